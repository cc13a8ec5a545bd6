"""The caller's end of the verbs mover: all queue pairs to one store node, and which one an operation uses.

A lane is one queue pair between a rail here and one there. Lanes are set up when the first operation asks.
Lost ones are tried again in the background, every RETRY_S and when a port of this host comes back.

An operation goes to the lane that would finish it first. If that one breaks meanwhile, the operation begins
again on another one, and raises NotThisWay if none is left.
"""

import logging
from collections.abc import Awaitable, Callable
from ipaddress import IPv6Address
from itertools import accumulate, pairwise

import trio

from ...unwrap import first_alone
from .. import Extent, FileRange, Landed, Memory, landed_from
from ..caller import ControlClient
from ..device import NotThisWay, Sending, Transfer, Way
from ..link import Link
from .messages import NO_QUEUE_PAIR, NOT_BY_VERBS, QUEUE_PAIRS_MAX, Rail, Rails, RailsFound
from .path import Path, open_path
from .rails import OwnRail
from .rails import pair as paired
from .rdma import Rdma

log = logging.getLogger(__name__)

RETRY_S = 5.0
# How often rails that were missing are looked for.
_LOOK_S = 60.0
# A READ is divided between rails if each of them gets at least this much.
SHARE_BYTES_MIN = 4 << 20
_SHARE_ALIGNMENT_BYTES = 2 << 20
# The node chooses a part of each name, and might send ever new ones.
_NAMES_MAX = 256
# An operation that breaks this many queue pairs is moved over TCP.
_TRIES = 4
_UP, _DOWN = "up", "down"


class Lane:
    """One queue pair between a rail here and one of the node."""

    def __init__(self, mine: OwnRail, other: Rail) -> None:
        self.number = -1
        self.mine = mine
        self.other = other
        address = IPv6Address(other.gid)
        self.name = f"{mine.rail.name} - {other.name} ({address.ipv4_mapped or address})"
        self.mbit_s = max(1, min(mine.rail.mbit_s, other.mbit_s))
        self.path: Path | None = None
        self.bytes_under_way = 0

    @property
    def key(self) -> tuple[str, bytes, str, bytes]:
        mine, other = self.mine.rail, self.other
        return mine.name, mine.gid, other.name, other.gid

    @property
    def is_usable(self) -> bool:
        return self.path is not None and not self.path.pair.failure


