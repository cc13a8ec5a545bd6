"""A store directory: its lock, the extents in it, each one file, named by its number in hexadecimal, and
their pins.

Bytes enter and leave extents inside the kernel (passthrough, copy_file_range); this module only makes,
opens, copies and removes the files. An extent that was published is never written again.
"""

import errno
import fcntl
import math
import os
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TypeVar, TypeVarTuple

import trio

from ..model.records import ContentId
from ..model.values import filesystem_of
from ..pauses import Places
from .sparse import next_data

# The mode bit of files that a store node made itself, and may use again.
OWN_FILE = stat.S_ISVTX
# The modification time of such a file from when a program may keep references to its pages: it is never
# used again.
LENT_NS = 0
# One call may copy at most this much, so that a signal or a cancelled scope is noticed in between.
_COPY_CHUNK_BYTES = 256 * 1024 * 1024

# A store with less room than this is full: a write may just have been refused.
_FULL_BYTES = 64 * 1024
# A file in a store node's directory: its time is when that was last found full.
FULL = "full"
# A command takes the lock of a store for a moment to see whether it is free.
_LOOKED_AT_S = 0.3
_LOOK_AGAIN_S = 0.01

# Our own reads leave an extent's access time alone: only reads by programs change it.
OPEN_FLAGS = os.O_CLOEXEC | os.O_NOATIME

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
# The user whose request a task carries out; "" if it is nobody's.
asking_user: ContextVar[str] = ContextVar("asking_user", default="")
# Threads that wait for locks of files: others need the threads of trio's own limit.
_places, _unlimited = Places(4096), trio.CapacityLimiter(math.inf)


async def when_unlocked(call: Callable[[*Ts], T], *args: *Ts) -> T:
    """Make a call that takes the lock of a file that programs may be writing. The kernel holds that lock
    while it copies from a program's memory, for ever if the program wants it: threads are left to other
    users. Raises what the call does."""
    async with _places.one(asking_user.get()):
        return await trio.to_thread.run_sync(call, *args, limiter=_unlimited)


class StoreInUse(OSError):
    """Another daemon serves this store directory."""


def lock_directory(directory: str, busy: str) -> int:
    """Take the lock of a directory; it is held until the descriptor that is returned is closed.

    Raises StoreInUse when another process has it: `busy`, with that one's pid.
    """
    fd = os.open(f"{directory}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    give_up = time.monotonic() + _LOOKED_AT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() < give_up:
                time.sleep(_LOOK_AGAIN_S)
                continue
            owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise StoreInUse(errno.EBUSY, f"{busy} (pid {owner})", directory) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, b"%d\n" % os.getpid(), 0)
    return fd


def look_for_room(store: str, *, refused: bool = False) -> int:
    """Do as `ExtentStore.look_for_room` does in the directory of a store node, for all processes that have
    extents there: the node, and mounts on its host."""
    noted = f"{store}/{FULL}"
    try:
        if refused or _is_full(store):
            os.utime(noted, ns=(time.time_ns(),) * 2)  # not rounded to a tick
        return os.stat(noted).st_mtime_ns
    except OSError:  # its node is of a version before, or another user's
        return 0


def _is_full(directory: int | str) -> bool:
    room = os.statvfs(directory)
    # f_blocks is 0 on a tmpfs without a limit.
    return room.f_blocks > 0 and room.f_bavail * room.f_frsize < _FULL_BYTES


def in_memory(path: str) -> bool:
    """Return whether a directory lies on a filesystem that a power loss empties anyway."""
    return filesystem_of(os.stat(path).st_dev) in (b"tmpfs", b"ramfs")


