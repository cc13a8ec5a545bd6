"""Contents of files on this host: which bytes a descriptor reads and writes.

A `Content` is one run of bytes that descriptors share, kept in one extent. An inode has at most one
*current* content here, which opens for reading or in place get; any number of *private* ones, each of which
replaces the file when it is published; and *superseded* ones, which only the descriptors that have them
keep. docs/sharing.md has the rule that says which open gets which.

This module has only the bookkeeping: who holds a content, and when its extent may go.
"""

import itertools
import os
from contextlib import suppress
from typing import NamedTuple

import trio

from ..backend.cluster.records import NO_CONTENT, ContentId
from ..backend.namespace import Inode
from ..backend.store.api import Store

Stamp = tuple[int, int]

# The unit of st_blocks.
BLOCK_BYTES = 512
# The limit of descriptors kept for contents that are being written, so that no program exhausts them.
_DESCRIPTORS_MAX = 16


class Content:
    """One content. Sizes are bytes, `blocks` 512-byte units, times nanoseconds.

    `extent` keeps the bytes, 0 while there are none; `own`: no version names the extent, so it is freed
    with this object; `fd` may be open on it while it is written, else -1. `version` is the published
    version that the content is, or began as, and `published` the inode as it was then. `holds` counts
    handles and promised opens, `opens` and `writers` handles alone; `leaving` counts writers whose last
    descriptor is closed and whose release is not carried out yet; `preparing` those that are about to make
    the content writable; `awaited` those who join it and whose promised open has not come yet. `leaves`: a
    store node is adopting its very file.

    `writable`: the extent may be written, because nobody else relies on its bytes. `dirty`: a request to
    the daemon changed it since it was published. `seen` is the stamp at its last publication, or when it
    was first opened in place; None if it was never published; `begun` is the stamp when it began to be
    written. `moved`: its stamp and the time of its last change when its file got another number, as the
    file's own time of change moves then as if it were written. `mapped`: a program could map it for
    writing. `whole`: every writer began with an empty file, so a writer that is killed publishes nothing.
    `kept`: such a writer left it, and it is seen on this host only. `discarded`: its writer gave it up.
    """

    __slots__ = (
        "awaited", "begun", "blocks", "dirty", "discarded", "extent", "fd", "holds", "ino",
        "kept", "leaves", "leaving", "lock", "mapped", "moved", "mtime_ns", "opens", "own", "pinned",
        "preparing", "private", "published", "seen", "size", "superseded", "version",
        "whole", "writable", "writers",
    )  # fmt: skip

    def __init__(self, inode: Inode, *, private: bool = False) -> None:
        self.ino = inode.ino
        self.private = private
        self.superseded = False
        self.opens = 0
        self.writers = 0
        self.leaving = 0
        self.preparing = 0
        self.awaited = 0
        self.leaves = False
        self.holds = 0
        self.pinned = NO_CONTENT
        self.own = False
        self.fd = -1
        self.writable = False
        self.dirty = False
        self.mapped = False
        self.whole = private
        self.kept = False
        self.discarded = False
        self.seen: Stamp | None = None
        self.begun: Stamp | None = None
        self.moved: tuple[Stamp, int] | None = None
        self.lock: trio.Lock | None = None
        self.show(inode)
        self.extent = NO_CONTENT if private else inode.extent

    def show(self, inode: Inode) -> None:
        """Take over the version's attributes from the namespace."""
        self.published = inode
        self.version = inode.version
        self.size = inode.size
        self.blocks = inode.blocks
        self.mtime_ns = inode.mtime_ns

    @property
    def since(self) -> Stamp | None:
        """Return the stamp of its extent when it was last published, or begun."""
        return self.seen if self.seen is not None else self.begun

    @property
    def is_changing(self) -> bool:
        """Return whether its size and times are those of its extent, and not of a published version."""
        return bool(self.private or self.writers or self.kept)

    def locked(self) -> trio.Lock:
        """Return the lock that is held while it is published, or made writable."""
        if self.lock is None:
            self.lock = trio.Lock()
        return self.lock

    @property
    def is_busy(self) -> bool:
        return bool(self.preparing) or (self.lock is not None and self.lock.locked())

    def __repr__(self) -> str:
        kind = "private" if self.private else "superseded" if self.superseded else "current"
        return f"<Content ino={self.ino} v{self.version} {kind} extent={self.extent:x}>"


class Shown(NamedTuple):
    """How a file looks to stat(2): bytes, 512-byte units, nanoseconds."""

    size: int
    blocks: int
    mtime_ns: int
    ctime_ns: int


def stamp_of(status: os.stat_result) -> Stamp:
    """Return the attributes that a write to an extent changes. Not st_ctime: a store that adopts the file
    changes it, too."""
    return status.st_size, status.st_mtime_ns


def changed_ns(content: Content, status: os.stat_result) -> int:
    """Return when a content was last changed; `status` is its extent's stat."""
    if content.moved is not None and content.moved[0] == stamp_of(status):
        return content.moved[1]
    return status.st_ctime_ns


