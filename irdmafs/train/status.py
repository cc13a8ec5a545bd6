"""Reports of a training: the pushes that were refused, how far it is, and workers that wait in vain."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shlex
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec

from .config import TrainConfig
from .directory import COMPLAINT, COORDINATOR, TrainDirectory, read_small, replace
from .errors import BadPush, Refused, TrainError
from .liveness import is_locked, locked_in
from .plan import Plan, Push, is_wanted, next_plan, pending
from .pushes import inspect, worker_of
from .trees import Directory, look

log = logging.getLogger(__name__)

# The refusals that are kept, as small files in refused/, and those that `status` shows.
_KEPT = 32
_SHOWN = 8
_TEXT_MAX = 500
# At most so many workers are listed that take no part and of whom nothing has counted: whoever may push may
# do so under any number of names.
_STRANGERS_MAX = 20
# Reducers and workers are often started together.
_WITHOUT_REDUCER_S = 3.0


# -- refused pushes -----------------------------------------------------------------------------------


class Refusal(msgspec.Struct, frozen=True):
    """A refused push. `path`: its name in push/; `made_s`: seconds since 1970; `code`: the error code.
    `counts`: it was refused when it was in a plan, and counts with weight 0."""

    path: str
    reason: str
    made_s: Annotated[float, msgspec.Meta(ge=0, le=1 << 37)]
    code: int = errno.EINVAL
    counts: bool = False


def note_refusal(
    train: TrainDirectory, path: str, refused: Refused, *, counts: bool = False
) -> None:
    """Keep the reason of a refusal. A filesystem that is full or read-only does not keep it.

    Only files of refused/ itself are touched: somebody may have put a link there.
    """
    code, reason = refused.errno or errno.EINVAL, refused.strerror or str(refused)
    refusal = Refusal(one_line(path), one_line(reason), time.time(), code, counts)
    name = f"{time.time_ns()}.{os.uname().nodename}.{os.getpid()}"
    with contextlib.suppress(OSError):
        folder = Directory(train.path / "refused")
        new = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(folder.path / name, new, 0o644), "wb") as file:
            file.write(msgspec.json.encode(refusal))
        for old in sorted(os.listdir(folder.path))[:-_KEPT]:
            with contextlib.suppress(OSError):
                (folder.path / old).unlink()


def one_line(text: str) -> str:
    """Return a text that others chose as one short line."""
    return repr(text[:_TEXT_MAX])[1:-1]


def refusals(train: TrainDirectory) -> list[str]:
    """Return the names of the files of refusals, oldest first; none if refused/ is something else."""
    with contextlib.suppress(OSError, TrainError):
        return sorted(look(train.refused).names)
    return []


def _read(train: TrainDirectory, files: Iterable[str]) -> list[Refusal]:
    """Return what files of these names say, as far as they are there and say it."""
    found = []
    for name in files:
        with contextlib.suppress(OSError, TrainError, msgspec.MsgspecError):
            found.append(msgspec.json.decode(read_small(train.refused / name), type=Refusal))
    return found


def complain(target: Path, shard: str, bad: BadPush) -> None:
    """Tell the coordinator of a push of a plan that a reducer cannot sum. `target`: the directory of the
    version that is being made. Raises OSError."""
    replace(target / f"{COMPLAINT}{shard}", msgspec.json.encode({bad.path: bad.reason}))


def complaints(target: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the reasons of the complaints about a plan, by the names of the pushes. `names`: of all that
    is in the directory of the version. Raises OSError."""
    found: dict[str, str] = {}
    for name in names:
        if name.startswith(COMPLAINT):
            with contextlib.suppress(TrainError, msgspec.MsgspecError):
                found |= msgspec.json.decode(read_small(target / name), type=dict[str, str])
    return found


# -- how far it is ------------------------------------------------------------------------------------


def how_to_reduce(train: TrainDirectory) -> str:
    """Return the command that starts a reducer."""
    return f"irdmafs train reduce {shlex.quote(str(train.models.absolute()))}"


def is_reduced(train: TrainDirectory) -> bool:
    """Return whether a reducer makes versions: it holds the coordinator's lock. Raises OSError."""
    return is_locked(train.reducers / COORDINATOR)


def no_reducer(train: TrainDirectory) -> str:
    """Return what to say where no reducer is at work."""
    return f"no reducer is at work: {how_to_reduce(train)}"


def _now(train: TrainDirectory) -> tuple[TrainConfig, Plan, list[Push], list[str]]:
    """Return the configuration, the newest plan, the pushes and who takes part, by files and locks: no
    coordinator has to be at work. Raises TrainError and OSError."""
    config, newest = train.config(), train.newest_plan()
    members = locked_in(train.workers)
    refused = {one.path for one in _read(train, refusals(train)[-_SHOWN:])}
    pushes = []
    there = look(train.push)
    for name in there.names:
        with contextlib.suppress(Refused):
            if (push := inspect(train, name, there)) and one_line(name) not in refused:
                step = push.step or newest.clocks.get(push.worker, 0) + 1
                pushes.append(push._replace(step=step))
    return config, newest, pushes, members


