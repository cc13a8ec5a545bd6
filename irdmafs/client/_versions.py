"""A directory of numbered versions: each appears whole, and stays as long as a reader holds it."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from . import _locks
from ._drafts import Copying, below, new_name, refuse_unfinished, remove
from ._files import RENAME_NOREPLACE, StrPath, look_up, open_to_read, rename
from ._waiting import Seen, wait

log = logging.getLogger(__name__)

_INSIDE = ("versions", ".held", ".drafts")
_NUMBER = re.compile(r"[1-9][0-9]{0,17}", re.ASCII)
# The name of a draft has the number whose lock holds it.
_DRAFT = re.compile(r"\.draft-([0-9]+)-.*", re.ASCII)
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Files that are fetched at once.
_AT_ONCE = 8


class Version(NamedTuple):
    """A version that is held: its number, the directory that has its files, and the descriptor of the lock
    that holds it, which a program that is executed in place of this one may inherit."""

    number: int
    path: str
    fd: int


class Versions:
    """The versions of one thing in several files, such as a model: ``DIR/versions/1``, ``2`` and so on.

    A version has its number when it is whole. Nobody writes it from then on, and its number is not used
    again. Who made it and who reads it may be on any host; all of it are files and locks on files,
    in ``DIR/.held``, so it works for programs of one host in any directory. ``DIR`` has to be there.
    """

    def __init__(self, directory: StrPath, *, keep: int = 3) -> None:
        """``keep``: how many of the newest versions stay that nobody holds, at least 1. Raises
        FileNotFoundError for "", which would be where the program is."""
        if keep < 1:
            raise ValueError(f"keep is {keep}, but the newest version always stays")
        if not (path := os.fsdecode(directory)):
            raise FileNotFoundError(errno.ENOENT, "The directory has no name", "")
        self.directory = os.path.abspath(path)
        self.keep = keep
        self._versions, self._held, self._drafts = (
            os.path.join(self.directory, name) for name in _INSIDE
        )
        self._putting_aside: threading.Thread | None = None

    def __getstate__(self) -> dict[str, object]:
        # A copy in another process has no thread of this one to wait for.
        return {**vars(self), "_putting_aside": None}

    def path(self, number: int) -> str:
        """Return the directory of a version, which may be gone, or yet to come."""
        return os.path.join(self._versions, str(number))

    def numbers(self) -> list[int]:
        """Return the numbers of the versions that are there, without those that this object is about to
        remove. Raises OSError, also if ``DIR`` is not there."""
        self._end_putting_aside()
        return self._numbers()

    def _numbers(self, versions: str = "") -> list[int]:
        try:
            names = os.listdir(versions or self._versions)
        except FileNotFoundError:
            os.stat(self.directory)  # its mount may be gone, but not the versions
            return []
        return sorted(map(int, filter(_NUMBER.fullmatch, names)))

    def newest(self) -> int:
        """Return the number of the newest version that any host has published; 0 if there is none. Raises
        OSError, also if ``DIR`` is not there."""
        newest = max(self._numbers(), default=0)
        # A listing may be older by a moment; "no such file" never is.
        while os.path.lexists(self.path(newest + 1)):
            newest += 1
        return newest

    # -- writing -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def draft(self, *, expected: int | None = None, base: int | None = None) -> Iterator[str]:
        """Give a directory to fill, which is the next version when the block ends; nothing is published
        after an exception. It is empty, or begins with the files of version ``base``, which share their
        bytes (see clone()) until they are changed. ``expected``: as for publish(). Raises OSError, and
        FileNotFoundError."""
        with self._drafted() as path:
            if base is not None:
                with self.hold(base) as old:
                    Copying().copy(old.path, path, inside=True)
            yield path
            self._publish(path, expected)
        self._tidy_later()

    def publish(self, directory: StrPath, *, expected: int | None = None) -> int:
        """Make a directory of this filesystem the next version, and return its number. It loses its old
        name. What came before the ``keep`` newest is removed.

        Raises FileExistsError if the newest version is not ``expected``, so that of several writers who
        began with the same version one publishes; and OSError, after which nothing has changed, unless this
        host was cut off for so long that others may have published meanwhile (EIO). EPERM: the directory
        is a part of a version, which stays whole; EBUSY: a program of this host is still writing a file in
        it; EINVAL: the versions are in it.
        """
        real = Path(directory).resolve()
        top = Path(self.directory)
        if top.is_dir() and top.resolve().is_relative_to(real):
            raise OSError(errno.EINVAL, "It has the versions in it", directory)
        for top in real.parents:
            if real.relative_to(top).parts[0] in _INSIDE and (top / ".held").is_dir():
                text = f"It is a part of the versions in {top}: copy it"
                raise OSError(errno.EPERM, text, directory)
        number = self._publish(directory, expected)
        self._tidy_later()
        return number

    def _publish(self, directory: StrPath, expected: int | None) -> int:
        self._make()
        newest = self.newest()
        while expected in (None, newest):
            number = newest + 1
            # Readers find the file to lock, also those that may not make it. Nobody removes this version
            # from now on, so it was there before only if there are newer ones.
            with self._locked(str(number), _locks.READ) as lock:
                newest = self.newest()
                if newest >= number:
                    continue
                refuse_unfinished(os.fsdecode(directory))
                try:
                    # By this name it cannot be anything but a directory.
                    rename(os.path.join(directory, ""), self.path(number), RENAME_NOREPLACE)
                except FileExistsError:
                    newest = number
                except OSError as error:
                    if error.errno == errno.EXDEV:
                        os.stat(os.path.join(directory, ""))  # it may not be there at all
                        error.strerror = f"Not on the filesystem of {self.directory}: copy it there"
                    raise
                else:
                    _locks.lock(lock, _locks.READ)  # fails if it was lost meanwhile
                    return number
        text = f"version {newest} is the newest, not {expected}"
        raise FileExistsError(errno.EEXIST, text, self._versions)

    def roll_back(self, number: int, *, expected: int | None = None) -> int:
        """Publish an old version again, and return its new number. It has the same files: links, without
        another copy of their bytes. Nothing is removed. Raises OSError as publish() does, and
        FileNotFoundError."""
        with self.hold(number) as old, self._drafted() as path:
            Copying(links=True).copy(old.path, path, inside=True)
            return self._publish(path, expected)

    def tidy(self) -> None:
        """Remove the versions before the ``keep`` newest, and the drafts of programs that were killed, but
        nothing that somebody holds. What cannot be removed is logged."""
        rest = contextlib.ExitStack()
        self._put_aside(rest)
        self._finish(rest)

    def _tidy_later(self) -> None:
        """Do as tidy() does, in threads: nobody waits for that, except that numbers() waits until old
        versions are put aside. If the program is killed, who tidies next does it."""
        rest = contextlib.ExitStack()

        def put_aside() -> None:
            self._put_aside(rest)
            _in_thread(partial(self._finish, rest))

        self._end_putting_aside()
        self._putting_aside = _in_thread(put_aside)

    def _end_putting_aside(self) -> None:
        if self._putting_aside is not None:
            self._putting_aside.join()

    def _finish(self, rest: contextlib.ExitStack) -> None:
        try:
            rest.close()
        except OSError as error:
            log.warning("%s: the rest is left to who tidies next: %s", self.directory, error)

    def _put_aside(self, rest: contextlib.ExitStack) -> None:
        """Move what is to be removed to where nobody looks for it. The `rest` is to remove it there."""
        try:
            inside = (self._versions, self._held, self._drafts)
            versions, held, drafts = (rest.enter_context(_opened(path)) for path in inside)
            numbers = [str(number) for number in self._numbers(versions)]
            old, kept = {*numbers[: -self.keep]}, {*numbers[-self.keep :]}
            # By the name of a lock, the old version and the drafts that it holds.
            left = {number: [f"{versions}/{number}"] for number in old}
            for name in os.listdir(drafts):
                found = _DRAFT.fullmatch(name)
                left.setdefault(found[1] if found else name, []).append(f"{drafts}/{name}")
            for name in {*os.listdir(held)} - kept:
                left.setdefault(name, [])
        except OSError as error:
            log.warning("old versions in %s stay: %s", self.directory, error)
            return
        for name, paths in left.items():
            try:
                with contextlib.ExitStack() as locked:
                    lock = self._locked(name, _locks.WRITE, held)
                    if locked.enter_context(lock) < 0:
                        continue  # somebody holds it
                    # Readers lock it, maybe of a version that was published since.
                    is_used = name not in old and os.path.lexists(f"{versions}/{name}")
                    for path in paths:
                        aside = f"{drafts}/{new_name('0')}"
                        with contextlib.suppress(FileNotFoundError):
                            # In one change: nobody sees a part of it, and no host that was cut off
                            # publishes the rest.
                            rename(path, aside)
                            rest.callback(remove, aside)
                    if not is_used:
                        rest.push(locked.pop_all())
                        # Another host removed it if this one was cut off for too long.
                        rest.callback(Path(held, name).unlink, missing_ok=True)
            except OSError as error:
                log.warning("%s in %s stays: %s", name, self.directory, error)

    def _make(self) -> None:
        # The directory itself is not made: where nothing is mounted it would be in a strange place.
        for path in (self._versions, self._held, self._drafts):
            with contextlib.suppress(FileExistsError):
                try:
                    os.mkdir(path)
                except FileNotFoundError as error:
                    error.filename = self.directory
                    raise

    @contextlib.contextmanager
    def _drafted(self) -> Iterator[str]:
        """Give an empty directory, which is removed at the end if it has that name still."""
        self._make()
        number, owner = str(self.newest() + 1), os.getpid()
        # Publishing takes this lock, too, if nobody is faster: the mount has it then.
        with self._locked(number, _locks.READ):
            path = os.path.join(self._drafts, new_name(number))
            os.mkdir(path)
            try:
                yield path
            finally:
                if os.getpid() == owner:
                    remove(path)

    # -- reading -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def hold(
        self,
        number: int | None = None,
        *,
        newer_than: int = 0,
        timeout: float | None = None,
        local: bool = False,
    ) -> Iterator[Version]:
        """Give a version which stays until the block ends, whole, also if newer ones come: version
        ``number``, or the newest one as soon as that is newer than ``newer_than``, for which it waits
        ``timeout`` seconds at most. ``local``: when all of its files are on this host, as far as the cache
        has room.

        Raises FileNotFoundError if version ``number`` is not there, TimeoutError, and OSError: ENOTSUP if
        it would have to wait in a directory that is not on a mount of irdmafs.
        """
        until_s = None if timeout is None else time.monotonic() + timeout
        seen: Seen | None = None
        while True:
            try:
                found = self.newest() if number is None else number
            except FileNotFoundError:
                found = 0
            if found > max(newer_than, 0) or number is not None:
                path = self.path(found)
                if _is_directory(path):
                    # The files are fetched while the lock is asked for; it shows if the version stays.
                    fetched = _fetch_beside(path) if local else ()
                    with self._locked(str(found), _locks.READ) as fd:
                        if _is_directory(path):
                            for _ in fetched:
                                pass
                            yield Version(found, path, fd)
                            return
                elif number is not None or os.path.lexists(path):
                    raise FileNotFoundError(errno.ENOENT, f"There is no version {found}", path)
                continue
            left_s = None if until_s is None else until_s - time.monotonic()
            try:
                seen = wait(self._versions, seen, timeout=left_s)
            except TimeoutError:
                text = f"Nothing newer than version {newer_than} in {timeout:g} s"
                raise TimeoutError(errno.ETIMEDOUT, text, self._versions) from None

    def is_held(self, number: int) -> bool:
        """Return whether somebody holds a version. Raises OSError."""
        path = os.path.join(self._held, str(number))
        with contextlib.suppress(FileNotFoundError), open_to_read(path, os.O_NOFOLLOW) as (fd, _):
            return _locks.is_locked(fd)
        return False

    @contextlib.contextmanager
    def _locked(self, name: str, kind: int, held: str = "") -> Iterator[int]:
        """Lock the file by which a version or draft is held, which is made if there is none; return its
        descriptor. In the directory `held`, if given, this does not wait: -1 if somebody else has it
        locked. Raises OSError."""
        path, flags, owner = os.path.join(held or self._held, name), _FLAGS, os.getpid()
        if kind == _locks.WRITE:
            flags |= os.O_RDWR
        while True:
            try:
                fd = look_up(os.open, path, flags)
            except FileNotFoundError:
                self._make()  # a program may have named a directory as a version
                fd = os.open(path, flags | os.O_CREAT, 0o666)
            try:
                if not held:
                    _locks.lock(fd, kind)
                elif _locks.is_locked(fd) or not _locks.try_lock(fd, kind):
                    yield -1
                    return
                if os.fstat(fd).st_nlink:
                    yield fd
                    return
            finally:
                # By itself it ends when the mount has been told of the last close, which may be later. A
                # child that leaves the block after a fork has the parent's lock.
                if os.getpid() == owner:
                    with contextlib.suppress(OSError):
                        _locks.lock(fd, _locks.NONE)
                os.close(fd)


@contextlib.contextmanager
def _opened(directory: str) -> Iterator[str]:
    """Give a path that leads to a directory whoever has its name by then. Raises OSError for a link: what
    is removed there would be another user's."""
    fd = os.open(directory, _DIRECTORY)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def _in_thread(work: Callable[[], None]) -> threading.Thread | None:
    """Have a thread do some work, and return it; without one if the program ends, or may have no more."""
    thread = threading.Thread(target=work)
    try:
        thread.start()
    except RuntimeError:
        work()
        return None
    return thread


def _is_directory(path: str) -> bool:
    """Return whether a path leads to a directory. Raises OSError, unless it leads nowhere."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _fetch_beside(directory: str) -> Iterator[None]:
    """Have the mount fetch all files of a directory, in threads. The iterator ends when they are here; it
    raises OSError."""
    threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="irdmafs-fetch")
    fetched = threads.map(open_once, below(directory)[1])
    threads.shutdown(wait=False)
    return fetched


def open_once(path: str) -> None:
    """Open a file and close it, by which its mount fetches it. Raises OSError."""
    # Links that lead nowhere, FIFOs and the like have nothing to fetch.
    with contextlib.suppress(FileNotFoundError), open_to_read(path):
        pass
