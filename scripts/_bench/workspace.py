"""A directory to measure in, and the files that one measure leaves there for the next."""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns as now

import numpy as np

MIB = 1 << 20
LARGE_CHUNK = 4 * MIB
SMALL_FILE = 64 * 1024

_MARK = struct.Struct("<Q")
_WORDS_PER_MIB = MIB // _MARK.size


class WrongData(Exception):
    """A read returned bytes that were not written last, or a call moved fewer than asked for."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of everything. ``size`` is the large file's, in bytes, a multiple of 4 MiB."""

    size: int = 1 << 30
    small_files: int = 1000
    names: int = 2000
    iterations: int = 5000


class Workspace:
    """A directory in one target, with the files that one measure leaves for the next.

    Every MiB of the large file and every small file starts with a number that no earlier
    version of it had: so a reader can tell at little cost that it got the last one written.
    """

    def __init__(self, directory: Path, scale: Scale) -> None:
        self.scale = scale
        self.large = str(directory / "large")
        self.small_directory = str(directory / "small")
        self.names_directory = str(directory / "names")
        self.small = [f"{self.small_directory}/{i:04}" for i in range(scale.small_files)]
        self.names: list[str] = []
        # Filled with bytes that are not zero, so that its pages are real memory before they count.
        self.buffer = bytearray(os.urandom(LARGE_CHUNK))
        self._generation = 0
        self._small_generation = 0
        os.mkdir(self.small_directory)
        os.mkdir(self.names_directory)

    # The large file

    def remove_large(self) -> None:
        if os.path.exists(self.large):
            os.unlink(self.large)

    def need_large(self) -> None:
        if not os.path.exists(self.large):
            self.write_large(LARGE_CHUNK)

    def write_large(self, chunk: int, flags: int = os.O_CREAT | os.O_TRUNC) -> float:
        """Write the file by ``chunk`` bytes a call. Seconds from before open to after close."""
        self._generation += 1
        first_mark = self._generation << 32
        view = memoryview(self.buffer)[:chunk]
        start = now()
        fd = os.open(self.large, os.O_WRONLY | flags, 0o644)
        try:
            for position in range(0, self.scale.size, chunk):
                for offset in range(0, chunk, MIB):
                    _MARK.pack_into(view, offset, first_mark + (position + offset) // MIB)
                if os.write(fd, view) != chunk:
                    raise WrongData(f"short write at {position} of {self.large}")
        finally:
            os.close(fd)
        return (now() - start) / 1e9

    def fill_large(self) -> float:
        """Map the file and write it in place through the mapping. Seconds from open to close."""
        self._generation += 1
        first_mark = self._generation << 32
        view = memoryview(self.buffer)
        start = now()
        fd = os.open(self.large, os.O_RDWR)
        with mmap.mmap(fd, self.scale.size) as mapping:
            os.close(fd)
            for position in range(0, self.scale.size, LARGE_CHUNK):
                for offset in range(0, LARGE_CHUNK, MIB):
                    _MARK.pack_into(view, offset, first_mark + (position + offset) // MIB)
                mapping[position : position + LARGE_CHUNK] = view
        return (now() - start) / 1e9

    def read_large(self) -> float:
        """Read the file by 4 MiB a call into one buffer. Seconds from open to close."""
        view = memoryview(self.buffer)
        target = [view]
        first_mark = self._generation << 32
        start = now()
        fd = os.open(self.large, os.O_RDONLY)
        try:
            for position in range(0, self.scale.size, LARGE_CHUNK):
                if os.readv(fd, target) != LARGE_CHUNK:
                    raise WrongData(f"short read at {position} of {self.large}")
                for offset in range(0, LARGE_CHUNK, MIB):
                    expected = first_mark + (position + offset) // MIB
                    if _MARK.unpack_from(view, offset)[0] != expected:
                        raise WrongData(f"wrong bytes at {position + offset} of {self.large}")
        finally:
            os.close(fd)
        return (now() - start) / 1e9

    def scan_large(self) -> float:
        """Map the file and add up its 64-bit words. Seconds from open to close."""
        start = now()
        fd = os.open(self.large, os.O_RDONLY)
        mapping = mmap.mmap(fd, self.scale.size, prot=mmap.PROT_READ)
        os.close(fd)
        words = np.frombuffer(mapping, np.uint64)
        words.sum()
        seconds = (now() - start) / 1e9
        marks = words[::_WORDS_PER_MIB].copy()
        del words
        start = now()
        mapping.close()
        seconds += (now() - start) / 1e9
        first_mark = self._generation << 32
        expected = np.arange(first_mark, first_mark + len(marks), dtype=np.uint64)
        if not np.array_equal(marks, expected):
            raise WrongData(f"wrong bytes in the mapping of {self.large}")
        return seconds

    # Small files

    def remove_small(self) -> None:
        for path in os.scandir(self.small_directory):
            os.unlink(path)

    def need_small(self) -> None:
        if not os.path.exists(self.small[-1]):
            self.write_small()

    def write_small(self) -> float:
        """Write every small file, new or over what was there. Files per second."""
        self._small_generation += 1
        first_mark = self._small_generation << 32
        view = memoryview(self.buffer)[:SMALL_FILE]
        flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC
        start = now()
        for index, path in enumerate(self.small):
            _MARK.pack_into(view, 0, first_mark + index)
            fd = os.open(path, flags, 0o644)
            written = os.write(fd, view)
            os.close(fd)
            if written != SMALL_FILE:
                raise WrongData(f"short write to {path}")
        return len(self.small) / (now() - start) * 1e9

    def read_small(self) -> float:
        """Read every small file whole. Files per second."""
        first_mark = self._small_generation << 32
        view = memoryview(self.buffer)[:SMALL_FILE]
        target = [view]
        start = now()
        for index, path in enumerate(self.small):
            fd = os.open(path, os.O_RDONLY)
            count = os.readv(fd, target)
            os.close(fd)
            if count != SMALL_FILE or _MARK.unpack_from(view)[0] != first_mark + index:
                raise WrongData(f"wrong bytes in {path}")
        return len(self.small) / (now() - start) * 1e9

    def list_small(self) -> float:
        """scandir and stat, as ``ls -l`` does. Entries per second."""
        start = now()
        with os.scandir(self.small_directory) as entries:
            total = sum(entry.stat(follow_symlinks=False).st_size for entry in entries)
        seconds = (now() - start) / 1e9
        if total != len(self.small) * SMALL_FILE:
            raise WrongData(f"the sizes in {self.small_directory} add up to {total}")
        return len(self.small) / seconds

    # Empty files

    def remove_names(self) -> None:
        for path in os.scandir(self.names_directory):
            os.unlink(path)
        self.names = []

    def need_names(self) -> None:
        if not self.names:
            self.create_names()

    def create_names(self) -> float:
        names = [f"{self.names_directory}/{i:05}" for i in range(self.scale.names)]
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
        start = now()
        for path in names:
            os.close(os.open(path, flags, 0o644))
        seconds = (now() - start) / 1e9
        self.names = names
        return len(names) / seconds

    def stat_names(self) -> float:
        start = now()
        for path in self.names:
            os.stat(path)
        return len(self.names) / (now() - start) * 1e9

    def list_names(self) -> float:
        start = now()
        found = os.listdir(self.names_directory)
        seconds = (now() - start) / 1e9
        if len(found) != len(self.names):
            raise WrongData(f"{self.names_directory} lists {len(found)}, has {len(self.names)}")
        return len(found) / seconds

    def rename_names(self) -> float:
        renamed = [f"{path}-renamed" for path in self.names]
        start = now()
        for old, new in zip(self.names, renamed, strict=True):
            os.rename(old, new)
        seconds = (now() - start) / 1e9
        self.names = renamed
        return len(renamed) / seconds

    def unlink_names(self) -> float:
        start = now()
        for path in self.names:
            os.unlink(path)
        rate = len(self.names) / (now() - start) * 1e9
        self.names = []
        return rate
