"""The node's end over verbs: it grants a peer rights to read extents, and to write reserved ones.

A right ends with its operation, with the queue pair, with the control connection that set the pair up, with
the peer's session in the cluster, or after GIVEN_S.
"""

import errno
import itertools
import logging
from collections.abc import Callable
from functools import partial

import trio

from ...unwrap import if_it_fails
from .. import FileRange
from ..device import Growth
from ..messages import Answer, Done, Message, Request
from ..mover import Connection, Host, Lasting, Serving
from ..rights import Peer
from ..service import Held, Incoming, begin
from . import messages
from .queue import Broken, QueuePair, Window
from .rdma import Rdma

log = logging.getLogger(__name__)

# A peer that takes longer over one operation loses its right.
GIVEN_S = 600.0
SESSION_OVER = "the peer's session is over"


class _Operation:
    """A read of the file `held`, or a write into it, by a queue pair: the peer's right to a range of it is
    a window (None: it has no right, as the node has the extent already)."""

    def __init__(self, pair: QueuePair, held: Held, window: Window | None) -> None:
        self.pair = pair
        self.held = held
        self._window = window
        self.until = trio.current_time() + GIVEN_S

    def exposed(self, handle: int) -> messages.Exposed:
        if self._window is None:
            return messages.Exposed(handle, 0, 0, wanted=False)
        return messages.Exposed(handle, self._window.address, self._window.key)

    def take_back(self) -> None:
        """End the right: the peer cannot touch the memory any more."""
        window, self._window = self._window, None
        if window is not None:
            window.close()
            self.pair.port.regions.release(window.region, keep=self.held.is_own)


class Arrival(_Operation):
    """An extent that a peer writes. `incoming` is the file that it comes into, None if the extent is here
    already: then `held` is only handed on."""

    def __init__(
        self, pair: QueuePair, held: Held, window: Window | None, asked: messages.Reserve
    ) -> None:
        super().__init__(pair, held, window)
        self.asked = asked
        self.incoming = held if window is not None else None
        self.growth = Growth(asked.length, asked.length if window is None else 0, held.lend)
        self.onward = trio.CancelScope()
        self.handed_on = trio.Event()
        self.onward_error: OSError | None = None
        self.is_over = False
        if not asked.target.chain:
            self.handed_on.set()

    def end(self) -> None:
        """End handing it on, too. The file is closed when both have ended."""
        self.is_over = True
        self.onward.cancel()
        if self.handed_on.is_set():
            self.held.close()


class VerbsServing(Serving):
    """The end of one node. It has a responder for each control connection."""

    def __init__(self, host: Host, rdma: Rdma) -> None:
        self.host = host
        self.rdma = rdma
        self.responders: set[Responder] = set()

    def connected(self, peer: Peer, local: str, nursery: trio.Nursery) -> Connection:
        responder = Responder(self, peer, local, nursery)
        self.responders.add(responder)
        return responder

    def give_up(self, content: int) -> None:
        for responder in self.responders:
            responder.give_up(content)

    def end_rights(self, is_over: Callable[[Peer], bool]) -> None:
        for responder in self.responders:
            if is_over(responder.peer):
                responder.detach(SESSION_OVER)


