"""fp8 pushes with scales by block are what numpy makes of them."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from harness.training_runs import parameters, reduce, start
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import save_file

from irdmafs.train import Reducer, Worker
from irdmafs.train.arithmetic import SCALE_BLOCK, SUFFIX, BlockScales, accumulate, blocks_of
from irdmafs.train.directory import TrainDirectory

F8 = np.dtype(ml_dtypes.float8_e4m3fn)
SHAPES = {"w": (300, 200), "bias": (517,), "experts": (3, 130, 70)}
Array = NDArray[Any]


def widened(shape: tuple[int, ...], scales: Array) -> Array:
    """Return a scale for each element, by its index."""
    at = [
        np.arange(length) // block
        for length, block in zip(shape, blocks_of(shape, scales.shape), strict=True)
    ]
    return np.asarray(scales[np.ix_(*at)])


def quantized(values: Array) -> tuple[Array, Array]:
    """Quantize as DeepSeek-V3 does: the largest of each block becomes 448."""
    shape = tuple(-(-length // SCALE_BLOCK) for length in values.shape)
    largest = np.zeros(shape, np.float32)
    blocks = np.ix_(*(np.arange(length) // SCALE_BLOCK for length in values.shape))
    np.maximum.at(largest, blocks, np.abs(values))
    scales = np.maximum(largest, np.float32(1e-4)) / np.float32(448)
    return (values / widened(values.shape, scales)).astype(F8), scales


def gradients(seed: int) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    return {
        name: (random.standard_normal(shape) * 10.0 ** random.integers(-4, 4)).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def push_of(gradients: dict[str, Array]) -> dict[str, Array]:
    push: dict[str, Array] = {}
    for name, values in gradients.items():
        push[name], push[name + SUFFIX] = quantized(values)
    return push


def value_of(push: dict[str, Array], name: str, weight: float = 1.0) -> Array:
    scales = np.asarray(push[name + SUFFIX] * np.float64(weight)).astype(np.float32)
    return push[name].astype(np.float32) * widened(SHAPES[name], scales)


@given(st.data())
def test_factors_are_those_of_the_elements_index(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=3)))
    if np.prod(shape) > 1_000_000:
        shape = shape[:2]
    choices = (sorted({length, -(-length // SCALE_BLOCK), 1}) for length in shape)
    counts = tuple(data.draw(st.sampled_from(lengths)) for lengths in choices)
    scales = np.random.default_rng(0).standard_normal(counts).astype(np.float32)
    size = int(np.prod(shape))
    first = data.draw(st.integers(0, size - 1))
    last = data.draw(st.integers(first + 1, size))
    weight = data.draw(st.sampled_from([1.0, 0.3, 7.0]))
    expected = widened(shape, (scales * np.float64(weight)).astype(np.float32)).reshape(-1)
    found = BlockScales(shape, scales).factors(first, last, weight)
    assert found.tolist() == expected[first:last].tolist()


@given(st.sampled_from(["F8_E4M3", "F8_E5M2"]), st.integers(1, 40), st.integers(1, 300), st.data())
def test_sum_with_scales_is_numpys(code: str, rows: int, columns: int, data: st.DataObject) -> None:
    dtype = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}[code]
    random = np.random.default_rng(data.draw(st.integers(0, 1000)))
    pushes, expected = [], np.zeros(rows * columns, np.float32)
    for number in range(data.draw(st.integers(1, 3))):
        values = random.standard_normal((rows, columns)).astype(dtype)
        scales = random.random((-(-rows // SCALE_BLOCK), -(-columns // SCALE_BLOCK)), np.float32)
        factors = BlockScales(values.shape, scales).factors(0, values.size, 1.0)
        pushes.append((values.reshape(-1), factors.__getitem__))
        term = (values.astype(np.float32) * widened(values.shape, scales)).reshape(-1)
        expected = term if number == 0 else expected + term
    out = np.empty(rows * columns, np.float32)
    accumulate(out, pushes)
    assert out.tolist() == expected.tolist()


@pytest.mark.parametrize("shards", [1, 5])
def test_pushes_with_scales_by_block_are_summed(run: Path, tmp_path: Path, shards: int) -> None:
    """Pushes come from a Worker, in one file of another program, and with some parameters only."""
    start(run, {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}, shards=shards)
    one, other = push_of(gradients(1)), push_of(gradients(2))
    del other["bias"], other["bias" + SUFFIX]
    with Reducer(run) as reducer, Worker(run, "a") as a, Worker(run, "b"):
        a.push(one, weight=0.5)
        save_file(other, tmp_path / "push")
        (TrainDirectory(run).push / "b.safetensors").write_bytes((tmp_path / "push").read_bytes())
        reduce(reducer)
    found = parameters(run)
    for name in ("w", "experts"):
        expected = value_of(one, name, 0.5) + value_of(other, name)
        np.testing.assert_array_equal(found[name], expected)
    np.testing.assert_array_equal(found["bias"], value_of(one, "bias", 0.5))
    np.testing.assert_allclose(value_of(one, "w"), gradients(1)["w"], rtol=2**-4, atol=1e-3)


def test_scales_of_an_open_push_may_come_after_their_tensor(run: Path) -> None:
    start(run, {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}, shards=3)
    values = push_of(gradients(3))
    with Reducer(run) as reducer, Worker(run, "a") as worker:
        push = worker.begin_push()
        for name in sorted(values, key=lambda name: name.endswith(SUFFIX)):
            push.put(name, values[name])
        push.finish()
        reduce(reducer)
    np.testing.assert_array_equal(parameters(run)["w"], value_of(values, "w"))


def test_parameter_with_the_name_of_scales_is_a_parameter(run: Path) -> None:
    start(run, {"w": np.zeros((4, 4), np.float32), "w" + SUFFIX: np.zeros((1, 1), np.float32)})
    with Reducer(run) as reducer, Worker(run, "a") as worker:
        worker.push({"w": np.ones((4, 4)), "w" + SUFFIX: np.full((1, 1), 3.0)})
        reduce(reducer)
    assert np.all(parameters(run)["w"] == 1)
    assert np.all(parameters(run)["w" + SUFFIX] == 3)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(
    ("scales", "reason"),
    [
        (np.ones((3, 3), np.float32), "scales of the shape"),
        (np.ones(6, np.float32), "scales of the shape"),
        (np.ones((3, 2), np.int32), "has the type"),
        (np.full((3, 2), np.nan, np.float32), "NaN"),
    ],
    ids=["shape", "axes", "type", "NaN"],
)
def test_misfitting_scales_are_refused(
    place: Path, shards: int, scales: Array, reason: str
) -> None:
    run = start(place / "run", {"w": np.zeros((300, 200), np.float32)}, shards=shards)
    with Worker(run, "a") as worker, pytest.raises(OSError, match=f"{reason}|Invalid argument"):
        worker.push({"w": np.zeros((300, 200), F8), "w" + SUFFIX: scales})
