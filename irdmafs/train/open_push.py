"""A push that is being made, maybe while its gradients are still being computed."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path

from ..client import _files
from ..client._dtypes import Array
from ..client._safetensors import encode
from .directory import TrainDirectory
from .errors import Refused, TrainError, invalid
from .layout import Shard
from .pushes import STEP, arrays_of, check_finite, slices_of

# Shards that are written at once: so many that the link is never idle, so few that one is there soon.
_AT_ONCE = 3


class OpenPush:
    """A push that takes gradients one by one. Threads write the file of a shard as soon as all gradients
    of that shard are there. Nobody sees the push before `finish`. Methods may be called by any thread.

    Arrays are not copied: they must not change before `finish` returns, unless they are put again.
    """

    def __init__(
        self,
        train: TrainDirectory,
        shards: Sequence[Shard],
        path: Path | None,
        step: int,
        *,
        finite: bool,
        publish: Callable[[Mapping[str, Array], float, float | None], int],
    ) -> None:
        """`shards`: in the order in which `finish` writes them. `path`: of its directory in staging/, None
        if it is one file, which is written when it is published. `finite`: NaN and infinity are refused.
        `publish`: publishes the push, by its values, weight and learning rate, and returns its step. Raises
        OSError."""
        self._train = train
        self._shards = shards
        self._path = path
        self._directory = None if path is None else train.directories.open(path)
        self._metadata = {STEP: str(step)}
        self._finite = finite
        self._publish = publish
        self._holders: dict[str, list[Shard]] = {}
        for shard in shards:
            for part in shard.slices:
                self._holders.setdefault(part.parameter.name, []).append(shard)
        self._values: dict[str, Array] = {}
        self._ended = False
        self._lock = threading.Lock()
        # The files that were or are being written, by shard, and the shards that have changed since.
        self._written: dict[str, Future[None]] = {}
        self._changed: set[str] = set()
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="irdmafs-push")

    def put(self, name: str, gradient: object) -> None:
        """Add a gradient, or replace the one of that name. Raises Refused if it does not fit, TrainError if
        the push was finished or dropped."""
        self._refuse_if_ended()
        value = arrays_of(self._train.layout, {name: gradient})[name]
        with self._lock:
            self._values[name] = value
            for shard in self._holders.get(name, ()):
                if shard.name in self._written:
                    # finish() writes it anew: gradients that accumulate are put many times.
                    self._written[shard.name].cancel()
                    self._changed.add(shard.name)
                elif all(part.parameter.name in self._values for part in shard.slices):
                    self._begin_writing(shard)

    def put_all(self, values: Mapping[str, Array]) -> None:
        """Add values that were checked. Their files are written by `finish`."""
        with self._lock:
            self._values |= values

    def finish(self, weight: float = 1.0, *, lr: float | None = None) -> int:
        """Publish the push, as Worker.push() does, and return its step. Parameters that were not put are
        left out. Raises Refused and OSError, after which nothing of the push is there, and TrainError as
        put() does."""
        self._refuse_if_ended()
        with self._train.naming():
            try:
                step = self._finish(weight, lr)
            except BaseException:
                self.abort()
                raise
        self._ended = True
        self._threads.shutdown()
        return step

    def _refuse_if_ended(self) -> None:
        if self._ended:
            raise TrainError("this push was finished or dropped: begin another")

    def _finish(self, weight: float, lr: float | None) -> int:
        # A file that is written anew has no other writer: it would be emptied for those who have it mapped.
        for name in self._changed:
            with contextlib.suppress(Refused, CancelledError):
                self._written.pop(name).result()
        with self._lock:
            for shard in self._shards:
                if shard.name not in self._written:
                    self._begin_writing(shard)
        for writing in self._written.values():
            writing.result()
        if not self._values:
            raise invalid("it has no tensor")
        if self._finite and self._path is None:
            check_finite(self._values)
        return self._publish(self._values, weight, lr)

    def abort(self) -> None:
        """Drop the push, unless it is finished. If its files cannot be removed, the next worker of the name
        removes them."""
        if self._ended:
            return
        self._ended = True
        self._threads.shutdown(cancel_futures=True)
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._train.discard(self._path)

    def _begin_writing(self, shard: Shard) -> None:
        slices = slices_of(shard, self._values)
        self._written[shard.name] = self._threads.submit(self._write, shard, slices)

    def _write(self, shard: Shard, slices: Mapping[str, Array]) -> None:
        """Publish the file of a shard. Raises Refused and OSError."""
        if self._finite:
            check_finite(slices)
        contents = list(encode(slices, self._metadata))
        assert self._path is not None and self._directory is not None
        try:
            name = os.fspath(self._directory.path / shard.name)
            os.close(_files.write_version(name, contents, self._directory.view))
        except OSError as error:
            error.filename = self._train.shown(os.fspath(self._path / shard.name))
            raise
