"""The processes that keep a mount busy, read from /proc alone: the mount itself is never touched.

Reading /proc of a process can block for ever (onlooker.py says why). So a child reads it, which can be
left behind.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from .mounting import ask_child, is_under, unescape

_PATIENCE_S = 5.0


class MountUser(NamedTuple):
    """A process that keeps a mount busy; `how` is "cwd", "root", "program", "mapping" or "file"."""

    pid: int
    command: str
    how: str
    path: str


def users_of(mountpoint: str) -> list[MountUser]:
    """Return the other processes that use a mount, each once, as far as they are found within some
    seconds."""
    return [MountUser(*found) for found in _ask_child("users", mountpoint)]


def holders_of(device: str) -> list[int]:
    """Return the processes in whose mount namespaces a filesystem ("major:minor") is mounted. After it is
    unmounted here, it stays mounted in namespaces that were made as copies of this one."""
    return list(_ask_child("holders", device))


def _ask_child(what: str, argument: str) -> list[Any]:
    command = [sys.executable, "-m", __name__, what, argument]
    found, _ = ask_child(command, _PATIENCE_S)
    return [json.loads(line) for line in found.split(b"\n")[:-1]]


def _holders(device: str) -> Iterator[int]:
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            with open(f"/proc/{pid}/mountinfo", "rb") as file:
                devices = {line.split(b" ", 3)[2] for line in file}
        except OSError:
            continue  # the process has ended, or this user may not read it
        if device.encode() in devices:
            yield pid


def _users(mountpoint: str) -> Iterator[MountUser]:
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        if pid in (os.getpid(), os.getppid()):
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


def _main(what: str, argument: str) -> None:
    for found in _holders(argument) if what == "holders" else _users(argument):
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
