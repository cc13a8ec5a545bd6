"""The names and inodes of a tree: records in an ordered map, read when somebody asks for one.

    key                                    value
    "d" + parent ino (8 bytes BE) + name   ino and revision (8 bytes BE each)
    "i" + ino (8 bytes BE)                 header, name, and the record (see Inode.encode)
    "l" + ino + parent (8 bytes BE each) + name    b"": a further name of an inode that has several

The header holds what is derived from names, so that no record is changed for it: the revision of the
record, the directory and the length of the first name, how many further names there are, and how many
subdirectories a directory has.
"""

import contextlib
import errno
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Final

import msgspec

from ..kv.map import Map
from .inode import (
    NAME_MAX,
    ROOT_INO,
    Inode,
    NoInode,
    Unread,
    damaged,
    fail,
    inode_key,
    name_key,
    nearest_time,
    time_key,
    upwards,
)
from .known import Known

_HEADER: Final = struct.Struct(">QQIIB")
_INODES: Final = (b"i", b"j")
# Inodes of the map that stay here, decoded. About 5 MiB.
_KEPT_MAX: Final = 8192
# Their records, which may have much more: extended attributes.
_KEPT_BYTES_MAX: Final = 16 << 20


class Names:
    """The names and inodes of a tree, which Tree changes, in an ordered map. `inodes` is for reading only.

    A `damaged` inode can be listed and removed, and everything else is EIO.

    Only the mount that makes a new file sees its names until it has a version; the inode names that mount
    (Inode.maker: its number, negative when the writers of the file have gone). Every mount's tree has the
    names, so that nobody else makes them, and all but the maker pass over them (docs/sharing.md, "When
    other hosts see a new file"). `unseen` are the inodes whose names are not seen here; `maker` is the
    number of this mount; is_mounted(number) returns whether a mount has a session now. To ask for a name
    that is not `known` raises Unread."""

    def __init__(self, records: Map, maker: int, is_mounted: Callable[[int], bool]) -> None:
        self.records = records
        self.inodes = Inodes(records)
        # By number; True: its kind is a guess, as no record of it was ever sound here.
        self.damaged: dict[int, bool] = {}
        self.unseen: set[int] = set()
        self.known = Known(records, self.inodes)
        # By subvolume, the next inode number that is not reserved, and the revision of that record.
        self._blocks: dict[int, tuple[int, int]] = {}
        self.maker = maker
        self._is_mounted = is_mounted

    def inode(self, ino: int) -> Inode:
        """Return an inode. Raises OSError ESTALE, and EIO if it is damaged."""
        if ino in self.damaged:
            raise damaged(ino)
        return self.inodes[ino]

    def leads_to(self, parent: int, name: bytes, ino: int) -> bool:
        """Return whether a name leads to an inode."""
        return self.ino_behind(parent, name) == ino != 0

    def lookup(self, parent: int, name: bytes) -> Inode | None:
        """Return the inode of a name, "." and ".." included; None if no such name is seen."""
        found = self.taken(parent, name)
        return None if found is None or found.ino in self.unseen else found

    def taken(self, parent: int, name: bytes) -> Inode | None:
        """Return the inode of a name, as `lookup` does, also of one that is not seen."""
        inodes = self.inodes
        if len(name) <= NAME_MAX:
            value = self.records.get(b"d" + parent.to_bytes(8, "big") + name)
            if value is not None:
                ino = int.from_bytes(value[:8], "big")
                try:
                    return inodes[ino]
                except KeyError:
                    raise fail(errno.EIO, f"the record of inode {ino} is missing") from None
        try:
            directory = inodes[parent]
        except KeyError:
            raise fail(errno.ESTALE) from None
        if not directory.is_dir:
            raise fail(errno.ENOTDIR)
        if name == b".":
            return directory
        if name == b"..":
            return self.inode(self.parent_of(parent))
        if len(name) > NAME_MAX:
            raise fail(errno.ENAMETOOLONG)
        if parent in self.known.unread:
            raise Unread(parent)
        return None

    def parent_of(self, directory: int) -> int:
        """Return the directory that holds a directory; the root holds itself."""
        inode = self.inodes.get(directory)
        if inode is None:
            raise fail(errno.ESTALE)
        return inode.parent or directory

    def below(self, ino: int) -> list[tuple[bytes, int]]:
        """Return a snapshot of all names that are known in a directory and their inode numbers."""
        return [
            (key[9:], int.from_bytes(value[:8], "big"))
            for key, value in self.records.range(*_in(ino))
        ]

    def children(self, ino: int) -> list[tuple[bytes, int]]:
        """Return a snapshot of the names seen in a directory and their inode numbers."""
        self.known.require(ino)
        found, unseen = self.below(ino), self.unseen
        return [one for one in found if one[1] not in unseen] if unseen else found

    def is_empty(self, directory: int) -> bool:
        if not self.has_no_known_name(directory):
            return False
        self.known.require(directory)
        return True

    def has_no_known_name(self, directory: int) -> bool:
        return self.records.first(*_in(directory)) is None

    def parents_of(self, ino: int) -> Sequence[int]:
        """Return the directories that hold an inode, without reading all names that it has in them."""
        try:
            inode = self.inodes[ino]
        except KeyError:
            return ()
        if not inode.name:
            return (inode.parent,) if ino in self.known.placed else ()
        if not inode.more:
            return (inode.parent,)
        found = {inode.parent: None}
        parent, end = -1, link_key(ino + 1, 0, b"")
        while key := self.records.first(link_key(ino, parent + 1, b""), end):
            parent = int.from_bytes(key[9:17], "big")
            found[parent] = None
        return list(found)

    def names_of(self, ino: int) -> list[tuple[int, bytes]]:
        """Return every (parent, name) of an inode."""
        try:
            inode = self.inodes[ino]
        except KeyError:
            return []
        if not inode.name:
            return []
        found = [(inode.parent, inode.name)]
        if inode.more:
            ends = link_key(ino, 0, b""), link_key(ino + 1, 0, b"")
            for key, _ in self.records.range(*ends):
                found.append((int.from_bytes(key[9:17], "big"), key[17:]))
        return found

    def path_of(self, directory: int) -> bytes:
        """Return the path of a directory from the root, which is b"". Raises ENOENT if it was removed."""
        names = list[bytes]()
        for inode in upwards(self.inodes, directory):
            if inode.ino == ROOT_INO:
                return b"".join(reversed(names))
            if inode.ino in self.known.placed:
                raise Unread(inode.parent)
            if not inode.nlink or not inode.name:
                break
            names.append(b"/" + inode.name)
        raise fail(errno.ENOENT)

    def is_in_place(self, directory: int, elsewhere: set[int]) -> bool:
        """Return whether a directory has a path. `elsewhere`: those of which it is known that they have
        none. They get company."""
        passed = set[int]()
        for inode in upwards(self.inodes, directory):
            if inode.ino == ROOT_INO:
                return True
            passed.add(inode.ino)
            if inode.ino in self.known.placed:
                continue
            if inode.ino in elsewhere or not inode.nlink or not inode.name:
                break
        elsewhere |= passed
        return False

    def describe(self, ino: int) -> str:
        """Return the path of an inode from the root of the filesystem, for messages."""
        for parent, name in self.names_of(ino):
            with contextlib.suppress(OSError):  # a directory that was removed
                return os.fsdecode(self.path_of(parent) + b"/" + name)
        return "/" if ino == ROOT_INO else f"inode {ino}"

    def existing(self, parent: int, name: bytes) -> Inode:
        """Return the inode of a name, but not of "." and "..". Raises OSError ENOENT, ENOTDIR,
        ESTALE, ENAMETOOLONG."""
        found = self.taken(parent, name)
        if found is None or found.ino in self.unseen or name in (b".", b".."):
            raise fail(errno.ENOENT)
        return found

    def ino_behind(self, parent: int, name: bytes) -> int:
        """Return the number of a name's inode, 0: there is none."""
        if len(name) > NAME_MAX:
            return 0
        value = self.records.get(b"d" + parent.to_bytes(8, "big") + name)
        if value is None and parent in self.known.unread:
            raise Unread(parent)
        return int.from_bytes(value[:8], "big") if value is not None else 0

    def name_revision(self, parent: int, name: bytes) -> int:
        """Return the revision that last put a name, 0: there is none."""
        value = self.records.get(name_key(parent, name)) if len(name) <= NAME_MAX else None
        if value is None and parent in self.known.unread:
            raise Unread(parent)
        return int.from_bytes(value[8:], "big") if value is not None else 0

    def check_names(self, inodes: Iterable[Inode]) -> None:
        """Raise Unread unless all names of these files are known: whoever follows one of their directories
        is told of their changes."""
        for inode in inodes:
            known = self.inodes.get(inode.ino)
            if known is not None and not known.is_dir and known.revision:
                names = known.more + bool(known.name or known.ino in self.known.placed)
                if known.nlink > names and known.ino not in self.damaged:
                    raise Unread(0)

    def next_block(self, subvolume: int) -> tuple[int, int]:
        """Return the next inode number of a subvolume (ROOT_INO: outside of all) that is not reserved, and
        the revision of that record."""
        return self._blocks.get(subvolume, (subvolume + 1, 0))

    # -- names that are not seen -------------------------------------------------------------------

    def is_abandoned(self, inode: Inode) -> bool:
        """Return whether nobody sees the names of an inode: the mount that made it has no session."""
        return inode.ino in self.unseen and not self._is_mounted(abs(inode.maker))

    def is_left(self, inode: Inode) -> bool:
        """Return whether an inode that is not seen here has lost its writers, or is abandoned."""
        return (inode.maker < 0 and inode.ino in self.unseen) or self.is_abandoned(inode)

    def left_in(self, directory: int) -> list[bytes] | None:
        """Return all names in a directory if they are of files that were left; None if others are there."""
        names = list[bytes]()
        for key, value in self.records.range(*_in(directory)):
            ino = int.from_bytes(value[:8], "big")
            if ino not in self.unseen or not self.is_left(self.inodes[ino]):
                return None
            names.append(key[9:])
        return names


