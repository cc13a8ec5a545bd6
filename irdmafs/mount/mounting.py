"""Mount tables, mounting and unmounting, stale mountpoints.

A mount whose daemon hangs makes every call that reaches it hang, beyond the reach of signals. So
nothing here touches a mounted filesystem in this process: questions to one go through
`ask_mount`, a child that can be left behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import pwd
import re
import select
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from shlex import quote
from typing import Literal

from ..backend.process import has_capability
from ..mount_options import MountError, MountOptions, parse_mount_options, switches_of

FSTYPE = "fuse.irdmafs"
STATUS_XATTR = "user.irdmafs.status"
VERSIONS_XATTR = "user.irdmafs.versions"

MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_REMOUNT = 0x20
MNT_DETACH = 0x2
UMOUNT_NOFOLLOW = 0x8
# Flags of mount(2), and words that libfuse knows, among the options of a mount.
_FLAGS = {
    "ro": 0x1,
    "nosuid": MS_NOSUID,
    "nodev": MS_NODEV,
    "noexec": 0x8,
    "sync": 0x10,
    "dirsync": 0x80,
    "noatime": 0x400,
    "nodiratime": 0x800,
}
_LIBFUSE_WORDS = _FLAGS.keys() - {"nosuid", "nodev"} | {"allow_other", "dev", "suid"}

# The kernel checks modes, always.
_KERNEL_CHECKS = "default_permissions"

CAP_SYS_ADMIN = 21

# Where systems mount fusectl, which has a directory for each connection. Containers do not.
_FUSECTL = "/sys/fs/fuse/connections"
_SYS_FSOPEN, _SYS_FSCONFIG, _SYS_FSMOUNT = 430, 431, 432
_FD_CLOEXEC, _CMD_CREATE = 1, 6
# Runs until it gets the signal or its input ends, and then writes to the file `abort` of a connection.
_ABORT = "exec 2>&-; trap 'echo 1; exit' USR1; read -r line; echo 1"

_FUSE_CONFIG = "/etc/fuse.conf"
# Mounting where something is mounted waits for this long: an unmount may have begun.
_UNMOUNT_S = 2.0

STALE_ERRNOS = frozenset({errno.ENOTCONN, errno.ECONNABORTED})

_libc = ctypes.CDLL(None, use_errno=True)


class MountBusyError(MountError):
    """The mount is in use and was left as it is."""


@dataclass(frozen=True, slots=True)
class Mount:
    """Fields of a line of /proc/self/mountinfo (proc(5)), in its order. ``device`` is "major:minor"."""

    mount_id: int
    device: str
    root: str
    mountpoint: str
    options: str
    fstype: str
    source: str
    super_options: str

    @property
    def user(self) -> int | None:
        """Return the user who mounted a FUSE filesystem and serves it. None if that is not told."""
        match = re.search(r"(?:^|,)user_id=(\d+)", self.super_options)
        return int(match[1]) if match else None


def user_name(uid: int) -> str:
    """Return the name of a user, or the number if there is none."""
    try:
        return f"{pwd.getpwuid(uid).pw_name} (user {uid})"
    except KeyError:
        return f"user {uid}"


def unescape(field: str) -> str:
    """Return a path from a table of /proc, in which the kernel writes blanks as octal escapes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def parse_mountinfo(text: bytes) -> list[Mount]:
    """Return the mounts in the order of the table: of several on one mountpoint the last is on top."""
    mounts = []
    for line in os.fsdecode(text).split("\n"):  # a path may have others that end lines
        before, _, after = line.partition(" - ")
        fields, tail = before.split(" "), after.split(" ")
        if len(fields) < 6 or len(tail) < 3:
            continue
        texts = (*fields[2:6], *tail[:3])
        mounts.append(Mount(int(fields[0]), *(map(unescape, texts) if "\\" in line else texts)))
    return mounts


def mounts() -> list[Mount]:
    """Return every mount that this process can see."""
    with open("/proc/self/mountinfo", "rb") as file:
        return parse_mountinfo(file.read())


def irdmafs_mounts() -> list[Mount]:
    return [mount for mount in mounts() if mount.fstype == FSTYPE]


def is_under(path: str, directory: str) -> bool:
    """Return whether `path` is `directory` or lies below it; both are absolute, and neither is accessed."""
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def named(path: str) -> str:
    """Return a path that a user gave. Raises MountError for an empty one, which the functions of os.path
    take for the current directory."""
    if not path:
        raise MountError("an empty path was given, which names nothing; is a variable not set?")
    return path


