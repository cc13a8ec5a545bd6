"""Which content an open gets: the one rule of docs/sharing.md."""

import errno
import os
from contextlib import suppress

from ..backend.namespace import Inode, fail
from ..backend.namespace.attributes import ISOLATION
from .content import Content, State
from .nodes import Node
from .table import ContentTable, stamp_of


class Sharing:
    """Chooses the content of a file that an open shares, or begins one for it. `isolates`: a file is
    replaced as a whole at its close, and not at once as on other filesystems, unless the nearest directory
    above that has the attribute user.irdmafs.isolation ("on" or "off") decides otherwise."""

    def __init__(self, table: ContentTable, *, isolates: bool) -> None:
        self._store = table.store
        self._inodes = table.store.namespace.inodes
        self._parents_of = table.store.namespace.parents_of
        self._table = table
        self._isolates = isolates

    def current(self, inode: Inode) -> Content | None:
        """Return the file's content here; None if nobody has had its present version open.

        If another host has published since, the content is left to its readers. Programs that write it in
        place stay together with all who open it, until `refresh` or a conflict.
        """
        content = self._table.current.get(inode.ino)
        if content is None or content.base.version == inode.version:
            return content
        if content.base.version == self._newest(inode).version:
            return content
        # While it is being published here, that version may be the newer one itself.
        if content.writers or content.is_busy:
            return content
        self._table.supersede(content)
        return None

    def current_or_new(self, inode: Inode) -> Content:
        content = self.current(inode)
        if content is None:
            inode = self._newest(inode)
            content = self._table.become_version(inode) if self._table.publishing else None
        if content is None:
            content = self._table.current[inode.ino] = Content(inode)
        return content

    def _newest(self, inode: Inode) -> Inode:
        """Return the inode as it is now: the caller may have found it before another version came."""
        return self._inodes.get(inode.ino) or inode

    def newest(self, inode: Inode) -> Content:
        """Return the content that truncate(2) by name changes."""
        newest = self._table.newest_private(inode.ino) or self.current_or_new(inode)
        return self.to_share(newest, inode)

    def content_for(self, inode: Inode, flags: int) -> tuple[Content, bool]:
        """Return the content that an open gets, and whether it is to be emptied. May begin a private one.
        Raises OSError (ENOSPC, EMFILE)."""
        current = self.current_or_new(inode)
        if flags & os.O_ACCMODE == os.O_RDONLY:
            return current, False
        private = self._table.newest_private(inode.ino)
        if not flags & os.O_TRUNC:
            return self.to_share(private or current, inode), False
        if private is not None and (private.awaited or not private.whole):
            return private, True  # somebody writes it in place, as others may from now on
        if private is not None or self._is_replaced(current, inode):
            return self._begin_private(inode), False
        return self.to_share(current, inode), True

    def content_to_empty(self, inode: Inode, shown: Content | None) -> Content:
        """Return the content that an open with O_RDONLY | O_TRUNC empties. `shown`: the content of the
        descriptor by which the open came."""
        if shown is not None:
            return shown
        current = self.current_or_new(inode)
        if self._is_replaced(current, inode):
            return self._begin_private(inode)
        return self.to_share(current, inode)

    def to_share(self, content: Content, inode: Inode) -> Content:
        """Return the content to write in place for this one: another one if this may not be written."""
        if self.may_be_written(content):
            return content
        self._table.supersede(content)
        return self.current_or_new(inode)

    def may_be_written(self, content: Content) -> bool:
        """Return whether a content may be written in place: not if it has readers of a file that must not
        be written, as their node passes through to one file."""
        return not content.opens or content.is_busy or not self._table.is_borrowed(content)

    def _is_replaced(self, current: Content, inode: Inode) -> bool:
        """Return whether emptying the file begins a version of its own, which nobody sees before it is
        closed."""
        writers = current.writers + current.awaited - current.leaving
        written = current.state is State.LEFT or writers > 0
        if not inode.version or written:
            return False
        return self.isolates_below(inode.parent or next(iter(self._parents_of(inode.ino)), 0))

    def isolates_below(self, ino: int) -> bool:
        """Return whether files in this directory are isolated. If so, other hosts do not see the name of a
        new one before its first version, either."""
        with suppress(KeyError):  # a directory that is gone
            while ino:
                directory = self._inodes[ino]
                value = directory.xattrs.get(ISOLATION)
                if value is not None:
                    return value != b"off"
                ino = directory.parent
        return self._isolates

    def _begin_private(self, inode: Inode) -> Content:
        content = Content(inode, replaces=True)
        self.allocate(content, inode)
        self._table.private.setdefault(content.ino, []).append(content)
        self._table.store.extents.filled += 1
        return content

    def allocate(self, content: Content, inode: Inode, *, whole: bool = False) -> None:
        """Begin to write a content in an empty extent. Until it is written, its times are those of the
        name; if it replaces the file, those of its beginning. `whole`: its writer needs it empty."""
        extent, fd = self._store.allocate(inode)
        replaces = content.state is State.REPLACING
        try:
            if not replaces:
                os.utime(fd, ns=(inode.atime_ns, inode.mtime_ns))
            stamp = stamp_of(os.fstat(fd))
        except BaseException:
            os.close(fd)
            raise
        self._table.give_extent(content, extent, frees=False)
        self._table.keep_open(content, fd)
        found_full = self._store.extents.look_for_room(extent) if replaces else 0
        content.begin_empty(stamp, found_full, has_version=bool(inode.version), whole=whole)

    # -- what others see of it -------------------------------------------------------------------

    def discard(self, node: Node) -> None:
        """Give a content up for its writers: closing it publishes nothing. Raises OSError EBUSY if others
        see it already."""
        self._table.give_up(self._unseen(node))

    def believe_unmapped(self, node: Node) -> None:
        """Take the only writer's word that no mapping of the content is left: it is published as it lies.
        Raises OSError EBUSY if others have it open, or see it already."""
        content = self._unseen(node)
        if content.holds > 1:
            raise fail(errno.EBUSY, "others have it open")
        content.be_unmapped()

    def leave_to_rename(self, node: Node) -> None:
        """Have closing a content leave it to the next rename of a directory above. Raises as `discard`."""
        self._unseen(node).wait_for_rename()
        self._store.namespace.tree.has_drafts = True

    @staticmethod
    def _unseen(node: Node) -> Content:
        content = node.content
        unseen = content is not None and content.seen is None and content.whole
        if content is None or not node.opens or not unseen or content.is_busy:
            raise fail(errno.EBUSY, "others see it already")
        return content

    def is_at_hand(self, inode: Inode) -> bool:
        """Return whether opens get a content of this host, without asking any other."""
        content = self.current(inode)
        return content is not None and content.own

    def may_be_cloned(self, inode: Inode) -> bool:
        """Return whether another file may get the very content of a file's version: nobody has written it
        in place since, nor may without a copy from now on."""
        content = self.current(inode)
        if not inode.version or content is None:
            return inode.version > 0
        if content.is_changing or content.is_busy or content.awaited:
            return False
        if content.state.writable:
            if self._table.is_written(content) or (content.mapped and self._store.sends):
                return False
            if not self._store.sends:
                if content.mapped:
                    self._store.note_mapped(content.extent)
                content.rest()
        return True

    def is_written_in_place(self, inode: Inode) -> bool:
        """Return whether opens for reading see unpublished bytes."""
        content = self.current(inode)
        return content is not None and content.is_changing


def truncates(flags: int) -> bool:
    """Return whether an open is to begin with an empty file."""
    return bool(flags & os.O_TRUNC) and flags & os.O_ACCMODE != os.O_RDONLY
