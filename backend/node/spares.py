"""Files of superseded extents, reused for new extents of exactly the same length.

A reused file needs no allocation, and no registration if it was registered for RDMA. But pages of it that
were sent with sendfile or splice, by this process or by an application on a mount of this host, may still
be referenced by a socket's send queue or by a pipe, and would change. So a file is reused only if it was
made here, was never lent, and nobody holds it. If in doubt, it is not.
"""

import os
import time
from collections.abc import Iterator
from typing import Protocol

SPARES_MAX = 1024
# The share of the store for spare files. Files freed beyond it are removed at once.
SPARES_SHARE = 0.5
# Smaller files do not move by RDMA, and cost little to make.
SPARE_BYTES_MIN = 64 << 10
# A spare file that was unused for so long is given up.
SPARE_S = 60.0

# Device and inode number.
FileKey = tuple[int, int]


class Mappings(Protocol):
    """The users that keep files mapped (transport/verbs). For the event loop."""

    def descriptors(self, file: FileKey) -> list[int]:
        """Return the descriptors through which the file is mapped. Raises OSError EBUSY if it is in use."""
        ...

    def forget(self, fd: int) -> None:
        """Unmap a file that may be truncated: later users map it anew."""
        ...

    def drop_orphans(self) -> None:
        """Unmap files that have no name any more."""
        ...


class Unmapped:
    """Mappings where no file is mapped."""

    def descriptors(self, file: FileKey) -> list[int]:
        return []

    def forget(self, fd: int) -> None:
        pass

    def drop_orphans(self) -> None:
        pass


class StoredFile:
    """A file that this process made for an extent. `freed` is how many extents had been freed before."""

    __slots__ = ("freed", "is_lent", "length", "name", "since", "users")

    def __init__(self, name: str, length: int) -> None:
        self.name = name
        self.length = length
        self.users = 0
        self.is_lent = False
        self.since = 0.0
        self.freed = 0


class Held:
    """An open file, which is not reused for another extent before it is closed. For the event loop.

    `is_own`: no other process ever had it open for writing, so it cannot be truncated.
    """

    def __init__(self, fd: int, file: StoredFile | None, is_own: bool) -> None:
        self.fd = fd
        self.is_own = is_own
        self._file = file
        if file is not None:
            file.users += 1

    def lend(self) -> None:
        """Note that references to its pages may exist for ever from now on. For any thread."""
        if self._file is not None:
            self._file.is_lent = True

    def close(self) -> None:
        os.close(self.fd)
        if self._file is not None:
            self._file.users -= 1


class Incoming(Held):
    """A file in incoming/ that is not an extent yet."""

    def __init__(self, name: str, fd: int, file: StoredFile | None = None) -> None:
        super().__init__(fd, file, is_own=file is not None)
        self.name = name
        self.file = file


class Spares:
    """At most SPARES_MAX spare files, found by length. For the event loop."""

    def __init__(self) -> None:
        self._files: dict[StoredFile, None] = {}  # the oldest first
        self._of_length: dict[int, list[StoredFile]] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._files)

    def add(self, file: StoredFile) -> None:
        file.since = time.monotonic()
        self._files[file] = None
        self._of_length.setdefault(file.length, []).append(file)
        self.bytes += file.length

    def of_length(self, length: int) -> Iterator[StoredFile]:
        """Return files of this length that nobody holds, the newest first, so that surplus ones get old."""
        for file in reversed(self._of_length.get(length, ())):
            if not file.users:
                yield file

    def remove(self, file: StoredFile) -> None:
        del self._files[file]
        others = self._of_length[file.length]
        others.remove(file)
        if not others:
            del self._of_length[file.length]
        self.bytes -= file.length

    def oldest(self) -> StoredFile | None:
        return next(iter(self._files), None)
