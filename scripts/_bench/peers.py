"""A cluster of irdmafs beside GlusterFS: two nodes, two replicas, on this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import click
from harness.cluster import Cluster, Plan
from harness.network import make_network
from harness.scratch import scratch_directory

from . import files
from .command import SETTINGS, Size, asserting, finish, json_file, measuring, only, say, turned
from .files import MIB, SMALL_FILE, Files
from .gluster import Gluster
from .machine import make_real
from .tables import Rates, Row

OURS = "irdmafs"
PEER = "gluster"
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

    @property
    def room(self) -> int:
        """Bytes for the files of a round and what still goes away of those of the round before."""
        return 2 * (self.size + self.small * SMALL_FILE) + 256 * MIB


@dataclass(frozen=True, slots=True)
class System:
    """What is measured: a directory as one client sees it, and as another one does."""

    name: str
    writer: Path
    reader: Path


def start_irdmafs(stack: contextlib.ExitStack, scale: Scale) -> System:
    plan = Plan(
        nodes=2,
        mounts=2,
        replicas=2,
        buckets=64,
        lease_ttl_s=5,
        store_bytes=scale.room,
        cache_bytes=scale.room,
        namespaces=True,
    )
    cluster = stack.enter_context(Cluster(plan))
    return System(OURS, cluster.mounts[0].path, cluster.mounts[1].path)


def start_gluster(stack: contextlib.ExitStack, scale: Scale) -> System:
    network = stack.enter_context(make_network(True))
    hosts = network.add_hosts(["server0", "server1", "client0", "client1"])
    parent = scratch_directory()
    stack.callback(shutil.rmtree, parent, ignore_errors=True)
    gluster = Gluster(hosts[:2], hosts[2:], parent / "gluster", scale.room)
    stack.enter_context(gluster)
    return System(PEER, *gluster.mounts)


STARTS = {OURS: start_irdmafs, PEER: start_gluster}


def measure(system: System, scale: Scale, round_: int, through: Files, rates: Rates) -> None:
    """One round. Raises OSError, WrongData."""

    def add(row: str, amount: float, seconds: float) -> None:
        rates.add(system.name, row, round_, amount / seconds)

    folder = f"round{round_}"
    here, there = system.writer / folder, system.reader / folder
    here.mkdir()
    # The copies of both replicas, the writer's and the reader's.
    make_real(4 * scale.size)
    add("write", scale.size / MIB, through.write(here / "large", scale.size, round_).whole)
    add("read", scale.size / MIB, through.read(there / "large", scale.size, round_).whole)
    os.unlink(here / "large")
    count = scale.small
    (here / "small").mkdir()
    make_real(4 * count * SMALL_FILE)
    add("small-write", count, through.write_small(files.paths_in(here / "small", count), round_))
    add("small-read", count, through.read_small(files.paths_in(there / "small", count), round_))
    shutil.rmtree(here / "small")
    (here / "names").mkdir()
    names = files.paths_in(here / "names", scale.names)
    add("create", scale.names, files.create_names(names))
    add("stat", scale.names, files.stat_names(names))
    add("list", scale.names, files.list_names(here / "names", scale.names))
    add("unlink", scale.names, files.unlink_names(names))


@click.command(context_settings=SETTINGS)
@only("system", tuple(STARTS), "SYSTEM,...")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--size", type=Size(MIB), default="1G", show_default=True, help="Of the large file.")
@click.option("--quick", is_flag=True, help="64 MiB and a fifth of the files: a look.")
@json_file
@asserting
def peers(
    only: tuple[str, ...],
    rounds: int,
    size: int,
    quick: bool,
    json_file: Path | None,
    assert_: bool,
) -> None:
    """Measure two irdmafs store nodes beside two GlusterFS bricks, replica 2, on this machine.

    Both have their servers and clients on hosts of the same network (namespaces with links of their own)
    and their data in tmpfs. One client writes, another one, which has not seen the files, reads. The
    systems are measured in turn in every round; run it as root.
    """
    scale = Scale(64 * MIB, 200, 400) if quick else Scale(size, 1000, 2000)
    rates = Rates(ROWS, OURS, PEER)
    through = Files()
    with measuring(), contextlib.ExitStack() as stack:
        systems = [STARTS[name](stack, scale) for name in only]
        for round_ in range(rounds):
            for system in turned(systems, round_):
                say(system.name, round_, rounds)
                measure(system, scale, round_, through, rates)
    finish(rates, 120, json_file, assert_)
