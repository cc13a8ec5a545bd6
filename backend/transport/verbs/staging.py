"""Registered memory that bytes pass through where each file is transferred only once, as at a mount.

At a mount each version is a file of its own: its pages cannot be used again, because an earlier version's
pages may still be in a pipe or socket. Mapping and registering a file costs a page fault and a pin for each
page. Copying between the file and memory that stays registered costs less (docs/performance.md), and needs
no mapping.

The memory is cut into slots, which all transfers share. A transfer holds a few slots, for pieces that are
being copied or moved, and may wait for one more. The slots it holds become free whether it gets that one or
not, so transfers cannot deadlock. A slot is given back only when neither a thread nor the hardware touches
it any more, even if the transfer failed.
"""

import errno
import mmap
import os
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import trio

from ...files.sparse import write_at
from ...unwrap import first_alone
from .. import FileRange, Landed, Memory, nothing_landed
from ..device import NotThisWay
from ..prompt import acquire
from .messages import Exposed
from .queue import Piece, QueuePair
from .regions import Region, Regions

BYTES_MAX = 32 << 20
_BYTES_MIN = 1 << 20
_SLOT_BYTES_MAX = 4 << 20
_SLOTS_MIN = 4
# The limit for one transfer.
_SLOTS_AT_ONCE = 4
# The unit of digests: pieces are multiples of it, so that each block is hashed as it passes.
_BLOCK_BYTES = 2 << 20
_PIECES = 8
# Up to these sizes, of a piece and of a whole transfer, bytes are copied in the event loop: handing them to
# a thread takes about as long. With one processor all are, as a thread would have to wait for it.
_AT_ONCE_BYTES = 256 << 10
_ALL_AT_ONCE_BYTES = 1 << 20
_THREADS_MAX = 8
# How long after a failed registration it is tried again.
_PAUSE_S = 30.0


class _Slot(NamedTuple):
    address: int
    key: int
    view: memoryview


