#!/usr/bin/env python3
"""Measure a cluster of irdmafs beside GlusterFS: two nodes, two replicas, on this machine.

Both have their servers and clients on hosts of the same network (namespaces with links of their own)
and their data in tmpfs. One client writes, another one, which has not seen the files, reads. The
systems are measured in turn in every round; run it on a quiet machine, as root.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
from _bench.places import signals_end_the_block
from _cluster import measures
from _cluster.cluster import Cluster, Plan
from _cluster.gluster import Gluster
from _cluster.measures import MIB, Files, WrongData
from _cluster.network import CommandFailed, NoNamespaces, make_network
from _cluster.table import Rates, Row
from rich.console import Console

from irdmafs.config import MountError, parse_size

OURS = "irdmafs"
PEERS = ("gluster", "none")
ROWS = (
    Row("write", "write a large file", "MiB/s", 3),
    Row("read", "read it, cold, on another host", "MiB/s", 3),
    Row("small-write", "write 64 KiB files", "files/s", 5),
    Row("small-read", "read them, cold, on another host", "files/s", 5),
    Row("create", "create empty files", "files/s", 5),
    Row("stat", "stat them", "files/s", 5),
    Row("list", "ls -l", "entries/s", 5),
    Row("unlink", "unlink them", "files/s", 5),
)


@dataclass(frozen=True, slots=True)
class Scale:
    size: int
    small: int
    names: int


@dataclass(frozen=True, slots=True)
class System:
    """What is measured: a directory as one client sees it, and as another one does."""

    name: str
    writer: Path
    reader: Path


def start_irdmafs(stack: contextlib.ExitStack, scale: Scale) -> System:
    room = room_for(scale)
    plan = Plan(
        nodes=2,
        mounts=2,
        replicas=2,
        buckets=64,
        lease_ttl_s=5,
        store_bytes=room,
        cache_bytes=room,
        namespaces=True,
    )
    cluster = stack.enter_context(Cluster(plan))
    return System(OURS, cluster.mounts[0].path, cluster.mounts[1].path)


def start_gluster(stack: contextlib.ExitStack, scale: Scale) -> System:
    network = stack.enter_context(make_network(True))
    hosts = network.add_hosts(["server0", "server1", "client0", "client1"])
    parent = tempfile.mkdtemp(prefix=f"irdmafs-cluster-{os.getpid()}-", dir="/dev/shm")
    stack.callback(shutil.rmtree, parent, ignore_errors=True)
    gluster = Gluster(hosts[:2], hosts[2:], Path(parent) / "gluster", room_for(scale))
    stack.enter_context(gluster)
    return System("gluster", *gluster.mounts)


def room_for(scale: Scale) -> int:
    """Bytes for the files of a round and what still goes away of those of the round before."""
    return 2 * (scale.size + scale.small * measures.SMALL_FILE) + 256 * MIB


def measure(system: System, scale: Scale, round_: int, files: Files, rates: Rates) -> None:
    """One round. Raises OSError, WrongData."""

    def add(row: str, amount: float, seconds: float) -> None:
        rates.add(system.name, row, round_, amount / seconds)

    folder = f"round{round_}"
    here, there = system.writer / folder, system.reader / folder
    here.mkdir()
    # The copies of both replicas, the writer's and the reader's.
    measures.make_real(4 * scale.size)
    add("write", scale.size / MIB, files.write(here / "large", scale.size, round_))
    add("read", scale.size / MIB, files.read(there / "large", scale.size, round_))
    os.unlink(here / "large")
    (here / "small").mkdir()
    measures.make_real(4 * scale.small * measures.SMALL_FILE)
    add("small-write", scale.small, files.write_small(here / "small", scale.small, round_))
    add("small-read", scale.small, files.read_small(there / "small", scale.small, round_))
    shutil.rmtree(here / "small")
    (here / "names").mkdir()
    steps: tuple[tuple[str, Callable[[Path, int], float]], ...] = (
        ("create", measures.create_names),
        ("stat", measures.stat_names),
        ("list", measures.list_names),
        ("unlink", measures.unlink_names),
    )
    for row, step in steps:
        add(row, scale.names, step(here / "names", scale.names))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--peer", type=click.Choice(PEERS), default="gluster", show_default=True)
@click.option("--only", is_flag=True, help="The peer alone.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--size", default="1G", show_default=True, help="Of the large file.")
@click.option("--quick", is_flag=True, help="64 MiB and a fifth of the files: a look.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--assert", "assert_", is_flag=True, help="Fail if a bar is missed.")
def main(
    peer: str,
    only: bool,
    rounds: int,
    size: str,
    quick: bool,
    json_file: Path | None,
    assert_: bool,
) -> None:
    """Measure two irdmafs store nodes beside two GlusterFS bricks, replica 2, on this machine."""
    try:
        scale = Scale(64 * MIB, 200, 400) if quick else Scale(parse_size(size), 1000, 2000)
    except MountError as error:
        raise click.BadParameter(str(error)) from None
    if scale.size % MIB:
        raise click.BadParameter("--size must be a multiple of 1 MiB")
    rates = Rates(ROWS, ours=OURS, base=peer)
    starts = [] if only else [start_irdmafs]
    if peer == "gluster":
        starts.append(start_gluster)
    files = Files()
    gc.disable()
    try:
        with signals_end_the_block(), contextlib.ExitStack() as stack:
            systems = [start(stack, scale) for start in starts]
            for round_ in range(rounds):
                # Each begins every other round.
                for system in systems[:: -1 if round_ % 2 else 1]:
                    print(f"round {round_ + 1}/{rounds}: {system.name}", file=sys.stderr)
                    measure(system, scale, round_, files, rates)
    except (CommandFailed, NoNamespaces, OSError, WrongData) as error:
        raise click.ClickException(str(error)) from None
    console = Console(width=max(Console().width, 120))
    rates.show(console)
    if json_file is not None:
        rates.save(json_file)
    sys.exit(1 if assert_ and rates.missed() else 0)


if __name__ == "__main__":
    main()
