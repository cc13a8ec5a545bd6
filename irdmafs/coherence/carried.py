"""Changes of bytes, and reads, that come to the daemon as requests: truncations, reservations, times, and
the reads and writes that do not pass through."""

import errno
import os
from collections.abc import Callable
from typing import Final

from ..backend.files.extents import when_unlocked
from ..backend.files.sparse import segments
from ..backend.model.records import NO_CONTENT
from ..backend.namespace import Inode, fail
from ..inline import detach
from .content import Content, State
from .host import Host, OnHost
from .in_place import InPlace
from .nodes import Handle, Node
from .publishing import Publisher

# After these errors of copy_file_range(2) programs read and write.
_COPIED_OTHERWISE: Final = (errno.EINVAL, errno.EOPNOTSUPP, errno.EXDEV)


class Carried(OnHost):
    """Carries requests out on contents. `bytes`: so many were read and written through the daemon."""

    def __init__(self, host: Host, in_place: InPlace, publisher: Publisher) -> None:
        super().__init__(host)
        self._in_place = in_place
        self._publisher = publisher
        self.bytes = 0

    # -- of open files ---------------------------------------------------------------------------

    async def read(self, handle: Handle, offset: int, size: int) -> bytes:
        content = handle.content
        assert content is not None
        if not content.extent:
            return b""
        if self._table.is_here(content):
            with self._store.extents.opened(content.extent) as fd:
                data = os.pread(fd, size, offset)
        else:
            await detach()
            size = max(0, min(size, content.base.size - offset))
            data = await self._store.read(self._inodes[content.ino], content.extent, offset, size)
        self.bytes += len(data)
        return data

    async def write(self, handle: Handle, offset: int, data: "memoryview | bytes") -> int:
        """Return how many bytes were written."""
        content = handle.content
        assert content is not None
        if self._in_place.waits(content, handle.node):
            data = bytes(data)  # the session reuses its buffer meanwhile
        view = memoryview(data)
        written = 0

        def write(fd: int) -> None:
            nonlocal written
            content.touch()
            self.refuse_growth(content.ino, fd, offset, len(view))
            while written < len(view):
                written += os.pwrite(fd, view[written:], offset + written)

        try:
            await self.change(handle, write, writes=True)
        except OSError:
            if not written:
                raise
        self.bytes += written
        return written

    async def change(
        self, handle: Handle, change: Callable[[int], None], *, writes: bool = False
    ) -> None:
        """Call `change` with a descriptor of the content's file, for a request of a handle. If it `writes`
        and fails, a private content is given up: half of a version must not be published."""
        content = handle.content
        assert content is not None
        handle.since = None
        try:
            await self._in_place.change(content, change, handle.node)
        except OSError as error:
            is_over = writes and error.errno not in _COPIED_OTHERWISE
            if is_over and content.state is State.REPLACING:
                self._table.give_up(content, refused=error.errno or 0)
            raise

    def refuse_growth(self, ino: int, fd: int, offset: int, length: int) -> None:
        """Raise OSError EDQUOT if an extent of the file may not grow by so many bytes."""
        quotas = self._store.namespace.quotas
        if quotas.in_use:
            quotas.refuse_growth(ino, os.fstat(fd), offset, length)

    def refuse_to_reserve(self, fd: int, offset: int, length: int) -> None:
        """Raise OSError ENOSPC if there is no room for what is not allocated yet of a part of a file.
        Store nodes do not know of bytes that are not published; a store on this host does."""
        if not self._store.sends:
            return
        wanted = length - sum(count for _, count in segments(fd, offset, length))
        space = self._store.statvfs()
        free = space.f_bavail * space.f_frsize - self._table.unpublished_bytes()
        if wanted > free:
            raise fail(errno.ENOSPC)

    # -- by name ---------------------------------------------------------------------------------

    async def truncate(self, inode: Inode, size: int) -> None:
        """Carry out truncate(2) by name: every descriptor on this host sees the file cut at once."""
        content = self._sharing.newest(inode)
        if inode.size == size and not content.is_changing:
            return
        if not size and content.extent and not content.holds and content.state is State.VERSION:
            # The content need not be fetched to be emptied.
            self._table.give_extent(content, NO_CONTENT, frees=False)
            self._host.drop_idle_backings(inode.ino)
        await self._cut_and_publish(content, size)

    async def empty(self, content: Content) -> None:
        """Publish an empty version at once: no close will publish it."""
        is_private = content.state is State.REPLACING
        if content.writers or is_private or self._table.stamp(content)[0]:
            await self._cut_and_publish(content, 0)

    async def _cut_and_publish(self, content: Content, size: int) -> None:
        """Cut a content, and publish that at once unless its writer's close will."""
        with self._host.held(content):
            await self._in_place.change(content, lambda fd: os.ftruncate(fd, size))
            in_place = content.seen is not None and content.state is not State.REPLACING
            stays_here = content.state in (State.LEFT, State.GIVEN_UP)
            if not stays_here and (in_place or not content.writers):
                # No close will publish it.
                await self._publisher.publish(content, stays=bool(content.writers))

    async def set_mtime(self, node: Node, mtime_ns: int) -> None:
        """Carry out utimensat(2) for a time that is kept in the extent."""
        content = node.content if node.is_bound else self._table.current.get(node.ino)
        if content is None or not content.extent:
            return
        if not (content.is_changing or content.state.writable):
            return
        written = self._table.is_written(content)
        status = self._table.stat(content)
        times = status.st_atime_ns, mtime_ns
        if self._in_place.is_alone(content, node):
            self._table.set_times(content, *times)
        else:
            await detach()
            written = True  # maybe: the kernel waits for a program that is writing
            with self._host.held(content):
                await when_unlocked(self._store.extents.set_times, content.extent, *times)
        if written:
            content.touch()  # the new time may be the one it had when it was published
        else:
            content.retime(self._table.stamp(content))
