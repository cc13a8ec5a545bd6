"""The processes that use a store, and those that keep a mount busy.

Those of a mount are found in /proc alone: the mount itself is never touched. Reading /proc of a process
can block for ever (onlooker.py says why). So a child reads it, which can be left behind.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..mount_options import MountError
from .mounting import ask_child, irdmafs_mounts, is_under, unescape

LOCK_FILE = "lock"
MOUNTPOINT_FILE = "mountpoint"
# umount(8) returns before the daemon has stored its last changes and ended.
_FREE_WITHIN_S = 15.0
_LOOK_AGAIN_S = 0.02
# A child that reads /proc is left behind after so long.
_PATIENCE_S = 5.0


# -- of a store ---------------------------------------------------------------------------------------


@contextmanager
def kept_free(store: str) -> Iterator[bool]:
    """Keep daemons from using a store for the time of the block. Yield False if one uses it."""
    try:
        descriptor = os.open(os.path.join(store, LOCK_FILE), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield True
        return
    is_free = False
    with os.fdopen(descriptor):
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_free = True
        yield is_free


def is_locked(store: str) -> bool:
    """Return whether a daemon uses this store."""
    with kept_free(store) as is_free:
        return not is_free


def read_note(store: str, name: str) -> str | None:
    """Return what a small file of a store holds; None: it cannot be read."""
    try:
        return os.fsdecode(Path(store, name).read_bytes())
    except OSError:
        return None


def mountpoint_of(store: str) -> str | None:
    """Return the mountpoint that a store records as its last one, if any."""
    return read_note(store, MOUNTPOINT_FILE) or None


def write_note(store: str, name: str, text: str) -> None:
    """Write a small file of a store. Raises MountError."""
    try:
        Path(store, name).write_bytes(os.fsencode(text))
    except OSError as error:
        raise MountError(
            f"cannot use the store {store}: {error.strerror}; make room there, or give another directory "
            "with --store"
        ) from error


def wait_until_free(store: str) -> None:
    """Return when no daemon uses a store any more; a daemon whose mount is gone is waited for.

    Raises MountError, which names the mount that uses it and what to do.
    """
    give_up = time.monotonic() + _FREE_WITHIN_S
    while is_locked(store):
        where = mountpoint_of(store)
        if where in [mount.mountpoint for mount in irdmafs_mounts()]:
            raise MountError(
                f"the store {store} is in use by the mount at {where} (process {_owner_of(store)}); "
                f"unmount it with: irdmafs umount {shlex.quote(where)}"
            )
        if time.monotonic() > give_up:
            raise MountError(_held(store, where))
        time.sleep(_LOOK_AGAIN_S)


def _owner_of(store: str) -> str:
    return (read_note(store, LOCK_FILE) or "").strip() or "unknown"


def _held(store: str, where: str | None) -> str:
    owner = _owner_of(store)
    mount = f"mount at {where}" if where is not None else "mount"
    return (
        f"the store {store} is still in use by process {owner}, whose {mount} is gone from here: it was "
        "detached (umount --lazy) or is in another mount namespace, and programs still use files in it; "
        f"it ends when they do, or at once with: kill {owner} (what they have not closed is then lost)"
    )


# -- of a mount ---------------------------------------------------------------------------------------


class MountUser(NamedTuple):
    """A process that keeps a mount busy; `how` is "cwd", "root", "program", "mapping" or "file"."""

    pid: int
    command: str
    how: str
    path: str


def users_of(mountpoint: str) -> list[MountUser]:
    """Return the other processes that use a mount, each once, as far as found within some seconds."""
    return [MountUser(*found) for found in _ask_child("users", mountpoint)]


def holders_of(device: str) -> list[int]:
    """Return the processes in other mount namespaces in which a filesystem ("major:minor") is mounted.
    After it is unmounted here, it stays mounted in namespaces that were made as copies of this one."""
    return list(_ask_child("holders", device))


def _ask_child(what: str, argument: str) -> list[Any]:
    command = [sys.executable, "-m", __name__, what, argument]
    found, _ = ask_child(command, _PATIENCE_S)
    return [json.loads(line) for line in found.split(b"\n")[:-1]]


def _holders(device: str) -> Iterator[int]:
    here = os.readlink("/proc/self/ns/mnt")
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            # A mount that was made here since may have the number of the one that was unmounted.
            if os.readlink(f"/proc/{pid}/ns/mnt") == here:
                continue
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
    links = [("cwd", "cwd"), ("root", "root"), ("program", "exe")]
    # A process of another user cannot be read, nor one that has gone.
    with suppress(OSError):
        links += [("file", f"fd/{descriptor}") for descriptor in os.listdir(f"/proc/{pid}/fd")]
    for how, link in links:
        with suppress(OSError):
            yield how, os.readlink(f"/proc/{pid}/{link}")
    with suppress(OSError), open(f"/proc/{pid}/maps", "rb") as file:
        for line in file:
            fields = line.rstrip(b"\n").split(None, 5)
            if len(fields) == 6:
                yield "mapping", unescape(os.fsdecode(fields[5]))


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_bytes().decode(errors="replace").strip()
    except OSError:
        return "?"


def _main(what: str, argument: str) -> None:
    for found in _holders(argument) if what == "holders" else _users(argument):
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
