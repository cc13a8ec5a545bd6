"""The node's end of one control connection: requests are answered as they become ready."""

import errno
import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import trio

from ..observe import logs
from ..store.intake import Intake
from . import Extent, Fenced, FileRange, Target
from .codec import Codec
from .counters import Counters
from .frames import BadMessage, Frames
from .messages import (
    GET_BYTES_MAX,
    LASTING_MAX,
    REQUESTS_AT_ONCE,
    Abort,
    AboutExtent,
    Adopt,
    Answer,
    Contents,
    Digest,
    Digested,
    Done,
    Doubt,
    Failed,
    Get,
    Map,
    Mapped,
    Message,
    Ping,
    Put,
    Renewed,
    Report,
    Request,
    Scrub,
    Status,
    Suspect,
    Verdict,
    failure_of,
)
from .mover import Connection, Lasting, Others
from .prompt import acquire
from .rights import Peer, Scope, may, need, tell_of_denial
from .service import Service, begin

log = logging.getLogger(__name__)

_IN_A_ROW = 8
# Reading more small files than this is left to a thread.
_READ_AT_ONCE = 16


class Control:
    """`give_up(content)` ends what is coming in of a content; `connect(nursery)` gives who does what the
    messages of movers ask for."""

    _connections: dict[type[Message], Connection]

    def __init__(
        self,
        frames: Frames,
        peer: Peer,
        codec: Codec,
        service: Service[Any],
        others: Others,
        counters: Counters,
        give_up: Callable[[int], None],
        connect: Callable[[trio.Nursery], AbstractContextManager[dict[type[Message], Connection]]],
        *,
        idle_s: float,
        patience_s: float,
    ) -> None:
        self._frames = frames
        self._peer = peer
        self._codec = codec
        self._service = service
        self._others = others
        self._counters = counters
        self._give_up = give_up
        self._connect = connect
        self._idle_s = idle_s
        self._patience_s = patience_s
        self._heard = 0
        # What is being written to is not answered for long.
        self._slots = trio.Semaphore(REQUESTS_AT_ONCE + LASTING_MAX)

    async def run(self) -> None:
        """Until the peer closes the connection or says nothing for `idle_s` or somewhat longer; what is not
        answered then is cancelled. Raises BadMessage, trio.EndOfChannel, trio.BrokenResourceError."""
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
            # Nothing is taken while as much as allowed is being done.
            quiet = quiet + 1 if heard == self._heard and self._slots.value else 0
        connection.cancel()

    async def _take_request(self, nursery: trio.Nursery) -> None:
        if self._frames.has_received and self._heard % _IN_A_ROW == 0:
            # It has sent much at once: the others have their turn, too.
            await trio.lowlevel.checkpoint()
        message = self._codec.decode(await self._frames.receive())
        self._heard += 1
        if not isinstance(message, Request):
            self._take(message)
            return
        self._codec.check(message)
        await acquire(self._slots)
        if _is_short(message):
            await self._serve(message, nursery.cancel_scope)
        else:
            nursery.start_soon(self._serve, message, nursery.cancel_scope)

    def _take(self, message: Message) -> None:
        """Take a message that has no answer. Raises BadMessage if it is not the peer's right."""
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
                answer = await self._answer(request, request.number, self._do(request))
                while isinstance(answer, Lasting):
                    await self._send(answer.first, connection)
                    answer = await self._answer(request, answer.number, answer.then())
            await self._send(answer, connection)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            connection.cancel()
        finally:
            self._slots.release()

    async def _send(self, answer: Answer, connection: trio.CancelScope) -> None:
        self._frames.put(answer)
        if not self._frames.flush_now():
            with trio.move_on_after(self._patience_s) as sending:
                await self._frames.flush()
            if sending.cancelled_caught:
                log.warning("%s does not take its answers; it is cut off", self._peer)
                connection.cancel()

    async def _answer(
        self, request: Request, number: int, done: Awaitable[Answer | Lasting]
    ) -> Answer | Lasting:
        """What is done, or why it failed."""
        try:
            return await done
        except OSError as error:
            code, node, text = failure_of(error, self._service.node)
            self._counters.errors[errno.errorcode.get(code, str(code))] += 1
            if isinstance(error, PermissionError):
                self._counters.denied += 1
                tell_of_denial(self._peer, error)
            elif not isinstance(error, (Fenced, FileNotFoundError)):
                log.info("%s: %s: %s", self._peer, type(request).__name__.lower(), error)
            return Failed(number, code, node, text)
        except Exception:
            log.exception("%s: %s", self._peer, type(request).__name__.lower())
            return Failed(number, errno.EIO, self._service.node, "internal error; see its log")

    async def _check_right(self, request: Request) -> None:
        """Raises OSError EACCES, and what Service.check_owner raises."""
        if need(self._codec.rights, self._peer.role, type(request)) is Scope.OWN:
            assert isinstance(request, (AboutExtent, Abort))
            content = request.content if isinstance(request, Abort) else request.extent.content
            await self._service.check_owner(self._peer, self._peer.session, content)

    async def _do(self, request: Request) -> Answer | Lasting:
        service, number = self._service, request.number
        await self._check_right(request)
        match request:
            case Ping():
                return Done(number)
            case Put():
                await self._put(request.extent, request.target, request.data)
                return Done(number)
            case Get():
                return Contents(number, await self._get(request.extents, request.limit))
            case Adopt():
                await self._adopt(request.extent, request.target, request.name)
                return Done(number)
            case Abort():
                self._give_up(request.content)
                service.abort(request.content)
                return Done(number)
            case Suspect():
                return Verdict(number, await service.suspect(request.group, request.node))
            case Doubt():
                service.doubt(request.extent)
                return Done(number)
            case Digest():
                return Digested(number, await service.digest(request.extent))
            case Map():
                return Mapped(number, await service.segments(request.extent))
            case Scrub():
                service.scrub()
                return Done(number)
            case Status():
                return Report(number, service.status())
        return await self._connections[type(request)].answer(request)

    async def _put(self, extent: Extent, target: Target, data: bytes) -> None:
        intake = await begin(self._service, extent, target, len(data))

        async def store() -> None:
            if intake is not None:
                _write(intake.fd, data)
                await self._service.seal(extent, intake.take())
                self._counters.received_bytes += len(data)

        async def forward(node: int, rest: Target) -> None:
            await self._others.device(node).put(extent, rest, data)
            self._counters.sent_bytes += len(data)

        with intake or nullcontext():
            await _here_and_further(target, store, forward)

    async def _adopt(self, extent: Extent, target: Target, name: str) -> None:
        service = self._service
        await service.admit(extent, target)
        if service.size(extent) is not None:
            # A second try, after a node further down failed.
            fd = service.open(extent)
        else:
            with Intake(await service.adopt(extent, name), service.drop) as intake:
                fd = os.dup(intake.fd)
                try:
                    await service.seal(extent, intake.take())
                except BaseException:
                    os.close(fd)
                    raise

        async def nothing() -> None:
            pass

        async def forward(node: int, rest: Target) -> None:
            size = os.fstat(fd).st_size
            await self._others.device(node).write(extent, rest, FileRange(fd, 0, size))
            self._counters.sent_bytes += size

        try:
            await _here_and_further(target, nothing, forward)
        finally:
            os.close(fd)

    async def _get(self, extents: list[Extent], limit: int) -> list[bytes | None]:
        if len(extents) > _READ_AT_ONCE:
            data = await trio.to_thread.run_sync(_read, self._service, extents, limit)
        else:
            data = _read(self._service, extents, limit)
        self._counters.sent_bytes += sum(len(one) for one in data if one is not None)
        return data


