"""The reducer: a process that makes versions. docs/training.md has the protocol.

It works through files alone. Any number of them, on any hosts, take parts of the work by locks: each
shard, and the coordinator's part. A part whose holder ended is taken by another.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from ..client import FormatError, _files
from ..client._safetensors import encode
from . import pushes, refusals
from .arithmetic import Blocks
from .config import TrainConfig
from .directory import (
    PLAN,
    Changes,
    Lock,
    TrainDirectory,
    gather,
    is_locked,
    is_published,
    lead_to_newest,
    read_small,
    remove,
    remove_staging,
    rename_new,
    replace,
    write_once,
)
from .errors import Refused, TrainError
from .layout import ModelLayout, Shard
from .places import is_here
from .plan import Plan, Push, is_wanted, next_plan, pending, without
from .pushes import Identity
from .reduction import Reduction
from .status import Progress, write_status

__all__ = ["Reducer", "assemble"]

log = logging.getLogger(__name__)

# Workers that ended and parts whose reducer ended send no event: look after them this often.
LOOK_S = 1.0
# A part whose place is another host is left to a reducer there for so long.
_LEAVE_S = 3.0
_PARTS = ("params", "state")
# A file that is written aside has its name sooner than that, unless its process was killed.
_LEFT_S = 60.0
# Without irdmafs below a file is seen as it grows: a file that has just been written may not be whole.
_SETTLED_NS = 2_000_000_000


class Reducer:
    """A reducer of a training directory. A context manager: closing it gives its parts up."""

    def __init__(self, directory: str | os.PathLike[str], *, threads: int | None = None) -> None:
        """Raises TrainError."""
        self.train = TrainDirectory(directory)
        self.layout = self.train.layout()
        self._shards = {shard.name: shard for shard in self.layout.shards()}
        self._blocks = Blocks(threads or len(os.sched_getaffinity(0)))
        self._locks: dict[str, Lock] = {}
        self._coordinator: _Coordinator | None = None
        self._reduction: dict[str, tuple[Path, Reduction]] = {}
        self._looked_s = 0.0
        self._begun_s = time.monotonic()

    def __enter__(self) -> Reducer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for lock in self._locks.values():
            lock.close()
        self._locks.clear()
        self._blocks.close()

    def run(self, stopped: Callable[[], bool]) -> None:
        """Make versions until `stopped`. An error is logged and what failed is done again, as long as there
        is a training. Raises TrainError."""
        said = ""
        while not stopped():
            try:
                changes = Changes(self.train.path)
                if self.step():
                    said = ""
                else:
                    changes.wait(LOOK_S)
            except InterruptedError:
                continue
            except (OSError, ValueError, msgspec.MsgspecError, TrainError) as error:
                if not os.path.lexists(self.train.path):
                    raise TrainError(f"{self.train.models} is not trained in any more") from error
                # The filesystem is full, for example, or its daemon is being started again.
                if said != str(error):
                    said = str(error)
                    log.warning("%s: %s: it is tried again", self.train.models, error)
                time.sleep(LOOK_S)

    def step(self) -> bool:
        """Do what can be done now; return whether that was anything. Raises TrainError and OSError, and
        ValueError and msgspec.MsgspecError for what cannot be read."""
        self._take_parts()
        config = self.train.config()
        newest = self.train.newest_plan()
        did = False
        if self._coordinator is not None:
            did = self._coordinator.step(config, newest)
        made = self.train.making(newest.version + 1)
        if made is None:
            return did
        for name in self._shards:
            if name in self._locks:
                did = self._reduce(self._shards[name], *made) or did
        return did

    # -- parts -------------------------------------------------------------------------------------

    def _take_parts(self) -> None:
        """Take parts that nobody has, now and then."""
        now_s = time.monotonic()
        if self._looked_s and now_s < self._looked_s + LOOK_S:
            return
        self._looked_s = now_s
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
        if self._coordinator is None and _COORDINATOR in self._locks:
            self._coordinator = _Coordinator(self.train, self.layout)

    def _may_take(self, name: str, now_s: float) -> bool:
        """Return whether a part is better here than elsewhere, or nobody there has taken it."""
        if name == _COORDINATOR or now_s > self._begun_s + _LEAVE_S:
            return True
        state = self.train.version(self.train.newest()) / "state" / name
        return is_here(state) is not False

    # -- shards ------------------------------------------------------------------------------------

    def _reduce(self, shard: Shard, target: Path, plan: Plan) -> bool:
        """Make a shard of the next version, as far as can be now."""
        if all(is_published(target / part / shard.name) for part in _PARTS):
            return False
        try:
            reduction = self._reduction_of(shard, target, plan)
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
        except (FileNotFoundError, FormatError, Refused) as error:
            # Made by somebody else meanwhile, and tidied. Or a push is gone or broken: the coordinator will
            # make another plan.
            self._reduction.pop(shard.name, None)
            log.info("%s: version %d is left: %s", self.train.models, plan.version, error)
            return False
        self._reduction.pop(shard.name, None)
        return True

    def _reduction_of(self, shard: Shard, target: Path, plan: Plan) -> Reduction:
        made_in, reduction = self._reduction.get(shard.name, (None, None))
        if reduction is None or made_in != target:
            before = self.train.version(plan.version - 1)
            reduction = Reduction(shard, plan, before, self.train.push, self._blocks)
            self._reduction[shard.name] = (target, reduction)
        return reduction


_COORDINATOR = "coordinator"


class _Coordinator:
    """Plans, commits and tidies."""

    def __init__(self, train: TrainDirectory, layout: ModelLayout) -> None:
        self._train = train
        self._layout = layout
        self._progress = Progress()
        # By name in push/; of refused ones the inode, time and size of the file that was refused.
        self._pushes: dict[str, Identity] = {}
        self._bad: dict[str, tuple[int, int, int]] = {}
        self._is_checked = _files.lies_on_irdmafs(train.path)
        self._members: dict[str, int] = {}
        self._looked_s = 0.0
        self._lacking_s = time.monotonic()
        self._tidied = -1

    def step(self, config: TrainConfig, newest: Plan) -> bool:
        if self._tidied < 0:
            self._sweep()
        if self._tidied != newest.version:
            self._tidy(config, newest)
            self._tidied = newest.version
        made = self._train.making(newest.version + 1)
        if made is None:
            return self._plan(config, newest)
        return self._commit(config, *made) or self._try_again(*made)

    # -- plan --------------------------------------------------------------------------------------

    def _plan(self, config: TrainConfig, newest: Plan) -> bool:
        self._look_at_members()
        found = self._find_pushes(config, newest)
        waiting = pending(found, newest.clocks)
        enough, awaited = is_wanted(config, waiting, self._members)
        self._progress.see(config, newest, waiting, awaited, self._members)
        if not enough:
            write_status(self._train, self._progress)
            return False
        skipped = self._nonfinite(waiting) if config.nonfinite == "skip" else ()
        plan = next_plan(config, newest, found, self._members, skipped, time.time_ns())
        assert plan is not None
        self._write_plan(self._train.attempt(plan.version, 0), plan)
        self._progress.planned(self._train, plan)
        return True

    def _write_plan(self, target: Path, plan: Plan) -> None:
        for part in ("", "norm", *_PARTS):
            os.makedirs(target / part, exist_ok=True)
        write_once(target / PLAN, msgspec.json.encode(plan))
        self._lacking_s = time.monotonic()

    def _try_again(self, target: Path, plan: Plan) -> bool:
        """Plan the version once more, in another directory, if a push of the plan is gone or broken, which
        would be waited for in vain: it counts with weight 0. Shards that were made with it stay where
        they are, and count for nothing unless all of them were made."""
        now_s = time.monotonic()
        if now_s < self._lacking_s + LOOK_S:
            return False
        self._lacking_s = now_s
        gone = {push.path for push in plan.pushes if push.weight and not self._is_usable(push.path)}
        if not gone or self._train.newest() >= plan.version:
            return False
        log.warning("%s: gone while it was counted: %s", self._train.models, ", ".join(gone))
        attempt = int(target.name.partition(".")[2] or 0) + 1
        self._write_plan(self._train.attempt(plan.version, attempt), without(plan, gone))
        return True

    def _is_usable(self, name: str) -> bool:
        try:
            return pushes.inspect(self._train, self._layout, name) is not None
        except Refused as error:
            self._refuse(name, error)
            return False

    def _find_pushes(self, config: TrainConfig, newest: Plan) -> list[Push]:
        """Return what is in push/. A push that was read once is not read again."""
        names = set(os.listdir(self._train.push))
        for known in (self._pushes, self._bad):
            for name in known.keys() - names:
                del known[name]
        steps = dict(newest.clocks)
        for name in sorted(names - self._pushes.keys()):
            identity = self._look_at(config, newest, name)
            if identity is not None:
                self._pushes[name] = identity
        for name, identity in list(self._pushes.items()):
            if 0 < identity.step <= newest.clocks.get(identity.worker, 0):
                # A repetition of one that has counted.
                del self._pushes[name]
                remove(self._train.push / name)
        for identity in self._pushes.values():
            steps[identity.worker] = max(steps.get(identity.worker, 0), identity.step)
        for name, identity in [item for item in self._pushes.items() if item[1].step == 0]:
            steps[identity.worker] += 1
            self._settle(name, identity, steps[identity.worker])
        return [
            Push(one.worker, one.step, name, one.weight, one.base, one.lr)
            for name, one in self._pushes.items()
        ]

    def _settle(self, name: str, identity: Identity, step: int) -> None:
        """Give a push that has the worker's next step a name that says which that is. Its old name is free:
        a file that comes there is another push."""
        settled = pushes.settled_name(name, identity.worker, step)
        del self._pushes[name]
        try:
            rename_new(self._train.push / name, self._train.push / settled)
        except FileExistsError:
            # Its worker has just pushed that step: this is the one after.
            return
        self._pushes[settled] = identity._replace(step=step)

    def _look_at(self, config: TrainConfig, newest: Plan, name: str) -> Identity | None:
        path = self._train.push / name
        try:
            status = path.lstat()
            seen = (status.st_ino, status.st_ctime_ns, status.st_size)
            if name.startswith(".") or self._bad.get(name) == seen:
                return None
            identity = pushes.inspect(self._train, self._layout, name)
            if identity is not None:
                # What was renamed into push/ has not been checked under this name.
                pushes.check_worker_and_step(config, newest.clocks, identity)
            if identity is not None and not self._is_checked and path.is_file():
                with _files.open_to_read(os.fspath(path)) as (fd, _):
                    pushes.check_content(self._train, fd, name)
            return identity
        except FileNotFoundError:
            return None
        except Refused as error:
            if error.errno == errno.ESTALE:
                # As above: its step is past.
                remove(path)
            elif self._is_checked or time.time_ns() > status.st_mtime_ns + _SETTLED_NS:
                self._bad[name] = seen
                self._refuse(name, error)
            return None

    def _refuse(self, name: str, error: Refused) -> None:
        log.warning("%s: %s is refused: %s", self._train.models, name, error)
        refusals.note(self._train, name, error)

    def _nonfinite(self, waiting: list[Push]) -> list[str]:
        """Return the pushes that have NaN or infinity."""
        found = []
        for push in waiting:
            path = self._train.push / push.path
            files = [path / name for name in self._layout.shard_names] if path.is_dir() else [path]
            if any(map(pushes.has_nonfinite, files)):
                log.warning("%s: %s has NaN or infinity: skipped", self._train.models, push.path)
                found.append(push.path)
        return found

    def _look_at_members(self) -> None:
        """See who takes part, and who has ended."""
        now_s = time.monotonic()
        if self._names() == self._members.keys() and now_s < self._looked_s + LOOK_S:
            return
        self._looked_s = now_s
        # Listed before the workers: each makes its directory there when it has locked its name.
        staged = [name for name in os.listdir(self._train.push) if name.startswith(".")]
        present = {name for name in self._names() if self._takes_part(name)}
        for name in staged:
            worker, at, _ = name[1:].partition("@")
            if at and worker not in present and (self._train.push / name).is_dir():
                # Another user's may have to stay.
                with contextlib.suppress(PermissionError):
                    remove_staging(self._train.push / name)
        members = {}
        for name in present:
            with contextlib.suppress(FileNotFoundError, ValueError, TrainError):
                members[name] = int(read_small(self._train.workers / name) or 0)
        if members != self._members or not self._train.members.exists():
            replace(self._train.members, msgspec.json.encode(members))
            self._members = members

    def _names(self) -> set[str]:
        return {name for name in os.listdir(self._train.workers) if not name.startswith(".")}

    def _takes_part(self, name: str) -> bool:
        """Return whether a worker has not ended. Removes the file of one that has."""
        path = self._train.workers / name
        if is_locked(path):
            return True
        log.info("%s: worker %s has ended", self._train.models, name)
        remove(path)
        return False

    # -- commit ------------------------------------------------------------------------------------

    def _commit(self, config: TrainConfig, target: Path, plan: Plan) -> bool:
        names = self._layout.shard_names
        if not all(is_published(target / part / name) for part in _PARTS for name in names):
            return False
        self._progress.reduced()
        for part in ("", *_PARTS):
            for name in os.listdir(target / part):
                if name.startswith("."):
                    remove(target / part / name)
        if config.whole_every and plan.version % config.whole_every == 0:
            assemble(self._layout, target)
        remove(target / "norm")
        try:
            os.rename(target, self._train.version(plan.version))
        except OSError as error:
            # Another coordinator made it, while this one's host was stopped.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise
        self._progress.committed(plan)
        lead_to_newest(self._train)
        return True

    def _tidy(self, config: TrainConfig, newest: Plan) -> None:
        """Remove the pushes that count, versions that nobody wants any more, and what was left behind."""
        lead_to_newest(self._train)
        for push in newest.pushes:
            remove(self._train.push / push.path)
        for number in self._train.version_numbers():
            if number <= newest.version - config.keep:
                remove(self._train.version(number))
        for name in os.listdir(self._train.next):
            made = name.partition(".")[0]
            if made.isdecimal() and int(made) <= newest.version:
                remove(self._train.next / name)

    def _sweep(self) -> None:
        """Remove the small files that processes were writing when they were killed."""
        for folder in (self._train.path, self._train.since, self._train.workers):
            for name in os.listdir(folder):
                path = folder / name
                if name.startswith(".") and _is_old(path) and not is_locked(path):
                    remove(path)


def _is_old(path: Path) -> bool:
    try:
        return time.time() > path.lstat().st_mtime + _LEFT_S
    except FileNotFoundError:
        return False


def assemble(layout: ModelLayout, version: Path) -> None:
    """Make the model's files of a version from its shards. Raises OSError."""
    files = layout.files
    names = layout.shard_names
    if len(files) == len(names) == 1:
        with contextlib.suppress(FileExistsError):
            os.link(version / "params" / names[0], version / files[0])
        return
    values = gather(layout, version / "params")
    for file in files:
        parameters = [one.name for one in layout.parameters if one.file == file]
        _files.replace_file(
            os.fspath(version / file),
            encode({name: values[name] for name in parameters}, {"format": "pt"}),
            versioned=_files.lies_on_irdmafs(version),
        )
