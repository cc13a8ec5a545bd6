"""Update rules: how the combined pushes of a plan change the master weights.

A rule works on elements, in place and in fp32, with numpy, whose results are the same on every host: two
reducers that make the same shard have to make the same bits.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import Meta

from .arithmetic import F32, F32_MAX, PART, ranges, scratch

State = Mapping[str, F32]
Option = float | bool
_Number = Annotated[float, Meta(ge=-F32_MAX, le=F32_MAX)]
_NotNegative = Annotated[float, Meta(ge=0, le=F32_MAX)]
_Share = Annotated[float, Meta(ge=0, lt=1)]


@dataclass(frozen=True)
class Rule(ABC):
    """An update rule; its fields are its options, checked by `make_rule`.

    ``combine`` says what is made of the pushes of a plan before: their weighted sum, or their weighted
    mean. ``default_lr`` is the usual learning rate, None for a rule that has none and ignores ``lr``.
    """

    combine: ClassVar[Literal["mean", "sum"]] = "mean"
    default_lr: ClassVar[float | None] = None

    @property
    def state(self) -> tuple[str, ...]:
        """The names of the fp32 arrays that the rule keeps beside the master weights, zeros at first."""
        return ()

    def apply(self, update: int, lr: float, combined: F32, master: F32, state: State) -> None:
        """Change ``master`` and ``state`` in place by the ``combined`` pushes, which are only read.

        All arrays are of the same length: those of a whole shard, or of any block of it. ``update``
        is the number of this one, 1 for the first.
        """
        with np.errstate(all="ignore"):
            for part in ranges(len(master), PART):
                kept = {name: state[name][part] for name in self.state}
                self._update(update, lr, combined[part], master[part], kept)

    @abstractmethod
    def _update(self, update: int, lr: float, grad: F32, param: F32, state: State) -> None:
        """Do what apply() does, with numpy, to at most PART elements."""


def _temporary(array: F32) -> F32:
    return scratch.floats[0, : len(array)]


def _add_scaled(target: F32, factor: float, array: F32) -> None:
    """target += factor * array"""
    product = np.multiply(array, np.float32(factor), out=_temporary(target))
    np.add(target, product, out=target)


def _move_towards(target: F32, goal: F32, rate: float) -> None:
    """target += rate * (goal - target)"""
    way = np.subtract(goal, target, out=_temporary(target))
    np.multiply(way, np.float32(rate), out=way)
    np.add(target, way, out=target)


def _with_decay(grad: F32, decay: float, param: F32) -> F32:
    """Return grad + decay * param, which is grad itself without a decay."""
    if not decay:
        return grad
    decayed = scratch.floats[1, : len(grad)]
    np.multiply(param, np.float32(decay), out=decayed)
    return np.add(grad, decayed, out=decayed)


@dataclass(frozen=True)
class Sum(Rule):
    """p += lr * g, where g is the sum of pushes that are changes to the parameters."""

    combine = "sum"
    default_lr = 1.0

    def _update(self, update: int, lr: float, grad: F32, param: F32, state: State) -> None:
        _add_scaled(param, lr, grad)


@dataclass(frozen=True)
class Mean(Rule):
    """p = g: the mean of pushes that are parameters. Federated averaging (McMahan et al. 2017)."""

    def _update(self, update: int, lr: float, grad: F32, param: F32, state: State) -> None:
        np.copyto(param, grad)


@dataclass(frozen=True)
class Sgd(Rule):
    """Stochastic gradient descent with momentum, as torch.optim.SGD does it."""

    default_lr = 1e-3
    momentum: _NotNegative = 0.0
    dampening: _Number = 0.0
    nesterov: bool = False
    weight_decay: _NotNegative = 0.0

    def __post_init__(self) -> None:
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise ValueError("nesterov needs a momentum, and a dampening of 0")

    @property
    def state(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    def _update(self, update: int, lr: float, grad: F32, param: F32, state: State) -> None:
        grad = _with_decay(grad, self.weight_decay, param)
        if not self.momentum:
            _add_scaled(param, -lr, grad)
            return
        momentum = state["momentum"]
        if update == 1:
            np.copyto(momentum, grad)
        else:
            np.multiply(momentum, np.float32(self.momentum), out=momentum)
            _add_scaled(momentum, 1 - self.dampening, grad)
        if self.nesterov:
            _add_scaled(param, -lr, grad)
            _add_scaled(param, -lr * self.momentum, momentum)
        else:
            _add_scaled(param, -lr, momentum)


@dataclass(frozen=True)
class DiLoCo(Sgd):
    """Nesterov momentum on the mean of deltas, each a worker's base minus its parameters after many steps
    of its own (Douillard et al. 2023, arXiv:2311.08105)."""

    default_lr = 0.7
    momentum: _NotNegative = 0.9
    nesterov: bool = True


@dataclass(frozen=True)
class Adam(Rule):
    """Adam (Kingma and Ba 2015), as torch.optim.Adam does it; weight_decay is added to the gradient."""

    default_lr = 1e-3
    beta1: _Share = 0.9
    beta2: _Share = 0.999
    eps: _NotNegative = 1e-8
    weight_decay: _NotNegative = 0.0

    @property
    def state(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def _decay(self, lr: float, grad: F32, param: F32) -> F32:
        """Apply the weight decay, and return the gradient to go on with."""
        return _with_decay(grad, self.weight_decay, param)

    def _update(self, update: int, lr: float, grad: F32, param: F32, state: State) -> None:
        average, squares = state["exp_avg"], state["exp_avg_sq"]
        grad = self._decay(lr, grad, param)
        _move_towards(average, grad, 1 - self.beta1)
        np.multiply(squares, np.float32(self.beta2), out=squares)
        square = np.multiply(grad, grad, out=_temporary(grad))
        np.multiply(square, np.float32(1 - self.beta2), out=square)
        np.add(squares, square, out=squares)
        # Both bias corrections are factors of scalars, the form at the end of the paper's section 2.
        root_correction = math.sqrt(1 - self.beta2**update)
        step = lr * root_correction / (1 - self.beta1**update)
        divisor = np.sqrt(squares, out=_temporary(grad))
        np.add(divisor, np.float32(self.eps * root_correction), out=divisor)
        change = scratch.floats[1, : len(grad)]
        np.multiply(average, np.float32(-step), out=change)
        np.divide(change, divisor, out=change)
        np.add(param, change, out=param)


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam whose weight decay acts on the parameters alone (Loshchilov and Hutter 2019), as
    torch.optim.AdamW does it."""

    weight_decay: _NotNegative = 0.01

    def _decay(self, lr: float, grad: F32, param: F32) -> F32:
        if self.weight_decay:
            np.multiply(param, np.float32(1 - lr * self.weight_decay), out=param)
        return grad


