"""What a store node frees and what it keeps: extents against the records that etcd tells it of."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness.seeds import seeded

from irdmafs.backend.cluster.group_configs import Groups
from irdmafs.backend.cluster.membership import Members
from irdmafs.backend.kv import Event, KeyValue
from irdmafs.backend.model import records
from irdmafs.backend.model.placement import group_of
from irdmafs.backend.model.records import Layout, key_of
from irdmafs.backend.namespace import Inode
from irdmafs.backend.namespace.numbers import SUBVOLUMES
from irdmafs.backend.node import catalog as catalog_module
from irdmafs.backend.node.catalog import Catalog
from irdmafs.backend.node.files import Files
from irdmafs.backend.node.named import Named
from irdmafs.backend.transport import Extent

BUCKETS = 16
STRIPE_BYTES = 1000
MOUNT = records.encode(records.MountRecord("host", "/mnt", 1, "0"))


class World:
    """A node's store and catalog, and the records in etcd, which `put` and `delete` change."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self.records: dict[bytes, tuple[bytes, int]] = {}
        self.revision = 100
        up = records.encode(records.NodeRecord("up", 1.0, {}))
        self.records[key_of(b"N", files.node)] = up, self.revision
        self.restart()
        for bucket in range(BUCKETS):
            self.configure(2 << 16 | bucket, files.node, 7)

    def change(self, *changes: tuple[bytes, bytes | None]) -> int:
        """One transaction."""
        self.revision += 1
        events = []
        for key, value in changes:
            if value is None:
                del self.records[key]
            else:
                self.records[key] = value, self.revision
            events.append(Event(self.revision, key, value))
        for consumer in (self.members, self.groups, self.catalog):
            mine = [event for event in events if event.key.startswith(consumer.prefixes)]
            if mine:
                consumer.apply(self.revision, mine)
        return self.revision

    def reload(self) -> None:
        """The watch lost events: everything is read anew."""
        records = [
            KeyValue(key, value, revision)
            for key, (value, revision) in sorted(self.records.items())
        ]
        for consumer in (self.members, self.groups, self.catalog):
            mine = [record for record in records if record.key.startswith(consumer.prefixes)]
            consumer.load(mine, self.revision)

    def restart(self) -> None:
        """Another process on the same store."""
        self.members, self.groups = Members(), Groups()
        self.catalog = Catalog(self.files, self.members, self.groups, BUCKETS)
        self.reload()
        self.catalog.begin()

    # -- records

    def session(self, lease: int) -> int:
        return self.change((key_of(b"m", lease), MOUNT))

    def end_session(self, lease: int) -> None:
        self.change((key_of(b"m", lease), None))

    def drain(self) -> None:
        """The node is to be in no group."""
        record = records.NodeRecord("draining", 1.0, {})
        self.change((key_of(b"N", self.files.node), records.encode(record)))

    def configure(self, group: int, *in_sync: int) -> None:
        self.change((records.group_key(group), records.encode(records.GroupConfig(1, in_sync))))

    def name(self, ino: int, content: int, size: int, layout: Layout) -> None:
        self.change((key_of(b"i", ino), record(ino, content, size, layout)))

    def delete(self, ino: int) -> None:
        self.change((key_of(b"i", ino), None))

    def pin(self, content: int, lease: int) -> None:
        self.change((records.pin_key(content, lease), b""))

    def unpin(self, content: int, lease: int) -> None:
        self.change((records.pin_key(content, lease), None))

    # -- extents

    def keep(self, content: int, stripe: int = 0, size: int = 100) -> Extent:
        extent = Extent(content, stripe)
        incoming = self.files.create(size)
        self.files.seal(incoming, extent)
        os.close(incoming.fd)
        self.catalog.sealed(extent)
        return extent

    def published(self, ino: int = 9) -> int:
        """Return the content of a file, which is of a new session."""
        content = self.session(5) << 24 | ino
        self.keep(content)
        self.name(ino, content, 100, one_stripe())
        return content

    def has(self, content: int, stripe: int = 0) -> bool:
        return Extent(content, stripe) in self.files


def record(ino: int, content: int, size: int, layout: Layout) -> bytes:
    inode = Inode(ino, 0o100644, 0, 0, 0)
    inode.extent, inode.size = records.ContentId(content), size
    inode.layout, inode.version = layout, 1
    return inode.encode()


