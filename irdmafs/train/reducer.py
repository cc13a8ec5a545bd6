"""The reducer: a process that makes versions. docs/training.md has the protocol.

It works through files alone. Any number of them, on any hosts, take parts of the work by locks: each
shard, and the coordinator's part. A part whose holder ended is taken by another.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from ..client import FormatError
from . import refusals
from .arithmetic import Blocks
from .config import TrainConfig
from .coordinator import Coordinator
from .directory import LOOK_S, Changes, Lock, TrainDirectory, is_made, is_published, replace
from .errors import BadPush, TrainError
from .layout import Shard
from .places import is_here
from .plan import Plan
from .reduction import Reduction

__all__ = ["Reducer"]

log = logging.getLogger(__name__)

# A part whose place is another host is left to a reducer there for so long.
_LEAVE_S = 3.0
# A reducer that fails for so long, as on a host whose disk is broken or that reaches no store node, leaves
# its parts to others.
_FAILS_S = 5.0


class Reducer:
    """A reducer of a training directory. A context manager: closing it gives its parts up."""

    def __init__(self, directory: str | os.PathLike[str], *, threads: int | None = None) -> None:
        """Raises TrainError."""
        self.train = TrainDirectory(directory)
        self.layout = self.train.layout()
        self._shards = {shard.name: shard for shard in self.layout.shards()}
        self._blocks = Blocks(threads or len(os.sched_getaffinity(0)))
        self._locks: dict[str, Lock] = {}
        self._coordinator: Coordinator | None = None
        self._reduction: dict[str, tuple[Path, Reduction]] = {}
        self._looked_s = 0.0
        self._begun_s = time.monotonic()
        # The names in next/ when nothing was left to do for this reducer, for a while. Only the coordinator
        # has more to do.
        self._done: list[str] | None = None
        # The last: where a version is being made, the shard and the push.
        self._complaint: tuple[Path, str, str] | None = None

    def __enter__(self) -> Reducer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._leave_parts()
        self._blocks.close()

    def run(self, stopped: Callable[[], bool]) -> None:
        """Make versions until `stopped`. An error is logged and what failed is done again, as long as there
        is a training; after some seconds of errors others may take the parts. Raises TrainError."""
        said, worked_s = "", time.monotonic()
        while not stopped():
            try:
                # Before looking, so that no change is missed.
                planned = Changes(self.train.next)
                pushed = Changes(self.train.push) if self._coordinator is not None else planned
                did = self.step()
                worked_s = time.monotonic()
                if did:
                    said = ""
                elif self._coordinator is None:
                    planned.wait(LOOK_S)
                elif not self._coordinator.tidy_up():
                    (pushed if self._coordinator.waits_for_pushes else planned).wait(LOOK_S)
            except InterruptedError:
                continue
            except (OSError, ValueError, msgspec.MsgspecError, TrainError) as error:
                if not os.path.lexists(self.train.path):
                    raise TrainError(f"{self.train.models} is not trained in any more") from error
                # The filesystem is full, for example, or its daemon is being started again.
                if said != str(error):
                    said = str(error)
                    log.warning("%s: %s: it is tried again", self.train.models, error)
                if self._locks and time.monotonic() > worked_s + _FAILS_S:
                    log.warning("%s: this reducer leaves its parts to others", self.train.models)
                    self._leave_parts()
                    self._looked_s = time.monotonic() + _LEAVE_S
                time.sleep(LOOK_S)

    def step(self) -> bool:
        """Do what can be done now; return whether that was anything. Raises TrainError and OSError, and
        ValueError and msgspec.MsgspecError for what cannot be read."""
        did = self._take_parts()
        names = os.listdir(self.train.next)
        if self._coordinator is None and names == self._done:
            return did
        config = self.train.config()
        newest = self.train.newest_plan()
        made = self.train.making(newest.version + 1, names)
        if self._coordinator is not None and self._coordinator.step(config, newest, made):
            return True
        mine = [shard for name, shard in self._shards.items() if name in self._locks and made]
        for shard in mine:
            assert made is not None
            did = self._reduce(config, shard, *made) or did
        is_done = all(is_made(made[0], shard.name) for shard in mine if made is not None)
        self._done = names if is_done else None
        return did

    # -- parts -------------------------------------------------------------------------------------

    def _take_parts(self) -> bool:
        """Take parts that nobody has, now and then; return whether there was one."""
        now_s = time.monotonic()
        if self._looked_s and now_s < self._looked_s + LOOK_S:
            return False
        took = False
        self._looked_s, self._done = now_s, None
        for name in [name for name, lock in self._locks.items() if not lock.is_held]:
            log.warning("%s: the lock of %s was lost", self.train.models, name)
            self._locks.pop(name).close()
            if name == _COORDINATOR:
                self._coordinator = None
        for name in (_COORDINATOR, *self._shards):
            if name in self._locks or not self._may_take(name, now_s):
                continue
            lock = Lock.take(
                self.train.reducers / name, f"{os.uname().nodename} {os.getpid()}\n".encode()
            )
            if lock is not None:
                log.info("%s: this reducer has %s now", self.train.models, name)
                self._locks[name] = lock
                took = True
        if self._coordinator is None and _COORDINATOR in self._locks:
            self._coordinator = Coordinator(self.train, self.layout)
        return took

    def _leave_parts(self) -> None:
        for lock in self._locks.values():
            lock.close()
        self._locks.clear()
        self._reduction.clear()
        self._coordinator = None

    def _may_take(self, name: str, now_s: float) -> bool:
        """Return whether a part is better here than elsewhere, or nobody there has taken it."""
        if name == _COORDINATOR or now_s > self._begun_s + _LEAVE_S:
            return True
        state = self.train.version(self.train.newest()) / "state" / name
        return is_here(state) is not False

    # -- shards ------------------------------------------------------------------------------------

    def _reduce(self, config: TrainConfig, shard: Shard, target: Path, plan: Plan) -> bool:
        """Make a shard of the next version, as far as can be now."""
        if is_made(target, shard.name):
            return False
        try:
            reduction = self._reduction_of(config, shard, target, plan)
            square_norms: list[float] = []
            if plan.clip_norm:
                own = target / "norm" / shard.name
                if not is_published(own):
                    replace(own, " ".join(map(float.hex, reduction.square_norms())).encode())
                try:
                    norms = [
                        [*map(float.fromhex, (target / "norm" / name).read_text().split())]
                        for name in self._shards
                    ]
                except (FileNotFoundError, ValueError):
                    return False
                square_norms = [sum(parts) for parts in zip(*norms, strict=True)]
            reduction.write(target, square_norms)
        except (FileNotFoundError, FormatError) as error:
            # Made by somebody else meanwhile, and tidied. Or a push is gone: the coordinator will make
            # another plan.
            self._reduction.pop(shard.name, None)
            log.info("%s: version %d is left: %s", self.train.models, plan.version, error)
            return False
        except BadPush as bad:
            self._reduction.pop(shard.name, None)
            return self._complain(target, shard.name, bad)
        self._reduction.pop(shard.name, None)
        return True

    def _complain(self, target: Path, shard: str, bad: BadPush) -> bool:
        """Tell the coordinator of a bad push, once; return whether that was done now."""
        if self._complaint == (target, shard, bad.path):
            return False
        self._complaint = (target, shard, bad.path)
        with contextlib.suppress(FileNotFoundError):
            refusals.complain(target, shard, bad)
        return True

    def _reduction_of(
        self, config: TrainConfig, shard: Shard, target: Path, plan: Plan
    ) -> Reduction:
        made_in, reduction = self._reduction.get(shard.name, (None, None))
        if reduction is None or made_in != target:
            reduction = Reduction(self.train, shard, plan, self._blocks)
            if config.nonfinite == "skip":
                reduction.check_finite()
            self._reduction[shard.name] = (target, reduction)
        return reduction


_COORDINATOR = "coordinator"
