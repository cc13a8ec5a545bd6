"""Where a worker writes its pushes before anybody sees them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Container, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from ..client import _files
from ..client._dtypes import Array
from ..client._safetensors import encode
from .directory import SPARE, TrainDirectory, discard, make_home, owner_of
from .folders import Directories, Directory
from .layout import Shard
from .pushes import check_finite, slices_of

__all__ = ["Staging", "without_worker"]

# Shards that are published at once: enough that the link is never idle, and few enough that one after the
# other is there.
_AT_ONCE = 3


class Staging:
    """A directory of one worker in staging/. Only it writes there."""

    def __init__(self, train: TrainDirectory, worker: str) -> None:
        """Make the directory, and remove those of workers that had the name before. Raises OSError."""
        self._train = train
        self.path = make_home(train.staging, worker, partial(discard, train))
        self._directories = Directories()
        self._publishing = ThreadPoolExecutor(_AT_ONCE, "publish")

    def begin(self, name: str) -> tuple[Path, Directory]:
        """Return a directory for the files of a push. Those of one that has counted are in it, if there is
        one: writing all of them anew costs half of making new ones. Raises OSError."""
        path = self.path / name
        try:
            os.rename(self.path / SPARE, path)
        except FileNotFoundError:
            path.mkdir()
        return path, self._directories.open(path)

    def write(
        self,
        path: Path,
        directory: Directory,
        shard: Shard,
        values: Mapping[str, Array],
        more: Mapping[str, str],
        *,
        finite: bool,
    ) -> Future[None]:
        """Write the file of a shard into a directory that has this path; `more`: its metadata; `finite`:
        NaN and infinity are refused. It is published when the future is done, which raises OSError. So one
        file is on its way to its node while the next is written. Raises Refused and OSError."""
        slices = slices_of(shard, values)
        if finite:
            check_finite(slices)
        contents = list(encode(slices, more))
        with self._naming(path / shard.name):
            name = os.fspath(directory.file(shard.name))
            fd = _files.write_version(name, contents, directory.view)
        return self._publishing.submit(self._publish, path / shard.name, fd)

    def _publish(self, path: Path, fd: int) -> None:
        with self._naming(path):
            os.close(fd)

    @contextlib.contextmanager
    def _naming(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename = self._train.shown(os.fspath(path))
            raise

    def drop(self, path: Path) -> None:
        """Remove a push that was begun, if that can be."""
        with contextlib.suppress(OSError):
            discard(self._train, path)

    def remove(self) -> None:
        """Raises OSError."""
        self._publishing.shutdown()
        self._directories.close()
        discard(self._train, self.path)


def without_worker(names: Iterable[str], workers: Container[str]) -> list[str]:
    """Return those of the directories in staging/ that belong to none of these workers."""
    return [name for name in names if owner_of(name) not in workers]
