"""irdmafs.client: arrays by name, on nothing but files. The directory may be any: a mount too."""

from __future__ import annotations

import errno
import gc
import json
import os
import pickle
import resource
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from harness.errors import fails_with
from harness.example_programs import needs
from harness.late_imports import torch
from harness.mountpoint import Mount
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from irdmafs import client
from irdmafs.client import _dtypes, _files

PROPERTY = settings(
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SHAPES = hnp.array_shapes(min_dims=0, min_side=0, max_dims=4)
SAFE_DTYPES = ["?", "u1", "i1", *(f"<{kind}{size}" for size in (2, 4, 8) for kind in "uif"), "<c8"]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def store(directory: Path) -> client.Store:
    return client.open(directory)


def rewrite(path: Path, data: bytes) -> None:
    """Make a file anew: a mapping of the one before must not be truncated."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def assert_same(actual: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.tobytes() == expected.tobytes()


def mappings_of(path: Path) -> int:
    lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    return sum(line.endswith(str(path)) for line in lines)


# -- arrays ----------------------------------------------------------------------------------------


def test_published_array_is_found_by_name(store: client.Store) -> None:
    weight = np.arange(12, dtype=np.float32).reshape(3, 4)
    store.publish("layer0/attention/weight", weight)
    store["bias"] = [1, 2, 3]
    assert_same(store["layer0/attention/weight"], weight)
    assert_same(store["bias"], np.array([1, 2, 3]))
    assert "bias" in store and "layer0" not in store
    assert list(store) == ["bias", "layer0/attention/weight"] and len(store) == 2


def test_arrays_are_mapped_and_read_only(store: client.Store, directory: Path) -> None:
    store["weight"] = np.arange(5000.0)
    mapped = store["weight"]
    assert mappings_of(directory / "weight.npy") == 1
    with pytest.raises(ValueError):
        mapped[0] = 1
    with pytest.raises(ValueError):
        mapped.flags.writeable = True
    part = mapped[10:20]
    del mapped
    assert part.sum() == sum(range(10, 20))
    del part
    gc.collect()
    assert mappings_of(directory / "weight.npy") == 0


def test_mapped_arrays_take_no_descriptors(store: client.Store) -> None:
    for index in range(300):
        store[f"layer{index}"] = np.full(4, index)
    before = len(os.listdir("/proc/self/fd"))
    arrays = store.state_dict()
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(arrays) == 300 and arrays["layer299"][0] == 299


def test_data_begins_at_a_multiple_of_64_bytes(store: client.Store, directory: Path) -> None:
    state = {f"t{index}": np.ones(index, dtype) for index, dtype in enumerate(SAFE_DTYPES)}
    store.publish_state_dict(state)
    raw = (directory / "model.safetensors").read_bytes()
    assert (8 + struct.unpack_from("<Q", raw)[0]) % 64 == 0
    for name, array in store.state_dict("model.safetensors").items():
        assert array.flags.aligned, name
    for shape in ((), (3,), (2, 3), (1,) * 20):
        array = np.zeros(shape)
        store["array"] = array
        assert ((directory / "array.npy").stat().st_size - array.nbytes) % 64 == 0


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Stored array in format:UserWarning")
@PROPERTY
@given(data=st.data())
def test_array_survives_the_way_through_a_file(store: client.Store, data: st.DataObject) -> None:
    dtype = data.draw(
        hnp.scalar_dtypes()
        | hnp.array_dtypes(allow_subarrays=True)
        | hnp.byte_string_dtypes()
        | hnp.unicode_string_dtypes()
    )
    array = data.draw(hnp.arrays(dtype, SHAPES))
    array = data.draw(st.sampled_from([array, array.T, array[..., ::-1] if array.ndim else array]))
    store["array"] = array
    assert_same(store["array"], array)
    assert store["array"].flags.f_contiguous == array.flags.f_contiguous or not array.flags.forc
    path = Path(store.path) / "array.npy"
    assert_same(np.load(path), array)
    path.unlink()
    np.save(path, array)
    assert_same(store["array"], array)


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_version_of_the_npy_format_is_read(
    store: client.Store, directory: Path, version: tuple[int, int]
) -> None:
    array = np.array([(1, 2.0)], dtype=[("a", "<i4"), ("b", "<f8")])
    with open(directory / "array.npy", "wb") as file:
        np.lib.format.write_array(file, array, version=version)
    assert_same(store["array"], array)


def test_large_arrays_that_need_conversion_are_copied_in_pieces(
    store: client.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_dtypes, "COPY_BYTES", 1000)
    array = np.arange(30 * 40 * 50, dtype=">i4").reshape(30, 40, 50)[::-1, 1:, ::2]
    sizes = [buffer.nbytes for buffer in _dtypes.buffers(array, np.dtype("<i4"))]
    assert max(sizes) <= 1000 and sum(sizes) == array.nbytes
    store["array"] = array
    store.publish_state_dict({"array": array})
    assert_same(store["array"], array)
    assert_same(store["model.safetensors/array"], array.astype("<i4"))


def test_contiguous_arrays_are_written_from_their_own_memory() -> None:
    array = np.arange(6.0).reshape(2, 3)
    (buffer,) = _dtypes.buffers(array, array.dtype)
    assert np.shares_memory(np.frombuffer(buffer), array)


def test_many_small_tensors_are_written_together(store: client.Store, directory: Path) -> None:
    state = {f"tensor{index}": np.full(index % 7, index) for index in range(3000)}
    store.publish_state_dict(state)
    loaded = safetensors.numpy.load_file(directory / "model.safetensors")
    assert loaded.keys() == state.keys()
    for name, array in state.items():
        assert_same(loaded[name], array)


# -- other sources of arrays -----------------------------------------------------------------------


def test_objects_with_numpy_or_array_methods_are_published(store: client.Store) -> None:
    class Arrayish:
        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
            return np.arange(3)

    store["a"] = SimpleNamespace(numpy=lambda: np.arange(3))
    store["b"] = Arrayish()
    assert_same(store["a"], np.arange(3))
    assert_same(store["b"], np.arange(3))


@needs("torch")
def test_torch_tensors_are_published(store: client.Store) -> None:
    half = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    tiny = torch.tensor([0.5, 2.0]).to(torch.float8_e4m3fn)
    state = {
        "plain": torch.nn.Parameter(torch.ones(2, 2)),
        "half": half.T,
        "tiny": tiny,
        "scalar": torch.tensor(3, dtype=torch.bfloat16),
    }
    store.publish_state_dict(state)
    store["half"] = half
    from safetensors.torch import load_file

    loaded = load_file(os.path.join(store.path, "model.safetensors"))
    for name, tensor in state.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(
            loaded[name].float(), tensor.detach().float()
        )
    bits = store["half"].view(np.uint16)
    assert torch.equal(torch.from_numpy(bits.copy()).view(torch.bfloat16), half)


def test_bits_in_records_named_bfloat16_are_bfloat16(store: client.Store) -> None:
    bits = np.array([[0x3F80, 0x4000]], dtype=np.uint16)
    np.save(Path(store.path) / "w.npy", bits.view([("bfloat16", "<u2")]))
    assert_same(store["w"], bits.view(ml_dtypes.bfloat16))


def test_ml_dtypes_arrays_keep_their_type(store: client.Store) -> None:
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        array = np.arange(6).reshape(2, 3).astype(getattr(ml_dtypes, name))
        for order in (array, array.T, array[:, ::2]):
            store["array"] = order
            store.publish_state_dict({"array": order})
            assert_same(store["array"], order)
            assert_same(store["model.safetensors/array"], order)


# -- safetensors -----------------------------------------------------------------------------------

deserialize: Callable[[bytes], list[tuple[str, Any]]] = safetensors.deserialize

tensors = st.dictionaries(
    st.text(min_size=1).filter(lambda name: name != "__metadata__"),
    st.sampled_from(SAFE_DTYPES).flatmap(
        lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0, max_dims=3))
    ),
    max_size=5,
)


@PROPERTY
@given(state=tensors, metadata=st.none() | st.dictionaries(st.text(), st.text(), max_size=3))
def test_safetensors_reads_what_is_published_and_is_read(
    store: client.Store, state: dict[str, np.ndarray[Any, Any]], metadata: dict[str, str] | None
) -> None:
    ours, theirs = (Path(store.path) / f"{name}.safetensors" for name in ("ours", "theirs"))
    store.publish_state_dict(state, ours.name, metadata)
    with safetensors.safe_open(ours, "np") as file:
        assert (file.metadata() or {}) == (metadata or {})
    theirs.unlink(missing_ok=True)
    safetensors.numpy.save_file(state, theirs, {"format": "np"})
    for found in (
        safetensors.numpy.load_file(ours), store.state_dict(ours.name), store.state_dict(theirs.name)
    ):  # fmt: skip
        assert found.keys() == state.keys()
        for name, array in state.items():
            assert_same(found[name], array)
    assert store.metadata(ours.name) == (metadata or {})
    assert store.metadata(theirs.name) == {"format": "np"}


def test_tensors_of_a_file_are_found_by_name(store: client.Store) -> None:
    state = {"encoder.weight": np.eye(3), "a/b": np.zeros(0), "odd//name": np.ones(1)}
    store.publish_state_dict(state, "runs/7/model.safetensors", {"step": "7"})
    prefix = "runs/7/model.safetensors"
    assert_same(store[f"{prefix}/encoder.weight"], np.eye(3))
    assert_same(store[f"{prefix}/a/b"], np.zeros(0))
    assert list(store) == [f"{prefix}/a/b", f"{prefix}/encoder.weight"]
    assert f"{prefix}/a/b" in store and f"{prefix}/missing" not in store
    assert store.state_dict(prefix).keys() == state.keys()
    with pytest.raises(KeyError):
        store[f"{prefix}/missing"]
    with pytest.raises(KeyError):
        store[prefix]


def test_tensors_of_one_version_share_a_mapping(store: client.Store, directory: Path) -> None:
    store.publish_state_dict({"a": np.zeros(9), "b": np.ones(9)})
    held = [store["model.safetensors/a"], store["model.safetensors/b"]]
    held += store.state_dict("model.safetensors").values()
    assert mappings_of(directory / "model.safetensors") == 1
    del held
    gc.collect()
    assert mappings_of(directory / "model.safetensors") == 0


def test_several_threads_may_look_up_and_publish(store: client.Store) -> None:
    store.publish_state_dict({f"t{index}": np.full(100, 0) for index in range(8)})

    def read() -> None:
        for turn in range(200):
            array = store[f"model.safetensors/t{turn % 8}"]
            assert len(set(array.tolist())) == 1

    with ThreadPoolExecutor(4) as threads:
        reading = [threads.submit(read) for _ in range(4)]
        for version in range(50):
            store.publish_state_dict({f"t{index}": np.full(100, version) for index in range(8)})
        for one in reading:
            one.result()


def test_what_cannot_be_published_is_refused_and_leaves_nothing(store: client.Store) -> None:
    with pytest.raises(TypeError, match="Python objects"):
        store["array"] = np.array([None])
    with pytest.raises(ValueError, match="publish_state_dict"):
        store["model.safetensors/w"] = np.zeros(1)
    with pytest.raises(TypeError, match=r"'w'.*Python objects"):
        store.publish_state_dict({"w": {"not": "an array"}})
    for array in (np.zeros(2, "c16"), np.zeros(2, "M8[s]"), np.zeros(2, [("a", "i4")])):
        with pytest.raises(TypeError, match="'w'"):
            store.publish_state_dict({"w": array})
    with pytest.raises(ValueError, match="__metadata__"):
        store.publish_state_dict({"__metadata__": np.zeros(1)})
    with pytest.raises(TypeError, match="metadata"):
        store.publish_state_dict({}, metadata={"step": 1})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="model"):
        store.publish_state_dict({}, "model")
    assert list(store) == []


# -- versions and files ----------------------------------------------------------------------------


def test_reader_keeps_its_version_when_a_name_is_published_again(store: client.Store) -> None:
    store["w"] = np.zeros(100_000)
    store.publish_state_dict({"w": np.zeros(100_000)})
    old = [store["w"], store["model.safetensors/w"]]
    store["w"] = np.ones(3)
    store.publish_state_dict({"w": np.ones(3)})
    new = [store["w"], store["model.safetensors/w"]]
    assert all(array.shape == (100_000,) and not array.any() for array in old)
    assert all(array.shape == (3,) and array.all() for array in new)
    del store["w"]
    assert not old[0].any()


def test_each_lookup_sees_the_current_content(store: client.Store) -> None:
    """Equal sizes and equal headers must not be taken for equal versions."""
    held = []
    for version in range(20):
        store.publish_state_dict({"w": np.full(8, version)})
        held.append(store["model.safetensors/w"])
    assert [int(array[0]) for array in held] == list(range(20))


def test_no_version_outside_of_irdmafs(store: client.Store) -> None:
    store["w"] = np.zeros(3)
    store.publish_state_dict({"w": np.zeros(3)})
    if store.versioned:
        pytest.skip("the directory lies on irdmafs")
    assert store.version("w") is None
    assert store.version("model.safetensors/w") is None
    assert store.version("model.safetensors") is None
    with pytest.raises(KeyError):
        store.version("missing")


def test_deleted_names_are_gone(store: client.Store) -> None:
    store["a/w"] = np.zeros(3)
    del store["a/w"]
    assert "a/w" not in store and list(store) == []
    with pytest.raises(KeyError):
        del store["a/w"]
    store.publish_state_dict({"w": np.zeros(3)})
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        del store["model.safetensors/w"]


def test_empty_files_count_as_missing(store: client.Store, directory: Path) -> None:
    (directory / "w.npy").touch()
    (directory / "m.safetensors").touch()
    assert "w" not in store and "m.safetensors/x" not in store and list(store) == []
    for name in ("w", "m.safetensors/x"):
        with pytest.raises(KeyError):
            store[name]
    with pytest.raises(KeyError):
        store.state_dict("m.safetensors")
    assert store.state_dict() == {}


def test_failed_publishing_leaves_the_old_content(store: client.Store, directory: Path) -> None:
    store["w"] = np.arange(10)
    version = store.version("w")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, limits[1]))
    try:
        with pytest.raises(OSError) as caught:
            store["w"] = np.zeros(1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG and str(directory / "w.npy") in str(caught.value)
    assert_same(store["w"], np.arange(10))
    assert store.version("w") == version
    assert os.listdir(directory) == ["w.npy"]


def test_state_dict_of_a_directory(store: client.Store) -> None:
    store["m/a"] = np.zeros(1)
    store["m/deep/b"] = np.ones(1)
    store["other"] = np.zeros(1)
    store.publish_state_dict({"x": np.ones(2)}, "m/head.safetensors")
    assert store.state_dict("m").keys() == {"a", "deep/b", "head.safetensors/x"}
    assert store.state_dict().keys() == set(store)
    for missing in ("nowhere", "other", "nowhere.safetensors"):
        with pytest.raises(KeyError):
            store.state_dict(missing)


def test_files_are_published_whole(store: client.Store, tmp_path_factory: Any) -> None:
    source = tmp_path_factory.mktemp("source") / "weights.safetensors"
    safetensors.numpy.save_file({"w": np.arange(5)}, source)
    store.publish_file(source, "a/model.safetensors")
    assert (Path(store.path) / "a/model.safetensors").read_bytes() == source.read_bytes()
    with pytest.raises(ValueError, match=r"'model\.bin'"):
        store.publish_file(source, "model.bin")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        store.publish_file("/nowhere", "model.safetensors")


@pytest.mark.parametrize(
    "name", ["", "/etc/w", "a//b", "a/", "..", "a/../b", ".", "a/./b", "m.safetensors/../w", "a\0b"]
)
def test_names_that_are_none_are_refused(store: client.Store, name: str) -> None:
    uses: list[Callable[[], object]] = [
        lambda: store[name],
        lambda: name in store,
        lambda: store.publish(name, np.zeros(1)),
        lambda: store.version(name),
        lambda: store.pop(name),
        lambda: store.publish_state_dict({}, f"{name}/x.safetensors"),
    ]
    for use in uses:
        with pytest.raises(ValueError) as caught:
            use()
        assert repr(name)[1:-1] in str(caught.value)


def test_store_needs_a_directory(tmp_path: Path) -> None:
    for nowhere in ("", tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match=f"'{nowhere}'"):
            client.open(nowhere)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file"):
        client.open(tmp_path / "file")


def test_closed_store_is_not_used_but_its_arrays_are(directory: Path) -> None:
    with client.open(directory) as store:
        store["w"] = np.arange(3)
        array = store["w"]
    assert array.sum() == 3
    with pytest.raises(ValueError, match="closed"):
        store["w"]


def test_store_can_be_sent_to_another_process(store: client.Store) -> None:
    store["w"] = np.arange(4)
    script = (
        "import pickle, sys; store = pickle.load(sys.stdin.buffer);"
        "print(store['w'].sum()); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input=pickle.dumps(store), capture_output=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"6\n", b"")


def test_another_filesystem_in_the_place_of_one_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not _files.is_versioned("/proc")
    assert not _files._is_irdmafs(os.makedev(4095, 1), 0)
    kind = Mock(return_value=b"fuse.irdmafs")
    monkeypatch.setattr(_files, "filesystem_of", kind)
    client.open(tmp_path)["w"] = np.zeros(4)
    with (tmp_path / "w.npy").open("rb") as reader:
        kind.return_value = b"tmpfs"
        time.sleep(0.2)
        client.open(tmp_path)["w"] = np.ones(4)
        assert not np.load(reader).any()


# -- damaged files ---------------------------------------------------------------------------------


def npy(header: str, data: bytes = b"", version: int = 1) -> bytes:
    text = header.encode()
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes((version, 0)) + length + text + data


def npy_header(descr: str = "'<f4'", order: str = "False", shape: str = "(2,)") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}}}"


DAMAGED_NPY = {
    "other file": b"hello, world",
    "magic only": b"\x93NUMPY",
    "cut in the length": b"\x93NUMPY\x01\x00\x10",
    "unknown version": b"\x93NUMPY\x09\x00\x10\x00" + bytes(100),
    "header beyond the file": npy(npy_header())[:-5],
    "huge header length": b"\x93NUMPY\x02\x00\xff\xff\xff\xff{}",
    "too long header": npy(npy_header() + " " * 70_000, version=2),
    "no literal": npy("print('x')"),
    "deep nesting": npy("(" * 30_000),
    "deep negation": npy("-" * 60_000 + "1"),
    "not a dict": npy("[1, 2]"),
    "missing keys": npy("{'descr': '<f4'}"),
    "unhashable key": npy("{[]: 1}"),
    "bad order": npy(npy_header(order="1"), bytes(8)),
    "shape is no tuple": npy(npy_header(shape="[2]"), bytes(8)),
    "negative length": npy(npy_header(shape="(-2,)"), bytes(8)),
    "boolean length": npy(npy_header(shape="(True, 2)"), bytes(8)),
    "unknown type": npy(npy_header(descr="'<q9'"), bytes(8)),
    "type is a number": npy(npy_header(descr="7"), bytes(8)),
    "type of endless size": npy(npy_header(descr="('<f8', (2**1,))"), bytes(8)),
    "huge type": npy(npy_header(descr="('<f8', (2147483647, 8))"), bytes(8)),
    "pickled objects": npy(npy_header(descr="'|O'"), bytes(8)),
    "objects in a record": npy(npy_header(descr="[('a', '|O')]"), bytes(8)),
    "data cut off": npy(npy_header(), bytes(7)),
    "overflowing shape": npy(npy_header(shape=f"({2**62}, {2**62})"), bytes(8)),
    "overflow hidden by zero": npy(npy_header(shape=f"(0, {2**64})"), bytes(8)),
    "too many dimensions": npy(npy_header(shape=f"({'1, ' * 5000})"), bytes(8)),
    "invalid utf-8": npy("{'descr'", version=3)[:-1] + b"\xff",
}


@pytest.mark.parametrize("defect", DAMAGED_NPY)
def test_damaged_npy_is_a_format_error(store: client.Store, directory: Path, defect: str) -> None:
    (directory / "w.npy").write_bytes(DAMAGED_NPY[defect])
    with pytest.raises(client.FormatError) as caught:
        store["w"]
    assert caught.value.path == str(directory / "w.npy")
    assert str(caught.value).startswith(f"{directory}/w.npy: ") and caught.value.defect
    assert pickle.loads(pickle.dumps(caught.value)).defect == caught.value.defect


def safe(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> Any:
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


DAMAGED_SAFETENSORS = {
    "empty header": safe(b""),
    "header beyond the file": struct.pack("<Q", 100) + b"{}",
    "huge header length": struct.pack("<Q", 2**64 - 1) + b"{}",
    "not json": safe(b"{nothing"),
    "not an object": safe([1]),
    "leading space": safe(b" {}"),
    "invalid utf-8": safe(b'{"\xff": 1}'),
    "deep nesting": safe(b'{"w":' + b"[" * 200_000),
    "deep value": safe(b'{"w":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "entry is a number": safe({"w": 1}),
    "missing fields": safe({"w": {"dtype": "F32"}}),
    "metadata is not text": safe({"__metadata__": {"a": 1}}),
    "unknown dtype": safe(tensor(dtype="F31"), bytes(8)),
    "dtype is a number": safe(tensor(dtype=3), bytes(8)),
    "negative length": safe(tensor(shape=(-2,)), bytes(8)),
    "fractional length": safe(tensor(shape=(2.5,)), bytes(8)),
    "huge shape": safe(tensor(shape=(2**62, 2**62)), bytes(8)),
    "huge number": safe(b'{"w":{"dtype":"U8","shape":[1' + b"0" * 5000 + b"]}}"),
    "too many dimensions": safe(tensor(shape=(1,) * 65, offsets=(0, 4)), bytes(4)),
    "overflow hidden by zero": safe(tensor(shape=(0, 2**63), offsets=(0, 0))),
    "negative offset": safe(tensor(offsets=(-8, 0)), bytes(8)),
    "offsets backwards": safe(tensor(shape=(0,), offsets=(8, 0)), bytes(8)),
}


@pytest.mark.parametrize("defect", DAMAGED_SAFETENSORS)
def test_damaged_file_is_a_format_error(store: client.Store, directory: Path, defect: str) -> None:
    path = directory / "m.safetensors"
    path.write_bytes(DAMAGED_SAFETENSORS[defect])
    uses: list[Callable[[], object]] = [
        lambda: store["m.safetensors/w"],
        lambda: store.state_dict("m.safetensors"),
        lambda: store.metadata("m.safetensors"),
        lambda: list(store),
    ]
    for use in uses if defect != "overflow hidden by zero" else uses[:2]:
        with pytest.raises(client.FormatError) as caught:
            use()
        assert str(caught.value).startswith(f"{path}: ") and len(str(caught.value)) < 500


def touch(array: np.ndarray[Any, Any]) -> None:
    """Look at every byte: what is outside of the file would end this process."""
    assert len(array.tobytes()) == array.nbytes


def damage(draw: st.DrawFn, data: bytes) -> bytes:
    raw = bytearray(data)
    for _ in range(draw(st.integers(0, 4))):
        raw[draw(st.integers(0, min(len(raw), 200) - 1))] = draw(st.integers(0, 255))
    return bytes(raw[: draw(st.integers(1, len(raw)))]) if draw(st.booleans()) else bytes(raw)


@st.composite
def damaged_npy(draw: st.DrawFn) -> bytes:
    literal = st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just("<f4"),
        lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple),
        max_leaves=6,
    )
    descr = draw(literal | st.sampled_from(["<f4", "|u1", "f4,f4", [("a", "<f4", (2,))]]))
    header = {
        "descr": descr,
        "fortran_order": draw(st.booleans()),
        "shape": tuple(draw(st.lists(st.integers(-1, 2**65) | st.integers(0, 3), max_size=4))),
    }
    version = draw(st.sampled_from([1, 2, 3]))
    return damage(draw, npy(repr(header), bytes(draw(st.integers(0, 100))), version))


@PROPERTY
@given(data=st.binary(min_size=1) | damaged_npy())
def test_no_npy_file_breaks_the_reader(store: client.Store, data: bytes) -> None:
    rewrite(Path(store.path) / "w.npy", data)
    try:
        touch(store["w"])
    except client.FormatError as error:
        assert error.defect


@st.composite
def damaged_safetensors(draw: st.DrawFn) -> bytes:
    header: dict[str, Any] = {}
    position = 0
    codes = {"U8": 1, "F32": 4, "BF16": 2, "F8_E4M3": 1, "BOOL": 1, "I64": 8, "C64": 8}
    for name in draw(st.lists(st.text(max_size=3), max_size=4, unique=True)):
        code = draw(st.sampled_from(sorted(codes)))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        size = codes[code] * int(np.prod(shape))
        slip = draw(st.sampled_from([0] * 8 + [1, -1, 4]))
        header[name] = {
            "dtype": code,
            "shape": shape,
            "data_offsets": [position, position + size + slip],
        }
        position += size
    if draw(st.booleans()):
        header["__metadata__"] = draw(st.dictionaries(st.text(max_size=3), st.text(max_size=3)))
    extra = draw(st.sampled_from([0] * 6 + [1, -1]))
    raw = safe(header, bytes(max(0, position + extra)))
    return damage(draw, raw) if draw(st.integers(0, 3)) == 0 else raw


@PROPERTY
@given(data=st.binary(min_size=1) | damaged_safetensors())
def test_no_safetensors_file_breaks_the_reader(store: client.Store, data: bytes) -> None:
    path = Path(store.path) / "m.safetensors"
    rewrite(path, data)
    try:
        mapped = store.state_dict("m.safetensors")
    except client.FormatError as error:
        ours = None
        assert error.defect
    else:
        ours = set(mapped)
        for array in mapped.values():
            touch(array)
    try:
        theirs = {name for name, _ in deserialize(data)}
    except safetensors.SafetensorError:
        theirs = None
    # numpy has no elements of less than a byte; otherwise what one reads, so does the other.
    if not any(code in data for code in (b"F4", b"F6_")):
        assert ours == theirs


def test_torch_is_not_imported_before_a_tensor_is_asked_for(tmp_path: Path) -> None:
    np.save(tmp_path / "array.npy", np.ones(3))
    program = (
        "import sys; from irdmafs import client; store = client.open(sys.argv[1]); "
        "store['array']; store.state_dict(); assert 'torch' not in sys.modules; "
        "sys.modules['torch'] = None\n"
        "try: store.to_device('array', 'cpu')\n"
        "except ImportError as error: assert 'irdmafs[torch]' in str(error)\n"
        "else: raise AssertionError"
    )
    subprocess.run(
        [sys.executable, "-c", program, os.fspath(tmp_path)], check=True, timeout=60, cwd="/"
    )


def test_nothing_is_published_below_a_mount_that_is_gone(own_mount: Mount) -> None:
    with client.open(own_mount.path) as store:
        store["array"] = np.zeros(1)
        own_mount.unmount()
        with fails_with(errno.ENOTCONN):
            store["below/array"] = np.ones(1)
        assert os.listdir(own_mount.path) == []
        own_mount.mount()
        store["array"] = np.ones(1)
