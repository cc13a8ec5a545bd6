"""The /dev/fuse messages: their layout (include/uapi/linux/fuse.h, protocol 7.31-7.45), nothing else.

Requests are decoded from the buffer they were read into; a message that is too short or whose parts
do not add up raises Malformed. Replies are packed to bytes, from what operations say of a node.
"""

import errno
import functools
import os
import struct
from collections.abc import Sequence
from enum import IntEnum, IntFlag
from typing import Final, NamedTuple

from ..backend.namespace import fail
from ..posix.calls import Attributes, Space
from ..posix.lock_tables import Lock

Buffer = bytes | bytearray | memoryview

MAJOR: Final = 7
MINOR: Final = 41  # what we implement; the kernel and we use the lower of both
MIN_MINOR: Final = 31
EPOCH_MINOR: Final = 44  # Linux 6.16
PRUNE_MINOR: Final = 45  # Linux 6.18


class Malformed(ValueError):
    """A request that the kernel would not have sent."""


class Opcode(IntEnum):
    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    SETXATTR = 21
    GETXATTR = 22
    LISTXATTR = 23
    REMOVEXATTR = 24
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    GETLK = 31
    SETLK = 32
    SETLKW = 33
    ACCESS = 34
    CREATE = 35
    INTERRUPT = 36
    BMAP = 37
    DESTROY = 38
    IOCTL = 39
    POLL = 40
    NOTIFY_REPLY = 41
    BATCH_FORGET = 42
    FALLOCATE = 43
    READDIRPLUS = 44
    RENAME2 = 45
    LSEEK = 46
    COPY_FILE_RANGE = 47
    SETUPMAPPING = 48
    REMOVEMAPPING = 49
    SYNCFS = 50
    TMPFILE = 51
    STATX = 52


class Init(IntFlag):
    """Capabilities that we ask for in INIT; those above bit 31 travel in flags2."""

    ASYNC_READ = 1 << 0
    POSIX_LOCKS = 1 << 1
    ATOMIC_O_TRUNC = 1 << 3
    EXPORT_SUPPORT = 1 << 4
    BIG_WRITES = 1 << 5
    DONT_MASK = 1 << 6
    FLOCK_LOCKS = 1 << 10
    DO_READDIRPLUS = 1 << 13
    READDIRPLUS_AUTO = 1 << 14
    PARALLEL_DIROPS = 1 << 18
    POSIX_ACL = 1 << 20
    MAX_PAGES = 1 << 22
    CACHE_SYMLINKS = 1 << 23
    EXPLICIT_INVAL_DATA = 1 << 25
    HANDLE_KILLPRIV_V2 = 1 << 28
    SETXATTR_EXT = 1 << 29
    INIT_EXT = 1 << 30
    PASSTHROUGH = 1 << 37


class Open:
    """Flags of the answer to an open. Plain numbers: calculating with an IntFlag calls Python code."""

    KEEP_CACHE = 1 << 1
    CACHE_DIR = 1 << 3
    NOFLUSH = 1 << 5
    PASSTHROUGH = 1 << 7


class Valid:
    """Which fields of a SETATTR count. Plain numbers, too."""

    MODE = 1 << 0
    UID = 1 << 1
    GID = 1 << 2
    SIZE = 1 << 3
    ATIME = 1 << 4
    MTIME = 1 << 5
    FH = 1 << 6
    ATIME_NOW = 1 << 7
    MTIME_NOW = 1 << 8
    LOCKOWNER = 1 << 9
    KILL_SUIDGID = 1 << 11


class Notify(IntEnum):
    POLL = 1
    INVAL_INODE = 2
    INVAL_ENTRY = 3
    INC_EPOCH = 8
    PRUNE = 9


LOCK_FLOCK: Final = 1 << 0
RELEASE_FLOCK_UNLOCK: Final = 1 << 1
EXPIRE_ONLY: Final = 1 << 0
POLL_SCHEDULE_NOTIFY: Final = 1 << 0
WRITE_KILL_SUIDGID: Final = 1 << 2
OPEN_KILL_SUIDGID: Final = 1 << 0
SETXATTR_ACL_KILL_SGID: Final = 1 << 0
STATX_BASIC_STATS: Final = 0x7FF
STATX_BTIME: Final = 0x800

IN_HEADER: Final = struct.Struct("<IIQQIII4x")
OUT_HEADER: Final = struct.Struct("<IiQ")

