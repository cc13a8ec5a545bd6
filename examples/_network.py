"""A network with one hidden layer in numpy, and scikit-learn's digits for it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Parameters = dict[str, Array]
HIDDEN = 64


def digits(rng: np.random.Generator) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Return images, of 64 pixels from 0 to 1, and labels: to train with, and every fifth to test with."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = rng.permutation(len(labels))
    images, labels = (images[order] / 16).astype(np.float32), labels[order]
    tested = np.arange(len(labels)) % 5 == 0
    return (images[~tested], labels[~tested]), (images[tested], labels[tested])


def first_parameters(rng: np.random.Generator) -> Parameters:
    """Return random parameters (He et al. 2015, arXiv:1502.01852)."""
    return {
        "hidden.weight": _random(rng, 64, HIDDEN),
        "hidden.bias": np.zeros(HIDDEN, np.float32),
        "output.weight": _random(rng, HIDDEN, 10),
        "output.bias": np.zeros(10, np.float32),
    }


def _random(rng: np.random.Generator, inputs: int, outputs: int) -> Array:
    weights: Array = rng.standard_normal((inputs, outputs)) * np.sqrt(2 / inputs)
    return weights.astype(np.float32)


def train_epoch(
    parameters: Parameters,
    images: Array,
    labels: Array,
    lr: float,
    batch: int,
    rng: np.random.Generator,
) -> None:
    """Change parameters in place: one epoch of SGD on the cross-entropy."""
    order = rng.permutation(len(labels))
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        for name, gradient in gradients(parameters, images[rows], labels[rows]).items():
            parameters[name] -= np.float32(lr) * gradient


def gradients(parameters: Parameters, images: Array, labels: Array) -> Parameters:
    """Return the gradients of the mean cross-entropy."""
    hidden, scores = _forward(parameters, images)
    scores = np.exp(scores - scores.max(1, keepdims=True))
    wrong = scores / scores.sum(1, keepdims=True)
    wrong[np.arange(len(labels)), labels] -= 1
    wrong /= np.float32(len(labels))
    back = (wrong @ parameters["output.weight"].T) * (hidden > 0)
    return {
        "hidden.weight": images.T @ back,
        "hidden.bias": back.sum(0),
        "output.weight": hidden.T @ wrong,
        "output.bias": wrong.sum(0),
    }


def accuracy(parameters: Parameters, images: Array, labels: Array) -> float:
    """Return the part of the images whose label has the highest score."""
    return float((_forward(parameters, images)[1].argmax(1) == labels).mean())


def _forward(parameters: Parameters, images: Array) -> tuple[Array, Array]:
    hidden = np.maximum(images @ parameters["hidden.weight"] + parameters["hidden.bias"], 0)
    return hidden, hidden @ parameters["output.weight"] + parameters["output.bias"]
