"""A store node's directory: one file per extent, immutable once it is there.

    STORE/node.json             which node this is, for ever: {"format": 1, "id": HEX, "cluster": ID,
                                "admitted": whether it has been a member of the cluster}
    STORE/lock                  one process at a time
    STORE/extents/CONTENT.STRIPE    sealed extents, numbers in hexadecimal; mode 0400 once it was named
    STORE/incoming/_N           being received, or on its way out
    STORE/incoming/CONTENT      a working copy of a mount on this host, to be adopted

An extent comes into being by a rename into extents/, so what lies there is whole. Files are never used
again for another extent: one that nobody has open may still have its pages in a socket's send queue or
in a pipe (sendfile and splice, ours or an application's on a mount of this host), and would change what
is sent. What reuse would save is small once a file is allocated beforehand: measured, receiving 1 GiB
into a tmpfs with huge=within_size takes 0.33 s into touched pages, 0.36 s into allocated ones, and 0.41
to 0.98 s into a hole.
"""

import errno
import itertools
import json
import logging
import os
import secrets
import stat
from collections.abc import Iterator
from types import TracebackType
from typing import NamedTuple, Self

from ..kv import Damaged
from ..storedir import StoreInUse, in_memory, lock_directory
from ..transport import Extent

__all__ = ["Files", "Incoming", "Space", "StoreInUse"]

log = logging.getLogger(__name__)

# Removing a large file frees its pages, which takes long (0.1 ms per MiB); it is left to `reap`.
_REMOVED_AT_ONCE_BYTES = 1 << 20
_FORMAT = 1


class Incoming(NamedTuple):
    """A file in incoming/ that is not an extent yet; `fd` is the holder's to close."""

    name: str
    fd: int


class Space(NamedTuple):
    """Bytes. `used` is what extents take, `total` and `free` are the filesystem's or the limit's."""

    used: int
    total: int
    free: int


