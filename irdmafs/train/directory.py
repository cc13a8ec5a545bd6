"""A training directory as files: names, versions, locks, and waiting for a change."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import mmap
import os
import secrets
import shutil
import stat
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from ..client import FormatError, _files
from ..client._dtypes import Array, Value, dtype_of_code
from ..client._safetensors import HEADER_MAX_BYTES, Header, header_size, parse_header
from .config import TrainConfig
from .errors import TrainError
from .layout import ModelLayout, Shard
from .plan import Plan

T = TypeVar("T")

# The plan of a version lies in its directory from the beginning.
PLAN = "version.json"
# The directories of a version that have a file for each shard.
PARTS = ("params", "state")
# Workers that ended and parts whose reducer ended send no event: look after them this often.
LOOK_S = 1.0
_CHANGES = "user.irdmafs.changes"
_DISCARD = "user.irdmafs.discard"
# Without irdmafs below there is nothing to wait for: look again.
_POLL_S = 0.005
# Shards that are written or opened at once.
_AT_ONCE = 16
# The largest config.toml, layout.json or plan: 10,000 workers and 100,000 parameters fit.
_SMALL_MAX_BYTES = 16 << 20
# Small files that are not read again as long as they are the same.
_READ_KEPT = 8
_libc = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD, _RENAME_NOREPLACE = -100, 1
_F_OFD_GETLK, _F_OFD_SETLK = 36, 37
_FLOCK = struct.Struct("hhqqi4x")


class TrainDirectory:
    """The paths of a training directory, and what they hold."""

    def __init__(self, directory: str | os.PathLike[str], name: str = ".train") -> None:
        """`name`: of the directory of a training that has not begun yet."""
        self.models = Path(directory)
        self.path = self.models / name
        self.config_path = self.path / "config.toml"
        self.layout_path = self.path / "layout.json"
        self.push = self.path / "push"
        self.staging = self.path / "staging"
        self.since = self.path / "since"
        self.versions = self.path / "versions"
        self.next = self.path / "next"
        self.empty = self.path / "empty"
        self.aside = self.path / "aside"
        self.workers = self.path / "workers"
        self.reducers = self.path / "reducers"
        self.refused = self.path / "refused"
        self.status = self.path / "status"
        self.members = self.path / "members.json"
        self._read: dict[Path, tuple[tuple[int, int, int], Any]] = {}

    @functools.cached_property
    def is_on_irdmafs(self) -> bool:
        """Return whether the directory lies on a mount of irdmafs. Raises OSError."""
        return _files.lies_on_irdmafs(self.path)

    def config(self) -> TrainConfig:
        """Read config.toml. Raises TrainError."""
        path = self.config_path
        try:
            return self._once(path, lambda: TrainConfig.read(path, read_small(path)))
        except FileNotFoundError:
            raise self._not_begun() from None

    def _not_begun(self) -> TrainError:
        return TrainError(
            f"{self.models} is not trained in: irdmafs train init {self.models} begins"
        )

    def layout(self) -> ModelLayout:
        """Read layout.json. Raises TrainError."""
        path = self.layout_path
        try:
            return self._once(path, lambda: msgspec.json.decode(read_small(path), type=ModelLayout))
        except FileNotFoundError:
            raise self._not_begun() from None
        except msgspec.MsgspecError as error:
            raise TrainError(f"{path}: {error}") from None

    def version_numbers(self) -> list[int]:
        """Return the numbers of the versions that are there, in order."""
        return sorted(int(name) for name in os.listdir(self.versions) if name.isdecimal())

    def newest(self) -> int:
        """Return the number of the newest version. Raises TrainError where there is none."""
        numbers = self.version_numbers()
        if not numbers:
            raise TrainError(f"{self.versions} has no version: irdmafs train init makes the first")
        return numbers[-1]

    def version(self, number: int) -> Path:
        return self.versions / str(number)

    def plan_of(self, number: int) -> Plan:
        """Read the plan that a version was made by. Raises FileNotFoundError."""
        return self._plan(self.version(number) / PLAN)

    def _plan(self, path: Path) -> Plan:
        return self._once(path, lambda: read_plan(path))

    def _once(self, path: Path, read: Callable[[], T]) -> T:
        """Return what a small file holds, which is read again if it has changed. Raises FileNotFoundError,
        and what `read` raises."""
        status = path.stat()
        seen = (status.st_ino, status.st_ctime_ns, status.st_size)
        known = self._read.pop(path, None)
        if known is None or known[0] != seen:
            known = (seen, read())
        self._read[path] = known
        while len(self._read) > _READ_KEPT:
            del self._read[next(iter(self._read))]
        value: T = known[1]
        return value

    def newest_plan(self) -> Plan:
        """Read the plan of the newest version, which may have gone since its directory was listed."""
        while True:
            number = self.newest()
            try:
                return self.plan_of(number)
            except FileNotFoundError:
                if self.newest() == number:
                    raise TrainError(f"{self.version(number)} has no {PLAN}") from None

    def making(self, version: int, names: Iterable[str]) -> tuple[Path, Plan] | None:
        """Return the directory in next/ where a version is being made, and its plan: of its attempts the
        last. None if there is no plan yet. `names`: of the directories in next/."""
        for attempt in reversed(_attempts(version, names)):
            path = self.attempt(version, attempt)
            with contextlib.suppress(FileNotFoundError):
                return path, self._plan(path / PLAN)
        return None

    def attempt(self, version: int, attempt: int) -> Path:
        """Return the directory of an attempt to make a version: the first is 0."""
        return self.next / (f"{version}.{attempt}" if attempt else str(version))

    def member_clocks(self) -> dict[str, int]:
        """Return the workers that take part, and the clock at which each joined."""
        try:
            return msgspec.json.decode(read_small(self.members), type=dict[str, int])
        except (FileNotFoundError, msgspec.MsgspecError):
            return {}


def _attempts(version: int, names: Iterable[str]) -> list[int]:
    found = []
    for name in names:
        number, _, attempt = name.partition(".")
        if number == str(version) and (not attempt or attempt.isdecimal()):
            found.append(int(attempt or 0))
    return sorted(found)


def read_small(path: Path) -> bytes:
    """Read a file of a run other than those of tensors. Whoever may write in the run can put a FIFO in its
    place, which would be waited for. Raises FileNotFoundError, other OSErrors, and TrainError."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise TrainError(f"{path} is not a regular file")
        if status.st_size > _SMALL_MAX_BYTES:
            raise TrainError(f"{path} has {status.st_size} bytes, more than {_SMALL_MAX_BYTES}")
        return _files.read_at(fd, status.st_size, 0)
    finally:
        os.close(fd)


