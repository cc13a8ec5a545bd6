"""The etcd engine when etcd, or the way to it, fails: every test runs real etcd.

A proxy between engine and etcd loses answers and delivers requests late. Randomized tests print
their seed.
"""

import contextlib
import errno
import math
import os
import random
import select
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from harness.errors import fails_with
from harness.etcd_server import EtcdServer, free_port, new_prefix
from harness.seeds import seeded

from irdmafs.backend.etcd import client, connection
from irdmafs.backend.etcd import etcd_pb2 as pb
from irdmafs.backend.etcd.calls import LAST_KEY
from irdmafs.backend.etcd.engine import EtcdEngine
from irdmafs.backend.etcd.leases import LeaseEnded
from irdmafs.backend.etcd.rpc import ALARM, DELETE, RANGE, NoAnswer
from irdmafs.backend.kv import Change, Compacted, Compare, Delete, Event, NoSpace, Put
from irdmafs.backend.trust.authority import issue, list_revoked, make_ca
from irdmafs.backend.trust.security import Credentials
from irdmafs.backend.unwrap import background

END = b"\xff"


async def in_thread(call: Callable[..., Any], *args: object) -> Any:
    return await trio.to_thread.run_sync(call, *args)


async def history(
    engine: EtcdEngine, start: bytes, end: bytes, until: int, after: int = 0
) -> list[Change]:
    """What happened in a range up to the revision `until`, which must have an event there."""
    changes = []
    watch = engine.watch(start, end, after)
    async for change in watch:
        changes.append(change)
        if change.revision >= until:
            break
    watch.close()
    return changes


async def served(
    connected: Callable[[trio.SocketStream], Awaitable[None]], nursery: trio.Nursery
) -> str:
    """Serve whoever connects, and return the endpoint."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    nursery.start_soon(trio.serve_listeners, connected, [listener])
    return f"127.0.0.1:{listener.socket.getsockname()[1]}"


class Link:
    """One connection through the proxy."""

    def __init__(self, client: trio.SocketStream, server: trio.SocketStream) -> None:
        self.client, self.server = client, server
        self.held = bytearray()
        self.answered = trio.Event()
        self.silent = False
        self._answer = bytearray()

    def note(self, data: bytes | bytearray) -> None:
        """`answered` is set by the first HEADERS frame: etcd also sends frames that answer nothing."""
        self._answer += data
        while len(self._answer) >= 9:
            if self._answer[3] == 1:
                self.answered.set()
            size = 9 + int.from_bytes(self._answer[:3], "big")
            if len(self._answer) < size:
                break
            del self._answer[:size]


class Proxy:
    """Stands between an engine and etcd.

    `holding`: what clients send is kept until `release`, also when the client has gone.
    `losing`: what etcd answers is dropped. `refusing`: connections are closed at once.
    `harming`: the next answer that has these bytes in it makes no sense.
    """

    def __init__(self, server: EtcdServer) -> None:
        self._server = server
        self._links: list[Link] = []
        self._kept: list[Link] = []
        self._something_held = trio.Event()
        self.holding = self.losing = self.refusing = False
        self.endpoint, self.harming = "", b""

    async def serve(self, nursery: trio.Nursery) -> None:
        self.endpoint = await served(self._connected, nursery)

    async def hold(self, text: bytes) -> None:
        """Until a client sent something with this in it, which is held; what follows is lost."""
        self.holding = True
        while not any(text in link.held for link in self._links):
            await self._something_held.wait()
            self._something_held = trio.Event()
        for link in self._links:
            link.silent = True

    async def cut(self) -> None:
        """End all connections of clients; what is held for etcd stays. New ones work."""
        self.holding = self.losing = False
        for link in self._links:
            await trio.aclose_forcefully(link.client)
            if link.held:
                self._kept.append(link)
            else:
                await trio.aclose_forcefully(link.server)
        self._links.clear()

    async def release(self) -> list[Link]:
        """Deliver what is held."""
        released, self._kept = self._kept, []
        for link in released:
            link.answered = trio.Event()
            await link.server.send_all(link.held)
        return released

    async def release_and_wait(self) -> None:
        """Deliver the call that is held, and wait until etcd has answered it."""
        for link in await self.release():
            await link.answered.wait()

    async def _connected(self, client: trio.SocketStream) -> None:
        host, port = self._server.endpoint.split(":")
        if self.refusing:
            await trio.aclose_forcefully(client)
            return
        try:
            link = Link(client, await trio.open_tcp_stream(host, int(port)))
        except OSError:
            await trio.aclose_forcefully(client)
            return
        self._links.append(link)
        async with link.server, trio.open_nursery() as nursery:
            nursery.start_soon(self._forward, link)
            nursery.start_soon(self._backward, link)

    async def _forward(self, link: Link) -> None:
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async for data in link.client:
                if link.silent:
                    continue
                if self.holding:
                    link.held += data
                    self._something_held.set()
                else:
                    await link.server.send_all(data)
        if not link.held:
            await trio.aclose_forcefully(link.server)

    async def _backward(self, link: Link) -> None:
        ended = contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError)
        with ended:
            async for data in link.server:
                link.note(data)
                if self.harming and self.harming in data:
                    # With the length before it, the value ends beyond its message.
                    data = data.replace(
                        bytes([len(self.harming)]) + self.harming, b"\x7f" + self.harming
                    )
                    self.harming = b""
                if not self.losing:
                    with ended:
                        await link.client.send_all(data)
        link.answered.set()
        await trio.aclose_forcefully(link.client)


@asynccontextmanager
async def proxied(
    server: EtcdServer, prefix: bytes, *, reader: bool = False
) -> AsyncIterator[tuple[Proxy, EtcdEngine, EtcdEngine]]:
    """A proxy, an engine that goes through it and has made a transaction, and one that does not."""
    proxy = Proxy(server)
    async with background() as nursery:
        await proxy.serve(nursery)
        async with (
            EtcdEngine(server.endpoints, prefix) as direct,
            EtcdEngine([proxy.endpoint], prefix, reader=reader) as engine,
        ):
            await engine.transact((), [Put(b"start", b"")])
            yield proxy, engine, direct
            proxy.holding = proxy.losing = False


@pytest.fixture(scope="module")
def own_etcd() -> Iterator[EtcdServer]:
    """A server of this module: an alarm or a compaction reaches everybody's keys."""
    with EtcdServer() as server:
        yield server


