"""The node's end of the transport: whoever connects is identified, then served.

Strangers cost little: they have HANDSHAKE_S to say who they are, in messages of a few KiB, and when
more than STRANGERS_MAX are at it the one that has been trying longest is cut off. A peer that makes no
sense loses its connection, with one line in the log.
"""

import logging
import socket
import ssl
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Self

import trio

from ..security import Credentials, Identity, describe_tls_error, peer_identity
from .authentication import CODE_BYTES, Authentication, Forged, Ticket
from .caller import broken_text
from .channel import (
    AuthenticatedChannel,
    Channel,
    EncryptedChannel,
    Lost,
    choose_congestion_control,
)
from .complaints import Complaints
from .control import Control
from .counters import Counters
from .data import Data
from .messages import (
    FRAME_BYTES_MAX,
    HELLO_BYTES_MAX,
    VERSION,
    BadMessage,
    Frames,
    Refused,
    Welcome,
    decode_hello,
)
from .peers import Peers
from .prompt import PromptStream, let_go
from .rights import ROLES, Peer
from .service import Incoming, Service
from .transfers import RECEIVER_PATIENCE, Transfers
from .verbs.rdma import Rdma
from .verbs.responder import SESSION_OVER, Responder
from .wire import PREAMBLE_BYTES, describe_version, unpack_preamble

__all__ = ["Incoming", "Listener", "Peer", "Service"]

log = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
STRANGERS_MAX = 128
MEMBERS_MAX = 16384
TICKET_S = 30.0
TICKETS_PENDING_MAX = 16384
TICKETS_OF_ONE_MAX = 512
# Callers give idle connections up earlier, or keep them alive.
IDLE_S = 60.0
_BACKLOG = 1024
_TLS_HANDSHAKE = 0x16
_SETBACK_S = 0.1
_REVOKED = "its certificate was revoked"
_ENDS = (
    OSError,
    Lost,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
    trio.EndOfChannel,
    trio.TooSlowError,
)


class _Granted(NamedTuple):
    """A ticket that was not used yet; `session` is the one whose rights it gives."""

    key: bytes
    end: float
    peer: Peer
    session: int


