"""Store directories: where they are by default, how they are made and thrown away.

A default store is named after its mountpoint, so that mounting there again finds what was
published. Where we may mount it is a tmpfs of its own: its pages can be huge, its size has a
limit, and discarding it is one unmount.

A directory serves one purpose: the store of an embedded mount, the cache of a cluster's mount (where
nothing is worth keeping) or the store of a cluster's node. Each of them deletes files that it does not
know, so a directory of one purpose must not be used for another.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shlex
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..backend.model.values import human_bytes, meminfo, memory_limit
from ..mount_options import MountError
from . import mounting
from .users import (
    MOUNTPOINT_FILE,
    is_locked,
    kept_free,
    mountpoint_of,
    read_note,
    wait_until_free,
    write_note,
)

# Unlike /tmp, it is not cleaned by age, and only root can write to it.
TMPFS_ROOT = "/run/irdmafs/stores"
SHM_ROOT = "/dev/shm"

# A tmpfs that fills all memory takes the machine down; the rest of the memory is for programs.
_DEFAULT_SHARE = 0.8
# The processes of a mount or node take some 40 MiB (*measured*), from the same control group.
_OWN_BYTES = 48 << 20
_SIZE_MIN_BYTES = 1 << 20
_TMPFS_FLAGS = mounting.MS_NOSUID | mounting.MS_NODEV
# A file in a cache, with the path of the configuration that its mount was given.
_CLUSTER_FILE = "cluster"
_ENTRIES = re.compile(r"names.*|extents|lock|open|mountpoint|cluster|irdmafs\.log.*")
OF_NODES = re.compile(
    r"extents|incoming|held|quarantine|lock|\w+\.json.*|irdmafs\.log.*|lost\+found"
)

Purpose = Literal["mount", "cache", "node"]
_PURPOSES: tuple[tuple[str, Purpose], ...] = (
    ("node.json", "node"),
    ("names", "mount"),
    (_CLUSTER_FILE, "cache"),
)
_OWNERS: dict[Purpose, str] = {
    "node": "a store node of a cluster (irdmafs serve)",
    "mount": "a mount without --cluster",
    "cache": "a cluster's mount",
}


@dataclass(frozen=True, slots=True)
class Store:
    """A store directory ready for a daemon. `created`: this command made it, so it holds nothing from
    before; `warnings` are lines for the user."""

    path: str
    created: bool
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LeftoverStore:
    """A default store that no mount uses. `mountpoint` is where mounting brings it back."""

    path: str
    mountpoint: str | None
    bytes: int


def store_name(mountpoint: str) -> str:
    """Return the name of a mountpoint's default store: readable, and unique."""
    readable = re.sub(r"[^A-Za-z0-9._-]", "_", os.path.basename(mountpoint))[:40] or "root"
    return f"{readable}-{hashlib.sha256(os.fsencode(mountpoint)).hexdigest()[:8]}"


def _shm_directory() -> str:
    return os.path.join(SHM_ROOT, f"irdmafs-{os.geteuid()}")


def _private_directory(path: str) -> bool:
    """Make a directory that only this user can enter, and return whether it is new.

    /dev/shm is everybody's: a directory or symlink that somebody else put there is refused.
    """
    created = True
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        created = False
    except OSError as error:
        raise MountError(f"cannot create the store {path}: {error.strerror}") from error
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise MountError(f"the store {path} is not a directory; move it away or use --store")
    if status.st_uid != os.geteuid():
        raise MountError(f"the store {path} belongs to user {status.st_uid}; use --store")
    if status.st_mode & 0o077:
        os.chmod(path, 0o700)
    return created


