"""Tests of who is in the cluster, who leads a group, and how a group gets its members: on a real etcd.

IRDMAFS_STEPS says how much happens in the long test of everything at random.
"""

import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from harness.etcd_server import EtcdKeys, EtcdServer
from harness.scratch import mounted_on
from harness.seeds import chosen_seed
from harness.store_nodes import Cluster, Node, Watcher, Writer, cluster

from irdmafs.backend.cluster.group_configs import Groups
from irdmafs.backend.cluster.lease import Removed, Session, now_s
from irdmafs.backend.cluster.membership import Members, admit, followed_key, seen_key
from irdmafs.backend.cluster.replica import Replica
from irdmafs.backend.etcd.engine import EtcdEngine
from irdmafs.backend.etcd.leases import EtcdLeases
from irdmafs.backend.kv import Change, Compacted, Delete, KeyValue, Put, WentBack
from irdmafs.backend.model import records
from irdmafs.backend.model.placement import Placement
from irdmafs.backend.model.records import SETTINGS_KEY, NodeRecord, encode, key_of
from irdmafs.backend.node.files import Files
from irdmafs.backend.node.housekeeping import HISTORY_KEPT_S
from irdmafs.backend.node.resync import _Filling
from irdmafs.backend.pauses import Throttle
from irdmafs.backend.store.remote.contents import Contents
from irdmafs.backend.unwrap import background

STEPS = int(os.environ.get("IRDMAFS_STEPS") or 60)
TTL_S = 2  # short, and yet not lost on a busy machine
LONG_TTL_S = 30  # so that no node is lost, which would move something, however busy it is
SETTINGS = records.Settings(1, "test", 2, 16, 0, TTL_S)
MOUNT_RECORD = records.MountRecord("worker", "/mnt", 1, "0")
UP = NodeRecord("up", 1.0, {})


def address(node: int, *, store: str = "/store", free: int = 1 << 30) -> records.NodeAddress:
    return records.NodeAddress("127.0.0.1", 1, 2, ["tcp"], f"host{node}", store, 1 << 30, free, "0")


class Process:
    """A mount's side of the cluster, or that of the store node `node`: an engine, a session that a test may
    run in the nursery, and its replica."""

    def __init__(self, engine: EtcdEngine, nursery: trio.Nursery, node: int = 0) -> None:
        self.engine, self.nursery = engine, nursery
        record = address(node) if node else MOUNT_RECORD
        self.session = Session(engine, record, TTL_S, node=node)
        self.members = Members(self.session)
        self.groups = Groups()
        self.replica = Replica(engine, (self.members, self.groups))


@asynccontextmanager
async def process(keys: EtcdKeys, node: int = 0) -> AsyncIterator[Process]:
    async with EtcdEngine(keys.endpoints, keys.prefix) as engine, background() as nursery:
        found = Process(engine, nursery, node)
        if await engine.get(SETTINGS_KEY) is None:
            await engine.transact((), [Put(SETTINGS_KEY, encode(SETTINGS))])
        await found.replica.start(nursery)
        yield found


async def until(condition: Callable[[], bool], changed: Callable[[], Awaitable[None]]) -> None:
    while not condition():
        await changed()


# --- sessions


async def test_session_is_registered_until_it_is_released(keys: EtcdKeys) -> None:
    async with process(keys) as mount, trio.open_nursery() as nursery:
        session = mount.session
        assert not session.valid()
        await nursery.start(session.run)
        assert session.valid()
        assert session.key == key_of(b"m", session.lease)
        record = await mount.engine.get(session.key)
        assert record is not None
        assert session.compare() == (record.key, record.mod_revision)
        await mount.replica.barrier()
        assert mount.members.sessions == {session.number: MOUNT_RECORD}
        await session.release()
        assert not session.valid()
        assert await mount.engine.get(record.key) is None
        with pytest.raises(OSError, match="ended"):
            await session.wait_valid()


async def test_who_waits_for_a_session_is_told_that_etcd_went_back(keys: EtcdKeys) -> None:
    async with EtcdEngine(keys.endpoints, keys.prefix) as engine:
        session = Session(engine, MOUNT_RECORD, TTL_S)
        with pytest.raises(OSError, match="etcd does not answer"):
            await session.wait_valid(0.0)
        engine.calls.doubt(WentBack("it is another one"))
        with pytest.raises(WentBack):
            await session.wait_valid(0.0)


