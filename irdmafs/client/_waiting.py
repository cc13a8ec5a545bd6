"""Waiting until a path leads to something new, whichever host makes it, without polling."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ._files import NO_XATTR, StrPath, look_up, naming, read_version

_CHANGES_XATTR = "user.irdmafs.changes"
# The kernel follows so many in a path.
_LINKS_MAX = 40


class Seen(NamedTuple):
    """The inode that a path led to, and the version of a file, or the counter of the changes below a
    directory. Values of one mount can be compared."""

    ino: int
    version: int


def look(path: StrPath) -> Seen | None:
    """Return what a path leads to; None if that is nothing, or a file that has no version yet. Its content
    is not fetched. Raises OSError."""
    try:
        fd = look_up(os.open, path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    with naming(os.fspath(path)):
        try:
            status, link = os.fstat(fd), f"/proc/self/fd/{fd}"
            if stat.S_ISDIR(status.st_mode):
                return Seen(status.st_ino, _changes(link))
            version = read_version(link) if stat.S_ISREG(status.st_mode) else None
            return None if version == 0 else Seen(status.st_ino, version or 0)
        finally:
            os.close(fd)


def wait(path: StrPath, newer_than: Seen | None = None, *, timeout: float | None = None) -> Seen:
    """Return what a path leads to, as soon as that is not ``newer_than``.

    A file is something else when a version of it is published, or when its name, or a link on the
    way, leads to another file; a directory when anything below it changes. A path that leads nowhere
    is waited for. Changes that follow each other may be seen as one; none is missed.

    Raises TimeoutError after ``timeout`` seconds, and OSError: ENOTSUP for a path that is not on a
    mount of irdmafs.
    """
    # Errors name this path, not the directory that is watched.
    with naming(os.fspath(path), instead=True):
        return _wait(path, newer_than, timeout)


def _wait(path: StrPath, newer_than: Seen | None, timeout: float | None) -> Seen:
    until_s = None if timeout is None else time.monotonic() + timeout
    while True:
        try:
            top = _top_of(path)
            before = _changes(top)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE, errno.EINVAL):
                continue  # it has just been removed, or is no link any more: look again
            raise
        seen = look(path)
        if seen not in (None, newer_than):
            return seen
        left_s = None if until_s is None else until_s - time.monotonic()
        if left_s is not None and not left_s > 0.0:  # nor NaN
            raise TimeoutError(errno.ETIMEDOUT, f"Nothing new in {timeout:g} s")
        with contextlib.suppress(InterruptedError, FileNotFoundError):
            _changes(top, f".{before}" if left_s is None else f".{before}.{min(1e6, left_s):.3f}")


def watch(
    path: StrPath, newer_than: Seen | None = None, *, timeout: float | None = None
) -> Iterator[Seen]:
    """Yield what a path leads to whenever that is something new, as ``wait`` returns it."""
    while True:
        newer_than = wait(path, newer_than, timeout=timeout)
        yield newer_than


def _changes(directory: str, since: str = "") -> int:
    """Return the counter of the changes below a directory; ``since``: of which value it is to be another,
    and for how many seconds that is waited for. Raises OSError."""
    try:
        return int(os.getxattr(directory, _CHANGES_XATTR + since))
    except OSError as error:
        if error.errno not in NO_XATTR:
            raise
        text = "Not on a mount of irdmafs, or a link leads out of it"
        raise OSError(errno.ENOTSUP, text) from None


def _top_of(path: StrPath) -> str:
    """Return the directory below which everything lies that decides what a path leads to."""
    named, real = os.path.abspath(path), os.path.realpath(path)
    if os.path.ismount(real):
        return real
    top = os.path.commonpath([os.path.dirname(named), os.path.dirname(real)])
    while not os.path.isdir(top):
        top = os.path.dirname(top)
    for link in _followed(Path(named)) if real != named else ():
        wider = os.path.commonpath([top, link.parent])
        # Links outside of the filesystem are not waited for.
        if os.stat(wider).st_dev == os.stat(top).st_dev:
            top = wider
    return top


def _followed(path: Path) -> Iterator[Path]:
    """Yield each link that is followed on the way to what a path leads to. Raises OSError."""
    for _ in range(_LINKS_MAX):
        link = next(filter(Path.is_symlink, (*reversed(path.parents), path)), None)
        if link is None:
            return
        yield link
        path = Path(os.path.normpath(link.parent / link.readlink() / path.relative_to(link)))