def read_plan(path: Path) -> Plan:
    """Read a plan. Raises FileNotFoundError and TrainError."""
    try:
        return msgspec.json.decode(read_small(path), type=Plan)
    except msgspec.MsgspecError as error:
        raise TrainError(f"{path}: {error}") from None


def is_published(path: Path, status: os.stat_result | None = None) -> bool:
    """Return whether a file is there, whole: on the host that writes it a new file is seen as it grows."""
    try:
        size = (status or os.stat(path)).st_size
        return size > 0 and _files.read_version(os.fspath(path)) != 0
    except FileNotFoundError:
        return False


def is_made(target: Path, shard: str) -> bool:
    """Return whether a shard of a version that is being made is there."""
    return all(is_published(target / part / shard) for part in PARTS)


def _aside(path: Path) -> Path:
    """Return a name beside another that only this process uses, and nobody looks at."""
    return path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")


def rename_new(path: Path, new: Path) -> None:
    """Give a file another name. Raises FileExistsError if something has it, and OSError."""
    names = os.fsencode(path), os.fsencode(new)
    if _libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_NOREPLACE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), os.fspath(path))


def replace(path: Path, data: bytes) -> None:
    """Replace a small file, whole. Raises OSError."""
    temporary = _aside(path)
    temporary.write_bytes(data)
    os.replace(temporary, path)


