"""Questions about the process behind a request, answered from /proc, and descriptors that it lends."""

import ctypes
import errno
import os
from collections import OrderedDict
from collections.abc import Sequence
from signal import SIGCHLD, SIGCONT, SIGINT, SIGSTOP, SIGTSTP, SIGTTIN, SIGTTOU, SIGURG, SIGWINCH
from typing import NamedTuple

_PF_EXITING = 0x4
_PF_FORKNOEXEC = 0x40
_PROCESSES_KNOWN = 64
_SYS_PIDFD_GETFD = 438
# Signals that by default end nobody.
_HARMLESS = (SIGCHLD, SIGCONT, SIGSTOP, SIGTSTP, SIGTTIN, SIGTTOU, SIGURG, SIGWINCH)

_libc = ctypes.CDLL(None, use_errno=True)


class DyingProcesses:
    """Tells a close() that nobody asked for from one that somebody did.

    The kernel sets the exit code of a process that a signal kills before it closes its files
    (do_exit). The status files of the last callers stay open: each belongs to one process for good,
    and reading an open one takes half the time.
    """

    def __init__(self) -> None:
        self._files: OrderedDict[int, tuple[int, int]] = OrderedDict()

    def killed_by_signal(self, pid: int) -> bool:
        """Whether the process (or thread) is being torn down because of a fatal signal."""
        files = self._files.get(pid)
        if files is not None:
            try:
                return _killed_by_signal(*files)
            except ProcessLookupError:
                # The process that had this number is gone.
                _close(self._files.pop(pid))
        try:
            files = self._files[pid] = _open(pid)
            if len(self._files) > _PROCESSES_KNOWN:
                _close(self._files.popitem(last=False)[1])
            return _killed_by_signal(*files)
        except OSError:
            return False

    def close(self) -> None:
        while self._files:
            _close(self._files.popitem()[1])


def _open(pid: int) -> tuple[int, int]:
    """Its statm and its stat. Raises OSError."""
    memory = os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return memory, os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except BaseException:
        os.close(memory)
        raise


def _close(files: tuple[int, int]) -> None:
    for fd in files:
        os.close(fd)


def is_in_exec(pid: int) -> bool:
    """Whether the process is in the middle of running another program, when the kernel closes what that is
    not to inherit.

    Its files stat, syscall, stack and fd/ in /proc cannot be looked at before that is closed
    (exec_update_lock; stat and fd/ too in Linux 6.18): whoever tries it while the process waits for an
    answer to a close waits for ever.
    """
    try:
        memory = os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return _has_no_code(memory)
    except ProcessLookupError:
        return False
    finally:
        os.close(memory)


def _has_no_code(memory: int) -> bool:
    """What tells `is_in_exec`: the new memory is empty. A process that exits has none at all. `memory` is
    its statm. Raises ProcessLookupError."""
    pages, _, _, code_pages, *_ = os.pread(memory, 128, 0).split()
    return pages != b"0" and code_pages == b"0"


def _killed_by_signal(memory: int, stat: int) -> bool:
    """Raises ProcessLookupError."""
    if _has_no_code(memory):
        return False
    fields = _fields(stat)
    # exit_code, 52 of proc_pid_stat(5)
    return bool(int(fields[6]) & _PF_EXITING and int(fields[49]) & 0x7F)


def _fields(stat: int) -> list[bytes]:
    """Of proc_pid_stat(5) from the third on, which follows the command name; 9 (flags) is at 6. Raises
    ProcessLookupError. It is not in the middle of execve(2)."""
    text = os.pread(stat, 512, 0)
    return text[text.rindex(b")") + 2 :].split()


def holds_descriptor(pid: int, ino: int, mountpoint: str) -> bool:
    """Whether the process has a descriptor open on inode `ino` of the filesystem at `mountpoint`. Waits
    while it `is_in_exec`."""
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


def may_still_write(closer: int, opener: int) -> list[int]:
    """Of a process (or thread) that closes a descriptor only because it was forked from one that has it:
    who had it before, the process of the `opener` and the closer's parent. None for a process that was
    run with the descriptor, as its output say: what it closes it has used.

    The kernel closes what is not to be inherited when a program is run; most runtimes close it before.
    """
    try:
        ids = _ids(closer)
    except ProcessLookupError:
        return []
    try:
        first = _ids(opener).process
    except ProcessLookupError:
        first = ids.parent  # the thread that opened it has ended
    if ids.process == first or not _has_not_run(ids.process):
        return []
    return [first, ids.parent]


def _has_not_run(pid: int) -> bool:
    """Whether the process was forked and has not run a program yet, or is in the middle of that."""
    try:
        memory, stat = files = _open(pid)
    except OSError:
        return False
    try:
        return _has_no_code(memory) or bool(int(_fields(stat)[6]) & _PF_FORKNOEXEC)
    except ProcessLookupError:
        return False
    finally:
        _close(files)


class _Ids(NamedTuple):
    process: int
    parent: int


def _ids(pid: int) -> _Ids:
    """Of a process or thread. Raises ProcessLookupError."""
    found = _status(pid, b"Tgid", b"PPid")
    return _Ids(int(found[b"Tgid"]), int(found[b"PPid"]))


def _status(pid: int, *names: bytes) -> dict[bytes, bytes]:
    """Lines of these names of a process's or thread's status. Raises ProcessLookupError."""
    found = {}
    try:
        with open(f"/proc/{pid}/status", "rb") as status:
            for line in status:
                name, _, value = line.partition(b":")
                if name in names:
                    found[name] = value
    except FileNotFoundError:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH)) from None
    return found


class PendingSignals(NamedTuple):
    """`fatal`: the thread is about to die. `keyboard`: it is about to handle SIGINT."""

    fatal: bool
    keyboard: bool


def pending_signals(pid: int) -> PendingSignals:
    """What waits for a thread to come back from the kernel. Of one that cannot be seen (`pid` 0) nothing is
    known but that something does."""
    if not pid:
        return PendingSignals(fatal=False, keyboard=True)
    try:
        found = _status(pid, b"SigPnd", b"ShdPnd", b"SigBlk", b"SigIgn", b"SigCgt")
    except ProcessLookupError:
        return PendingSignals(fatal=True, keyboard=False)
    masks = {name: int(value, 16) for name, value in found.items()}
    pending = (masks[b"SigPnd"] | masks[b"ShdPnd"]) & ~masks[b"SigBlk"]
    caught = pending & masks[b"SigCgt"]
    deadly = pending & ~caught & ~masks[b"SigIgn"] & ~_mask(*_HARMLESS)
    return PendingSignals(bool(deadly), bool(caught & _mask(SIGINT)))


def _mask(*signals: int) -> int:
    return sum(1 << (number - 1) for number in signals)


def take_descriptors(pid: int, numbers: Sequence[int]) -> list[int]:
    """Duplicates of a process's (or thread's) descriptors, pidfd_getfd(2). Raises OSError: EBADF for a
    number that is not open, EPERM without the right to trace the process."""
    try:
        process = os.pidfd_open(pid)
    except OSError:
        process = os.pidfd_open(_ids(pid).process)
    taken: list[int] = []
    try:
        for number in numbers:
            fd = _libc.syscall(_SYS_PIDFD_GETFD, process, number, 0)
            if fd < 0:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))
            taken.append(fd)
    except BaseException:
        for fd in taken:
            os.close(fd)
        raise
    finally:
        os.close(process)
    return taken
