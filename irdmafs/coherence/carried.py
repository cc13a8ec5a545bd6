"""Reads and writes that come through us: in the cached mode, and of what passthrough cannot serve."""

import os

from ..backend.store.api import Store
from ..inline import detach
from .content import ContentTable
from .in_place import InPlace
from .nodes import Handle


class Carried:
    """Carries out READ and WRITE requests. `bytes`: so many passed through us."""

    def __init__(self, store: Store, table: ContentTable, in_place: InPlace) -> None:
        self._store = store
        self._table = table
        self._in_place = in_place
        self._inodes = store.namespace.inodes
        self.bytes = 0

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
            size = max(0, min(size, content.size - offset))
            data = await self._store.read(self._inodes[content.ino], content.extent, offset, size)
        self.bytes += len(data)
        return data

    async def write(self, handle: Handle, offset: int, data: "memoryview | bytes") -> int:
        """Return how many bytes were written."""
        content = handle.content
        assert content is not None
        if not content.writable or content.is_busy:
            data = bytes(data)  # the session reuses its buffer while we wait
            await self._in_place.make_writable(content)
        content.dirty = True
        handle.since = None
        view = memoryview(data)
        written = 0
        try:
            with self._store.extents.opened(content.extent, os.O_RDWR) as fd:
                self._in_place.refuse_growth(content.ino, fd, offset, len(view))
                while written < len(view):
                    written += os.pwrite(fd, view[written:], offset + written)
        except OSError:
            # A half-written content must not be published when its writer closes the file.
            content.discarded = content.private
            if not written:
                raise
        self.bytes += written
        return written
