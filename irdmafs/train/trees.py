"""Directories of a mount: kept open, and read with all that is below them, by one request for each change.

A mount in a cluster is asked for each name of a path, each time: so directories are kept open. What is
below them is what the mount has been told so far: of two changes that somebody saw one after the other the
answers have both, or the first, or none.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..client import _files
from .errors import TrainError

_USED_MAX = 1 << 16
_OPEN_MAX = 128
_PRIVATE_VIEW = ".irdmafs-private"
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_TREE = "user.irdmafs.tree"
_CHANGES = "user.irdmafs.changes"
# Changes often come together: they are looked at so much later.
GATHER_S = 0.004
_BYTES_MAX = 65536
# As many names fit in an answer, and more.
_NAMES_MAX = 1024
# Nothing of ours is as deep in directories that are too large for an answer.
_LEVELS_MAX = 8
# A thread that nobody waits for any more ends its wait after so long.
_WATCH_S = 1.0
# Too much for one answer; not for this user. Such a directory is walked.
WALKED = (errno.E2BIG, errno.ERANGE, errno.EACCES)
_NOT_IRDMAFS = (errno.ENODATA, errno.EOPNOTSUPP)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.getxattr.restype = ctypes.c_ssize_t


# -- files, and open directories ----------------------------------------------------------------------


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
    """Directories that are used again and again under changing names: the last ones, by their inodes. Knows
    which of their files have been used, and will be written anew. Threads may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: OrderedDict[int, Directory] = OrderedDict()
        self._used: OrderedDict[int, Seen] = OrderedDict()

    def note_used(self, file: Seen) -> None:
        self._used[file.ino] = file
        if len(self._used) > _USED_MAX:
            self._used.popitem(last=False)

    def was_used(self, file: Seen) -> bool:
        return self._used.get(file.ino) == file

    def get(self, ino: int, path: Path) -> Directory:
        """Return a directory that has or had this path. Raises OSError if another has it; ino 0: any."""
        with self._lock:
            found = self._opened.pop(ino, None)
            if found is not None:
                self._opened[ino] = found
                return found
        found = self.open(path)
        if ino and os.fstat(found.fd).st_ino != ino:
            raise FileNotFoundError(errno.ENOENT, "Another directory is there now", str(path))
        return found

    def open(self, path: Path) -> Directory:
        """Return the directory that has a path. Raises OSError."""
        opened = Directory(path)
        ino = os.fstat(opened.fd).st_ino
        with self._lock:
            found = self._opened.setdefault(ino, opened)
            if len(self._opened) > _OPEN_MAX:
                self._opened.popitem(last=False)
        return found


# -- what is below a directory ------------------------------------------------------------------------


class Folder(NamedTuple):
    """A directory: its published files, those of them with other names (hard links), its directories, and
    the names of all that is in it. `counter`: of changes below it, if it was looked at by itself."""

    ino: int
    files: Mapping[str, Seen]
    linked: Collection[str]
    folders: Mapping[str, Folder]
    names: Collection[str]
    counter: int | None = None

    @property
    def visible(self) -> set[str]:
        """Return the names that do not begin with a dot."""
        return {name for name in self.names if not name.startswith(".")}

    def folder(self, *names: str) -> Folder:
        """Return a directory below it; one without entries if it is not there. No name, "", is itself."""
        found = self
        for name in filter(None, names):
            found = found.folders.get(name, NOTHING)
        return found


NOTHING = Folder(0, {}, (), {}, ())


def look(
    path: Path, after: int | None = None, timeout_s: float = 0.0, *, levels: int = _LEVELS_MAX
) -> Folder:
    """Return what is below a directory; if `after` is a counter, once it is another one, or after a while.
    Looks into each directory of a large tree, so many levels deep. Raises OSError, InterruptedError too."""
    try:
        counter, entries = json.loads(_ask(path, _TREE, after, timeout_s))
    except OSError as error:
        if not levels or error.errno not in WALKED:
            raise
        counter = count_changes(path, after, timeout_s)
        return _walk(path, levels)._replace(counter=counter)
    return _folder(path, 0, entries, levels)._replace(counter=counter)


def count_changes(path: Path, after: int | None = None, timeout_s: float = 0.0) -> int:
    """Return the counter of changes of anything below a directory; if `after` is a counter, once it is
    another one, or after a while. Raises OSError, InterruptedError too."""
    return int(_ask(path, _CHANGES, after, timeout_s))


def _ask(path: Path, attribute: str, after: int | None, timeout_s: float) -> bytes:
    if after is not None:
        attribute += f".{after}.{max(0.0, timeout_s):.3f}"
    # os.getxattr asks twice if an answer is longer than a few bytes.
    answer = ctypes.create_string_buffer(_BYTES_MAX)
    size = _files.look_up(_read_xattr, path, attribute, answer)
    return answer.raw[:size]


