"""Inodes and names as records of the key-value engine.

    key                                   value
    "d" + parent ino (8 bytes BE) + name  ino (8 bytes BE)
    "i" + ino (8 bytes BE)                msgpack array, see Inode.encode
    "t" + directory ino (8 bytes BE)      when its names last changed, ns (8 bytes BE)

Creating and removing names does not rewrite the directory's inode record: otherwise hosts that do so
at once in one directory would conflict. Its times have a key of their own, which is put without a
compare (the last one wins), and its link count is derived from its names.
"""

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from functools import partial
from struct import Struct
from typing import Annotated, Final, NamedTuple

import msgspec

from ..model.records import NO_CONTENT, SIZE_MAX, ContentId, Count, Layout

ROOT_INO = 1
# Numbers from here on to twice this are of inodes that are made up: they have neither record nor name.
FIRST_VIRTUAL_INO = 1 << 47
# The inode of names whose record is damaged.
DAMAGED_INO = 2 * FIRST_VIRTUAL_INO - 1
NAME_MAX = 255

NO_LAYOUT = Layout()
# Shared by all inodes without xattrs; replaced, never changed in place.
NO_XATTRS: dict[bytes, bytes] = {}

# Nodes look for each stripe, so a few bytes that say there are many cost them much. Mounts cut files into
# fewer (records.STRIPES_MAX), and did not always.
_STRIPES_MAX = 1 << 13

# Bytes: a path, of which the kernel takes no longer one, and the digests of a version's parts (see
# store.digest).
_TARGET_MAX = 4095
_DIGESTS_MAX = 64 * 8

# The kinds of inodes: the upper bits of a mode.
_KINDS = frozenset(
    kind >> 12
    for kind in (
        stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFBLK
    )
)  # fmt: skip

_encode = msgspec.msgpack.Encoder().encode


_Word = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
# Less than 64 bits: what is counted on from here still has a place in a record.
_Links = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
_Version = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Time = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class _Record(NamedTuple):
    mode: _Word
    uid: _Word
    gid: _Word
    nlink: _Links
    rdev: _Word
    size: Count
    blocks: Count
    atime_ns: _Time
    mtime_ns: _Time
    ctime_ns: _Time
    version: _Version
    extent: Annotated[ContentId, msgspec.Meta(ge=0, le=2**63 - 1)]
    target: Annotated[bytes, msgspec.Meta(max_length=_TARGET_MAX)]
    xattrs: dict[bytes, bytes]
    layout: Layout
    # Records that were put before these were thought of end earlier.
    digests: Annotated[bytes, msgspec.Meta(max_length=_DIGESTS_MAX)] = b""
    birth_ns: _Time = 0
    origin: Count = 0
    maker: Annotated[int, msgspec.Meta(ge=1 - 2**63, le=2**63 - 1)] = 0
    # The directory that holds it, as of when the record was put: one of them, if it has several names.
    place: Count = 0


_decode = msgspec.msgpack.Decoder(_Record).decode


