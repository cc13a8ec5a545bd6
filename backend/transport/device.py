"""A store node as a device, and the ways by which extents move to and from it.

A transfer takes the fastest way that suits it and reaches the node. A way that cannot do it after all
raises NotThisWay, and the next one does it, without a trace of the first.
"""

import errno
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from operator import methodcaller
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import trio

from ..files.sparse import is_sparse
from ..model.records import SIZE_MAX
from ..observe.logs import log_failure
from . import Extent, FileRange, Landed, Memory, Target, Unreachable, messages, nothing_landed
from .link import Link
from .prompt import acquire

log = logging.getLogger(__name__)


class NotThisWay(Exception):
    """A transfer is not possible in this way, but may be in another one; the text says why."""


class Growth:
    """The progress of an extent that is being received, for tasks that send it on or seal it: the first
    `done` of `length` bytes have been. `lend` is called before anything may keep a reference to the file's
    pages (service.Held.lend)."""

    def __init__(self, length: int, done: int = 0, lend: Callable[[], None] = lambda: None) -> None:
        self.length = length
        self.done = done
        self.lend = lend
        self._error: OSError | None = None
        self._changed = trio.Event()

    def advance(self, count: int) -> None:
        """Count `count` more bytes, at most as many as were missing."""
        self.done = min(self.length, self.done + count)
        self._notify()

    def give_up(self, error: OSError) -> None:
        """Note that no more bytes will be received. A complete extent stays complete."""
        if self._error is None:
            self._error = error
            self._notify()

    async def more_than(self, count: int) -> int:
        """Wait for more bytes than these, and return how many there are. Raises the error of `give_up`."""
        while self.done <= count:
            if self._error is not None:
                raise self._error
            await self._changed.wait()
        return self.done

    async def complete(self) -> None:
        """Wait until all bytes are there. Raises the error of `give_up`."""
        if self.length:
            await self.more_than(self.length - 1)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


class Transfer(NamedTuple):
    """The properties of a transfer: `length` bytes between a node and `memory`."""

    operation: Literal["read", "write"]
    length: int
    memory: Memory = Memory.FILE
    is_sparse: bool = False


class Sending(NamedTuple):
    """An extent on its way to a target: a part of a file. `passed` is called, from any thread, with bytes
    that are in memory of this process. With `growth`, it is still being received; else it may be sparse."""

    extent: Extent
    target: Target
    source: FileRange
    passed: Landed = nothing_landed
    growth: Growth | None = None
    is_sparse: bool = False


class Way(Protocol):
    """The caller's end of a mover, to one store node. Moving raises OSError as Device's methods do, and
    NotThisWay. `name` is the mover's. `shows_bytes`: written bytes pass through this process's memory."""

    name: str
    shows_bytes: bool

    def suits(self, transfer: Transfer) -> bool:
        """Return whether such a transfer should take this way. Makes no request to find out."""

    async def reach(self) -> int | None:
        """Return the Mbit/s at which the node is reached (0: not known), None if it is not reached in this
        way now. Missing connections are set up first, if several ways suit. Raises Unreachable."""

    async def read(self, extent: Extent, start: int, into: FileRange, landed: Landed) -> None:
        """Do as Device.read; the file is long enough."""

    async def write(self, sending: Sending) -> None:
        """Do as Device.write."""


W = TypeVar("W", bound=Way)


