"""The places of contents that lie not in the mount's own directory but in that of a store node on this
host.

The node frees an extent as soon as no version names it, and renames a working copy that it adopts. Programs
that have the file open need it longer: a second name keeps it without a descriptor, of which there are few.
The names are in a directory of this mount's own, whose lock tells the node that the mount lives
(node/directory.py removes those of mounts that have ended).

The node reuses the files of superseded contents, but not those whose pages programs may keep in their pipes
and sockets. So before such a program opens a content, its file is marked (node/incoming.py).
"""

import fcntl
import os
from contextlib import suppress

from ...files.extents import LENT_NS, OWN_FILE, look_for_room
from ...model.records import ContentId

HELD = "held"
_ID_BYTES = 8


class Holds:
    """The second names that a mount has made in the store directory `store` of a node."""

    def __init__(self, store: str) -> None:
        self._store = store
        self._directory = ""
        self._fd = -1

    def close(self) -> None:
        """Remove them all."""
        if self._fd < 0:
            return
        try:
            with suppress(FileNotFoundError):  # the store is gone
                for name in os.listdir(self._fd):
                    os.unlink(name, dir_fd=self._fd)
                os.rmdir(self._directory)
        finally:
            os.close(self._fd)
            self._fd = -1

    def add(self, path: str, name: str) -> str:
        """Give a file of the store a second name, and return its path. Raises OSError: ENOENT, EMFILE."""
        if self._fd < 0:
            self._open()
        target = f"{self._directory}/{name}"
        try:
            os.link(path, target)
        except FileNotFoundError:
            if os.path.exists(self._directory) or not os.path.exists(path):
                raise
            # Another store was made in this place.
            self.close()
            self._open()
            target = f"{self._directory}/{name}"
            os.link(path, target)
        return target

    def _open(self) -> None:
        while self._fd < 0:
            directory = f"{self._store}/{HELD}/{os.urandom(_ID_BYTES).hex()}"
            os.mkdir(directory, 0o700)
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                with suppress(BlockingIOError, FileNotFoundError):
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    # Before it was locked, the node may have removed it as that of a mount that has ended.
                    if os.path.samestat(os.stat(directory), os.fstat(fd)):
                        self._directory, self._fd = directory, fd
            finally:
                if self._fd != fd:
                    os.close(fd)


class Place:
    """A content's file in the node's directory `store`: an extent of the node's, which nobody may write,
    or, while it `is_incoming`, a working copy that the node adopts when it is published. `held` is a second
    name that keeps the file while it is pinned, "" if it has none; `is_lent`: the file with that name is
    marked."""

    def __init__(self, store: str, extent: ContentId, *, is_incoming: bool) -> None:
        self.store = store
        self.is_incoming = is_incoming
        name = f"incoming/{extent:x}" if is_incoming else f"extents/{extent:x}.0"
        self.path = f"{store}/{name}"
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

    def lend(self) -> None:
        """Mark the file, which has a second name: a program may keep references to its pages."""
        if not (self.is_incoming or self.is_lent):
            _mark_lent(self.held)
            self.is_lent = True

    def open(self, flags: int) -> int:
        """Open the file. Raises FileNotFoundError if the node has freed it."""
        fd = os.open(self.held or self.path, flags | os.O_CLOEXEC)
        try:
            if not (self.held or self.is_incoming):
                _mark_lent(fd)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def free(self) -> None:
        """Remove a working copy; leave an extent to its node."""
        self.let_go()
        if self.is_incoming:
            look_for_room(self.store)
            _unlink(self.path)  # the node may have adopted it


def _mark_lent(file: str | int) -> None:
    """Mark a file that the node made: it uses no others again."""
    status = os.stat(file)
    if status.st_mode & OWN_FILE:
        os.utime(file, ns=(status.st_atime_ns, LENT_NS))


def _unlink(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)
