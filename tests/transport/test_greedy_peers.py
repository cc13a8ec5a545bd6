"""A peer that takes all that a store node has: connections, memory, threads. It has an address of its own,
as it would have a certificate of its own; others are served meanwhile."""

import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest
import test_strangers as strangers
import trio
import trio.testing
from harness.transport_place import MiB, Place, in_cluster, until
from test_strangers import EXTENT, TARGET, frame

from irdmafs.backend.etcd import etcd_pb2 as pb
from irdmafs.backend.etcd import rpc
from irdmafs.backend.node.readers import Readers
from irdmafs.backend.transport import Extent, door, messages, rights
from irdmafs.backend.transport.frames import BadMessage
from irdmafs.backend.transport.messages import Parcel
from irdmafs.backend.transport.tcp import data, wire
from irdmafs.backend.trust.security import Identity

GREEDY = "127.0.0.2"


@asynccontextmanager
async def greedy(
    cluster: Place, count: int, role: str = "mount"
) -> AsyncIterator[list[trio.SocketStream]]:
    """Control connections of one peer, which receives next to nothing."""
    async with AsyncExitStack() as stack:
        streams = []
        for _ in range(count):
            stream = await stack.enter_async_context(
                await strangers.introduced(cluster, GREEDY, role)
            )
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 256 << 10)
            streams.append(stream)
        yield streams


@pytest.mark.parametrize(
    "slow, greedy",
    [("127.0.0.1", ["127.0.0.2"] * 2), ("::ffff:127.0.0.1", ["fe80::1%eth0.1", "fe80::2"])],
)
async def test_strangers_of_one_address_or_network_take_no_place_of_another(
    monkeypatch: pytest.MonkeyPatch, slow: str, greedy: list[str]
) -> None:
    monkeypatch.setattr(door, "STRANGERS_MAX", 2)
    node, ended = door.Door(door.ServerFigures(), lambda serial: False), list[str]()

    async def come(address: str) -> None:
        with pytest.raises(BadMessage), node.stranger(address):
            await trio.sleep_forever()
        ended.append(address)

    async with trio.open_nursery() as nursery:
        for address in (slow, *greedy):
            nursery.start_soon(come, address)
            await trio.testing.wait_all_tasks_blocked()
        assert ended == greedy[:1]
        nursery.cancel_scope.cancel()


async def test_a_peer_with_most_of_the_connections_gives_them_up_for_others(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "MEMBERS_MAX", 8)
    async with in_cluster(memory, 1) as cluster, greedy(cluster, 12) as streams:
        await cluster.write(EXTENT, bytes(MiB))
        for stream in streams[:4]:
            assert await strangers.is_closed(stream)
        assert await cluster.read(1, EXTENT, 0, MiB) == bytes(MiB)


