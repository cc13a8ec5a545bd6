"""Measured training steps of one to eight workers, beside what the model of a step's time predicts."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
from _step_time import PUBLISHED, Work, step_time
from _step_time import Cluster as Hosts
from harness.cluster import MIB, Cluster, Plan
from rich.text import Text

from .command import SETTINGS, measuring, say, wide_console
from .tables import table
from .train import LEASE_S, begin_sums, reducing, working
from .workers import slowest

SMALL_BYTES = 4096
# The share of data in an Ethernet frame with 1448 bytes in a TCP segment.
GOODPUT = 1448 / 1514


@dataclass(frozen=True)
class Measured:
    """Median seconds of a step of so many workers, with a model of a few KiB and with the whole one."""

    workers: int
    small_s: float
    whole_s: float


def measure(workers: int, size: int, compute_s: float, mbit: float, rounds: int) -> Measured:
    """Measure steps of workers on the hosts of as many store nodes."""
    plan = Plan(
        nodes=workers, mounts=workers, replicas=1, lease_ttl_s=LEASE_S, namespaces=True,
        store_bytes=12 * size + 64 * MIB, cache_bytes=8 * size + 64 * MIB,
        beside={number: number for number in range(workers)},
    )  # fmt: skip
    with Cluster(plan) as cluster:
        for mount in cluster.mounts:
            cluster.network.shape(mount.host, mbit * 1e6)
        places = [mount.path for mount in cluster.mounts]
        small_s, whole_s = (
            statistics.median(_steps([place / name for place in places], bytes_, compute_s, rounds))
            for name, bytes_ in (("small", SMALL_BYTES), ("whole", size))
        )
    return Measured(workers, small_s, whole_s)


def _steps(places: Sequence[Path], size: int, compute_s: float, rounds: int) -> Iterator[float]:
    begin_sums(places[0], size, len(places))
    with contextlib.ExitStack() as stack:
        for place in places:
            stack.enter_context(reducing(place))
        workers = stack.enter_context(
            working(places, "_bench.train:work_by_files", compute_s=compute_s)
        )
        for turn in range(rounds + 1):
            seconds = slowest(workers, "step")
            # In the first one connections are made, and pages touched for the first time.
            if turn:
                yield seconds


def predict(
    found: Sequence[Measured], size: int, compute_s: float, mbit: float
) -> dict[int, float]:
    """Return seconds of a step of the whole model, by number of workers. The machine is described by
    steps of the small model, and of the whole one with the fewest workers."""
    overheads = [one.small_s - compute_s for one in found]
    # Each host spends the same time on each push, and all hosts share the processors of this machine.
    # Errors are weighed beside a whole step.
    spent_s, latencies_s = np.polyfit(
        [one.workers**2 for one in found], overheads, 1, w=[1 / one.whole_s for one in found]
    )
    spent_s, latency_s = max(0.0, float(spent_s)), max(0.0, float(latencies_s)) / PUBLISHED
    link = mbit * 1e6 / 8 * GOODPUT
    whole = Work(compute_s, size, size)

    def hosts(workers: int, reduce_bytes_s: float) -> Hosts:
        return Hosts(
            workers, workers, link, latency_s, colocated=True, reduce_bytes_s=reduce_bytes_s,
            plan_s=workers * spent_s,
        )  # fmt: skip

    few = found[0]
    moving = step_time(whole, hosts(few.workers, math.inf))
    rest_s = few.whole_s - few.small_s - moving.push_s - moving.pull_s
    reduce_bytes_s = size / max(rest_s, 1e-9)
    say(
        f"latency {latency_s * 1e3:.1f} ms, {spent_s * 1e3:.1f} ms a push on each host, "
        f"reduction {reduce_bytes_s / 1e6:.0f} MB/s"
    )
    return {
        one.workers: step_time(whole, hosts(one.workers, reduce_bytes_s)).total_s for one in found
    }


@click.command(context_settings=SETTINGS)
@click.option(
    "--size", "size_mib", default=16, show_default=True, help="MiB of the model, in fp32."
)
@click.option("--compute", "compute_s", default=1.0, show_default=True, help="Seconds of a step.")
@click.option("--mbit", default=50.0, show_default=True, help="Mbit/s of each link.")
@click.option("--rounds", default=5, show_default=True)
@click.option(
    "--workers", "counts", type=int, multiple=True, default=(1, 2, 4, 8), show_default=True
)
def train_scaling(
    size_mib: int, compute_s: float, mbit: float, rounds: int, counts: tuple[int, ...]
) -> None:
    """Compare the model of a step's time (examples/_step_time.py) with measured steps in lockstep.

    Workers are on the hosts of as many store nodes. Latency and planning are taken from steps of a model of
    4 KiB, and reduction from the fewest workers; what the bytes cost on the links is predicted. All hosts
    share this machine's cores, so that links have to be slow for the model to hold.
    """
    size = size_mib * MIB
    found = []
    with measuring():
        for workers in counts:
            found.append(measure(workers, size, compute_s, mbit, rounds))
            say(f"{workers} workers: {found[-1].small_s:.3f} s, {found[-1].whole_s:.3f} s")
    predicted = predict(found, size, compute_s, mbit)
    shown = table(
        "", "workers", "few bytes, s", "measured, s", "predicted, s", "error", numbers=True
    )
    for one in found:
        expected_s = predicted[one.workers]
        seconds = (one.small_s, one.whole_s, expected_s)
        cells = [str(one.workers), *(f"{value:.3f}" for value in seconds)]
        shown.add_row(*map(Text, (*cells, f"{expected_s / one.whole_s - 1:+.1%}")))
    wide_console(80).print(shown)