@dataclass(frozen=True)
class Easgd(Rule):
    """p += beta * (mean of x_i - p): the centre of elastic averaging, where pushes are the parameters x_i
    of the workers (Zhang, Choromanska and LeCun 2015, arXiv:1412.6651, equation 4).

    ``beta`` is the paper's: the number of workers times their own moving rate alpha. Where a version is
    made of one worker's push (async), it has to be alpha itself.
    """

    beta: _NotNegative = 0.9

    def _update(self, update: int, lr: float, grad: F32, param: F32, state: State) -> None:
        _move_towards(param, grad, self.beta)


@dataclass(frozen=True)
class Ema(Rule):
    """p = decay * p + (1 - decay) * g: an exponential moving average of pushes that are parameters."""

    decay: _Share = 0.999

    def _update(self, update: int, lr: float, grad: F32, param: F32, state: State) -> None:
        _move_towards(param, grad, 1 - self.decay)


RULES: dict[str, type[Rule]] = {
    "sum": Sum,
    "mean": Mean,
    "sgd": Sgd,
    "adam": Adam,
    "adamw": AdamW,
    "easgd": Easgd,
    "ema": Ema,
    "diloco": DiLoCo,
}


# -- by name -----------------------------------------------------------------------------------


def options_of(name: str) -> dict[str, Option]:
    """Return the options of a rule with their defaults. Raises ValueError for an unknown rule."""
    if name not in RULES:
        raise ValueError(f"no rule {name!r}; there are {', '.join(RULES)}")
    rule = RULES[name]
    return {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule)}


def make_rule(name: str, options: Mapping[str, Option]) -> Rule:
    """Make a rule of RULES; options that are not given have their defaults. Raises ValueError for an
    unknown rule or option and for a value that makes no sense."""
    known = options_of(name)
    if unknown := options.keys() - known.keys():
        has = f"it has {', '.join(known)}" if known else "it has none"
        raise ValueError(f"the rule {name} has no option {min(unknown)!r}; {has}")
    try:
        return msgspec.convert(options, RULES[name])
    except msgspec.ValidationError as error:
        raise ValueError(f"the options of the rule {name}: {error}") from None