def remove(path: Path) -> None:
    """Remove a file, or a directory and all that is in it; it may be gone, or go meanwhile."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
    except FileNotFoundError:
        pass


def put_aside(train: TrainDirectory, path: Path) -> None:
    """Take a file or directory away, at once and whole, to be removed later; it may be gone. Raises
    OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, train.aside / secrets.token_hex(8))


def discard(train: TrainDirectory, path: Path) -> None:
    """Remove what is below staging/: a push, or a directory of a worker. Somebody, or a request that was
    not answered, may be about to publish it: it is renamed first, so either it is published whole or it
    never will be. Raises OSError."""
    gone = train.staging / f"@{secrets.token_hex(8)}"
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, gone)
        remove(gone)


def lead_to_newest(train: TrainDirectory) -> None:
    """Make since/0 a link to the newest version, where that is not done by irdmafs itself."""
    if train.is_on_irdmafs:
        return
    link = _aside(train.since / "0")
    link.unlink(missing_ok=True)
    link.symlink_to(f"../versions/{train.newest()}")
    os.replace(link, train.since / "0")


class ShardFile:
    """A .safetensors file in memory: its header, and its bytes, mapped."""

    def __init__(
        self,
        path: Path,
        header_of: Callable[[str, int, int], Header] | None = None,
        *,
        shown: bool = False,
    ) -> None:
        """`shown`: its arrays are given to programs, which may send them from where they lie. Raises
        FileNotFoundError and FormatError, and what `header_of` raises, which reads the header of a file of
        another kind."""
        name = os.fspath(path)
        open_file = _files.open_to_read if shown else _files.open_privately
        with open_file(name) as (fd, status):
            self.header = (header_of or read_header)(name, fd, status.st_size)
            self._data = _files.Mapping(name, fd, status.st_size).bytes

    def bits(self, dtype: np.dtype[Any], offset: int, count: int) -> Array:
        """Return elements, as numbers of this type or as integers that hold their bits."""
        return self._data[offset : offset + count * dtype.itemsize].view(dtype)

    def tensor(self, name: str) -> Array:
        """Return a tensor as it lies in the file, read-only. Raises KeyError."""
        found = self.header.tensors[name]
        return _files.view(name, self._data, found.dtype, found.shape, found.offset)


def in_parallel(do: Callable[[Shard], T], shards: Sequence[Shard]) -> list[T]:
    """Do the same with each shard, several at once: they lie on different store nodes, and all workers
    begin at the same time, so in turns all would use the same links."""
    if len(shards) == 1:
        return [do(shards[0])]
    with ThreadPoolExecutor(min(len(shards), _AT_ONCE), "shard") as pool:
        return list(pool.map(do, shards))


def gather(layout: ModelLayout, params: Path) -> dict[str, Value]:
    """Return all parameters of a version from its shards, `params`/K: shown where they lie, copied where a
    shard ends within one. Raises FileNotFoundError and FormatError."""
    found: dict[str, list[Array]] = {}
    shards = layout.shards()
    files = in_parallel(lambda shard: ShardFile(params / shard.name, shown=True), shards)
    for shard, file in zip(shards, files, strict=True):
        for part in shard.slices:
            found.setdefault(part.parameter.name, []).append(file.tensor(part.parameter.name))
    result = {}
    for parameter in layout.parameters:
        dtype, extension = dtype_of_code(parameter.dtype)
        parts = found.get(parameter.name, [np.empty(0, dtype)])
        array = parts[0] if len(parts) == 1 else np.concatenate(parts)
        array.flags.writeable = False
        result[parameter.name] = Value(array.reshape(parameter.shape), extension)
    return result


