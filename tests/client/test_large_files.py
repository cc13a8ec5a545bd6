"""Large versions, which several threads store through mappings of the file; here a few MiB are large."""

import ctypes
import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from harness.errors import fails_with
from harness.example_programs import needs
from harness.late_imports import torch
from harness.mountpoint import Mount
from test_buffers import device

from irdmafs import client
from irdmafs.client import _storing

__all__ = ["device"]

SESSIONS = ("kernel", "cluster")
MIB = 1 << 20


@pytest.fixture(autouse=True)
def mapped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have small files stored so, and return the sizes of what was stored through a mapping."""
    sizes: list[int] = []
    made = _storing._mapped

    def note(fd: int, size: int) -> int | None:
        address = made(fd, size)
        sizes.extend([size] * (address is not None))
        return address

    limits = {"BYTES_MIN": MIB, "_PIECE_BYTES": 99_999, "_PROCESSORS_MIN": 1, "_mapped": note}
    for name, value in limits.items():
        monkeypatch.setattr(_storing, name, value)
    return sizes


def arrays() -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.default_rng(0)
    sizes = (5 * MIB // 4, 1, 0, 333_333, MIB, 7)
    made = {f"f{size}": random.random(size, np.float32) for size in sizes}
    made["bytes"] = np.frombuffer(random.bytes(1_234_567), np.uint8)
    return made | {"turned": random.random((700, 900)).T}


@pytest.mark.parametrize("alone", [False, True])
def test_every_byte_is_stored_once(
    folder: Path, mapped: list[int], monkeypatch: pytest.MonkeyPatch, *, alone: bool
) -> None:
    """`alone`: no thread can be started, as while the program ends."""
    if alone:
        monkeypatch.setattr(ThreadPoolExecutor, "submit", Mock(side_effect=RuntimeError))
    store = client.open(folder)
    states = [{name: array + step for name, array in arrays().items()} for step in range(2)]
    found = []
    for state in states:
        store.publish_state_dict(state)
        found.append(store.state_dict("model.safetensors"))
    for kept, state in zip(found, states, strict=True):
        assert kept.keys() == state.keys()
        assert all(np.array_equal(kept[name], array) for name, array in state.items())
    assert store.version("model.safetensors") == len(mapped) == 2
    large = np.arange(3 * MIB)
    store.publish("large", large)
    assert np.array_equal(store["large"], large) and mapped[-1] > large.nbytes
    copy = folder / "copy.npy"
    store.publish_file(folder / "large.npy", copy.name)
    assert copy.read_bytes() == (folder / "large.npy").read_bytes()
    assert mapped[-1] == copy.stat().st_size


@pytest.mark.parametrize("refused", ["fallocate", "map_file", "process_vm_writev", "open"])
def test_where_it_cannot_be_done_the_file_is_written(
    folder: Path, mapped: list[int], monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    def refuse(*given: Any) -> int:
        if refused == "open" and not given[1] & os.O_RDWR:
            return real_open(*given)
        if refused in ("map_file", "open"):
            raise OSError(errno.ENODEV if refused == "map_file" else errno.EACCES, "not here")
        ctypes.set_errno(errno.EOPNOTSUPP if refused == "fallocate" else errno.EPERM)
        return -1

    store, real_open = client.open(folder), os.open
    place = {"map_file": _storing, "open": os}.get(refused, _storing._libc)
    monkeypatch.setattr(place, refused, refuse)
    store.publish_state_dict(arrays())
    found = store.state_dict("model.safetensors")
    assert all(np.array_equal(found[name], array) for name, array in arrays().items())
    assert not mapped


def test_a_file_that_is_truncated_meanwhile_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = client.open(folder)
    store["w"] = np.zeros(MIB)
    copy = _storing._copy

    def cut(source: int, target: int, size: int) -> None:
        if size > 1:
            os.truncate(folder / "w.npy", 0)
        copy(source, target, size)

    monkeypatch.setattr(_storing, "_copy", cut)
    with pytest.raises(OSError, match="truncated while") as caught:
        store["w"] = np.ones(MIB)
    assert caught.value.errno == errno.EIO and str(caught.value.filename).endswith("w.npy")
    assert not store["w"].any() and store.version("w") == 1


def test_a_full_store_keeps_the_version_before(new_mount: Callable[..., Mount]) -> None:
    mount = new_mount(store_size="24M")
    store = client.open(mount.path)
    store["w"] = np.zeros(MIB)
    with fails_with(errno.ENOSPC):
        store["w"] = np.ones(4 * MIB)
    assert not store["w"].any() and store.version("w") == 1
    store["w"] = np.ones(MIB)
    assert store["w"].all() and os.listdir(mount.path) == ["w.npy"]


def test_only_the_one_writer_of_what_nobody_has_seen_says_that_it_is_unmapped(file: Path) -> None:
    first = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.write(first, b"first")
    os.setxattr(first, "user.irdmafs.unmapped", b"1")
    second = os.open(file, os.O_RDWR)
    for fd in (first, second):
        with fails_with(errno.EBUSY):
            os.setxattr(fd, "user.irdmafs.unmapped", b"1")
    os.close(second)
    os.close(first)
    assert file.read_bytes() == b"first"


@needs("torch")
@pytest.mark.parametrize("on_mount", [True, False])
def test_tensors_are_published_from_the_device(
    folder: Path, tmp_path: Path, mapped: list[int], device: str, on_mount: bool
) -> None:
    made = torch.arange(3 * MIB, device=device)
    state = {
        "large": made.to(torch.float32),
        "half": made.to(torch.bfloat16)[5:],
        "turned": made.view(3, MIB).T,
        "part": made[:999:7],
        "one": torch.tensor(3.0, device=device),
        "none": torch.empty((0, 3), device=device),
        "flags": made % 3 == 0,
        "conjugate": torch.tensor([1 + 2j, 3j], dtype=torch.complex64, device=device).conj(),
        "gradient": torch.ones(5, device=device, requires_grad=True),
        "host": torch.ones(7),
    }
    store = client.open(folder if on_mount else tmp_path)
    store.publish_state_dict(state)
    found = store.state_dict("model.safetensors", device="cpu")
    for name, tensor in state.items():
        expected = tensor.detach().cpu().resolve_conj()
        store[name] = tensor
        for copy in (found[name], store.to_device(name, "cpu")):
            assert copy.dtype == expected.dtype and torch.equal(copy, expected), name
    assert bool(mapped) is on_mount
    with pytest.raises(TypeError):
        store["sparse"] = made.float().to_sparse()
