"""Directories in memory, with the mounts in them and the processes that use them, for as long as a run."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

from irdmafs.mount.mounting import mounts

from .network import run

PARENT = Path("/dev/shm")
PREFIX = "irdmafs-test"
_DIRECTORY = re.compile(rf"{PREFIX}-(\d+)-.*")


def scratch_directory() -> Path:
    """Make a directory that others can look into. `sweep` removes it if this process is killed."""
    memory = PARENT if os.access(PARENT, os.W_OK) else None
    directory = Path(tempfile.mkdtemp(prefix=f"{PREFIX}-{os.getpid()}-", dir=memory))
    directory.chmod(0o755)
    return directory


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Make such a directory, and remove it with all that is in it."""
    path = scratch_directory()
    try:
        yield path
    finally:
        shutil.rmtree(path)


@contextlib.contextmanager
def mounted_on(
    path: str | Path, options: str = "rw", *, kind: str = "tmpfs", source: str | Path = "none"
) -> Iterator[Path]:
    """Have a filesystem of this kind, with these mount options, on a path. Raises CommandFailed."""
    run("mount", "-t", kind, "-o", options, source, path)
    try:
        yield Path(path)
    finally:
        run("umount", "--lazy", path)


def is_mounted(path: Path) -> bool:
    """Return whether something is mounted on a path without blanks; asks nothing of what is there."""
    return b" %b " % os.fsencode(path) in Path("/proc/self/mountinfo").read_bytes()


def sweep() -> None:
    """Take away the processes, mounts and directories of runs that were killed."""
    if not PARENT.is_dir():
        return
    for path in PARENT.glob(f"{PREFIX}-*"):
        match = _DIRECTORY.fullmatch(path.name)
        if match is None or Path(f"/proc/{match[1]}").exists():
            continue
        _kill_users_of(path)
        for mount in mounts():
            if Path(mount.mountpoint).is_relative_to(path):
                run("umount", "-l", mount.mountpoint, check=False)
        shutil.rmtree(path, ignore_errors=True)


def _kill_users_of(directory: Path) -> None:
    """Kill the processes whose command line names a directory, or something below it."""
    needle = os.fsencode(directory)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if needle in (entry / "cmdline").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)
