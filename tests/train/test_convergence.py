"""Workers in lockstep learn what one process learns from the batches of all, to the rounding of fp32."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.training_runs import reducing, start
from numpy.typing import NDArray

from irdmafs.train import Worker

Array = NDArray[Any]
Parameters = dict[str, Array]
Update = Callable[[int, Parameters, Parameters, Parameters], None]

INPUTS, OUTPUTS = 20, 5
BATCH = 24
STEPS = 20
LR = 0.1
TIMEOUT_S = 60.0


def first_parameters() -> Parameters:
    weight = np.random.default_rng(0).standard_normal((INPUTS, OUTPUTS))
    return {"weight": weight.astype(np.float32), "bias": np.zeros(OUTPUTS, np.float32)}


def batch(step: int) -> tuple[Array, Array]:
    """Return the inputs and labels of all workers."""
    random = np.random.default_rng(1000 + step)
    return random.standard_normal((BATCH, INPUTS)), random.integers(0, OUTPUTS, BATCH)


def loss_and_gradients(
    parameters: Parameters, inputs: Array, labels: Array
) -> tuple[float, Parameters]:
    """Return the mean cross-entropy of softmax regression and its gradients, in float64."""
    scores = inputs @ parameters["weight"].astype(np.float64) + parameters["bias"]
    each = np.exp(scores - scores.max(1, keepdims=True))
    each /= each.sum(1, keepdims=True)
    rows = np.arange(len(labels))
    loss = -float(np.log(each[rows, labels]).mean())
    each[rows, labels] -= 1
    each /= len(labels)
    return loss, {"weight": inputs.T @ each, "bias": each.sum(0)}


def momentum(step: int, parameters: Parameters, gradients: Parameters, kept: Parameters) -> None:
    for name, gradient in gradients.items():
        kept[name] = gradient + 0.9 * kept.get(name, 0)
        parameters[name] -= LR * kept[name]


def adamw(step: int, parameters: Parameters, gradients: Parameters, kept: Parameters) -> None:
    for name, gradient in gradients.items():
        average = kept[f"{name}.average"] = 0.9 * kept.get(f"{name}.average", 0) + 0.1 * gradient
        squares = 0.999 * kept.get(f"{name}.squares", 0) + 0.001 * gradient**2
        kept[f"{name}.squares"] = squares
        root = np.sqrt(squares / (1 - 0.999**step)) + 1e-8
        parameters[name] *= 1 - LR * 0.1
        parameters[name] -= LR * average / (1 - 0.9**step) / root


RULES: dict[str, tuple[dict[str, float], Update]] = {
    "sgd": ({"momentum": 0.9}, momentum),
    "adamw": ({"weight_decay": 0.1}, adamw),
}


def learn_alone(update: Update, clip_norm: float) -> tuple[Parameters, list[float]]:
    """Train in float64 on whole batches; return the parameters and the loss of each step."""
    parameters = {name: array.astype(np.float64) for name, array in first_parameters().items()}
    kept: Parameters = {}
    losses = []
    for step in range(1, STEPS + 1):
        loss, gradients = loss_and_gradients(parameters, *batch(step))
        losses.append(loss)
        norm = np.sqrt(sum(float(np.sum(one**2)) for one in gradients.values()))
        scale = min(1.0, clip_norm / norm) if clip_norm else 1.0
        update(step, parameters, {name: one * scale for name, one in gradients.items()}, kept)
    return parameters, losses


def learn_together(run: Path, workers: int) -> tuple[Parameters, list[float]]:
    """Train with workers whose parts of a batch are not of the same size; return the same of them."""
    cuts = np.cumsum([2 + number for number in range(workers - 1)])

    def work(number: int) -> tuple[Parameters, list[float]]:
        worker = members[number]
        parameters = worker.pull()
        losses = []
        for step in range(1, STEPS + 1):
            inputs, labels = (np.split(one, cuts)[number] for one in batch(step))
            loss, gradients = loss_and_gradients(parameters, inputs, labels)
            losses.append(loss * len(labels) / BATCH)
            pushed = {name: one.astype(np.float32) for name, one in gradients.items()}
            parameters = worker.push_pull(pushed, weight=len(labels), timeout_s=TIMEOUT_S)
        return parameters, losses

    with reducing(run), ExitStack() as stack:
        members = [stack.enter_context(Worker(run, f"w{number}")) for number in range(workers)]
        threads = stack.enter_context(ThreadPoolExecutor(workers))
        results = list(threads.map(work, range(workers)))
        return results[0][0], [
            sum(parts) for parts in zip(*(one for _, one in results), strict=True)
        ]


@pytest.mark.long
@pytest.mark.parametrize(("rule", "clip_norm", "workers"), [("sgd", 0.0, 2), ("adamw", 0.2, 4)])
def test_workers_in_lockstep_learn_what_one_process_learns(
    place: Path, rule: str, clip_norm: float, workers: int
) -> None:
    options, update = RULES[rule]
    run = start(
        place / "run", first_parameters(), rule=rule, lr=LR, options=options,
        clip_norm=clip_norm, workers=workers, shards=2,
    )  # fmt: skip
    found, losses = learn_together(run, workers)
    expected, losses_alone = learn_alone(update, clip_norm)
    np.testing.assert_allclose(losses, losses_alone, rtol=1e-5)
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-6)
    assert losses[-1] < losses[0]
