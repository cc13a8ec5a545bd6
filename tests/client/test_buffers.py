"""Buffers that files of any directory are read into."""

import gc
import os
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from harness.example_programs import needs
from harness.late_imports import torch

from irdmafs import client

MIB = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[client.Store]:
    with client.open(tmp_path) as made:
        yield made


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return str(request.param)


@pytest.fixture
def buffer() -> Iterator[client.Buffer]:
    with client.Buffer(MIB) as made:
        yield made


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


ARRAYS = {
    "matrix": np.arange(12, dtype=np.float32).reshape(3, 4),
    "fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "big": np.arange(5, dtype=">i4"),
    "scalar": np.array(7),
    "empty": np.zeros((0, 3), np.int16),
    "records": np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
}


@pytest.mark.parametrize("name", sorted(ARRAYS))
def test_an_array_is_shown_as_mapped(store: client.Store, buffer: client.Buffer, name: str) -> None:
    store[name] = ARRAYS[name]
    found, mapped = store.read_into(name, buffer), store[name]
    assert np.array_equal(found, ARRAYS[name])
    assert (found.dtype, found.flags.f_contiguous) == (mapped.dtype, mapped.flags.f_contiguous)
    assert not found.size or np.shares_memory(found, buffer.memory)
    assert (buffer.filled_by, buffer.version) == ("copy", None)
    assert buffer.filled == os.stat(f"{store.path}/{name}.npy").st_size


def test_a_state_dict_is_views_of_the_buffer(store: client.Store, buffer: client.Buffer) -> None:
    state = {f"tensor{i}": np.full((i, 7), i, np.int64) for i in range(9)}
    store.publish_state_dict(state)
    found = store.state_dict("model.safetensors", into=buffer)
    assert found.keys() == state.keys()
    for name, array in state.items():
        assert np.array_equal(found[name], array)
    one = store.read_into("model.safetensors/tensor3", buffer)
    assert np.shares_memory(one, found["tensor3"])
    with pytest.raises(KeyError):
        store.read_into("model.safetensors/other", buffer)
    with pytest.raises(KeyError):
        store.state_dict("other.safetensors", into=buffer)
    for name, why in ("", "name it"), ("model", "does not name a file that ends in .safetensors"):
        with pytest.raises(ValueError, match=why):
            store.state_dict(name, into=buffer)
    with pytest.raises(ValueError, match="device or into"):
        store.state_dict("model.safetensors", device="cpu", into=buffer)


@pytest.mark.parametrize(("size", "error"), [(0, KeyError), (200, client.FormatError)])
def test_damaged_files_are_told_from_those_that_were_never_published(
    store: client.Store, buffer: client.Buffer, size: int, error: type[Exception]
) -> None:
    store["array"] = np.arange(1000)
    store.publish_state_dict({"tensor": np.arange(1000)})
    for file, name in ("array.npy", "array"), ("model.safetensors", "model.safetensors/tensor"):
        os.truncate(f"{store.path}/{file}", size)
        with pytest.raises(error):
            store.read_into(name, buffer)


def test_a_shorter_file_shows_no_former_one(store: client.Store, buffer: client.Buffer) -> None:
    store.publish_state_dict({"tensor": np.arange(1000)})
    store.state_dict("model.safetensors", into=buffer)
    Path(f"{store.path}/model.safetensors").write_bytes(b"\x40")
    with pytest.raises(client.FormatError, match="only 1 bytes"):
        store.state_dict("model.safetensors", into=buffer)


def test_a_file_that_does_not_fit_is_refused_and_nothing_is_said_to_be_held(
    store: client.Store, buffer: client.Buffer
) -> None:
    store["small"] = np.zeros(10)
    store["large"] = np.zeros(MIB, np.uint8)
    store.read_into("small", buffer)
    with pytest.raises(ValueError, match=f"too many for a buffer of {MIB}"):
        store.read_into("large", buffer)
    assert (buffer.filled, buffer.version, buffer.filled_by) == (0, None, "")


def test_arrays_outlive_a_closed_buffer(store: client.Store) -> None:
    store["array"] = np.arange(100)
    before = descriptors()
    buffer = client.Buffer(MIB)
    array = store.read_into("array", buffer)
    buffer.close()
    buffer.close()
    with pytest.raises(ValueError, match="closed"):
        store.read_into("array", buffer)
    del buffer
    assert np.array_equal(array, np.arange(100))
    del array
    assert descriptors() == before


def test_a_buffer_that_is_forgotten_is_closed() -> None:
    before = descriptors()
    for _ in range(10):
        client.Buffer(MIB)
    assert descriptors() == before


@pytest.mark.parametrize("size", [0, -1])
def test_a_buffer_of_nothing_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="holds nothing"):
        client.Buffer(size)


def test_a_buffer_cannot_be_sent_to_another_process(buffer: client.Buffer) -> None:
    with pytest.raises(TypeError, match="make one where it is to be used"):
        pickle.dumps(buffer)


def test_memory_that_cannot_be_had_leaves_nothing_behind() -> None:
    before = descriptors()
    with pytest.raises(MemoryError, match="are available"):
        client.Buffer(1 << 60)
    assert descriptors() == before


def test_threads_fill_a_buffer_one_after_the_other(store: client.Store) -> None:
    for number in range(4):
        store[f"array{number}"] = np.full(MIB, number, np.uint8)
    with client.Buffer(2 * MIB) as buffer:
        with ThreadPoolExecutor(32) as threads:
            list(threads.map(buffer.fill, [f"{store.path}/array{i % 4}.npy" for i in range(32)]))
        assert len(set(buffer.memory[128 : 128 + MIB].tolist())) == 1


@needs("torch")
def test_a_device_shows_tensors(store: client.Store, device: str) -> None:
    state = {name: array for name, array in ARRAYS.items() if name != "records"}
    weights = {"half": torch.arange(9).to(torch.bfloat16), "w": torch.ones(2, 3)}
    store.publish_state_dict(weights)
    with client.Buffer(MIB, device=device) as buffer:
        for name, array in state.items():
            store[name] = array
            tensor = store.read_into(name, buffer)
            assert tensor.device.type == device
            native = array.astype(array.dtype.newbyteorder("="))
            assert torch.equal(tensor.cpu(), torch.from_numpy(native))
            assert tensor.stride() == torch.from_numpy(native).stride() or not array.size
        found = store.state_dict("model.safetensors", into=buffer)
        for name, expected in weights.items():
            assert torch.equal(found[name].cpu(), expected)
        assert found["w"].untyped_storage().data_ptr() == buffer.memory.untyped_storage().data_ptr()
        store["records"] = ARRAYS["records"]
        with pytest.raises(TypeError, match="no type"):
            store.read_into("records", buffer)


@needs("torch")
def test_a_tensor_that_lies_at_an_odd_place_is_copied(store: client.Store) -> None:
    header = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
    header += b'"b":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}}'
    data = b"\x05" + np.array([1.5, -2], np.float32).tobytes()
    Path(f"{store.path}/odd.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + data
    )
    with client.Buffer(MIB, device="cpu") as buffer:
        found = store.state_dict("odd.safetensors", into=buffer)
        assert found["b"].tolist() == [1.5, -2] and found["a"].tolist() == [5]


@needs("torch")
def test_a_device_that_is_not_there_leaves_nothing_behind() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    before = descriptors()
    with pytest.raises((RuntimeError, AssertionError)):
        client.Buffer(MIB, device="cuda")
    assert descriptors() == before