def read_header(path: str, fd: int, size: int, most: int = HEADER_MAX_BYTES) -> Header:
    """Read the header of an open .safetensors file, of `most` bytes at most. Raises FormatError."""
    length = header_size(path, _files.read_at(fd, 8, 0), size)
    if length > most:
        raise FormatError(path, f"the header has {length} bytes, more than {most}")
    return parse_header(path, _files.read_at(fd, length, 8), size)


class _Shown:
    """The memory of a mapped file as numpy sees it. A thread that is about to end may still have a
    reference to an array of it, with which mmap.mmap would not let it be unmapped."""

    def __init__(self, memory: mmap.mmap) -> None:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (len(memory),),
            "data": (address, False),
        }


@contextlib.contextmanager
def new_file(path: Path, size: int, *, versioned: bool) -> Iterator[Array]:
    """Give the memory of a file that is to have `size` bytes, and publish it, whole, at the end of the
    block, unless that raises. No array of it may be used any more then. A file that was begun and not
    published is begun anew.

    On irdmafs (`versioned`) the file is written in place: it has no version until it is closed. Elsewhere
    it gets its name when it is whole.
    """
    written = path if versioned else path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(written, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        # Allocated: a full filesystem is an error here, and not a SIGBUS.
        os.posix_fallocate(fd, 0, size)
        with mmap.mmap(fd, size) as memory:
            yield np.asarray(_Shown(memory))
    except BaseException:
        with contextlib.suppress(OSError):
            if versioned:
                os.setxattr(fd, _DISCARD, b"1")
            else:
                written.unlink()
        with contextlib.suppress(OSError):
            os.close(fd)
        raise
    os.close(fd)
    if not versioned:
        written.rename(path)


class Lock:
    """A file that this process has locked, until it ends or `close` is called. It is a lock of the open
    file (F_OFD_SETLK), so it does not end with other descriptors of the process."""

    def __init__(self, fd: int, path: Path) -> None:
        self._fd = fd
        self.path = path

    @classmethod
    def take(cls, path: Path, content: bytes = b"") -> Lock | None:
        """Lock a file, which is made if there is none; None if somebody else has it locked. `content`
        becomes what the file holds. Raises OSError."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.fcntl(fd, _F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, 0, 0, 0, 0))
            if content:
                os.ftruncate(fd, 0)
                os.pwrite(fd, content, 0)
                os.fsync(fd)
            return cls(fd, path)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return None
            raise

    @property
    def is_held(self) -> bool:
        """Return whether the lock still holds: a host that was cut off for too long loses its locks."""
        if self._fd < 0:
            return False
        try:
            fcntl.fcntl(self._fd, _F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, 0, 0, 0, 0))
            return os.fstat(self._fd).st_nlink > 0
        except OSError:
            return False

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        with contextlib.suppress(OSError):
            os.close(fd)


def is_locked(path: Path) -> bool:
    """Return whether somebody has a file locked. One that is not there is not, nor is a link."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return False
        raise
    try:
        answer = fcntl.fcntl(fd, _F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, 0, 0, 0, 0))
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
    finally:
        os.close(fd)


class Changes:
    """Waits for a change of anything below a directory. No change is missed that is made after this object:
    make it before looking."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._path = os.fspath(path)
        self._counter: str | None = None
        try:
            self._counter = os.getxattr(self._path, _CHANGES).decode()
        except OSError as error:
            if error.errno not in (errno.ENODATA, errno.EOPNOTSUPP):
                raise

    def wait(self, timeout_s: float) -> None:
        """Return when something has changed since, or after a while. Raises InterruptedError and
        OSError."""
        if self._counter is None:
            time.sleep(min(_POLL_S, timeout_s))
        else:
            os.getxattr(self._path, f"{_CHANGES}.{self._counter}.{max(0.0, timeout_s):.3f}")