def resolve(path: str) -> str:
    """Return the absolute path without symlinks, without accessing what is mounted on it. Raises
    MountError for an empty path."""
    path = os.path.abspath(named(path))
    for _ in range(40):
        parent, name = os.path.split(path)
        path = os.path.join(os.path.realpath(parent), name) if name else parent
        if any(mount.mountpoint == path for mount in mounts()):
            return path
        try:
            path = os.path.join(os.path.dirname(path), os.readlink(path))
        except OSError:
            return path
        path = os.path.abspath(path)
    return path


def mounted_at(path: str) -> Mount | None:
    """Return the topmost mount on an absolute path without symlinks. The mount is not accessed."""
    return next((mount for mount in reversed(mounts()) if mount.mountpoint == path), None)


def find_mount(path: str) -> Mount | None:
    """Return the topmost mount on exactly this path."""
    return mounted_at(resolve(path))


def containing_mount(path: str) -> Mount | None:
    """Return the topmost mount that holds this path. Raises MountError for an empty path."""

    def innermost(path: str) -> Mount | None:
        inside = [mount for mount in reversed(mounts()) if is_under(path, mount.mountpoint)]
        return max(inside, key=lambda mount: len(mount.mountpoint), default=None)

    found = innermost(os.path.abspath(named(path)))
    # A path inside a mount of irdmafs is not resolved: that would access the mount.
    return found if found is not None and found.fstype == FSTYPE else innermost(resolve(path))


def ask_child(command: list[str], timeout_s: float) -> tuple[bytes, bool]:
    """Run a command that may block in the kernel for good, where no signal reaches it. Return its output
    until then, and whether it has ended by itself in time."""
    null = subprocess.DEVNULL
    child = subprocess.Popen(command, stdin=null, stdout=subprocess.PIPE, stderr=null, cwd="/")
    try:
        return child.communicate(timeout=timeout_s)[0], True
    except subprocess.TimeoutExpired as late:
        child.kill()
        try:
            child.communicate(timeout=0.5)
        except subprocess.TimeoutExpired:
            # The child ends when the kernel lets it go; init will reap it.
            assert child.stdout is not None
            child.stdout.close()
            child.returncode = -9
        return late.output or b"", False


def reason(error: OSError) -> str:
    """Return what is to be said of an error of a file that may be on a mount of irdmafs."""
    if error.errno in STALE_ERRNOS:
        return "its mount is stale, as the daemon is gone; mount it again"
    return error.strerror or str(error)


_ASK = """
import os, sys
path, name = os.fsencode(sys.argv[1]), sys.argv[2]
try:
    answer = os.getxattr(path, name) if name else bool(os.statvfs(path)) * b""
    sys.stdout.buffer.write(b"+" + answer)
except OSError as error:
    sys.stdout.write(f"-{error.errno}")
"""


def ask_mount(path: str, xattr: str = "", timeout_s: float = 5.0) -> bytes:
    """Return the value of an extended attribute (without a name: b"" once statfs answered).

    Raises the filesystem's OSError, and TimeoutError when there is no answer in time.
    """
    command = [sys.executable, "-I", "-S", "-c", _ASK, path, xattr]
    answer, has_ended = ask_child(command, timeout_s)
    if not has_ended:
        why = f"its mount does not answer for {timeout_s:g} s; see: irdmafs status"
        raise TimeoutError(errno.ETIMEDOUT, why, path)
    if answer.startswith(b"+"):
        return answer[1:]
    code = int(answer[1:]) if answer.startswith(b"-") else errno.EIO
    raise OSError(code, os.strerror(code), path)


MountState = Literal["ok", "stale", "hung", "denied"]


def mount_state(path: str, timeout_s: float = 5.0) -> MountState:
    """Return whether a mount answers. "denied": only the user who mounted it may enter."""
    # statfs, not stat: stat may be answered from attributes that the kernel still holds.
    try:
        ask_mount(path, timeout_s=timeout_s)
    except TimeoutError:
        return "hung"
    except OSError as error:
        if error.errno in STALE_ERRNOS:
            return "stale"
        if error.errno in (errno.EACCES, errno.EPERM):
            return "denied"
        raise
    return "ok"


def can_mount() -> bool:
    """Return whether this process may call mount(2) (a sandbox may still refuse it)."""
    return has_capability(CAP_SYS_ADMIN)


def mount_filesystem(source: str, target: str, fstype: str, flags: int, data: str) -> None:
    """Call mount(2). Raises OSError."""
    texts = map(os.fsencode, (source, target, fstype))
    _check(_libc.mount(*texts, ctypes.c_ulong(flags), os.fsencode(data)), target)


def unmount_filesystem(target: str, flags: int = 0) -> None:
    """Call umount2(2), without following a symlink. Raises OSError."""
    _check(_libc.umount2(os.fsencode(target), flags | UMOUNT_NOFOLLOW), target)


