"""Pushes as files: their names, what they say of themselves, and whether they may count."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ..client import FormatError, _files
from ..client._dtypes import Array, Layout, array_of, code_of, each_of
from ..client._safetensors import Header
from .arithmetic import CODES, F32_MAX, count_nonfinite
from .config import TrainConfig, is_worker_name
from .directory import ShardFile, TrainDirectory
from .errors import Refused, invalid
from .layout import ModelLayout, Shard
from .liveness import is_locked
from .plan import Plan, Push
from .trees import NOTHING, Folder, is_published

# WORKER@STEP, and what else is said of a push that is a directory: ;weight=2.0;base=16;lr=0.001
_NAME = re.compile(r"([^@;]+)@(\d{1,18})((?:;(?:weight|base|lr)=[0-9eE+.-]+)*)", re.ASCII)
# The name of a file, without its suffix. Errors tell both forms:
_FILE_NAME = re.compile(r"([^@]+)@(\d{1,18})", re.ASCII)
_NAME_OF_FILE = "WORKER.safetensors or WORKER@STEP.safetensors (WORKER: letters, digits and _ . -)"
_NAME_OF_DIRECTORY = "WORKER@STEP or WORKER@STEP;weight=2.0;base=16;lr=0.001"
# In the metadata of a push: its step. A file of a shard that lacks it is not summed ahead of the plan.
STEP = "step"
# The numbers in a push's metadata.
_NUMBERS = {
    STEP: (int, "a whole number"),
    "weight": (float, "a number"),
    "base": (int, "a whole number"),
    "lr": (float, "a number"),
}
# Steps that a worker may push before the first of them counts.
_AHEAD_MAX = 64
# So much of a text that others chose is in an error.
_SHOWN_MAX = 100


# -- names ----------------------------------------------------------------------------------------


def name_in_shards(push: Push) -> str:
    """Return the name of a push as a directory, which says all that is said of the push."""
    (_, step), *more = metadata_of(push).items()
    return f"{push.worker}@{step}" + "".join(f";{key}={value}" for key, value in more)


def name_in_file(push: Push) -> str:
    """Return the name of a push in one file, whose metadata says the rest."""
    return f"{push.worker}@{push.step}.safetensors"


def metadata_of(push: Push) -> dict[str, str]:
    """Return what a push in one file says of itself."""
    said = {STEP: push.step, "weight": push.weight, "base": push.base, "lr": push.lr}
    return {key: repr(value) for key, value in said.items() if value is not None and value != -1}


def push_in_shards(name: str) -> Push | None:
    """Return the push that a directory in push/ is by its name; None if it is none. Raises Refused."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    said = dict(part.split("=", 1) for part in found[3].split(";")[1:])
    return _push(name, found[1], {STEP: found[2], **said})


def worker_of(name: str) -> str:
    """Return the worker that a name in push/ says, of a push or of anything else."""
    worker, at, _ = name.partition("@")
    return worker if at else os.path.splitext(name)[0]


def _push(name: str, worker: str, said: Mapping[str, str]) -> Push:
    """Return a push by what its name and metadata say; step 0: the worker's next. Raises Refused."""
    numbers: dict[str, Any] = {STEP: 0}
    for key, (kind, allowed) in _NUMBERS.items():
        if key in said:
            try:
                numbers[key] = kind(said[key])
            except ValueError:
                value = said[key][:_SHOWN_MAX]
                raise invalid(f"its {key} is {value!r}, not {allowed}") from None
    push = Push(said.get("worker", worker), path=name, **numbers)
    if not is_worker_name(push.worker):
        shown = push.worker[:_SHOWN_MAX]
        allowed = "letters, digits and _ . -, 100 at most"
        raise invalid(f"{shown!r} cannot be the name of a worker: {allowed}")
    if push.step < 0:
        raise invalid(f"step {push.step} is not a step")
    _check_numbers(push)
    return push