class Device:
    """One store node, reached over a link and by `ways`, the better ones first."""

    def __init__(self, link: Link, ways: Sequence[Way]) -> None:
        self.link = link
        self._counters = link.caller.counters
        self._ways = ways

    async def put(self, *parcels: messages.Parcel) -> None:
        """Store small extents, PUTS_MAX at most and PUTS_BYTES_MAX together, on this node alone; they are
        sealed when this returns. Each may be there, or not, when it raises OSError."""
        await self.link.ask(messages.Put([*parcels]), messages.Done)
        self._counters.message_bytes += sum(len(parcel.data) for parcel in parcels)

    async def get(self, extents: Sequence[Extent], limit: int) -> list[bytes | None]:
        """Return small extents whole, in one round trip; None for missing ones, and those above `limit`."""
        found: list[bytes | None] = []
        limit = min(limit, messages.PUT_BYTES_MAX)
        while len(found) < len(extents):
            wanted = list(extents[len(found) : len(found) + messages.GET_EXTENTS_MAX])
            answer = await self.link.ask(messages.Get(wanted, limit), messages.Contents)
            if not 0 < len(answer.data) <= len(wanted):
                raise OSError(errno.EPROTO, "a node's answer makes no sense")
            found += answer.data
        self._counters.message_bytes += sum(len(data) for data in found if data is not None)
        return found

    async def adopt(self, extent: Extent, target: Target, name: str) -> None:
        """Make the file `incoming/NAME` of the node's store directory this extent, without a copy, and
        send it down the chain. On the node's host only."""
        await self.link.ask(messages.Adopt(extent, target, name), messages.Done)

    async def share(self, extent: Extent, target: Target, source: Extent, length: int) -> None:
        """Make an extent of the bytes of another one that the node has, without a copy. The target's chain
        is not gone on with. Raises OSError ENOENT if the node does not have `length` bytes of it."""
        await self.link.ask(messages.Share(extent, target, source, length), messages.Done)

    async def digest(self, extent: Extent) -> bytes:
        """Return the digest (backend/files/digest.py) of the node's bytes."""
        return (await self.link.ask(messages.Digest(extent), messages.Digested)).digest

    async def doubt(self, extent: Extent) -> None:
        """Tell the node that it sent wrong bytes, if that is possible. It then checks its extent itself."""
        with log_failure(log.info, "content %x", extent.content):
            await self.link.ask(messages.Doubt(extent), messages.Done)

    async def abort(self, content: int) -> None:
        """Remove the extents of a content that will not be published."""
        await self.link.ask(messages.Abort(content), messages.Done)

    def write(
        self,
        extent: Extent,
        target: Target,
        source: FileRange,
        passed: Landed = nothing_landed,
        growth: Growth | None = None,
    ) -> Coroutine[Any, Any, None]:
        """Send a part of a file as an extent; it is sealed everywhere when this returns. Holes stay holes,
        unless they are small. No bytes are in a Python object; `passed` is called, from any thread, with
        those that are in memory of this process. The caller keeps the descriptor. With `growth`, the file
        is still being received, and has no holes."""
        has_holes = False
        if growth is None:
            status = os.fstat(source.fd)
            has_holes = is_sparse(status.st_size, status.st_blocks)
        sending = Sending(extent, target, source, passed, growth, has_holes)
        transfer = Transfer("write", source.length, is_sparse=has_holes)
        # An extent that is being received waits for no other one: crossing chains would block each other.
        takes_turns = growth is None
        return self._move(transfer, lambda way: way.write(sending), takes_turns=takes_turns)

    def read(
        self, extent: Extent, start: int, into: FileRange, landed: Landed = nothing_landed
    ) -> Coroutine[Any, Any, None]:
        """Receive a range of an extent, from `start`, of the length of the part of a file, which may be
        after the file's end. Raises OSError EOPNOTSUPP for a device's memory that cannot be reached."""
        _lengthen(into)
        has_holes = into.memory is Memory.HOLES
        transfer = Transfer("read", into.length, into.memory, is_sparse=has_holes)
        return self._move(transfer, lambda way: way.read(extent, start, into, landed))

    # -- ways ------------------------------------------------------------------------------------

    def way(self, kind: type[W]) -> W:
        """Return the way of this kind. Raises Unreachable."""
        for way in self._ways:
            if isinstance(way, kind):
                return way
        raise Unreachable(self.link.node, f"this process has no {kind.__name__}")

    def shows_bytes(self) -> bool:
        """Return whether bytes that are written are, most likely, in memory of this process."""
        much = Transfer("write", SIZE_MAX)
        for way in self._ways:
            if way.suits(much):
                return way.shows_bytes
        return False

    async def _move(
        self,
        transfer: Transfer,
        move: Callable[[Way], Awaitable[None]],
        *,
        takes_turns: bool = True,
    ) -> None:
        """Move a transfer by the fastest way; if it `takes_turns`, when fewer than the limit are under way.
        Raises OSError: the node's error; EOPNOTSUPP if there is no way."""
        ways = [*filter(methodcaller("suits", transfer), self._ways)]
        counters, why = self._counters, ""
        if takes_turns:
            await acquire(self.link.operations)
        try:
            if len(ways) > 1:
                reached = [(await way.reach(), way) for way in ways]
                speeds = [(mbit_s, way) for mbit_s, way in reached if mbit_s is not None]
                ways = [way for _, way in sorted(speeds, key=lambda each: -each[0])]
            for number, way in enumerate(ways, 1):
                control = await self.link.connected()
                control.begin_waiting()
                control.watchers += 1
                try:
                    await move(way)
                except NotThisWay as error:
                    why = str(error)
                    if number < len(ways):
                        counters.fallbacks += 1
                        after = ways[number].name.upper()
                        log.info("store node %x: over %s: %s", self.link.node, after, why)
                else:
                    counters.moved_bytes[way.name] += transfer.length
                    return
                finally:
                    control.watchers -= 1
        finally:
            if takes_turns:
                self.link.operations.release()
        why = why or f"no mover takes a {transfer.operation} of {transfer.memory.name} memory"
        raise OSError(errno.EOPNOTSUPP, f"store node {self.link.node:x}: {why}")


def _lengthen(into: FileRange) -> None:
    """Extend the file to the end of the range."""
    if os.fstat(into.fd).st_size < into.offset + into.length:
        os.ftruncate(into.fd, into.offset + into.length)
