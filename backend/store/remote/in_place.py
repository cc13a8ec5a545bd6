"""Taking the content of a version out of the cache, to be written in place, and putting it back."""

import errno
import os

import trio

from ...files.extents import copy_contents
from ...model.records import ContentId
from ...namespace import Inode, fail
from .cluster import Cluster
from .replication import Publisher
from .versions import Versions
from .writer import digests_of


class InPlace:
    """Takes contents of versions out of a mount's cache to be written."""

    def __init__(self, cluster: Cluster, versions: Versions, publisher: Publisher) -> None:
        self._namespace = cluster.namespace
        self._contents = cluster.contents
        self._versions = versions
        self._publisher = publisher

    async def begin(self, inode: Inode, extent: ContentId) -> ContentId:
        """Make the content of a version writable, and return its new number. It is a copy if a store node
        here has the file. Raises OSError (ENOSPC)."""
        if not self._contents.is_lent(extent):
            return await self._take_out(inode, extent)
        number, fd = self._publisher.allocate(inode)
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
            inode = await self._versions.bring(inode.ino)
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
