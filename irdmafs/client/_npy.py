"""The .npy container: one array in one file (numpy's NEP 1).

Extension types (see _dtypes) have no name in this format. They are written as records of one
unsigned integer field that bears the type's name, such as ``[('bfloat16', '<u2')]``: numpy.load
reads them as records of bits, this module as what they are. Nothing outside the file is needed
to know its type, so a version of it can never be read with the type of another.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NamedTuple

from numpy.lib import format as npy_format

from ._dtypes import EXTENSIONS, Array, DType, Layout, Source, bits_of, buffers, size_bytes
from ._files import FormatError, Mapping, open_to_read, read_at, view

# Headers are Python literals; the limit keeps a hostile one from costing memory and time.
_HEADER_MAX_BYTES = 64 << 10
_FIRST_READ_BYTES = 1024
_SHOWN_MAX = 200
_READERS = {(1, 0): npy_format.read_array_header_1_0, (2, 0): npy_format.read_array_header_2_0}


class _Ascii(NamedTuple):
    """A part of a header that is written with escapes for letters beyond ASCII, which every version has."""

    value: object

    def __repr__(self) -> str:
        return ascii(self.value)


def encode(array: Source) -> Iterator[Any]:
    """Return the contents of a file that holds ``array``; data begins at a multiple of 64 bytes.

    Raises ValueError for a type that needs too long a header.
    """
    fortran_order = array.flags.f_contiguous and not array.flags.c_contiguous
    descr: object
    if array.dtype in EXTENSIONS.values():
        descr = [(array.dtype.name, bits_of(array.dtype).str)]
    else:
        descr = npy_format.dtype_to_descr(array.dtype)
    header = io.BytesIO()
    fields = {"descr": _Ascii(descr), "fortran_order": fortran_order, "shape": array.shape}
    npy_format.write_array_header_1_0(header, fields)
    if header.tell() > _HEADER_MAX_BYTES // 4:
        raise ValueError(f"the type of the array takes {header.tell()} bytes to describe")
    data = buffers(array.T if fortran_order else array, array.dtype)
    return chain([memoryview(header.getvalue())], data)


def layout(path: str, read: Callable[[int], bytes], size: int) -> Layout:
    """Return the layout of a file of ``size`` bytes; ``read`` returns its first bytes. Raises
    FormatError."""
    head = read(_FIRST_READ_BYTES)
    prefix_bytes = 10 if head[6:7] == b"\1" else 12
    data_start = prefix_bytes + int.from_bytes(head[8:prefix_bytes], "little")
    if data_start > len(head):
        head = read(min(data_start, prefix_bytes + _HEADER_MAX_BYTES))
    try:
        dtype, fortran_order, shape = _decode_header(head[:data_start])
    except Exception as error:
        # numpy raises almost anything for what only looks like a header, and quotes all of it.
        defect = f"its header is not that of a .npy file: {str(error)[:_SHOWN_MAX]}"
        raise FormatError(path, defect) from None
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
        return view(path, Mapping(path, fd, size).bytes, found)


# The layers of a model have few different shapes; a literal takes longer to parse than a file to map.
@functools.lru_cache(maxsize=256)
def _decode_header(head: bytes) -> tuple[DType, bool, tuple[int, ...]]:
    """Return type, Fortran order and shape. Raises almost any Exception, which says what is wrong."""
    if head[6:8] == b"\3\0":
        # Version 3 is version 2 in UTF-8.
        text = head[12:].decode().encode("ascii", "backslashreplace")
        head = npy_format.magic(2, 0) + len(text).to_bytes(4, "little") + text
    file = io.BytesIO(head)
    version = npy_format.read_magic(file)
    if version not in _READERS:
        raise ValueError(f"its version is {version}")
    shape, fortran_order, dtype = _READERS[version](file, max_header_size=_HEADER_MAX_BYTES)
    if not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError("its shape is not a tuple of lengths")
    if dtype.hasobject:
        raise ValueError("it holds pickled Python objects, which are never loaded")
    return dtype, fortran_order, shape


def _extension_of(dtype: DType) -> DType:
    """Return the extension type that a type of records stands for, or the type itself."""
    found = EXTENSIONS.get(dtype.names[0]) if dtype.names and len(dtype.names) == 1 else None
    return found if found is not None and dtype[0] == bits_of(found) else dtype
