"""Questions about the process behind a request.

Opening files of /proc can block (onlooker.py says why), so the user's onlooker opens them, unless the user
is the one who mounted. Reading them once they are open does not block."""

import errno
import fcntl
import os
import select
import struct
from collections import OrderedDict
from collections.abc import Collection
from signal import SIGCHLD, SIGCONT, SIGINT, SIGSTOP, SIGTSTP, SIGTTIN, SIGTTOU, SIGURG, SIGWINCH
from typing import Final, NamedTuple

import trio

from ..inline import detach
from . import onlooker
from .onlookers import PATIENCE_S, Onlookers

CAP_CHOWN: Final = 0
CAP_DAC_OVERRIDE: Final = 1
CAP_DAC_READ_SEARCH: Final = 2
CAP_FOWNER: Final = 3
CAP_FSETID: Final = 4
CAP_SYS_ADMIN: Final = 21

_PF_EXITING = 0x4
_PF_FORKNOEXEC = 0x40
_PROCESSES_KNOWN = 64
_PIDFD_THREAD = os.O_EXCL
# ioctl_pidfd(2), with the first version of its struct: mask, cgroup; pid, tgid, ppid, real uid and more.
_PIDFD_GET_INFO = 0xC040FF0B
_INFO = struct.Struct("<QQIIII24x")
_INFO_PID_AND_CREDS = 0x3
# Signals whose default action does not end a process.
_HARMLESS = (SIGCHLD, SIGCONT, SIGSTOP, SIGTSTP, SIGTTIN, SIGTTOU, SIGURG, SIGWINCH)
# Descriptors below this number are those of redirections, in shells and the programs they start.
_LOW_DESCRIPTORS = 10
_LOOK_AGAIN_S = 0.01
_CLOSED = (-1, -1)


class Ids(NamedTuple):
    """`uid` is the real user's."""

    process: int
    parent: int
    uid: int


class Credentials(NamedTuple):
    """The groups and capabilities of a caller, from its status: a request tells only the user and one
    group. `groups` are the supplementary ones, `effective` a mask of capabilities.

    Finding out takes some 200 us, so it is done only where a rule of POSIX turns on them.
    """

    groups: Collection[int]
    effective: int

    def has(self, capability: int) -> bool:
        """Return whether a capability is effective."""
        return bool(self.effective >> capability & 1)


# Taken for a thread that cannot be seen, or has ended.
_NOTHING: Final = Credentials((), 0)


