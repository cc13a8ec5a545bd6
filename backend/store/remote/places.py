"""The places of contents that lie not in the mount's own directory but in that of a store node on this
host.

The node reuses the files of superseded contents, but not those whose pages programs may keep in their pipes
and sockets. So before such a program opens a content, that gets a name in the node's directory lent/
(node/files.py).
"""

import errno
import os

from ...model.records import ContentId
from .holds import Holds


class Place:
    """A content's file in the node's directory `store`: an extent of the node's, which nobody may write,
    or, while it `is_incoming`, a working copy that the node adopts when it is published. `held` is a second
    name that keeps the file while it is pinned, "" if it has none; `is_lent`: the node was told that its
    pages may be kept."""

    def __init__(self, store: str, extent: ContentId, *, is_incoming: bool) -> None:
        self.store = store
        self.is_incoming = is_incoming
        self.path = (
            f"{store}/incoming/{extent:x}" if is_incoming else f"{store}/extents/{extent:x}.0"
        )
        self._lent = f"{store}/lent/{extent:x}.0"
        self._second_name = f"{extent:x}"
        self.held = ""
        self.is_lent = False

    def hold(self, holds: Holds) -> None:
        """Give the file a second name. Raises FileNotFoundError if the node has freed it."""
        if not self.held:
            self.held = holds.add(self.path, self._second_name)

    def let_go(self) -> None:
        """Remove the second name."""
        self.is_lent = False
        if self.held:
            _unlink(self.held)  # the store may be gone
            self.held = ""

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
        if self.held or self.is_incoming:
            return os.open(self.held or self.path, flags | os.O_CLOEXEC)
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
        """Remove a working copy; leave an extent to its node."""
        self.let_go()
        if self.is_incoming:
            _unlink(self.path)  # the node may have adopted it


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
