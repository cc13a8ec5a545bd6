"""Files that are not extents: those being received, those being removed, and spare ones: files of freed
extents that are used for new extents.

They lie in STORE/incoming (directory.py), where mounts on this host also have their working copies.

A file that is used again needs no allocation, and no registration if it was registered for RDMA. But
whoever still refers to its pages would see what it is used for next. So a file is used again only if

    this process made it     An application may have the files that it made open for writing.
    its pages are not lent   This process never sent them by sendfile or splice: they might still be in the
                             send queue of a socket.
    no program keeps them    Before a mount on this host lets a program open an extent that may keep
                             references to its pages, in a pipe for instance, it gives the file the
                             modification time LENT_NS.
    nobody has it open       This process has not, nor has a peer the right to read it by RDMA: the kernel
                             tells about every process. A mount here gives a file that a program has open a
                             second name, in STORE/held.
    it has the right length  Exactly that of the new extent.
    it lies in memory        On a disk, a power loss could give it its old name back.

A file for which one of these is in doubt is removed. Files that wait to be used again count as free.
"""

import errno
import fcntl
import itertools
import logging
import os
import signal
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field

from ..files.extents import LENT_NS, OWN_FILE, look_for_room
from ..transport.verbs.rdma import Rdma
from .directory import StoreDirectory

log = logging.getLogger(__name__)

SPARES_MAX = 1024
# The share of the store for files that wait. Files freed beyond it are removed at once.
_SPARES_SHARE = 0.5
# With less free room than this share of the store, no file waits.
_ROOM_SHARE = 1 / 16
# Smaller files do not move by RDMA, and cost little to make.
SPARE_BYTES_MIN = 64 << 10
# A file that waited for so long is given up.
SPARE_S = 60.0


@dataclass(slots=True, eq=False)
class StoredFile:
    """A file of the store: one that is being received, that of an extent, or a spare one.

    `is_own`: no other process ever had it open for writing, so it cannot be truncated. `is_reusable`: it
    may become another extent's file when nobody uses it any more; once false, for ever. `taken` is how many
    bytes are allocated, `since` when it became a spare file.
    """

    name: str
    length: int
    _: KW_ONLY
    is_own: bool
    is_reusable: bool = False
    since: float = 0.0
    taken: int = field(init=False)

    def __post_init__(self) -> None:
        self.taken = self.length


class Held:
    """An open file, which is not used for another extent before it is closed."""

    def __init__(self, fd: int, file: StoredFile) -> None:
        self.fd = fd
        self.file = file

    @property
    def is_own(self) -> bool:
        return self.file.is_own

    def lend(self) -> None:
        """Note that references to its pages may exist for ever from now on."""
        self.file.is_reusable = False

    def close(self) -> None:
        os.close(self.fd)


class Incoming(Held):
    """A file in incoming/ that is not an extent yet. Closing it removes it, unless it became an extent, or
    is a mount's working copy. `closed` is called then."""

    def __init__(self, files: "IncomingFiles", fd: int, file: StoredFile) -> None:
        super().__init__(fd, file)
        self.name = file.name
        self.is_extent = False
        self.closed: Callable[[], None] | None = None
        self._files = files

    def close(self) -> None:
        if not self.is_extent and working_copy(self.name) is None:
            self._files.remove(self.name)
        super().close()
        if self.closed is not None:
            self.closed()


