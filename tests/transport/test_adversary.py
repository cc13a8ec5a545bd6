"""Somebody on the way between a mount and a store node, and peers that ask for what is not theirs.

Whoever can write into a connection of a cluster with certificates gets nothing read, stores nothing,
destroys nothing, and makes nobody wait: the connection is given up, with one line in the log, and another
one is used.
"""

import errno
import gc
import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import test_strangers as strangers
import trio
from harness.closing import descriptor
from harness.transport_place import TIMEOUT_S, MiB, Place, in_cluster, mounted, random_bytes, until
from test_strangers import EXTENT, REQUESTS, TARGET

from irdmafs.backend.model.records import NodeAddress
from irdmafs.backend.transport import Extent, FileRange, Unreachable, messages
from irdmafs.backend.transport.frames import FRAME_BYTES_MAX, BadMessage, Frames, decode_welcome
from irdmafs.backend.transport.messages import Parcel
from irdmafs.backend.transport.movers import all_movers
from irdmafs.backend.transport.peers import Peers, open_peers
from irdmafs.backend.transport.rights import ROLES, Scope, may
from irdmafs.backend.transport.tcp import data, wire
from irdmafs.backend.transport.tcp.authentication import CODE_BYTES
from irdmafs.backend.trust.security import Credentials

TO_NODE, TO_MOUNT = 0, 1


class Passage:
    """One connection that goes through the relay."""

    def __init__(self, mount: trio.SocketStream, node: trio.SocketStream) -> None:
        self.ends = (node, mount)
        # All that passed, by direction.
        self.passed = (bytearray(), bytearray())

    async def speak(self, direction: int, data: bytes) -> None:
        """Say something that the other end did not. Only somebody on the way can do that."""
        await self.ends[direction].send_all(data)


class Relay:
    """On the way to one port of a node. `change(direction, passage, data)` gives what is handed on."""

    def __init__(self, port: int) -> None:
        self._to = port
        self.port = 0
        self.passages: list[Passage] = []
        self.change: Callable[[int, Passage, bytes], bytes] = lambda direction, passage, data: data

    async def serve(self, task_status: trio.TaskStatus[None]) -> None:
        async with trio.open_nursery() as nursery:
            [listener] = await nursery.start(
                lambda task_status: trio.serve_tcp(
                    self._pass, 0, host="127.0.0.1", task_status=task_status
                )
            )
            self.port = listener.socket.getsockname()[1]
            task_status.started()

    async def _pass(self, mount: trio.SocketStream) -> None:
        node = await trio.open_tcp_stream("127.0.0.1", self._to)
        passage = Passage(mount, node)
        self.passages.append(passage)
        async with mount, node, trio.open_nursery() as nursery:
            for direction, source in ((TO_NODE, mount), (TO_MOUNT, node)):
                nursery.start_soon(self._hand_on, passage, direction, source, nursery.cancel_scope)

    async def _hand_on(
        self, passage: Passage, direction: int, source: trio.SocketStream, end: trio.CancelScope
    ) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async for received in source:
                passage.passed[direction].extend(received)
                changed = self.change(direction, passage, bytes(received))
                if changed:
                    await passage.ends[direction].send_all(changed)
        end.cancel()


@asynccontextmanager
async def on_the_way(
    cluster: Place, credentials: Credentials, kind: str
) -> AsyncIterator[tuple[Relay, Peers]]:
    """A relay before node 1's port of that kind, and a mount that knows no other way."""
    listener = cluster.nodes[1].listener
    relay = Relay(listener.ports["tcp"] if kind == "data" else listener.control_port)

    def resolve(node: int) -> NodeAddress | None:
        found = cluster.peers.resolve(node)
        if found is None or node != 1:
            return found
        return msgspec.structs.replace(found, **{f"{kind}_port": relay.port})

    async with trio.open_nursery() as nursery:
        await nursery.start(relay.serve)
        async with open_peers(
            resolve,
            all_movers(streams=2),
            name="victim",
            role="mount",
            credentials=credentials,
            timeout_s=TIMEOUT_S,
        ) as peers:
            yield relay, peers
        nursery.cancel_scope.cancel()


