"""The replica hub on a real etcd: whole, in order, up to date when asked, and after lost events."""

import errno
import queue
import random
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Self, TypeVar
from unittest.mock import Mock

import pytest
import trio
from harness import shared_namespaces as shared
from harness.etcd_server import EtcdKeys, EtcdServer, new_prefix
from harness.models.namespace import DIRECTORY, FILE, NamespaceAgainstModel, Thing
from harness.seeds import chosen_seed
from hypothesis import HealthCheck, settings
from hypothesis.stateful import rule, run_state_machine_as_test
from trio.testing import wait_all_tasks_blocked

from irdmafs.backend.cluster import replica as hub
from irdmafs.backend.cluster.history import History
from irdmafs.backend.cluster.replica import Replica
from irdmafs.backend.etcd import connection
from irdmafs.backend.etcd.calls import Watch
from irdmafs.backend.etcd.engine import EtcdEngine
from irdmafs.backend.kv import Change, Delete, Event, KeyValue, Put, WentBack
from irdmafs.backend.model.records import EPOCH_KEY, Epoch, encode
from irdmafs.backend.namespace import ROOT_INO
from irdmafs.backend.namespace.inode import inode_key, name_key
from irdmafs.backend.unwrap import background

Result = TypeVar("Result")


# -- lost events -------------------------------------------------------------------------------------


class Recorded:
    """A consumer that knows nothing but the records."""

    prefixes = (b"d", b"i", b"t", b"u")

    def __init__(self) -> None:
        self.records: dict[bytes, KeyValue] = {}
        self.changes: list[tuple[int, Sequence[Event]]] = []
        self.came = trio.Event()

    def load(self, records: Sequence[KeyValue], revision: int) -> None:
        self.records = {record.key: record for record in records}

    def apply(self, revision: int, events: Sequence[Event]) -> None:
        self.changes.append((revision, events))
        self.came.set()
        for _, key, value in events:
            if value is None:
                self.records.pop(key, None)
            else:
                self.records[key] = KeyValue(key, value, revision)


async def test_loading_anew_after_lost_events_tells_exactly_what_differs(keys: EtcdKeys) -> None:
    """The last half of what happened is lost to one host, and made up for by loading everything."""
    seed = chosen_seed()

    async with shared.host(keys) as namespace:
        engine = namespace.engine
        assert isinstance(engine, EtcdEngine)
        worker = shared.Worker(namespace, random.Random(seed))
        behind = shared.HostNamespace(engine)
        behind.tree.load((), 0)
        for _ in range(4):
            await worker.work(40)
            revision, records = await engine.snapshot(b"", b"\xff")
            prefixes = behind.tree.prefixes
            mirror = shared.Mirror(behind)
            behind.tree.load([r for r in records if r.key.startswith(prefixes)], revision)
            mirror.expect_equal()
            assert shared.everything(behind) == shared.everything(namespace)
            # Nothing is different now.
            behind.listener = told = Mock()
            behind.tree.load([r for r in records if r.key.startswith(prefixes)], revision)
            assert not told.method_calls


class LateWatch:
    """A watch that begins when an event is set."""

    def __init__(self, watch: Watch, late: trio.Event) -> None:
        self._watch = watch
        self._late = late
        self.close = watch.close

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Change:
        await self._late.wait()
        return await anext(self._watch)


class LosesEvents(EtcdEngine):
    """Its first watch begins so late that etcd has forgotten what is to come first."""

    late: trio.Event | None = None

    def watch(self, start: bytes, end: bytes, from_revision: int) -> Any:
        if self.late is None:
            return super().watch(start, end, from_revision)
        late, self.late = self.late, None
        return LateWatch(super().watch(start, end, 1), late)


@pytest.fixture
def compacted_keys() -> Iterator[EtcdKeys]:
    """Keys of an etcd of their own: compaction reaches all keys, also those of other tests."""
    with EtcdServer() as server:
        yield EtcdKeys(server, new_prefix())


