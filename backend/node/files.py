"""A store node's extents: one file each, immutable once it is sealed.

An extent comes into being by a rename into STORE/extents, so every file there is whole. Its file may be
used for another extent later (reuse.py tells when).
"""

import errno
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple, Self

import trio

from ..files.sparse import allocated_bytes
from ..files.storedir import OWN_FILE, StoreInUse
from ..transport import Extent
from ..transport.verbs.rdma import Choice, Rdma
from .directory import StoreDirectory
from .figures import FileFigures
from .identity import Identity
from .incoming import Held, Incoming, IncomingFiles, StoredFile
from .quarantine import (
    KEPT_IN_MEMORY_S,
    KEPT_ON_DISK_S,
    Quarantine,
    extent_name,
    parsed_name,
)
from .reuse import SPARE_BYTES_MIN, Spares

__all__ = ["Files", "Held", "Incoming", "Space", "StoreInUse"]

log = logging.getLogger(__name__)

# A file of at most this size is made and removed at once, as that takes no time.
_AT_ONCE_BYTES = 1 << 20
# With less free room than this share of the store, the oldest in quarantine are removed: working copies of
# mounts on this host need room at once.
_QUARANTINE_ROOM_SHARE = 1 / 8


class Space(NamedTuple):
    """Sizes in bytes. `used` is what extents take, `total` and `free` are the filesystem's or the limit's;
    spare files and the quarantine count as free."""

    used: int
    total: int
    free: int


