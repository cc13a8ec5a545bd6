"""Where a worker writes its pushes before anybody sees them."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Container, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from ..client import _files
from ..client._dtypes import Value
from .directory import TrainDirectory, discard
from .layout import Shard
from .pushes import REFUSALS, check_content, shard_contents

__all__ = ["Staging", "explain", "give_back", "without_worker"]

_SPARE = "spare"
# Shards that are published at once.
_AT_ONCE = 16
# There is one already, the worker has ended, or it is another user's.
_NOT_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.EACCES, errno.EPERM)


class Staging:
    """A directory of one worker in staging/. Only it writes there."""

    def __init__(self, train: TrainDirectory, worker: str) -> None:
        """Make the directory. Remove those of workers that had the name before: one that was only stopped
        can then publish nothing any more. Raises OSError."""
        self._train = train
        for name in os.listdir(train.staging):
            if _worker_of(name) == worker:
                discard(train, train.staging / name)
        self.path = train.staging / f"{worker}@{secrets.token_hex(8)}"
        self.path.mkdir()
        self._publishing = ThreadPoolExecutor(_AT_ONCE, "publish")

    def begin(self, name: str) -> Path:
        """Return a directory for the files of a push. Those of one that has counted are in it, if there is
        one: writing all of them anew costs half of making new ones. Raises OSError."""
        path = self.path / name
        try:
            os.rename(self.path / _SPARE, path)
        except FileNotFoundError:
            path.mkdir()
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
        fd = _files.write_version(os.fspath(path), contents)
        return self._publishing.submit(self._publish, path, fd, contents)

    def _publish(self, path: Path, fd: int, contents: Iterable[memoryview]) -> None:
        try:
            with _files.naming(os.fspath(path)):
                os.close(fd)
        except OSError as error:
            if error.errno in REFUSALS:
                explain(self._train, os.fspath(path.relative_to(self._train.staging)), contents)
            raise

    def drop(self, path: Path) -> None:
        """Remove a push that was begun, if that can be."""
        with contextlib.suppress(OSError):
            discard(self._train, path)

    def remove(self) -> None:
        """Raises OSError."""
        self._publishing.shutdown()
        discard(self._train, self.path)


def explain(train: TrainDirectory, name: str, contents: Iterable[memoryview]) -> None:
    """Check once more what the mount has refused: a close cannot give a reason. Raises Refused."""
    fd = os.memfd_create("push", os.MFD_CLOEXEC)
    try:
        _files.write_all(fd, contents)
        check_content(train, fd, name)
    finally:
        os.close(fd)


def _worker_of(name: str) -> str:
    return name.rpartition("@")[0]


def give_back(train: TrainDirectory, push: Path, worker: str, names: Iterable[str]) -> bool:
    """Give a push in shards that has counted to its worker, which writes its next one into the same files.
    `names`: of the directories in staging/. Return whether it was taken. Raises OSError."""
    for name in names:
        if _worker_of(name) == worker:
            try:
                os.rename(push, train.staging / name / _SPARE)
            except OSError as error:
                if error.errno not in _NOT_TAKEN:
                    raise
            else:
                return True
    return False


def without_worker(names: Iterable[str], workers: Container[str]) -> list[str]:
    """Return those of the directories in staging/ that belong to none of these workers."""
    return [name for name in names if _worker_of(name) not in workers]