class Listener:
    """Serves a node's extents on two ports of an address, for as long as it is open as an async context
    manager. `control_port` 0 takes a free one. Raises OSError when an address cannot be had, and
    CredentialsError.

    With credentials, only members of the cluster are served. `encrypt_data` refuses data connections
    that are not encrypted; with credentials those that are, are always welcome. With `rdma`, which must
    stay open longer, peers may set queue pairs up.
    """

    def __init__(
        self,
        service: Service[Any],
        peers: Peers,
        address: str,
        control_port: int = 0,
        *,
        credentials: Credentials | None = None,
        encrypt_data: bool = False,
        timeout_s: float = 5.0,
        rdma: Rdma | None = None,
    ) -> None:
        # Whether a peer's session is known to be over.
        self.is_gone: Callable[[Peer], bool] = lambda peer: False
        # Tells whether a certificate, by its serial number, is not accepted any more. `cut` ends its
        # connections.
        self.is_revoked: Callable[[str], bool] = lambda serial: False
        self._connected: dict[trio.CancelScope, Peer] = {}
        self._rdma = rdma
        self._responders: dict[Responder, Peer] = {}
        self._service = service
        self._peers = peers
        self._address = address
        self._credentials = credentials
        self._context = credentials.server_context() if credentials is not None else None
        self._encrypt_data = encrypt_data
        self._timeout_s = timeout_s
        self._strangers: OrderedDict[int, trio.CancelScope] = OrderedDict()
        self._tickets: OrderedDict[bytes, _Granted] = OrderedDict()
        self._complaints = Complaints(log)
        self.counters = Counters()
        self.control_port = control_port
        self.data_port = 0

    async def __aenter__(self) -> Self:
        control = await _listen(self._address, self.control_port)
        try:
            data = await _listen(self._address, 0)
            choose_congestion_control(data)
        except BaseException:
            control.close()
            raise
        self.control_port = control.getsockname()[1]
        self.data_port = data.getsockname()[1]
        self._manager = trio.open_nursery()
        self._nursery = await self._manager.__aenter__()
        self._transfers = Transfers(self._service, self._nursery)
        self._data = Data(
            self._service, self._peers, self._transfers, self.counters, self._timeout_s
        )
        self._nursery.start_soon(self._accept, control, self._serve_control)
        self._nursery.start_soon(self._accept, data, self._serve_data)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._nursery.cancel_scope.cancel()
        # An error of the block is not the nursery's business, which would wrap it.
        await self._manager.__aexit__(None, None, None)

    # -- who is there ----------------------------------------------------------------------------

    async def _accept(
        self,
        listening: trio.socket.SocketType,
        serve: Callable[[trio.socket.SocketType, str], Awaitable[None]],
    ) -> None:
        with listening:
            while True:
                try:
                    sock, address = await listening.accept()
                except OSError as error:
                    # Out of descriptors or memory, or the peer is gone already.
                    log.warning("a connection could not be accepted: %s", error)
                    await trio.sleep(_SETBACK_S)
                    continue
                self._nursery.start_soon(self._serve, serve, sock, address[0])

    async def _serve(
        self,
        serve: Callable[[trio.socket.SocketType, str], Awaitable[None]],
        sock: trio.socket.SocketType,
        address: str,
    ) -> None:
        try:
            with sock:
                await serve(sock, address)
        except BadMessage as error:
            self.counters.rejected += 1
            self._complaints.warn("connection from %s closed: %s", address, str(error))
        except _ENDS as error:
            log.debug("connection from %s ended: %s", address, str(error))
        except Exception:
            log.exception("connection from %s", address)

    @contextmanager
    def _stranger(self) -> Iterator[None]:
        """What is done inside has to end soon. Raises BadMessage if it does not."""
        if len(self._strangers) >= STRANGERS_MAX:
            self._strangers.popitem(last=False)[1].cancel()
        with trio.move_on_after(HANDSHAKE_S) as scope:
            self._strangers[id(scope)] = scope
            try:
                yield
            finally:
                self._strangers.pop(id(scope), None)
        if scope.cancelled_caught:
            raise BadMessage("it did not say in time who it is")

    @contextmanager
    def _member(self) -> Iterator[None]:
        if self.counters.connections >= MEMBERS_MAX:
            raise BadMessage(f"there are {MEMBERS_MAX} connections already")
        self.counters.connections += 1
        try:
            yield
        finally:
            self.counters.connections -= 1

    # -- control ---------------------------------------------------------------------------------

    async def _serve_control(self, sock: trio.socket.SocketType, address: str) -> None:
        local = sock.getsockname()[0]
        with (
            closing(PromptStream(socket.socket(fileno=sock.detach()))) as stream,
            ExitStack() as after,
        ):
            frames, peer = await self._met(stream, address, after)
            await self._control(frames, peer, local)

    async def _met(
        self, plain: PromptStream, address: str, after: ExitStack
    ) -> tuple[Frames, Peer]:
        """Who is there. Raises BadMessage and the like."""
        with self._stranger():
            await self._check_tls(plain)
            stream: trio.abc.Stream = plain
            identity: Identity | None = None
            if self._context is not None:
                stream, identity = await self._tls(plain, after)
            frames = Frames(stream, HELLO_BYTES_MAX)
            return frames, await self._meet(frames, address, identity)

    async def _control(self, frames: Frames, peer: Peer, local: str) -> None:
        frames.limit = FRAME_BYTES_MAX
        with self._member(), self._until_revoked(peer):
            log.debug("%s is connected", peer)
            control = Control(
                frames, peer, self._service, self._peers, self.counters,
                self._grant, self._give_up, partial(self._responding, local, peer),
                idle_s=IDLE_S, patience_s=self._timeout_s * RECEIVER_PATIENCE,
            )  # fmt: skip
            try:
                await control.run()
            except BadMessage as error:
                raise BadMessage(f"{peer.role} {peer.name!r}: {error}") from None
            finally:
                peer.leave()
                for number in list(peer.tickets):
                    self._forget(number)

    @contextmanager
    def _until_revoked(self, peer: Peer) -> Iterator[None]:
        """Raises BadMessage when the peer's certificate is revoked meanwhile."""
        with trio.CancelScope() as scope:
            self._connected[scope] = peer
            try:
                if self.is_revoked(peer.serial):
                    scope.cancel()
                yield
            finally:
                del self._connected[scope]
        if scope.cancelled_caught:
            raise BadMessage(f"{peer}: {_REVOKED}")

    def cut(self, serial: str) -> None:
        """End all connections, and with them all rights, of who showed the certificate of this number."""
        for scope, peer in self._connected.items():
            if peer.serial == serial:
                scope.cancel()

    @contextmanager
    def _responding(self, local: str, peer: Peer, nursery: trio.Nursery) -> Iterator[Responder]:
        responder = Responder(
            self._service, self._peers, self.counters, self._rdma, local, nursery, self._timeout_s,
            lambda: self.is_gone(peer),
        )  # fmt: skip
        self._responders[responder] = peer
        try:
            yield responder
        finally:
            del self._responders[responder]
            responder.detach("the control connection ended")

    def _give_up(self, content: int) -> None:
        self._transfers.give_up(content)
        for responder in self._responders:
            responder.give_up(content)

    def end_rights(self, session: int = 0) -> None:
        """Somebody is gone: with the session of that number, or as `is_gone` tells. What a peer was given
        to read or write in our memory ends with its session, not only with its connection."""
        for responder, peer in self._responders.items():
            if (session and peer.session == session) or self.is_gone(peer):
                responder.detach(SESSION_OVER)

    async def _check_tls(self, stream: PromptStream) -> None:
        """One who begins with TLS where there is none, or without, is told so, as his waiting for
        better times would be in vain. Raises BadMessage."""
        start = await stream.peek()
        encrypted = start == bytes([_TLS_HANDSHAKE])
        if not start or encrypted == (self._context is not None):
            return
        frames = Frames(stream, HELLO_BYTES_MAX)
        # What is not read of it would take the answer away from him.
        if encrypted:
            await stream.receive_some(HELLO_BYTES_MAX)
            why = "it speaks TLS, and this node has no credentials (ca, cert, key in [cluster])"
        else:
            decode_hello(await frames.receive())
            why = "it speaks no TLS, and this node has credentials (ca, cert, key in [cluster])"
        await frames.send(Refused(why, for_good=True))
        raise BadMessage(why)

    async def _tls(
        self, stream: trio.abc.Stream, after: ExitStack
    ) -> tuple[trio.abc.Stream, Identity]:
        assert self._context is not None
        assert self._credentials is not None
        secure = trio.SSLStream(stream, self._context, server_side=True)
        after.callback(let_go, secure)
        try:
            await secure.do_handshake()
        except trio.BrokenResourceError as error:
            shown = f"; we show {self._credentials.cert} and trust {self._credentials.ca}"
            raise BadMessage(broken_text(error) + shown) from None
        return secure, _identity(secure)

    async def _meet(self, frames: Frames, address: str, identity: Identity | None) -> Peer:
        try:
            hello = decode_hello(await frames.receive())
        except trio.BrokenResourceError as error:
            raise BadMessage(broken_text(error)) from None
        why = ""
        if hello.version != VERSION:
            why = describe_version(hello.version)
        elif self._context is None and hello.role not in ROLES:
            why = f"{hello.role!r} is no role"
        elif identity is not None and self.is_revoked(identity.serial):
            why = _REVOKED
        elif hello.wanted not in (0, self._service.node):
            why = f"this is store node {self._service.node:x}, not {hello.wanted:x}"
        if why:
            for_good = hello.version != VERSION or why == _REVOKED
            await frames.send(Refused(why, for_good=for_good))
            raise BadMessage(why)
        await frames.send(Welcome(VERSION, self._service.node))
        role, name, serial = hello.role, hello.name, ""
        if identity is not None:
            role, name, serial = identity.role, identity.name, identity.serial
        node = _number(hello.name) if role == "node" else 0
        return Peer(
            role, name[:128], address, hello.session, node, session_key=hello.session_key,
            is_certified=identity is not None, serial=serial,
        )  # fmt: skip

    # -- tickets ---------------------------------------------------------------------------------

    def _grant(self, peer: Peer, count: int) -> list[bytes]:
        now = trio.current_time()
        while len(peer.tickets) > TICKETS_OF_ONE_MAX - count:
            self._forget(next(iter(peer.tickets)))
        while self._tickets:
            number, first = next(iter(self._tickets.items()))
            if first.end > now and len(self._tickets) + count <= TICKETS_PENDING_MAX:
                break
            self._forget(number)
        granted = []
        for _ in range(count):
            ticket = Ticket.make()
            self._tickets[ticket.number] = _Granted(ticket.key, now + TICKET_S, peer, peer.session)
            peer.tickets[ticket.number] = None
            granted.append(ticket.pack())
        return granted

    def _forget(self, number: bytes) -> _Granted | None:
        granted = self._tickets.pop(number, None)
        if granted is not None:
            del granted.peer.tickets[number]
        return granted

    def _redeem(self, channel: Channel, preamble: bytes) -> Peer:
        """Raises BadMessage. A ticket is good for one try."""
        granted = self._forget(unpack_preamble(preamble[:-CODE_BYTES]))
        if granted is None or granted.end < trio.current_time():
            raise BadMessage("it shows no valid ticket for a data connection")
        channel.authentication = Authentication(granted.key, listens=True)
        channel.session = granted.session
        try:
            channel.checked(preamble)
        except Forged:
            raise BadMessage("it shows a ticket that is not its own") from None
        return granted.peer

    # -- data ------------------------------------------------------------------------------------

    async def _serve_data(self, sock: trio.socket.SocketType, address: str) -> None:
        channel: Channel | None = None
        try:
            with self._stranger():
                channel = await self._open_channel(sock)
                peer = self._redeem(channel, await self._preamble(channel))
            with self._member():
                while await self._has_request(channel, peer):
                    if not await self._data.serve(channel, peer):
                        break
        finally:
            if channel is not None:
                channel.close()

    async def _open_channel(self, sock: trio.socket.SocketType) -> Channel:
        """Encrypted if the peer begins so."""
        start = await sock.recv(1, socket.MSG_PEEK)
        user_timeout_s = self._timeout_s * RECEIVER_PATIENCE
        encrypted = bool(start) and start[0] == _TLS_HANDSHAKE and self._context is not None
        if self._encrypt_data and not encrypted:
            raise BadMessage("it opened a data connection that is not encrypted")
        plain = socket.socket(fileno=sock.detach())
        try:
            if not encrypted:
                kind = Channel if self._context is None else AuthenticatedChannel
                return kind(plain, user_timeout_s)
            assert self._context is not None
            secure = self._context.wrap_socket(
                plain, server_side=True, do_handshake_on_connect=False
            )
            channel = EncryptedChannel(secure, user_timeout_s)
        except BaseException:
            plain.close()
            raise
        try:
            await _shake_hands(secure)
            _identity(secure)
        except BaseException as error:
            channel.close()
            if isinstance(error, ssl.SSLError):
                raise BadMessage(describe_tls_error(error)) from None
            raise
        return channel

    async def _preamble(self, channel: Channel) -> bytes:
        """Not in a thread, as members would have to wait for one until strangers give theirs back."""
        preamble = bytearray(PREAMBLE_BYTES)
        done = 0
        with memoryview(preamble) as view:
            while done < len(preamble):
                try:
                    with view[done:] as rest:
                        done += channel.receive(rest, wait=False)
                except BlockingIOError:
                    await trio.lowlevel.wait_readable(channel.sock)
        return bytes(preamble)

    async def _has_request(self, channel: Channel, peer: Peer) -> bool:
        """Wait for one. False: there is none for long, or the peer's rights ended."""
        if peer.has_left:
            return False
        if channel.has_input():
            return True
        with trio.move_on_after(IDLE_S) as scope:
            peer.waiting.add(scope)
            try:
                await trio.lowlevel.wait_readable(channel.sock)
                return True
            finally:
                peer.waiting.discard(scope)
        return False


async def _shake_hands(secure: ssl.SSLSocket) -> None:
    """Raises ssl.SSLError and other OSErrors."""
    secure.setblocking(False)
    while True:
        try:
            secure.do_handshake()
        except ssl.SSLWantReadError:
            await trio.lowlevel.wait_readable(secure)
        except ssl.SSLWantWriteError:
            await trio.lowlevel.wait_writable(secure)
        else:
            return


def _number(text: str) -> int:
    """0 if it is none."""
    try:
        return int(text, 16)
    except ValueError:
        return 0


async def _listen(address: str, port: int) -> trio.socket.SocketType:
    found = await trio.socket.getaddrinfo(
        address or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    family, kind, protocol, _, where = found[0]
    sock = trio.socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        await sock.bind(where)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        text = f"cannot listen on {address} port {port}: {error.strerror}"
        raise OSError(error.errno, text) from error
    except BaseException:
        sock.close()
        raise
    return sock


def _identity(connection: Any) -> Identity:
    """Return the identity in the certificate at the other end. Raises BadMessage if it may not ask us."""
    identity = peer_identity(connection)
    if identity is None or identity.role not in ROLES:
        raise BadMessage("its certificate names no role that may use store nodes")
    return identity
