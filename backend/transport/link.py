"""What connects this process to one store node."""

import errno
import logging
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import trio

from ..records import NodeAddress
from ..security import is_final, peer_identity
from . import Distrusted, Unreachable
from .authentication import Authentication, Ticket
from .caller import ControlClient, broken_text
from .channel import (
    AuthenticatedChannel,
    Channel,
    EncryptedChannel,
    Lost,
    Patience,
    choose_congestion_control,
)
from .messages import (
    FRAME_BYTES_MAX,
    TICKETS_MAX,
    AnyAnswer,
    AnyRequest,
    BadMessage,
    Frames,
    Granted,
    Refused,
    Tickets,
    decode_welcome,
)
from .prompt import PromptStream, acquire
from .threads import in_threads
from .verbs.lanes import Lanes

if TYPE_CHECKING:
    from .peers import Peers

log = logging.getLogger(__name__)

# How long a node is left alone after it could not be reached: doubled with every failure.
SETBACK_FIRST_S = 0.05
SETBACK_MAX_S = 1.0
OPERATIONS_AT_ONCE = 8
IDLE_CHANNEL_S = 15.0
_CHANNELS_KEPT = 16
_USER_TIMEOUTS = 3


class _Refusal(Exception):
    """The node is not to be talked to, or does not want to, and this will not change by itself."""


