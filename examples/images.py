#!/usr/bin/env python3
"""Recognize digits with a convolutional network of torch, in lockstep, with bounded staleness and
asynchronously.

The images are scikit-learn's, of 8 x 8 pixels; every fifth is kept to test with. Each worker has images of
its own, and its optimizer is a ParameterServerOptimizer: the directory's rule is Adam. With the same number
of batches, bsp makes one update of the mean of all workers' gradients where ssp and async make one of each.
Curves show the loss and the accuracy on the test images over time, and over the bytes that were pushed and
pulled by all workers.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import _common
import _network
import click
import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from irdmafs.train import TrainConfig
from irdmafs.train.torch import ParameterServerOptimizer

BATCH = 32
# Steps of the first worker between two measurements.
MEASURED_EVERY = 5
Samples = tuple[_network.Array, _network.Array]


class Point(NamedTuple):
    """A measurement on the test images: seconds since the first step, bytes of all workers until then."""

    seconds: float
    bytes: float
    loss: float
    accuracy: float


def make_network() -> Any:
    """Return a network with two convolutions: always the same. It has no batch normalization, whose means
    are no parameters: each worker would have its own."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def tensors(samples: Samples) -> tuple[Any, Any]:
    """Return images (N x 1 x 8 x 8) and labels."""
    images, labels = map(torch.from_numpy, samples)
    return images.reshape(-1, 1, 8, 8), labels


def learn(directory: Path, number: int, own: Samples, tested: Samples, steps: int) -> list[Point]:
    """Train with so many batches of samples; the first worker returns what it measured."""
    torch.set_num_threads(1)
    (images, labels), test = tensors(own), tensors(tested)
    network = make_network()
    size_bytes = sum(tensor.nbytes for tensor in network.parameters())
    chosen = torch.Generator().manual_seed(number)
    points = []
    with ParameterServerOptimizer(
        network.named_parameters(), directory, name=f"worker{number}", timeout_s=_common.TIMEOUT_S
    ) as optimizer:
        begun_s = time.monotonic()
        for step in range(1, steps + 1):
            batch = torch.randint(0, len(labels), (BATCH,), generator=chosen)
            optimizer.zero_grad()
            cross_entropy(network(images[batch]), labels[batch]).backward()
            optimizer.step()
            if number == 0 and (step % MEASURED_EVERY == 0 or step == steps):
                # Each push that counts is followed by a pull.
                counted = sum(optimizer.worker.train.newest_plan().clocks.values())
                points.append(
                    Point(
                        time.monotonic() - begun_s, 2 * counted * size_bytes, *score(network, *test)
                    )
                )
    return points


def score(network: Any, images: Any, labels: Any) -> tuple[float, float]:
    """Return the mean cross-entropy, and the part of the images that is recognized."""
    with torch.no_grad():
        scores = network(images)
        loss = float(cross_entropy(scores, labels))
        return loss, float((scores.argmax(1) == labels).float().mean())


@click.command(help=__doc__)
@_common.directory_argument
@click.option("--workers", default=3, show_default=True)
@click.option("--steps", default=150, show_default=True, help="Of each worker.")
@click.option("--lr", default=0.003, show_default=True, help="Of Adam.")
@click.option("--sync", "syncs", multiple=True, default=("bsp", "ssp:2", "async"),
              show_default=True, help="One or more.")  # fmt: skip
@_common.out_option
def main(
    directory: Path | None, workers: int, steps: int, lr: float, syncs: tuple[str, ...],
    out: Path,
) -> None:  # fmt: skip
    (images, labels), test = _network.digits(np.random.default_rng(1))
    parts = [(images[number::workers], labels[number::workers]) for number in range(workers)]
    first = {name: tensor.detach().numpy() for name, tensor in make_network().named_parameters()}
    measured = {}
    with _common.place(directory) as place:
        for sync in syncs:
            config = TrainConfig(rule="adam", lr=lr, sync=sync, workers=workers)
            with _common.training(place / sync.replace(":", "-"), first, config) as trained:
                points, *_ = _common.in_processes(
                    partial(learn, trained), workers, parts, [test] * workers, [steps] * workers
                )
            newest = _common.read(trained)
            network = make_network()
            network.load_state_dict(
                {name: torch.from_numpy(array) for name, array in newest.items()}
            )
            loss, accuracy = score(network, *tensors(test))
            spent_s, moved = points[-1][:2]
            click.echo(
                f"{sync:6} {spent_s:6.1f} s, {moved / 1e6:6.1f} MB, loss {loss:.4f}, "
                f"accuracy {accuracy:.4f}"
            )
            measured[sync] = points
    for y in ("loss", "accuracy"):
        for x in ("seconds", "bytes"):
            curves = {
                sync: [(getattr(point, x), getattr(point, y)) for point in points]
                for sync, points in measured.items()
            }
            _common.save_curves(out, f"images-{y}-{x}", x, y, curves)


if __name__ == "__main__":
    main()