@pytest.fixture(scope="module")
def tls_etcd() -> Iterator[tuple[EtcdServer, Credentials]]:
    """A server that shows a certificate and asks for one, and a client's."""
    with tempfile.TemporaryDirectory() as directory:
        make_ca(directory, "of the same name")
        issue(directory, "etcd", "etcd", ["127.0.0.1"])
        admin = issue(directory, "admin", "admin")
        list_revoked(directory, ())
        with EtcdServer(credentials=Path(directory)) as server:
            yield server, admin


@asynccontextmanager
async def overtaken(engine: EtcdEngine) -> AsyncIterator[None]:
    """Another transaction is the last one by now."""
    await engine.transact((), [Put(b"other", b"")])
    yield


@asynccontextmanager
async def forgotten(engine: EtcdEngine) -> AsyncIterator[None]:
    """A member has removed the key that tells which transaction was the last."""
    key = engine.prefix + LAST_KEY
    await engine.calls.call(DELETE, pb.DeleteRangeRequest(key=key))
    yield


@asynccontextmanager
async def filled(engine: EtcdEngine) -> AsyncIterator[None]:
    """etcd says that it is full: it answers questions and deletes, and takes nothing else."""
    request = pb.AlarmRequest(action=pb.AlarmRequest.ACTIVATE, memberID=1, alarm=pb.NOSPACE)
    await engine.admin._calls.call(ALARM, request)
    try:
        yield
    finally:
        request.action = pb.AlarmRequest.DEACTIVATE
        await engine.admin._calls.call(ALARM, request)


