"""Tensors in a device's memory, copied out of mapped files, and memory of a device that is lent.

For CUDA several threads copy the mapped bytes in pieces to pinned memory, from which the device fetches
them itself. *Measured* with an H200 and 16 processors, 4 GiB of a mount: 40 GB/s; 20 GB/s when the pages of
the mapping are pinned instead, which takes most of the time; 55 GB/s from memory that was pinned before.
Small tensors that lie side by side in a file are copied at once, and are views of one piece of the device's
memory. A mapping shows one version of the file, and keeps it for as long as the copy takes.

CUDA memory is lent as a dma-buf, which the driver makes (CUDA 11.7, and a kernel module that can).

torch is imported when a tensor is asked for, not before.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import itertools
import logging
import mmap
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np

from . import _files
from ._dtypes import COPY_BYTES, EXTENSIONS, Array, DType, Layout, bits_of, size_bytes
from ._files import FormatError

log = logging.getLogger(__name__)

T = TypeVar("T")

# Larger copies go through pinned memory in such pieces, two for each thread. torch keeps that memory for
# the next copies, 192 MiB at most.
PIECE_BYTES = 8 << 20
_PIECES_EACH = 2
_THREADS_MAX = 12
# Larger tensors have memory of their own: each can be freed by itself.
_SMALL_BYTES = 1 << 20
_RUN_BYTES_MAX = 32 << 20
# A run begins at a multiple of this, as the device's memory does, so that tensors stay aligned.
_ALIGN = 16

# CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
_DMA_BUF = 1
# CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX, ..._TO_OWNER
_FLUSH_CONTEXT, _FLUSH_TO_OWNER = 0, 100


class _Item(NamedTuple):
    """A tensor to be copied: its bytes from an address on, and its form."""

    name: str
    address: int
    size: int
    layout: Layout


class _Run(NamedTuple):
    address: int
    size: int
    items: list[_Item]


def to_device(arrays: Mapping[str, Array], device: object) -> dict[str, Any]:
    """Return torch tensors of these arrays, which lie in mapped files, in memory of their own on a device.

    Returns when all of it is there. Raises ImportError without torch, TypeError for elements that torch
    has no type for, and what torch raises (no such device, out of memory).
    """
    torch = _torch()
    target = torch.device(device)
    tensors: dict[str, Any] = dict.fromkeys(arrays)  # in the order of the arguments
    items = []
    for name, given in arrays.items():
        dtype, flags = _dtype(torch, name, given.dtype), given.flags
        if given.nbytes == 0:
            tensors[name] = torch.empty(given.shape, dtype=dtype, device=target)
        elif not given.dtype.isnative or not (flags.c_contiguous or flags.f_contiguous):
            tensors[name] = tensor_of(given).to(target)
        else:
            layout = Layout(given.dtype, given.shape, order="C" if flags.c_contiguous else "F")
            items.append(_Item(name, given.ctypes.data, given.nbytes, layout))
    runs = list(_runs(items))
    copies = [torch.empty(run.size, dtype=torch.uint8, device=target) for run in runs]
    _copy(torch, target, [(run.address, copy) for run, copy in zip(runs, copies, strict=True)])
    for run, copy in zip(runs, copies, strict=True):
        for item in run.items:
            layout = item.layout._replace(offset=item.address - run.address)
            tensors[item.name] = view(item.name, copy, layout)
    return tensors


def _torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        why = "tensors on a device need the package torch: pip install 'irdmafs[torch]'"
        raise ImportError(why) from error


def tensor_of(array: Array) -> Any:
    """Return a tensor with a copy of an array. Raises TypeError for elements that torch does not have."""
    torch = _torch()
    native = np.array(array, array.dtype.newbyteorder("="), order="C")
    if array.dtype in EXTENSIONS.values():
        bits = torch.from_numpy(native.view(bits_of(array.dtype)))
        return bits.view(_dtype(torch, "array", array.dtype))
    return torch.from_numpy(native)


def _dtype(torch: Any, name: str, dtype: DType) -> Any:
    found = None
    if dtype in EXTENSIONS.values():
        found = getattr(torch, dtype.name, None)
    else:
        with contextlib.suppress(TypeError):
            found = torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype
    if found is None:
        raise TypeError(f"{name!r}: torch has no type for elements of {dtype}")
    return found


def _runs(items: Iterable[_Item]) -> Iterator[_Run]:
    """Return the runs of items that are copied at once."""
    run: _Run | None = None
    for item in sorted(items, key=lambda item: item.address):
        if item.size > _SMALL_BYTES or item.address % item.layout.dtype.itemsize:
            yield _Run(item.address, item.size, [item])
            continue
        end = item.address + item.size
        if run is not None:
            gap = item.address - (run.address + run.size)
            if 0 <= gap < _ALIGN * 4 and end - run.address <= _RUN_BYTES_MAX:
                run = _Run(run.address, end - run.address, [*run.items, item])
                continue
            yield run
        start = item.address - item.address % _ALIGN
        run = _Run(start, end - start, [item])
    if run is not None:
        yield run


def _bytes_at(torch: Any, address: int, size: int) -> Any:
    """Return a tensor of mapped bytes. It is not made of a read-only array, of which torch would warn."""
    memory = (ctypes.c_ubyte * size).from_address(address)
    return torch.from_numpy(np.ctypeslib.as_array(memory))


# -- copying -------------------------------------------------------------------------------------

# An address in memory, and the bytes, maybe a tensor, that are copied to it or from it.
_Copy = tuple[int, Any]


def _copy(torch: Any, target: Any, copies: Sequence[_Copy]) -> None:
    """Copy mapped bytes to a device, and return when they are there."""
    size = sum(len(tensor) for _, tensor in copies)
    if target.type == "cuda" and size > PIECE_BYTES:
        with torch.cuda.device(target):
            threads = min(_THREADS_MAX, len(os.sched_getaffinity(0)), -(-size // PIECE_BYTES))
            try:
                memory = [_pinned(torch) for _ in range(_PIECES_EACH * threads)]
            except RuntimeError as error:
                log.warning("%d bytes are copied without pinned memory: %s", size, error)
            else:
                _copy_by_threads(torch, target, copies, memory)
                return
    for address, tensor in copies:
        tensor.copy_(_bytes_at(torch, address, len(tensor)))


def _pinned(torch: Any) -> Any:
    return torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)


def pieces(copies: Iterable[_Copy], size: int) -> Iterator[_Copy]:
    """Yield the copies in pieces of `size` bytes at most."""
    for address, part in copies:
        for start in range(0, len(part), size):
            yield address + start, part[start : start + size]


class Shared(Iterator[T]):
    """An iterator from which several threads take."""

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self._taking = threading.Lock()

    def __next__(self) -> T:
        with self._taking:
            return next(self._items)


def _copy_by_threads(torch: Any, target: Any, copies: Sequence[_Copy], memory: list[Any]) -> None:
    """Copy through pinned `memory`: a thread fills one piece of it while the device fetches another."""
    shared = Shared(pieces(copies, PIECE_BYTES))
    current = torch.cuda.current_stream(target)

    def work(first: int) -> None:
        own = [(one, torch.cuda.Event()) for one in memory[first : first + _PIECES_EACH]]
        stream = torch.cuda.Stream(target)
        stream.wait_stream(current)  # the tensors' memory may have been in use until then
        try:
            with torch.cuda.stream(stream):
                for (pinned, fetched), (address, tensor) in zip(itertools.cycle(own), shared):
                    fetched.synchronize()
                    ctypes.memmove(pinned.data_ptr(), address, len(tensor))
                    tensor.copy_(pinned[: len(tensor)], non_blocking=True)
                    fetched.record(stream)
        finally:
            stream.synchronize()

    firsts = range(0, len(memory), _PIECES_EACH)
    with ThreadPoolExecutor(len(firsts), "irdmafs-copy") as threads:
        list(threads.map(work, firsts))


class Carrier:
    """Brings bytes of devices to the host, for one thread; each piece stays until the next one comes."""

    _memory: Any = None

    def bring(self, piece: Any) -> int:
        """Return the host's address of a piece of a flat tensor, of PIECE_BYTES at most."""
        torch = _torch()
        if self._memory is None:
            try:
                self._memory = _pinned(torch)
            except RuntimeError as error:
                log.warning("tensors are stored without pinned memory: %s", error)
                self._memory = torch.empty(PIECE_BYTES, dtype=torch.uint8)
        here = self._memory[: len(piece)]
        stream = torch.cuda.Stream(piece.device)
        with torch.cuda.stream(stream):
            here.copy_(piece, non_blocking=True)
        stream.synchronize()
        return int(here.data_ptr())


