"""Files of freed extents that are used for new extents, and the one rule for which files may be.

A file that is used again needs no allocation, and no registration if it was registered for RDMA. But
whoever still refers to its pages would see what it is used for next. So a file is used again only if

    this process made it     An application may have the files that it made open for writing.
    its pages are not lent   This process never sent them by sendfile or splice: they might still be in the
                             send queue of a socket.
    no program keeps them    Before a mount on this host lets a program open an extent that may keep
                             references to its pages, in a pipe for instance, it gives the file the
                             modification time LENT_NS.
    nobody has it open       This process has not, nor has a peer the right to read it by RDMA: the kernel
                             tells about every process. A mount here gives a file that a program has open a
                             second name, in STORE/held.
    it has the right length  Exactly that of the new extent.
    it lies in memory        On a disk, a power loss could give it its old name back.

A file for which one of these is in doubt is removed instead. Files that wait to be used again count as
free room.
"""

import errno
import fcntl
import logging
import os
import signal
import time

from ..files.storedir import LENT_NS, OWN_FILE
from ..transport.verbs.rdma import Rdma
from .directory import StoreDirectory
from .incoming import Incoming, IncomingFiles, StoredFile

log = logging.getLogger(__name__)

SPARES_MAX = 1024
# The share of the store for files that wait. Files freed beyond it are removed at once.
_SPARES_SHARE = 0.5
# With less free room than this share of the store, no file waits.
_ROOM_SHARE = 1 / 16
# Smaller files do not move by RDMA, and cost little to make.
SPARE_BYTES_MIN = 64 << 10
# A file that waited for so long is given up.
SPARE_S = 60.0


class Spares:
    """The files that wait, at most SPARES_MAX. For the event loop."""

    def __init__(self, place: StoreDirectory, incoming: IncomingFiles, rdma: Rdma) -> None:
        self.bytes = 0
        self.reused = 0
        self._place = place
        self._incoming = incoming
        self._rdma = rdma
        self._files: dict[StoredFile, None] = {}  # the oldest first

    def wants(self, file: StoredFile) -> bool:
        """Return whether `add` may keep the file of an extent that is being freed."""
        return file.is_reusable and file.length >= SPARE_BYTES_MIN and not self._place.power_safe

    def add(self, file: StoredFile, name: str, total: int, free: int) -> bool:
        """Keep the file of a freed extent, which was just renamed to `name` in incoming/. Return False if
        it may never be used again, or the store, of which so many bytes are free, has no room for it: then
        the caller removes it."""
        if not self.wants(file):
            return False
        limit = int(total * _SPARES_SHARE)
        if file.length > limit or free < total * _ROOM_SHARE:
            return False
        while self.bytes + file.length > limit or len(self._files) >= SPARES_MAX:
            self._give_up(next(iter(self._files)))
        file.name, file.since = name, time.monotonic()
        self._files[file] = None
        self.bytes += file.length
        return True

    def take(self, length: int) -> Incoming | None:
        """Return a file of exactly this length, which has the bytes of the extent that it was before. The
        newest is taken, so that surplus ones get old."""
        for file in [file for file in reversed(self._files) if file.length == length]:
            try:
                fd = self._open(file)
            except OSError as error:
                if error.errno != errno.EBUSY:
                    log.info("a file is not used again: %s", error)
                    self._give_up(file)
                continue
            self._remove(file)
            file.is_named = False
            self.reused += 1
            return self._incoming.opened_again(file, fd)
        return None

    def _open(self, file: StoredFile) -> int:
        """Open a file for another extent. Raises OSError: EBUSY if somebody has it open or mapped, EPERM if
        it can never be used again."""
        status = os.stat(file.name, dir_fd=self._place.incoming)
        mapped = self._rdma.descriptors((status.st_dev, status.st_ino))
        # A file that is mapped through several descriptors is refused: each would have to be asked for a
        # lease.
        is_alone = not mapped or _is_ours_alone(mapped)
        os.chmod(file.name, 0o600 | OWN_FILE, dir_fd=self._place.incoming)
        fd = os.open(file.name, os.O_RDWR | os.O_CLOEXEC, dir_fd=self._place.incoming)
        is_alone &= bool(mapped) or _is_ours_alone([fd])
        # Last: who had it open or by another name has marked it before letting it go.
        status = os.fstat(fd)
        is_lent = not file.is_reusable or status.st_mtime_ns == LENT_NS
        if is_alone and status.st_nlink == 1 and not is_lent and status.st_size == file.length:
            return fd
        os.close(fd)
        if is_lent or status.st_size != file.length:
            raise OSError(errno.EPERM, "its pages may be somebody else's", file.name)
        raise OSError(errno.EBUSY, "somebody else has it", file.name)

    def give_up(self, unused_s: float = 0.0) -> None:
        """Give up files that waited for so long; their memory goes with the next `IncomingFiles.reap`."""
        until = time.monotonic() - unused_s
        for file in [file for file in self._files if file.since <= until]:
            self._give_up(file)

    def _give_up(self, file: StoredFile) -> None:
        self._remove(file)
        self._incoming.condemn(file.name)

    def _remove(self, file: StoredFile) -> None:
        del self._files[file]
        self.bytes -= file.length


def _is_ours_alone(descriptors: list[int]) -> bool:
    """Return whether nobody has the file open or mapped but by this descriptor. The kernel grants a write
    lease in exactly that case; the lease is given back at once. A mapping outlives its descriptor, so a
    kernel that does not tell is not trusted. Raises OSError."""
    if len(descriptors) != 1:
        return False
    (fd,) = descriptors
    # Opening the file while the lease is held sends a signal: by default SIGIO, which would end this
    # process.
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        return False
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True
