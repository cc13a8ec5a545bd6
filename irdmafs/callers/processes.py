"""Questions about the process behind a request.

What /proc says of a process it may keep one waiting for (onlooker.py): files there are opened by the user's
onlooker, unless the user is the one who mounted. Reading them once they are open keeps nobody waiting.
"""

import errno
import fcntl
import os
import struct
from collections import OrderedDict
from signal import SIGCHLD, SIGCONT, SIGINT, SIGSTOP, SIGTSTP, SIGTTIN, SIGTTOU, SIGURG, SIGWINCH
from typing import NamedTuple

from ..inline import detach
from . import onlooker
from .credentials import NOTHING, Credentials
from .onlookers import Onlookers

_PF_EXITING = 0x4
_PF_FORKNOEXEC = 0x40
_PROCESSES_KNOWN = 64
_PIDFD_THREAD = os.O_EXCL
# ioctl_pidfd(2), with the first version of its struct: mask, cgroup; pid, tgid, ppid, real uid and more.
_PIDFD_GET_INFO = 0xC040FF0B
_INFO = struct.Struct("<QQIIII24x")
_INFO_PID_AND_CREDS = 0x3
# Signals that by default end nobody.
_HARMLESS = (SIGCHLD, SIGCONT, SIGSTOP, SIGTSTP, SIGTTIN, SIGTTOU, SIGURG, SIGWINCH)
# Where shells, and what they start, put what is redirected.
_LOW_DESCRIPTORS = 10


class Ids(NamedTuple):
    """`uid` is the real user's."""

    process: int
    parent: int
    uid: int


def open_thread(pid: int) -> int:
    """A pidfd of a thread; before Linux 6.9 of its process, whose descriptors it nearly always shares.

    Raises OSError: EOPNOTSUPP for one that cannot be seen from here (`pid` 0), ESRCH.
    """
    if not pid:
        raise OSError(errno.EOPNOTSUPP, "its process is in another pid namespace")
    try:
        return os.pidfd_open(pid, _PIDFD_THREAD)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.pidfd_open(_ids_by_name(pid).process)


def ids_of(pid: int) -> Ids:
    """Return the ids of a process or thread. Raises ProcessLookupError."""
    try:
        fd = os.pidfd_open(pid, _PIDFD_THREAD)
    except ProcessLookupError:
        raise
    except OverflowError:
        raise ProcessLookupError(errno.ESRCH, f"{pid} is no process") from None
    except OSError:
        return _ids_by_name(pid)
    info = bytearray(_INFO.size)
    info[0] = _INFO_PID_AND_CREDS
    try:
        fcntl.ioctl(fd, _PIDFD_GET_INFO, info)
    except ProcessLookupError:
        raise
    except OSError:  # before Linux 6.13
        return _ids_by_name(pid)
    finally:
        os.close(fd)
    _, _, _, process, parent, uid = _INFO.unpack(info)
    return Ids(process, parent, uid)


def _ids_by_name(pid: int) -> Ids:
    try:
        with open(f"/proc/{pid}/status", "rb") as status:
            found = _lines(status.read(), b"Tgid", b"PPid", b"Uid")
    except FileNotFoundError:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH)) from None
    return Ids(int(found[b"Tgid"]), int(found[b"PPid"]), int(found[b"Uid"].split()[0]))


def _lines(status: bytes, *names: bytes) -> dict[bytes, bytes]:
    """Lines of these names of a process's or thread's status. Raises ProcessLookupError."""
    lines = (line.partition(b":") for line in status.splitlines())
    found = {name: value for name, _, value in lines if name in names}
    if len(found) < len(names):
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    return found


class Process:
    """One process or thread, as long as it lives: its statm and its stat are open.

    Each belongs to one process for good, and reading an open one takes half the time. What it answers is
    how it was at the last look.
    """

    def __init__(self, files: tuple[int, int] | None) -> None:
        self._files = files
        self._is_told_of = False
        self._pages = self._code_pages = b"0"

    def tell_once(self) -> bool:
        """Return whether this is the first time that something is to be said of it."""
        first, self._is_told_of = not self._is_told_of, True
        return first

    def look(self) -> bool:
        """Find out how it is now; False: it has ended."""
        if self._files is None:
            return False
        try:
            self._pages, _, _, self._code_pages, *_ = os.pread(self._files[0], 128, 0).split()
        except ProcessLookupError:
            return False
        return True

    def _flags_and_exit_code(self) -> tuple[int, int]:
        """9 and 52 of proc_pid_stat(5). Raises ProcessLookupError. It is not in the middle of execve(2)."""
        if self._files is None:
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        text = os.pread(self._files[1], 512, 0)
        # From the third on, which follows the command name.
        fields = text[text.rindex(b")") + 2 :].split()
        return int(fields[6]), int(fields[49])

    def is_in_exec(self) -> bool:
        """Return whether it is in the middle of running another program. The kernel then closes descriptors
        that the program is not to inherit.

        Its files stat, syscall, stack and fd/ in /proc cannot be looked at before that is closed
        (exec_update_lock; stat and fd/ too in Linux 6.18): whoever tries it while the process waits for
        an answer to a close waits for ever.
        """
        # The new memory is empty. A process that exits has none at all.
        return self._pages != b"0" and self._code_pages == b"0"

    def killed_by_signal(self) -> bool:
        """Return whether a fatal signal is ending the process. This tells a close() that nobody asked for
        from one that somebody did. Before a process that a signal kills closes its files, the kernel sets
        its exit code and takes its memory (do_exit)."""
        if self._pages != b"0":
            return False
        try:
            flags, exit_code = self._flags_and_exit_code()
        except ProcessLookupError:
            return False
        return bool(flags & _PF_EXITING and exit_code & 0x7F)

    def has_not_run(self) -> bool:
        """Return whether it was forked and has not run a program yet, or is in the middle of that."""
        if self.is_in_exec():
            return True
        try:
            return bool(self._flags_and_exit_code()[0] & _PF_FORKNOEXEC)
        except ProcessLookupError:
            return False

    def close(self) -> None:
        if self._files is not None:
            for fd in self._files:
                os.close(fd)
            self._files = None