class IncomingFiles:
    """The files in STORE/incoming. Files that the last process was receiving or removing are removed. For
    any thread, except where a method says otherwise. `spare_bytes` are those of spare files, at most
    SPARES_MAX, `reused` counts the spare files that were used."""

    def __init__(self, place: StoreDirectory, rdma: Rdma) -> None:
        self.spare_bytes = 0
        self.reused = 0
        self._fd = place.incoming
        self._path = place.path
        self._may_reuse = not place.power_safe
        self._rdma = rdma
        self._spares: dict[StoredFile, None] = {}  # the oldest first
        self._numbers = itertools.count(1)
        self._reserved: dict[str, int] = {}
        self._condemned: list[str] = []
        for name in os.listdir(self._fd):
            if working_copy(name) is None:
                os.unlink(name, dir_fd=self._fd)

    @property
    def reserved_bytes(self) -> int:
        """Return the room that files being received take, or will take."""
        return sum(list(self._reserved.values()))

    def working_copies(self) -> dict[str, int]:
        """Return the names and content numbers of working copies of mounts on this host."""
        found = {}
        for name in os.listdir(self._fd):
            content = working_copy(name)
            if content is not None:
                found[name] = content
        return found

    # -- coming ----------------------------------------------------------------------------------

    def create(self, length: int, allocated: int) -> Incoming:
        """Make a file of `length` bytes with room for them, or a hole for which `allocated` are free. A
        large one takes a while (0.2 ms per MiB of small pages).

        Raises OSError: ENOSPC; no file is left then.
        """
        name, flags = self.new_name(), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(name, flags, 0o600 | OWN_FILE, dir_fd=self._fd)
        self._reserved[name] = allocated
        try:
            if allocated < length:
                status = os.fstatvfs(fd)
                if allocated > status.f_bavail * status.f_frsize:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path)
                os.ftruncate(fd, length)
            elif length:
                os.posix_fallocate(fd, 0, length)
        except BaseException:
            os.close(fd)
            self.remove(name, refused=allocated == length)
            raise
        # A file with holes has no room for the bytes of another extent.
        is_reusable = self._may_reuse and allocated == length and length >= SPARE_BYTES_MIN
        return Incoming(self, fd, StoredFile(name, length, is_own=True, is_reusable=is_reusable))

    def open_shared(self, name: str, *, is_own: bool) -> Incoming:
        """Open another name of an extent's file, `is_own` if no application made it. Raises OSError."""
        try:
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._fd)
        except OSError:
            self.remove(name)
            raise
        return Incoming(self, fd, StoredFile(name, os.fstat(fd).st_size, is_own=is_own))

    def take_over(self, name: str, content: int) -> Incoming:
        """Open the working copy that a mount on this host made for this content. For the event loop.

        Raises OSError: ENOENT if it is not there, EPERM if no mount made it.
        """
        if working_copy(name) != content:
            raise PermissionError(errno.EPERM, f"{name!r} does not name content {content:x}")
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(name, flags, dir_fd=self._fd)
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in (0, os.geteuid()):
            os.close(fd)
            raise PermissionError(errno.EPERM, "not a mount's working copy", name)
        # The file may have been an extent before, and truncated since.
        self._rdma.forget(fd)
        return Incoming(self, fd, StoredFile(name, status.st_size, is_own=False))

    def move_out(self, incoming: Incoming, name: str, to_fd: int) -> None:
        """Move a received file into another directory. Raises OSError."""
        self._reserved.pop(incoming.name, None)
        os.rename(incoming.name, name, src_dir_fd=self._fd, dst_dir_fd=to_fd)
        incoming.is_extent = True

    def remove(self, name: str, *, refused: bool = False) -> None:
        """Remove a file. A missing one is no error. `refused`: as an allocation was."""
        self._reserved.pop(name, None)
        look_for_room(self._path, refused=refused)
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)

    # -- spare -----------------------------------------------------------------------------------

    def let_go(self, file: StoredFile, name: str, total: int, free: int) -> None:
        """Keep the file of a freed extent, which was just renamed to `name`, as a spare one; condemn it if
        it may never be used again, or the store, of which so many bytes are free, has no room for it. For
        the event loop, as all about spare files."""
        limit = int(total * _SPARES_SHARE)
        if not file.is_reusable or file.length > limit or free < total * _ROOM_SHARE:
            self.condemn(name)
            return
        while self.spare_bytes + file.length > limit or len(self._spares) >= SPARES_MAX:
            self._give_up(next(iter(self._spares)))
        file.name, file.since = name, time.monotonic()
        self._spares[file] = None
        self.spare_bytes += file.length

    def take_spare(self, length: int) -> Incoming | None:
        """Return a file of exactly this length, which has the bytes of the extent that it was before. The
        newest is taken, so that surplus ones get old."""
        for file in [file for file in reversed(self._spares) if file.length == length]:
            try:
                fd = self._open(file)
            except OSError as error:
                if error.errno != errno.EBUSY:
                    log.info("a file is not used again: %s", error)
                    self._give_up(file)
                continue
            self._remove_spare(file)
            self.reused += 1
            self._reserved[file.name] = file.length
            return Incoming(self, fd, file)
        return None

    def _open(self, file: StoredFile) -> int:
        """Open a file for another extent. Raises EBUSY if it is in use, EPERM if it can never be used."""
        status = os.stat(file.name, dir_fd=self._fd)
        mapped = self._rdma.descriptors((status.st_dev, status.st_ino))
        # A file that is mapped through several descriptors is refused, as each would need a lease.
        if status.st_nlink > 1 or (mapped and not _is_ours_alone(mapped)):
            raise OSError(errno.EBUSY, "somebody else has it", file.name)
        fd = os.open(file.name, os.O_RDWR | os.O_CLOEXEC, dir_fd=self._fd)
        try:
            if not mapped and not _is_ours_alone([fd]):
                raise OSError(errno.EBUSY, "somebody else has it", file.name)
            # Last: who had it open, or by another name, has marked it before letting it go.
            status = os.fstat(fd)
            is_lent = not file.is_reusable or status.st_mtime_ns == LENT_NS
            if is_lent or status.st_size != file.length:
                raise OSError(errno.EPERM, "its pages may be somebody else's", file.name)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def give_up_spares(self, unused_s: float = 0.0) -> None:
        """Give up spare files that waited for so long; their memory goes with the next `reap`."""
        until = time.monotonic() - unused_s
        for file in [file for file in self._spares if file.since <= until]:
            self._give_up(file)

    def _give_up(self, file: StoredFile) -> None:
        self._remove_spare(file)
        self.condemn(file.name)

    def _remove_spare(self, file: StoredFile) -> None:
        del self._spares[file]
        self.spare_bytes -= file.length

    # -- going -----------------------------------------------------------------------------------

    def new_name(self) -> str:
        """Return a name that no file here has."""
        return f"_{next(self._numbers):x}"

    def condemn(self, name: str) -> None:
        """Have the next `reap` remove a file: giving its memory back takes long (0.1 ms per MiB)."""
        self._condemned.append(name)

    @property
    def has_condemned(self) -> bool:
        return bool(self._condemned)

    def reap(self) -> None:
        """Remove condemned files."""
        with suppress(IndexError):
            while True:
                self.remove(self._condemned.pop())


def _is_ours_alone(descriptors: list[int]) -> bool:
    """Return whether nobody has the file open or mapped but by this descriptor. The kernel grants a write
    lease in exactly that case; the lease is given back at once. A mapping outlives its descriptor, so a
    kernel that does not tell is not trusted. Raises OSError."""
    if len(descriptors) != 1:
        return False
    (fd,) = descriptors
    # Opening the file while the lease is held sends a signal, by default SIGIO, which would end us.
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        return False
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True


def working_copy(name: str) -> int | None:
    """Return the content that a file in incoming/ is a mount's copy of, None if it is the node's."""
    try:
        content = int(name, 16)
    except ValueError:
        return None
    return content if f"{content:x}" == name else None
