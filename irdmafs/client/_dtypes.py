"""Element types: their names in files and in numpy, and how values become arrays.

numpy has no bfloat16 and no 8-bit floats; the package ml_dtypes adds them. Such *extension* types
are arrays of that package where it can be imported, and otherwise unsigned integers of the same
size that hold the bits: ``uint16`` for bfloat16, ``uint8`` for the 8-bit floats. On the way to a
file they are always integers together with the extension's name, so that ml_dtypes arrays and
torch tensors take one path.
"""

from __future__ import annotations

import functools
import importlib
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
DType: TypeAlias = np.dtype[Any]

# An array whose memory differs from the file's form is converted in pieces of this many bytes.
COPY_BYTES = 64 << 20

# Safetensors codes and their numpy types; the format is little-endian.
_CODES = {
    "BOOL": "|b1",
    "U8": "|u1",
    "I8": "|i1",
    "U16": "<u2",
    "I16": "<i2",
    "F16": "<f2",
    "U32": "<u4",
    "I32": "<i4",
    "F32": "<f4",
    "C64": "<c8",
    "U64": "<u8",
    "I64": "<i8",
    "F64": "<f8",
}
# Safetensors codes and the names that ml_dtypes and torch give these types.
_EXTENSION_CODES = {
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
_DTYPE_OF_CODE = {code: np.dtype(text) for code, text in _CODES.items()}
_CODE_OF_DTYPE = {dtype: code for code, dtype in _DTYPE_OF_CODE.items()}
_CODE_OF_EXTENSION = {name: code for code, name in _EXTENSION_CODES.items()}


class Layout(NamedTuple):
    """The place and form of an array in a file; ``offset`` is in bytes from the beginning. ``extension``
    is the type whose bits ``dtype`` holds, if numpy does not have it."""

    dtype: DType
    extension: str | None
    shape: tuple[int, ...]
    offset: int = 0
    order: Literal["C", "F"] = "C"


@dataclass(frozen=True, slots=True)
class Value:
    """A value to be written: an array, and the extension type whose bits it holds, if any."""

    array: Array
    extension: str | None = None

    @property
    def code(self) -> str | None:
        """Return the safetensors code of the elements, None where that format has no such type."""
        return code_of(self.array.dtype, self.extension)

    @property
    def shown(self) -> Array:
        """Return the array as programs get it: of the extension type, if ml_dtypes is installed."""
        if self.extension is None:
            return self.array
        return self.array.view(extension_dtype(self.extension))


def code_of(dtype: DType, extension: str | None) -> str | None:
    """Return the safetensors code of a type that is given in two parts, as dtype_of_code() gives it; None
    where that format has no such type."""
    if extension is not None:
        return _CODE_OF_EXTENSION[extension]
    return _CODE_OF_DTYPE.get(dtype.newbyteorder("<")) if dtype.names is None else None


def bits_of(extension: str) -> DType | None:
    """Return the integer type that holds the bits of an extension type; None for an unknown name."""
    if extension not in _CODE_OF_EXTENSION:
        return None
    return np.dtype("<u2" if extension == "bfloat16" else "|u1")


@functools.cache
def extension_dtype(extension: str) -> DType:
    """Return the ml_dtypes type of that name, or the integer type of its bits without ml_dtypes.

    Raises KeyError for an unknown name.
    """
    bits = bits_of(extension)
    if bits is None:
        raise KeyError(extension)
    try:
        found: DType = np.dtype(getattr(importlib.import_module("ml_dtypes"), extension))
    except (ImportError, AttributeError):
        return bits
    return found


def dtype_of_code(code: str) -> tuple[DType, str | None]:
    """Return the numpy type of a safetensors code, and the extension type whose bits it holds, if any.
    Raises KeyError for one that numpy cannot index, such as the packed 4- and 6-bit floats."""
    extension = _EXTENSION_CODES.get(code)
    bits = None if extension is None else bits_of(extension)
    return (_DTYPE_OF_CODE[code], None) if bits is None else (bits, extension)


def dtype_of_name(name: str) -> tuple[DType, str | None]:
    """Return the type that ``float32``, ``<f4`` or ``bfloat16`` names, in two parts as dtype_of_code()
    does.

    Raises whatever numpy raises for text that names no type (TypeError, ValueError, SyntaxError).
    """
    bits = bits_of(name)
    return (np.dtype(name), None) if bits is None else (bits, name)


def value_of(source: object) -> Value:
    """Return the array of a numpy array, a torch tensor, anything with ``numpy()`` or ``__array__``, or
    numbers in nested lists. Memory is shared with ``source`` where it can be.

    Raises TypeError for what numpy can only hold as Python objects.
    """
    if type(source).__module__.partition(".")[0] == "torch":
        return _value_of_tensor(source)
    if not isinstance(source, np.ndarray) and callable(getattr(source, "numpy", None)):
        source = source.numpy()  # type: ignore[attr-defined]
    array = np.asarray(source)
    if array.dtype.hasobject:
        raise TypeError(f"an array of {array.dtype} holds Python objects, not numbers")
    bits = bits_of(array.dtype.name)
    return Value(array) if bits is None else Value(array.view(bits), array.dtype.name)


def _value_of_tensor(tensor: Any) -> Value:
    # A tensor exists, so torch is loaded: torch is never imported here.
    torch = sys.modules["torch"]
    extension = str(tensor.dtype).removeprefix("torch.")
    bits = bits_of(extension)
    if bits is None:
        return Value(tensor.numpy(force=True))
    integers = tensor.detach().view(torch.uint16 if bits.itemsize == 2 else torch.uint8)
    return Value(integers.numpy(force=True), extension)


def buffers(array: Array, dtype: DType) -> Iterator[memoryview]:
    """Yield the bytes of an array as ``dtype`` in C order: views of its memory if it has that form,
    otherwise copies of COPY_BYTES at most."""
    if array.nbytes == 0:
        return
    if array.dtype == dtype and array.flags.c_contiguous:
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
