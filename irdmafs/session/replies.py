"""Answers to the kernel, packed from what operations say of a node."""

import errno
import os
from typing import Any, Final

from ..operations import Attributes
from . import wire

_NS: Final = 1_000_000_000
_NO_ENTRY = bytes(wire.ENTRY_OUT.size)


class DirectoryReply:
    """The buffer that a READDIRPLUS answer is collected in."""

    def __init__(self, size: int) -> None:
        self._room = size
        self.parts: list[bytes] = []

    def add(self, name: bytes, entry: Attributes, next_id: int) -> bool:
        record = wire.dirent(entry.ino, next_id, name, entry.st_mode)
        size = wire.ENTRY_OUT.size + len(record)
        if size > self._room:
            return False
        self._room -= size
        # The kernel takes no reference on "." and "..", nor on what comes without a node.
        referred = entry.st_ino and name not in (b".", b"..")
        self.parts.append(pack_entry(entry, entry.st_ino) if referred else _NO_ENTRY)
        self.parts.append(record)
        return True


def readdir_reply(token: Any, name: bytes, entry: Attributes, next_id: int) -> bool:
    reply: DirectoryReply = token
    return reply.add(name, entry, next_id)


def sized(unique: int, value: bytes, room: int) -> bytes:
    """The answer to GETXATTR and LISTXATTR: the size alone when none was offered."""
    if room == 0:
        return wire.reply(unique, wire.XATTR_SIZE_OUT.pack(len(value), 0))
    if len(value) > room:
        return wire.error_reply(unique, errno.ERANGE)
    return wire.reply(unique, value)


def pack_entry(entry: Attributes, node_id: int) -> bytes:
    atime, mtime, ctime = entry.st_atime_ns, entry.st_mtime_ns, entry.st_ctime_ns
    return wire.ENTRY_OUT.pack(
        node_id, entry.generation, int(entry.entry_timeout), int(entry.attr_timeout),
        int(entry.entry_timeout % 1 * _NS), int(entry.attr_timeout % 1 * _NS),
        entry.ino, entry.st_size, entry.st_blocks, atime // _NS, mtime // _NS, ctime // _NS,
        atime % _NS, mtime % _NS, ctime % _NS, entry.st_mode, entry.st_nlink,
        entry.st_uid, entry.st_gid, entry.st_rdev, 4096, 0,
    )  # fmt: skip


def pack_attributes(entry: Attributes) -> bytes:
    atime, mtime, ctime = entry.st_atime_ns, entry.st_mtime_ns, entry.st_ctime_ns
    return wire.ATTR_OUT.pack(
        int(entry.attr_timeout), int(entry.attr_timeout % 1 * _NS), 0,
        entry.ino, entry.st_size, entry.st_blocks, atime // _NS, mtime // _NS, ctime // _NS,
        atime % _NS, mtime % _NS, ctime % _NS, entry.st_mode, entry.st_nlink,
        entry.st_uid, entry.st_gid, entry.st_rdev, 4096, 0,
    )  # fmt: skip


def pack_statx(entry: Attributes, birth_ns: int) -> bytes:
    known = wire.STATX_BASIC_STATS | (wire.STATX_BTIME if birth_ns else 0)
    times = (entry.st_atime_ns, birth_ns, entry.st_ctime_ns, entry.st_mtime_ns)
    seconds = [part for time_ns in times for part in (time_ns // _NS, time_ns % _NS)]
    return wire.STATX_OUT.pack(
        int(entry.attr_timeout), int(entry.attr_timeout % 1 * _NS), 0
    ) + wire.STATX.pack(
        known, 4096, 0, entry.st_nlink, entry.st_uid, entry.st_gid, entry.st_mode, entry.ino,
        entry.st_size, entry.st_blocks, 0, *seconds,
        os.major(entry.st_rdev), os.minor(entry.st_rdev), 0, 0,
    )  # fmt: skip