def named_bytes(catalog: Catalog) -> dict[int, int]:
    """How many bytes inodes name in each group that has any."""
    groups = (2 << 16 | bucket for bucket in range(BUCKETS))
    found = {group: sum(size for _, size in catalog.extents_of(group)) for group in groups}
    return {group: count for group, count in found.items() if count}


@pytest.fixture
def world(memory: Path) -> Iterator[World]:
    world = World(Files(f"{memory}/store"))
    yield world
    world.files.close()


def one_stripe(seed: int = 0) -> Layout:
    return Layout(2, 0, seed)


@pytest.mark.parametrize(
    "change",
    [
        lambda world, content: world.name(9, content, 100, one_stripe()),
        lambda world, content: (world.pin(content, 5), world.unpin(content, 5)),
        lambda world, content: world.catalog.give_up(content),
    ],
    ids=["attributes", "a pin that goes", "its writer gives it up"],
)
def test_what_is_named_stays(world: World, change: Callable[[World, int], object]) -> None:
    content = world.published()
    change(world, content)
    assert world.has(content)
    assert named_bytes(world.catalog) == {2 << 16: 100}
    world.reload()
    assert world.has(content)


def test_a_content_may_change_hands_in_one_transaction(world: World) -> None:
    content = world.published()
    world.change(
        (key_of(b"i", 9), None), (key_of(b"i", 10), record(10, content, 100, one_stripe()))
    )
    assert world.has(content)
    world.change((key_of(b"i", 3), record(3, content, 100, one_stripe())), (key_of(b"i", 10), None))
    assert world.has(content)
    world.delete(3)
    assert not world.has(content)


@pytest.mark.parametrize("forged", [Layout(2), Layout(2, 10), Layout(3)], ids=str)
def test_a_forged_name_in_another_subvolume_takes_no_extent(world: World, forged: Layout) -> None:
    content = world.session(5) << 24 | 1
    world.name(SUBVOLUMES[0] + 1, content, 77 if forged == Layout(2) else 100, forged)
    assert not world.catalog.is_published(content)
    extent = world.keep(content)
    world.name(SUBVOLUMES[1] + 1, content, 100, Layout(2))
    for again in (None, world.reload, world.restart):
        if again is not None:
            again()
        world.catalog.tidy(time.monotonic() + 1e6)
        assert [*world.files] == [extent]


@pytest.mark.parametrize("is_pinned", [False, True])
def test_a_forged_name_that_goes_again_takes_no_extent(world: World, is_pinned: bool) -> None:
    """It is kept where it costs no room: nobody knows if it was forged, or its writer's and superseded."""
    content, forged = world.session(5) << 24 | 1, SUBVOLUMES[0] + 1
    for _ in range(2):
        world.name(forged, content, 100, Layout(2))
        world.delete(forged)
        world.keep(content)
    if is_pinned:
        world.pin(content, 3)
    world.name(forged, content, 100, Layout(2))
    world.delete(forged)
    assert world.has(content) == is_pinned
    if is_pinned:
        world.unpin(content, 3)
    assert [*world.files.quarantine] == [Extent(content, 0)]
    world.name(9, content, 100, Layout(2))
    assert world.has(content)
    later = world.revision + 4 << 24 | 1
    world.name(forged, later, 100, Layout(2))
    world.delete(forged)
    world.name(forged, content + 1, 100, Layout(2))
    assert world.session(6) == later >> 24
    world.records.pop(key_of(b"i", forged))
    world.reload()
    assert world.catalog.may_store(content + 1) and world.catalog.may_store(later)


