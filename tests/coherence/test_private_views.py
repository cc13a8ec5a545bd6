"""The private view of a directory: its files, opened as the mount knows them, which asks nobody."""

import errno
import os
import stat
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from conftest import SESSIONS, make_mount
from harness.closing import descriptor
from harness.cluster_mount import CLUSTER
from harness.clusters import MIB, ClusterMount
from harness.errors import fails_with
from harness.mountpoint import eventually
from harness.patterns import pattern
from harness.processes import AS_NOBODY

pytestmark = pytest.mark.timeout(120)

VIEW = ".irdmafs-private"


@pytest.fixture
def pair(pair: list[Path]) -> list[Path]:
    """A directory of this test's own, which the mounts do not follow, as two hosts see it."""
    os.setxattr(pair[0], "user.irdmafs.follow", b"off")
    return pair


def nobody_reads(path: Path) -> bool:
    return not subprocess.run(
        [*AS_NOBODY, "cat", path], capture_output=True, check=False
    ).returncode


def has(path: Path, content: bytes) -> bool:
    return path.exists() and path.read_bytes() == content


def barriers(host: ClusterMount) -> int:
    count: int = host.status()["cluster"]["barriers"]
    return count


def test_opening_file_in_it_asks_nobody(hosts: list[ClusterMount], here: Path, there: Path) -> None:
    (here / "file").write_bytes(b"content")
    assert (there / "file").read_bytes() == b"content"
    with descriptor(os.open(there / VIEW, os.O_PATH | os.O_DIRECTORY)) as view:
        before = barriers(hosts[1])
        for _ in range(10):
            fd = os.open("file", os.O_RDONLY, dir_fd=view)
            assert os.read(fd, 100) == b"content"
            os.close(fd)
        # Leases are renewed meanwhile.
        assert barriers(hosts[1]) <= before + 2
        for _ in range(10):
            (there / "file").read_bytes()
        assert barriers(hosts[1]) >= before + 10


def test_it_shows_what_others_publish(here: Path, there: Path) -> None:
    for number in range(20):
        content = pattern(number, 3 * MIB if number % 2 else 100)
        (here / "file").write_bytes(content)
        eventually(partial(has, there / VIEW / "file", content), "what was published")


def test_a_file_that_is_written_in_it_is_published(here: Path, there: Path) -> None:
    (here / "file").write_bytes(b"before")
    assert (there / "file").read_bytes() == b"before"
    for number in range(20):
        content = pattern(number, 2 * MIB)
        fd = os.open(there / VIEW / "file", os.O_WRONLY | os.O_TRUNC)
        os.write(fd, content)
        os.close(fd)
        assert (here / "file").read_bytes() == (there / "file").read_bytes() == content


def test_replaced_files_are_opened_whole(here: Path, there: Path) -> None:
    """A file that is open here with an old content, too."""
    (here / "file").write_bytes(pattern(0, MIB))
    kept = [(there / "file").open("rb")]
    try:
        for number in range(1, 10):
            (here / "new").write_bytes(pattern(number, MIB))
            os.replace(here / "new", here / "file")
            content = (there / VIEW / "file").read_bytes()
            assert content in (pattern(number, MIB), pattern(number - 1, MIB))
            kept.append((there / VIEW / "file").open("rb"))
        assert kept[0].read() == pattern(0, MIB)
    finally:
        for file in kept:
            file.close()


def test_it_is_a_directory_of_the_same_number_that_no_listing_has(here: Path) -> None:
    assert os.listdir(here) == []
    status = (here / VIEW).stat()
    assert stat.S_ISDIR(status.st_mode)
    assert status.st_ino == here.stat().st_ino
    here.rmdir()
    assert not (here / VIEW).exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda view: os.listdir(view),
        lambda view: (view / "new").write_bytes(b""),
        lambda view: (view / "new").mkdir(),
        lambda view: (view / "new").symlink_to("file"),
        lambda view: (view / "file").unlink(),
        lambda view: os.link(view.parent / "file", view / "new"),
        lambda view: os.rename(view / "file", view.parent / "new"),
        lambda view: os.rename(view.parent / "file", view / "new"),
    ],
)
def test_nothing_is_listed_or_changed_in_it(here: Path, change: Callable[[Path], object]) -> None:
    (here / "file").write_bytes(b"")
    # The kernel does not move or link between two directories of one place.
    with fails_with(errno.EPERM, errno.EXDEV):
        change(here / VIEW)
    assert os.listdir(here) == ["file"]


def test_it_has_no_directories_and_nothing_that_is_missing(here: Path) -> None:
    (here / "below").mkdir()
    for name in ("below", "missing", VIEW, "below/file"):
        assert not (here / VIEW / name).exists()
    assert (here / "below" / VIEW).is_dir()


def test_no_other_file_has_its_name(here: Path) -> None:
    (here / "file").write_bytes(b"")
    with pytest.raises(IsADirectoryError):
        (here / VIEW).write_bytes(b"")
    with pytest.raises(FileExistsError):
        (here / VIEW).mkdir()
    with pytest.raises(IsADirectoryError):
        os.rename(here / "file", here / VIEW)


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user")
def test_rights_are_those_of_the_files_and_the_directory() -> None:
    with make_mount(CLUSTER, "-o", "allow_other") as mount:
        mount.path.parent.chmod(0o755)
        folder = mount.path / "folder"
        folder.mkdir()
        (folder / "file").write_bytes(b"")
        (folder / "file").chmod(0o600)
        assert not nobody_reads(folder / VIEW / "file")
        (folder / "file").chmod(0o644)
        assert nobody_reads(folder / VIEW / "file")
        folder.chmod(0o700)
        assert not nobody_reads(folder / VIEW / "file")


def test_a_mount_of_its_own_store_has_none() -> None:
    with make_mount(SESSIONS[0]) as alone:
        assert not (alone.path / VIEW).exists()