async def test_session_of_a_process_that_was_stopped_goes_on(keys: EtcdKeys) -> None:
    async with process(keys) as mount:
        session = Session(mount.engine, MOUNT_RECORD, 3 * TTL_S)
        await mount.nursery.start(session.run)
        number, known_s = session.number, session.valid_until
        time.sleep(0.4 * session.ttl_s)  # stands still until the next renewal is late
        while session.valid_until == known_s:
            await session._changed.park()
        assert session.valid()
        assert session.number == number


async def test_session_is_invalid_before_etcd_lets_its_key_go(keys: EtcdKeys) -> None:
    async with process(keys) as watcher, EtcdEngine(keys.endpoints, keys.prefix) as engine:
        session = Session(engine, MOUNT_RECORD, TTL_S)
        async with trio.open_nursery() as nursery:
            await nursery.start(session.run)
            await watcher.replica.barrier()
            nursery.cancel_scope.cancel()  # as if stopped: no keepalive from here on
        number, until_s = session.number, session.valid_until
        assert session.valid()
        await until(lambda: number not in watcher.members.sessions, watcher.members.changed)
        assert now_s() > until_s
        assert not session.valid()


async def test_a_pin_that_is_given_up_late_leaves_the_one_that_was_put_since(
    keys: EtcdKeys, memory: Path
) -> None:
    late: list[Any] = []
    inode: Any = SimpleNamespace(ino=2, extent=records.ContentId(1))
    async with process(keys) as mount:
        await mount.nursery.start(mount.session.run)
        member: Any = SimpleNamespace(**vars(mount), timeout_s=TTL_S)
        member.changes = SimpleNamespace(content_listeners=[])
        member.config = SimpleNamespace(mount=SimpleNamespace(cache_size=None))
        member.nursery = SimpleNamespace(start_soon=lambda *work: late.append(work))
        member.tree = SimpleNamespace(inodes={})
        with closing(Contents(member, f"{memory}")) as contents:
            await contents.pin_on_nodes(inode)
            contents.let_go_on_nodes(inode.extent)
            await contents.pin_on_nodes(inode)
            ((work, *of_what),) = late
            await work(*of_what)
        assert await mount.engine.get(records.pin_key(inode.extent, mount.session.lease))


@pytest.mark.parametrize("has_lease", [False, True], ids=["revoked", "key deleted"])
async def test_lost_session_is_followed_by_a_new_number(keys: EtcdKeys, has_lease: bool) -> None:
    lost = trio.Event()
    async with process(keys) as mount:
        session = mount.session
        gone: list[int] = []
        mount.members.session_gone.append(gone.append)
        await mount.nursery.start(partial(session.run, on_lost=lost.set))
        first = session.number
        if has_lease:
            await mount.engine.transact((), [Delete(session.key)])
        else:
            await mount.engine.leases.revoke(session.lease)
        await lost.wait()
        assert await session.wait_valid() > first
        await mount.replica.barrier()
        assert list(mount.members.sessions) == [session.number]
        assert gone == [first]


async def test_session_goes_on_when_etcd_was_away_and_still_has_its_lease() -> None:
    lost = trio.Event()
    with EtcdServer() as server:
        async with process(EtcdKeys(server, b"/test/")) as mount:
            session = Session(mount.engine, MOUNT_RECORD, 3 * TTL_S)
            await mount.nursery.start(partial(session.run, on_lost=lost.set))
            number = session.number
            await trio.to_thread.run_sync(server.kill9)
            session.doubt()  # as it does when it was away for longer
            await trio.to_thread.run_sync(server.start)
            assert await session.wait_valid() == number
            record = await mount.engine.get(session.key)
            assert record is not None
            assert record.mod_revision == number
            assert not lost.is_set()


async def test_node_looks_over_what_it_has_before_each_registration(keys: EtcdKeys) -> None:
    async with process(keys, 7) as node:
        key = key_of(b"n", 7)
        await admit(node.engine, 7, UP)
        seen: list[KeyValue | None] = []

        async def verify() -> None:
            seen.append(await node.engine.get(key))
            if len(seen) == 2:
                raise OSError("not now")

        session = node.session
        lost = trio.Event()
        await node.nursery.start(partial(session.run, verify, lost.set))
        await node.engine.leases.revoke(session.lease)
        await lost.wait()
        await session.wait_valid()
        assert seen == [None, None, None]  # the second try failed, and was repeated