def _check(result: int, target: str) -> None:
    """Raise OSError if a call of the C library failed."""
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), target)


def mount_flags(options: MountOptions) -> int:
    """Return the MS_* flags of mount(2) that these options stand for."""
    words = switches_of(options)
    return sum(flag for word, flag in _FLAGS.items() if word in words)


_MOUNT_HINTS = {
    errno.EPERM: " (mounting needs CAP_SYS_ADMIN, and no sandbox that forbids it)",
    errno.ENODEV: " (this kernel has no FUSE: modprobe fuse)",
}
_REMOUNT_HINTS = {errno.EPERM: " (only root can)", errno.EBUSY: " (files are open for writing)"}


def mount_fuse(fd: int, mountpoint: str, options: MountOptions) -> None:
    """Mount the /dev/fuse descriptor `fd`; the kernel then sends INIT to it. Raises MountError."""
    data = [f"fd={fd}", "rootmode=40000", f"user_id={os.geteuid()}", f"group_id={os.getegid()}"]
    data.append(_KERNEL_CHECKS)
    if options.allow_other:
        data.append("allow_other")
    try:
        mount_filesystem(options.fsname, mountpoint, FSTYPE, mount_flags(options), ",".join(data))
    except OSError as error:
        hint = _MOUNT_HINTS.get(error.errno or 0, "")
        raise MountError(f"cannot mount on {mountpoint}: {error.strerror}{hint}") from error


def abort_after_this_thread(mount: Mount) -> None:
    """Start a process that aborts the connection of a FUSE mount when the calling thread has ended. Raises
    OSError.

    The kernel aborts it when /dev/fuse is closed. But a killed daemon keeps that open while another thread
    of it waits for a lock, whose owner may wait for an answer of the daemon.
    """
    name, flags = f"{mount.device.partition(':')[2]}/abort", os.O_WRONLY | os.O_CLOEXEC
    if os.path.exists(f"{_FUSECTL}/{name}"):
        abort = os.open(f"{_FUSECTL}/{name}", flags)
    else:
        # Mounted where nobody sees it, by root. A call that fails leads to EBADF.
        context = _libc.syscall(_SYS_FSOPEN, b"fusectl", _FD_CLOEXEC)
        _libc.syscall(_SYS_FSCONFIG, context, _CMD_CREATE, None, None, 0)
        directory = _libc.syscall(_SYS_FSMOUNT, context, _FD_CLOEXEC, 0)
        os.close(context)
        abort = os.open(name, flags, dir_fd=directory)
        os.close(directory)
    # The kernel sends the signal when the thread ends, even if the process does not. The daemon keeps the
    # other end of the pipe.
    command = ["setpriv", "--pdeathsig", "USR1", "--", "sh", "-c", _ABORT]
    with open(os.pipe()[0]) as until, open(abort, "w") as output:
        subprocess.Popen(
            command, stdin=until, stdout=output, cwd="/", start_new_session=True
        ).returncode = 0  # no need to wait for it


def remount(mount: Mount, words: Iterable[str]) -> None:
    """Have the kernel obey these options of a mount instead of its own; others stay. Raises MountError."""
    try:
        flags = MS_REMOUNT | mount_flags(parse_mount_options(words))
        mount_filesystem(mount.source, mount.mountpoint, mount.fstype, flags, "")
    except OSError as error:
        hint = _REMOUNT_HINTS.get(error.errno or 0, "")
        raise MountError(f"cannot remount {mount.mountpoint}: {error.strerror}{hint}") from error


def libfuse_options(options: MountOptions) -> set[str]:
    """Return the same options for libfuse, as `pyfuse3.init` takes them."""
    words = {f"fsname={options.fsname}", f"subtype={FSTYPE.removeprefix('fuse.')}", _KERNEL_CHECKS}
    return words | switches_of(options) & _LIBFUSE_WORDS


def refuse_what_users_may_not(options: MountOptions) -> None:
    """Raise MountError if this user may not mount by mount(2), and asks for an option that root has not
    allowed, or the helper that mounts for users is missing."""
    if can_mount():
        return
    if fusermount() is None:
        raise MountError(
            "users mount with the help of fusermount3, which is missing; install it (apt install fuse3), "
            "or mount as root"
        )
    if options.allow_other and users_may_allow_other() is False:
        raise MountError(
            f"-o allow_other: {_FUSE_CONFIG} does not let users do this; root can allow it by a line "
            "user_allow_other there, or mount without the option"
        )


def users_may_allow_other() -> bool | None:
    """Return whether root lets users mount with -o allow_other. None: this user may not read that;
    fusermount3 may, and reports an error if not."""
    try:
        with open(_FUSE_CONFIG) as file:
            return any(line.partition("#")[0].strip() == "user_allow_other" for line in file)
    except FileNotFoundError:
        return False
    except OSError:
        return None


