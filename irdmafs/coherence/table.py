"""The contents of this host, by file: what keeps their extents, and whether they were written.

With passthrough the daemon sees no writes: only the size and the times of an extent tell.
"""

import errno
import itertools
import os
import platform
import time
from contextlib import suppress
from typing import Final

from ..backend.model.records import ContentId
from ..backend.namespace import Inode, fail
from ..backend.store.api import Store
from .content import Content, Mark, Stamp, State
from .nodes import Handle

# The unit of st_blocks.
BLOCK_BYTES = 512
# The limit of descriptors kept for contents that are being written, so that no program exhausts them.
_DESCRIPTORS_MAX = 16
# Before 6.13 a write may leave the times of a file unchanged within a timer tick (1-10 ms).
_TIMESTAMP_GRAIN_NS: Final = 20_000_000


def stamp_of(status: os.stat_result) -> Stamp:
    """Return the attributes that a write to an extent changes. Not st_ctime: a store that adopts the file
    changes it, too."""
    return status.st_size, status.st_mtime_ns


def changed_ns(content: Content, status: os.stat_result) -> int:
    """Return when a content was last changed; `status` is its extent's stat."""
    if content.moved is not None and content.moved[0] == stamp_of(status):
        return content.moved[1]
    return status.st_ctime_ns


def _stamps_are_fine() -> bool:
    """Return whether a write always moves a time that was looked at before (Linux 6.13)."""
    major, minor, *_ = (int(part) for part in platform.release().split("-")[0].split(".")[:2])
    return (major, minor) >= (6, 13)


