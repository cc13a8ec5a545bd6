#!/usr/bin/env python3
"""A support vector machine whose samples are on several workers, which leave out those that do not matter.

After Vishnu et al. 2015 ("Fast and Accurate Support Vector Machines on Large Scale Systems", CLUSTER): each
worker has a part of the samples and the gradient of the dual problem for them. The samples that violate the
optimality conditions most are exchanged, everybody changes their multipliers alike, and updates its own
gradients. Samples at a bound that cannot become one of those soon are eliminated; once the others are
optimal, the gradients of the eliminated are computed anew, and those that were eliminated wrongly (false
positives) come back, so the result is the one without elimination.

A version is an allgather: every worker pushes tensors of its own, and the rule `mean` takes them over. It
is slower than an MPI collective; hence a round exchanges --candidates samples of each worker where the
paper has one pair of all, and everybody solves the small problem of these (as SVMlight does: Joachims
1999). Nothing is sent when gradients are computed anew, where the paper passes samples round a ring: any
sample with a multiplier above 0 was a candidate, so everybody has it. Pushes are combined in fp32, to which
multipliers are rounded.

The result is compared with scikit-learn's SVC, which is libsvm.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import _common
import click
import numpy as np
from numpy.typing import NDArray

from irdmafs.train import TrainConfig, Worker

Array = NDArray[Any]
# The round after which samples are eliminated; None: never.
ELIMINATION: dict[str, int | None] = {"none": None, "earliest": 1, "early": 10, "lazy": 40}
ROUNDS_MAX = 5_000


class Problem(NamedTuple):
    """A classification with labels -1 and 1, an RBF kernel and the bound C of the multipliers."""

    gamma: float
    bound: float
    tolerance: float
    candidates: int
    eliminate_after: int | None


@dataclass
class Counts:
    """The cost of training; `evaluations`: values of the kernel between a worker's samples and others."""

    rounds: int = 0
    evaluations: int = 0
    reconstructions: int = 0
    eliminated_most: int = 0
    false_positives: int = 0
    gaps: list[float] = field(default_factory=list)


class Machine(NamedTuple):
    """The support vectors with their multipliers times labels, and the bias."""

    vectors: Array
    weights: Array
    bias: float

    def decide(self, samples: Array, gamma: float) -> Array:
        """Return the decision value of each sample; its sign is the label."""
        return kernel(samples, self.vectors, gamma) @ self.weights + self.bias


class Candidates(NamedTuple):
    """Samples that are exchanged: of each, its worker and number there, its label, its multiplier, and y
    times the negative gradient, here and below called its score."""

    owners: Array
    numbers: Array
    samples: Array
    labels: Array
    multipliers: Array
    scores: Array


def kernel(one: Array, other: Array, gamma: float) -> Array:
    squares = (one**2).sum(1)[:, None] + (other**2).sum(1) - 2 * (one @ other.T)
    products: Array = np.exp(-gamma * np.maximum(squares, 0))
    return products


def may_rise(labels: Array, multipliers: Array, bound: float) -> Array:
    """Return whose label times multiplier may rise: I_up of the optimality conditions (Keerthi et al.
    2001). Asked with opposite labels: whose may sink."""
    return np.where(labels > 0, multipliers < bound, multipliers > 0)


def solve(found: Candidates, problem: Problem) -> Array:
    """Return new multipliers of the candidates, by sequential minimal optimization of the most violating
    pairs (Platt 1998, Keerthi et al. 2001)."""
    labels, bound = found.labels, problem.bound
    multipliers, scores = found.multipliers.copy(), found.scores.copy()
    products = kernel(found.samples, found.samples, problem.gamma)
    for _ in range(20 * len(labels)):
        up = np.where(may_rise(labels, multipliers, bound), scores, -np.inf)
        low = np.where(may_rise(-labels, multipliers, bound), scores, np.inf)
        i, j = int(up.argmax()), int(low.argmin())
        if up[i] - low[j] < problem.tolerance / 10:
            break
        step = (up[i] - low[j]) / max(products[i, i] + products[j, j] - 2 * products[i, j], 1e-12)
        room_i = bound - multipliers[i] if labels[i] > 0 else multipliers[i]
        room_j = multipliers[j] if labels[j] > 0 else bound - multipliers[j]
        step = min(step, room_i, room_j)
        multipliers[i] += labels[i] * step
        multipliers[j] -= labels[j] * step
        scores -= step * (products[i] - products[j])
    return np.clip(multipliers, 0, bound).astype(np.float32).astype(np.float64)


