#!/usr/bin/env python3
"""How much sooner more workers reach an accuracy, and what one slow worker costs.

The computation of a worker is a sleep for each sample, so that a few cores can pretend to be many; what it
pushes are real gradients of a small network. All workers together have --batch samples in a step. Without
--slow, runs with 1, 2, 4 and 8 workers in lockstep are compared with linear speed-up. With --slow F the
last of four workers takes F times as long, and lockstep is compared with bounded staleness, a quorum and
asynchronous training. Both are set beside how many pushes count in the same time in theory, which knows of
no time for communication.
"""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import _common
import _network
import click
import numpy as np
from _network import Array

from irdmafs.train import TrainConfig, Worker
from irdmafs.train.config import parse_sync

LR = 0.3
Samples = tuple[Array, Array]


class Point(NamedTuple):
    """A measurement of the first worker: seconds since all began, its accuracy, and the pushes that count
    then."""

    seconds: float
    accuracy: float
    pushes: int


class Run:
    """Workers, as threads, that train until the first of them reaches an accuracy."""

    def __init__(self, samples: Samples, test: Samples, batch: int, accuracy: float) -> None:
        self._samples = samples
        self._test = test
        self._batch = batch
        self._accuracy = accuracy
        self._reached = threading.Event()
        self.points: list[Point] = []

    def train(self, directory: Path, step_s: list[float]) -> list[Point]:
        """Train with workers whose computation takes so long; return what the first one has found."""
        with contextlib.ExitStack() as stack:
            members = [
                stack.enter_context(Worker(directory, f"worker{number}"))
                for number in range(len(step_s))
            ]
            threads = stack.enter_context(ThreadPoolExecutor(len(members)))
            begun_s = time.monotonic()
            calls = [
                threads.submit(self._work, member, number, len(members), seconds, begun_s)
                for number, (member, seconds) in enumerate(zip(members, step_s, strict=True))
            ]
            for call in calls:
                call.result()
        return self.points

    def _work(
        self, worker: Worker, number: int, workers: int, step_s: float, begun_s: float
    ) -> None:
        # A worker that leaves is not waited for by those who have not seen yet that they can leave. One
        # that fails ends all.
        with worker, contextlib.ExitStack() as ending:
            ending.callback(self._reached.set)
            parameters = worker.pull()
            while not self._reached.wait(step_s):
                images, labels = self._part(worker.step, number, workers)
                gradients = _network.gradients(parameters, images, labels)
                parameters = worker.push_pull(gradients, timeout_s=_common.TIMEOUT_S)
                if number == 0:
                    self._measure(worker, parameters, begun_s)

    def _part(self, step: int, number: int, workers: int) -> Samples:
        images, labels = self._samples
        rows = np.random.default_rng(step).integers(0, len(labels), self._batch)
        own = np.array_split(rows, workers)[number]
        return images[own], labels[own]

    def _measure(self, worker: Worker, parameters: _network.Parameters, begun_s: float) -> None:
        seconds = time.monotonic() - begun_s
        accuracy = _network.accuracy(parameters, *self._test)
        counted = sum(worker.train.newest_plan().clocks.values())
        self.points.append(Point(seconds, accuracy, counted))
        if accuracy >= self._accuracy:
            self._reached.set()


def pushes_in(steps: float, sync: str, workers: int, slow: float) -> float:
    """Return how many pushes count in the time that a worker needs for `steps` steps, if the last one needs
    `slow` times as long and communication needs none. A quorum is one of all but one."""
    kind, number = parse_sync(sync)
    slowest, others = steps / slow, workers - 1
    if kind == "async":
        return others * steps + slowest
    if kind == "quorum":
        # All but one go at the pace of the others. When the push of the slow one counts, it takes the place
        # of another's, which waits for a step then.
        return others * steps
    if kind == "ssp":
        return others * min(steps, slowest + number + 1) + slowest
    return workers * slowest


@click.command(help=__doc__)
@_common.directory_argument
@click.option(
    "--workers", "counts", type=int, multiple=True, default=(1, 2, 4, 8), show_default=True
)
@click.option("--slow", type=float, metavar="F", help="Compare ways to wait for a slow worker.")
@click.option("--sync", "syncs", multiple=True, default=("bsp", "ssp:4", "quorum:3", "async"),
              show_default=True, help="With --slow.")  # fmt: skip
@click.option("--sample-ms", default=100.0, show_default=True, help="Computation of a sample.")
@click.option("--batch", default=96, show_default=True, help="Samples of a step, of all workers.")
@click.option("--accuracy", default=0.85, show_default=True, help="To be reached.")
@_common.out_option
def main(
    directory: Path | None, counts: tuple[int, ...], slow: float | None, syncs: tuple[str, ...],
    sample_ms: float, batch: int, accuracy: float, out: Path,
) -> None:  # fmt: skip
    samples, test = _network.digits(np.random.default_rng(1))
    first = _network.first_parameters(np.random.default_rng(2))
    runs = [("bsp", count) for count in counts]
    if slow is not None:
        runs = [(sync, 4) for sync in syncs]
    found: dict[str, list[Point]] = {}
    with _common.place(directory) as place:
        for sync, workers in runs:
            step_s = [sample_ms / 1e3 * batch / workers] * workers
            step_s[-1] *= slow or 1
            # The sum of the workers' gradients is applied, each for its part of the batch.
            config = TrainConfig(rule="sum", lr=-LR / workers, sync=sync)
            name = f"{workers} workers, {sync}"
            with _common.training(place / name.replace(":", "-"), first, config) as trained:
                points = Run(samples, test, batch, accuracy).train(trained, step_s)
            found[name] = points
            seconds, _, pushes = points[-1]
            theory = pushes_in(seconds / step_s[0], sync, workers, slow or 1)
            click.echo(
                f"{name:19} {seconds:6.1f} s to {accuracy:.2f}, {pushes:4} pushes, "
                f"{pushes / theory:.2f} of {theory:.0f} in theory"
            )
    curves = {name: [point[:2] for point in points] for name, points in found.items()}
    _common.save_curves(out, "slow" if slow else "speedup", "seconds", "accuracy", curves)
    if slow is None:
        times = [(float(n), found[f"{n} workers, bsp"][-1].seconds) for n in sorted(counts)]
        linear = [(n, times[0][0] * times[0][1] / n) for n, _ in times]
        curves = {"measured": times, "linear": linear}
        _common.save_curves(
            out, "speedup-workers", "workers", "seconds to the accuracy", curves, logarithmic=True
        )


if __name__ == "__main__":
    main()
