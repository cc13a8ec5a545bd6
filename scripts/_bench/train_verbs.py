"""A synchronous training step by RDMA beside the same one over TCP, and what it registers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from harness.cluster import MIB, Cluster, Plan
from harness.parts import ClusterMount
from harness.roce import find_way
from harness.training import Counts, counts

from .command import SETTINGS, json_file, measuring, say, turned, wide_console
from .tables import Rates, Row
from .train import begin_sums, reducing, working
from .workers import Worker, slowest

RDMA, TCP = "RDMA", "TCP"
LEASE_S = 20
# Versions and pushes of the first steps are new files everywhere.
FIRST_STEPS = 3
ROWS = (
    Row("step", "gradients reduced and back", "MB/s"),
    Row("node", "registrations per step on nodes", ""),
    Row("mount", "registrations per step on mounts", ""),
    Row("made", "files made per step on nodes", ""),
    Row("moved", "moved by mounts, per byte of the model", ""),
    Row("rdma", "of these by RDMA", ""),
    Row("staged", "of these through registered memory", ""),
    Row("fallbacks", "transfers by TCP that RDMA could not do", ""),
)


@dataclass(frozen=True, slots=True)
class NodeCounts:
    registrations: int
    made: int


class Run:
    """A training on a cluster whose nodes and mounts use RDMA, or do not."""

    def __init__(
        self,
        column: str,
        cluster: Cluster,
        mounts: Sequence[ClusterMount],
        workers: Sequence[Worker],
    ) -> None:
        self.column = column
        self._cluster = cluster
        self._mounts = mounts
        self._workers = workers

    def step(self) -> float:
        """Return how long it took, in seconds."""
        return slowest(self._workers, "step")

    def on_mounts(self) -> Counts:
        return Counts(*map(sum, zip(*map(counts, self._mounts), strict=True)))

    def on_nodes(self) -> NodeCounts:
        nodes = self._cluster.status()["nodes"]
        return NodeCounts(
            sum(node["rdma_registrations"] for node in nodes),
            sum(node["created_files"] for node in nodes),
        )

    def measure(self, rates: Rates, turn: int, size: int) -> None:
        mounts, nodes = self.on_mounts(), self.on_nodes()
        seconds = self.step()
        after = self.on_nodes()
        found = self.on_mounts().since(mounts)
        for row, value in (
            ("step", size / seconds / 1e6),
            ("node", after.registrations - nodes.registrations),
            ("mount", found.registrations),
            ("made", after.made - nodes.made),
            ("moved", found.moved_bytes / size),
            ("rdma", found.rdma_bytes / size),
            ("staged", found.staged_bytes / size),
            ("fallbacks", found.fallbacks),
        ):
            rates.add(self.column, row, turn, value)


@contextlib.contextmanager
def trained(column: str, size: int, hosts: int, apart: bool) -> Iterator[Run]:
    """A training of as many workers as store nodes, with a reducer on the host of each node; the workers
    are there, too, or `apart`."""
    way = "require" if column == RDMA else "off"
    plan = Plan(
        nodes=hosts, mounts=0, namespaces=False, replicas=1, lease_ttl_s=LEASE_S,
        node_config={"listen": find_way().address},
        store_bytes=12 * size, cache_bytes=6 * size,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(Cluster(plan))
        reduced_at = [cluster.add_mount("--rdma", way, beside=node) for node in cluster.nodes]
        working_at = reduced_at
        if apart:
            working_at = [cluster.add_mount("--rdma", way) for _ in range(hosts)]
        places = [mount.path / "run" for mount in working_at]
        begin_sums(places[0], size, hosts)
        for mount in reduced_at:
            stack.enter_context(reducing(mount.path / "run"))
        workers = stack.enter_context(working(places, "_bench.train:work_by_files"))
        yield Run(column, cluster, cluster.mounts, workers)


@click.command(context_settings=SETTINGS)
@click.option(
    "--size", "size_mib", default=100, show_default=True, help="MiB of the model, in fp32."
)
@click.option("--hosts", default=2, show_default=True, help="Store nodes, and as many workers.")
@click.option("--rounds", default=7, show_default=True)
@click.option("--apart", is_flag=True, help="Workers on other hosts than store nodes.")
@json_file
def train_verbs(
    size_mib: int, hosts: int, rounds: int, apart: bool, json_file: Path | None
) -> None:
    """Measure synchronous steps by RDMA and over TCP, in turns, and count what the steps register.

    To be run where there is an RDMA device, or in a guest: scripts/rdma_guest run --memory 8G --
    scripts/bench train-verbs
    """
    rates = Rates(ROWS, RDMA, TCP)
    size = size_mib * MIB
    with measuring(), contextlib.ExitStack() as stack:
        runs = [stack.enter_context(trained(each, size, hosts, apart)) for each in (RDMA, TCP)]
        for run in runs:
            for _ in range(FIRST_STEPS):
                run.step()
        for turn in range(rounds):
            say("steps", turn, rounds)
            for run in turned(runs, turn):
                run.measure(rates, turn, size)
    rates.show(wide_console(120))
    if json_file is not None:
        rates.save(json_file)
