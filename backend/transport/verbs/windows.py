"""The right to touch one range of a file, for one peer and for one operation.

A device with memory windows gets one of type 2: its rkey works on one queue pair only, for one range, for
reading or for writing, and only until the window is closed. The memory region below it has no remote rights
and stays registered. Making a window costs a system call and a work request. (Soft-RoCE checks only that
the range of an rkey lies in the memory region, which is one extent's file.)

Other devices get a memory region of its own for each right, registered in a protection domain that holds
only the peer's queue pair. A file that this process may only read gets one on every device, because a
window needs a writable region; on a device with windows, its protection domain is the one of all queue
pairs.
"""

from typing import Any

from .adapter import Adapter
from .queue import QueuePair
from .regions import Region


class Window:
    """A right made by `grant`. It ends with `close` and with its queue pair."""

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
    """Give the peer of `pair` the right to `length` bytes of the region's file, from `offset` of the file.
    The region must stay in use until the window is closed. Raises OSError, Broken."""
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
