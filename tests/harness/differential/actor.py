"""The processes of a differential test: each carries out steps by system calls, and says what came of them.

Run as a program, this is the parent of all actors on one side. An actor keeps descriptors and mappings in
numbered slots, so that a step means the same on both sides, whatever numbers the kernel gives. A step never
raises: its result is a value, or the name of an errno.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import marshal
import os
import shutil
import signal
import socket
import stat
import struct
import sys
import zlib
from collections.abc import Callable
from typing import Any

SLOTS = 6
MAPS = 2
MESSAGE_MAX_BYTES = 1 << 18
PAGE_BYTES = 4096
_READ_ALL_BYTES = 1 << 20
_AT_EMPTY_PATH = 0x1000
_AT_FDCWD = -100
_FLOCK = struct.Struct("hhqqixxxx")
_LOCK_KINDS = {"read": fcntl.F_RDLCK, "write": fcntl.F_WRLCK, "none": fcntl.F_UNLCK}
_OFD_GETLK, _OFD_SETLK = 36, 37
_FICLONE = 0x40049409
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_int64)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.msync.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
for _name in ("read", "write"):
    getattr(_libc, _name).restype = ctypes.c_ssize_t
    getattr(_libc, _name).argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.renameat2.argtypes = (*(ctypes.c_int, ctypes.c_char_p) * 2, ctypes.c_uint)
_libc.linkat.argtypes = (*(ctypes.c_int, ctypes.c_char_p) * 2, ctypes.c_int)

Value = Any  # what marshal can carry: None, int, str, bytes, tuple, list


class EmptySlot(Exception):
    """The step names a slot in which nothing is open."""


def _checked(result: int) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _status(found: os.stat_result, *, nameless: bool = False) -> Value:
    """A stat, marked so that the comparison knows numbers that mean something from those that do not."""
    size = 0 if stat.S_ISDIR(found.st_mode) or nameless else found.st_size
    owner = (found.st_nlink, found.st_uid, found.st_gid)
    times = (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)
    return ("stat", found.st_ino, found.st_mode, *owner, size, *times)


def _content(data: bytes) -> Value:
    return ("bytes", len(data), zlib.crc32(data), data[:12], data[-8:])


def _payload(mark: int, length: int) -> bytes:
    """Bytes that are those of one step only."""
    return (mark.to_bytes(4, "big") * (length // 4 + 1))[:length]


def _times(file: str | int, times: list[int] | None) -> None:
    os.utime(file, ns=(times[0], times[1])) if times else os.utime(file)


def _set_xattr(file: str | int, name: str, mark: int, length: int, flags: int) -> None:
    os.setxattr(file, name, _payload(mark, length), flags)


def _listed(path: str) -> Value:
    with os.scandir(path) as entries:
        return tuple(sorted((entry.name, ("ino", entry.inode())) for entry in entries))


# Steps that are one call for a file: that of a path, or what is open in a slot.
_ON_FILES: dict[str, Callable[..., Value]] = {
    "read": lambda fd, length: _content(os.read(fd, length)),
    "pread": lambda fd, offset, length: _content(os.pread(fd, length, offset)),
    "write": lambda fd, mark, length: os.write(fd, _payload(mark, length)),
    "fsync": lambda fd, data_only: (os.fdatasync if data_only else os.fsync)(fd),
    "mkdir": os.mkdir,
    "symlink": lambda path, leads_to: os.symlink(leads_to, path),
    "readlink": os.readlink,
    "mknod": os.mknod,
    "listdir": _listed,
    "stat": lambda path: _status(os.stat(path)),
    "lstat": lambda path: _status(os.lstat(path)),
    "access": lambda path, mode: os.access(path, mode, effective_ids=True),
    "chmod": os.chmod,
    "fchmod": os.fchmod,
    "chown": lambda path, owner: os.lchown(path, *owner),
    "fchown": lambda fd, owner: os.fchown(fd, *owner),
    "utimens": _times,
    "futimens": _times,
    "setxattr": _set_xattr,
    "fsetxattr": _set_xattr,
    "getxattr": lambda path, name: _content(os.getxattr(path, name)),
    "fgetxattr": lambda fd, name: _content(os.getxattr(fd, name)),
    "listxattr": lambda path: tuple(sorted(os.listxattr(path))),
    "removexattr": lambda path, name: os.removexattr(path, name),
    "flock": lambda fd, kind: fcntl.flock(fd, kind | fcntl.LOCK_NB),
}


class Map:
    """One mapping; the address stays valid in a forked child."""

    def __init__(self, address: int, length: int, ino: int, size: int) -> None:
        """`size`: of the file, as far as it is known."""
        self.address = address
        self.length = length
        self.ino = ino
        self.size = size


class Actor:
    """One process of the test."""

    def __init__(self, number: int, sockets: list[socket.socket], *, times: bool) -> None:
        """`times`: they are compared. Then no empty file is emptied and no file cut to the size that it
        has: a tmpfs moves times then only if the file has pages, most filesystems do always."""
        self.number = number
        self.sockets = sockets
        self.times = times
        self.fds: list[int | None] = [None] * SLOTS
        self.maps: list[Map | None] = [None] * MAPS
        self.user = 0
        self._pipe = os.pipe()
        self._stamped = os.memfd_create("clock")

    # -- the loop --------------------------------------------------------------------------------

    def serve(self) -> None:
        """Carry out steps until told to exit."""
        while True:
            channel = self.sockets[self.number]
            message = channel.recv(MESSAGE_MAX_BYTES)
            if not message:
                os._exit(0)
            number = self.number
            steps, observed = marshal.loads(message)
            answers = []
            for op, arguments in steps:
                result = self._attempt(op, arguments)
                answers.append((result, self._observe(arguments) if observed else None))
            if self.number == number:  # a child is not to answer for its parent
                channel.send(marshal.dumps(answers))

    def _attempt(self, op: str, arguments: dict[str, Any]) -> Value:
        arguments = dict(arguments)
        user = arguments.pop("user", 0)
        try:
            if user:
                os.setegid(user)
                os.seteuid(user)
            if op not in _ON_FILES:
                return getattr(self, f"do_{op}")(**arguments)
            file = arguments.pop("path") if "path" in arguments else self._fd(arguments.pop("slot"))
            return _ON_FILES[op](file, **arguments)
        except OSError as error:
            assert error.errno is not None
            return errno.errorcode.get(error.errno, str(error.errno))
        except EmptySlot:
            return "nothing there"
        finally:
            if user:
                os.seteuid(0)
                os.setegid(0)

    def _observe(self, arguments: dict[str, Any]) -> Value:
        """Look at whatever the step named, without changing anything."""
        seen = []
        for key in ("slot", "source", "target"):
            fd = self.fds[arguments[key]] if key in arguments else None
            if fd is not None:
                seen.append(self._attempt("fstat", {"slot": arguments[key]}))
                seen.append(
                    self._attempt("lseek", {"slot": arguments[key], "offset": 0, "whence": 1})
                )
        names = [arguments[key] for key in ("path", "new") if key in arguments]
        return (*seen, *(self._attempt("lstat", {"path": name}) for name in names))

    def _fd(self, slot: int) -> int:
        fd = self.fds[slot]
        if fd is None:
            raise EmptySlot
        return fd

    def _put(self, slot: int, fd: int) -> None:
        old = self.fds[slot]
        self.fds[slot] = fd
        if old is not None:
            user = os.geteuid()
            os.seteuid(0)  # whoever opens another file is not to publish this one
            with contextlib.suppress(OSError):
                os.close(old)
            os.seteuid(user)

    # -- opening and closing ---------------------------------------------------------------------

    def _has_size(self, file: str | int, size: int) -> bool:
        if isinstance(file, str) and not os.access(file, os.W_OK, effective_ids=True):
            return False  # that they may not is to be compared
        with contextlib.suppress(OSError):
            found = os.stat(file)
            return self.times and stat.S_ISREG(found.st_mode) and found.st_size == size
        return False

    def do_open(self, slot: int, path: str, flags: int, mode: int = 0o644) -> Value:
        if flags & os.O_TRUNC and self._has_size(path, 0):
            flags &= ~os.O_TRUNC
        fd = os.open(path, flags, mode)
        os.set_inheritable(fd, not flags & os.O_CLOEXEC)
        self._put(slot, fd)
        return ("opened", ("ino", os.fstat(fd).st_ino))

    def _is_nameless(self, slot: int) -> bool:
        """Return whether a descriptor names a file that has no name. What is left of one that nobody has
        open differs between filesystems."""
        fd = self._fd(slot)
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        return bool(flags & os.O_PATH) and not os.fstat(fd).st_nlink

    def do_reopen(self, slot: int, source: int, flags: int) -> Value:
        if self._is_nameless(source):
            return "nameless"
        return self.do_open(slot, f"/proc/self/fd/{self._fd(source)}", flags)

    def do_close(self, slot: int) -> Value:
        fd = self._fd(slot)
        self.fds[slot] = None
        os.close(fd)
        return None

    def do_dup(self, slot: int, source: int) -> Value:
        fd = os.dup(self._fd(source))
        os.set_inheritable(fd, True)
        self._put(slot, fd)
        return None

    def do_status_flags(self, slot: int, flags: int) -> Value:
        fd = self._fd(slot)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        return fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_CLOEXEC & (os.O_ACCMODE | os.O_APPEND)

    def do_fork(self, child: int) -> Value:
        pid = os.fork()
        if pid == 0:
            self.number = child
            self._pipe = os.pipe()
            return None
        return ("pid", pid)

    def do_exec(self) -> Value:
        os.set_inheritable(self.sockets[self.number].fileno(), True)
        for channel in self.sockets:
            channel.set_inheritable(True)
        kept = [fd if fd is not None and os.get_inheritable(fd) else None for fd in self.fds]
        state = {
            "number": self.number,
            "sockets": [channel.fileno() for channel in self.sockets],
            "fds": kept,
            "times": self.times,
        }
        os.execv(sys.executable, [sys.executable, "-SEI", __file__, json.dumps(state)])

    def do_exit(self) -> Value:
        os._exit(0)

    # -- reading and writing ---------------------------------------------------------------------

    def do_pwrite(self, slot: int, mark: int, offset: int, length: int, flags: int = 0) -> Value:
        data = _payload(mark, length)
        if flags:
            return os.pwritev(self._fd(slot), [data], offset, flags)
        return os.pwrite(self._fd(slot), data, offset)

    def do_lseek(self, slot: int, offset: int, whence: int) -> Value:
        fd = self._fd(slot)
        if whence == os.SEEK_END and stat.S_ISDIR(os.fstat(fd).st_mode):
            return None  # no two filesystems agree
        return os.lseek(fd, offset, whence)

    def do_seek_data(self, slot: int, offset: int, whence: int) -> Value:
        """Judge the answer by the content, because where holes may begin and end is nobody's promise."""
        fd = self._fd(slot)
        position = os.lseek(fd, 0, os.SEEK_CUR)
        size = os.fstat(fd).st_size
        try:
            found = os.lseek(fd, offset, whence)
        except OSError as error:
            if error.errno != errno.ENXIO or whence != os.SEEK_DATA or offset >= size:
                raise
            found = size
        finally:
            os.lseek(fd, position, os.SEEK_SET)
        if whence == os.SEEK_HOLE:
            return offset <= found <= size
        if found == offset:
            return True
        with contextlib.suppress(OSError):  # it may be open for writing only
            return not any(os.pread(fd, found - offset, offset))
        return True

    def do_copy_range(
        self, source: int, target: int, length: int, from_offset: int | None, to_offset: int | None
    ) -> Value:
        return os.copy_file_range(
            self._fd(source), self._fd(target), length, from_offset, to_offset
        )

    def _overlap(self, source: int, target: int, offset: int | None, length: int) -> bool:
        """Return whether bytes of a file are to be sent onto themselves: what comes of that depends on the
        pages that they lie in."""
        fds = self._fd(source), self._fd(target)
        with contextlib.suppress(OSError):  # one of them may not be open for that
            begin = os.lseek(fds[0], 0, os.SEEK_CUR) if offset is None else offset
            distance = abs(os.lseek(fds[1], 0, os.SEEK_CUR) - begin)
            return os.path.sameopenfile(*fds) and distance < length
        return False

    def do_sendfile(self, source: int, target: int, offset: int | None, length: int) -> Value:
        if self._overlap(source, target, offset, length):
            return "overlap"
        return os.sendfile(self._fd(target), self._fd(source), offset, length)

    def do_clone(self, source: int, target: int) -> Value:
        return fcntl.ioctl(self._fd(target), _FICLONE, self._fd(source))

    def do_ftruncate(self, slot: int, size: int) -> Value:
        fd = self._fd(slot)
        return None if self._has_size(fd, size) else os.ftruncate(fd, size)

    def do_truncate(self, path: str, size: int) -> Value:
        return None if self._has_size(path, size) else os.truncate(path, size)

    def do_fallocate(self, slot: int, mode: int, offset: int, length: int) -> Value:
        return _checked(_libc.fallocate(self._fd(slot), mode, offset, length))

    # -- mappings --------------------------------------------------------------------------------

    def _map(self, where: int) -> Map:
        mapping = self.maps[where]
        if mapping is None:
            raise EmptySlot
        return mapping

    def do_mmap(self, where: int, slot: int, length: int, protection: int, flags: int) -> Value:
        address = _libc.mmap(None, length, protection, flags, self._fd(slot), 0)
        if address is None or address == ctypes.c_void_p(-1).value:
            _checked(-1)
        if self.maps[where] is not None:
            self.do_munmap(where)
        found = os.fstat(self._fd(slot))
        self.maps[where] = Map(address, length, found.st_ino, found.st_size)
        return ("mapped", ("ino", found.st_ino), found.st_size)

    def do_munmap(self, where: int) -> Value:
        mapping = self._map(where)
        self.maps[where] = None
        return _checked(_libc.munmap(mapping.address, mapping.length))

    @staticmethod
    def _within(mapping: Map, offset: int, length: int) -> int:
        """How much of the range is in the mapping, and not in the rest of the file's last page, which POSIX
        leaves open."""
        end = min(offset + length, mapping.length)
        pages = -(-mapping.length // PAGE_BYTES) * PAGE_BYTES
        area = f"{mapping.address:x}-{mapping.address + pages:x}"
        with contextlib.suppress(OSError):  # it takes a capability, and the file may be gone
            mapping.size = os.stat(f"/proc/self/map_files/{area}").st_size
        if offset < -(-mapping.size // PAGE_BYTES) * PAGE_BYTES:
            end = min(end, mapping.size)
        return max(0, end - offset)

    def do_load(self, where: int, offset: int, length: int) -> Value:
        """Read through the mapping; EFAULT instead of a signal where there is no page."""
        mapping = self._map(where)
        length = self._within(mapping, offset, length)
        copied = _checked(_libc.write(self._pipe[1], mapping.address + offset, length))
        return _content(os.read(self._pipe[0], copied) if copied else b"")

    def do_store(self, where: int, mark: int, offset: int, length: int) -> Value:
        """Write through the mapping; EFAULT instead of a signal."""
        mapping = self._map(where)
        length = self._within(mapping, offset, length)
        if length == 0:
            return 0
        os.write(self._pipe[1], _payload(mark, length))
        try:
            return _checked(_libc.read(self._pipe[0], mapping.address + offset, length))
        finally:
            os.set_blocking(self._pipe[0], False)
            with contextlib.suppress(BlockingIOError):
                os.read(self._pipe[0], length)
            os.set_blocking(self._pipe[0], True)

    def do_msync(self, where: int, flags: int) -> Value:
        mapping = self._map(where)
        return _checked(_libc.msync(mapping.address, mapping.length, flags))

    # -- names -----------------------------------------------------------------------------------

    def do_rename(self, path: str, new: str, flags: int) -> Value:
        names = path.encode(), new.encode()
        self._move_clock()
        return _checked(_libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], flags))

    def _move_clock(self) -> None:
        """Let the next stamp of any file be later than all before. A tmpfs gives a directory the stamp of
        the file whose name comes or goes there, which may be that of the last tick."""
        for _ in range(2):
            os.utime(self._stamped)
            os.fstat(self._stamped)  # what was looked at gets a finer stamp

    def do_link(self, path: str, new: str) -> Value:
        self._move_clock()
        return os.link(path, new, follow_symlinks=False)

    def do_link_fd(self, slot: int, new: str) -> Value:
        self._move_clock()
        return _checked(_libc.linkat(self._fd(slot), b"", _AT_FDCWD, new.encode(), _AT_EMPTY_PATH))

    def do_unlink(self, path: str) -> Value:
        self._move_clock()
        return os.unlink(path)

    def do_rmdir(self, path: str) -> Value:
        self._move_clock()
        return os.rmdir(path)

    def do_fstat(self, slot: int) -> Value:
        return _status(os.fstat(self._fd(slot)), nameless=self._is_nameless(slot))

    def do_umask(self, mask: int) -> Value:
        return os.umask(mask)

    # -- locks -----------------------------------------------------------------------------------

    def do_lock(self, slot: int, kind: str, start: int, length: int, ofd: bool) -> Value:
        wanted = _FLOCK.pack(_LOCK_KINDS[kind], os.SEEK_SET, start, length, 0)
        fcntl.fcntl(self._fd(slot), _OFD_SETLK if ofd else fcntl.F_SETLK, wanted)
        return None

    def do_lock_test(self, slot: int, kind: str, start: int, length: int, ofd: bool) -> Value:
        wanted = _FLOCK.pack(_LOCK_KINDS[kind], os.SEEK_SET, start, length, 0)
        answer = fcntl.fcntl(self._fd(slot), _OFD_GETLK if ofd else fcntl.F_GETLK, wanted)
        found, whence, begin, size, pid = _FLOCK.unpack(answer)
        if found == fcntl.F_UNLCK:
            return "free"
        return (found, whence, begin, size, ("pid", pid))

    # -- the end ---------------------------------------------------------------------------------

    def do_holdings(self) -> Value:
        """Everything that this process has open and mapped."""
        found: list[Value] = []
        for slot, fd in enumerate(self.fds):
            if fd is not None:
                status = self._attempt("fstat", {"slot": slot})
                wanted = {"slot": slot, "offset": 0, "length": _READ_ALL_BYTES}
                found.append((slot, status, self._attempt("pread", wanted)))
        for where, mapping in enumerate(self.maps):
            if mapping is not None:
                wanted = {"where": where, "offset": 0, "length": 4096}
                found.append((where, ("ino", mapping.ino), self._attempt("load", wanted)))
        return tuple(found)


