"""Pulling ahead of the version: shards that reducers have made in ahead/ are fetched while others are still
being pushed. They are used if the version turns out to have these files."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from ..client import FormatError
from .changes import GATHER_S, Changes
from .directory import LOOK_S, PARAMS, ShardFile, TrainDirectory, is_published, owner_of
from .folders import Directory, Past, Seen, seen
from .layout import ModelLayout, Shard

__all__ = ["Early"]

# Shards that are fetched at once: of each node the next.
_AT_ONCE = 16


class _Fetch(NamedTuple):
    """A file that is being fetched. `status`: before it was opened."""

    status: Seen
    file: Future[ShardFile]


class Early:
    """Fetches the parameters of a version that is being made, by a thread, until take() or close()."""

    def __init__(
        self,
        train: TrainDirectory,
        layout: ModelLayout,
        version: int,
        homes: dict[str, Path],
        past: Past,
        use: Callable[[Shard, ShardFile], None] | None,
        *,
        shown: bool,
    ) -> None:
        """`homes`: where each part is made, as far as that is known; `past`: the files of earlier versions;
        both are added to. `use`: called in a thread with each shard that is here, of which the version may
        get another one yet; `shown`: as in ShardFile."""
        self.version = version
        self._train = train
        self._layout = layout
        self._homes = homes
        self._past = past
        self._use = use
        self._shown = shown
        self._directories: dict[str, Directory] = {}
        self._fetches: dict[str, _Fetch] = {}
        self._pool = ThreadPoolExecutor(_AT_ONCE, "early")
        self._lock = threading.Lock()
        self._ended = False
        self._listed_s = time.monotonic()
        threading.Thread(target=self._run, name="early", daemon=True).start()

    def take(self, version: Path) -> dict[str, ShardFile]:
        """End, and return the shards that a directory of the version has, by name. Raises OSError."""
        self.close()
        found: dict[str, ShardFile] = {}
        for part, shards in self._layout.parts.items():
            directory = self._directories.get(part)
            if directory is None or not directory.is_at(version / part / PARAMS):
                continue
            for shard in shards:
                fetch = self._fetches.get(shard.name)
                if fetch is None or fetch.file.exception() is not None:
                    continue
                if seen(directory.look(shard.name)) == fetch.status:
                    found[shard.name] = fetch.file.result()
                    self._past.add(fetch.status)
        return found

    def close(self) -> None:
        """Begin no more fetches, and wait for those that were begun: nothing is used any more then."""
        with self._lock:
            self._ended = True
        self._pool.shutdown()

    def _run(self) -> None:
        # An error, too, is met again by who pulls.
        with contextlib.suppress(OSError):
            while not self._ended and len(self._fetches) < len(self._layout.shard_names):
                changes = Changes(self._train.ahead)
                if not self._fetch():
                    changes.wait(LOOK_S)
                    time.sleep(GATHER_S)

    def _fetch(self) -> bool:
        """Begin to fetch what can be fetched now; return whether there was anything."""
        did = False
        for part, shards in self._layout.parts.items():
            directory = self._directories.get(part) or self._find(part)
            if directory is not None:
                left = [shard for shard in shards if shard.name not in self._fetches]
                begun = [self._fetch_shard(directory, shard) for shard in left]
                did = any(begun) or did
        return did

    def _fetch_shard(self, directory: Directory, shard: Shard) -> bool:
        try:
            status = directory.look(shard.name)
        except OSError:
            return False
        before = seen(status)
        path = directory.file(shard.name)
        if before in self._past or not is_published(path, status):
            return False
        with self._lock:
            if self._ended:
                return False
            file = self._pool.submit(self._open, shard, path, before)
            self._fetches[shard.name] = _Fetch(before, file)
        return True

    def _open(self, shard: Shard, path: Path, before: Seen) -> ShardFile:
        try:
            file = ShardFile(path, version=self.version, shown=self._shown)
        except (FileNotFoundError, FormatError):
            # The file is of an earlier version, and will be written anew.
            self._past.add(before)
            with self._lock:
                del self._fetches[shard.name]
            raise
        if self._use is not None:
            self._use(shard, file)
        return file

    def _find(self, part: str) -> Directory | None:
        """Return the directory where a reducer makes the shards of a part, as soon as there is one."""
        now_s = time.monotonic()
        if part not in self._homes or now_s > self._listed_s + LOOK_S:
            self._listed_s = now_s
            for name in os.listdir(self._train.ahead):
                self._homes[owner_of(name)] = self._train.ahead / name
        if part in self._homes:
            with contextlib.suppress(OSError):
                found = Directory(self._homes[part] / str(self.version) / PARAMS)
                self._directories[part] = found
                return found
        return None