class TestUncertainTransaction:
    @pytest.mark.parametrize("reader", [False, True])
    @pytest.mark.parametrize("meanwhile", [contextlib.nullcontext, overtaken, forgotten, filled])
    async def test_that_was_applied_is_acknowledged_once_with_its_revision(
        self, own_etcd: EtcdServer, meanwhile: Any, reader: bool
    ) -> None:
        async with proxied(own_etcd, new_prefix(), reader=reader) as (proxy, engine, direct):
            applied, acknowledged = 0, trio.Event()

            async def write() -> None:
                assert await engine.transact([(b"a1", 0)], [Put(b"a1", b"")]) == applied
                acknowledged.set()

            async with trio.open_nursery() as nursery:
                proxy.losing = True
                watch = direct.watch(b"a1", b"b", engine.revision)
                nursery.start_soon(write)
                applied = (await anext(watch)).revision
                watch.close()
                async with meanwhile(direct):
                    await proxy.cut()
                    await acknowledged.wait()
            last = await engine.transact((), [Put(b"a9", b"")])
            found = [change.events[0].key for change in await history(direct, b"a", b"b", last)]
            assert found == [b"a1", b"a9"]

    async def test_that_was_not_applied_is_repeated_and_does_nothing_when_it_arrives(
        self, etcd: EtcdServer
    ) -> None:
        async with proxied(etcd, new_prefix()) as (proxy, engine, direct):
            revisions: list[int] = []

            async def write() -> None:
                revisions.append(await engine.transact([(b"a", 0)], [Put(b"a", b"1")]))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(write)
                await proxy.hold(b"/a")
                await proxy.cut()
            found = await direct.get(b"a")
            assert found is not None
            assert revisions == [found.mod_revision]
            # Its compares hold again, since what it created has been deleted meanwhile.
            deleted = await engine.transact([(b"a", revisions[0])], [Delete(b"a")])
            await proxy.release_and_wait()
            last = await engine.transact((), [Put(b"b", b"")])
            assert await history(direct, b"a", b"c", last) == [
                Change(revisions[0], (Event(revisions[0], b"a", b"1"),)),
                Change(deleted, (Event(deleted, b"a", None),)),
                Change(last, (Event(last, b"b", b""),)),
            ]

    async def test_that_full_etcd_refuses_is_not_applied_later(self, own_etcd: EtcdServer) -> None:
        async with proxied(own_etcd, new_prefix()) as (proxy, engine, direct):

            async def write() -> None:
                with pytest.raises(NoSpace):
                    await engine.transact((), [Put(b"a", b"")])

            async with filled(direct), trio.open_nursery() as nursery:
                nursery.start_soon(write)
                await proxy.hold(b"/a")
                await proxy.cut()
            await proxy.release_and_wait()
            assert await direct.get(b"a") is None
            await engine.transact([(b"a", 0)], [Put(b"a", b"again")])

    @pytest.mark.parametrize("full", [False, True])
    async def test_that_was_cancelled_is_not_applied_after_what_comes_next(
        self, own_etcd: EtcdServer, full: bool
    ) -> None:
        async with proxied(own_etcd, new_prefix()) as (proxy, engine, direct):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.transact, (), [Put(b"a", b"cancelled")])
                await proxy.hold(b"/a")
                nursery.cancel_scope.cancel()
            await proxy.cut()
            if full:
                async with filled(direct):
                    await engine.fenced.settle()
            else:
                await engine.transact((), [Put(b"b", b"")])
            await proxy.release_and_wait()
            await engine.transact((), [Put(b"c", b"")])
            assert await direct.get(b"a") is None

    async def test_that_timed_out_is_not_applied_after_what_comes_next(
        self, etcd: EtcdServer
    ) -> None:
        async with proxied(etcd, new_prefix()) as (proxy, engine, direct):

            async def write() -> None:
                with fails_with(errno.ETIMEDOUT):
                    await engine.transact((), [Put(b"a", b"late")])

            await engine.snapshot(b"", END)
            timeout_s, engine.calls.timeout_s = engine.calls.timeout_s, 2.0
            async with trio.open_nursery() as nursery:
                nursery.start_soon(write)
                await proxy.hold(b"/a")
                proxy.refusing = True
                await proxy.cut()
            proxy.refusing, engine.calls.timeout_s = False, timeout_s
            await engine.transact((), [Put(b"b", b"")])
            await proxy.release_and_wait()
            assert await direct.get(b"a") is None

    @pytest.mark.slow
    async def test_of_random_kinds_are_all_applied_once_in_order(self, etcd: EtcdServer) -> None:
        chance = seeded()
        async with proxied(etcd, new_prefix()) as (proxy, engine, direct):
            first = engine.revision
            acknowledged: list[tuple[int, bytes, bytes | None]] = []
            progress = trio.lowlevel.ParkingLot()
            writing = 6

            async def write(name: bytes) -> None:
                """Creates and deletes a key by turns: a stale repetition would find it fitting."""
                nonlocal writing
                revision = 0
                for number in range(60):
                    value = None if number % 2 else b"%d" % number
                    operation = Delete(name) if value is None else Put(name, value)
                    compares: list[Compare] = [(name, revision)]
                    revision = await engine.transact(compares, [operation])
                    acknowledged.append((revision, name, value))
                    progress.unpark_all()
                    if value is None:
                        revision = 0
                writing -= 1

            async def disturb() -> None:
                while writing:
                    await progress.park()  # on a busy machine nothing would ever be acknowledged
                    await trio.sleep(chance.uniform(0, 0.03))
                    if chance.random() < 0.5:
                        proxy.holding = True
                        await trio.sleep(chance.uniform(0, 0.005))
                        await proxy.cut()
                        await trio.sleep(chance.uniform(0, 0.01))
                        await proxy.release()
                    else:
                        proxy.losing = True
                        await trio.sleep(chance.uniform(0, 0.005))
                        await proxy.cut()

            async with trio.open_nursery() as nursery:
                for number in range(writing):
                    nursery.start_soon(write, b"w%d" % number)
                nursery.start_soon(disturb)
            last = await engine.transact((), [Put(b"wz", b"")])
            found = await history(direct, b"w", b"x", last, first)
            events = [event for change in found for event in change.events]
            assert sorted(acknowledged) == [tuple(event) for event in events[:-1]]