# The fixed part of each request's body: the fields that are obeyed, and padding for the others.
OPEN_IN: Final = struct.Struct("<II")
OPENDIR_IN: Final = struct.Struct("<8x")
CREATE_IN: Final = struct.Struct("<III4x")
MKNOD_IN: Final = struct.Struct("<III4x")
MKDIR_IN: Final = struct.Struct("<II")
RENAME_IN: Final = struct.Struct("<Q")
RENAME2_IN: Final = struct.Struct("<QI4x")
LINK_IN: Final = struct.Struct("<Q")
SETATTR_IN: Final = struct.Struct("<I4xQQ8xqq8xII4xI4xII4x")
READ_IN: Final = struct.Struct("<QQI20x")
WRITE_IN: Final = struct.Struct("<QQII16x")
FLUSH_IN: Final = struct.Struct("<Q8xQ")
RELEASE_IN: Final = struct.Struct("<Q4xI8x")
FSYNC_IN: Final = struct.Struct("<Q8x")
SETXATTR_IN: Final = struct.Struct("<III4x")  # as agreed by SETXATTR_EXT
GETXATTR_IN: Final = struct.Struct("<I4x")
LOCK_IN: Final = struct.Struct("<QQQQIII4x")
INTERRUPT_IN: Final = struct.Struct("<Q")
INIT_IN: Final = struct.Struct("<IIII")
INIT_IN_FLAGS2: Final = struct.Struct("<I")
FORGET_IN: Final = struct.Struct("<Q")
BATCH_FORGET_IN: Final = struct.Struct("<I4x")
FORGET_ONE: Final = struct.Struct("<QQ")
FALLOCATE_IN: Final = struct.Struct("<QQQI4x")
LSEEK_IN: Final = struct.Struct("<QqI4x")
COPY_FILE_RANGE_IN: Final = struct.Struct("<QQ8xQQQ8x")
POLL_IN: Final = struct.Struct("<QQI4x")

INIT_OUT: Final = struct.Struct("<IIIIHHIIHHIIH22x")
ENTRY_OUT: Final = struct.Struct("<QQQQIIQQQqqqIIIIIIIIII")
ATTR_OUT: Final = struct.Struct("<QIIQQQqqqIIIIIIIIII")
OPEN_OUT: Final = struct.Struct("<QIi")
WRITE_OUT: Final = struct.Struct("<II")
STATFS_OUT: Final = struct.Struct("<QQQQQIIII24x")
XATTR_SIZE_OUT: Final = struct.Struct("<II")
LOCK_OUT: Final = struct.Struct("<QQII")
LSEEK_OUT: Final = struct.Struct("<Q")
STATX_OUT: Final = struct.Struct("<QII16x")
# As struct statx begins: mask, block size, attributes, links, owners, mode, number, size, blocks, what
# attributes mean; four times; device numbers of a node and of the filesystem.
STATX: Final = struct.Struct("<IIQIIIHxxQQQQ" + "qI4x" * 4 + "IIII112x")
POLL_OUT: Final = struct.Struct("<II")
# Directory entries with a name of so many bytes, up to NAME_MAX, and zeros up to a multiple of 8 bytes.
DIRENTS: Final = [struct.Struct(f"<QQII{size + -size % 8}s") for size in range(256)]
NOTIFY_POLL: Final = struct.Struct("<Q")
NOTIFY_INVAL_INODE: Final = struct.Struct("<Qqq")
NOTIFY_INVAL_ENTRY: Final = struct.Struct("<QII")
NOTIFY_PRUNE: Final = struct.Struct("<I12x")
PRUNE_MAX: Final = 512  # nodes in one notification

BODY: Final = IN_HEADER.size
EMPTY_LOCK_END: Final = (1 << 63) - 1


class Request(NamedTuple):
    """The header of a request, which says who made it. `pid`: the thread, 0 outside our pid namespace."""

    length: int
    opcode: int
    unique: int
    nodeid: int
    uid: int
    gid: int
    pid: int

    def refuse_shorter(self, size: int) -> None:
        """Raise Malformed if the request has not so many bytes."""
        if size > self.length:
            raise Malformed("the request is too short for its kind")


def decode_names(buffer: bytes | bytearray, start: int, end: int, count: int) -> tuple[bytes, ...]:
    """Return the first of the NUL-terminated strings between `start` and `end`."""
    names = bytes(buffer[start:end]).split(b"\0", count)[:-1]
    if len(names) < count:
        raise Malformed("a name is not terminated")
    if b"" in names:
        raise Malformed("a name is empty")
    return tuple(names)


def notification(code: Notify, payload: bytes) -> bytes:
    return OUT_HEADER.pack(OUT_HEADER.size + len(payload), code, 0) + payload


def inval_inode(nodeid: int, offset: int, length: int) -> bytes:
    """Forget attributes and, with offset >= 0, pages (length 0: to the end)."""
    return notification(Notify.INVAL_INODE, NOTIFY_INVAL_INODE.pack(nodeid, offset, length))


def inval_entry(parent: int, name: bytes) -> bytes:
    """Look a name up again before its next use."""
    payload = NOTIFY_INVAL_ENTRY.pack(parent, len(name), EXPIRE_ONLY) + name + b"\0"
    return notification(Notify.INVAL_ENTRY, payload)


