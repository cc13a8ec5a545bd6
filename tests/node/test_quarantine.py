"""Extents that a store node finds to have no name: kept for a while, and back when they are named again."""

import os
import time
from pathlib import Path

import pytest
from test_catalog import BUCKETS, World, one_stripe, world
from test_store_node import contents_of, keep

from irdmafs.backend.cluster.group_configs import Groups
from irdmafs.backend.cluster.membership import Members
from irdmafs.backend.model.records import key_of
from irdmafs.backend.node.catalog import Catalog
from irdmafs.backend.node.files import Files
from irdmafs.backend.transport import Extent

__all__ = ["world"]

MIB = 1 << 20


def aside(files: Files) -> set[Extent]:
    found = set(files.quarantine)
    assert sorted(os.listdir(f"{files.directory}/quarantine")) == sorted(
        f"{content:x}.{stripe:x}" for content, stripe in found
    )
    return found


@pytest.mark.parametrize("how", ["restart", "reload"])
def test_what_is_found_without_name_is_kept_until_it_has_its_name(world: World, how: str) -> None:
    content = world.published()
    now = dict(world.records)
    del world.records[key_of(b"i", 9)], world.records[key_of(b"m", 5)]
    getattr(world, how)()
    assert not world.has(content)
    assert aside(world.files) == {Extent(content, 0)}
    assert world.catalog.freed_extents == 0
    world.records = now
    getattr(world, how)()
    assert world.has(content)
    assert not aside(world.files)


def test_one_that_is_named_again_while_the_node_runs_comes_back_at_once(world: World) -> None:
    content = world.published()
    del world.records[key_of(b"i", 9)]
    world.reload()
    assert not world.has(content)
    world.name(10, content, 100, one_stripe())
    assert world.has(content)


def test_what_was_seen_to_be_superseded_or_removed_is_freed_at_once(world: World) -> None:
    content = world.published()
    world.keep(content + 1)
    world.name(9, content + 1, 100, one_stripe())
    world.delete(9)
    world.keep(content + 2)
    world.end_session(5)
    assert world.catalog.freed_extents == 3
    assert not aside(world.files)


def test_what_is_found_in_a_group_that_was_left_is_kept(world: World) -> None:
    content = world.published()
    world.configure(2 << 16, 7, 8)
    world.restart()
    world.drain()
    world.catalog.tidy(time.monotonic())
    assert aside(world.files) == {Extent(content, 0)}
    world.configure(2 << 16, 7, world.files.node)
    assert world.has(content)


def test_one_of_a_wrong_size_is_not_taken_back(world: World) -> None:
    content = world.published()
    world.name(9, content, 99, one_stripe())
    world.restart()
    assert not world.has(content)
    world.restart()
    assert not world.has(content)
    assert aside(world.files) == {Extent(content, 0)}


def test_the_store_of_a_node_that_forgot_who_it_is_keeps_what_it_has(memory: Path) -> None:
    """It is another node, and the extents of the former one are not its own."""
    with Files(str(memory)) as files:
        keep(files, Extent(1, 0), b"somebody's")
        node = files.node
    (memory / "node.json").unlink()
    with Files(str(memory)) as files:
        assert files.node != node
        assert not len(files)
        assert not os.listdir(memory / "extents")
        assert aside(files) == {Extent(1, 0)}


def test_it_outlives_a_restart_and_goes_in_time(memory: Path) -> None:
    with Files(str(memory), quarantine_s=1000) as files:
        keep(files, Extent(1, 0), b"old")
        keep(files, Extent(2, 0), b"new")
        for extent in list(files):
            files.set_aside(extent)
    old = time.time() - 2000
    os.utime(memory / "quarantine" / "1.0", (old, old))
    with Files(str(memory), quarantine_s=1000) as files:
        assert aside(files) == {Extent(1, 0), Extent(2, 0)}
        assert files.tidy_quarantine() == 1
        files.reap()
        assert aside(files) == {Extent(2, 0)}
        files.bring_back(Extent(2, 0))
        assert contents_of(files, Extent(2, 0)) == b"new"


def test_it_stays_though_the_clock_is_set_while_the_node_runs(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_time = time.time
    monkeypatch.setattr(time, "time", lambda: 1.0)
    with Files(str(memory), quarantine_s=1000) as files:
        keep(files, Extent(1, 0), b"found by a clock that nobody has set")
        files.set_aside(Extent(1, 0))
        monkeypatch.setattr(time, "time", true_time)
        assert files.tidy_quarantine() == 0
        assert aside(files) == {Extent(1, 0)}


def test_it_counts_as_free_and_the_oldest_go_for_what_comes(small_tmpfs: Path) -> None:
    with Files(str(small_tmpfs)) as files:
        for content in range(1, 7):
            keep(files, Extent(content, 0), bytes(2 * MIB))
        free = files.space().free
        for content in range(1, 7):
            files.set_aside(Extent(content, 0))
        assert files.space().free >= free + 12 * MIB
        catalog = Catalog(files, Members(), Groups(), BUCKETS)
        with pytest.raises(OSError, match="No space left"):
            files.create(6 * MIB)
        catalog.make_room(6 * MIB)
        files.reap()
        assert aside(files) == {Extent(4, 0), Extent(5, 0), Extent(6, 0)}
        keep(files, Extent(9, 0), bytes(6 * MIB))


def test_a_store_with_little_room_keeps_less(memory: Path) -> None:
    with Files(str(memory), limit_bytes=8 * MIB) as files:
        for content in range(1, 8):
            keep(files, Extent(content, 0), bytes(MIB))
        files.set_aside(Extent(1, 0))
        files.set_aside(Extent(2, 0))
        files.tidy_quarantine()
        assert len(files.quarantine) == 2, "an eighth is free"
        keep(files, Extent(9, 0), bytes(MIB // 2))
        assert files.tidy_quarantine() == 1
        assert aside(files) == {Extent(2, 0)}