def fusermount() -> str | None:
    """Return the setuid helper of libfuse through which unprivileged users mount and unmount."""
    return shutil.which("fusermount3") or shutil.which("fusermount")


def unmount(path: str, lazy: bool = False) -> None:
    """Unmount; `lazy` detaches it now and ends it when its last user lets go.

    Raises MountBusyError when it is in use, MountError for any other reason.
    """
    if can_mount():
        try:
            unmount_filesystem(path, MNT_DETACH if lazy else 0)
        except OSError as error:
            if error.errno == errno.EBUSY:
                raise MountBusyError(f"{path} is busy") from error
            if error.errno == errno.EINVAL:
                raise MountError(f"{path} is not a mountpoint") from error
            raise MountError(f"cannot unmount {path}: {error.strerror}") from error
        return
    helper = fusermount()
    if helper is None:
        raise MountError(f"cannot unmount {path}: fusermount3 is missing; install fuse3")
    command = [helper, "-u", *(["-z"] if lazy else []), "--", path]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", cwd="/")
    if result.returncode != 0:
        reason = result.stderr.strip().splitlines()[-1:] or [f"{helper} failed"]
        if "busy" in reason[0].lower():
            raise MountBusyError(f"{path} is busy")
        raise MountError(f"cannot unmount {path}: {reason[0]}")


def prepare_mountpoint(path: str, nonempty: bool = False) -> str:
    """Return the real path of a directory that can be mounted on; a stale irdmafs mount is unmounted.

    Raises MountError, which says what is wrong with the directory and what to do.
    """
    real = resolve(path)
    mount = mounted_at(real)
    if mount is not None and mount.fstype == "autofs":
        # An automounter (x-systemd.automount) asks for this mount: whoever looks into it waits for us.
        return real
    while mount is not None and (state := mount_state(real)) != "ok":
        if state == "stale":
            if mount.fstype != FSTYPE:
                raise MountError(
                    f"{path} is a {mount.fstype} mount, not one of irdmafs; "
                    f"if it is stale, remove it with: umount -l {path}"
                )
            unmount(real, lazy=True)
            mount = mounted_at(real)
        elif state == "hung":
            detach = "irdmafs umount --lazy" if mount.fstype == FSTYPE else "umount -l"
            raise MountError(
                f"{path} is a {mount.fstype} mount that does not answer; detach it with: {detach} {path}"
            )
        else:
            by = "another user" if mount.user is None else user_name(mount.user)
            raise MountError(
                f"{path} is already mounted ({mount.fstype}) by {by}, who lets nobody else in; "
                "take another directory, or have it unmounted"
            )
    if mount is not None and mount.fstype == FSTYPE:
        if mount.user not in (None, os.geteuid()) and not can_mount():
            raise MountError(f"{path} is already mounted by {user_name(mount.user)}")
        if _ends(mount, _UNMOUNT_S):
            return prepare_mountpoint(path, nonempty)
        by = _served_by(real)
        raise MountError(
            f"{path} is already mounted{by}; unmount it with: irdmafs umount {quote(path)}"
        )
    try:
        mode = os.stat(real).st_mode
        if not stat.S_ISDIR(mode):
            raise MountError(f"{path} is not a directory")
        with os.scandir(real) as entries:
            empty = next(entries, None) is None
    except FileNotFoundError:
        raise MountError(f"{path} does not exist; create it with: mkdir -p {quote(path)}") from None
    except OSError as error:
        raise MountError(f"cannot use {path}: {error.strerror}") from error
    if not empty and not nonempty:
        raise MountError(f"{path} is not empty; mounting would hide what is in it (-o nonempty)")
    if not can_mount() and not os.access(real, os.W_OK):
        raise MountError(f"cannot mount on {path}: you may not write to it")
    return real


def _ends(mount: Mount, within_s: float) -> bool:
    """Return whether a mount ends within this time: umount(8) may still have to start what unmounts it."""
    deadline = time.monotonic() + within_s
    with open("/proc/self/mountinfo", "rb") as table:
        changes = select.poll()
        changes.register(table, select.POLLPRI)
        while mount.mount_id in [other.mount_id for other in parse_mountinfo(table.read())]:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not changes.poll(left_s * 1000):
                return False
            table.seek(0)
    return True


def _served_by(mountpoint: str) -> str:
    match = None
    with contextlib.suppress(OSError):
        match = re.search(rb'"pid": ?(\d+)', ask_mount(mountpoint, STATUS_XATTR))
    return f" (served by process {int(match[1])})" if match else ""
