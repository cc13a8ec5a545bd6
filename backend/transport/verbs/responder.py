"""The node's end of queue pairs: extents are opened for a peer to read, and reserved for it to write.

Everything hangs on one control connection, which set the queue pair up: what a peer was given ends with
the operation, with the queue pair, with the connection, with its session in the cluster, or after GIVEN_S.
"""

import errno
import itertools
import logging
from collections.abc import Callable
from typing import NamedTuple

import trio

from ...store.intake import Intake
from .. import Extent, FileRange, Target
from ..growth import Growth
from ..mover import Host
from ..service import Held, Incoming, begin
from .adapter import Adapter
from .ends import QueueEnd, Rail
from .messages import HANDLES_MAX, NO_QUEUE_PAIR, NOT_BY_VERBS
from .queue import Broken, QueuePair
from .rdma import Rdma
from .regions import Region
from .windows import Window, grant

log = logging.getLogger(__name__)

# A peer that takes longer over one operation loses the right to it.
GIVEN_S = 600.0
SESSION_OVER = "the peer's session is over"


class _End(NamedTuple):
    adapter: Adapter
    pair: QueuePair


class _Given:
    """The right to a range of a file, in the peer's hands."""

    def __init__(self, end: _End, held: Held, region: Region, window: Window) -> None:
        self.held = held
        self.window = window
        self.end = end
        self._region: Region | None = region
        self.until = trio.current_time() + GIVEN_S

    def take_back(self) -> None:
        """The peer cannot touch the memory any more."""
        if self._region is not None:
            self.window.close()
            self.end.adapter.regions.release(self._region, keep=self.held.is_own)
            self._region = None


class _Arrival:
    """An extent that is coming in, in `intake` and by the right that was `given`; or one that is here, as
    `held`, and only handed on."""

    def __init__(
        self,
        end: _End,
        extent: Extent,
        target: Target,
        growth: Growth,
        piece: int,
        held: Held,
        intake: Intake[Incoming] | None = None,
        given: _Given | None = None,
    ) -> None:
        self.end = end
        self.extent = extent
        self.target = target
        self.growth = growth
        self.piece = piece
        self.held = held
        self.intake = intake
        self.given = given
        self.onward = trio.CancelScope()
        self.handed_on = trio.Event()
        self.onward_error: OSError | None = None
        if not target.chain:
            self.handed_on.set()

    def close(self) -> None:
        """Close the file, which nobody hands on any more, and drop it unless it was sealed."""
        (self.intake or self.held).close()


