"""Showing a file's newest version, which another host published, to those who have it open in place."""

import logging
import os

import trio

from ..backend.namespace import Inode
from ..backend.store.api import Store
from ..backend.store.extents import copy_contents
from .changes import Changes
from .content import Content, ContentTable, Stamp, stamp_of
from .kernel_cache import KernelCache
from .nodes import NodeTable

__all__ = ["Newest"]

log = logging.getLogger(__name__)


class Newest:
    """Shows newest versions to everybody who has a file open in place."""

    def __init__(
        self,
        store: Store,
        kernel: KernelCache,
        table: ContentTable,
        changes: Changes,
        nodes: NodeTable,
    ) -> None:
        self._store = store
        self._kernel = kernel
        self._table = table
        self._changes = changes
        self._nodes = nodes

    async def show(self, content: Content, inode: Inode) -> None:
        """Copy a version, which is on this host, into a writable content that has nothing unpublished."""
        extents = self._store.extents
        with extents.opened(content.extent, os.O_RDWR) as fd:
            os.ftruncate(fd, inode.size)
            if inode.extent:
                with extents.opened(inode.extent) as source:
                    await trio.to_thread.run_sync(copy_contents, source, fd)
        content.show(inode)
        content.seen, content.dirty = self.set_mtime(content, inode), False
        for node in list(self._nodes.of(content.ino)):
            if node.content is content:
                if node.cached:
                    await self._kernel.forget_content(node)
                self._kernel.invalidate_attributes(node)

    async def show_after_conflict(self, content: Content) -> None:
        """Show the newest version in the place of what was set aside, unless somebody has written since."""
        try:
            inode = await self._store.bring(content.ino)
            if content.writable and not self._changes.is_surely_written(content):
                await self.show(content, inode)
        except OSError as error:  # the next open or lock tries again
            where = self._store.namespace.describe(content.ino)
            log.warning("%s: the newest version cannot be shown yet: %s", where, error)

    def set_mtime(self, content: Content, inode: Inode) -> Stamp:
        """Give the content the inode's time of modification, and return its stamp. Its access time stays:
        it may be that of a read which no record has."""
        status = self._table.stat(content)
        if status.st_mtime_ns != inode.mtime_ns:
            self._table.set_times(content, status.st_atime_ns, inode.mtime_ns)
            status = self._table.stat(content)
        return stamp_of(status)