class Lanes:
    """The lanes of one control connection of a way; `run` is a task."""

    def __init__(self, way: "VerbsWay", control: ControlClient) -> None:
        self.control = control
        self._rdma = way.rdma
        self._told = way.told
        self._stages = way.shows_bytes
        self._lanes: list[Lane] = []
        self._first = trio.Event()
        self._pausing = trio.CancelScope()
        self._scope = trio.CancelScope()
        control.closers.append(self._end)

    @property
    def is_usable(self) -> bool:
        return any(lane.is_usable for lane in self._lanes)

    @property
    def usable(self) -> dict[str, int]:
        """Return the pairs of rails in use, and the Mbit/s of each."""
        return {lane.name: lane.mbit_s for lane in self._lanes if lane.is_usable}

    async def ready(self) -> None:
        """Wait until there is a queue pair, or until the first attempt to set them up has failed."""
        if not self._first.is_set():
            await self._first.wait()

    # -- choice of a lane ------------------------------------------------------------------------

    def fastest(self, length: int) -> Lane | None:
        """Return the lane that would finish an operation on so many bytes first; None if none is usable."""
        return min(
            (lane for lane in self._lanes if lane.is_usable),
            key=lambda lane: (lane.bytes_under_way + length) / lane.mbit_s,
            default=None,
        )

    def shares(self, length: int) -> list[tuple[int, int]]:
        """Return the starts and lengths of the ranges of a READ: one for each rail, by its speed."""
        speeds = sorted(self.usable.values(), reverse=True)[: max(1, length // SHARE_BYTES_MIN)]
        ends = [length * so_far // sum(speeds) for so_far in accumulate(speeds)]
        ends = [*(end - end % _SHARE_ALIGNMENT_BYTES for end in ends[:-1]), length]
        return [(start, end - start) for start, end in pairwise([0, *ends]) if start < end]

    # -- lanes come and go -----------------------------------------------------------------------

    async def run(self) -> None:
        """Keep queue pairs ready as long as the control connection is open."""
        try:
            with self._scope:
                while self.control.is_open:
                    changed = self._rdma.changed
                    await self._set_up()
                    self._first.set()
                    await self._pause(changed)
        finally:
            self._first.set()

    async def _pause(self, changed: trio.Event) -> None:
        """Wait until it is time to try lost queue pairs again, or to look for new rails."""
        pause_s = _LOOK_S if self._is_complete() else RETRY_S
        with trio.move_on_after(pause_s) as self._pausing:
            await changed.wait()

    def _is_complete(self) -> bool:
        """Return whether no pair of rails worked before, or failed to connect, and does not work now."""
        return _DOWN not in self._told.values() and all(lane.is_usable for lane in self._lanes)

    async def _set_up(self) -> None:
        """Set up queue pairs between all rails that reach each other."""
        try:
            own = self._rdma.rails(self.control.ends.here)
            answer = await self.control.ask(Rails(), RailsFound)
        except OSError as error:
            self._cannot(_text(error))
            return
        pairs = paired(own, answer.rails)[:QUEUE_PAIRS_MAX]
        if not pairs:
            self._cannot("no RDMA device here is on a network with one of the node's")
            return
        if len(self._told) > _NAMES_MAX:
            self._told.clear()
        before = {lane.key: lane for lane in self._lanes}
        lanes = [before.pop(lane.key, lane) for lane in (Lane(*ends) for ends in pairs)]
        lanes += [lane for lane in before.values() if lane.is_usable]
        self._lanes = lanes[:QUEUE_PAIRS_MAX]
        numbers = set(range(QUEUE_PAIRS_MAX)) - {lane.number for lane in self._lanes}
        async with trio.open_nursery() as nursery:
            for lane in self._lanes:
                if lane.number < 0:
                    lane.number = numbers.pop()
                if lane.path is None:
                    nursery.start_soon(self._connect, lane)

    async def _connect(self, lane: Lane) -> None:
        try:
            adapter, gid = self._rdma.open(lane.mine.route), lane.mine.route.gid
            path = await open_path(
                self.control, adapter, gid, lane.other, lane.number, self._stages
            )
        except (OSError, NotThisWay) as error:
            self._cannot(_text(error), lane)
            return
        lane.path = path
        if not self.control.is_open:
            path.pair.fail("the control connection ended")
            return
        self.control.caller.nursery.start_soon(self._watch, lane, path)
        told = self._told.get(lane.name)
        back = " is back" if told == _DOWN else ""
        if told != _UP:
            log.info("store node %x: by RDMA over %s%s", self.control.node, lane.name, back)
        self._told[lane.name] = _UP
        self._told.pop("", None)
        self._first.set()

    async def _watch(self, lane: Lane, path: Path) -> None:
        await path.pair.failed.wait()
        await self.lose(lane, path)

    async def lose(self, lane: Lane, path: Path) -> None:
        """Take a broken queue pair out of use. It has told the operations under way on it itself."""
        if lane.path is not path:
            return
        lane.path = None
        if self.control.is_open:
            self._cannot(path.pair.failure, lane)
            self._pausing.deadline = min(self._pausing.deadline, trio.current_time() + RETRY_S)
        await path.close(path.pair.failure)

    def _cannot(self, why: str, lane: Lane | None = None) -> None:
        """Log that RDMA, or this lane, does not work; once until that changes."""
        if not self.control.is_open:
            return
        name = lane.name if lane is not None else ""
        if name in self.usable:
            return
        told = _DOWN if lane is not None else why
        if self._told.get(name) == told:
            return
        now = ", ".join(self.usable) or "TCP"
        node = self.control.node
        if lane is None:
            log.warning("store node %x: over TCP: %s", node, why)
        elif self._told.get(name) == _UP:
            log.warning("store node %x: %s is lost: %s; over %s now", node, name, why, now)
        else:
            log.warning("store node %x: %s does not work: %s; over %s", node, name, why, now)
        self._told[name] = told

    def _end(self, why: str) -> None:
        self._scope.cancel()
        for lane in self._lanes:
            if lane.path is not None:
                lane.path.pair.fail(why)


def _text(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else "") or str(error)


class VerbsWay(Way):
    """Moves extents to and from one node. `stages` is as in Path."""

    name = "verbs"

    def __init__(self, link: Link, rdma: Rdma, stages: bool) -> None:
        self._link = link
        self.rdma = rdma
        self.shows_bytes = stages
        self.lanes: Lanes | None = None
        # The last state logged for each pair of rails, by name.
        self.told: dict[str, str] = {}

    def suits(self, transfer: Transfer) -> bool:
        rdma = self.rdma
        if transfer.is_sparse or rdma.why_not:
            return False
        if transfer.length < rdma.choice.threshold_bytes and transfer.memory is not Memory.DEVICE:
            return False
        record = self._link.caller.resolve(self._link.node)
        return record is None or self.name in record.transports

    async def reach(self) -> int | None:
        usable = (await self._connected()).usable
        return sum(usable.values()) if usable else None

    async def read(self, extent: Extent, start: int, into: FileRange, landed: Landed) -> None:
        async def read_part(at: int, count: int) -> None:
            there, show = into.part(at, count), landed_from(landed, at)
            await self._move(count, lambda path: path.read(extent, start + at, there, show))

        lanes = self.lanes
        parts = lanes.shares(into.length) if lanes is not None else []
        if len(parts) < 2:
            await read_part(0, into.length)
            return
        with first_alone(OSError, NotThisWay):
            async with trio.open_nursery() as nursery:
                for part in parts:
                    nursery.start_soon(read_part, *part)

    async def write(self, sending: Sending) -> None:
        await self._move(sending.source.length, lambda path: path.write(sending))

    async def _connected(self) -> Lanes:
        """Return the present connection's lanes, after the first try to set them up. Raises Unreachable."""
        control = await self._link.connected()
        lanes = self.lanes
        if lanes is None or lanes.control is not control:
            lanes = self.lanes = Lanes(self, control)
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
            except (OSError, NotThisWay) as error:
                code = error.errno if isinstance(error, OSError) else NOT_BY_VERBS
                why = _text(error)
                if code == NO_QUEUE_PAIR:
                    path.pair.fail(f"the node gave it up: {why}")
                elif code != NOT_BY_VERBS:
                    raise
            else:
                counters.rails[lane.mine.rail.name] += length
                return
            finally:
                lane.bytes_under_way -= length
            if not path.pair.failure:
                break
            counters.reroutes += 1
            await lanes.lose(lane, path)
        raise NotThisWay(why)
