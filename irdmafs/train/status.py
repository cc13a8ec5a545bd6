"""The file `status` of a training directory: how far it is, and who is waited for."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Collection, Sequence

from . import refusals
from .config import TrainConfig
from .directory import COORDINATOR, TrainDirectory, read_small
from .errors import TrainError
from .liveness import is_locked
from .plan import Plan, Push, is_wanted, pending
from .pushes import push_by_name

# At most so many workers are listed that take no part and of whom nothing has counted: whoever may push may
# do so under any number of names.
_STRANGERS_MAX = 20


def text_of(
    train: TrainDirectory,
    config: TrainConfig,
    newest: Plan,
    waiting: Collection[Push],
    awaited: Sequence[str],
    members: Collection[str],
    *more: str,
) -> str:
    """Return how far a training is by the newest version and the pushes that are pending. `awaited`: who is
    waited for; `members`: who takes part; `more`: lines with more about the version."""
    pushed = {push.worker: push.step for push in waiting}
    workers = sorted({*newest.clocks, *members})
    strangers = sorted(pushed.keys() - {*workers})
    first = max(newest.clocks.values(), default=0)
    lines = [
        f"version   {newest.version}",
        f"rule      {config.rule}, {config.sync}",
        *more,
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
    refused = refusals.newest(train)
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


def current(train: TrainDirectory, *more: str) -> tuple[str, bool]:
    """Return how far a training is now, as its files and locks tell, whether or not a coordinator is at
    work, and whether there are pushes enough for the next version. `more`: as in text_of(). Raises
    TrainError and OSError."""
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
    return text_of(train, config, newest, waiting, awaited, members, *more), enough


def report(train: TrainDirectory) -> str:
    """Return what `irdmafs train status` prints: what is true now. Raises TrainError and OSError."""
    return current(train, f"reducers  {_holders(train)}")[0]


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
