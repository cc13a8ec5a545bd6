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
from ._files import StrPath, look_up, open_to_read

_CLONE_XATTR = "user.irdmafs.clone"
# A mount makes so many files at a time.
_TOGETHER = 30
_COPIED_BYTES = 1 << 20


# A file to be copied: its path, that of the copy, and its status.
_File = tuple[str, str, os.stat_result]


class Cloned(NamedTuple):
    """What a copy consists of: how many files and bytes are shared, and how many were copied."""

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
    if os.path.realpath(target).startswith(os.path.join(os.path.realpath(source), "")):
        raise OSError(errno.EINVAL, "It is in what is to be copied", target)
    copying = _Copying()
    with aside(target) as place:
        copying.copy({place: os.fspath(source)}, os.path.dirname(place))
    shared, copied = copying.shared, copying.copied
    return Cloned(len(shared), sum(shared), len(copied), sum(copied))


def clone_all(source: str, target: str) -> None:
    """Copy all that is in a directory into another one. Raises OSError."""
    _Copying().copy_all(source, target)


class _Copying:
    """Copies files and directories; has the sizes of files that share their bytes, and of others."""

    def __init__(self) -> None:
        self.shared = list[int]()
        self.copied = list[int]()

    def copy_all(self, source: str, target: str) -> None:
        names = os.listdir(source)
        self.copy({f"{target}/{name}": f"{source}/{name}" for name in names}, target)

    def copy(self, sources: Mapping[str, str], directory: str) -> None:
        """Copy what is under paths to other ones in a directory, by which they are given."""
        files = list[_File]()
        for made, path in sources.items():
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode):
                files.append((path, made, status))
                continue
            if stat.S_ISDIR(status.st_mode):
                os.mkdir(made)
                self.copy_all(path, made)
            elif stat.S_ISLNK(status.st_mode):
                os.symlink(os.readlink(path), made)
            else:
                os.mknod(made, status.st_mode, status.st_rdev)
            _keep_attributes(path, made, status)
        for first in range(0, len(files), _TOGETHER):
            some = files[first : first + _TOGETHER]
            if not _share(some, directory):
                for file in some:
                    self._copy_one(*file, directory)
            else:
                self.shared += [status.st_size for _, _, status in some]

    def _copy_one(self, path: str, made: str, status: os.stat_result, directory: str) -> None:
        """Copy a file that could not be shared together with others."""
        if _share([(path, made, status)], directory):
            self.shared.append(status.st_size)
        else:
            with (
                open_to_read(path, os.O_NOFOLLOW) as (fd, _),
                open(fd, "rb", closefd=False) as old,
                open(made, "xb") as new,
            ):
                shutil.copyfileobj(old, new, _COPIED_BYTES)
            _keep_attributes(path, made, status)
            self.copied.append(status.st_size)


def _share(files: Sequence[_File], directory: str) -> bool:
    """Have the mount make copies in a directory that share their bytes. Return whether it did."""
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
