#!/usr/bin/env python3
"""A soup of models and a moving average of checkpoints, beside the models that they are made of.

All workers go on from one network, each with a learning rate and an order of samples of its own. What they
end with is averaged by the rule `mean`: a uniform soup (Wortsman et al. 2022, arXiv:2203.05482). The first
worker also pushes its parameters after every epoch to a second directory, whose rule `ema` keeps their
exponential moving average. A soup and an average are versions as all are: files that any program reads.
"""

from __future__ import annotations

from pathlib import Path

import _common
import _network
import click
import numpy as np
from _network import Array, Parameters

from irdmafs.train import TrainConfig, Worker

LRS = (0.05, 0.1, 0.15, 0.2)
BATCH = 8


def finetune(
    worker: Worker, number: int, images: Array, labels: Array, epochs: int, checkpoints: Path
) -> Parameters:
    """Go on from version 0, push the result, and return it."""
    rng = np.random.default_rng(100 + number)
    own = {name: array.copy() for name, array in worker.pull().items()}
    averaging = Worker(checkpoints, "run") if number == 0 else None
    for _ in range(epochs):
        _network.train_epoch(own, images, labels, LRS[number % len(LRS)], BATCH, rng)
        if averaging is not None:
            averaging.push_pull(own, timeout_s=_common.TIMEOUT_S)
    if averaging is not None:
        averaging.close()
    worker.push(own)
    worker.pull(timeout_s=_common.TIMEOUT_S)
    return own


@click.command(help=__doc__)
@_common.directory_argument
@click.option("--workers", default=4, show_default=True, help="Models.")
@click.option("--steps", default=20, show_default=True, help="Epochs of each.")
@click.option("--decay", default=0.8, show_default=True, help="Of the moving average.")
@click.option("--noise", default=0.15, show_default=True, help="Part of the labels that are wrong.")
@_common.out_option
def main(
    directory: Path | None, workers: int, steps: int, decay: float, noise: float, out: Path
) -> None:
    rng = np.random.default_rng(2)
    (images, labels), test = _network.digits(rng)
    wrong = rng.random(len(labels)) < noise
    labels = np.where(wrong, rng.integers(0, 10, len(labels)), labels)
    first = _network.first_parameters(rng)
    for _ in range(2):
        _network.train_epoch(first, images, labels, LRS[0], BATCH, rng)

    soup_config = TrainConfig(rule="mean", workers=workers)
    ema_config = TrainConfig(rule="ema", options={"decay": decay}, workers=1)
    with _common.place(directory) as place:
        soup, ema = place / "soup", place / "ema"
        with _common.training(soup, first, soup_config), _common.training(ema, first, ema_config):
            models = _common.run(
                finetune, soup, workers, [images] * workers, [labels] * workers,
                [steps] * workers, [ema] * workers,
            )  # fmt: skip
        singles = [_network.accuracy(model, *test) for model in models]
        averages = {
            "soup": _network.accuracy(_common.read(soup), *test),
            "moving average of model 0": _network.accuracy(_common.read(ema), *test),
        }
    for number, accuracy in enumerate(singles):
        click.echo(f"model {number}, lr {LRS[number % len(LRS)]:.2f}          {accuracy:.4f}")
    click.echo(f"mean of their accuracies   {np.mean(singles):.4f}")
    for name, accuracy in averages.items():
        click.echo(f"{name:26} {accuracy:.4f}")
    lines = {name: [(0, one), (workers - 1, one)] for name, one in averages.items()}
    curves = {"models": list(enumerate(singles)), **lines}
    _common.save_curves(out, "soup", "model", "accuracy", curves)


if __name__ == "__main__":
    main()