async def collect(engine: EtcdEngine, into: list[Change]) -> None:
    async for change in engine.watch(b"", END, 0):
        into.append(change)  # noqa: PERF401 - read while it grows


async def test_an_etcd_that_is_restarted_is_waited_for() -> None:
    with EtcdServer() as server:
        prefix = new_prefix()
        async with EtcdEngine(server.endpoints, prefix) as engine:
            revision = await engine.transact((), [Put(b"a", b"1")])
            watch = engine.watch(b"a", b"b", 0)
            assert (await anext(watch)).revision == revision
            for end in (server.members[0].terminate, server.kill9):
                await in_thread(end)
                results: list[int] = []

                async def write(results: list[int] = results, after: int = revision) -> None:
                    results.append(await engine.transact([(b"a", after)], [Put(b"a", b"2")]))

                async def read() -> None:
                    found = await engine.get(b"a")
                    assert found is not None

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(write)
                    nursery.start_soon(read)
                    nursery.start_soon(in_thread, server.start)
                assert (await anext(watch)).revision == results[0] > revision
                revision = results[0]


class TestCompaction:
    async def test_of_what_a_watch_asks_for_is_told(self, own_etcd: EtcdServer) -> None:
        async with EtcdEngine(own_etcd.endpoints, new_prefix()) as engine:
            first = await engine.transact((), [Put(b"a", b"1")])
            await engine.transact((), [Delete(b"a")])
            kept = await in_thread(own_etcd.compact)
            for after in (0, first, kept - 1):
                with pytest.raises(Compacted) as refused:
                    await anext(engine.watch(b"", END, after))
                assert refused.value.revision == kept
            revision, found = await engine.snapshot(b"a", b"b")
            assert (revision, found) == (kept, [])
            watch = engine.watch(b"a", b"b", revision)
            last = await engine.transact((), [Put(b"a", b"2")])
            assert await anext(watch) == Change(last, (Event(last, b"a", b"2"),))

    async def test_while_a_watch_is_cut_off_is_told_and_a_snapshot_fills_the_gap(
        self, own_etcd: EtcdServer
    ) -> None:
        async with proxied(own_etcd, new_prefix()) as (proxy, engine, direct):
            first = await direct.transact((), [Put(b"a", b"1")])
            watch = engine.watch(b"", END, first - 1)
            while (await anext(watch)).revision < first:
                pass
            proxy.refusing = True
            await proxy.cut()
            await direct.transact((), [Delete(b"a")])
            await direct.transact((), [Put(b"b", b"2")])
            kept = await in_thread(own_etcd.compact)
            proxy.refusing = False
            with pytest.raises(Compacted) as refused:
                await anext(watch)
            assert refused.value.revision == kept
            revision, found = await engine.snapshot(b"a", b"c")
            assert [one.key for one in found] == [b"b"]
            watch = engine.watch(b"a", b"c", revision)
            last = await direct.transact((), [Put(b"a", b"3")])
            assert (await anext(watch)).revision == last

    async def test_of_what_is_compacted_already_is_no_error(self, own_etcd: EtcdServer) -> None:
        async with EtcdEngine(own_etcd.endpoints, new_prefix()) as engine:
            revision = await engine.transact((), [Put(b"a", b"1")])
            await engine.admin.compact(revision)
            await engine.admin.compact(revision)


