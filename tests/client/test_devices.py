"""Arrays of a store as torch tensors on a device."""

import itertools
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from harness.example_programs import needs
from harness.late_imports import torch
from test_buffers import device, store

from irdmafs import client
from irdmafs.client import _device, _dtypes

pytestmark = needs("torch")

__all__ = ["device", "store"]

MIB = 1 << 20
DTYPES = (
    "float32 float64 float16 bfloat16 int8 uint8 int16 int32 int64 uint16 uint32 bool complex64"
)
DTYPES += " float8_e4m3fn"
needs_cuda = pytest.mark.parametrize("device", ["cuda"], indirect=True)


def same(tensor: Any, expected: Any) -> bool:
    return tensor.dtype == expected.dtype and bool(torch.equal(tensor.cpu(), expected))


@pytest.mark.parametrize("dtype", DTYPES.split())
def test_a_tensor_comes_back_as_published(store: client.Store, device: str, dtype: str) -> None:
    shapes: tuple[tuple[int, ...], ...] = ((), (0,), (7,), (3, 5))
    for shape, kind in itertools.product(shapes, ("array", "file.safetensors/tensor")):
        expected = torch.arange(15)[: int(np.prod(shape))].reshape(shape).to(getattr(torch, dtype))
        if kind == "array":
            store.publish(kind, expected)
        else:
            store.publish_state_dict({"tensor": expected}, "file.safetensors")
        found = store.to_device(kind, device)
        assert found.device.type == device
        assert found.dtype == expected.dtype and found.shape == expected.shape
        assert bytes(found.cpu().flatten().view(torch.uint8)) == bytes(
            expected.flatten().view(torch.uint8)
        )


def test_a_state_dict_of_small_and_large_tensors_is_whole(store: client.Store, device: str) -> None:
    expected = {f"layer{i}": torch.randn(i % 13, 17) for i in range(200)}
    expected |= {f"large{i}": torch.randn(3 * MIB // 4) for i in range(3)}
    expected["half"] = torch.randn(33).to(torch.bfloat16)
    store.publish_state_dict(expected, "model.safetensors")
    found = store.state_dict("model.safetensors", device=device)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.device.type == device and same(tensor, expected[name]), name


def test_arrays_of_a_directory_come_by_their_names(store: client.Store, device: str) -> None:
    store.publish("model/bias", np.arange(4, dtype=np.float32))
    store.publish_state_dict({"weight": torch.ones(2, 3)}, "model/part.safetensors")
    found = store.state_dict("model", device=device)
    assert found.keys() == {"bias", "part.safetensors/weight"}
    assert same(found["bias"], torch.arange(4, dtype=torch.float32))


def test_order_and_byte_order_of_the_file_do_not_show(store: client.Store, device: str) -> None:
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    store["fortran"] = np.asfortranarray(matrix)
    store["big"] = matrix.astype(">f4")
    for name in ("fortran", "big"):
        assert same(store.to_device(name, device), torch.from_numpy(matrix))


def test_tensors_own_their_memory(store: client.Store, device: str) -> None:
    store.publish_state_dict({"a": torch.zeros(4), "b": torch.ones(4)}, "file.safetensors")
    found = store.state_dict("file.safetensors", device=device)
    found["a"] += 5
    assert same(found["b"], torch.ones(4))
    assert not store["file.safetensors/a"].any()


def test_all_tensors_are_of_the_version_that_was_current_when_it_began(
    store: client.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def state(version: int) -> dict[str, Any]:
        return {f"tensor{i}": torch.full((MIB,), float(version)) for i in range(4)}

    store.publish_state_dict(state(1), "model.safetensors")
    original = _device._bytes_at

    def replaced_first(*arguments: Any) -> Any:
        store.publish_state_dict(state(2), "model.safetensors")
        return original(*arguments)

    monkeypatch.setattr(_device, "_bytes_at", replaced_first)
    found = store.state_dict("model.safetensors", device="cpu")
    assert all(same(tensor, torch.full((MIB,), 1.0)) for tensor in found.values())


def test_what_misses_is_a_key_error_and_an_unknown_type_a_type_error(store: client.Store) -> None:
    store["dates"] = np.zeros(3, "datetime64[s]")
    with pytest.raises(KeyError):
        store.to_device("nothing", "cpu")
    with pytest.raises(TypeError, match="dates"):
        store.to_device("dates", "cpu")


def test_small_neighbours_are_copied_at_once_and_keep_their_alignment() -> None:
    def item(address: int, size: int) -> _device._Item:
        return _device._Item("", address, size, _dtypes.Layout(np.dtype("f4"), (size // 4,)))

    small = [item(4104 + 100 * i, 100) for i in range(10)]
    large, crooked = item(4104 + 1000, 2 * MIB), item((1 << 30) + 2, 8)
    far = item(1 << 31, 100)
    runs = list(_device._runs([large, far, crooked, *small]))
    assert [[len(run.items), run.address] for run in runs if len(run.items) > 1] == [[10, 4096]]
    assert sorted(len(run.items) for run in runs) == [1, 1, 1, 10]
    for run in runs:
        for found in run.items:
            assert run.address <= found.address
            assert found.address + found.size <= run.address + run.size
            assert (found.address - run.address) % 4 == 0


@pytest.mark.parametrize("size", [0, 1, 8 * MIB, 8 * MIB + 1, 33 * MIB])
def test_pieces_cover_what_is_copied_once(size: int) -> None:
    copies = [(4096, torch.empty(5)), (1 << 40, torch.empty(size, dtype=torch.uint8))]
    pieces = list(_device.pieces(copies, 8 * MIB))
    assert all(0 < len(piece) <= 8 * MIB for _, piece in pieces)
    assert sum(len(piece) for _, piece in pieces) == 5 + size
    for address, piece in pieces[1:]:
        assert piece.data_ptr() - copies[1][1].data_ptr() == address - (1 << 40)


@pytest.mark.usefixtures("device")
@needs_cuda
def test_large_copies_of_mapped_files_reach_the_device_also_from_several_threads(
    store: client.Store, caplog: pytest.LogCaptureFixture
) -> None:
    expected = {f"large{i}": torch.randn(16 * MIB + 7 * i) for i in range(3)}
    expected |= {f"small{i}": torch.randn(i) for i in range(100)}
    store.publish_state_dict(expected, "model.safetensors")

    def load(_: int) -> bool:
        found = store.state_dict("model.safetensors", device="cuda")
        return all(same(found[name], tensor) for name, tensor in expected.items())

    with ThreadPoolExecutor(3) as threads:
        assert all(threads.map(load, range(6)))
    assert "without pinned memory" not in caplog.text


@pytest.mark.usefixtures("device")
@needs_cuda
def test_large_copies_go_on_without_pinned_memory_and_the_reason_is_logged(
    store: client.Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:

    def refuse(_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(_device, "_pinned", refuse)
    expected = torch.randn(16 * MIB)
    store.publish("large", expected)
    with caplog.at_level(logging.WARNING):
        assert same(store.to_device("large", "cuda"), expected)
    assert "copied without pinned memory: out of memory" in caplog.text


@pytest.mark.usefixtures("device")
@needs_cuda
def test_a_copy_waits_for_what_the_memory_was_used_for(store: client.Store) -> None:
    expected = torch.randn(16 * MIB)
    store.publish("large", expected)
    for _ in range(5):
        # Its memory is free at once, and comes back while the device still writes it.
        torch.empty(16 * MIB, device="cuda").normal_().exp_().mul_(2.0)
        assert same(store.to_device("large", "cuda"), expected)
