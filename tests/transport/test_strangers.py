"""What a store node puts up with: strangers, impostors and peers that talk nonsense.

None of them may crash it, make it grow, or keep others from being served; each leaves one line in the
log.
"""

import contextlib
import errno
import logging
import os
import random
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from harness.seeds import seeded
from harness.transport_place import TIMEOUT_S, MiB, Place, in_cluster, mounted, until

from irdmafs.backend.transport import Distrusted, Extent, Target, Unreachable, door, messages
from irdmafs.backend.transport.frames import HELLO_BYTES_MAX, decode_welcome
from irdmafs.backend.transport.messages import Parcel
from irdmafs.backend.transport.movers import all_movers
from irdmafs.backend.transport.operations import codec_for
from irdmafs.backend.transport.tcp import serving, wire
from irdmafs.backend.transport.tcp.authentication import CODE_BYTES, Authentication, connection_key
from irdmafs.backend.transport.verbs import messages as verbs
from irdmafs.backend.transport.verbs.messages import QueueEnd
from irdmafs.backend.trust.security import Credentials

DOOR = "irdmafs.backend.transport.door"
TARGET = Target(1, 1, ())
CODEC = codec_for(all_movers())
Begin = Callable[[Place], Awaitable[trio.SocketStream]]
EXTENT = Extent(5 << 24 | 1, 0)
END = QueueEnd(bytes(16), 0, 5, 6, 1024, 16)
REQUESTS: dict[type[messages.Message], messages.Request] = {
    type(request): request
    for request in (
        messages.Ping(),
        messages.Put([messages.Parcel(EXTENT, TARGET, b"data")]),
        messages.Get([EXTENT], 100),
        messages.Adopt(EXTENT, TARGET, f"{EXTENT.content:x}"),
        messages.Abort(EXTENT.content),
        messages.Suspect(1, 2),
        messages.Status(),
        wire.Admit(),
        verbs.Rails(),
        messages.Doubt(EXTENT),
        messages.Digest(EXTENT),
        messages.Share(EXTENT, TARGET, Extent(5 << 24 | 2, 0), 10),
        messages.Scrub(),
        messages.AskEtcd("/etcdserverpb.KV/Range", b""),
        verbs.Attach(END, 0, "rxe0", bytes(16)),
        verbs.Expose(EXTENT, 0, 10, 0),
        verbs.Reserve(EXTENT, TARGET, 10, 10, 2, 0),
    )
}


def writing(total: int, *ranges: tuple[int, int]) -> wire.Header:
    """The header of a stream that brings all there is of an extent."""
    comes = sum(length for _, length in ranges)
    return wire.Header(wire.Op.WRITE, Extent(3, 0), TARGET, 5, total, comes, ranges, "")


def hello(cluster: Place, **changes: Any) -> bytes:
    usual = messages.Hello(messages.VERSION, "mount", "odd", session=0, wanted=1)
    return frame(msgspec.structs.replace(usual, **changes))


def frame(message: Any) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "big") + body


async def connect(
    cluster: Place, port: str = "control", here: str = "127.0.0.1"
) -> trio.SocketStream:
    """From an address of this machine to a port of node 1: "control", or a mover's."""
    listener = cluster.nodes[1].listener
    number = listener.control_port if port == "control" else listener.ports[port]
    return await trio.open_tcp_stream("127.0.0.1", number, local_address=here)


async def introduced(
    cluster: Place, here: str = "127.0.0.1", role: str = "mount"
) -> trio.SocketStream:
    """A control connection that has been accepted."""
    stream = await connect(cluster, here=here)
    await stream.send_all(hello(cluster, role=role))
    welcome = await receive_frame(stream)
    assert isinstance(decode_welcome(welcome), messages.Welcome)
    return stream