class Part:
    """The samples of one worker, and what it knows of the others' support vectors."""

    def __init__(self, number: int, samples: Array, labels: Array, problem: Problem) -> None:
        self.number = number
        self.samples = samples
        self.labels = labels
        self.problem = problem
        self.multipliers = np.zeros(len(labels))
        self.scores = labels.astype(np.float64)
        self.active = np.ones(len(labels), bool)
        self.known: dict[tuple[int, int], tuple[Array, float, float]] = {}
        self.counts = Counts()

    def candidates(self) -> dict[str, Array]:
        """Return the active samples that violate most, half of them to rise and half to sink, and the
        extremes among all active ones, as the tensors of a push. What is lacking has the number -1."""
        up, low = self._sides()
        half = self.problem.candidates // 2
        rising = up[np.argsort(-self.scores[up], kind="stable")[:half]]
        sinking = low[np.argsort(self.scores[low], kind="stable")[:half]]
        taken = np.union1d(rising, sinking)
        numbers = np.full(self.problem.candidates, -1)
        numbers[: len(taken)] = taken
        extremes = (
            self.scores[up].max(initial=-1e30),
            self.scores[low].min(initial=1e30),
            (~self.active).sum(),
        )
        own = {
            "numbers": numbers,
            "samples": self.samples[numbers],
            "labels": self.labels[numbers],
            "multipliers": self.multipliers[numbers],
            "scores": self.scores[numbers],
            "extremes": np.array(extremes),
        }
        return {f"{self.number}.{name}": one.astype(np.float32) for name, one in own.items()}

    def _sides(self) -> tuple[Array, Array]:
        rises = may_rise(self.labels, self.multipliers, self.problem.bound)
        sinks = may_rise(-self.labels, self.multipliers, self.problem.bound)
        return np.flatnonzero(rises & self.active), np.flatnonzero(sinks & self.active)

    def apply(self, found: Candidates) -> None:
        """Solve the problem of the candidates, and take over the result."""
        new = solve(found, self.problem)
        changed = np.flatnonzero(new != found.multipliers)
        for index in changed:
            key = int(found.owners[index]), int(found.numbers[index])
            self.known[key] = found.samples[index], float(found.labels[index]), float(new[index])
            if key[0] == self.number:
                self.multipliers[key[1]] = new[index]
        weights = (new - found.multipliers)[changed] * found.labels[changed]
        self._subtract(self.active, found.samples[changed], weights)

    def _subtract(self, which: Array, samples: Array, weights: Array) -> None:
        """Change scores by what samples of changed weights contribute to them."""
        products = kernel(self.samples[which], samples, self.problem.gamma)
        self.scores[which] -= products @ weights
        self.counts.evaluations += products.size

    def eliminate(self, highest: float, lowest: float) -> None:
        """Leave out what is at a bound and on the right side of both extremes (Joachims 1999): it would not
        be a candidate."""
        rises = may_rise(self.labels, self.multipliers, self.problem.bound)
        sinks = may_rise(-self.labels, self.multipliers, self.problem.bound)
        settled = (~sinks & (self.scores < lowest)) | (~rises & (self.scores > highest))
        self.active &= ~settled
        self.counts.eliminated_most = max(self.counts.eliminated_most, int((~self.active).sum()))

    def reconstruct(self, highest: float, lowest: float) -> None:
        """Compute the scores of the eliminated anew, and take back those that are not optimal."""
        gone = ~self.active
        vectors, weights = self.support()
        self.scores[gone] = self.labels[gone]
        if len(weights):
            self._subtract(gone, vectors, weights)
        rises = may_rise(self.labels, self.multipliers, self.problem.bound)
        sinks = may_rise(-self.labels, self.multipliers, self.problem.bound)
        # Then all samples together violate by the tolerance at most.
        margin = self.problem.tolerance / 2
        violates = (rises & (self.scores > lowest + margin)) | (
            sinks & (self.scores < highest - margin)
        )
        self.active |= gone & violates
        self.counts.false_positives += int((gone & violates).sum())
        self.counts.reconstructions += 1

    def support(self) -> tuple[Array, Array]:
        """Return all workers' support vectors, and their multipliers times labels."""
        kept = [one for _, one in sorted(self.known.items()) if one[2] > 0]
        vectors = np.array([sample for sample, _, _ in kept])
        return vectors, np.array([label * multiplier for _, label, multiplier in kept])


def gather(version: dict[str, Array], workers: int) -> tuple[Candidates, float, float, int]:
    """Return all workers' candidates, the highest score that may rise, the lowest that may sink, and how
    many samples are eliminated."""
    columns: list[list[Array]] = [[] for _ in Candidates._fields]
    extremes = np.array([version[f"{number}.extremes"] for number in range(workers)], np.float64)
    for number in range(workers):
        kept = version[f"{number}.numbers"] >= 0
        columns[0].append(np.full(int(kept.sum()), number))
        for column, name in zip(columns[1:], Candidates._fields[1:], strict=True):
            column.append(version[f"{number}.{name}"][kept].astype(np.float64))
    found = Candidates(*map(np.concatenate, columns))
    return found, extremes[:, 0].max(), extremes[:, 1].min(), int(extremes[:, 2].sum())