def _is_short(request: Request) -> bool:
    """Whether it waits for nothing, so that a task of its own would cost more than the answer."""
    match request:
        case Ping() | Doubt():
            return True
        case Get():
            return len(request.extents) <= _READ_AT_ONCE
    return False


async def _here_and_further(
    target: Target,
    here: Callable[[], Awaitable[None]],
    forward: Callable[[int, Target], Awaitable[None]],
) -> None:
    """Do something on this node and the rest of the chain at once. Raises what failed here, or else
    further down."""
    if not target.chain:
        await here()
        return
    errors: dict[bool, OSError] = {}

    async def attempt(is_here: bool, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except OSError as error:
            errors[is_here] = error

    node, further = target.onward()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(attempt, True, here)
        nursery.start_soon(attempt, False, lambda: forward(node, further))
    for is_here in (True, False):
        if is_here in errors:
            raise errors[is_here]


def _write(fd: int, data: bytes) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], done)


def _read(service: Service[Any], extents: list[Extent], limit: int) -> list[bytes | None]:
    """Of as many extents as an answer holds, at least one."""
    found: list[bytes | None] = []
    room = GET_BYTES_MAX
    for extent in extents:
        data = _read_one(service, extent, limit)
        found.append(data)
        room -= len(data or b"")
        if room <= 0:
            break
    return found


def _read_one(service: Service[Any], extent: Extent, limit: int) -> bytes | None:
    try:
        fd = service.open(extent)
    except FileNotFoundError:
        return None
    try:
        size = service.size(extent)
        if size is None:
            size = os.fstat(fd).st_size  # freed a moment ago
        return os.pread(fd, size, 0) if size <= limit else None
    finally:
        os.close(fd)
