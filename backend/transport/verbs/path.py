"""The caller's end of a queue pair: extents are read from and written to a store node's memory.

A transfer begins on the control connection, where the node answers with an address and an rkey. The node
sees by itself when all of a write has arrived, and is told when a read is over. If the queue pair breaks
meanwhile, `Broken` is raised and nothing is lost: the node drops a half-written extent, and the caller
moves the bytes in another way, as it does if the node says NOT_BY_VERBS or NO_QUEUE_PAIR.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

from ...unwrap import if_it_fails
from .. import Extent, FileRange, Landed, Memory
from ..caller import ControlClient, Expected
from ..device import NotThisWay, Sending
from ..messages import Done
from . import messages
from .devices import Gid
from .queue import Piece, QueuePair
from .rdma import Adapter
from .regions import Region

_PIECE_BYTES_MAX = 16 << 20
# A node hands one piece on while it receives the next. Each piece costs both ends a completion.
_HANDED_ON_BYTES_MIN = 256 << 10
_HANDED_ON_BYTES_MAX = 4 << 20
_PIECES_HANDED_ON = 16


def piece_bytes(length: int, is_handed_on: bool = False) -> int:
    """Return how many bytes one work request moves of a transfer of `length` bytes."""
    usual = _PIECE_BYTES_MAX
    if is_handed_on:
        share = length // _PIECES_HANDED_ON
        usual = max(_HANDED_ON_BYTES_MIN, min(_HANDED_ON_BYTES_MAX, share))
    return min(length, max(usual, -(-length // messages.PIECES_MAX)))


@dataclass(frozen=True, eq=False)
class Path:
    """A queue pair to one store node, number `number` of its control connection, with which it ends. Made
    by `open_path`. Without `stages`, files are registered at first use; with it, their bytes pass through
    memory that stays registered, as each file is used once."""

    control: ControlClient
    adapter: Adapter
    pair: QueuePair
    number: int
    stages: bool

    async def read(self, extent: Extent, start: int, into: FileRange, landed: Landed) -> None:
        """Do as Device.read; the file must be long enough. Raises OSError, NotThisWay."""
        length = into.length
        async with self._using(into) as regions:
            asked = messages.Expose(extent, start, length, self.number)
            exposed = await self.control.ask(asked, messages.Exposed)
            try:
                if not regions:
                    await self.adapter.staging.read(self.pair, exposed, into, landed)
                else:
                    await self.pair.read(_pieces_into(regions, into, exposed))
                    landed(0, length, None)
            finally:
                self.control.say_later(messages.Release(exposed.handle))

    async def write(self, sending: Sending) -> None:
        """Do as Device.write. Raises OSError, NotThisWay."""
        extent, target, source, passed, growth, _ = sending
        length = source.length
        async with self._using(source) as regions:
            region = regions[0] if regions else None
            if region is None:
                piece = self.adapter.staging.piece_bytes(length)
                if length > piece * messages.PIECES_MAX:
                    raise NotThisWay(f"{length} bytes are too many pieces")
            else:
                piece = piece_bytes(length, growth is not None or bool(target.chain))
            with Expected(self.control) as sealed:
                told = piece if target.chain else length
                asked = messages.Reserve(extent, target, length, told, sealed.number, self.number)
                exposed = await self.control.ask(asked, messages.Exposed)
                try:
                    if exposed.wanted and region is not None:
                        await self._write_from(region, sending, piece, exposed)
                    elif exposed.wanted:
                        staging = self.adapter.staging
                        each = bool(target.chain)
                        await staging.write(self.pair, exposed, source, each, passed)
                    await sealed.answer(Done)
                except BaseException:
                    self.control.say_later(messages.Release(exposed.handle))
                    raise

    async def _write_from(
        self, region: Region, sending: Sending, piece: int, exposed: messages.Exposed
    ) -> None:
        """Write from a region. The node is told of each piece if it hands them on, or of the last one."""
        source, growth, each = sending.source, sending.growth, bool(sending.target.chain)
        address, length = region.address(source.offset), source.length
        done = 0
        while done < length:
            there = length
            if growth is not None:
                # The sender's pieces need not have the same size.
                there = await growth.more_than(min(length, done + piece) - 1)
                if there < length:
                    there -= there % piece
            pieces = [
                Piece(
                    address + at,
                    min(piece, there - at),
                    region.key,
                    exposed.address + at,
                    exposed.key,
                    exposed.handle if each or at + piece >= length else None,
                )
                for at in range(done, there, piece)
            ]
            await self.pair.write(pieces)
            done = there

    @asynccontextmanager
    async def _using(self, file: FileRange) -> AsyncIterator[list[Region]]:
        """Give the regions that cover the range: one, or several for lent memory; none means that the bytes
        must go through `staging`. Raises NotThisWay if the range cannot be registered, as by TCP."""
        regions, acquired = self.adapter.regions, list[Region]()
        try:
            if file.memory is not Memory.FILE:
                acquired = await regions.acquire_lent(*file)
            elif not self.stages:
                acquired = [await regions.acquire(file.fd, file.offset + file.length)]
        except OSError as error:
            if file.memory is not Memory.LENT:
                why = f"{file.length} bytes cannot be registered: {error.strerror}"
                raise NotThisWay(why) from None
        if not acquired:
            await self.adapter.staging.make()
        try:
            yield acquired
        finally:
            for region in acquired:
                regions.release(region)

    async def close(self, why: str) -> None:
        """Fail the queue pair and tell the node, so that it drops half-written extents at once."""
        self.pair.fail(why)
        with trio.CancelScope(shield=True):
            await self.control.say(messages.Detach(self.number))


async def open_path(
    control: ControlClient,
    adapter: Adapter,
    gid: Gid,
    rail: messages.Rail,
    number: int,
    stages: bool,
) -> Path:
    """Set up a queue pair with a rail of the node, and check that it works. Raises OSError, NotThisWay."""
    caller = control.caller
    pair = adapter.queue_pair(gid)
    with if_it_fails(pair.close):
        asked = messages.Attach(pair.end(), number, rail.name, rail.gid)
        answer = await control.ask(asked, messages.Attached)
        pair.connect(answer.end, caller.timeout_s)
    caller.nursery.start_soon(pair.run)
    path = Path(control, adapter, pair, number, stages)
    try:
        # A WRITE of no bytes needs no rkey.
        await pair.write([Piece(0, 0, 0, 0, 0)])
    except BaseException:
        await path.close("the peer does not answer")
        raise
    return path


def _pieces_into(regions: list[Region], into: FileRange, exposed: messages.Exposed) -> list[Piece]:
    """Return the pieces that read all exposed bytes; none crosses a boundary between regions."""
    piece = piece_bytes(into.length)
    end = into.offset + into.length
    pieces: list[Piece] = []
    for region in regions:
        first, last = max(into.offset, region.offset), min(end, region.offset + region.length)
        for at in range(first, last, piece):
            there = exposed.address + at - into.offset
            count = min(piece, last - at)
            pieces.append(Piece(region.address(at), count, region.key, there, exposed.key))
    return pieces
