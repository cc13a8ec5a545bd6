"""Directories that are kept open: a mount in a cluster is asked for each name of a path, each time."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

__all__ = ["Directory", "Past", "Seen", "seen"]

_PAST_MAX = 1 << 16
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Seen(NamedTuple):
    """What tells a file, and each time that it was published, from all others."""

    ino: int
    ctime_ns: int
    size: int


def seen(status: os.stat_result) -> Seen:
    return Seen(status.st_ino, status.st_ctime_ns, status.st_size)


class Past:
    """Files that have been used, and will be written anew: the last ones of them."""

    def __init__(self) -> None:
        self._files: OrderedDict[int, Seen] = OrderedDict()

    def add(self, file: Seen) -> None:
        self._files[file.ino] = file
        if len(self._files) > _PAST_MAX:
            self._files.popitem(last=False)

    def __contains__(self, file: Seen) -> bool:
        return self._files.get(file.ino) == file


class Directory:
    """An open directory, which has the same files after it was renamed."""

    def __init__(self, path: str | Path, above: int | None = None) -> None:
        """Raises OSError, also for a link."""
        self.fd = os.open(path, _DIRECTORY, dir_fd=above)

    def __del__(self) -> None:
        if (fd := getattr(self, "fd", -1)) >= 0:
            os.close(fd)

    def is_at(self, path: Path) -> bool:
        """Return whether this directory has a path. Raises OSError if nothing has it."""
        return os.path.samestat(os.fstat(self.fd), os.stat(path, follow_symlinks=False))

    def file(self, name: str) -> Path:
        return Path(f"/proc/self/fd/{self.fd}/{name}")

    def look(self, name: str) -> os.stat_result:
        """Return the status of a file in it. Raises OSError."""
        return os.stat(name, dir_fd=self.fd, follow_symlinks=False)
