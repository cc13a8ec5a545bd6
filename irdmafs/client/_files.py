"""Files as memory: mapping them to read, and writing arrays from where they lie."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import secrets
import stat
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Concatenate, ParamSpec, Self, TypeAlias, TypeVar

import numpy as np

from ..backend.model.values import filesystem_of
from ._dtypes import Array, Layout, size_bytes

StrPath: TypeAlias = str | os.PathLike[str]
AnyPath = TypeVar("AnyPath", bound=StrPath)
T = TypeVar("T")
P = ParamSpec("P")

# A path is looked up so often if others replace or move what it leads to, each time twice by the kernel.
_LOOKUPS_MAX = 4
_VERSION_XATTR = "user.irdmafs.version"
_DISCARD_XATTR = "user.irdmafs.discard"
_KEEPS_NO_PAGES_XATTR = "user.irdmafs.keeps_no_pages"
NO_XATTR = (errno.ENODATA, errno.EOPNOTSUPP)
# Buffers are written together until they have this size, or are as many as a call takes.
_TOGETHER_BYTES = 1 << 20
_IOV_MAX = 1024

RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2
_AT_FDCWD = -100
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value


class Closing(ABC):
    """A context manager, which is closed at the end of the block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Release what it has."""


class FormatError(ValueError):
    """A file that should hold arrays does not: ``path`` names it, ``defect`` says what is wrong."""

    def __init__(self, path: str, defect: str) -> None:
        super().__init__(path, defect)
        self.path = path
        self.defect = defect

    def __str__(self) -> str:
        return f"{self.path}: {self.defect}"


def failed() -> OSError:
    """Return the error of a call of libc."""
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


def map_file(fd: int, size: int, access: int = mmap.PROT_READ) -> int:
    """Map a file, shared, without a descriptor of the mapping's own; return the address. Raises OSError."""
    address = _libc.mmap(None, size, access, mmap.MAP_SHARED, fd, 0)
    if address == _MAP_FAILED:
        raise failed()
    return int(address)


unmap = _libc.munmap


class Mapping:
    """A whole file in memory, shared and read-only, for as long as an array of it lives.

    mmap.mmap keeps a duplicate of the descriptor (until Python 3.13 always), and a model of some
    thousand files would meet RLIMIT_NOFILE; a mapping of our own needs none. Arrays come from
    numpy's array interface rather than from a writable buffer, so that setting
    ``flags.writeable`` on one is refused instead of ending in a SIGSEGV.
    """

    def __init__(self, path: str, fd: int, size: int) -> None:
        with naming(path):
            address = map_file(fd, size)
        self.size = size
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (size,),
            "data": (address, True),
        }
        # Not at exit: other exit handlers and daemon threads may still use arrays.
        weakref.finalize(self, unmap, address, size).atexit = False

    @property
    def bytes(self) -> Array:
        """Return the whole file as a read-only array of bytes that keeps the mapping."""
        return np.asarray(self)


def view(path: str, data: Array, layout: Layout) -> Array:
    """Return the array of this layout in a file's mapped bytes. Raises FormatError for what numpy cannot
    represent."""
    dtype, shape, offset, order = layout
    try:
        if size_bytes(dtype, shape) == 0:
            array: Array = np.ndarray(shape, dtype)
            array.flags.writeable = False
            return array
        return np.ndarray(shape, dtype, data, offset, order=order)
    except (ValueError, OverflowError, TypeError, MemoryError) as error:
        defect = f"numpy cannot hold an array of {len(shape)} dimensions: {error}"
        raise FormatError(path, defect) from None


@contextlib.contextmanager
def naming(path: str, *, instead: bool = False) -> Iterator[None]:
    """Add the path to OSErrors of calls that know only a descriptor; `instead`: or another path."""
    try:
        yield
    except OSError as error:
        if instead or error.filename is None:
            error.filename = path
        raise


def look_up(
    call: Callable[Concatenate[AnyPath, P], T], path: AnyPath, *args: P.args, **kwargs: P.kwargs
) -> T:
    """Return what a system call says about a path, which it looks up once more if another host has replaced
    or moved what it found (ESTALE). Raises FileNotFoundError if that was gone each time, and OSError."""
    for _ in range(_LOOKUPS_MAX):
        try:
            return call(path, *args, **kwargs)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


