"""The .npy container: one array in one file (numpy's NEP 1).

Extension types (see _dtypes) have no name in this format. They are written as records of one
unsigned integer field that bears the type's name, such as ``[('bfloat16', '<u2')]``: numpy.load
reads them as records of bits, this module as what they are. Nothing outside the file is needed
to know its type, so a version of it can never be read with the type of another.
"""

from __future__ import annotations

import ast
import functools
import struct
from collections.abc import Callable, Iterator
from itertools import chain

import numpy as np
from numpy.lib import format as npy_format

from ._dtypes import EXTENSIONS, Array, DType, Layout, bits_of, buffers, size_bytes
from ._errors import FormatError
from ._files import Mapping, open_to_read, read_at, view

_ALIGN = 64
# Headers are Python literals; the limit keeps a hostile one from costing memory and time.
_HEADER_MAX_BYTES = 64 << 10
# Room that numpy also leaves, to let a file grow along its first axis without moving its data.
_GROWTH_DIGITS = 21
_FIRST_READ_BYTES = 1024
_MAGIC = b"\x93NUMPY"
_LENGTH_FORMATS = {1: ("<H", "latin1"), 2: ("<I", "latin1"), 3: ("<I", "utf-8")}


def encode(array: Array) -> Iterator[memoryview]:
    """Return the contents of a file that holds ``array``; data begins at a multiple of 64 bytes.

    Raises ValueError for a type that needs too long a header.
    """
    fortran_order = array.flags.f_contiguous and not array.flags.c_contiguous
    descr: object
    if array.dtype in EXTENSIONS.values():
        descr = [(array.dtype.name, bits_of(array.dtype).str)]
    else:
        descr = npy_format.dtype_to_descr(array.dtype)
    header = _encode_header(descr, fortran_order, array.shape)
    return chain([memoryview(header)], buffers(array.T if fortran_order else array, array.dtype))


def _encode_header(descr: object, fortran_order: bool, shape: tuple[int, ...]) -> bytes:
    shape = tuple(int(length) for length in shape)
    text = f"{{'descr': {descr!r}, 'fortran_order': {fortran_order!r}, 'shape': {shape!r}, }}"
    if shape:
        text += " " * (_GROWTH_DIGITS - len(repr(shape[-1 if fortran_order else 0])))
    if len(text) > _HEADER_MAX_BYTES // 4:
        raise ValueError(f"the type of the array takes {len(text)} characters to describe")
    version = 1 if text.isascii() and len(text) < 0xFF00 else 3
    length_format, encoding = _LENGTH_FORMATS[version]
    data = text.encode(encoding)
    prefix_bytes = len(_MAGIC) + 2 + struct.calcsize(length_format)
    padding = -(prefix_bytes + len(data) + 1) % _ALIGN
    data += b" " * padding + b"\n"
    return _MAGIC + bytes((version, 0)) + struct.pack(length_format, len(data)) + data


def layout(path: str, read: Callable[[int], bytes], size: int) -> Layout:
    """Return the layout of a file of ``size`` bytes; ``read`` returns its first bytes. Raises
    FormatError."""
    head = read(_FIRST_READ_BYTES)
    data_start, encoding = _measure(path, head, size)
    if data_start > len(head):
        head = read(data_start)
    try:
        dtype, fortran_order, shape = _decode_header(head[:data_start], encoding)
    except ValueError as error:
        raise FormatError(path, str(error)) from None
    data_bytes = size_bytes(dtype, shape)
    if data_start + data_bytes > size:
        defect = f"{data_bytes} bytes of data are announced, {size - data_start} are there"
        raise FormatError(path, defect)
    return Layout(_extension_of(dtype), shape, data_start, "F" if fortran_order else "C")


def load(path: str) -> Array | None:
    """Map the array in a file; None for an empty file, which nothing was published to yet.

    Raises FileNotFoundError, other OSErrors, and FormatError.
    """
    with open_to_read(path) as (fd, status):
        size = status.st_size
        if size == 0:
            return None
        found = layout(path, lambda count: read_at(fd, count, 0), size)
        data = Mapping(path, fd, size).bytes if size_bytes(found.dtype, found.shape) else None
    return view(path, data, found)


def _measure(path: str, head: bytes, size: int) -> tuple[int, str]:
    """Return where the data starts, and the encoding of the header before it."""
    if head[: len(_MAGIC)] != _MAGIC:
        raise FormatError(path, "not a .npy file: it does not begin with \\x93NUMPY")
    if len(head) < len(_MAGIC) + 2:
        raise FormatError(path, "the header is cut off")
    major, minor = head[6], head[7]
    if major not in _LENGTH_FORMATS or minor != 0:
        raise FormatError(path, f"unknown .npy version {major}.{minor}")
    length_format, encoding = _LENGTH_FORMATS[major]
    start = len(_MAGIC) + 2 + struct.calcsize(length_format)
    if len(head) < start:
        raise FormatError(path, "the header is cut off")
    (length,) = struct.unpack_from(length_format, head, len(_MAGIC) + 2)
    if start + length > size:
        raise FormatError(path, f"a header of {length} bytes is announced in {size} bytes of file")
    if length > _HEADER_MAX_BYTES:
        raise FormatError(path, f"the header has {length} bytes, more than {_HEADER_MAX_BYTES}")
    return start + length, encoding


# The layers of a model have few different shapes, and a literal takes longer to parse than a file
# to map.
@functools.lru_cache(maxsize=256)
def _decode_header(head: bytes, encoding: str) -> tuple[DType, bool, tuple[int, ...]]:
    """Return type, Fortran order and shape. Raises ValueError, which says what is wrong."""
    start = 10 if head[6] == 1 else 12
    try:
        fields = ast.literal_eval(head[start:].decode(encoding))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise ValueError("the header is not a Python literal") from None
    if not isinstance(fields, dict) or fields.keys() != {"descr", "fortran_order", "shape"}:
        raise ValueError("the header does not have descr, fortran_order and shape")
    fortran_order, shape = fields["fortran_order"], fields["shape"]
    if not isinstance(fortran_order, bool):
        raise ValueError(f"fortran_order is {_shown(fortran_order)}, not True or False")
    if not isinstance(shape, tuple) or not all(
        type(length) is int and length >= 0 for length in shape
    ):
        raise ValueError(f"the shape {_shown(shape)} is not a tuple of lengths")
    try:
        dtype = np.dtype(npy_format.descr_to_dtype(fields["descr"]))
    except Exception:
        # numpy raises almost anything for a descr that only looks like one.
        raise ValueError(f"{_shown(fields['descr'])} describes no type of numpy") from None
    if dtype.hasobject:
        raise ValueError("it holds pickled Python objects, which are never loaded")
    return dtype, fortran_order, shape


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _extension_of(dtype: DType) -> DType:
    """Return the extension type that a type of records stands for, or the type itself."""
    found = EXTENSIONS.get(dtype.names[0]) if dtype.names and len(dtype.names) == 1 else None
    return found if found is not None and dtype[0] == bits_of(found) else dtype