def inc_epoch() -> bytes:
    """Look every name up again before its next use, even those in answers on their way."""
    return notification(Notify.INC_EPOCH, b"")


def prune(nodes: Sequence[int]) -> bytes:
    """Drop what names of these nodes nothing uses."""
    ids = struct.pack(f"<{len(nodes)}Q", *nodes)
    return notification(Notify.PRUNE, NOTIFY_PRUNE.pack(len(nodes)) + ids)


def dirent(ino: int, next_offset: int, name: bytes, mode: int) -> bytes:
    size = len(name)
    return DIRENTS[size].pack(ino, next_offset, size, mode >> 12, name)


# -- answers of operations -------------------------------------------------------------------------

_NS: Final = 1_000_000_000
NO_ENTRY: Final = bytes(ENTRY_OUT.size)


def sized(value: bytes, room: int) -> bytes:
    """Return the answer to GETXATTR and LISTXATTR: the size alone if no room is offered. Raises ERANGE."""
    if room == 0:
        return XATTR_SIZE_OUT.pack(len(value), 0)
    if len(value) > room:
        raise fail(errno.ERANGE)
    return value


def pack_found(entry: Attributes) -> bytes:
    """Return the answer to a lookup: for as long as that holds, if the name does not exist."""
    return pack_entry(entry) if entry.st_ino else _missing(entry.entry_timeout)


@functools.lru_cache
def _missing(valid_s: float) -> bytes:
    entry = Attributes()
    entry.entry_timeout = valid_s
    return pack_entry(entry)


def pack_entry(entry: Attributes) -> bytes:
    entry_s, attr_s = int(entry.entry_timeout), int(entry.attr_timeout)
    entry_ns, attr_ns = int(entry.entry_timeout % 1 * _NS), int(entry.attr_timeout % 1 * _NS)
    atime, atime_ns = divmod(entry.st_atime_ns, _NS)
    mtime, mtime_ns = divmod(entry.st_mtime_ns, _NS)
    ctime, ctime_ns = divmod(entry.st_ctime_ns, _NS)
    return ENTRY_OUT.pack(
        entry.st_ino, entry.generation, entry_s, attr_s, entry_ns, attr_ns,
        entry.ino, entry.st_size, entry.st_blocks, atime, mtime, ctime,
        atime_ns, mtime_ns, ctime_ns, entry.st_mode, entry.st_nlink,
        entry.st_uid, entry.st_gid, entry.st_rdev, 4096, 0,
    )  # fmt: skip


def pack_attributes(entry: Attributes) -> bytes:
    attr_s, attr_ns = int(entry.attr_timeout), int(entry.attr_timeout % 1 * _NS)
    atime, atime_ns = divmod(entry.st_atime_ns, _NS)
    mtime, mtime_ns = divmod(entry.st_mtime_ns, _NS)
    ctime, ctime_ns = divmod(entry.st_ctime_ns, _NS)
    return ATTR_OUT.pack(
        attr_s, attr_ns, 0,
        entry.ino, entry.st_size, entry.st_blocks, atime, mtime, ctime,
        atime_ns, mtime_ns, ctime_ns, entry.st_mode, entry.st_nlink,
        entry.st_uid, entry.st_gid, entry.st_rdev, 4096, 0,
    )  # fmt: skip


def pack_statx(entry: Attributes, birth_ns: int) -> bytes:
    known = STATX_BASIC_STATS | (STATX_BTIME if birth_ns else 0)
    times = (entry.st_atime_ns, birth_ns, entry.st_ctime_ns, entry.st_mtime_ns)
    seconds = [part for time_ns in times for part in (time_ns // _NS, time_ns % _NS)]
    attr_s, attr_ns = int(entry.attr_timeout), int(entry.attr_timeout % 1 * _NS)
    return STATX_OUT.pack(attr_s, attr_ns, 0) + STATX.pack(
        known, 4096, 0, entry.st_nlink, entry.st_uid, entry.st_gid, entry.st_mode, entry.ino,
        entry.st_size, entry.st_blocks, 0, *seconds,
        os.major(entry.st_rdev), os.minor(entry.st_rdev), 0, 0,
    )  # fmt: skip


def pack_statfs(space: Space) -> bytes:
    return STATFS_OUT.pack(
        space.f_blocks, space.f_bfree, space.f_bavail, space.f_files, space.f_ffree,
        space.f_bsize, space.f_namemax, space.f_frsize, 0,
    )  # fmt: skip


def pack_lock(found: Lock) -> bytes:
    return LOCK_OUT.pack(found.start, found.end, found.type, found.pid)


def pack_written(size: int) -> bytes:
    return WRITE_OUT.pack(size, 0)