def are_enough(train: TrainDirectory) -> bool:
    """Return whether there are pushes enough for the next version. Raises TrainError and OSError."""
    return next_plan(*_now(train)) is not None


def report(train: TrainDirectory) -> str:
    """Return what `irdmafs train status` prints: what is true now. Raises TrainError and OSError."""
    config, newest, pushes, members = _now(train)
    waiting = pending(pushes, newest.clocks)
    _, awaited = is_wanted(config, waiting, members)
    pushed = {push.worker: push.step for push in waiting}
    workers = sorted({*newest.clocks, *members})
    strangers = sorted(pushed.keys() - {*workers})
    first = max(newest.clocks.values(), default=0)
    lines = [
        f"version   {newest.version}",
        f"rule      {config.rule}, {config.sync}",
        f"reducers  {_holders(train)}",
        f"waits for {', '.join(awaited) or 'nobody' if pushed else 'pushes'}",
        "",
        "worker                         clock  behind  pushed  takes part",
    ]
    for name in (*workers, *strangers[:_STRANGERS_MAX]):
        clock = newest.clocks.get(name, 0)
        part = "yes" if name in members else "no"
        lines.append(
            f"{name:30} {clock:5}  {first - clock:6}  {pushed.get(name, '-')!s:>6}  {part}"
        )
    if len(strangers) > _STRANGERS_MAX:
        lines.append(f"and {len(strangers) - _STRANGERS_MAX} more")
    refused = _read(train, refusals(train)[-_SHOWN:])
    if refused:
        lines += ["", "refused:"]
        for one in refused:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.made_s))
            lines.append(f"{when}  {one.path}: {one.reason}")
    return "\n".join(lines) + "\n"


def _holders(train: TrainDirectory) -> str:
    """Return who holds which parts. Raises TrainError and OSError."""
    parts: dict[str, list[str]] = {}
    for name in (COORDINATOR, *train.layout.parts):
        path = train.reducers / name
        holder = "nobody"
        if is_locked(path):
            with contextlib.suppress(OSError, TrainError):
                holder = one_line(read_small(path).decode(errors="replace").strip())
        parts.setdefault(holder, []).append(name)
    return "; ".join(f"{holder}: {', '.join(names)}" for holder, names in parts.items())


# -- a worker that waits -----------------------------------------------------------------------------


class Watch:
    """Looks after the reducers and the worker's pushes, while the worker waits."""

    def __init__(self, train: TrainDirectory, worker: str) -> None:
        self._train = train
        self._worker = worker
        # The refusals that were there before, or that the worker was told of.
        self._known = set(refusals(train))
        # The name and the step of the last push.
        self._last, self._step = "", 0
        # When this wait began, or a reducer was seen in it.
        self._reducer_s = 0.0
        self._told = False

    def begin(self) -> None:
        """Begin a wait."""
        self._reducer_s = time.monotonic()

    def pushed(self, name: str, step: int) -> None:
        """Note the worker's last push, which is looked after from now on."""
        self._last, self._step = name, step

    def look(self) -> None:
        """Raise Refused if a push of the worker was refused; remove the push if the worker itself made it.
        Raise TrainError if the last push was removed before it counted: the worker would wait forever."""
        names = refusals(self._train)
        new = [name for name in names if name not in self._known]
        self._known = set(names)
        for refusal in _read(self._train, new):
            if worker_of(refusal.path) == self._worker and not refusal.counts:
                if self._last == refusal.path:
                    if self._has_counted():
                        # The configuration that refused the push was changed since.
                        continue
                    self._last = ""
                    self._train.discard(self._train.push / refusal.path)
                raise Refused(refusal.code, f"{refusal.path}: {refusal.reason}")
        if not self._last or (self._train.push / self._last).exists():
            return
        self._last = ""
        if not self._has_counted():
            push = f"push {self._step} of {self._worker!r}"
            raise TrainError(f"{push} was removed before it counted: push it again")

    def _has_counted(self) -> bool:
        return self._train.has_counted(self._worker, self._step)

    def look_for_reducer(self) -> None:
        """Log a warning if there has been no reducer for some seconds of a wait."""
        now_s = time.monotonic()
        if is_reduced(self._train):
            self._reducer_s, self._told = now_s, False
        elif not self._told and now_s > self._reducer_s + _WITHOUT_REDUCER_S:
            self._told = True
            log.warning("irdmafs: %s", no_reducer(self._train))
