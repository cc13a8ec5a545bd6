"""A synchronous training step through files, beside other ways to sum gradients over the same links."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import numpy as np
from harness.cluster import MIB, Cluster, Plan
from harness.network import Host, run

from irdmafs import client
from irdmafs.train import TrainConfig, begin
from irdmafs.train import Worker as TrainWorker

from .command import SETTINGS, asserting, finish, json_file, measuring, say
from .machine import make_real
from .tables import Rates, Row
from .workers import Worker, slowest, tell

OURS, BASE, SERVER = "irdmafs", "gloo", "gRPC"
HOSTS = 4
TENSOR = 4 << 20
PORT = 29511
LEASE_S = 10
# A step makes so many copies of the model: pushes on their way and at the nodes, parameters, pulled files.
_COPIES = 12


def _begin(directory: Path, elements: int, shards: int | None) -> None:
    """Make a directory with a model, in tensors of 16 MiB, and begin to train it by sums of gradients."""
    directory.mkdir()
    rng = np.random.default_rng(1)
    model = {
        f"layer{first // TENSOR:04}": rng.standard_normal(min(TENSOR, elements - first), np.float32)
        for first in range(0, elements, TENSOR)
    }
    with client.open(directory) as store:
        store.publish_state_dict(model)
    begin(directory, TrainConfig(rule="sum", workers=HOSTS, whole_every=0), shards=shards)


def work_by_files(directory: str, name: str) -> None:
    """A worker: for each line it pushes gradients and pulls the next version, and tells the seconds."""
    with TrainWorker(directory, name) as worker:
        out = {key: np.array(value) for key, value in worker.pull().items()}
        gradients = {key: np.full_like(value, 0.001) for key, value in out.items()}
        tell(None)
        for _ in sys.stdin:
            start = time.perf_counter()
            worker.push_pull(gradients, out, timeout_s=120)
            tell([time.perf_counter() - start])


def work_by_gloo(address: str, rank: int, world: int, elements: int) -> None:
    """A rank: for each line it has the gradients reduced, and tells the seconds."""
    import torch
    import torch.distributed as distributed

    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": "eth0"}
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank, world_size=world)
    gradients = torch.full((elements,), 0.001)
    tell(None)
    for _ in sys.stdin:
        start = time.perf_counter()
        distributed.all_reduce(gradients)
        tell([time.perf_counter() - start])
    distributed.destroy_process_group()


def _sent(hosts: Collection[Host]) -> list[int]:
    """Return the bytes that each host has sent."""
    lines = [run(*host.launcher, "grep", "eth0:", "/proc/net/dev") for host in hosts]
    return [int(line.partition(":")[2].split()[8]) for line in lines]


def _measure(
    rates: Rates,
    column: str,
    workers: Sequence[Worker],
    hosts: Collection[Host],
    size: int,
    rounds: int,
) -> None:
    slowest(workers, "step")  # connections, and pages that are touched for the first time
    for turn in range(rounds):
        # Versions are new files; gloo and gRPC use their memory again.
        make_real(_COPIES * size)
        before = _sent(hosts)
        seconds = slowest(workers, "step")
        sent = max(now - then for now, then in zip(_sent(hosts), before, strict=True))
        rates.add(column, "step", turn, size / seconds / 1e6)
        rates.add(column, "bytes", turn, sent / size)


@click.command(context_settings=SETTINGS)
@click.option(
    "--size", "size_mib", default=100, show_default=True, help="MiB of the model, in fp32."
)
@click.option("--rounds", default=5, show_default=True)
@click.option("--mbit", default=1000, show_default=True, help="Mbit/s of each link.")
@click.option("--apart", is_flag=True, help="Store nodes on hosts of their own.")
@click.option("--shards", type=int, help="Of the model  [default: as train init has it].")
@asserting
@json_file
def train(
    size_mib: int,
    rounds: int,
    mbit: int,
    apart: bool,
    shards: int | None,
    assert_: bool,
    json_file: Path | None,
) -> None:
    """Measure synchronous steps of four workers: push gradients, sum them, pull parameters.

    Beside it, the same gradients between the same hosts: torch's all-reduce by gloo (needs torch), and one
    parameter server over gRPC on the first store node's host, which sends the sum when it has all gradients
    (needs grpcio). The rule is a sum, so that all do the same arithmetic.
    """
    rows = (
        Row(
            "step",
            f"gradients of {size_mib} MiB reduced and back",
            "MB/s",
            bar=1.2 if apart else 0.95,
            others={SERVER: 3.0},
        ),
        Row("bytes", "sent by the busiest host, per byte of the model", ""),
    )
    rates = Rates(rows, OURS, BASE)
    size, elements = size_mib * MIB, size_mib * MIB // 4
    with measuring():
        plan = Plan(
            nodes=HOSTS, mounts=HOSTS, replicas=1, lease_ttl_s=LEASE_S, namespaces=True,
            store_bytes=12 * size, cache_bytes=8 * size,
            beside={} if apart else {number: number for number in range(HOSTS)},
        )  # fmt: skip
        with Cluster(plan) as cluster:
            places = [mount.path / "run" for mount in cluster.mounts]
            _begin(places[0], elements, shards)
            working_at = [mount.host for mount in cluster.mounts]
            reduced_at = cluster.mounts
            if apart:
                reduced_at = [cluster.add_mount(beside=node) for node in cluster.nodes]
            hosts = {*working_at, *(node.host for node in cluster.nodes)}
            for host in hosts:
                cluster.network.shape(host, mbit * 1e6)
            with contextlib.ExitStack() as stack:
                for mount in reduced_at:
                    stack.enter_context(_reducing(mount.path / "run"))
                plans = [
                    {"directory": f"{place}", "name": f"w{n}"} for n, place in enumerate(places)
                ]
                workers = stack.enter_context(_working("train:work_by_files", plans, [()] * HOSTS))
                _measure(rates, OURS, workers, hosts, size, rounds)
                say((places[0] / ".train" / "status").read_text())
            if _has("torch", BASE):
                _measure_gloo(rates, working_at, elements, rounds)
            if _has("grpc", SERVER):
                _measure_server(rates, cluster.nodes[0].host, working_at, elements, rounds)
    finish(rates, 180, json_file, assert_)


@contextlib.contextmanager
def _working(
    function: str, plans: Sequence[Mapping[str, object]], launchers: Sequence[tuple[str, ...]]
) -> Iterator[Sequence[Worker]]:
    """Run a function of this package in a process for each plan. They are started at once, as each may wait
    for the others."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(HOSTS) as pool:
        workers = [
            Worker(function, f"_bench.{function}", plan, launcher)
            for plan, launcher in zip(plans, launchers, strict=True)
        ]
        list(pool.map(stack.enter_context, workers))
        yield workers


