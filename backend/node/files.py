"""A store node's extents: one file each, immutable once it is sealed.

An extent comes into being by a rename into STORE/extents, so every file there is whole. Its file may be
used for another extent later (incoming.py tells when).
"""

import errno
import itertools
import logging
import os
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import NamedTuple, Self

import trio

from ..files.digest import digest_at_rest
from ..files.extents import OWN_FILE, StoreInUse, copy_all, look_for_room
from ..files.sparse import allocated_bytes
from ..model.records import session_of
from ..observe.figures import count, gauge
from ..transport import Extent
from ..transport.verbs.rdma import Choice, Rdma
from ..unwrap import if_it_fails
from .directory import (
    KEPT_IN_MEMORY_S,
    KEPT_ON_DISK_S,
    Quarantine,
    StoreDirectory,
    extent_name,
    parsed_name,
)
from .identity import Identity
from .incoming import SPARE_BYTES_MIN, Held, Incoming, IncomingFiles, StoredFile

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


@dataclass(slots=True)
class FileFigures:
    """The files of extents."""

    created_files: int = count("Files made for extents")
    reused_files: int = count("Files of superseded extents that were used for new ones")
    store_bytes: int = gauge("Bytes of extents kept")
    store_free_bytes: int = gauge("Bytes free in the store directory")
    extents: int = gauge("Extents kept")


