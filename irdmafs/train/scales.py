"""Scales by block: a push has, beside the tensor NAME, a tensor NAME_scale_inv with what blocks of NAME are
multiplied by. It is the form of DeepSeek-V3's weights (https://huggingface.co/deepseek-ai/DeepSeek-V3,
README_WEIGHTS.md). Pure."""

from __future__ import annotations

import numpy as np

from .arithmetic import F32

SUFFIX = "_scale_inv"
BLOCK = 128


def blocks_of(shape: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...]:
    """Return the lengths of a block of a tensor along its axes; `scales` is the shape of its scales. Each
    axis of length n has ceil(n / 128) of them (a block is 128 long, the last may be shorter), n, or 1.
    Raises ValueError."""
    if len(shape) != len(scales):
        raise ValueError(f"scales of the shape {list(scales)} for one of {list(shape)}")
    blocks = []
    for length, count in zip(shape, scales, strict=True):
        found = {-(-length // BLOCK): BLOCK, length: 1, 1: max(1, length)}.get(count)
        if found is None:
            raise ValueError(f"scales of the shape {list(scales)} for one of {list(shape)}")
        blocks.append(found)
    return tuple(blocks)


class BlockScales:
    """The scales of a tensor, for its elements in C order."""

    def __init__(self, shape: tuple[int, ...], scales: F32) -> None:
        """Raises ValueError."""
        blocks = blocks_of(shape, scales.shape)
        for axis, (length, block) in enumerate(zip(shape[:-1], blocks, strict=False)):
            scales = scales.repeat(block, axis).take(range(length), axis)
        self._columns, self._block = (shape[-1], blocks[-1]) if shape else (1, 1)
        # A row for each row of the tensor: all axes but the last.
        self._rows = scales.reshape(-1, scales.shape[-1] if shape else 1)

    def factors(self, first: int, last: int, weight: float) -> F32:
        """Return the scales of elements [first, last), each times a weight and rounded to fp32."""
        top, bottom = first // self._columns, -(-last // self._columns)
        rows, at = self._rows[top:bottom], first - top * self._columns
        if len(rows) == 1:
            # A row may be long: take only its blocks that are asked for.
            left = at // self._block
            right = -(-(at + last - first) // self._block)
            rows, at = rows[:, left:right], at - left * self._block
        with np.errstate(over="ignore"):
            wide = (rows * np.float64(weight)).astype(np.float32).repeat(self._block, axis=1)
        if len(rows) > 1:
            wide = wide[:, : self._columns]
        return wide.reshape(-1)[at : at + last - first]