async def test_second_store_with_the_same_node_id_is_refused(keys: EtcdKeys) -> None:
    async with process(keys) as node:
        await admit(node.engine, 7, UP)
        first = Session(node.engine, address(7), TTL_S, node=7)
        await node.nursery.start(first.run)
        copy = Session(node.engine, address(7, store="/copy"), TTL_S, node=7)
        with pytest.raises(OSError, match="was the store directory copied"):
            await copy.run()
        # The same store again: its former process died without a word.
        second = Session(node.engine, address(7), TTL_S, node=7)
        await node.nursery.start(second.run)
        assert second.number > first.number
        await node.replica.wait_applied(second.number)
        assert node.members.nodes.get(7) == address(7)


class GoneOnceSeen(EtcdEngine):
    """What is read is gone before anything else is done, as its lease ends."""

    lease = 0

    async def get(self, key: bytes) -> KeyValue | None:
        found = await super().get(key)
        await self.leases.revoke(self.lease)
        return found


async def test_node_starts_while_the_lease_of_its_former_process_ends(keys: EtcdKeys) -> None:
    async with process(keys) as node:
        await admit(node.engine, 7, UP)
        first = Session(node.engine, address(7), TTL_S, node=7)
        async with background() as killed:
            await killed.start(first.run)
        async with GoneOnceSeen(keys.endpoints, keys.prefix) as engine:
            engine.lease = first.lease
            second = Session(engine, address(7), TTL_S, node=7)
            await node.nursery.start(second.run)
            assert second.number > first.number
            found = await node.engine.get(second.key)
            assert found is not None
            assert found.mod_revision == second.number


async def test_node_tells_of_its_space_within_its_session(keys: EtcdKeys) -> None:
    async with process(keys, 7) as node:
        await admit(node.engine, 7, UP)
        session = node.session
        await session.update(address(7, free=4))
        await node.nursery.start(session.run)
        await node.replica.barrier()
        assert node.members.nodes == {7: address(7, free=4)}, "as it was told before it began"
        for free in (5, 6, 7):
            await session.update(address(7, free=free))
            await node.replica.barrier()
            assert node.members.nodes == {7: address(7, free=free)}
            found = await node.engine.get(session.key)
            assert found is not None
            assert found.mod_revision == session.number
        assert session.valid()
        # Its renewal is late, as when etcd changes its leader; the lease lives on.
        session.valid_until, until = 0.0, session.valid_until
        await session.update(address(7, free=8))
        session.valid_until = until
        assert session.record == address(7, free=7), "what was not told is told later"


async def test_node_that_was_removed_does_not_come_back_by_itself(keys: EtcdKeys) -> None:
    async with process(keys) as node:
        engine = node.engine
        session = Session(engine, address(7), TTL_S, node=7)
        with pytest.raises(Removed, match=r"empty store directory, .* cluster admit 0{15}7$"):
            await session.run()
        assert await engine.get(session.key) is None
        await admit(engine, 7, UP)
        told = trio.Event()

        async def run(task_status: trio.TaskStatus[None]) -> None:
            with pytest.raises(Removed):
                await session.run(task_status=task_status)
            told.set()

        await node.nursery.start(run)
        # Removed while it was cut off, for so long that its lease is over.
        await engine.transact((), [Delete(key_of(b"N", 7))])
        await engine.leases.revoke(session.lease)
        await told.wait()
        assert await engine.get(session.key) is None
        assert not session.valid()


# --- members


async def test_members_tell_which_nodes_live(keys: EtcdKeys) -> None:
    async with process(keys) as watcher:
        members, engine = watcher.members, watcher.engine
        changes: list[int] = []
        members.node_changed.append(changes.append)
        assert await admit(engine, 7, NodeRecord("up", 1.0, {"zone": "a"}))
        assert not await admit(engine, 7, NodeRecord("up", 5.0, {}))
        await watcher.replica.barrier()
        assert members.records == {7: NodeRecord("up", 1.0, {"zone": "a"})}
        assert list(members.dead_since) == [7]
        assert members.nodes.get(7) is None
        assert members.placement().candidates == ()
        assert members.candidates(60) == ()  # who is dead is kept, not brought in
        assert [c.node for c in members.candidates(60, {7})] == [7]
        assert members.elected() is None
        session = Session(engine, address(7), TTL_S, node=7)
        await watcher.nursery.start(session.run)
        await watcher.replica.barrier()
        assert members.nodes.get(7) == address(7)
        assert not members.dead_since
        assert [c.node for c in members.placement().candidates] == [7]
        assert members.placement() is members.placement()
        assert members.elected() == 7
        await session.release()
        await until(lambda: 7 not in members.nodes, members.changed)
        assert list(members.dead_since) == [7]
        await engine.transact((), [Delete(key_of(b"N", 7))])
        await watcher.replica.barrier()
        assert not members.records
        assert not members.dead_since
        assert changes == [7] * 4