class Files:
    """An open store directory, with at most `limit_bytes` of extents. Extents that nothing names are kept
    for `quarantine_s` (None: the default). `rdma` tells which files are mapped. Use as a context manager.

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
        self.rdma = rdma or Rdma(Choice("off"))
        self._created = 0
        self._files: dict[Extent, StoredFile] = {}  # of sealed extents
        self._copying: dict[Extent, trio.Event] = {}
        place = self.place = StoreDirectory(directory)
        with if_it_fails(place.close):
            self.power_safe = place.power_safe
            if quarantine_s is None:
                quarantine_s = KEPT_ON_DISK_S if self.power_safe else KEPT_IN_MEMORY_S
            self.quarantine = Quarantine(place.quarantine, quarantine_s)
            self.identity = Identity(place)
            self.node = self.identity.node
            if self.identity.is_new:
                self._forget_strays()
                self.identity.save()
            self.incoming = IncomingFiles(place, self.rdma)
            self._scan()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.incoming.give_up_spares()
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
        for entry in os.scandir(self.place.extents):
            extent = parsed_name(entry.name)
            if extent is None or not entry.is_file(follow_symlinks=False):
                log.warning("%s is not an extent and is passed over", entry.path)
                continue
            self._find(extent, entry.stat(follow_symlinks=False))

    def figures(self) -> FileFigures:
        space = self.space()
        return FileFigures(self._created, self.incoming.reused, space.used, space.free, len(self))

    # -- what is here ----------------------------------------------------------------------------

    def newest_session(self) -> int:
        """Return the newest session that wrote an extent here, 0 if there is none."""
        kept = itertools.chain(self, self.quarantine)
        return max((session_of(extent.content) for extent in kept), default=0)

    def __contains__(self, extent: Extent) -> bool:
        return extent in self._files

    def __iter__(self) -> Iterator[Extent]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def size(self, extent: Extent) -> int | None:
        """Return the bytes of a sealed extent, None if it is not here."""
        file = self._files.get(extent)
        return file.length if file is not None else None

    def hold(self, extent: Extent, *, damaged: bool = False) -> Held:
        """Open a sealed extent for reading. Its bytes stay even if the extent is freed, until it is closed
        or, if it is lent, for ever. For any thread. Raises OSError: ENOENT if it is not here, or, unless it
        may be `damaged`, has another length than it should have; EMFILE."""
        file = self._file(extent)
        fd = os.open(extent_name(extent), os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.place.extents)
        if not damaged and os.fstat(fd).st_size != file.length:
            os.close(fd)
            raise _missing(extent)
        return Held(fd, file)

    async def digest(self, extent: Extent) -> bytes:
        """Return the digest of the bytes that are here. Raises OSError: ENOENT."""
        with closing(self.hold(extent, damaged=True)) as held:
            return await digest_at_rest(held.fd, held.file.length)

    def _file(self, extent: Extent) -> StoredFile:
        """Return the file of a sealed extent. Raises FileNotFoundError."""
        file = self._files.get(extent)
        if file is None:
            raise _missing(extent)
        return file

    def space(self) -> Space:
        status = os.fstatvfs(self.place.extents)
        total = status.f_blocks * status.f_frsize
        spare = self.incoming.spare_bytes + self.quarantine.bytes
        free = min(total, status.f_bavail * status.f_frsize + spare)
        if self._limit_bytes is not None:
            total = min(total, self._limit_bytes)
            free = min(free, max(0, self._limit_bytes - self._taken() + spare))
        return Space(self.used_bytes, total, free)

    # -- coming ----------------------------------------------------------------------------------

    async def make(self, length: int, allocated: int) -> Incoming:
        """Return a file as `create` does, or one of exactly this length that was another extent's, and has
        that one's bytes. Raises OSError ENOSPC."""
        if allocated == length and (spare := self.incoming.take_spare(length)) is not None:
            return spare
        if allocated < length or length <= _AT_ONCE_BYTES:
            return self.create(length, allocated)
        return await trio.to_thread.run_sync(self.create, length)

    def create(self, length: int, allocated: int | None = None) -> Incoming:
        """Make a file with room for `length` bytes, or a hole with so many reserved. For any thread.

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
        file = self._file(source)
        if file.length != length:
            raise _missing(source)
        file.is_reusable = False
        return self.incoming.open_shared(self._other_name(source), is_own=file.is_own)

    async def harden(self, incoming: Incoming) -> None:
        """Make the bytes survive a power loss, if the store is on a disk."""
        if self.power_safe:
            await trio.to_thread.run_sync(os.fsync, incoming.fd)

    def seal(self, incoming: Incoming, extent: Extent) -> None:
        """Make an extent of a file whose bytes are complete and hardened. On a disk, call `settle` before
        anybody relies on it. Raises EEXIST if the extent is here: a sealed one is never replaced."""
        if extent in self._files:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), extent_name(extent))
        status = os.fstat(incoming.fd)
        self.incoming.move_out(incoming, extent_name(extent), self.place.extents)
        self._count_in(extent, incoming.file, status)

    def replace(self, incoming: Incoming, extent: Extent) -> None:
        """Seal as `seal` does, in place of an extent that is here: one that has turned out to be damaged,
        or the same bytes in another file. The next `reap` gives the memory of the former file back."""
        status = os.fstat(incoming.fd)
        with suppress(FileNotFoundError):
            self.incoming.condemn(self._other_name(extent))
        before = self._files[extent]
        # Before the new file can be opened, as its user marks it if it is lent.
        self._files[extent] = incoming.file
        try:
            self.incoming.move_out(incoming, extent_name(extent), self.place.extents)
        except OSError:
            self._files[extent] = before
            raise
        self.used_bytes -= before.taken
        self._count_in(extent, incoming.file, status)

    def _other_name(self, extent: Extent) -> str:
        """Give the file of an extent another name, in incoming/. Raises FileNotFoundError."""
        name, place = self.incoming.new_name(), self.place
        os.link(extent_name(extent), name, src_dir_fd=place.extents, dst_dir_fd=place.incoming)
        return name

    async def make_own(self, extent: Extent) -> None:
        """Put a copy in the place of an extent that lies in the file of an application, without holes; once
        only, however many ask for it. Where there is no room for it nothing changes.

        Such a file is another one for each version, and the program may still have it open for writing, so
        it cannot stay registered for RDMA: each read of it would register it anew (0.5 ms per MiB with
        soft-RoCE). The copy is in a file that is used again, and is registered already (0.35 ms per MiB).
        """
        while (copied := self._copying.get(extent)) is not None:
            await copied.wait()
        if not self._is_foreign(extent):
            return
        done = self._copying[extent] = trio.Event()
        try:
            with closing(self.hold(extent)) as source:
                length = source.file.length
                with closing(await self.make(length, length)) as incoming:
                    await trio.to_thread.run_sync(copy_all, source.fd, incoming.fd)
                    await self.harden(incoming)
                    if self._is_foreign(extent):
                        self.replace(incoming, extent)
            await self.settle()
        except OSError as error:
            log.info("extent %s stays in its file: %s", extent_name(extent), error)
        finally:
            del self._copying[extent]
            done.set()

    def _is_foreign(self, extent: Extent) -> bool:
        file = self._files.get(extent)
        if file is None or file.is_own or file.length < SPARE_BYTES_MIN:
            return False
        return file.taken == file.length

    async def settle(self) -> None:
        """Make sealed names survive a power loss, if the store is on a disk."""
        if self.power_safe:
            await trio.to_thread.run_sync(os.fsync, self.place.extents)

    # -- going -----------------------------------------------------------------------------------

    def free(self, extent: Extent) -> None:
        """Remove an extent at once. Its file is kept as a spare, or its memory goes with the next `reap`
        (at once if it is small), or with its last descriptor. One that is not here is no error."""
        file, place = self._count_out(extent), self.place
        if file is None:
            return
        old = extent_name(extent)
        try:
            if file.length <= _AT_ONCE_BYTES and not file.is_reusable:
                look_for_room(self.directory)
                os.unlink(old, dir_fd=place.extents)
                return
            name = self.incoming.new_name()
            os.rename(old, name, src_dir_fd=place.extents, dst_dir_fd=place.incoming)
        except FileNotFoundError:
            log.warning("extent %s vanished from the store", old)
            return
        space = self.space()
        self.incoming.let_go(file, name, space.total, space.free - self.incoming.spare_bytes)

    def set_aside(self, extent: Extent) -> None:
        """Put an extent into quarantine. One that is not here is no error."""
        file = self._count_out(extent)
        if file is None:
            return
        try:
            self.quarantine.take_in(extent, file.length, self.place.extents)
        except FileNotFoundError:
            log.warning("extent %s vanished from the store", extent_name(extent))

    def bring_back(self, extent: Extent) -> None:
        """Take an extent out of quarantine. Raises FileNotFoundError."""
        self.quarantine.move_out(extent, extent_name(extent), self.place.extents)
        self._find(extent, os.stat(extent_name(extent), dir_fd=self.place.extents))

    def tidy_quarantine(self, wanted_bytes: int = 0) -> int:
        """Remove what has been in quarantine for long enough, and the oldest if the store has little room
        or `wanted_bytes` are wanted. Their memory goes with the next `reap`. Return how many went."""
        if not len(self.quarantine):
            return 0
        space = self.space()
        really_free = space.free - self.incoming.spare_bytes - self.quarantine.bytes
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

    async def give_back(self) -> None:
        """Give back the memory of freed extents, and of those that only ended mounts held."""
        await trio.to_thread.run_sync(self.reap)
        self.rdma.drop_orphans()

    def reap(self) -> None:
        """Give back memory as `give_back` does, except files that are mapped for RDMA. For any thread."""
        self.place.forget_ended_mounts()
        self.incoming.reap()

    def _find(self, extent: Extent, status: os.stat_result) -> None:
        """Count in an extent that was sealed before. Somebody may refer to its pages."""
        is_own = bool(status.st_mode & OWN_FILE)
        file = StoredFile(extent_name(extent), status.st_size, is_own=is_own)
        self._count_in(extent, file, status)

    def _count_in(self, extent: Extent, file: StoredFile, status: os.stat_result) -> None:
        file.length = status.st_size
        file.taken = allocated_bytes(status.st_size, status.st_blocks)
        self._files[extent] = file
        self.used_bytes += file.taken

    def _count_out(self, extent: Extent) -> StoredFile | None:
        """Take an extent out of the counts, and return its file, None if it is not here."""
        file = self._files.pop(extent, None)
        if file is not None:
            self.used_bytes -= file.taken
        return file

    def _taken(self) -> int:
        kept = self.used_bytes + self.incoming.spare_bytes + self.quarantine.bytes
        return kept + self.incoming.reserved_bytes


def _missing(extent: Extent) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), extent_name(extent))
