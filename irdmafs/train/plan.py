"""Decide which pushes make the next version. Pure: the decisions that the protocol's model tests."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import msgspec

from .config import Nonfinite, TrainConfig
from .rules import RULES


class Push(NamedTuple):
    """A push that is there, whole. `step`: 0: the worker's next. `path`: its name in push/. `base`: the
    version that it was made from; -1 if that was not said. `lr`: None if it was not said."""

    worker: str
    step: int
    path: str = ""
    weight: float = 1.0
    base: int = -1
    lr: float | None = None


class PushInPlan(msgspec.Struct, frozen=True):
    """A push that counts in a version. `weight` is what it is multiplied by, 0 if it is skipped. `lr` is
    that of its update, where it is one of its own."""

    worker: str
    step: int
    path: str
    weight: float
    lr: float = 0.0


class Update(NamedTuple):
    """An update of the parameters: the rule is applied once, to the sum or mean of these pushes. `number`
    is 1 for the first of a run."""

    number: int
    lr: float
    pushes: tuple[PushInPlan, ...]


class Plan(msgspec.Struct, frozen=True):
    """The contents of version.json: all that a version is made from, but the pushes' contents and the
    version before. `clocks`: the last step of each worker that counted, in this version or before. `apart`:
    each push is an update of its own, in the order of `pushes`; else they are one together. `updates`: how
    many have made this version and those before. `nonfinite`: as in the configuration."""

    version: int
    pushes: tuple[PushInPlan, ...]
    clocks: dict[str, int]
    rule: str
    options: dict[str, float | bool]
    lr: float
    clip_norm: float
    apart: bool = False
    updates: int = 0
    nonfinite: Nonfinite = "refuse"

    def each_update(self) -> list[Update]:
        """Return the updates that make this version, in their order."""
        if not self.apart:
            return [Update(self.updates, self.lr, self.pushes)]
        first = self.updates - len(self.pushes) + 1
        return [Update(first + n, push.lr, (push,)) for n, push in enumerate(self.pushes)]


def first_plan(config: TrainConfig) -> Plan:
    """Return the plan of version 0, which no push is in."""
    lr, options = config.learning_rate, dict(config.options)
    clip, nonfinite = config.clip_norm, config.nonfinite
    return Plan(0, (), {}, config.rule, options, lr, clip, nonfinite=nonfinite)


def pending(pushes: Iterable[Push], clocks: Mapping[str, int]) -> list[Push]:
    """Return the pushes that no version has, in the order in which they are summed up. Of two with the same
    worker and step the first by name is taken."""
    found: dict[tuple[str, int], Push] = {}
    for push in sorted(pushes, key=lambda one: (one.worker, one.step, one.path)):
        if push.step > clocks.get(push.worker, 0):
            found.setdefault((push.worker, push.step), push)
    return list(found.values())


def is_wanted(
    config: TrainConfig, waiting: Collection[Push], members: Collection[str]
) -> tuple[bool, list[str]]:
    """Return whether pending pushes suffice for a version, and the members that it waits for."""
    came = {push.worker for push in waiting}
    kind, number = config.synchronization
    if kind in ("ssp", "async"):
        return bool(came), []
    wanted = set(config.workers if isinstance(config.workers, tuple) else members)
    absent = sorted(wanted - came)
    count = config.workers if isinstance(config.workers, int) else None
    if kind == "quorum":
        enough = len(came) >= min(number, count or len(wanted) or 1)
    else:
        enough = not absent if count is None else len(came) >= count
    return bool(came) and enough, [] if enough else absent


def next_plan(
    config: TrainConfig, newest: Plan, pushes: Iterable[Push], members: Collection[str]
) -> Plan | None:
    """Return the plan of the version after `newest`; None: not yet."""
    waiting = pending(pushes, newest.clocks)
    if not is_wanted(config, waiting, members)[0]:
        return None
    taken = waiting
    apart = config.synchronization.kind in ("ssp", "async")
    if not apart:
        # One step of each worker; the further ones are for the versions after.
        first: dict[str, Push] = {}
        for push in waiting:
            first.setdefault(push.worker, push)
        taken = list(first.values())
    lr = next((push.lr for push in taken if push.lr is not None), config.learning_rate)
    # A mean is divided by its weights: one push alone is made to count less by its learning rate.
    scales_lr = apart and RULES[config.rule].combine == "mean"
    counted = []
    for push in taken:
        weight = push.weight
        own_lr = push.lr if apart and push.lr is not None else lr
        if config.staleness == "inverse" and push.base >= 0:
            age = 1 + max(0, newest.version - push.base)
            weight, own_lr = (weight, own_lr / age) if scales_lr else (weight / age, own_lr)
        counted.append(PushInPlan(push.worker, push.step, push.path, weight, own_lr))
    clocks = dict(newest.clocks)
    for push in taken:
        clocks[push.worker] = max(clocks.get(push.worker, 0), push.step)
    return msgspec.structs.replace(
        first_plan(config), version=newest.version + 1, pushes=tuple(counted), clocks=clocks,
        lr=lr, apart=apart, updates=newest.updates + (len(counted) if apart else 1),
    )  # fmt: skip


def is_foreseen(config: TrainConfig) -> bool:
    """Return whether a plan can be foreseen from what is in staging/: which pushes the next version has.
    What clips, or looks for NaN, needs all shards or another plan."""
    lockstep = config.synchronization.kind in ("bsp", "local")
    return lockstep and not config.clip_norm and config.nonfinite != "skip"


def without(plan: Plan, gone: Collection[str]) -> Plan:
    """Return the plan of another attempt: pushes at paths that are gone have weight 0."""
    pushes = tuple(
        msgspec.structs.replace(push, weight=0.0) if push.path in gone else push
        for push in plan.pushes
    )
    return msgspec.structs.replace(plan, pushes=pushes)


def may_pull(
    config: TrainConfig,
    worker: str,
    pushed: int,
    step: int,
    clocks: Mapping[str, int],
    members: Mapping[str, int],
) -> bool:
    """Return whether a worker may go on with the version that has these clocks. `pushed`: its last push, 0
    before the first; `step`: that, or its clock when it joined; `members`: the clocks when they joined."""
    if clocks.get(worker, 0) < pushed:
        return False
    kind, number = config.synchronization
    others = [max(clocks.get(name, 0), at) for name, at in members.items() if name != worker]
    return kind != "ssp" or min(others, default=step) >= step - number
