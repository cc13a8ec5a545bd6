"""Storing large files by several threads.

The kernel lets one thread at a time write to a file. So a large version is stored through a mapping of its
file, whose room is allocated before. The kernel copies there (process_vm_writev): for it a file that
somebody truncates meanwhile is an error, for stores of our own it would be SIGBUS. *Measured* with an H200
and 16 processors, 8.7 GB on a mount: 17 GB/s out of CUDA memory and 22 of the host's; 1 and 5 by write(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from . import _device
from ._files import begun, failed, map_file, naming, unmap, write_all

BYTES_MIN = 64 << 20
_PIECE_BYTES = _device.PIECE_BYTES
_THREADS_MAX = 16
# Fewer processors gain nothing over write(2), unless they wait for a device.
_PROCESSORS_MIN = 4
_UNMAPPED_XATTR = "user.irdmafs.unmapped"
# The filesystem allocates nothing, or does not map; the file may not be read; a sandbox refuses the call.
_CANNOT = (errno.EOPNOTSUPP, errno.ENODEV, errno.EACCES, errno.EPERM, errno.ENOSYS)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
_libc.process_vm_writev.restype = ctypes.c_ssize_t
_Range = ctypes.c_size_t * 2  # struct iovec


def pays(size: int, *, on_device: bool) -> bool:
    """Return whether threads store so many bytes sooner than write(2) does."""
    return size >= BYTES_MIN and (on_device or _threads() >= _PROCESSORS_MIN)


def replace_file(path: str, size: int, parts: Iterable[Any]) -> None:
    """Make a new version of a file of irdmafs, whole or not at all. Raises OSError, with the path."""
    with begun(path, access=os.O_RDWR) as fd:
        address = _mapped(fd, size)
        if address is None:
            write_all(fd, _device.host_parts(parts))
        else:
            try:
                _store(address, parts)
            finally:
                unmap(address, size)
            with contextlib.suppress(OSError):
                os.setxattr(fd, _UNMAPPED_XATTR, b"1")
    with naming(path):
        os.close(fd)


def _threads() -> int:
    return min(_THREADS_MAX, len(os.sched_getaffinity(0)))


def _mapped(fd: int, size: int) -> int | None:
    """Map a file with room for so many bytes. Return None where that cannot be done."""
    address = None
    try:
        if _libc.fallocate(fd, 0, 0, size):
            raise failed()
        address = map_file(fd, size, mmap.PROT_READ | mmap.PROT_WRITE)
        _copy(address, address, 1)
    except OSError as error:
        if address is not None:
            unmap(address, size)
        if error.errno not in _CANNOT:
            raise
        return None
    return address


def _store(address: int, parts: Iterable[Any]) -> None:
    pieces = _device.Shared(_device.pieces(_placed(address, parts), _PIECE_BYTES))

    def work() -> None:
        carrier = _device.Carrier()
        for target, piece in pieces:
            if isinstance(piece, memoryview):
                source = np.frombuffer(piece, np.uint8).ctypes.data
            else:
                source = carrier.bring(piece)
            _copy(source, target, len(piece))

    begun = list[Future[None]]()
    with ThreadPoolExecutor(_threads(), "irdmafs-store") as threads:
        with contextlib.suppress(RuntimeError):  # while the program ends, no thread can be started
            for _ in range(_threads() - 1):
                begun.append(threads.submit(work))
        work()
        for one in begun:
            one.result()


def _placed(address: int, parts: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    for part in parts:
        yield address, part
        address += len(part)


def _copy(source: int, target: int, size: int) -> None:
    """Copy memory of this process. Raises OSError EIO if the target's file was truncated."""
    while size:
        done = _libc.process_vm_writev(
            os.getpid(), _Range(source, size), 1, _Range(target, size), 1, 0
        )
        if done <= 0:
            error = failed()
            if error.errno == errno.EFAULT:
                raise OSError(errno.EIO, "The file was truncated while it was written")
            raise error
        source, target, size = source + done, target + done, size - done