async def test_a_host_whose_events_were_compacted_away_catches_up_and_tells_what_changed(
    compacted_keys: EtcdKeys,
) -> None:
    async with (
        shared.host(compacted_keys) as other,
        LosesEvents(compacted_keys.endpoints, compacted_keys.prefix) as engine,
        background() as nursery,
    ):
        for name in (b"stays", b"goes", b"moves"):
            await other.create(ROOT_INO, name, FILE, 0, 0)
        place = await other.create(ROOT_INO, b"place", DIRECTORY, 0, 0)
        late = engine.late = trio.Event()
        namespace = shared.HostNamespace(engine)
        replica = namespace.hub
        await replica.start(nursery)
        mirror = shared.Mirror(namespace)
        namespace.held = lambda ino: ino == gone.ino
        gone = await other.unlink(ROOT_INO, b"goes")
        await other.rename(ROOT_INO, b"moves", place.ino, b"moved", 0)
        await other.create(place.ino, b"comes", FILE, 0, 0)
        await other.set_attributes(place.ino, mtime_ns=5)
        await trio.to_thread.run_sync(compacted_keys.server.compact)
        late.set()
        await replica.barrier()
        mirror.expect_equal()
        assert namespace.inode(gone.ino).nlink == 0
        namespace.tree.drop(gone.ino)
        assert shared.everything(namespace) == shared.everything(other)
        # And it goes on from there.
        await other.create(place.ino, b"later", FILE, 0, 0)
        await replica.barrier()
        assert shared.everything(namespace) == shared.everything(other)


# -- the hub -----------------------------------------------------------------------------------------


async def test_hub_hands_every_transaction_whole_to_its_consumers_in_order(keys: EtcdKeys) -> None:
    async with EtcdEngine(keys.endpoints, keys.prefix) as engine, background() as nursery:
        consumer = Recorded()
        replica = Replica(engine, (consumer,))
        await replica.start(nursery)
        expected, inode = [], inode_key(5)
        for number in range(20):
            name = name_key(ROOT_INO, b"%d" % number)
            operations = [Put(name, b"1"), Put(inode, b"%d" % number), Put(b"q", b"")]
            revision = await engine.transact((), operations)
            expected.append((revision, {name, inode}))
        await replica.wait_applied(expected[-1][0])
        assert [(r, {e.key for e in events}) for r, events in consumer.changes] == expected
        # A change that no consumer follows moves the hub on, too.
        revision = await engine.transact((), [Put(b"q", b"again")])
        await replica.barrier()
        assert replica.applied >= revision


@asynccontextmanager
async def beside_another(
    keys: EtcdKeys, consumer: Recorded, is_depended_on: Callable[[], bool]
) -> AsyncIterator[tuple[Replica, EtcdEngine]]:
    """A hub that follows, and the engine of another process."""
    async with (
        EtcdEngine(keys.endpoints, keys.prefix) as engine,
        EtcdEngine(keys.endpoints, keys.prefix) as other,
        background() as nursery,
    ):
        replica = Replica(engine, (consumer,), is_depended_on=is_depended_on)
        await replica.start(nursery)
        yield replica, other


@pytest.mark.parametrize("is_depended_on", [False, True])
async def test_changes_come_together_unless_somebody_waits(
    keys: EtcdKeys, monkeypatch: pytest.MonkeyPatch, is_depended_on: bool
) -> None:
    monkeypatch.setattr(connection, "_MODERATION_S", 60.0)
    monkeypatch.setattr(hub, "_QUIET_S", 0.0)
    consumer = Recorded()
    async with beside_another(keys, consumer, lambda: is_depended_on) as (replica, other):
        await replica.wait_applied(await other.transact((), [Put(inode_key(2), b"")]))
        consumer.came = trio.Event()
        for number in range(3, 20):
            newest = await other.transact((), [Put(inode_key(number), b"")])
            await consumer.came.wait()
        while is_depended_on and replica.applied < newest:
            await trio.lowlevel.checkpoint()
        await wait_all_tasks_blocked()
        assert len(consumer.changes) == (18 if is_depended_on else 2)
        await replica.barrier()
        assert replica.applied == newest and len(consumer.changes) == 18
        await other.transact((), [Put(b"large", bytes(1 << 20))])  # not received at once
        with trio.fail_after(30):
            await replica.reload()