Attacked = Callable[..., AbstractAsyncContextManager[tuple[Place, Relay]]]


@pytest.fixture
def attacked(
    memory: Path, certificates: dict[str, Credentials], certified: dict[str, Any]
) -> Attacked:
    """attacked(count=1, kind="data"): so many nodes, and a relay before that port of the first one."""

    @asynccontextmanager
    async def make(count: int = 1, kind: str = "data") -> AsyncIterator[tuple[Place, Relay]]:
        async with (
            in_cluster(memory, count, **certified) as cluster,
            on_the_way(cluster, certificates["mount"], kind) as (relay, peers),
        ):
            with trio.fail_after(60):
                yield Place(memory, peers, cluster.nodes), relay

    return make


def header(op: wire.Op, extent: Extent, length: int) -> bytes:
    return strangers.frame(wire.Header(op, extent, TARGET, 7, length, length, ((0, length),), ""))


def end_of_header(passed: bytearray, start: int = 0) -> int:
    """Where the header that begins there, and its code, end in what passed."""
    return start + 4 + int.from_bytes(passed[start : start + 4], "big") + CODE_BYTES


# -- into a data connection ----------------------------------------------------------------------


@pytest.mark.parametrize("op", wire.Op)
@pytest.mark.parametrize(
    "code", [b"", bytes(16), None], ids=["no code", "a wrong code", "repeated"]
)
async def test_a_request_of_others_in_an_idle_connection_is_not_served(
    attacked: Attacked, caplog: pytest.LogCaptureFixture, op: wire.Op, code: bytes | None
) -> None:
    """It is forged, or one that passed before."""
    content = random_bytes(100_000)
    async with attacked() as (cluster, relay):
        await cluster.write(Extent(1, 0), content)
        [passage] = relay.passages
        written = len(passage.passed[TO_NODE])
        await cluster.read(1, Extent(1, 0), 0, 300)
        passed, before = passage.passed[TO_NODE], len(passage.passed[TO_MOUNT])
        if code is not None:
            said = header(op, Extent(1, 0), 1) + code + b"!" * (17 - len(code))
        elif op is wire.Op.READ:
            said = bytes(passed[written:])
            assert len(said) == end_of_header(passed, written) - written
        else:
            said = bytes(passed[wire.PREAMBLE_BYTES : written])
        await passage.speak(TO_NODE, said)
        await until(lambda: len(strangers.warnings(caplog)) == 1)
        assert "not sent by the other end" in strangers.warnings(caplog)[0]
        assert cluster.nodes[1].listener.host.counters.rejected_peers == 1
        assert len(passage.passed[TO_MOUNT]) == before
        # The mount takes another connection.
        assert await cluster.read(1, Extent(1, 0), 0, len(content)) == content
        assert cluster.service(1).sealed == [Extent(1, 0)]


async def test_a_request_that_never_ends_is_given_up_and_the_mount_goes_on(
    attacked: Attacked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "_HEADER_S", 1.0)
    async with attacked() as (cluster, relay):
        await cluster.write(Extent(1, 0), b"content")
        connections = cluster.nodes[1].listener.host.counters.connections
        await relay.passages[0].speak(TO_NODE, header(wire.Op.READ, Extent(1, 0), 7)[:20])
        await until(lambda: cluster.nodes[1].listener.host.counters.connections < connections)
        assert await cluster.read(1, Extent(1, 0), 0, 7) == b"content"


def flip(relay: Relay, direction: int, start: int, place: int) -> None:
    """Have a bit of one byte changed, of those that follow the message which begins at `start`."""

    def change(way: int, passage: Passage, data: bytes) -> bytes:
        passed = passage.passed[direction]
        at = place - (len(passed) - end_of_header(passed, start) - len(data))
        if way != direction or not 0 <= at < len(data):
            return data
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    relay.change = change


