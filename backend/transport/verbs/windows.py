"""The right to touch one range of a file, for one peer and for one operation.

On a device that has them it is a memory window of type 2: its key works on one queue pair only, for
one range, for reading or for writing, and not any more when it is closed, while the registration below,
which has no remote rights, stays. Making one costs a system call and a work request. (Soft-RoCE checks
only that a key's range lies in the registration, which is one extent's file.) On other devices it
is a registration of its own that lives as long, in a protection domain that only the peer's queue pair is
in. So it is on a file that this process may only read; there the device's other queue pairs share the
domain.
"""

from typing import Any

from .adapter import Adapter
from .queue import QueuePair
from .regions import Region


class Window:
    """Made by `grant`; `close` ends the right, and the queue pair's end does."""

    def __init__(self, pair: QueuePair, handle: Any, address: int, key: int) -> None:
        self._pair = pair
        self._handle = handle
        self.address = address
        self.key = key
        pair.windows.add(self)

    def close(self) -> None:
        self._pair.windows.discard(self)
        self._handle.close()


async def grant(
    adapter: Adapter, pair: QueuePair, region: Region, offset: int, length: int, writable: bool
) -> Window:
    """For the peer of `pair`: `length` bytes of the region's file, from `offset` of the file. The region
    stays in use until the window is closed. Raises OSError, Broken."""
    library = adapter.library
    rights = library.enum("ACCESS_REMOTE_WRITE" if writable else "ACCESS_REMOTE_READ")
    address = region.address(offset)
    if not (adapter.has_windows and region.writable):
        rights |= library.enum("ACCESS_LOCAL_WRITE") if writable else 0
        with library.errors:
            registration = library.MR(pair.pd, length, rights, address=address)
        return Window(pair, registration, address, registration.rkey)
    with library.errors:
        handle = library.MW(adapter.pd, library.enum("MW_TYPE_2"))
    window = Window(pair, handle, address, 0)
    try:
        info = library.MWBindInfo(region.registration, address, length, rights)
        window.key = await pair.bind(handle, info)
    except BaseException:
        window.close()
        raise
    return window