class ContentTable:
    """All contents that are open, or may be opened again."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.current: dict[int, Content] = {}
        # The newest one last.
        self.private: dict[int, list[Content]] = {}
        # The newest version of each file that was published on this host.
        self.published: dict[int, int] = {}
        # The content that is being published, of each file.
        self.publishing: dict[int, Content] = {}
        # Contents with a descriptor, the oldest first.
        self._described: dict[Content, None] = {}

    def newest_private(self, ino: int) -> Content | None:
        contents = self.private.get(ino)
        return contents[-1] if contents else None

    def stat(self, content: Content) -> os.stat_result:
        """Return the stat of its extent. Raises OSError EIO if that is gone."""
        if content.fd >= 0:
            return os.fstat(content.fd)
        return self._store.extents.stat(content.extent)

    def stamp(self, content: Content) -> Stamp:
        return stamp_of(self.stat(content)) if content.extent else (content.size, content.mtime_ns)

    def set_times(self, content: Content, atime_ns: int, mtime_ns: int) -> None:
        if content.fd >= 0:
            os.utime(content.fd, ns=(atime_ns, mtime_ns))
        else:
            self._store.extents.set_times(content.extent, atime_ns, mtime_ns)

    def unpublished_bytes(self) -> int:
        """Return how many bytes are allocated for contents that are being written, beyond those of the
        versions that they are changed copies of. Those of files without a name are not published."""
        written = [*self.current.values(), *itertools.chain(*self.private.values())]
        blocks = 0
        for content in written:
            has_name = bool(self._store.namespace.inodes[content.ino].nlink)
            if has_name and content.is_changing and content.extent:
                with suppress(OSError):  # a store node has removed it with its session
                    before = content.blocks if content.seen is not None else 0
                    blocks += max(0, self.stat(content).st_blocks - before)
        return blocks * BLOCK_BYTES

    # -- where it lies ---------------------------------------------------------------------------

    def is_here(self, content: Content) -> bool:
        """Return whether the content is on this host; it may be too large for that."""
        return content.own or (bool(content.extent) and self._store.is_here(content.extent))

    def is_borrowed(self, content: Content) -> bool:
        """Return whether the content's file belongs to a store node, and must not be written."""
        return not content.writable and self._store.is_lent(content.extent)

    # -- what keeps an extent --------------------------------------------------------------------

    def hold(self, content: Content, *, lends: bool = False) -> None:
        """Keep a content. `lends`: a program gets it that may keep references to its pages. Raises OSError
        ESTALE if a store node has freed its extent already."""
        if not content.holds:
            try:
                self._store.pin(content.extent)
            except OSError:
                if content.own:
                    self.supersede(content)  # nobody else has it
                raise
            content.pinned = content.extent
        content.holds += 1
        if lends:
            try:
                self._store.lend(content.extent)
            except BaseException:
                self.let_go(content)
                raise

    def let_go(self, content: Content) -> bool:
        """Undo one `hold`. Return whether it was the last one."""
        content.holds -= 1
        if content.holds:
            return False
        self._store.unpin(content.pinned)
        content.pinned = NO_CONTENT
        self.close(content)
        return True

    def close(self, content: Content) -> None:
        """Close the descriptor of a content, as when nobody writes it any more."""
        if content.fd >= 0:
            del self._described[content]
            os.close(content.fd)
            content.fd = -1

    def keep_open(self, content: Content, fd: int) -> None:
        """Take over a descriptor of the content's extent."""
        self.close(content)
        if len(self._described) >= _DESCRIPTORS_MAX:
            self.close(next(iter(self._described)))
        self._described[content] = None
        content.fd = fd

    def give_extent(self, content: Content, extent: ContentId, *, own: bool) -> None:
        """Move the content to another extent, or give the same extent another number. Raises OSError
        ESTALE, and changes nothing, if a store node has freed that extent already."""
        if content.holds:
            self._store.pin(extent)
            self._store.lend(extent)
            self._store.unpin(content.pinned)
            content.pinned = extent
        before, was_own = content.extent, content.own
        if extent != before:
            self.close(content)
        content.extent, content.own = extent, own
        if was_own and before != extent:
            self._store.retire(before)

    # -- becoming and ceasing to be the file's content --------------------------------------------

    def add_private(self, content: Content) -> None:
        self.private.setdefault(content.ino, []).append(content)

    def make_current(self, content: Content) -> None:
        """Make the content the file's current one; the one before stays with its descriptors."""
        if content.private:
            self._remove_private(content)
        content.superseded = False
        before = self.current.get(content.ino)
        if before is not None and before is not content:
            self.supersede(before)
        self.current[content.ino] = content

    def become_version(self, inode: Inode) -> Content | None:
        """Make the content that is being published current if its very file is the newest version, maybe
        under another number: the store knows of a version before its publisher does."""
        content = self.publishing.get(inode.ino)
        if content is None or not self._is_same_file(content.extent, inode.extent):
            return None
        content.show(inode)
        self.make_current(content)
        return content

    def _is_same_file(self, one: ContentId, other: ContentId) -> bool:
        if not (one and other):
            return False
        try:
            return one == other or os.path.samestat(*map(self._store.extents.stat, (one, other)))
        except OSError:
            return False

    def supersede(self, content: Content) -> None:
        """Let no further open share this content; descriptors that have it keep it."""
        if content.private:
            self._remove_private(content)
        content.superseded = True
        if self.current.get(content.ino) is content:
            del self.current[content.ino]
        if not content.holds:
            self._retire(content)

    def rest(self, content: Content, inode: Inode) -> None:
        """Note that nobody holds the content any more."""
        if content.kept and not content.superseded:
            return
        if (
            content.private
            or content.superseded
            or content.version != inode.version
            or content.extent != inode.extent
        ):
            self.supersede(content)
        else:
            content.mapped = content.writable = False

    def _remove_private(self, content: Content) -> None:
        content.private = False
        left = self.private[content.ino]
        left.remove(content)
        if not left:
            del self.private[content.ino]

    def _retire(self, content: Content) -> None:
        if content.own:
            content.own = False
            self._store.retire(content.extent)
