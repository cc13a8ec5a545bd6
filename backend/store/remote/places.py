"""Where the file of a content lies on this host when it is not in the mount's own directory: in that of a
store node.

The node uses the files of superseded contents again, but not those that a mount has opened: what we give to
applications may stay in their pipes and sockets. So before one is opened, it gets a name in the node's
directory lent/ (node/files.py).
"""

import errno
import os
from dataclasses import dataclass

from ...cluster.records import ContentId

__all__ = ["Borrowed", "Incoming", "Place"]


@dataclass(frozen=True, slots=True)
class Incoming:
    """A working copy where the node in the directory `store` takes it over when it is published."""

    store: str
    name: str

    @property
    def path(self) -> str:
        return f"{self.store}/incoming/{self.name}"

    def tell(self) -> str:
        """Return a name of the file: its node need not be told that it is opened."""
        return self.path

    def open(self, flags: int) -> int:
        return os.open(self.path, flags | os.O_CLOEXEC)

    def free(self) -> None:
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            pass  # taken over


@dataclass(frozen=True, slots=True)
class Borrowed:
    """The very file of the node in the directory `store`, which nobody may write."""

    store: str
    extent: ContentId

    @property
    def path(self) -> str:
        return f"{self.store}/extents/{self.extent:x}.0"

    def tell(self) -> str:
        """Tell the node that its extent is about to be opened. Return the name that tells it."""
        lent = f"{self.store}/lent/{self.extent:x}.0"
        try:
            os.link(self.path, lent)
        except FileExistsError:
            pass  # it was opened before
        return lent

    def open(self, flags: int) -> int:
        """Open the file. Raises FileNotFoundError when the node has let it go."""
        lent = self.tell()
        fd = os.open(self.path, flags | os.O_CLOEXEC)
        try:
            # Both names could be of other files, if the content went and came again meanwhile.
            if os.path.samestat(os.stat(lent), os.fstat(fd)):
                return fd
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path)
        except BaseException:
            os.close(fd)
            raise

    def free(self) -> None:
        """Leave the file to its node."""


Place = Incoming | Borrowed
