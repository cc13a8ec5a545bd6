"""Names that keep files of a store node on this host while a mount here needs them.

The node frees an extent as soon as no version names it, and renames a working copy that it adopts. Programs
that have the file open need it longer: a second name keeps it without a descriptor, of which there are few.
The names are in a directory of this mount's own, whose lock tells the node that the mount lives
(node/directory.py removes those of mounts that have ended).
"""

import fcntl
import os

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
            for name in os.listdir(self._fd):
                os.unlink(name, dir_fd=self._fd)
            os.rmdir(self._directory)
        except FileNotFoundError:
            pass  # the store is gone
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
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Before it was locked, the node may have removed it as that of a mount that has ended.
                if os.path.samestat(os.stat(directory), os.fstat(fd)):
                    self._directory, self._fd = directory, fd
            except (BlockingIOError, FileNotFoundError):
                pass
            finally:
                if self._fd != fd:
                    os.close(fd)
