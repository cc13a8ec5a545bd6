"""Copies of files and directories that share the bytes of what they are copies of, where a mount can."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
from collections.abc import Mapping, Sequence
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

    def _with(self, *more: int) -> Cloned:
        return Cloned(*map(sum, zip(self, more, strict=True)))


class _File(NamedTuple):
    path: str
    made: str
    size: int
    is_near: bool


def clone(source: StrPath, target: StrPath) -> Cloned:
    """Copy a file, or a directory with all below it, as ``cp -a`` does, and return what was copied. The
    copy is at ``target`` when it is whole, in one change; what was there goes.

    On one mount of irdmafs a copy shares the bytes: it takes no room, and neither changes the other. What
    is just being written, or lies elsewhere, is copied byte by byte. Raises OSError.
    """
    with aside(target) as place:
        return _copy({place: os.fspath(source)}, os.path.dirname(place))


def clone_all(source: str, target: str) -> Cloned:
    """Copy all that is in a directory into another one. Raises OSError."""
    names = os.listdir(source)
    made = {os.path.join(target, name): os.path.join(source, name) for name in names}
    return _copy(made, target)


def _copy(sources: Mapping[str, str], directory: str) -> Cloned:
    """Copy what is under paths to other ones in a directory, by which they are given."""
    done, files, device = Cloned(), list[_File](), os.stat(directory).st_dev
    for made, path in sources.items():
        status = os.lstat(path)
        if stat.S_ISREG(status.st_mode):
            files.append(_File(path, made, status.st_size, status.st_dev == device))
            continue
        if stat.S_ISDIR(status.st_mode):
            os.mkdir(made)
            done = done._with(*clone_all(path, made))
        elif stat.S_ISLNK(status.st_mode):
            os.symlink(os.readlink(path), made)
        else:
            os.mknod(made, status.st_mode, status.st_rdev)
        _keep_attributes(path, made)
    for first in range(0, len(files), _TOGETHER):
        some = files[first : first + _TOGETHER]
        shared = _share(some, directory)
        for file in some:
            if shared or (len(some) > 1 and _share([file], directory)):
                done = done._with(1, file.size, 0, 0)
            else:
                shutil.copyfile(file.path, file.made)
                _keep_attributes(file.path, file.made)
                done = done._with(0, 0, 1, file.size)
    return done


def _share(files: Sequence[_File], directory: str) -> bool:
    """Have the mount make copies in a directory that share their bytes. Return whether it did."""
    if not all(file.is_near for file in files):
        return False  # another filesystem would take the attribute for one to keep
    try:
        wanted = [
            (os.path.basename(made), look_up(os.getxattr, path, _CLONE_XATTR).decode())
            for path, made, *_ in files
        ]
        os.setxattr(directory, _CLONE_XATTR, json.dumps(wanted).encode())
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
