"""Pushes as files: their names, what they say of themselves, and whether they may count."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ..client import FormatError, _files, _npy
from ..client._dtypes import Layout, Value, code_of, dtype_of_code, size_bytes, value_of
from ..client._safetensors import HEADER_MAX_BYTES, Header
from .arithmetic import F32_MAX, count_nonfinite
from .config import TrainConfig, is_worker_name
from .directory import TrainDirectory, is_published
from .errors import Refused
from .folders import Directory
from .layout import FLOAT_CODES, ModelLayout, Parameter, Shard
from .locks import is_locked
from .plan import Push
from .scales import blocks_of
from .shard_files import read_header
from .trees import Folder

__all__ = [
    "STEP",
    "Identity",
    "check_finite",
    "check_identity",
    "check_shard",
    "identity_of_directory",
    "inspect",
    "read_file",
    "settled_name",
    "slices_of",
    "worker_of",
]

_SAFETENSORS, _NPY = ".safetensors", ".npy"
# WORKER@STEP, and what else is said of a push that is a directory: ;weight=2.0;base=16;lr=0.001
_NAME = re.compile(r"([^@;]+)@(\d{1,18})((?:;(?:weight|base|lr)=[0-9eE+.-]+)*)", re.ASCII)
# Of a file, without its suffix; both are said in errors.
_FILE_NAME = re.compile(r"([^@]+)@(\d{1,18})", re.ASCII)
_NAME_OF_FILE = (
    "WORKER.safetensors or WORKER@STEP.safetensors, with letters, digits and _ . - in WORKER"
)
_NAME_OF_DIRECTORY = "WORKER@STEP or WORKER@STEP;weight=2.0;base=16;lr=0.001"
# In the metadata of a push: its step. A file of a push in shards that lacks it is not summed ahead of the
# plan.
STEP = "step"
# The numbers in a push's metadata.
_NUMBERS = {
    STEP: (int, "a whole number"),
    "weight": (float, "a number"),
    "base": (int, "a whole number"),
    "lr": (float, "a number"),
}
# So much of a text that others chose is in an error.
_SHOWN_MAX = 100
# Bytes that are looked at at once for NaN and infinity.
_BLOCK_BYTES = 16 << 20


class Identity(NamedTuple):
    """The metadata of a push; `step` 0: the worker's next, `lr` None: not said. `size`: of its files, in
    bytes, if that is known."""

    worker: str
    step: int
    weight: float = 1.0
    base: int = -1
    lr: float | None = None
    size: int = 0

    @property
    def name(self) -> str:
        """Return the name of the push as a directory."""
        more = f";weight={self.weight!r}"
        if self.base >= 0:
            more += f";base={self.base}"
        if self.lr is not None:
            more += f";lr={self.lr!r}"
        return f"{self.worker}@{self.step}{more}"

    def push(self, path: str) -> Push:
        return Push(self.worker, self.step, path, self.weight, self.base, self.lr)

    @property
    def metadata(self) -> dict[str, str]:
        """Return the metadata of the push as a file."""
        said = {"worker": self.worker, STEP: str(self.step), "weight": repr(self.weight)}
        if self.base >= 0:
            said["base"] = str(self.base)
        if self.lr is not None:
            said["lr"] = repr(self.lr)
        return said


def identity_of_directory(name: str) -> Identity | None:
    """Return what the name of a directory in push/ says; None if it is not a push."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    said = dict(part.split("=", 1) for part in found[3].split(";")[1:])
    return _identity(found[1], {STEP: found[2], **said})


def _identity_in_shards(name: str) -> Identity:
    """Raises Refused."""
    identity = identity_of_directory(name)
    if identity is None:
        raise Refused(
            errno.EINVAL,
            f"{name!r} is not the name of a push in shards, which is {_NAME_OF_DIRECTORY}",
        )
    return identity


def identity_of_name(name: str) -> Identity | None:
    """Return what a name in push/ says, step 0: the worker's next; None if it is not that of a push."""
    try:
        return identity_of_directory(name) or _identity_of_file(name, {})
    except Refused:
        return None


def worker_of(name: str) -> str:
    """Return the worker that a name in push/ says, of a push or of anything else."""
    worker, at, _ = name.partition("@")
    return worker if at else os.path.splitext(name)[0].partition(":")[0]


