"""The contents of this host, by file, and what keeps their extents."""

import itertools
import os
from contextlib import suppress

from ..backend.model.records import ContentId
from ..backend.namespace import Inode
from ..backend.store.api import Store
from .content import Content, Stamp, State

# The unit of st_blocks.
BLOCK_BYTES = 512
# The limit of descriptors kept for contents that are being written, so that no program exhausts them.
_DESCRIPTORS_MAX = 16


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
        self.store = store
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

    def stamp(self, content: Content) -> Stamp:
        if not content.extent:
            return content.base.size, content.base.mtime_ns
        status = self.stat(content)
        return status.st_size, status.st_mtime_ns

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
            has_name = bool(self.store.namespace.inodes[content.ino].nlink)
            if has_name and content.is_changing and content.extent:
                with suppress(OSError):  # a store node has removed it with its session
                    before = content.base.blocks if content.seen is not None else 0
                    blocks += max(0, self.stat(content).st_blocks - before)
        return blocks * BLOCK_BYTES

    # -- where it lies ---------------------------------------------------------------------------

    def is_here(self, content: Content) -> bool:
        """Return whether the content is on this host; it may be too large for that."""
        return content.own or (bool(content.extent) and self.store.is_here(content.extent))

    def is_borrowed(self, content: Content) -> bool:
        """Return whether the content's file belongs to a store node, and must not be written."""
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
        content.holds += 1
        if lends:
            try:
                self.store.lend(content.extent)
            except BaseException:
                self.let_go(content)
                raise

    def let_go(self, content: Content) -> bool:
        """Undo one `hold`. Return whether it was the last one."""
        content.holds -= 1
        if content.holds:
            return False
        self.store.unpin(content.extent)
        if content.fd >= 0:
            self.close(content)
        return True

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
        if content.holds:
            self.store.pin(extent)
            self._lend(extent)
            self.store.unpin(before)
        if content.fd >= 0:
            self.close(content)
        content.extent = extent
        if frees:
            self.store.retire(before)

    def lend_again(self, content: Content) -> None:
        """Note that a store node may have adopted the content's file, which programs have open. Raises
        OSError ESTALE if it has freed that already."""
        if content.holds:
            self.store.pin(content.extent)
            self._lend(content.extent)
            self.store.unpin(content.extent)

    def _lend(self, extent: ContentId) -> None:
        """Lend an extent that is pinned for that; take the pin back if a store node has freed it."""
        try:
            self.store.lend(extent)
        except BaseException:
            self.store.unpin(extent)
            raise

    # -- becoming and ceasing to be the file's content --------------------------------------------

    def add_private(self, content: Content) -> None:
        self.private.setdefault(content.ino, []).append(content)

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

    def give_up(self, content: Content) -> None:
        """Never publish a content that is being written."""
        content.give_up()
        self._end(content)

    def _end(self, content: Content) -> None:
        self._forget_private(content)
        if self.current.get(content.ino) is content:
            del self.current[content.ino]
        if not content.holds and content.own:
            self.store.retire(content.extent)

    def rest(self, content: Content, inode: Inode) -> None:
        """Note that nobody holds the content any more."""
        if content.state is State.LEFT and inode.nlink:
            return
        is_private = content.state is State.REPLACING
        if content.state.ended or is_private or not content.is_version_of(inode):
            self.supersede(content)
        else:
            content.rest()

    def _forget_private(self, content: Content) -> None:
        left = self.private.get(content.ino)
        if left is not None and content in left:
            left.remove(content)
            if not left:
                del self.private[content.ino]
