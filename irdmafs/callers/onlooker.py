"""The process that looks at other processes for a mount. Run by onlookers.py, as a script.

Reading /proc of a process, or taking a descriptor from it, can block beyond the reach of signals: for a
lock that the process holds in the middle of a system call, which copies from a page that never comes; or
for the owner of a filesystem whose file is closed. And the object behind a descriptor's number can be
replaced between a check and a use. So all that is done here, where only one user's requests wait for it.
The mount gets answers, open files of /proc, whose reads do not block, and descriptors that it can hold and
close without blocking: lent memory, and a pipe of this process in the place of the lifeline."""

import ctypes
import errno
import os
import select
import socket
import struct
import sys
from collections.abc import Iterator

# A request: its kind, a process or thread, and arguments. Bytes may follow.
REQUEST = struct.Struct("<BiQQ")
REQUEST_MAX_BYTES = REQUEST.size + 4096
# An answer: an error code (0: none) and how many loans there are; then data, or the text of the error.
# Descriptors may come with it.
REPLY = struct.Struct("<iI")
REPLY_MAX_BYTES = REPLY.size + 8192
# Kinds of requests. LEND: take the memory and the lifeline, given by their descriptors' numbers; a pidfd
# comes with it. WATCH: open statm and stat of a process. STATUS: read its status. HOLDS: tell whether it
# has an inode of the mount whose path follows open, as a descriptor below a number.
LEND, WATCH, STATUS, HOLDS = range(4)
# The line of a process's status that has a value where its capabilities hold for us.
OUR_USER_NAMESPACE = b"OurUserNamespace"
# The most loans of one user to one mount. Each takes two descriptors here and two in the mount.
_LENT_MAX = 128
_NAME_MAX = 100
_SYS_PIDFD_GETFD = 438

_libc = ctypes.CDLL(None, use_errno=True)


def _info(fd: int) -> dict[bytes, bytes]:
    with open(f"/proc/self/fdinfo/{fd}", "rb") as file:
        lines = (line.partition(b":") for line in file)
        return {name: value.strip() for name, _, value in lines}


def _check_name(thread: int, number: int, *beginnings: str) -> None:
    """Raise OSError EINVAL for a descriptor of an obviously wrong kind, before it is taken."""
    try:
        name = os.readlink(f"/proc/{thread}/fd/{number}")
    except OSError as error:
        code = errno.EBADF if error.errno == errno.ENOENT else error.errno
        raise OSError(code, f"descriptor {number}: {os.strerror(code or 0)}") from None
    if not name.startswith(beginnings):
        raise OSError(errno.EINVAL, f"descriptor {number} is {name[:_NAME_MAX]!r}")


def _take(process: int, number: int) -> int:
    """Call pidfd_getfd(2). Raises OSError: EBADF, EPERM without the right to trace the process."""
    fd: int = _libc.syscall(_SYS_PIDFD_GETFD, process, number, 0)
    if fd < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return fd


def _close_all(descriptors: list[int]) -> None:
    for fd in descriptors:
        os.close(fd)


def open_files(pid: int) -> list[int]:
    """Return statm and stat of a process or thread, open. Raises OSError."""
    opened: list[int] = []
    try:
        paths = f"/proc/{pid}/statm", f"/proc/{pid}/stat"
        opened.extend(os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in paths)
    except BaseException:
        _close_all(opened)
        raise
    return opened


def read_status(pid: int) -> bytes:
    """Return the text of /proc/PID/status after a line for the user namespace, which has nothing if that is
    not ours, or is not told. Raises OSError."""
    try:
        ours = os.path.samestat(os.stat(f"/proc/{pid}/ns/user"), os.stat("/proc/self/ns/user"))
    except PermissionError:
        ours = False
    line = b"%b:%b\n" % (OUR_USER_NAMESPACE, b"1" if ours else b"")
    with open(f"/proc/{pid}/status", "rb") as file:
        return line + file.read(REPLY_MAX_BYTES - REPLY.size - len(line))


def _is_in_exec(pid: int) -> bool:
    """Return what Process.is_in_exec does."""
    with open(f"/proc/{pid}/statm", "rb") as file:
        pages, _, _, code, *_ = file.read().split()
    return pages != b"0" and code == b"0"


# By process: the number under which an inode was found last. A forked child closes what its parent holds in
# the order of numbers, or against it; without this each close would look through all of the parent's.
_found_last: dict[int, int] = {}
_FOUND_MAX = 1024


def _numbers(pid: int, directory: int) -> Iterator[int]:
    last = _found_last.get(pid, 0)
    yield from range(last, last + 3)
    yield from range(max(last - 2, 0), last)
    yield from map(int, os.listdir(directory))


