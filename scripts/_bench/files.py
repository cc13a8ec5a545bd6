"""Files that are written and read, with contents that tell which ones they are.

Every MiB of a large file, and every small file, begins with a number that no other version of it has:
so a reader can tell at little cost that it got the one written last.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from irdmafs import client

MIB = 1 << 20
GIB = 1 << 30
CHUNK = 4 * MIB
SMALL_FILE = 64 << 10
PAGE = 4096
MARK = struct.Struct("<Q")

now = time.perf_counter


class WrongData(Exception):
    """A read returned other bytes than were written last, or a call moved fewer than asked for."""


class Took(NamedTuple):
    """Seconds from open to close, and of a part of it."""

    whole: float
    part: float


def mark(view: memoryview, number: int, position: int) -> None:
    """Write the marks of what goes to `position` of version `number`."""
    for offset in range(0, len(view), MIB):
        MARK.pack_into(view, offset, number << 32 | (position + offset) // MIB)


def check(path: str | Path, view: memoryview, position: int, number: int) -> None:
    """Raises WrongData where a mark is another one."""
    for offset in range(-position % MIB, len(view) - MARK.size + 1, MIB):
        if MARK.unpack_from(view, offset)[0] != number << 32 | (position + offset) // MIB:
            raise WrongData(f"wrong bytes at {position + offset} of {path}")


class Files:
    """Writes and reads through one buffer; `number` tells the versions of files apart."""

    def __init__(self) -> None:
        # Filled with bytes that are not zero, so that its pages are real memory before they count.
        self.buffer = bytearray(os.urandom(CHUNK))

    def write(
        self,
        path: str | Path,
        size: int,
        number: int,
        chunk: int = CHUNK,
        flags: int = os.O_CREAT | os.O_TRUNC,
    ) -> Took:
        """Write a file of `size` bytes (a multiple of 1 MiB); `part` is close() alone."""
        view = memoryview(self.buffer)[:chunk]
        start = now()
        fd = os.open(path, os.O_WRONLY | flags, 0o644)
        try:
            for position in range(0, size, chunk):
                part = view[: min(chunk, size - position)]
                mark(part, number, position)
                if os.write(fd, part) != len(part):
                    raise WrongData(f"short write at {position} of {path}")
        finally:
            written = now()
            os.close(fd)
        end = now()
        return Took(end - start, end - written)

    def read(self, path: str | Path, size: int, number: int) -> Took:
        """Read that file by 4 MiB a call; `part` is until open() returned. Raises WrongData."""
        view = memoryview(self.buffer)
        target = [view]
        position = 0
        start = now()
        fd = os.open(path, os.O_RDONLY)
        opened = now()
        try:
            while position < size:
                count = os.readv(fd, target)
                if count == 0:
                    raise WrongData(f"{path} has {position} bytes, not {size}")
                check(path, view[:count], position, number)
                position += count
        finally:
            os.close(fd)
        return Took(now() - start, opened - start)

    def fill(self, path: Path, buffer: client.Buffer, size: int, number: int) -> float:
        """Read a file into a buffer. Seconds for all but looking at it. Raises WrongData."""
        start = now()
        count = buffer.fill(os.fspath(path))
        seconds = now() - start
        if (count, buffer.filled_by) != (size, "mount"):
            raise WrongData(f"{path} has {count} bytes, not {size}, by {buffer.filled_by!r}")
        check(path, buffer.memory[:size].data, 0, number)
        return seconds

    def write_small(self, paths: Sequence[str], number: int) -> float:
        """Write files of 64 KiB, new or over what was there. Seconds for all."""
        view = memoryview(self.buffer)[:SMALL_FILE]
        flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC
        start = now()
        for index, path in enumerate(paths):
            MARK.pack_into(view, 0, number << 32 | index)
            fd = os.open(path, flags, 0o644)
            written = os.write(fd, view)
            os.close(fd)
            if written != SMALL_FILE:
                raise WrongData(f"short write to {path}")
        return now() - start

    def read_small(self, paths: Sequence[str], number: int) -> float:
        """Read those files whole. Seconds for all. Raises WrongData."""
        view = memoryview(self.buffer)[:SMALL_FILE]
        target = [view]
        start = now()
        for index, path in enumerate(paths):
            fd = os.open(path, os.O_RDONLY)
            count = os.readv(fd, target)
            os.close(fd)
            if count != SMALL_FILE or MARK.unpack_from(view)[0] != number << 32 | index:
                raise WrongData(f"wrong bytes in {path}")
        return now() - start


# -- names -------------------------------------------------------------------------------------


def paths_in(folder: str | Path, count: int) -> list[str]:
    return [f"{folder}/{index:05}" for index in range(count)]


def create_names(paths: Sequence[str]) -> float:
    """Create empty files. Seconds for all, as of what follows."""
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    start = now()
    for path in paths:
        os.close(os.open(path, flags, 0o644))
    return now() - start


def stat_names(paths: Sequence[str]) -> float:
    start = now()
    for path in paths:
        os.stat(path)
    return now() - start


def list_names(folder: str | Path, count: int, size: int = 0) -> float:
    """List `count` files of `size` bytes with scandir and stat, as `ls -l` does. Raises WrongData."""
    start = now()
    with os.scandir(folder) as entries:
        found = sum(entry.stat(follow_symlinks=False).st_size == size for entry in entries)
    seconds = now() - start
    if found != count:
        raise WrongData(f"{folder} lists {found} files of {size} bytes, not {count}")
    return seconds


def unlink_names(paths: Sequence[str]) -> float:
    start = now()
    for path in paths:
        os.unlink(path)
    return now() - start
