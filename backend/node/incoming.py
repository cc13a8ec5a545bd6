"""Files that are not extents: those being received, and those being removed.

They lie in STORE/incoming (directory.py), where mounts on this host also have their working copies.
"""

import errno
import itertools
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field

from ..files.storedir import OWN_FILE
from ..transport.verbs.rdma import Rdma


@dataclass(slots=True, eq=False)
class StoredFile:
    """A file of the store: one that is being received, that of an extent, or a spare one.

    `is_own`: no other process ever had it open for writing, so it cannot be truncated. `is_reusable`: it
    may become another extent's file when nobody uses it any more (reuse.py); once false, for ever. `taken`
    is how many bytes are allocated, `is_named` whether an inode named its extent, `since` when it became a
    spare file.
    """

    name: str
    length: int
    _: KW_ONLY
    is_own: bool
    is_reusable: bool = False
    is_named: bool = False
    since: float = 0.0
    taken: int = field(init=False)

    def __post_init__(self) -> None:
        self.taken = self.length


class Held:
    """An open file, which is not used for another extent before it is closed. For the event loop."""

    def __init__(self, fd: int, file: StoredFile) -> None:
        self.fd = fd
        self.file = file

    @property
    def is_own(self) -> bool:
        return self.file.is_own

    def lend(self) -> None:
        """Note that references to its pages may exist for ever from now on. For any thread."""
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
    """The files in the directory `fd`, which stays the caller's; `path` is for messages. Files that the
    last process was receiving or removing are removed. For any thread, except where a method says
    otherwise."""

    def __init__(self, fd: int, path: str, rdma: Rdma) -> None:
        self._fd = fd
        self._path = path
        self._rdma = rdma
        self._numbers = itertools.count(1)
        self._reserved: dict[str, int] = {}
        self._condemned: list[str] = []
        for name in os.listdir(fd):
            if working_copy(name) is None:
                os.unlink(name, dir_fd=fd)

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
        name = self.new_name()
        fd = os.open(
            name,
            os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC,
            0o600 | OWN_FILE,
            dir_fd=self._fd,
        )
        self._reserved[name] = allocated
        try:
            if allocated < length:
                self._check_room(allocated)
                os.ftruncate(fd, length)
            elif length:
                os.posix_fallocate(fd, 0, length)
        except BaseException:
            os.close(fd)
            self.remove(name)
            raise
        # A file with holes has no room for the bytes of another extent.
        file = StoredFile(name, length, is_own=True, is_reusable=allocated == length)
        return Incoming(self, fd, file)

    def _check_room(self, allocated: int) -> None:
        """Raise OSError ENOSPC if fewer bytes are free."""
        status = os.fstatvfs(self._fd)
        if allocated > status.f_bavail * status.f_frsize:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path)

    def opened_again(self, file: StoredFile, fd: int) -> Incoming:
        """Return a file of a freed extent, which is open for reading and writing, as one to be received."""
        self._reserved[file.name] = file.length
        return Incoming(self, fd, file)

    def open_shared(self, name: str, *, is_own: bool) -> Incoming:
        """Open another name of an extent's file, which is `is_own` if no application made it. Raises
        OSError."""
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
        fd = os.open(
            name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._fd
        )
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

    def remove(self, name: str) -> None:
        """Remove a file. A missing one is no error."""
        self._reserved.pop(name, None)
        try:
            os.unlink(name, dir_fd=self._fd)
        except FileNotFoundError:
            pass

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


def working_copy(name: str) -> int | None:
    """Return the content that a file in incoming/ is a mount's working copy of, None if it is the
    node's."""
    try:
        content = int(name, 16)
    except ValueError:
        return None
    return content if f"{content:x}" == name else None
