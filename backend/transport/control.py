"""The node's end of one control connection: requests are answered as they become ready."""

import errno
import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from .. import logs
from . import Extent, Fenced, FileRange, Target
from .counters import Counters
from .messages import (
    GET_BYTES_MAX,
    GET_EXTENTS_MAX,
    HANDLES_MAX,
    NAME_MAX,
    PUT_BYTES_MAX,
    REQUESTS_AT_ONCE,
    TICKETS_MAX,
    Abort,
    Adopt,
    AnyAnswer,
    AnyRequest,
    Attach,
    Attached,
    BadMessage,
    Contents,
    Detach,
    Digest,
    Digested,
    Done,
    Doubt,
    Expose,
    Exposed,
    Failed,
    Frames,
    Get,
    Granted,
    Map,
    Mapped,
    OneWay,
    Ping,
    Put,
    Rails,
    RailsFound,
    Release,
    Renewed,
    Report,
    Reserve,
    Scrub,
    Status,
    Suspect,
    Tickets,
    Verdict,
    check_end,
    check_extent,
    check_numbers,
    check_pair,
    check_range,
    check_reservation,
    check_target,
    decode_request,
    failure_of,
)
from .prompt import acquire
from .rights import Peer, Scope, may, need
from .service import Service
from .verbs.responder import Responder

if TYPE_CHECKING:
    from .peers import Peers

log = logging.getLogger(__name__)

T = TypeVar("T")

_IN_A_ROW = 8
# Reading more small files than this is left to a thread.
_READ_AT_ONCE = 16


