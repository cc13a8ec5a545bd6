"""A directory that a daemon keeps data in: its lock, whether it lies in memory, and marks of its files."""

import errno
import fcntl
import os
import stat

# The mode bit of files that a store node made itself, and may use again.
OWN_FILE = stat.S_ISVTX
# The modification time of such a file from when a program may keep references to its pages: it is never
# used again.
LENT_NS = 0


class StoreInUse(OSError):
    """Another daemon serves this store directory."""


def lock_directory(directory: str, busy: str) -> int:
    """Take the lock of a directory; it is held until the descriptor that is returned is closed.

    Raises StoreInUse when another process has it: `busy`, with that one's pid.
    """
    fd = os.open(f"{directory}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise StoreInUse(errno.EBUSY, f"{busy} (pid {owner})", directory) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, b"%d\n" % os.getpid(), 0)
    return fd


def in_memory(path: str) -> bool:
    """Return whether a directory lies on a filesystem that a power loss empties anyway."""
    # st_dev names the mount in /proc/self/mountinfo; its type is the field after " - ".
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
        for line in mounts:
            fields, _, tail = line.partition(" - ")
            if fields.split()[2] == wanted:
                return tail.split()[0] in ("tmpfs", "ramfs")
    return False