class Inode:
    """One inode as the namespace knows it. Times are nanoseconds since the epoch, sizes bytes.

    An inode in the tree is never changed in place; a change makes a copy, of the same kind (`is_dir`,
    `is_file`).

    `extent` is 0 for an empty content, in a cluster the number of the content, which `layout` places on
    nodes; `digests`, if any, are those of its bytes (see digest). `blocks` counts 512-byte units as stat
    does; `target` is a symlink's; `birth_ns` is the time of creation, 0 if it is unknown; `maker` is the
    mount that makes the first version of a file, and alone sees its names until then (see unseen), 0 if all
    mounts do, negative when its writers have gone; `origin` is the inode that named the content of a clone
    first (see clones). Derived, not part of the record: `nlink` of a directory; `parent` and `name`, the
    directory and the name in it that lead to the inode (0 and b"": none does; a removed directory keeps its
    parent), and how many `more` names do. `revision` is that of the record in the engine, 0 while there is
    none.
    """

    __slots__ = (
        "atime_ns", "birth_ns", "blocks", "ctime_ns", "digests", "extent", "gid", "ino", "is_dir",
        "is_file", "layout", "maker", "mode", "more", "mtime_ns", "name", "nlink", "origin", "parent",
        "rdev", "revision", "size", "target", "uid", "version", "xattrs",
    )  # fmt: skip

    def __init__(self, ino: int, mode: int, uid: int, gid: int, now_ns: int) -> None:
        self.ino = ino
        self.mode = mode
        self.uid = uid
        self.gid = gid
        self.is_dir = mode & 0o170000 == stat.S_IFDIR
        self.is_file = mode & 0o170000 == stat.S_IFREG
        self.nlink = 2 if self.is_dir else 1
        self.rdev = self.size = self.blocks = self.version = 0
        self.atime_ns = self.mtime_ns = self.ctime_ns = self.birth_ns = now_ns
        self.maker = self.origin = self.parent = self.more = self.revision = 0
        self.extent = NO_CONTENT
        self.name = self.target = self.digests = b""
        self.xattrs = NO_XATTRS
        self.layout = NO_LAYOUT

    def encode(self, place: int = 0) -> bytes:
        """Return the record; `place`: the directory that is to hold the inode, 0: not said."""
        record = (
            self.mode, self.uid, self.gid, self.nlink, self.rdev, self.size, self.blocks,
            self.atime_ns, self.mtime_ns, self.ctime_ns, self.version, self.extent,
            self.target, self.xattrs, self.layout, self.digests, self.birth_ns, self.origin,
            self.maker, place,
        )  # fmt: skip
        return _encode(record)

    @classmethod
    def decode(cls, ino: int, value: bytes, revision: int) -> "Inode":
        """Return the inode of a record. Its `parent` is what the record says, until a name is known. Raises
        msgspec.DecodeError when the record is damaged."""
        inode = cls.__new__(cls)
        inode.ino = ino
        (
            inode.mode, inode.uid, inode.gid, inode.nlink, inode.rdev, inode.size, inode.blocks,
            inode.atime_ns, inode.mtime_ns, inode.ctime_ns, inode.version, inode.extent,
            inode.target, inode.xattrs, inode.layout, inode.digests, inode.birth_ns, inode.origin,
            inode.maker, inode.parent,
        ) = _decode(value)  # fmt: skip
        if inode.mode >> 12 not in _KINDS:
            raise msgspec.ValidationError(f"{inode.mode:o} is no mode")
        inode.is_dir = inode.mode & 0o170000 == stat.S_IFDIR
        inode.is_file = inode.mode & 0o170000 == stat.S_IFREG
        if not inode.xattrs:
            inode.xattrs = NO_XATTRS
        if inode.layout == NO_LAYOUT:
            inode.layout = NO_LAYOUT
        elif inode.size > SIZE_MAX or inode.layout.stripes(inode.size) > _STRIPES_MAX:
            stripes = inode.layout.stripes(inode.size)
            raise msgspec.ValidationError(f"{inode.size} bytes in {stripes} stripes")
        inode.more = 0
        inode.name = b""
        inode.revision = revision
        return inode

    def copy(self) -> "Inode":
        # Twenty times faster than copy.copy(), and called for every create and publish.
        new = Inode.__new__(Inode)
        new.ino, new.mode, new.uid, new.gid = self.ino, self.mode, self.uid, self.gid
        new.is_dir, new.is_file = self.is_dir, self.is_file
        new.nlink, new.rdev, new.size, new.blocks = self.nlink, self.rdev, self.size, self.blocks
        new.atime_ns, new.mtime_ns, new.ctime_ns = self.atime_ns, self.mtime_ns, self.ctime_ns
        new.version, new.extent = self.version, self.extent
        new.parent, new.name, new.more = self.parent, self.name, self.more
        new.target, new.xattrs, new.layout = self.target, self.xattrs, self.layout
        new.digests, new.revision = self.digests, self.revision
        new.birth_ns, new.maker, new.origin = self.birth_ns, self.maker, self.origin
        return new


def told_of(record: bytes) -> tuple[bool, int]:
    """Return whether a record is a directory's, and the directory that holds the inode; 0: it does not
    say."""
    try:
        found = _decode(record)
    except msgspec.DecodeError:
        return False, 0
    return stat.S_ISDIR(found.mode), found.place


def led_to(record: bytes | None) -> int:
    """Return the number of the inode that the record of a name leads to, 0: none that can be there."""
    ino = int.from_bytes(record, "big") if record is not None and len(record) == 8 else 0
    return ino if ino < FIRST_VIRTUAL_INO else 0


def is_name(name: bytes) -> bool:
    """Return whether a file can have this name."""
    return (
        0 < len(name) <= NAME_MAX
        and not (b"/" in name or b"\0" in name)
        and name not in (b".", b"..")
    )


def upwards(inodes: Mapping[int, Inode], directory: int) -> Iterator[Inode]:
    """Yield a directory and those above it, up to the root, as far as they are there."""
    while (inode := inodes.get(directory)) is not None:
        yield inode
        if directory == ROOT_INO:
            return
        directory = inode.parent


# The keys of an inode's record, and of a directory's times, by its number.
inode_key: Final = partial(Struct(">cQ").pack, b"i")
time_key: Final = partial(Struct(">cQ").pack, b"t")


def name_key(parent: int, name: bytes) -> bytes:
    return b"d" + parent.to_bytes(8, "big") + name


def nearest_time(time_ns: int) -> int:
    """Return the nearest time that can be stored: in 64 bits, the years 1677 to 2262."""
    return max(-(2**63), min(time_ns, 2**63 - 1))


def fail(code: int, detail: str = "") -> OSError:
    return OSError(code, detail or os.strerror(code))


class NoInode(OSError, KeyError):
    """ESTALE: there is no inode of that number, maybe as another host removed it just now."""

    def __init__(self) -> None:
        super().__init__(errno.ESTALE, os.strerror(errno.ESTALE))


class Unread(OSError):
    """EAGAIN: names in `directory` are not known here yet; `below`: nor all in those below it. 0: names
    anywhere. Who asked reads them (Replica.learn), and asks again."""

    def __init__(self, directory: int, *, below: bool = False) -> None:
        super().__init__(errno.EAGAIN, f"names in directory {directory} are not read yet")
        self.directory = directory
        self.below = below


def damaged(ino: int) -> OSError:
    return fail(errno.EIO, f"the record of inode {ino} is damaged")