def _identity(worker: str, said: Mapping[str, str]) -> Identity:
    """Raises Refused."""
    numbers: dict[str, Any] = {STEP: 0}
    for key, (kind, allowed) in _NUMBERS.items():
        if key in said:
            try:
                numbers[key] = kind(said[key])
            except ValueError:
                value = said[key][:_SHOWN_MAX]
                raise Refused(errno.EINVAL, f"its {key} is {value!r}, not {allowed}") from None
    identity = Identity(said.get("worker", worker), **numbers)
    if not is_worker_name(identity.worker):
        shown = identity.worker[:_SHOWN_MAX]
        raise Refused(
            errno.EINVAL,
            f"{shown!r} cannot be the name of a worker: letters, digits and _ . -, 100 at most",
        )
    if identity.step < 0:
        raise Refused(errno.EINVAL, f"step {identity.step} is not a step")
    _check_numbers(identity)
    return identity


def _check_numbers(identity: Identity) -> None:
    if not (0 <= identity.weight <= F32_MAX and 0 <= (identity.lr or 0) <= F32_MAX):
        raise Refused(
            errno.EINVAL, f"weight {identity.weight} or lr {identity.lr} is not an fp32 number >= 0"
        )


class _File(NamedTuple):
    """A push in one file: its tensors, and what it says of itself."""

    tensors: dict[str, Layout]
    identity: Identity


def read_file(layout: ModelLayout, name: str, fd: int, *, finite: bool = False) -> Identity:
    """Return what a push in one file says of itself. `finite`: its elements are read, too. Raises Refused
    for what does not fit the parameters, and for NaN and infinity where elements are read."""
    pushed = _read(layout, name, fd)
    _check_whole(layout, pushed.tensors)
    if finite:
        for parameter, found in pushed.tensors.items():
            _refuse_nonfinite(parameter, _nonfinite_in(fd, found))
    return pushed.identity


def _read(layout: ModelLayout, name: str, fd: int) -> _File:
    """Read the header of a push. Raises Refused."""
    try:
        header = header_of(name, fd, os.fstat(fd).st_size, layout.header_max_bytes)
    except FormatError as error:
        raise Refused(errno.EINVAL, error.defect) from None
    scales_of(header)
    return _File(header.tensors, _identity_of_file(name, header.metadata))


def _identity_of_file(name: str, metadata: Mapping[str, str]) -> Identity:
    """Return what the name of a file in push/, and its metadata, say. Raises Refused."""
    if not name.isprintable():
        raise Refused(errno.EINVAL, "its name is not printable text")
    stem, suffix = os.path.splitext(name)
    who = stem.rpartition(":")[0] or stem if suffix == _NPY else stem
    if "@" not in who:
        return _identity(who, metadata)
    found = _FILE_NAME.fullmatch(who)
    if found is None:
        raise Refused(errno.EINVAL, f"{name!r} is not the name of a push, which is {_NAME_OF_FILE}")
    worker, step = found.groups()
    identity = _identity(worker, {"worker": worker, STEP: step, **metadata})
    if (identity.worker, str(identity.step)) != (worker, step):
        # Another push may be about to get this name.
        raise Refused(errno.EINVAL, f"it is {identity.worker}@{identity.step} by its metadata")
    return identity


def header_of(path: str, fd: int, size: int, most: int = HEADER_MAX_BYTES) -> Header:
    """Read the header of a file of a push, of `most` bytes at most: an array WORKER@STEP:PARAMETER.npy is
    one parameter. Raises FormatError and Refused."""
    name = os.path.basename(path)
    if not name.endswith(_NPY):
        return read_header(path, fd, size, most)
    found = _npy.layout(path, lambda count: _files.read_at(fd, count, 0), size)
    if found.order != "C":
        raise Refused(errno.EINVAL, "its array is in Fortran order")
    parameter = name.removesuffix(_NPY).rpartition(":")[2]
    return Header({parameter: found}, {}, size_bytes(found.dtype, found.shape) > 0)


def scales_of(header: Header) -> dict[str, float]:
    """Return what the tensors of a push are multiplied by: its metadata `scales` is a JSON object. Raises
    Refused."""
    try:
        scales = msgspec.json.decode(header.metadata.get("scales", "{}"), type=dict[str, float])
    except msgspec.MsgspecError as error:
        raise Refused(
            errno.EINVAL, f"its scales are not a JSON object of numbers: {error}"
        ) from None
    check_scales(scales)
    return scales


def check_scales(scales: Mapping[str, float]) -> None:
    """Raises Refused for factors that are no fp32 numbers."""
    if not all(abs(scale) <= F32_MAX for scale in scales.values()):
        raise Refused(errno.EINVAL, "its scales are not all fp32 numbers")