async def receive(stream: trio.SocketStream, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = await stream.receive_some(count - len(data))
        assert more, "the node closed the connection"
        data += more
    return data


async def receive_frame(stream: trio.SocketStream) -> bytes:
    return await receive(stream, int.from_bytes(await receive(stream, 4), "big"))


async def is_closed(stream: trio.SocketStream) -> bool:
    """Whether the node closes the connection, whatever it says before."""
    with trio.move_on_after(30):
        with contextlib.suppress(trio.BrokenResourceError):
            while await stream.receive_some(65536):
                pass
        return True
    return False


class DataConnection:
    """A data connection whose other end is a test, with the control connection that its rights hang on."""

    def __init__(
        self, control: trio.abc.Stream, stream: trio.SocketStream, admitted: wire.Admitted
    ) -> None:
        self.control = control
        self.stream = stream
        self.admitted = admitted
        self.authentication = Authentication(connection_key(admitted.key, 1), listens=False)

    def signed(self, message: bytes) -> bytes:
        return message + self.authentication.sign(message)

    def preamble(self) -> bytes:
        return self.signed(wire.PREAMBLE.pack(self.admitted.peer, 1))

    def framed(self, body: bytes) -> bytes:
        return len(body).to_bytes(4, "big") + self.signed(body)

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def reply(self) -> wire.Reply:
        """The next one that is not only a sign of life."""
        while True:
            message = await receive_frame(self.stream)
            self.authentication.check(message, await receive(self.stream, CODE_BYTES))
            reply = wire.decode_reply(message)
            if reply.kind is not wire.ReplyKind.WORKING:
                return reply

    async def aclose(self) -> None:
        await self.stream.aclose()
        await self.control.aclose()


async def with_key(cluster: Place, here: str = "127.0.0.1") -> DataConnection:
    """One in which nothing was said yet."""
    control = await introduced(cluster, here)
    await control.send_all(frame(wire.Admit()))
    answer = CODEC.decode_answer(await receive_frame(control))
    assert isinstance(answer, wire.Admitted)
    stream = await connect(cluster, "tcp", here)
    return DataConnection(control, stream, answer)


async def data_connection(cluster: Place, here: str = "127.0.0.1") -> DataConnection:
    connection = await with_key(cluster, here)
    await connection.send(connection.preamble())
    return connection


def warnings(caplog: pytest.LogCaptureFixture, name: str = DOOR) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == name and record.levelno >= logging.WARNING
    ]


class Usage:
    """What this process uses, which the node is a part of."""

    def __init__(self) -> None:
        self.files = len(os.listdir("/proc/self/fd"))
        self.threads = threading.active_count()
        with open("/proc/self/statm") as file:
            self.resident_bytes = int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


async def unchanged(cluster: Place, before: Usage) -> None:
    """The node still serves, and nothing has grown."""
    await until(lambda: not cluster.nodes[1].listener.host.door.strangers)
    await cluster.peers.device(1).put(Parcel(Extent(1 << 40, 0), Target(1, 1, ()), b"works"))
    await until(lambda: len(os.listdir("/proc/self/fd")) <= before.files + 4)
    after = Usage()
    assert after.threads <= before.threads + 40
    assert after.resident_bytes < before.resident_bytes + 48 * MiB
    assert not cluster.service(1).leftovers


# -- strangers -----------------------------------------------------------------------------------


async def lose_connection(stream: trio.SocketStream, nonsense: bytes) -> None:
    """Send something for which the other end closes the connection."""
    with contextlib.suppress(trio.BrokenResourceError):
        await stream.send_all(nonsense)
        await stream.send_eof()
    assert await is_closed(stream)
    await stream.aclose()


@pytest.mark.parametrize("port", ["control", "tcp"])
@pytest.mark.parametrize("secured", [False, True])
async def test_nonsense_from_strangers_is_logged_once_each_and_does_no_harm(
    memory: Path,
    certified: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    port: str,
    secured: bool,
) -> None:
    chooser = seeded()
    tries = 150
    options = certified if secured else {}
    async with in_cluster(memory, 1, **options) as cluster:
        await cluster.peers.ping(1)
        before = Usage()
        for _ in range(tries):
            stream = await connect(cluster, port)
            # Longer than a preamble, so that it does not look like one that is not complete.
            await lose_connection(stream, chooser.randbytes(chooser.randrange(64, 6000)))
        await unchanged(cluster, before)
        assert tries / 2 < len(warnings(caplog)) <= tries
        assert cluster.nodes[1].listener.host.counters.rejected_peers == len(warnings(caplog))