@pytest.mark.parametrize("missed_max", [0, 100])
async def test_changes_pass_who_rests_and_are_known_afterwards(
    keys: EtcdKeys, monkeypatch: pytest.MonkeyPatch, missed_max: int
) -> None:
    for limit in ("_LOOK_S", "_LOOK_AGAIN_S", "_QUIET_S"):
        monkeypatch.setattr(hub, limit, 0.0)
    monkeypatch.setattr(hub, "_MISSED_MAX", missed_max)
    consumer, is_depended_on = Recorded(), True
    async with beside_another(keys, consumer, lambda: is_depended_on) as (replica, other):
        async with replica.resting():
            newest = await other.transact((), [Put(inode_key(2), b"")])
            while replica.applied < newest:
                await trio.lowlevel.checkpoint()
            assert not replica.rests, "somebody depends on it"
            is_depended_on = False
            while not replica.rests:
                await trio.lowlevel.checkpoint()
            for number in range(3, 20):
                newest = await other.transact((), [Put(inode_key(number), b"")])
            assert len(consumer.changes) == 1
            is_depended_on = True
            while replica.applied < newest:
                await trio.lowlevel.checkpoint()
            is_depended_on = False
            while replica.rests < 2:
                await trio.lowlevel.checkpoint()
            newest = await other.transact((), [Delete(inode_key(2))])
        assert replica.applied == newest
        assert [*consumer.records] == [inode_key(number) for number in range(3, 20)]
        assert len(consumer.changes) == (19 if missed_max else 18)


async def test_who_rested_while_a_restored_etcd_was_accepted_begins_a_new_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for limit in ("_LOOK_S", "_QUIET_S"):
        monkeypatch.setattr(hub, limit, 0.0)
    session = Mock()
    with EtcdServer() as server:
        data = server.directory / "m0"
        async with EtcdEngine(server.endpoints, b"x/") as engine, background() as nursery:
            await engine.transact((), [Put(inode_key(2), b"")])
            server.kill9()
            shutil.copytree(data, server.directory / "old")
            server.start()
            consumer = Recorded()
            replica = Replica(engine, (consumer,), history=History(engine, session))
            await replica.start(nursery)
            await replica.transact((), [Put(inode_key(3), b"")])
            async with replica.resting():
                while not replica.rests:
                    await trio.lowlevel.checkpoint()
                session.reset_mock()
                server.kill9()
                shutil.rmtree(data)
                shutil.copytree(server.directory / "old", data)
                server.start()
                async with EtcdEngine(server.endpoints, b"x/") as other:
                    await other.transact((), [Put(EPOCH_KEY, encode(Epoch(1, "a", 0)))])
                    await other.admin.spend(100)
                    await other.admin.compact(other.revision)
            session.lose.assert_called_once()
            assert [*consumer.records] == [inode_key(2)]


