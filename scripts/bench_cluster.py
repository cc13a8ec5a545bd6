#!/usr/bin/env python3
"""Measure what a cluster makes of its network: hosts as namespaces on this machine, as root.

Beside it, in the same round, stand iperf3 with its best number of streams (storing what it receives
in the same kind of tmpfs), the rate that a link is shaped to, and embedded mode. Run it on a quiet
machine.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
from _bench.places import Unavailable, mounted, signals_end_the_block
from _cluster.cluster import Cluster, Plan
from _cluster.measures import MIB, Files, WrongData, make_real
from _cluster.network import CommandFailed, Host, NoNamespaces, run
from _cluster.parts import mount_tmpfs
from _cluster.table import Rates, Row
from rich.console import Console

from irdmafs.config import MountError, parse_size

OURS = "irdmafs"
BASE = "base"
PLAIN = "iperf3"
STREAMS = (1, 2, 4)
GIGABIT = 1_000_000_000
SHAPED = {"1g": 1 * GIGABIT, "10g": 10 * GIGABIT}
ROWS = (
    Row("read", "read what another host published; base: iperf3 -F", "MiB/s", 0.90),
    Row("fetch", "  until open() returns", "MiB/s"),
    Row("write", "write, 2 replicas; base: iperf3 -F", "MiB/s", 0.80),
    Row("close", "  close() alone", "MiB/s"),
    Row("read-10g", "read, 10 Gbit/s; base: that rate", "MiB/s", 0.97),
    Row("fetch-10g", "  until open() returns", "MiB/s"),
    Row("write-10g", "write, 2 replicas, 10 Gbit/s", "MiB/s", 0.97),
    Row("close-10g", "  close() alone", "MiB/s"),
    Row("read-1g", "read, 1 Gbit/s", "MiB/s", 0.97),
    Row("fetch-1g", "  until open() returns", "MiB/s"),
    Row("write-1g", "write, 2 replicas, 1 Gbit/s", "MiB/s", 0.97),
    Row("close-1g", "  close() alone", "MiB/s"),
    Row("local-write", "write, store on the same host; base: embedded", "MiB/s", 0.90),
    Row("local-read", "read, store on the same host; base: embedded", "MiB/s", 0.90),
)
PARTS = ("link", "shaped", "local")


class Bench:
    """`size`: bytes of every file."""

    def __init__(self, size: int, rates: Rates) -> None:
        self._size = size
        self._rates = rates
        self._files = Files()
        self._number = 0

    def _add(self, column: str, row: str, round_: int, seconds: float) -> None:
        self._rates.add(column, row, round_, self._size / MIB / seconds)

    def _add_both_ends(self, cluster: Cluster, round_: int, suffix: str = "") -> None:
        """Write on one host, read on the other."""
        one, other = (mount.path / "large" for mount in cluster.mounts)
        self._number += 1
        # Both replicas, the writer's copy and the reader's.
        make_real(4 * self._size)
        whole, closing = self._files.write_timed(one, self._size, self._number)
        self._add(OURS, f"write{suffix}", round_, whole)
        opening, reading = self._files.read_timed(other, self._size, self._number)
        self._add(OURS, f"read{suffix}", round_, reading)
        self._add(OURS, f"close{suffix}", round_, closing)
        self._add(OURS, f"fetch{suffix}", round_, opening)
        os.unlink(one)

    def link(self, cluster: Cluster, memory: Path, round_: int) -> None:
        """At the speed of the link."""
        sender, receiver = (mount.host for mount in cluster.mounts)
        make_real(self._size)
        stored = max(iperf3(sender, receiver, self._size, n, memory / "sink") for n in STREAMS)
        plain = max(iperf3(sender, receiver, self._size, n) for n in STREAMS)
        for row in ("read", "write", "fetch", "close"):
            self._rates.add(BASE, row, round_, stored / MIB)
            self._rates.add(PLAIN, row, round_, plain / MIB)
        self._add_both_ends(cluster, round_)

    def shaped(self, cluster: Cluster, memory: Path, round_: int) -> None:
        """With every host's link limited, each way; what iperf3 stores over it is shown, too."""
        sender, receiver = (mount.host for mount in cluster.mounts)
        for name, bits_per_s in SHAPED.items():
            parts = [*cluster.nodes, *cluster.mounts]
            for part in parts:
                cluster.slow_down(part, bits_per_s)
            make_real(self._size)
            stored = max(
                iperf3(sender, receiver, self._size, n, memory / "sink") for n in STREAMS[1:]
            )
            for row in ("read", "fetch", "write", "close"):
                self._rates.add(BASE, f"{row}-{name}", round_, bits_per_s / 8 / MIB)
                self._rates.add(PLAIN, f"{row}-{name}", round_, stored / MIB)
            self._add_both_ends(cluster, round_, f"-{name}")
            for part in parts:
                cluster.slow_down(part, None)

    def local(self, cluster: Cluster, embedded: Path, round_: int) -> None:
        """A mount beside the only store node, and an embedded mount."""
        one, other = (mount.path for mount in cluster.mounts)
        places = ((OURS, one, other), (BASE, embedded, embedded))
        for column, writer, reader in places[:: -1 if round_ % 2 else 1]:
            self._number += 1
            make_real(self._size)
            seconds = self._files.write(writer / "large", self._size, self._number)
            self._add(column, "local-write", round_, seconds)
            seconds = self._files.read(reader / "large", self._size, self._number)
            self._add(column, "local-read", round_, seconds)
            os.unlink(writer / "large")


