"""Second names of files that mounts on a store node's host need, and their removal (store/remote/holds.py).

STORE/held/ID/CONTENT   second name of a file that the mount ID needs; the mount locks ID while it lives
"""

import fcntl
import logging
import os

__all__ = ["drop_orphans"]

log = logging.getLogger(__name__)


def drop_orphans(held_fd: int) -> int:
    """Remove the names of mounts that have ended from the directory `held_fd`, and return how many. For a
    worker thread: memory of files without another name is freed here."""
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
            pass  # the mount lives
        finally:
            os.close(fd)
    return count
