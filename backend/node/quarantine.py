"""Extents that a store node keeps although nothing names them, in case that they are needed again.

STORE/quarantine/CONTENT.STRIPE     in quarantine since its time of modification

The node frees extents that it saw being removed or superseded. An extent that it merely finds without a
name, at its start or after a gap in the watch, goes into quarantine: etcd may have been restored from a
backup older than the extent. An extent that is named again goes back. The oldest are removed after
`kept_s`, and sooner if room is wanted: they count as free.
"""

import logging
import os
import time
from collections.abc import Iterator

from ..transport import Extent

log = logging.getLogger(__name__)

KEPT_ON_DISK_S = 7 * 86400.0
# Memory costs more than disks, and a store in memory does not outlive its machine.
KEPT_IN_MEMORY_S = 3600.0


class Quarantine:
    """The extents in the directory `fd`, which stays the caller's. `kept_s` is in seconds."""

    def __init__(self, fd: int, kept_s: float) -> None:
        self.kept_s = kept_s
        self.bytes = 0
        self._fd = fd
        self._kept: dict[Extent, tuple[int, float]] = {}  # size, since; the oldest first
        # The stripes that are here, by content.
        self.stripes: dict[int, set[int]] = {}
        found = []
        for entry in os.scandir(fd):
            extent = parsed_name(entry.name)
            if extent is not None and entry.is_file(follow_symlinks=False):
                status = entry.stat(follow_symlinks=False)
                found.append((status.st_mtime, extent, status.st_size))
        for since, extent, size in sorted(found):
            self._add(extent, size, since)

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Extent]:
        return iter(self._kept)

    def size(self, extent: Extent) -> int:
        """Return the bytes of an extent that is here."""
        return self._kept[extent][0]

    def take_in(self, extent: Extent, size: int, sealed_fd: int) -> None:
        """Move an extent here from the directory of sealed ones. Raises FileNotFoundError."""
        self._forget(extent)
        name = extent_name(extent)
        os.rename(name, name, src_dir_fd=sealed_fd, dst_dir_fd=self._fd)
        now = time.time()
        os.utime(name, (now, now), dir_fd=self._fd)
        self._add(extent, size, now)

    def move_out(self, extent: Extent, name: str, to_fd: int) -> None:
        """Move an extent's file into another directory, as `name`: among the sealed ones again, or to be
        removed. Raises FileNotFoundError."""
        self._forget(extent)
        os.rename(extent_name(extent), name, src_dir_fd=self._fd, dst_dir_fd=to_fd)

    def due(self, wanted_bytes: int) -> list[Extent]:
        """Return the extents that have been here for long enough, and as many of the oldest others as it
        takes to free so many bytes."""
        until = time.time() - self.kept_s
        found = []
        for extent, (size, since) in self._kept.items():
            if since > until and wanted_bytes <= 0:
                break
            wanted_bytes -= size
            found.append(extent)
        return found

    def _add(self, extent: Extent, size: int, since: float) -> None:
        self._kept[extent] = size, since
        self.stripes.setdefault(extent.content, set()).add(extent.stripe)
        self.bytes += size

    def _forget(self, extent: Extent) -> None:
        known = self._kept.pop(extent, None)
        if known is not None:
            self.bytes -= known[0]
            stripes = self.stripes[extent.content]
            stripes.discard(extent.stripe)
            if not stripes:
                del self.stripes[extent.content]


def extent_name(extent: Extent) -> str:
    """Return the name of an extent's file."""
    return f"{extent.content:x}.{extent.stripe:x}"


def parsed_name(name: str) -> Extent | None:
    """Return the extent whose file has this name, None if it is no such name."""
    content, dot, stripe = name.partition(".")
    try:
        extent = Extent(int(content, 16), int(stripe, 16))
    except ValueError:
        return None
    return extent if dot and extent_name(extent) == name else None
