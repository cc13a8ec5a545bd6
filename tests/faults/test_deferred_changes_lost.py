"""Whatever becomes of a mount that defers changes, others see them in their order, all but the last ones.

A program on one host makes the files 0, 1, 2, ... in a directory and removes each when there are five
newer ones. So every listing, on any host and at any time, shows numbers in a row. Another host looks now
and then. IRDMAFS_KILLS says how often the mount is killed or stopped.
"""

import contextlib
import errno
import os
import threading
import time
from pathlib import Path

from harness.claims import claim_exclusively
from harness.clusters import Cluster, ClusterMount, Plan, counters
from harness.mountpoint import eventually, fsync
from harness.seeds import seeded

from irdmafs.backend.namespace.inode import name_key

KILLS = 2
KEPT = 5


class Writer:
    """Makes and removes files in a thread until it fails or is told to stop; `newest` was made last."""

    def __init__(self, directory: Path, first: int) -> None:
        self.newest = -1
        self._directory = directory
        self._next = first
        self._stops = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        # The mount is killed, or was cut off.
        with contextlib.suppress(OSError):
            while not self._stops.is_set():
                (self._directory / f"{self._next}").touch(exist_ok=False)
                self.newest = self._next
                if self._next >= KEPT:
                    (self._directory / f"{self._next - KEPT}").unlink()
                self._next += 1

    def stop(self, *, wait: bool = True) -> None:
        self._stops.set()
        if wait:
            self._thread.join()


def newest_of(directory: Path) -> int:
    """Return the largest number in a directory. Raises AssertionError if the numbers have gaps."""
    found = sorted(int(name) for name in os.listdir(directory))
    assert found == list(range(found[0], found[0] + len(found))) if found else True, found
    assert KEPT - 1 <= len(found) <= KEPT + 1 or found[:1] == [0] or not found, found
    return found[-1] if found else -1


def look(writer: Writer, directory: Path) -> None:
    answered = writer.newest
    assert newest_of(directory) >= answered


def newest_stored(cluster: Cluster, directory: int) -> int:
    """Return the largest number that etcd has, without making a mount store what it has."""
    prefix = name_key(directory, b"")
    found = cluster.etcd.get(cluster._prefix(prefix[:1].decode()) + prefix[1:])
    return max(map(int, found), default=-1)


def recover(holder: ClusterMount) -> None:
    if holder.alive:
        holder.resume()
    else:
        holder.start()
        holder.wait_ready()
    eventually(lambda: bool(counters(holder)["session_valid_seconds"]), "it has a session")


def test_the_last_changes_are_lost_and_none_before() -> None:
    chooser = seeded()
    with Cluster(Plan(nodes=1, mounts=2, replicas=1, lease_ttl_s=2, namespaces=False)) as cluster:
        holder = cluster.mounts[0]
        here, there = (mount.path / "directory" for mount in cluster.mounts)
        here.mkdir()
        ino, first = here.stat().st_ino, 0
        for number in range(int(os.environ.get("IRDMAFS_KILLS") or KILLS)):
            if not os.listdir(here):
                claim_exclusively(here)
            writer = Writer(here, first)
            until = time.monotonic() + chooser.uniform(0.5, 2.5)
            while time.monotonic() < until:
                look(writer, there)
                time.sleep(chooser.choice((0.0, 0.3, 2.0)))
            print(f"{counters(holder)['deferred_changes']} deferred, {writer.newest} newest")
            answered = writer.newest
            eventually(lambda: newest_stored(cluster, ino) >= answered, "it is stored")  # noqa: B023
            time.sleep(chooser.uniform(0, 1))
            writer.stop(wait=False)
            # By turns it is killed, and stopped for shorter or longer than its lease.
            if number % 2 == 0:
                holder.kill9()
            else:
                holder.pause()
                time.sleep(chooser.uniform(0.2, 1.6) * cluster.plan.lease_ttl_s)
            assert newest_of(there) >= answered
            recover(holder)
            writer.stop()
            try:
                fsync(here)
            except OSError as error:
                assert error.errno == errno.EIO  # changes were lost
            # The name of a file whose close failed stays on its host.
            (here / f"{writer.newest + 1}").unlink(missing_ok=True)
            eventually(lambda: newest_of(here) == newest_of(there), "both hosts see the same")
            first = newest_of(here) + 1
            if (
                len(os.listdir(here)) > KEPT
            ):  # the writer was told of the loss before it removed this one
                (here / f"{first - 1 - KEPT}").unlink()
