"""The parameters of a training directory, and how they are cut into shards. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, TypeVar

import msgspec

from ..client._dtypes import DType, code_of, dtype_of_code
from ..client._safetensors import Header
from .arithmetic import CODES

T = TypeVar("T")

# Cuts within a parameter are at multiples of this many elements.
ALIGN = 64


class Parameter(msgspec.Struct, frozen=True):
    """One tensor of a model: its safetensors type, and the file of the directory that holds it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str

    @property
    def type(self) -> DType:
        """Return the type of its elements in numpy."""
        return dtype_of_code(self.dtype)

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)


class Slice(NamedTuple):
    """The elements [start, stop) of a parameter, which are [at, at + stop - start) of the shard."""

    parameter: Parameter
    start: int
    stop: int
    at: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        return self.size == self.parameter.size

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the slice in a shard's file: a cut parameter is one-dimensional."""
        return self.parameter.shape if self.is_whole else (self.size,)


class Shard(NamedTuple):
    """A piece of all parameters. `size`: its number of elements. `part`: the part of the work it is in; ""
    in a small run, whose only shard is the model's file."""

    name: str
    slices: tuple[Slice, ...]
    size: int
    part: str

    @property
    def is_fp32(self) -> bool:
        """Return whether all parameters are fp32, and so are the master weights themselves."""
        return all(part.parameter.dtype == "F32" for part in self.slices)


class ModelLayout(msgspec.Struct, frozen=True, dict=True):
    """The contents of layout.json: the parameters in canonical order, the names of the shards, and the
    number of parts: every so many shards are of the same part, 0 in a small run; `indices`: names of files
    that say which parameter is in which file. What follows from them is computed once."""

    parameters: tuple[Parameter, ...]
    shard_names: tuple[str, ...]
    part_count: int
    indices: tuple[str, ...] = ()

    @property
    def is_small(self) -> bool:
        """Return whether pushes, and parameters, are one file each: to agree on pieces would cost more."""
        return not self.part_count

    @cached_property
    def files(self) -> tuple[str, ...]:
        """Return the names of the model's files."""
        return tuple(dict.fromkeys(parameter.file for parameter in self.parameters))

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {parameter.name: parameter.shape for parameter in self.parameters}

    @cached_property
    def header_max_bytes(self) -> int:
        """Return the size that the header of a push may have."""
        return (1 << 20) + sum(1024 + 16 * len(parameter.name) for parameter in self.parameters)

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        return cut(self.parameters, self.shard_names, self.part_count)

    @cached_property
    def parts(self) -> dict[str, tuple[Shard, ...]]:
        """Return the shards of each part, in their order. Reducers take each part for itself."""
        found: dict[str, tuple[Shard, ...]] = {}
        for shard in self.shards if self.part_count else ():
            found[shard.part] = (*found.get(shard.part, ()), shard)
        return found


def canonical(parameters: Iterable[Parameter]) -> tuple[Parameter, ...]:
    """Return the parameters in the order in which a .safetensors file that we write has their data."""
    return tuple(sorted(parameters, key=lambda one: (-one.type.itemsize, one.name)))


def cut(parameters: Sequence[Parameter], names: Sequence[str], parts: int) -> tuple[Shard, ...]:
    """Return the shards: consecutive elements, as many in each as alignment allows; no parts: small run."""
    total = sum(parameter.size for parameter in parameters)
    shards = []
    index, start = 0, 0  # the first element that no shard has yet
    before = 0
    for number, name in enumerate(names, 1):
        end = total * number // len(names)
        slices: list[Slice] = []
        at = 0
        while index < len(parameters):
            parameter = parameters[index]
            left = parameter.size - start
            wanted = end - before - at
            if number < len(names) and wanted < left:
                wanted = wanted // ALIGN * ALIGN
                if wanted > 0:
                    slices.append(Slice(parameter, start, start + wanted, at))
                    start += wanted
                    at += wanted
                break
            slices.append(Slice(parameter, start, parameter.size, at))
            at += left
            index, start = index + 1, 0
        shards.append(Shard(name, tuple(slices), at, str((number - 1) % parts) if parts else ""))
        before += at
    return tuple(shards)


def in_turns(sequences: Iterable[Iterable[T]]) -> Iterator[T]:
    """Return the first of each, then the second of each, and so on."""
    for turn in itertools.zip_longest(*sequences):
        yield from (one for one in turn if one is not None)


class Run(NamedTuple):
    """Elements [at, at + size) of a shard, one after the other from byte `offset` of a file on."""

    at: int
    size: int
    dtype: DType
    offset: int


def runs_of(shard: Shard, header: Header) -> list[Run]:
    """Return where a file has the elements of a shard, in their order; parameters that it lacks are left
    out. The file has whole parameters, or the shard's slices of them."""
    runs: list[Run] = []
    for part in shard.slices:
        found = header.tensors.get(part.parameter.name)
        count = part.size
        if found is None or not count:
            continue
        assert code_of(found.dtype) in CODES, "the push was checked"
        first = part.start if found.shape == part.parameter.shape else 0
        offset = found.offset + first * found.dtype.itemsize
        run = Run(part.at, count, found.dtype, offset)
        if runs and _follows(runs[-1], run):
            runs[-1] = runs[-1]._replace(size=runs[-1].size + count)
        else:
            runs.append(run)
    return runs


def _follows(one: Run, other: Run) -> bool:
    return (
        one.dtype == other.dtype
        and one.at + one.size == other.at
        and one.offset + one.size * one.dtype.itemsize == other.offset
    )
