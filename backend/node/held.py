"""What mounts on a store node's host hold of it, and its end when they have ended (store/remote/holds.py).

STORE/held/ID/CONTENT   another name of a file that the mount ID needs; ID is locked as long as it lives
"""

import fcntl
import logging
import os

__all__ = ["drop_orphans"]

log = logging.getLogger(__name__)


def drop_orphans(held_fd: int) -> int:
    """Remove the names of mounts that have ended from the directory `held_fd`, and return how many. For a
    worker thread: the memory of what has no other name goes now."""
    count = 0
    for owner in os.listdir(held_fd):
        try:
            fd = os.open(owner, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=held_fd)
        except OSError as error:
            log.debug("held/%s: %s", owner, error)
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for name in os.listdir(fd):
                os.unlink(name, dir_fd=fd)
                count += 1
            os.rmdir(owner, dir_fd=held_fd)
        except BlockingIOError:
            pass  # its mount lives
        finally:
            os.close(fd)
    return count
