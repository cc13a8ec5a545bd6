"""Element types: their names in files, in numpy and in torch, and how values become arrays.

numpy has no bfloat16 and no 8-bit floats. The package ml_dtypes adds them; here they are called *extension*
types. torch knows them under the same names, but exchanges no arrays of them with numpy: their bits pass
between the two as unsigned integers.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
DType: TypeAlias = np.dtype[Any]

# An array whose memory differs from the file's form is converted in pieces of this many bytes.
COPY_BYTES = 64 << 20

# Safetensors codes and the names of their extension types.
_EXTENSION_CODES = {
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
# Extension types by name.
EXTENSIONS: dict[str, DType] = {
    name: np.dtype(getattr(ml_dtypes, name)) for name in _EXTENSION_CODES.values()
}
# Safetensors codes and their types; the format is little-endian.
_DTYPE_OF_CODE: dict[str, DType] = {
    "BOOL": np.dtype("|b1"),
    "C64": np.dtype("<c8"),
    **{f"U{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)},
    **{f"I{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)},
    **{f"F{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
    **{code: EXTENSIONS[name] for code, name in _EXTENSION_CODES.items()},
}
_CODE_OF_DTYPE = {dtype: code for code, dtype in _DTYPE_OF_CODE.items()}


class DeviceArray(NamedTuple):
    """An array in a device's memory: its type in numpy's terms, its shape, and its bytes, in C order, as a
    flat torch tensor."""

    dtype: DType
    shape: tuple[int, ...]
    bytes: Any
    nbytes: int
    flags: Any = np.empty(0).flags  # those of an array in C order


# An array or a DeviceArray: both are published from where they lie.
Source: TypeAlias = Any


class Layout(NamedTuple):
    """The place and form of an array in a file; ``offset`` is in bytes from the beginning."""

    dtype: DType
    shape: tuple[int, ...]
    offset: int = 0
    order: Literal["C", "F"] = "C"


def code_of(dtype: DType) -> str | None:
    """Return the safetensors code of a type, None where that format has no such type."""
    return _CODE_OF_DTYPE.get(dtype.newbyteorder("<")) if dtype.names is None else None


def dtype_of_code(code: str) -> DType:
    """Return the type of a safetensors code. Raises KeyError for one that numpy cannot index, such as the
    packed 4- and 6-bit floats."""
    return _DTYPE_OF_CODE[code]


def bits_of(dtype: DType) -> DType:
    """Return the unsigned integers that hold the bits of an extension type."""
    return np.dtype(f"<u{dtype.itemsize}")


def array_of(source: object) -> Array:
    """Return the array of a numpy array, a torch tensor, anything with ``numpy()`` or ``__array__``, or
    numbers in nested lists. Memory is shared with ``source`` where it can be.

    Raises TypeError for what numpy can only hold as Python objects.
    """
    if type(source).__module__.partition(".")[0] == "torch":
        return _array_of_tensor(source)
    if not isinstance(source, np.ndarray) and callable(getattr(source, "numpy", None)):
        source = source.numpy()  # type: ignore[attr-defined]
    array = np.asarray(source)
    if array.dtype.hasobject:
        raise TypeError(f"an array of {array.dtype} holds Python objects, not numbers")
    return array


def each_of(
    convert: Callable[[object], Source], tensors: Mapping[str, object]
) -> dict[str, Source]:
    """Return tensors as `convert` returns them, by name. Raises TypeError, with the name."""
    found: dict[str, Source] = {}
    for name, tensor in tensors.items():
        try:
            found[name] = convert(tensor)
        except TypeError as error:
            raise TypeError(f"tensor {name!r}: {error}") from None
    return found


def source_of(source: Any) -> Source:
    """Return a tensor that lies in CUDA memory as it lies there, anything else as `array_of` does."""
    torch: Any = sys.modules.get("torch")
    is_tensor = torch is not None and isinstance(source, torch.Tensor)
    if not is_tensor or source.device.type != "cuda" or source.layout is not torch.strided:
        return array_of(source)
    name = str(source.dtype).removeprefix("torch.")
    dtype = EXTENSIONS.get(name) or np.dtype(name)
    tensor = source.detach().resolve_conj().resolve_neg().contiguous()
    torch.cuda.current_stream(source.device).synchronize()  # it is copied by other streams
    flat = tensor.reshape(-1).view(torch.uint8)
    return DeviceArray(dtype, tuple(tensor.shape), flat, len(flat))


def _array_of_tensor(tensor: Any) -> Array:
    # A tensor exists, so torch is loaded: torch is never imported here.
    torch = sys.modules["torch"]
    extension = EXTENSIONS.get(str(tensor.dtype).removeprefix("torch."))
    if extension is not None:
        bits = tensor.detach().view(getattr(torch, bits_of(extension).name))
        return bits.numpy(force=True).view(extension)  # type: ignore[no-any-return]
    return tensor.numpy(force=True)  # type: ignore[no-any-return]


def buffers(array: Source, dtype: DType) -> Iterator[Any]:
    """Yield the bytes of an array as ``dtype`` in C order: views of its memory if it has that form,
    otherwise copies of COPY_BYTES at most; those of a device as a tensor."""
    if array.nbytes == 0:
        return
    if isinstance(array, DeviceArray):
        yield array.bytes
    elif array.dtype == dtype and array.flags.c_contiguous:
        yield array.reshape(-1).view(np.uint8).data
    elif array.nbytes <= COPY_BYTES or array.ndim == 0:
        yield from buffers(np.ascontiguousarray(array, dtype), dtype)
    elif (row_bytes := array.nbytes // len(array)) > COPY_BYTES:
        for row in array:
            yield from buffers(np.asarray(row), dtype)
    else:
        rows = COPY_BYTES // row_bytes
        for first in range(0, len(array), rows):
            yield from buffers(array[first : first + rows], dtype)


def size_bytes(dtype: DType, shape: tuple[int, ...]) -> int:
    """Return the size of an array in bytes, without the overflow that numpy's own arithmetic would have."""
    return dtype.itemsize * math.prod(shape)
