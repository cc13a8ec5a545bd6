"""Names in a directory with user.irdmafs.awaits = DIRECTORY lead to names there that are to come."""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.cluster_mount import CLUSTER
from harness.errors import fails_with
from harness.mountpoint import Mount, eventually
from harness.processes import Process, is_waiting

# How waits end in the pyfuse3 session, and with the daemon, is told by test_changes.py.
SESSIONS = ("kernel", CLUSTER)

AWAITS = "user.irdmafs.awaits"
TIMEOUT = "user.irdmafs.awaits_timeout"
READ = "open(path, 'rb').read()"


def make_since(top: Path) -> Path:
    """Make the directories `versions` and `since` in a directory; return the latter."""
    (top / "versions").mkdir()
    (top / "since").mkdir()
    os.setxattr(top / "since", AWAITS, b"versions")
    return top / "since"


def make_version(top: Path, number: int, content: bytes | None = None) -> None:
    """Make a version, whole when it has its name."""
    aside = top / f"next{number}"
    aside.mkdir()
    (aside / "model").write_bytes(content or b"version %d" % number)
    aside.rename(top / "versions" / f"{number}")


@pytest.fixture
def since(folder: Path) -> Path:
    return make_since(folder)


def start_reading(process: Process, path: Path) -> None:
    process.start(READ, path=str(path))
    eventually(lambda: is_waiting(process.pid), "it waits", 30)


# -- where the links lead ----------------------------------------------------------------------------


def test_a_link_leads_to_the_newest_version_there_is_and_is_not_listed(since: Path) -> None:
    (since.parent / "model").symlink_to("since/0/model")
    for number in (1, 2, 10):
        make_version(since.parent, number)
        for asked in (0, 1, number):
            assert os.readlink(since / f"{asked}") == f"../versions/{number}"
            assert (since / f"{asked}" / "model").read_bytes() == b"version %d" % number
        assert (since.parent / "model").read_bytes() == b"version %d" % number
    (since.parent / "versions" / "10").rename(since.parent / "taken-back")
    assert os.readlink(since / "0") == "../versions/2"
    assert os.listdir(since) == []


def test_a_name_looked_for_in_vain_is_found_by_who_waits(since: Path, reader: Process) -> None:
    """By the time it is woken, the kernel may not have noted the change that it was woken by."""
    for number in range(40):
        assert number % 2 or not (since.parent / "versions" / f"{number}").exists()
        reader.start(READ, path=str(since / f"{number}" / "model"))
        make_version(since.parent, number)
        assert reader.result() == b"version %d" % number


def test_first_version_is_waited_for_before_there_are_any(folder: Path, reader: Process) -> None:
    (folder / "since").mkdir()
    os.setxattr(folder / "since", AWAITS, b"versions")
    start_reading(reader, folder / "since" / "0" / "model")
    (folder / "versions").mkdir()
    make_version(folder, 0)
    assert reader.result() == b"version 0"


def test_earlier_versions_and_other_names_do_not_end_a_wait(since: Path, reader: Process) -> None:
    start_reading(reader, since / "5" / "model")
    for number in range(5):
        make_version(since.parent, number)
    (since.parent / "versions" / "latest").mkdir()
    (since.parent / "versions" / "0" / "more").touch()
    assert not reader.finished(within_s=0.2)
    make_version(since.parent, 7)
    assert reader.result() == b"version 7"


# -- the links themselves ----------------------------------------------------------------------------


def test_a_program_waits_for_a_file_until_it_has_a_version(since: Path, reader: Process) -> None:
    path = since.parent / "versions" / "model"
    start_reading(reader, since / "model")
    with path.open("wb") as file:
        file.write(b"whole")
        file.flush()
        assert not reader.finished(within_s=0.2)
    assert reader.result() == b"whole"
    assert os.readlink(since / "model") == "../versions/model"


def test_an_empty_file_ends_a_wait(since: Path, reader: Process) -> None:
    start_reading(reader, since / "ready")
    (since.parent / "versions" / "ready").touch()
    assert reader.result() == b""


