"""The places of contents that lie not in the mount's own directory but in that of a store node on this
host.

The node reuses the files of superseded contents, but not those whose pages programs may keep in their pipes
and sockets. So before such a program opens a content, that gets a name in the node's directory lent/
(node/files.py).
"""

import errno
import os
from dataclasses import dataclass

from ...model.records import ContentId


@dataclass(frozen=True, slots=True)
class Incoming:
    """A working copy in a place where the node with the directory `store` adopts it when it is
    published."""

    store: str
    name: str

    @property
    def path(self) -> str:
        return f"{self.store}/incoming/{self.name}"

    def open(self, flags: int) -> int:
        return os.open(self.path, flags | os.O_CLOEXEC)

    def free(self) -> None:
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            pass  # adopted by the node


@dataclass(frozen=True, slots=True)
class Borrowed:
    """A file of the node with the directory `store`, which nobody may write."""

    store: str
    extent: ContentId

    @property
    def path(self) -> str:
        return f"{self.store}/extents/{self.extent:x}.0"

    @property
    def _lent(self) -> str:
        return f"{self.store}/lent/{self.extent:x}.0"

    def tell(self) -> str:
        """Tell the node that its extent is about to be opened. Return the name in lent/ that tells it."""
        try:
            os.link(self.path, self._lent)
        except FileExistsError:
            pass  # it was opened before
        return self._lent

    def is_another(self) -> bool:
        """Return whether the node was told of another file of this extent, which it has replaced since.
        Raises OSError."""
        try:
            told = os.stat(self._lent)
        except FileNotFoundError:
            return False
        return not os.path.samestat(told, os.stat(self.path))

    def open(self, flags: int) -> int:
        """Open the file. Raises FileNotFoundError if the node has freed it."""
        lent = self.tell()
        fd = os.open(self.path, flags | os.O_CLOEXEC)
        try:
            # The two names may be of different files, if the content was freed and came again meanwhile.
            if os.path.samestat(os.stat(lent), os.fstat(fd)):
                return fd
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path)
        except BaseException:
            os.close(fd)
            raise

    def free(self) -> None:
        """Leave the file to its node."""


Place = Incoming | Borrowed
