"""Pushes as files: their names, what they say of themselves, and whether they may count."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from ..client import FormatError, _files, _npy
from ..client._dtypes import Layout, Value, code_of, size_bytes, value_of
from ..client._safetensors import Header, encode
from .arithmetic import count_nonfinite
from .config import TrainConfig, is_worker_name
from .directory import TrainDirectory, read_header
from .errors import Refused
from .layout import FLOAT_CODES, ModelLayout, Shard
from .plan import Push

__all__ = ["Identity", "check", "identity_of_directory", "read_push", "shard_contents"]

_SAFETENSORS, _NPY = ".safetensors", ".npy"
# WORKER@STEP, and what else is said of a push that is a directory: ;weight=2.0;base=16;lr=0.001
_NAME = re.compile(r"([^@;]+)@(\d{1,18})((?:;[a-z]+=[0-9eE+.-]+)*)")
# Bytes that are looked at at once for NaN and infinity.
_BLOCK_BYTES = 16 << 20


class Identity(NamedTuple):
    """What a push says of itself; `step` 0: the worker's next."""

    worker: str
    step: int
    weight: float = 1.0
    base: int = -1
    lr: float = 0.0

    @property
    def name(self) -> str:
        """Return the name of the push as a directory."""
        more = f";weight={self.weight!r}"
        if self.base >= 0:
            more += f";base={self.base}"
        if self.lr:
            more += f";lr={self.lr!r}"
        return f"{self.worker}@{self.step}{more}"

    @property
    def metadata(self) -> dict[str, str]:
        """Return the metadata of the push as a file."""
        said = {"worker": self.worker, "step": str(self.step), "weight": repr(self.weight)}
        if self.base >= 0:
            said["base"] = str(self.base)
        if self.lr:
            said["lr"] = repr(self.lr)
        return said


