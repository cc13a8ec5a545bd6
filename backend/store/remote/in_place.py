"""Taking the content of a version out of the cache, to be written in place, and putting it back."""

import errno
import os
from collections.abc import Awaitable, Callable

import trio

from ...cluster.records import ContentId
from ...namespace import Inode, Namespace, fail
from ..extents import copy_contents
from .contents import Contents
from .writer import digests_of

__all__ = ["InPlace"]


class InPlace:
    """Takes contents of versions out of a mount's cache to be written. bring(ino) fetches the current
    version, allocate(inode) makes a working copy."""

    def __init__(
        self,
        namespace: Namespace,
        contents: Contents,
        bring: Callable[[int], Awaitable[Inode]],
        allocate: Callable[[Inode], tuple[ContentId, int]],
    ) -> None:
        self._namespace = namespace
        self._contents = contents
        self._bring = bring
        self._allocate = allocate

    async def begin(self, inode: Inode, extent: ContentId) -> ContentId:
        """Make the content of a version writable, and return its new number. It is a copy if a store node
        here has the file. Raises OSError (ENOSPC)."""
        if not self._contents.is_lent(extent):
            return await self._take_out(inode, extent)
        number, fd = self._allocate(inode)
        try:
            with self._contents.opened(extent) as source:
                await trio.to_thread.run_sync(copy_contents, source, fd)
        except BaseException:
            self._contents.free(number)
            raise
        finally:
            os.close(fd)
        return number

    async def _take_out(self, inode: Inode, extent: ContentId) -> ContentId:
        try:
            return self._contents.take_out(extent)
        except FileNotFoundError:
            pass  # it may have been evicted since it was fetched
        if inode.extent == extent:
            inode = await self._bring(inode.ino)
        if inode.extent != extent:
            raise fail(errno.ESTALE)
        try:
            return self._contents.take_out(extent)
        except FileNotFoundError:
            raise fail(
                errno.EFBIG,
                f"{self._namespace.describe(inode.ino)} is larger than this mount keeps of other "
                "hosts' files, and cannot be written in place; see --cache-size",
            ) from None

    def end(self, inode: Inode, extent: ContentId) -> bool:
        """Give back the content from `begin`, which holds the same bytes as then. Return whether it is the
        content of the inode's version again."""
        return bool(inode.extent) and self._contents.put_back(extent, inode.extent)

    async def is_same(self, inode: Inode, extent: ContentId) -> bool:
        """Return whether a content holds the bytes of the inode's version; False if that is not known."""
        with self._contents.opened(extent) as fd:
            if os.fstat(fd).st_size != inode.size:
                return False
            if not inode.size or not inode.digests:
                return not inode.size
            return await digests_of(fd, inode.size, inode.layout) == inode.digests
