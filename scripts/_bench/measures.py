"""What is measured: each measure is one function on a Workspace, and fills one or more rows."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns as now

import numpy as np

from .workspace import LARGE_CHUNK, MIB, SMALL_FILE, Workspace, WrongData

PAGE = 4096


class NotHere(Exception):
    """A measure that this machine or user cannot take; the text says why."""


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


def _open_edit_close(ws: Workspace) -> Sequence[float]:
    path, page = ws.small[-1], memoryview(ws.buffer)[PAGE : 2 * PAGE]
    samples = []
    for _ in range(ws.scale.iterations):
        start = now()
        fd = os.open(path, os.O_RDWR)
        os.pwrite(fd, page, PAGE)
        os.close(fd)
        samples.append(now() - start)
    return _percentiles_us(samples)[:1]


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
    touch_memory(max(ws.scale.size * 5 // 4, 256 * MIB))


def _ready_to_write_small(ws: Workspace) -> None:
    ws.remove_small()
    touch_memory(4 * len(ws.small) * SMALL_FILE)


def _ready_to_overwrite_small(ws: Workspace) -> None:
    ws.need_small()
    touch_memory(4 * len(ws.small) * SMALL_FILE)


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
    _measure(
        "edit",
        "write it again in place, 4 MiB a call",
        "GiB/s",
        Workspace.need_large,
        _gib(lambda ws: ws.write_large(LARGE_CHUNK, flags=0)),
    ),
    _measure(
        "edit-mmap",
        "write it in place through a mapping",
        "GiB/s",
        Workspace.need_large,
        _gib(Workspace.fill_large),
    ),
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
    _measure(
        "edit-small", "open, write 4 KiB in place, close, p50", "us", _warm_small, _open_edit_close
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
