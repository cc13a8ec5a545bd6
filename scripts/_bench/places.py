"""Places to measure: mounts and directories that a script makes for itself and takes away again."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

STATUS_XATTR = "user.irdmafs.status"
COMMAND_TIMEOUT = 60.0


class Unavailable(Exception):
    """A place that cannot be had on this machine; the text says why."""


def read_status(path: Path) -> dict[str, Any]:
    """The status that an irdmafs mount tells about itself. Raises OSError where it is none."""
    status: dict[str, Any] = json.loads(os.getxattr(path, STATUS_XATTR))
    return status


class Mount:
    """A mounted irdmafs, seen from outside: its requests, and its daemon's time and memory."""

    def __init__(self, mountpoint: Path) -> None:
        self.mountpoint = mountpoint
        status = read_status(mountpoint)
        self.pid = int(status["pid"])
        self.session = str(status["session"])
        # Asking for the status is itself counted. What one question costs is subtracted.
        self._cost_of_asking: Counter[str] = Counter()
        for _ in range(3):
            before = self._counts()
            self._cost_of_asking = self._counts() - before
        self._asked: Counter[str] = Counter()

    def _counts(self) -> Counter[str]:
        return Counter(read_status(self.mountpoint)["requests"])

    def requests(self) -> Counter[str]:
        """Requests the daemon got so far, by kind, without those that this method causes.

        RELEASE and FORGET follow the call that causes them, so this waits until a question is
        all that arrives between two questions (at most 0.5 s).
        """
        counts = self._counts()
        for _ in range(50):
            self._asked += self._cost_of_asking
            before, counts = counts, self._counts()
            if counts - before == self._cost_of_asking:
                break
            time.sleep(0.01)
        self._asked += self._cost_of_asking
        return counts - self._asked

    def cpu_seconds(self) -> float:
        """Processor time of the daemon so far, user and system."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_bytes(self) -> int:
        """Resident memory of the daemon's own, as the kernel counts it (mapped tmpfs included)."""
        with open(f"/proc/{self.pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def kill(self) -> None:
        """Kill the daemon: every call that waits for an answer of it ends with an error."""
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)


def free_memory() -> int:
    """Bytes of memory that can still be used (MemAvailable)."""
    return meminfo()["MemAvailable"]


def meminfo() -> dict[str, int]:
    """/proc/meminfo in bytes."""
    values = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, amount = line.partition(":")
        number, _, unit = amount.strip().partition(" ")
        values[name] = int(number) * (1024 if unit == "kB" else 1)
    return values


class _CacheRange(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _CacheStat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


def cached_bytes(path: Path) -> int | None:
    """Bytes of a file in the page cache of its own filesystem, None before Linux 6.5."""
    whole, found = _CacheRange(0, 0), _CacheStat()
    number = 451  # cachestat(2), the same on every architecture but alpha
    with open(path, "rb") as file:
        call = ctypes.CDLL(None, use_errno=True).syscall
        failed = call(number, file.fileno(), ctypes.byref(whole), ctypes.byref(found), 0)
    return None if failed else int(found.cached) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def signals_end_the_block() -> Iterator[None]:
    """SIGTERM, SIGHUP and Ctrl-C leave the block by an exception, once, so that it cleans up."""

    caught = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)

    def leave(number: int, _frame: FrameType | None) -> None:
        for other in caught:
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + number)

    previous = {number: signal.signal(number, leave) for number in caught}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def temporary_directory(parent: Path | None = None) -> Iterator[Path]:
    """A directory that goes away with its files, but never with those of a mount still in it."""
    path = Path(tempfile.mkdtemp(prefix="irdmafs-bench-", dir=parent))
    try:
        yield path
    finally:
        if not _mounts_below(path):
            shutil.rmtree(path, ignore_errors=True)


def _mounts_below(path: Path) -> list[str]:
    prefix = f"{path.resolve()}/"
    with open("/proc/self/mounts") as file:
        points = [line.split()[1] for line in file]
    return [point for point in points if f"{point}/".startswith(prefix)]


@contextlib.contextmanager
def huge_page_tmpfs(path: Path, size: int) -> Iterator[Path]:
    """Mount a tmpfs for ``size`` bytes, with huge pages, on a new directory ``path``.

    Raises Unavailable without the privilege to mount.
    """
    if os.geteuid() != 0:
        raise Unavailable("mounting a tmpfs with huge pages takes root")
    path.mkdir()
    options = f"huge=within_size,mode=0700,size={size}"
    mounting = _run(["mount", "-t", "tmpfs", "-o", options, "irdmafs-bench", str(path)])
    if mounting.returncode != 0:
        path.rmdir()
        raise Unavailable(f"mount -t tmpfs -o {options}: {_last_line(mounting)}")
    try:
        yield path
    finally:
        if _run(["umount", str(path)]).returncode != 0:
            _run(["umount", "--lazy", str(path)])
        path.rmdir()


@contextlib.contextmanager
def mounted(session: str, store: Path, mountpoint: Path, log_file: Path) -> Iterator[Mount]:
    """``irdmafs mount`` on a new directory ``mountpoint``, keeping its data in ``store``.

    Raises Unavailable where the command says that it cannot.
    """
    mountpoint.mkdir()
    mount: Mount | None = None
    try:
        mounting = _irdmafs(
            "mount", "--session", session, "--store", store, "--log-file", log_file, mountpoint
        )
        if mounting.returncode != 0:
            told = log_file.read_text(errors="replace").splitlines() if log_file.exists() else []
            reason = "\n    ".join([_last_line(mounting), *told[-5:]])
            raise Unavailable(f"irdmafs mount --session {session}: {reason}")
        mount = Mount(mountpoint)
        yield mount
    finally:
        _unmount(mountpoint, mount)
        with contextlib.suppress(OSError):
            mountpoint.rmdir()


def _unmount(mountpoint: Path, mount: Mount | None) -> None:
    """Unmount the proper way, or by force where that fails or takes too long."""
    if not _mounts_below(mountpoint):
        return
    with contextlib.suppress(Unavailable):
        if _irdmafs("umount", mountpoint).returncode == 0:
            return
    with contextlib.suppress(Unavailable):
        if os.geteuid() == 0:
            _run(["umount", "--lazy", str(mountpoint)])
        else:
            _run(["fusermount3", "-u", "-z", str(mountpoint)])
    if mount is not None:
        mount.kill()


def _irdmafs(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    beside = Path(sys.executable).with_name("irdmafs")
    command = str(beside) if beside.exists() else shutil.which("irdmafs")
    if command is None:
        raise Unavailable("the irdmafs command is not installed (pip install -e .)")
    return _run([command, *map(str, arguments)])


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    # Into a file, not a pipe: a daemon left in the background may hold its end open for good.
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        try:
            process = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=COMMAND_TIMEOUT,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Unavailable(str(error)) from None
        output.seek(0)
        return subprocess.CompletedProcess(command, process.returncode, output.read())


def _last_line(process: subprocess.CompletedProcess[str]) -> str:
    lines = process.stdout.strip().splitlines()
    return lines[-1].strip() if lines else f"exit code {process.returncode}"
