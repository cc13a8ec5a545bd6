"""A mount was stopped for longer than its lease, and a store node on its host has removed what that session
was writing."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.at_signal import SIGNAL
from harness.clusters import Cluster, ClusterOfChangedMounts, Plan
from harness.mountpoint import eventually
from harness.programs import ended_sessions


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(Plan(nodes=1, mounts=1, replicas=1, beside={0: 0})) as made:
        yield made


def open_in_place(cluster: Cluster, path: Path) -> int:
    """Return a descriptor of a file that is written where the node can take it over."""
    opened: list[int] = []

    def is_there() -> bool:
        path.write_text("before")
        fd = os.open(path, os.O_RDWR)
        if os.listdir(incoming(cluster)):
            opened.append(fd)
        else:
            os.close(fd)
        return bool(opened)

    eventually(is_there, "the node is known")
    return opened[0]


def incoming(cluster: Cluster) -> Path:
    return cluster.nodes[0].store / "incoming"


def stop_for_longer_than_the_lease(cluster: Cluster) -> None:
    """Return when the node has removed the files of the mount's session."""
    (mount,) = cluster.mounts
    mount.pause()
    try:
        eventually(lambda: not os.listdir(incoming(cluster)), "it removes them", within_s=30)
    finally:
        mount.resume()


@pytest.mark.parametrize("written", [False, True])
def test_file_that_was_open_for_writing_is_opened_and_written_again(
    cluster: Cluster, written: bool
) -> None:
    path = cluster.mounts[0].path / f"file{written}"
    fd = open_in_place(cluster, path)
    try:
        if written:
            os.pwrite(fd, b"BEFORE", 0)
            os.fsync(fd)
        stop_for_longer_than_the_lease(cluster)
    finally:
        os.close(fd)
    assert path.read_text() == ("BEFORE" if written else "before")
    for text in ("first", "second"):
        with path.open("r+") as file:
            file.truncate()
            file.write(text)
        assert path.read_text() == text


def test_what_is_written_after_it_is_published(cluster: Cluster) -> None:
    path = cluster.mounts[0].path / "file"
    fd = open_in_place(cluster, path)
    try:
        stop_for_longer_than_the_lease(cluster)
        os.pwrite(fd, b"AFTER", 0)
        os.fsync(fd)
    finally:
        os.close(fd)
    assert path.read_text() == "AFTERe"


def test_copy_that_gets_another_number_is_kept_once() -> None:
    """It was made to be published in a session that has ended."""
    with ClusterOfChangedMounts(
        Plan(nodes=1, mounts=1, replicas=1), ended_sessions.__file__
    ) as cluster:
        (mount,) = cluster.mounts
        with (mount.path / "file").open("wb+", buffering=0) as file:
            for text in (b"first", b"second"):
                file.write(text)
                os.fsync(file.fileno())
            before = os.listdir(mount.cache / "extents")
            file.write(b"third")
            os.kill(mount.pid, SIGNAL)
            os.fsync(file.fileno())
            assert len(os.listdir(mount.cache / "extents")) == len(before)
        assert (mount.path / "file").read_bytes() == b"firstsecondthird"
