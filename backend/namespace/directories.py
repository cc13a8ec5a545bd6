"""Where the directories of a tree are: each has one name, and none lies below itself.

Hosts that follow the rules change no tree in another way. The records of one that does not are found here
before somebody walks up from a directory and never arrives (docs/security.md, "Sensible values").
"""

import errno
from collections.abc import Iterator, Mapping

from .inode import ROOT_INO, Dentry, Inode, fail

__all__ = ["Directories"]

_Name = tuple[int, bytes]  # number of a directory, and a name in it


class Directories:
    """The names of directories. A removed directory keeps its last one while its inode is known."""

    def __init__(
        self, inodes: Mapping[int, Inode], children: Mapping[int, Mapping[bytes, Dentry]]
    ) -> None:
        self._inodes = inodes
        self._children = children
        self._names: dict[int, bytes] = {}
        # Directories that got a name since `watch`, with the names that they had before.
        self._linked: dict[int, list[_Name]] | None = None

    def __contains__(self, ino: int) -> bool:
        return ino in self._names

    def link(self, ino: int, parent: int, name: bytes) -> None:
        """Note that a directory has a new name, instead of the one it had."""
        if self._linked is not None:
            former = self._linked.setdefault(ino, [])
            if ino in self._names:
                former.append((self._inodes[ino].parent, self._names[ino]))
        self._place(ino, parent, name)

    def place_of(self, ino: int) -> _Name | None:
        """Return the name that leads to a directory, None: there is none."""
        name = self._inodes[ino].parent, self._names.get(ino, b"")
        return name if self._leads_to(name, ino) else None

    def places_of(self, ino: int) -> list[_Name]:
        """Return all names that lead to a directory: more than one if a transaction gives it several."""
        names = {
            *(self._linked or {}).get(ino, ()),
            (self._inodes[ino].parent, self._names.get(ino, b"")),
        }
        return [name for name in names if self._leads_to(name, ino)]

    def forget(self, ino: int) -> None:
        self._names.pop(ino, None)
        if self._linked is not None:
            self._linked.pop(ino, None)

    def path_of(self, directory: int) -> bytes:
        """Return the path of a directory from the root, which is b"". Raises ESTALE if it was removed."""
        names = []
        while directory != ROOT_INO:
            inode = self._inodes.get(directory)
            if inode is None or not inode.nlink or directory not in self._names:
                raise fail(errno.ESTALE)
            names.append(self._names[directory])
            directory = inode.parent
        return b"".join(b"/" + name for name in reversed(names))

    def watch(self) -> None:
        """Note what is linked from now on, for `misplaced`."""
        self._linked = {}

    def misplaced(self) -> Iterator[tuple[int, _Name]]:
        """Yield the directories that were given a second name since `watch`, or one below themselves, with
        that name. The caller has to remove it before it asks for the next one."""
        linked, self._linked = self._linked or {}, None
        for ino, former in linked.items():
            here = self._inodes[ino].parent, self._names[ino]
            names = [name for name in {*former, here} if self._leads_to(name, ino)]
            # The one that came first is the right one; of two in one transaction, whichever.
            names.sort(key=lambda name: (self._children[name[0]][name[1]].revision, name))
            for name in names[1:]:
                yield ino, name
            if names and names[0] != here:
                self._place(ino, *names[0])
        sound: set[int] = set()
        for ino in linked:
            if ino == ROOT_INO or (self._children[ino] and self._lies_below_itself(ino, sound)):
                yield ino, (self._inodes[ino].parent, self._names.pop(ino))
                self._inodes[ino].parent = 0

    def _lies_below_itself(self, ino: int, sound: set[int]) -> bool:
        """`sound`: directories below which this was found not to be so. They get company."""
        passed = set()
        directory = ino
        while directory != ROOT_INO and directory not in sound:
            passed.add(directory)
            place = self.place_of(directory)
            if place is None:
                break  # it was removed
            directory, _ = place
            if directory == ino:
                return True
            if directory in passed:
                return False  # it lies below one that does
        sound |= passed
        return False

    def _place(self, ino: int, parent: int, name: bytes) -> None:
        self._inodes[ino].parent = parent
        self._names[ino] = name

    def _leads_to(self, name: _Name, ino: int) -> bool:
        dentry = self._children[name[0]].get(name[1]) if name[0] in self._children else None
        return dentry is not None and dentry.ino == ino
