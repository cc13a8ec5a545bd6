"""Parts of requests, as operations take them."""

from typing import NamedTuple

from .wire import Request, Valid

__all__ = ["Creator", "SetattrFields", "creator"]


class Creator(NamedTuple):
    """The caller of a request that makes something with a mode."""

    uid: int
    gid: int
    pid: int
    umask: int


class SetattrFields:
    """Which attributes a SETATTR changes."""

    def __init__(self, valid: int) -> None:
        self.update_mode = bool(valid & Valid.MODE)
        self.update_uid = bool(valid & Valid.UID)
        self.update_gid = bool(valid & Valid.GID)
        self.update_size = bool(valid & Valid.SIZE)
        self.update_atime = bool(valid & (Valid.ATIME | Valid.ATIME_NOW))
        self.update_mtime = bool(valid & (Valid.MTIME | Valid.MTIME_NOW))


def creator(asked: Request, umask: int) -> Creator:
    return Creator(asked.uid, asked.gid, asked.pid, umask)
