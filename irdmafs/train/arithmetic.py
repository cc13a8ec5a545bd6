"""Sums of pushes in fp32, in blocks that stay in a processor's cache.

An accumulator is a one-dimensional fp32 array. A push is an array as it lies in a file, often a
read-only map, of any float type; ml_dtypes has those that numpy lacks.

The order of operations on an element is fixed, and each operation rounds to fp32. So neither blocks
nor threads nor the host change a bit of a result.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from irdmafs.client._dtypes import Array, bits_of, code_of, dtype_of_code
from irdmafs.client._files import Closing

F32: TypeAlias = NDArray[np.float32]
# The elements of a push, and their factor in the sum.
Push: TypeAlias = tuple[Array, float]
F32_MAX = float(np.finfo(np.float32).max)

T = TypeVar("T")

# Elements that a thread works on before it takes the next ones.
BLOCK = 256 << 10
# Elements that pass through several operations of numpy while they are in the cache: 256 KiB of each fp32
# array. Measured with 1 MiB of L2 cache, two threads, others at work: the sum of four pushes moves 0.75 of
# the bytes per second that a + b does with 32 Ki elements, 0.85 with 64 Ki or 128 Ki, 0.81 with 256 Ki.
PART = 64 << 10

CODES = ("F32", "F16", "BF16", "F64", "F8_E4M3", "F8_E5M2")


class _Scratch(threading.local):
    """Arrays which every thread has of its own and keeps, of PART elements, or of a block."""

    def __init__(self) -> None:
        self.floats = np.empty((2, PART), np.float32)
        self.doubles = np.empty(PART, np.float64)
        self.flags = np.empty(PART, np.bool_)
        self._blocks: dict[str, F32] = {}

    def block(self, name: str, size: int) -> F32:
        """Return the array of a name, with so many elements of undefined values, BLOCK at most."""
        if name not in self._blocks:
            self._blocks[name] = np.empty(BLOCK, np.float32)
        return self._blocks[name][:size]


scratch = _Scratch()


def ranges(size: int, step: int) -> Iterator[slice]:
    """Yield the ranges of ``step`` elements that ``size`` elements have; the last one may be shorter."""
    for first in range(0, size, step):
        yield slice(first, min(first + step, size))


class Blocks(Closing):
    """Threads that work on blocks of arrays, which numpy and torch allow to run at the same time."""

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"{threads} threads can do nothing")
        self._pool = ThreadPoolExecutor(threads, "block") if threads > 1 else None

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def each(self, size: int, work: Callable[[slice], T]) -> list[T]:
        """Call ``work`` with each range of BLOCK elements of ``size``, and return its results in the order
        of the ranges. Raises what ``work`` raises, when no thread is at work any more."""
        if self._pool is None or size <= BLOCK:
            return [work(part) for part in ranges(size, BLOCK)]
        futures = [self._pool.submit(work, part) for part in ranges(size, BLOCK)]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
            wait(futures)


ALONE = Blocks(1)


def _check(array: Array) -> None:
    if code_of(array.dtype) not in CODES:
        raise ValueError(
            f"no arithmetic with elements of {array.dtype}, only of {', '.join(CODES)}"
        )
    if array.ndim != 1:
        raise ValueError(f"elements lie in a 1-dimensional array, not in {array.ndim} dimensions")


# -- to fp32 -----------------------------------------------------------------------------------


def _values_by_bits(code: str) -> F32:
    """Return the values of all bits of an element."""
    dtype = dtype_of_code(code)
    bits = np.arange(1 << 8 * dtype.itemsize, dtype=bits_of(dtype))
    with np.errstate(all="ignore"):
        return bits.view(dtype).astype(np.float32)


# Looking values up takes half as long as numpy's and ml_dtypes' conversions of these types, or less.
_VALUES = {dtype_of_code(code): _values_by_bits(code) for code in ("F16", "F8_E4M3", "F8_E5M2")}


def to_float32(elements: Array, out: F32) -> None:
    """Convert the elements of a push to fp32. ``elements`` and ``out`` have the same length. All but F64,
    which is rounded to nearest even, are exact. Raises ValueError for other types."""
    _check(elements)
    with np.errstate(all="ignore"):
        for part in ranges(len(out), PART):
            _convert(elements[part], out[part])


def _convert(elements: Array, out: F32) -> None:
    """Convert at most PART elements."""
    values = _VALUES.get(elements.dtype)
    if values is None:
        np.copyto(out, elements, casting="same_kind")
    else:
        # "clip" keeps numpy from buffering the output; no index is out of range.
        np.take(values, elements.view(bits_of(elements.dtype)), out=out, mode="clip")


# -- sums --------------------------------------------------------------------------------------


def accumulate(out: F32, pushes: Sequence[Push]) -> None:
    """Set ``out`` to the weighted sum of ``pushes``, in their order.

    Every element is converted to fp32, and every product and every sum is rounded to fp32; a weight of
    1.0 changes nothing. All pushes are as long as ``out``. Raises ValueError for no pushes, and for what
    to_float32() does not convert.
    """
    if not pushes:
        raise ValueError("a sum of no pushes")
    for elements, _ in pushes:
        _check(elements)
        if len(elements) != len(out):
            raise ValueError(f"a push of {len(elements)} elements in a sum of {len(out)}")
    (first, first_weight), *others = pushes
    with np.errstate(all="ignore"):
        for part in ranges(len(out), PART):
            target = out[part]
            addend = scratch.floats[0, : len(target)]
            total = _weighted(first[part], first_weight, target)
            for elements, weight in others:
                weighted = _weighted(elements[part], weight, addend)
                total = np.add(total, weighted, out=target)
            if total is not target:
                np.copyto(target, total)


def _weighted(elements: Array, weight: float, out: F32) -> F32:
    """Return a product of at most PART elements: ``out``, or ``elements`` itself if it is that already."""
    if elements.dtype != np.float32:
        _convert(elements, out)
        elements = out
    return elements if weight == 1 else np.multiply(elements, np.float32(weight), out=out)


def square_sum(values: F32, blocks: Blocks = ALONE) -> float:
    """Return the sum of squares, added in float64.

    The sum of a block is added in one order, and those of blocks are added without rounding
    (math.fsum). So it does not depend on threads, and ``math.fsum`` of the results for each BLOCK
    elements gives that for all of them.
    """
    return math.fsum(blocks.each(len(values), lambda block: _square_sum(values[block])))


def _square_sum(block: F32) -> float:
    total = 0.0
    with np.errstate(all="ignore"):
        for part in ranges(len(block), PART):
            doubles = scratch.doubles[: part.stop - part.start]
            np.copyto(doubles, block[part])
            np.multiply(doubles, doubles, out=doubles)
            total += float(np.add.reduce(doubles))
    return total


def count_nonfinite(elements: Array) -> int:
    """Return how many elements are NaN, or infinite in fp32. Raises ValueError as to_float32() does."""
    _check(elements)
    finite = 0
    with np.errstate(all="ignore"):
        for part in ranges(len(elements), PART):
            floats = scratch.floats[0, : min(PART, len(elements) - part.start)]
            _convert(elements[part], floats)
            finite += int(np.count_nonzero(np.isfinite(floats, out=scratch.flags[: len(floats)])))
    return len(elements) - finite
