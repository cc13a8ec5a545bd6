"""The caller's end of the verbs mover: queue pairs to one store node."""

from collections.abc import Awaitable, Callable

from .. import Extent, FileRange, Landed, Memory, Target
from ..growth import Growth
from ..link import Link
from ..mover import Transfer, Way
from .lanes import Lanes
from .rdma import Rdma

__all__ = ["VerbsWay"]


class VerbsWay(Way):
    """Moves extents to and from one node. `stages` is as in `open_path`."""

    name = "verbs"

    def __init__(self, link: Link, rdma: Rdma, stages: bool) -> None:
        self._link = link
        self._rdma = rdma
        self._stages = stages
        self.lanes: Lanes | None = None
        # The last state logged for each pair of rails, by name.
        self._told: dict[str, str] = {}

    def suits(self, transfer: Transfer) -> bool:
        rdma = self._rdma
        if transfer.is_sparse or not rdma.is_usable:
            return False
        if transfer.length < rdma.choice.threshold_bytes and transfer.memory is not Memory.DEVICE:
            return False
        record = self._link.caller.resolve(self._link.node)
        return record is None or self.name in record.transports

    async def reach(self) -> int | None:
        caller = self._link.caller
        control = await self._link.connected()
        lanes = self.lanes
        if lanes is None or lanes.control is not control:
            lanes = self.lanes = Lanes(control, caller, self._rdma, self._told, self._stages)
            caller.nursery.start_soon(lanes.run)
        await lanes.ready()
        return lanes.mbit_s if lanes.is_usable else None

    @property
    def shows_bytes(self) -> bool:
        return self._stages

    async def read(self, extent: Extent, start: int, into: FileRange, landed: Landed) -> None:
        await self._move(lambda lanes: lanes.read(extent, start, into, landed))

    async def write(
        self, extent: Extent, target: Target, source: FileRange, passed: Landed
    ) -> None:
        await self._move(lambda lanes: lanes.write(extent, target, source, passed=passed))

    async def pass_on(
        self,
        extent: Extent,
        target: Target,
        source: FileRange,
        growth: Growth,
        lend: Callable[[], None],
    ) -> None:
        await self._move(lambda lanes: lanes.write(extent, target, source, growth))

    def give_up(self, why: str) -> None:
        """Do nothing: queue pairs end with their control connection."""

    def tidy(self) -> None:
        """Do nothing: adapters keep their registrations, for all nodes."""

    async def _move(self, move: Callable[[Lanes], Awaitable[None]]) -> None:
        if self.lanes is None or not self.lanes.is_usable:
            await self.reach()
        assert self.lanes is not None
        with self._link.watched():
            await move(self.lanes)