def test_many_names_of_a_content_are_not_looked_at_for_each(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    many, looks = range(SUBVOLUMES[0] + 1, SUBVOLUMES[0] + 60), list[object]()

    def is_member(group: int, of: Callable[[int], bool] = world.catalog.is_member) -> bool:
        looks.append(group)
        return of(group)

    monkeypatch.setattr(world.catalog, "is_member", is_member)

    def is_same(one: Named, other: object) -> bool:
        looks.append(one)
        return one is other

    monkeypatch.setattr(Named, "__eq__", is_same)
    content = world.session(5) << 24 | 1
    world.keep(content)
    for ino in many:
        world.name(ino, content, 77, Layout(2))
    assert world.files.quarantine.size(Extent(content, 0)) == 100
    for ino in reversed(many):
        world.delete(ino)
    assert len(looks) < 4 * len(many)


def test_what_its_writer_gives_up_is_freed_even_if_it_arrives_later(world: World) -> None:
    content = world.session(5) << 24 | 1
    world.keep(content)
    world.catalog.give_up(content)
    assert not world.has(content)
    world.keep(content, 1)
    assert not world.has(content, 1)
    assert not world.catalog.may_store(content)


def test_an_extent_that_arrives_after_its_content_came_and_went_is_freed(world: World) -> None:
    content = world.session(5) << 24 | 1
    world.name(9, content, 100, one_stripe())
    world.delete(9)
    world.keep(content)
    assert not world.has(content)


def test_extents_of_a_group_that_was_left_go_when_nobody_wants_them_here(world: World) -> None:
    content = world.published()
    world.configure(2 << 16, 7, 8)
    world.catalog.tidy(time.monotonic())
    assert world.has(content), "the node may be back in a moment"
    world.drain()
    world.catalog.tidy(time.monotonic())
    assert not world.has(content)


def test_extents_of_a_group_that_was_left_go_in_time_or_for_room(world: World) -> None:
    content = world.session(5) << 24
    for number in (1, 2):
        world.keep(content + number)
        world.name(number, content + number, 100, one_stripe(number))
    world.configure(2 << 16 | 1, 7, 8)
    world.catalog.tidy(time.monotonic() + 3600)
    assert not world.has(content + 1)
    world.configure(2 << 16 | 2, 7, 8)
    world.catalog.make_room()
    assert not world.has(content + 2)


def test_a_node_that_comes_back_to_a_group_keeps_what_it_had(world: World) -> None:
    content = world.published()
    world.configure(2 << 16, 7, 8)
    world.configure(2 << 16, 7, world.files.node)
    world.drain()
    world.catalog.tidy(time.monotonic() + 3600)
    world.catalog.make_room()
    assert world.has(content)


def test_what_is_missing_is_named_by_group(world: World) -> None:
    content = world.session(5) << 24 | 1
    layout = Layout(2, STRIPE_BYTES, 3)
    size = 100 * STRIPE_BYTES - 1
    for stripe in range(0, 100, 2):
        world.keep(content, stripe, layout.span(size, stripe)[1])
    world.name(9, content, size, layout)
    found = {}
    for bucket in range(BUCKETS):
        group = 2 << 16 | bucket
        missing = world.catalog.missing(group)
        assert all(group_of(layout, extent.stripe, BUCKETS) == group for extent, _ in missing)
        assert all(world.catalog.is_missing(extent) for extent, _ in missing)
        found.update(dict(missing))
        assert named_bytes(world.catalog)[group] == sum(
            layout.span(size, stripe)[1]
            for stripe in range(100)
            if group_of(layout, stripe, BUCKETS) == group
        )
    assert found == {
        Extent(content, stripe): layout.span(size, stripe)[1] for stripe in range(1, 100, 2)
    }
    assert not world.catalog.is_missing(Extent(content, 0))
    assert not world.catalog.is_missing(Extent(content, 101))
    assert not world.catalog.is_missing(Extent(content + 1, 0))


def test_an_extent_of_a_wrong_size_counts_as_missing(world: World) -> None:
    content = world.session(5) << 24 | 1
    world.name(9, content, 100, one_stripe())
    world.keep(content, size=99)
    assert not world.has(content)
    assert world.catalog.missing(2 << 16) == [(Extent(content, 0), 100)]


def test_files_of_an_embedded_store_and_directories_name_nothing_here(world: World) -> None:
    content = world.session(5) << 24 | 1
    world.keep(content)
    world.name(9, content, 100, Layout())
    world.name(10, 0, 0, one_stripe())
    world.end_session(5)
    assert not world.has(content)


def test_a_damaged_record_frees_nothing(world: World) -> None:
    content = world.published()
    world.change((key_of(b"i", 9), b"\xff damaged"))
    assert world.has(content)


def test_a_restart_keeps_what_is_named_and_what_a_faster_publish_names(world: World) -> None:
    ended, open_ = world.session(5), world.session(6)
    named, lost, pending = ended << 24 | 1, ended << 24 | 2, open_ << 24 | 1
    world.name(9, named, 100, one_stripe())
    del world.records[key_of(b"m", 5)]
    for content in (named, lost, pending):
        world.keep(content)
    world.restart()
    assert set(world.files) == {Extent(named, 0)}
    # Before the acknowledgement of the former process is void.
    world.name(10, pending, 100, one_stripe())
    assert set(world.files) == {Extent(named, 0), Extent(pending, 0)}


def test_nothing_is_freed_before_the_records_are_known(world: World) -> None:
    content = world.session(5) << 24 | 1
    world.keep(content)
    fresh = Catalog(world.files, Members(), Groups(), BUCKETS)
    fresh.sealed(Extent(content, 0))
    assert world.has(content)


def test_working_copies_of_dead_mounts_go_and_those_of_live_ones_stay(world: World) -> None:
    dead, alive = world.session(5), world.session(6)
    world.end_session(5)
    names = [f"{session << 24 | 1:x}" for session in (dead, alive, world.revision + 10)]
    for name in names:
        with open(f"{world.files.directory}/incoming/{name}", "wb"):
            pass
    incoming = world.files.create(10)
    world.catalog.tidy(time.monotonic())
    assert sorted(world.files.incoming.working_copies()) == sorted(names[1:])
    assert os.path.exists(f"{world.files.directory}/incoming/{incoming.name}")
    os.close(incoming.fd)


def test_memory_of_gone_contents_is_limited(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_module, "_REMEMBERED_GONE", 10)
    content = world.session(5) << 24
    for number in range(1, 31):
        world.catalog.give_up(content + number)
    assert not world.catalog.may_store(content + 30)
    assert not world.catalog.may_store(content + 21)
    assert world.catalog.may_store(content + 20)


def test_random_histories_lose_nothing_and_leak_nothing(world: World) -> None:
    rng = seeded()
    sessions: dict[int, int] = {}
    number = 0
    named: dict[int, tuple[int, int, Layout]] = {}
    pins: set[tuple[int, int]] = set()
    pending: set[int] = set()
    stripes: dict[int, int] = {}
    lease = 0

    def expected() -> set[Extent]:
        contents = {content for content, _, _ in named.values()}
        contents |= {content for content, _ in pins if content in stripes}
        contents |= {c for c in pending if c >> 24 in sessions.values()}
        return {Extent(c, s) for c in contents for s in range(stripes[c])}

    for _ in range(1500):
        match rng.randrange(10):
            case 0:
                lease += 1
                sessions[lease] = world.session(lease)
            case 1 if sessions and rng.random() < 0.3:
                ended = rng.choice(sorted(sessions))
                pending -= {c for c in pending if c >> 24 == sessions[ended]}
                del sessions[ended]
                world.end_session(ended)
            case 2 | 3 if sessions:
                number += 1
                content = rng.choice(sorted(sessions.values())) << 24 | number
                layout = Layout(2, rng.choice((0, STRIPE_BYTES)), rng.randrange(1 << 64))
                size = rng.randrange(1, 5 * STRIPE_BYTES)
                stripes[content] = layout.stripes(size)
                for stripe in range(layout.stripes(size)):
                    world.keep(content, stripe, layout.span(size, stripe)[1])
                if rng.random() < 0.7:
                    ino = rng.randrange(30)
                    named[ino] = content, size, layout
                    world.name(ino, content, size, layout)
                else:
                    pending.add(content)
            case 9 if named:  # a clone
                ino, one = rng.randrange(30), rng.choice(sorted(named.values()))
                named[ino] = one
                world.name(ino, *one)
            case 4 if named:
                ino = rng.choice(sorted(named))
                del named[ino]
                world.delete(ino)
            case 5 if named:
                content = rng.choice(sorted(named.values()))[0]
                if (content, lease) not in pins:
                    pins.add((content, lease))
                    world.pin(content, lease)
            case 6 if pins:
                pin = rng.choice(sorted(pins))
                pins.remove(pin)
                world.unpin(*pin)
            case 7 if pending:
                content = rng.choice(sorted(pending))
                pending.remove(content)
                world.catalog.give_up(content)
            case 8 if rng.random() < 0.1:
                if rng.random() < 0.5:
                    world.reload()
                else:
                    world.restart()
                    pending.clear()
        world.catalog.tidy(time.monotonic())
        assert set(world.files) == expected()
        sizes = {content: size for content, size, _ in named.values()}
        assert sum(named_bytes(world.catalog).values()) == sum(sizes.values())
        for content in sizes:
            inos = {ino for ino, one in named.items() if one[0] == content}
            assert {*world.catalog.inos_of(content)} == inos
        for bucket in range(BUCKETS):
            assert not world.catalog.missing(2 << 16 | bucket)
    world.files.reap()
    on_disk = os.listdir(f"{world.files.directory}/extents")
    assert len(on_disk) == len(world.files)