def host_parts(parts: Iterable[Any]) -> Iterator[memoryview]:
    """Yield the bytes of the host and of devices, which are copied in pieces."""
    for part in parts:
        if isinstance(part, memoryview):
            yield part
        else:
            yield from (piece.cpu().numpy().data for piece in part.split(COPY_BYTES))


# -- memory that is lent -------------------------------------------------------------------------


def is_host(device: object) -> bool:
    """Return whether a device is the host. Raises ImportError without torch, RuntimeError for no device."""
    return bool(_torch().device(device).type == "cpu")


def wrapped(array: Array) -> Any:
    """Return host memory as a tensor."""
    return _torch().from_numpy(array)


class LentMemory:
    """Memory of a device that torch has allocated. `fd`: a dma-buf that begins with it, -1 for none."""

    def __init__(self, size: int, device: object) -> None:
        torch = _torch()
        target = torch.device(device)
        self.fd = -1
        if target.type != "cuda":
            self.bytes = torch.empty(size, dtype=torch.uint8, device=target)
            return
        # The exported range begins and ends at a page boundary of the host.
        whole = size + -size % mmap.PAGESIZE
        room = torch.empty(whole + mmap.PAGESIZE, dtype=torch.uint8, device=target)
        start = -room.data_ptr() % mmap.PAGESIZE
        self.bytes = room[start : start + size]
        self.fd, why_not = _export(torch, target, self.bytes.data_ptr(), whole)
        if why_not:
            log.info("%d bytes of %s are filled by copying: %s", size, target, why_not)

    def settle(self) -> None:
        """Wait until the device has done all work on the memory: a network card would not wait."""
        if self.bytes.device.type == "cuda":
            _torch().cuda.current_stream(self.bytes.device).synchronize()

    def see(self) -> None:
        """Make data that a network card has written visible to kernels that are launched from now on."""
        if self.bytes.device.type == "cuda":
            with _torch().cuda.device(self.bytes.device):
                # Where writes are ordered anyway, flushing may be unsupported, which is an error.
                _driver().cuFlushGPUDirectRDMAWrites(_FLUSH_CONTEXT, _FLUSH_TO_OWNER)

    def head(self, size: int) -> bytes:
        return bytes(self.bytes[:size].cpu().numpy())

    def copy(self, path: str, fd: int, size: int) -> None:
        """Copy an open file here, and return when it is there."""
        source = _files.Mapping(path, fd, size).bytes
        _copy(_torch(), self.bytes.device, [(source.ctypes.data, self.bytes[:size])])

    def show(self, path: str, layout: Layout) -> Any:
        return view(path, self.bytes, layout)


