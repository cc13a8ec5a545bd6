"""What the cluster's benchmarks do with files: write on one client, read on another."""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from irdmafs import client

MIB = 1 << 20
CHUNK = 4 * MIB
SMALL_FILE = 64 << 10
PAGE = 4096

_MARK = struct.Struct("<Q")


class WrongData(Exception):
    """A read returned other bytes than were written."""


class Stopwatch:
    """`with stopwatch: ...`; then `seconds`."""

    seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds = time.perf_counter() - start


def make_real(size: int) -> None:
    """Have that much free memory that a virtual machine's host has not taken back.

    Memory that was free for a second or two is given back (free page reporting), and writing it again
    is ten times slower; memory freed last is used first.
    """
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for offset in range(0, size, PAGE):
            memory[offset] = 1


def _check(path: Path, view: memoryview, position: int, number: int) -> None:
    for offset in range(-position % MIB, len(view) - _MARK.size + 1, MIB):
        if _MARK.unpack_from(view, offset)[0] != number << 32 | position + offset:
            raise WrongData(f"wrong bytes at {position + offset} of {path}")


class Files:
    """Files of one content each; `number` tells the contents of different files apart."""

    def __init__(self) -> None:
        self._buffer = bytearray(os.urandom(CHUNK))

    def write(self, path: Path, size: int, number: int) -> float:
        """Write a file of `size` bytes (a multiple of 1 MiB). Seconds from open to close."""
        return self.write_timed(path, size, number)[0]

    def write_timed(self, path: Path, size: int, number: int) -> tuple[float, float]:
        """`write`; seconds for all, and for close() alone."""
        view = memoryview(self._buffer)
        start = time.perf_counter()
        fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        try:
            for position in range(0, size, CHUNK):
                part = view[: min(CHUNK, size - position)]
                for offset in range(0, len(part), MIB):
                    _MARK.pack_into(part, offset, number << 32 | position + offset)
                if os.write(fd, part) != len(part):
                    raise WrongData(f"short write at {position} of {path}")
        finally:
            written = time.perf_counter()
            os.close(fd)
        end = time.perf_counter()
        return end - start, end - written

    def read(self, path: Path, size: int, number: int) -> float:
        """Read that file. Seconds from open to close. Raises WrongData."""
        return self.read_timed(path, size, number)[1]

    def read_timed(self, path: Path, size: int, number: int) -> tuple[float, float]:
        """`read`; seconds until open() returned, and for all."""
        view = memoryview(self._buffer)
        start = time.perf_counter()
        fd = os.open(path, os.O_RDONLY)
        opened = time.perf_counter()
        try:
            position = 0
            while count := os.readv(fd, [view]):
                _check(path, view[:count], position, number)
                position += count
        finally:
            os.close(fd)
        end = time.perf_counter()
        if position != size:
            raise WrongData(f"{path} has {position} bytes, not {size}")
        return opened - start, end - start

    def fill(self, path: Path, buffer: client.Buffer, size: int, number: int) -> float:
        """Read that file into a buffer. Seconds for all but looking at it. Raises WrongData."""
        watch = Stopwatch()
        with watch.running():
            count = buffer.fill(os.fspath(path))
        if (count, buffer.filled_by) != (size, "mount"):
            raise WrongData(f"{path} has {count} bytes, not {size}, by {buffer.filled_by!r}")
        _check(path, buffer.memory[:size].data, 0, number)
        return watch.seconds

    def write_small(self, folder: Path, count: int, number: int) -> float:
        """Write files of 64 KiB. Seconds for all."""
        watch = Stopwatch()
        view = memoryview(self._buffer)[:SMALL_FILE]
        paths = [f"{folder}/{i:05}" for i in range(count)]
        with watch.running():
            for i, path in enumerate(paths):
                _MARK.pack_into(view, 0, number << 32 | i)
                fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
                written = os.write(fd, view)
                os.close(fd)
                if written != SMALL_FILE:
                    raise WrongData(f"short write to {path}")
        return watch.seconds

    def read_small(self, folder: Path, count: int, number: int) -> float:
        """Read those files. Seconds for all. Raises WrongData."""
        watch = Stopwatch()
        view = memoryview(self._buffer)[:SMALL_FILE]
        paths = [f"{folder}/{i:05}" for i in range(count)]
        with watch.running():
            for i, path in enumerate(paths):
                fd = os.open(path, os.O_RDONLY)
                got = os.readv(fd, [view])
                os.close(fd)
                if got != SMALL_FILE or _MARK.unpack_from(view)[0] != number << 32 | i:
                    raise WrongData(f"wrong bytes in {path}")
        return watch.seconds


def create_names(folder: Path, count: int) -> float:
    """Create empty files. Seconds for all, as of what follows."""
    watch = Stopwatch()
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    with watch.running():
        for i in range(count):
            os.close(os.open(f"{folder}/{i:05}", flags, 0o644))
    return watch.seconds


def stat_names(folder: Path, count: int) -> float:
    watch = Stopwatch()
    with watch.running():
        for i in range(count):
            os.stat(f"{folder}/{i:05}")
    return watch.seconds


def list_names(folder: Path, count: int) -> float:
    """List the folder, with the size of every file."""
    watch = Stopwatch()
    with watch.running(), os.scandir(folder) as entries:
        found = sum(entry.stat(follow_symlinks=False).st_size == 0 for entry in entries)
    if found != count:
        raise WrongData(f"{folder} lists {found} files, not {count}")
    return watch.seconds


def unlink_names(folder: Path, count: int) -> float:
    watch = Stopwatch()
    with watch.running():
        for i in range(count):
            os.unlink(f"{folder}/{i:05}")
    return watch.seconds
