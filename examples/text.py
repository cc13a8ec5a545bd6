#!/usr/bin/env python3
"""Tell languages apart by their letters, trained asynchronously or with bounded staleness.

The texts are the translations that Django ships: the same messages in many languages, all in Latin script.
Every fifth message is kept to test with, in all languages. A text is a vector of its n-grams of one to
three letters, hashed (Weinberger et al. 2009, arXiv:0902.2206); the model is softmax regression in numpy.
Each worker has texts of its own and pushes the gradient of a batch; --sync says how far apart workers may
be (docs/training.md). The rule `sum` adds gradients up, so each counts alike however many make a version.
"""

from __future__ import annotations

import gettext
import re
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import _common
import click
import numpy as np
from numpy.typing import NDArray

from irdmafs.train import TrainConfig, Worker

Array = NDArray[Any]
LANGUAGES = (
    "af", "cs", "da", "de", "es", "et", "fi", "fr", "hu", "id", "it", "lt", "nb", "nl", "pl", "pt", "ro",
    "sk", "sv", "tr",
)  # fmt: skip
FEATURES = 2048
SHORTEST = 20
BATCH = 64
# Parts of a message that are the same in every language: placeholders, tags, names in capitals.
_SAME = re.compile(r"%\(\w+\)[a-z]|%[a-z]|\{\w*\}|<[^>]*>|\b[A-Z]{2,}\b|[\d_]+")


class Texts(NamedTuple):
    texts: list[str]
    labels: Array


def django_texts() -> tuple[Texts, Texts]:
    """Return texts with the indices of their languages: to train with, and to test with."""
    spec = find_spec("django")
    if spec is None or not spec.submodule_search_locations:
        raise click.ClickException("the texts are Django's: pip install irdmafs[examples]")
    root = Path(spec.submodule_search_locations[0])
    catalogs = sorted(root.glob("**/locale/*/LC_MESSAGES/django.mo"))
    found: tuple[list[tuple[str, int]], list[tuple[str, int]]] = ([], [])
    for label, language in enumerate(LANGUAGES):
        texts: dict[str, str] = {}
        for path in [one for one in catalogs if one.parts[-3] == language]:
            with path.open("rb") as file:
                catalog = vars(gettext.GNUTranslations(file))["_catalog"]
            texts.update({key: text for key, text in catalog.items() if isinstance(key, str)})
        for message, text in texts.items():
            letters = " ".join(_SAME.sub(" ", text).lower().split())
            if message and text != message and len(letters) >= SHORTEST:
                found[crc32(message.encode()) % 5 == 0].append((letters, label))
    train, test = (
        Texts([text for text, _ in one], np.array([label for _, label in one])) for one in found
    )
    return train, test


def features(texts: list[str]) -> Array:
    """Return a row of FEATURES for each text: roots of the counts of its n-grams, of norm 1."""
    rows = np.zeros((len(texts), FEATURES), np.float32)
    for row, text in zip(rows, texts, strict=True):
        padded = f" {text} "
        for size in (1, 2, 3):
            for start in range(len(padded) - size + 1):
                row[crc32(padded[start : start + size].encode()) % FEATURES] += 1
    rows = np.sqrt(rows)
    unit: Array = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return unit


class Point(NamedTuple):
    """The loss of a batch: seconds since the first, and bytes that its worker has moved until then."""

    seconds: float
    bytes: float
    loss: float


def learn(worker: Worker, number: int, own: Texts, steps: int) -> list[Point]:
    """Push the gradients of so many batches; return what was measured at each."""
    rows, labels = features(own.texts), own.labels
    rng = np.random.default_rng(number)
    points = []
    moved = 0
    begun_s = time.monotonic()
    for _ in range(steps):
        newest = worker.pull(timeout_s=_common.TIMEOUT_S)
        batch = rng.integers(0, len(labels), BATCH)
        loss, gradients = gradients_of(newest, rows[batch], labels[batch])
        moved += sum(array.nbytes for array in newest.values())
        points.append(Point(time.monotonic() - begun_s, moved, loss))
        worker.push(gradients)
        moved += sum(array.nbytes for array in gradients.values())
    return points


def gradients_of(
    parameters: dict[str, Array], rows: Array, labels: Array
) -> tuple[float, dict[str, Array]]:
    """Return the mean cross-entropy and its gradients."""
    scores = rows @ parameters["weight"] + parameters["bias"]
    scores = np.exp(scores - scores.max(1, keepdims=True))
    wrong = scores / scores.sum(1, keepdims=True)
    each = np.arange(len(labels))
    loss = -float(np.log(wrong[each, labels]).mean())
    wrong[each, labels] -= 1
    wrong /= np.float32(len(labels))
    return loss, {"weight": rows.T @ wrong, "bias": wrong.sum(0)}


@click.command(help=__doc__)
@_common.directory_argument
@click.option("--workers", default=3, show_default=True)
@click.option("--steps", default=150, show_default=True, help="Of each worker.")
@click.option("--lr", default=8.0, show_default=True, help="Of a step of all workers.")
@_common.syncs_option
@_common.out_option
def main(
    directory: Path | None, workers: int, steps: int, lr: float, syncs: tuple[str, ...], out: Path
) -> None:
    train, test = django_texts()
    click.echo(
        f"{len(train.texts)} texts in {len(LANGUAGES)} languages, {len(test.texts)} to test with"
    )
    tested = features(test.texts)
    order = np.random.default_rng(0).permutation(len(train.texts))
    parts = [
        Texts([train.texts[index] for index in part], train.labels[part])
        for part in np.array_split(order, workers)
    ]
    first = {
        "weight": np.zeros((FEATURES, len(LANGUAGES)), np.float32),
        "bias": np.zeros(len(LANGUAGES), np.float32),
    }
    measured: dict[str, list[Point]] = {}
    with _common.place(directory) as place:
        for sync in syncs:
            # Versions stay long enough for a slow worker to push what it made of one.
            config = TrainConfig(
                rule="sum", lr=-lr / workers, sync=sync, workers=workers, keep=16 * workers
            )
            with _common.training(place / sync.replace(":", "-"), first, config) as trained:
                results = _common.run(learn, trained, workers, parts, [steps] * workers)
            newest = _common.read(trained)
            guessed = (tested @ newest["weight"] + newest["bias"]).argmax(1)
            accuracy = float((guessed == test.labels).mean())
            measured[sync] = sorted(point for points in results for point in points)
            spent_s = measured[sync][-1].seconds
            click.echo(f"{sync:6} {spent_s:6.1f} s, accuracy {accuracy:.4f}")
    for x in ("seconds", "bytes"):
        curves = {
            sync: sorted((getattr(point, x), point.loss) for point in points)
            for sync, points in measured.items()
        }
        _common.save_curves(out, f"text-{x}", x, "loss of a batch", curves)


if __name__ == "__main__":
    main()
