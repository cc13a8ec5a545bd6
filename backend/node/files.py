"""A store node's directory: one file per extent, immutable once it is there.

    STORE/node.json             which node this is, for ever (identity.py)
    STORE/lock                  one process at a time
    STORE/extents/CONTENT.STRIPE    sealed extents, numbers in hexadecimal; mode 0400 once it was named,
                                with the sticky bit if the node made the file itself
    STORE/incoming/_N           being received, on its way out, or spare
    STORE/incoming/CONTENT      a working copy of a mount on this host, to be adopted
    STORE/lent/CONTENT.STRIPE   another name of an extent that a mount on this host has opened
    STORE/held/ID/CONTENT       another name of a file that a mount on this host needs (held.py)
    STORE/quarantine/CONTENT.STRIPE     an extent that nothing names, kept for a while (quarantine.py)

An extent comes into being by a rename into extents/, so what lies there is whole. Its file may be used
again for another one after it (spares.py says when).

A mount makes the name in lent/ before it opens an extent, and this process looks for it after it has
renamed a freed extent: so either the mount does not find the extent any more, or the name is found.
"""

import errno
import itertools
import logging
import os
import stat
import time
from collections.abc import Iterator
from types import TracebackType
from typing import NamedTuple, Self

from ..store.file_lease import is_only_opener
from ..store.sparse import allocated_bytes
from ..store.storedir import StoreInUse, in_memory, lock_directory
from ..transport import Extent
from .held import drop_orphans
from .identity import Identity
from .quarantine import (
    KEPT_IN_MEMORY_S,
    KEPT_ON_DISK_S,
    Quarantine,
    extent_name,
    parsed_name,
)
from .spares import (
    SPARE_BYTES_MIN,
    SPARES_MAX,
    SPARES_SHARE,
    Held,
    Incoming,
    Mappings,
    Spares,
    StoredFile,
    Unmapped,
)

__all__ = ["Files", "Held", "Incoming", "Space", "StoreInUse"]

log = logging.getLogger(__name__)

# Removing a large file frees its pages, which takes long (0.1 ms per MiB); it is left to `reap`.
_REMOVED_AT_ONCE_BYTES = 1 << 20
# With less room than this share of the store, nothing is spare.
_ROOM_SHARE = 1 / 16
# With less, the oldest in quarantine go: working copies of mounts on this host need room at once.
_QUARANTINE_ROOM_SHARE = 1 / 8
_OWN = stat.S_ISVTX


class Space(NamedTuple):
    """Bytes. `used` is what extents take, `total` and `free` are the filesystem's or the limit's; what is
    spare or in quarantine is free."""

    used: int
    total: int
    free: int