@pytest.mark.parametrize(
    ("begin", "length", "told"),
    [
        (connect, HELLO_BYTES_MAX + 1, "a frame of 4097 bytes, 4096 are allowed"),
        (introduced, (1 << 32) - 1, "a frame of 4294967295 bytes"),
    ],
    ids=["stranger", "member"],
)
async def test_a_long_frame_is_refused_before_it_is_read(
    memory: Path, caplog: pytest.LogCaptureFixture, begin: Begin, length: int, told: str
) -> None:
    async with in_cluster(memory, 1) as cluster:
        stream = await begin(cluster)
        await stream.send_all(length.to_bytes(4, "big"))
        assert await is_closed(stream)
        await stream.aclose()
        assert told in warnings(caplog)[0]


async def silent_strangers(cluster: Place, port: str, count: int) -> list[trio.SocketStream]:
    """Return connections that say one byte and no more."""
    strangers = [await connect(cluster, port) for _ in range(count)]
    for stream in strangers:
        await stream.send_all(b"\0")
    return strangers


@pytest.mark.parametrize("port", ["control", "tcp"])
async def test_slow_strangers_do_not_keep_members_out(
    memory: Path, monkeypatch: pytest.MonkeyPatch, port: str
) -> None:
    # Nobody waits until they are cut off.
    monkeypatch.setattr(door, "HANDSHAKE_S", 60.0)
    async with in_cluster(memory, 1, timeout_s=10.0) as cluster:
        strangers = await silent_strangers(cluster, port, door.STRANGERS_MAX + 50)
        await cluster.write(Extent(1, 0), bytes(20 * MiB))
        assert 0 < len(cluster.nodes[1].listener.host.door.strangers) <= door.STRANGERS_MAX
        # The first ones had to go for those who came later.
        for stream in strangers[: -door.STRANGERS_MAX]:
            assert await is_closed(stream)
        for stream in strangers:
            await stream.aclose()


@pytest.mark.parametrize("port", ["control", "tcp"])
async def test_who_does_not_say_who_it_is_is_cut_off(
    memory: Path, monkeypatch: pytest.MonkeyPatch, port: str
) -> None:
    monkeypatch.setattr(door, "HANDSHAKE_S", 0.5)
    async with in_cluster(memory, 1) as cluster:
        for stream in await silent_strangers(cluster, port, door.STRANGERS_MAX):
            assert await is_closed(stream)
            await stream.aclose()


@pytest.mark.parametrize(
    "changes", [{"version": 99}, {"version": messages.VERSION - 1}, {"role": "king"}, {"wanted": 2}]
)
async def test_who_does_not_fit_is_told_why(
    memory: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any]
) -> None:
    async with in_cluster(memory, 1) as cluster:
        stream = await connect(cluster)
        await stream.send_all(hello(cluster, **changes))
        refused = decode_welcome(await receive_frame(stream))
        assert isinstance(refused, messages.Refused)
        assert refused.text in warnings(caplog)[0]
        if "version" in changes:
            assert refused.for_good
            assert "have the same version of irdmafs on both hosts" in refused.text
        assert await is_closed(stream)
        await stream.aclose()


# -- impostors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["foreign", "nobody", "plain node"])
async def test_those_who_will_never_be_let_in_are_told_so(
    memory: Path,
    certificates: dict[str, Credentials],
    certified: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    who: str,
) -> None:
    """Each side says which side is configured how; and waiting is of no use."""
    node, theirs = certificates["node"], certificates.get(who)
    if who == "plain node":
        theirs = certificates["mount"]
    options = certified if who != "plain node" else {}
    async with in_cluster(memory, 1, **options):
        async with mounted(memory, timeout_s=TIMEOUT_S, credentials=theirs) as peers:
            for _ in range(2):
                with pytest.raises(Distrusted) as refused:
                    await peers.ping(1)
            assert refused.value.errno == errno.EACCES
            await peers.check([1])
            [line] = peers.refusals()
            assert str(refused.value).partition(": ")[2] in line
        await until(lambda: len(warnings(caplog)) >= 1)
        ours = warnings(caplog)[0]
        told = [r.getMessage() for r in caplog.records if r.name.endswith(".link")]
        assert len(set(told)) == len(told) == 1, told
        if who == "foreign":
            assert theirs is not None
            assert "not of this cluster's CA" in line
            assert f"we trust {theirs.ca}" in line
            assert "broke off: it may not trust our certificate" in ours
            assert f"we show {node.cert} and trust {node.ca}" in ours
        elif who == "nobody":
            assert "refuses: it speaks no TLS, and this node has credentials" in line
            assert "it speaks no TLS, and this node has credentials" in ours
        else:
            assert "the peer speaks no TLS" in line
            assert "it speaks TLS, and this node has no credentials" in ours


