"""Prefetching: fetch shards that reducers have made in ahead/, while other shards are still being pushed.
They are used if the version turns out to have these files."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from ..client import FormatError
from .directory import LOOK_S, PARAMS, TrainDirectory, owner_of
from .layout import ModelLayout, Shard
from .shard_files import ShardFile, copy_shard
from .trees import GATHER_S, Directories, Directory, Folder, Seen, look

# Shards that are fetched at once: of each node the next.
_AT_ONCE = 16


class _Fetch(NamedTuple):
    """A file that is being fetched. `status`: what identified it before it was opened."""

    status: Seen
    file: Future[ShardFile]


class Prefetch:
    """Fetches the parameters of a version that is being made, in a thread, until take() or close()."""

    def __init__(
        self,
        train: TrainDirectory,
        layout: ModelLayout,
        version: int,
        directories: Directories,
        out: Mapping[str, Any] | None,
        *,
        shown: bool,
    ) -> None:
        """`directories`: of earlier parts, which are added to. `out`: arrays or tensors that each shard
        that is here is copied into, of which the version may get another one yet. `shown`: as in
        ShardFile."""
        self.out = out
        self._version = version
        self._train = train
        self._layout = layout
        self._directories = directories
        self._shown = shown
        self._fetches: dict[str, _Fetch] = {}
        self._pool = ThreadPoolExecutor(_AT_ONCE, "prefetch")
        self._lock = threading.Lock()
        self._ended = False
        threading.Thread(target=self._run, name="prefetch", daemon=True).start()

    def take(self, version: int) -> dict[str, ShardFile]:
        """End, and return the shards that a version has, by name. Raises FileNotFoundError if the version
        is gone, and OSError."""
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
                self._directories.past.add(fetch.status)
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
        made = {
            owner_of(home): (
                self._train.ahead / home / number / PARAMS,
                folder.folder(number, PARAMS),
            )
            for home, folder in ahead.folders.items()
            if number in folder.folders
        }
        if any(
            shard.name not in self._fetches and shard.part not in made
            for shard in self._layout.shards
        ):
            # A part that has gone from ahead/ is published as soon as there is a plan.
            planned = look(self._train.next).folder(number)
            for part, folder in planned.folders.items():
                path = self._train.next / number / part / PARAMS
                made.setdefault(part, (path, folder.folder(PARAMS)))
        for shard in self._layout.shards:
            if shard.part in made and shard.name not in self._fetches:
                self._fetch_shard(*made[shard.part], shard)

    def _fetch_shard(self, path: Path, folder: Folder, shard: Shard) -> None:
        before = folder.files.get(shard.name)
        if before is None or before in self._directories.past:
            return
        with self._lock, contextlib.suppress(FileNotFoundError):
            if not self._ended:
                # If its part was published meanwhile, the next look finds the file there.
                directory = self._directories.get(folder.ino, path)
                file = self._pool.submit(self._open, shard, directory, before)
                self._fetches[shard.name] = _Fetch(before, file)

    def _open(self, shard: Shard, directory: Directory, before: Seen) -> ShardFile:
        try:
            file = ShardFile(shard.name, directory, version=self._version, shown=self._shown)
        except (FileNotFoundError, FormatError):
            # The file is of an earlier version, and will be written anew.
            self._directories.past.add(before)
            with self._lock:
                del self._fetches[shard.name]
            raise
        if self.out is not None:
            copy_shard(lambda _: file, self.out, shard)
        return file
