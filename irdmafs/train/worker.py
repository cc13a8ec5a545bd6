"""A worker: pushes gradients, and pulls parameters."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from ..client import _files
from ..client._dtypes import Array
from ..client._files import RENAME_NOREPLACE, Closing, rename
from ..client._safetensors import encode
from .config import is_worker_name
from .directory import LOOK_S, ShardFile, TrainDirectory, hidden, move, params_of, remove
from .errors import Refused, TrainError
from .layout import Shard, in_turns
from .liveness import Lock, is_locked
from .open_push import OpenPush
from .placement import host_of
from .plan import Plan, Push, is_foreseen, may_pull
from .pushes import arrays_of, check_turn, inspect, metadata_of, name_in_file, name_in_shards
from .shard_files import Prefetch, copy_shard, gather, in_parallel
from .status import Watch, is_reduced, no_reducer
from .trees import look

# Arrays or tensors by parameter, into which those of a version are copied.
Out: TypeAlias = Mapping[str, Any] | None


class Worker(Closing):
    """One worker of a training directory. A context manager: it takes part until it is closed.

    `step` is the number of its last push; `version` the one that was pulled last, -1 before. `name` tells
    workers apart; one that begins again under its name goes on after its last push.
    """

    def __init__(self, directory: str | os.PathLike[str], name: str | None = None) -> None:
        """Raises TrainError, also if a worker of that name is taking part, and OSError."""
        self.train = TrainDirectory(directory, keeps_open=True)
        with self.train.naming():
            self._begin(name)

    def _begin(self, name: str | None) -> None:
        self.config = self.train.config()
        self.layout = self.train.layout
        host = re.sub(r"[^A-Za-z0-9_.-]", "-", os.uname().nodename)
        self.name = name or f"{host}-{os.getpid()}"
        if not is_worker_name(self.name):
            raise TrainError(f"{self.name!r} is no name of a worker: letters, digits, _ . -")
        workers = self.config.workers
        if isinstance(workers, tuple) and self.name not in workers:
            raise TrainError(f"{self.name!r} is not one of the workers of {self.train.config_path}")
        self.version = -1
        self._weight = 1.0
        self._lr: float | None = None
        self._watch = Watch(self.train, self.name)
        self._looked_s = 0.0
        self._in_turns = self._turns()
        self._prefetch: Prefetch | None = None
        self._open: OpenPush | None = None
        self._closed = False
        # True if the last pull gave arrays that show the version's files: the next one probably does, too.
        self._shows = False
        self._take_part()

    def _turns(self) -> Sequence[Shard]:
        """Return the shards in the order in which they are pushed: one of each part in turn, so that some
        can be reduced while others are on their way. No two workers begin with the same node, and what
        stays on this host comes last, as it needs no link."""
        version = self.train.version(self.train.newest())
        parts = list(self.layout.parts.values())
        here = [host_of(params_of(version, shards[0])) == "" for shards in parts]
        first = here.index(True) + 1 if True in here else zlib.crc32(self.name.encode())
        order = [(first + turn) % len(parts) for turn in range(len(parts))]
        return [*in_turns(parts[number] for number in sorted(order, key=here.__getitem__))]

    def _take_part(self) -> None:
        """Lock the name, remove what workers of this name had begun, and see how far they came. Raises
        TrainError and OSError."""
        self._lock = self._join(self._progress()[1])
        try:
            # The directory in staging/ in which nobody else writes.
            self._home = self.train.make_home(self.name, is_part=False)
            # The name of the last push. One from before may be taken away meanwhile.
            self._last = ""
            if not self._lock.is_held:
                self.train.discard(self._home)
                raise self._taken()
            self._take_back()
            self._pushed, self.step = self._progress()
        except BaseException:
            self._lock.close()
            raise

    def _progress(self) -> tuple[int, int]:
        """Return the last step that was pushed, and the step to go on after."""
        # First the pushes: one that counts meanwhile is in the clocks.
        own = self._pushes_there().values()
        clocks = self.train.newest_plan().clocks
        pushed = max([clocks.get(self.name, 0), *own])
        # A new worker begins where the others are.
        return pushed, pushed if self.name in clocks else max([*clocks.values(), *own, 0])

    def _taken(self) -> TrainError:
        return TrainError(f"a worker {self.name!r} is taking part in {self.train.models} already")

    def _take_back(self) -> None:
        """Take away what has counted: no earlier process of this worker writes its next push there."""
        for name, step in self._pushes_there().items():
            if self.train.has_counted(self.name, step):
                self.train.discard(self.train.push / name)

    def _pushes_there(self) -> dict[str, int]:
        """Return the steps of this worker's pushes that are there, by their names."""
        there, steps = look(self.train.push), {}
        for name in there.names:
            if name.partition("@")[0] == self.name:
                with contextlib.suppress(Refused):
                    if (found := inspect(self.train, name, there)) is not None:
                        steps[name] = found.step
        return steps

    def _join(self, clock: int) -> Lock:
        """Take part: a file in workers/, locked before others can see it, or that of a worker that has
        ended. Who locks that first has the name."""
        path, content = self.train.workers / self.name, b"%d" % clock
        if is_locked(path):
            raise self._taken()
        until_s = time.monotonic() + LOOK_S
        while True:
            with contextlib.ExitStack() as undo:
                try:
                    lock, beside = Lock(path, makes=False), None
                except FileNotFoundError:
                    beside = hidden(path)
                    lock = Lock(beside)
                    undo.callback(remove, beside)
                undo.callback(lock.close)
                is_over = time.monotonic() > until_s
                if not lock.hold(content) and (is_over or not lock.is_being_removed()):
                    raise self._taken()
                with contextlib.suppress(FileExistsError):
                    if beside is not None:
                        rename(beside, path, RENAME_NOREPLACE)
                if lock.is_held and lock.is_of(path):
                    undo.pop_all()
                    return lock

    def close(self) -> None:
        """Take part no longer: nobody waits for this worker any more. What it pushed counts."""
        self._closed = True
        self._drop_open()
        self._end_prefetch()
        if self._lock.is_held:
            self.train.discard(self._home)
            remove(self.train.workers / self.name)
        self._lock.close()
        self.train.close()

    # -- push --------------------------------------------------------------------------------------

    def push(
        self, gradients: Mapping[str, object], *, weight: float = 1.0, lr: float | None = None
    ) -> int:
        """Push gradients (or whatever the rule takes) by parameter; return the step. Some may be left out.

        They are numpy arrays or torch tensors with the parameters' shapes, of any float type, and are
        written from where they lie. `weight`: a number of samples or tokens, for example; `lr`: instead of
        the configured one. When this returns the push will
        count, once. Raises Refused (an OSError), which says why. After another OSError it counts once or
        not at all: a worker that begins again under the name goes on after it if it does.
        """
        with self.train.naming():
            return self._push(gradients, weight, lr, None)

    def _push(
        self, gradients: Mapping[str, object], weight: float, lr: float | None, out: Out
    ) -> int:
        values = arrays_of(self.layout, gradients)
        push = self._open_push(weight, lr, out)
        push.put_all(values)
        return push.finish(weight, lr=lr)

    def begin_push(self) -> OpenPush:
        """Begin the next push before all of its gradients are there: they are put into it one by one, and
        each shard is written when it is complete. One that is not finished is dropped when the next
        begins, or the worker is closed. Raises Refused, TrainError if the worker is closed, and OSError."""
        # Its weight and learning rate are known when it is finished: maybe they are those of the last one.
        with self.train.naming():
            return self._open_push(self._weight, self._lr, None)

    def _open_push(self, weight: float, lr: float | None, out: Out) -> OpenPush:
        if self._closed:
            raise TrainError(f"the worker {self.name!r} of {self.train.models} is closed")
        self._drop_open()
        if not self._lock.is_held:
            self._take_part_again()
        name = name_in_shards(self._next_push(weight, lr))
        self.config = self.train.config()
        self._begin_prefetch(out)
        path = None if self.layout.is_small else self._make_staged(name)
        self._open = OpenPush(
            self.train, self._in_turns, path, self.step + 1,
            finite=self.config.nonfinite == "refuse", publish=partial(self._publish, path),
        )  # fmt: skip
        return self._open

    def _drop_open(self) -> None:
        push, self._open = self._open, None
        if push is not None:
            push.abort()

    def _make_staged(self, name: str) -> Path:
        """Make a directory for the files of a push: that of the last one, if it has counted, as writing its
        files anew costs half of making new ones. Raises OSError."""
        path, counted = self._home / name, self._counted()
        if counted:
            # If the worker was taken for dead meanwhile, the coordinator has put it aside.
            with contextlib.suppress(FileNotFoundError):
                move(self.train.push / counted, path)
                return path
        path.mkdir()
        return path

    def _counted(self) -> str:
        """Return the name of the last push if it has counted: it is written anew. Else return ""."""
        return self._last if self.train.has_counted(self.name, self._pushed) else ""

    def _next_push(self, weight: float, lr: float | None) -> Push:
        self._weight, self._lr = float(weight), None if lr is None else float(lr)
        return Push(self.name, self.step + 1, "", self._weight, self.version, self._lr)

    def _take_part_again(self) -> None:
        """Go on after this host was cut off. Raises Refused if another worker has the name, or pushed, or
        another training has begun."""
        pushed = self._pushed
        self._lock.close()
        self.train.reopen()
        try:
            if self.train.layout != self.layout:
                raise Refused(errno.ESTALE, f"another training has begun in {self.train.models}")
            self._take_part()
        except TrainError as error:
            raise Refused(errno.ENOLCK, str(error)) from None
        if self._pushed != pushed:
            self._lock.close()
            raise Refused(errno.ENOLCK, f"another worker has pushed as {self.name!r}: begin again")

    def _publish(
        self, written: Path | None, values: Mapping[str, Array], weight: float, lr: float | None
    ) -> int:
        push = self._next_push(weight, lr)
        check_turn(self.train, self.config, self.train.newest_plan(), push)
        name = self._write(push, values) if written is None else name_in_shards(push)
        if written is not None:
            # It fails if the worker was taken for dead since the push was begun, and its files removed.
            os.rename(written, self.train.push / name)
        self.step = self._pushed = push.step
        self._last, self._open = name, None
        self._watch.pushed(name, self.step)
        return self.step

    def _write(self, push: Push, values: Mapping[str, Array]) -> str:
        """Publish a push of a small run, and return the name of its file, which may be that of the last."""
        name, directory = self._counted() or name_in_file(push), self.train.opened["push"]
        path = os.fspath(directory.path / name)
        fd = _files.write_version(path, encode(values, metadata_of(push)), directory.view)
        try:
            os.close(fd)
        except BaseException:
            # It may be published all the same: taking part again tells.
            self._lock.close()
            raise
        return name

    # -- pull --------------------------------------------------------------------------------------

    def pull(self, out: Out = None, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Return the parameters, as soon as this worker may go on (docs/training.md): read-only arrays that
        show the version's files. `out`: arrays or tensors that they are copied into, and which are
        returned. Raises TimeoutError, TrainError and OSError."""
        with self.train.naming():
            return self._show(self._wait(self._may_go_on, timeout_s), out)

    def pull_since(
        self, version: int, out: Out = None, *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Return the parameters as pull() does, as soon as the newest version is at least `version`."""
        with self.train.naming():
            return self._show(self._wait(lambda plan: plan.version >= version, timeout_s), out)

    def push_pull(
        self,
        gradients: Mapping[str, object],
        out: Out = None,
        *,
        weight: float = 1.0,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """Push, and pull: parameters are copied into `out` while others are still being pushed. After an
        error `out` may have parameters of more than one version."""
        try:
            with self.train.naming():
                self._push(gradients, weight, None, out)
            return self.pull(out, timeout_s=timeout_s)
        finally:
            self._end_prefetch()

    def _may_go_on(self, plan: Plan) -> bool:
        is_ssp = self.config.synchronization.kind == "ssp"
        members = self.train.member_clocks(plan.clocks) if is_ssp else {}
        return may_pull(self.config, self.name, self._pushed, self.step, plan.clocks, members)

    def _wait(self, suffices: Callable[[Plan], bool], timeout_s: float | None) -> Plan:
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._watch.begin()
        versions = self.train.look_at_versions()
        while True:
            now_s = time.monotonic()
            looks = now_s >= self._looked_s + LOOK_S
            if looks:
                self._looked_s = now_s
                self._look_for_refusals()
            newest = self.train.newest_plan(versions)
            if suffices(newest):
                return newest
            if looks:
                self._watch.look_for_reducer()
            left_s = LOOK_S if deadline_s is None else deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(
                    errno.ETIMEDOUT,
                    f"version {newest.version} is the newest after {timeout_s} s; {self._reason()}",
                )
            with contextlib.suppress(InterruptedError):
                versions = self.train.look_at_versions(versions.counter, min(left_s, LOOK_S))

    def _reason(self) -> str:
        if not is_reduced(self.train):
            return no_reducer(self.train)
        return f"irdmafs train status {self.train.models} says who is waited for"

    def _look_for_refusals(self) -> None:
        """Raise Refused if a push of this worker was refused, and TrainError if its last is gone."""
        try:
            self._watch.look()
        except (Refused, TrainError):
            clock = self.train.newest_plan().clocks.get(self.name, 0)
            self.step = self._pushed = max([clock, *self._pushes_there().values()])
            raise

    # -- the parameters ----------------------------------------------------------------------------

    def _begin_prefetch(self, out: Out) -> None:
        """Fetch the next version's parameters while it is made, into `out` as far as it has them."""
        self._end_prefetch()
        if len(self.layout.shards) == 1 or not is_foreseen(self.config):
            return
        self._check_out(out)
        before = self.version if self.version >= 0 else self.train.newest()
        shown = out is None and self._shows
        self._prefetch = Prefetch(self.train, before + 1, out, shown=shown)

    def _end_prefetch(self) -> None:
        prefetch, self._prefetch = self._prefetch, None
        if prefetch is not None:
            prefetch.close()

    def _check_out(self, out: Out) -> None:
        for name, target in (out or {}).items():
            shape, wanted = tuple(target.shape), self.layout.shapes[name]
            # Floats have this in the names of their types in numpy, ml_dtypes and torch.
            if shape != wanted or "float" not in str(target.dtype):
                text = f"{target.dtype} array of {shape} for the parameter {name!r}"
                raise ValueError(f"{text}, which is floats of {wanted}")

    def _show(self, plan: Plan, out: Out) -> dict[str, Any]:
        self._check_out(out)
        self._shows = out is None
        values: dict[str, Any] = dict(out or {})
        while True:
            try:
                fetched: Mapping[str, ShardFile] = {}
                prefetch, self._prefetch = self._prefetch, None
                if prefetch is not None:
                    fetched = prefetch.take(plan.version)
                copied = fetched if prefetch is not None and prefetch.out is out else {}
                open_shard = partial(self._open_shard, plan.version, fetched, out is None)
                if out is None:
                    values = gather(self.layout, self.layout.shards, open_shard)
                else:
                    left = [one for one in self.layout.shards if one.name not in copied]
                    in_parallel(partial(copy_shard, open_shard, out), left)
                break
            except FileNotFoundError:
                # Older than `keep` versions meanwhile.
                newer = self.train.newest_plan()
                if newer.version == plan.version:
                    raise
                plan = newer
        self.version = plan.version
        return values

    def _open_shard(
        self, version: int, fetched: Mapping[str, ShardFile], shown: bool, shard: Shard
    ) -> ShardFile:
        found = fetched.get(shard.name)
        if found is not None and (found.shown or not shown):
            return found
        file = self.train.parameters(version, shard, shown=shown)
        self.train.directories.note_used(file.seen)
        return file