async def test_writer_waits_for_followers_until_they_saw_it_or_are_gone(keys: EtcdKeys) -> None:
    async with process(keys) as watcher:
        members, engine = watcher.members, watcher.engine
        follower = Session(engine, MOUNT_RECORD, TTL_S)
        await watcher.nursery.start(follower.run)
        lease = follower.lease
        revision = await engine.transact((), [Put(followed_key(12, lease), b"", lease)])
        await watcher.replica.barrier()
        assert members.followers_of([1, 12, 40]) == {lease}
        assert members.followers_of([1, 40]) == set()
        assert members.acked(lease) == 0
        done = trio.Event()

        async def wait() -> None:
            await members.wait_acked(lambda: {lease: revision})
            done.set()

        watcher.nursery.start_soon(wait)
        for seen in (revision - 1, revision):
            await trio.testing.wait_all_tasks_blocked()
            assert not done.is_set()
            value = seen.to_bytes(8, "big")
            await engine.transact((), [Put(seen_key(lease), value, lease)])
        await done.wait()
        async with trio.open_nursery() as waiting:
            waiting.start_soon(members.wait_acked, lambda: {lease: revision + 1000})
            await follower.release()  # nobody waits for one that is gone
        assert members.followers_of([12]) == set()
        assert members.acked(lease) == 0


def test_members_find_out_what_happened_while_the_watch_was_broken() -> None:
    members = Members()
    gone: list[int] = []
    members.session_gone.append(gone.append)
    mount, node = encode(MOUNT_RECORD), encode(address(7))
    members.load(
        [
            KeyValue(SETTINGS_KEY, encode(SETTINGS), 1),
            KeyValue(key_of(b"N", 7), encode(NodeRecord("up", 1, {})), 2),
            KeyValue(followed_key(1, 3), b"", 6),
            KeyValue(key_of(b"m", 3), mount, 4),
            KeyValue(key_of(b"m", 4), mount, 5),
            KeyValue(key_of(b"n", 7), node, 3),
        ],
        6,
    )
    assert members.settings == SETTINGS
    assert set(members.sessions) == {4, 5}
    members.load(
        [
            KeyValue(SETTINGS_KEY, encode(SETTINGS), 1),
            KeyValue(key_of(b"N", 7), b"damaged", 9),
            KeyValue(key_of(b"m", 4), mount, 5),
            KeyValue(key_of(b"m", 8), mount, 8),
        ],
        9,
    )
    assert set(members.sessions) == {5, 8}
    assert gone == [4]
    assert not members.nodes
    assert members.followers_of([1]) == set()


class AllOn(Placement):
    """Every group is on the same nodes."""

    def __init__(self, nodes: tuple[int, ...]) -> None:
        super().__init__((), SETTINGS.buckets)
        self._nodes = nodes

    def target(self, group: int) -> tuple[int, ...]:
        return self._nodes


async def test_groups_of_a_pool_are_created_once_by_whoever_is_first(keys: EtcdKeys) -> None:
    history: list[Change] = []
    async with process(keys) as first, process(keys) as second:
        start = first.replica.applied

        async def create(who: Process, nodes: tuple[int, ...]) -> None:
            await who.groups.ensure(who.replica, 2, AllOn(nodes))
            assert set(who.groups.configs) == {2 << 16 | bucket for bucket in range(16)}

        with pytest.raises(OSError, match="no store node"):
            await first.groups.ensure(first.replica, 2, first.members.placement())
        async with trio.open_nursery() as both:
            both.start_soon(create, first, (1, 2))
            both.start_soon(create, second, (3, 4))
        assert first.groups.configs == second.groups.configs
        assert first.groups.pools() == {2}
        assert {config.in_sync for config, _ in first.groups.configs.values()} <= {(1, 2), (3, 4)}
        await create(first, (5, 6))  # exists: nothing happens
        await first.replica.barrier()
        with trio.move_on_after(60):
            async for change in first.engine.watch(b"g", b"h", start):
                history.append(change)
                if sum(len(change.events) for change in history) == 16:
                    break
        assert all(revision < first.replica.applied + 1 for revision, _ in history)
    told = [event.key for change in history for event in change.events]
    assert len(told) == len(set(told)) == 16