def inspect(
    train: TrainDirectory,
    layout: ModelLayout,
    name: str,
    folder: Folder | None = None,
    *,
    finite: bool = False,
) -> Identity | None:
    """Return what a name in push/ says of itself; None for what is no push, or not yet. `folder`: what is
    known to be below it. `finite`: as in read_file(); the files of a push in shards are not opened here.
    Raises Refused for what does not fit the parameters."""
    if name.startswith("."):
        return None
    if folder is not None and train.is_on_irdmafs and folder.files.keys() >= {*layout.shard_names}:
        # Reducers check its files.
        size = sum(folder.files[shard].size for shard in layout.shard_names)
        return _identity_in_shards(name)._replace(size=size)
    path = train.push / name
    try:
        if stat.S_ISDIR(_check_kind(path).st_mode):
            identity = _identity_in_shards(name)
            size = _size_if_whole(layout, path)
            if size and not train.is_on_irdmafs:
                _check_headers(layout, path)
            return identity._replace(size=size) if size else None
        with _files.open_to_read(os.fspath(path)) as (fd, status):
            if status.st_size == 0 or _files.read_version(fd) == 0:
                return None
            identity = read_file(layout, name, fd, finite=finite)._replace(size=status.st_size)
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise Refused(
            errno.EACCES, f"the reducer may not read {train.shown(str(error.filename))}"
        ) from None
    return identity


def _check_kind(path: Path) -> os.stat_result:
    """Return the status of a file or directory. Raises Refused for anything else: a link could lead to a
    file that only the reducer may read. Raises OSError."""
    status = path.lstat()
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise Refused(errno.EINVAL, f"{path.name} is a link or a special file")
    return status


def _size_if_whole(layout: ModelLayout, path: Path) -> int:
    """Return the bytes of a directory that has the files of all shards, else 0. Reducers check the files;
    here they are not opened: on another host than theirs all of them would be fetched. Raises Refused."""
    directory = Directory(path)
    size = 0
    for name in layout.shard_names:
        file = directory.file(name)
        status = _check_kind(file)
        if not is_published(file, status):
            return 0
        size += status.st_size
    return size


def _check_headers(layout: ModelLayout, path: Path) -> None:
    """Check the files of all shards. Raises Refused."""
    for shard in layout.shards():
        with _files.open_to_read(os.fspath(path / shard.name)) as (fd, _):
            _check_header(layout, shard, fd)


def settled_name(name: str, worker: str, step: int) -> str:
    """Return the name of a push whose step was the worker's next, and is this one now."""
    parameter = f":{name.rpartition(':')[2]}" if name.endswith(_NPY) else _SAFETENSORS
    return f"{worker}@{step}{parameter}"


# -- whether it may count -------------------------------------------------------------------------


def _check_header(layout: ModelLayout, shard: Shard, fd: int) -> None:
    """Check the header of a shard's file of a push. Raises Refused."""
    try:
        header = read_header(shard.name, fd, os.fstat(fd).st_size, layout.header_max_bytes)
    except FormatError as error:
        raise Refused(errno.EINVAL, str(error)) from None
    scales_of(header)
    check_shard(shard, header, cut=True)


def check_shard(shard: Shard, header: Header, *, cut: bool) -> None:
    """Check what a file of a push has of a shard. `cut`: it has nothing else. Raises Refused."""
    shapes = {
        part.parameter.name: part.shape if cut else part.parameter.shape for part in shard.slices
    }
    scaled = _scaled(shard)
    wanted = shapes.keys() | scaled.keys()
    tensors = header.tensors
    if not cut:
        tensors = {name: found for name, found in tensors.items() if name in wanted}
    _check_tensors(tensors, shapes, scaled)


def _scaled(shard: Shard) -> dict[str, Parameter]:
    """Return the parameters of a shard by the names of the tensors that have their scales."""
    return {part.scales: part.parameter for part in shard.slices if part.scales}


def _check_whole(layout: ModelLayout, tensors: Mapping[str, Layout]) -> None:
    if not tensors:
        raise Refused(errno.EINVAL, "it has no tensor")
    _check_tensors(tensors, layout.shapes, layout.scaled)


def _check_tensors(
    tensors: Mapping[str, Layout],
    shapes: Mapping[str, tuple[int, ...]],
    scaled: Mapping[str, Parameter],
) -> None:
    for name, found in tensors.items():
        if name in scaled:
            try:
                blocks_of(scaled[name].shape, found.shape)
            except ValueError as error:
                raise Refused(errno.EINVAL, f"{name!r}: {error}") from None
        elif name not in shapes:
            raise Refused(errno.EINVAL, f"there is no parameter {name!r}")
        elif found.shape != shapes[name]:
            raise Refused(
                errno.EINVAL,
                f"{name!r} has the shape {list(found.shape)}, not {list(shapes[name])}",
            )
        if code_of(found.dtype, found.extension) not in FLOAT_CODES:
            raise Refused(errno.EINVAL, f"{name!r} has the type {found.extension or found.dtype}")


