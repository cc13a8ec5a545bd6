"""What the machine tells of itself and its processes, and memory to measure in."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from harness.network import CommandFailed, Unavailable, run
from harness.parts import mount_tmpfs

from irdmafs.mount.mounting import mounts

_TICKS = os.sysconf("SC_CLK_TCK")
_KTHREADD = 2


def meminfo() -> dict[str, int]:
    """/proc/meminfo in bytes."""
    values = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, amount = line.partition(":")
        number, _, unit = amount.strip().partition(" ")
        values[name] = int(number) * (1024 if unit == "kB" else 1)
    return values


def make_real(size: int) -> None:
    """Have `size` bytes of free memory that a virtual machine's host has not taken back.

    Memory that has been free for a second or two is given back (free page reporting), and writing it
    again is ten times slower: by chance for one contender and not for another. Memory freed last is
    used first, so this is for right before a write.
    """
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 1


def drop_caches() -> None:
    """Make the kernel forget names, inodes and clean pages (those of a tmpfs are never clean).

    Raises Unavailable for users who may not.
    """
    try:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError as error:
        raise Unavailable(f"dropping caches takes root ({error.strerror})") from None


# -- processes ---------------------------------------------------------------------------------


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def processor_s(pid: int) -> float:
    """Processor time of a process so far, user and system; the kernel counts it in ticks."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS


def kernel_processor_s() -> float:
    """Processor time that no process is charged for: kernel threads and soft interrupts."""
    total = 0.0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if int(_stat(int(name))[1]) == _KTHREADD:
                    total += processor_s(int(name))
    return total + int(Path("/proc/stat").read_text().split("\n", 1)[0].split()[7]) / _TICKS


def resident_bytes(pid: int) -> int:
    """Memory of a process, as the kernel counts it (mapped tmpfs included)."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE


def process_status(pid: int) -> dict[str, int]:
    """The numbers of /proc/PID/status; memory is in kB. Raises OSError."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    words = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    return {name: int(value[0]) for name, value in words.items() if value and value[0].isdigit()}


# -- files -------------------------------------------------------------------------------------


@contextlib.contextmanager
def temporary_directory(parent: Path | None = None) -> Iterator[Path]:
    """A directory that goes away with its files, but never with those of a mount still in it."""
    path = Path(tempfile.mkdtemp(prefix="irdmafs-bench-", dir=parent))
    try:
        yield path
    finally:
        below = f"{path.resolve()}/"
        if not any(f"{mount.mountpoint}/".startswith(below) for mount in mounts()):
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def huge_page_tmpfs(path: Path, size: int) -> Iterator[Path]:
    """Mount a tmpfs for `size` bytes, with huge pages, on a new directory `path`.

    Raises Unavailable without the privilege to mount.
    """
    if os.geteuid() != 0:
        raise Unavailable("mounting a tmpfs with huge pages takes root")
    try:
        mount_tmpfs(path, size)
    except CommandFailed as error:
        path.rmdir()
        raise Unavailable(str(error)) from None
    try:
        yield path
    finally:
        run("umount", "-l", path, check=False)
        path.rmdir()
