"""The measures, part by part, and the tables that show them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
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
from ..workers import Worker, WorkerFailed
from . import echo, loop, perftest, registration
from .jobs import AT_ONCE, MESSAGE_BYTES

KIB = 1 << 10

BASE = "perftest"
DEVICE, MOUNT, BUFFER = "device", "mount", "buffer"
DEVICE_MANY = f"device, {AT_ONCE} at once"
VERBS, TCP, UNARY, STREAMED = "verbs", "TCP", "gRPC, one message", "gRPC, streamed"
CONTENDERS = (VERBS, TCP, UNARY, STREAMED)
# Bytes per second, of "write" or "read" and a size.
Rate = Callable[[str, int], float]
WAYS = ("write", "read")
BAR_SIZE = 1 * MIB
SMALL = 4 * KIB
LATENCIES = {
    "blocking": "a TCP round trip, blocking sockets",
    "trio": "a TCP round trip, trio at both ends",
    "codec": "encoding and decoding both messages of a get",
    "file": "opening, reading and closing a file of 4 KiB, as the node does",
    "ping": "an empty request on the control connection",
    "get": "get of 4 KiB on the control connection",
    "one_sided": "read of 4 KiB by verbs (ask, READ, release)",
    "ib_read_lat": "ib_read_lat, 4 KiB",
    "bound": "2 x ib_read_lat + the empty request + codec + file",
}


@dataclass(frozen=True)
class Scale:
    """`volume`: about so many bytes are moved for one figure."""

    rounds: int
    sizes: tuple[int, ...]
    all_sizes: tuple[int, ...]
    volume: int
    cpu_size: int
    repeats_max: int
    asks: int
    tensors: int
    versions: int
    version_bytes: int
    chunk: int

    def repeats(self, size: int) -> int:
        return max(2, min(self.repeats_max, self.volume // size))


@dataclass
class Results:
    """What is printed in the end, and every figure of it for `--json`."""

    figures: dict[str, Any] = field(default_factory=dict)
    shown: list[Table | Rates | str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


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


class GrpcEnds(NamedTuple):
    client: Worker
    server_pid: int


class Bench:
    """One cluster and the processes that ask it. `start_grpc` has the alternative's, as long as they are
    wanted."""

    def __init__(
        self,
        scale: Scale,
        way: Way,
        cluster: Cluster,
        metrics_port: int,
        workers: dict[str, Worker],
        start_grpc: Callable[[], AbstractContextManager[GrpcEnds]],
    ) -> None:
        self.scale = scale
        self.way = way
        self.cluster = cluster
        self.metrics_port = metrics_port
        self.workers = workers
        self._start_grpc = start_grpc
        self._grpc: GrpcEnds | None = None
        self.results = Results()
        self._files = Files()
        self._number = 0
        self._buffers: dict[int, client.Buffer] = {}

    # -- how fast ------------------------------------------------------------------------------

    def run(self, parts: Sequence[str]) -> None:
        """Those of `PARTS`."""
        ours: dict[str, Ours] = {
            "bandwidth": Ours(DEVICE, 0.95, self._device_rate),
            "at_once": Ours(DEVICE_MANY, 0.95, self._many_rate),
            "posix": Ours(MOUNT, 0.90, self._mount_rate),
            # What is smaller is copied out of the cache.
            "buffer": Ours(BUFFER, 0.90, self._buffer_rate, ("read",), least=MESSAGE_BYTES + 1),
        }
        if beside := [ours[part] for part in parts if part in ours]:
            self._beside_perftest(beside)
        for part in parts:
            if part not in ours:
                getattr(self, part)()

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

    def _many_rate(self, way: str, size: int) -> float:
        count = max(AT_ONCE, self.scale.repeats(size))
        (took_s,) = self.workers[VERBS].do(f"{way}_many", size, count)
        return size * count / took_s

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

    def latency(self) -> None:
        """Of small gets, and what their time is made of."""
        found: dict[str, list[float]] = {key: [] for key in LATENCIES}
        asks = self.scale.asks
        for round_ in range(self.scale.rounds):
            self._say("latency", round_)
            for kind in ("blocking", "trio"):
                found[kind].append(echo.round_trip_us(kind, self.way.address, asks))
            for job in ("codec", "file", "ping", "get", "one_sided"):
                count = asks if job != "codec" else 5
                times = self.workers[VERBS].do(job, SMALL, count=count)
                found[job].append(median(times) * 1e6)
            found["ib_read_lat"].append(perftest.read_latency_us(self.way, SMALL, asks))
            parts = [found[part][-1] for part in ("ping", "codec", "file")]
            found["bound"].append(2 * found["ib_read_lat"][-1] + sum(parts))
        shown = table("latency", "", "us")
        for key, title in LATENCIES.items():
            shown.add_row(title, spread(found[key]))
        ratio = median(get / bound for get, bound in zip(found["get"], found["bound"], strict=True))
        shown.add_row("get / that bound (bar: 1)", f"{ratio:.2f}")
        if ratio > 1:
            self.results.missed.append("latency: get of 4 KiB")
        self.results.shown.append(shown)
        self.results.figures["latency"] = found | {"ratio": ratio}

    # -- the others ----------------------------------------------------------------------------

    def alternatives(self) -> None:
        """The same versions by verbs, over TCP and by gRPC."""
        figures: dict[str, Any] = {}
        shown = table(
            "alternatives, MiB/s", "", *CONTENDERS, "verbs / message", "verbs / streamed",
        )  # fmt: skip
        measured, without = self._beside_grpc()
        for way, size in ((way, size) for size in self.scale.all_sizes for way in WAYS):
            if (values := measured.get((way, size))) is None:
                continue
            ratios = {
                other: median(
                    ours / theirs for ours, theirs in zip(values[VERBS], values[other], strict=True)
                )
                for other in (UNARY, STREAMED)
            }
            shown.add_row(
                f"{way} {name_of(size)}",
                *(spread(values[one]) for one in CONTENDERS),
                *(f"x{ratio:.2f}" for ratio in ratios.values()),
            )
            figures[f"{way}-{size}"] = values | {"ratios": ratios}
        chunk = name_of(self.scale.chunk)
        self.results.shown += [
            shown,
            f"gRPC: bytes without protobuf, chunks of {chunk}, insecure, one channel, malloc keeps memory, "
            "from a file in a tmpfs\ninto one that is there already, as on the device. Below 64 KiB the "
            "device's versions travel in a control message.\n",
            *without,
        ]
        self.results.figures["alternatives"] = figures

    def _beside_grpc(self) -> tuple[dict[tuple[str, int], dict[str, list[float]]], list[str]]:
        """By way and size, and why some are missing."""
        measured = {}
        without = []
        # Processes of a guest can have few pieces of its memory (the machine's vm.max_map_count), and what
        # others have used is in pieces: the largest first, and each by processes of its own.
        for size in sorted(self.scale.all_sizes, reverse=True):
            try:
                with self._grpc_running():
                    for way in WAYS:
                        measured[way, size] = self._rounds_of(way, size)
            except WorkerFailed as error:
                if not all(worker.is_alive for worker in self.workers.values()):
                    raise
                without.append(f"not measured: {error}\n")
            self._release(size)
        return measured, without

    @contextlib.contextmanager
    def _grpc_running(self) -> Iterator[None]:
        with self._start_grpc() as self._grpc:
            yield
        self._grpc = None

    def _rounds_of(self, way: str, size: int) -> dict[str, list[float]]:
        """MiB/s of each round."""
        values: dict[str, list[float]] = {one: [] for one in CONTENDERS}
        for contender in CONTENDERS:
            self._ask(contender, way, size, 2)
        for round_ in range(self.scale.rounds):
            self._say(f"alternatives: {way} {name_of(size)}", round_)
            for contender in turned(CONTENDERS, round_):
                times = self._ask(contender, way, size, self.scale.repeats(size))
                values[contender].append(size / median(times) / MIB)
        return values

    def _ask(self, contender: str, way: str, size: int, count: int) -> list[float]:
        if contender in (VERBS, TCP):
            return self.workers[contender].do(way, size, count=count)
        suffix = "_stream" if contender == STREAMED else ""
        assert self._grpc is not None
        return self._grpc.client.do(f"{way}{suffix}", size, count=count)

    # -- at what cost --------------------------------------------------------------------------

    def cpu(self) -> None:
        """Processor seconds per GiB of each side."""
        size = self.scale.cpu_size
        count = max(4, 2 * self.scale.volume // size)
        found: dict[str, list[tuple[float, ...]]] = {}
        with self._grpc_running():
            for round_ in range(self.scale.rounds):
                self._say(f"processor time, {name_of(size)}", round_)
                for contender in turned(CONTENDERS, round_):
                    client, node = self._pids(contender)
                    for way in WAYS:
                        self._ask(contender, way, size, 2)
                        before = usage(client, node)
                        self._ask(contender, way, size, count)
                        used = zip(usage(client, node), before, strict=True)
                        per_gib = tuple((t - t0) * GIB / (size * count) for t, t0 in used)
                        found.setdefault(f"{way}, {contender}", []).append(per_gib)
        self._release(size)
        shown = table(
            f"processor seconds per GiB, versions of {name_of(size)}",
            "", "client's process", "node's process", "kernel's threads",
        )  # fmt: skip
        for way in WAYS:
            for contender in CONTENDERS:
                rounds = found[f"{way}, {contender}"]
                sides = zip(*rounds, strict=True)
                shown.add_row(f"{way}, {contender}", *(spread(list(side)) for side in sides))
        self.results.shown += [
            shown,
            "Software RDMA does a card's work in kernel threads, soft interrupts and whoever posts.\n",
        ]
        self.results.figures["cpu"] = found

    def _pids(self, contender: str) -> tuple[int, int]:
        if contender in (VERBS, TCP):
            return self.workers[contender].pid, self.cluster.nodes[0].pid
        assert self._grpc is not None
        return self._grpc.client.pid, self._grpc.server_pid

    # -- registration --------------------------------------------------------------------------

    def registration(self) -> None:
        """A model's tensors in one region, and in one each."""
        wanted = registration.tensors(self.scale.tensors)
        registrar = registration.Registrar(self.way.device, self.cluster.directory, wanted)
        kinds = {"one region for the file": registrar.whole, "one for each tensor": registrar.each}
        found: dict[str, list[registration.Registered]] = {kind: [] for kind in kinds}
        with registrar.opened():
            for round_ in range(self.scale.rounds):
                self._say("registration", round_)
                for kind in turned(list(kinds), round_):
                    found[kind].append(kinds[kind]())
        shown = table(
            f"registration: {len(wanted)} tensors of Llama 3.1 405B, widths / {registration.SCALE}, "
            f"{registrar.size / MIB:.0f} MiB",
            "", "regions", "ms to register", "ms to give up",
        )  # fmt: skip
        for kind, rounds in found.items():
            shown.add_row(
                kind, str(rounds[0].regions),
                spread([one.seconds * 1e3 for one in rounds]),
                spread([one.closing_seconds * 1e3 for one in rounds]),
            )  # fmt: skip
        self.results.shown.append(shown)
        self.results.figures["registration"] = {
            kind: [one._asdict() for one in rounds] for kind, rounds in found.items()
        }

    # -- the loop ------------------------------------------------------------------------------

    def loop(self) -> None:
        """The steady state: nothing is registered, and no byte passes through Python."""
        scale = self.scale
        self._say(f"{scale.versions} versions of {name_of(scale.version_bytes)}", None)
        outcome = loop.Loop(
            self.cluster, self.way.device, self.metrics_port, scale.version_bytes
        ).run(scale.versions)
        shown = table(
            f"training loop: {scale.versions} versions of {name_of(scale.version_bytes)}, after "
            f"{loop.WARM_UP} to warm up", "", "counted", "expected", "",
        )  # fmt: skip
        for row in outcome.rows:
            expected = "" if row.expected is None else f"{row.expected:,g}"
            shown.add_row(
                row.what,
                f"{row.counted:,g}",
                expected,
                "[bold red]wrong[/]" if row.is_wrong else "",
            )
            if row.is_wrong:
                self.results.wrong.append(f"{row.what}: {row.counted:,g}, not {row.expected:,g}")
        told = table("what the processes counted meanwhile", "", "more by", "per version")
        for name, value in sorted(outcome.changed.items()):
            told.add_row(name, f"{value:,g}", f"{value / scale.versions:,.4g}")
        took_ms = median(outcome.seconds) * 1e3
        self.results.shown += [
            shown,
            f"{took_ms:.0f} ms to write a version on one mount and read it on the other\n",
            told,
        ]
        self.results.figures["loop"] = {
            "rows": {row.what: [row.counted, row.expected] for row in outcome.rows},
            "changed": outcome.changed,
            "seconds": outcome.seconds,
        }

    def _say(self, what: str, round_: int | None) -> None:
        say(what, round_, self.scale.rounds)


def usage(client: int, node: int) -> tuple[float, float, float]:
    """Processor seconds until now: of two processes by their numbers, and of the kernel's threads."""
    return processor_s(client), processor_s(node), kernel_processor_s()


def name_of(size: int) -> str:
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size} B"
