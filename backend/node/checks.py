"""Telling right bytes of an extent from wrong ones, by the digest in its record; the wrong extents."""

import logging
from enum import Enum, auto

import trio

from ..transport import Extent
from .catalog import Catalog

log = logging.getLogger(__name__)


class Verdict(Enum):
    """The result of comparing a copy of an extent with what was published."""

    MISSING = auto()
    """The node has no copy."""
    RIGHT = auto()
    WRONG = auto()
    UNKNOWN = auto()
    """Nothing is known to check it by."""


def verdict_on(digest: bytes, published: bytes) -> Verdict:
    """Return the verdict on a copy with this digest; `published` is b"" if nothing is known."""
    if not published:
        return Verdict.UNKNOWN
    return Verdict.RIGHT if digest == published else Verdict.WRONG


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