def _check_numbers(push: Push) -> None:
    if not (0 <= push.weight <= F32_MAX and 0 <= (push.lr or 0) <= F32_MAX):
        raise invalid(f"weight {push.weight} or lr {push.lr} is not an fp32 number >= 0")


def _push_in_file(name: str, metadata: Mapping[str, str]) -> Push:
    """Return the push that a file in push/ is by its name and metadata. Raises Refused."""
    if not name.isprintable():
        raise invalid("its name is not printable text")
    stem = os.path.splitext(name)[0]
    if "@" not in stem:
        return _push(name, stem, metadata)
    found = _FILE_NAME.fullmatch(stem)
    if found is None:
        raise invalid(f"{name!r} is not the name of a push, which is {_NAME_OF_FILE}")
    worker, step = found.groups()
    push = _push(name, worker, {"worker": worker, STEP: step, **metadata})
    # Another push may be about to get this name. In a small run a worker writes later ones into its file.
    if push.worker != worker or push.step < int(step):
        raise invalid(f"it is {push.worker}@{push.step} by its metadata")
    return push


# -- contents -------------------------------------------------------------------------------------


def inspect(
    train: TrainDirectory,
    name: str,
    there: Folder = NOTHING,
    *,
    finite: bool = False,
    opened: dict[str, ShardFile] | None = None,
) -> Push | None:
    """Return the push that a name leads to; None if it leads to none, or to none that is whole. `there`:
    what is known to be where pushes are. `finite`: elements of a file are read, too; those of a push in
    shards are not opened here, as they would be fetched: reducers check them. `opened`: a file that was
    opened is put there. Raises Refused for what does not fit."""
    if name.startswith("."):
        return None
    path, folder = train.push / name, there.folders.get(name)
    try:
        if name not in there.files:
            if folder is not None or stat.S_ISDIR(_check_kind(path).st_mode):
                return _inspect_shards(train.layout, path, folder)
            if not is_published(path):
                return None
        directory, most = train.opened.get("push"), train.layout.header_max_bytes
        file = ShardFile(name if directory else path, directory, header_max_bytes=most)
        push = push_of(train.layout, name, file.header)
    except FileNotFoundError:
        return None
    except FormatError as error:
        raise invalid(error.defect) from None
    except PermissionError as error:
        where = train.shown(str(error.filename))
        raise Refused(errno.EACCES, f"the reducer may not read {where}") from None
    if finite:
        check_finite(file.tensors)
    if opened is not None:
        opened[name] = file
    return push


def _inspect_shards(layout: ModelLayout, path: Path, folder: Folder | None) -> Push | None:
    push = push_in_shards(path.name)
    if push is None:
        what = f"a push in shards, which is {_NAME_OF_DIRECTORY}"
        raise invalid(f"{path.name!r} is not the name of {what}")
    names = [shard.name for shard in layout.shards]
    if folder is not None and folder.files.keys() >= {*names}:
        return push
    files = map(path.joinpath, names)
    return push if all(is_published(file, _check_kind(file)) for file in files) else None


def _check_kind(path: Path) -> os.stat_result:
    """Return the status of a file or directory. Raises Refused for anything else: a link could lead to a
    file that only the reducer may read. Raises OSError."""
    status = _files.look_up(os.lstat, path)
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise invalid(f"{path.name} is a link or a special file")
    return status


def push_of(layout: ModelLayout, name: str, header: Header) -> Push:
    """Return the push that a file is. Raises Refused for what does not fit the parameters."""
    push = _push_in_file(name, header.metadata)
    _check_whole(layout, header.tensors)
    return push


def check_shard(shard: Shard, header: Header, *, cut: bool) -> None:
    """Check what a file of a push has of a shard. `cut`: it has nothing else. Raises Refused."""
    shapes = {one.parameter.name: one.shape if cut else one.parameter.shape for one in shard.slices}
    tensors = header.tensors
    if not cut:
        tensors = {name: found for name, found in tensors.items() if name in shapes}
    _check_tensors(tensors, shapes)


