"""A reducer's work on one part: it makes the part's shards of each version, and publishes them together."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ..client import FormatError
from . import refusals
from .arithmetic import Blocks
from .config import TrainConfig
from .directory import (
    NORM,
    PARAMS,
    STATE,
    TrainDirectory,
    make_home,
    make_part,
    move,
    put_aside,
    read_small,
    replace,
)
from .errors import BadPush, TrainError
from .folders import Directories, is_published
from .layout import ModelLayout, Shard
from .plan import Plan
from .reduction import PartFolders, Reduction
from .shard_files import ShardFile
from .speculation import Foreseen, Staged
from .trees import Folder, look

log = logging.getLogger(__name__)


class Part:
    """Makes the shards of a part in a directory of its own in ahead/, where only this object writes."""

    def __init__(
        self, train: TrainDirectory, layout: ModelLayout, name: str, blocks: Blocks, staged: Staged
    ) -> None:
        """Make the directory, and put aside those of reducers that had the part before. Raises OSError."""
        self._train = train
        self._layout = layout
        self._name = name
        self._shards = layout.parts[name]
        self._blocks = blocks
        self._staged = staged
        self._home = make_home(train.ahead, name, partial(put_aside, train))
        self._directories = Directories()
        # The version whose directory is there, its directories, and its shards.
        self._version: int | None = None
        self._folders: PartFolders | None = None
        # The plan by which each shard was made: a foreseen one has the files that it was made from.
        self._made: dict[str, Plan | Foreseen] = {}
        # Reductions that wait for the norms of other parts, and where their version is being made.
        self._begun: tuple[Path, dict[str, Reduction]] | None = None
        # The version before the last plan, and its directories.
        self._before: tuple[int, PartFolders] | None = None
        # The last: where a version is being made, and the push.
        self._complaint: tuple[Path, str] | None = None

    def foresee(self, config: TrainConfig, plan: Plan) -> bool:
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
                reduction = self._reduction(config, shard, plan, foreseen.files.__getitem__)
                reduction.write(folders)
                self._made[shard.name] = foreseen
                self._staged.used(foreseen)
                return True
            return False
        return False

    def make(self, config: TrainConfig, target: Path, plan: Plan) -> bool:
        """Make the shards of a plan that are not made yet, and publish all of them; return whether
        something was done. Raises OSError."""
        try:
            if not self._finish(config, target, plan):
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
            return self._complain(target, bad)
        self._version = self._begun = None
        return True

    def _finish(self, config: TrainConfig, target: Path, plan: Plan) -> bool:
        """Make the shards that are not made yet; return False if norms of other parts are awaited. Raises
        FileNotFoundError, FormatError and BadPush."""
        folders = self._open_folders(plan.version)
        missing = self._missing(plan)
        if not missing:
            return True
        reductions = self._reductions(config, missing, target, plan)
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
        that its pushes have now."""
        missing = []
        pushes: Folder | None = None
        for shard in self._shards:
            made = self._made.get(shard.name)
            if isinstance(made, Foreseen):
                pushes = pushes or self._staged.published()
                is_made = made.is_of(shard, plan, pushes)
            else:
                is_made = made == plan
            if not is_made:
                missing.append(shard)
        return missing

    def _reductions(
        self, config: TrainConfig, shards: Sequence[Shard], target: Path, plan: Plan
    ) -> dict[str, Reduction]:
        if self._begun is None or self._begun[0] != target:
            found = {
                shard.name: self._reduction(
                    config, shard, plan, partial(self._staged.open_published, shard)
                )
                for shard in shards
            }
            self._begun = (target, found)
        return self._begun[1]

    def _reduction(
        self, config: TrainConfig, shard: Shard, plan: Plan, open_push: Callable[[str], ShardFile]
    ) -> Reduction:
        before, nonfinite = self._open_before(plan), config.nonfinite
        return Reduction(shard, plan, self._blocks, before, open_push, nonfinite=nonfinite)

    def _all_norms(self, target: Path) -> list[float] | None:
        """Return the square of the norm over all shards, for each update in their order; None if other
        parts have not said theirs yet."""
        found: dict[str, list[float]] = {}
        for name, shards in self._layout.parts.items():
            try:
                lines = read_small(target / f"{NORM}{name}").decode().split("\n")
                found |= {
                    shard.name: [*map(float.fromhex, line.split())]
                    for shard, line in zip(shards, lines, strict=True)
                }
            except (FileNotFoundError, ValueError, TrainError):
                return None
        in_order = [found[shard.name] for shard in self._layout.shards]
        return [sum(norms) for norms in zip(*in_order, strict=True)]

    def _open_before(self, plan: Plan) -> PartFolders:
        """Return the directories of the part in the version before a plan's. Raises OSError."""
        number = plan.version - 1
        if self._before is None or self._before[0] != number:
            path = self._train.version(number) / self._name
            there = self._train.in_version(number).folder(self._name)
            self._before = (number, self._open(path, there))
        return self._before[1]

    def _open(self, path: Path, there: Folder) -> PartFolders:
        params, state = (
            self._directories.get(there.folder(name).ino, path / name) for name in (PARAMS, STATE)
        )
        return PartFolders(params, state, there.folder(STATE).names)

    def _open_folders(self, version: int) -> PartFolders:
        """Return the directories for the shards of a version. They are those of a version that was removed,
        if the coordinator has given some back: writing files anew costs less than making new ones. Raises
        OSError."""
        if self._folders is not None and self._version == version:
            return self._folders
        if self._version != version:
            if self._version is not None:
                put_aside(self._train, self._home / str(self._version))
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
        self._folders = self._open(path, there)
        return self._folders

    def _complain(self, target: Path, bad: BadPush) -> bool:
        """Tell the coordinator of a bad push; return False if it was told before."""
        if self._complaint == (target, bad.path):
            return False
        self._complaint = (target, bad.path)
        with contextlib.suppress(FileNotFoundError):
            refusals.complain(target, self._name, bad)
        return True