class Files:
    """An open store directory, at most `limit_bytes` of extents in it. What nothing names is kept for
    `quarantine_s` (None: as is fit for a disk, or for memory). Use as a context manager.

    Methods are for the event loop except where they say otherwise. Raises StoreInUse when another
    process has it open and kv.Damaged when node.json makes no sense.
    """

    def __init__(
        self,
        directory: str,
        limit_bytes: int | None = None,
        quarantine_s: float | None = None,
    ) -> None:
        self.directory = directory
        self._limit_bytes = limit_bytes
        self._quarantine_s = quarantine_s
        self.quarantine: Quarantine
        self.identity = Identity(directory)
        self.power_safe = False
        self.used_bytes = 0
        self.mappings: Mappings = Unmapped()
        self.created_files = 0
        self.reused_files = 0
        self._sizes: dict[Extent, int] = {}
        self._holes: dict[Extent, int] = {}  # bytes of those that have any
        self._named: set[Extent] = set()
        # Made by an application on this host, which may have them open for writing.
        self._foreign: set[Extent] = set()
        self._made: dict[Extent, StoredFile] = {}  # by this process
        self._spares = Spares()
        self._freed = 0
        self._settled = 0  # of those that were freed, how many have lost their name for good
        self._numbers = itertools.count(1)
        self._receiving: dict[str, int] = {}
        self._condemned: list[str] = []
        self._fds: list[int] = []

    def __enter__(self) -> Self:
        os.makedirs(self.directory, mode=0o700, exist_ok=True)
        try:
            self._fds.append(lock_directory(self.directory, "store is in use by another process"))
            for name in ("", "extents", "incoming", "lent", "held", "quarantine"):
                path = f"{self.directory}/{name}"
                os.makedirs(path, mode=0o700, exist_ok=True)
                os.chmod(path, 0o700)
                self._fds.append(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            _, self._top, self._sealed, self._incoming, self._lent, self._held, aside = self._fds
            self.power_safe = not in_memory(self.directory)
            usual_s = KEPT_ON_DISK_S if self.power_safe else KEPT_IN_MEMORY_S
            kept_s = usual_s if self._quarantine_s is None else self._quarantine_s
            self.quarantine = Quarantine(aside, kept_s)
            if not self.identity.load(self._top):
                self._forget_strays()
                self.identity.save()
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
        self.give_up_spares()
        self.reap()
        self._close()

    def _close(self) -> None:
        for fd in reversed(self._fds):
            os.close(fd)
        self._fds.clear()

    @property
    def node(self) -> int:
        """Its number, for ever."""
        return self.identity.node

    def _forget_strays(self) -> None:
        names = os.listdir(self._sealed)
        if names:
            log.warning(
                "%s: node.json is gone, so this is a new node; the extents of the former one are put into "
                "quarantine",
                self.directory,
            )
        for entry in os.scandir(self._sealed):
            extent = parsed_name(entry.name)
            if extent is not None:
                self.quarantine.take_in(extent, entry.stat().st_size, self._sealed)

    def _scan(self) -> None:
        """Find sealed extents; what was being received or removed when the last process ended goes. None
        of their files is used again, lent or not."""
        for entry in os.scandir(self._incoming):
            if working_copy(entry.name) is None:
                os.unlink(entry.name, dir_fd=self._incoming)
        for name in os.listdir(self._lent):
            os.unlink(name, dir_fd=self._lent)
        for entry in os.scandir(self._sealed):
            extent = parsed_name(entry.name)
            if extent is None or not entry.is_file(follow_symlinks=False):
                log.warning("%s is not an extent and is passed over", entry.path)
                continue
            status = entry.stat(follow_symlinks=False)
            self._count_in(extent, status)
            if not status.st_mode & stat.S_IWUSR:
                self._named.add(extent)
            if not status.st_mode & _OWN:
                self._foreign.add(extent)

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
        if the extent is freed: the file is lent. Raises OSError ENOENT, EMFILE."""
        file = self._made.get(extent)
        if file is not None:
            # Before it is opened, as this may be a thread: see the names in lent/.
            file.is_lent = True
        return self._open(extent)

    def hold(self, extent: Extent) -> Held:
        """As `open`, for what keeps no reference to its pages. For the event loop."""
        return Held(self._open(extent), self._made.get(extent), extent not in self._foreign)

    def _open(self, extent: Extent) -> int:
        if extent not in self._sizes:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), extent_name(extent))
        return os.open(extent_name(extent), os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._sealed)

    def space(self) -> Space:
        status = os.fstatvfs(self._sealed)
        total = status.f_blocks * status.f_frsize
        spare = self._spares.bytes + self.quarantine.bytes
        free = min(total, status.f_bavail * status.f_frsize + spare)
        if self._limit_bytes is not None:
            total = min(total, self._limit_bytes)
            free = min(free, max(0, self._limit_bytes - self._taken() + spare))
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

    def reuse(self, length: int) -> Incoming | None:
        """A file of exactly this length that was another extent's, with the bytes of that. For the event
        loop."""
        for file in list(self._spares.of_length(length)):
            if self.power_safe and file.freed > self._settled:
                continue  # a power loss could give it its old name back
            self._spares.remove(file)
            try:
                fd = self._open_spare(file)
            except OSError as error:
                log.info("a file is not used again: %s", error)
                self._condemned.append(file.name)
                continue
            self._receiving[file.name] = length
            self.reused_files += 1
            return Incoming(file.name, fd, file)
        return None

    def _open_spare(self, file: StoredFile) -> int:
        """Raises OSError, EBUSY when it is not ours alone."""
        os.chmod(file.name, 0o600 | _OWN, dir_fd=self._incoming)
        status = os.stat(file.name, dir_fd=self._incoming)
        mapped = self.mappings.descriptors((status.st_dev, status.st_ino))
        is_ours = not file.is_lent and (status.st_nlink, status.st_size) == (1, file.length)
        # Those that are mapped by several descriptors would have to be asked one by one.
        if not is_ours or (len(mapped) == 1 and not is_only_opener(mapped[0])):
            raise OSError(errno.EBUSY, "somebody else has it", file.name)
        fd = os.open(file.name, os.O_RDWR | os.O_CLOEXEC, dir_fd=self._incoming)
        if not mapped and not is_only_opener(fd):
            os.close(fd)
            raise OSError(errno.EBUSY, "somebody else has it", file.name)
        return fd

    def create(self, length: int, allocated: int | None = None) -> Incoming:
        """A file of `length` bytes that has its room already, or that is a hole for which so many bytes are
        reserved. May be called in any thread, as it takes a while for a large one (0.2 ms per MiB of small
        pages).

        Raises OSError: ENOSPC, and nothing is left of it.
        """
        if allocated is None:
            allocated = length
        if self._limit_bytes is not None and self._taken() + allocated > self._limit_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.directory)
        name = self._new_name()
        fd = os.open(
            name,
            os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC,
            0o600 | _OWN,
            dir_fd=self._incoming,
        )
        self._receiving[name] = allocated
        try:
            if allocated < length:
                self._check_room(allocated)
                os.ftruncate(fd, length)
            elif length:
                os.posix_fallocate(fd, 0, length)
        except BaseException:
            os.close(fd)
            self.remove(name)
            raise
        self.created_files += 1
        return Incoming(name, fd, StoredFile(name, allocated))

    def _check_room(self, allocated: int) -> None:
        """Raises OSError ENOSPC."""
        status = os.fstatvfs(self._incoming)
        if allocated > status.f_bavail * status.f_frsize:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.directory)

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
        # It may have been an extent before, and truncated since.
        self.mappings.forget(fd)
        return Incoming(name, fd)

    def harden(self, incoming: Incoming) -> None:
        """Make the bytes survive a power loss, if the store is on a disk. For a worker thread."""
        if self.power_safe:
            os.fsync(incoming.fd)

    def seal(self, incoming: Incoming, extent: Extent) -> None:
        """Its bytes are complete and hardened: from now on it is an extent. On a disk, `settle` before
        anybody relies on it. Raises OSError EEXIST when the extent is here: what is sealed stays."""
        if extent in self._sizes:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), extent_name(extent))
        self._put_in_place(incoming, extent)

    def _put_in_place(self, incoming: Incoming, extent: Extent) -> None:
        status = os.fstat(incoming.fd)
        self._receiving.pop(incoming.name, None)
        self._forget_file(extent)
        if incoming.file is None:
            self._foreign.add(extent)
        else:
            # Before it can be opened, as `open` marks it.
            self._made[extent] = incoming.file
        try:
            os.rename(
                incoming.name,
                extent_name(extent),
                src_dir_fd=self._incoming,
                dst_dir_fd=self._sealed,
            )
        except OSError:
            self._made.pop(extent, None)
            raise
        self._count_out(extent)
        self._count_in(extent, status)
        self._named.discard(extent)

    def replace(self, incoming: Incoming, extent: Extent) -> None:
        """As `seal`, in the place of an extent that is here and has turned out to be damaged."""
        self._put_in_place(incoming, extent)

    def mark_named(self, extent: Extent) -> None:
        """Remember, over a restart, that an inode named this extent: if none does any more, it has been
        superseded, while one without the mark may still be published. Costs 2 us, once."""
        if extent in self._sizes and extent not in self._named:
            self._named.add(extent)
            try:
                own = 0 if extent in self._foreign else _OWN
                os.chmod(extent_name(extent), 0o400 | own, dir_fd=self._sealed)
            except FileNotFoundError:
                log.error("extent %s vanished from the store", extent_name(extent))
                self.free(extent)

    def was_named(self, extent: Extent) -> bool:
        return extent in self._named

    def settle(self) -> None:
        """Make sealed names survive a power loss, if the store is on a disk. For a worker thread."""
        if self.power_safe:
            freed = self._freed
            os.fsync(self._sealed)
            self._settled = max(self._settled, freed)

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
        last open file of it is closed, or is kept for another one. One that is not here is no error."""
        size = self._count_out(extent)
        if size is None:
            return
        self._named.discard(extent)
        file = self._made.get(extent)
        if file is not None and (size < SPARE_BYTES_MIN or size != file.length):
            file = None
        try:
            if file is None and size <= _REMOVED_AT_ONCE_BYTES:
                os.unlink(extent_name(extent), dir_fd=self._sealed)
                self._forget_file(extent)
                return
            name = self._new_name()
            os.rename(extent_name(extent), name, src_dir_fd=self._sealed, dst_dir_fd=self._incoming)
        except FileNotFoundError:
            log.warning("extent %s vanished from the store", extent_name(extent))
            self._forget_file(extent)
            return
        self._freed += 1
        # Now, as nobody can borrow it any more.
        was_borrowed = self._forget_file(extent)
        if file is None or file.is_lent or was_borrowed or not self._room_for_spare(size):
            self._condemned.append(name)
        else:
            file.name, file.freed = name, self._freed
            self._spares.add(file)

    def set_aside(self, extent: Extent) -> None:
        """Put an extent into quarantine. One that is not here is no error."""
        size = self._count_out(extent)
        if size is None:
            return
        self._named.discard(extent)
        try:
            self.quarantine.take_in(extent, size, self._sealed)
        except FileNotFoundError:
            log.warning("extent %s vanished from the store", extent_name(extent))
        self._forget_file(extent)

    def bring_back(self, extent: Extent) -> None:
        """Take an extent out of quarantine. Raises FileNotFoundError."""
        self.quarantine.give_back(extent, self._sealed)
        status = os.stat(extent_name(extent), dir_fd=self._sealed)
        self._count_in(extent, status)
        if not status.st_mode & _OWN:
            self._foreign.add(extent)

    def tidy_quarantine(self, wanted_bytes: int = 0) -> int:
        """Give up what has been in quarantine for long enough, and the oldest where the store has little
        room, or where `wanted_bytes` are wanted at once. Their memory goes with the next `reap`. Returns
        how many went."""
        if not len(self.quarantine):
            return 0
        space = self.space()
        really_free = space.free - self._spares.bytes - self.quarantine.bytes
        short = int(space.total * _QUARANTINE_ROOM_SHARE) - really_free
        due = self.quarantine.due(max(wanted_bytes, short))
        for extent in due:
            name = self._new_name()
            try:
                self.quarantine.move_out(extent, name, self._incoming)
            except FileNotFoundError:
                continue
            self._condemned.append(name)
        return len(due)

    def _forget_file(self, extent: Extent) -> bool:
        """An extent has lost its file, or is about to. Returns whether a mount on this host ever had it
        open."""
        self._made.pop(extent, None)
        self._foreign.discard(extent)
        try:
            os.unlink(extent_name(extent), dir_fd=self._lent)
        except FileNotFoundError:
            return False
        return True

    def _room_for_spare(self, size: int) -> bool:
        """Older ones go for it."""
        space = self.space()
        limit = int(space.total * SPARES_SHARE)
        if size > limit or space.free - self._spares.bytes < space.total * _ROOM_SHARE:
            return False
        while self._spares.bytes + size > limit or len(self._spares) >= SPARES_MAX:
            self._give_up_oldest()
        return True

    def give_up_spares(self, unused_s: float = 0.0) -> None:
        """Those that were not used for so long; their memory goes with the next `reap`."""
        until = time.monotonic() - unused_s
        while (file := self._spares.oldest()) is not None and file.since <= until:
            self._give_up_oldest()

    def _give_up_oldest(self) -> None:
        file = self._spares.oldest()
        assert file is not None
        self._spares.remove(file)
        self._condemned.append(file.name)

    def let_go(self) -> None:
        """After `reap`: what is removed is not kept mapped. For the event loop."""
        self.mappings.drop_orphans()

    @property
    def has_condemned(self) -> bool:
        return bool(self._condemned)

    def reap(self) -> int:
        """Give back the memory of freed extents, and of those that only mounts which have ended held;
        returns how many. May be called in any thread."""
        done = drop_orphans(self._held)
        while True:
            try:
                name = self._condemned.pop()
            except IndexError:
                return done
            self.remove(name)
            done += 1

    def _count_in(self, extent: Extent, status: os.stat_result) -> None:
        taken = allocated_bytes(status.st_size, status.st_blocks)
        self._sizes[extent] = status.st_size
        self.used_bytes += taken
        if taken < status.st_size:
            self._holes[extent] = status.st_size - taken

    def _count_out(self, extent: Extent) -> int | None:
        """Returns its length; None: it is not here."""
        size = self._sizes.pop(extent, None)
        if size is not None:
            self.used_bytes -= size - self._holes.pop(extent, 0)
        return size

    def _taken(self) -> int:
        kept = self.used_bytes + self._spares.bytes + self.quarantine.bytes
        return kept + sum(list(self._receiving.values()))

    def _new_name(self) -> str:
        return f"_{next(self._numbers):x}"


def working_copy(name: str) -> int | None:
    """The content that a file in incoming/ is a mount's working copy of; None: it is ours."""
    try:
        content = int(name, 16)
    except ValueError:
        return None
    return content if f"{content:x}" == name else None
