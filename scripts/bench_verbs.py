#!/usr/bin/env python3
"""Measure what the verbs transport makes of its device, beside perftest, TCP and gRPC.

On a machine without RDMA it runs itself in a guest that has soft-RoCE (scripts/rdma_guest), else natively.
A cluster of one store node and two mounts, one replica, and a process that uses the node's device as a
mount does share the host; all are processes of their own. Every round measures the contenders one after
the other, beginning with another each time; shown are medians over the rounds, lowest and highest, and
the median of the ratios within a round. Versions of a size follow each other: the steady state.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click
import trio
from _bench.places import signals_end_the_block
from _cluster.cluster import Cluster, Plan
from _cluster.measures import MIB, WrongData
from _cluster.network import CommandFailed
from _cluster.table import Rates
from _verbs import echo, perftest
from _verbs.bench import KIB, TCP, VERBS, Bench, GrpcEnds, Results, Scale
from _verbs.perftest import PerftestFailed
from _verbs.worker import Worker, WorkerFailed, packed, revision_of, work
from irdmafs.backend.placement import replicas_of
from irdmafs.backend.transport.verbs import devices
from rich.console import Console

from irdmafs.config import MountError, parse_size

IN_GUEST = "IRDMAFS_GUEST"
GUEST_TOOL = Path(__file__).resolve().parent / "rdma_guest"
# For gRPC, which allocates every message: memory that was freed is used again, and not mapped anew.
KEEPS_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
}
PARTS = (
    "bandwidth", "at_once", "posix", "buffer", "latency", "alternatives", "cpu", "registration", "loop",
)  # fmt: skip

FULL = Scale(
    rounds=5,
    sizes=(64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB),
    all_sizes=(
        4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB,
    ),
    volume=256 * MIB,
    cpu_size=64 * MIB,
    repeats_max=100,
    asks=1000,
    tensors=1000,
    versions=200,
    version_bytes=100 * MIB,
    chunk=2 * MIB,
)  # fmt: skip
QUICK = Scale(
    rounds=2,
    sizes=(MIB, 4 * MIB),
    all_sizes=(4 * KIB, MIB, 16 * MIB),
    volume=16 * MIB,
    cpu_size=16 * MIB,
    repeats_max=8,
    asks=50,
    tensors=200,
    versions=10,
    version_bytes=8 * MIB,
    chunk=2 * MIB,
)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _grpc(description: dict[str, Any]) -> Iterator[GrpcEnds]:
    with contextlib.ExitStack() as stack:
        server, port = stack.enter_context(
            _grpc_server(description["address"], description["place"], description["chunk"])
        )
        plan = description | {"grpc_port": port}
        client = stack.enter_context(Worker(__file__, "grpc", plan, KEEPS_MEMORY))
        yield GrpcEnds(client, server.pid)


@contextlib.contextmanager
def _grpc_server(
    address: str, parent: str, chunk: int
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    place = tempfile.mkdtemp(prefix="grpc-", dir=parent)
    server = subprocess.Popen(
        [sys.executable, __file__, "grpc-server", address, place, str(chunk)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | KEEPS_MEMORY,
    )  # fmt: skip
    try:
        assert server.stdout is not None and server.stdin is not None
        answer = server.stdout.readline()
        if not answer:
            raise WorkerFailed("the gRPC server did not start")
        yield server, int(answer)
    finally:
        for pipe in (server.stdin, server.stdout):
            assert pipe is not None
            pipe.close()
        server.kill()
        server.wait()
        shutil.rmtree(place)


@contextlib.contextmanager
def prepared(scale: Scale, parts: Sequence[str]) -> Iterator[Bench]:
    """The cluster, and whoever the parts need to ask it."""
    way = perftest.find_way()
    if {"bandwidth", "at_once", "posix", "buffer", "latency"} & set(parts):
        perftest.need()
    needs_grpc = bool({"alternatives", "cpu"} & set(parts))
    if needs_grpc and importlib.util.find_spec("grpc") is None:
        raise WorkerFailed("grpcio is not installed: scripts/install test verbs bench")
    metrics_port = _free_port()
    largest = max(*scale.sizes, *scale.all_sizes, scale.version_bytes)
    # Of each of two workers the version that it keeps, those that come, and those that are being freed.
    room = 5 * largest + 256 * MIB
    plan = Plan(
        nodes=1, mounts=2, replicas=1, buckets=2, namespaces=False, lease_ttl_s=60,
        store_bytes=room, cache_bytes=room,
        node_config={"listen": way.address, "metrics_port": metrics_port},
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(Cluster(plan))
        (node,) = cluster.nodes
        # The cluster makes a group when something is first written to it.
        (cluster.mounts[0].path / "first").write_bytes(bytes(MIB))
        group = min(group for group in cluster.groups() if replicas_of(group) == 1)
        # One for all, as memory is short in a guest.
        place = cluster.directory / "workers"
        place.mkdir()
        description: dict[str, Any] = {
            "node": node.node_id,
            "node_address": packed(cluster.live_nodes()[node.node_id]),
            "config": str(cluster.mounts[0].config),
            "group": group,
            "revision": trio.run(revision_of, cluster.mounts[0].config, group),
            "address": way.address,
            "place": str(place),
            "chunk": scale.chunk,
        }
        kinds = {VERBS: "verbs"} | ({TCP: "tcp"} if needs_grpc else {})
        workers = {
            name: stack.enter_context(Worker(__file__, kind, description))
            for name, kind in kinds.items()
        }
        start_grpc = partial(_grpc, description)
        yield Bench(scale, way, cluster, metrics_port, workers, start_grpc, __file__)


def go_on_in_guest(arguments: Sequence[str], memory: str) -> NoReturn:
    command = [str(GUEST_TOOL), "run", "--memory", memory, "--", sys.executable, __file__]
    os.execv(command[0], [*command, *arguments])


def describe_host() -> str:
    count = len(os.sched_getaffinity(0))
    where = "a guest with soft-RoCE" if IN_GUEST in os.environ else "this machine"
    shared = "one processor, which all processes share" if count == 1 else f"{count} processors"
    rdma = "; ".join(devices.describe(device) for device in devices.find())
    return f"{where}: {os.uname().release}, {shared}; {rdma}"


def _sizes(_context: click.Context, _option: click.Parameter, text: str | None) -> Any:
    try:
        return text and tuple(parse_size(word) for word in text.split(","))
    except MountError as error:
        raise click.BadParameter(str(error)) from None


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rounds", type=click.IntRange(1), help="[default: 5; quick: 2]")
@click.option("--only", default=",".join(PARTS), show_default=True, metavar="PART,...")
@click.option("--quick", is_flag=True, help="Few rounds and sizes: less than a minute.")
@click.option("--sizes", callback=_sizes, metavar="SIZE,...", help="Such as 1M,64M, for all parts.")
@click.option("--versions", type=click.IntRange(1), help="Of the loop  [default: 200; quick: 10]")
@click.option("--version-size", callback=_sizes, help="Of the loop  [default: 100M; quick: 8M]")
@click.option("--memory", default="4G", show_default=True, help="Of the guest.")
@click.option("--json", "as_json", is_flag=True, help="Print every figure of every round.")
@click.option("--assert", "assert_", is_flag=True, help="Fail if a bar is missed, too.")
@click.pass_context
def main(
    context: click.Context,
    rounds: int | None,
    only: str,
    quick: bool,
    sizes: tuple[int, ...] | None,
    versions: int | None,
    version_size: tuple[int, ...] | None,
    memory: str,
    as_json: bool,
    assert_: bool,
) -> None:
    """Measure the verbs transport beside perftest, TCP and gRPC."""
    if context.invoked_subcommand is not None:
        return
    parts = [part for part in PARTS if part in only.split(",")]
    if unknown := set(only.split(",")) - set(PARTS):
        raise click.BadParameter(f"no part {unknown.pop()!r}; there are {', '.join(PARTS)}")
    if not devices.find() and IN_GUEST not in os.environ:
        go_on_in_guest(sys.argv[1:], memory)
    scale = _scale(QUICK if quick else FULL, rounds, sizes, versions, version_size)
    gc.disable()
    results = Results()
    failure = ""
    try:
        with signals_end_the_block(), prepared(scale, parts) as bench:
            results = bench.results
            bench.run(parts)
    except (CommandFailed, PerftestFailed, WorkerFailed, OSError, WrongData) as error:
        failure = str(error)
    if as_json:
        print(json.dumps({"host": describe_host(), "missed": results.missed,
                          "wrong": results.wrong, **results.figures}))  # fmt: skip
    elif results.shown:
        _show(results, rounds=scale.rounds)
    if failure:
        raise click.ClickException(failure)
    sys.exit(1 if results.wrong or (assert_ and results.missed) else 0)


def _scale(
    scale: Scale,
    rounds: int | None,
    sizes: tuple[int, ...] | None,
    versions: int | None,
    version_size: tuple[int, ...] | None,
) -> Scale:
    if rounds is not None:
        scale = replace(scale, rounds=rounds)
    if sizes is not None:
        scale = replace(scale, sizes=sizes, all_sizes=sizes, cpu_size=max(sizes))
    if versions is not None:
        scale = replace(scale, versions=versions)
    if version_size is not None:
        scale = replace(scale, version_bytes=version_size[0])
    return scale


def _show(results: Results, rounds: int) -> None:
    console = Console(width=max(Console().width, 160))
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
    for text in results.wrong:
        console.print(f"WRONG: {text}", markup=False)


@main.command("worker", hidden=True)
@click.argument("kind")
@click.argument("plan")
def worker_command(kind: str, plan: str) -> None:
    trio.run(work, kind, json.loads(plan))


@main.command("grpc-server", hidden=True)
@click.argument("address")
@click.argument("place", type=click.Path(path_type=Path))
@click.argument("chunk", type=int)
def grpc_server_command(address: str, place: Path, chunk: int) -> None:
    from _verbs import grpc_ends

    grpc_ends.serve(address, place, chunk)


@main.command("echo", hidden=True)
@click.argument("kind")
@click.argument("address")
def echo_command(kind: str, address: str) -> None:
    echo.serve(kind, address)


if __name__ == "__main__":
    main()
