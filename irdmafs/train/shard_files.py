"""Files of shards: copied into arrays and tensors, new ones, and those that are fetched ahead of their
version."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..backend.files.sparse import write_at
from ..client import FormatError, _files
from ..client._device import tensor_of
from ..client._dtypes import Array, array_of
from ..client._safetensors import Head
from .directory import LOOK_S, PARAMS, ShardFile, TrainDirectory, owner_of
from .layout import ModelLayout, Shard, Slice
from .trees import GATHER_S, Directory, Folder, Seen, look

T = TypeVar("T")

_WITH_RENAME = "user.irdmafs.with_rename"
# Shards that are written, opened or fetched at once.
_AT_ONCE = 16


def in_parallel(do: Callable[[Shard], T], shards: Sequence[Shard]) -> list[T]:
    """Do the same with each shard, several at once: they lie on different store nodes, and all workers
    begin at the same time, so in turns all would use the same links."""
    if len(shards) <= 1:
        return [do(shard) for shard in shards]
    with ThreadPoolExecutor(min(len(shards), _AT_ONCE), "shard") as pool:
        return list(pool.map(do, shards))


def gather(
    layout: ModelLayout, shards: Sequence[Shard], open_shard: Callable[[Shard], ShardFile]
) -> dict[str, Array]:
    """Return all parameters of a version from the files of its shards: shown where they lie, copied where a
    shard ends within one. Raises FileNotFoundError and FormatError."""
    found: dict[str, list[Array]] = {}
    for shard, file in zip(shards, in_parallel(open_shard, shards), strict=True):
        for part in shard.slices:
            found.setdefault(part.parameter.name, []).append(file.tensor(part.parameter.name))
    result = {}
    for parameter in layout.parameters:
        parts = found.get(parameter.name, [np.empty(0, parameter.type)])
        array = parts[0] if len(parts) == 1 else np.concatenate(parts)
        array.flags.writeable = False
        result[parameter.name] = array.reshape(parameter.shape)
    return result


def copy_shard(
    open_shard: Callable[[Shard], ShardFile], out: Mapping[str, Any], shard: Shard
) -> None:
    """Copy the parameters of a shard into arrays or tensors."""
    file = open_shard(shard)
    for part in shard.slices:
        name = part.parameter.name
        if name in out:
            _copy(file.tensor(name), out[name], part)


def _copy(source: Array, target: Any, part: Slice) -> None:
    """Copy a slice of a parameter into an array, or a tensor on any device, of the parameter's shape."""
    if type(target).__module__.partition(".")[0] == "torch" and target.device.type != "cpu":
        _copy_to_device(tensor_of(source), target.detach(), part)
        return
    target = array_of(target)
    if part.is_whole:
        target[...] = source
    elif target.flags.c_contiguous:
        target.reshape(-1)[part.start : part.stop] = source
    else:
        target.flat[part.start : part.stop] = source


def _copy_to_device(source: Any, target: Any, part: Slice) -> None:
    if part.is_whole:
        target.copy_(source)
    elif target.is_contiguous():
        target.view(-1)[part.start : part.stop].copy_(source)
    else:
        at = np.unravel_index(range(part.start, part.stop), part.parameter.shape)
        target[at] = source.to(target)


class NewFile:
    """A .safetensors file that is being made. Threads may write its elements at the same time. It has no
    version until it is published.

    It is written, not mapped: a mount publishes a copy of a file that may be mapped still.
    """

    def __init__(self, directory: Directory, name: str, head: Head, *, with_rename: bool) -> None:
        """Make the file, or write it anew. Nobody else writes in the directory. `with_rename`: it has a
        version when a directory above is renamed. Raises OSError."""
        path = os.fspath(directory.path / name)
        self._fd = _files.open_anew(path, directory.view)
        self._head = head
        try:
            with contextlib.suppress(OSError):
                if with_rename:
                    os.setxattr(self._fd, _WITH_RENAME, b"1")
            write_at(self._fd, head.text, 0)
        except BaseException:
            self.discard()
            raise

    def publish(self) -> None:
        """Close the file, whole. Raises OSError."""
        os.close(self._fd)

    def discard(self) -> None:
        """Close the file without publishing it."""
        _files.discard(self._fd)

    def write(self, name: str, values: Array, first: int = 0) -> None:
        """Write elements of a tensor, from `first` on. Raises OSError."""
        self._write(values, self._head.offsets[name] + first * values.itemsize)

    def write_flat(self, values: Array, first: int) -> None:
        """Write elements of a file of one type, from `first` on, of whichever tensors. Raises OSError."""
        self._write(values, len(self._head.text) + first * values.itemsize)

    def _write(self, values: Array, offset: int) -> None:
        if values.size:
            write_at(self._fd, values.reshape(-1).view(np.uint8).data, offset)


