"""Update rules, against torch's optimizers and against their formulas in float64."""

import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from harness.example_programs import needs
from harness.late_imports import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from irdmafs.client._dtypes import Array
from irdmafs.train.arithmetic import BLOCK, F32, PART, Blocks
from irdmafs.train.rules import RULES, Option, Rule, make_rule, options_of

F64 = NDArray[np.float64]

STEPS = 20
LR = 0.05

SGD: tuple[Mapping[str, Option], ...] = (
    {},
    {"weight_decay": 0.1},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True},
)
# Comparisons with torch.optim: the rule, its options, the optimizer there.
OPTIMIZERS: list[tuple[str, Mapping[str, Option], str]] = [
    *(("sgd", options, "SGD") for options in SGD),
    ("diloco", {}, "SGD"),
    ("adam", {}, "Adam"),
    ("adam", {"beta1": 0.8, "beta2": 0.95, "eps": 1e-2, "weight_decay": 0.1}, "Adam"),
    ("adamw", {}, "AdamW"),
    ("adamw", {"beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.0}, "AdamW"),
]


def gradients(size: int, steps: int = STEPS) -> F32:
    """A gradient for each step; those of an element differ in size by decades."""
    rng = np.random.default_rng(11)
    return (rng.standard_normal((steps, size)) * 10.0 ** rng.uniform(-6, 1, size)).astype(
        np.float32
    )


def parameters(size: int) -> F32:
    return np.random.default_rng(12).standard_normal(size).astype(np.float32)


def is_close(found: F32, expected: Array, master: F32, pushes: F32) -> bool:
    """Return whether they differ by a few roundings of each step."""
    reach = 1 + np.abs(master) + np.abs(pushes).sum(axis=0)
    return bool((np.abs(found - expected) <= STEPS * 2.0**-22 * reach).all())


class Shard:
    """Master weights and the state of a rule."""

    def __init__(self, rule: Rule, master: F32) -> None:
        self.rule = rule
        self.master = master.copy()
        self.state = {name: np.zeros_like(master) for name in rule.state}

    def step(self, version: int, combined: F32, part: slice = slice(None), lr: float = LR) -> None:
        state = {name: array[part] for name, array in self.state.items()}
        self.rule.apply(version, lr, combined[part], self.master[part], state)

    def train(self, pushes: F32) -> F32:
        for version, combined in enumerate(pushes, 1):
            self.step(version, combined)
        return self.master

    def bits(self) -> bytes:
        return b"".join(one.tobytes() for one in (self.master, *self.state.values()))


# -- formulas ----------------------------------------------------------------------------------


def reference(name: str, options: Mapping[str, Option], master: F64, pushes: F64) -> F64:
    """The rules as papers and torch's documentation have them, in float64."""
    rule: Any = make_rule(name, options)
    p = master.copy()
    first, second = np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(pushes, 1):
        if name == "sum":
            p = p + LR * g
        elif name == "mean":
            p = g
        elif name == "easgd":
            p = (1 - rule.beta) * p + rule.beta * g
        elif name == "ema":
            p = rule.decay * p + (1 - rule.decay) * g
        elif name in ("sgd", "diloco"):
            g = g + rule.weight_decay * p
            first = g if t == 1 else rule.momentum * first + (1 - rule.dampening) * g
            p = p - LR * (
                g + rule.momentum * first if rule.nesterov else first if rule.momentum else g
            )
        else:
            if name == "adam":
                g = g + rule.weight_decay * p
            else:
                p = p - LR * rule.weight_decay * p
            first = rule.beta1 * first + (1 - rule.beta1) * g
            second = rule.beta2 * second + (1 - rule.beta2) * g * g
            corrected = first / (1 - rule.beta1**t)
            p = p - LR * corrected / (np.sqrt(second / (1 - rule.beta2**t)) + rule.eps)
    return p


EVERY_RULE: list[tuple[str, Mapping[str, Option]]] = [
    *((name, options) for name, options, _ in OPTIMIZERS),
    *((name, {}) for name in ("sum", "mean", "easgd", "ema")),
    ("easgd", {"beta": 0.1}),
    ("ema", {"decay": 0.5}),
]


def test_every_rule_is_tried() -> None:
    assert {name for name, _ in EVERY_RULE} == set(RULES)


@pytest.mark.parametrize(("name", "options"), EVERY_RULE)
def test_a_rule_computes_its_formula(name: str, options: Mapping[str, Option]) -> None:
    size = PART + 1001
    pushes, master = gradients(size), parameters(size)
    found = Shard(make_rule(name, options), master).train(pushes)
    expected = reference(name, options, master.astype(np.float64), pushes.astype(np.float64))
    assert is_close(found, expected, master, pushes)


@needs("torch")
@pytest.mark.parametrize(("name", "options", "optimizer"), OPTIMIZERS)
def test_a_rule_is_that_of_torch(name: str, options: Mapping[str, Option], optimizer: str) -> None:
    size = 4099
    pushes, master = gradients(size), parameters(size)
    given = {**options_of(name), **options}
    if "beta1" in given:
        given["betas"] = (given.pop("beta1"), given.pop("beta2"))  # type: ignore[assignment]
    parameter = torch.from_numpy(master.copy()).requires_grad_()
    optimizer_ = getattr(torch.optim, optimizer)([parameter], lr=LR, **given)
    shard = Shard(make_rule(name, options), master)
    for version, combined in enumerate(pushes, 1):
        parameter.grad = torch.from_numpy(combined.copy())
        optimizer_.step()
        shard.step(version, combined)
        expected = parameter.detach().numpy()
        assert is_close(shard.master, expected, master, pushes), f"version {version}"
    for kept in shard.rule.state:
        key = "momentum_buffer" if kept == "momentum" else kept
        expected = optimizer_.state[parameter][key].numpy()
        assert np.allclose(shard.state[kept], expected, rtol=1e-5, atol=1e-6)


# -- blocks ------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(sorted(RULES)), st.lists(st.integers(0, 2 * PART), max_size=5))
def test_cutting_the_arrays_changes_no_bit(name: str, cuts: list[int]) -> None:
    rule = make_rule(name, {})
    size = 2 * PART + 7
    pushes, master = gradients(size, 3), parameters(size)
    edges = sorted({0, size, *cuts})
    whole, cut = Shard(rule, master), Shard(rule, master)
    whole.train(pushes)
    for version, combined in enumerate(pushes, 1):
        for first, end in itertools.pairwise(edges):
            cut.step(version, combined, slice(first, end))
    assert cut.bits() == whole.bits()


@pytest.mark.parametrize("name", ["sgd", "diloco", "adam", "adamw"])
def test_threads_change_no_bit(name: str) -> None:
    size = 5 * BLOCK + 33
    pushes, master = gradients(size, 2), parameters(size)
    rule = make_rule(name, {})
    alone, together = Shard(rule, master), Shard(rule, master)
    alone.train(pushes)
    with Blocks(3) as blocks:
        for version, combined in enumerate(pushes, 1):
            blocks.each(size, functools.partial(together.step, version, combined))
    assert together.bits() == alone.bits()


@pytest.mark.parametrize("name", sorted(RULES))
def test_pushes_are_only_read(name: str) -> None:
    pushes = gradients(1001, 2)
    before = pushes.tobytes()
    shard = Shard(make_rule(name, {}), parameters(1001))
    array = shard.master
    shard.train(pushes)
    assert pushes.tobytes() == before
    assert shard.master is array and np.isfinite(array).all()


def test_a_push_that_is_not_finite_comes_out_without_a_warning() -> None:
    pushes = np.array([[np.inf, np.nan, 3e38, 0]], np.float32)
    found = Shard(make_rule("adamw", {}), np.ones(4, np.float32)).train(pushes)
    assert math.isnan(found[0]) and math.isnan(found[1]) and math.isfinite(found[3])


# -- names and options -------------------------------------------------------------------------


def test_a_rule_says_what_it_is_given_and_its_options_are_those_of_the_declaration() -> None:
    diloco = {"momentum": 0.9, "dampening": 0.0, "nesterov": True, "weight_decay": 0.0}
    assert options_of("diloco") == diloco
    assert options_of("sum") == {}
    assert options_of("adamw")["weight_decay"] == 0.01
    means = {name for name, rule in RULES.items() if rule.combine == "mean"}
    assert set(RULES) - means == {"sum"}
    assert RULES["diloco"].default_lr == 0.7
    assert RULES["mean"].default_lr is None


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("lamb", {}, "no rule 'lamb'; there are sum, mean, sgd, adam"),
        ("sgd", {"beta1": 0.9}, "no option 'beta1'; it has momentum, dampening"),
        ("sum", {"beta1": 0.9}, "no option 'beta1'; it has none"),
        ("sgd", {"nesterov": 1}, "the options of the rule sgd: .*bool.* - at `\\$.nesterov`"),
        ("sgd", {"momentum": True}, "float.* - at `\\$.momentum`"),
        ("sgd", {"momentum": "0.9"}, "float.* - at `\\$.momentum`"),
        ("sgd", {"nesterov": True}, "nesterov needs a momentum"),
        ("sgd", {"weight_decay": -1}, ">= 0.0 - at `\\$.weight_decay`"),
        ("sgd", {"dampening": 1e39}, "- at `\\$.dampening`"),
        ("adamw", {"beta2": 1.0}, "< 1.0 - at `\\$.beta2`"),
        ("ema", {"decay": math.nan}, "- at `\\$.decay`"),
    ],
)
def test_what_makes_no_rule_is_refused(name: str, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_rule(name, options)