# Offsets in the bytes, and in the code that follows them.
PLACES = (0, 1 * MiB, 3 * MiB - 1, 3 * MiB, 3 * MiB + CODE_BYTES - 1)


@pytest.mark.parametrize("place", PLACES)
async def test_bytes_that_were_changed_on_the_way_to_a_node_are_stored_nowhere(
    attacked: Attacked, caplog: pytest.LogCaptureFixture, place: int
) -> None:
    content = random_bytes(3 * MiB)
    async with attacked(2) as (cluster, relay):
        flip(relay, TO_NODE, wire.PREAMBLE_BYTES, place)
        with pytest.raises(Unreachable):
            await cluster.write(Extent(1, 0), content, 2)
        await until(lambda: not any(cluster.service(node).leftovers for node in (1, 2)))
        assert not cluster.service(1).sealed + cluster.service(2).sealed
        assert len(strangers.warnings(caplog)) == 1
        relay.change = lambda direction, passage, data: data
        await cluster.write(Extent(1, 0), content, 2)
        assert cluster.have(Extent(1, 0), content) == [1, 2]


@pytest.mark.parametrize("place", PLACES)
async def test_bytes_that_were_changed_on_the_way_from_a_node_are_not_used(
    attacked: Attacked, caplog: pytest.LogCaptureFixture, place: int
) -> None:
    content, landed = random_bytes(3 * MiB), list[int]()
    async with attacked() as (cluster, relay):
        await cluster.write(Extent(1, 0), content)
        flip(relay, TO_MOUNT, len(relay.passages[0].passed[TO_MOUNT]), place)
        with descriptor(os.memfd_create("target")) as target, pytest.raises(Unreachable):
            whole = FileRange(target, 0, len(content))
            read = cluster.peers.device(1).read
            await read(Extent(1, 0), 0, whole, lambda *piece: landed.append(piece[1]))
        assert sum(landed) < len(content)
        assert len(strangers.warnings(caplog, "irdmafs.backend.transport.tcp.way")) == 1
        relay.change = lambda direction, passage, data: data
        assert await cluster.read(1, Extent(1, 0), 0, len(content)) == content


async def test_a_forged_answer_acknowledges_nothing(attacked: Attacked) -> None:
    """The bytes never arrive, and somebody says that they did."""
    async with attacked() as (cluster, relay):
        answer = strangers.frame(wire.Reply(wire.ReplyKind.OK)) + bytes(16)
        answered: set[Passage] = set()

        def change(direction: int, passage: Passage, data: bytes) -> bytes:
            if direction == TO_MOUNT:
                return data
            if passage not in answered and len(passage.passed[TO_NODE]) > 1 * MiB:
                answered.add(passage)
                nursery.start_soon(passage.speak, TO_MOUNT, answer)
            return b"" if passage in answered else data

        relay.change = change
        async with trio.open_nursery() as nursery:
            with pytest.raises(Unreachable):
                await cluster.write(Extent(1, 0), random_bytes(3 * MiB))
        assert answered
        assert not cluster.service(1).sealed


@pytest.mark.parametrize("direction", [TO_NODE, TO_MOUNT])
@pytest.mark.parametrize("what", ["injected", "repeated", "changed"])
async def test_others_words_end_a_control_connection(
    attacked: Attacked, direction: int, what: str
) -> None:
    async with attacked(kind="control") as (cluster, relay):
        await cluster.peers.device(1).put(Parcel(Extent(1, 0), TARGET, b"content"))
        [passage] = relay.passages
        control = cluster.peers.device(1).link._control
        assert control is not None
        if what == "changed":
            relay.change = lambda way, passage, data: (
                data[:-1] + bytes([data[-1] ^ 1]) if way == direction else data
            )
            with pytest.raises(Unreachable):
                await cluster.peers.ping(1)
            relay.change = lambda way, passage, data: data
        elif what == "repeated":
            await passage.speak(direction, bytes(passage.passed[direction]))
        else:
            await passage.speak(direction, strangers.frame(messages.Abort(1)))
        # A request that is sent before both ends know that the connection is over fails with it.
        await until(lambda: not control.is_open)
        await until(lambda: cluster.nodes[1].listener.host.counters.connections == 0)
        assert await cluster.peers.device(1).get([Extent(1, 0)], 100) == [b"content"]
        assert not cluster.service(1).aborted


