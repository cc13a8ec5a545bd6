"""Questions about the process behind a request, answered from /proc."""

import os
from collections import OrderedDict

_PF_EXITING = 0x4
_STATUS_FDS = 64


class DyingProcesses:
    """Tells a close() that nobody asked for from one that somebody did.

    The kernel sets the exit code of a process that a signal kills before it closes its files
    (do_exit). The status files of the last callers stay open: each belongs to one process for good,
    and reading an open one takes half the time.
    """

    def __init__(self) -> None:
        self._status_fds: OrderedDict[int, int] = OrderedDict()

    def killed_by_signal(self, pid: int) -> bool:
        """Whether the process (or thread) is being torn down because of a fatal signal."""
        fd = self._status_fds.get(pid)
        status = b""
        if fd is not None:
            try:
                status = os.pread(fd, 512, 0)
            except ProcessLookupError:
                # The process that had this number is gone.
                os.close(self._status_fds.pop(pid))
        if not status:
            try:
                fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return False
            self._status_fds[pid] = fd
            if len(self._status_fds) > _STATUS_FDS:
                os.close(self._status_fds.popitem(last=False)[1])
            status = os.pread(fd, 512, 0)
        # Fields 9 (flags) and 52 (exit_code) of proc_pid_stat(5); field 3 follows the command name.
        fields = status[status.rindex(b")") + 2 :].split()
        return bool(int(fields[6]) & _PF_EXITING and int(fields[49]) & 0x7F)

    def close(self) -> None:
        while self._status_fds:
            os.close(self._status_fds.popitem()[1])


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