async def test_a_damaged_record_of_a_group_is_no_reason_to_wait_for_it(keys: EtcdKeys) -> None:
    async with EtcdEngine(keys.endpoints, keys.prefix) as engine:
        await engine.transact((), [Put(records.group_key(2 << 16 | 3), b"damaged")])
    async with process(keys) as one:
        with trio.fail_after(10):
            await one.groups.ensure(one.replica, 2, AllOn((1, 2)))
        assert len(one.groups.configs) == SETTINGS.buckets - 1


async def test_groups_that_changed_meanwhile_are_left_alone(keys: EtcdKeys) -> None:
    async with process(keys) as one:
        groups, engine = one.groups, one.engine
        await groups.ensure(one.replica, 2, AllOn((1, 2)))
        before = dict(groups.configs)
        moved = random.sample(sorted(before), 3)
        for group in moved:
            await engine.transact(
                (), [Put(records.group_key(group), encode(records.GroupConfig(2, (2,))))]
            )
        late = await groups.change(
            one.replica,
            {
                group: (revision, records.GroupConfig(2, (1,)))
                for group, (_, revision) in before.items()
            },
        )
        assert late == set(moved)
        for group, (config, _) in groups.configs.items():
            assert config == records.GroupConfig(2, (2,) if group in moved else (1,))


# --- leaders, joining, promotion


@asynccontextmanager
async def watched(
    keys: EtcdKeys, nodes: int, buckets: int = 16, ttl_s: int = LONG_TTL_S
) -> AsyncIterator[tuple[Cluster, Watcher, Writer, trio.Nursery]]:
    """A cluster of so many nodes with a writer, and a watcher that must have found nothing wrong."""
    async with (
        cluster(keys, buckets, ttl_s) as made,
        EtcdEngine(keys.endpoints, keys.prefix) as engine,
        background() as nursery,
    ):
        watcher = Watcher(made)
        writer = Writer(made, engine, 1000)
        watcher.replica = Replica(engine, (watcher,))
        await watcher.replica.start(nursery)
        for _ in range(nodes):
            await made.add()
        await writer.start(nursery)
        yield made, watcher, writer, nursery
        await watcher.replica.barrier()
    assert watcher.failures == []


async def settled(writer: Writer, watcher: Watcher, nodes: int) -> None:
    with trio.fail_after(60):
        await watcher.replica.barrier()
        await writer.replica.barrier()
        while not watcher.settled(nodes):
            with trio.move_on_after(0.1):
                await writer.groups.changed()


def target_of(writer: Writer, group: int) -> tuple[int, ...]:
    targets = writer.members.targets.get(group >> 16)
    return targets[0].target(group) if targets else ()


async def on_target(writer: Writer, watcher: Watcher) -> dict[int, int]:
    """Wait until every group is where it should be; how many replicas each node keeps."""
    with trio.fail_after(100):
        while True:
            await watcher.replica.barrier()
            await writer.replica.barrier()
            configs = [(group, config) for group, (config, _) in writer.groups.configs.items()]
            targets, _ = writer.members.targets.get(2, (None, 0))
            if (
                targets is not None
                and set(targets.nodes) == set(writer.members.nodes)
                and all(config.members == target_of(writer, group) for group, config in configs)
            ):
                return dict(Counter(node for _, config in configs for node in config.in_sync))
            with trio.move_on_after(0.2):
                await writer.groups.changed()


async def notice(made: Cluster, node: int) -> None:
    """Kill a node, and have etcd notice at once."""
    lease = await made.kill(node)
    async with EtcdEngine(made.keys.endpoints, made.keys.prefix) as engine:
        await engine.leases.revoke(lease)


def assert_readable(made: Cluster, writer: Writer) -> None:
    """Every member in sync has every published content, whole."""
    for extent, data in writer.published.items():
        for node in writer.groups.get(writer.group_of[extent])[0].in_sync:
            files = made.running[node].files
            with closing(files.hold(extent)) as held:
                assert os.pread(held.fd, len(data) + 1, 0) == data


