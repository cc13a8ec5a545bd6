"""Reduction ahead of the plan: pushes that are in staging/ still, and the plan that will have them.

What is made from them is used if the plan turns out to be the foreseen one, and each push to have the files
that were summed. Else it is made again.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..client import FormatError
from .config import TrainConfig
from .directory import ShardFile, TrainDirectory, is_published, owner_of
from .errors import Refused
from .folders import Directory, Past, Seen, seen
from .layout import Shard
from .plan import Plan, Push, next_plan
from .pushes import STEP, Identity, check_again, header_of, identity_of_directory

__all__ = ["Foreseen", "Staged"]

# Pushes whose names are not as expected are looked for so often.
_LIST_S = 0.1


class _Push(NamedTuple):
    """A push that is there, in a directory of its own. `of`: the directory of its worker in staging/."""

    push: Push
    identity: Identity
    directory: Directory
    of: Directory


class Foreseen(NamedTuple):
    """The files of a shard that a foreseen plan has. `seen`: of each push, before it was opened."""

    plan: Plan
    files: dict[str, ShardFile]
    seen: dict[str, Seen]


class Staged:
    """The pushes of the next version, as far as they are there."""

    def __init__(self, train: TrainDirectory) -> None:
        self._train = train
        self._newest = -1
        self._plan: Plan | None = None
        # By worker: what is there, and what was there before.
        self._pushes: dict[str, _Push] = {}
        self._before: dict[str, _Push] = {}
        self._listed_s = 0.0
        # By shard: what was opened while others were not there.
        self._opened: dict[str, Foreseen] = {}
        self._past = Past()

    def plan(self, config: TrainConfig, newest: Plan) -> Plan | None:
        """Return the next plan, if it can be foreseen. Raises OSError and TrainError."""
        if self._newest != newest.version:
            self._newest, self._plan, self._listed_s = newest.version, None, 0.0
            self._before |= self._pushes
            self._pushes = {}
            self._opened.clear()
        if self._plan is None:
            self._find_expected(newest)
            self._plan = self._foresee(config, newest)
            now_s = time.monotonic()
            if self._plan is None and now_s > self._listed_s + _LIST_S:
                self._listed_s = now_s
                self._find(newest)
                self._plan = self._foresee(config, newest)
        return self._plan

    def _foresee(self, config: TrainConfig, newest: Plan) -> Plan | None:
        pushes = [one.push for one in self._pushes.values()]
        return next_plan(config, newest, pushes, self._train.member_clocks()) if pushes else None

    def _find_expected(self, newest: Plan) -> None:
        """Look for the pushes that follow on the last ones, by the names that they will have."""
        for worker, last in self._before.items():
            if worker not in self._pushes:
                step = newest.clocks.get(worker, 0) + 1
                expected = last.identity._replace(step=step, base=newest.version)
                self._add(expected.name, expected, last.of)

    def _find(self, newest: Plan) -> None:
        """Look for the pushes of workers that have none yet."""
        for directory, owner in self._directories():
            for name in self._names(directory):
                # The coordinator tells of a name that is refused.
                with contextlib.suppress(Refused):
                    identity = identity_of_directory(name)
                    if (
                        identity is not None
                        and owner in (identity.worker, None)
                        and identity.worker not in self._pushes
                        and identity.step > newest.clocks.get(identity.worker, 0)
                    ):
                        self._add(name, identity, directory)

    def _add(self, name: str, identity: Identity, of: Directory) -> None:
        with contextlib.suppress(OSError):
            found = Directory(name, of.fd)
            self._pushes[identity.worker] = _Push(identity.push(name), identity, found, of)

    def _directories(self) -> Iterator[tuple[Directory, str | None]]:
        """Return where pushes may be, and whose."""
        for name in os.listdir(self._train.staging):
            worker = owner_of(name)
            if worker and worker not in self._pushes:
                with contextlib.suppress(OSError):
                    yield Directory(self._train.staging / name), worker
        # A link leads to what is kept open.
        yield Directory(f"{self._train.push}/."), None

    def _names(self, directory: Directory) -> Iterable[str]:
        with contextlib.suppress(OSError):
            return os.listdir(directory.path)
        return ()

    def files(self, shard: Shard, plan: Plan) -> Foreseen | None:
        """Return the shard's files of all pushes of the foreseen plan; None if one of them is not there."""
        found = self._opened.setdefault(shard.name, Foreseen(plan, {}, {}))
        for push in plan.pushes:
            if push.weight and push.path not in found.files:
                opened = self._open(self._pushes[push.worker].directory, shard, push.step)
                if opened is None:
                    return None
                found.files[push.path], found.seen[push.path] = opened
        return self._opened.pop(shard.name)

    def _open(self, directory: Directory, shard: Shard, step: int) -> tuple[ShardFile, Seen] | None:
        try:
            status = directory.look(shard.name)
            before = seen(status)
            if before in self._past or not stat.S_ISREG(status.st_mode):
                return None
            path = directory.file(shard.name)
            if not is_published(path, status):
                return None
            file = ShardFile(path, header_of)
            if file.inode == before.ino and file.header.metadata.get(STEP) == str(step):
                check_again(shard, file.header, cut=True)
                return file, before
        except (OSError, FormatError, Refused):
            # Not there yet, or not as it should be: who has a plan finds out.
            return None
        self._past.add(before)
        return None

    def has(self, shard: Shard, foreseen: Foreseen, plan: Plan) -> bool:
        """Return whether the pushes of a plan, which are in push/ now, have the files that were opened."""
        if not plan.is_like(foreseen.plan):
            return False
        try:
            for push in plan.pushes:
                if push.weight:
                    directory = self._pushes[push.worker].directory
                    now = seen(directory.look(shard.name))
                    if now != foreseen.seen[push.path]:
                        return False
                    if not directory.is_at(self._train.push / push.path):
                        return False
        except (OSError, KeyError):
            return False
        return True

    def used(self, foreseen: Foreseen) -> None:
        """Note that these files will be written anew."""
        for one in foreseen.seen.values():
            self._past.add(one)