@pytest.mark.parametrize("limit", ["UNTAKEN_BYTES_MAX", "UNTAKEN_OF_ONE_MAX"])
async def test_who_takes_no_answers_costs_nobody_else_the_connection(
    memory: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(door, limit, 30 * MiB)
    async with in_cluster(memory, 1, timeout_s=60) as cluster, greedy(cluster, 12) as streams:
        await cluster.peers.device(1).put(Parcel(EXTENT, TARGET, bytes(MiB)))
        asked = frame(messages.Get([EXTENT] * 8, MiB))
        async with await strangers.introduced(cluster) as slow:
            await slow.send_all(asked)
            await until(lambda: len(cluster.nodes[1].listener.host.door.untaken) == 1)
            for stream in streams:
                await stream.send_all(asked)
            await until(lambda: cluster.nodes[1].listener.host.counters.connections < 14)
            left = 8 * MiB
            while left > 0:
                left -= len(await slow.receive_some(MiB)) or 1 << 60
            assert left > -MiB


async def test_no_more_is_read_in_etcd_than_a_reader_takes(memory: Path) -> None:
    client = Mock(attempt=AsyncMock(return_value=bytes(7 * MiB)))
    readers = Readers(client, b"a", Mock(), Mock(after=AsyncMock(return_value=bytes(7 * MiB))))
    keys = pb.RangeRequest(key=b"ab", range_end=b"b")
    create = pb.WatchCreateRequest(key=b"ab", range_end=b"b", start_revision=1)
    changes = pb.WatchRequest(create_request=create)
    asked = [
        messages.AskEtcd(rpc.RANGE.path, keys.SerializeToString()),
        messages.AskEtcd(rpc.WATCH.path, changes.SerializeToString()),
    ]
    lengths = list[int]()

    async def ask(peer: rights.Peer, request: messages.AskEtcd) -> messages.EtcdSaid:
        peer.identity = Identity("reader", "r", 7, "1")
        said = await readers.ask(peer, request)
        lengths.append(len(said.body))
        return said

    async with in_cluster(memory, 1, timeout_s=60) as cluster:
        cluster.nodes[1].listener.host.etcd = ask
        async with greedy(cluster, 12, "reader") as streams, trio.open_nursery() as nursery:
            for request, stream in zip(asked * 6, streams, strict=True):
                await stream.send_all(frame(request))
            await until(lambda: sum(lengths) >= 28 * MiB)
            await trio.sleep(0.3)
            assert sum(lengths) <= 42 * MiB
            for stream in streams:
                nursery.start_soon(strangers.is_closed, stream)
            await until(lambda: len(lengths) == 12)
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("kind", ["requests", "answers", "endless frames", "short ones"])
async def test_what_a_peer_has_outstanding_is_limited_in_all(memory: Path, kind: str) -> None:
    """Requests beyond the limit stay at the peer."""
    sent = 0

    async def send(stream: trio.SocketStream, data: bytes) -> None:
        nonlocal sent
        for start in range(0, len(data), 64 << 10):
            part = data[start : start + (64 << 10)]
            await stream.send_all(part)
            sent += len(part)

    async with in_cluster(memory, 1, timeout_s=60) as cluster, greedy(cluster, 12) as streams:
        host = cluster.nodes[1].listener.host
        await cluster.peers.device(1).put(Parcel(EXTENT, TARGET, bytes(MiB)))
        service = cluster.service(1)
        service.may_seal = trio.Event()
        puts = [messages.Parcel(Extent(6, n), TARGET, bytes(MiB)) for n in range(12)]
        data = {
            "requests": frame(messages.Put(puts)) * 4,
            "answers": frame(messages.Get([EXTENT] * 200, MiB)) * 20,
            "endless frames": frame(messages.Put(puts))[:-1],
            "short ones": frame(messages.Put([Parcel(EXTENT, TARGET, bytes(99_000))]))[:-1],
        }[kind]
        async with trio.open_nursery() as nursery:
            for stream in streams:
                nursery.start_soon(send, stream, data)
            before = -1
            while sent > before:
                before = sent
                await trio.sleep(0.5)
            assert host.door.outstanding[GREEDY].taken > 12 * 99_000
            served = host.counters.requests
            assert (served["put"] - 1) * 12 * MiB <= rights.OUTSTANDING_BYTES_MAX
            assert served["get"] * 8 * MiB <= rights.OUTSTANDING_BYTES_MAX
            # Besides, there is what the kernel keeps of each connection.
            assert sent < rights.OUTSTANDING_BYTES_MAX + 12 * 6 * MiB
            service.may_seal.set()
            await cluster.peers.device(1).put(Parcel(Extent(7, 0), TARGET, bytes(MiB)))
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("others", [(), ("127.0.0.3", "127.0.0.4")])
async def test_streams_leave_others_threads(
    memory: Path, monkeypatch: pytest.MonkeyPatch, others: tuple[str, ...]
) -> None:
    monkeypatch.setattr(data, "THREADS_MAX", 8)
    length = 16 * MiB
    async with in_cluster(memory, 1, timeout_s=10) as cluster, AsyncExitStack() as stack:
        await cluster.write(EXTENT, bytes(length))
        asked = wire.Header(wire.Op.READ, EXTENT, TARGET, 5, 0, 0, ((0, length),), "")
        for name in (GREEDY, *others) * 10:
            connection = await strangers.data_connection(cluster, name)
            stack.push_async_callback(connection.aclose)
            await connection.send(connection.framed(wire.encode(asked)))
        requests = cluster.nodes[1].listener.host.counters.requests
        await until(lambda: requests["read"] == 10 * (1 + len(others)))
        with trio.fail_after(5):
            assert await cluster.read(1, EXTENT, 0, length) == bytes(length)
