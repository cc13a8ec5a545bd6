"""Find out what this machine can do for irdmafs, by trying it; nothing is left behind.

Passthrough is negotiated with the kernel on a throwaway mount, huge pages by mounting a tmpfs.
"""

from __future__ import annotations

import errno
import importlib.metadata
import os
import platform
import re
import resource
import select
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from ..backend.model.values import human_bytes, meminfo, memory_limit
from ..backend.process import has_capability, own_status
from ..backend.transport.verbs.rdma import Choice
from ..fuse import wakeups
from ..fuse.connection import Connection, ProtocolError
from ..mount import mounting
from ..mount.stores import SHM_ROOT, mount_tmpfs
from ..mount_options import MountError, MountOptions
from . import Check, Verdict
from .rdma import check_memlock, check_rdma

_FUSE_DEVICE = "/dev/fuse"
_INIT_TIMEOUT_S = 5.0
_TRIAL_TMPFS_BYTES = 4 << 20
# Loaders that hold a directory of shards open can exhaust fewer descriptors than this.
_COMFORTABLE_OPEN_FILES = 65536
_COMFORTABLE_MEMORY_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Examination:
    """All checks, and the sessions that can run, the better one first."""

    checks: tuple[Check, ...]
    sessions: tuple[str, ...]
    passthrough: bool

    def summary(self) -> str:
        if not self.sessions:
            return "irdmafs cannot mount here: see the failed checks"
        how = "with passthrough" if self.passthrough else "without passthrough"
        return f"irdmafs can mount here, {how}; sessions: {', '.join(self.sessions)}"

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": bool(self.sessions),
            "sessions": list(self.sessions),
            "passthrough": self.passthrough,
            "checks": [asdict(check) for check in self.checks],
        }


def examine(choice: Choice | None = None, peer: str | None = None) -> Examination:
    """Run all checks, in a fraction of a second. `choice` is the choice of RDMA devices to check, on the
    route to the host `peer`."""
    device = check_fuse_device()
    through = check_passthrough()
    helper = check_fusermount()
    packages = check_packages()
    rdma = check_rdma(choice or Choice(), peer)
    checks = (
        check_kernel(),
        device,
        check_privilege(),
        through,
        helper,
        check_allow_other(),
        check_huge_pages(),
        check_memory(),
        check_shared_memory(),
        *rdma,
        check_memlock(),
        check_open_files(),
        check_wakeups(),
        packages,
    )
    sessions = []
    # Without pyfuse3, a requirement of irdmafs, the installation is broken. With rdma = "require" no
    # session starts without RDMA.
    if packages.verdict != "fail" and all(check.verdict != "fail" for check in rdma):
        if through.verdict == "ok":
            sessions.append("kernel")
        # This process mounts by itself, if it may, else by the helper.
        mounts = through if mounting.can_mount() else helper
        if "fail" not in (device.verdict, mounts.verdict):
            sessions.append("pyfuse3")
    return Examination(checks, tuple(sessions), "kernel" in sessions)


def _kernel_version() -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", platform.release())
    return (int(match[1]), int(match[2])) if match else (0, 0)


def check_kernel() -> Check:
    found = f"{platform.system()} {platform.release()}"
    if _kernel_version() >= (6, 9):
        return Check("kernel", "ok", found)
    return Check("kernel", "warn", found, "passthrough needs Linux 6.9; without it every byte is "
                 "copied by the daemon")  # fmt: skip


