"""Directories that are kept open: a mount in a cluster is asked for each name of a path, each time."""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

from ..client import _files

_PAST_MAX = 1 << 16
_OPEN_MAX = 128
_PRIVATE_VIEW = ".irdmafs-private"
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Seen(NamedTuple):
    """Identifies one publication of one file: no other has the same values."""

    ino: int
    ctime_ns: int
    size: int


def seen(status: os.stat_result) -> Seen:
    return Seen(status.st_ino, status.st_ctime_ns, status.st_size)


def is_published(path: Path, status: os.stat_result | None = None) -> bool:
    """Return whether a file is there, whole: on the host that writes it a new file is seen as it grows."""
    try:
        size = (status or _files.look_up(os.stat, path)).st_size
        return size > 0 and _files.look_up(_files.read_version, path) != 0
    except FileNotFoundError:
        return False


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

    def __init__(self, path: Path) -> None:
        """Raises OSError, also for a link."""
        self.fd = _files.look_up(os.open, path, _DIRECTORY)
        # The descriptor of its private view. None: it was not looked for; -1: there is none.
        self._view_fd: int | None = None
        self._lock = threading.Lock()

    def __del__(self) -> None:
        for fd in (getattr(self, "fd", -1), getattr(self, "_view_fd", None)):
            if fd is not None and fd >= 0:
                os.close(fd)

    @property
    def path(self) -> Path:
        """Return a path of this directory, wherever it is."""
        return Path(f"/proc/self/fd/{self.fd}")

    def file(self, name: str) -> Path:
        return self.path / name

    @property
    def view(self) -> Path | None:
        """Return a path of its private view (docs/mount.md), in which this process opens files as its mount
        knows them, and promises to keep no references to their pages. None where there is none."""
        with self._lock:
            if self._view_fd is None:
                try:
                    self._view_fd = os.open(_PRIVATE_VIEW, _DIRECTORY, dir_fd=self.fd)
                except OSError:
                    self._view_fd = -1
        return Path(f"/proc/self/fd/{self._view_fd}") if self._view_fd >= 0 else None


class Directories:
    """Directories that are used again and again under changing names: the last ones, by their inodes.
    `past`: their files that have been used."""

    def __init__(self) -> None:
        self._opened: OrderedDict[int, Directory] = OrderedDict()
        self.past = Past()

    def get(self, ino: int, path: Path) -> Directory:
        """Return a directory which has this path, or had it. Raises OSError if another one has it now."""
        found = self._opened.get(ino)
        if found is None:
            found = self.open(path)
            if self._opened.get(ino) is not found:
                raise FileNotFoundError(errno.ENOENT, "Another directory is there now", str(path))
        self._opened.move_to_end(ino)
        return found

    def open(self, path: Path) -> Directory:
        """Return the directory that has a path. Raises OSError."""
        opened = Directory(path)
        found = self._opened.setdefault(os.fstat(opened.fd).st_ino, opened)
        if len(self._opened) > _OPEN_MAX:
            self._opened.popitem(last=False)
        return found

    def close(self) -> None:
        self._opened.clear()