class Files:
    """An open store directory, at most `limit_bytes` of extents in it. Use as a context manager.

    Methods are for the event loop except where they say otherwise. Raises StoreInUse when another
    process has it open and kv.Damaged when node.json makes no sense.
    """

    def __init__(self, directory: str, limit_bytes: int | None = None) -> None:
        self.directory = directory
        self._limit_bytes = limit_bytes
        self.node = 0
        self.cluster = ""
        self.admitted = False
        self.power_safe = False
        self.used_bytes = 0
        self._sizes: dict[Extent, int] = {}
        self._named: set[Extent] = set()
        self._numbers = itertools.count(1)
        self._receiving: dict[str, int] = {}
        self._condemned: list[str] = []
        self._fds: list[int] = []

    def __enter__(self) -> Self:
        os.makedirs(self.directory, mode=0o700, exist_ok=True)
        try:
            self._fds.append(lock_directory(self.directory, "store is in use by another process"))
            for name in ("", "extents", "incoming"):
                path = f"{self.directory}/{name}"
                os.makedirs(path, mode=0o700, exist_ok=True)
                os.chmod(path, 0o700)
                self._fds.append(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            _, self._top, self._sealed, self._incoming = self._fds
            self.power_safe = not in_memory(self.directory)
            self._load_identity()
            self._scan()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.reap()
        self._close()

    def _close(self) -> None:
        for fd in reversed(self._fds):
            os.close(fd)
        self._fds.clear()

    # -- identity --------------------------------------------------------------------------------

    def bind(self, cluster: str) -> None:
        """Make this a store of the cluster with this id; raises OSError EINVAL if it is another's."""
        if self.cluster == cluster:
            return
        if self.cluster:
            raise OSError(
                errno.EINVAL,
                f"the store belongs to cluster {self.cluster}, not to {cluster}: "
                "use another directory, or empty this one",
                self.directory,
            )
        self.cluster = cluster
        self._save_identity()

    def mark_admitted(self) -> None:
        """Remember that the cluster knows this node: if one day it does not, the node was removed."""
        if not self.admitted:
            self.admitted = True
            self._save_identity()

    def _load_identity(self) -> None:
        path = f"{self.directory}/node.json"
        try:
            with open(path, "rb") as file:
                text = file.read(4096)
        except FileNotFoundError:
            if os.listdir(self._sealed):
                log.warning("%s is gone: the extents beside it belong to nobody and go", path)
                for name in os.listdir(self._sealed):
                    os.unlink(name, dir_fd=self._sealed)
            self.node = secrets.randbelow((1 << 63) - 1) + 1
            self._save_identity()
            return
        try:
            record = json.loads(text)
            if record["format"] != _FORMAT:
                raise ValueError(f"format {record['format']} is not known to this version")
            self.node, self.cluster = int(record["id"], 16), str(record["cluster"])
            self.admitted = bool(record.get("admitted", False))
            if not 0 < self.node < 1 << 63:
                raise ValueError("the node id is out of range")
        except (KeyError, TypeError, ValueError) as error:
            raise Damaged(
                f"{path} is damaged ({error}); remove the store directory to begin as a new node"
            ) from None

    def _save_identity(self) -> None:
        record = {
            "format": _FORMAT,
            "id": f"{self.node:x}",
            "cluster": self.cluster,
            "admitted": self.admitted,
        }
        fd = os.open(
            "node.json.new",
            os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC,
            0o600,
            dir_fd=self._top,
        )
        try:
            os.write(fd, json.dumps(record).encode() + b"\n")
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename("node.json.new", "node.json", src_dir_fd=self._top, dst_dir_fd=self._top)
        os.fsync(self._top)

    def _scan(self) -> None:
        """Find sealed extents; what was being received or removed when the last process ended goes."""
        for entry in os.scandir(self._incoming):
            if working_copy(entry.name) is None:
                os.unlink(entry.name, dir_fd=self._incoming)
        for entry in os.scandir(self._sealed):
            extent = _parsed(entry.name)
            if extent is None or not entry.is_file(follow_symlinks=False):
                log.warning("%s is not an extent and is passed over", entry.path)
                continue
            status = entry.stat(follow_symlinks=False)
            self._sizes[extent] = status.st_size
            self.used_bytes += status.st_size
            if not status.st_mode & stat.S_IWUSR:
                self._named.add(extent)

    # -- what is here ----------------------------------------------------------------------------

    def __contains__(self, extent: Extent) -> bool:
        return extent in self._sizes

    def __iter__(self) -> Iterator[Extent]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def size(self, extent: Extent) -> int | None:
        """Bytes of a sealed extent; None: it is not here."""
        return self._sizes.get(extent)

    def open(self, extent: Extent) -> int:
        """A read-only descriptor of a sealed extent, the caller's to close; what it reads stays even
        if the extent is freed. Raises OSError ENOENT, EMFILE."""
        if extent not in self._sizes:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), _name(extent))
        return os.open(_name(extent), os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._sealed)

    def space(self) -> Space:
        status = os.fstatvfs(self._sealed)
        total, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
        if self._limit_bytes is not None:
            total = min(total, self._limit_bytes)
            free = min(free, max(0, self._limit_bytes - self._taken()))
        return Space(self.used_bytes, total, free)

    def working_copies(self) -> dict[str, int]:
        """Names and content numbers of what mounts on this host are writing."""
        found = {}
        for name in os.listdir(self._incoming):
            content = working_copy(name)
            if content is not None:
                found[name] = content
        return found

    # -- coming ----------------------------------------------------------------------------------

    def create(self, length: int) -> Incoming:
        """A file of `length` bytes that has its room already. May be called in any thread, as it takes
        a while for a large one (0.2 ms per MiB of small pages).

        Raises OSError: ENOSPC, and nothing is left of it.
        """
        if self._limit_bytes is not None and self._taken() + length > self._limit_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.directory)
        name = self._new_name()
        fd = os.open(
            name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self._incoming
        )
        self._receiving[name] = length
        try:
            if length:
                os.posix_fallocate(fd, 0, length)
        except BaseException:
            os.close(fd)
            self.remove(name)
            raise
        return Incoming(name, fd)

    def take_over(self, name: str, content: int) -> Incoming:
        """The working copy that a mount on this host made in incoming/ for this content.

        Raises OSError: ENOENT (it is not there), EPERM (it is not what a mount makes).
        """
        if working_copy(name) != content:
            raise PermissionError(errno.EPERM, f"{name!r} does not name content {content:x}")
        fd = os.open(
            name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._incoming
        )
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in (0, os.geteuid()):
            os.close(fd)
            raise PermissionError(errno.EPERM, "not a mount's working copy", name)
        return Incoming(name, fd)

    def harden(self, incoming: Incoming) -> None:
        """Make the bytes survive a power loss, if the store is on a disk. For a worker thread."""
        if self.power_safe:
            os.fsync(incoming.fd)

    def seal(self, incoming: Incoming, extent: Extent) -> None:
        """Its bytes are complete and hardened: from now on it is an extent. On a disk, `settle` before
        anybody relies on it."""
        size = os.fstat(incoming.fd).st_size
        self._receiving.pop(incoming.name, None)
        os.rename(incoming.name, _name(extent), src_dir_fd=self._incoming, dst_dir_fd=self._sealed)
        # The same extent may come twice, with the same bytes: who reads the first has its file.
        self.used_bytes += size - self._sizes.get(extent, 0)
        self._sizes[extent] = size
        self._named.discard(extent)

    def mark_named(self, extent: Extent) -> None:
        """Remember, over a restart, that an inode named this extent: if none does any more, it has been
        superseded, while one without the mark may still be published. Costs 2 us, once."""
        if extent in self._sizes and extent not in self._named:
            self._named.add(extent)
            try:
                os.chmod(_name(extent), 0o400, dir_fd=self._sealed)
            except FileNotFoundError:
                log.error("extent %s vanished from the store", _name(extent))
                self.free(extent)

    def was_named(self, extent: Extent) -> bool:
        return extent in self._named

    def settle(self) -> None:
        """Make sealed names survive a power loss, if the store is on a disk. For a worker thread."""
        if self.power_safe:
            os.fsync(self._sealed)

    def discard(self, incoming: Incoming) -> None:
        """It will not become an extent. A working copy stays its mount's."""
        if working_copy(incoming.name) is None:
            self.remove(incoming.name)

    def remove(self, name: str) -> None:
        """Remove a file of incoming/; one that is not there is no error. For any thread."""
        self._receiving.pop(name, None)
        try:
            os.unlink(name, dir_fd=self._incoming)
        except FileNotFoundError:
            pass

    # -- going -----------------------------------------------------------------------------------

    def free(self, extent: Extent) -> None:
        """Remove an extent at once; the memory of a large one goes with the next `reap`, or when the
        last open file of it is closed. One that is not here is no error."""
        size = self._sizes.pop(extent, None)
        if size is None:
            return
        self._named.discard(extent)
        self.used_bytes -= size
        try:
            if size <= _REMOVED_AT_ONCE_BYTES:
                os.unlink(_name(extent), dir_fd=self._sealed)
                return
            name = self._new_name()
            os.rename(_name(extent), name, src_dir_fd=self._sealed, dst_dir_fd=self._incoming)
            self._condemned.append(name)
        except FileNotFoundError:
            log.warning("extent %s vanished from the store", _name(extent))

    @property
    def has_condemned(self) -> bool:
        return bool(self._condemned)

    def reap(self) -> int:
        """Give back the memory of freed extents; returns how many. May be called in any thread."""
        done = 0
        while True:
            try:
                name = self._condemned.pop()
            except IndexError:
                return done
            self.remove(name)
            done += 1

    def _taken(self) -> int:
        return self.used_bytes + sum(list(self._receiving.values()))

    def _new_name(self) -> str:
        return f"_{next(self._numbers):x}"


def _name(extent: Extent) -> str:
    return f"{extent.content:x}.{extent.stripe:x}"


def _parsed(name: str) -> Extent | None:
    content, dot, stripe = name.partition(".")
    try:
        extent = Extent(int(content, 16), int(stripe, 16))
    except ValueError:
        return None
    return extent if dot and _name(extent) == name else None


def working_copy(name: str) -> int | None:
    """The content that a file in incoming/ is a mount's working copy of; None: it is ours."""
    try:
        content = int(name, 16)
    except ValueError:
        return None
    return content if f"{content:x}" == name else None
