"""The .safetensors container: named arrays in one file.

A file is a little-endian u64 (the length of the header), the header (JSON: name -> dtype, shape,
data_offsets counted from the end of the header; ``__metadata__`` -> text), and the data. Arrays
lie in C order, little-endian, without holes between them.
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, NamedTuple

import msgspec

from ._dtypes import DType, Layout, Source, buffers, code_of, dtype_of_code, size_bytes
from ._files import FormatError

LENGTH_BYTES = 8
# The limit of the reference implementation, which must be able to read our files.
HEADER_MAX_BYTES = 100_000_000
# numpy's own limit since 2.0.
_NDIM_MAX = 64
_ALIGN = 64
_METADATA = "__metadata__"


_Length = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct):
    dtype: str
    shape: Annotated[tuple[_Length, ...], msgspec.Meta(max_length=_NDIM_MAX)]
    data_offsets: tuple[_Length, _Length]


_decode_header = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_entry = msgspec.json.Decoder(_Entry).decode
_decode_metadata = msgspec.json.Decoder(dict[str, str] | None).decode


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a file, checked against the file's size."""

    tensors: dict[str, Layout]
    metadata: dict[str, str]


def header_text(
    path: str, read: Callable[[int], bytes], size: int, most: int = HEADER_MAX_BYTES
) -> bytes:
    """Return the header of a file of ``size`` bytes, ``most`` at the most, as text; ``read`` returns the
    file's first bytes. Raises FormatError."""
    first = read(LENGTH_BYTES)
    if len(first) < LENGTH_BYTES:
        raise FormatError(path, f"not a .safetensors file: it has only {len(first)} bytes")
    (length,) = struct.unpack_from("<Q", first)
    if LENGTH_BYTES + length > size:
        raise FormatError(path, f"a header of {length} bytes is announced in {size} bytes of file")
    if length > most:
        raise FormatError(path, f"the header has {length} bytes, more than {most}")
    text = read(LENGTH_BYTES + length)[LENGTH_BYTES:]
    if len(text) != length:
        raise FormatError(path, "the header is cut off")
    return text


def parse_header(path: str, text: bytes, size: int) -> Header:
    """Read a header and check it against the file's ``size`` in bytes. Raises FormatError."""
    if text[:1] != b"{":
        raise FormatError(path, "the header does not begin with {")
    try:
        fields = _decode_header(text)
        metadata = _decode_metadata(fields.pop(_METADATA, msgspec.Raw(b"null"))) or {}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(path, f"the header is not what it should be: {error}") from None
    data_start = LENGTH_BYTES + len(text)
    tensors = {}
    ranges = []
    for name, raw in fields.items():
        dtype, shape, first, end = _parse_entry(path, name, raw)
        tensors[name] = Layout(dtype, shape, data_start + first)
        ranges.append((first, end, name))
    # As in the reference implementation: every byte of data belongs to exactly one tensor.
    position = 0
    for first, end, name in sorted(ranges):
        if first != position:
            defect = "overlaps another" if first < position else "leaves a hole before it"
            raise FormatError(path, f"tensor {name!r} {defect}")
        position = end
    if data_start + position != size:
        defect = f"the tensors take {position} bytes of data, {size - data_start} are there"
        raise FormatError(path, defect)
    return Header(tensors, metadata)


def _parse_entry(path: str, name: str, raw: msgspec.Raw) -> tuple[DType, tuple[int, ...], int, int]:
    try:
        entry = _decode_entry(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(path, f"tensor {name!r}: {error}") from None
    try:
        dtype = dtype_of_code(entry.dtype)
    except KeyError:
        raise FormatError(path, f"tensor {name!r} has the unknown dtype {entry.dtype!r}") from None
    first, end = entry.data_offsets
    needed = size_bytes(dtype, entry.shape)
    if end - first != needed:
        defect = f"tensor {name!r} takes {needed} bytes, its offsets span {end - first}"
        raise FormatError(path, defect)
    return dtype, entry.shape, first, end


class Head(NamedTuple):
    """The beginning of a file, up to its data. `offsets`: the byte where each tensor begins, in order."""

    text: bytes
    offsets: dict[str, int]


def head_of(
    forms: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] | None
) -> Head:
    """Return the head of a file that holds tensors of these codes and shapes; data begins at a multiple of
    64 bytes, and tensors of larger elements come first, so that every one is aligned to its element.

    Raises TypeError and ValueError for what the format cannot hold.
    """
    texts = [text for item in (metadata or {}).items() for text in item]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("metadata of a .safetensors file must be a mapping of str to str")
    fields: dict[str, object] = {} if metadata is None else {_METADATA: dict(metadata)}
    sizes = {code: dtype_of_code(code).itemsize for code, _ in forms.values()}
    position = 0
    starts = {}
    for name, (code, shape) in sorted(forms.items(), key=lambda one: (-sizes[one[1][0]], one[0])):
        if name == _METADATA:
            raise ValueError(f"a tensor cannot be named {_METADATA!r} in a .safetensors file")
        end = position + sizes[code] * math.prod(shape)
        fields[name] = _Entry(code, shape, (position, end))
        starts[name] = position
        position = end
    text = msgspec.json.encode(fields)
    text += b" " * (-(LENGTH_BYTES + len(text)) % _ALIGN)
    if len(text) > HEADER_MAX_BYTES:
        raise ValueError(f"the header takes {len(text)} bytes, more than {HEADER_MAX_BYTES}")
    data = LENGTH_BYTES + len(text)
    offsets = {name: data + start for name, start in starts.items()}
    return Head(struct.pack("<Q", len(text)) + text, offsets)


def encode(arrays: Mapping[str, Source], metadata: Mapping[str, str] | None) -> Iterator[Any]:
    """Return the contents of a file of these arrays. Raises TypeError and ValueError as head_of() does."""
    forms = {}
    for name, array in arrays.items():
        code = code_of(array.dtype)
        if code is None:
            raise TypeError(f"tensor {name!r}: .safetensors files cannot hold {array.dtype}")
        forms[name] = (code, array.shape)
    head = head_of(forms, metadata)
    ordered = (arrays[name] for name in head.offsets)
    data = (buffers(array, array.dtype.newbyteorder("<")) for array in ordered)
    return chain([memoryview(head.text)], chain.from_iterable(data))
