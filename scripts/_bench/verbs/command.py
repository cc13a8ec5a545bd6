"""The verbs transport and its device, beside perftest, TCP and gRPC."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import click
import trio
from harness.cluster import Cluster, Plan
from harness.guest.guest import IN_GUEST
from harness.roce import find_way

from irdmafs.backend.model.placement import replicas_of
from irdmafs.backend.transport.verbs import devices
from irdmafs.backend.transport.verbs.rdma import Choice
from irdmafs.doctor.rdma import check_rdma

from ..command import SETTINGS, Sizes, asserting, measuring, only, wide_console
from ..files import MIB
from ..tables import Rates
from ..workers import PROGRAM, Worker, WorkerFailed
from . import perftest
from .jobs import plan_of
from .parts import KIB, TCP, VERBS, Bench, Ends, Results, Scale

GUEST_TOOL = PROGRAM.with_name("rdma_guest")
# For gRPC, which allocates every message: memory that was freed is used again, and not mapped anew.
KEEPS_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
}
PARTS = ("bandwidth", "posix", "buffer", "latency", "cpu")

FULL = Scale(
    rounds=5,
    sizes=(64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB),
    volume=256 * MIB,
    cpu_size=64 * MIB,
    repeats_max=100,
    asks=1000,
)
QUICK = Scale(
    rounds=2, sizes=(MIB, 4 * MIB), volume=16 * MIB, cpu_size=16 * MIB, repeats_max=8, asks=50
)


@contextlib.contextmanager
def _grpc(address: str, place: Path) -> Iterator[Ends]:
    kept = place / "grpc"
    kept.mkdir()
    functions, plan = "_bench.verbs.grpc_ends", {"address": address, "place": str(kept)}
    with Worker("gRPC server", f"{functions}:serve", plan, (), KEEPS_MEMORY) as server:
        plan |= {"place": str(place), "port": server.ready}
        with Worker("grpc", f"{functions}:work", plan, (), KEEPS_MEMORY) as client:
            yield Ends(client, server.pid)


@contextlib.contextmanager
def prepared(scale: Scale, parts: Sequence[str]) -> Iterator[Bench]:
    """Start the cluster, and the processes that the parts need."""
    way = find_way()
    if set(parts) != {"cpu"}:
        perftest.need()
    if "cpu" in parts and importlib.util.find_spec("grpc") is None:
        raise WorkerFailed("grpcio is not installed: scripts/install test verbs bench")
    largest = max(*scale.sizes, scale.cpu_size)
    # For each of two workers: the version that it keeps, those that arrive, and those that are being freed.
    room = 5 * largest + 256 * MIB
    plan = Plan(
        nodes=1, mounts=2, replicas=1, buckets=2, namespaces=False, lease_ttl_s=60,
        store_bytes=room, cache_bytes=room,
        node_config={"listen": way.address},
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(Cluster(plan))
        # The cluster makes a group when something is first written to it.
        (cluster.mounts[0].path / "first").write_bytes(bytes(MIB))
        group = min(group for group in cluster.groups() if replicas_of(group) == 1)
        # One for all, as memory is short in a guest.
        place = cluster.directory / "workers"
        place.mkdir()
        description = trio.run(plan_of, cluster, group, place)
        kinds = {VERBS: "verbs"} | ({TCP: "tcp"} if "cpu" in parts else {})
        workers = {
            name: stack.enter_context(
                Worker(kind, "_bench.verbs.jobs:work", description | {"kind": kind})
            )
            for name, kind in kinds.items()
        }
        yield Bench(scale, way, cluster, workers, partial(_grpc, way.address, place))


def go_on_in_guest(memory: str) -> NoReturn:
    """Run the same command in a guest."""
    command = [str(GUEST_TOOL), "run", "--memory", memory, "--", sys.executable, str(PROGRAM)]
    os.execv(command[0], [*command, *sys.argv[1:]])


def describe_host() -> str:
    count = len(os.sched_getaffinity(0))
    where = "a guest with soft-RoCE" if IN_GUEST in os.environ else "this machine"
    shared = "one processor, which all processes share" if count == 1 else f"{count} processors"
    rdma = "; ".join(f"{check.name}: {check.found}" for check in check_rdma(Choice()))
    return f"{where}: {os.uname().release}, {shared}; {rdma}"


@click.command(context_settings=SETTINGS)
@click.option("--rounds", type=click.IntRange(1), help="[default: 5; quick: 2]")
@only("part", PARTS, "PART,...")
@click.option("--quick", is_flag=True, help="Few rounds and sizes: less than a minute.")
@click.option("--sizes", type=Sizes(), metavar="SIZE,...", help="Such as 1M,64M, for all parts.")
@click.option("--memory", default="4G", show_default=True, help="Memory of the guest.")
@click.option("--json", "as_json", is_flag=True, help="Print every figure of every round.")
@asserting
def verbs(
    rounds: int | None,
    only: tuple[str, ...],
    quick: bool,
    sizes: tuple[int, ...] | None,
    memory: str,
    as_json: bool,
    assert_: bool,
) -> None:
    """Measure what the verbs transport makes of its device, beside perftest, TCP and gRPC.

    On a machine without RDMA it runs itself in a guest that has soft-RoCE (scripts/rdma_guest), else
    natively. A cluster of one store node and two mounts, one replica, and a process that uses the node's
    device as a mount does share the host; all are processes of their own. Every round measures the
    contenders one after the other, beginning with another each time; shown are medians over the rounds,
    lowest and highest, and the median of the ratios within a round. Versions of a size follow each other:
    the steady state.
    """
    if not devices.find() and IN_GUEST not in os.environ:
        go_on_in_guest(memory)
    scale = QUICK if quick else FULL
    if sizes is not None:
        scale = replace(scale, sizes=sizes, cpu_size=max(sizes))
    scale = replace(scale, rounds=rounds or scale.rounds)
    results = Results()
    failure = None
    try:
        with measuring(), prepared(scale, only) as bench:
            results = bench.results
            bench.run(only)
    except click.ClickException as error:
        failure = error
    # What was measured before a failure is shown, too.
    if as_json:
        told = {"host": describe_host(), "missed": results.missed}
        print(json.dumps(told | results.figures))
    elif results.shown:
        _show(results, scale.rounds)
    if failure is not None:
        raise failure
    sys.exit(1 if assert_ and results.missed else 0)


def _show(results: Results, rounds: int) -> None:
    console = wide_console(160)
    console.print(
        f"{describe_host()}\nmedians of {rounds} rounds (lowest to highest)\n", markup=False
    )
    for shown in results.shown:
        if isinstance(shown, Rates):
            shown.show(console)
        else:
            console.print(shown, markup=not isinstance(shown, str))
    for text in results.missed:
        console.print(f"bar missed: {text}", markup=False)