def test_a_number_does_not_lead_to_a_file_that_is_being_written(since: Path) -> None:
    make_version(since.parent, 1)
    with (since.parent / "versions" / "2").open("wb") as file:
        file.write(b"a part")
        file.flush()
        assert os.readlink(since / "0") == "../versions/1"
    assert os.readlink(since / "0") == "../versions/2"


def test_a_link_looks_the_same_each_time(since: Path) -> None:
    status = os.lstat(since / "4")
    assert stat.S_ISLNK(status.st_mode)
    assert stat.S_IMODE(status.st_mode) == 0o777
    assert (status.st_uid, status.st_gid, status.st_nlink) == (0, 0, 1)
    assert os.lstat(since / "4").st_ino == status.st_ino
    assert os.lstat(since / "5").st_ino != status.st_ino


def test_names_that_begin_with_a_dot_are_ordinary(since: Path) -> None:
    with pytest.raises(FileNotFoundError):
        os.lstat(since / ".x")
    (since / ".x").touch()
    assert os.listdir(since) == [".x"]


def test_a_number_that_did_not_exist_before_is_found(folder: Path) -> None:
    (folder / "versions").mkdir()
    (folder / "since").mkdir()
    assert not os.path.lexists(folder / "since" / "0")
    os.setxattr(folder / "since", AWAITS, b"versions")
    make_version(folder, 1)
    eventually(lambda: os.path.lexists(folder / "since" / "0"), "it is found")


def test_links_cannot_be_changed(since: Path) -> None:
    (since / ".x").touch()
    (since.parent / "other").mkdir()
    refused: list[Callable[[], object]] = [
        lambda: os.unlink(since / "1"),
        lambda: os.rename(since / "1", since / ".y"),
        lambda: os.rename(since / ".x", since / "1"),
        lambda: os.rename(since.parent / "other", since / "1"),
        lambda: os.link(since / "1", since / ".y", follow_symlinks=False),
        lambda: os.utime(since / "1", (0, 0), follow_symlinks=False),
        lambda: os.mkdir(since / "1"),
        lambda: os.mknod(since / "1", stat.S_IFIFO | 0o600),
        lambda: os.symlink("target", since / "1"),
        lambda: os.link(since / ".x", since / "1"),
        lambda: os.rmdir(since / "1"),
    ]
    if os.geteuid() == 0:
        refused.append(lambda: os.lchown(since / "1", 1, 1))
    for change in refused:
        with fails_with(errno.EPERM, errno.EEXIST, errno.ENOTDIR):
            change()
        # The kernel finds a name, and refuses some by itself.
    assert os.listdir(since) == [".x"]


def test_only_a_directory_is_marked_and_only_so(folder: Path) -> None:
    (folder / "file").touch()
    refused = [
        (folder / "file", AWAITS, b"versions"), (folder, AWAITS, b"a/b"), (folder, AWAITS, b".."),
        (folder, TIMEOUT, b"soon"), (folder, TIMEOUT, b"-1"), (folder, TIMEOUT, b"nan"),
    ]  # fmt: skip
    for path, name, value in refused:
        with fails_with(errno.EINVAL):
            os.setxattr(path, name, value)


def test_links_that_were_looked_up_are_forgotten(since: Path, mount: Mount) -> None:
    def nodes() -> int:
        return int(mount.status()["nodes"])

    before = nodes()
    for number in range(1500):
        os.lstat(since / f"{number}")
    eventually(lambda: nodes() < before + 1000, "the kernel forgets them")


def test_a_wait_ends_after_its_time(since: Path) -> None:
    os.setxattr(since, TIMEOUT, b"0.1")
    with pytest.raises(TimeoutError):
        os.readlink(since / "1")
    with pytest.raises(TimeoutError):
        (since / "1" / "model").read_bytes()


# -- between hosts -----------------------------------------------------------------------------------


@pytest.fixture
def pair(pair: list[Path]) -> list[Path]:
    """A directory with versions as two hosts see it."""
    make_since(pair[0])
    return pair


def test_an_open_sees_every_version_that_another_host_made_before(here: Path, there: Path) -> None:
    for number in range(30):
        make_version(here, number)
        assert (there / "since" / "0" / "model").read_bytes() == b"version %d" % number
