"""The node's end of one control connection: requests are answered as they become ready."""

import errno
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager

import trio

from ..observe import logs
from . import Fenced
from .codec import Codec
from .frames import BadMessage, Frames
from .messages import (
    LASTING_MAX,
    REQUESTS_AT_ONCE,
    Abort,
    AboutExtent,
    Answer,
    Failed,
    Message,
    Renewed,
    Request,
    failure_of,
)
from .mover import Connection, Lasting
from .operations import OPERATIONS, StoreNode
from .prompt import acquire
from .rights import Scope, may, tell_of_denial
from .service import check_right

log = logging.getLogger(__name__)

_IN_A_ROW = 8


class Control:
    """One control connection of a peer. Requests of the core are carried out by OPERATIONS;
    `connect(nursery)` gives the Connection that carries out each message of a mover."""

    def __init__(
        self,
        frames: Frames,
        codec: Codec,
        node: StoreNode,
        connect: Callable[[trio.Nursery], AbstractContextManager[dict[type[Message], Connection]]],
        *,
        idle_s: float,
        patience_s: float,
    ) -> None:
        self._frames = frames
        self._peer = node.peer
        self._codec = codec
        self._node = node
        self._counters = node.counters
        self._connect = connect
        self._idle_s = idle_s
        self._patience_s = patience_s
        self._heard = 0
        self._connections: dict[type[Message], Connection] = {}
        # Requests that write take long to answer: they have LASTING_MAX places of their own.
        self._slots = trio.Semaphore(REQUESTS_AT_ONCE + LASTING_MAX)

    async def run(self) -> None:
        """Serve until the peer closes the connection, or sends nothing for `idle_s` or a little longer.
        Requests under way are then cancelled. Raises BadMessage, trio.EndOfChannel,
        trio.BrokenResourceError."""
        error: Exception | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, nursery.cancel_scope)
            try:
                with self._connect(nursery) as self._connections:
                    while True:
                        await self._take_request(nursery)
            except Exception as ended:
                error = ended
            nursery.cancel_scope.cancel()
        if error is not None:
            raise error

    async def _watch(self, connection: trio.CancelScope) -> None:
        quiet = 0
        while quiet < 2:
            heard = self._heard
            await trio.sleep(self._idle_s / 2)
            # No request is received while the limit of requests is reached.
            quiet = quiet + 1 if heard == self._heard and self._slots.value else 0
        connection.cancel()

    async def _take_request(self, nursery: trio.Nursery) -> None:
        if self._frames.has_received and self._heard % _IN_A_ROW == 0:
            # The peer has sent many requests at once: let other tasks run, too.
            await trio.lowlevel.checkpoint()
        message = self._codec.decode(await self._frames.receive())
        self._heard += 1
        if not isinstance(message, Request):
            self._take(message)
            return
        message.check()
        await acquire(self._slots)
        operation = OPERATIONS.get(type(message))
        if operation is not None and operation.is_short(message):
            await self._serve(message, nursery.cancel_scope)
        else:
            nursery.start_soon(self._serve, message, nursery.cancel_scope)

    def _take(self, message: Message) -> None:
        """Take a message that has no answer. Raises BadMessage if the peer has no right to it."""
        kind = type(message)
        if may(self._codec.rights, self._peer.role, kind) is Scope.NONE:
            raise BadMessage(f"a {self._peer.role} may not send {kind.__name__}")
        if isinstance(message, Renewed):
            self._peer.session = message.session
        else:
            self._connections[kind].take(message)

    async def _serve(self, request: Request, connection: trio.CancelScope) -> None:
        self._counters.requests[type(request).__name__.lower()] += 1
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

    async def _send(self, number: int, answer: Answer, connection: trio.CancelScope) -> None:
        answer.number = number
        self._frames.put(answer)
        if not self._frames.flush_now():
            with trio.move_on_after(self._patience_s) as sending:
                await self._frames.flush()
            if sending.cancelled_caught:
                log.warning("%s does not take its answers; it is cut off", self._peer)
                connection.cancel()

    async def _answer(
        self, request: Request, done: Awaitable[Answer | Lasting]
    ) -> Answer | Lasting:
        """Return the answer, or the error."""
        try:
            return await done
        except OSError as error:
            code, node, text = failure_of(error, self._node.service.node)
            self._counters.errors[errno.errorcode.get(code, str(code))] += 1
            if isinstance(error, PermissionError):
                self._counters.denied_requests += 1
                tell_of_denial(self._peer, error)
            elif not isinstance(error, (Fenced, FileNotFoundError)):
                log.info("%s: %s: %s", self._peer, type(request).__name__.lower(), error)
            return Failed(code, node, text)
        except Exception:
            log.exception("%s: %s", self._peer, type(request).__name__.lower())
            return Failed(errno.EIO, self._node.service.node, "internal error; see its log")

    async def _do(self, request: Request) -> Answer | Lasting:
        content: int | None = None
        if isinstance(request, AboutExtent):
            content = request.extent.content
        elif isinstance(request, Abort):
            content = request.content
        peer, service = self._peer, self._node.service
        await check_right(service, self._codec.rights, peer, type(request), content)
        operation = OPERATIONS.get(type(request))
        if operation is not None:
            return await operation.do(self._node, request)
        return await self._connections[type(request)].answer(request)