# -- ahead of a version ------------------------------------------------------------------------------


class _Fetch(NamedTuple):
    """A file that is being fetched. `status`: what identified it before it was opened."""

    status: Seen
    file: Future[ShardFile]


class Prefetch:
    """Fetches the parameters of a version that is being made, in a thread, until take() or close()."""

    def __init__(
        self, train: TrainDirectory, version: int, out: Mapping[str, Any] | None, *, shown: bool
    ) -> None:
        """`out`: arrays or tensors that each shard is copied into once it is here; the version may get
        another yet. `shown`: as in ShardFile."""
        self.out = out
        self._version = version
        self._train, self._layout = train, train.layout
        self._shown = shown
        self._fetches: dict[str, _Fetch] = {}
        self._pool = ThreadPoolExecutor(_AT_ONCE, "prefetch")
        self._lock = threading.Lock()
        self._ended = False
        threading.Thread(target=self._run, name="prefetch", daemon=True).start()

    def take(self, version: int) -> dict[str, ShardFile]:
        """End, and return the shards that a version has, by name. Raises OSError, also if it is gone."""
        self.close()
        found: dict[str, ShardFile] = {}
        if version != self._version:
            return found
        there = self._train.in_version(version)
        for shard in self._layout.shards:
            fetch = self._fetches.get(shard.name)
            if fetch is None or fetch.file.exception() is not None:
                continue
            if there.folder(shard.part, PARAMS).files.get(shard.name) == fetch.status:
                found[shard.name] = fetch.file.result()
                self._train.directories.note_used(fetch.status)
        return found

    def close(self) -> None:
        """Begin no more fetches, and wait for those that were begun: nothing is used any more then."""
        with self._lock:
            self._ended = True
        self._pool.shutdown()

    def _run(self) -> None:
        counter = None
        while not self._ended and len(self._fetches) < len(self._layout.shard_names):
            try:
                ahead = look(self._train.ahead, counter, LOOK_S)
                counter = ahead.counter
                self._fetch(ahead)
            except InterruptedError:
                continue
            except OSError:
                # pull() meets the error again.
                return
            time.sleep(GATHER_S)

    def _fetch(self, ahead: Folder) -> None:
        """Begin to fetch what can be fetched now."""
        number = str(self._version)
        made = {}
        for home, there in ahead.folders.items():
            if number in there.folders:
                path = self._train.ahead / home / number / PARAMS
                made[owner_of(home)] = (path, there.folder(number, PARAMS))
        left = [one for one in self._layout.shards if one.name not in self._fetches]
        if any(shard.part not in made for shard in left):
            # A part that has gone from ahead/ is published as soon as there is a plan.
            planned = look(self._train.next).folder(number)
            for part, folder in planned.folders.items():
                path = self._train.next / number / part / PARAMS
                made.setdefault(part, (path, folder.folder(PARAMS)))
        for shard in left:
            if shard.part in made:
                self._fetch_shard(*made[shard.part], shard)

    def _fetch_shard(self, path: Path, folder: Folder, shard: Shard) -> None:
        before = folder.files.get(shard.name)
        if before is None or self._train.directories.was_used(before):
            return
        with self._lock, contextlib.suppress(FileNotFoundError):
            if not self._ended:
                # If its part was published meanwhile, the next look finds the file there.
                directory = self._train.directories.get(folder.ino, path)
                file = self._pool.submit(self._open, shard, directory, before)
                self._fetches[shard.name] = _Fetch(before, file)

    def _open(self, shard: Shard, directory: Directory, before: Seen) -> ShardFile:
        try:
            file = ShardFile(shard.name, directory, version=self._version, shown=self._shown)
        except (FileNotFoundError, FormatError):
            # The file is of an earlier version, and will be written anew.
            self._train.directories.note_used(before)
            with self._lock:
                del self._fetches[shard.name]
            raise
        if self.out is not None:
            copy_shard(lambda _: file, self.out, shard)
        return file