class ContentTable:
    """All contents that are open, or may be opened again."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._inodes = store.namespace.inodes
        self._grain_ns = 0 if _stamps_are_fine() else _TIMESTAMP_GRAIN_NS
        self.current: dict[int, Content] = {}
        # Contents that replace their files when they are published, the newest one last.
        self.private: dict[int, list[Content]] = {}
        # The newest version of each file that was published on this host.
        self.published: dict[int, int] = {}
        # The content that is being published, of each file.
        self.publishing: dict[int, Content] = {}
        # Contents with a descriptor, the oldest first.
        self._described: dict[Content, None] = {}

    def newest_private(self, ino: int) -> Content | None:
        contents = self.private.get(ino) if self.private else None
        return contents[-1] if contents else None

    def stat(self, content: Content) -> os.stat_result:
        """Return the stat of its extent. Raises OSError EIO if that is gone."""
        if content.fd >= 0:
            return os.fstat(content.fd)
        return self.store.extents.stat(content.extent)

    def stamp(self, content: Content, status: os.stat_result | None = None) -> Stamp:
        """Return the stamp of a content; `status` is its extent's stat, if known."""
        if not content.extent:
            return content.base.size, content.base.mtime_ns
        return stamp_of(status or self.stat(content))

    def mark(self, content: Content, status: os.stat_result | None = None) -> Mark:
        """Return the mark of a content, which every write changes; `status` as for `stamp`."""
        if not content.extent:
            return 0, 0, 0
        status = status or self.stat(content)
        return *stamp_of(status), status.st_ctime_ns

    def set_times(self, content: Content, atime_ns: int, mtime_ns: int) -> None:
        if content.fd >= 0:
            os.utime(content.fd, ns=(atime_ns, mtime_ns))
        else:
            self.store.extents.set_times(content.extent, atime_ns, mtime_ns)

    def unpublished_bytes(self) -> int:
        """Return how many bytes are allocated for contents that are being written, beyond those of the
        versions that they are changed copies of. Those of files without a name are not published."""
        written = [*self.current.values(), *itertools.chain(*self.private.values())]
        blocks = 0
        for content in written:
            has_name = bool(self._inodes[content.ino].nlink)
            if has_name and content.is_changing and content.extent:
                with suppress(OSError):  # a store node has removed it with its session
                    before = content.base.blocks if content.seen is not None else 0
                    blocks += max(0, self.stat(content).st_blocks - before)
        return blocks * BLOCK_BYTES

    # -- whether it was written ------------------------------------------------------------------

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
        status = status or self.stat(content)
        if (status.st_size, status.st_mtime_ns) != (content.seen or content.begun):
            return True
        return not surely and self._grain_ns > 0 and self._may_share_a_tick(content, status)

    def is_given_up(self, handle: Handle, content: Content) -> bool:
        """Return whether a content was given up by its writer. Raises OSError, and has nothing of a private
        one published, if a write to it was refused, or the kernel may have refused one: the store is full,
        or was found so since. Also such a write moves a time."""
        refused = content.refused
        if content.state is State.REPLACING and not handle.node.cached:
            found_full = self.store.extents.look_for_room(content.extent)
            was_full = content.begun is not None and content.found_full != found_full
            if was_full and (self._grain_ns > 0 or self.is_written(content)):
                refused = errno.ENOSPC
        if refused:
            handle.aborted = True
            raise fail(refused, "a write was refused; the version before stays")
        return content.state is State.GIVEN_UP

    def _may_share_a_tick(self, content: Content, status: os.stat_result | None = None) -> bool:
        """Return whether a write after the publication may have left the times unchanged."""
        if not self._grain_ns or content.seen is None or not content.extent:
            return False
        return time.time_ns() - (status or self.stat(content)).st_mtime_ns < self._grain_ns

    @property
    def grain_s(self) -> float:
        """Return after how many seconds each write moves a time that was looked at now."""
        return self._grain_ns / 1e9

    def is_changed(
        self, handle: Handle, content: Content, status: os.stat_result | None = None
    ) -> bool:
        """Return whether closing the handle has anything to publish, as far as stat can tell. `status` is
        its content's extent's stat, if known."""
        if handle.since is not None and self.mark(content, status) == handle.since:
            return False  # nothing was written through it
        if content.seen is not None:
            # In a cluster, bytes are compared before anything is published whose times have not moved.
            return self.is_written(content, status, surely=self.store.sends)
        if self.store.sends and not content.base.version:
            stamp = self.stamp(content, status)
            if not stamp[0] and (not content.extent or stamp == content.begun):
                return False  # a new file that stays empty is known to be empty by its name
        inode = self._inodes[content.ino]
        # An unwritten empty copy gives way to a version that was published meanwhile.
        return inode.version == content.base.version or self.is_written(content, status)

    def may_hide_writes(self, content: Content) -> bool:
        """Return whether only a comparison of bytes can tell that the content was written. A store through
        a mapping changes no time if its page was stored to before, or (in a tmpfs) read before."""
        if content.mapped and content.seen is not None:
            return True
        return self._grain_ns > 0 and self._may_share_a_tick(content)

    # -- where it lies ---------------------------------------------------------------------------

    def is_here(self, content: Content) -> bool:
        """Return whether the content is on this host; it may be too large for that."""
        return (bool(content.extent) and self.store.is_here(content.extent)) or content.own

    def is_borrowed(self, content: Content) -> bool:
        """Return whether the content's file belongs to a store node or other files, and must not be
        written."""
        return not content.state.writable and self.store.is_lent(content.extent)

    # -- what keeps an extent --------------------------------------------------------------------

    def hold(self, content: Content, *, lends: bool = False) -> None:
        """Keep a content. `lends`: a program gets it that may keep references to its pages. Raises OSError
        ESTALE if a store node has freed its extent already."""
        if not content.holds:
            try:
                self.store.pin(content.extent)
            except OSError:
                if content.own:
                    self.supersede(content)  # nobody else has it
                raise
        if lends:
            try:
                self.store.lend(content.extent)
            except BaseException:
                if not content.holds:
                    self.store.unpin(content.extent)
                    if content.fd >= 0:
                        self.close(content)
                raise
        content.holds += 1

    def close(self, content: Content) -> None:
        """Close the descriptor of a content, as when nobody writes it any more."""
        del self._described[content]
        os.close(content.fd)
        content.fd = -1

    def keep_open(self, content: Content, fd: int) -> None:
        """Take over a descriptor of the content's extent."""
        if content.fd >= 0:
            self.close(content)
        if len(self._described) >= _DESCRIPTORS_MAX:
            self.close(next(iter(self._described)))
        self._described[content] = None
        content.fd = fd

    def give_extent(self, content: Content, extent: ContentId, *, frees: bool) -> None:
        """Move the content to another extent, or give the same extent another number. `frees`: no version
        names the former number. Raises OSError ESTALE, and changes nothing, if a store node has freed that
        extent already."""
        before = content.extent
        self.lend(content, extent)
        if content.fd >= 0:
            self.close(content)
        content.extent = extent
        if frees:
            self.store.retire(before)

    def lend(self, content: Content, extent: ContentId) -> None:
        """Let programs that have the content open keep this extent instead of its present one, or that
        again when a store node may have adopted it. Raises OSError ESTALE if a node has freed it."""
        if not content.holds:
            return
        self.store.pin(extent)
        try:
            self.store.lend(extent)
        except BaseException:
            self.store.unpin(extent)
            raise
        self.store.unpin(content.extent)

    # -- becoming and ceasing to be the file's content --------------------------------------------

    def make_current(self, content: Content) -> None:
        """Make the content the file's current one; the one before stays with its descriptors."""
        before = self.current.get(content.ino)
        if before is content:
            return
        if before is not None:
            self.supersede(before)
        self._forget_private(content)
        self.current[content.ino] = content

    def become_version(self, inode: Inode) -> Content | None:
        """Make the content that is being published current if its very file is the newest version, maybe
        under another number: the store knows of a version before its publisher does."""
        content = self.publishing.get(inode.ino)
        if content is None or not self._is_same_file(content.extent, inode.extent):
            return None
        content.become_version(inode)
        self.make_current(content)
        return content

    def _is_same_file(self, one: ContentId, other: ContentId) -> bool:
        if not (one and other):
            return False
        try:
            return one == other or os.path.samestat(*map(self.store.extents.stat, (one, other)))
        except OSError:
            return False

    def supersede(self, content: Content) -> None:
        """Let no further open share this content; descriptors that have it keep it."""
        content.supersede()
        self._end(content)

    def give_up(self, content: Content, *, refused: int = 0) -> None:
        """Never publish a content that is being written, to which a write may have been `refused`."""
        content.give_up(refused)
        self._end(content)

    def _end(self, content: Content) -> None:
        self._forget_private(content)
        if self.current.get(content.ino) is content:
            del self.current[content.ino]
        if not content.holds and content.own:
            self.store.retire(content.extent)

    def _forget_private(self, content: Content) -> None:
        left = self.private.get(content.ino)
        if left is not None and content in left:
            left.remove(content)
            self.store.extents.filled -= 1
            if not left:
                del self.private[content.ino]
