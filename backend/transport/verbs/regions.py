"""Registered memory: ranges of files, mapped and pinned, and kept registered for as long as it helps.

A registration costs the kernel a look at every page (measured with soft-RoCE in a guest: 0.6 to 4.5 ms
per MiB), so it is kept when an operation ends: the next one on the same file finds it, whatever it
moves and whichever version the file holds then. A mapping keeps its file alive, so a file is known by
its inode number, which no other can get meanwhile. What lost its last name is let go; else the ranges
that were not used for longest go first when there is no room.
"""

import ctypes
import errno
import mmap
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .library import Library

REGIONS_MAX = 1024

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value


@dataclass(slots=True)
class RegionCounters:
    """`registrations` were made, `hits` found one that was there. `pinned_bytes` are registered now."""

    registrations: int = 0
    hits: int = 0
    evictions: int = 0
    pinned_bytes: int = 0


class Region:
    """A registered range of a file. One that is `writable` can be read and written by this end, and can
    have windows, which the kernel takes for writing whatever they are for."""

    def __init__(
        self, library: Library, pd: Any, fd: int, offset: int, length: int, writable: bool
    ) -> None:
        self.offset = offset
        self.length = length
        self.writable = writable
        self.users = 0
        self._library = library
        access, protection = 0, mmap.PROT_READ
        if writable:
            access = library.enum("ACCESS_LOCAL_WRITE") | library.enum("ACCESS_MW_BIND")
            protection |= mmap.PROT_WRITE
        # A name of its own for the file: the caller closes his.
        self._fd = os.dup(fd)
        try:
            self._address = _map(self._fd, offset, length, protection)
            try:
                with library.errors:
                    self.registration = library.MR(pd, length, access, address=self._address)
            except BaseException:
                _libc.munmap(self._address, length)
                raise
        except BaseException:
            os.close(self._fd)
            raise
        self.key: int = self.registration.lkey

    def address(self, offset: int) -> int:
        """Of a byte of the file."""
        assert self.offset <= offset <= self.offset + self.length
        return int(self._address) + offset - self.offset

    def covers(self, offset: int, length: int, writable: bool) -> bool:
        return (
            self.offset <= offset
            and offset + length <= self.offset + self.length
            and (self.writable or not writable)
        )

    def is_orphan(self) -> bool:
        """Whether the file has no name any more."""
        return not os.fstat(self._fd).st_nlink

    def close(self) -> None:
        with self._library.errors:
            self.registration.close()
        _libc.munmap(self._address, self.length)
        os.close(self._fd)


class Regions:
    """All registered ranges of one protection domain, at most `limit_bytes` and REGIONS_MAX."""

    def __init__(self, library: Library, pd: Any, limit_bytes: int) -> None:
        self._library = library
        self._pd = pd
        self._limit_bytes = limit_bytes
        self._regions: OrderedDict[Region, tuple[int, int]] = OrderedDict()
        self._of_file: dict[tuple[int, int], list[Region]] = {}
        self.counters = RegionCounters()

    @contextmanager
    def using(self, fd: int, offset: int, length: int, writable: bool) -> Iterator[Region]:
        """A region over this range of a file, which must be there in full. Raises OSError: ENOMEM when
        too much is registered or locked, and what the kernel says."""
        region = self.acquire(fd, offset, length, writable)
        try:
            yield region
        finally:
            self.release(region)

    def acquire(self, fd: int, offset: int, length: int, writable: bool) -> Region:
        """As `using`; to be given to `release`."""
        status = os.fstat(fd)
        file = status.st_dev, status.st_ino
        for region in self._of_file.get(file, ()):
            if region.covers(offset, length, writable):
                self.counters.hits += 1
                self._regions.move_to_end(region)
                region.users += 1
                return region
        if offset + length > status.st_size:
            raise OSError(errno.EINVAL, "the file is shorter than what is to be registered")
        start = offset - offset % mmap.PAGESIZE
        end = offset + length
        end += -end % mmap.PAGESIZE
        self._make_room(end - start)
        region = Region(self._library, self._pd, fd, start, end - start, writable)
        self.counters.registrations += 1
        self.counters.pinned_bytes += region.length
        self._regions[region] = file
        self._of_file.setdefault(file, []).append(region)
        region.users = 1
        return region

    def release(self, region: Region) -> None:
        region.users -= 1
        if not region.users and region.is_orphan():
            self._evict(region)

    def drop_orphans(self) -> None:
        """Let go of files that lost their last name: their memory is free after it."""
        self._evict_where(Region.is_orphan)

    def close(self) -> None:
        """Nothing is used any more."""
        for region in list(self._regions):
            self._evict(region)

    def _make_room(self, length: int) -> None:
        def is_full(region: Region) -> bool:
            return self._is_full(length)

        if self._is_full(length):
            self.drop_orphans()
            self._evict_where(is_full)
        if self._is_full(length):
            raise OSError(
                errno.ENOMEM, f"{self.counters.pinned_bytes} bytes are registered already"
            )

    def _is_full(self, length: int) -> bool:
        return (
            self.counters.pinned_bytes + length > self._limit_bytes
            or len(self._regions) >= REGIONS_MAX
        )

    def _evict_where(self, condition: Callable[[Region], bool]) -> None:
        """Of what is not used, oldest first."""
        for region in list(self._regions):
            if not region.users and condition(region):
                self._evict(region)
                self.counters.evictions += 1

    def _evict(self, region: Region) -> None:
        file = self._regions.pop(region)
        others = self._of_file[file]
        others.remove(region)
        if not others:
            del self._of_file[file]
        self.counters.pinned_bytes -= region.length
        region.close()


def _map(fd: int, offset: int, length: int, protection: int) -> int:
    """An address. Python's own mmap objects would export a buffer to tell it, and only if writable."""
    address = _libc.mmap(None, length, protection, mmap.MAP_SHARED, fd, offset)
    if address is None or address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(address)
