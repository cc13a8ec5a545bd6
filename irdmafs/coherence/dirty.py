"""Detecting whether a content was written since it was published or begun.

With passthrough the daemon sees no writes: only the size and the times of an extent tell.
"""

import os
import platform
import time
from typing import Final

from ..backend.store.api import Store
from .content import Content
from .nodes import Handle
from .table import ContentTable

# Before 6.13 a write may leave the times of a file unchanged within a timer tick (1-10 ms).
_TIMESTAMP_GRAIN_NS: Final = 20_000_000


def _stamps_are_fine() -> bool:
    """Return whether a write always moves a time that was looked at before (Linux 6.13)."""
    major, minor, *_ = (int(part) for part in platform.release().split("-")[0].split(".")[:2])
    return (major, minor) >= (6, 13)


class Changes:
    """Compares contents with their size and times when they were published or begun."""

    def __init__(self, store: Store, table: ContentTable) -> None:
        self._store = store
        self._table = table
        self._inodes = store.namespace.inodes
        self._grain_ns = 0 if _stamps_are_fine() else _TIMESTAMP_GRAIN_NS

    def is_written(
        self, content: Content, status: os.stat_result | None = None, *, surely: bool = False
    ) -> bool:
        """Return whether anybody may have written to the content since it was published or begun, as far as
        stat can tell. A store through a mapping changes no time. `status` is its extent's stat, if known;
        `surely`: a write counts only if it moved the times."""
        if content.dirty:
            return True
        if not content.extent:
            return False
        status = status or self._table.stat(content)
        if (status.st_size, status.st_mtime_ns) != (content.seen or content.begun):
            return True
        return not surely and self._grain_ns > 0 and self._may_share_a_tick(content, status)

    def _may_share_a_tick(self, content: Content, status: os.stat_result | None = None) -> bool:
        """Return whether a write after the publication may have left the times unchanged."""
        if not self._grain_ns or content.seen is None or not content.extent:
            return False
        return time.time_ns() - (status or self._table.stat(content)).st_mtime_ns < self._grain_ns

    def is_changed(self, handle: Handle, content: Content) -> bool:
        """Return whether closing the handle has anything to publish, as far as stat can tell."""
        if handle.since is not None and self._table.stamp(content) == handle.since:
            return False  # nothing was written through it
        if content.seen is not None:
            # In a cluster, bytes are compared before anything is published whose times have not moved.
            return self.is_written(content, surely=self._store.sends)
        if self._store.sends and not content.base.version:
            stamp = self._table.stamp(content)
            if not stamp[0] and (not content.extent or stamp == content.begun):
                return False  # a new file that stays empty is known to be empty by its name
        inode = self._inodes[content.ino]
        # An unwritten empty copy gives way to a version that was published meanwhile.
        return inode.version == content.base.version or self.is_written(content)

    def may_hide_writes(self, content: Content) -> bool:
        """Return whether only a comparison of bytes can tell that the content was written. A store through
        a mapping changes no time if its page was stored to before, or (in a tmpfs) read before."""
        if content.mapped and content.seen is not None:
            return True
        return self._grain_ns > 0 and self._may_share_a_tick(content)

    def is_to_be_compared(self, content: Content) -> bool:
        """Return whether its bytes have to be compared with those that other hosts have."""
        return self._store.sends and self.may_hide_writes(content)
