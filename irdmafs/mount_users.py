"""Who keeps a mount busy, read from /proc alone: the mount itself is never touched."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from .mounting import is_under, unescape


@dataclass(frozen=True, slots=True)
class MountUser:
    """A process that keeps a mount busy; `how` is "cwd", "root", "program", "mapping" or "file"."""

    pid: int
    command: str
    how: str
    path: str


def users_of(mountpoint: str) -> Iterator[MountUser]:
    """The other processes that use a mount, one finding each, read from /proc alone."""
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        if pid == os.getpid():
            continue
        for how, path in _paths_used_by(pid):
            if is_under(path.removesuffix(" (deleted)"), mountpoint):
                yield MountUser(pid, _command_of(pid), how, path)
                break


def _paths_used_by(pid: int) -> Iterator[tuple[str, str]]:
    for how, link in (("cwd", "cwd"), ("root", "root"), ("program", "exe")):
        try:
            yield how, os.readlink(f"/proc/{pid}/{link}")
        except OSError:
            continue
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        descriptors = []
    for descriptor in descriptors:
        try:
            yield "file", os.readlink(f"/proc/{pid}/fd/{descriptor}")
        except OSError:
            continue
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:
            for line in file:
                fields = line.rstrip(b"\n").split(None, 5)
                if len(fields) == 6:
                    yield "mapping", unescape(fields[5])
    except OSError:
        return


def _command_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            return file.read().decode(errors="replace").strip()
    except OSError:
        return "?"
