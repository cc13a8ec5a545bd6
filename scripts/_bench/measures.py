"""What is measured: each measure is one function on a Workspace, and fills one or more rows."""

from __future__ import annotations

import mmap
import os
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns as now

import numpy as np

MIB = 1 << 20
LARGE_CHUNK = 4 * MIB
SMALL_FILE = 64 * 1024
PAGE = 4096

_MARK = struct.Struct("<Q")
_WORDS_PER_MIB = MIB // _MARK.size


class WrongData(Exception):
    """A read returned bytes that were not written last, or a call moved fewer than asked for."""


class NotHere(Exception):
    """A measure that this machine or user cannot take; the text says why."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of everything. ``size`` is the large file's, in bytes, a multiple of 4 MiB."""

    size: int = 1 << 30
    small_files: int = 1000
    names: int = 2000
    iterations: int = 5000


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    key: str
    title: str
    unit: str


@dataclass(frozen=True, slots=True)
class Measure:
    """``prepare`` runs first, untimed and uncounted; ``run`` gives one value for each row."""

    name: str
    rows: tuple[Row, ...]
    prepare: Callable[[Workspace], None]
    run: Callable[[Workspace], Sequence[float]]


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

    def write_large(self, chunk: int) -> float:
        """Write the file by ``chunk`` bytes a call. Seconds from before open to after close."""
        self._generation += 1
        first_mark = self._generation << 32
        view = memoryview(self.buffer)[:chunk]
        start = now()
        fd = os.open(self.large, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        try:
            for position in range(0, self.scale.size, chunk):
                for offset in range(0, chunk, MIB):
                    _MARK.pack_into(view, offset, first_mark + (position + offset) // MIB)
                if os.write(fd, view) != chunk:
                    raise WrongData(f"short write at {position} of {self.large}")
        finally:
            os.close(fd)
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


def _percentiles_us(samples: list[int]) -> tuple[float, float]:
    samples.sort()
    return samples[len(samples) // 2] / 1e3, samples[len(samples) * 99 // 100] / 1e3


def _random_read(ws: Workspace) -> Sequence[float]:
    offsets = [random.randrange(ws.scale.size // PAGE) * PAGE for _ in range(ws.scale.iterations)]
    target = [memoryview(ws.buffer)[:PAGE]]
    samples = []
    fd = os.open(ws.large, os.O_RDONLY)
    try:
        for offset in offsets:
            start = now()
            os.preadv(fd, target, offset)
            samples.append(now() - start)
    finally:
        os.close(fd)
    return _percentiles_us(samples)[:1]


def _open_read_close(ws: Workspace) -> Sequence[float]:
    path, flags = ws.small[0], os.O_RDONLY
    open_, read, close = os.open, os.read, os.close
    samples = []
    for _ in range(ws.scale.iterations):
        start = now()
        fd = open_(path, flags)
        data = read(fd, PAGE)
        close(fd)
        samples.append(now() - start)
        if len(data) != PAGE:
            raise WrongData(f"short read of {path}")
    return _percentiles_us(samples)


def _stat(ws: Workspace) -> Sequence[float]:
    path, stat = ws.small[0], os.stat
    samples = []
    for _ in range(ws.scale.iterations):
        start = now()
        stat(path)
        samples.append(now() - start)
    return _percentiles_us(samples)[:1]


def _warm_small(ws: Workspace) -> None:
    ws.need_small()
    ws.read_small()


def _warm_list(ws: Workspace) -> None:
    ws.need_small()
    ws.list_small()


def drop_caches() -> None:
    """Make the kernel forget names, inodes and clean pages (those of a tmpfs are never clean).

    Raises NotHere for users who may not.
    """
    try:
        os.sync()
        with open("/proc/sys/vm/drop_caches", "w") as file:
            file.write("3")
    except OSError as error:
        raise NotHere(f"dropping caches takes root ({error.strerror})") from None


def _cold_small(ws: Workspace) -> None:
    ws.need_small()
    drop_caches()


def _gib(seconds: Callable[[Workspace], float]) -> Callable[[Workspace], Sequence[float]]:
    return lambda ws: (ws.scale.size / (1 << 30) / seconds(ws),)


def _one(rate: Callable[[Workspace], float]) -> Callable[[Workspace], Sequence[float]]:
    return lambda ws: (rate(ws),)


def _measure(
    name: str,
    title: str,
    unit: str,
    prepare: Callable[[Workspace], None],
    run: Callable[[Workspace], Sequence[float]],
) -> Measure:
    return Measure(name, (Row(name, title, unit),), prepare, run)


def _read_again(ws: Workspace) -> None:
    ws.need_large()
    ws.read_large()


def touch_memory(size: int) -> None:
    """Have ``size`` bytes of free memory that are real.

    A virtual machine gives memory that has been free for a second or two back to its host (free
    page reporting), and writing it again is then ten times slower: by chance for this target and
    not for that one. Memory freed last is used first, so this is for right before a write.
    """
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        np.frombuffer(memory, np.uint8)[::PAGE] = 1


def _ready_to_write_large(ws: Workspace) -> None:
    ws.remove_large()
    touch_memory(max(ws.scale.size * 5 // 4, 512 * MIB))


def _ready_to_write_small(ws: Workspace) -> None:
    ws.remove_small()
    touch_memory(512 * MIB)


def _ready_to_overwrite_small(ws: Workspace) -> None:
    ws.need_small()
    touch_memory(512 * MIB)


# In the order of a round: what one leaves behind is what the next one starts from.
MEASURES: tuple[Measure, ...] = (
    _measure(
        "write-1m",
        "write, 1 MiB a call",
        "GiB/s",
        _ready_to_write_large,
        _gib(lambda ws: ws.write_large(MIB)),
    ),
    _measure(
        "write",
        "write, 4 MiB a call",
        "GiB/s",
        _ready_to_write_large,
        _gib(lambda ws: ws.write_large(LARGE_CHUNK)),
    ),
    _measure(
        "read-first",
        "read what was just written, 4 MiB a call",
        "GiB/s",
        Workspace.need_large,
        _gib(Workspace.read_large),
    ),
    _measure("read", "read it again", "GiB/s", _read_again, _gib(Workspace.read_large)),
    _measure("mmap", "mmap and add up", "GiB/s", Workspace.need_large, _gib(Workspace.scan_large)),
    _measure("pread", "pread 4 KiB, random, p50", "us", Workspace.need_large, _random_read),
    _measure(
        "small-write",
        "write new 64 KiB files",
        "files/s",
        _ready_to_write_small,
        _one(Workspace.write_small),
    ),
    _measure(
        "small-overwrite",
        "overwrite 64 KiB files",
        "files/s",
        _ready_to_overwrite_small,
        _one(Workspace.write_small),
    ),
    _measure("small-read", "read them, warm", "files/s", _warm_small, _one(Workspace.read_small)),
    _measure("small-cold", "read them, cold", "files/s", _cold_small, _one(Workspace.read_small)),
    _measure("ls", "ls -l, second time", "entries/s", _warm_list, _one(Workspace.list_small)),
    Measure(
        "open",
        (
            Row("open", "open, read 4 KiB, close, p50", "us"),
            Row("open-p99", "open, read 4 KiB, close, p99", "us"),
        ),
        _warm_small,
        _open_read_close,
    ),
    _measure("stat", "stat, p50", "us", _warm_small, _stat),
    _measure(
        "names-create",
        "create empty files",
        "files/s",
        Workspace.remove_names,
        _one(Workspace.create_names),
    ),
    _measure(
        "names-stat", "stat them", "files/s", Workspace.need_names, _one(Workspace.stat_names)
    ),
    _measure(
        "names-list", "list them", "entries/s", Workspace.need_names, _one(Workspace.list_names)
    ),
    _measure(
        "names-rename", "rename them", "files/s", Workspace.need_names, _one(Workspace.rename_names)
    ),
    _measure(
        "names-unlink", "unlink them", "files/s", Workspace.need_names, _one(Workspace.unlink_names)
    ),
)


def measures_named(names: Sequence[str]) -> list[Measure]:
    """The measures of these names, or of the rows of these names, in the order of a round.

    Raises ValueError for a name that is none.
    """
    known = {row.key: measure for measure in MEASURES for row in measure.rows}
    for name in names:
        if name not in known:
            raise ValueError(f"no measure {name!r}; there are {', '.join(known)}")
    wanted = {known[name].name for name in names}
    return [measure for measure in MEASURES if measure.name in wanted]