class Control:
    """`grant(peer, count)` gives tickets for data connections, `give_up(content)` ends what is coming in
    of a content, `respond(nursery)` serves what is done by verbs."""

    _responder: Responder

    def __init__(
        self,
        frames: Frames,
        peer: Peer,
        service: Service[Any],
        peers: "Peers",
        counters: Counters,
        grant: Callable[[Peer, int], list[bytes]],
        give_up: Callable[[int], None],
        respond: Callable[[trio.Nursery], AbstractContextManager[Responder]],
        *,
        idle_s: float,
        patience_s: float,
    ) -> None:
        self._frames = frames
        self._peer = peer
        self._service = service
        self._peers = peers
        self._counters = counters
        self._grant = grant
        self._give_up = give_up
        self._respond = respond
        self._idle_s = idle_s
        self._patience_s = patience_s
        self._heard = 0
        # What is being written to is not answered for long.
        self._slots = trio.Semaphore(REQUESTS_AT_ONCE + HANDLES_MAX)

    async def run(self) -> None:
        """Until the peer closes the connection or says nothing for `idle_s` or somewhat longer; what is not
        answered then is cancelled. Raises BadMessage, trio.EndOfChannel, trio.BrokenResourceError."""
        error: Exception | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, nursery.cancel_scope)
            try:
                with self._respond(nursery) as self._responder:
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
        request = decode_request(await self._frames.receive())
        self._heard += 1
        if isinstance(request, OneWay) and may(self._peer.role, type(request)) is Scope.NONE:
            raise BadMessage(f"a {self._peer.role} may not send {type(request).__name__}")
        match request:
            case Renewed():
                self._peer.session = request.session
            case Release():
                self._responder.release(request.handle)
            case Detach():
                self._responder.detach("the peer gave it up", request.pair)
            case _:
                self._check(request)
                await acquire(self._slots)
                if _is_short(request):
                    await self._serve(request, nursery.cancel_scope)
                else:
                    nursery.start_soon(self._serve, request, nursery.cancel_scope)

    def _check(self, request: AnyRequest) -> None:
        """Raises BadMessage for what our own software never sends."""
        match request:
            case Put():
                check_target(request.target)
                check_extent(request.extent)
                if len(request.data) > PUT_BYTES_MAX:
                    raise BadMessage(f"an extent of {len(request.data)} bytes in a message")
            case Adopt():
                check_target(request.target)
                check_extent(request.extent)
                if len(request.name) > NAME_MAX:
                    raise BadMessage(f"a file name of {len(request.name)} characters")
            case Abort():
                check_numbers(request.content)
            case Suspect():
                check_numbers(request.group, request.node)
            case Get():
                if len(request.extents) > GET_EXTENTS_MAX or request.limit > PUT_BYTES_MAX:
                    raise BadMessage("more is asked for than a message can hold")
                for extent in request.extents:
                    check_extent(extent)
            case Tickets():
                if not 0 < request.count <= TICKETS_MAX:
                    raise BadMessage(f"{request.count} tickets are asked for")
            case Attach():
                check_end(request.end)
                check_pair(request.pair)
            case Expose():
                check_pair(request.pair)
                check_extent(request.extent)
                check_range(request.start, request.length)
            case Doubt() | Digest() | Map():
                check_extent(request.extent)
            case Reserve():
                check_pair(request.pair)
                check_target(request.target)
                check_extent(request.extent)
                check_reservation(request.length, request.piece)

    async def _serve(self, request: AnyRequest, connection: trio.CancelScope) -> None:
        self._counters.requests[type(request).__name__.lower()] += 1
        try:
            with logs.request(request.trace):
                answer = await self._answer(request, request.number, self._do(request))
                if isinstance(request, Reserve) and isinstance(answer, Exposed):
                    await self._send(answer, connection)
                    sealed = self._seal(answer.handle, request.sealed)
                    answer = await self._answer(request, request.sealed, sealed)
            await self._send(answer, connection)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            connection.cancel()
        finally:
            self._slots.release()

    async def _send(self, answer: AnyAnswer, connection: trio.CancelScope) -> None:
        self._frames.put(answer)
        if not self._frames.flush_now():
            with trio.move_on_after(self._patience_s) as sending:
                await self._frames.flush()
            if sending.cancelled_caught:
                log.warning("%s does not take its answers; it is cut off", self._peer)
                connection.cancel()

    async def _answer(
        self, request: AnyRequest, number: int, done: Awaitable[AnyAnswer]
    ) -> AnyAnswer:
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

    async def _seal(self, handle: int, number: int) -> AnyAnswer:
        await self._responder.seal(handle)
        return Done(number)

    async def _check_right(self, request: AnyRequest) -> None:
        """Raises OSError EACCES, and what Service.check_owner raises."""
        if need(self._peer.role, type(request)) is Scope.OWN:
            assert isinstance(request, (Put, Adopt, Abort, Reserve))
            content = request.content if isinstance(request, Abort) else request.extent.content
            await self._service.check_owner(self._peer, self._peer.session, content)

    async def _do(self, request: AnyRequest) -> AnyAnswer:
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
            case Tickets():
                return Granted(number, self._grant(self._peer, request.count))
            case Attach():
                end = self._responder.attach(request.end, request.pair, request.rail, request.gid)
                return Attached(number, end)
            case Rails():
                return RailsFound(number, self._responder.rails())
            case Expose():
                exposed = await self._responder.expose(
                    request.extent, request.start, request.length, request.pair
                )
                return Exposed(number, *exposed)
            case Reserve():
                reserved = await self._responder.reserve(
                    request.extent, request.target, request.length, request.piece, request.pair
                )
                return Exposed(number, *reserved)

    async def _put(self, extent: Extent, target: Target, data: bytes) -> None:
        await self._service.admit(extent, target)

        async def store() -> None:
            if self._service.size(extent) == len(data):
                return
            incoming = await self._service.create(extent, len(data))
            try:
                await sealed_or_dropped(
                    self._service, extent, incoming, lambda fd: _write(fd, data)
                )
            finally:
                incoming.close()
            self._counters.received_bytes += len(data)

        async def forward(node: int, rest: Target) -> None:
            await self._peers.device(node).put(extent, rest, data)
            self._counters.sent_bytes += len(data)

        await _here_and_further(target, store, forward)

    async def _adopt(self, extent: Extent, target: Target, name: str) -> None:
        service = self._service
        await service.admit(extent, target)
        if service.size(extent) is not None:
            # A second try, after a node further down failed.
            fd = service.open(extent)
        else:
            incoming = await service.adopt(extent, name)
            try:
                fd = os.dup(incoming.fd)
                await sealed_or_dropped(service, extent, incoming, lambda fd: None)
            finally:
                incoming.close()

        async def nothing() -> None:
            pass

        async def forward(node: int, rest: Target) -> None:
            size = os.fstat(fd).st_size
            await self._peers.device(node).write(extent, rest, FileRange(fd, 0, size))
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


def tell_of_denial(peer: Peer, error: PermissionError) -> None:
    """Log the first thing that a peer asked for without the right to it."""
    peer.denials += 1
    log.log(logging.WARNING if peer.denials == 1 else logging.DEBUG, "%s: %s", peer, error.strerror)


def _is_short(request: AnyRequest) -> bool:
    """Whether it waits for nothing, so that a task of its own would cost more than the answer."""
    match request:
        case Ping() | Doubt():
            return True
        case Get():
            return len(request.extents) <= _READ_AT_ONCE
    return False


async def sealed_or_dropped(
    service: Service[Any], extent: Extent, incoming: Any, fill: Callable[[int], None]
) -> None:
    try:
        fill(incoming.fd)
    except BaseException:
        service.drop(incoming)
        raise
    await service.seal(extent, incoming)


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

    node, *rest = target.chain
    further = Target(target.group, target.config, tuple(rest))
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
