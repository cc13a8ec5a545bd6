"""Sums of pushes: element types to fp32 and back, in blocks that stay in a processor's cache.

An accumulator is a one-dimensional fp32 array. A push is an array as it lies in a file, often a
read-only map: its numpy type is that of its safetensors code, and for BF16 and the 8-bit floats,
which numpy lacks, an unsigned integer of the same size that holds the bits.

The order of operations on an element is fixed, and each operation rounds to fp32. So neither blocks
nor threads nor the host change a bit of a result.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import NamedTuple, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from irdmafs.client._dtypes import Array, dtype_of_code

F32: TypeAlias = NDArray[np.float32]
# The factor of the elements of a push in the sum: one number, or a function that returns one for
# each element of a part.
Weight: TypeAlias = float | Callable[[slice], F32]
# The elements of a push, their safetensors code, and their weight.
Push: TypeAlias = tuple[Array, str, Weight]
F32_MAX = float(np.finfo(np.float32).max)

T = TypeVar("T")

# Elements that a thread works on before it takes the next ones.
BLOCK = 256 << 10
# Elements that pass through several operations of numpy while they are in the cache: 256 KiB of each fp32
# array. Measured with 1 MiB of L2 cache, two threads, others at work: the sum of four pushes moves 0.75 of
# the bytes per second that a + b does with 32 Ki elements, 0.85 with 64 Ki or 128 Ki, 0.81 with 256 Ki.
PART = 64 << 10


class _Format(NamedTuple):
    """A float smaller than fp32, but for BF16. ``largest``: the code of what is too large, an infinity
    or, in F8_E4M3, NaN."""

    mantissa_bits: int
    bias: int
    largest: int
    nan: int


_FORMATS = {
    "F16": _Format(10, 15, 0x7C00, 0x7E00),
    "F8_E4M3": _Format(3, 7, 0x7F, 0x7F),
    "F8_E5M2": _Format(2, 15, 0x7C, 0x7E),
}
# An element is infinite or NaN if all these bits of it are set.
_NONFINITE_BITS = {"F16": 0x7C00, "BF16": 0x7F80, "F8_E4M3": 0x7F, "F8_E5M2": 0x7C}
CODES = ("F32", "F16", "BF16", "F64", "F8_E4M3", "F8_E5M2")


class _Scratch(threading.local):
    """Arrays of PART elements, which every thread has of its own and keeps."""

    def __init__(self) -> None:
        self.floats = np.empty((2, PART), np.float32)
        self.doubles = np.empty(PART, np.float64)
        self.flags = np.empty(PART, np.bool_)


scratch = _Scratch()


def ranges(size: int, step: int) -> Iterator[slice]:
    """Yield the ranges of ``step`` elements that ``size`` elements have; the last one may be shorter."""
    for first in range(0, size, step):
        yield slice(first, min(first + step, size))


class Blocks:
    """Threads that work on blocks of arrays, which numpy and torch allow to run at the same time."""

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"{threads} threads can do nothing")
        self._pool = ThreadPoolExecutor(threads, "block") if threads > 1 else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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


def _check(array: Array, code: str) -> None:
    if code not in CODES:
        raise ValueError(f"no arithmetic with elements of {code!r}, only of {', '.join(CODES)}")
    expected, _ = dtype_of_code(code)
    if array.dtype != expected or array.ndim != 1:
        shown = f"{array.ndim}-dimensional {array.dtype}"
        raise ValueError(f"{code} elements lie in a 1-dimensional {expected} array, not in {shown}")


# -- to fp32 -----------------------------------------------------------------------------------


def to_float32(bits: Array, dtype: str, out: F32, scale: float = 1.0) -> None:
    """Convert the elements ``bits`` of the safetensors type ``dtype`` to fp32, times ``scale``.

    ``bits`` and ``out`` have the same length. All but F64, which is rounded to nearest even, are exact
    before they are scaled. Raises ValueError for other types.
    """
    _check(bits, dtype)
    with np.errstate(all="ignore"):
        for part in ranges(len(out), PART):
            _convert(bits[part], dtype, out[part])
            if scale != 1:
                np.multiply(out[part], np.float32(scale), out=out[part])


def _convert(bits: Array, dtype: str, out: F32) -> None:
    """Convert at most PART elements."""
    if dtype == "BF16":
        codes = out.view(np.uint32)
        np.copyto(codes, bits)
        np.left_shift(codes, np.uint32(16), out=codes)
    elif dtype == "F16":
        _convert_half(bits.view(np.uint16), out)
    elif dtype in _TABLES:
        # "clip" keeps numpy from buffering the output; no index is out of range.
        np.take(_TABLES[dtype], bits, out=out, mode="clip")
    else:
        np.copyto(out, bits, casting="same_kind")


def _convert_half(bits: NDArray[np.uint16], out: F32) -> None:
    # numpy's own conversion is three times slower. The shift to the right copies the sign into the upper
    # exponent bits, which the mask clears; the product corrects the exponent's bias, and is exact.
    if _nonfinite(bits, "F16"):
        np.copyto(out, bits.view(np.float16))
        return
    codes = out.view(np.int32)
    np.copyto(codes, bits)
    np.left_shift(codes, np.int32(16), out=codes)
    np.right_shift(codes, np.int32(3), out=codes)
    np.bitwise_and(out.view(np.uint32), np.uint32(0x8FFFE000), out=out.view(np.uint32))
    np.multiply(out, np.float32(2.0**112), out=out)


def _table(code: str) -> F32:
    """Return the values of all 256 codes of an 8-bit float."""
    mantissa_bits, bias, largest, _ = _FORMATS[code]
    values = []
    for magnitude in range(128):
        exponent, mantissa = divmod(magnitude, 1 << mantissa_bits)
        fraction = mantissa / (1 << mantissa_bits)
        if magnitude >= largest:
            is_infinity = code == "F8_E5M2" and magnitude == largest
            values.append(math.inf if is_infinity else math.nan)
        elif exponent == 0:
            values.append(math.ldexp(fraction, 1 - bias))
        else:
            values.append(math.ldexp(1 + fraction, exponent - bias))
    positive = np.array(values, np.float32)
    return np.concatenate((positive, -positive))


_TABLES = {code: _table(code) for code in ("F8_E4M3", "F8_E5M2")}


# -- from fp32 ---------------------------------------------------------------------------------


def from_float32(values: F32, dtype: str, out: Array) -> None:
    """Convert ``values`` to elements of the safetensors type ``dtype`` in ``out``, which has the same
    length.

    Rounds to nearest even. What is too large becomes an infinity (NaN in F8_E4M3, which has none), and
    NaN stays NaN. Raises ValueError for other types.
    """
    _check(out, dtype)
    with np.errstate(all="ignore"):
        for part in ranges(len(values), PART):
            if dtype == "BF16":
                _round_to_bfloat16(values[part], out[part])
            elif dtype in _FORMATS:
                unsigned = out[part].view(f"u{out.itemsize}")
                _round_to_small(values[part], _FORMATS[dtype], unsigned)
            else:
                np.copyto(out[part], values[part])


def _round_to_bfloat16(values: F32, out: NDArray[np.uint16]) -> None:
    codes, rounded = values.view(np.uint32), scratch.floats[0, : len(values)].view(np.uint32)
    _round_mantissa(codes, 16, rounded)
    np.copyto(out, rounded, casting="unsafe")
    is_nan = np.isnan(values, out=scratch.flags[: len(values)])
    if is_nan.any():
        # As processors do it: the sign and the upper bits stay, and the NaN becomes quiet.
        out[is_nan] = (codes[is_nan] >> 16) | 0x40


def _round_mantissa(codes: NDArray[np.uint32], dropped: int, out: NDArray[np.uint32]) -> None:
    """Drop the lowest bits of fp32 codes, rounding to nearest even; a carry goes into the exponent."""
    np.right_shift(codes, np.uint32(dropped), out=out)
    np.bitwise_and(out, np.uint32(1), out=out)
    np.add(out, codes, out=out)
    np.add(out, np.uint32((1 << (dropped - 1)) - 1), out=out)
    np.right_shift(out, np.uint32(dropped), out=out)


def _round_to_small(values: F32, form: _Format, out: Array) -> None:
    magnitudes, rounded = scratch.floats[:, : len(values)]
    np.abs(values, out=magnitudes)
    codes, found = magnitudes.view(np.uint32), rounded.view(np.uint32)
    _round_mantissa(codes, 23 - form.mantissa_bits, found)
    with_bias = np.uint32((127 - form.bias) << form.mantissa_bits)
    # A magnitude below the bias is subnormal in the small type, and comes out of the subtraction wrong.
    np.subtract(found, with_bias, out=found)
    is_special = np.less(
        magnitudes, np.float32(2.0 ** (1 - form.bias)), out=scratch.flags[: len(values)]
    )
    if is_special.any():
        # The sum with a number whose last bit is worth the smallest subnormal rounds to a multiple of it.
        anchor = np.float32(2.0 ** (24 - form.bias - form.mantissa_bits))
        subnormal = (magnitudes[is_special] + anchor).view(np.uint32) - anchor.view(np.uint32)
        found[is_special] = subnormal
    np.minimum(found, np.uint32(form.largest), out=found)
    np.isnan(magnitudes, out=is_special)
    if is_special.any():
        found[is_special] = form.nan
    sign_bit = 8 * out.itemsize - 1
    signs = np.right_shift(values.view(np.uint32), np.uint32(31), out=codes)
    np.left_shift(signs, np.uint32(sign_bit), out=signs)
    np.bitwise_or(found, signs, out=found)
    np.copyto(out, found, casting="unsafe")


# -- sums --------------------------------------------------------------------------------------


def accumulate(out: F32, pushes: Sequence[Push]) -> None:
    """Set ``out`` to the weighted sum of ``pushes``, in their order.

    Every element is converted to fp32, and every product and every sum is rounded to fp32; a weight of
    1.0 changes nothing. All pushes are as long as ``out``. Raises ValueError for no pushes, and for what
    to_float32() does not convert.
    """
    if not pushes:
        raise ValueError("a sum of no pushes")
    for bits, dtype, _ in pushes:
        _check(bits, dtype)
        if len(bits) != len(out):
            raise ValueError(f"a push of {len(bits)} elements in a sum of {len(out)}")
    (first, first_dtype, first_weight), *others = pushes
    with np.errstate(all="ignore"):
        for part in ranges(len(out), PART):
            target = out[part]
            addend = scratch.floats[0, : len(target)]
            total = _weighted(first[part], first_dtype, _of(first_weight, part), target)
            for bits, dtype, weight in others:
                weighted = _weighted(bits[part], dtype, _of(weight, part), addend)
                total = np.add(total, weighted, out=target)
            if total is not target:
                np.copyto(target, total)


def _of(weight: Weight, part: slice) -> F32 | np.float32 | None:
    """Return the weight of a part; None: 1."""
    if callable(weight):
        return weight(part)
    return None if weight == 1 else np.float32(weight)


def _weighted(bits: Array, dtype: str, weight: F32 | np.float32 | None, out: F32) -> F32:
    """Return a product of at most PART elements: ``out``, or ``bits`` itself if it is that already."""
    if dtype == "F32":
        return bits if weight is None else np.multiply(bits, weight, out=out)
    _convert(bits, dtype, out)
    return out if weight is None else np.multiply(out, weight, out=out)


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


def count_nonfinite(bits: Array, dtype: str) -> int:
    """Return how many elements are NaN, or infinite in fp32. Raises ValueError for what to_float32() does
    not convert."""
    _check(bits, dtype)
    with np.errstate(all="ignore"):
        return sum(_nonfinite(bits[part], dtype) for part in ranges(len(bits), PART))


def _nonfinite(bits: Array, dtype: str) -> int:
    """Count in at most PART elements."""
    flags = scratch.flags[: len(bits)]
    if dtype not in _NONFINITE_BITS:
        floats = scratch.floats[0, : len(bits)]
        np.copyto(floats, bits, casting="same_kind")
        return len(bits) - int(np.count_nonzero(np.isfinite(floats, out=flags)))
    unsigned = np.dtype(f"u{bits.itemsize}")
    mask = unsigned.type(_NONFINITE_BITS[dtype])
    masked = scratch.doubles.view(unsigned)[: len(bits)]
    np.bitwise_and(bits.view(unsigned), mask, out=masked)
    return int(np.count_nonzero(np.equal(masked, mask, out=flags)))
