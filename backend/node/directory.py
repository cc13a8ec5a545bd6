"""A store node's directory, where things lie in it, and the extents that it keeps in quarantine.

STORE/node.json             the node's identity, for ever (identity.py)
STORE/scrub.json            the progress of the scrub (scrub.py)
STORE/lock                  one process at a time
STORE/full                  its time is when the store was last found full (files/extents.py)
STORE/extents/CONTENT.STRIPE    sealed extents, numbers in hexadecimal; with the sticky bit if the node made
                            the file itself (files.py)
STORE/incoming/_N           being received, on its way out, or spare (incoming.py)
STORE/incoming/CONTENT      a working copy of a mount on this host, to be adopted
STORE/held/ID/CONTENT       another name of a file that the mount ID on this host needs; it locks ID as long
                            as it lives (store/remote/places.py)
STORE/quarantine/CONTENT.STRIPE     an extent that nothing names, kept for a while
"""

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack

from ..cluster.lease import now_s
from ..files.extents import FULL, in_memory, lock_directory
from ..transport import Extent

log = logging.getLogger(__name__)

# How long extents stay in quarantine. Memory costs more, and ends with its machine.
KEPT_ON_DISK_S = 7 * 86400.0
KEPT_IN_MEMORY_S = 3600.0


class StoreDirectory:
    """A store directory, locked, with a descriptor of each directory in it, until it is closed.

    `power_safe` is whether it lies on a disk. Raises StoreInUse when another process has it open.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        os.makedirs(path, mode=0o700, exist_ok=True)
        with ExitStack() as opened:
            lock = lock_directory(path, "store is in use by another process")
            opened.callback(os.close, lock)
            self.top = _opened(opened, path)
            self.extents = _opened(opened, f"{path}/extents")
            self.incoming = _opened(opened, f"{path}/incoming")
            self.held = _opened(opened, f"{path}/held")
            self.quarantine = _opened(opened, f"{path}/quarantine")
            os.close(os.open(f"{path}/{FULL}", os.O_CREAT | os.O_CLOEXEC, 0o600))
            self.power_safe = not in_memory(path)
            self._opened = opened.pop_all()

    def close(self) -> None:
        self._opened.close()

    def read(self, name: str) -> bytes | None:
        """Return the contents of a small file beside the directories, None if it is not there."""
        try:
            with open(f"{self.path}/{name}", "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes, *, hardened: bool) -> None:
        """Replace such a file; `hardened`: it survives a power loss. For any thread, one at a time each."""
        draft = f"{name}.new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        with open(os.open(draft, flags, 0o600, dir_fd=self.top), "wb") as file:
            file.write(data)
            if hardened:
                file.flush()
                os.fsync(file.fileno())
        os.rename(draft, name, src_dir_fd=self.top, dst_dir_fd=self.top)
        if hardened:
            os.fsync(self.top)

    def forget_ended_mounts(self) -> None:
        """Remove the names in held/ of mounts that have ended. For a worker thread:
        memory of files without another name is freed here."""
        for owner in os.listdir(self.held):
            try:
                fd = os.open(owner, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.held)
            except OSError as error:
                log.debug("held/%s: %s", owner, error)
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for name in os.listdir(fd):
                    os.unlink(name, dir_fd=fd)
                os.rmdir(owner, dir_fd=self.held)
            except BlockingIOError:
                pass  # the mount lives
            finally:
                os.close(fd)


def _opened(stack: ExitStack, path: str) -> int:
    os.makedirs(path, mode=0o700, exist_ok=True)
    os.chmod(path, 0o700)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    stack.callback(os.close, fd)
    return fd


class Quarantine:
    """Extents that are kept although nothing names them, in case that they are needed again. They are in
    the directory `fd`, which stays the caller's, since their time of modification; as long as the node runs
    they get older by its own clock, whatever happens to the time of day.

    The node frees extents that it saw being removed or superseded. An extent that it merely finds without a
    name, at its start or after a gap in the watch, goes into quarantine: etcd may have been restored from a
    backup older than the extent. An extent that is named again goes back. The oldest are removed after
    `kept_s` seconds, and sooner if room is wanted: they count as free.
    """

    def __init__(self, fd: int, kept_s: float) -> None:
        self.kept_s = kept_s
        self.bytes = 0
        self._fd = fd
        # Size, and since when by now_s(); the oldest first.
        self._kept: dict[Extent, tuple[int, float]] = {}
        # The stripes that are here, by content.
        self.stripes: dict[int, set[int]] = {}
        found = []
        for entry in os.scandir(fd):
            extent = parsed_name(entry.name)
            if extent is not None and entry.is_file(follow_symlinks=False):
                status = entry.stat(follow_symlinks=False)
                found.append((status.st_mtime, extent, status.st_size))
        for modified, extent, size in sorted(found):
            self._add(extent, size, now_s() - (time.time() - modified))

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Extent]:
        return iter(self._kept)

    def size(self, extent: Extent) -> int:
        """Return the bytes of an extent that is here."""
        return self._kept[extent][0]

    def take_in(self, extent: Extent, size: int, sealed_fd: int) -> None:
        """Move an extent here from the directory of sealed ones. Raises FileNotFoundError."""
        self._forget(extent)
        name = extent_name(extent)
        os.rename(name, name, src_dir_fd=sealed_fd, dst_dir_fd=self._fd)
        os.utime(name, dir_fd=self._fd)
        self._add(extent, size, now_s())

    def move_out(self, extent: Extent, name: str, to_fd: int) -> None:
        """Move an extent's file elsewhere, as `name`: sealed again, or removed. Raises ENOENT."""
        self._forget(extent)
        os.rename(extent_name(extent), name, src_dir_fd=self._fd, dst_dir_fd=to_fd)

    def due(self, wanted_bytes: int) -> list[Extent]:
        """Return the extents that are here long enough, and the oldest others that free so many bytes."""
        until = now_s() - self.kept_s
        found = []
        for extent, (size, since) in self._kept.items():
            if since > until and wanted_bytes <= 0:
                break
            wanted_bytes -= size
            found.append(extent)
        return found

    def _add(self, extent: Extent, size: int, since: float) -> None:
        self._kept[extent] = size, since
        self.stripes.setdefault(extent.content, set()).add(extent.stripe)
        self.bytes += size

    def _forget(self, extent: Extent) -> None:
        known = self._kept.pop(extent, None)
        if known is not None:
            self.bytes -= known[0]
            stripes = self.stripes[extent.content]
            stripes.discard(extent.stripe)
            if not stripes:
                del self.stripes[extent.content]


def extent_name(extent: Extent) -> str:
    """Return the name of an extent's file."""
    return f"{extent.content:x}.{extent.stripe:x}"


def parsed_name(name: str) -> Extent | None:
    """Return the extent whose file has this name, None if it is no such name."""
    content, dot, stripe = name.partition(".")
    try:
        extent = Extent(int(content, 16), int(stripe, 16))
    except ValueError:
        return None
    return extent if dot and extent_name(extent) == name else None