@pytest.mark.parametrize("lacks", ["what was published meanwhile", "what its store has lost"])
async def test_node_that_comes_back_copies_before_it_counts(keys: EtcdKeys, lacks: str) -> None:
    async with watched(keys, 2) as (made, watcher, writer, _):
        for _ in range(20):
            await writer.publish(random.randbytes(1000))
        await settled(writer, watcher, 2)
        victim = next(iter(made.running))
        if lacks == "what its store has lost":
            await made.kill(victim)  # back before its lease is over: nobody takes it out
            for content, stripe in random.sample(sorted(writer.published), 5):
                os.unlink(f"{made.stores[victim]}/extents/{content:x}.{stripe:x}")
        else:
            await notice(made, victim)
            for _ in range(5):
                await writer.publish(random.randbytes(1000))
        await made.start(made.stores[victim])
        await settled(writer, watcher, 2)
        assert made.running[victim].resync.figures().resync_bytes == 5 * 1000
        assert len(made.running[victim].files) == len(writer.published)
        assert_readable(made, writer)


async def test_loss_of_the_only_copy_is_told_and_service_goes_on(
    keys: EtcdKeys, caplog: pytest.LogCaptureFixture
) -> None:
    async with watched(keys, 1) as (made, watcher, writer, _):
        kept = await writer.publish(b"kept")
        lost = await writer.publish(b"lost")
        # Otherwise it looks for what the last change names once that is gone.
        await watcher.replica.barrier()
        only = next(iter(made.running))
        await made.kill(only)
        os.unlink(f"{made.stores[only]}/extents/{lost.content:x}.{lost.stripe:x}")
        for named in watcher.named.values():
            named.discard(lost)  # rightly, so it is no failure
        await made.start(made.stores[only])
        assert "1 extents of group" in caplog.text
        assert "no other node is in sync" in caplog.text
        assert kept in made.running[only].files
        assert made.running[only].resync.damaged
        await made.add()
        await settled(writer, watcher, 2)  # what is nowhere keeps nobody from joining
        assert "they are lost" in caplog.text


def groups_of(writer: Writer, node: int) -> set[int]:
    return {group for group, (config, _) in writer.groups.configs.items() if node in config.members}


async def test_ninth_node_gets_its_share_and_nothing_else_moves(keys: EtcdKeys) -> None:
    buckets, files, size = 128, 256, 500
    async with watched(keys, 8, buckets) as (made, watcher, writer, _):
        load = await on_target(writer, watcher)
        replicas = 2 * buckets
        assert set(load) == set(made.running)
        assert max(load.values()) <= 1.15 * replicas / 8
        for _ in range(files):
            await writer.publish(random.randbytes(size))
        assert watcher.moves == 0
        new = await made.add()
        load = await on_target(writer, watcher)
        assert set(load) == set(made.running)
        assert max(load.values()) <= 1.15 * replicas / 9
        assert watcher.moves <= 1.1 * replicas / 9
        copied = {node: at.resync.figures().resync_bytes for node, at in made.running.items()}
        assert set(copied) - {node for node, count in copied.items() if not count} == {new}
        held = sum(writer.group_of[extent] in groups_of(writer, new) for extent in writer.published)
        assert copied[new] == held * size
        # The share of one that leaves for good goes to the others, and nothing else moves.
        watcher.moves = 0
        victim = random.choice(list(made.running))
        await notice(made, victim)
        after = await on_target(writer, watcher)
        assert max(after.values()) <= 1.15 * replicas / 8
        assert watcher.moves <= 1.1 * load[victim]
        assert_readable(made, writer)


async def test_restarted_node_brings_no_long_dead_one_into_the_targets(keys: EtcdKeys) -> None:
    async with watched(keys, 4) as (made, watcher, writer, _):
        await on_target(writer, watcher)
        elected = min(made.running)
        await notice(made, max(made.running))
        await on_target(writer, watcher)
        before = await writer.engine.get(records.targets_key(2))
        # It comes back before its lease is over, and has only heard of the dead node then.
        made.rereplicate_after_s = 60.0
        await made.kill(elected)
        await made.start(made.stores[elected])
        node = made.running[elected]
        await node.replica.barrier()
        assert node.agent.housekeeping.acts()
        assert len(node.members.dead_since) == 1
        assert not await node.agent.housekeeping.retarget()
        assert await writer.engine.get(records.targets_key(2)) == before


