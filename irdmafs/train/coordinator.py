"""The coordinator's part of a reducer: it plans versions, commits them, and tidies. docs/training.md has
the protocol."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from ..client._files import RENAME_NOREPLACE, look_up, rename
from . import pushes
from .config import TrainConfig
from .directory import (
    LOOK_S,
    NOT_KEPT,
    PLAN,
    ShardFile,
    TrainDirectory,
    make_new,
    move,
    owner_of,
    remove,
    remove_aside,
)
from .errors import BadPush, Refused, invalid
from .layout import in_turns
from .liveness import WatchedLock, is_locked
from .models import add_kept_files, assemble
from .part import Alone
from .plan import Plan, Push, next_plan, without
from .status import complaints, note_refusal, one_line
from .trees import Folder, Seen, Trees, look, seen

log = logging.getLogger(__name__)

# The time that the coordinator removes old files for, before it looks again for what others wait for.
_TIDY_S = 0.05
# The coordinator removes at least so many, more than a version leaves: they never pile up on a slow host.
_TIDY_LEAST = 8
# The time that the coordinator reads new pushes for, before it plans with those that it has read.
_READ_S = 0.2
# The age at which a file with a hidden name is taken for one that a killed process has left.
_LEFT_S = 60.0


class _Worker(NamedTuple):
    """A worker that takes part: the status of its file, and the file itself, open."""

    status: Seen | None
    lock: WatchedLock


class Coordinator:
    """Plans versions from the pushes that are there, commits versions that are made, and tidies."""

    def __init__(self, train: TrainDirectory, trees: Trees, alone: Alone | None = None) -> None:
        """`alone`: of a small run, of which the coordinator makes each version by itself."""
        self._train = train
        self._trees = trees
        self._alone = alone
        # The pushes that were read, and those that were refused by this configuration, by their names in
        # push/. A name that was refused is looked at again if another file has it.
        self._config: TrainConfig | None = None
        self._pushes: dict[str, Push] = {}
        self._bad: dict[str, Seen] = {}
        # The files of pushes when they were read, and in a small run these files, opened.
        self._files: dict[str, Seen | None] = {}
        self._opened: dict[str, ShardFile] = {}
        # When names in push/ were looked at last.
        self._looks: dict[str, int] = {}
        self._members: set[str] = set()
        self._joined: dict[str, _Worker] = {}
        self._looked_s = 0.0
        self._lacking_s = time.monotonic()
        # The newest version when the coordinator tidied last, and the oldest that it left.
        self._tidied = -1
        self._oldest = 0
        # The names of files/, which each version has, too.
        self._kept = os.listdir(train.kept_files)
        # The names that are to be removed from aside/; None if it has to be listed.
        self._litter: list[str] | None = None

    def step(self, config: TrainConfig, newest: Plan, made: tuple[Path, Plan] | None) -> bool:
        """Do what can be done now; return whether that was anything. `made`: the directory of the version
        that is being made, and its plan."""
        if self._tidied < 0:
            self._sweep()
        if self._tidied != newest.version:
            self._tidy(config, newest)
            self._tidied = newest.version
        if made is None:
            return self._plan(config, newest)
        return self._commit(config, *made) or self._try_again(*made)

    # -- plan --------------------------------------------------------------------------------------

    def _plan(self, config: TrainConfig, newest: Plan) -> bool:
        self._look_at_members()
        found = self._find_pushes(config, newest)
        plan = next_plan(config, newest, found, self._members)
        if plan is None:
            names = {*self._trees.look(self._train.push).names}
            return bool(names - self._looks.keys() - self._pushes.keys())
        if self._alone is not None:
            return self._make(self._alone, plan)
        self._write_plan(self._train.next / str(plan.version), plan)
        return True

    def _make(self, alone: Alone, plan: Plan) -> bool:
        """Make a version of a small run; return False if a push has gone, or the version before. A bad push
        counts with weight 0. Raises OSError."""
        while True:
            try:
                alone.make(plan, self._opened)
            except BadPush as bad:
                self._refuse(bad.path, invalid(bad.reason), counts=True)
                plan = without(plan, {bad.path})
            except (FileExistsError, FileNotFoundError) as error:
                log.info("%s: version %d is left: %s", self._train.models, plan.version, error)
                return False
            else:
                self._opened.clear()
                return True

    def _write_plan(self, target: Path, plan: Plan) -> None:
        # Another coordinator may have planned it, while this one's host was stopped.
        with contextlib.suppress(FileExistsError):
            target.mkdir()
        add_kept_files(self._train, self._kept, target)
        with contextlib.suppress(FileExistsError):
            make_new(target / PLAN, [memoryview(msgspec.json.encode(plan))])
        self._lacking_s = time.monotonic()

    def _try_again(self, target: Path, plan: Plan) -> bool:
        """Plan the version once more, in another directory, if a push of the plan is gone or broken, which
        would be waited for in vain: it counts with weight 0. Shards that were made with it stay where
        they are, and count for nothing unless all of them were made."""
        now_s = time.monotonic()
        names = self._trees.look(self._train.next).folder(target.name).names
        bad = complaints(target, names)
        if not bad and now_s < self._lacking_s + LOOK_S:
            return False
        self._lacking_s = now_s
        counted = {push.path for push in plan.pushes if push.weight}
        for path in counted & bad.keys():
            self._refuse(path, invalid(bad[path]), counts=True)
        gone = {path for path in counted if path in bad or not self._is_usable(path)}
        if not gone or self._train.newest() >= plan.version:
            return False
        log.warning("%s: gone while it was counted: %s", self._train.models, ", ".join(gone))
        attempt = int(target.name.partition(".")[2] or 0) + 1
        self._write_plan(self._train.next / f"{plan.version}.{attempt}", without(plan, gone))
        return True

    def _is_usable(self, name: str) -> bool:
        try:
            return pushes.inspect(self._train, name) is not None
        except Refused as error:
            self._refuse(name, error, counts=True)
            return False

    def _find_pushes(self, config: TrainConfig, newest: Plan) -> list[Push]:
        """Return what is in push/, as far as it was read. A push is read once, and again if it is a file
        that was written anew."""
        there = self._trees.look(self._train.push)
        names = set(there.names)
        for known in (self._pushes, self._bad, self._looks, self._files):
            for name in known.keys() - names:
                del known[name]
        for name in [*self._pushes]:
            if self._files.get(name) != there.files.get(name):
                del self._pushes[name]
                self._looks.pop(name, None)
        if config != self._config:
            self._config = config
            self._bad.clear()
        steps = dict(newest.clocks)
        until_s = time.monotonic() + _READ_S
        for name in self._in_turns(names - self._pushes.keys(), newest):
            self._looks[name] = time.monotonic_ns()
            push = self._look_at(config, newest, name, there)
            if push is not None:
                self._pushes[name], self._files[name] = push, there.files.get(name)
            if time.monotonic() > until_s:
                break
        for push in list(self._pushes.values()):
            if _is_past(push, newest) and not self._is_written_anew(push, newest):
                del self._pushes[push.path]
                self._train.put_aside(self._train.push / push.path)
                self._litter = None
        for push in self._pushes.values():
            steps[push.worker] = max(steps.get(push.worker, 0), push.step)
        for push in [one for one in self._pushes.values() if one.step == 0]:
            steps[push.worker] += 1
            self._settle(push, steps[push.worker])
        return list(self._pushes.values())

    def _is_written_anew(self, push: Push, newest: Plan) -> bool:
        """Return whether a worker writes its next push, or has just written it, where one is that has
        counted: its last one. A worker that has lost its lock writes no more."""
        worker, file = push.worker, self._files.get(push.path)
        if push.step == newest.clocks[worker] and (
            worker in self._members or is_locked(self._train.workers / worker)
        ):
            return True
        look = self._trees.look_again
        return file is not None and look(self._train.push).files.get(push.path) != file

    def _in_turns(self, names: Iterable[str], newest: Plan) -> Iterator[str]:
        """Return names in the order in which to look at them: those that were never looked at
        first, then those longest ago, of each worker in turn. Workers that take part and others take turns,
        too: nobody's push waits for all that somebody else has put there."""
        by_worker: dict[str, list[str]] = {}
        for name in sorted(names, key=lambda name: (self._looks.get(name, 0), name)):
            by_worker.setdefault(pushes.worker_of(name), []).append(name)
        known = [by_worker.pop(name) for name in sorted(newest.clocks.keys() | self._members)
                 if name in by_worker]  # fmt: skip
        return in_turns([in_turns(known), in_turns(by_worker.values())])

    def _settle(self, push: Push, step: int) -> None:
        """Give a push whose name says no step one that does. A later file of that name is another push."""
        del self._pushes[push.path]
        path = pushes.name_in_file(push._replace(step=step))
        try:
            rename(self._train.push / push.path, self._train.push / path, RENAME_NOREPLACE)
        except FileExistsError:
            # Its worker has just pushed that step: this is the one after.
            return
        self._pushes[path] = push._replace(step=step, path=path)

    def _look_at(self, config: TrainConfig, newest: Plan, name: str, there: Folder) -> Push | None:
        folder = there.folders.get(name)
        try:
            known = there.files.get(name) if folder is None else Seen(folder.ino, 0, 0)
            now = known or seen(look_up(os.lstat, self._train.push / name))
            if name.startswith(".") or self._bad.get(name) == now:
                return None
            finite = config.nonfinite == "refuse"
            opened = None if self._alone is None else self._opened
            push = pushes.inspect(self._train, name, there, finite=finite, opened=opened)
            if push is not None and not _is_past(push, newest):
                pushes.check_turn(self._train, config, newest, push)
            return push
        except FileNotFoundError:
            return None
        except Refused as error:
            self._bad[name] = now
            self._refuse(name, error)
            return None

    def _refuse(self, name: str, error: Refused, *, counts: bool = False) -> None:
        """Refuse a push. `counts`: it is in a plan, where it has weight 0 from now on."""
        log.warning("%s: %s is refused: %s", self._train.models, one_line(name), error)
        note_refusal(self._train, name, error, counts=counts)

    def _look_at_members(self) -> None:
        """See which workers take part, and which have ended."""
        now_s = time.monotonic()
        known = self._trees.look(self._train.workers).visible
        if known == self._members and now_s < self._looked_s + LOOK_S:
            return
        self._looked_s = now_s
        # Listed before the workers: each makes its directory there when it has locked its name.
        staged = os.listdir(self._train.staging)
        there = self._trees.look_again(self._train.workers)
        self._members = {
            name for name in there.visible if self._takes_part(name, there.files.get(name))
        }
        for name in staged:
            # The directory of another user may have to stay.
            with contextlib.suppress(PermissionError):
                if owner_of(name) not in self._members:
                    self._train.discard(self._train.staging / name)
        for name in self._joined.keys() - self._members:
            del self._joined[name]

    def _takes_part(self, name: str, status: Seen | None) -> bool:
        """Return whether a worker takes part. Remove the file of one that ended. `status`: of the file."""
        path = self._train.workers / name
        known = self._joined.get(name)
        try:
            if known is None or known.status != status:
                known = self._joined[name] = _Worker(status, WatchedLock(path))
            # Another file may have the name by now.
            if known.lock.is_held() or is_locked(path) or not WatchedLock(path).remove(path):
                return True
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP, errno.ENXIO):  # ENXIO: a socket
                raise
            remove(path)
        log.info("%s: worker %s has ended", self._train.models, name)
        return False

    # -- commit ------------------------------------------------------------------------------------

    def _commit(self, config: TrainConfig, target: Path, plan: Plan) -> bool:
        there = self._trees.look(self._train.next).folder(target.name)
        if not self._train.layout.parts.keys() <= there.folders.keys():
            return False
        is_whole = bool(config.whole_every) and plan.version % config.whole_every == 0
        if is_whole:
            assemble(self._train, plan.version, target, there)
        for name in there.names:
            # Norms and complaints are not needed any more; a killed process was writing names with a dot.
            if name.startswith(NOT_KEPT) or (name in self._train.layout.files and not is_whole):
                remove(target / name)
        # Another coordinator may have made it, while this one's host was stopped.
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            move(target, self._train.version(plan.version))
        return True

    def _tidy(self, config: TrainConfig, newest: Plan) -> None:
        """Put aside versions older than `keep`, and directories in next/ of versions that are made."""
        train = self._train
        for number in range(self._oldest, newest.version - config.keep + 1):
            self._put_aside_version(train.version(number), newest.version)
            self._oldest = number + 1
        for name in self._trees.look(train.next).folders:
            made = name.partition(".")[0]
            if made.isdecimal() and int(made) <= newest.version:
                train.put_aside(train.next / name)
        self._litter = None

    def _put_aside_version(self, version: Path, newest: int) -> None:
        """Put a version aside, whole, and give its parts to the reducers that make them, which write into
        the same files those of the version after the next: they may have begun the next one. In a small run
        all of it becomes the next version."""
        if self._alone is not None:
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                move(version, self._alone.home / str(newest + 1))
                return
        gone = self._train.put_aside(version)
        if gone is not None:
            for home in look(self._train.ahead).folders:
                with contextlib.suppress(FileExistsError, FileNotFoundError, PermissionError):
                    move(gone / owner_of(home), self._train.ahead / home / str(newest + 2))

    def tidy_up(self) -> bool:
        """Remove for a little while what was put aside; return whether there was any. Raises OSError."""
        if self._litter is None:
            self._litter = [*look(self._train.aside).names]
        until_s = time.monotonic() + _TIDY_S
        removed = 0
        while self._litter and (time.monotonic() < until_s or removed < _TIDY_LEAST):
            remove_aside(self._train.aside / self._litter.pop())
            removed += 1
        return removed > 0

    def _sweep(self) -> None:
        """Put aside the files of killed processes, and the directories of parts whose reducer has ended."""
        self._oldest = min(self._train.version_numbers(), default=0)
        for name in os.listdir(self._train.ahead):
            if not is_locked(self._train.reducers / owner_of(name)):
                self._train.put_aside(self._train.ahead / name)
        for path in self._train.workers.glob(".*"):
            with contextlib.suppress(FileNotFoundError):
                is_old = time.time() > look_up(os.lstat, path).st_mtime + _LEFT_S
                if is_old and not is_locked(path):
                    self._train.put_aside(path)


def _is_past(push: Push, newest: Plan) -> bool:
    """Return whether a push of this worker and step has counted."""
    return 0 < push.step <= newest.clocks.get(push.worker, 0)
