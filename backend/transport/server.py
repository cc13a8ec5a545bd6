"""The node's end of the transport: each peer is identified, and each of its requests answered."""

import errno
import logging
import socket
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack, ExitStack, closing, suppress
from typing import Self, cast

import trio

from ..observe import logs
from ..trust.security import Identity, Role
from ..unwrap import background
from . import messages
from .caller import broken_text
from .door import REVOKED, TLS_BEGINS, identity_of, listen
from .frames import FRAME_BYTES_MAX, HELLO_BYTES_MAX, BadMessage, Codec, Frames, decode_hello
from .mover import Connection, Host, Lasting, Mover
from .operations import OPERATIONS, codec_for
from .prompt import PromptStream, acquire, let_go
from .rights import ROLES, SHORT_BYTES, Peer, Scope, may
from .service import check_right

log = logging.getLogger(__name__)

# Callers give idle connections up earlier, or keep them alive.
IDLE_S = 60.0
_IN_A_ROW = 8


class Listener:
    """Serves a node's extents, which are moved by `movers`, as long as it is open as an async context
    manager. `control_port` 0 takes a free one. Raises CredentialsError, and OSError for an address."""

    def __init__(self, host: Host, movers: Sequence[Mover], control_port: int = 0) -> None:
        if host.credentials is not None:
            host.credentials.server_context()  # or an error now
        self.host = host
        self.control_port = control_port
        self._codec = codec_for(movers)
        self._movers = movers

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opened:
            host = self.host
            control = opened.enter_context(listen(host.address, self.control_port))
            self.control_port = control.getsockname()[1]
            host.nursery = await opened.enter_async_context(background())
            for mover in self._movers:
                host.servings[mover] = await mover.serving(host)
            host.door.open(host.nursery, control, self._serve_control)
            self._opened = opened.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        # An error of the block is not the nursery's business, which would wrap it.
        await self._opened.aclose()

    @property
    def ports(self) -> dict[str, int]:
        """Return the movers by which this node can be reached, and the port of each (0: none)."""
        servings = self.host.servings.items()
        return {mover.name: serving.port for mover, serving in servings if mover.is_usable}

    # -- control ---------------------------------------------------------------------------------

    async def _serve_control(self, sock: trio.socket.SocketType, address: str) -> None:
        local = sock.getsockname()[0]
        plain = PromptStream(socket.socket(fileno=sock.detach()))
        with closing(plain), ExitStack() as after:
            stream: trio.abc.Stream = plain
            identity: Identity | None = None
            with self.host.door.stranger(address):
                await self._check_tls(plain)
                if self.host.credentials is not None:
                    stream, identity = await self._tls(plain, after)
                frames = Frames(stream, HELLO_BYTES_MAX)
                peer = await self._meet(frames, address, identity)
            with self.host.door.member(peer):
                frames.limit, frames.outstanding = FRAME_BYTES_MAX, peer.outstanding
                log.debug("%s is connected", peer)
                try:
                    await Control(frames, self._codec, self.host, peer, local).run()
                except BadMessage as error:
                    raise BadMessage(f"{peer}: {error}") from None

    def cut(self, serial: str) -> None:
        """End all connections, and with them all rights, of peers with the certificate of this number."""
        self.host.door.members.end(serial)

    def end_rights(self, session: int = 0) -> None:
        """Revoke the rights to memory of peers whose session is over: the one with that number, or those
        that `is_gone` tells. Such a right ends with the session, not only with the connection."""

        def is_over(peer: Peer) -> bool:
            return bool(session and peer.session == session) or self.host.is_gone(peer)

        for serving in self.host.servings.values():
            serving.end_rights(is_over)

    async def _check_tls(self, stream: PromptStream) -> None:
        """Refuse a peer that begins with TLS where there are no credentials, or without TLS where there
        are, and tell it so, as another try would fail, too. Raises BadMessage."""
        start = await stream.peek()
        encrypted = start == TLS_BEGINS
        if not start or encrypted == (self.host.credentials is not None):
            return
        frames = Frames(stream, HELLO_BYTES_MAX)
        # Unread bytes would reset the connection before the peer has read the answer.
        if encrypted:
            await stream.receive_some(HELLO_BYTES_MAX)
            why = "it speaks TLS, and this node has no credentials (ca, cert, key in [cluster])"
        else:
            decode_hello(await frames.receive())
            why = "it speaks no TLS, and this node has credentials (ca, cert, key in [cluster])"
        await frames.send(messages.Refused(why, for_good=True))
        raise BadMessage(why)

    async def _tls(
        self, stream: trio.abc.Stream, after: ExitStack
    ) -> tuple[trio.abc.Stream, Identity]:
        assert self.host.credentials is not None
        secure = trio.SSLStream(stream, self.host.credentials.server_context(), server_side=True)
        after.callback(let_go, secure)
        try:
            await secure.do_handshake()
        except trio.BrokenResourceError as error:
            shown = f"; we show {self.host.credentials.cert} and trust {self.host.credentials.ca}"
            raise BadMessage(broken_text(error) + shown) from None
        return secure, identity_of(secure)

    async def _meet(self, frames: Frames, address: str, identity: Identity | None) -> Peer:
        try:
            hello = decode_hello(await frames.receive())
        except trio.BrokenResourceError as error:
            raise BadMessage(broken_text(error)) from None
        why = ""
        if hello.version != messages.VERSION:
            why = messages.describe_version(hello.version)
        elif self.host.credentials is None and hello.role not in ROLES:
            why = f"{hello.role!r} is no role"
        elif identity is not None and self.host.is_revoked(identity.serial):
            why = REVOKED
        elif hello.wanted not in (0, self.host.service.node):
            why = f"this is store node {self.host.service.node:x}, not {hello.wanted:x}"
        if why:
            for_good = hello.version != messages.VERSION or why == REVOKED
            await frames.send(messages.Refused(why, for_good=for_good))
            raise BadMessage(why)
        await frames.send(messages.Welcome(messages.VERSION, self.host.service.node))
        who = identity or Identity(cast(Role, hello.role), hello.name[:128])
        node = 0
        if who.role == "node":
            with suppress(ValueError):
                node = int(hello.name, 16)
        return Peer(who, address, hello.session, node, hello.session_key)


