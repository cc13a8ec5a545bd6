"""Mounts and store nodes on hosts of a network, beside iperf3, shaped links and embedded mode."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from harness.cluster import Cluster, Plan

from .command import SETTINGS, Size, asserting, finish, json_file, measuring, only, say, turned
from .files import MIB, Files
from .iperf import iperf3, need_iperf3
from .machine import huge_page_tmpfs, make_real
from .mounts import mounted
from .tables import Rates, Row

OURS = "irdmafs"
BASE = "base"
PLAIN = "iperf3"
STREAMS = (1, 2, 4)
GIGABIT = 1_000_000_000
SHAPED = {"1g": 1 * GIGABIT, "10g": 10 * GIGABIT}
BETWEEN_HOSTS = ("read", "fetch", "write", "close")


def _between_hosts(suffix: str, base: str, read_bar: float, write_bar: float) -> tuple[Row, ...]:
    return (
        Row(f"read{suffix}", f"read what another host published; base: {base}", "MiB/s", read_bar),
        Row(f"fetch{suffix}", "  until open() returns", "MiB/s"),
        Row(f"write{suffix}", f"write, 2 replicas; base: {base}", "MiB/s", write_bar),
        Row(f"close{suffix}", "  close() alone", "MiB/s"),
    )


ROWS = {
    "link": _between_hosts("", "iperf3 -F", 0.90, 0.80),
    "shaped": (
        *_between_hosts("-10g", "10 Gbit/s", 0.97, 0.97),
        *_between_hosts("-1g", "1 Gbit/s", 0.97, 0.97),
    ),
    "local": (
        Row("local-write", "write, store on the same host; base: embedded", "MiB/s", 0.90),
        Row("local-read", "read, store on the same host; base: embedded", "MiB/s", 0.90),
    ),
}
PARTS = tuple(ROWS)


class Bench:
    """`size`: bytes of every file."""

    def __init__(self, size: int, rates: Rates) -> None:
        self._size = size
        self._rates = rates
        self._files = Files()
        self._number = 0

    def _add(self, column: str, row: str, round_: int, seconds: float) -> None:
        self._rates.add(column, row, round_, self._size / MIB / seconds)

    def _beside(
        self, cluster: Cluster, round_: int, suffix: str, base_bytes_s: float, plain_bytes_s: float
    ) -> None:
        """Write on one host and read on the other; set these rates beside it."""
        for row in BETWEEN_HOSTS:
            self._rates.add(BASE, f"{row}{suffix}", round_, base_bytes_s / MIB)
            self._rates.add(PLAIN, f"{row}{suffix}", round_, plain_bytes_s / MIB)
        one, other = (mount.path / "large" for mount in cluster.mounts)
        self._number += 1
        # Both replicas, the writer's copy and the reader's.
        make_real(4 * self._size)
        written = self._files.write(one, self._size, self._number)
        read = self._files.read(other, self._size, self._number)
        took_s = (read.whole, read.part, written.whole, written.part)
        for row, seconds in zip(BETWEEN_HOSTS, took_s, strict=True):
            self._add(OURS, f"{row}{suffix}", round_, seconds)
        os.unlink(one)

    def _iperf3(self, cluster: Cluster, streams: Sequence[int], sink: Path | None = None) -> float:
        """Return the bytes per second of the best number of streams."""
        sender, receiver = (mount.host for mount in cluster.mounts)
        return max(iperf3(sender, receiver, self._size, count, sink) for count in streams)

    def link(self, cluster: Cluster, memory: Path, round_: int) -> None:
        """At the speed of the link."""
        make_real(self._size)
        stored = self._iperf3(cluster, STREAMS, memory / "sink")
        self._beside(cluster, round_, "", stored, self._iperf3(cluster, STREAMS))

    def shaped(self, cluster: Cluster, memory: Path, round_: int) -> None:
        """With every host's link limited, each way; what iperf3 stores over it is shown, too."""
        parts = [*cluster.nodes, *cluster.mounts]
        for name, bits_per_s in SHAPED.items():
            for part in parts:
                cluster.slow_down(part, bits_per_s)
            make_real(self._size)
            stored = self._iperf3(cluster, STREAMS[1:], memory / "sink")
            self._beside(cluster, round_, f"-{name}", bits_per_s / 8, stored)
            for part in parts:
                cluster.slow_down(part, None)

    def local(self, cluster: Cluster, embedded: Path, round_: int) -> None:
        """A mount beside the only store node, and an embedded mount."""
        one, other = (mount.path for mount in cluster.mounts)
        for column, writer, reader in turned(
            ((OURS, one, other), (BASE, embedded, embedded)), round_
        ):
            self._number += 1
            make_real(self._size)
            took = self._files.write(writer / "large", self._size, self._number)
            self._add(column, "local-write", round_, took.whole)
            took = self._files.read(reader / "large", self._size, self._number)
            self._add(column, "local-read", round_, took.whole)
            os.unlink(writer / "large")


@contextlib.contextmanager
def running(size: int, nodes: int, **plan: Any) -> Iterator[tuple[Cluster, Path]]:
    """Nodes that keep a replica each, two mounts, and a tmpfs of the kind that they use."""
    room = 3 * size + 256 * MIB
    whole = Plan(
        nodes=nodes,
        mounts=2,
        replicas=nodes,
        lease_ttl_s=10,
        store_bytes=room,
        cache_bytes=room,
        namespaces=True,
        **plan,
    )
    with Cluster(whole) as cluster, huge_page_tmpfs(cluster.directory / "beside", room) as memory:
        yield cluster, memory


@click.command(context_settings=SETTINGS)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--size", type=Size(MIB), default="1G", show_default=True, help="Of the files.")
@only("part", PARTS, "PART,...")
@json_file
@asserting
def cluster(
    rounds: int, size: int, only: tuple[str, ...], json_file: Path | None, assert_: bool
) -> None:
    """Measure reading and writing between hosts beside iperf3, shaped links and embedded mode.

    Hosts are namespaces on this machine, as root. Beside the cluster, in the same round, stand iperf3 with
    its best number of streams (storing what it receives in the same kind of tmpfs), the rate that a link is
    shaped to, and embedded mode.
    """
    linked = [part for part in ("link", "shaped") if part in only]
    if linked:
        need_iperf3()
    rates = Rates([row for part in PARTS if part in only for row in ROWS[part]], OURS, BASE)
    bench = Bench(size, rates)
    with measuring():
        if linked:
            with running(size, 2) as (made, memory):
                for round_ in range(rounds):
                    say("between hosts", round_, rounds)
                    for part in linked:
                        getattr(bench, part)(made, memory, round_)
        if "local" in only:
            with (
                running(size, 1, beside={0: 0, 1: 0}) as (made, memory),
                mounted("kernel", memory / "store") as embedded,
            ):
                for round_ in range(rounds):
                    say("on one host", round_, rounds)
                    bench.local(made, embedded.path, round_)
    finish(rates, 150, json_file, assert_)
