"""Memory that files are read into, again and again.

A mount of a cluster reads into it straight from the store nodes, by RDMA where there is a way, and past the
host's cache: once the first version was read, nothing is mapped, copied or registered any more. Host memory
is a memfd, sealed so that it cannot shrink under the mount; CUDA memory is exported as a dma-buf, which
network cards reach by themselves. The mount gets hold of either by its descriptor, and lets go of it when
the buffer's pipe is closed, at the latest when the process ends.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import mmap
import os
import threading
import weakref
from typing import Any, Literal, NoReturn

import numpy as np

from ..backend.model.values import meminfo
from . import _device
from ._dtypes import Array, Layout
from ._files import Closing, naming, open_to_read, read_version, view

log = logging.getLogger(__name__)

_READ_INTO_XATTR = "user.irdmafs.read_into"
# Errors after which a file is opened and copied instead: the filesystem or mount cannot read into memory,
# the mount may not trace the caller, the file went between two lookups of its name, or an interrupt from
# the keyboard that the program handles has ended the call.
_OPEN_INSTEAD = (
    errno.ENODATA, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, errno.ESTALE, errno.EINTR,
)  # fmt: skip


class Buffer(Closing):
    """``size`` bytes of memory that a Store reads files into, each over what was there before.

    It is host memory, which numpy arrays show; or, with ``device`` ("cpu", "cuda", "cuda:1", a
    torch.device), memory of that device, which torch tensors show. They show the current contents
    of the memory, and keep it when the buffer is closed.

    ``filled`` is how many bytes of a file it holds, ``version`` of which version (None: of a file that is
    on no irdmafs mount). ``filled_by`` is "mount" if the mount read them in, past the cache; "copy" if they
    were copied out of the opened file; else "".

    Raises MemoryError, OSError (ENOSPC, EMFILE), ImportError without torch, and what torch raises.
    """

    def __init__(self, size: int, device: object = None) -> None:
        if size <= 0:
            raise ValueError(f"a buffer of {size} bytes holds nothing")
        self.size = size
        self.filled = 0
        self.version: int | None = None
        self.filled_by: Literal["mount", "copy", ""] = ""
        self._lock = threading.Lock()
        memory: _HostMemory | _device.LentMemory
        if device is None or _device.is_host(device):
            memory = _HostMemory(size, as_tensors=device is not None)
        else:
            memory = _device.LentMemory(size, device)
        self._memory = memory
        try:
            self._lifeline, other_end = os.pipe2(os.O_CLOEXEC)
        except OSError:
            _close([memory.fd])
            raise
        self._end = weakref.finalize(self, _close, [other_end, self._lifeline, memory.fd])

    def __reduce__(self) -> NoReturn:
        raise TypeError("a buffer is this process's memory: make one where it is to be used")

    def close(self) -> None:
        """Have mounts release the memory, after reads under way. Nothing can be read into it after that."""
        with self._lock:
            self._end()

    @property
    def memory(self) -> Any:
        """Return all of the memory, as an array or a tensor of bytes."""
        return self._memory.bytes

    def fill(self, path: str | os.PathLike[str]) -> int:
        """Read a file's current version, whole, and return its size in bytes. When this fails, the
        contents of the buffer are undefined.

        Raises ValueError for a file that does not fit, FileNotFoundError and other OSErrors."""
        with self._lock:
            if not self._end.alive:
                raise ValueError("the buffer is closed")
            self.filled, self.version, self.filled_by = 0, None, ""
            self._memory.settle()
            if not self._filled_by_mount(os.fspath(path)):
                self._copy(os.fspath(path))
            return self.filled

    def _filled_by_mount(self, path: str) -> bool:
        fd = self._memory.fd
        if fd < 0:
            return False
        try:
            with naming(path):
                text = os.getxattr(path, f"{_READ_INTO_XATTR}.{fd}.{self._lifeline}")
        except OSError as error:
            if error.errno == errno.EFBIG:
                raise self._too_small(path, os.stat(path).st_size) from None
            if error.errno not in _OPEN_INSTEAD:
                raise
            log.debug("%s is copied: %s", path, error.strerror)
            return False
        answer = json.loads(text)
        if "why_not" in answer:
            log.debug("%s is copied: %s", path, answer["why_not"])
            return False
        self._memory.see()
        self.filled, self.version, self.filled_by = answer["size"], answer["version"], "mount"
        return True

    def _copy(self, path: str) -> None:
        with open_to_read(path) as (fd, status):
            size = status.st_size
            if size > self.size:
                raise self._too_small(path, size)
            version = read_version(fd)
            if size:
                self._memory.copy(path, fd, size)
            self.filled, self.version, self.filled_by = size, version, "copy"

    def _too_small(self, path: str, size: int) -> ValueError:
        return ValueError(f"{path!r} has {size} bytes, too many for a buffer of {self.size}")

    # -- what it holds ---------------------------------------------------------------------------

    def head(self, size: int) -> bytes:
        """Return the first ``size`` bytes of the file, fewer if it is shorter."""
        return self._memory.head(min(size, self.filled))

    def show(self, path: str, layout: Layout) -> Any:
        """Return the array or tensor of this layout in the buffer. Raises FormatError, TypeError."""
        return self._memory.show(path, layout)


def _close(descriptors: list[int]) -> None:
    for fd in descriptors:
        if fd >= 0:
            os.close(fd)


class _HostMemory:
    """A memfd, which numpy arrays show, or torch tensors."""

    def __init__(self, size: int, *, as_tensors: bool) -> None:
        available = meminfo("MemAvailable")
        if size > available:
            # The kernel would find out page by page, and kill some process.
            raise MemoryError(f"a buffer of {size} bytes: {available} are available")
        self.fd = os.memfd_create("irdmafs-buffer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Allocated by this process, so that it gets the error if there is no memory.
            os.posix_fallocate(self.fd, 0, size)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
            self._array: Array = np.frombuffer(mmap.mmap(self.fd, size), np.uint8)
        except BaseException:
            os.close(self.fd)
            raise
        self.bytes: Any = _device.wrapped(self._array) if as_tensors else self._array

    def settle(self) -> None:
        pass

    def see(self) -> None:
        pass

    def head(self, size: int) -> bytes:
        return self._array[:size].tobytes()

    def copy(self, path: str, fd: int, size: int) -> None:
        done = 0
        with naming(path):
            while done < size:
                count = os.preadv(fd, [self._array[done:size].data], done)
                if not count:
                    raise OSError(errno.EIO, "The file shrank while it was read")
                done += count

    def show(self, path: str, layout: Layout) -> Any:
        shows = view if self.bytes is self._array else _device.view
        return shows(path, self.bytes, layout)
