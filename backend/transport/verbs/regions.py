"""An opened port, and its registered memory: ranges of files, mapped, pinned and kept for later operations.

The kernel looks at every page of a registration (measured with soft-RoCE in a guest: 0.6 to 4.5 ms per
MiB). So a registration is kept when its operation ends, and the next operation on the same file uses it,
even if the file holds another version then. A mapping keeps its file alive, so the inode number identifies
the file. Registrations of files that lost their last name are dropped; after those, when there is no room,
the least recently used ones.

Memory that a program lends is a file without a name, or a dma-buf, which stands for memory of a device and
is registered without a mapping. It stays registered until the program takes it back.
"""

import ctypes
import errno
import mmap
import os
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import trio

from ...unwrap import if_it_fails
from .. import Memory
from .devices import Route
from .library import Library
from .messages import Mtu

REGIONS_MAX = 1024
# Registering blocks the event loop, so lent memory of many GiB is registered in blocks.
LENT_BLOCK_BYTES = 64 << 20
# Up to this size a range is registered without touching its pages in a thread first.
_AT_ONCE_BYTES = 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)
# Python's own madvise(2) keeps other threads waiting.
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MADV_POPULATE_WRITE = 23
# The device and the number of the inode.
FileId = tuple[int, int]
MTUS: dict[int, Mtu] = {1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096}


class Region:
    """A range of a file, mapped and registered. It owns the descriptor `fd`, which is open for writing, as
    the kernel asks that of every window, even one for reading. A device's memory is not mapped: only the
    network card addresses it, by offsets from 0."""

    registration: Any
    key: int
    _mapped: mmap.mmap

    def __init__(
        self, file: FileId, fd: int, offset: int, length: int, memory: Memory = Memory.FILE
    ) -> None:
        self.file, self.fd = file, fd
        self.offset, self.length = offset, length
        self.users = 0
        self.is_stale = False
        self._memory = memory
        self._address = 0
        if memory is not Memory.DEVICE:
            with if_it_fails(partial(os.close, fd)):
                try:
                    self._mapped = mmap.mmap(fd, length, offset=offset)
                except ValueError as error:  # it has become shorter
                    raise OSError(errno.EINVAL, str(error)) from None
            self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapped))

    def populate(self) -> None:
        """Touch all pages; call it in a thread. Pages that cannot be had show when they are registered."""
        if self._memory is not Memory.DEVICE:
            _libc.madvise(self._address, self.length, _MADV_POPULATE_WRITE)

    def register(self, library: Library, pd: Any) -> None:
        access = library.enum("ACCESS_LOCAL_WRITE")
        if self._memory is Memory.FILE:
            access |= library.enum("ACCESS_MW_BIND")
        with library.errors:
            if self._memory is Memory.DEVICE:
                made = library.DmaBufMR(pd, self.length, access, dmabuf=self.fd, offset=0)
            else:
                made = library.MR(pd, self.length, access, address=self._address)
        self.registration, self.key = made, made.lkey

    def address(self, offset: int) -> int:
        """Return the address of a byte of the file."""
        assert self.offset <= offset <= self.offset + self.length
        return self._address + offset - self.offset

    def view(self, offset: int, length: int) -> memoryview:
        """Return bytes of the file in this process's memory, to be released before the region."""
        return memoryview(self._mapped)[offset - self.offset :][:length]

    def covers(self, offset: int, length: int) -> bool:
        end = self.offset + self.length
        return not self.is_stale and self.offset <= offset and offset + length <= end

    def is_orphan(self) -> bool:
        """Return whether the file has lost its last name and is not lent."""
        return self._memory is Memory.FILE and not os.fstat(self.fd).st_nlink

    def close(self) -> None:
        """Unmap the range, which is not registered any more."""
        if self._memory is not Memory.DEVICE:
            self._mapped.close()
        os.close(self.fd)


