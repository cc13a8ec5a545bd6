#!/usr/bin/env python3
"""Train a small transformer language model with DiLoCo, beside synchronous training.

The text is the manual that comes with Python (`pydoc_data.topics`); its last tenth is kept to test with.
The model predicts the next character. In synchronous training each step pushes its gradients, and the
directory's rule is AdamW. With DiLoCo (Douillard et al. 2023, arXiv:2311.08105) each worker makes --every
steps of an AdamW of its own, then pushes the change of its parameters. Curves show the loss on the test
text over the bytes that all workers have pushed and pulled, and over time.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import _common
import click
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from irdmafs.train import TrainConfig
from irdmafs.train.torch import DiLoCo, ParameterServerOptimizer

LR = 0.003
BATCH = 16
CONTEXT = 64
WIDTH = 64
HEADS = 4
LAYERS = 2
# Places of the test text that the loss is measured at.
TESTED = 256


class Point(NamedTuple):
    """A measurement: seconds since the first step, bytes of all workers until then, and the loss on the
    test text in nats per character."""

    seconds: float
    bytes: float
    loss: float


class LanguageModel(nn.Module):
    """A transformer that sees no later characters, with learned positions (Radford et al. 2019)."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.characters = nn.Embedding(characters, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, characters, bias=False)

    def forward(self, inputs: Any) -> Any:
        """Return scores (batch x CONTEXT x characters) of the next character, for inputs (batch x
        CONTEXT)."""
        hidden = self.characters(inputs) + self.positions.weight
        later = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        return self.head(self.norm(self.layers(hidden, later, is_causal=True)))


def texts() -> tuple[Any, Any, int]:
    """Return the text to train with and the one to test with, as numbers of characters, and how many
    characters there are."""
    text = "\n".join(topics[name] for name in sorted(topics))
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    encoded = torch.tensor([numbers[character] for character in text])
    cut = len(encoded) * 9 // 10
    return encoded[:cut], encoded[cut:], len(numbers)


def loss_of(model: Any, text: Any, starts: Any) -> Any:
    """Return the mean cross-entropy of the characters that follow those at `starts`."""
    windows = text[starts[:, None] + torch.arange(CONTEXT + 1)]
    scores = model(windows[:, :-1])
    return cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten())


def test_loss(model: Any, text: Any) -> float:
    with torch.no_grad():
        return float(
            loss_of(model, text, torch.linspace(0, len(text) - CONTEXT - 1, TESTED).long())
        )


def learn(
    directory: Path, number: int, workers: int, steps: int, every: int, measured_every: int
) -> list[Point]:
    """Train with so many batches of this worker's part of the text; the first worker returns what it
    measured. `every`: steps that a push is made of; 1 is synchronous training."""
    torch.set_num_threads(1)
    train, test, characters = texts()
    own = train.chunk(workers)[number]
    model = LanguageModel(characters)
    size_bytes = sum(tensor.nbytes for tensor in model.parameters())
    chosen = torch.Generator().manual_seed(number)
    points = []
    with _optimizer(model, directory, f"worker{number}", every) as optimizer:
        begun_s = time.monotonic()
        for step in range(1, steps + 1):
            starts = torch.randint(0, len(own) - CONTEXT, (BATCH,), generator=chosen)
            optimizer.zero_grad()
            loss_of(model, own, starts).backward()
            optimizer.step()
            if number == 0 and step % measured_every == 0:
                moved = 2 * workers * (step // every) * size_bytes
                points.append(Point(time.monotonic() - begun_s, moved, test_loss(model, test)))
    return points


def _optimizer(model: Any, directory: Path, name: str, every: int) -> Any:
    if every == 1:
        return ParameterServerOptimizer(
            model.named_parameters(), directory, name=name, timeout_s=_common.TIMEOUT_S
        )
    inner = torch.optim.AdamW(model.named_parameters(), lr=LR)
    return DiLoCo(inner, directory, name=name, timeout_s=_common.TIMEOUT_S)


@click.command(help=__doc__)
@_common.directory_argument
@click.option("--workers", default=2, show_default=True)
@click.option(
    "--steps",
    type=click.IntRange(10),
    default=1000,
    show_default=True,
    help="Of synchronous training.",
)
@click.option("--every", default=125, show_default=True, help="Steps between two pushes of DiLoCo.")
@click.option("--rounds", default=10, show_default=True, help="Pushes of DiLoCo.")
@_common.out_option
def main(
    directory: Path | None, workers: int, steps: int, every: int, rounds: int, out: Path
) -> None:
    first = {
        name: tensor.detach().numpy()
        for name, tensor in LanguageModel(texts()[2]).named_parameters()
    }
    outer = TrainConfig(
        rule="diloco", lr=1.0, options={"momentum": 0.5}, sync=f"local:{every}", workers=workers
    )
    runs = {
        "synchronous": (TrainConfig(rule="adamw", lr=LR, workers=workers), steps, 1, steps // 10),
        "DiLoCo": (outer, every * rounds, every, every),
    }
    measured = {}
    with _common.place(directory) as place:
        for name, (config, count, *periods) in runs.items():
            with _common.training(place / name, first, config) as trained:
                arguments = ([number] * workers for number in (workers, count, *periods))
                points, *_ = _common.in_processes(partial(learn, trained), workers, *arguments)
            last = points[-1]
            click.echo(
                f"{name:11} {count:5} steps, {last.seconds:6.1f} s, {last.bytes / 1e6:8.2f} MB, "
                f"loss {last.loss:.4f}"
            )
            measured[name] = points
    for x in ("bytes", "seconds"):
        curves = {
            name: [(getattr(point, x), point.loss) for point in points]
            for name, points in measured.items()
        }
        _common.save_curves(out, f"language-{x}", x, "loss", curves, logarithmic=x == "bytes")


if __name__ == "__main__":
    main()