@pytest.mark.parametrize("what", ["guessed", "seen", "used", "gone"])
async def test_a_data_connection_that_no_peer_opens_is_refused(
    memory: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    async with in_cluster(memory, 1) as cluster:
        connection = await with_key(cluster)
        guests = cluster.nodes[1].serving(serving.TcpServing).guests
        preamble = connection.preamble()
        if what == "guessed":
            preamble = connection.signed(wire.PREAMBLE.pack(1 << 40, 1))
        elif what == "seen":
            # A stranger that sees the numbers pass does not see the key.
            preamble = preamble[:-1] + bytes([preamble[-1] ^ 1])
        elif what == "gone":
            await connection.control.aclose()
            await until(lambda: not guests)
        await connection.send(preamble)
        if what == "used":
            await until(lambda: any(guest.channels for guest in guests.values()))
            await connection.stream.aclose()
            connection.stream = await connect(cluster, "tcp")
            await connection.send(preamble)
        assert await is_closed(connection.stream)
        why = {"seen": "without the peer's key", "used": "it repeats"}.get(what, "not connected")
        assert why in warnings(caplog)[0]
        await connection.aclose()


async def test_each_number_opens_one_data_connection(memory: Path) -> None:
    async with in_cluster(memory, 1) as cluster, await introduced(cluster):
        [guest] = cluster.nodes[1].serving(serving.TcpServing).guests.values()
        numbers = [*range(9 + serving.NUMBERS_REMEMBERED, 9, -1), 5]
        assert all(map(guest.use, numbers))
        assert not any(map(guest.use, [*numbers, 4]))


async def test_a_node_that_encrypts_data_refuses_connections_that_do_not(
    memory: Path, certified: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    options = certified | {"encrypt_data": True}
    async with in_cluster(memory, 1, **options) as cluster:
        async with mounted(memory, timeout_s=TIMEOUT_S, **options["mount"]) as peers:
            with pytest.raises(Unreachable):
                await Place(memory, peers, cluster.nodes).write(Extent(1, 0), b"secret")
        assert "not encrypted" in warnings(caplog)[0]
        await cluster.write(Extent(1, 0), b"secret")


# -- members that talk nonsense ------------------------------------------------------------------


def mutated(chooser: random.Random, data: bytes) -> bytes:
    """Some bytes of it changed, removed or put in."""
    changed = bytearray(data)
    for _ in range(chooser.randrange(1, 6)):
        place = chooser.randrange(len(changed))
        match chooser.randrange(4):
            case 0:
                changed[place] = chooser.randrange(256)
            case 1:
                changed[place:place] = chooser.randbytes(chooser.randrange(1, 9))
            case 2:
                del changed[place : place + chooser.randrange(1, 9)]
            case 3:
                changed[place] ^= 1 << chooser.randrange(8)
        if not changed:
            changed = bytearray(b"\0")
    return bytes(changed)


async def test_nonsense_from_a_member_costs_it_the_connection_and_nobody_else(
    memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chooser = seeded()
    said = [*REQUESTS.values(), messages.Renewed(9), verbs.Release(1), verbs.Detach(3)]
    async with in_cluster(memory, 1) as cluster:
        await cluster.peers.ping(1)
        before = Usage()
        for _ in range(300):
            body = mutated(chooser, msgspec.msgpack.encode(chooser.choice(said)))
            frame = len(body).to_bytes(4, "big") + body
            await lose_connection(await introduced(cluster), frame)
        assert not [record for record in caplog.records if record.exc_info]
        await unchanged(cluster, before)
        assert len(warnings(caplog)) <= 300


@pytest.mark.long
async def test_nonsense_on_a_data_connection_costs_it_the_connection_and_nobody_else(
    memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chooser = seeded()
    headers = [
        wire.encode(writing(1000, (0, 1000))._replace(op=op, trace="trace")) for op in wire.Op
    ]
    async with in_cluster(memory, 1) as cluster:
        await cluster.peers.ping(1)
        cluster.service(1).limit_bytes = MiB
        before = Usage()
        for number in range(200):
            nonsense = (
                chooser.randbytes(len(headers[0]))
                if number % 2
                else mutated(chooser, chooser.choice(headers))
            )
            connection = await data_connection(cluster)
            with contextlib.suppress(trio.BrokenResourceError):
                framed = connection.framed(nonsense)
                await connection.send(framed + chooser.randbytes(chooser.randrange(2000)))
                await connection.stream.send_eof()
            # What makes sense by chance may be waited for, as long as its sender stays.
            with trio.move_on_after(0.05):
                await is_closed(connection.stream)
            await connection.aclose()
        assert not [record for record in caplog.records if record.exc_info]
        await until(lambda: not cluster.service(1).leftovers)
        await unchanged(cluster, before)


async def test_streams_that_overlap_store_nothing(
    memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with in_cluster(memory, 1) as cluster:
        async with contextlib.AsyncExitStack() as opened:
            for _ in range(2):
                stream = await data_connection(cluster)
                opened.push_async_callback(stream.aclose)
                header = writing(2000, (0, 1000))._replace(comes=2000)
                await stream.send(stream.framed(wire.encode(header)) + bytes(500))
            await until(lambda: bool(warnings(caplog)))
            assert "two streams bring the same bytes" in warnings(caplog)[0]
        await until(lambda: not cluster.service(1).leftovers)
        assert not cluster.service(1).sealed


@pytest.mark.parametrize(
    "ranges",
    [
        ((0, 600), (500, 500)),
        ((500, 500), (0, 600)),
        ((0, 1000), (1000, 0), (1000, 100)),
        ((0, 1000), (2000, 100)),
        ((0, 1000), (1 << 62, 100)),
        ((0, 1000), (1500, 101)),
    ],
)
async def test_a_table_of_ranges_that_makes_no_sense_costs_the_connection(
    memory: Path, caplog: pytest.LogCaptureFixture, ranges: tuple[tuple[int, int], ...]
) -> None:
    async with in_cluster(memory, 1) as cluster:
        stream = await data_connection(cluster)
        # All but the ranges is right: 1,100 bytes of 2,000.
        header = writing(2000, (0, 1000), (1500, 100))._replace(ranges=ranges)
        await stream.send(stream.framed(wire.encode(header)) + bytes(1100))
        assert await is_closed(stream.stream)
        await stream.aclose()
        assert "the ranges of a stream" in warnings(caplog)[0]
        assert not cluster.service(1).created


async def test_what_a_writer_had_sent_before_it_died_is_dropped_on_all_nodes(memory: Path) -> None:
    async with in_cluster(memory) as cluster:
        stream = await data_connection(cluster)
        header = writing(8 * MiB, (0, 8 * MiB))._replace(target=Target(1, 1, (2, 3)))
        await stream.send(stream.framed(wire.encode(header)) + bytes(4 * MiB))
        await until(lambda: bool(cluster.service(3).leftovers))
        await stream.aclose()
        services = [node.service for node in cluster.nodes.values()]
        await until(lambda: not any(service.leftovers for service in services))
        assert not any(service.sealed for service in services)


async def test_a_peer_that_takes_no_answers_is_cut_off(memory: Path) -> None:
    async with in_cluster(memory, 1, timeout_s=0.5) as cluster:
        data = bytes(MiB)
        await cluster.peers.device(1).put(Parcel(Extent(1, 0), Target(1, 1, ()), data))
        stream = await introduced(cluster)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        asked = messages.Get([Extent(1, 0)] * 8, MiB)
        await stream.send_all(frame(asked) * 8)
        await until(lambda: cluster.nodes[1].listener.host.counters.connections == 1)
        await stream.aclose()