_UNKNOWN = Process(None)


class Processes:
    """The processes that a mount has to do with. Those that closed files last are remembered."""

    def __init__(self, mountpoint: str) -> None:
        self.onlookers = Onlookers()
        self._mountpoint = mountpoint
        # A process of this user can end the mount anyway, so it may make the mount wait. Looking at it
        # directly is far cheaper.
        self._own_user = os.geteuid()
        self._known: OrderedDict[int, Process] = OrderedDict()

    def close(self) -> None:
        self.onlookers.close()
        while self._known:
            self._known.popitem()[1].close()

    async def of(self, pid: int) -> Process:
        """The process or thread; one of which nothing is known says no to all. Does not wait for one that
        is remembered."""
        known = self._known.get(pid)
        if known is not None and known.look():
            return known
        try:
            uid = ids_of(pid).uid
            if uid == self._own_user:
                memory, stat = onlooker.open_files(pid)
            else:
                await detach()
                memory, stat = await self.onlookers.watch(uid, pid)
        except OSError:
            return _UNKNOWN
        before = self._known.pop(pid, None)
        if before is not None:
            before.close()
        found = self._known[pid] = Process((memory, stat))
        if len(self._known) > _PROCESSES_KNOWN:
            self._known.popitem(last=False)[1].close()
        return found if found.look() else _UNKNOWN

    async def may_still_write(self, closer: int, opener: int) -> list[int]:
        """Return the processes that may still write when a process (or thread) closes a descriptor only
        because it was forked from one that has it: the process of the `opener` and the closer's parent.
        Return none if the closer was run with the descriptor, as its output say: it has used what it
        closes.

        The kernel closes what is not to be inherited when a program is run; most runtimes close it before.
        """
        try:
            ids = ids_of(closer)
        except OSError:
            return []
        try:
            first = ids_of(opener).process
        except OSError:
            first = ids.parent  # the thread that opened it has ended
        if ids.process == first or not (await self.of(ids.process)).has_not_run():
            return []
        return [first, ids.parent]

    async def hold(self, pids: list[int], ino: int) -> bool:
        """Return whether one of these processes, others than the caller, has a descriptor open on inode
        `ino` of the mount."""
        for pid in pids:
            if await self._holds(pid, ino, 0, other=True):
                return True
        return False

    async def holds_low(self, pid: int, ino: int) -> bool:
        """Return whether the calling process has the inode open where redirections put it."""
        return await self._holds(pid, ino, _LOW_DESCRIPTORS, other=False)

    async def _holds(self, pid: int, ino: int, below: int, *, other: bool) -> bool:
        try:
            uid = ids_of(pid).uid
            if uid == self._own_user and not other:
                return onlooker.holds(pid, ino, below, self._mountpoint)
            await detach()
            return await self.onlookers.holds(uid, pid, ino, self._mountpoint, below, other=other)
        except OSError:
            return False

    async def _status(self, pid: int) -> bytes:
        """Raises OSError."""
        uid = ids_of(pid).uid
        if uid == self._own_user:
            return onlooker.read_status(pid)
        await detach()
        return await self.onlookers.status(uid, pid)

    async def credentials(self, pid: int) -> Credentials:
        """Return the credentials of a thread. They are empty for one that cannot be seen."""
        try:
            status = await self._status(pid)
            found = _lines(status, b"Groups", b"CapEff")
        except OSError:
            return NOTHING
        return Credentials(frozenset(map(int, found[b"Groups"].split())), int(found[b"CapEff"], 16))

    async def pending_signals(self, pid: int) -> "PendingSignals":
        """Return the signals that wait for a thread to come back from the kernel. If the thread cannot be
        seen (`pid` 0), assume only that some signal waits."""
        if not pid:
            return PendingSignals(fatal=False, keyboard=True)
        try:
            status = await self._status(pid)
            found = _lines(status, b"SigPnd", b"ShdPnd", b"SigBlk", b"SigIgn", b"SigCgt")
        except (ProcessLookupError, FileNotFoundError):
            return PendingSignals(fatal=True, keyboard=False)
        except OSError:
            return PendingSignals(fatal=False, keyboard=False)
        masks = {name: int(value, 16) for name, value in found.items()}
        pending = (masks[b"SigPnd"] | masks[b"ShdPnd"]) & ~masks[b"SigBlk"]
        caught = pending & masks[b"SigCgt"]
        deadly = pending & ~caught & ~masks[b"SigIgn"] & ~_mask(*_HARMLESS)
        return PendingSignals(bool(deadly), bool(caught & _mask(SIGINT)))


class PendingSignals(NamedTuple):
    """`fatal`: the thread is about to die. `keyboard`: it is about to handle SIGINT."""

    fatal: bool
    keyboard: bool


def _mask(*signals: int) -> int:
    return sum(1 << (number - 1) for number in signals)
