"""Reading a directory tree: which inode a name leads to, and which names an inode has."""

import contextlib
import errno
import os
from collections.abc import Callable, Collection, Sequence

from .directories import Directories
from .inode import NAME_MAX, Dentry, Inode, fail
from .unseen import Unseen

__all__ = ["Names"]


class Names:
    """The names and inodes of a tree, which Tree changes. `inodes` is for reading only.

    A `damaged` inode can be listed and removed, and everything else is EIO. `maker` and `is_mounted`: of
    new files that other mounts make (see Unseen)."""

    def __init__(self, maker: int, is_mounted: Callable[[int], bool]) -> None:
        self.inodes: dict[int, Inode] = {}
        # By number; True: its kind is a guess, as no record of it was ever sound here.
        self.damaged: dict[int, bool] = {}
        self.unseen = Unseen(self.inodes, maker, is_mounted)
        self._unseen = self.unseen.inos
        self._children: dict[int, dict[bytes, Dentry]] = {}
        self.directories = Directories(self.inodes, self._children)
        # The parents of inodes with several names (once for each name).
        self._parents: dict[int, list[int]] = {}

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
        children = self._children.get(parent)
        dentry = children.get(name) if children is not None else None
        return dentry is not None and dentry.ino == ino

    def lookup(self, parent: int, name: bytes) -> Inode | None:
        """Return the inode of a name, "." and ".." included; None if no such name is seen."""
        children = self._children.get(parent)
        dentry = children.get(name) if children is not None else None
        if dentry is not None:
            return None if dentry.ino in self._unseen else self.inodes[dentry.ino]
        return self._without_dentry(parent, name)

    def taken(self, parent: int, name: bytes) -> Inode | None:
        """Return the inode of a name, as `lookup` does, also of one that is not seen."""
        ino = self.ino_behind(parent, name)
        return self.inodes[ino] if ino else self._without_dentry(parent, name)

    def _without_dentry(self, parent: int, name: bytes) -> Inode | None:
        if parent not in self._children:
            raise fail(errno.ENOTDIR if parent in self.inodes else errno.ESTALE)
        if name == b".":
            return self.inodes[parent]
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

    def children(self, ino: int) -> list[tuple[bytes, int]]:
        """Return a snapshot of the names seen in a directory and their inode numbers."""
        children, unseen = self._children[ino], self._unseen
        return [(name, dentry.ino) for name, dentry in children.items() if dentry.ino not in unseen]

    def is_empty(self, directory: int) -> bool:
        return not self._children[directory]

    def parents_of(self, ino: int) -> Sequence[int]:
        """Return the directories that hold an inode, once for each name."""
        parents = self._parents.get(ino)
        if parents is not None:
            return parents
        inode = self.inodes.get(ino)
        if inode is None or not inode.parent or (inode.is_dir and ino not in self.directories):
            return ()
        return (inode.parent,)

    def names_of(self, ino: int) -> list[tuple[int, bytes]]:
        """Return every (parent, name) of an inode, by searching all names of its parents."""
        return [
            (parent, name)
            for parent in set(self.parents_of(ino))
            for name, dentry in self._children.get(parent, {}).items()
            if dentry.ino == ino
        ]

    def names_of_all(self, inos: Collection[int]) -> list[tuple[int, bytes]]:
        """Return every (parent, name) of these inodes, by searching all names once."""
        wanted = set(inos)
        return [
            (parent, name)
            for parent, children in (self._children.items() if wanted else ())
            for name, dentry in children.items()
            if dentry.ino in wanted
        ]

    def describe(self, ino: int) -> str:
        """Return the path of an inode from the root of the filesystem, for messages."""
        for parent, name in self.names_of(ino):
            with contextlib.suppress(OSError):  # a directory that was removed
                return os.fsdecode(self.directories.path_of(parent) + b"/" + name)
        return f"inode {ino}"

    def existing(self, parent: int, name: bytes) -> Inode:
        """Return the inode of a name, but not of "." and "..". Raises OSError ENOENT, ENOTDIR,
        ESTALE, ENAMETOOLONG."""
        ino = self.ino_behind(parent, name)
        if not ino or ino in self._unseen:
            self.lookup(parent, name)  # raises a more exact error than ENOENT, if there is one
            raise fail(errno.ENOENT)
        return self.inodes[ino]

    def ino_behind(self, parent: int, name: bytes) -> int:
        """Return the number of a name's inode, 0: there is none."""
        children = self._children.get(parent)
        dentry = children.get(name) if children is not None else None
        return dentry.ino if dentry is not None else 0

    def name_revision(self, parent: int, name: bytes) -> int:
        """Return the revision that last put a name, 0: there is none."""
        dentry = self._children[parent].get(name)
        return dentry.revision if dentry is not None else 0