class Staging:
    """The slots of one protection domain, made at first use, in a file without a name: one of `regions`."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self._memory: Region | None = None
        self._making = trio.Lock()
        self._why = ""
        self._after = 0.0
        self._slot_bytes = 0
        self.slots: list[_Slot] = []
        self.free: list[_Slot] = []
        self._room = trio.Semaphore(0)
        self._threads = trio.CapacityLimiter(_THREADS_MAX)
        self.staged_bytes = 0

    async def make(self) -> None:
        """Make the slots if there are none. Raises NotThisWay."""
        if self._memory is None:
            async with self._making:
                if self._memory is None:
                    await self._make()

    async def _make(self) -> None:
        if time.monotonic() < self._after:
            raise NotThisWay(self._why)
        limit_bytes = self._regions.limit_bytes
        # The other half is left for queue pairs and for files that are registered themselves.
        size = min(BYTES_MAX, limit_bytes // 2)
        try:
            if size < _BYTES_MIN:
                text = f"no more than {limit_bytes} bytes may be registered"
                raise OSError(errno.ENOMEM, text)
            with open(os.memfd_create("irdmafs-staging", os.MFD_CLOEXEC), "wb") as file:
                file.truncate(size)
                region = self._memory = await self._regions.acquire(file.fileno(), size)
        except OSError as error:
            self._why = f"{size} bytes cannot be registered: {error.strerror}"
            self._after = time.monotonic() + _PAUSE_S
            raise NotThisWay(self._why) from None
        step = min(_SLOT_BYTES_MAX, size // _SLOTS_MIN)
        self._slot_bytes = step = step - step % mmap.PAGESIZE
        self.slots = [
            _Slot(region.address(at), region.key, region.view(at, step))
            for at in range(0, size - step + 1, step)
        ]
        for slot in self.slots:
            self._give_back(slot)

    def close(self) -> None:
        """Give the memory back; no transfer may be under way."""
        if self._memory is not None:
            for slot in self.slots:
                slot.view.release()
            self.slots.clear()
            self.free.clear()
            self._regions.release(self._memory, keep=False)
            self._memory = None

    def piece_bytes(self, length: int) -> int:
        """Return the bytes of one work request, for a transfer of `length`. `make` comes first."""
        piece = min(length, self._slot_bytes, max(_BLOCK_BYTES, length // _PIECES))
        return piece - piece % _BLOCK_BYTES if piece > _BLOCK_BYTES else piece

    # -- moving bytes ----------------------------------------------------------------------------

    async def read(
        self, pair: QueuePair, exposed: Exposed, into: FileRange, landed: Landed = nothing_landed
    ) -> None:
        """Read what the peer exposes into a range of a file. `make` comes first. Raises OSError, Broken."""
        store = write_at if into.memory is Memory.FILE else _write_mapped

        async def take(slot: _Slot, at: int, view: memoryview, in_thread: bool) -> None:
            count, there = len(view), exposed.address + at

            def copy() -> None:
                store(into.fd, view, into.offset + at)
                landed(at, count, view)

            await pair.read([Piece(slot.address, count, slot.key, there, exposed.key)])
            await self._copy(copy, in_thread)

        await self._move_pieces(take, into.length)

    async def write(
        self,
        pair: QueuePair,
        exposed: Exposed,
        source: FileRange,
        each: bool,
        passed: Landed = nothing_landed,
    ) -> None:
        """Write a range of a file into the memory that the peer exposes, in order. Its handle is sent as
        immediate data of `each` piece, or of the last one. `make` comes first. Raises OSError, Broken."""
        # Set when the piece that ends there was posted.
        posted: defaultdict[int, trio.Event] = defaultdict(trio.Event)

        async def send(slot: _Slot, at: int, view: memoryview, in_thread: bool) -> None:
            count, there = len(view), exposed.address + at
            end = at + count

            def copy() -> None:
                _read_file(source.fd, view, source.offset + at)
                passed(at, count, view)

            await self._copy(copy, in_thread)
            if at and not posted[at].is_set():
                await posted[at].wait()
            said = exposed.handle if each or end == source.length else None
            piece = Piece(slot.address, count, slot.key, there, exposed.key, said)
            batch = await pair.begin_write(piece)
            posted[end].set()
            await pair.finish([batch])

        await self._move_pieces(send, source.length)

    async def _move_pieces(
        self, move: Callable[[_Slot, int, memoryview, bool], Awaitable[None]], length: int
    ) -> None:
        """Call `move` for each piece, in order, some at a time: with a slot, the start of the piece, its
        bytes in the slot, and whether they are to be copied in a thread. Raises what it raises."""
        share = trio.Semaphore(_SLOTS_AT_ONCE)
        piece = self.piece_bytes(length)
        in_thread = length > _ALL_AT_ONCE_BYTES and piece > _AT_ONCE_BYTES and _processors() > 1

        async def move_one(slot: _Slot, at: int) -> None:
            try:
                with slot.view[: min(piece, length - at)] as view:
                    await move(slot, at, view, in_thread)
            finally:
                self._give_back(slot)
                share.release()

        if piece == length:
            await move_one(await self._take(), 0)
        else:
            with first_alone(OSError, NotThisWay):
                async with trio.open_nursery() as nursery:
                    for at in range(0, length, piece):
                        await acquire(share)
                        nursery.start_soon(move_one, await self._take(), at)
        self.staged_bytes += length

    async def _take(self) -> _Slot:
        await acquire(self._room)
        return self.free.pop()

    def _give_back(self, slot: _Slot) -> None:
        self.free.append(slot)
        self._room.release()

    async def _copy(self, copy: Callable[[], None], in_thread: bool) -> None:
        """Copy bytes. Return only when that is over, even if cancelled. Raises what it raises."""
        if in_thread:
            await trio.to_thread.run_sync(copy, limiter=self._threads)
        else:
            copy()


def _processors() -> int:
    return len(os.sched_getaffinity(0))


def _read_file(fd: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        with view[done:] as rest:
            count = os.preadv(fd, [rest], offset + done)
        if not count:
            raise OSError(errno.EIO, "the file shrank while it was sent")
        done += count


def _write_mapped(fd: int, view: memoryview, offset: int) -> None:
    """Copy into memory that a program lends. It is mapped: pwrite could wait for the program's writes."""
    skip = offset % mmap.ALLOCATIONGRANULARITY
    with mmap.mmap(fd, len(view) + skip, offset=offset - skip) as mapped:
        mapped[skip:] = view
