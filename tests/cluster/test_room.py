"""The room that a mount of a cluster reports."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from harness.clusters import MIB, Cluster, Plan
from harness.errors import fails_with
from harness.mountpoint import eventually, fsync, irdmafs
from harness.programs import hasty_node

from irdmafs.backend.cluster.membership import Members
from irdmafs.backend.kv import Event
from irdmafs.backend.model.records import (
    SETTINGS_KEY,
    NodeAddress,
    NodeRecord,
    Settings,
    encode,
    key_of,
)
from irdmafs.backend.store.remote.layouts import Space


def free_bytes(directory: Path) -> int:
    room = os.statvfs(directory)
    return room.f_bavail * room.f_frsize


def test_overwriting_a_file_takes_no_room(here: Path) -> None:
    (here / "file").write_bytes(bytes(8 * MIB))
    before = free_bytes(here)
    for _ in range(20):
        (here / "file").write_bytes(bytes(8 * MIB))
    assert free_bytes(here) > before - 40 * MIB
    os.unlink(here / "file")


def test_what_was_published_is_counted_before_the_nodes_say_so(here: Path) -> None:
    before = free_bytes(here)
    (here / "file").write_bytes(bytes(range(256)) * (8 * MIB // 256))
    assert free_bytes(here) < before


def test_what_was_removed_again_is_not_counted(here: Path) -> None:
    before = free_bytes(here)
    for _ in range(4):
        (here / "file").write_bytes(bytes(range(256)) * (8 * MIB // 256))
        (here / "file").unlink()
        # A node that tells its room meanwhile has to know.
        fsync(here)
    assert free_bytes(here) > before - 8 * MIB


def test_a_mount_says_whether_its_figures_are_of_all_names(cluster: Cluster) -> None:
    told = [irdmafs("status", mount.path).stdout.splitlines() for mount in cluster.mounts]
    names = [[line.split(None, 1)[1] for line in one if line.startswith("names ")] for one in told]
    assert names == [["all are read"], ["of directories that were used"]]


def test_room_that_changes_no_more_is_told_however_little_it_changed() -> None:
    plan = Plan(nodes=1, replicas=1, mounts=1, store_bytes=1024 * MIB, namespaces=False)
    with Cluster(plan, node_program=hasty_node.__file__) as cluster:
        here = cluster.mounts[0].path
        empty = free_bytes(here)
        (here / "kept").write_bytes(os.urandom(8 * MIB))
        (here / "removed").write_bytes(os.urandom(16 * MIB))
        full = empty - 24 * MIB
        eventually(lambda: cluster.status()["nodes"][0]["free_bytes"] <= full, "the node tells")
        (here / "removed").unlink()
        eventually(lambda: free_bytes(here) >= empty - 9 * MIB, "there is room again")


def test_only_nodes_that_take_new_files_count() -> None:
    """Not one that is drained, nor one that is dead."""
    members = Members()
    contents: Any = SimpleNamespace(statvfs=lambda: os.statvfs("/"))
    space = Space(members, contents)
    records: dict[bytes, Any] = {SETTINGS_KEY: Settings(2, "id", 2, 4, 0, 5)}
    for node in (1, 2, 3):
        records[key_of(b"N", node)] = NodeRecord("up", 1.0, {})
        records[key_of(b"n", node)] = NodeAddress(
            "h", 1, 1, ["tcp"], "h", "/s", 16 * MIB, node * MIB, "0"
        )

    def blocks(changes: dict[bytes, Any]) -> tuple[int, int]:
        """Total and free blocks once these records have changed; None: removed."""
        members.apply(1, [Event(1, key, one and encode(one)) for key, one in changes.items()])
        found = space.statvfs()
        return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize

    assert blocks(records) == (24 * MIB, 3 * MIB)
    assert blocks({key_of(b"N", 3): NodeRecord("draining", 1.0, {})}) == (16 * MIB, 3 * MIB // 2)
    assert blocks({key_of(b"n", 2): None}) == (16 * MIB, 1 * MIB)
    assert blocks({key_of(b"n", 1): None}) == (0, 0)


def test_room_is_reserved_as_far_as_there_is_any(here: Path) -> None:
    free = free_bytes(here)
    with (here / "one").open("wb") as one, (here / "other").open("wb") as other:
        with fails_with(errno.ENOSPC):
            os.posix_fallocate(one.fileno(), 0, free + MIB)
        os.posix_fallocate(one.fileno(), 0, 16 * MIB)
        os.posix_fallocate(one.fileno(), 0, 16 * MIB)
        with fails_with(errno.ENOSPC):
            os.posix_fallocate(other.fileno(), 0, free - 8 * MIB)
        os.posix_fallocate(other.fileno(), 0, 4 * MIB)
    for name, size in (("one", 16 * MIB), ("other", 4 * MIB)):
        assert (here / name).stat().st_size == size
        (here / name).unlink()


def test_a_file_without_a_name_takes_no_room_of_the_cluster() -> None:
    plan = Plan(nodes=1, replicas=1, mounts=1, store_bytes=64 * MIB, namespaces=False)
    with Cluster(plan) as cluster:
        here = cluster.mounts[0].path
        free = free_bytes(here)
        with (here / "removed").open("wb") as removed, (here / "new").open("wb") as new:
            os.posix_fallocate(removed.fileno(), 0, free - 8 * MIB)
            with fails_with(errno.ENOSPC):
                os.posix_fallocate(new.fileno(), 0, free - 8 * MIB)
            (here / "removed").unlink()
            os.posix_fallocate(new.fileno(), 0, free - 8 * MIB)


def test_reserved_room_stays_counted_when_the_file_is_closed(pair: list[Path]) -> None:
    with (pair[0] / "reserved").open("w+b") as file:
        os.posix_fallocate(file.fileno(), 0, MIB)
    for directory in pair:
        assert (directory / "reserved").stat().st_blocks * 512 == MIB