@contextlib.contextmanager
def open_to_read(
    path: str, flags: int = 0, *, privately: bool = False
) -> Iterator[tuple[int, os.stat_result]]:
    """Return the descriptor and status of a regular file; raise FileNotFoundError for anything else. With
    O_NOFOLLOW in `flags` also for a link. `privately`: the caller reads and maps the file and gives its
    pages to no pipe, socket or device: when it is closed and unmapped, a store node here may use its memory
    again."""
    if privately:
        with contextlib.suppress(OSError):
            os.getxattr(path, _KEEPS_NO_PAGES_XATTR)
    with naming(path):
        try:
            # Opening a FIFO would wait for its writer.
            fd = look_up(os.open, path, flags | os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
                raise
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise FileNotFoundError(errno.ENOENT, "Not a regular file", path)
            yield fd, status
        finally:
            os.close(fd)


def read_at(fd: int, size: int, offset: int) -> bytes:
    """Return ``size`` bytes at ``offset``, fewer only at the end of the file. Headers are read, not
    mapped: a file that shrinks meanwhile is then an error, not a SIGBUS."""
    data = os.pread(fd, size, offset)
    while len(data) < size:
        more = os.pread(fd, size - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data


def read_version(file: StrPath | int) -> int | None:
    """Return the version of a file of an irdmafs mount; None on other filesystems."""
    try:
        return int(os.getxattr(file, _VERSION_XATTR))
    except OSError as error:
        if error.errno in NO_XATTR:
            return None
        raise


def is_versioned(directory: StrPath) -> bool:
    """Return whether a directory lies on irdmafs. Raises OSError."""
    return _is_irdmafs(os.stat(directory).st_dev, int(time.monotonic() * 10))


@lru_cache(8)
def _is_irdmafs(device: int, tenths: int) -> bool:
    # Later the kernel may use the number for another mount.
    return filesystem_of(device) == b"fuse.irdmafs"


def open_anew(path: str, view: StrPath | None = None, access: int = os.O_WRONLY) -> int:
    """Open a file to write it from its beginning, which makes it if it is not there; with O_RDWR, also to
    read it if the caller may. `view`: a path of the private view of its directory, in which nobody else
    writes. Raises OSError."""
    flags = access | os.O_TRUNC | os.O_CLOEXEC
    if view is not None:
        with contextlib.suppress(FileNotFoundError):
            return look_up(os.open, os.path.join(view, os.path.basename(path)), flags)
    try:
        return look_up(os.open, path, flags | os.O_CREAT, 0o666)
    except PermissionError:
        if access == os.O_WRONLY:
            raise
    return open_anew(path)


@contextlib.contextmanager
def begun(path: str, view: StrPath | None = None, access: int = os.O_WRONLY) -> Iterator[int]:
    """Give a descriptor to write a new version of a file of irdmafs, which closing it publishes; after an
    exception nothing is. `view` as in `open_anew`. Raises OSError, with the path."""
    with naming(path):
        fd = open_anew(path, view, access)
        try:
            yield fd
        except BaseException:
            discard(fd)
            raise


def write_version(path: str, contents: Iterable[memoryview], view: StrPath | None = None) -> int:
    """Write a new version of a file of irdmafs, and return its descriptor (see `begun`)."""
    with begun(path, view) as fd:
        write_all(fd, contents)
    return fd


def replace_file(path: str, contents: Iterable[memoryview], *, versioned: bool) -> None:
    """Replace the contents of ``path``, whole or not at all; the file is created if it does not exist.

    ``versioned`` says that the file lies on irdmafs: there truncating begins a new version, which
    closing publishes. Elsewhere a file of another name is written and renamed over it. Either way
    readers that have the old content open or mapped keep it. Raises OSError, with the path.
    """
    if versioned:
        fd = write_version(path, contents)
        with naming(path):
            os.close(fd)
        return
    temporary = os.path.join(os.path.dirname(path), f".{secrets.token_hex(8)}.tmp")
    with naming(path):
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            try:
                write_all(fd, contents)
            finally:
                os.close(fd)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise


def rename(path: StrPath, new: StrPath, flags: int = 0) -> None:
    """Do as renameat2(2). Raises OSError."""
    names = os.fsencode(path), os.fsencode(new)
    for _ in range(_LOOKUPS_MAX):
        if not _libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], flags):
            return
        code = ctypes.get_errno()
        if code != errno.ESTALE:
            break
        # The kernel has to look up what another host has moved: it cannot while it holds a rename's locks.
        os.path.lexists(path)
        os.path.lexists(new)
    raise OSError(code, os.strerror(code), os.fspath(path))


def discard(fd: int) -> None:
    """Close a file without publishing what was written so far."""
    try:
        os.setxattr(fd, _DISCARD_XATTR, b"1")
    except OSError:
        pass
    finally:
        with contextlib.suppress(OSError):
            os.close(fd)


def write_all(fd: int, contents: Iterable[memoryview]) -> None:
    """Write buffers of bytes one after the other, straight from their memory, in few calls."""
    together, size = [], 0
    for one in contents:
        together.append(one)
        size += len(one)
        if size >= _TOGETHER_BYTES or len(together) == _IOV_MAX:
            _write_together(fd, together)
            together, size = [], 0
    _write_together(fd, together)


def _write_together(fd: int, buffers: list[memoryview]) -> None:
    written = os.writev(fd, buffers) if buffers else 0
    for one in buffers:
        done = min(written, len(one))
        written -= done
        while done < len(one):
            done += os.write(fd, one[done:])
