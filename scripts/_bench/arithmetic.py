"""The arithmetic of a reducer beside what the machine's memory and torch can do."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import ml_dtypes
import numpy as np

from irdmafs.train.arithmetic import Blocks, accumulate, square_sum
from irdmafs.train.rules import make_rule

from .command import SETTINGS, asserting, finish, json_file, measuring, say, turned
from .files import MIB, now
from .tables import Rates, Row

OURS, BASE = "irdmafs", "beside"
PUSHES = 4
ROWS = (
    Row("sum F32", f"sum of {PUSHES} F32 pushes, beside numpy's a + b", "GB/s", bar=0.8),
    Row("sum BF16", f"sum of {PUSHES} BF16 pushes, beside the same", "GB/s"),
    Row("squares", "sum of squares, beside the same", "GB/s"),
    Row("to BF16", "rounding to BF16, beside the same", "GB/s"),
    Row("adamw", "AdamW in blocks, beside torch's fused kernel", "GB/s"),
)
# A step of AdamW reads gradient, parameter and two moments, and writes all but the gradient.
ADAMW_STREAMS = 7

Arrays = list[np.ndarray[Any, np.dtype[np.float32]]]


class Contenders:
    """The measured functions, on arrays of `elements`; each returns the least bytes that it moves."""

    def __init__(self, elements: int, blocks: Blocks, torch: Any) -> None:
        rng = np.random.default_rng(1)
        # Values that stay finite for any number of steps.
        self._arrays: Arrays = [rng.random(elements, np.float32) for _ in range(PUSHES + 1)]
        self._halves = [array.astype(ml_dtypes.bfloat16) for array in self._arrays]
        self._blocks = blocks
        self._rule = make_rule("adamw", {})
        self._optimizer: Any = None
        if torch is not None:
            parameter = torch.nn.Parameter(torch.from_numpy(self._arrays[0].copy()))
            parameter.grad = torch.from_numpy(self._arrays[1])
            self._optimizer = torch.optim.AdamW([parameter], fused=True)

    def of(self, row: str) -> dict[str, Callable[[], int]]:
        """Return the contenders of a row by column."""
        ours: dict[str, Callable[[], int]] = {
            "sum F32": self._sum,
            "sum BF16": self._sum_halves,
            "squares": self._squares,
            "to BF16": self._round,
        }
        if row in ours:
            return {OURS: ours[row], BASE: self._add}
        found: dict[str, Callable[[], int]] = {OURS: self._adamw}
        if self._optimizer is not None:
            found[BASE] = self._step
        return found

    def _each(self, work: Callable[[slice], object]) -> None:
        self._blocks.each(len(self._arrays[0]), work)

    def _add(self) -> int:
        out, a, b, *_ = self._arrays
        self._each(lambda part: np.add(a[part], b[part], out=out[part]))
        return 3 * out.nbytes

    def _sum(self) -> int:
        out, *pushes = self._arrays
        self._each(lambda part: accumulate(out[part], [(one[part], 1.0) for one in pushes]))
        return (PUSHES + 1) * out.nbytes

    def _sum_halves(self) -> int:
        out, pushes = self._arrays[0], self._halves[1:]
        self._each(lambda part: accumulate(out[part], [(one[part], 1.0) for one in pushes]))
        return out.nbytes + sum(one.nbytes for one in pushes)

    def _squares(self) -> int:
        square_sum(self._arrays[1], self._blocks)
        return self._arrays[1].nbytes

    def _round(self) -> int:
        values, out = self._arrays[1], self._halves[0]
        self._each(lambda part: np.copyto(out[part], values[part], casting="unsafe"))
        return values.nbytes + out.nbytes

    def _adamw(self) -> int:
        rule = self._rule
        master, grad, *moments = self._arrays[: 2 + len(rule.state)]
        state = dict(zip(rule.state, moments, strict=True))
        self._each(
            lambda part: rule.apply(
                9, 1e-3, grad[part], master[part], {name: state[name][part] for name in state}
            )
        )
        return ADAMW_STREAMS * grad.nbytes

    def _step(self) -> int:
        self._optimizer.step()
        return ADAMW_STREAMS * self._arrays[0].nbytes


def best_rate(contender: Callable[[], int], times: int) -> float:
    """Return GB/s of the fastest of several calls, after one that is not counted."""
    contender()
    rates = []
    for _ in range(times):
        began = now()
        moved = contender()
        rates.append(moved / (now() - began) / 1e9)
    return max(rates)


def find_torch(threads: int) -> Any:
    """Return torch with that number of threads, None where it is not installed."""
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(threads)
    return torch


@click.command("train-arithmetic", context_settings=SETTINGS)
@click.option("--size", "size_mib", default=64, show_default=True, help="MiB of an fp32 array.")
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--times", type=click.IntRange(1), default=5, show_default=True)
@json_file
@asserting
def train_arithmetic(
    size_mib: int, threads: int, rounds: int, times: int, json_file: Path | None, assert_: bool
) -> None:
    """Sum pushes and apply AdamW as a reducer does, beside numpy's a + b and torch's fused step.

    Of each contender the fastest of --times calls counts; they take turns, --rounds times.
    """
    rates = Rates(ROWS, OURS, BASE, (OURS, BASE), "{:.1f}".format)
    with measuring(), Blocks(threads) as blocks:
        contenders = Contenders(size_mib * MIB // 4, blocks, find_torch(threads))
        gc.collect()
        for round_ in range(rounds):
            say("all", round_, rounds)
            for row in turned(ROWS, round_):
                for column, contender in turned(list(contenders.of(row.key).items()), round_):
                    rates.add(column, row.key, round_, best_rate(contender, times))
    finish(rates, 130, json_file, assert_)
