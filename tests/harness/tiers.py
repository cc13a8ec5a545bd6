"""Tiers of tests, by what has to be started for them. `scripts/test` runs a tier and those below it.

units      nothing: `scripts/test quick`, but for what is marked long
promises   programs, mounts of the kernel session, and the etcd and the cluster that tests share
all        etcd or a cluster of a test's own, or one that it harms, the pyfuse3 session, mounts of clusters,
           devices for RDMA, and what is slow

Nobody writes down the tier of a test. `tier_of` finds it in the code of the test, in that of its fixtures
and in what they call. A test that starts something by other ways fails: whatever starts asks `allow`.
"""

from __future__ import annotations

import contextlib
import inspect
import subprocess
from collections.abc import Iterator
from enum import IntEnum
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


class Tier(IntEnum):
    UNITS = 0
    PROMISES = 1
    ALL = 2


# The tier of a test whose code names these.
_STARTS = {
    "harness.cluster.Cluster": Tier.ALL,
    "harness.etcd.Etcd": Tier.ALL,
    "harness.network.make_network": Tier.ALL,
    "harness.daemons.Daemon": Tier.PROMISES,
    "harness.forks.start": Tier.PROMISES,
    "subprocess": Tier.PROMISES,
}
# Fixtures of conftest.py that start a mount or what tests share. No other fixture there starts anything.
_SHARED = {"module_mount", "new_mount", "training_mount"}
_SHARED |= {"shared_cluster", "etcd", "process", "small_tmpfs"}
# Markers and parameters of the tests that only the highest tier has.
_MARKERS = ("slow", "verbs", "guest_tests")
_SESSIONS = ("pyfuse3", "cluster")


class _State:
    """Keeps the tier of the test that runs."""

    def __init__(self) -> None:
        self.tier = Tier.ALL


_state = _State()


def allow(tier: Tier, what: str) -> None:
    """Raise AssertionError if the test that runs is in a lower tier, and thus must not start `what`."""
    assert tier <= _state.tier, f"{what} is started by a test of the tier {_state.tier.name}"


@contextlib.contextmanager
def running(tier: Tier) -> Iterator[None]:
    """Run a test of this tier in this block, or start what tests of lower tiers share."""
    before, _state.tier = _state.tier, tier
    try:
        yield
    finally:
        _state.tier = before


def tier_of(item: pytest.Item) -> Tier:
    import pytest

    assert isinstance(item, pytest.Function)
    if any(item.get_closest_marker(name) is not None for name in _MARKERS):
        return Tier.ALL
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if parameters.get("session") in _SESSIONS:
        return Tier.ALL
    found = [_tier_of_code(item.function)]
    if item.get_closest_marker("long") is not None:
        found.append(Tier.PROMISES)
    if parameters.get("place") == "mount":
        found.append(Tier.PROMISES)
    for name, definitions in item._fixtureinfo.name2fixturedefs.items():
        function = definitions[-1].func
        if function.__module__ != "conftest":
            found.append(_tier_of_code(function))
        elif name == "failing" or (name == "cluster" and hasattr(item.module, "PLAN")):
            found.append(Tier.ALL)
        elif name in _SHARED:
            found.append(Tier.PROMISES)
    return max(found)


@cache
def _tier_of_code(code: Any) -> Tier:
    """Return the tier of a function or a class: the highest one of all that it names."""
    seen: set[int] = set()
    found = Tier.UNITS
    waiting = [code]
    while waiting:
        one = inspect.unwrap(waiting.pop())
        if id(one) in seen:
            continue
        seen.add(id(one))
        is_module = isinstance(one, ModuleType)
        name = one.__name__ if is_module else f"{one.__module__}.{one.__qualname__}"
        found = max(found, _STARTS.get(name, Tier.UNITS))
        if isinstance(one, FunctionType):
            waiting += _named(one)
        elif isinstance(one, type):
            waiting += [value for value in vars(one).values() if isinstance(value, FunctionType)]
            waiting += [base for base in one.__bases__ if _is_ours(base)]
    return found


def _named(function: FunctionType) -> Iterator[Any]:
    """Yield what a function names of tests, of the harness and of what starts processes."""
    names = set(_names(function.__code__))
    for name in names:
        value = function.__globals__.get(name)
        if _is_ours(value) or value is subprocess:
            yield value
        elif isinstance(value, ModuleType) and value.__name__.startswith("harness."):
            yield from (vars(value)[one] for one in names if _is_ours(vars(value).get(one)))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_ours(value: object) -> bool:
    if not isinstance(value, type | FunctionType):
        return False
    return value.__module__.startswith(("harness.", "test_", "conftest"))
