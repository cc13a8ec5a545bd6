"""Making contents writable in place, and showing the versions of other hosts in them."""

import errno
import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from ..backend.files.extents import copy_contents, when_unlocked
from ..backend.model.records import ContentId
from ..backend.namespace import Inode, fail
from ..backend.store.api import copy_of
from ..inline import detach
from .content import Content, Stamp
from .host import OnHost
from .nodes import Node
from .table import changed_ns, stamp_of

log = logging.getLogger(__name__)


class InPlace(OnHost):
    """Makes contents writable, and copies newer versions into those that have nothing unpublished."""

    # -- beginning -------------------------------------------------------------------------------

    async def make_writable(self, content: Content) -> None:
        """Return when the content may be written. Raises OSError (ENOSPC, ESTALE)."""
        is_quick = not (self._store.waits or content.is_busy)
        if is_quick and not (content.extent and self._store.is_lent(content.extent)):
            await self._begin(content)
            return
        # Counted from now on: opens that come before this task goes on are to share the copy.
        content.preparing += 1
        try:
            await detach()
            async with content.locked():
                if not content.state.writable:
                    await self._begin(content)
        finally:
            content.preparing -= 1

    async def _begin(self, content: Content) -> None:
        """Note that the content may differ from its version from now on."""
        inode = self._inodes[content.ino]
        if not content.extent:
            self._sharing.allocate(content, inode)
            return
        before = content.extent
        is_known = content.seen is not None and self._store.is_as_left(before)
        is_version = not (is_known and self._table.is_written(content))
        is_copied = self._store.is_lent(before)
        written = None if is_version else self._table.stat(content)
        extent = before
        if is_copied or self._store.sends:
            extent = await self._store.begin_in_place(inode, before)
        if extent != before:
            self._table.give_extent(content, extent, frees=False)
        self._table.keep_open(content, self._store.extents.open(extent, os.O_RDWR))
        if is_copied:
            for node in self._nodes.of(content.ino):
                if node.backing_extent == before and (node.content is content or not node.is_bound):
                    self._kernel.drop_backing(node)
        elif extent != before:
            self._host.move_backings(content.ino, before, extent)
        if written is None:
            content.begin_in_place(self._set_mtime(content, inode), self._inodes[content.ino])
        else:
            content.go_on_in_place(stamp_of(written), changed_ns(content, written))

    # -- changed by requests ---------------------------------------------------------------------

    def is_alone(self, content: Content, node: Node | None = None) -> bool:
        """Return whether no program is in the middle of a write to the content's file. `node`: the kernel
        lets nobody write through that one now."""
        return not content.writers or not any(
            other.backing_id and other.content is content and other is not node
            for other in self._nodes.of(content.ino)
        )

    def waits(self, content: Content, node: Node) -> bool:
        """Return whether `change` has to wait."""
        return not (content.state.writable and not content.is_busy and self.is_alone(content, node))

    async def change(
        self, content: Content, change: Callable[[int], object], node: Node | None = None
    ) -> None:
        """Make a content writable, and call `change` with a descriptor of its file: in a thread that waits
        for the file's lock, unless it `is_alone`."""
        if not content.state.writable or content.is_busy:
            await self.make_writable(content)
        if self._store.extents.filled:
            self._store.extents.look_for_room(content.extent)
        if self.is_alone(content, node):
            with self._store.extents.opened(content.extent, os.O_RDWR) as fd:
                change(fd)
        else:
            await detach()
            async with content.locked():
                if not content.state.writable:
                    await self._begin(content)
                with self._store.extents.opened(content.extent, os.O_RDWR) as fd:
                    await when_unlocked(change, fd)
        content.touch()

    # -- versions of other hosts -----------------------------------------------------------------

    def is_behind(self, inode: Inode) -> bool:
        """Return whether another host has published a newer version than the one written in place here."""
        content = self._table.current.get(inode.ino)
        return content is not None and content.writers > 0 and content.base.version != inode.version

    async def refresh(self, ino: int, *, opens: bool = False, cuts: bool = False) -> None:
        """Show the newest version, which another host published, to everybody who has the file open in
        place, unless this host has unpublished changes; only to who `opens` it if it is too large for this
        host: EFBIG for others. `cuts`: before a truncation; the kernel sends no stores until that is
        answered, so nobody can wait for them. Raises OSError."""
        content, inode = self._table.current.get(ino), self._inodes.get(ino)
        if content is None or inode is None or not self.is_behind(inode):
            return
        with self._host.held(content):
            await detach()
            forget = self._forget_later if cuts else self.forget_pages
            await forget(content)
            async with content.locked():
                inode = await self._store.bring(ino)
                is_newest = content.base.version == inode.version
                if content.state.ended or is_newest or self._table.is_written(content):
                    return
                is_here = not inode.extent or self._store.is_here(inode.extent)
                if not (is_here or opens):
                    raise fail(errno.EFBIG, "the newest version is larger than this mount keeps")
                if self._table.is_borrowed(content) or not is_here:
                    self._table.supersede(content)  # or its last writer is leaving
                    return
                with self._opened(inode) as source:
                    if not content.state.writable:
                        await self._begin(content)
                    await self._show(content, inode, source)
            await forget(content)

    async def forget_pages(self, content: Content) -> None:
        """Return when the kernel keeps no pages of the content, and what programs stored to them through
        mappings came here as writes. Those take the content's lock: nobody may hold it meanwhile."""
        for node in self._nodes.of(content.ino):
            if node.cached and node.content is content:
                await detach()
                await self._kernel.forget_content(node)

    async def _forget_later(self, content: Content) -> None:
        self._kernel.start_soon(self.forget_pages, content)

    async def show_after_conflict(self, content: Content) -> None:
        """Show the newest version in the place of what was set aside, unless somebody has written since.
        The caller may hold the content's lock, so the kernel forgets its pages later."""
        try:
            inode = await self._store.bring(content.ino)
            if content.state.writable and not self._table.is_written(content, surely=True):
                with self._opened(inode) as source:
                    await self._show(content, inode, source)
                await self._forget_later(content)
        except OSError as error:  # the next open or lock tries again
            where = self._store.namespace.describe(content.ino)
            log.warning("%s: the newest version cannot be shown yet: %s", where, error)

    def _opened(self, inode: Inode) -> AbstractContextManager[int]:
        """Return a context manager with a descriptor of a version's extent, 0 if there is none. A newer
        version may take the extent away meanwhile."""
        return self._store.extents.opened(inode.extent) if inode.extent else nullcontext(0)

    async def _show(self, content: Content, inode: Inode, source: int) -> None:
        """Copy a version into a writable content that has nothing unpublished."""
        extents = self._store.extents

        def copy(fd: int) -> Stamp:
            os.ftruncate(fd, inode.size)
            if inode.extent:
                copy_contents(source, fd)
            os.utime(fd, ns=(os.fstat(fd).st_atime_ns, inode.mtime_ns))
            return stamp_of(os.fstat(fd))

        with extents.opened(content.extent, os.O_RDWR) as fd:
            content.show_newest(inode, await when_unlocked(copy, fd))
        for node in self._nodes.of(content.ino):
            if node.content is content:
                self._kernel.invalidate_attributes(node)

    async def copied(self, content: Content) -> tuple[ContentId, os.stat_result]:
        """Copy the content to an extent of its own. Return that, and its stat. The copy takes no room for
        bytes that were reserved and not written (posix_fallocate); the stat counts them."""
        extent = await copy_of(self._store, self._inodes[content.ino], content.extent)
        blocks = self._table.stat(content).st_blocks
        return extent, os.stat_result(self._store.extents.stat(extent), {"st_blocks": blocks})

    def _set_mtime(self, content: Content, inode: Inode) -> Stamp:
        """Give the content the inode's time of modification, and return its stamp. Its access time stays:
        it may be that of a read which no record has."""
        status = self._table.stat(content)
        if status.st_mtime_ns != inode.mtime_ns:
            self._table.set_times(content, status.st_atime_ns, inode.mtime_ns)
            status = self._table.stat(content)
        return stamp_of(status)