def check_identity(train: TrainDirectory, config: TrainConfig, identity: Identity) -> None:
    """Raises Refused for a worker, a step or a base that cannot count."""
    newest = train.newest_plan()
    clocks = newest.clocks
    _check_worker_and_step(config, clocks, identity)
    if isinstance(config.workers, int) and identity.worker not in clocks:
        _check_number(train, config.workers, identity.worker, clocks)
    clock = clocks.get(identity.worker, 0)
    if 0 < identity.step <= clock:
        raise Refused(
            errno.ESTALE, f"step {identity.step} is past: {identity.worker} is at {clock}"
        )
    if identity.base > newest.version:
        raise Refused(errno.EINVAL, f"there is no version {identity.base} yet")
    # Where nobody waits for the others, a base may be older than all versions that are kept.
    lockstep = config.synchronization.kind in ("bsp", "local")
    if lockstep and identity.base >= 0 and not train.version(identity.base).is_dir():
        raise Refused(errno.ESTALE, f"version {identity.base} is gone")


def _check_worker_and_step(
    config: TrainConfig, clocks: Mapping[str, int], identity: Identity
) -> None:
    """Raises Refused for one who is not in the list of workers, and for steps that are too far ahead."""
    _check_numbers(identity)
    if isinstance(config.workers, tuple) and identity.worker not in config.workers:
        raise Refused(errno.EPERM, f"{identity.worker!r} is not one of the workers")
    newest = max(clocks.values(), default=0)
    if identity.step > newest + config.ahead:
        raise Refused(
            errno.EINVAL, f"step {identity.step} is too far ahead: the others are at {newest}"
        )


def _check_number(train: TrainDirectory, limit: int, worker: str, clocks: Collection[str]) -> None:
    """Raises Refused for a new worker if there are as many as there may be. One that takes part may have
    the place of one that ended; nobody knows of the others if they have."""
    others = list(clocks)
    if is_locked(train.workers / worker):
        others = [name for name in clocks if is_locked(train.workers / name)]
    if len(others) >= limit:
        raise Refused(errno.EPERM, f"{worker!r} is a worker too many: {limit} take part")


def check_finite(values: Mapping[str, Value]) -> None:
    """Raises Refused for values with NaN, or with numbers that are infinite in fp32."""
    for name, value in values.items():
        assert value.code is not None
        bits = value.array.reshape(-1).astype(dtype_of_code(value.code)[0], copy=False)
        _refuse_nonfinite(name, count_nonfinite(bits, value.code))


def _refuse_nonfinite(name: str, bad: int) -> None:
    if bad:
        raise Refused(errno.EINVAL, f"{name!r} has {bad} elements that are NaN or infinite")


def has_nonfinite(file: Path) -> bool:
    """Return whether a file of a push has NaN or infinity, or cannot be read any more. Raises OSError."""
    with _files.open_privately(os.fspath(file)) as (fd, status):
        try:
            header = header_of(os.fspath(file), fd, status.st_size)
        except (FormatError, Refused):
            return True
        return any(_nonfinite_in(fd, one) for one in header.tensors.values())


def _nonfinite_in(fd: int, found: Layout) -> int:
    """Count NaN and infinity in a tensor of an open file."""
    code = code_of(found.dtype, found.extension)
    assert code is not None
    bad = 0
    end = found.offset + size_bytes(found.dtype, found.shape)
    for offset in range(found.offset, end, _BLOCK_BYTES):
        data = _files.read_at(fd, min(_BLOCK_BYTES, end - offset), offset)
        bad += count_nonfinite(np.frombuffer(data, found.dtype), code)
    return bad


# -- making pushes --------------------------------------------------------------------------------


def slices_of(shard: Shard, values: Mapping[str, Value]) -> dict[str, Value]:
    """Return what a shard's file has of values of whole parameters, some of which may lack. All scales of a
    parameter are in every file that has some of it."""
    slices = {}
    for part in shard.slices:
        value = values.get(part.parameter.name)
        if value is None:
            continue
        array = value.array
        if not part.is_whole:
            array = array.reshape(-1)[part.start : part.stop]
        slices[part.parameter.name] = Value(array, value.extension)
        if part.scales in values:
            slices[part.scales] = values[part.scales]
    return slices


def values_of(layout: ModelLayout, gradients: Mapping[str, object]) -> dict[str, Value]:
    """Return the values that are to be pushed. Raises Refused where they do not fit the parameters."""
    values = {name: value_of(one) for name, one in gradients.items()}
    found = {
        name: Layout(value.array.dtype, value.extension, value.array.shape)
        for name, value in values.items()
    }
    _check_whole(layout, found)
    return values
