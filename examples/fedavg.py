#!/usr/bin/env python3
"""Federated averaging on clients that differ: in how many samples they have, and of which digits.

Every client trains the newest parameters on its own samples for some epochs and pushes them, weighted by
the number of its samples; the rule `mean` makes the next version of that (McMahan et al. 2017,
arXiv:1602.05629). The network is numpy's, the digits are scikit-learn's. Beside it, the same network is
trained on all samples in one place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import _common
import _network
import click
import numpy as np
from _network import Array, Parameters

from irdmafs.train import TrainConfig, Worker

LR = 0.1
BATCH = 16


def split(labels: Array, clients: int, alpha: float, rng: np.random.Generator) -> list[Array]:
    """Return the samples of each client: of every label, parts drawn from a Dirichlet distribution (Hsu et
    al. 2019, arXiv:1909.06335); the smaller alpha, the fewer labels a client has. Each has a sample."""
    parts: list[list[Any]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        samples = rng.permutation(np.flatnonzero(labels == label))
        shares = rng.dirichlet(np.full(clients, alpha))
        cuts = (np.cumsum(shares)[:-1] * len(samples)).astype(int)
        for part, own in zip(parts, np.split(samples, cuts), strict=True):
            part.extend(own)
    for part in parts:
        if not part:
            part.append(max(parts, key=len).pop())
    return [np.array(part) for part in parts]


def client(
    worker: Worker, number: int, images: Array, labels: Array, rounds: int, epochs: int
) -> list[Parameters] | None:
    """Take part in all rounds; the first client returns the parameters after each of them."""
    rng = np.random.default_rng(number)
    versions = []
    newest = worker.pull()
    for _ in range(rounds):
        own = {name: array.copy() for name, array in newest.items()}
        for _ in range(epochs):
            _network.train_epoch(own, images, labels, LR, BATCH, rng)
        newest = worker.push_pull(own, weight=len(labels), timeout_s=_common.TIMEOUT_S)
        versions.append({name: array.copy() for name, array in newest.items()})
    return versions if number == 0 else None


@click.command(help=__doc__)
@_common.directory_argument
@click.option("--workers", default=5, show_default=True, help="Clients.")
@click.option("--steps", default=15, show_default=True, help="Rounds.")
@click.option("--epochs", default=2, show_default=True, help="Epochs of a client in a round.")
@click.option("--alpha", default=0.3, show_default=True, help="Of the Dirichlet distribution.")
@_common.out_option
def main(
    directory: Path | None, workers: int, steps: int, epochs: int, alpha: float, out: Path
) -> None:
    rng = np.random.default_rng(1)
    (images, labels), (test_images, test_labels) = _network.digits(rng)
    parts = split(labels, workers, alpha, rng)
    for number, part in enumerate(parts):
        counts = np.bincount(labels[part], minlength=10)
        click.echo(f"client {number}: {len(part):5} samples, of each digit {counts}")
    first = _network.first_parameters(rng)

    config = TrainConfig(rule="mean", workers=workers)
    with (
        _common.place(directory) as place,
        _common.training(place / "model", first, config) as train,
    ):
        versions, *_ = _common.run(
            client, train, workers, [images[part] for part in parts],
            [labels[part] for part in parts], [steps] * workers, [epochs] * workers,
        )  # fmt: skip
    federated = [_network.accuracy(one, test_images, test_labels) for one in versions]

    own = {name: array.copy() for name, array in first.items()}
    central = []
    for _ in range(steps):
        for _ in range(epochs):
            _network.train_epoch(own, images, labels, LR, BATCH, rng)
        central.append(_network.accuracy(own, test_images, test_labels))

    click.echo("round  federated  one place")
    for number, accuracies in enumerate(zip(federated, central, strict=True), 1):
        click.echo(f"{number:5}  {accuracies[0]:9.4f}  {accuracies[1]:9.4f}")
    curves = {
        name: list(enumerate(values, 1))
        for name, values in (("federated", federated), ("one place", central))
    }
    _common.save_curves(out, "fedavg", "round", "accuracy", curves)


if __name__ == "__main__":
    main()
