"""The reducer: a process that makes versions. docs/training.md has the protocol.

It works through files alone. Any number of them, on any hosts, take parts of the work by locks: each
shard, and the coordinator's part. A part whose holder ended is taken by another.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

import msgspec

from ..client._files import Closing
from .arithmetic import Blocks
from .config import TrainConfig
from .coordinator import Coordinator
from .directory import COORDINATOR, LOOK_S, PLAN, TrainDirectory, params_of
from .errors import TrainError
from .liveness import Lock
from .part import Alone, Part, Staged
from .placement import host_of
from .plan import Plan, is_foreseen
from .trees import Folder, Trees

log = logging.getLogger(__name__)

# A part whose place is another host is left to a reducer there for so long.
_LEAVE_S = 3.0
# A reducer that fails for so long, as on a host whose disk is broken or that reaches no store node, leaves
# its parts to others, and takes none for as long: while it tries to, it has their locks.
_FAILS_S = 5.0
# A reducer that has nothing to do looks this often whether it has to end.
_STOPPED_S = 0.1


class _Found(NamedTuple):
    """The configuration, the plan of the newest version, and the directory and plan of the version that is
    being made, if there is one."""

    config: TrainConfig
    newest: Plan
    made: tuple[Path, Plan] | None


class Reducer(Closing):
    """A reducer of a training directory. A context manager: closing it gives its parts up."""

    def __init__(self, directory: str | os.PathLike[str], *, threads: int | None = None) -> None:
        """Raises TrainError."""
        self.train = TrainDirectory(directory, keeps_open=True)
        with self.train.naming():
            self.layout = self.train.layout
        self._trees = Trees()
        self._staged = Staged(self.train, self._trees)
        self._blocks = Blocks(threads or len(os.sched_getaffinity(0)))
        # The locks of parts that are held here, and those of others, kept open as opening them costs more.
        self._locks: dict[str, Lock] = {}
        self._of_others: dict[str, Lock] = {}
        self._parts: dict[str, Part] = {}
        self._coordinator: Coordinator | None = None
        self._looked_s = 0.0
        # The newest version when this reducer last looked for parts that nobody has.
        self._newest = -1
        self._begun_s = time.monotonic()
        # The numbers of the directories in next/ that had a plan when it was read last, or its counter, and
        # what was found.
        self._found: tuple[Collection[int] | int | None, _Found] | None = None
        # The counters of next/ and push/ when the coordinator had nothing to do, and when that was.
        self._coordinated: tuple[int | None, ...] = ()
        self._coordinated_s = 0.0

    def close(self) -> None:
        self._leave_parts()
        self._trees.close()
        self._blocks.close()
        self.train.close()

    def run(self, stopped: Callable[[], bool]) -> None:
        """Make versions until `stopped`. An error is logged and what failed is done again, as long as there
        is a training; after some seconds of errors others may take the parts. Raises TrainError."""
        said, worked_s = "", time.monotonic()
        while not stopped():
            try:
                did = self.step()
                worked_s = time.monotonic()
                if did:
                    said = ""
                elif self._coordinator is None or not self._coordinator.tidy_up():
                    self._wait(stopped)
            except InterruptedError:
                continue
            except (OSError, ValueError, msgspec.MsgspecError, TrainError) as error:
                if self.train.has_ended:
                    raise TrainError(f"{self.train.models} is not trained in any more") from error
                # The filesystem is full, for example, or its daemon is being started again.
                if said != str(error):
                    said = str(error)
                    shown = self.train.shown(said)
                    log.warning("%s: %s: it is tried again", self.train.models, shown)
                if self._locks and time.monotonic() > worked_s + _FAILS_S:
                    log.warning("%s: this reducer leaves its parts to others", self.train.models)
                    self._leave_parts()
                    self._looked_s = time.monotonic() + _FAILS_S
                time.sleep(LOOK_S)
                if not self.train.is_current:
                    self._begin_again()

    def _begin_again(self) -> None:
        """Go on after the mount was mounted again. Raises TrainError if there is another training."""
        self._leave_parts()
        self.train.reopen()
        # Its paths are by descriptors that are others now.
        self._found = None
        self._trees.close()
        self._trees = Trees()
        self._staged = Staged(self.train, self._trees)
        with contextlib.suppress(OSError), self.train.naming():
            if self.train.layout != self.layout:
                raise TrainError(f"another training has begun in {self.train.models}")

    def _wait(self, stopped: Callable[[], bool]) -> None:
        until_s = time.monotonic() + LOOK_S
        while not stopped() and time.monotonic() < until_s:
            if self._trees.wait(_STOPPED_S):
                return

    def step(self) -> bool:
        """Do what can be done now; return whether that was anything. Raises TrainError and OSError, and
        ValueError and msgspec.MsgspecError for what cannot be read."""
        took = self._take_parts()
        below = self._trees.look(self.train.next)
        found = self._look(below)
        if self._coordinator is not None and self._coordinate(self._coordinator, found, below):
            return True
        did = False
        if found.made is not None:
            target, plan = found.made
            for name in sorted(self._parts.keys() - below.folder(target.name).folders.keys()):
                did = self._parts[name].make(target, plan) or did
            if did:
                self._trees.look_again(self.train.next)
        elif self._parts and is_foreseen(found.config):
            foreseen = self._staged.plan(found.config, found.newest)
            if foreseen is not None:
                for part in self._parts.values():
                    did = part.foresee(foreseen) or did
        return did or took

    def _look(self, below: Folder) -> _Found:
        """Return what there is, as long as next/ has the same plans. If it has none, a change may be that
        of a version, whose plan has come and gone."""
        known = {one.ino for one in below.folders.values() if PLAN in one.files} or below.counter
        if self._found is None or self._found[0] != known:
            config = self.train.config()
            newest = self.train.newest_plan()
            found = _Found(config, newest, self.train.making(newest.version + 1, below))
            self._found = (known, found)
        return self._found[1]

    def _coordinate(self, coordinator: Coordinator, found: _Found, below: Folder) -> bool:
        """Do the coordinator's part, unless nothing has changed that concerns it."""
        counters = (below.counter, self._trees.look(self.train.push).counter)
        now_s = time.monotonic()
        if counters == self._coordinated and now_s < self._coordinated_s + LOOK_S:
            return False
        did = coordinator.step(*found)
        self._coordinated = () if did else counters
        self._coordinated_s = now_s
        if did:
            self._found = None
            self._trees.look_again(self.train.next)
        return did

    # -- parts -------------------------------------------------------------------------------------

    def _take_parts(self) -> bool:
        """Take parts that nobody has, now and then; return whether there was one."""
        now_s = time.monotonic()
        if self._looked_s and now_s < self._looked_s + LOOK_S:
            return False
        took = False
        self._looked_s = now_s
        for name in [name for name, lock in self._locks.items() if not lock.is_held]:
            log.warning("%s: the lock of %s was lost", self.train.models, name)
            self._locks.pop(name).close()
            self._parts.pop(name, None)
            if name == COORDINATOR:
                self._coordinator = None
        holder = f"{os.uname().nodename} {os.getpid()}\n".encode()
        newest = -1 if self._found is None else self._found[1].newest.version
        # Changes of the configuration, and versions of a small run, are not seen in next/.
        self._found = None
        # A new version is the work of all parts: somebody has them.
        are_taken, self._newest = newest > self._newest >= 0, newest
        for name in (COORDINATOR, *self.layout.parts):
            if name in self._locks or are_taken or not self._may_take(name, now_s):
                continue
            if name not in self._of_others:
                self._of_others[name] = Lock(self.train.reducers / name)
            try:
                held = self._of_others[name].hold(holder)
            except OSError:
                self._of_others.pop(name).close()
                self._looked_s = time.monotonic() + _FAILS_S
                raise
            if held:
                log.info("%s: this reducer has %s now", self.train.models, name)
                self._locks[name] = self._of_others.pop(name)
                took = True
        for name in self.layout.parts.keys() & (self._locks.keys() - self._parts.keys()):
            self._parts[name] = Part(self.train, name, self._blocks, self._staged)
        if self._coordinator is None and COORDINATOR in self._locks:
            alone = Alone(self.train, self._blocks, self._staged) if self.layout.is_small else None
            self._coordinator = Coordinator(self.train, self._trees, alone)
        return took

    def _leave_parts(self) -> None:
        for lock in (*self._locks.values(), *self._of_others.values()):
            lock.close()
        self._locks.clear()
        self._of_others.clear()
        self._parts.clear()
        self._coordinator = None

    def _may_take(self, name: str, now_s: float) -> bool:
        """Return whether a part is better here than elsewhere, or nobody there has taken it."""
        if name == COORDINATOR or now_s > self._begun_s + _LEAVE_S:
            return True
        version = self.train.version(self.train.newest())
        return not host_of(params_of(version, self.layout.parts[name][0]))
