"""Compare two directories: their files, and the tensors in them."""

from __future__ import annotations

import filecmp
import os
from collections.abc import Iterator

import numpy as np

from ._dtypes import Array
from ._files import FormatError
from ._store import SAFETENSORS, Store
from ._versions import files_below


def differences(old: str, new: str) -> Iterator[tuple[str, str]]:
    """Yield what came ("+"), went ("-") or changed ("~") between two directories: the path of a file from
    there, or the name of a tensor of a .safetensors file as ``Store`` knows it. Names of one inode are
    not read. Raises OSError."""
    before, after = (
        {os.path.relpath(file, top) for file in files_below(top)} for top in (old, new)
    )
    for name in sorted(before | after):
        if name not in before or name not in after:
            yield "+" if name in after else "-", name
        elif not _are_equal(os.path.join(old, name), os.path.join(new, name)):
            yield "~", name
            if name.endswith(SAFETENSORS):
                yield from _tensors_that_differ(old, new, name)


def _are_equal(old: str, new: str) -> bool:
    """Return whether two names lead to the same: links to the same place, files of the same bytes."""
    if os.path.islink(old) or os.path.islink(new):
        return os.path.islink(old) == os.path.islink(new) and os.readlink(old) == os.readlink(new)
    return os.path.samefile(old, new) or filecmp.cmp(old, new, shallow=False)


def _tensors_that_differ(old: str, new: str, name: str) -> Iterator[tuple[str, str]]:
    try:
        before, after = Store(old).state_dict(name), Store(new).state_dict(name)
    except FormatError:
        return
    for tensor in sorted(before.keys() | after.keys()):
        if tensor not in before or tensor not in after:
            yield "+" if tensor in after else "-", f"{name}/{tensor}"
        elif not _have_equal_bytes(before[tensor], after[tensor]):
            yield "~", f"{name}/{tensor}"


def _have_equal_bytes(one: Array, other: Array) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return np.array_equal(one.reshape(-1).view(np.uint8), other.reshape(-1).view(np.uint8))