def train_part(
    worker: Worker, number: int, samples: Array, labels: Array, problem: Problem, workers: int
) -> tuple[Machine, Counts]:
    """Train with the other workers, and return the machine, which is the same for all."""
    part = Part(number, samples, labels, problem)
    counts = part.counts
    rebuilt = False
    while True:
        version = worker.push_pull(part.candidates(), timeout_s=_common.TIMEOUT_S)
        found, highest, lowest, eliminated = gather(version, workers)
        counts.rounds += 1
        counts.gaps.append(highest - lowest)
        if highest - lowest < problem.tolerance:
            # Nothing has changed since the last reconstruction: it found no false positive.
            if not eliminated or rebuilt:
                break
            part.reconstruct(highest, lowest)
            rebuilt = True
            continue
        if counts.rounds > ROUNDS_MAX:
            raise click.ClickException(f"no result after {ROUNDS_MAX} rounds")
        rebuilt = False
        part.apply(found)
        after = problem.eliminate_after
        if after is not None and counts.rounds >= after:
            part.eliminate(highest, lowest)
    vectors, weights = part.support()
    return Machine(vectors, weights, (highest + lowest) / 2), counts


def samples_of(name: str) -> tuple[Array, Array]:
    """Return samples and labels -1 and 1: even and odd digits, or benign and malignant cells."""
    from sklearn.datasets import load_breast_cancer, load_digits

    samples, labels = {"digits": load_digits, "cells": load_breast_cancer}[name](return_X_y=True)
    scale = samples.std(0)
    samples = (samples - samples.mean(0)) / np.where(scale > 0, scale, 1)
    # In fp32, as they are exchanged.
    return samples.astype(np.float32).astype(np.float64), np.where(labels % 2, 1, -1)


@click.command(help=__doc__)
@_common.directory_argument
@click.option("--workers", default=3, show_default=True)
@click.option("--data", type=click.Choice(["digits", "cells"]), default="digits", show_default=True)
@click.option("--candidates", default=32, show_default=True, help="Samples of a worker in a round.")
@click.option("--bound", default=4.0, show_default=True, help="C, in fp32.")
@click.option(
    "--eliminate", "strategies", type=click.Choice(list(ELIMINATION)), multiple=True,
    default=list(ELIMINATION), help="When samples are left out first.",
)  # fmt: skip
@_common.out_option
def main(
    directory: Path | None, workers: int, data: str, candidates: int, bound: float,
    strategies: tuple[str, ...], out: Path,
) -> None:  # fmt: skip
    from sklearn.svm import SVC

    samples, labels = samples_of(data)
    gamma = 1 / samples.shape[1]
    reference = SVC(C=bound, gamma=gamma, tol=1e-4).fit(samples, labels)
    expected = reference.decision_function(samples)
    click.echo(
        f"{data}: {len(labels)} samples, {len(reference.support_)} support vectors of libsvm"
    )

    parts = np.array_split(np.random.default_rng(0).permutation(len(labels)), workers)
    first = {
        f"{number}.{name}": np.zeros(shape, np.float32)
        for number in range(workers)
        for name, shape in {
            "numbers": (candidates,), "samples": (candidates, samples.shape[1]),
            "labels": (candidates,), "multipliers": (candidates,), "scores": (candidates,),
            "extremes": (3,),
        }.items()
    }  # fmt: skip
    config = TrainConfig(rule="mean", workers=workers, whole_every=0)
    curves = {}
    with _common.place(directory) as place:
        for strategy in strategies:
            problem = Problem(gamma, bound, 1e-3, candidates, ELIMINATION[strategy])
            begun_s = time.monotonic()
            with _common.training(place / strategy, first, config) as train:
                results = _common.run(
                    train_part, train, workers, [samples[part] for part in parts],
                    [labels[part] for part in parts], [problem] * workers, [workers] * workers,
                )  # fmt: skip
            spent_s = time.monotonic() - begun_s
            machine = results[0][0]
            counts = [counts for _, counts in results]
            difference = np.abs(machine.decide(samples, gamma) - expected).max()
            click.echo(
                f"eliminate {strategy}: {counts[0].rounds} rounds, {spent_s:.1f} s, "
                f"{sum(one.evaluations for one in counts):,} kernel values, "
                f"{sum(one.eliminated_most for one in counts)} samples eliminated, "
                f"{sum(one.false_positives for one in counts)} of them wrongly, "
                f"{len(machine.weights)} support vectors, decision values differ by {difference:.4f}"
            )
            curves[strategy] = list(enumerate(counts[0].gaps, 1))
    _common.save_curves(out, "svm", "round", "violation of optimality", curves)


if __name__ == "__main__":
    main()