def open_thread(pid: int) -> int:
    """Return a pidfd of a thread; before Linux 6.9 of its process, whose descriptors it nearly always
    shares.

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
    except (OSError, OverflowError):  # before Linux 6.9, it has ended, or no number of a process
        return _ids_by_name(pid)
    info = bytearray(_INFO.size)
    info[0] = _INFO_PID_AND_CREDS
    try:
        fcntl.ioctl(fd, _PIDFD_GET_INFO, info)
    except OSError:  # before Linux 6.13, or it has ended
        return _ids_by_name(pid)
    finally:
        os.close(fd)
    _, _, _, process, parent, uid = _INFO.unpack(info)
    return Ids(process, parent, uid)


def process_of(pid: int) -> int:
    """Return the process that a thread belongs to; the thread itself if it has ended."""
    try:
        return ids_of(pid).process
    except OSError:
        return pid


def has_ended(thread: int) -> bool:
    """Return whether a thread that a pidfd stands for has ended."""
    ended = select.poll()
    ended.register(thread, select.POLLIN)
    return bool(ended.poll(0))


def is_gone(pid: int) -> bool:
    """Return whether a thread has ended, as far as can be seen."""
    try:
        with os.fdopen(os.pidfd_open(pid, _PIDFD_THREAD)) as thread:
            return has_ended(thread.fileno())
    except (OSError, ValueError) as error:
        return isinstance(error, ProcessLookupError)


def _ids_by_name(pid: int) -> Ids:
    try:
        with open(f"/proc/{pid}/status", "rb") as status:
            found = _lines(status.read(), b"Tgid", b"PPid", b"Uid")
    except FileNotFoundError:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH)) from None
    return Ids(int(found[b"Tgid"]), int(found[b"PPid"]), int(found[b"Uid"].split()[0]))


def _lines(status: bytes, *names: bytes) -> dict[bytes, bytes]:
    """Return the lines of these names in a process's or thread's status. Raises ProcessLookupError."""
    lines = (line.partition(b":") for line in status.splitlines())
    found = {name: value for name, _, value in lines if name in names}
    if len(found) < len(names):
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    return found


class Process:
    """One process or thread, as long as it lives: its statm and its stat are open.

    An open file of /proc belongs to one process for good, and reading it takes half the time of opening it
    anew. The properties tell the state at the last `look`.
    """

    def __init__(self, statm: int, stat: int) -> None:
        self._files = statm, stat
        self._is_told_of = False
        self._pages = self._code_pages = b"0"

    def tell_once(self) -> bool:
        """Return whether this is the first call: so that a process is logged once."""
        first, self._is_told_of = not self._is_told_of, True
        return first

    def look(self) -> bool:
        """Read the current state; return False if the process has ended."""
        try:
            self._pages, _, _, self._code_pages, *_ = os.pread(self._files[0], 128, 0).split()
        except OSError:
            return False
        return True

    def _flags_and_exit_code(self) -> tuple[int, int]:
        """Return fields 9 and 52 of proc_pid_stat(5), outside execve(2). They are 0 if it has ended."""
        try:
            text = os.pread(self._files[1], 512, 0)
        except OSError:
            return 0, 0
        # The fields from the third on, which follows the command name.
        fields = text[text.rindex(b")") + 2 :].split()
        return int(fields[6]), int(fields[49])

    def is_in_exec(self) -> bool:
        """Return whether the process is in execve(2), in which the kernel closes descriptors that the new
        program does not inherit.

        Until they are closed, stat, syscall, stack and fd/ of the process in /proc block (exec_update_lock;
        stat and fd/ too in Linux 6.18): reading them before a close of the process is answered is a
        deadlock.
        """
        # The new memory is empty. A process that exits has none at all.
        return self._pages != b"0" and self._code_pages == b"0"

    def exit_code(self) -> int | None:
        """Return the exit code of a process whose end closes its files, else None. The kernel sets it and
        takes the memory before it closes them (do_exit)."""
        flags, exit_code = self._flags_and_exit_code() if self._pages == b"0" else (0, 0)
        return exit_code if flags & _PF_EXITING else None

    def killed_by_signal(self) -> bool:
        """Return whether a fatal signal is ending the process, which closes its files."""
        return self._pages == b"0" and bool((self.exit_code() or 0) & 0x7F)

    def has_not_run(self) -> bool:
        """Return whether the process was forked and has not finished execve(2) since."""
        return self.is_in_exec() or bool(self._flags_and_exit_code()[0] & _PF_FORKNOEXEC)

    def close(self) -> None:
        for fd in self._files:
            os.close(fd)
        self._files = _CLOSED


_UNKNOWN = Process(*_CLOSED)


class Processes:
    """The processes that make requests of a mount. Those that closed files last are remembered."""

    def __init__(self, mountpoint: str) -> None:
        self.onlookers = Onlookers()
        self._mountpoint = mountpoint
        # A process of this user can end the mount anyway, so it may block the mount. Reading its /proc
        # directly is far cheaper.
        self._own_user = os.geteuid()
        self._known: OrderedDict[int, Process] = OrderedDict()

    def close(self) -> None:
        self.onlookers.close()
        while self._known:
            self._known.popitem()[1].close()

    async def of(self, pid: int) -> Process:
        """Return the process or thread; one that cannot be seen answers no to every question. Does not
        wait for one that is remembered."""
        known = self._known.get(pid)
        if known is not None and known.look():
            return known
        try:
            uid = ids_of(pid).uid
            if uid == self._own_user:
                files = onlooker.open_files(pid)
            else:
                await detach()
                request = onlooker.REQUEST.pack(onlooker.WATCH, pid, 0, 0)
                _, files = await self.onlookers.ask(uid, request)
        except OSError:
            return _UNKNOWN
        before = self._known.pop(pid, None)
        if before is not None:
            before.close()
        found = self._known[pid] = Process(*files)
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
        first = process_of(opener)
        if ids.process == first or not (await self.of(ids.process)).has_not_run():
            return []
        return [first, ids.parent]

    async def hold(self, pids: list[int], ino: int) -> bool:
        """Return whether one of these processes, others than the caller, has an inode of the mount open."""
        for pid in pids:
            if await self._holds(pid, ino, 0, other=True):
                return True
        return False

    async def holds_low(self, pid: int, ino: int) -> bool:
        """Return whether the calling process has the inode open where redirections put it."""
        return await self._holds(pid, ino, _LOW_DESCRIPTORS, other=False)

    async def _holds(self, pid: int, ino: int, below: int, *, other: bool) -> bool:
        request = onlooker.REQUEST.pack(onlooker.HOLDS, pid, ino, below)
        request += os.fsencode(self._mountpoint)
        try:
            uid = ids_of(pid).uid
            if uid == self._own_user and not other:
                return onlooker.holds(pid, ino, below, self._mountpoint)
            await detach()
            with trio.move_on_after(PATIENCE_S):
                while True:
                    try:
                        found, _ = await self.onlookers.ask(uid, request, about_other=other)
                        return bool(found)
                    except BlockingIOError:  # it begins to run another program
                        await trio.sleep(_LOOK_AGAIN_S)
        except OSError:
            pass
        return False

    async def _status(self, pid: int) -> bytes:
        """Return what onlooker.read_status does. Raises OSError."""
        uid = ids_of(pid).uid
        if uid == self._own_user:
            return onlooker.read_status(pid)
        await detach()
        request = onlooker.REQUEST.pack(onlooker.STATUS, pid, 0, 0)
        return (await self.onlookers.ask(uid, request))[0]

    async def credentials(self, pid: int) -> Credentials:
        """Return the credentials of a thread. They are empty for one that cannot be seen. Capabilities
        in a user namespace of its own, which everybody can make, are none here."""
        try:
            status = await self._status(pid)
            found = _lines(status, b"Groups", b"CapEff", onlooker.OUR_USER_NAMESPACE)
        except OSError:
            return _NOTHING
        effective = int(found[b"CapEff"], 16) if found[onlooker.OUR_USER_NAMESPACE] else 0
        return Credentials(frozenset(map(int, found[b"Groups"].split())), effective)

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
        harmless = masks[b"SigIgn"] | sum(1 << (number - 1) for number in _HARMLESS)
        deadly, keyboard = pending & ~caught & ~harmless, caught & (1 << (SIGINT - 1))
        return PendingSignals(bool(deadly), bool(keyboard), bool(caught))


class PendingSignals(NamedTuple):
    """Signals that wait for a thread. `fatal`: it is about to die. `keyboard`: it will handle SIGINT.
    `handled`: it will handle one."""

    fatal: bool
    keyboard: bool
    handled: bool = False