class Responder:
    """What one control connection may do by verbs. `nursery` is the connection's; `local` is this host's
    address on it, `is_gone` tells whether the peer's session is over."""

    def __init__(
        self,
        host: Host,
        rdma: Rdma,
        local: str,
        nursery: trio.Nursery,
        is_gone: Callable[[], bool],
    ) -> None:
        self._is_gone = is_gone
        self._service = host.service
        self._others = host.others
        self._counters = host.counters
        self._patience_s = host.timeout_s
        self._rdma = rdma
        self._local = local
        self._nursery = nursery
        self._handles = itertools.count(1)
        self._ends: dict[int, _End] = {}
        self._given: dict[int, _Given] = {}
        self._arrivals: dict[int, _Arrival] = {}

    def rails(self) -> list[Rail]:
        """Of this node. Raises OSError NOT_BY_VERBS."""
        try:
            return [own.rail for own in self._usable().rails(self._local)]
        except OSError as error:
            raise OSError(NOT_BY_VERBS, str(error.strerror)) from error

    def attach(self, end: QueueEnd, number: int, rail: str, gid: bytes) -> QueueEnd:
        """Raises OSError NOT_BY_VERBS."""
        self.detach("the peer set another queue pair up", number)
        if self._is_gone():
            raise OSError(NOT_BY_VERBS, SESSION_OVER)
        try:
            rdma = self._usable()
            adapter, gid_index = rdma.open(rdma.rail(self._local, rail, gid).route)
            pair = adapter.queue_pair(gid_index, receives=True, arrived=self._arrived)
            try:
                pair.connect(end, self._patience_s)
            except BaseException:
                pair.close()
                raise
        except OSError as error:
            raise OSError(NOT_BY_VERBS, str(error.strerror)) from error
        self._ends[number] = _End(adapter, pair)
        self._nursery.start_soon(pair.run)
        self._nursery.start_soon(self._watch, number, pair)
        return pair.end()

    def _usable(self) -> Rdma:
        """Raises OSError."""
        if not self._rdma.is_usable:
            raise OSError(NOT_BY_VERBS, self._rdma.why_not)
        return self._rdma

    def detach(self, why: str, number: int | None = None) -> None:
        """A queue pair (all of them) and what was given for it are of no use any more."""
        gone = [
            self._ends.pop(each) for each in list(self._ends) if number is None or each == number
        ]
        for end in gone:
            # Closed before any file is let go: a message that is half in holds its memory.
            end.pair.fail(why)
            end.pair.close()
        held: dict[int, _Given | _Arrival] = {**self._given, **self._arrivals}
        for handle, each in held.items():
            if each.end in gone:
                self._drop(handle, why)

    def release(self, handle: int) -> None:
        """The peer has read, or will not write."""
        self._drop(handle, "the sender gave it up")

    def give_up(self, content: int) -> None:
        """What is coming in of this content has no use any more."""
        for handle, arrival in list(self._arrivals.items()):
            if arrival.extent.content == content:
                self._drop(handle, "the content was given up")

    async def expose(
        self, extent: Extent, start: int, length: int, number: int
    ) -> tuple[int, int, int]:
        """Handle, address and key for reading. Raises OSError: ENOENT, EINVAL, NOT_BY_VERBS,
        NO_QUEUE_PAIR."""
        end = self._end(number)
        held = self._service.hold(extent)
        try:
            size = self._service.size(extent) or 0
            if start + length > size:
                raise OSError(errno.EINVAL, "the extent is shorter than what is asked for")
            given = await self._give(end, held, size, start, length, False)
        except BaseException:
            held.close()
            raise
        handle = next(self._handles)
        self._given[handle] = given
        self._counters.requests["read"] += 1
        self._counters.sent_bytes += length
        return handle, given.window.address, given.window.key

    async def reserve(
        self, extent: Extent, target: Target, length: int, piece: int, number: int
    ) -> tuple[int, int, int, bool]:
        """Handle, address, key and whether the bytes are wanted. Raises OSError: what `begin` raises,
        NOT_BY_VERBS, NO_QUEUE_PAIR."""
        end = self._end(number)
        intake = await self._begin(end, extent, target, length)
        if intake is None:
            growth, held = Growth(length, length), self._service.hold(extent)
            arrival = _Arrival(end, extent, target, growth, piece, held)
        else:
            held = intake.incoming
            try:
                given = await self._give(end, held, length, 0, length, True)
            except BaseException:
                intake.close()
                raise
            arrival = _Arrival(end, extent, target, Growth(length), piece, held, intake, given)
        handle = next(self._handles)
        self._arrivals[handle] = arrival
        self._counters.requests["write"] += 1
        if target.chain:
            self._nursery.start_soon(self._hand_on, arrival)
        if arrival.given is None:
            return handle, 0, 0, False
        return handle, arrival.given.window.address, arrival.given.window.key, True

    async def seal(self, handle: int) -> None:
        """All pieces have arrived, and the extent is sealed here and down the chain, when this returns.
        Raises what failed here, or else further down; NOT_BY_VERBS when the bytes were lost with the
        queue pair."""
        arrival = self._arrivals.get(handle)
        if arrival is None:
            raise OSError(NOT_BY_VERBS, "what was written is not here any more")
        await arrival.growth.complete()
        if self._arrivals.pop(handle, None) is None:
            raise OSError(NOT_BY_VERBS, "what was written is not here any more")
        try:
            await self._seal(arrival)
            await arrival.handed_on.wait()
            if arrival.onward_error is not None:
                raise arrival.onward_error
        finally:
            arrival.onward.cancel()
            self._leave(arrival)

    # -- coming in -------------------------------------------------------------------------------

    async def _begin(
        self, end: _End, extent: Extent, target: Target, length: int
    ) -> Intake[Incoming] | None:
        try:
            return await begin(self._service, extent, target, length)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        # Removed extents keep their memory for as long as they are registered.
        end.adapter.regions.drop_orphans()
        return await begin(self._service, extent, target, length)

    def _arrived(self, handle: int) -> None:
        arrival = self._arrivals.get(handle)
        if arrival is not None:
            before = arrival.growth.done
            arrival.growth.advance(arrival.piece)
            self._counters.received_bytes += arrival.growth.done - before

    async def _seal(self, arrival: _Arrival) -> None:
        if arrival.intake is not None and arrival.given is not None:
            # What is sealed never changes: first nobody can write it any more.
            arrival.given.take_back()
            await self._service.seal(arrival.extent, arrival.intake.take())

    def _drop(self, handle: int, why: str) -> None:
        given = self._given.pop(handle, None)
        if given is not None:
            given.take_back()
            given.held.close()
        arrival = self._arrivals.pop(handle, None)
        if arrival is not None:
            arrival.growth.give_up(OSError(NOT_BY_VERBS, why))
            arrival.onward.cancel()
            if arrival.given is not None:
                arrival.given.take_back()
            self._leave(arrival)

    def _leave(self, arrival: _Arrival) -> None:
        if arrival.handed_on.is_set():
            arrival.close()
        else:
            self._nursery.start_soon(_close_after, arrival)

    async def _hand_on(self, arrival: _Arrival) -> None:
        node, target = arrival.target.onward()
        held, length = arrival.held, arrival.growth.length
        try:
            with arrival.onward:
                await self._others.device(node).pass_on(
                    arrival.extent, target, FileRange(held.fd, 0, length), arrival.growth, held.lend
                )
                self._counters.sent_bytes += length
        except OSError as error:
            arrival.onward_error = error
        finally:
            arrival.handed_on.set()

    # -- rights ----------------------------------------------------------------------------------

    async def _give(
        self,
        end: _End,
        held: Held,
        size: int,
        start: int,
        length: int,
        writes: bool,
    ) -> _Given:
        """The whole file is registered, so that other ranges of it find it so. Raises OSError."""
        adapter, pair = end
        try:
            region = await adapter.regions.acquire_file(held.fd, size)
        except OSError as error:
            log.info("%d bytes cannot be registered: %s", size, error.strerror)
            text = f"{size} bytes cannot be registered: {error.strerror}"
            raise OSError(NOT_BY_VERBS, text) from None
        try:
            if pair.failure:
                raise Broken(pair.failure)
            window = await grant(adapter, pair, region, start, length, writes)
        except Broken as error:
            adapter.regions.release(region, keep=held.is_own)
            raise OSError(NO_QUEUE_PAIR, str(error)) from None
        except OSError as error:
            adapter.regions.release(region, keep=held.is_own)
            raise OSError(NOT_BY_VERBS, str(error)) from None
        except BaseException:
            adapter.regions.release(region, keep=held.is_own)
            raise
        given = _Given(end, held, region, window)
        if pair.failure:
            given.take_back()
            raise OSError(NO_QUEUE_PAIR, pair.failure)
        return given

    def _end(self, number: int) -> _End:
        """Raises OSError."""
        end = self._ends.get(number)
        if end is None:
            raise OSError(NO_QUEUE_PAIR, "there is no queue pair")
        if len(self._given) + len(self._arrivals) >= HANDLES_MAX:
            raise OSError(NOT_BY_VERBS, f"{HANDLES_MAX} operations are under way")
        return end

    async def _watch(self, number: int, pair: QueuePair) -> None:
        """Take back what was given when the queue pair breaks, or the peer takes too long."""
        while not pair.failure:
            with trio.move_on_after(GIVEN_S / 8):
                await pair.failed.wait()
            if self._is_gone():
                pair.fail(SESSION_OVER)
            now = trio.current_time()
            rights = list(self._given.items())
            rights += [(each, one.given) for each, one in self._arrivals.items() if one.given]
            for handle, given in rights:
                if given.until < now:
                    self.release(handle)
        end = self._ends.get(number)
        if end is not None and end.pair is pair:
            self.detach(pair.failure, number)


async def _close_after(arrival: _Arrival) -> None:
    with trio.CancelScope(shield=True):
        await arrival.handed_on.wait()
    arrival.close()