def _read_xattr(path: Path, attribute: str, answer: ctypes.Array[ctypes.c_char]) -> int:
    size = _libc.getxattr(os.fsencode(path), attribute.encode(), answer, _BYTES_MAX)
    if size < 0:
        code = ctypes.get_errno()
        if code in _NOT_IRDMAFS:
            raise TrainError(f"{path} is not on a mount of irdmafs")
        raise OSError(code, os.strerror(code), os.fspath(path))
    return int(size)


def _folder(path: Path, ino: int, entries: Mapping[str, Any], levels: int) -> Folder:
    files, linked, folders = {}, [], {}
    for name, (number, *more) in entries.items():
        if len(more) == 4:
            ctime_ns, size, version, links = more
            if version and size:
                files[name] = Seen(number, ctime_ns, size)
            if links > 1:
                linked.append(name)
        elif more and more[0] is not None:
            folders[name] = _folder(path / name, number, more[0], levels)
        elif more and levels:
            with contextlib.suppress(OSError):
                folders[name] = _walk(path / name, levels)
    return Folder(ino, files, linked, folders, entries.keys())


def _walk(path: Path, levels: int) -> Folder:
    """Look at each file. What goes meanwhile, or may not be seen, is not there; nor are files of a
    directory that has very many, nor very deep directories: whoever made them would have others look at
    them for ever."""
    files, linked, folders = {}, [], {}
    with _files.look_up(os.scandir, path) as entries:
        there = list(entries)
    for entry in there:
        below = path / entry.name
        with contextlib.suppress(OSError):
            if entry.is_dir(follow_symlinks=False):
                folders[entry.name] = look(below, levels=levels - 1)._replace(ino=entry.inode())
            elif len(there) <= _NAMES_MAX and entry.is_file(follow_symlinks=False):
                status = below.lstat()
                if is_published(below, status):
                    files[entry.name] = seen(status)
                if status.st_nlink > 1:
                    linked.append(entry.name)
    names = [entry.name for entry in there]
    return Folder(os.stat(path).st_ino, files, linked, folders, names)


class Trees:
    """Knows what is below some directories. From the first wait() on, threads wait for changes of all
    directories that were looked at; before, each look is a request."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._found: dict[Path, Folder] = {}
        self._watched: set[Path] = set()
        self._errors: list[OSError] = []
        self._closed = False
        # How many changes there were, and how many of them wait() has told of.
        self._news = self._waited = 0

    def look(self, path: Path) -> Folder:
        """Return what was below a directory at the last change that this process was told of. Raises
        OSError, also one that a thread has met."""
        with self._changed:
            if self._errors:
                raise self._errors.pop()
            if path in self._watched:
                return self._found[path]
        return self.look_again(path)

    def look_again(self, path: Path) -> Folder:
        """Return what is below a directory now; changes of this process and those that came before one it
        knows of are among it. Raises OSError."""
        found = look(path)
        with self._changed:
            self._take(path, found)
            return self._found[path]

    def _take(self, path: Path, found: Folder) -> bool:
        """Keep what was found, unless something later is known; return whether it is new."""
        known = self._found.get(path, NOTHING).counter
        if known is not None and found.counter is not None and found.counter <= known:
            return False
        self._found[path] = found
        return True

    def wait(self, timeout_s: float) -> bool:
        """Return True when something may have changed since the last wait(), False after a while."""
        with self._changed:
            for path, found in self._found.items():
                if path not in self._watched:
                    self._watched.add(path)
                    watch = partial(self._watch, path, found.counter)
                    threading.Thread(target=watch, name="tree", daemon=True).start()
            is_new = self._changed.wait_for(lambda: self._news != self._waited, timeout_s)
            self._waited = self._news
            return is_new

    def _watch(self, path: Path, counter: int | None) -> None:
        while not self._closed:
            try:
                try:
                    found = look(path, counter, _WATCH_S)
                except BlockingIOError:
                    # Too many wait on this mount.
                    time.sleep(_WATCH_S)
                    found = look(path)
            except InterruptedError:
                continue
            except OSError as error:
                # The next look raises the error, and the directory is watched again from then on.
                with self._changed:
                    self._errors.append(error)
                    self._watched.discard(path)
                    del self._found[path]
                    self._tell()
                return
            counter = found.counter
            with self._changed:
                if self._take(path, found):
                    self._tell()
            time.sleep(GATHER_S)

    def _tell(self) -> None:
        self._news += 1
        self._changed.notify_all()

    def close(self) -> None:
        """Watch no more. Threads that wait end soon."""
        self._closed = True
