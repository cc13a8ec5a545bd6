"""Parameters copied from the files of a version into arrays and tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..client._dtypes import Array, Value, dtype_of_code
from .layout import Shard, Slice
from .shard_files import ShardFile

__all__ = ["copy_shard"]


def copy_shard(
    open_shard: Callable[[Shard], ShardFile], out: Mapping[str, Any], shard: Shard
) -> None:
    """Copy the parameters of a shard into arrays or tensors."""
    file = open_shard(shard)
    for part in shard.slices:
        name = part.parameter.name
        if name in out:
            extension = dtype_of_code(part.parameter.dtype)[1]
            _copy(Value(file.tensor(name), extension), out[name], part)


def _copy(value: Value, target: Any, part: Slice) -> None:
    """Copy a slice of a parameter into an array, or a tensor on any device, of the parameter's shape."""
    shown: Array = value.shown
    if type(target).__module__.partition(".")[0] == "torch":
        import torch

        dtype = getattr(torch, value.extension or value.array.dtype.name)
        if target.device.type != "cpu" or target.dtype != dtype:
            source = torch.from_numpy(value.array.copy()).view(dtype)
            _copy_tensor(source, target, part)
            return
        target = target.detach()
        shown = value.array
        if value.extension is not None:
            target = target.view(getattr(torch, value.array.dtype.name))
        target = target.numpy()
    if part.is_whole:
        target[...] = shown
    elif target.flags.c_contiguous:
        target.reshape(-1)[part.start : part.stop] = shown
    else:
        target.flat[part.start : part.stop] = shown


def _copy_tensor(source: Any, target: Any, part: Slice) -> None:
    """Copy into a tensor on another device, or of another type."""
    whole = target.detach()
    if part.is_whole:
        whole.copy_(source)
    elif whole.is_contiguous():
        whole.view(-1)[part.start : part.stop].copy_(source)
    else:
        at = np.unravel_index(range(part.start, part.stop), part.parameter.shape)
        whole[at] = source.to(whole)