def holds(pid: int, ino: int, below: int, mountpoint: str) -> bool:
    """Return whether the process has a descriptor, with a number below this (0: any), open on the inode of
    the filesystem that is mounted there. Waits while the process begins to run another program."""
    wanted = b"ino:\t%d\n" % ino
    prefix = mountpoint.rstrip("/") + "/"
    directory = os.open(f"/proc/{pid}/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for number in range(below) if below else _numbers(pid, directory):
            try:
                if os.readlink(str(number), dir_fd=directory).startswith(prefix):
                    with open(f"/proc/{pid}/fdinfo/{number}", "rb") as file:
                        if wanted in file.read(1024):
                            if len(_found_last) >= _FOUND_MAX:
                                _found_last.clear()
                            _found_last[pid] = number
                            return True
            except OSError:
                continue
    finally:
        os.close(directory)
    return False


class _Onlooker:
    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        # They tell the kind of a descriptor without a call that could block: memfds and pipes are on
        # mounts internal to the kernel, whose numbers never change and which hold no other files.
        memory, ends = os.memfd_create("irdmafs", os.MFD_CLOEXEC), os.pipe()
        self._memories, self._pipes = (_info(fd)[b"mnt_id"] for fd in (memory, ends[0]))
        _close_all([memory, *ends])
        self._poller = select.poll()
        self._poller.register(channel, select.POLLIN)
        # A program's lifeline, and our end of the pipe that the mount has: each leads to the other.
        self._other_end: dict[int, int] = {}
        self._lifelines: set[int] = set()

    def run(self) -> None:
        """Answer requests, and return when the mount is gone."""
        while True:
            for fd, _ in self._poller.poll():
                if fd != self._channel.fileno():
                    self._end(fd)
                elif not self._answer():
                    return

    def _answer(self) -> bool:
        """Answer one request; return False when the mount has closed the socket."""
        request, came, _, _ = socket.recv_fds(self._channel, REQUEST_MAX_BYTES, 1)
        if not request:
            return False
        kind, pid, one, other = REQUEST.unpack_from(request)
        code, data = 0, b""
        given: list[int] = []
        try:
            if kind == LEND:
                given = self._lend(came[0], pid, one, other)
            elif kind == WATCH:
                given = open_files(pid)
            elif kind == STATUS:
                data = read_status(pid)
            else:
                path = os.fsdecode(request[REQUEST.size :])
                if _is_in_exec(pid):
                    # The process may be waiting for the mount while it closes a file.
                    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
                data = b"1" if holds(pid, one, other, path) else b""
        except OSError as error:
            code = error.errno or errno.EINVAL
            data = str(error.strerror).encode(errors="replace")
        _close_all(came)
        reply = REPLY.pack(code, len(self._lifelines)) + data
        socket.send_fds(self._channel, [reply], given)
        _close_all(given)
        return True

    def _lend(self, process: int, thread: int, memory: int, lifeline: int) -> list[int]:
        """Return the memory, and the end of a pipe whose other end is closed when the lifeline's is."""
        if len(self._lifelines) >= _LENT_MAX:
            raise OSError(errno.EOPNOTSUPP, f"{_LENT_MAX} buffers are lent by this user already")
        _check_name(thread, memory, "/memfd:", "/dmabuf:")
        _check_name(thread, lifeline, "pipe:")
        taken: list[int] = []
        try:
            taken.append(_take(process, memory))
            info = _info(taken[0])
            # Only dma-bufs of the kernel itself show the second line.
            if info[b"mnt_id"] != self._memories and b"exp_name" not in info:
                raise OSError(errno.EINVAL, "neither a memfd of ordinary pages nor a dma-buf")
            taken.append(_take(process, lifeline))
            if _info(taken[1])[b"mnt_id"] != self._pipes:
                raise OSError(errno.EINVAL, "the lifeline is no pipe")
            end, ours = os.pipe()
        except BaseException:
            _close_all(taken)
            raise
        self._other_end[ours], self._other_end[taken[1]] = taken[1], ours
        self._lifelines.add(taken[1])
        self._poller.register(taken[1], select.POLLIN)
        self._poller.register(ours, 0)
        return [taken[0], end]

    def _end(self, fd: int) -> None:
        """End a loan: its lifeline was closed, at one end or the other."""
        other = self._other_end.pop(fd, None)
        if other is None:
            return  # the other end was handled in the same turn
        del self._other_end[other]
        lifeline, ours = (fd, other) if fd in self._lifelines else (other, fd)
        self._lifelines.remove(lifeline)
        for one in (lifeline, ours):
            self._poller.unregister(one)
        # In this order: closing the second one may block.
        _close_all([ours, lifeline])


def main(channel: int) -> None:
    """Serve the mount at the other end of a socket until the socket is closed."""
    _Onlooker(socket.socket(fileno=channel)).run()
    # Skip the interpreter's clean-up, which would close all descriptors one by one.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