def check_fuse_device() -> Check:
    try:
        os.close(os.open(_FUSE_DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        return Check("/dev/fuse", "fail", "missing", "load the module: modprobe fuse; "
                     "in a container: docker run --device /dev/fuse")  # fmt: skip
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM) and not mounting.can_mount():
            return Check("/dev/fuse", "fail", "not for this user", "as root: chmod 666 /dev/fuse; "
                         "in a container: docker run --device /dev/fuse")  # fmt: skip
        return Check("/dev/fuse", "fail", f"cannot be opened: {error.strerror}",
                     "load the module: modprobe fuse; in a container: docker run "
                     "--device /dev/fuse --cap-add SYS_ADMIN")  # fmt: skip
    return Check("/dev/fuse", "ok", "can be opened")


def check_privilege() -> Check:
    if mounting.can_mount():
        return Check("privilege", "ok", f"user {os.geteuid()} with CAP_SYS_ADMIN")
    return Check("privilege", "info", f"user {os.geteuid()} without CAP_SYS_ADMIN",
                 "for passthrough and a huge-page store mount as root; "
                 "in a container: docker run --cap-add SYS_ADMIN")  # fmt: skip


def check_passthrough() -> Check:
    """Check whether the kernel supports FUSE passthrough; "fail": this process cannot mount at all."""
    name = "passthrough"
    slower = "mounts work without it, through the daemon"
    if not mounting.can_mount():
        return Check(name, "warn", "not tried: needs CAP_SYS_ADMIN", f"mount as root; {slower}")
    try:
        offered, works = negotiate_passthrough()
    except (OSError, MountError) as error:
        return Check(name, "fail", f"no trial mount: {error}", "in a container: docker run --device"
                     " /dev/fuse --cap-add SYS_ADMIN --security-opt apparmor=unconfined")  # fmt: skip
    if works:
        return Check(name, "ok", "negotiated")
    if offered:
        return Check(name, "warn", "offered by the kernel, but a tmpfs file was refused", slower)
    why = "needs Linux 6.9" if _kernel_version() < (6, 9) else "needs CONFIG_FUSE_PASSTHROUGH=y"
    return Check(name, "warn", "not offered by this kernel", f"{why}; {slower}")


@contextmanager
def _trial_directory() -> Iterator[str]:
    # The parent directory is private, so that no other process enters the trial mount.
    parent = tempfile.mkdtemp(prefix="irdmafs-doctor-")
    path = os.path.join(parent, "mnt")
    try:
        os.mkdir(path)
        yield path
    finally:
        while mounting.find_mount(path) is not None:
            mounting.unmount_filesystem(path, mounting.MNT_DETACH)
        shutil.rmtree(parent)


def negotiate_passthrough() -> tuple[bool, bool]:
    """Do the INIT handshake on a throwaway mount, and return two answers: the kernel offers passthrough;
    it accepts a tmpfs file as backing file. Raises MountError or OSError where the handshake is not
    possible."""
    with _trial_directory() as path:
        device = os.open(_FUSE_DEVICE, os.O_RDWR | os.O_CLOEXEC)
        try:
            mounting.mount_fuse(device, path, MountOptions(fsname="irdmafs-doctor"))
            if not select.select([device], [], [], _INIT_TIMEOUT_S)[0]:
                raise OSError(errno.ETIMEDOUT, "the kernel sent no INIT")
            return True, _accepts_backing(Connection(device))
        except ProtocolError:
            return False, False
        finally:
            # Closing ends the connection: a process in the mount gets an error instead of waiting.
            os.close(device)


def _accepts_backing(connection: Connection) -> bool:
    file = os.memfd_create("irdmafs-doctor", os.MFD_CLOEXEC)
    try:
        connection.unregister(connection.register(file))
    except OSError:
        return False
    finally:
        os.close(file)
    return True


def check_fusermount() -> Check:
    name = "fusermount3"
    path = mounting.fusermount()
    privileged = mounting.can_mount()
    missing: Verdict = "info" if privileged else "fail"
    if path is None:
        return Check(name, missing, "not installed", "unprivileged users need it to mount: "
                     "apt install fuse3 (dnf install fuse3)")  # fmt: skip
    status = os.stat(path)
    if not (status.st_mode & stat.S_ISUID and status.st_uid == 0) and os.geteuid() != 0:
        return Check(name, missing, f"{path} is not setuid root",
                     f"as root: chown root {path}; chmod u+s {path}")  # fmt: skip
    if not privileged and own_status("NoNewPrivs") == "1":
        return Check(name, missing, "has no effect: this process may gain no privileges",
                     "start it without no_new_privs (systemd: NoNewPrivileges=no; a container: without "
                     "--security-opt no-new-privileges)")  # fmt: skip
    if not privileged and (user := mounting.user_name(os.getuid())) == f"user {os.getuid()}":
        return Check(name, missing, f"refuses {user}, who has no name", "give the user one in /etc/passwd; "
                     "in a container: docker run -v /etc/passwd:/etc/passwd:ro")  # fmt: skip
    if not has_capability(mounting.CAP_SYS_ADMIN, "CapBnd"):
        return Check(name, missing, "has no effect: CAP_SYS_ADMIN was taken from all processes here",
                     "in a container: docker run --cap-add SYS_ADMIN --device /dev/fuse")  # fmt: skip
    return Check(name, "ok", path)


def check_allow_other() -> Check:
    name = "user_allow_other"
    if mounting.users_may_allow_other():
        return Check(name, "ok", "set in /etc/fuse.conf")
    if mounting.can_mount():
        return Check(name, "info", "not set in /etc/fuse.conf; root needs no permission for "
                     "-o allow_other")  # fmt: skip
    return Check(name, "info", "not set in /etc/fuse.conf", "to share a mount with other users "
                 "(-o allow_other), as root: echo user_allow_other >> /etc/fuse.conf")  # fmt: skip


def check_huge_pages() -> Check:
    name = "huge-page tmpfs"
    if not mounting.can_mount():
        return Check(name, "warn", "not tried: mounting a tmpfs needs CAP_SYS_ADMIN",
                     f"mount as root; until then stores are in {SHM_ROOT}")  # fmt: skip
    with _trial_directory() as path:
        try:
            refused = mount_tmpfs(path, _TRIAL_TMPFS_BYTES)
        except (OSError, MountError) as error:
            return Check(name, "warn", f"no tmpfs can be mounted: {error}",
                         f"stores are in {SHM_ROOT} instead")  # fmt: skip
    if refused:
        return Check(name, "warn", "refused by the kernel", "needs "
                     "CONFIG_TRANSPARENT_HUGEPAGE=y; large files are slower without")  # fmt: skip
    try:
        with open("/sys/kernel/mm/transparent_hugepage/shmem_enabled") as file:
            denied = "[deny]" in file.read()
    except OSError:
        denied = False
    if denied:
        return Check(name, "warn", "accepted, but denied for the whole machine", "echo never > "
                     "/sys/kernel/mm/transparent_hugepage/shmem_enabled")  # fmt: skip
    return Check(name, "ok", "huge=within_size works")


def check_memory() -> Check:
    available = meminfo("MemAvailable")
    found = f"{human_bytes(available)} available, limit {human_bytes(memory_limit())}"
    if available < _COMFORTABLE_MEMORY_BYTES:
        return Check("memory", "warn", found, "stores are in memory: free some, or put the store "
                     "on a disk with --store")  # fmt: skip
    return Check("memory", "ok", found)


def check_shared_memory() -> Check:
    name = SHM_ROOT
    try:
        usage = os.statvfs(SHM_ROOT)
    except OSError as error:
        return Check(name, "warn", error.strerror or "missing",
                     f"unprivileged stores need it: mount -t tmpfs tmpfs {SHM_ROOT}")  # fmt: skip
    total, free = usage.f_blocks * usage.f_frsize, usage.f_bavail * usage.f_frsize
    found = f"{human_bytes(free)} free of {human_bytes(total)}"
    if total < _COMFORTABLE_MEMORY_BYTES:
        verdict: Verdict = "info" if mounting.can_mount() else "warn"
        return Check(name, verdict, found, "unprivileged stores are there: "
                     f"mount -o remount,size=50% {SHM_ROOT}; docker run --shm-size=8g")  # fmt: skip
    return Check(name, "ok", found)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"


def check_open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"soft {_limit(soft)}, hard {_limit(hard)}: that many versions open at once"
    if hard == resource.RLIM_INFINITY or hard >= _COMFORTABLE_OPEN_FILES:
        return Check("open files", "ok", found)
    return Check("open files", "warn", found, "the daemon raises its limit up to the hard one: "
                 "ulimit -Hn 1048576, LimitNOFILE=1048576")  # fmt: skip


def check_wakeups() -> Check:
    """Check how idle processors wait: halting at once delays each answer to an open by 15-35 us."""
    name = "wake-ups"
    if not wakeups.halts_at_once():
        return Check(name, "ok", "idle processors of this machine are woken fast")
    found = "idle processors of this virtual machine halt at once and are slow to wake"
    if os.access(wakeups.DEVICE, os.W_OK):
        return Check(name, "ok", f"{found}; a mount keeps them polling while requests come")
    return Check(name, "warn", found, "run as root with /dev/cpu_dma_latency, or: echo 200000 > "
                 "/sys/module/haltpoll/parameters/guest_halt_poll_ns")  # fmt: skip


def check_packages() -> Check:
    name = "pyfuse3"
    try:
        import pyfuse3  # noqa: F401
    except ImportError as error:
        return Check(name, "fail", f"cannot be imported: {error}",
                     "apt install libfuse3-dev pkg-config gcc; pip install pyfuse3")  # fmt: skip
    return Check(name, "ok", importlib.metadata.version("pyfuse3"))