def identity_of_directory(name: str) -> Identity | None:
    """Return what the name of a directory in push/ says; None if it is not a push."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    said = dict(part.split("=", 1) for part in found[3].split(";")[1:])
    return _identity(found[1], {"step": found[2], **said})


def _identity(worker: str, said: Mapping[str, str]) -> Identity:
    """Raises Refused."""
    try:
        identity = Identity(
            said.get("worker", worker),
            int(said.get("step", "0")),
            float(said.get("weight", "1")),
            int(said.get("base", "-1")),
            float(said.get("lr", "0")),
        )
    except ValueError as error:
        raise Refused(errno.EINVAL, f"its metadata is not understood: {error}") from None
    if not is_worker_name(identity.worker):
        raise Refused(errno.EINVAL, f"{identity.worker!r} cannot be the name of a worker")
    if identity.step < 0:
        raise Refused(errno.EINVAL, f"step {identity.step} is not a step")
    if not (np.isfinite(identity.weight) and identity.weight >= 0 and np.isfinite(identity.lr)):
        raise Refused(
            errno.EINVAL, f"weight {identity.weight} or lr {identity.lr} is not a number >= 0"
        )
    return identity


class _File(NamedTuple):
    """A push in one file: its tensors, what it says of itself, and the scale of each tensor."""

    tensors: dict[str, Layout]
    identity: Identity
    scales: dict[str, float]


def _read(name: str, fd: int) -> _File:
    """Read the header of a push. Raises Refused."""
    size = os.fstat(fd).st_size
    # Of a push NAME.safetensors without metadata, NAME is the worker; WORKER@STEP.NAME.npy says it all.
    try:
        if name.endswith(_NPY):
            found = _npy.layout(name, lambda count: _files.read_at(fd, count, 0), size)
            who, _, parameter = name.removesuffix(_NPY).rpartition(":")
            worker, _, step = (who or parameter).partition("@")
            if found.order != "C":
                raise Refused(errno.EINVAL, "its array is in Fortran order")
            return _File({parameter: found}, _identity(worker, {"step": step or "0"}), {})
        header = read_header(name, fd, size)
    except FormatError as error:
        raise Refused(errno.EINVAL, str(error)) from None
    worker, _, step = name.removesuffix(_SAFETENSORS).partition("@")
    said = {"step": step or "0", **header.metadata}
    return _File(header.tensors, _identity(worker, said), scales_of(header))


def tensors_in(name: str, fd: int) -> dict[str, Layout]:
    """Return the tensors of a file of a push. Raises Refused."""
    return (
        _read(name, fd).tensors
        if name.endswith((_NPY, _SAFETENSORS))
        else read_header(name, fd, os.fstat(fd).st_size).tensors
    )


def scales_of(header: Header) -> dict[str, float]:
    """Return what the tensors of a push are multiplied by: its metadata `scales` is a JSON object. Raises
    Refused."""
    try:
        return msgspec.json.decode(header.metadata.get("scales", "{}"), type=dict[str, float])
    except msgspec.MsgspecError as error:
        raise Refused(
            errno.EINVAL, f"its scales are not a JSON object of numbers: {error}"
        ) from None


def read_push(path: Path, clocks: Mapping[str, int]) -> Push | None:
    """Return the push that a name in push/ is; None for what is none, or not yet."""
    name = path.name
    if name.startswith("."):
        return None
    try:
        if path.is_dir():
            identity = identity_of_directory(name)
        else:
            with _files.open_to_read(os.fspath(path)) as (fd, status):
                if status.st_size == 0 or _files.read_version(fd) == 0:
                    return None
                identity = _read(name, fd).identity
    except (FileNotFoundError, Refused):
        return None
    if identity is None:
        return None
    step = identity.step or clocks.get(identity.worker, 0) + 1
    return Push(identity.worker, step, name, identity.weight, identity.base, identity.lr)


# -- whether it may count -------------------------------------------------------------------------


def check(directory: Path, fd: int, name: str) -> None:
    """Check a file that is about to be published below push/ of a training directory: `name` is its path
    from there. Raises Refused, after which nothing of it is seen, and TrainError."""
    train = TrainDirectory(directory)
    config, layout = train.config(), train.layout()
    *folders, last = name.split("/")
    if folders:
        _check_shard(config, layout, folders, last, fd)
        return
    pushed = _read(last, fd)
    shapes = {one.name: one.shape for one in layout.parameters}
    _check_tensors(pushed.tensors, shapes, whole=True)
    check_identity(train, config, pushed.identity)
    if config.nonfinite == "refuse":
        _refuse_nonfinite(fd, pushed.tensors)


def _check_shard(
    config: TrainConfig, layout: ModelLayout, folders: list[str], last: str, fd: int
) -> None:
    shard = next((one for one in layout.shards() if one.name == last), None)
    if len(folders) > 1 or shard is None:
        raise Refused(errno.EINVAL, f"there is no shard {last!r}")
    if identity_of_directory(folders[0].removeprefix(".")) is None:
        raise Refused(errno.EINVAL, f"{folders[0]!r} is not WORKER@STEP")
    try:
        header = read_header(last, fd, os.fstat(fd).st_size)
    except FormatError as error:
        raise Refused(errno.EINVAL, str(error)) from None
    scales_of(header)
    shapes = {part.parameter.name: part.shape for part in shard.slices}
    _check_tensors(header.tensors, shapes, whole=False)
    if config.nonfinite == "refuse":
        _refuse_nonfinite(fd, header.tensors)


def _check_tensors(
    tensors: Mapping[str, Layout], shapes: Mapping[str, tuple[int, ...]], *, whole: bool
) -> None:
    if not tensors and whole:
        raise Refused(errno.EINVAL, "it has no tensor")
    for name, found in tensors.items():
        if name not in shapes:
            raise Refused(errno.EINVAL, f"there is no parameter {name!r}")
        if found.shape != shapes[name]:
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
    _check_worker(config, identity.worker, clocks)
    clock = clocks.get(identity.worker, 0)
    if 0 < identity.step <= clock:
        raise Refused(
            errno.ESTALE, f"step {identity.step} is past: {identity.worker} is at {clock}"
        )
    if identity.step > max([clock, *clocks.values()]) + config.ahead:
        raise Refused(errno.EINVAL, f"step {identity.step} is too far ahead of {clock}")
    if identity.base > newest.version:
        raise Refused(errno.EINVAL, f"there is no version {identity.base} yet")
    if identity.base >= 0 and not train.version(identity.base).is_dir():
        raise Refused(errno.ESTALE, f"version {identity.base} is gone")


def _check_worker(config: TrainConfig, worker: str, clocks: Mapping[str, int]) -> None:
    if isinstance(config.workers, tuple) and worker not in config.workers:
        raise Refused(errno.EPERM, f"{worker!r} is not one of the workers")
    if isinstance(config.workers, int) and worker not in clocks and len(clocks) >= config.workers:
        raise Refused(errno.EPERM, f"{worker!r} is a worker too many")


def _refuse_nonfinite(fd: int, tensors: Mapping[str, Layout]) -> None:
    for name, found in tensors.items():
        if bad := nonfinite_in(fd, found):
            raise Refused(errno.EINVAL, f"{name!r} has {bad} elements that are NaN or infinite")


def nonfinite_in(fd: int, found: Layout) -> int:
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


def shard_contents(
    shard: Shard, values: Mapping[str, Value], metadata: Mapping[str, str]
) -> list[memoryview]:
    """Return the contents of a shard's file, from values of whole parameters, some of which may lack."""
    slices = {}
    for part in shard.slices:
        value = values.get(part.parameter.name)
        if value is None:
            continue
        array = value.array
        if not part.is_whole:
            array = array.reshape(-1)[part.start : part.stop]
        slices[part.parameter.name] = Value(array, value.extension)
    return list(encode(slices, metadata))


def values_of(layout: ModelLayout, gradients: Mapping[str, object]) -> dict[str, Value]:
    """Return the values that are to be pushed. Raises Refused where they do not fit the parameters."""
    values = {name: value_of(one) for name, one in gradients.items()}
    shapes = {one.name: one.shape for one in layout.parameters}
    found = {
        name: Layout(value.array.dtype, value.extension, value.array.shape)
        for name, value in values.items()
    }
    _check_tensors(found, shapes, whole=True)
    return values