class Regions:
    """All registered ranges of one protection domain: at most `limit_bytes` and REGIONS_MAX."""

    def __init__(self, library: Library, pd: Any, limit_bytes: int) -> None:
        self._library = library
        self._pd = pd
        self.limit_bytes = limit_bytes
        self._regions: OrderedDict[Region, None] = OrderedDict()
        self._of_file: dict[FileId, list[Region]] = {}
        # Regions made, uses of one that was there, and bytes registered now.
        self.registrations = self.hits = self.pinned_bytes = 0

    async def acquire(self, fd: int, length: int) -> Region:
        """Return a region over a whole file, which has at least `length` bytes, and which this process may
        write, even if `fd` is not open for that; the caller has to `release` it. Raises OSError: ENOMEM, or
        the kernel's error."""
        status = os.fstat(fd)
        file, size = (status.st_dev, status.st_ino), status.st_size
        region = self._find(file, 0, length)
        if region is not None:
            return region
        if length > size:
            raise OSError(errno.EINVAL, "the file is shorter than what is to be registered")
        own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        return await self._register(Region(file, own, 0, size))

    async def acquire_lent(self, fd: int, offset: int, length: int, memory: Memory) -> list[Region]:
        """Return regions that follow each other and cover a range of memory that a program lends. Their
        blocks are the same for every range, so that later operations find them; memory of a device is one
        region. Raises as `acquire`, and EOPNOTSUPP if the card's driver cannot reach the device."""
        status = os.fstat(fd)
        file, size = (status.st_dev, status.st_ino), status.st_size
        block = LENT_BLOCK_BYTES if memory is Memory.LENT else size
        acquired: list[Region] = []
        try:
            for start in range(offset - offset % block, offset + length, block):
                count = min(block, size - start)
                region = self._find(file, start, count)
                if region is None:
                    region = Region(file, os.dup(fd), start, count, memory)
                    region = await self._register(region)
                acquired.append(region)
        except BaseException:
            for region in acquired:
                self.release(region)
            raise
        return acquired

    async def _register(self, region: Region) -> Region:
        """Return the region, registered, or one that was registered for its range meanwhile."""
        with if_it_fails(region.close):
            self._make_room(region.length)
            if region.length > _AT_ONCE_BYTES:
                # Pages that were touched before are pinned faster. Pinning runs in the event loop, as
                # pyverbs holds Python's global interpreter lock.
                await trio.to_thread.run_sync(region.populate)
                other = self._find(region.file, region.offset, region.length)
                if other is not None:
                    region.close()
                    return other
                self._make_room(region.length)
            region.register(self._library, self._pd)
        self.registrations += 1
        self.pinned_bytes += region.length
        self._regions[region] = None
        self._of_file.setdefault(region.file, []).append(region)
        region.users = 1
        return region

    def _find(self, file: FileId, offset: int, length: int) -> Region | None:
        for region in self._of_file.get(file, ()):
            if region.covers(offset, length):
                self.hits += 1
                self._regions.move_to_end(region)
                region.users += 1
                return region
        return None

    def release(self, region: Region, *, keep: bool = True) -> None:
        """End one use of a region. `keep` is false if others may truncate the file: the region would keep
        pages that are not the file's any more."""
        region.users -= 1
        region.is_stale |= not keep
        if region.is_stale and not region.users:
            self._evict(region)

    def forget(self, file: FileId) -> None:
        """Drop the regions of a file when they are not in use: later operations register it anew."""
        for region in self.of_file(file):
            region.is_stale = True
            if not region.users:
                self._evict(region)

    def of_file(self, file: FileId) -> list[Region]:
        """Return the regions of a file."""
        return list(self._of_file.get(file, ()))

    def drop_orphans(self) -> None:
        """Drop the regions of files that lost their last name, which frees their memory."""
        self._evict_where(Region.is_orphan)

    def close(self) -> None:
        """Drop all regions; none may be in use."""
        for region in list(self._regions):
            self._evict(region)

    def _make_room(self, length: int) -> None:
        if self._is_full(length):
            self.drop_orphans()
            self._evict_where(lambda region: self._is_full(length))
        if self._is_full(length):
            raise OSError(errno.ENOMEM, f"{self.pinned_bytes} bytes are registered already")

    def _is_full(self, length: int) -> bool:
        return self.pinned_bytes + length > self.limit_bytes or len(self._regions) >= REGIONS_MAX

    def _evict_where(self, condition: Callable[[Region], bool]) -> None:
        """Drop the unused regions that fulfil the condition, the least recently used first."""
        for region in list(self._regions):
            if not region.users and condition(region):
                self._evict(region)

    def _evict(self, region: Region) -> None:
        del self._regions[region]
        others = self._of_file[region.file]
        others.remove(region)
        if not others:
            del self._of_file[region.file]
        self.pinned_bytes -= region.length
        self._library.close(region.registration)
        region.close()


class OpenedPort:
    """A port of a device. Use as a context manager; close everything made from `context` and `pd` before
    it. At most `limit_bytes` are registered; `events` is the device's descriptor. Raises OSError."""

    def __init__(self, library: Library, route: Route, limit_bytes: int) -> None:
        self.library = library
        self.name = route.device.name
        self.port = route.port.number
        self.lid = route.port.lid
        self.context: Any
        self.context, self.events = library.open(self.name)
        with if_it_fails(self.context.close), library.errors:
            limits = self.context.query_device()
            port = self.context.query_port(self.port)
            self.pd = library.PD(self.context)
        self.mtu = MTUS.get(int(port.active_mtu), 256)
        self.reads_answered = max(1, int(limits.max_qp_rd_atom))
        self.reads_asked = max(1, int(limits.max_qp_init_rd_atom))
        kinds = library.enum("DEVICE_MEM_WINDOW_TYPE_2B")
        self.has_windows = bool(int(limits.device_cap_flags) & kinds)
        self.regions = Regions(library, self.pd, min(limit_bytes, int(limits.max_mr_size)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.regions.close()
        self.library.close(self.pd)
        self.library.close(self.context)
