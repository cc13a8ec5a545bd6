"""Directories and files that appear whole: drafts, and copies, which share their bytes with what they copy
where a mount can."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from ._files import NO_XATTR, RENAME_EXCHANGE, StrPath, look_up, open_to_read, rename

log = logging.getLogger(__name__)

_UNFINISHED_XATTR = "user.irdmafs.unfinished"
_CLONE_XATTR = "user.irdmafs.clone"
# A mount is asked to make so many files at a time; where it refuses, so many groups of them, by turns.
_TOGETHER = 400
_GROUPS = 20
_COPIED_BYTES = 1 << 20
_NAME_BYTES = 200
_NOT_EMPTY = (errno.ENOTEMPTY, errno.EEXIST)
# A file to be copied: its path, that of the copy, and its status.
_File = tuple[str, str, os.stat_result]


@contextlib.contextmanager
def draft(path: StrPath) -> Iterator[str]:
    """Give a new directory to fill, which is at ``path`` when the block ends, whole: one change, on every
    host. A directory that is there goes, and who has its files open keeps them. After an exception nothing
    has changed.

    On a mount in a cluster files are closed without waiting for the store nodes, and stored together;
    anywhere else it is a directory with another name. Raises OSError: NotADirectoryError if a file is at
    ``path``; EBUSY if a program of this host is still writing a file in it; EINVAL for a path that ends in
    no name, such as "", which would be where the program is.
    """
    with _aside(path) as place:
        os.mkdir(place)
        yield place


@contextlib.contextmanager
def _aside(path: StrPath) -> Iterator[str]:
    """Give a path at which something is to be made, which is at ``path`` when the block ends."""
    parent, name = os.path.split(os.fsdecode(path).rstrip("/"))
    if name in ("", os.curdir, os.pardir):
        raise OSError(errno.EINVAL, "It names no directory to make", path)
    path = os.path.join(os.path.abspath(parent), name)
    place, owner = os.path.join(os.path.dirname(path), new_name(name)), os.getpid()
    try:
        yield place
        # A rename that fails has the files stored before, in a transaction of their own.
        flags = RENAME_EXCHANGE if _is_directory(place) and _is_directory(path) else 0
        try:
            refuse_unfinished(place)
            rename(place, path, flags)
        except OSError as error:
            if error.errno not in ((errno.ENOENT, errno.EINVAL) if flags else _NOT_EMPTY):
                raise OSError(error.errno, error.strerror, path) from None
            rename(place, path, flags ^ RENAME_EXCHANGE)
    finally:
        if os.getpid() == owner:
            remove(place)


def _is_directory(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def new_name(of: str) -> str:
    """Return a new name of a draft (see backend/namespace/drafts), which says what is made there."""
    cut = os.fsdecode(os.fsencode(of)[:_NAME_BYTES])
    return f".draft-{cut}-{secrets.token_hex(8)}"


def remove(path: str) -> None:
    """Remove a file, or a directory with all that is in it as far as that is possible, if it is there. What
    stays is logged."""
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
            return
        with contextlib.suppress(RecursionError):
            shutil.rmtree(path, ignore_errors=True)
        # The directory has gone; or it is very deep, or the error says why not.
        folders, others = below(path)
        for other in others:
            os.unlink(other)
        for folder in reversed(folders):
            os.rmdir(folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("%s stays: %s", path, error)


def refuse_unfinished(directory: str) -> None:
    """Raise OSError EBUSY if a program of this host is still writing a file below a directory of a mount:
    others would see it later, or as it is now."""
    try:
        ino = int(os.getxattr(directory, _UNFINISHED_XATTR))
    except OSError as error:
        if error.errno in NO_XATTR:
            return
        raise
    if ino:
        paths = (path for path in below(directory)[1] if os.lstat(path).st_ino == ino)
        name = os.path.relpath(next(paths, directory), directory)
        raise OSError(errno.EBUSY, f"{name} is still being written", directory)


def below(
    directory: str, failed: Callable[[OSError], object] | None = None
) -> tuple[list[str], list[str]]:
    """Return the paths of a directory and all directories below it, each before those in it, and of
    everything else there. Raises OSError if one cannot be read, unless `failed` is told of it."""
    folders, others = [directory], list[str]()
    for folder in folders:
        try:
            with contextlib.suppress(FileNotFoundError), look_up(os.scandir, folder) as entries:
                for entry in entries:
                    (folders if entry.is_dir(follow_symlinks=False) else others).append(entry.path)
        except OSError as error:
            if failed is None:
                raise
            failed(error)
    return folders, others


class Cloned(NamedTuple):
    """The contents of a copy: how many files and bytes are shared, and how many were copied."""

    shared_files: int
    shared_bytes: int
    copied_files: int
    copied_bytes: int


def clone(source: StrPath, target: StrPath) -> Cloned:
    """Copy a file, or a directory with all below it, as ``cp -a`` does, and return what was copied. The
    copy is at ``target`` when it is whole, in one change; what was there goes.

    On one mount of irdmafs a copy shares the bytes: it takes no room, and neither changes the other. What
    is just being written, or lies elsewhere, is copied byte by byte. Raises OSError: EINVAL for a target in
    the source.
    """
    source, target = os.fsdecode(source), os.fsdecode(target)
    if os.path.realpath(target).startswith(os.path.join(os.path.realpath(source), "")):
        raise OSError(errno.EINVAL, "It is in what is to be copied", target)
    copying = Copying()
    with _aside(target) as place:
        copying.copy(source, place)
    shared, copied = copying.shared, copying.copied
    return Cloned(len(shared), sum(shared), len(copied), sum(copied))


class Copying:
    """Copies files and directories; has the sizes of files that share their bytes, and of others. With
    `links` a copy of a file is another name of it."""

    def __init__(self, *, links: bool = False) -> None:
        self.shared = list[int]()
        self.copied = list[int]()
        self._links = links

    def copy(self, source: str, target: str, *, inside: bool = False) -> None:
        """Copy a file or directory; `inside`: what is in a directory, into another one. Raises OSError."""
        folders, others = below(source) if _is_directory(source) else ([], [source])
        del folders[:inside]
        cut = len(source.rstrip("/"))
        for folder in folders:
            os.mkdir(target + folder[cut:])
        first, links = dict[tuple[int, int], str](), list[tuple[str, str]]()
        for _, paths in groupby(others, os.path.dirname):
            files = list[_File]()
            for path in paths:
                status, made = os.lstat(path), target + path[cut:]
                old = path if self._links else made
                if status.st_nlink > 1 and not self._links:
                    old = first.setdefault((status.st_dev, status.st_ino), made)
                if old != made:
                    links.append((old, made))
                elif stat.S_ISREG(status.st_mode):
                    files.append((path, made, status))
                else:
                    _make_special(path, made, status)
            for at in range(0, len(files), _TOGETHER):
                self._copy_files(files[at : at + _TOGETHER])
        for old, made in links:
            os.link(old, made, follow_symlinks=False)
        for folder in reversed(folders):
            _keep_attributes(folder, target + folder[cut:], os.lstat(folder))

    def _copy_files(self, files: Sequence[_File]) -> None:
        """Have files share their bytes, together or else in smaller groups; copy one that cannot."""
        if _share(files):
            self.shared += [status.st_size for _, _, status in files]
            return
        if len(files) > 1:
            some = -(-len(files) // _GROUPS)
            for first in range(0, len(files), some):
                self._copy_files(files[first : first + some])
            return
        ((path, made, status),) = files
        with (
            open_to_read(path, os.O_NOFOLLOW) as (fd, _),
            open(fd, "rb", closefd=False) as old,
            open(made, "xb") as new,
        ):
            shutil.copyfileobj(old, new, _COPIED_BYTES)
        _keep_attributes(path, made, status)
        self.copied.append(status.st_size)


def _make_special(path: str, made: str, status: os.stat_result) -> None:
    """Copy what is neither a file nor a directory."""
    if stat.S_ISLNK(status.st_mode):
        os.symlink(os.readlink(path), made)
    else:
        os.mknod(made, status.st_mode, status.st_rdev)
    _keep_attributes(path, made, status)


def _share(files: Sequence[_File]) -> bool:
    """Have the mount make copies in a directory that share their bytes. Return whether it did."""
    directory = os.path.dirname(files[0][1])
    device = os.stat(directory).st_dev
    if any(status.st_dev != device for _, _, status in files):
        return False  # another filesystem would take the attribute for one to keep
    try:
        wanted = list[tuple[str, str]]()
        for path, made, _ in files:
            ticket = look_up(os.getxattr, path, _CLONE_XATTR, follow_symlinks=False)
            wanted.append((os.path.basename(made), ticket.decode()))
        os.setxattr(directory, _CLONE_XATTR, json.dumps(wanted).encode())
    except OSError as error:
        if error.errno in (errno.EDQUOT, errno.ENOSPC):
            raise
        return False
    return True


def _keep_attributes(path: str, made: str, status: os.stat_result) -> None:
    with contextlib.suppress(PermissionError):
        os.chown(made, status.st_uid, status.st_gid, follow_symlinks=False)
    shutil.copystat(path, made, follow_symlinks=False)