def _has(module: str, column: str) -> bool:
    found = importlib.util.find_spec(module) is not None
    if not found:
        say(f"{column} is left out: there is no Python module {module}")
    return found


def _measure_gloo(rates: Rates, hosts: Sequence[Host], elements: int, rounds: int) -> None:
    plans = [
        {"address": hosts[0].address, "rank": rank, "world": HOSTS, "elements": elements}
        for rank in range(HOSTS)
    ]
    with _working("train:work_by_gloo", plans, [host.launcher for host in hosts]) as workers:
        _measure(rates, BASE, workers, hosts, elements * 4, rounds)


def _measure_server(
    rates: Rates, at: Host, hosts: Sequence[Host], elements: int, rounds: int
) -> None:
    plan = {"address": at.address, "elements": elements}
    serving = plan | {"world": HOSTS}
    with Worker("gRPC server", "_bench.train_server:serve", serving, at.launcher) as server:
        plans = [plan | {"port": server.ready}] * HOSTS
        launchers = [host.launcher for host in hosts]
        with _working("train_server:work", plans, launchers) as workers:
            _measure(rates, SERVER, workers, {*hosts, at}, elements * 4, rounds)


@contextlib.contextmanager
def _reducing(directory: Path) -> Iterator[None]:
    options = ("--threads", "1")
    command = [sys.executable, "-m", "irdmafs", "train", "reduce", os.fspath(directory), *options]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
