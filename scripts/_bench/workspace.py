"""A directory to measure in, and the files that one measure leaves there for the next."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from . import files
from .files import CHUNK, MARK, MIB, SMALL_FILE, Files, WrongData, now

_WORDS_PER_MIB = MIB // MARK.size


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of everything. `size` is the large file's, in bytes, a multiple of 4 MiB."""

    size: int = 1 << 30
    small_files: int = 1000
    names: int = 2000
    iterations: int = 5000


class Workspace:
    """A directory in one target. Methods that measure return seconds."""

    def __init__(self, directory: Path, scale: Scale) -> None:
        self.scale = scale
        self.large = str(directory / "large")
        self.small_directory = str(directory / "small")
        self.names_directory = str(directory / "names")
        self.small = files.paths_in(self.small_directory, scale.small_files)
        self.names: list[str] = []
        self._files = Files()
        self.buffer = self._files.buffer
        self._generation = 0
        self._small_generation = 0
        os.mkdir(self.small_directory)
        os.mkdir(self.names_directory)

    # -- the large file ------------------------------------------------------------------------

    def remove_large(self) -> None:
        if os.path.exists(self.large):
            os.unlink(self.large)

    def need_large(self) -> None:
        if not os.path.exists(self.large):
            self.write_large()

    def write_large(self, chunk: int = CHUNK, flags: int = os.O_CREAT | os.O_TRUNC) -> float:
        self._generation += 1
        number = self._generation
        return self._files.write(self.large, self.scale.size, number, chunk, flags).whole

    def fill_large(self) -> float:
        """Map the file and write it in place through the mapping."""
        self._generation += 1
        view = memoryview(self.buffer)
        start = now()
        fd = os.open(self.large, os.O_RDWR)
        with mmap.mmap(fd, self.scale.size) as mapping:
            os.close(fd)
            for position in range(0, self.scale.size, CHUNK):
                files.mark(view, self._generation, position)
                mapping[position : position + CHUNK] = view
        return now() - start

    def read_large(self) -> float:
        return self._files.read(self.large, self.scale.size, self._generation).whole

    def scan_large(self) -> float:
        """Map the file and add up its 64-bit words."""
        start = now()
        fd = os.open(self.large, os.O_RDONLY)
        mapping = mmap.mmap(fd, self.scale.size, prot=mmap.PROT_READ)
        os.close(fd)
        words = np.frombuffer(mapping, np.uint64)
        words.sum()
        seconds = now() - start
        marks = words[::_WORDS_PER_MIB].copy()
        del words
        start = now()
        mapping.close()
        seconds += now() - start
        first = self._generation << 32
        expected = np.arange(first, first + len(marks), dtype=np.uint64)
        if not np.array_equal(marks, expected):
            raise WrongData(f"wrong bytes in the mapping of {self.large}")
        return seconds

    # -- small files ---------------------------------------------------------------------------

    def remove_small(self) -> None:
        for path in os.scandir(self.small_directory):
            os.unlink(path)

    def need_small(self) -> None:
        if not os.path.exists(self.small[-1]):
            self.write_small()

    def write_small(self) -> float:
        self._small_generation += 1
        return self._files.write_small(self.small, self._small_generation)

    def read_small(self) -> float:
        return self._files.read_small(self.small, self._small_generation)

    def list_small(self) -> float:
        return files.list_names(self.small_directory, len(self.small), SMALL_FILE)

    # -- empty files ---------------------------------------------------------------------------

    def remove_names(self) -> None:
        for path in os.scandir(self.names_directory):
            os.unlink(path)
        self.names = []

    def need_names(self) -> None:
        if not self.names:
            self.create_names()

    def create_names(self) -> float:
        names = files.paths_in(self.names_directory, self.scale.names)
        seconds = files.create_names(names)
        self.names = names
        return seconds

    def stat_names(self) -> float:
        return files.stat_names(self.names)

    def list_names(self) -> float:
        start = now()
        found = os.listdir(self.names_directory)
        seconds = now() - start
        if len(found) != len(self.names):
            raise WrongData(f"{self.names_directory} lists {len(found)}, has {len(self.names)}")
        return seconds

    def rename_names(self) -> float:
        renamed = [f"{path}-renamed" for path in self.names]
        start = now()
        for old, new in zip(self.names, renamed, strict=True):
            os.rename(old, new)
        seconds = now() - start
        self.names = renamed
        return seconds

    def unlink_names(self) -> float:
        names, self.names = self.names, []
        return files.unlink_names(names)
