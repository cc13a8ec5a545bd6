"""A version was published and its writer was told that it was not: etcd's answer was lost."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.at_signal import SIGNAL
from harness.clusters import LONG_LEASE_S, Cluster, Plan
from harness.programs import lost_answers


@pytest.fixture(scope="module", params=["a node elsewhere", "a node here"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    beside = {0: 0} if request.param == "a node here" else {}
    plan = Plan(nodes=1, replicas=1, beside=beside, lease_ttl_s=LONG_LEASE_S)
    with Cluster(plan, mount_program=lost_answers.__file__) as made:
        yield made


@pytest.fixture
def pair(cluster: Cluster, request: pytest.FixtureRequest) -> list[Path]:
    """The same file on both mounts."""
    name = request.node.name.partition("[")[0]
    return [mount.path / name for mount in cluster.mounts]


def write_and_lose_answer(cluster: Cluster, path: Path) -> int:
    """Return a descriptor of a file whose second version is published, of which the mount is not told."""
    path.write_text("first")
    fd = os.open(path, os.O_RDWR)
    os.pwrite(fd, b"second", 0)
    os.kill(cluster.mounts[0].pid, SIGNAL)
    with pytest.raises(TimeoutError):
        os.fsync(fd)
    return fd


def replace(path: Path, text: str) -> None:
    """As a lock file gets what its holder is called."""
    fd = os.open(path, os.O_RDWR)
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, text.encode(), 0)
        os.fsync(fd)
    finally:
        os.close(fd)


def test_a_file_that_others_replace_then_can_be_written_again(
    cluster: Cluster, here: Path, there: Path
) -> None:
    fd = write_and_lose_answer(cluster, here)
    try:
        assert there.read_text() == "second"
        replace(there, "third")
    finally:
        with pytest.raises(OSError, match="Stale"):
            os.close(fd)
    assert there.read_text() == "third"
    for text in ("fourth", "fifth"):
        replace(here, text)
        assert there.read_text() == here.read_text() == text


def test_what_is_written_next_is_published_and_the_version_before_stays_whole(
    cluster: Cluster, here: Path, there: Path
) -> None:
    fd = write_and_lose_answer(cluster, here)
    try:
        with there.open() as reader:
            os.pwrite(fd, b"THIRD", 0)
            assert reader.read() == "second"
        os.fsync(fd)
        assert there.read_text() == here.read_text() == "THIRDd"
    finally:
        os.close(fd)
    assert there.read_text() == here.read_text() == "THIRDd"
