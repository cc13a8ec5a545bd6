"""A mount with a reader's certificate: it reads everything, and changes nothing."""

import fcntl
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.claims import claim_exclusively
from harness.clusters import Cluster, ClusterMount, Plan, counters
from harness.errors import error_of
from harness.mountpoint import can_be_opened, eventually, irdmafs, succeeded
from harness.processes import TakeProcess
from harness.refused_changes import changes_in, outcomes

from irdmafs.mount.mounting import mounts

OPEN = "import os, select; fd = os.open(file, os.O_RDONLY)"
POLL = "p = select.poll(); p.register(fd, select.POLLPRI); bool(p.poll(20_000))"


@pytest.fixture(scope="module")
def made() -> Iterator[Cluster]:
    with Cluster(Plan(nodes=1, mounts=1, replicas=1, buckets=4, tls=True)) as cluster:
        writer = cluster.mounts[0].path
        (writer / "models").mkdir()
        (writer / "models/weights").write_bytes(b"w" * 300_000)
        (writer / "models/small").write_bytes(b"s")
        (writer / "models/link").symlink_to("small")
        yield cluster


@pytest.fixture(scope="module")
def reader(made: Cluster) -> ClusterMount:
    return made.add_mount(certificate="reader")


def test_a_reader_sees_what_was_and_what_is_published(made: Cluster, reader: ClusterMount) -> None:
    writer = made.mounts[0].path
    assert sorted(os.listdir(reader.path / "models")) == ["link", "small", "weights"]
    assert (reader.path / "models/weights").read_bytes() == b"w" * 300_000
    for number in range(20):
        (writer / "models/step").write_bytes(b"%d" % number)
        assert (reader.path / "models/step").read_bytes() == b"%d" % number
    os.unlink(writer / "models/step")
    assert not can_be_opened(reader.path / "models/step")


def test_a_reader_sees_changes_that_a_writer_defers(made: Cluster, reader: ClusterMount) -> None:
    writer = made.mounts[0]
    (writer.path / "alone").mkdir()
    (writer.path / "alone/old").touch()
    claim_exclusively(writer.path / "alone")
    (writer.path / "alone/new").touch(0o600)
    (writer.path / "alone/old").unlink()
    assert os.listdir(reader.path / "alone") == ["new"]


def test_a_reader_changes_nothing(reader: ClusterMount) -> None:
    found = outcomes(changes_in(reader.path / "models"))
    assert found == dict.fromkeys(found, "EROFS")
    assert (reader.path / "models/small").read_bytes() == b"s"


def test_a_reader_that_is_mounted_for_writing_by_force_still_changes_nothing(made: Cluster) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting anew takes root")
    forced = made.add_mount(certificate="reader")
    done = subprocess.run(
        ["mount", "-i", "-o", "remount,rw", str(forced.path)], capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip(f"the kernel does not let it: {done.stderr}")
    for call in (os.mkdir, os.mknod):
        assert error_of(call, forced.path / "forced") == "EROFS"
    with pytest.raises(OSError):
        (forced.path / "models/small").write_bytes(b"forced")
    assert (made.mounts[0].path / "models/small").read_bytes() == b"s"
    assert not (made.mounts[0].path / "forced").exists()
    forced.close()


def test_a_reader_prefetches_follows_and_hears_changes(made: Cluster, process: TakeProcess) -> None:
    writer = made.mounts[0].path
    follower = made.add_mount("--follow", "models", "-o", "poll", certificate="reader")
    succeeded(irdmafs("prefetch", follower.path / "models/weights"))
    before = counters(follower)
    assert (before["role"], before["followed_directories"]) == ("reader", 1)
    assert (follower.path / "models/weights").read_bytes() == b"w" * 300_000
    assert counters(follower)["cache_misses"] == before["cache_misses"]
    poller = process()
    poller.do(OPEN, file=str(follower.path / "models/small"))
    poller.start(POLL)
    channel = Path(f"/proc/{poller.pid}/wchan")
    eventually(lambda: channel.read_text().startswith("poll_"), "it polls", 30)
    (writer / "models/small").write_bytes(b"s")
    assert poller.result() is True
    (writer / "models/followed").write_bytes(b"f" * 200_000)
    eventually(
        lambda: counters(follower)["fetched_files"] > before["fetched_files"],
        "what is followed is fetched without being opened",
    )
    assert (follower.path / "models/followed").read_bytes() == b"f" * 200_000
    follower.close()
    os.unlink(writer / "models/followed")


def test_a_reader_locks_what_it_reads(reader: ClusterMount) -> None:
    """Programs take shared locks on what they only read."""
    with (reader.path / "models/weights").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        fcntl.flock(file, fcntl.LOCK_UN)
        fcntl.lockf(file, fcntl.LOCK_SH)
        fcntl.lockf(file, fcntl.LOCK_UN)


def test_it_says_that_it_is_a_reader(made: Cluster, reader: ClusterMount) -> None:
    assert "this mount is read-only, by its certificate" in reader.log_tail()
    examine = ("doctor", "--json", "--cluster", reader.config)
    done = irdmafs(*examine, launcher=reader.host.launcher)
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert "read-only" in checks["certificate of reader 'reader'"]["found"]
    assert checks["etcd"]["found"] == "is reached through store nodes, as a reader should"
    [mount] = [mount for mount in mounts() if mount.mountpoint == str(reader.path)]
    assert mount.options.startswith("ro")
    assert Path(reader.path).stat()
