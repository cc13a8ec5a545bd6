"""Clones: files that name a content which another file named first, as long as they have that version.

Nodes keep a content while any inode names it. A mount that wants to know as much of the contents on its
host has an index of the clones alone: their records tell that they are, and of which inode (Inode.origin).
"""

from collections.abc import Mapping
from typing import NamedTuple

from ..model.records import ContentId
from .inode import Inode


class NewClone(NamedTuple):
    """A file to be made: its name, the inode of which it is a clone, as it was, and a copy of that with its
    owner, mode and attributes, and the number of its content."""

    name: bytes
    source: Inode
    made: Inode


class Clones:
    """The clones among `inodes`, by content. `in_use` is False while there was never one."""

    def __init__(self, inodes: Mapping[int, Inode]) -> None:
        self._inodes = inodes
        self.in_use = False
        self.of: dict[ContentId, set[int]] = {}

    def changed(self, before: Mapping[int, Inode | None]) -> None:
        """Bring the index up to date; inodes were as in `before`."""
        for ino, old in before.items():
            new = self._inodes.get(ino)
            if old is not None and old.origin and old.extent in self.of:
                self.of[old.extent].discard(ino)
                if not self.of[old.extent]:
                    del self.of[old.extent]
            if new is not None and new.origin and new.nlink:
                self.of.setdefault(new.extent, set()).add(ino)

    def count(self, content: ContentId) -> int:
        """Return how many inodes name a content that has clones; 0 if it has none."""
        clones = self.of.get(content)
        if not clones:
            return 0
        clone = self._inodes.get(next(iter(clones)))  # None: it was damaged
        origin = self._inodes.get(clone.origin) if clone is not None else None
        return len(clones) + (origin is not None and origin.nlink > 0 and origin.extent == content)
