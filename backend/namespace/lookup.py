"""Reading a directory tree: which inode a name leads to, and which names an inode has."""

import contextlib
import errno
import os
from collections.abc import Callable, Sequence

from ..kv.map import Map
from .inode import NAME_MAX, ROOT_INO, Inode, fail, name_key
from .inodes import Inodes, link_key


class Names:
    """The names and inodes of a tree, which Tree changes, in an ordered map. `inodes` is for reading only.

    A `damaged` inode can be listed and removed, and everything else is EIO.

    Only the mount that makes a new file sees its names until it has a version; the inode names that mount
    (Inode.maker). Every mount's tree has the names, so that nobody else makes them, and all but the maker
    pass over them (docs/sharing.md, "When other hosts see a new file"). `unseen` are the inodes whose names
    are not seen here; `maker` is the number of this mount; is_mounted(number) returns whether a mount has
    a session now."""

    def __init__(self, records: Map, maker: int, is_mounted: Callable[[int], bool]) -> None:
        self.records = records
        self.inodes = Inodes(records)
        # By number; True: its kind is a guess, as no record of it was ever sound here.
        self.damaged: dict[int, bool] = {}
        self.unseen: set[int] = set()
        self.maker = maker
        self._is_mounted = is_mounted

    def inode(self, ino: int) -> Inode:
        """Return an inode. Raises OSError ESTALE, and EIO if it is damaged."""
        if ino in self.damaged:
            raise fail(errno.EIO, f"the record of inode {ino} is damaged")
        try:
            return self.inodes[ino]
        except KeyError:
            raise fail(errno.ESTALE) from None

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
        return None

    def parent_of(self, directory: int) -> int:
        """Return the directory that holds a directory; the root holds itself."""
        inode = self.inodes.get(directory)
        if inode is None:
            raise fail(errno.ESTALE)
        return inode.parent or directory

    def below(self, ino: int) -> list[tuple[bytes, int]]:
        """Return a snapshot of all names in a directory and their inode numbers."""
        return [
            (key[9:], int.from_bytes(value[:8], "big"))
            for key, value in self.records.range(*_in(ino))
        ]

    def children(self, ino: int) -> list[tuple[bytes, int]]:
        """Return a snapshot of the names seen in a directory and their inode numbers."""
        found, unseen = self.below(ino), self.unseen
        return [one for one in found if one[1] not in unseen] if unseen else found

    def is_empty(self, directory: int) -> bool:
        return self.records.first(*_in(directory)) is None

    def parents_of(self, ino: int) -> Sequence[int]:
        """Return the directories that hold an inode, without reading all names that it has in them."""
        try:
            inode = self.inodes[ino]
        except KeyError:
            return ()
        if not inode.name:
            return ()
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
        path, inodes = b"", self.inodes
        try:
            while directory != ROOT_INO:
                inode = inodes[directory]
                if not inode.nlink or not inode.name:
                    raise fail(errno.ENOENT)
                path = b"/" + inode.name + path
                directory = inode.parent
        except KeyError:
            raise fail(errno.ENOENT) from None
        return path

    def describe(self, ino: int) -> str:
        """Return the path of an inode from the root of the filesystem, for messages."""
        for parent, name in self.names_of(ino):
            with contextlib.suppress(OSError):  # a directory that was removed
                return os.fsdecode(self.path_of(parent) + b"/" + name)
        return f"inode {ino}"

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
        return int.from_bytes(value[:8], "big") if value is not None else 0

    def name_revision(self, parent: int, name: bytes) -> int:
        """Return the revision that last put a name, 0: there is none."""
        value = self.records.get(name_key(parent, name)) if len(name) <= NAME_MAX else None
        return int.from_bytes(value[8:], "big") if value is not None else 0

    # -- names that are not seen -------------------------------------------------------------------

    def note_maker(self, inode: Inode) -> None:
        """Take over who sees the names of an inode, which is new or has changed."""
        if inode.maker and inode.maker != self.maker:
            self.unseen.add(inode.ino)
        else:
            self.unseen.discard(inode.ino)

    def is_abandoned(self, inode: Inode) -> bool:
        """Return whether nobody sees the names of an inode: the mount that made it has no session."""
        return inode.ino in self.unseen and not self._is_mounted(inode.maker)

    def abandoned(self) -> list[int]:
        """Return the inodes whose names nobody sees."""
        return [ino for ino in self.unseen if self.is_abandoned(self.inodes[ino])]


def _in(directory: int) -> tuple[bytes, bytes]:
    return name_key(directory, b""), name_key(directory + 1, b"")