def _check_whole(layout: ModelLayout, tensors: dict[str, Layout]) -> None:
    if not tensors:
        raise invalid("it has no tensor")
    _check_tensors(tensors, layout.shapes)


def _check_tensors(tensors: dict[str, Layout], shapes: dict[str, tuple[int, ...]]) -> None:
    for name, found in tensors.items():
        if name not in shapes:
            raise invalid(f"there is no parameter {name!r}")
        if found.shape != shapes[name]:
            raise invalid(f"{name!r} has the shape {list(found.shape)}, not {list(shapes[name])}")
        if code_of(found.dtype) not in CODES:
            raise invalid(f"{name!r} has the type {found.dtype}")


# -- whether it may count -------------------------------------------------------------------------


def check_turn(train: TrainDirectory, config: TrainConfig, newest: Plan, push: Push) -> None:
    """Raises Refused for a worker, a step or a base that cannot count after the newest version."""
    clocks = newest.clocks
    _check_numbers(push)
    if isinstance(config.workers, tuple) and push.worker not in config.workers:
        raise Refused(errno.EPERM, f"{push.worker!r} is not one of the workers")
    others = max(clocks.values(), default=0)
    if push.step > others + _AHEAD_MAX:
        raise invalid(f"step {push.step} is too far ahead: the others are at {others}")
    if isinstance(config.workers, int) and push.worker not in clocks:
        _check_number(train, config.workers, push.worker, clocks)
    clock = clocks.get(push.worker, 0)
    if 0 < push.step <= clock:
        raise Refused(errno.ESTALE, f"step {push.step} is past: {push.worker} is at {clock}")
    # A coordinator that was taken for dead may have made a version a moment ago.
    if push.base > newest.version and push.base > train.newest():
        raise invalid(f"there is no version {push.base} yet")
    # In other kinds of sync nobody waits for the slowest, whose base may be older than all that is kept.
    lockstep = config.synchronization.kind in ("bsp", "local")
    if lockstep and 0 <= push.base <= newest.version - config.keep:
        raise Refused(errno.ESTALE, f"version {push.base} is gone")


def _check_number(train: TrainDirectory, limit: int, worker: str, clocks: Collection[str]) -> None:
    """Raises Refused for a new worker if there are as many as there may be. One that takes part may have
    the place of one that ended; nobody knows of the others if they have."""
    others = list(clocks)
    if is_locked(train.workers / worker):
        others = [name for name in clocks if is_locked(train.workers / name)]
    if len(others) >= limit:
        raise Refused(errno.EPERM, f"{worker!r} is a worker too many: {limit} take part")


def check_finite(arrays: Mapping[str, Array]) -> None:
    """Raises Refused for values with NaN, or with numbers that are infinite in fp32."""
    for name, array in arrays.items():
        if bad := count_nonfinite(array.reshape(-1)):
            raise invalid(f"{name!r} has {bad} elements that are NaN or infinite")


# -- making pushes --------------------------------------------------------------------------------


def slices_of(shard: Shard, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return what a shard's file has of arrays of whole parameters, some of which may lack."""
    slices = {}
    for part in shard.slices:
        array = arrays.get(part.parameter.name)
        if array is None:
            continue
        if not part.is_whole:
            array = array.reshape(-1)[part.start : part.stop]
        slices[part.parameter.name] = array
    return slices


def arrays_of(layout: ModelLayout, gradients: Mapping[str, object]) -> dict[str, Array]:
    """Return the arrays that are to be pushed. Raises Refused where they do not fit the parameters, and
    TypeError for what is no array."""
    arrays = each_of(array_of, gradients)
    _check_whole(layout, {name: Layout(one.dtype, one.shape) for name, one in arrays.items()})
    return arrays
