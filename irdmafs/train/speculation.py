"""Speculative reduction: find pushes that are still in staging/, and foresee the plan that will have them.

A shard that is made from them is used if the plan turns out to be the foreseen one, and its pushes to have
the files that were summed. Otherwise the shard is made again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from ..client import FormatError
from .config import TrainConfig
from .directory import TrainDirectory, owner_of
from .errors import Refused
from .folders import Directories, Directory, Seen
from .layout import ModelLayout, Shard
from .plan import Plan, Push, next_plan
from .pushes import STEP, check_shard, push_in_shards
from .shard_files import ShardFile
from .trees import Folder, Trees


class _Push(NamedTuple):
    """A push in shards: its directory, and what is known to be in there."""

    push: Push
    path: Path
    folder: Folder


class Foreseen(NamedTuple):
    """The files of a shard that the pushes of a foreseen plan have, by the names of the pushes. `seen`:
    what identified each file before it was opened."""

    plan: Plan
    files: dict[str, ShardFile]
    seen: dict[str, Seen]

    def is_of(self, shard: Shard, plan: Plan, pushes: Folder) -> bool:
        """Return whether a plan is the foreseen one, and its pushes, which are in push/ now, have the files
        that were opened."""
        return plan == self.plan and all(
            pushes.folder(push.path).files.get(shard.name) == self.seen[push.path]
            for push in plan.pushes
            if push.weight
        )


class Staged:
    """The pushes of the next version that are in staging/ or push/ already."""

    def __init__(self, train: TrainDirectory, layout: ModelLayout, trees: Trees) -> None:
        self._train = train
        self._header_max_bytes = layout.header_max_bytes
        self._trees = trees
        self._newest = -1
        # The pushes and workers from which no plan could be foreseen last.
        self._too_few: tuple[Collection[str], Collection[str]] = ((), ())
        self._plan: Plan | None = None
        # The pushes, by the names of their directories.
        self._pushes: dict[str, _Push] = {}
        # The files of shards, by shard, for which some pushes have no file yet.
        self._opened: dict[str, Foreseen] = {}
        self._directories = Directories()

    def close(self) -> None:
        self._directories.close()

    def plan(self, config: TrainConfig, newest: Plan) -> Plan | None:
        """Return the next plan, if it can be foreseen. Raises OSError and TrainError."""
        if self._newest != newest.version:
            self._newest, self._plan, self._too_few = newest.version, None, ((), ())
            self._opened.clear()
        self._pushes = {one.push.path: one for one in self._find(newest)}
        members = self._trees.look(self._train.workers).visible
        if self._plan is None and self._pushes and self._too_few != (self._pushes.keys(), members):
            self._too_few = (self._pushes.keys(), members)
            pushes = [one.push for one in self._pushes.values()]
            self._plan = next_plan(config, newest, pushes, members)
        return self._plan

    def _find(self, newest: Plan) -> Iterator[_Push]:
        """Return the pushes that are there and have not counted."""
        homes: list[tuple[Path, str | None, Folder]] = [
            (self._train.staging / name, owner_of(name), home)
            for name, home in self._trees.look(self._train.staging).folders.items()
            if owner_of(name)
        ]
        homes.append((self._train.push, None, self._trees.look(self._train.push)))
        for home, owner, folder in homes:
            for name, found in folder.folders.items():
                # The coordinator tells of a name that is refused.
                with contextlib.suppress(Refused):
                    push = push_in_shards(name)
                    if (
                        push is not None
                        and owner in (push.worker, None)
                        and push.step > newest.clocks.get(push.worker, 0)
                    ):
                        yield _Push(push, home / name, found)

    def files(self, shard: Shard, plan: Plan) -> Foreseen | None:
        """Return the shard's files of all pushes of the foreseen plan; None if one of them is not there."""
        found = self._opened.setdefault(shard.name, Foreseen(plan, {}, {}))
        for push in plan.pushes:
            if push.weight and push.path not in found.files:
                there = self._pushes.get(push.path)
                opened = None if there is None else self._open(there, shard, push.step)
                if opened is None:
                    return None
                found.files[push.path], found.seen[push.path] = opened
        return self._opened.pop(shard.name)

    def _open(self, push: _Push, shard: Shard, step: int) -> tuple[ShardFile, Seen] | None:
        before = push.folder.files.get(shard.name)
        if before is None or before in self._directories.past:
            return None
        try:
            directory = self._directories.get(push.folder.ino, push.path)
            file = ShardFile(shard.name, directory, header_max_bytes=self._header_max_bytes)
            if file.seen.ino == before.ino and file.header.metadata.get(STEP) == str(step):
                check_shard(shard, file.header, cut=True)
                return file, before
        except (OSError, FormatError, Refused):
            # The file is not there yet, or not as it should be: the reducer finds out when there is a plan.
            return None
        self._directories.past.add(before)
        return None

    def published(self) -> Folder:
        """Return what is in push/ now. Raises OSError."""
        return self._trees.look_again(self._train.push)

    def open_published(self, shard: Shard, name: str) -> ShardFile:
        """Return the file with a shard of the push that has a name in push/. Raises Refused, FormatError
        and OSError."""
        path, most = self._train.push / name, self._header_max_bytes
        try:
            directory = Directory(path)
        except NotADirectoryError:
            file, cut = ShardFile(path, header_max_bytes=most), False
        else:
            # The mount was told of the push before it was told of the plan.
            file, cut = ShardFile(shard.name, directory, header_max_bytes=most), True
        check_shard(shard, file.header, cut=cut)
        return file

    def used(self, foreseen: Foreseen) -> None:
        """Note that these files were summed: they are not opened again before they are written anew."""
        for one in foreseen.seen.values():
            self._directories.past.add(one)
