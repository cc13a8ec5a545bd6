"""Files for extents that are to come, and the room for them in a store that is full."""

import errno
from collections.abc import Awaitable, Callable
from typing import Protocol

import trio

from .files import Files, Incoming

__all__ = ["Room"]

# Larger files are allocated in a worker thread.
_AT_ONCE_BYTES = 1 << 20


class Catalog(Protocol):
    """The extents that are kept just in case (backend/node/catalog.py)."""

    def make_room(self, wanted_bytes: int = 0) -> None:
        """Condemn them for `Files.reap`."""
        ...


async def _nothing() -> None:
    pass


class Room:
    """The room of a store node's directory."""

    def __init__(self, files: Files, catalog: Catalog) -> None:
        self._files = files
        self._catalog = catalog

    async def create(
        self, length: int, allocated: int, learn: Callable[[], Awaitable[None]] = _nothing
    ) -> Incoming:
        """Make a file of `length` bytes, of which so many are allocated. In a full store, extents kept just
        in case are removed first, after `learn`. Raises OSError ENOSPC."""
        try:
            return await self.create_in_free(length, allocated)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        await learn()
        self._catalog.make_room(allocated)
        await trio.to_thread.run_sync(self._files.reap)
        self._files.let_go()
        return await self.create_in_free(length, allocated)

    async def create_in_free(self, length: int, allocated: int) -> Incoming:
        """Do as `create`, but remove nothing for it. Raises OSError ENOSPC."""
        if allocated == length and (spare := self._files.reuse(length)) is not None:
            return spare
        if allocated < length or length <= _AT_ONCE_BYTES:
            return self._files.create(length, allocated)
        return await trio.to_thread.run_sync(self._files.create, length)
