"""Questions about the process behind a request, answered from /proc."""

import os

_PF_EXITING = 0x4


def killed_by_signal(pid: int) -> bool:
    """Whether the process (or thread) is being torn down because of a fatal signal.

    The kernel sets the exit code before it closes the dying process's files (do_exit), so this tells
    a close() that nobody asked for from one that somebody did.
    """
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    except OSError:
        return False
    try:
        status = os.read(fd, 4096)
    except OSError:
        return False
    finally:
        os.close(fd)
    # Fields 9 (flags) and 52 (exit_code) of proc_pid_stat(5); field 3 follows the command name.
    fields = status[status.rindex(b")") + 2 :].split()
    return bool(int(fields[6]) & _PF_EXITING and int(fields[49]) & 0x7F)


def holds_descriptor(pid: int, ino: int, mountpoint: str) -> bool:
    """Whether the process has a descriptor open on inode `ino` of the filesystem at `mountpoint`."""
    wanted = b"ino:\t%d\n" % ino
    prefix = mountpoint.rstrip("/") + "/"
    try:
        names = os.listdir(f"/proc/{pid}/fdinfo")
    except OSError:
        return False
    for name in names:
        try:
            fd = os.open(f"/proc/{pid}/fdinfo/{name}", os.O_RDONLY)
            try:
                info = os.read(fd, 1024)
            finally:
                os.close(fd)
            if wanted in info and os.readlink(f"/proc/{pid}/fd/{name}").startswith(prefix):
                return True
        except OSError:
            continue
    return False
