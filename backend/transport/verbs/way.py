"""The caller's end of the verbs mover: an operation goes to one of the queue pairs to a store node.

An operation goes to the queue pair that would finish it first. If that one breaks meanwhile, the operation
begins again on another one, and raises NotThisWay if none is left.
"""

from collections.abc import Awaitable, Callable

import trio

from ...unwrap import first_error
from .. import Extent, FileRange, Landed, Memory, landed_from
from ..device import NotThisWay, Sending, Transfer, Way
from ..link import Link
from .lanes import Lanes
from .path import Path
from .rdma import Rdma

# An operation that breaks this many queue pairs is moved over TCP.
_TRIES = 4


class VerbsWay(Way):
    """Moves extents to and from one node. `stages` is as in Path."""

    name = "verbs"

    def __init__(self, link: Link, rdma: Rdma, stages: bool) -> None:
        self._link = link
        self._rdma = rdma
        self.shows_bytes = stages
        self.lanes: Lanes | None = None
        # The last state logged for each pair of rails, by name.
        self._told: dict[str, str] = {}

    def suits(self, transfer: Transfer) -> bool:
        rdma = self._rdma
        if transfer.is_sparse or rdma.why_not:
            return False
        if transfer.length < rdma.choice.threshold_bytes and transfer.memory is not Memory.DEVICE:
            return False
        record = self._link.caller.resolve(self._link.node)
        return record is None or self.name in record.transports

    async def reach(self) -> int | None:
        lanes = await self._connected()
        return lanes.mbit_s if lanes.is_usable else None

    async def read(self, extent: Extent, start: int, into: FileRange, landed: Landed) -> None:
        async def read_part(at: int, count: int) -> None:
            there, show = into.part(at, count), landed_from(landed, at)
            await self._move(count, lambda path: path.read(extent, start + at, there, show))

        lanes = self.lanes
        parts = lanes.shares(into.length) if lanes is not None else []
        if len(parts) < 2:
            await read_part(0, into.length)
            return
        try:
            async with trio.open_nursery() as nursery:
                for part in parts:
                    nursery.start_soon(read_part, *part)
        except BaseExceptionGroup as group:
            raise first_error(group, OSError, NotThisWay) from group

    async def write(self, sending: Sending) -> None:
        await self._move(sending.source.length, lambda path: path.write(sending))

    async def _connected(self) -> Lanes:
        """Return the lanes of the present control connection, after the first attempt to set them up.
        Raises Unreachable."""
        control = await self._link.connected()
        lanes = self.lanes
        if lanes is None or lanes.control is not control:
            lanes = self.lanes = Lanes(control, self._rdma, self._told, self.shows_bytes)
            control.caller.nursery.start_soon(lanes.run)
        await lanes.ready()
        return lanes

    async def _move(self, length: int, move: Callable[[Path], Awaitable[None]]) -> None:
        lanes = self.lanes
        if lanes is None or not lanes.is_usable:
            lanes = await self._connected()
        counters = self._link.caller.counters
        why = "there is no queue pair"
        for _ in range(_TRIES):
            lane = lanes.fastest(length)
            if lane is None or lane.path is None:
                break
            path = lane.path
            lane.bytes_under_way += length
            try:
                await move(path)
            except NotThisWay as error:
                if not path.pair.failure:
                    raise
                why = str(error)
                counters.reroutes += 1
                await lanes.lose(lane, path)
            else:
                counters.rails[lane.mine.rail.name] += length
                return
            finally:
                lane.bytes_under_way -= length
        raise NotThisWay(why)
