"""Sums of pushes, and conversions of their elements."""

import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from irdmafs.client._dtypes import Array
from irdmafs.train import arithmetic
from irdmafs.train.arithmetic import (
    BLOCK,
    CODES,
    PART,
    Blocks,
    Push,
    accumulate,
    count_nonfinite,
    ranges,
    square_sum,
    to_float32,
)

# The types of the codes in a package with an implementation of its own.
PEERS: dict[str, Any] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F64": np.float64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}
SMALL = ("F16", "BF16", "F8_E4M3", "F8_E5M2")


def unsigned(array: Array) -> Array:
    return array.view(f"u{array.itemsize}")


def all_codes(code: str) -> Array:
    """Every element of a type of 8 or 16 bits."""
    dtype = np.dtype(PEERS[code])
    return np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}").view(dtype)


def random_elements(code: str, size: int, seed: int) -> Array:
    """Elements about as large as gradients are."""
    return np.random.default_rng(seed).standard_normal(size).astype(PEERS[code])


# -- conversions -------------------------------------------------------------------------------


@pytest.mark.parametrize("code", SMALL)
def test_every_element_of_a_small_type_becomes_its_value(code: str) -> None:
    elements = all_codes(code)
    found = np.empty(len(elements), np.float32)
    to_float32(elements, found)
    expected = elements.astype(np.float32)
    assert np.array_equal(found, expected, equal_nan=True)
    assert np.array_equal(np.signbit(found), np.signbit(expected))


def test_wide_types_become_the_nearest_float32() -> None:
    values = np.array([1 + 2**-30, 1e300, -1e-300, np.nan, 2**24 + 1])
    found = np.empty(len(values), np.float32)
    to_float32(values, found)
    assert np.array_equal(
        found, np.array([1, np.inf, -0.0, np.nan, 2**24], np.float32), equal_nan=True
    )


def test_what_cannot_be_computed_is_refused() -> None:
    out = np.empty(3, np.float32)
    with pytest.raises(ValueError, match="no arithmetic with elements of int64, only of F32"):
        to_float32(np.zeros(3, np.int64), out)
    with pytest.raises(ValueError, match="not in 2 dimensions"):
        count_nonfinite(np.zeros((3, 3), np.float32))
    with pytest.raises(ValueError, match="no pushes"):
        accumulate(out, [])
    with pytest.raises(ValueError, match="a push of 4 elements in a sum of 3"):
        accumulate(out, [(np.zeros(4, np.float32), 1.0)])
    with pytest.raises(ValueError, match="0 threads"):
        Blocks(0)


# -- sums --------------------------------------------------------------------------------------


def expected_sum(pushes: list[Push]) -> arithmetic.F32:
    """The definition: one element after the other in fp32, without blocks."""
    total: arithmetic.F32 | None = None
    for elements, weight in pushes:
        assert not callable(weight)
        values = elements.astype(np.float32)
        product = values if weight == 1 else values * np.float32(weight)
        total = product if total is None else total + product
    assert total is not None
    return total


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from(CODES), st.sampled_from([1.0, 0.0, 0.1, -3.0, 1 / 3])),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from([0, 1, 63, PART - 1, PART, PART + 1, 2 * PART + 17]),
    st.integers(0, 1000),
)
def test_a_sum_is_in_order_and_rounded_to_float32(
    terms: list[tuple[str, float]], size: int, seed: int
) -> None:
    pushes: list[Push] = []
    for number, (code, weight) in enumerate(terms):
        elements = random_elements(code, size, seed + number)
        elements.flags.writeable = False
        pushes.append((elements, weight))
    found = np.full(size, np.nan, np.float32)
    accumulate(found, pushes)
    assert np.array_equal(unsigned(found), unsigned(expected_sum(pushes)))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 3 * PART), max_size=6), st.integers(0, 1000))
def test_cutting_the_arrays_changes_no_bit_of_a_sum(cuts: list[int], seed: int) -> None:
    size = 3 * PART
    pushes = [(random_elements(code, size, seed), 0.3) for code in ("F32", "BF16", "F16")]
    whole, cut = np.empty(size, np.float32), np.empty(size, np.float32)
    accumulate(whole, pushes)
    edges = sorted({0, size, *cuts})
    for first, end in itertools.pairwise(edges):
        part = slice(first, end)
        accumulate(cut[part], [(elements[part], weight) for elements, weight in pushes])
    assert np.array_equal(unsigned(cut), unsigned(whole))


def test_infinities_of_pushes_come_out_without_a_warning() -> None:
    out = np.empty(3, np.float32)
    large = np.array([np.inf, 3e38, 1], np.float32)
    accumulate(out, [(large, 1.0), (-large, 2.0), (large, 1.0)])
    assert np.isnan(out[0]) and out[1] == -np.inf and out[2] == 0


def test_square_sum_is_that_of_float64_and_the_same_for_all_threads() -> None:
    values = random_elements("F32", 3 * BLOCK + 1001, 5)
    alone = square_sum(values)
    assert alone == pytest.approx(math.fsum(values.astype(np.float64) ** 2), rel=1e-14)
    assert alone == math.fsum(square_sum(values[part]) for part in ranges(len(values), BLOCK))
    for threads in (2, 3):
        with Blocks(threads) as blocks:
            assert square_sum(values, blocks) == alone
    assert square_sum(values[:0]) == 0
    values[7] = np.inf
    assert square_sum(values) == math.inf


@pytest.mark.parametrize("code", CODES)
def test_nonfinite_elements_are_counted(code: str) -> None:
    elements = random_elements(code, 2 * PART + 3, 9)
    assert count_nonfinite(elements) == 0
    elements[[0, PART - 1, PART]] = np.nan
    elements[[1, -1]] = np.inf  # NaN in F8_E4M3
    assert count_nonfinite(elements) == 5


# -- threads -----------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("size", [0, 1, BLOCK, 5 * BLOCK + 1])
def test_each_element_is_worked_on_once(threads: int, size: int) -> None:
    seen = np.zeros(size, np.uint8)

    def work(part: slice) -> int:
        seen[part] += 1
        return int(part.start)

    with Blocks(threads) as blocks:
        assert blocks.each(size, work) == list(range(0, size, BLOCK))
    assert (seen == 1).all()


def test_an_error_comes_when_no_thread_is_at_work_any_more() -> None:
    at_work = set()

    def work(part: slice) -> None:
        at_work.add(part.start)
        try:
            if part.start == BLOCK:
                raise ValueError("not this one")
        finally:
            at_work.remove(part.start)

    with Blocks(2) as blocks, pytest.raises(ValueError, match="not this one"):
        blocks.each(50 * BLOCK, work)
    assert not at_work