async def test_damaged_targets_are_made_anew_from_where_groups_are(keys: EtcdKeys) -> None:
    async with watched(keys, 2) as (_, watcher, writer, _):
        await on_target(writer, watcher)
        await writer.engine.transact((), [Put(records.targets_key(2), b"damaged")])
        await on_target(writer, watcher)
        assert watcher.moves == 0


async def test_extent_found_damaged_by_a_reader_is_copied_anew(
    keys: EtcdKeys, caplog: pytest.LogCaptureFixture
) -> None:
    async with watched(keys, 2) as (made, watcher, writer, _):
        extents = [await writer.publish(random.randbytes(1000)) for _ in range(5)]
        await settled(writer, watcher, 2)
        node = random.choice(list(made.running.values()))
        directory = f"{made.stores[node.id]}/extents"
        gone, short, *_ = (f"{directory}/{content:x}.{stripe:x}" for content, stripe in extents)
        os.unlink(gone)
        os.truncate(short, 999)
        for extent in extents[:2]:
            with pytest.raises(FileNotFoundError):  # so that the reader asks another one
                node.service.hold(extent)
        with trio.fail_after(60):
            while node.resync.figures().resync_bytes < 2000:
                with trio.move_on_after(0.1):
                    await writer.groups.changed()
        await settled(writer, watcher, 2)
        assert_readable(made, writer)
        assert caplog.text.count("is damaged and dropped") == 2


async def test_etcd_forgets_its_history_after_a_while(keys: EtcdKeys) -> None:
    async with watched(keys, 2) as (made, watcher, writer, _):
        await on_target(writer, watcher)
        start = 1000.0
        tasks = {node: at.agent.housekeeping for node, at in made.running.items()}
        first, second = (tasks[node] for node in sorted(tasks))

        async def oldest() -> int:
            """The revision of the first event that is still known."""
            try:
                async for change in writer.engine.watch(b"", b"\xff", 0):
                    return change.revision
            except Compacted as error:
                return error.revision
            raise AssertionError("the watch ended")

        old = first._cluster.replica.applied
        for housekeeping in (first, second):
            await housekeeping.forget(start)
            await housekeeping.forget(start + HISTORY_KEPT_S - 1)
        assert await oldest() < old
        await writer.publish(b"new")
        await second.forget(start + HISTORY_KEPT_S)
        assert await oldest() < old  # the other one does it
        await first.forget(start + HISTORY_KEPT_S)
        assert await oldest() == old
        await writer.publish(b"newer")
        await settled(writer, watcher, 2)


async def test_live_member_is_evicted_only_by_one_in_sync_that_misses_it(keys: EtcdKeys) -> None:
    async with watched(keys, 2) as (made, watcher, writer, _):
        await settled(writer, watcher, 2)
        here, there = made.running.values()
        group = next(iter(writer.groups.configs))
        assert not await there.agent.evict(group, here.id)  # it answers
        assert not await here.agent.evict(group, here.id)
        made.cut.add((here.id, there.id))
        assert await here.agent.evict(group, there.id)
        await writer.replica.barrier()
        assert writer.groups.get(group)[0].in_sync == (here.id,)
        assert not await there.agent.evict(group, here.id)  # it is out itself
        assert await here.agent.evict(group, there.id)  # is so already


class GoneOnceGranted(EtcdLeases):
    """The first lease is over before a key is attached to it, as this process stood still."""

    granted = 0

    async def grant(self, ttl_s: int) -> int:
        lease = await super().grant(ttl_s)
        self.granted += 1
        if self.granted == 1:
            await self.revoke(lease)
        return lease


@pytest.mark.parametrize("node", [0, 7], ids=["of a mount", "of a node"])
async def test_a_lease_that_ends_at_once_is_followed_by_another(keys: EtcdKeys, node: int) -> None:
    record = address(7) if node else MOUNT_RECORD
    async with EtcdEngine(keys.endpoints, keys.prefix) as engine, background() as nursery:
        leases = engine.leases = GoneOnceGranted(engine.calls, 0)
        await admit(engine, 7, UP)
        session = Session(engine, record, TTL_S, node=node)
        await nursery.start(session.run)
        assert session.valid()
        assert leases.granted == 2


