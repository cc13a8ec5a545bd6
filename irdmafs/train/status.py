"""The file `status` of a training directory: how far it is, and who is waited for."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from . import refusals
from .config import TrainConfig
from .directory import COORDINATOR, TrainDirectory, replace
from .locks import is_locked
from .plan import Plan, Push
from .refusals import Refusal

__all__ = ["Progress", "how_to_reduce", "is_reduced", "no_reducer", "write_status"]

# A change is shown after so long at the latest.
_PERIOD_S = 0.5


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

    def text(self, refused: Sequence[Refusal]) -> str:
        """Return what `cat status` prints."""
        workers = sorted({*self.clocks, *self.members, *self.waiting})
        ahead = max(self.clocks.values(), default=0)
        lines = [
            f"version   {self.version}",
            f"rule      {self.rule}, {self.sync}",
            f"pushes    {self.pushes} since this coordinator began; "
            f"{self.pushed_bytes:,} bytes in this version",
            f"seconds   {self.wait_s:.3f} waiting, {self.reduce_s:.3f} reducing, "
            f"{self.commit_s:.3f} committing",
            f"waits for {', '.join(self.awaited) or 'nobody' if self.waiting else 'pushes'}",
            "",
            "worker                         clock  behind  pushed  stale  takes part",
        ]
        for name in workers:
            clock = self.clocks.get(name, 0)
            pushed = self.waiting.get(name, "-")
            stale = self.staleness.get(name, "-")
            part = "yes" if name in self.members else "no"
            lines.append(
                f"{name:30} {clock:5}  {ahead - clock:6}  {pushed!s:>6}  {stale!s:>5}  {part}"
            )
        if refused:
            lines += ["", "refused:"]
            for one in refused:
                when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.made_s))
                lines.append(f"{when}  {one.path}: {one.reason}")
        return "\n".join(lines) + "\n"


def how_to_reduce(train: TrainDirectory) -> str:
    """Return the command that starts a reducer."""
    return f"irdmafs train reduce {train.models}"


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
        replace(train.status, progress.text(refused).encode())
