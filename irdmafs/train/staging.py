"""Where a worker writes its pushes before anybody sees them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Container, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from ..client import _files
from ..client._dtypes import Value
from .directory import SPARE, TrainDirectory, discard, make_home, owner_of
from .folders import Directories, Directory
from .layout import Shard
from .pushes import REFUSALS, check_content, shard_contents

__all__ = ["Staging", "explain", "without_worker"]

# Shards that are published at once: enough that the link is never idle, and few enough that one after the
# other is there.
_AT_ONCE = 3


class Staging:
    """A directory of one worker in staging/. Only it writes there."""

    def __init__(self, train: TrainDirectory, worker: str) -> None:
        """Make the directory, and remove those of workers that had the name before. Raises OSError."""
        self._train = train
        self.path = make_home(train.staging, worker, partial(discard, train))
        # The push that is being written.
        self._open: tuple[Path, Directory] | None = None
        self._directories = Directories()
        self._publishing = ThreadPoolExecutor(_AT_ONCE, "publish")

    def begin(self, name: str) -> Path:
        """Return a directory for the files of a push. Those of one that has counted are in it, if there is
        one: writing all of them anew costs half of making new ones. Raises OSError."""
        path = self.path / name
        try:
            os.rename(self.path / SPARE, path)
        except FileNotFoundError:
            path.mkdir()
        self._open = (path, self._directories.open(path))
        return path

    def write(
        self, directory: Path, shard: Shard, values: Mapping[str, Value], more: Mapping[str, str]
    ) -> Future[None]:
        """Write the file of a shard; `more`: its metadata. It is published when the future is done, which
        raises Refused and OSError. So one file is on its way to its node while the next is written.
        Raises OSError."""
        contents = shard_contents(shard, values, more)
        path = directory / shard.name
        if not self._train.is_on_irdmafs:
            return self._publishing.submit(
                _files.replace_file, os.fspath(path), contents, versioned=False
            )
        opened = self._open
        assert opened is not None
        assert opened[0] == directory, "only one push is written at a time"
        with self._naming(path):
            name = os.fspath(opened[1].file(shard.name))
            fd = _files.write_version(name, contents, opened[1].view)
        return self._publishing.submit(self._publish, path, fd, contents)

    def _publish(self, path: Path, fd: int, contents: Iterable[memoryview]) -> None:
        try:
            with self._naming(path):
                os.close(fd)
        except OSError as error:
            if error.errno in REFUSALS:
                explain(self._train, os.fspath(path.relative_to(self._train.staging)), contents)
            raise

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
        self._open = None
        self._directories.close()
        discard(self._train, self.path)


def explain(train: TrainDirectory, name: str, contents: Iterable[memoryview]) -> None:
    """Check once more what the mount has refused: a close cannot give a reason. Raises Refused."""
    fd = os.memfd_create("push", os.MFD_CLOEXEC)
    try:
        _files.write_all(fd, contents)
        check_content(train, fd, name)
    finally:
        os.close(fd)


def without_worker(names: Iterable[str], workers: Container[str]) -> list[str]:
    """Return those of the directories in staging/ that belong to none of these workers."""
    return [name for name in names if owner_of(name) not in workers]
