"""Compare two directories: their files, and the tensors in them."""

from __future__ import annotations

import contextlib
import filecmp
import os
import stat
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

from ._drafts import below
from ._dtypes import Array
from ._files import FormatError
from ._store import SAFETENSORS, Store

T = TypeVar("T")


def differences(old: str, new: str) -> Iterator[tuple[str, str]]:
    """Yield what came ("+"), went ("-") or changed ("~") between two directories: the path of a file from
    there, or the name of a tensor of a .safetensors file as ``Store`` knows it. Names of one inode are
    not read. Raises OSError."""
    files = ({os.path.relpath(file, top): file for file in below(top)[1]} for top in (old, new))
    for sign, name in _compared(_are_equal, *files):
        yield sign, name
        if sign == "~" and name.endswith(SAFETENSORS):
            # Not those of a file that is damaged or empty, or of a link that leads nowhere.
            with contextlib.suppress(FormatError, KeyError):
                tensors = (Store(top).state_dict(name) for top in (old, new))
                for change, tensor in _compared(_have_equal_bytes, *tensors):
                    yield change, f"{name}/{tensor}"


def _compared(
    are_equal: Callable[[T, T], bool], before: dict[str, T], after: dict[str, T]
) -> Iterator[tuple[str, str]]:
    for name in sorted(before | after):
        if name not in before or name not in after:
            yield "+" if name in after else "-", name
        elif not are_equal(before[name], after[name]):
            yield "~", name


def _are_equal(old: str, new: str) -> bool:
    """Return whether two names are the same: links to the same place, files of the same bytes, or FIFOs,
    sockets or devices of one kind."""
    before, after = os.lstat(old), os.lstat(new)
    kind = stat.S_IFMT(before.st_mode)
    if (kind, before.st_rdev) != (stat.S_IFMT(after.st_mode), after.st_rdev):
        return False
    if kind == stat.S_IFLNK:
        return os.readlink(old) == os.readlink(new)
    is_same = kind != stat.S_IFREG or os.path.samestat(before, after)
    return is_same or filecmp.cmp(old, new, shallow=False)


def _have_equal_bytes(one: Array, other: Array) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return np.array_equal(one.reshape(-1).view(np.uint8), other.reshape(-1).view(np.uint8))
