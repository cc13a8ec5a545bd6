"""Locks on files, which tell whether a worker or a reducer has ended."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from ..client import _files, _locks
from .directory import remove


class Lock:
    """A file that this process has locked, until it ends or `close` is called, or that it tries to lock. It
    is a lock of the open file (F_OFD_SETLK), so it does not end with other descriptors of the process."""

    def __init__(self, path: Path, *, makes: bool = True) -> None:
        """Open the file, which it `makes` if there is none. Raises OSError."""
        flags = os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = _files.look_up(os.open, path, flags | makes * os.O_CREAT, 0o666)

    def hold(self, content: bytes = b"") -> bool:
        """Try to lock the file; return whether it is locked now. `content` becomes what the file holds.
        Raises OSError."""
        # A question costs hosts no transactions, as an attempt does.
        if _locks.is_locked(self._fd) or not _locks.try_lock(self._fd, _locks.WRITE):
            return False
        if content:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, content, 0)
            os.fsync(self._fd)
        return True

    def is_of(self, path: Path) -> bool:
        """Return whether a path leads to the file."""
        return _is_at(self._fd, path)

    def is_being_removed(self) -> bool:
        """Return whether nobody has the file locked but who removes it (WatchedLock). Raises OSError."""
        return _locks.try_lock(self._fd, _locks.READ)

    @property
    def is_held(self) -> bool:
        """Return whether the lock still holds: a host that was cut off for too long loses its locks."""
        if self._fd < 0:
            return False
        try:
            return _locks.try_lock(self._fd, _locks.WRITE) and os.fstat(self._fd).st_nlink > 0
        except OSError:
            return False

    def close(self) -> None:
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        # By itself the lock ends when the mount has been told of the last close, which may be later.
        with contextlib.suppress(OSError):
            _locks.lock(fd, _locks.NONE)
        with contextlib.suppress(OSError):
            os.close(fd)


class WatchedLock:
    """An open file of which it is asked whether somebody has it locked."""

    def __init__(self, path: Path) -> None:
        """Raises OSError; ELOOP for a link."""
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = _files.look_up(os.open, path, flags)

    def __del__(self) -> None:
        if (fd := getattr(self, "_fd", -1)) >= 0:
            # Its mount may be gone.
            with contextlib.suppress(OSError):
                os.close(fd)

    def is_held(self) -> bool:
        """Raises OSError."""
        return _locks.is_locked(self._fd)

    def remove(self, path: Path) -> bool:
        """Remove what is at a path, if it is this and nobody has it locked; nobody can lock it meanwhile.
        Return False if somebody has. Raises OSError."""
        if not _locks.try_lock(self._fd, _locks.READ):
            return False
        if _is_at(self._fd, path):
            remove(path)
        _locks.lock(self._fd, _locks.NONE)
        return True


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), _files.look_up(os.lstat, path))
    except FileNotFoundError:
        return False


def locked_in(folder: Path) -> list[str]:
    """Return the names in a folder that somebody has locked; hidden ones do not count."""
    return [one for one in os.listdir(folder) if one[0] != "." and is_locked(folder / one)]


def is_locked(path: Path) -> bool:
    """Return whether somebody has a file locked. One that is not there is not, nor is a link."""
    try:
        return WatchedLock(path).is_held()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return False
        raise