@contextmanager
def _locked(directory: str) -> Iterator[None]:
    """Wait until no other command has this directory locked, and lock it. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def default_store(mountpoint: str, size: int | None = None) -> Store:
    """Return the default store of a mountpoint; `size` in bytes limits it.

    Raises MountError where it cannot be made, or not with that size.
    """
    if size is not None:
        _refuse_size(size)
    if mounting.can_mount():
        try:
            os.makedirs(os.path.dirname(TMPFS_ROOT), 0o755, exist_ok=True)
            _private_directory(TMPFS_ROOT)
            with _locked(TMPFS_ROOT):
                return _tmpfs_store(os.path.join(TMPFS_ROOT, store_name(mountpoint)), size)
        except PermissionError as error:
            refused = f"no tmpfs of its own for the store ({error.strerror})"
        except OSError as error:
            raise MountError(
                f"cannot make the store in {TMPFS_ROOT}: {error.strerror}; give a directory that can be "
                "written with --store DIR"
            ) from error
    else:
        refused = ""
    if size is not None:
        raise MountError(
            "--size needs a tmpfs of its own for the store, and mounting one needs CAP_SYS_ADMIN; "
            f"without it the store shares {SHM_ROOT} and that one's limit"
        )
    _private_directory(_shm_directory())
    path = os.path.join(_shm_directory(), store_name(mountpoint))
    created = _private_directory(path)
    wait_until_free(path)
    warnings = (f"{refused}; it is in {path}, without huge pages",) if refused else ()
    return Store(path, created, warnings)


def _refuse_size(size: int) -> None:
    """Raise MountError for a size that is too small for a store, or larger than what memory and swap leave
    beside the mount: writes would then not fail with ENOSPC, but have the kernel kill processes."""
    if size < _SIZE_MIN_BYTES:
        raise MountError(f"--size {human_bytes(size)} is too little for a store; give 1M or more")
    if lack := lack_of_memory(size):
        raise MountError(f"--size {lack}; give less, or keep contents on a disk with --store DIR")


def lack_of_memory(size: int) -> str:
    """Return why so many bytes cannot be kept in memory beside the processes of a mount or node, "" if they
    can."""
    memory, swap = memory_limit(), meminfo("SwapTotal")
    if size <= memory + swap - _OWN_BYTES:
        return ""
    return (
        f"{human_bytes(size)} is more than this machine has ({human_bytes(memory)} of memory, "
        f"{human_bytes(swap)} of swap) beside the {human_bytes(_OWN_BYTES)} of irdmafs itself: the "
        "kernel would end programs before the store is full"
    )


def _tmpfs_store(path: str, size: int | None) -> Store:
    mount = mounting.find_mount(path)
    if mount is not None:
        if mount.fstype != "tmpfs":
            raise MountError(f"a {mount.fstype} filesystem is mounted on {path}; unmount it")
        wait_until_free(path)
        if size is not None:
            empty_cache(path)
            resize(path, size)
        return Store(path, created=False)
    _private_directory(path)
    if size is None:
        memory = memory_limit()
        size = max(_SIZE_MIN_BYTES, min(int(memory * _DEFAULT_SHARE), memory - _OWN_BYTES))
    warnings = mount_tmpfs(path, size)
    return Store(path, created=True, warnings=warnings)


def mount_tmpfs(path: str, size: int) -> tuple[str, ...]:
    """Mount a private huge-page tmpfs of `size` bytes. Returns warnings (of a kernel without
    huge pages); raises PermissionError where mounting is forbidden, else MountError."""
    data = f"mode=0700,size={size}"
    try:
        try:
            _mount(path, f"huge=within_size,{data}")
            return ()
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        _mount(path, data)
    except PermissionError:
        raise
    except OSError as error:
        raise MountError(f"cannot mount a tmpfs on {path}: {error.strerror}") from error
    return ("this kernel has no huge pages for tmpfs: large files are slower",)


def _mount(path: str, data: str, flags: int = 0) -> None:
    mounting.mount_filesystem("irdmafs", path, "tmpfs", _TMPFS_FLAGS | flags, data)


def resize(path: str, size: int) -> None:
    """Set the size in bytes of a mounted tmpfs. Raises MountError (smaller than its contents)."""
    try:
        _mount(path, f"size={size}", mounting.MS_REMOUNT)
    except OSError as error:
        why = f"{error.strerror} (it holds {_bytes_used(path)})"
        raise MountError(f"cannot resize the store {path} to {size} bytes: {why}") from error


def _is_private_tmpfs(path: str) -> bool:
    return os.path.dirname(path) == TMPFS_ROOT and mounting.find_mount(path) is not None


def explicit_store(directory: str, mountpoint: str, size: int | None = None) -> Store:
    """Return the store that was given by --store; it is created if it does not exist.

    Raises MountError if the directory cannot be a store.
    """
    path = os.path.realpath(mounting.named(directory))
    if os.path.commonpath([path, mountpoint]) in (path, mountpoint):
        raise MountError(f"the store {directory} and the mountpoint must not contain each other")
    refuse_mount(path, directory)
    if size is not None:
        raise MountError(
            f"--size limits the private tmpfs that irdmafs makes; {directory} has the size of the "
            "filesystem that it is on"
        )
    try:
        created = not os.path.lexists(path)
        os.makedirs(path, 0o700, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise MountError(f"the store {directory} is not a directory") from None
    except OSError as error:
        raise MountError(f"cannot use the store {directory}: {_reason(error)}") from error
    warnings: tuple[str, ...] = ()
    if not created:
        warnings = make_fit(path, directory, _ENTRIES)
        wait_until_free(path)
    return Store(path, created, warnings)


def refuse_mount(path: str, name: str) -> None:
    """Raise MountError for a store on a mount of irdmafs: the two would wait for each other."""
    below = mounting.containing_mount(path)
    if below is not None and below.fstype == mounting.FSTYPE:
        raise MountError(f"the store {name} is on an irdmafs mount; it needs memory or a disk")


def _reason(error: OSError) -> str:
    if error.errno == errno.EROFS:
        return "its filesystem is read-only, and a store is written to, also with -o ro"
    return error.strerror or str(error)


def make_fit(path: str, name: str, own: re.Pattern[str]) -> tuple[str, ...]:
    """Check that an existing directory is a store with `own` files of this user and root, or empty, take
    write permission from other users, and return warnings. Raises MountError."""
    try:
        status = os.stat(path)
        entries = [*os.scandir(path)]
        if os.statvfs(path).f_flag & os.ST_RDONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        owners = {entry.stat(follow_symlinks=False).st_uid for entry in entries} | {status.st_uid}
        strangers = sorted(owners - {0, os.geteuid()})
    except OSError as error:
        raise MountError(f"cannot use the store {name}: {_reason(error)}") from error
    _refuse_strange_files(path, name, own)
    if strangers:
        raise MountError(
            f"the store {name}, or what is in it, belongs to user {strangers[0]}, who could change it; "
            "take a directory of your own"
        )
    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        os.chmod(path, stat.S_IMODE(status.st_mode) & ~0o022)
        return (f"other users could write to the store {name}; they cannot any more",)
    return ()


def _refuse_strange_files(path: str, name: str, own: re.Pattern[str]) -> None:
    """Raise MountError if a directory that is no store yet holds other files than `own` ones."""
    strange = sorted(entry for entry in os.listdir(path) if not own.fullmatch(entry))
    if strange and purpose_of(path) is None:
        some = ", ".join(strange[:3]) + (", ..." if len(strange) > 3 else "")
        raise MountError(
            f"the store {name} holds other files already ({some}): a store keeps contents under names "
            "of its own; take an empty or a new directory (and copy the files into the mount)"
        )


def purpose_of(path: str) -> Purpose | None:
    """Return the purpose of a directory; None: it has none so far."""
    return next((use for name, use in _PURPOSES if os.path.lexists(os.path.join(path, name))), None)


def cluster_of(path: str) -> str | None:
    """Return the configuration of the cluster whose files a directory caches; None: it is no cache."""
    return read_note(path, _CLUSTER_FILE)


def refuse_other_purpose(path: str, purpose: Purpose) -> None:
    """Raise MountError if the directory keeps contents that this purpose would destroy."""
    found = purpose_of(path)
    if found is None or found == purpose:
        return
    if found == "cache" and purpose == "mount":
        # A cache could be replaced, but --cluster may just have been forgotten.
        file = cluster_of(path) or "FILE"
        raise MountError(
            f"{path} is the cache of a cluster's mount; mount it with --cluster {file}, or "
            f"take it for files of this host after: {_discarding(path)}"
        )
    remedy = "take another directory"
    if found == "mount":
        remedy += f", or throw away what it keeps with: {_discarding(path)}"
    raise MountError(f"{path} is in use as the store of {_OWNERS[found]}; {remedy}")


def _discarding(path: str) -> str:
    return f"irdmafs umount --discard --store {shlex.quote(path)}"


def claim(path: str, mountpoint: str, config: str | None) -> None:
    """Record the mount whose store a directory is: one without a cluster, or one of the cluster that this
    file describes. Its cache is emptied: files that an earlier mount cached are fetched again when they are
    opened. Raises MountError where that would destroy contents."""
    refuse_other_purpose(path, "mount" if config is None else "cache")
    write_note(path, MOUNTPOINT_FILE, mountpoint)
    # If it is in use, the daemon's error says by whom.
    if config is not None and not is_locked(path):
        empty_cache(path)
        write_note(path, _CLUSTER_FILE, config)


def empty_cache(path: str) -> None:
    """Remove the contents of a cache, unless a daemon uses it."""
    with kept_free(path) as is_free:
        if is_free and cluster_of(path) is not None:
            shutil.rmtree(os.path.join(path, "extents"), ignore_errors=True)


def default_store_path(mountpoint: str) -> str | None:
    """Return the path of the default store of a mountpoint, if there is one."""
    name = store_name(mountpoint)
    paths = (os.path.join(parent, name) for parent in (TMPFS_ROOT, _shm_directory()))
    return next(filter(os.path.isdir, paths), None)


def discard_given_store(directory: str) -> None:
    """Discard the store in a directory that a user named. Raises MountError as discard_store does, and if
    the directory is not the store or the cache of a mount."""
    path = os.path.realpath(mounting.named(directory))
    purpose = purpose_of(path)
    if purpose == "node":
        raise MountError(f"{directory} is the store of {_OWNERS[purpose]}: irdmafs cluster drain")
    if purpose is None:
        raise MountError(f"{directory} is not the store of a mount: nothing is discarded")
    discard_store(path)


def discard_store(path: str) -> None:
    """Remove a store with everything in it. In a directory that was given by --store, files that are not
    the store's are left. Raises MountError if a daemon still uses it."""
    wait_until_free(path)
    try:
        with kept_free(path) as is_free:
            if not is_free:
                raise MountError(f"the store {path} is in use again: a mount of it has begun")
            if _is_private_tmpfs(path):
                mounting.unmount_filesystem(path, mounting.MNT_DETACH)
            else:
                _remove_entries(path)
        os.rmdir(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
            raise MountError(f"cannot discard the store {path}: {error.strerror}") from error


def _remove_entries(path: str) -> None:
    for entry in os.scandir(path):
        if not _ENTRIES.fullmatch(entry.name):
            continue
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


def _bytes_used(path: str) -> int:
    return sum(
        os.lstat(os.path.join(directory, name)).st_blocks * 512
        for directory, _, names in os.walk(path)
        for name in names
    )


def leftover_stores(mountpoints: Iterable[str]) -> list[LeftoverStore]:
    """Return the default stores that belong to none of these mountpoints and to no daemon."""
    used = {store_name(mountpoint) for mountpoint in mountpoints}
    found = []
    for parent in (TMPFS_ROOT, _shm_directory()):
        for path in map(str, sorted(Path(parent).glob("*"))):
            if os.path.basename(path) in used or not os.path.isdir(path) or is_locked(path):
                continue
            with suppress(OSError):
                kept = path if cluster_of(path) is None else os.path.join(path, "extents")
                if os.listdir(kept):
                    found.append(LeftoverStore(path, mountpoint_of(path), _bytes_used(path)))
    return found
