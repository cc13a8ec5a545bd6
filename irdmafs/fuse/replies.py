"""Answers to the kernel, packed from what operations say of a node."""

import errno
import functools
import os
from typing import Final

from ..backend.namespace import fail
from ..posix.calls import Attributes, Space
from ..posix.lock_tables import Lock
from . import wire

_NS: Final = 1_000_000_000
_pack_entry, _pack_attributes = wire.ENTRY_OUT.pack, wire.ATTR_OUT.pack
_NO_ENTRY = bytes(wire.ENTRY_OUT.size)


class DirectoryReply:
    """The buffer that a READDIRPLUS answer is collected in."""

    def __init__(self, size: int) -> None:
        self._room = size
        self.parts: list[bytes] = []

    def add(self, name: bytes, ino: int, mode: int, entry: Attributes | None, next_id: int) -> bool:
        record = wire.dirent(ino, next_id, name, mode)
        size = wire.ENTRY_OUT.size + len(record)
        if size > self._room:
            return False
        self._room -= size
        self.parts.append(_NO_ENTRY if entry is None else pack_entry(entry))
        self.parts.append(record)
        return True


def sized(value: bytes, room: int) -> bytes:
    """Return the answer to GETXATTR and LISTXATTR: the size alone when no room was offered. Raises OSError
    ERANGE."""
    if room == 0:
        return wire.XATTR_SIZE_OUT.pack(len(value), 0)
    if len(value) > room:
        raise fail(errno.ERANGE)
    return value


@functools.lru_cache
def _split(seconds: float) -> tuple[int, int]:
    """Whole seconds, and nanoseconds."""
    return int(seconds), int(seconds % 1 * _NS)


def pack_found(entry: Attributes) -> bytes:
    """Return the answer to a lookup: for as long as that holds, if the name does not exist."""
    return pack_entry(entry) if entry.st_ino else _missing(entry.entry_timeout)


@functools.lru_cache
def _missing(valid_s: float) -> bytes:
    entry = Attributes()
    entry.entry_timeout = valid_s
    return pack_entry(entry)


def pack_entry(entry: Attributes) -> bytes:
    entry_s, entry_ns = _split(entry.entry_timeout)
    attr_s, attr_ns = _split(entry.attr_timeout)
    atime, atime_ns = divmod(entry.st_atime_ns, _NS)
    mtime, mtime_ns = divmod(entry.st_mtime_ns, _NS)
    ctime, ctime_ns = divmod(entry.st_ctime_ns, _NS)
    return _pack_entry(
        entry.st_ino, entry.generation, entry_s, attr_s, entry_ns, attr_ns,
        entry.ino, entry.st_size, entry.st_blocks, atime, mtime, ctime,
        atime_ns, mtime_ns, ctime_ns, entry.st_mode, entry.st_nlink,
        entry.st_uid, entry.st_gid, entry.st_rdev, 4096, 0,
    )  # fmt: skip


def pack_attributes(entry: Attributes) -> bytes:
    attr_s, attr_ns = _split(entry.attr_timeout)
    atime, atime_ns = divmod(entry.st_atime_ns, _NS)
    mtime, mtime_ns = divmod(entry.st_mtime_ns, _NS)
    ctime, ctime_ns = divmod(entry.st_ctime_ns, _NS)
    return _pack_attributes(
        attr_s, attr_ns, 0,
        entry.ino, entry.st_size, entry.st_blocks, atime, mtime, ctime,
        atime_ns, mtime_ns, ctime_ns, entry.st_mode, entry.st_nlink,
        entry.st_uid, entry.st_gid, entry.st_rdev, 4096, 0,
    )  # fmt: skip


def pack_statx(entry: Attributes, birth_ns: int) -> bytes:
    known = wire.STATX_BASIC_STATS | (wire.STATX_BTIME if birth_ns else 0)
    times = (entry.st_atime_ns, birth_ns, entry.st_ctime_ns, entry.st_mtime_ns)
    seconds = [part for time_ns in times for part in (time_ns // _NS, time_ns % _NS)]
    return wire.STATX_OUT.pack(*_split(entry.attr_timeout), 0) + wire.STATX.pack(
        known, 4096, 0, entry.st_nlink, entry.st_uid, entry.st_gid, entry.st_mode, entry.ino,
        entry.st_size, entry.st_blocks, 0, *seconds,
        os.major(entry.st_rdev), os.minor(entry.st_rdev), 0, 0,
    )  # fmt: skip


def pack_statfs(space: Space) -> bytes:
    return wire.STATFS_OUT.pack(
        space.f_blocks, space.f_bfree, space.f_bavail, space.f_files, space.f_ffree,
        space.f_bsize, space.f_namemax, space.f_frsize, 0,
    )  # fmt: skip


def pack_lock(found: Lock) -> bytes:
    return wire.LOCK_OUT.pack(found.start, found.end, found.type, found.pid)


def pack_written(size: int) -> bytes:
    return wire.WRITE_OUT.pack(size, 0)
