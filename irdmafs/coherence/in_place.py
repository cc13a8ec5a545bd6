"""Making contents writable in place, and taking versions of other hosts into them."""

import errno
import os
from collections.abc import Callable

from ..backend.cluster.records import NO_CONTENT
from ..backend.namespace import Inode, fail
from ..backend.store.api import Store
from ..backend.store.sparse import segments
from ..inline import detach
from .changes import Changes
from .content import Content, ContentTable, changed_ns, stamp_of
from .kernel_cache import KernelCache
from .newest import Newest
from .nodes import Handle, Node
from .publishing import Publisher
from .sharing import Sharing
from .unused import Unused


class InPlace:
    """Makes contents writable, and changes them for requests."""

    def __init__(
        self,
        store: Store,
        kernel: KernelCache,
        table: ContentTable,
        changes: Changes,
        sharing: Sharing,
        unused: Unused,
        newest: Newest,
        publisher: Publisher,
    ) -> None:
        self._store = store
        self._kernel = kernel
        self._table = table
        self._changes = changes
        self._sharing = sharing
        self._unused = unused
        self._newest = newest
        self._publisher = publisher
        self._nodes = unused.nodes
        self._inodes = store.namespace.inodes

    # -- beginning -------------------------------------------------------------------------------

    async def make_writable(self, content: Content) -> None:
        if self._store.waits or content.is_busy:
            # Counted from now on: opens that come before this task goes on are to share the copy.
            content.preparing += 1
            try:
                await detach()
                async with content.locked():
                    if not content.writable:
                        await self._begin(content)
            finally:
                content.preparing -= 1
        else:
            await self._begin(content)

    async def _begin(self, content: Content) -> None:
        """Note that the content may differ from its version from now on."""
        inode = self._inodes[content.ino]
        if not content.extent:
            self._sharing.allocate(content, inode)
            content.seen = content.begun if inode.version else None
            return
        before = content.extent
        is_version = content.seen is None or not self._changes.is_written(content)
        is_copied = self._store.is_lent(before)
        if not is_version:
            status = self._table.stat(content)
            content.moved = stamp_of(status), changed_ns(content, status)
        extent = await self._store.begin_in_place(inode, before)
        self._table.give_extent(content, extent, own=extent != before)
        self._table.keep_open(content, self._store.extents.open(extent, os.O_RDWR))
        if is_copied:
            for node in self._nodes.of(content.ino):
                if node.backing_extent == before and (node.content is content or not node.is_bound):
                    self._kernel.drop_backing(node)
        else:
            self._unused.move_backings(content.ino, before, extent)
        if is_version:
            content.seen = content.begun = self._newest.set_mtime(content, inode)
        content.writable = True

    # -- what other hosts published --------------------------------------------------------------

    def is_behind(self, inode: Inode) -> bool:
        """Return whether another host has published a newer version than the one written in place here."""
        content = self._table.current.get(inode.ino)
        return content is not None and bool(content.writers) and content.version != inode.version

    async def refresh(self, ino: int) -> None:
        """Show the newest version, which another host published, to everybody who has the file open in
        place, unless this host has unpublished changes."""
        content, inode = self._table.current.get(ino), self._inodes.get(ino)
        if content is None or inode is None or not self.is_behind(inode):
            return
        with self._unused.held(content):
            await detach()
            async with content.locked():
                inode = await self._store.bring(ino)
                if content.superseded or content.version == inode.version:
                    return
                if self._changes.is_written(content):
                    return
                if self._table.is_borrowed(content):
                    self._table.supersede(content)  # its last writer is leaving
                    return
                if not content.writable:
                    await self._begin(content)
                await self._newest.show(content, inode)

    # -- changes that come as requests -----------------------------------------------------------

    async def change(self, handle: Handle, change: Callable[[int], None]) -> None:
        """Call `change` with a descriptor of the content's file, for a request of a handle."""
        content = handle.content
        assert content is not None
        if not content.writable or content.is_busy:
            await self.make_writable(content)
        with self._store.extents.opened(content.extent, os.O_RDWR) as fd:
            change(fd)
        content.dirty = True
        handle.since = None

    def refuse_growth(self, ino: int, fd: int, offset: int, length: int) -> None:
        """Raise OSError EDQUOT if an extent of the file may not grow by so many bytes."""
        quotas = self._store.namespace.quotas
        if quotas.in_use:
            quotas.refuse_growth(ino, os.fstat(fd), offset, length)

    def refuse_to_reserve(self, fd: int, offset: int, length: int) -> None:
        """Raise OSError ENOSPC if there is no room for what is not allocated yet of a part of a file.
        Store nodes do not know of bytes that are not published; a store on this host does."""
        if not self._store.shared:
            return
        wanted = length - sum(count for _, count in segments(fd, offset, length))
        space = self._store.statvfs()
        free = space.f_bavail * space.f_frsize - self._table.unpublished_bytes()
        if wanted > free:
            raise fail(errno.ENOSPC)

    async def truncate(self, inode: Inode, size: int) -> None:
        """Carry out truncate(2) by name: every descriptor on this host sees the file cut at once."""
        content = self._sharing.newest(inode)
        if inode.size == size and not content.is_changing:
            return
        if not size and not content.holds and not content.kept:
            # The content need not be fetched to be emptied.
            self._table.give_extent(content, NO_CONTENT, own=False)
        await self._cut_and_publish(content, size)

    async def empty(self, content: Content) -> None:
        """Publish an empty version at once: no close will publish it."""
        if content.writers or content.private or self._table.stamp(content)[0]:
            await self._cut_and_publish(content, 0)

    async def _cut_and_publish(self, content: Content, size: int) -> None:
        """Cut a content, and publish that at once unless its writer's close will."""
        with self._unused.held(content):
            if not content.writable or content.is_busy:
                await self.make_writable(content)
            self._store.extents.truncate(content.extent, size)
            content.dirty = True
            in_place = content.seen is not None and not content.private
            if not content.kept and (in_place or not content.writers):
                await self._publisher.publish_truncated(content)

    def set_mtime(self, node: Node, mtime_ns: int) -> None:
        """Carry out utimensat(2) for a time that is kept in the extent."""
        content = node.content if node.is_bound else self._table.current.get(node.ino)
        if content is None or not content.extent or not (content.is_changing or content.writable):
            return
        written = self._changes.is_written(content)
        status = self._table.stat(content)
        self._table.set_times(content, status.st_atime_ns, mtime_ns)
        if written:
            content.dirty = True  # the new time may be the one it had when it was published
        elif content.seen is not None:
            content.seen = self._table.stamp(content)
        else:
            content.begun = self._table.stamp(content)
