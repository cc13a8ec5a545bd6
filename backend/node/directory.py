"""A store node's directory, and where things lie in it.

STORE/node.json             the node's identity, for ever (identity.py)
STORE/scrub.json            the progress of the scrub (scrub.py)
STORE/lock                  one process at a time
STORE/extents/CONTENT.STRIPE    sealed extents, numbers in hexadecimal; mode 0400 once an inode named it,
                            with the sticky bit if the node made the file itself (files.py)
STORE/incoming/_N           being received, on its way out, or spare (incoming.py)
STORE/incoming/CONTENT      a working copy of a mount on this host, to be adopted
STORE/held/ID/CONTENT       another name of a file that the mount ID on this host needs; it locks ID as long
                            as it lives (store/remote/places.py)
STORE/quarantine/CONTENT.STRIPE     an extent that nothing names, kept for a while (quarantine.py)
"""

import fcntl
import logging
import os
import shutil
from contextlib import ExitStack

from ..files.extents import in_memory, lock_directory

log = logging.getLogger(__name__)


class StoreDirectory:
    """A store directory, locked, with a descriptor of each directory in it, until it is closed.

    `power_safe` is whether it lies on a disk. Raises StoreInUse when another process has it open.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        os.makedirs(path, mode=0o700, exist_ok=True)
        with ExitStack() as opened:
            lock = lock_directory(path, "store is in use by another process")
            opened.callback(os.close, lock)
            # Names of files that nodes up to 0.2 made.
            shutil.rmtree(f"{path}/lent", ignore_errors=True)
            self.top = _opened(opened, path)
            self.extents = _opened(opened, f"{path}/extents")
            self.incoming = _opened(opened, f"{path}/incoming")
            self.held = _opened(opened, f"{path}/held")
            self.quarantine = _opened(opened, f"{path}/quarantine")
            self.power_safe = not in_memory(path)
            self._opened = opened.pop_all()

    def close(self) -> None:
        self._opened.close()

    def read(self, name: str) -> bytes | None:
        """Return the contents of a small file beside the directories, None if it is not there."""
        try:
            with open(f"{self.path}/{name}", "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes, *, hardened: bool) -> None:
        """Replace such a file; one that is `hardened` survives a power loss. For any thread, one at a time
        for each name."""
        draft = f"{name}.new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        with open(os.open(draft, flags, 0o600, dir_fd=self.top), "wb") as file:
            file.write(data)
            if hardened:
                file.flush()
                os.fsync(file.fileno())
        os.rename(draft, name, src_dir_fd=self.top, dst_dir_fd=self.top)
        if hardened:
            os.fsync(self.top)

    def forget_ended_mounts(self) -> None:
        """Remove the names in held/ of mounts that have ended. For a worker thread:
        memory of files without another name is freed here."""
        for owner in os.listdir(self.held):
            try:
                fd = os.open(owner, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.held)
            except OSError as error:
                log.debug("held/%s: %s", owner, error)
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for name in os.listdir(fd):
                    os.unlink(name, dir_fd=fd)
                os.rmdir(owner, dir_fd=self.held)
            except BlockingIOError:
                pass  # the mount lives
            finally:
                os.close(fd)


def _opened(stack: ExitStack, path: str) -> int:
    os.makedirs(path, mode=0o700, exist_ok=True)
    os.chmod(path, 0o700)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    stack.callback(os.close, fd)
    return fd
