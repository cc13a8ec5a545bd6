"""Telling right bytes from wrong ones by an extent's digest and its version's record; the wrong ones.

A record has a digest for each stripe, or, for contents with many stripes, one for each run of them (see
files/digest.py). An extent of such a run is checked together with the digests that other nodes report of
theirs: some combination of the existing copies must give the digest of the run.
"""

import itertools
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import closing
from enum import Enum, auto

import trio

from ..cluster.group_configs import Groups
from ..cluster.membership import Members
from ..files.digest import digest_at_rest
from ..transport import Extent
from ..transport.device import Device
from .catalog import Catalog, Check

log = logging.getLogger(__name__)

# The most combinations of copies to try. There is only one as long as all copies are right.
_COMBINATIONS_MAX = 4096
_REMEMBERED = 1 << 16
_TOLD_S = 60.0


class Verdict(Enum):
    """The result of comparing a copy of an extent with what was published."""

    MISSING = auto()
    """The node has no copy."""
    RIGHT = auto()
    WRONG = auto()
    UNKNOWN = auto()
    """Nothing is known to check it by, or not everybody could be asked who has a part of that."""
    HOPELESS = auto()
    """It cannot be told which of several extents is wrong, and no combination of their copies is right."""


class Checks:
    """The checks of extents on one store node. `device` returns the transport to another one."""

    def __init__(
        self, catalog: Catalog, members: Members, groups: Groups, device: Callable[[int], Device]
    ) -> None:
        self._files = catalog.files
        self._catalog = catalog
        self.members = members
        self._groups = groups
        self.device = device
        # Digests of extents here that other nodes asked for: those of a run of n stripes ask n times.
        self._told: OrderedDict[Extent, tuple[bytes, float]] = OrderedDict()
        self._forgotten = 0  # how often `forget` was called

    async def tell(self, extent: Extent) -> bytes:
        """Return the digest of the extent here, which may be a minute old. Raises OSError: ENOENT."""
        found, at = self._told.get(extent, (b"", 0.0))
        if not found or time.monotonic() - at > _TOLD_S or extent not in self._files:
            forgotten = self._forgotten
            with closing(self._files.hold(extent, damaged=True)) as held:
                size = self._files.size(extent) or 0
                found = await digest_at_rest(held.fd, size)
            if self._forgotten == forgotten:
                # Otherwise the file may have been replaced while it was read.
                self._told[extent] = found, time.monotonic()
                if len(self._told) > _REMEMBERED:
                    self._told.popitem(last=False)
        return found

    async def digest_of(self, node: int, extent: Extent) -> bytes | None:
        """Return the digest of a node's copy as `tell` does; b"": it has none, None: it does not say."""
        try:
            if node == self._files.node:
                return await self.tell(extent)
            return await self.device(node).digest(extent)
        except FileNotFoundError:
            return b""
        except OSError as error:
            log.info("extent %x.%x of node %x: %s", *extent, node, error)
            return None

    def forget(self, extent: Extent) -> None:
        """Forget an extent's digest: its file was replaced, or has turned out to be damaged."""
        self._forgotten += 1
        self._told.pop(extent, None)

    async def verdict(self, extent: Extent, digest: bytes) -> Verdict:
        """Return whether a copy of an extent with this digest is what was published."""
        check = self._catalog.check_of(extent)
        if check is None:
            return Verdict.UNKNOWN
        if len(check.stripes) == 1:
            return Verdict.RIGHT if check.digests.match(check.part, [digest]) else Verdict.WRONG
        # Most copies are right: ask no more nodes than it takes to see that.
        found: list[dict[bytes, None]] = []
        for stripe, group in zip(check.stripes, check.groups, strict=True):
            one = Extent(extent.content, stripe)
            first = {digest: None} if one == extent else {}
            if not first:
                await self._ask(one, group, first, enough=1)
            if not first:
                return Verdict.UNKNOWN
            found.append(first)
        if check.digests.match(check.part, [next(iter(each)) for each in found]):
            return Verdict.RIGHT
        all_told = True
        for stripe, group, each in zip(check.stripes, check.groups, found, strict=True):
            all_told &= await self._ask(Extent(extent.content, stripe), group, each)
        if math.prod(map(len, found)) > _COMBINATIONS_MAX:
            return Verdict.UNKNOWN
        for digests in itertools.product(*found):
            if check.digests.match(check.part, digests):
                is_right = digests[extent.stripe - check.stripes.start] == digest
                return Verdict.RIGHT if is_right else Verdict.WRONG
        return Verdict.HOPELESS if all_told and self._all_live(check) else Verdict.UNKNOWN

    async def _ask(
        self, extent: Extent, group: int, found: dict[bytes, None], enough: int = 0
    ) -> bool:
        """Ask members of an extent's group for its digest, until `found` has `enough` of them (0: ask all).
        Return whether every node that was asked has answered."""
        answered = True
        config, _ = self._groups.get(group)
        for node in filter(self.members.nodes.__contains__, config.in_sync):
            digest = await self.digest_of(node, extent)
            if digest is None:
                answered = False
            elif digest:
                found[digest] = None
                if len(found) == enough:
                    break
        return answered

    def _all_live(self, check: Check) -> bool:
        """Return whether every node that may have a right copy could be asked."""
        live = self.members.nodes.keys()
        holders = [set(self._groups.get(group)[0].in_sync) for group in check.groups]
        return all(holders) and all(live >= nodes for nodes in holders)


class WrongExtents(dict[Extent, bool]):
    """Wrong extents, each with whether a right copy may be somewhere, as far as is known."""

    def __init__(self, catalog: Catalog) -> None:
        super().__init__()
        self.found = self.mended = 0
        self._waiting = trio.Event()
        self._files = catalog.files
        self._catalog = catalog

    def inodes(self) -> dict[int, bool]:
        """Return the inodes whose contents are wrong here, and whether a right copy may be had."""
        found: dict[int, bool] = {}
        for extent, may_be_mended in self.items():
            for ino in self._catalog.inos_of(extent.content):
                found[ino] = found.get(ino, True) and may_be_mended
        return found

    def find(self, extent: Extent) -> None:
        """Take in an extent that was read and found to be wrong."""
        if extent not in self:
            self.found += 1
            log.error(
                "extent %x.%x in %s is not what was published (inode %d): a right copy is looked for",
                *extent,
                self._files.directory,
                self._catalog.ino_of(extent.content),
            )
            self[extent] = True

    def keep(self, extent: Extent) -> None:
        """Take in an extent of which no node has a right copy."""
        if extent not in self:
            self.found += 1
        self[extent] = False
        log.error(
            "no node has extent %x.%x as it was published: inode %d is damaged. Publish the file again; "
            "what there is of it can be read with --no-verify",
            *extent,
            self._catalog.ino_of(extent.content),
        )
        self.wait()

    def wait(self) -> None:
        """Say that an extent has to wait for a right copy."""
        self._waiting.set()

    async def wait_for_one(self) -> None:
        """Return when there is, since the last time, one more that has to wait for a right copy."""
        await self._waiting.wait()
        self._waiting = trio.Event()

    def mend(self, extent: Extent) -> None:
        """Note that a right copy took the place of an extent."""
        self.pop(extent, None)
        self.mended += 1
        log.warning("extent %x.%x is mended", *extent)

    def drop_unneeded(self) -> None:
        """Forget the extents that are not here any more, or not needed."""
        for extent in list(self):
            if extent not in self._files or not self._catalog.is_named(extent.content):
                del self[extent]