def iperf3(
    sender: Host, receiver: Host, size: int, streams: int, sink: Path | None = None
) -> float:
    """Bytes per second that arrive. Raises CommandFailed."""
    store = () if sink is None else ("-F", str(sink))
    server = subprocess.Popen(
        [*receiver.launcher, "iperf3", "-s", "-1", "--forceflush", *store],
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
    )
    try:
        assert server.stdout is not None
        # It says that it listens on its second line.
        while "Server listening" not in server.stdout.readline():
            if server.poll() is not None:
                raise CommandFailed("iperf3 -s does not start")
        answer = run(
            *(*sender.launcher, "iperf3", "-c", receiver.address, "-J"),
            *("-n", str(size), "-P", str(streams)),
        )
        found = json.loads(answer)["end"]["sum_received"]
        return float(found["bits_per_second"]) / 8
    finally:
        server.kill()
        server.wait()
        server.stdout.close() if server.stdout else None
        if sink is not None:
            sink.unlink(missing_ok=True)


@contextlib.contextmanager
def linked_cluster(size: int) -> Iterator[tuple[Cluster, Path]]:
    """Two nodes, two mounts, and a tmpfs of the kind that they use."""
    room = 3 * size + 256 * MIB
    plan = Plan(
        nodes=2,
        mounts=2,
        replicas=2,
        lease_ttl_s=10,
        store_bytes=room,
        cache_bytes=room,
        namespaces=True,
    )
    with Cluster(plan) as cluster:
        memory = cluster.directory / "iperf3"
        mount_tmpfs(memory, room)
        try:
            yield cluster, memory
        finally:
            run("umount", "-l", memory)


@contextlib.contextmanager
def local_cluster(size: int) -> Iterator[tuple[Cluster, Path]]:
    """A node and two mounts on one host, and an embedded mount."""
    room = 3 * size + 256 * MIB
    plan = Plan(
        nodes=1,
        mounts=2,
        replicas=1,
        lease_ttl_s=10,
        store_bytes=room,
        cache_bytes=room,
        beside={0: 0, 1: 0},
        namespaces=True,
    )
    with Cluster(plan) as cluster:
        memory = cluster.directory / "embedded"
        mount_tmpfs(memory, room)
        directory = cluster.directory
        try:
            with mounted("kernel", memory / "store", directory / "here", directory / "log") as made:
                yield cluster, made.mountpoint
        finally:
            run("umount", "-l", memory)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--size", default="1G", show_default=True, help="Of the files.")
@click.option("--only", default=",".join(PARTS), show_default=True, metavar="PART,...")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--assert", "assert_", is_flag=True, help="Fail if a bar is missed.")
def main(rounds: int, size: str, only: str, json_file: Path | None, assert_: bool) -> None:
    """Measure reading and writing between hosts beside iperf3, shaped links and embedded mode."""
    parts = [part for part in only.split(",") if part]
    for part in parts:
        if part not in PARTS:
            raise click.BadParameter(f"no part {part!r}; there are {', '.join(PARTS)}")
    try:
        bytes_ = parse_size(size)
    except MountError as error:
        raise click.BadParameter(str(error)) from None
    if bytes_ % MIB:
        raise click.BadParameter("--size must be a multiple of 1 MiB")
    if {"link", "shaped"} & set(parts) and shutil.which("iperf3") is None:
        raise click.ClickException("iperf3 is missing: apt install iperf3")
    keys = tuple(row for row in ROWS if part_of(row) in parts)
    rates = Rates(keys, ours=OURS, base=BASE)
    bench = Bench(bytes_, rates)
    gc.disable()
    try:
        with signals_end_the_block():
            if {"link", "shaped"} & set(parts):
                with linked_cluster(bytes_) as (cluster, memory):
                    for round_ in range(rounds):
                        print(f"round {round_ + 1}/{rounds}: between hosts", file=sys.stderr)
                        if "link" in parts:
                            bench.link(cluster, memory, round_)
                        if "shaped" in parts:
                            bench.shaped(cluster, memory, round_)
            if "local" in parts:
                with local_cluster(bytes_) as (cluster, embedded):
                    for round_ in range(rounds):
                        print(f"round {round_ + 1}/{rounds}: on one host", file=sys.stderr)
                        bench.local(cluster, embedded, round_)
    except (CommandFailed, NoNamespaces, Unavailable, OSError, WrongData) as error:
        raise click.ClickException(str(error)) from None
    rates.show(Console(width=max(Console().width, 150)))
    if json_file is not None:
        rates.save(json_file)
    sys.exit(1 if assert_ and rates.missed() else 0)


def part_of(row: Row) -> str:
    if row.key.startswith("local"):
        return "local"
    return "shaped" if row.key.endswith("g") else "link"


if __name__ == "__main__":
    main()