async def test_a_watch_that_was_lost_goes_on_without_gap_or_duplicate(etcd: EtcdServer) -> None:
    chance = seeded()
    async with proxied(etcd, new_prefix()) as (proxy, engine, direct):
        watched: list[Change] = []
        async with background() as nursery:
            nursery.start_soon(collect, engine, watched)
            for number in range(400):
                last = await direct.transact((), [Put(b"a", b"%d" % number), Put(b"b", b"")])
                if chance.random() < 0.1:
                    await proxy.cut()
            while not watched or watched[-1].revision < last:
                await trio.sleep(0.01)
        assert watched == await history(direct, b"", END, last)


async def test_answers_that_make_no_sense_are_asked_for_again(etcd: EtcdServer) -> None:
    async with proxied(etcd, new_prefix()) as (proxy, engine, direct):
        watch = engine.watch(b"a", b"b", engine.revision)
        proxy.harming = b"harmed"
        revision = await direct.transact((), [Put(b"a", b"harmed")])
        assert (await anext(watch)).revision == revision
        proxy.harming = b"harmed"
        found = await engine.get(b"a")
        assert found is not None and found.value == b"harmed"
        assert not proxy.harming


async def test_a_watch_leaves_a_member_that_is_silent_to_a_call(etcd: EtcdServer) -> None:
    """A session's renewal is one, every third of its lease."""
    async with proxied(etcd, new_prefix()) as (proxy, engine, direct):
        watch = engine.watch(b"a", b"b", engine.revision)
        with trio.move_on_after(0.1):
            await anext(watch)
        proxy.losing = True
        revision = await direct.transact((), [Put(b"a", b"")])
        with pytest.raises(NoAnswer):
            await engine.leases.renew(1, 0.2)
        proxy.losing = False
        assert (await anext(watch)).revision == revision


@pytest.mark.parametrize("reader", [False, True])
async def test_a_barrier_is_newer_than_what_was_forgotten(etcd: EtcdServer, reader: bool) -> None:
    async with EtcdEngine(etcd.endpoints, new_prefix(), reader=reader) as engine:
        applied = await engine.transact((), [Put(b"a", b"")])
        async with forgotten(engine):
            assert await engine.barrier() > applied


async def test_a_watch_may_be_cancelled_and_gone_on_with(etcd: EtcdServer) -> None:
    async with EtcdEngine(etcd.endpoints, new_prefix()) as engine:
        watch = engine.watch(b"a", b"b", 0)
        for number in range(20):
            with trio.move_on_after(0.001):
                await anext(watch)
                pytest.fail("nothing happened yet")
            revision = await engine.transact((), [Put(b"a", b"%d" % number)])
            assert (await anext(watch)).revision == revision


