"""The file `status` of a training directory: how far it is, and who is waited for."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from . import refusals
from .config import TrainConfig
from .directory import COORDINATOR, TrainDirectory, read_small, replace
from .errors import TrainError
from .liveness import is_locked
from .plan import Plan, Push, is_wanted, pending
from .pushes import push_by_name
from .refusals import Refusal

__all__ = [
    "Progress",
    "StatusFile",
    "current",
    "how_to_reduce",
    "is_reduced",
    "no_reducer",
    "progress_of",
    "report",
]

# A change is shown after so long at the latest.
_PERIOD_S = 0.5
# Of those who take no part and of whom nothing has counted so many are listed: whoever may push may do so
# under any number of names.
_STRANGERS_MAX = 20


class Progress(NamedTuple):
    """How far a training is. `clocks`: the last step of each worker that counted; `pushed`: the step of a
    push that is pending; `awaited`: who is waited for; `members`: who takes part."""

    version: int
    rule: str
    sync: str
    clocks: Mapping[str, int]
    pushed: Mapping[str, int]
    awaited: Sequence[str]
    members: Sequence[str]

    def text(self, refused: Sequence[Refusal], *more: str) -> str:
        """Return what `cat status` prints. `more`: lines with more about the version."""
        workers = sorted({*self.clocks, *self.members})
        strangers = sorted(self.pushed.keys() - {*workers})
        first = max(self.clocks.values(), default=0)
        lines = [
            f"version   {self.version}",
            f"rule      {self.rule}, {self.sync}",
            *more,
            f"waits for {', '.join(self.awaited) or 'nobody' if self.pushed else 'pushes'}",
            "",
            "worker                         clock  behind  pushed  takes part",
        ]
        for name in (*workers, *strangers[:_STRANGERS_MAX]):
            clock, pushed = self.clocks.get(name, 0), self.pushed.get(name, "-")
            part = "yes" if name in self.members else "no"
            lines.append(f"{name:30} {clock:5}  {first - clock:6}  {pushed!s:>6}  {part}")
        if len(strangers) > _STRANGERS_MAX:
            lines.append(f"and {len(strangers) - _STRANGERS_MAX} more")
        if refused:
            lines += ["", "refused:"]
            for one in refused:
                when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.made_s))
                lines.append(f"{when}  {one.path}: {one.reason}")
        return "\n".join(lines) + "\n"


def progress_of(
    config: TrainConfig,
    newest: Plan,
    waiting: Collection[Push],
    awaited: Sequence[str],
    members: Collection[str],
) -> Progress:
    """Return how far a training is by the newest version and the pushes that are pending."""
    pushed = {push.worker: push.step for push in waiting}
    return Progress(
        newest.version, config.rule, config.sync, newest.clocks, pushed, awaited, sorted(members)
    )


class StatusFile:
    """The file `status`, which the coordinator writes."""

    def __init__(self, train: TrainDirectory) -> None:
        self._train = train
        self._written: tuple[object, ...] = ()
        self._written_s = 0.0

    def show(self, progress: Progress) -> None:
        """Write the file anew, if there is something to show. Raises OSError."""
        refused = refusals.newest(self._train)
        shown = (progress, refused)
        now_s = time.monotonic()
        if shown != self._written and now_s >= self._written_s + _PERIOD_S:
            self._written, self._written_s = shown, now_s
            replace(self._train.status, progress.text(refused).encode())


def how_to_reduce(train: TrainDirectory) -> str:
    """Return the command that starts a reducer."""
    return f"irdmafs train reduce {shlex.quote(str(train.models.absolute()))}"


def is_reduced(train: TrainDirectory) -> bool:
    """Return whether a reducer makes versions: it holds the coordinator's lock. Raises OSError."""
    return is_locked(train.reducers / COORDINATOR)


def no_reducer(train: TrainDirectory) -> str:
    """Return what to say where no reducer is at work."""
    return f"no reducer is at work: {how_to_reduce(train)}"


def current(train: TrainDirectory) -> tuple[Progress, bool]:
    """Return how far a training is now, as its files and locks tell, whether or not a coordinator is at
    work, and whether there are pushes enough for the next version. Raises TrainError and OSError."""
    config, newest = train.config(), train.newest_plan()
    members = [
        name
        for name in os.listdir(train.workers)
        if not name.startswith(".") and is_locked(train.workers / name)
    ]
    refused = {one.path for one in refusals.newest(train)}
    pushes = []
    for name in os.listdir(train.push):
        push = push_by_name(name)
        if push is not None and refusals.one_line(name) not in refused:
            step = push.step or newest.clocks.get(push.worker, 0) + 1
            pushes.append(push._replace(step=step))
    waiting = pending(pushes, newest.clocks)
    enough, awaited = is_wanted(config, waiting, members)
    return progress_of(config, newest, waiting, awaited, members), enough


def report(train: TrainDirectory) -> str:
    """Return what `irdmafs train status` prints: what is true now. Raises TrainError and OSError."""
    return current(train)[0].text(refusals.newest(train), f"reducers  {_holders(train)}")


def _holders(train: TrainDirectory) -> str:
    """Return which reducer has which part of the work."""
    parts: dict[str, list[str]] = {}
    for name in (COORDINATOR, *train.layout().parts):
        path = train.reducers / name
        holder = "nobody"
        if is_locked(path):
            with contextlib.suppress(OSError, TrainError):
                holder = refusals.one_line(read_small(path).decode(errors="replace").strip())
        parts.setdefault(holder, []).append(name)
    return "; ".join(f"{holder}: {', '.join(names)}" for holder, names in parts.items())