class ExtentStore:
    """Extents in one directory. Not shared between processes: the store's lock guards it."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        os.makedirs(directory, mode=0o700, exist_ok=True)
        self._dir_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        # Extents below the first were there before.
        self.first = self._next = ContentId(max(self, default=0) + 1)
        # `filled` counts the extents that programs fill, which are no versions if a write to them was
        # refused, and only programs see that. `_found_full` counts how often the store was.
        self.filled = self._found_full = 0

    def close(self) -> None:
        os.close(self._dir_fd)

    def __iter__(self) -> Iterator[ContentId]:
        """Numbers of all extents that exist as files."""
        for name in os.listdir(self._dir_fd):
            with suppress(ValueError):
                yield ContentId(int(name, 16))

    def path(self, extent: ContentId) -> str:
        return f"{self.directory}/{extent:x}"

    def allocate(self) -> tuple[ContentId, int]:
        """Make an empty extent. Returns its number and a read-write descriptor the caller closes.

        Raises OSError (ENOSPC, EMFILE).
        """
        extent, flags = self._next, os.O_RDWR | os.O_CREAT | os.O_EXCL | OPEN_FLAGS
        fd = os.open(f"{extent:x}", flags, 0o600, dir_fd=self._dir_fd)
        self._next = ContentId(extent + 1)
        return extent, fd

    def open(self, extent: ContentId, flags: int = os.O_RDONLY) -> int:
        """Open an extent. Raises OSError EIO when the file is gone: the store was damaged."""
        try:
            return os.open(f"{extent:x}", flags | OPEN_FLAGS, dir_fd=self._dir_fd)
        except FileNotFoundError:
            raise self._missing(extent) from None

    @contextmanager
    def opened(self, extent: ContentId, flags: int = os.O_RDONLY) -> Iterator[int]:
        fd = self.open(extent, flags)
        try:
            yield fd
        finally:
            os.close(fd)

    def stat(self, extent: ContentId) -> os.stat_result:
        """Return an extent's stat. Raises OSError EIO when the file is gone: the store was damaged."""
        try:
            return os.stat(f"{extent:x}", dir_fd=self._dir_fd)
        except FileNotFoundError:
            raise self._missing(extent) from None

    def set_times(self, extent: ContentId, atime_ns: int, mtime_ns: int) -> None:
        with self.opened(extent, os.O_RDWR) as fd:
            os.utime(fd, ns=(atime_ns, mtime_ns))

    def _missing(self, extent: ContentId) -> OSError:
        return OSError(errno.EIO, "extent is missing from the store", self.path(extent))

    def link(self, extent: ContentId) -> ContentId:
        """Give an extent's file another number, too, and return that. It must not be written from then on.
        Raises OSError."""
        number = self._next
        os.link(f"{extent:x}", f"{number:x}", src_dir_fd=self._dir_fd, dst_dir_fd=self._dir_fd)
        self._next = ContentId(number + 1)
        return number

    def is_open_to_write(self, extent: ContentId) -> bool:
        """Return whether anybody may write an extent, as far as the kernel tells: has it open, or mapped
        after it was closed."""
        with self.opened(extent) as fd:
            try:
                fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
                fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            except OSError:  # or its filesystem has no leases
                return True
        return False

    def free(self, extent: ContentId) -> None:
        """Remove an extent; its memory goes when the last open file of it is closed."""
        if self.filled:
            self.look_for_room(extent)
        with suppress(FileNotFoundError):
            os.unlink(f"{extent:x}", dir_fd=self._dir_fd)

    def sync(self, extent: ContentId) -> None:
        """Make an extent survive a power loss (for stores on disk)."""
        with self.opened(extent) as fd:
            os.fsync(fd)
        os.fsync(self._dir_fd)

    def look_for_room(self, extent: ContentId, *, refused: bool = False) -> int:
        """Note whether it is full where an extent lies, before somebody makes room, or was full for a
        moment, as an allocation was `refused`. Return a number that changes each time it is."""
        if refused or _is_full(self._dir_fd):
            self._found_full += 1
        return self._found_full

    def statvfs(self) -> os.statvfs_result:
        return os.fstatvfs(self._dir_fd)


class Pinned(ABC):
    """Contents that are freed, by `free`, once no version names them and nothing pins them.

    Contents are numbers; 0 stands for an empty one, which needs no pin. `counts` tells how often each is
    pinned; it is read-only.
    """

    def __init__(self) -> None:
        self.counts: dict[ContentId, int] = {}
        self._retired: set[ContentId] = set()

    @abstractmethod
    def free(self, extent: ContentId) -> None:
        """Remove a content."""

    def pin(self, extent: ContentId) -> None:
        """Keep a content although its file moves on to another version."""
        if extent:
            self.counts[extent] = self.counts.get(extent, 0) + 1

    def unpin(self, extent: ContentId) -> None:
        if not extent:
            return
        left = self.counts[extent] - 1
        if left:
            self.counts[extent] = left
            return
        del self.counts[extent]
        if extent in self._retired:
            self._retired.remove(extent)
            self.free(extent)

    def retire(self, extent: ContentId) -> None:
        """Note that no version names this content any more: it is freed as soon as nothing pins it."""
        if not extent:
            return
        if extent in self.counts:
            self._retired.add(extent)
        else:
            self.free(extent)


def copy_contents(source_fd: int, target_fd: int) -> None:
    """Copy the bytes of one file to another one, which is empty, inside the kernel.

    Holes stay holes. Raises OSError (ENOSPC, EIO); the target is then incomplete.
    """
    size = os.fstat(source_fd).st_size
    offset = 0
    while (offset := next_data(source_fd, offset, size)) < size:
        end = min(os.lseek(source_fd, offset, os.SEEK_HOLE), size)
        while offset < end:
            offset += _copy_some(source_fd, target_fd, offset, end - offset)
    os.ftruncate(target_fd, size)


def copy_all(source_fd: int, target_fd: int) -> None:
    """Copy a file over another of the same length, inside the kernel: also zeros that were never written.
    Raises OSError (EIO)."""
    start, size = 0, os.fstat(source_fd).st_size
    while start < size:
        start += _copy_some(source_fd, target_fd, start, size - start)


def _copy_some(source_fd: int, target_fd: int, offset: int, count: int) -> int:
    count = min(count, _COPY_CHUNK_BYTES)
    try:
        copied = os.copy_file_range(source_fd, target_fd, count, offset, offset)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        os.lseek(target_fd, offset, os.SEEK_SET)
        copied = os.sendfile(target_fd, source_fd, offset, count)
    if copied == 0:
        raise OSError(errno.EIO, "the file shrank while it was copied")
    return copied
