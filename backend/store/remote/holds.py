"""Names that keep files of a store node on this host while a mount here needs them.

The node lets an extent go as soon as no version names it, and takes a working copy over under another
name. Programs that have the file open need it longer: a name of our own keeps it, without a descriptor, of
which there are only so many. The names are in a directory of ours, whose lock tells the node that we live
(node/held.py removes what is left of mounts that do not).
"""

import fcntl
import os

__all__ = ["HELD", "Holds"]

HELD = "held"
_ID_BYTES = 8


class Holds:
    """Our names in the store directory `store` of a node."""

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
            pass  # the store has gone
        finally:
            os.close(self._fd)
            self._fd = -1

    def add(self, path: str, name: str) -> str:
        """Give a file of the store one more name, and return its path. Raises OSError: ENOENT, EMFILE."""
        if self._fd < 0:
            self._open()
        target = f"{self._directory}/{name}"
        try:
            os.link(path, target)
        except FileNotFoundError:
            if os.path.exists(self._directory) or not os.path.exists(path):
                raise
            # Another store was made in the place of the one before.
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
                # The node may have taken it for a dead mount's before it was locked.
                if os.path.samestat(os.stat(directory), os.fstat(fd)):
                    self._directory, self._fd = directory, fd
            except (BlockingIOError, FileNotFoundError):
                pass
            finally:
                if self._fd != fd:
                    os.close(fd)