def _export(torch: Any, target: Any, address: int, size: int) -> tuple[int, str]:
    """Return a dma-buf, or -1 and the reason."""
    try:
        export = _driver().cuMemGetHandleForAddressRange
    except (OSError, AttributeError):
        return -1, "the driver cannot export memory (CUDA 11.7 and newer can)"
    export.argtypes = (
        ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int, ctypes.c_ulonglong,
    )  # fmt: skip
    fd = ctypes.c_int(-1)
    with torch.cuda.device(target):
        error = export(ctypes.byref(fd), address, size, _DMA_BUF, 0)
    if error or fd.value < 0:
        return -1, f"the driver exports no dma-buf of it (CUDA error {error})"
    os.set_inheritable(fd.value, False)
    return fd.value, ""


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def view(path: str, memory: Any, layout: Layout) -> Any:
    """Return the tensor of this layout in a tensor of bytes: a view, or a copy if torch cannot view
    elements that are not aligned. Raises FormatError, and TypeError for unknown elements."""
    torch = _torch()
    dtype, shape, offset, order = layout
    kind = _dtype(torch, path, dtype)
    size = size_bytes(dtype, shape)
    flat = memory[offset : offset + size]
    if len(flat) != size:
        raise FormatError(path, "its data are cut off")
    if not dtype.isnative and dtype.itemsize > 1:
        native = flat.cpu().numpy().view(dtype).astype(dtype.newbyteorder("="))
        flat = torch.from_numpy(native).to(memory.device)
    elif flat.storage_offset() % dtype.itemsize:
        flat = flat.clone()
    flat = flat.view(kind)
    if order == "C":
        return flat.view(shape)
    return flat.view(shape[::-1]).permute(*reversed(range(len(shape))))