@pytest.mark.parametrize(("code", "node"), [(-1, 1), (1 << 12, 1), (1 << 40, 1), (5, -1)])
def test_an_error_that_no_system_has_is_no_answer(code: int, node: int) -> None:
    failed = msgspec.msgpack.encode(messages.Failed(code, node, ""))
    reply = wire.encode(wire.Reply(wire.ReplyKind.FAILED, code, node))
    for decode, said in ((strangers.CODEC.decode_answer, failed), (wire.decode_reply, reply)):
        with pytest.raises(BadMessage):
            decode(said)


# -- peers with a certificate --------------------------------------------------------------------


async def asked(cluster: Place, role: str, request: messages.Request, **more: Any) -> Any:
    """The node's answer to a peer of a role."""
    stream = await strangers.connect(cluster)
    await stream.send_all(strangers.hello(cluster, role=role, **more) + strangers.frame(request))
    decode_welcome(await strangers.receive_frame(stream))
    answer = strangers.CODEC.decode_answer(await strangers.receive_frame(stream))
    await stream.aclose()
    return answer


def is_denied(answer: Any) -> bool:
    return isinstance(answer, messages.Failed) and answer.code == errno.EACCES


def test_every_request_is_tried() -> None:
    assert set(REQUESTS) == {
        kind for kind in strangers.CODEC.rights if issubclass(kind, messages.Request)
    }


@pytest.mark.parametrize("role", ROLES)
async def test_a_role_is_refused_what_it_may_not_ask_for(memory: Path, role: str) -> None:
    async with in_cluster(memory, 1) as cluster:
        Path(cluster.service(1).directory, f"incoming/{EXTENT.content:x}").write_bytes(b"copy")
        for kind, request in REQUESTS.items():
            answer = await asked(cluster, role, request, session=5)
            assert is_denied(answer) == (may(strangers.CODEC.rights, role, kind) is Scope.NONE), (
                role,
                kind,
                answer,
            )
        service = cluster.service(1)
        if role != "mount":
            assert service.aborted == []
            assert service.suspected == []
        if role in ("reader", "admin"):
            assert service.sealed == []


@pytest.mark.parametrize("key", [b"", bytes(32)], ids=["no key", "another key"])
async def test_a_mount_is_refused_what_is_of_another_session(
    memory: Path, caplog: pytest.LogCaptureFixture, key: bytes
) -> None:
    async with in_cluster(memory, 1) as cluster:
        cluster.service(1).owners = {5: b"the key of the victim's session", 6: key}
        for kind, request in REQUESTS.items():
            if may(strangers.CODEC.rights, "mount", kind) is Scope.OWN:
                assert is_denied(await asked(cluster, "mount", request, session=5, session_key=key))
        assert not cluster.service(1).sealed
        assert not cluster.service(1).aborted
        assert not cluster.service(1).leftovers
        told = strangers.warnings(caplog, "irdmafs.backend.transport.mover")
        assert len(told) == cluster.nodes[1].listener.host.counters.denied_requests == 5


@pytest.mark.parametrize("op", wire.Op)
async def test_a_right_that_a_data_connection_does_not_give_is_refused(
    memory: Path, op: wire.Op
) -> None:
    async with in_cluster(memory, 1) as cluster:
        await cluster.peers.device(1).put(Parcel(EXTENT, TARGET, b"published"))
        service = cluster.service(1)
        service.owners = {5: b"the key of the victim's session"}
        before = list(service.sealed)
        connection = await strangers.data_connection(cluster)
        await connection.send(connection.framed(header(op, EXTENT, 9)[4:]) + b"malicious")
        reply = await connection.reply()
        if op is wire.Op.WRITE:
            assert (reply.kind, reply.code) == (wire.ReplyKind.FAILED, errno.EACCES)
            assert reply.closing
        else:
            assert reply.kind is wire.ReplyKind.OK
        await connection.aclose()
        assert service.sealed == before
        assert cluster.have(EXTENT, b"published") == [1]


