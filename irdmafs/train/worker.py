"""A worker: pushes gradients, and pulls parameters."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ..client import _files
from ..client._dtypes import Array, Value, dtype_of_code
from ..client._safetensors import encode
from .config import is_worker_name
from .directory import (
    Changes,
    Lock,
    ShardFile,
    TrainDirectory,
    gather,
    in_parallel,
    is_locked,
    remove,
)
from .errors import Refused, TrainError
from .layout import Shard, Slice
from .open_push import OpenPush
from .places import is_here
from .plan import Plan, may_pull
from .pushes import REFUSALS, Identity, check, check_identity, inspect, values_of
from .staging import Staging, explain

__all__ = ["Worker"]

_LOOK_S = 1.0


class Worker:
    """One worker of a training directory. A context manager: it takes part until it is closed.

    `step` is the number of its last push; `version` the one that was pulled last, -1 before. `name` tells
    workers apart; one that begins again under its name goes on after its last push.
    """

    def __init__(self, directory: str | os.PathLike[str], name: str | None = None) -> None:
        """Raises TrainError, also if a worker of that name is taking part, and OSError."""
        self.train = TrainDirectory(directory)
        self.config = self.train.config()
        self.layout = self.train.layout()
        host = re.sub(r"[^A-Za-z0-9_.-]", "-", os.uname().nodename)
        self.name = name or f"{host}-{os.getpid()}"
        if not is_worker_name(self.name):
            raise TrainError(
                f"{self.name!r} cannot be the name of a worker: letters, digits, _ . -"
            )
        workers = self.config.workers
        if isinstance(workers, tuple) and self.name not in workers:
            raise TrainError(f"{self.name!r} is not one of the workers of {self.train.config_path}")
        self._shards = self.layout.shards()
        self.version = -1
        self._last_push: Path | None = None
        self._looked_s = 0.0
        self._in_turns = self._turns()
        self._take_part()

    def _turns(self) -> Sequence[Shard]:
        """Return the shards in the order in which they are pushed: no two workers begin with the same node,
        and what stays on this host comes last, as it needs no link."""
        shards = self._shards
        params = self.train.version(self.train.newest()) / "params"
        here = [is_here(params / shard.name) is True for shard in shards]
        first = here.index(True) + 1 if True in here else zlib.crc32(self.name.encode())
        order = [(first + turn) % len(shards) for turn in range(len(shards))]
        return [shards[number] for number in sorted(order, key=here.__getitem__)]

    def _take_part(self) -> None:
        """Lock the name, remove what workers of this name had begun, and see how far they came. Raises
        TrainError and OSError."""
        self._lock = self._join(self._progress()[1])
        try:
            self._staging = Staging(self.train, self.name)
            if not self._lock.is_held:
                self._staging.remove()
                raise self._taken()
            self._pushed, self.step = self._progress()
        except BaseException:
            self._lock.close()
            raise

    def _progress(self) -> tuple[int, int]:
        """Return the last step that was pushed, and the step to go on after."""
        # First the pushes: one that counts meanwhile is in the clocks.
        own = self._steps_there()
        clocks = self.train.newest_plan().clocks
        pushed = max([clocks.get(self.name, 0), *own])
        # A new worker begins where the others are.
        return pushed, pushed if self.name in clocks else max([*clocks.values(), *own, 0])

    def _taken(self) -> TrainError:
        return TrainError(f"a worker {self.name!r} is taking part in {self.train.models} already")

    def _steps_there(self) -> list[int]:
        """Return the steps of this worker's pushes that are there."""
        steps = []
        for name in os.listdir(self.train.push):
            if name.partition("@")[0] == self.name:
                with contextlib.suppress(Refused):
                    found = inspect(self.train, self.layout, name)
                    steps.append(found.step if found is not None else 0)
        return steps

    def _join(self, clock: int) -> Lock:
        """Take part: a file in workers/, locked before others can see it."""
        path = self.train.workers / self.name
        if is_locked(path):
            raise self._taken()
        hidden = path.with_name(f".{self.name}.{os.getpid()}")
        lock = Lock.take(hidden, b"%d" % clock)
        assert lock is not None, "nobody else has this name"
        try:
            os.rename(hidden, path)
        except BaseException:
            lock.close()
            remove(hidden)
            raise
        return lock

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take part no longer: nobody waits for this worker any more. What it pushed counts."""
        if self._lock.is_held:
            self._staging.remove()
            remove(self.train.workers / self.name)
        self._lock.close()

    # -- push --------------------------------------------------------------------------------------

    def push(
        self,
        gradients: Mapping[str, object],
        *,
        weight: float = 1.0,
        lr: float | None = None,
        scales: Mapping[str, float] | None = None,
    ) -> int:
        """Push gradients (or whatever the rule takes) by parameter; return the step. Some may be left out.

        They are numpy arrays or torch tensors with the parameters' shapes, of any float type, and are
        written from where they lie. `weight`: a number of samples or tokens, for example; `lr`: instead of
        the configured one; `scales`: factors of parameters, for fp8. When this returns the push will
        count, once. Raises Refused (an OSError), which says why. After another OSError it counts once or
        not at all: a worker that begins again under the name goes on after it if it does.
        """
        values = values_of(self.layout, gradients)
        identity = self._next_push(weight, lr)
        more = {}
        if scales is not None:
            factors = {name: float(factor) for name, factor in scales.items()}
            more["scales"] = msgspec.json.encode(factors).decode()
        if len(self._shards) == 1:
            return self._push_file(identity, values, more)
        check_identity(self.train, self.config, identity)
        return self._push_shards(identity, values, more)

    def begin_push(self) -> OpenPush:
        """Begin the next push before all of its gradients are there: they are put into it one by one, and
        each shard is written when it is complete. Finish or abort it before the next push begins."""
        name = f"{self.name}@{self.step + 1}"
        # A push of one shard is a file of push/ itself.
        cut = len(self._shards) > 1
        hidden = self._staging.begin(name) if cut else self._staging.path / name

        def publish(values: Mapping[str, Value], weight: float, lr: float | None) -> int:
            identity = self._next_push(weight, lr)
            if not cut:
                return self._push_file(identity, values, {})
            check_identity(self.train, self.config, identity)
            return self._push_directory(identity, hidden)

        return OpenPush(self.layout, self._staging, hidden, publish)

    def _next_push(self, weight: float, lr: float | None) -> Identity:
        if not self._lock.is_held:
            self._take_part_again()
        lr = None if lr is None else float(lr)
        return Identity(self.name, self.step + 1, float(weight), self.version, lr)

    def _take_part_again(self) -> None:
        """Go on after this host was cut off for too long. Raises Refused if another worker has the name, or
        has pushed under it."""
        pushed = self._pushed
        self._lock.close()
        try:
            self._take_part()
        except TrainError as error:
            raise Refused(errno.ENOLCK, str(error)) from None
        if self._pushed != pushed:
            self._lock.close()
            raise Refused(errno.ENOLCK, f"another worker has pushed as {self.name!r}: begin again")

    def _push_file(
        self, identity: Identity, values: Mapping[str, Value], more: Mapping[str, str]
    ) -> int:
        name = f"{self.name}@{identity.step}.safetensors"
        self._publish(name, list(encode(values, {**identity.metadata, **more})))
        return self._pushed_as(name, identity)

    def _push_directory(self, identity: Identity, hidden: Path) -> int:
        """Publish the files of all shards. Where irdmafs is not below they are checked here."""
        if not self.train.is_on_irdmafs:
            for shard in self._shards:
                with _files.open_to_read(os.fspath(hidden / shard.name)) as (fd, _):
                    name = f"{self._staging.path.name}/{hidden.name}/{shard.name}"
                    check(self.train.models, fd, name)
        os.rename(hidden, self.train.push / identity.name)
        return self._pushed_as(identity.name, identity)

    def _pushed_as(self, name: str, identity: Identity) -> int:
        self._last_push = self.train.push / name
        self.step = self._pushed = identity.step
        return self.step

    def _push_shards(
        self, identity: Identity, values: Mapping[str, Value], more: Mapping[str, str]
    ) -> int:
        staging = self._staging
        hidden = staging.begin(identity.name)
        try:
            published = []
            try:
                for shard in self._in_turns:
                    written = staging.write(hidden, shard, values, more)
                    published.append(written)
            finally:
                wait(published)
            for future in published:
                future.result()
            return self._push_directory(identity, hidden)
        except BaseException:
            staging.drop(hidden)
            raise

    def _publish(self, name: str, contents: Sequence[memoryview]) -> None:
        """Write a file below push/, which is checked before it is published. Raises Refused and OSError."""
        path = self.train.push / name
        if self.train.is_on_irdmafs:
            try:
                _files.replace_file(os.fspath(path), contents, versioned=True)
            except OSError as error:
                if error.errno in REFUSALS:
                    explain(self.train, name, contents)
                raise
            return
        hidden = self._staging.path / name
        try:
            with hidden.open("wb+") as file:
                _files.write_all(file.fileno(), contents)
                check(self.train.models, file.fileno(), name)
            os.replace(hidden, path)
        except BaseException:
            self._staging.drop(hidden)
            raise

    # -- pull --------------------------------------------------------------------------------------

    def pull(
        self, out: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Return the parameters, as soon as this worker may go on (docs/training.md): read-only arrays that
        show the version's files. `out`: arrays or tensors that they are copied into, and which are
        returned. Raises TimeoutError, TrainError and OSError."""
        return self._show(self._wait(self._may_go_on, timeout_s), out)

    def pull_since(
        self, version: int, out: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Return the parameters of the newest version, as soon as that is at least `version`; else as
        pull()."""
        return self._show(self._wait(lambda plan: plan.version >= version, timeout_s), out)

    def push_pull(
        self,
        gradients: Mapping[str, object],
        out: Mapping[str, Any] | None = None,
        *,
        weight: float = 1.0,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """Push, then pull."""
        self.push(gradients, weight=weight)
        return self.pull(out, timeout_s=timeout_s)

    def _may_go_on(self, plan: Plan) -> bool:
        members = self.train.member_clocks() if self.config.synchronization.kind == "ssp" else {}
        return may_pull(self.config, self.name, self._pushed, self.step, plan.clocks, members)

    def _wait(self, suffices: Callable[[Plan], bool], timeout_s: float | None) -> Plan:
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            changes = Changes(self.train.versions)
            newest = self.train.newest_plan()
            if suffices(newest):
                return newest
            self._look_after_push()
            left_s = _LOOK_S if deadline_s is None else deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(
                    errno.ETIMEDOUT,
                    f"version {newest.version} is the newest after {timeout_s} s; "
                    f"{self.train.status} says who is waited for",
                )
            with contextlib.suppress(InterruptedError):
                changes.wait(min(left_s, _LOOK_S))

    def _look_after_push(self) -> None:
        """Raise TrainError if the last push was removed before it counted: nobody would go on."""
        now_s = time.monotonic()
        if self._last_push is None or now_s < self._looked_s + _LOOK_S:
            return
        self._looked_s = now_s
        if self._last_push.exists():
            return
        clock = self.train.newest_plan().clocks.get(self.name, 0)
        if clock < self._pushed:
            missing, self._last_push = self._pushed, None
            self.step = self._pushed = max([clock, *self._steps_there()])
            raise TrainError(
                f"push {missing} of {self.name!r} was removed before it counted: push it again"
            )

    def _show(self, plan: Plan, out: Mapping[str, Any] | None) -> dict[str, Any]:
        shapes = self.layout.shapes
        for name, target in (out or {}).items():
            if tuple(target.shape) != shapes[name]:
                raise ValueError(
                    f"an array of {tuple(target.shape)} for the parameter {name!r} of {shapes[name]}"
                )
        values: dict[str, Value] = {}
        while True:
            params = self.train.version(plan.version) / "params"
            try:
                if out is None:
                    values = gather(self.layout, params)
                else:
                    in_parallel(partial(_copy_shard, params, out), self._shards)
                break
            except FileNotFoundError:
                # Older than `keep` versions meanwhile.
                newer = self.train.newest_plan()
                if newer.version == plan.version:
                    raise
                plan = newer
        self.version = plan.version
        if out is None:
            return {name: value.shown for name, value in values.items()}
        return dict(out)


def _copy_shard(params: Path, out: Mapping[str, Any], shard: Shard) -> None:
    """Copy the parameters of a shard, as soon as they are here, into arrays or tensors."""
    file = ShardFile(params / shard.name)
    for part in shard.slices:
        name = part.parameter.name
        if name in out:
            extension = dtype_of_code(part.parameter.dtype)[1]
            _copy(Value(file.tensor(name), extension), out[name], part)


def _copy(value: Value, target: Any, part: Slice) -> None:
    """Copy a slice of a parameter into an array, or a tensor on any device, of the parameter's shape."""
    shown: Array = value.shown
    if type(target).__module__.partition(".")[0] == "torch":
        import torch

        dtype = getattr(torch, value.extension or value.array.dtype.name)
        if target.device.type != "cpu" or target.dtype != dtype:
            source = torch.from_numpy(value.array.copy()).view(dtype)
            _copy_tensor(source, target, part)
            return
        target = target.detach()
        shown = value.array
        if value.extension is not None:
            target = target.view(getattr(torch, value.array.dtype.name))
        target = target.numpy()
    if part.is_whole:
        target[...] = shown
    elif target.flags.c_contiguous:
        target.reshape(-1)[part.start : part.stop] = shown
    else:
        target.flat[part.start : part.stop] = shown


def _copy_tensor(source: Any, target: Any, part: Slice) -> None:
    """Copy into a tensor on another device, or of another type."""
    whole = target.detach()
    if part.is_whole:
        whole.copy_(source)
    elif whole.is_contiguous():
        whole.view(-1)[part.start : part.stop].copy_(source)
    else:
        at = np.unravel_index(range(part.start, part.stop), part.parameter.shape)
        whole[at] = source.to(whole)
