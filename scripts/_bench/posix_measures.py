"""What is measured of a directory: each measure is one function on a Workspace, for one or more rows."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from .files import CHUNK, GIB, MIB, PAGE, SMALL_FILE, WrongData, now
from .machine import drop_caches, make_real
from .tables import Row
from .workspace import Scale, Workspace


@dataclass(frozen=True, slots=True)
class Measure:
    """`prepare` runs first, untimed and uncounted; `run` gives one value for each row."""

    name: str
    rows: tuple[Row, ...]
    prepare: Callable[[Workspace], None]
    run: Callable[[Workspace], Sequence[float]]


def _percentiles_us(samples: list[float]) -> tuple[float, float]:
    samples.sort()
    return samples[len(samples) // 2] * 1e6, samples[len(samples) * 99 // 100] * 1e6


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


# -- what comes before -------------------------------------------------------------------------


def _read(ws: Workspace) -> None:
    ws.need_large()
    ws.read_large()


def _warm(ws: Workspace) -> None:
    ws.need_small()
    ws.read_small()


def _cold(ws: Workspace) -> None:
    ws.need_small()
    drop_caches()


def _listed(ws: Workspace) -> None:
    ws.need_small()
    ws.list_small()


def _no_large(ws: Workspace) -> None:
    ws.remove_large()
    make_real(max(ws.scale.size * 5 // 4, 256 * MIB))


def _no_small(ws: Workspace) -> None:
    ws.remove_small()
    make_real(4 * len(ws.small) * SMALL_FILE)


def _small(ws: Workspace) -> None:
    ws.need_small()
    make_real(4 * len(ws.small) * SMALL_FILE)


# -- the measures ------------------------------------------------------------------------------

Prepare = Callable[[Workspace], None]


def _rate(
    unit: str,
    amount: Callable[[Scale], float],
    name: str,
    title: str,
    prepare: Prepare,
    seconds: Callable[[Workspace], float],
) -> Measure:
    rows = (Row(name, title, unit),)
    return Measure(name, rows, prepare, lambda ws: (amount(ws.scale) / seconds(ws),))


_of_large = partial(_rate, "GiB/s", lambda scale: scale.size / GIB)
_of_small = partial(_rate, "files/s", lambda scale: scale.small_files)
_small_entries = partial(_rate, "entries/s", lambda scale: scale.small_files)
_of_names = partial(_rate, "files/s", lambda scale: scale.names)
_name_entries = partial(_rate, "entries/s", lambda scale: scale.names)


def _latency(
    name: str, title: str, prepare: Prepare, run: Callable[[Workspace], Sequence[float]]
) -> Measure:
    return Measure(name, (Row(name, title, "us"),), prepare, run)


_EDIT = "write it again in place, 4 MiB a call"
_OPEN = "open, read 4 KiB, close"
WS = Workspace

# In the order of a round: what one leaves behind is what the next one starts from.
MEASURES: tuple[Measure, ...] = (
    _of_large("write-1m", "write, 1 MiB a call", _no_large, lambda ws: ws.write_large(MIB)),
    _of_large("write", "write, 4 MiB a call", _no_large, lambda ws: ws.write_large(CHUNK)),
    _of_large(
        "read-first", "read what was just written, 4 MiB a call", WS.need_large, WS.read_large
    ),
    _of_large("read", "read it again", _read, WS.read_large),
    _of_large("mmap", "mmap and add up", WS.need_large, WS.scan_large),
    _of_large("edit", _EDIT, WS.need_large, lambda ws: ws.write_large(flags=0)),
    _of_large("edit-mmap", "write it in place through a mapping", WS.need_large, WS.fill_large),
    _latency("pread", "pread 4 KiB, random, p50", WS.need_large, _random_read),
    _of_small("small-write", "write new 64 KiB files", _no_small, WS.write_small),
    _of_small("small-overwrite", "overwrite 64 KiB files", _small, WS.write_small),
    _of_small("small-read", "read them, warm", _warm, WS.read_small),
    _of_small("small-cold", "read them, cold", _cold, WS.read_small),
    _small_entries("ls", "ls -l, second time", _listed, WS.list_small),
    Measure(
        "open",
        (Row("open", f"{_OPEN}, p50", "us"), Row("open-p99", f"{_OPEN}, p99", "us")),
        _warm,
        _open_read_close,
    ),
    _latency("edit-small", "open, write 4 KiB in place, close, p50", _warm, _open_edit_close),
    _latency("stat", "stat, p50", _warm, _stat),
    _of_names("names-create", "create empty files", WS.remove_names, WS.create_names),
    _of_names("names-stat", "stat them", WS.need_names, WS.stat_names),
    _name_entries("names-list", "list them", WS.need_names, WS.list_names),
    _of_names("names-rename", "rename them", WS.need_names, WS.rename_names),
    _of_names("names-unlink", "unlink them", WS.need_names, WS.unlink_names),
)
BY_ROW = {row.key: measure for measure in MEASURES for row in measure.rows}