async def test_rights_of_a_data_connection_end_with_its_control_connection(memory: Path) -> None:
    async with in_cluster(memory, 1) as cluster:
        connection = await strangers.data_connection(cluster)
        await until(lambda: cluster.nodes[1].listener.host.counters.connections >= 2)
        await connection.control.aclose()
        assert await strangers.is_closed(connection.stream)
        await connection.aclose()


@pytest.mark.parametrize("revoked", [False, True])
async def test_what_is_being_read_comes_to_its_end_unless_the_certificate_is_revoked(
    memory: Path, revoked: bool
) -> None:
    length = 16 * MiB
    async with in_cluster(memory, 1) as cluster:
        await cluster.write(EXTENT, random_bytes(length))
        connection = await strangers.data_connection(cluster)
        await connection.send(connection.framed(header(wire.Op.READ, EXTENT, length)[4:]))
        assert (await connection.reply()).kind is wire.ReplyKind.OK
        host, received = cluster.nodes[1].listener.host, 0
        before = host.counters.connections
        host.is_revoked = lambda serial: revoked
        await connection.control.aclose()
        await until(lambda: host.counters.connections < before)
        while received < length and (more := await connection.stream.receive_some(MiB)):
            received += len(more)
        assert (received < length) == revoked
        await connection.aclose()


async def test_a_new_session_of_the_same_mount_keeps_its_connections(memory: Path) -> None:
    key = b"the key of the mount's sessions, one after another"
    async with in_cluster(memory, 1) as cluster:
        cluster.service(1).owners = {5: key, 6: key}
        session = 5
        async with mounted(
            memory, timeout_s=TIMEOUT_S, session=lambda: session, session_key=key
        ) as peers:
            place = Place(memory, peers, cluster.nodes)
            await place.write(Extent(5 << 24, 0), bytes(100_000))
            connections = cluster.nodes[1].listener.host.counters.connections
            session = 6
            for session_of_content in (6, 5):
                extent = Extent(session_of_content << 24 | 1, 0)
                await place.write(extent, bytes(100_000))
            assert cluster.nodes[1].listener.host.counters.connections == connections


@pytest.mark.parametrize("who", ["nobody", "mount"])
async def test_what_a_connection_took_is_free_when_it_has_ended(
    memory: Path, certificates: dict[str, Credentials], certified: dict[str, Any], who: str
) -> None:
    """Not when the garbage collector comes by, which does not see how large it is."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if who == "mount":
        context.load_cert_chain(certificates[who].cert, certificates[who].key)

    def greet(port: int, said: bytes) -> None:
        with socket.create_connection(("127.0.0.1", port)) as plain:
            try:
                with context.wrap_socket(plain) as secure:
                    secure.sendall(said)
                    secure.recv(1)  # It says why it closes the connection, or welcomes a member.
            except OSError:
                pass

    def connections() -> int:
        kinds = ssl.SSLObject, ssl.SSLSocket, Frames
        return sum(issubclass(type(each), kinds) for each in gc.get_objects())

    async with in_cluster(memory, 1, **certified) as cluster:
        listener = cluster.nodes[1].listener
        begun = (
            strangers.hello(cluster, role=who) + FRAME_BYTES_MAX.to_bytes(4, "big") + bytes(1000)
        )
        await until(lambda: not listener.host.door.strangers)
        gc.collect()
        gc.disable()
        try:
            before = connections()
            for port in (listener.control_port, listener.ports["tcp"]):
                for _ in range(10):
                    await trio.to_thread.run_sync(greet, port, begun)
            await until(lambda: not listener.host.door.strangers)
            await until(lambda: connections() <= before)
        finally:
            gc.enable()
