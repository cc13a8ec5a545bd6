"""Files of raw bytes, whose extended attributes hold type and shape."""

from __future__ import annotations

import json
from typing import Any

from ._dtypes import Array, Layout, dtype_of_name, size_bytes
from ._errors import FormatError
from ._files import Mapping, open_to_read, read_xattr, view
from ._names import DTYPE_XATTR, NPY, SAFETENSORS, SHAPE_XATTR


def load(path: str) -> Array | None:
    """Map the array in a file; None for one without the attributes, or of another container.

    Raises FileNotFoundError, other OSErrors, and FormatError.
    """
    with open_to_read(path) as (fd, status):
        size = status.st_size
        found = layout(path, fd, size)
        if found is None:
            return None
        data = Mapping(path, fd, size).bytes if size else None
    return view(path, data, found)


def layout(path: str, file: str | int, size: int) -> Layout | None:
    """Return the layout of a file of ``size`` bytes; None as load() does. Raises OSError, FormatError."""
    dtype_text = read_xattr(file, DTYPE_XATTR)
    if dtype_text is None or path.endswith((NPY, SAFETENSORS)):
        return None
    shape_text = read_xattr(file, SHAPE_XATTR)
    try:
        dtype = dtype_of_name(dtype_text.decode("ascii"))
    except Exception:
        # numpy raises almost anything for text that only looks like a type.
        raise FormatError(path, f"{DTYPE_XATTR} names no type: {dtype_text!r}") from None
    if dtype.hasobject:
        raise FormatError(path, f"{DTYPE_XATTR} names Python objects: {dtype_text!r}")
    shape = _parse_shape(path, shape_text)
    if size_bytes(dtype, shape) != size:
        defect = f"its attributes announce {size_bytes(dtype, shape)} bytes, {size} are there"
        raise FormatError(path, defect)
    return Layout(dtype, shape)


def _parse_shape(path: str, text: bytes | None) -> tuple[int, ...]:
    try:
        shape: Any = json.loads(text or b"")
    except (ValueError, RecursionError):
        shape = None
    if not isinstance(shape, list) or not all(type(item) is int and item >= 0 for item in shape):
        raise FormatError(path, f"{SHAPE_XATTR} is not a list of lengths: {text!r}")
    return tuple(shape)
