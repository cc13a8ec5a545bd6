"""The mount knows of a version, as its replica has it, before its own publisher is told of it."""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.at_signal import SIGNAL
from harness.clusters import LONG_LEASE_S, Cluster, Plan
from harness.mountpoint import eventually
from harness.programs import late_answers


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(
        Plan(nodes=2, lease_ttl_s=LONG_LEASE_S), mount_program=late_answers.__file__
    ) as made:
        yield made


@contextlib.contextmanager
def published_untold(cluster: Cluster, fd: int, name: str, content: bytes) -> Iterator[None]:
    """Close a descriptor: what it wrote is a version on all mounts; its publisher is told in the end."""
    here = cluster.mounts[0]
    os.kill(here.pid, SIGNAL)
    os.statvfs(here.path)  # it handles the signal before this
    closing = threading.Thread(target=os.close, args=(fd,))
    closing.start()
    try:
        paths = [mount.path / name for mount in cluster.mounts]
        eventually(
            lambda: all(path.read_bytes() == content for path in paths),
            "it is published everywhere",
        )
        yield
    finally:
        os.kill(here.pid, SIGNAL)
        closing.join()


def open_again(fd: int) -> int:
    """Open a descriptor once more, for writing, as `> /dev/stdout` does: it shares its content."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR)


def expect_shared_by_readers(path: Path, reader: int, content: bytes) -> None:
    """Open the descriptor of a version, and one that is opened now, once more for writing."""
    with path.open("rb") as later:
        try:
            os.close(open_again(reader))
            os.close(open_again(later.fileno()))
            assert later.read() == os.pread(reader, 9, 0) == content
        finally:
            os.close(reader)
    assert path.read_bytes() == content


def test_what_was_open_in_place_leaves_the_published_file_to_its_content(cluster: Cluster) -> None:
    path = cluster.mounts[0].path / "replaced"
    path.write_bytes(b"first")
    with path.open("rb") as first:
        writer = os.open(path, os.O_WRONLY | os.O_TRUNC)
        in_place = open_again(first.fileno())
    os.write(writer, b"second")
    with published_untold(cluster, writer, path.name, b"second"):
        assert path.read_bytes() == b"second"
        os.close(in_place)
        assert path.read_bytes() == b"second"
        reader = os.open(path, os.O_RDONLY)
    expect_shared_by_readers(path, reader, b"second")


def test_a_copy_that_is_published_is_not_taken_from_later_opens(cluster: Cluster) -> None:
    path = cluster.mounts[0].path / "written"
    path.write_bytes(b"first")
    with path.open("rb") as first:
        writer = os.open(path, os.O_WRONLY | os.O_TRUNC)
        one, other = (open_again(first.fileno()) for _ in range(2))
    os.write(writer, b"second")
    os.close(writer)
    os.pwrite(one, b"third", 0)
    with published_untold(cluster, one, path.name, b"third"):
        reader = os.open(path, os.O_RDONLY)
    os.close(other)
    for _ in range(2):
        path.with_name("another").write_bytes(
            b""
        )  # the release of `other` is carried out before this
    expect_shared_by_readers(path, reader, b"third")
