"""A program uses a name that another host has just changed. If it removes the name, or has it lead to
another directory, where its kernel still has a directory that was moved, the kernel takes its own for
dead, wherever that is now. If the name was no file before, the kernel would refuse to open it."""

import os
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
from harness.closing import descriptor
from harness.clusters import LONG_LEASE_S, Cluster, Plan
from harness.mountpoint import eventually
from harness.processes import is_waiting

from irdmafs.backend.namespace import Inode
from irdmafs.coherence.kernel_directories import KernelNames


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(Plan(nodes=1, replicas=1, lease_ttl_s=LONG_LEASE_S)) as made:
        # Nobody waits for a host that has looked something up.
        os.setxattr(made.mounts[0].path, "user.irdmafs.follow", b"off")
        yield made


@pytest.fixture
def pair(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[list[Path]]:
    """A directory on both mounts, with a directory that is open on the second, and an empty one."""
    here, there = (mount.path / request.node.name for mount in cluster.mounts)
    here.mkdir()
    (here / "known").mkdir()
    (here / "other").mkdir()
    opened = os.open(there / "known", os.O_PATH)
    yield [here, there]
    os.close(opened)


@contextmanager
def doing(
    cluster: Cluster, change: Callable[[], None], first: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Change names on the second mount. Its kernel has looked them up, and the change is carried out after
    the block. The mount hears of what `first` does only then."""
    mount, (etcd,) = cluster.mounts[1], cluster.etcd.members
    threads: list[int] = []

    def run() -> None:
        threads.append(threading.get_native_id())
        change()

    cluster.cut(mount, etcd)
    first()
    with ThreadPoolExecutor(1) as pool:
        changing = pool.submit(run)
        try:
            eventually(
                lambda: changing.done() or (bool(threads) and is_waiting(threads[0])),
                "the mount is asked",
            )
            yield
        finally:
            cluster.heal(mount, etcd)
        changing.result()


def is_usable(directory: Path) -> bool:
    (directory / "file").write_text("content")
    return os.listdir(directory) == ["file"]


def test_rename_onto_a_directory_that_has_moved(cluster: Cluster, here: Path, there: Path) -> None:
    with doing(cluster, lambda: os.rename(there / "other", there / "known")):
        os.rename(here / "known", here / "moved")
    assert sorted(os.listdir(there)) == ["known", "moved"]
    assert is_usable(there / "moved")
    assert is_usable(there / "known")


def test_rmdir_of_a_directory_that_has_moved(cluster: Cluster, here: Path, there: Path) -> None:
    with doing(cluster, lambda: os.rmdir(there / "known")):
        os.rename(here / "known", here / "moved")
        os.rename(here / "other", here / "known")
    assert os.listdir(there) == ["moved"]
    assert is_usable(there / "moved")


def test_rename_of_a_directory_that_has_moved(cluster: Cluster, here: Path, there: Path) -> None:
    with doing(cluster, lambda: os.rename(there / "known", there / "renamed")):
        os.rename(here / "known", here / "moved")
        os.rename(here / "other", here / "known")
        (here / "known" / "another").touch()
    assert os.listdir(there / "renamed") == ["another"]
    assert is_usable(there / "moved")


def test_file_that_is_made_in_a_directory_which_is_removed_by_now(here: Path, there: Path) -> None:
    with descriptor(os.open(there / "known", os.O_PATH)) as opened:
        os.rmdir(here / "known")
        eventually(lambda: not (there / "known").exists(), "the other host is told")
        with pytest.raises(FileNotFoundError):
            os.open("new", os.O_WRONLY | os.O_CREAT, dir_fd=opened)


def test_name_that_leads_to_a_file_by_now_which_is_being_replaced(
    cluster: Cluster, here: Path, there: Path
) -> None:
    os.rmdir(here / "known")
    (here / "known").write_text("before")
    (there / "new").write_text("new")
    with (there / "known").open("w"), (there / "known").open():
        os.rename(there / "new", there / "known")
    assert (here / "known").read_text() == "new"


@pytest.mark.parametrize(
    ("make", "flags"),
    [
        (lambda path: path.symlink_to("nowhere"), os.O_RDONLY),
        (lambda path: path.symlink_to("nowhere"), os.O_RDONLY | os.O_NOFOLLOW),
        (os.mkfifo, os.O_RDONLY | os.O_NONBLOCK),
        (lambda path: os.mknod(path, stat.S_IFSOCK | 0o600), os.O_RDONLY),
    ],
    ids=["link that leads nowhere", "link not to be followed", "FIFO", "socket"],
)
def test_file_that_another_host_has_put_in_the_place_of_what_is_no_file_is_opened(
    cluster: Cluster, here: Path, there: Path, make: Callable[[Path], None], flags: int
) -> None:
    make(here / "name")
    eventually(lambda: os.path.lexists(there / "name"), "the other host is told")
    (here / "new").write_text("content")
    read: list[bytes] = []

    def look() -> None:
        with descriptor(os.open(there / "name", flags)) as fd:
            read.append(os.read(fd, 9))

    with doing(cluster, look, lambda: os.rename(here / "new", here / "name")):
        pass
    assert read == [b"content"]


def test_directories_that_the_kernel_has_forgotten_are_forgotten() -> None:
    known = set(range(1, 10_000))
    nodes = Mock(has_nodes=known.__contains__)
    names = KernelNames(nodes)
    for number in range(1, 10_000):
        known.discard(number - 1)
        names.found((1, b"%d" % number), Inode(number, stat.S_IFDIR, 0, 0, 0))
    assert len(names._inodes) <= 1001
    assert names.of((1, b"9999"), (1, b"9998")) == {(1, b"9999"): 9999}


def test_directory_is_known_under_its_last_name() -> None:
    names = KernelNames(Mock(has_nodes=lambda _: True))
    one, other = (Inode(ino, stat.S_IFDIR, 0, 0, 0) for ino in (10, 11))
    a, b = (1, b"a"), (1, b"b")
    names.found(a, one)
    names.found(b, one)
    assert names.of(a, b) == {b: 10}
    names.found(b, other)
    assert names.of(a, b) == {b: 11}
    names.found(a, one)
    names.found(b, None)
    assert names.of(a, b) == {a: 10}