class Parent:
    """The process from which all actors of one side descend. It has none of their descriptors."""

    def __init__(
        self, control: socket.socket, sockets: list[socket.socket], *, times: bool
    ) -> None:
        self._control = control
        self._sockets = sockets
        self._with_times = times

    def serve(self) -> None:
        """Do what is asked for over `control` until it is closed; raises OSError for what fails."""
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while message := self._control.recv(MESSAGE_MAX_BYTES):
            op, arguments = marshal.loads(message)
            self._control.send(marshal.dumps(getattr(self, f"do_{op}")(*arguments)))

    def do_begin(self, root: str) -> Value:
        os.umask(0o022)
        os.mkdir(root)
        os.chmod(root, 0o777)

    def do_actor(self, number: int, root: str) -> Value:
        os.chdir(root)
        pid = os.fork()
        if pid:
            os.chdir("/")
            return pid
        self._control.close()
        Actor(number, self._sockets, times=self._with_times).serve()
        return None

    def do_tree(self, root: str) -> Value:
        """Every name, with what it leads to."""
        os.chdir(root)
        try:
            return self._tree()
        finally:
            os.chdir("/")

    def _tree(self) -> Value:
        names: list[tuple[str, Value]] = []
        folders = ["."]
        while folders:
            folder = folders.pop()
            for name in sorted(os.listdir(folder)):
                path = f"{folder}/{name}"
                names.append((path, self._describe(path)))
                if stat.S_ISDIR(os.lstat(path).st_mode):
                    folders.append(path)
        return tuple(names)

    def _describe(self, path: str) -> Value:
        found = os.lstat(path)
        content: Value = None
        if stat.S_ISREG(found.st_mode) and found.st_size:
            with open(path, "rb") as file:
                content = _content(file.read())
        elif stat.S_ISLNK(found.st_mode):
            content = os.readlink(path)
        attributes = sorted(os.listxattr(path, follow_symlinks=False))
        values = [os.getxattr(path, name, follow_symlinks=False) for name in attributes]
        return (_status(found), content, tuple(attributes), tuple(values))

    def do_end(self, root: str) -> Value:
        shutil.rmtree(root)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{os.path.dirname(root)}/a")  # a symbolic link may have led there


def _sockets(numbers: list[int]) -> list[socket.socket]:
    return [socket.socket(fileno=number) for number in numbers]


def main() -> None:
    state = json.loads(sys.argv[1])
    sockets = _sockets(state["sockets"])
    if "control" in state:
        Parent(socket.socket(fileno=state["control"]), sockets, times=state["times"]).serve()
        return
    actor = Actor(state["number"], sockets, times=state["times"])
    actor.fds = state["fds"]
    sockets[actor.number].send(marshal.dumps([(None, None)]))
    actor.serve()


if __name__ == "__main__":
    main()