class Link:
    """A store node's control connection and its idle data connections."""

    def __init__(self, peers: "Peers", node: int) -> None:
        self.node = node
        self._operations = trio.Semaphore(OPERATIONS_AT_ONCE)
        self._peers = peers
        self._connecting = trio.Lock()
        self._control: ControlClient | None = None
        self._where: tuple[str, int, int] | None = None
        self._idle: list[Channel] = []
        # What ends each operation whose data is on its way.
        self.stops: set[Callable[[], None]] = set()
        self._setback_s = 0.0
        self._alone_until = 0.0
        self._why = ""
        self._distrusts = False
        self._own_address = ""
        self._lanes: Lanes | None = None
        self._told: dict[str, str] = {}

    @property
    def refusal(self) -> str:
        """Why the node and this process do not accept each other; "": they do, or it is not known."""
        return self._why if self._distrusts else ""

    @asynccontextmanager
    async def operation(self) -> AsyncIterator[None]:
        """A few extents at a time are on their way to a node or from it."""
        await acquire(self._operations)
        try:
            yield
        finally:
            self._operations.release()

    async def ask(self, make: Callable[[int], AnyRequest], group: int = 0) -> AnyAnswer:
        """One round trip. `group` is the one that a Fenced is about. Raises OSError."""
        control = await self._connected()
        counters = self._peers.counters
        try:
            return await control.ask(make, group)
        except OSError as error:
            counters.errors[errno.errorcode.get(error.errno or 0, "EIO")] += 1
            raise

    async def channels(self, count: int) -> list[Channel]:
        """Data connections; to be given back. Raises Unreachable."""
        control = await self._connected()
        found: list[Channel] = []
        while self._idle and len(found) < count:
            channel = self._idle.pop()
            if channel.session != self._peers.writing_session or channel.is_closed_by_peer():
                channel.close()
            else:
                found.append(channel)
        try:
            while len(found) < count:
                wanted = min(count - len(found), TICKETS_MAX)
                found += await self._open_channels(control, wanted)
        except BaseException:
            self.give_back(found)
            raise
        return found

    def give_back(self, channels: Iterable[Channel]) -> None:
        for channel in channels:
            if channel.clean and self._control is not None and len(self._idle) < _CHANNELS_KEPT:
                channel.idle_since = time.monotonic()
                channel.was_idle = True
                self._idle.append(channel)
            else:
                channel.close()

    async def lanes(self, length: int, few_too: bool = False) -> Lanes | None:
        """Queue pairs for so many bytes; None: they go over TCP, as a few do unless `few_too`. Raises
        Unreachable."""
        peers = self._peers
        rdma = peers.rdma
        if rdma is None or not rdma.is_usable:
            return None
        if length < rdma.choice.threshold_bytes and not few_too:
            return None
        address = peers.resolve(self.node)
        if address is not None and "verbs" not in address.transports:
            return None
        control = await self._connected()
        lanes = self._lanes
        if lanes is None or lanes.control is not control:
            lanes = self._lanes = Lanes(
                control, rdma, self._own_address, peers.nursery, peers.timeout_s, peers.counters,
                self._told, peers.stages,
            )  # fmt: skip
            peers.nursery.start_soon(lanes.run)
        await lanes.ready()
        return lanes if lanes.is_usable else None

    def lost(self) -> None:
        """A data connection broke: the others may be no better."""
        self._drop_idle()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While data is on its way, make sure that the node is alive: when it stalls, it is known."""
        control = self._control
        if control is None:
            yield
            return
        control.watch()
        try:
            yield
        finally:
            control.watchers -= 1

    def silent(self, why: str) -> None:
        """The node did not answer for long: do not let the next caller find out again."""
        self._leave_alone(self._peers.timeout_s / 2, why)

    def give_up(self, why: str) -> None:
        """It is known that the node is gone: whoever waits for it learns so now."""
        for stop in list(self.stops):
            stop()
        self._drop_idle()
        if self._control is not None:
            self._control.close(why)
            self._control = None

    def tidy(self) -> None:
        """Close what has not been used for long."""
        old = time.monotonic() - IDLE_CHANNEL_S
        while self._idle and self._idle[0].idle_since < old:
            self._idle.pop(0).close()

    def close(self) -> None:
        self._drop_idle()
        if self._control is not None:
            self._control.close("this process is stopping")
            self._control = None

    def _drop_idle(self) -> None:
        for channel in self._idle:
            channel.close()
        self._idle.clear()

    # -- the control connection ------------------------------------------------------------------

    async def _connected(self) -> ControlClient:
        address = self._peers.resolve(self.node)
        if address is None:
            raise Unreachable(self.node, "it is not registered")
        where = (address.address, address.control_port, address.data_port)
        control = self._control
        if control is not None and control.is_open and where == self._where:
            return control
        async with self._connecting:
            if self._control is not None and (not self._control.is_open or where != self._where):
                self._control.close("its address changed")
                self._control = None
                self._drop_idle()
            if where != self._where:
                self._where = where
                self._setback_s = self._alone_until = 0.0
            if self._control is None:
                if time.monotonic() < self._alone_until:
                    raise self._unreachable()
                self._control = await self._connect(address)
            return self._control

    async def _connect(self, address: NodeAddress) -> ControlClient:
        timeout_s = self._peers.timeout_s
        self._peers.counters.connects += 1
        began = time.monotonic()
        why, final = "", False
        try:
            with trio.move_on_after(timeout_s) as scope:
                stream = await self._stream(address)
                try:
                    frames = await self._introduce(stream)
                except BaseException:
                    await trio.aclose_forcefully(stream)
                    raise
            if scope.cancelled_caught:
                why = f"no answer for {timeout_s:g} s"
        except trio.BrokenResourceError as error:
            why = broken_text(error)
            if isinstance(error.__cause__, ssl.SSLError):
                final = is_final(error.__cause__)
                why += f"; we trust {self._peers.trusted}"
        except _Refusal as error:
            why, final = str(error), True
        except (BadMessage, trio.EndOfChannel) as error:
            why = str(error) or "it closed the connection"
        except OSError as error:
            why = error.strerror or str(error)
        if not why:
            self._setback_s = 0.0
            self._distrusts = False
            control = ControlClient(self._peers, self, frames)
            control.start()
            return control
        # A node that took long to be given up must not cost every caller as long again.
        took_s = time.monotonic() - began
        self._setback_s = min(SETBACK_MAX_S, max(SETBACK_FIRST_S, 2 * self._setback_s))
        if final and (why, final) != (self._why, self._distrusts):
            log.warning("store node %x at %s: %s", self.node, address.address, why)
        self._leave_alone(max(took_s, self._setback_s), why)
        self._distrusts = final
        self._peers.counters.errors["ENOTCONN"] += 1
        raise self._unreachable()

    def _unreachable(self) -> Unreachable:
        return (Distrusted if self._distrusts else Unreachable)(self.node, self._why)

    def _leave_alone(self, time_s: float, why: str) -> None:
        self._alone_until = time.monotonic() + time_s
        self._why = why
        self._distrusts = False

    async def _stream(self, address: NodeAddress) -> trio.abc.Stream:
        connected = await trio.open_tcp_stream(address.address, address.control_port)
        stream = PromptStream(socket.socket(fileno=connected.socket.detach()))
        try:
            sock = stream.socket
            sock.setsockopt(
                socket.IPPROTO_TCP,
                socket.TCP_USER_TIMEOUT,
                int(self._peers.timeout_s * _USER_TIMEOUTS * 1000),
            )
            # Data connections go to the address that was found to work.
            self._family = sock.family
            self._peer_name = sock.getpeername()
            self._own_address = sock.getsockname()[0]
            if self._peers.context is None:
                return stream
            secure = trio.SSLStream(stream, self._peers.context)
            await secure.do_handshake()
            _check_node(secure, self._peers.is_revoked)
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise
        return secure

    async def _introduce(self, stream: trio.abc.Stream) -> Frames:
        peers = self._peers
        frames = Frames(stream, FRAME_BYTES_MAX)
        await frames.send(peers.hello(self.node))
        peers.counters.round_trips += 1
        answer = decode_welcome(await frames.receive())
        if isinstance(answer, Refused):
            kind = _Refusal if answer.for_good else BadMessage
            raise kind(f"it refuses: {answer.text[:200]}")
        if answer.node != self.node:
            raise BadMessage(f"store node {answer.node:x} is at its address")
        return frames

    # -- data connections ------------------------------------------------------------------------

    async def _open_channels(self, control: ControlClient, count: int) -> list[Channel]:
        session = self._peers.writing_session
        answer = await control.ask(lambda number: Tickets(number, "", count))
        if not isinstance(answer, Granted) or len(answer.tickets) != count:
            raise Unreachable(self.node, "its answer makes no sense")
        opened: list[Channel] = []
        errors: list[Unreachable] = []

        async def open_one(ticket: bytes) -> None:
            try:
                with trio.fail_after(self._peers.timeout_s):
                    channel = await self._open_channel(Ticket.unpack(ticket))
                    channel.session = session
                    opened.append(channel)
            except (OSError, Lost, trio.TooSlowError, BadMessage, _Refusal) as error:
                why = str(error) or "no data connection could be opened in time"
                errors.append(Unreachable(self.node, why))

        try:
            async with trio.open_nursery() as nursery:
                for ticket in answer.tickets:
                    nursery.start_soon(open_one, ticket)
            if errors:
                raise errors[0]
        except BaseException:
            self.give_back(opened)
            raise
        return opened

    async def _open_channel(self, ticket: Ticket) -> Channel:
        peers = self._peers
        assert self._where is not None
        with trio.socket.socket(self._family, socket.SOCK_STREAM) as sock:
            choose_congestion_control(sock)
            await sock.connect((self._peer_name[0], self._where[2], *self._peer_name[2:]))
            plain = socket.socket(fileno=sock.detach())
        user_timeout_s = peers.timeout_s * _USER_TIMEOUTS
        channel: Channel
        try:
            if peers.context is None:
                channel = Channel(plain, user_timeout_s)
            elif not peers.encrypt_data:
                channel = AuthenticatedChannel(plain, user_timeout_s)
            else:
                secure = peers.context.wrap_socket(plain, do_handshake_on_connect=False)
                channel = EncryptedChannel(secure, user_timeout_s)
        except BaseException:
            plain.close()
            raise
        try:
            if isinstance(channel, EncryptedChannel):
                channel.sock.settimeout(peers.timeout_s)
                await in_threads([channel.sock.do_handshake], channel.shutdown, peers.limiter)
                _check_node(channel.sock, peers.is_revoked)
            channel.authentication = Authentication(ticket.key, listens=False)
            # Fits into the empty buffer of the new connection.
            channel.send_preamble(ticket.number, Patience(peers.timeout_s))
        except BaseException:
            channel.close()
            raise
        return channel


def _check_node(
    connection: trio.SSLStream[PromptStream] | ssl.SSLSocket, is_revoked: Callable[[str], bool]
) -> None:
    """Raises _Refusal when something else than a node listens there."""
    identity = peer_identity(connection)
    if identity is None or identity.role != "node":
        raise _Refusal("its certificate is not a store node's")
    if is_revoked(identity.serial):
        raise _Refusal("its certificate was revoked")
