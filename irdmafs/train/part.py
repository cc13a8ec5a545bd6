"""A reducer's work on one part: it makes the part's shards of each version, and publishes them together.

Shards are also made ahead of the plan, from pushes that are still in staging/. Such a shard is used if
the plan turns out to be the foreseen one, and its pushes to have the files that were summed. Otherwise the
shard is made again.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ..client import FormatError
from .arithmetic import Blocks
from .config import TrainConfig
from .directory import (
    COORDINATOR,
    NORM,
    PARAMS,
    STATE,
    ShardFile,
    TrainDirectory,
    make_part,
    move,
    owner_of,
    read_small,
    replace,
)
from .errors import BadPush, Refused, TrainError
from .layout import Shard
from .models import add_kept_files
from .plan import Plan, Push, next_plan
from .pushes import STEP, check_shard, push_in_shards
from .reduction import PartFolders, Reduction
from .status import complain
from .trees import Folder, Seen, Trees, is_published, look

log = logging.getLogger(__name__)


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
        """Return whether a plan is the foreseen one, and its pushes in push/ have the opened files."""
        there = {path: pushes.folder(path).files.get(shard.name) for path in self.seen}
        return plan == self.plan and there == self.seen


class Staged:
    """The pushes of the next version that are in staging/ or push/ already."""

    def __init__(self, train: TrainDirectory, trees: Trees) -> None:
        self._train = train
        self._trees = trees
        self._newest = -1
        # The pushes and workers from which no plan could be foreseen last.
        self._too_few: tuple[Collection[str], Collection[str]] = ((), ())
        self._plan: Plan | None = None
        # The pushes, by the names of their directories.
        self._pushes: dict[str, _Push] = {}
        # The files of shards, by shard, for which some pushes have no file yet.
        self._opened: dict[str, Foreseen] = {}
        # The last plan that was made, and what was in push/ after that.
        self._published: tuple[Plan, Folder] | None = None

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
                    if push is None or owner not in (push.worker, None):
                        continue
                    if push.step > newest.clocks.get(push.worker, 0):
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
        if before is None or self._train.directories.was_used(before):
            return None
        try:
            directory = self._train.directories.get(push.folder.ino, push.path)
            most = self._train.layout.header_max_bytes
            file = ShardFile(shard.name, directory, header_max_bytes=most)
            if file.seen.ino == before.ino and file.header.metadata.get(STEP) == str(step):
                check_shard(shard, file.header, cut=True)
                return file, before
        except (OSError, FormatError, Refused):
            # The file is not there yet, or not as it should be: the reducer finds out when there is a plan.
            return None
        self._train.directories.note_used(before)
        return None

    def published(self, plan: Plan) -> Folder:
        """Return what is in push/ after a plan was made. Raises OSError."""
        if self._published is None or self._published[0] is not plan:
            self._published = (plan, self._trees.look_again(self._train.push))
        return self._published[1]

    def open_published(self, whole: dict[str, ShardFile], shard: Shard, name: str) -> ShardFile:
        """Return the file with a shard of a push by its name. `whole`: files with all shards of pushes that
        were opened before. Raises Refused, FormatError and OSError."""
        most, path = self._train.layout.header_max_bytes, self._train.push / name
        file = whole.get(name)
        if file is None:
            try:
                directory = self._train.directories.open(path)
            except NotADirectoryError:
                file = whole[name] = ShardFile(path, header_max_bytes=most)
            else:
                # The mount was told of the push before it was told of the plan.
                file = ShardFile(shard.name, directory, header_max_bytes=most)
        check_shard(shard, file.header, cut=name not in whole)
        return file


class Part:
    """Makes the shards of a part in a directory of its own in ahead/, where only this object writes."""

    def __init__(self, train: TrainDirectory, name: str, blocks: Blocks, staged: Staged) -> None:
        """Make the directory, and put aside those of reducers that had the part before. Raises OSError."""
        self._train = train
        self._name = name
        self._shards = train.layout.parts[name]
        self._blocks = blocks
        self._staged = staged
        self._home = train.make_home(name, is_part=True)
        # The version whose directory is there, its directories, and its shards.
        self._version: int | None = None
        self._folders: PartFolders | None = None
        # The plan by which each shard was made: a foreseen one has the files that it was made from.
        self._made: dict[str, Plan | Foreseen] = {}
        # Reductions that wait for the norms of other parts, and their plan: the next one may be in a
        # directory of the same name.
        self._begun: tuple[Plan, dict[str, Reduction]] | None = None
        # The last: the plan, and the push.
        self._complaint: tuple[Plan, str] | None = None

    def foresee(self, plan: Plan) -> bool:
        """Make the next shard for which all pushes of a foreseen plan are there; return whether there was
        one. Raises OSError."""
        # Make the directories first: there is time for it while the first pushes are on their way.
        folders = self._open_folders(plan.version)
        for shard in self._shards:
            if shard.name in self._made:
                continue
            foreseen = self._staged.files(shard, plan)
            if foreseen is None:
                continue
            with contextlib.suppress(FileNotFoundError, FormatError, BadPush):
                open_push = foreseen.files.__getitem__
                reduction = Reduction(shard, plan, self._blocks, self._train, open_push)
                reduction.write(folders)
                self._made[shard.name] = foreseen
                # They are not opened again before they are written anew.
                for one in foreseen.seen.values():
                    self._train.directories.note_used(one)
                return True
            return False
        return False

    def make(self, target: Path, plan: Plan) -> bool:
        """Make the shards of a plan that are not made yet, and publish all of them; return whether
        something was done. Raises OSError."""
        try:
            if not self._finish(target, plan):
                return False
            # If it fails it may have been done all the same: write nothing into them any more.
            self._folders = None
            move(self._home / str(plan.version), target / self._name)
        except (FileExistsError, FileNotFoundError, FormatError) as error:
            # Made by somebody else meanwhile, and maybe tidied. Or a push is gone: the coordinator will
            # make another plan. Or another reducer has the part.
            self._begun = None
            log.info("%s: version %d is left: %s", self._train.models, plan.version, error)
            return False
        except BadPush as bad:
            self._begun = None
            return self._complain(target, plan, bad)
        self._version = self._begun = None
        return True

    def _finish(self, target: Path, plan: Plan) -> bool:
        """Make the shards that are not made yet; return False if norms of other parts are awaited. Raises
        FileNotFoundError, FormatError and BadPush."""
        folders = self._open_folders(plan.version)
        missing = self._missing(plan)
        if not missing:
            return True
        if self._begun is None or self._begun[0] is not plan:
            open_push = partial(self._staged.open_published, {})
            begun = {
                one.name: Reduction(one, plan, self._blocks, self._train, partial(open_push, one))
                for one in missing
            }
            self._begun = (plan, begun)
        reductions = self._begun[1]
        norms: list[float] = []
        if plan.clip_norm:
            own = target / f"{NORM}{self._name}"
            if not is_published(own):
                lines = [reductions[shard.name].square_norms() for shard in self._shards]
                text = "\n".join(" ".join(map(float.hex, line)) for line in lines)
                replace(own, text.encode())
            found = self._all_norms(target)
            if found is None:
                return False
            norms = found
        for shard in missing:
            reductions[shard.name].write(folders, norms)
            self._made[shard.name] = plan
        self._begun = None
        return True

    def _missing(self, plan: Plan) -> list[Shard]:
        """Return the shards that are to be made: all but those that were made by this plan, from the files
        that its pushes had when it was made."""

        def is_made(shard: Shard) -> bool:
            made = self._made.get(shard.name)
            if isinstance(made, Foreseen):
                return made.is_of(shard, plan, self._staged.published(plan))
            return made == plan

        return [shard for shard in self._shards if not is_made(shard)]

    def _all_norms(self, target: Path) -> list[float] | None:
        """Return the square of the norm over all shards, for each update in their order; None if other
        parts have not said theirs yet."""
        found: dict[str, list[float]] = {}
        for name, shards in self._train.layout.parts.items():
            try:
                lines = read_small(target / f"{NORM}{name}").decode().split("\n")
                found |= {
                    shard.name: [*map(float.fromhex, line.split())]
                    for shard, line in zip(shards, lines, strict=True)
                }
            except (FileNotFoundError, ValueError, TrainError):
                return None
        in_order = [found[shard.name] for shard in self._train.layout.shards]
        return [sum(norms) for norms in zip(*in_order, strict=True)]

    def _open_folders(self, version: int) -> PartFolders:
        """Return the directories for the shards of a version: those of a removed one, if the coordinator
        gave some back, as writing files anew costs less than making new ones. Raises OSError."""
        if self._folders is not None and self._version == version:
            return self._folders
        if self._version != version:
            if self._version is not None:
                self._train.put_aside(self._home / str(self._version))
            self._version, self._folders = version, None
            self._made.clear()
        path = self._home / str(version)
        try:
            there = look(path)
        except FileNotFoundError:
            # There was none, or it was published, in spite of an error.
            self._made.clear()
            make_part(path)
            there = look(path)
        for folder in (PARAMS, STATE):
            # Their other names, such as model.safetensors or a user's hard link, keep their content.
            for name in there.folder(folder).linked:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path / folder / name)
        self._folders = PartFolders.open(self._train.directories, path, there)
        return self._folders

    def _complain(self, target: Path, plan: Plan, bad: BadPush) -> bool:
        """Tell the coordinator of a bad push; return False if it was told before."""
        told = self._complaint
        if told is not None and told[0] is plan and told[1] == bad.path:
            return False
        self._complaint = (plan, bad.path)
        with contextlib.suppress(FileNotFoundError):
            complain(target, self._name, bad)
        return True


class Alone:
    """Makes the versions of a small run, each in a directory of its own, where only this object writes, and
    publishes them. The coordinator gives it the directories of removed versions."""

    def __init__(self, train: TrainDirectory, blocks: Blocks, staged: Staged) -> None:
        """Put aside the directory of the coordinator before. Raises OSError."""
        self._train = train
        self._blocks = blocks
        self._staged = staged
        self.home = train.make_home(COORDINATOR, is_part=True)
        self._kept = {*os.listdir(train.kept_files)}

    def make(self, plan: Plan, opened: dict[str, ShardFile]) -> None:
        """Make a version. `opened`: pushes that were opened, by their names. Raises FileNotFoundError if
        a push is gone, or the version before, FileExistsError if this one is there, BadPush and OSError."""
        (shard,) = self._train.layout.shards
        open_push = partial(self._staged.open_published, opened, shard)
        reduction = Reduction(shard, plan, self._blocks, self._train, open_push)
        norms = reduction.square_norms() if plan.clip_norm else ()
        target = self.home / str(plan.version)
        reduction.write(self._open(target, shard), norms)
        move(target, self._train.version(plan.version))

    def _open(self, target: Path, shard: Shard) -> PartFolders:
        """Return the directories of a version: those of a removed one, whose files are written anew, unless
        others have put something into it, or have linked to its files: these keep their content."""
        there = look(self.home).folder(target.name)
        state = there.folder(STATE)
        linked = {*there.linked, *state.linked} - self._kept
        is_ours = {*there.names} == {shard.name, STATE, *self._kept} and shard.name in there.files
        if not is_ours or linked or not state.ino or {*state.names} != {*state.files}:
            self._train.put_aside(target)
            for path in (target, target / STATE):
                path.mkdir()
            add_kept_files(self._train, self._kept, target)
            there = look(self.home).folder(target.name)
        return PartFolders.open(self._train.directories, target, there, "")
