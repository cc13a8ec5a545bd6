"""Copies of files and directories that share the bytes of what they are copies of, where a mount can."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from typing import NamedTuple

from ._drafts import aside
from ._files import StrPath, look_up

_CLONE_XATTR = "user.irdmafs.clone"
# A mount makes so many files at a time.
_TOGETHER = 30


class Cloned(NamedTuple):
    """What a copy consists of: how many files and bytes are shared, and how many were copied."""

    shared_files: int = 0
    shared_bytes: int = 0
    copied_files: int = 0
    copied_bytes: int = 0

    def _and(self, path: str, *, shared: bool) -> Cloned:
        size = os.lstat(path).st_size
        more = (1, size, 0, 0) if shared else (0, 0, 1, size)
        return Cloned(*map(sum, zip(self, more, strict=True)))


def clone(source: StrPath, target: StrPath) -> Cloned:
    """Copy a file, or a directory with all below it, as ``cp -a`` does, and return what was copied. The
    copy is at ``target`` when it is whole, in one change; what was there goes.

    On one mount of irdmafs a copy shares the bytes: it takes no room, and neither changes the other. What
    is just being written, or lies elsewhere, is copied byte by byte. Raises OSError.
    """
    source = os.fspath(source)
    with aside(target) as place:
        directory, name = os.path.split(place)
        return _copy([os.path.split(source.rstrip("/") or "/")], [name], directory)


def clone_all(source: str, target: str) -> Cloned:
    """Copy all that is in a directory into another one. Raises OSError."""
    names = os.listdir(source)
    return _copy([(source, name) for name in names], names, target)


def _copy(sources: list[tuple[str, str]], names: list[str], target: str) -> Cloned:
    """Copy what is under names of directories into another one, under other names."""
    done, files = Cloned(), list[tuple[str, str]]()
    for (directory, former), name in zip(sources, names, strict=True):
        path, made = os.path.join(directory, former), os.path.join(target, name)
        mode = os.lstat(path).st_mode
        if os.path.isdir(path) and not os.path.islink(path):
            os.mkdir(made)
            below = clone_all(path, made)
            done = Cloned(*map(sum, zip(done, below, strict=True)))
        elif os.path.islink(path):
            os.symlink(os.readlink(path), made)
        elif os.path.isfile(path):
            files.append((path, made))
            continue
        else:
            os.mknod(made, mode, os.lstat(path).st_rdev)
        _keep_attributes(path, made)
    for first in range(0, len(files), _TOGETHER):
        some = files[first : first + _TOGETHER]
        shared = _share(some, target)
        for path, made in some:
            is_shared = shared or (len(some) > 1 and _share([(path, made)], target))
            if not is_shared:
                shutil.copyfile(path, made)
                _keep_attributes(path, made)
            done = done._and(made, shared=is_shared)
    return done


def _share(files: list[tuple[str, str]], target: str) -> bool:
    """Have the mount make copies in a directory that share their bytes. Return whether it did."""
    try:
        wanted = [
            (os.path.basename(made), look_up(os.getxattr, path, _CLONE_XATTR).decode())
            for path, made in files
        ]
        os.setxattr(target, _CLONE_XATTR, json.dumps(wanted).encode())
    except OSError as error:
        if error.errno in (errno.EDQUOT, errno.ENOSPC):
            raise
        return False
    return True


def _keep_attributes(path: str, made: str) -> None:
    status = os.lstat(path)
    with contextlib.suppress(PermissionError):
        os.chown(made, status.st_uid, status.st_gid, follow_symlinks=False)
    shutil.copystat(path, made, follow_symlinks=False)