class Control:
    """One control connection of a peer, to this host's address `local`. Requests of the core are carried
    out by OPERATIONS, messages of a mover by its Connection."""

    def __init__(self, frames: Frames, codec: Codec, host: Host, peer: Peer, local: str) -> None:
        self._frames = frames
        self._codec = codec
        self._host = host
        self._peer = peer
        self._local = local
        self._patience_s = host.timeout_s * messages.RECEIVER_PATIENCE
        self._heard = 0
        self._connections: dict[type[messages.Message], Connection] = {}
        # Requests that write take long to answer: they have LASTING_MAX places of their own.
        self._slots = trio.Semaphore(messages.REQUESTS_AT_ONCE + messages.LASTING_MAX)

    async def run(self) -> None:
        """Serve until the peer closes the connection, or sends nothing for IDLE_S or a little longer.
        Requests under way are cancelled. Raises BadMessage, trio.EndOfChannel, trio.BrokenResourceError."""
        error: Exception | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, nursery.cancel_scope)
            with ExitStack() as after:
                try:
                    for mover, serving in self._host.servings.items():
                        connection = serving.connected(self._peer, self._local, nursery)
                        after.callback(connection.close, "the control connection ended")
                        self._connections.update(dict.fromkeys(mover.messages.rights, connection))
                    while True:
                        await self._take_request(nursery)
                except Exception as ended:
                    error = ended
            nursery.cancel_scope.cancel()
        if error is not None:
            try:
                raise error
            finally:  # it refers to this frame, and so to all that was received
                del error

    async def _watch(self, connection: trio.CancelScope) -> None:
        quiet = 0
        while quiet < 2:
            heard = self._heard
            await trio.sleep(IDLE_S / 2)
            # No request is received while the limit of requests is reached.
            quiet = quiet + 1 if heard == self._heard and self._slots.value else 0
        connection.cancel()

    async def _take_request(self, nursery: trio.Nursery) -> None:
        if self._frames.has_received and self._heard % _IN_A_ROW == 0:
            # The peer has sent many requests at once: let other tasks run, too.
            await trio.lowlevel.checkpoint()
        body = await self._frames.receive()
        size = len(body)
        message = self._codec.decode(body)
        del body
        self._heard += 1
        if not isinstance(message, messages.Request):
            self._take(message)
            return
        message.check()
        if isinstance(message, messages.Get):
            size += min(message.limit * len(message.extents), messages.GET_BYTES_MAX)
        await acquire(self._slots)
        if size > SHORT_BYTES:
            await self._peer.outstanding.take(size)
        operation = OPERATIONS.get(type(message))
        if operation is not None and operation.is_short(message):
            await self._serve(message, size, nursery.cancel_scope)
        else:
            nursery.start_soon(self._serve, message, size, nursery.cancel_scope)

    def _take(self, message: messages.Message) -> None:
        """Take a message that has no answer. Raises BadMessage if the peer has no right to it."""
        kind = type(message)
        role = self._peer.identity.role
        if may(self._codec.rights, role, kind) is Scope.NONE:
            raise BadMessage(f"a {role} may not send {kind.__name__}")
        if isinstance(message, messages.Renewed):
            self._peer.session = message.session
        else:
            self._connections[kind].take(message)

    async def _serve(
        self, request: messages.Request, size: int, connection: trio.CancelScope
    ) -> None:
        self._host.counters.requests[type(request).__name__.lower()] += 1
        try:
            with logs.request(request.trace):
                number = request.number
                answer = await self._answer(request, self._do(request))
                while isinstance(answer, Lasting):
                    await self._send(number, answer.first, connection)
                    number = answer.number
                    answer = await self._answer(request, answer.then())
            await self._send(number, answer, connection)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            connection.cancel()
        finally:
            self._slots.release()
            if size > SHORT_BYTES:
                self._peer.outstanding.give_back(size)

    async def _send(self, number: int, answer: messages.Answer, scope: trio.CancelScope) -> None:
        answer.number = number
        size = self._frames.put(answer)
        if not self._frames.flush_now():
            untaken, said = self._host.door.untaken, self._peer.said
            of_etcd = size if isinstance(answer, messages.EtcdSaid) else 0
            said.taken += of_etcd
            with untaken.share(self._peer.who, size, self._patience_s) as sending:
                try:
                    await self._frames.flush()
                finally:
                    said.give_back(of_etcd)
            if sending.cancelled_caught:
                log.warning("%s does not take its answers; it is cut off", self._peer)
                scope.cancel()

    async def _answer(
        self, request: messages.Request, done: Awaitable[messages.Answer | Lasting]
    ) -> messages.Answer | Lasting:
        """Return the answer, or the error."""
        host, what = self._host, type(request).__name__.lower()
        try:
            return await done
        except OSError as error:
            return messages.Failed(*host.failed(self._peer, what, error))
        except Exception:
            log.exception("%s: %s", self._peer, what)
            return messages.Failed(errno.EIO, host.service.node, "internal error; see its log")

    async def _do(self, request: messages.Request) -> messages.Answer | Lasting:
        contents = request.contents if isinstance(request, messages.AboutContents) else ()
        peer, service = self._peer, self._host.service
        await check_right(service, self._codec.rights, peer, type(request), contents)
        operation = OPERATIONS.get(type(request))
        if operation is not None:
            return await operation.do(self._host, peer, request)
        return await self._connections[type(request)].answer(request)
