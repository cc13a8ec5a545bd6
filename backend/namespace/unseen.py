"""Names of new files that only the mount sees which makes them, until they have a version.

The inode of such a file names its maker (Inode.maker). Every mount's tree has the name, so that nobody else
makes it, and all but the maker pass over it (docs/sharing.md, "When other hosts see a new file").
"""

from collections.abc import Callable, Mapping

from .inode import Inode

__all__ = ["Unseen"]


class Unseen:
    """The inodes of a tree whose names are not seen here. `maker` is the number of this mount;
    is_mounted(number) returns whether a mount has a session now."""

    def __init__(
        self, inodes: Mapping[int, Inode], maker: int, is_mounted: Callable[[int], bool]
    ) -> None:
        self.maker = maker
        self.inos: set[int] = set()
        self._inodes = inodes
        self._is_mounted = is_mounted

    def note(self, inode: Inode) -> None:
        """Take over who sees the names of an inode, which is new or has changed."""
        if inode.maker and inode.maker != self.maker:
            self.inos.add(inode.ino)
        else:
            self.inos.discard(inode.ino)

    def is_abandoned(self, inode: Inode) -> bool:
        """Return whether nobody sees the names of an inode: the mount that made it has no session."""
        return inode.ino in self.inos and not self._is_mounted(inode.maker)

    def abandoned(self) -> list[int]:
        """Return the inodes whose names nobody sees."""
        return [ino for ino in self.inos if self.is_abandoned(self._inodes[ino])]
