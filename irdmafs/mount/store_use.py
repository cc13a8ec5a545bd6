"""The process that works on a store directory, and when the directory is free again."""

from __future__ import annotations

import fcntl
import os
import time

from ..mount_options import MountError
from . import mounting

LOCK_FILE = "lock"
MOUNTPOINT_FILE = "mountpoint"
# umount(8) returns before the daemon has stored its last changes and ended.
_FREE_WITHIN_S = 15.0
_LOOK_AGAIN_S = 0.02


def is_locked(store: str) -> bool:
    """Return whether a daemon uses this store."""
    try:
        descriptor = os.open(os.path.join(store, LOCK_FILE), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def read_note(store: str, name: str) -> str | None:
    """Return what a small file of a store holds; None: it cannot be read."""
    try:
        with open(os.path.join(store, name), "rb") as file:
            return os.fsdecode(file.read())
    except OSError:
        return None


def mountpoint_of(store: str) -> str | None:
    """Return the mountpoint that a store records as its last one, if any."""
    return read_note(store, MOUNTPOINT_FILE) or None


def write_note(store: str, name: str, text: str) -> None:
    """Write a small file of a store. Raises MountError."""
    try:
        with open(os.path.join(store, name), "wb") as file:
            file.write(os.fsencode(text))
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
        if where is not None and _is_mounted(where):
            raise MountError(
                f"the store {store} is in use by the mount at {where} (process {_owner_of(store)}); "
                f"unmount it with: irdmafs umount {where}"
            )
        if time.monotonic() > give_up:
            raise MountError(_held(store, where))
        time.sleep(_LOOK_AGAIN_S)


def _is_mounted(path: str) -> bool:
    return any(mount.mountpoint == path for mount in mounting.irdmafs_mounts())


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
