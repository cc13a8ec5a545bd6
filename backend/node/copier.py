"""Copying extents from other members of a group into this node's store.

A copy is compared with its version's record. A wrong one is not kept while there may be a right one, and
its sender is told. If all members in sync were asked and none has it right, the wrong copy is kept and
reported: it may be all that is left of a file.
"""

import errno
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing

import trio

from ..cluster.membership import Members
from ..files.digest import Stripe, digest_of_bytes
from ..model.records import GroupConfig
from ..pauses import Throttle
from ..transport import Extent, FileRange, Memory, landed_from
from ..transport.device import Device
from ..transport.messages import in_batches
from .catalog import Catalog
from .checks import Verdict, WrongExtents, verdict_on
from .files import Incoming

log = logging.getLogger(__name__)

READS_AT_ONCE = 4
SMALL_BYTES = 64 << 10
BATCH_EXTENTS = 64
BATCH_BYTES = 1 << 20
# With a limited rate, reads are cut into pieces of this size, to keep the rate even.
THROTTLED_READ_BYTES = 4 << 20
RATE_WINDOW_S = 10.0


class Copier:
    """Copies at most `bytes_per_s` (0: unlimited) from other nodes, which `device` returns.
    `copied_bytes` counts received bytes. `wrong` has also the extents that were kept although they are
    wrong, as no member in sync has them right."""

    def __init__(
        self,
        catalog: Catalog,
        members: Members,
        device: Callable[[int], Device],
        bytes_per_s: float,
    ) -> None:
        self.copied_bytes = 0
        self.wrong = WrongExtents(catalog)
        self._node = catalog.files.node
        self._members = members
        self._device = device
        self._catalog = catalog
        self._files = catalog.files
        self._throttle = Throttle(bytes_per_s)
        self._reads = trio.Semaphore(READS_AT_ONCE)
        self._recent: deque[tuple[float, int]] = deque()

    def bytes_per_s(self) -> float:
        """Return the rate of the last seconds."""
        now = time.monotonic()
        self._forget_before(now - RATE_WINDOW_S)
        if not self._recent:
            return 0.0
        return sum(count for _, count in self._recent) / max(now - self._recent[0][0], 1.0)

    async def copy(self, config: GroupConfig, left: dict[Extent, int]) -> list[Extent]:
        """Copy the extents in `left`, and remove those that are here afterwards from it. Return those that
        every other member in sync says it does not have. Raises OSError ENOSPC."""
        denied: list[Extent] = []
        full: list[OSError] = []

        async def bring(batch: Sequence[Extent]) -> None:
            try:
                if left[batch[0]] <= SMALL_BYTES:
                    denied.extend(await self._bring_small(config, batch, left))
                else:
                    denied.extend(await self._bring_large(config, batch[0], left))
            except OSError as error:
                full.append(error)
                nursery.cancel_scope.cancel()
            finally:
                self._reads.release()

        async with trio.open_nursery() as nursery:
            for batch in _batches(left):
                await self._reads.acquire()
                nursery.start_soon(bring, batch)
        await self._files.settle()
        if full:
            raise full[0]
        return denied

    def _sources(self, config: GroupConfig, salt: int) -> Iterator[int]:
        """Yield the live members to ask, those in sync first; `salt` spreads the load."""
        for nodes in (config.in_sync, config.joining):
            others = [node for node in nodes if node != self._node and node in self._members.nodes]
            turn = salt % len(others) if others else 0
            yield from others[turn:] + others[:turn]

    def _denied_by_all(self, config: GroupConfig, refused: Iterable[int]) -> bool:
        others = set(config.in_sync) - {self._node}
        return bool(others) and others <= set(refused)

    async def _bring_large(
        self, config: GroupConfig, extent: Extent, left: dict[Extent, int]
    ) -> list[Extent]:
        size = left[extent]
        refused = []
        wrong = []
        allocated = self._catalog.allocated(extent, size)
        with closing(await self._catalog.make_file(size, allocated)) as incoming:
            for node in self._sources(config, extent.content + extent.stripe):
                if not self._catalog.is_missing(extent):
                    left.pop(extent, None)  # superseded meanwhile, or a writer brought it
                    return []
                verdict = await self._try_to_read(node, extent, incoming.fd, size)
                if verdict is Verdict.MISSING:
                    refused.append(node)
                elif verdict is Verdict.WRONG:
                    wrong.append(node)
                    await self._doubt(node, extent)
                elif verdict is not None:
                    await self._seal(incoming, extent, left, verdict)
                    return []
            if not self._denied_by_all(config, refused + wrong):
                return []
            if wrong:
                # Once more, as somebody else may have sent a part of it since.
                await self._read(wrong[-1], extent, incoming.fd, size)
                await self._seal(incoming, extent, left, Verdict.WRONG)
                return []
        return [extent]

    async def mend(self, config: GroupConfig, extent: Extent, size: int) -> bool | None:
        """Replace an extent that is wrong here with a right copy of another node. Return True if it was
        replaced or is not needed; None if a member in sync could not be asked. Raises ENOSPC."""
        unasked = set(config.in_sync) - {self._node}
        allocated = self._catalog.allocated(extent, size)
        with closing(await self._catalog.make_file(size, allocated)) as incoming:
            members = list(self._sources(config, 0))
            # A former member may still have the extent.
            for node in (*members, *self._members.nodes.keys() - {self._node, *members}):
                if extent not in self._files or not self._catalog.is_named(extent.content):
                    return True
                verdict = await self._try_to_read(node, extent, incoming.fd, size)
                if verdict is Verdict.WRONG and node in unasked:
                    await self._doubt(node, extent)
                if verdict is Verdict.RIGHT:
                    await self._files.harden(incoming)
                    if extent in self._files and self._catalog.is_named(extent.content):
                        self._files.replace(incoming, extent)
                        self._catalog.sealed(extent)
                        await self._files.settle()
                        await self._files.give_back()
                    return True
                if verdict not in (None, Verdict.UNKNOWN):
                    unasked.discard(node)
        return None if unasked else False

    async def _doubt(self, node: int, extent: Extent) -> None:
        log.warning("node %x sent other bytes of extent %x.%x than were published", node, *extent)
        await self._device(node).doubt(extent)

    async def _try_to_read(self, node: int, extent: Extent, fd: int, size: int) -> Verdict | None:
        """Read as `_read` does, but return None if the node cannot be read from. Raises OSError ENOSPC."""
        try:
            return await self._read(node, extent, fd, size)
        except FileNotFoundError:
            return Verdict.MISSING
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise  # more of it lies outside holes than its record says
            log.info("extent %x.%x from node %x: %s", *extent, node, error)
            return None

    async def _read(self, node: int, extent: Extent, fd: int, size: int) -> Verdict:
        """Read a whole extent, whose blocks are hashed as they come."""
        device, into, found = self._device(node), FileRange(fd, 0, size), Stripe(fd, 0, size)
        allocated = self._catalog.allocated(extent, size)
        if allocated < size:
            await self._throttle.take(allocated)
            await device.read(extent, 0, into._replace(memory=Memory.HOLES), found.landed)
            self._count(allocated)
        else:
            piece = THROTTLED_READ_BYTES if self._throttle.bytes_per_s else size
            for start in range(0, size, piece):
                length = min(piece, size - start)
                await self._throttle.take(length)
                landed = landed_from(found.landed, start)
                await device.read(extent, start, into.part(start, length), landed)
                self._count(length)
        return verdict_on(await found.finish(), self._catalog.digest_of(extent))

    async def _bring_small(
        self, config: GroupConfig, batch: Sequence[Extent], left: dict[Extent, int]
    ) -> list[Extent]:
        wanted = list(batch)
        refused: dict[Extent, list[int]] = {extent: [] for extent in batch}
        wrong: dict[Extent, bytes] = {}
        for node in self._sources(config, batch[0].content):
            for extent in [extent for extent in wanted if not self._catalog.is_missing(extent)]:
                left.pop(extent, None)
                wanted.remove(extent)
            if not wanted:
                break
            await self._throttle.take(sum(left[extent] for extent in wanted))
            try:
                found = await self._device(node).get(wanted, SMALL_BYTES)
            except OSError as error:
                log.info("%d small extents from node %x: %s", len(wanted), node, error)
                continue
            others = []
            for extent, data in zip(wanted, found, strict=True):
                if data is not None and len(data) == left[extent]:
                    published = self._catalog.digest_of(extent)
                    verdict = verdict_on(digest_of_bytes(data), published)
                    if verdict is not Verdict.WRONG:
                        await self._keep(extent, data, left, verdict)
                        continue
                    wrong[extent] = data
                    await self._doubt(node, extent)
                refused[extent].append(node)
                others.append(extent)
            wanted = others
        denied = [extent for extent in wanted if self._denied_by_all(config, refused[extent])]
        for extent in denied:
            if extent in wrong:
                await self._keep(extent, wrong[extent], left, Verdict.WRONG)
        return [extent for extent in denied if extent not in wrong]

    async def _keep(
        self, extent: Extent, data: bytes, left: dict[Extent, int], verdict: Verdict
    ) -> None:
        with closing(await self._catalog.make_file(len(data), len(data))) as incoming:
            os.pwrite(incoming.fd, data, 0)
            self._count(len(data))
            await self._seal(incoming, extent, left, verdict)

    async def _seal(
        self, incoming: Incoming, extent: Extent, left: dict[Extent, int], verdict: Verdict
    ) -> None:
        """Make a copy an extent of this node, unless it is not needed any more: nothing would free it."""
        await self._files.harden(incoming)
        left.pop(extent, None)
        if self._catalog.is_missing(extent):
            self._files.seal(incoming, extent)
            self._catalog.sealed(extent)
            if verdict is Verdict.WRONG:
                self.wrong.keep(extent)

    def _count(self, count: int) -> None:
        now = time.monotonic()
        self._recent.append((now, count))
        self.copied_bytes += count
        self._forget_before(now - RATE_WINDOW_S)

    def _forget_before(self, oldest: float) -> None:
        while self._recent and self._recent[0][0] < oldest:
            self._recent.popleft()


def _batches(left: dict[Extent, int]) -> list[list[Extent]]:
    """Return the extents to copy, the smallest first: small ones together, large ones each by itself."""
    by_size = sorted(left, key=left.__getitem__)
    small = [extent for extent in by_size if left[extent] <= SMALL_BYTES]
    together = in_batches(small, left.__getitem__, BATCH_EXTENTS, BATCH_BYTES)
    return [*together, *([extent] for extent in by_size[len(small) :])]