class TestLease:
    async def test_takes_its_keys_along_when_it_is_revoked(self, etcd: EtcdServer) -> None:
        async with EtcdEngine(etcd.endpoints, new_prefix()) as engine:
            lease = await engine.leases.grant(60)
            put = await engine.transact((), [Put(b"a", b"", lease), Put(b"b", b"")])
            await engine.leases.revoke(lease)
            await engine.leases.revoke(lease)
            assert await engine.get(b"a") is None
            assert await engine.get(b"b") is not None
            watch = engine.watch(b"a", b"b", put)
            assert (await anext(watch)).events[0].value is None
            with pytest.raises(LeaseEnded):
                await engine.transact((), [Put(b"a", b"", lease)])

    async def test_ends_by_itself_and_keeping_it_alive_tells(self, etcd: EtcdServer) -> None:
        async with EtcdEngine(etcd.endpoints, new_prefix()) as engine:
            lease = await engine.leases.grant(2)
            revision = await engine.transact((), [Put(b"a", b"", lease)])
            gone = await anext(engine.watch(b"a", b"b", revision))
            assert gone.events[0].value is None
            assert await engine.leases.renew(lease, math.inf) == 0

    async def test_is_kept_alive_over_lost_connections(self, etcd: EtcdServer) -> None:
        async with proxied(etcd, new_prefix()) as (proxy, engine, direct):
            lease = await engine.leases.grant(60)
            await engine.transact((), [Put(b"a", b"", lease)])
            for _ in range(5):
                assert await renewed(engine, lease) == 60
                await proxy.cut()
            await direct.leases.revoke(lease)
            assert await renewed(engine, lease) == 0


async def renewed(engine: EtcdEngine, lease: int) -> int:
    """The answer to a renewal, which is tried until there is one."""
    while True:
        try:
            return await engine.leases.renew(lease, 1.0)
        except NoAnswer:
            await trio.sleep(0.01)


