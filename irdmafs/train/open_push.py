"""A push that is being made, maybe while its gradients are still being computed."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

from ..client._dtypes import Array
from .errors import Refused
from .layout import ModelLayout, Shard
from .pushes import arrays_of
from .staging import Staging

# Shards that are written at once: enough that the link is never idle, and few enough that one after the
# other is there.
_AT_ONCE = 3


class OpenPush:
    """A push that takes gradients one by one. Threads write the file of a shard as soon as all gradients
    of that shard are there. Nobody sees the push before `finish`. Methods may be called by any thread.

    Arrays are not copied: they must not change before `finish` returns, unless they are put again.
    """

    def __init__(
        self,
        layout: ModelLayout,
        shards: Sequence[Shard],
        staging: Staging,
        name: str,
        more: Mapping[str, str],
        *,
        finite: bool,
        publish: Callable[[Path, float, float | None], int],
        noting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """`shards`: in the order in which `finish` writes them. `name`: of the directory in `staging` for
        their files; `more`: their metadata; `finite`: NaN and infinity are refused. `publish`: gives
        the push its name, by the path of the directory, the weight and the learning rate, and returns its
        step. `noting`: a context that is told why the push is refused. Raises OSError."""
        self._layout = layout
        self._shards = shards
        self._staging = staging
        self._more = more
        self._finite = finite
        self._publish = publish
        self._noting = noting
        self._path, self._directory = staging.begin(name)
        self._holders: dict[str, list[Shard]] = {}
        for shard in shards:
            for part in shard.slices:
                self._holders.setdefault(part.parameter.name, []).append(shard)
                self._holders.setdefault(part.scales, []).append(shard)
        self._values: dict[str, Array] = {}
        self._lock = threading.Lock()
        # The files that were written or are being written, by shard, and those whose gradients have changed
        # since.
        self._written: dict[str, Future[None]] = {}
        self._in_vain: list[Future[None]] = []
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="irdmafs-push")

    def put(self, name: str, gradient: object) -> None:
        """Add a gradient, or replace the one of that name. Raises Refused where it does not fit the
        parameter."""
        value = arrays_of(self._layout, {name: gradient})[name]
        with self._lock:
            self._values[name] = value
            for shard in self._holders.get(name, ()):
                if shard.name in self._written:
                    # finish() writes it anew: gradients that accumulate are put many times.
                    writing = self._written.pop(shard.name)
                    if not writing.cancel():
                        self._in_vain.append(writing)
                elif self._is_complete(shard):
                    self._write(shard)

    def put_all(self, values: Mapping[str, Array]) -> None:
        """Add values that were checked. Their files are written by `finish`."""
        with self._lock:
            self._values |= values

    def finish(self, weight: float = 1.0, *, lr: float | None = None) -> int:
        """Publish the push, as Worker.push() does, and return its step. Parameters that were not put are
        left out. Raises Refused and OSError, after which nothing of the push is there."""
        with self._noting():
            step = self._finish(weight, lr)
        self._threads.shutdown()
        return step

    def _finish(self, weight: float, lr: float | None) -> int:
        try:
            # The version of a file that is published last stays.
            for writing in self._in_vain:
                with contextlib.suppress(Refused):
                    writing.result()
            with self._lock:
                for shard in self._shards:
                    if shard.name not in self._written:
                        self._write(shard)
            for writing in self._written.values():
                writing.result()
            if not self._values:
                raise Refused(errno.EINVAL, "it has no tensor")
            return self._publish(self._path, weight, lr)
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Drop the push."""
        self._threads.shutdown(cancel_futures=True)
        self._staging.drop(self._path)

    def _is_complete(self, shard: Shard) -> bool:
        return all(part.parameter.name in self._values for part in shard.slices)

    def _write(self, shard: Shard) -> None:
        values = {
            name: self._values[name]
            for part in shard.slices
            for name in (part.parameter.name, part.scales)
            if name in self._values
        }
        self._written[shard.name] = self._threads.submit(
            self._staging.write, self._path, self._directory, shard, values, self._more,
            finite=self._finite,
        )  # fmt: skip
