"""The measures, part by part, and the tables that show them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from harness.cluster import Cluster
from harness.roce import Way
from rich.table import Table

from irdmafs import client

from ..command import say, turned
from ..files import GIB, MIB, Files
from ..machine import kernel_processor_s, processor_s
from ..tables import Rates, Row, spread, table
from ..workers import Worker
from . import perftest
from .jobs import MESSAGE_BYTES

KIB = 1 << 10

BASE = "perftest"
DEVICE, MOUNT, BUFFER = "device", "mount", "buffer"
VERBS, TCP, GRPC = "verbs", "TCP", "gRPC, one message"
# Bytes per second, of "write" or "read" and a size.
Rate = Callable[[str, int], float]
WAYS = ("write", "read")
BAR_SIZE = 1 * MIB
SMALL = 4 * KIB
LATENCIES = {
    "get": "get of 4 KiB on the control connection",
    "one_sided": "read of 4 KiB by verbs (ask, READ, release)",
    "ib_read_lat": "ib_read_lat, 4 KiB",
}


@dataclass(frozen=True)
class Scale:
    """`volume`: about so many bytes are moved for one figure."""

    rounds: int
    sizes: tuple[int, ...]
    volume: int
    cpu_size: int
    repeats_max: int
    asks: int

    def repeats(self, size: int) -> int:
        return max(2, min(self.repeats_max, self.volume // size))


@dataclass
class Results:
    """What is printed in the end, and every figure of it for `--json`."""

    figures: dict[str, Any] = field(default_factory=dict)
    shown: list[Table | Rates | str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)


class Ours(NamedTuple):
    """What is measured beside perftest, of versions of `least` bytes and more. `bar`: of perftest's rate,
    from BAR_SIZE on."""

    name: str
    bar: float
    rate: Rate
    ways: Sequence[str] = WAYS
    least: int = 0

    def covers(self, way: str, size: int) -> bool:
        return way in self.ways and size >= self.least

    def row(self, way: str, size: int) -> Row:
        bar = self.bar if size >= BAR_SIZE else None
        return Row(f"{way}-{size}", f"{way} {name_of(size)}", "MiB/s", bar)


class Ends(NamedTuple):
    """The process that asks for versions, and the number of the one that keeps them."""

    client: Worker
    server_pid: int


class Bench:
    """One cluster and the processes that ask it. `start_grpc` starts those of the alternative, for as long
    as they are wanted."""

    def __init__(
        self,
        scale: Scale,
        way: Way,
        cluster: Cluster,
        workers: dict[str, Worker],
        start_grpc: Callable[[], AbstractContextManager[Ends]],
    ) -> None:
        self.scale = scale
        self.way = way
        self.cluster = cluster
        self.workers = workers
        self._start_grpc = start_grpc
        self.results = Results()
        self._files = Files()
        self._number = 0
        self._buffers: dict[int, client.Buffer] = {}

    def run(self, parts: Sequence[str]) -> None:
        """Measure those of `PARTS`."""
        ours: dict[str, Ours] = {
            "bandwidth": Ours(DEVICE, 0.95, self._device_rate),
            "posix": Ours(MOUNT, 0.90, self._mount_rate),
            # What is smaller is copied out of the cache.
            "buffer": Ours(BUFFER, 0.90, self._buffer_rate, ("read",), least=MESSAGE_BYTES + 1),
        }
        if beside := [ours[part] for part in parts if part in ours]:
            self._beside_perftest(beside)
        if "latency" in parts:
            self._latency()
        if "cpu" in parts:
            self._cpu()

    # -- how fast ------------------------------------------------------------------------------

    def _beside_perftest(self, ours: list[Ours]) -> None:
        """Through the device interface, and from programs on the two mounts."""
        keys = [(way, size) for size in self.scale.sizes for way in WAYS]
        tables = {
            one.name: Rates([one.row(*key) for key in keys if one.covers(*key)], one.name, BASE)
            for one in ours
        }
        for way, size in keys:
            asked = [one for one in ours if one.covers(way, size)]
            for one in asked:
                one.rate(way, size)
            measures = {one.name: one.rate for one in asked} | {BASE: self._perftest_rate}
            for round_ in range(self.scale.rounds):
                self._say(f"bandwidth: {way} {name_of(size)}", round_)
                for column in turned(list(measures), round_):
                    value = measures[column](way, size) / MIB
                    for one in asked:
                        if column in (BASE, one.name):
                            tables[one.name].add(column, f"{way}-{size}", round_, value)
            if way == "read":
                self._release(size)
        for name, rates in tables.items():
            self._keep_rates(name, rates)

    def _perftest_rate(self, way: str, size: int) -> float:
        total = size * self.scale.repeats(size)
        return perftest.bandwidth(self.way, f"ib_{way}_bw", size, total)

    def _device_rate(self, way: str, size: int) -> float:
        times = self.workers[VERBS].do(way, size, count=self.scale.repeats(size))
        return size / median(times)

    def _mount_rate(self, way: str, size: int) -> float:
        """A version that was written is read once: a second read would be the host's own."""
        writer, reader = (mount.path / f"weights-{size}" for mount in self.cluster.mounts)
        times: dict[str, list[float]] = {"write": [], "read": []}
        for _ in range(max(2, self.scale.repeats(size) // 4)):
            self._number += 1
            times["write"].append(self._files.write(writer, size, self._number).whole)
            times["read"].append(self._files.read(reader, size, self._number).whole)
        return size / median(times[way])

    def _buffer_rate(self, way: str, size: int) -> float:
        """Read what the other mount wrote into memory that the last version was read into."""
        assert way == "read"
        writer, reader = (mount.path / f"weights-{size}" for mount in self.cluster.mounts)
        buffer = self._buffers.get(size)
        if buffer is None:
            buffer = self._buffers[size] = client.Buffer(size)
        times = []
        for _ in range(max(2, self.scale.repeats(size) // 4)):
            self._number += 1
            self._files.write(writer, size, self._number)
            times.append(self._files.fill(reader, buffer, size, self._number))
        return size / median(times)

    def _release(self, size: int) -> None:
        if size in self._buffers:
            self._buffers.pop(size).close()
        for worker in self.workers.values():
            worker.do("release", size)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.cluster.mounts[0].path / f"weights-{size}")

    def _keep_rates(self, name: str, rates: Rates) -> None:
        self.results.shown.append(rates)
        self.results.missed += [f"{name}: {row.title}" for row in rates.missed()]
        self.results.figures[name] = {
            row.key: {column: rates.values(column, row.key) for column in (BASE, rates.ours)}
            | {"ratio": rates.ratio(rates.ours, row.key)}
            for row in rates.rows
        }

    # -- how soon ------------------------------------------------------------------------------

    def _latency(self) -> None:
        """A small get, by each way there is."""
        found: dict[str, list[float]] = {key: [] for key in LATENCIES}
        asks = self.scale.asks
        for round_ in range(self.scale.rounds):
            self._say("latency", round_)
            for job in ("get", "one_sided"):
                found[job].append(median(self.workers[VERBS].do(job, SMALL, count=asks)) * 1e6)
            found["ib_read_lat"].append(perftest.read_latency_us(self.way, SMALL, asks))
        shown = table("latency", "", "us")
        for key, title in LATENCIES.items():
            shown.add_row(title, spread(found[key]))
        self.results.shown.append(shown)
        self.results.figures["latency"] = found

    # -- at what cost --------------------------------------------------------------------------

    def _cpu(self) -> None:
        """Processor seconds per GiB of each side, by verbs, over TCP and by gRPC."""
        size = self.scale.cpu_size
        count = max(4, 2 * self.scale.volume // size)
        found: dict[str, list[tuple[float, ...]]] = {}
        with self._start_grpc() as grpc:
            node_pid = self.cluster.nodes[0].pid
            contenders = {name: Ends(worker, node_pid) for name, worker in self.workers.items()}
            contenders[GRPC] = grpc
            for round_ in range(self.scale.rounds):
                self._say(f"processor time, {name_of(size)}", round_)
                for name, ends in turned(list(contenders.items()), round_):
                    for way in WAYS:
                        ends.client.do(way, size, count=2)
                        before = usage(ends)
                        ends.client.do(way, size, count=count)
                        used = zip(usage(ends), before, strict=True)
                        per_gib = tuple((t - t0) * GIB / (size * count) for t, t0 in used)
                        found.setdefault(f"{way}, {name}", []).append(per_gib)
        self._release(size)
        shown = table(
            f"processor seconds per GiB, versions of {name_of(size)}",
            "", "client's process", "node's process", "kernel's threads",
        )  # fmt: skip
        for what in (f"{way}, {name}" for way in WAYS for name in contenders):
            sides = zip(*found[what], strict=True)
            shown.add_row(what, *(spread(list(side)) for side in sides))
        self.results.shown += [
            shown,
            "gRPC: bytes without protobuf, insecure, malloc keeps memory, from a file in a tmpfs into one "
            "that is there already.\nSoftware RDMA does a card's work in kernel threads, soft interrupts "
            "and whoever posts.\n",
        ]
        self.results.figures["cpu"] = found

    def _say(self, what: str, round_: int) -> None:
        say(what, round_, self.scale.rounds)


def usage(ends: Ends) -> tuple[float, float, float]:
    """Return processor seconds until now: of two processes, and of the kernel's threads."""
    return processor_s(ends.client.pid), processor_s(ends.server_pid), kernel_processor_s()


def name_of(size: int) -> str:
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size} B"