async def test_who_waits_for_an_ended_session_stops_in_order(
    keys: EtcdKeys, tmp_path: Path
) -> None:
    async with (
        watched(keys, 1) as (made, _, _, _),
        EtcdEngine(keys.endpoints, keys.prefix) as engine,
    ):
        with Files(str(tmp_path)) as files:
            node = Node(made, files, engine)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(node.agent.run)
                await trio.testing.wait_all_tasks_blocked()
                await node.session.release()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small store needs root")
async def test_node_without_room_does_not_keep_others_from_writing(
    keys: EtcdKeys, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with mounted_on(tmp_path, "size=1m"):
        async with watched(keys, 1) as (made, watcher, writer, _):
            for _ in range(16):
                await writer.publish(random.randbytes(300_000))
            full = await made.start(str(tmp_path))
            with trio.fail_after(60):
                while "is full" not in caplog.text:
                    await writer.groups.changed()
            for _ in range(3):
                await writer.publish(random.randbytes(10))
            assert watcher.live == {full, *made.running}
            assert_readable(made, writer)


def test_copying_keeps_to_its_rate() -> None:
    async def move() -> float:
        throttle = Throttle(1000)
        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(throttle.take, 2000)
        return trio.current_time() - start

    clock = trio.testing.MockClock(autojump_threshold=0)
    assert trio.run(move, clock=clock) == pytest.approx(8)  # the last one may begin then


async def test_a_group_that_was_left_before_its_turn_came_is_left_alone(keys: EtcdKeys) -> None:
    async with watched(keys, 3) as (made, watcher, writer, _):
        await settled(writer, watcher, 3)
        node = next(iter(made.running.values()))
        left = next(g for g, (one, _) in node.groups.configs.items() if node.id not in one.members)
        assert await node.resync._advance(left, _Filling())
        assert node.id not in node.groups.get(left)[0].members


@pytest.mark.timeout(120 + STEPS)
async def test_nothing_breaks_the_invariants_of_replication(keys: EtcdKeys) -> None:
    random.seed(chosen_seed())
    async with watched(keys, 3, ttl_s=TTL_S) as (made, watcher, writer, nursery):

        async def write() -> None:
            while True:
                await writer.publish(random.randbytes(random.choice((10, 1000, 100_000))))
                await trio.sleep(random.uniform(0, 0.02))

        async def kill() -> None:
            node = random.choice(list(made.running))
            if random.random() < 0.5:
                await notice(made, node)
            else:
                await made.kill(node)
            stopped.append(made.stores[node])

        async def start() -> None:
            if stopped:
                await made.start(stopped.pop(random.randrange(len(stopped))))

        async def add() -> None:
            if len(made.stores) < 5:
                await made.add()

        async def mark() -> None:
            node = random.choice(list(made.stores))
            record = NodeRecord(random.choice(("up", "draining")), random.choice((1, 2)), {})
            await writer.engine.transact((), [Put(key_of(b"N", node), encode(record))])

        async def cut() -> None:
            made.cut.add((random.choice(list(made.stores)), random.choice(list(made.stores))))

        async def heal() -> None:
            made.cut.clear()

        async def evict() -> None:
            node = random.choice(list(made.running.values()))
            group = random.choice(list(writer.groups.configs))
            await node.agent.evict(group, random.choice(list(made.stores)))

        async def lose_session() -> None:
            node = random.choice(list(made.running.values()))
            await writer.engine.leases.revoke(node.session.lease)

        async def leave() -> None:
            await random.choice(list(made.running.values())).agent.leave()

        stopped: list[str] = []
        writing = trio.CancelScope()

        async def keep_writing() -> None:
            with writing:
                await write()

        nursery.start_soon(keep_writing)
        actions = [kill, start, start, add, mark, cut, heal, evict, evict, lose_session, leave]
        for _ in range(STEPS):
            action = random.choice(actions)
            if action is kill and len(made.running) < 2:
                continue
            await action()
            await trio.sleep(random.uniform(0, 0.15))
        made.cut.clear()
        while stopped:
            await start()
        for node in made.stores:
            record = NodeRecord("up", 1.0, {})
            await writer.engine.transact((), [Put(key_of(b"N", node), encode(record))])
        writing.cancel()
        # However few there were on a slow machine.
        while len(writer.published) <= STEPS // 4:
            await writer.publish(random.randbytes(10))
        await settled(writer, watcher, len(made.stores))
        assert_readable(made, writer)
        assert watcher.changes > STEPS