class Gate:
    """An engine whose barrier takes until the gate is opened, and counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.opened = trio.Event()
        self.error: OSError | None = None

    async def barrier(self) -> int:
        self.asked += 1
        await self.opened.wait()
        if self.error is not None:
            raise self.error
        return 0


async def test_barriers_share_the_next_question_and_never_one_that_is_on_its_way() -> None:
    engine = Gate()
    replica = Replica(engine, ())  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(replica.barrier)
        await wait_all_tasks_blocked()
        for _ in range(10):
            nursery.start_soon(replica.barrier)
        await wait_all_tasks_blocked()
        assert engine.asked == 1
        engine.opened.set()
    assert engine.asked == replica.barriers == 2


async def test_a_barrier_that_is_given_up_leaves_nobody_waiting() -> None:
    engine = Gate()
    replica = Replica(engine, ())  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        async with trio.open_nursery() as impatient:
            impatient.start_soon(replica.barrier)
            await wait_all_tasks_blocked()
            impatient.start_soon(replica.barrier)
            for _ in range(3):
                nursery.start_soon(replica.barrier)
            await wait_all_tasks_blocked()
            impatient.cancel_scope.cancel()
        await wait_all_tasks_blocked()
        engine.opened.set()
    assert engine.asked == 2


async def test_a_barrier_that_fails_fails_for_all_who_share_it() -> None:
    engine = Gate()
    engine.error = OSError(errno.ETIMEDOUT, "etcd does not answer")
    replica = Replica(engine, ())  # type: ignore[arg-type]

    async def open_the_gate() -> None:
        await wait_all_tasks_blocked()
        engine.opened.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(open_the_gate)
        ends = await shared.all_at_once(*(replica.barrier() for _ in range(5)))
    assert ends == ["ETIMEDOUT"] * 5
    assert engine.asked <= 2


async def test_whoever_waits_for_the_hub_is_told_when_the_engine_is_closed(keys: EtcdKeys) -> None:
    engine = EtcdEngine(keys.endpoints, keys.prefix)
    async with engine, trio.open_nursery() as nursery:
        replica = Replica(engine, ())
        await replica.start(nursery)

        async def wait() -> None:
            with pytest.raises(trio.ClosedResourceError):
                await replica.wait_applied(2**60)

        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        await engine.close()
    with pytest.raises(trio.ClosedResourceError):
        await replica.wait_applied(2**60)


async def test_whoever_waits_for_the_hub_is_told_when_etcd_went_back(keys: EtcdKeys) -> None:
    async with EtcdEngine(keys.endpoints, keys.prefix) as engine, background() as nursery:
        replica = Replica(engine, (), history=History(engine))
        await replica.start(nursery)
        ends: list[str] = []

        async def wait() -> None:
            ends.append(await shared.error_of(replica.wait_applied(2**60)))

        async with trio.open_nursery() as waiting:
            waiting.start_soon(wait)
            await wait_all_tasks_blocked()
            engine.calls.doubt(WentBack("it is at an earlier revision"))
        assert ends == ["EIO"]


async def test_a_revision_that_does_not_come_is_waited_for_only_so_long(keys: EtcdKeys) -> None:
    async with EtcdEngine(keys.endpoints, keys.prefix) as engine, background() as nursery:
        engine.calls.timeout_s = 0.1
        replica = Replica(engine, ())
        await replica.start(nursery)
        assert await shared.error_of(replica.wait_applied(2**60)) == "ETIMEDOUT"


# -- against the model, on two hosts whose replicas are as far behind as they may be ----------------


class TrioThread:
    """A trio loop beside the test, for tests that must not be async. One task does everything, so that it
    can leave the contexts that it has entered."""

    def __init__(self) -> None:
        self.contexts = AsyncExitStack()
        self._jobs: queue.SimpleQueue[tuple[Coroutine[Any, Any, Any], Future[Any]] | None]
        self._jobs = queue.SimpleQueue()
        self._thread = threading.Thread(target=trio.run, args=(self._main,))
        self._thread.start()

    async def _main(self) -> None:
        async with self.contexts:
            while (job := await trio.to_thread.run_sync(self._jobs.get)) is not None:
                doing, done = job
                try:
                    done.set_result(await doing)
                except Exception as error:
                    done.set_exception(error)

    def run(self, doing: Coroutine[Any, Any, Result]) -> Result:
        done: Future[Result] = Future()
        self._jobs.put((doing, done))
        return done.result(30)

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()


class NamespaceOnEtcd(NamespaceAgainstModel):
    """Two hosts take turns; each is up to date only as far as its operations see to it."""

    namespace: shared.HostNamespace

    def __init__(self, server: EtcdServer) -> None:
        super().__init__()
        self.trio = TrioThread()
        two = shared.hosts(EtcdKeys(server, new_prefix()), 2, shared.Lagging)
        self.hosts = self.run(self.trio.contexts.enter_async_context(two))
        self.turn = 0
        self.choose_host()
        self.model.root.uid = self.namespace.inode(ROOT_INO).uid

    def teardown(self) -> None:
        self.compare()
        self.trio.close()

    def run(self, doing: Coroutine[Any, Any, Result]) -> Result:
        return self.trio.run(doing)

    def choose_host(self, *things: Thing, in_use: bool = False) -> None:
        held = in_use or any(thing in self.model.held for thing in things)
        self.turn = 0 if held else 1 - self.turn
        self.namespace = self.hosts[self.turn]
        self.engine = self.namespace.engine
        if in_use:
            # It has found what it has open.
            self.settle()

    def settle(self) -> None:
        self.run(self.namespace.hub.barrier())

    @rule()
    def compare(self) -> None:
        for number, namespace in enumerate(self.hosts):
            self.namespace = namespace
            self.settle()
            self.expect_as_the_model_says(holds=number == 0)
        self.choose_host()

    @rule()
    def swap_turns(self) -> None:
        self.choose_host()


def test_two_hosts_together_do_what_the_model_says(etcd: EtcdServer) -> None:
    run_state_machine_as_test(
        lambda: NamespaceOnEtcd(etcd),  # type: ignore[arg-type] # any callable will do
        settings=settings(
            max_examples=15,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