class Files:
    """An open store directory, with at most `limit_bytes` of extents. Extents that nothing names are kept
    for `quarantine_s` (None: the default of a disk, or of memory). `rdma` keeps files mapped, and can tell
    which. Use as a context manager.

    Methods are for the event loop except where they say otherwise. Raises StoreInUse when another
    process has it open and kv.Damaged when node.json makes no sense.
    """

    def __init__(
        self,
        directory: str,
        limit_bytes: int | None = None,
        quarantine_s: float | None = None,
        rdma: Rdma | None = None,
    ) -> None:
        self.directory = directory
        self.used_bytes = 0
        self._limit_bytes = limit_bytes
        self._rdma = rdma or Rdma(Choice("off"))
        self._created = 0
        self._sizes: dict[Extent, int] = {}
        self._holes: dict[Extent, int] = {}  # bytes in holes, of extents that have any
        self._named: set[Extent] = set()
        # Extents made by an application on this host, which may have their files open for writing.
        self._foreign: set[Extent] = set()
        self._made: dict[Extent, StoredFile] = {}  # made by this process
        place = self.place = StoreDirectory(directory)
        try:
            self.power_safe = place.power_safe
            usual_s = KEPT_ON_DISK_S if self.power_safe else KEPT_IN_MEMORY_S
            self.quarantine = Quarantine(
                place.quarantine, usual_s if quarantine_s is None else quarantine_s
            )
            self.identity = Identity(place)
            self.node = self.identity.node
            if self.identity.is_new:
                self._forget_strays()
                self.identity.save()
            self.incoming = IncomingFiles(place.incoming, directory, self._rdma)
            self.spares = Spares(place, self.incoming, self._rdma)
            self._scan()
        except BaseException:
            place.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.spares.give_up()
        self.reap()
        self.place.close()

    def _forget_strays(self) -> None:
        if os.listdir(self.place.extents):
            log.warning(
                "%s: node.json is gone, so this is a new node; the extents of the former one are put into "
                "quarantine",
                self.directory,
            )
        for entry in os.scandir(self.place.extents):
            extent = parsed_name(entry.name)
            if extent is not None:
                self.quarantine.take_in(extent, entry.stat().st_size, self.place.extents)

    def _scan(self) -> None:
        """Find sealed extents. Their files are never reused, lent or not."""
        for name in os.listdir(self.place.lent):
            os.unlink(name, dir_fd=self.place.lent)
        for entry in os.scandir(self.place.extents):
            extent = parsed_name(entry.name)
            if extent is None or not entry.is_file(follow_symlinks=False):
                log.warning("%s is not an extent and is passed over", entry.path)
                continue
            status = entry.stat(follow_symlinks=False)
            self._count_in(extent, status)
            # A mark on a file of several names may be another extent's.
            if not status.st_mode & stat.S_IWUSR and status.st_nlink == 1:
                self._named.add(extent)
            if not status.st_mode & OWN_FILE:
                self._foreign.add(extent)

    def figures(self) -> FileFigures:
        space = self.space()
        return FileFigures(self._created, self.spares.reused, space.used, space.free, len(self))

    # -- what is here ----------------------------------------------------------------------------

    def __contains__(self, extent: Extent) -> bool:
        return extent in self._sizes

    def __iter__(self) -> Iterator[Extent]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def size(self, extent: Extent) -> int | None:
        """Return the bytes of a sealed extent, None if it is not here."""
        return self._sizes.get(extent)

    def open(self, extent: Extent) -> int:
        """Open a sealed extent for reading, and return the descriptor, which the caller closes. Its bytes
        stay even if the extent is freed: the file is lent. Raises OSError ENOENT, EMFILE."""
        file = self._made.get(extent)
        if file is not None:
            # Before it is opened, as this may run in a thread (compare the names in lent/).
            file.is_lent = True
        return self._open(extent)

    def hold(self, extent: Extent) -> Held:
        """Open an extent as `open` does, for a user that keeps no reference to its pages. For the event
        loop."""
        return Held(self._open(extent), self._made.get(extent), extent not in self._foreign)

    def _open(self, extent: Extent) -> int:
        if extent not in self._sizes:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), extent_name(extent))
        return os.open(extent_name(extent), os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.place.extents)

    def space(self) -> Space:
        status = os.fstatvfs(self.place.extents)
        total = status.f_blocks * status.f_frsize
        spare = self.spares.bytes + self.quarantine.bytes
        free = min(total, status.f_bavail * status.f_frsize + spare)
        if self._limit_bytes is not None:
            total = min(total, self._limit_bytes)
            free = min(free, max(0, self._limit_bytes - self._taken() + spare))
        return Space(self.used_bytes, total, free)

    # -- coming ----------------------------------------------------------------------------------

    async def make(self, length: int, allocated: int) -> Incoming:
        """Return a file as `create` does, or one of exactly this length that was another extent's, and has
        that one's bytes. Raises OSError ENOSPC."""
        if allocated == length and (spare := self.spares.take(length)) is not None:
            return spare
        if allocated < length or length <= _AT_ONCE_BYTES:
            return self.create(length, allocated)
        return await trio.to_thread.run_sync(self.create, length)

    def create(self, length: int, allocated: int | None = None) -> Incoming:
        """Make a file of `length` bytes with room for them, or a hole for which so many bytes are reserved.
        For any thread.

        Raises OSError: ENOSPC; no file is left then.
        """
        if allocated is None:
            allocated = length
        if self._limit_bytes is not None and self._taken() + allocated > self._limit_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.directory)
        incoming = self.incoming.create(length, allocated)
        self._created += 1
        return incoming

    def share(self, source: Extent, length: int) -> Incoming:
        """Give the file of a sealed extent of `length` bytes another name, under which it becomes another
        extent. Neither of them leaves it to a third one later. Raises OSError ENOENT."""
        if self._sizes.get(source) != length:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), extent_name(source))
        made = self._made.get(source)
        if made is not None:
            made.is_lent = True
        name = self._other_name(source)
        return self.incoming.open_shared(name, is_own=source not in self._foreign)

    def harden(self, incoming: Incoming) -> None:
        """Make the bytes survive a power loss, if the store is on a disk. For a worker thread."""
        if self.power_safe:
            os.fsync(incoming.fd)

    def seal(self, incoming: Incoming, extent: Extent) -> None:
        """Make an extent of a file whose bytes are complete and hardened. On a disk, call `settle` before
        anybody relies on it. Raises OSError EEXIST if the extent is here: a sealed extent is never
        replaced."""
        if extent in self._sizes:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), extent_name(extent))
        self._put_in_place(incoming, extent)

    def _put_in_place(self, incoming: Incoming, extent: Extent) -> None:
        status = os.fstat(incoming.fd)
        self._forget(extent)
        if incoming.file is None:
            self._foreign.add(extent)
        else:
            # Before the extent can be opened, as `open` marks the file.
            self._made[extent] = incoming.file
        try:
            self.incoming.move_out(incoming, extent_name(extent), self.place.extents)
        except OSError:
            self._made.pop(extent, None)
            raise
        self._count_out(extent)
        self._count_in(extent, status)
        self._named.discard(extent)

    def replace(self, incoming: Incoming, extent: Extent) -> None:
        """Seal as `seal` does, in place of an extent that is here: one that has turned out to be damaged,
        or the same bytes in another file. The next `reap` gives the memory of the former file back."""
        with suppress(FileNotFoundError):
            self.incoming.condemn(self._other_name(extent))
        self._put_in_place(incoming, extent)

    def _other_name(self, extent: Extent) -> str:
        """Give the file of an extent another name, in incoming/. Raises FileNotFoundError."""
        name, place = self.incoming.new_name(), self.place
        os.link(extent_name(extent), name, src_dir_fd=place.extents, dst_dir_fd=place.incoming)
        return name

    def is_foreign(self, extent: Extent) -> bool:
        """Return whether an extent lies in a file that an application made, without holes."""
        return extent in self._foreign and extent not in self._holes

    def mark_named(self, extent: Extent) -> None:
        """Remember, across restarts, that an inode named this extent: if none does any more, it is
        superseded, while one without the mark may still be published. Costs 2 us, once."""
        if extent in self._sizes and extent not in self._named:
            self._named.add(extent)
            try:
                own = 0 if extent in self._foreign else OWN_FILE
                os.chmod(extent_name(extent), 0o400 | own, dir_fd=self.place.extents)
            except FileNotFoundError:
                log.error("extent %s vanished from the store", extent_name(extent))
                self.free(extent)

    def was_named(self, extent: Extent) -> bool:
        return extent in self._named

    def settle(self) -> None:
        """Make sealed names survive a power loss, if the store is on a disk. For a worker thread."""
        if self.power_safe:
            os.fsync(self.place.extents)

    # -- going -----------------------------------------------------------------------------------

    def free(self, extent: Extent) -> None:
        """Remove an extent at once. Its file is kept as a spare, or its memory goes with the next `reap`
        (at once if it is small), or when the last descriptor is closed. One that is not here is no
        error."""
        size = self._count_out(extent)
        if size is None:
            return
        self._named.discard(extent)
        file = self._made.get(extent)
        if file is not None and (size < SPARE_BYTES_MIN or size != file.length):
            file = None
        try:
            if file is None and size <= _AT_ONCE_BYTES:
                os.unlink(extent_name(extent), dir_fd=self.place.extents)
                self._forget(extent)
                return
            name = self.incoming.new_name()
            os.rename(
                extent_name(extent),
                name,
                src_dir_fd=self.place.extents,
                dst_dir_fd=self.place.incoming,
            )
        except FileNotFoundError:
            log.warning("extent %s vanished from the store", extent_name(extent))
            self._forget(extent)
            return
        self._forget_file(extent)
        space = self.space()
        really_free = space.free - self.spares.bytes
        if not self.spares.add(file, name, extent_name(extent), space.total, really_free):
            self.incoming.condemn(name)

    def set_aside(self, extent: Extent) -> None:
        """Put an extent into quarantine. One that is not here is no error."""
        size = self._count_out(extent)
        if size is None:
            return
        self._named.discard(extent)
        try:
            self.quarantine.take_in(extent, size, self.place.extents)
        except FileNotFoundError:
            log.warning("extent %s vanished from the store", extent_name(extent))
        self._forget(extent)

    def bring_back(self, extent: Extent) -> None:
        """Take an extent out of quarantine. Raises FileNotFoundError."""
        self.quarantine.give_back(extent, self.place.extents)
        status = os.stat(extent_name(extent), dir_fd=self.place.extents)
        self._count_in(extent, status)
        if not status.st_mode & OWN_FILE:
            self._foreign.add(extent)

    def tidy_quarantine(self, wanted_bytes: int = 0) -> int:
        """Remove what has been in quarantine for long enough, and the oldest if the store has little room
        or `wanted_bytes` are wanted at once. Their memory goes with the next `reap`. Return how many were
        removed."""
        if not len(self.quarantine):
            return 0
        space = self.space()
        really_free = space.free - self.spares.bytes - self.quarantine.bytes
        short = int(space.total * _QUARANTINE_ROOM_SHARE) - really_free
        due = self.quarantine.due(max(wanted_bytes, short))
        for extent in due:
            name = self.incoming.new_name()
            try:
                self.quarantine.move_out(extent, name, self.place.incoming)
            except FileNotFoundError:
                continue
            self.incoming.condemn(name)
        return len(due)

    def _forget(self, extent: Extent) -> None:
        """Forget the file of an extent that lost it, or is about to, and who had it open."""
        self._forget_file(extent)
        self.spares.forget_borrowers(extent_name(extent))

    def _forget_file(self, extent: Extent) -> None:
        self._made.pop(extent, None)
        self._foreign.discard(extent)

    async def give_back(self) -> None:
        """Give back the memory of freed extents, and of those that only ended mounts held."""
        await trio.to_thread.run_sync(self.reap)
        self._rdma.drop_orphans()

    def reap(self) -> None:
        """Give back memory as `give_back` does, except files that are mapped for RDMA. For any thread."""
        self.place.forget_ended_mounts()
        self.incoming.reap()

    def _count_in(self, extent: Extent, status: os.stat_result) -> None:
        taken = allocated_bytes(status.st_size, status.st_blocks)
        self._sizes[extent] = status.st_size
        self.used_bytes += taken
        if taken < status.st_size:
            self._holes[extent] = status.st_size - taken

    def _count_out(self, extent: Extent) -> int | None:
        """Take an extent out of the counts, and return its length, None if it is not here."""
        size = self._sizes.pop(extent, None)
        if size is not None:
            self.used_bytes -= size - self._holes.pop(extent, 0)
        return size

    def _taken(self) -> int:
        kept = self.used_bytes + self.spares.bytes + self.quarantine.bytes
        return kept + self.incoming.reserved_bytes
