"""The file `status` of a training directory: how far it is, and who is waited for."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from . import refusals
from .config import TrainConfig
from .directory import COORDINATOR, TrainDirectory, read_small, replace
from .errors import TrainError
from .locks import is_locked
from .plan import Plan, Push, is_wanted, pending
from .pushes import identity_of_name
from .refusals import Refusal

__all__ = [
    "Progress",
    "current",
    "how_to_reduce",
    "is_reduced",
    "no_reducer",
    "report",
    "write_status",
]

# A change is shown after so long at the latest.
_PERIOD_S = 0.5
# Of those who take no part and of whom nothing has counted so many are listed: whoever may push may do so
# under any number of names.
_STRANGERS_MAX = 20


# The beginnings of lines that only the coordinator can write.
_FIGURES = ("pushes    ", "seconds   ")


@dataclass
class Progress:
    """Figures of the coordinator. Seconds and bytes of pushes are of the newest version: waiting for
    pushes, reducing them, committing. `staleness`: versions between the base of a worker's last push and
    the one that was the newest when it came."""

    version: int = 0
    rule: str = ""
    sync: str = ""
    clocks: Mapping[str, int] = field(default_factory=dict)
    waiting: Mapping[str, int] = field(default_factory=dict)
    staleness: dict[str, int] = field(default_factory=dict)
    awaited: Sequence[str] = ()
    members: Collection[str] = ()
    pushes: int = 0
    pushed_bytes: int = 0
    wait_s: float = 0.0
    reduce_s: float = 0.0
    commit_s: float = 0.0
    _phase_s: float = field(default_factory=time.monotonic)
    _written_s: float = 0.0
    _written: tuple[object, ...] = ()

    def see(
        self,
        config: TrainConfig,
        newest: Plan,
        waiting: Collection[Push],
        awaited: Sequence[str],
        members: Collection[str],
    ) -> None:
        """Take in what the coordinator has found."""
        self.version, self.rule, self.sync = newest.version, config.rule, config.sync
        self.clocks, self.awaited, self.members = newest.clocks, awaited, sorted(members)
        for push in waiting:
            if push.base >= 0 and self.waiting.get(push.worker) != push.step:
                self.staleness[push.worker] = newest.version - push.base
        self.waiting = {push.worker: push.step for push in waiting}

    def planned(self, pushed_bytes: int) -> None:
        self.wait_s = self._next()
        self.pushed_bytes = pushed_bytes

    def reduced(self) -> None:
        self.reduce_s = self._next()

    def committed(self, plan: Plan) -> None:
        self.commit_s = self._next()
        self.pushes += len(plan.pushes)
        self.version, self.clocks = plan.version, plan.clocks

    def _next(self) -> float:
        now_s = time.monotonic()
        spent_s, self._phase_s = now_s - self._phase_s, now_s
        return spent_s

    def is_due(self, refused: Sequence[Refusal]) -> bool:
        """Return whether there is something to show that is not shown yet, and it is time to."""
        shown = (
            self.version,
            tuple(self.awaited),
            tuple(self.waiting.items()),
            tuple(self.members),
            tuple(refused),
        )
        now_s = time.monotonic()
        if shown == self._written or now_s < self._written_s + _PERIOD_S:
            return False
        self._written, self._written_s = shown, now_s
        return True

    @property
    def figures(self) -> list[str]:
        """Return the lines that only the coordinator knows."""
        return [
            f"{_FIGURES[0]}{self.pushes} since this coordinator began; "
            f"{self.pushed_bytes:,} bytes in this version",
            f"{_FIGURES[1]}{self.wait_s:.3f} waiting, {self.reduce_s:.3f} reducing, "
            f"{self.commit_s:.3f} committing",
        ]

    def text(self, figures: Sequence[str], refused: Sequence[Refusal]) -> str:
        """Return what `cat status` prints. `figures`: lines with more about the version."""
        workers = sorted({*self.clocks, *self.members})
        strangers = sorted(self.waiting.keys() - {*workers})
        ahead = max(self.clocks.values(), default=0)
        lines = [
            f"version   {self.version}",
            f"rule      {self.rule}, {self.sync}",
            *figures,
            f"waits for {', '.join(self.awaited) or 'nobody' if self.waiting else 'pushes'}",
            "",
            "worker                         clock  behind  pushed  stale  takes part",
        ]
        for name in (*workers, *strangers[:_STRANGERS_MAX]):
            clock = self.clocks.get(name, 0)
            pushed = self.waiting.get(name, "-")
            stale = self.staleness.get(name, "-")
            part = "yes" if name in self.members else "no"
            lines.append(
                f"{name:30} {clock:5}  {ahead - clock:6}  {pushed!s:>6}  {stale!s:>5}  {part}"
            )
        if len(strangers) > _STRANGERS_MAX:
            lines.append(f"and {len(strangers) - _STRANGERS_MAX} more")
        if refused:
            lines += ["", "refused:"]
            for one in refused:
                when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.made_s))
                lines.append(f"{when}  {one.path}: {one.reason}")
        return "\n".join(lines) + "\n"


def how_to_reduce(train: TrainDirectory) -> str:
    """Return the command that starts a reducer."""
    return f"irdmafs train reduce {shlex.quote(str(train.models.absolute()))}"


def is_reduced(train: TrainDirectory) -> bool:
    """Return whether a reducer makes versions: it holds the coordinator's lock. Raises OSError."""
    return is_locked(train.reducers / COORDINATOR)


def no_reducer(train: TrainDirectory) -> str:
    """Return what to say where no reducer is at work."""
    return f"no reducer is at work: {how_to_reduce(train)}"


def write_status(train: TrainDirectory, progress: Progress) -> None:
    """Write the file status anew, if there is something to show. Raises OSError."""
    refused = refusals.read(train)
    if progress.is_due(refused):
        replace(train.status, progress.text(progress.figures, refused).encode())


def current(train: TrainDirectory) -> tuple[Progress, bool]:
    """Return how far a training is now, as its files and locks tell, whether or not a coordinator is at
    work, and whether there are pushes enough for the next version. Raises TrainError and OSError."""
    config, newest = train.config(), train.newest_plan()
    members = [
        name
        for name in os.listdir(train.workers)
        if not name.startswith(".") and is_locked(train.workers / name)
    ]
    refused = {one.path for one in refusals.read(train)}
    pushes = []
    for name in os.listdir(train.push):
        identity = identity_of_name(name)
        if identity is not None and refusals.one_line(name) not in refused:
            step = identity.step or newest.clocks.get(identity.worker, 0) + 1
            pushes.append(identity._replace(step=step).push(name))
    waiting = pending(pushes, newest.clocks)
    enough, awaited = is_wanted(config, waiting, members)
    progress = Progress()
    progress.see(config, newest, waiting, awaited, members)
    return progress, enough


def report(train: TrainDirectory) -> str:
    """Return what `irdmafs train status` prints: what is true now, and the coordinator's own figures if it
    is at work. Raises TrainError and OSError."""
    progress, _ = current(train)
    figures = [f"reducers  {_holders(train)}"]
    if is_reduced(train):
        with contextlib.suppress(OSError, TrainError):
            said = read_small(train.status).decode(errors="replace").splitlines()
            figures += [line for line in said if line.startswith(_FIGURES)]
    return progress.text(figures, refusals.read(train))


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