def _in(directory: int) -> tuple[bytes, bytes]:
    return name_key(directory, b""), name_key(directory + 1, b"")


class Totals(msgspec.Struct):
    """How many inodes there are with a record, and the blocks of 512 bytes of their files."""

    files: int = 0
    directories: int = 0
    others: int = 0
    blocks: int = 0

    @property
    def inodes(self) -> int:
        return self.files + self.directories + self.others

    def count(self, inode: Inode, sign: int) -> None:
        """Count an inode (1), or count it no more (-1)."""
        if inode.is_file:
            self.files += sign
            self.blocks += sign * inode.blocks
        elif inode.is_dir:
            self.directories += sign
        else:
            self.others += sign


class Inodes(dict[int, Inode]):
    """Inodes by number, as a mapping. An inode without a revision is not in the map: it stays here until it
    is deleted. `totals` counts those in the map. `are_compared`: somebody compares inodes before and after
    a change, so none is changed in place."""

    def __init__(self, records: Map) -> None:
        super().__init__()
        self._records = records
        self.are_compared = False
        self.totals = Totals()
        self._kept_max = _KEPT_MAX
        self._kept_bytes = 0
        # By number: the inode before the change under way, and its new record; None: it stays the same.
        self._changed: dict[int, tuple[Inode | None, bytes | None]] = {}
        # Directories before the change under way, of which the map has another time since.
        self._touched: dict[int, Inode] = {}
        # Returns an inode if it is in memory, as all are that have no record.
        self.at_hand = super().get

    def __missing__(self, ino: int) -> Inode:
        if ino in self._changed:
            raise NoInode  # it is being removed
        value = self._records.get(inode_key(ino))
        if value is None:
            raise NoInode
        is_much = super().__len__() > self._kept_max or self._kept_bytes > _KEPT_BYTES_MAX
        if is_much and not self._changed:
            self.forget()
        self._kept_bytes += len(value)
        inode = self[ino] = self._decode(ino, value)
        return inode

    def get(self, ino: int) -> Inode | None:  # type: ignore[override]
        try:
            return self[ino]
        except KeyError:
            return None

    def __contains__(self, ino: object) -> bool:
        if super().__contains__(ino):
            return True
        return ino not in self._changed and self._records.get(inode_key(ino)) is not None

    def __iter__(self) -> Iterator[int]:
        yield from [ino for ino, inode in super().items() if not inode.revision]
        for key, _ in self._records.range(*_INODES):
            yield int.from_bytes(key[1:], "big")

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def items(self) -> Iterator[tuple[int, Inode]]:  # type: ignore[override]
        yield from [(ino, inode) for ino, inode in super().items() if not inode.revision]
        for key, value in self._records.range(*_INODES):
            ino = int.from_bytes(key[1:], "big")
            yield ino, self._decode(ino, value)

    def values(self) -> Iterator[Inode]:  # type: ignore[override]
        return map(itemgetter(1), self.items())

    def _decode(self, ino: int, value: bytes) -> Inode:
        try:
            revision, parent, more, subdirectories, length = _HEADER.unpack_from(value)
            record_at = _HEADER.size + length
            inode = Inode.decode(ino, value[record_at:], revision)
        except (msgspec.DecodeError, struct.error) as error:
            raise fail(errno.EIO, f"the record of inode {ino} is damaged: {error}") from error
        inode.parent, inode.more = parent, more
        inode.name = value[_HEADER.size : record_at]
        if inode.is_dir:
            inode.nlink = 2 + subdirectories
            self.date(inode)
        return inode

    def date(self, directory: Inode) -> None:
        """Give a directory the time when its names changed, if that is in the map."""
        changed = self._records.get(time_key(directory.ino))
        if changed is not None:
            directory.mtime_ns = time_ns = nearest_time(int.from_bytes(changed, "big"))
            directory.ctime_ns = max(directory.ctime_ns, time_ns)

    def unrecorded(self) -> list[Inode]:
        """Return the inodes without a record: those that were removed and are open, and new files of which
        this mount alone knows."""
        return [inode for inode in super().values() if not inode.revision]

    # -- changes -------------------------------------------------------------------------------------

    def store(self, inode: Inode, record: bytes | None, known: Inode | None) -> None:
        """Have an inode instead of the one that was `known` until now; its record is another one, or (None)
        the same."""
        ino = inode.ino
        before, former = self._changed.get(ino) or (known, None)
        self._changed[ino] = before, record if record is not None else former
        self[ino] = inode

    def replace(self, inode: Inode, revision: int) -> None:
        """Have an inode whose derived fields are right, with a record at this revision, instead of the one
        that was just read. 0: it has no record any more, or not yet."""
        ino = inode.ino
        before = self.at_hand(ino) or (self.get(ino) if inode.revision else None)
        inode.revision = revision
        self._changed[ino] = before, inode.encode() if revision else None
        self[ino] = inode

    def touch(self, ino: int, time_ns: int | None) -> None:
        """Set the time when the names of a directory changed, in place where nobody compares inodes with
        what they were; None: the directory's record has the times from now on."""
        known = self.get(ino) if self.are_compared else self.at_hand(ino)
        if known is not None and known.revision:
            self._touched.setdefault(ino, known)
            if time_ns is None or time_ns < known.mtime_ns:
                del self[ino]
            elif known.is_dir:
                inode = known
                if self.are_compared:
                    inode = self[ino] = known.copy()
                inode.mtime_ns, inode.ctime_ns = time_ns, max(known.ctime_ns, time_ns)
        value = None if time_ns is None else time_ns.to_bytes(8, "big")
        self._records.put(b"t" + ino.to_bytes(8, "big"), value)

    def changing(self, ino: int) -> Inode:
        """Return an inode whose derived fields can be changed."""
        inode = self[ino]
        if ino not in self._changed:
            self._changed[ino] = inode, None
            inode = self[ino] = inode.copy()
        return inode

    def write(self) -> None:
        """Put all that has changed into the map."""
        records = self._records
        for ino, (before, record) in self._changed.items():
            key, inode = b"i" + ino.to_bytes(8, "big"), super().get(ino)
            if inode is None or not inode.revision:
                if before is None or before.revision:
                    records.put(key, None)
                continue
            if record is None:
                value = records.get(key)
                record = (
                    value[_HEADER.size + value[_HEADER.size - 1] :] if value else inode.encode()
                )
            subdirectories = max(0, inode.nlink - 2) if inode.is_dir else 0
            header = _HEADER.pack(
                inode.revision, inode.parent, inode.more, subdirectories, len(inode.name)
            )
            records.put(key, b"%b%b%b" % (header, inode.name, record))
            self._kept_bytes += len(record)

    def settle(self) -> dict[int, Inode | None]:
        """End a change that was written. Return what it has changed, by number, as it was before."""
        totals, changed = self.totals, dict[int, Inode | None](self._touched)
        for ino, (before, _) in self._changed.items():
            changed.setdefault(ino, before)
            after = super().get(ino)
            if before is not None and before.revision:
                if after is not None and after.revision:
                    totals.blocks += after.blocks - before.blocks
                else:
                    totals.count(before, -1)
            elif after is not None and after.revision:
                totals.count(after, 1)
        self._changed.clear()
        self._touched.clear()
        if super().__len__() > self._kept_max or self._kept_bytes > _KEPT_BYTES_MAX:
            self.forget()
        return changed

    def restore(self) -> None:
        """Take a change back that failed."""
        for ino, (before, _) in self._changed.items():
            self.pop(ino, None)
            if before is not None:
                self[ino] = before
        self._changed.clear()
        self._touched.clear()
        self.forget()

    def forget(self) -> None:
        """Drop what the map has, too. The rest stays, and does not count."""
        self._kept_bytes = 0
        for ino in [ino for ino, inode in super().items() if inode.revision]:
            del self[ino]
        self._kept_max = super().__len__() + _KEPT_MAX


def link_key(ino: int, parent: int, name: bytes) -> bytes:
    return b"l" + ino.to_bytes(8, "big") + parent.to_bytes(8, "big") + name
