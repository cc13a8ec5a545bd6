"""Locks of open files (fcntl's F_OFD_SETLK): they hold on all hosts, and end with their descriptors.

A reader of a file can lock it for reading only, so he keeps out nobody but those who may write it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct

READ, WRITE, NONE = fcntl.F_RDLCK, fcntl.F_WRLCK, fcntl.F_UNLCK
_F_OFD_GETLK, _F_OFD_SETLK, _F_OFD_SETLKW = 36, 37, 38
_FLOCK = struct.Struct("hhqqi4x")


def _control(fd: int, command: int, kind: int) -> bytes:
    try:
        return fcntl.fcntl(fd, command, _FLOCK.pack(kind, 0, 0, 0, 0))
    except OSError as error:
        error.filename = os.readlink(f"/proc/self/fd/{fd}")
        raise


def lock(fd: int, kind: int) -> None:
    """Lock a file, or with NONE unlock it, as soon as nobody has a lock that conflicts. Raises OSError."""
    _control(fd, _F_OFD_SETLKW, kind)


def try_lock(fd: int, kind: int) -> bool:
    """Lock a file if nobody has a lock that conflicts; return whether it is locked now. Raises OSError."""
    try:
        _control(fd, _F_OFD_SETLK, kind)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def is_locked(fd: int) -> bool:
    """Return whether somebody else has a file locked. Raises OSError."""
    return bool(_FLOCK.unpack(_control(fd, _F_OFD_GETLK, WRITE))[0] != NONE)