class TestRefusal:
    """What is wrong is said at once, and what to do about it."""

    async def refusal(self, engine: EtcdEngine) -> OSError:
        with pytest.raises(OSError) as refused:
            async with engine:
                pass
        return refused.value

    async def test_of_an_address_where_nothing_listens(self) -> None:
        endpoints = [f"127.0.0.1:{free_port()}", f"localhost:{free_port()}"]
        error = await self.refusal(EtcdEngine(endpoints, b"/", timeout_s=0.5))
        assert error.errno == errno.ETIMEDOUT
        for said in (*endpoints, "refused", "running"):
            assert said in str(error)

    async def test_of_an_address_where_something_else_answers(self) -> None:
        async def greet(stream: trio.SocketStream) -> None:
            await stream.send_all(b"220 mail.example.com ESMTP service ready\r\n")
            await stream.receive_some()

        async with background() as nursery:
            endpoint = await served(greet, nursery)
            error = await self.refusal(EtcdEngine([endpoint], b"/", timeout_s=5))
            assert "HTTP/2" in str(error)

    async def test_of_a_peer_that_sends_nonsense(self) -> None:
        """Random frames, some of them nearly right: an error of ours, and nothing else."""
        chance = seeded()

        def nonsense() -> bytes:
            payload = chance.randbytes(chance.choice([0, 1, 4, 5, 8, 20, 200]))
            head = len(payload).to_bytes(3, "big") + bytes([chance.randrange(11)])
            stream = chance.choice([0, 1, 1, 1, 3, 2**31 - 1])
            flags = chance.choice([0, 1, 4, 5, 8, 13, 32, 37, chance.randrange(256)])
            return head + bytes([flags]) + stream.to_bytes(4, "big") + payload

        async def babble(stream: trio.SocketStream) -> None:
            settings = bytes(3) + b"\4\0" + bytes(4)
            with contextlib.suppress(trio.BrokenResourceError):
                await stream.send_all(settings)
                await stream.receive_some()
                for _ in range(chance.randrange(20)):
                    await stream.send_all(nonsense())
                if chance.random() < 0.3:
                    await stream.send_all(chance.randbytes(chance.randrange(100)))

        async with background() as nursery:
            endpoint = await served(babble, nursery)
            for _ in range(40):
                await self.refusal(EtcdEngine([endpoint], b"/", timeout_s=0.1))

    @pytest.mark.parametrize("address", ["", "ftp://host", "host:port", "http://", "host:1/path"])
    def test_of_an_address_that_is_none(self, address: str) -> None:
        with pytest.raises(ValueError):
            EtcdEngine([address], b"/")

    async def test_of_an_etcd_that_asks_for_a_password(self) -> None:
        with EtcdServer(auth=True) as server:
            error = await self.refusal(EtcdEngine(server.endpoints, b"/"))
            assert error.errno == errno.EACCES
            assert "user" in str(error)

    async def test_of_a_certificate_of_another_authority(
        self, tls_etcd: tuple[EtcdServer, Credentials], tmp_path: Path
    ) -> None:
        server, admin = tls_etcd
        make_ca(str(tmp_path), "of the same name")
        stranger = issue(str(tmp_path), "admin", "admin")
        ours: dict[str, Any] = {"ca": admin.ca, "cert": admin.cert, "key": admin.key}

        def engine_with(credentials: dict[str, Any]) -> EtcdEngine:
            direct = client.DirectClient(server.endpoints, **credentials)
            return EtcdEngine((), b"/", client=direct)

        async with engine_with(ours) as engine:
            large = random.randbytes(1_000_000)
            await engine.transact((), [Put(b"a", large)])
            found = await engine.get(b"a")
            assert found is not None
            assert found.value == large
        cases: list[tuple[dict[str, Any], str]] = [
            ({**ours, "ca": stranger.ca}, "certificate is not accepted"),
            ({**ours, "cert": stranger.cert, "key": stranger.key}, "TLS"),
            ({"ca": admin.ca}, "TLS"),
        ]
        for credentials, said in cases:
            error = await self.refusal(engine_with(credentials))
            assert said in str(error)
            assert error.errno == errno.EACCES
        error = await self.refusal(EtcdEngine(server.endpoints, b"/", timeout_s=1))
        assert "does it want TLS" in str(error)

    async def test_of_a_certificate_is_read_when_the_connection_is_closed_already(
        self, tls_etcd: tuple[EtcdServer, Credentials], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Late(socket.socket):
            """Sends after the handshake when the peer has answered, and closed the connection."""

            sends = 0

            def send(self, *args: Any) -> int:
                self.sends += 1
                if self.sends > 2:
                    select.select([self], [], [], 10)
                    raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
                return super().send(*args)

        connect = connection.connect

        async def connect_late(endpoint: connection.Endpoint) -> socket.socket:
            made = await connect(endpoint)
            late = Late(fileno=made.detach())
            late.setblocking(False)
            return late

        monkeypatch.setattr(client, "connect", connect_late)
        server, admin = tls_etcd
        direct = client.DirectClient(server.endpoints, ca=admin.ca)
        error = await self.refusal(EtcdEngine((), b"/", client=direct))
        assert "TLS failed" in str(error) and error.errno == errno.EACCES

    def test_of_certificate_files_that_are_none(self, tmp_path: Any) -> None:
        empty = tmp_path / "empty.pem"
        empty.write_text("")
        with pytest.raises(FileNotFoundError, match=r"missing\.pem"):
            client.DirectClient(["h:1"], ca=str(tmp_path / "missing.pem"))
        with pytest.raises(ValueError, match=r"empty\.pem"):
            client.DirectClient(["h:1"], ca=str(empty))
        with pytest.raises(ValueError, match="key"):
            client.DirectClient(["h:1"], cert=str(empty))


def test_a_full_etcd_refuses_what_it_did_not_apply_and_can_still_be_read() -> None:
    """Transactions that fill it are applied, and answered as if they were not."""

    async def main(server: EtcdServer) -> None:
        acknowledged: set[bytes] = set()

        async def write(key: bytes) -> None:
            with contextlib.suppress(NoSpace):
                await engine.transact((), [Put(key, bytes(300_000))])
                acknowledged.add(key)

        async with EtcdEngine(server.endpoints, b"/") as engine:
            # The transactions that follow wait for nothing here.
            await engine.transact((), [Put(b"start", b"")])
            async with trio.open_nursery() as nursery:
                for number in range(60):
                    nursery.start_soon(write, b"%02d" % number)
            assert {one.key for one in await engine.range(b"0", b":")} == acknowledged
            with pytest.raises(NoSpace, match="repair-etcd"):
                await engine.transact((), [Put(b"small", b"")])

    # Each transaction is written out by itself, so that etcd sees early that it is full.
    arguments = ("--quota-backend-bytes=8388608", "--backend-batch-limit=1")
    with EtcdServer(arguments=arguments) as server:
        trio.run(main, server)


async def test_members_that_accept_and_say_nothing_hold_nobody_up(
    etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_CONNECT_S", math.inf)
    monkeypatch.setattr(random, "randrange", lambda _: 0)  # which endpoint is the first
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as two,
    ):
        silent = [f"127.0.0.1:{server.getsockname()[1]}" for server in (one, two)]
        asking = client.DirectClient([*silent, etcd.endpoint])
        try:
            await asking.attempt(RANGE, pb.RangeRequest(key=b"k"), math.inf)
        finally:
            asking.close()


async def test_a_call_may_be_given_up_as_soon_as_it_has_connected(
    monkeypatch: pytest.MonkeyPatch, certificates: dict[str, Credentials]
) -> None:
    """The connection is closed before its task has run: trio chooses at random which one goes first."""
    scopes: list[trio.CancelScope] = []

    async def connect_and_give_up(to: connection.Endpoint) -> socket.socket:
        sock = await connection.connect(to)
        scopes[-1].cancel()
        return sock

    monkeypatch.setattr(client, "connect", connect_and_give_up)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        asking = client.DirectClient([endpoint], ca=certificates["mount"].ca)
        for _ in range(10):
            with trio.CancelScope() as scope:
                scopes.append(scope)
                await asking.attempt(RANGE, pb.RangeRequest(key=b"k"), math.inf)
            assert scope.cancelled_caught
            await trio.testing.wait_all_tasks_blocked()


async def test_a_call_goes_to_another_member_if_one_stands_still(
    etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "TRY_S", math.inf)
    monkeypatch.setattr(random, "randrange", lambda _: 0)  # which endpoint is the first
    steps: list[Callable[[EtcdEngine], Awaitable[object]]] = [
        lambda engine: engine.leases.grant(1),
        lambda engine: engine.transact([], [Put(b"k", b"")]),
    ]
    for step in steps:
        proxy = Proxy(etcd)
        async with background() as nursery:
            await proxy.serve(nursery)
            async with EtcdEngine([proxy.endpoint, etcd.endpoint], new_prefix()) as engine:
                engine.try_within(1)
                await engine.transact([], [Put(b"k", b"")])
                proxy.losing = True
                await step(engine)


async def test_closing_ends_what_waits(etcd: EtcdServer) -> None:
    async with proxied(etcd, new_prefix()) as (proxy, engine, _):
        await engine.transact((), [Put(b"a", b"")])
        ended: list[str] = []

        async def call(name: str, waits: Callable[[], Awaitable[object]]) -> None:
            with pytest.raises(trio.ClosedResourceError):
                await waits()
            ended.append(name)

        async def watch() -> None:
            async for _ in engine.watch(b"b", b"c", 0):
                pytest.fail("nothing happens here")
            ended.append("watch")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            nursery.start_soon(call, "get", lambda: engine.get(b"a"))
            nursery.start_soon(call, "put", lambda: engine.transact((), [Put(b"a", b"")]))
            await proxy.hold(b"/a")
            await engine.close()
        assert sorted(ended) == ["get", "put", "watch"]