class Responder(Connection):
    """Carries out what one peer asks of the verbs mover on its control connection. `nursery` is the
    connection's; `local` is this host's address on it."""

    def __init__(
        self, serving: VerbsServing, peer: Peer, local: str, nursery: trio.Nursery
    ) -> None:
        self.peer = peer
        self._serving = serving
        self._host = serving.host
        self._rdma = serving.rdma
        self._local = local
        self._nursery = nursery
        self._handles = itertools.count(1)
        self._pairs: dict[int, QueuePair] = {}
        self._operations: dict[int, _Operation] = {}

    async def answer(self, request: Request) -> Answer | Lasting:
        if isinstance(request, messages.Attach | messages.Rails):
            try:
                if isinstance(request, messages.Attach):
                    return messages.Attached(self._attach(request))
                return messages.RailsFound([own.rail for own in self._rdma.rails(self._local)])
            except OSError as error:
                raise OSError(messages.NOT_BY_VERBS, str(error.strerror)) from error
        if isinstance(request, messages.Expose):
            return await self._expose(request)
        assert isinstance(request, messages.Reserve)
        first = await self._reserve(request)
        return Lasting(first, request.sealed, partial(self._seal, first.handle))

    def take(self, message: Message) -> None:
        match message:
            case messages.Release():
                self._drop(message.handle, "the sender gave it up")
            case messages.Detach():
                self.detach("the peer gave it up", message.pair)

    def close(self, why: str) -> None:
        self._serving.responders.discard(self)
        self.detach(why)

    def detach(self, why: str, number: int | None = None) -> None:
        """Close queue pair `number`, or all of them, and end the rights granted for it."""
        numbers = list(self._pairs) if number is None else [number]
        gone = [self._pairs.pop(each) for each in numbers if each in self._pairs]
        for pair in gone:
            # Close it before its files: a message that has partly arrived still writes to their memory.
            pair.fail(why)
            pair.close()
        for handle, operation in list(self._operations.items()):
            if operation.pair in gone:
                self._drop(handle, why)

    def give_up(self, content: int) -> None:
        """Drop what has arrived of this content: nobody needs it any more."""
        for handle, operation in list(self._operations.items()):
            if isinstance(operation, Arrival) and operation.asked.extent.content == content:
                self._drop(handle, "the content was given up")

    # -- queue pairs -----------------------------------------------------------------------------

    def _attach(self, asked: messages.Attach) -> messages.QueueEnd:
        """Set up a queue pair with the peer's, and return this end. Raises OSError."""
        self.detach("the peer set another queue pair up", asked.pair)
        if self._host.is_gone(self.peer):
            raise OSError(errno.ENOTCONN, SESSION_OVER)
        route = self._rdma.rail(self._local, asked.rail, asked.gid).route
        pair = self._rdma.open(route).queue_pair(route.gid, self._arrived)
        with if_it_fails(pair.close):
            pair.connect(asked.end, self._host.timeout_s)
        self._pairs[asked.pair] = pair
        self._nursery.start_soon(pair.run)
        self._nursery.start_soon(self._watch, asked.pair, pair)
        return pair.end()

    # -- reading and writing ---------------------------------------------------------------------

    async def _expose(self, asked: messages.Expose) -> messages.Exposed:
        """Grant the right to read. Raises OSError: ENOENT, EINVAL, NOT_BY_VERBS, NO_QUEUE_PAIR."""
        pair = self._pair(asked.pair)
        held = await self._host.service.hold_own(asked.extent)
        with if_it_fails(held.close):
            size = self._host.service.size(asked.extent) or 0
            if asked.start + asked.length > size:
                raise OSError(errno.EINVAL, "the extent is shorter than what is asked for")
            window = await self._give(pair, held, size, asked.start, asked.length, False)
        self._host.counters.requests["read"] += 1
        self._host.counters.sent_bytes += asked.length
        return self._begun(_Operation(pair, held, window))

    async def _reserve(self, asked: messages.Reserve) -> messages.Exposed:
        """Grant the right to write wanted bytes. Raises as `begin`, and NOT_BY_VERBS, NO_QUEUE_PAIR."""
        pair, length = self._pair(asked.pair), asked.length
        incoming = await self._begin(pair, asked)
        if incoming is None:
            arrival = Arrival(pair, self._host.service.hold(asked.extent), None, asked)
        else:
            with if_it_fails(incoming.close):
                window = await self._give(pair, incoming, length, 0, length, True)
            arrival = Arrival(pair, incoming, window, asked)
        self._host.counters.requests["write"] += 1
        if asked.target.chain:
            self._nursery.start_soon(self._hand_on, arrival)
        return self._begun(arrival)

    def _begun(self, operation: _Operation) -> messages.Exposed:
        handle = next(self._handles)
        self._operations[handle] = operation
        return operation.exposed(handle)

    async def _seal(self, handle: int) -> Answer:
        """Answer when all pieces have arrived and the extent is sealed here and down the chain. Raises
        the failure here, or the one further down; NOT_BY_VERBS if its queue pair was lost."""
        arrival = self._operations.get(handle)
        if isinstance(arrival, Arrival):
            await arrival.growth.complete()
        if not isinstance(arrival, Arrival) or self._operations.pop(handle, None) is None:
            raise OSError(messages.NOT_BY_VERBS, "the written bytes are not here any more")
        try:
            # A sealed extent never changes: end the right to write first.
            arrival.take_back()
            if arrival.incoming is not None:
                await self._host.service.seal(arrival.asked.extent, arrival.incoming)
            await arrival.handed_on.wait()
            if arrival.onward_error is not None:
                raise arrival.onward_error
        finally:
            arrival.end()
        return Done()

    # -- coming in -------------------------------------------------------------------------------

    async def _begin(self, pair: QueuePair, asked: messages.Reserve) -> Incoming | None:
        try:
            return await begin(self._host.service, asked.extent, asked.target, asked.length)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        # A removed extent keeps its memory until it is unregistered: do that, and try again.
        pair.port.regions.drop_orphans()
        return await begin(self._host.service, asked.extent, asked.target, asked.length)

    def _arrived(self, handle: int) -> None:
        arrival = self._operations.get(handle)
        if isinstance(arrival, Arrival):
            before = arrival.growth.done
            arrival.growth.advance(arrival.asked.piece)
            self._host.counters.received_bytes += arrival.growth.done - before

    def _drop(self, handle: int, why: str) -> None:
        operation = self._operations.pop(handle, None)
        if operation is None:
            return
        operation.take_back()
        if isinstance(operation, Arrival):
            operation.growth.give_up(OSError(messages.NOT_BY_VERBS, why))
            operation.end()
        else:
            operation.held.close()

    async def _hand_on(self, arrival: Arrival) -> None:
        node, target = arrival.asked.target.onward()
        held, length = arrival.held, arrival.growth.length
        try:
            with arrival.onward:
                await self._host.device(node).write(
                    arrival.asked.extent,
                    target,
                    FileRange(held.fd, 0, length),
                    growth=arrival.growth,
                )
                self._host.counters.sent_bytes += length
        except OSError as error:
            arrival.onward_error = error
        finally:
            arrival.handed_on.set()
            if arrival.is_over:
                held.close()

    # -- rights ----------------------------------------------------------------------------------

    async def _give(
        self, pair: QueuePair, held: Held, size: int, start: int, length: int, writes: bool
    ) -> Window:
        """Grant a right. Registers the whole file, which later ranges of it can use. Raises OSError."""
        regions = pair.port.regions
        try:
            region = await regions.acquire(held.fd, size)
        except OSError as error:
            text = f"{size} bytes cannot be registered: {error.strerror}"
            log.info("%s", text)
            raise OSError(messages.NOT_BY_VERBS, text) from None
        with if_it_fails(lambda: regions.release(region, keep=held.is_own)):
            try:
                if pair.failure:
                    raise Broken(pair.failure)
                window = await pair.grant(region, start, length, writes)
                if pair.failure:
                    window.close()
                    raise Broken(pair.failure)
            except Broken as error:
                raise OSError(messages.NO_QUEUE_PAIR, str(error)) from None
            except OSError as error:
                raise OSError(messages.NOT_BY_VERBS, str(error)) from None
        return window

    def _pair(self, number: int) -> QueuePair:
        """Return queue pair `number`. Raises OSError if it is gone, or has too many operations."""
        pair = self._pairs.get(number)
        if pair is None:
            raise OSError(messages.NO_QUEUE_PAIR, "there is no queue pair")
        if len(self._operations) >= messages.HANDLES_MAX:
            raise OSError(messages.NOT_BY_VERBS, f"{messages.HANDLES_MAX} operations are under way")
        return pair

    async def _watch(self, number: int, pair: QueuePair) -> None:
        """End the rights granted for a queue pair when it breaks, and each right after GIVEN_S."""
        while not pair.failure:
            with trio.move_on_after(GIVEN_S / 8):
                await pair.failed.wait()
            if self._host.is_gone(self.peer):
                pair.fail(SESSION_OVER)
            now = trio.current_time()
            for handle, operation in list(self._operations.items()):
                if operation.until < now:
                    self._drop(handle, "it took too long")
        if self._pairs.get(number) is pair:
            self.detach(pair.failure, number)
