"""Changes of the attributes of an inode, which is a copy and may be changed."""

import errno
import os
import stat
from collections.abc import Mapping

from . import acl
from .inode import NAME_MAX, Inode, fail, nearest_time

XATTR_SIZE_MAX = 64 * 1024
_XATTRS_TOTAL_MAX = 1024 * 1024


def set_attributes(inode: Inode, *, values: Mapping[str, int]) -> None:
    """Set attributes of an inode (see Namespace.set_attributes)."""
    for name, value in values.items():
        if name == "mode":
            value = stat.S_IFMT(inode.mode) | stat.S_IMODE(value)
        elif name.endswith("_ns"):
            value = nearest_time(value)
        setattr(inode, name, value)
    if "mode" in values:
        acl.follow_chmod(inode)


def set_xattr(inode: Inode, *, name: bytes, value: bytes, flags: int, drop_set_gid: bool) -> None:
    """Set an extended attribute of an inode (see Namespace.set_xattr). Raises OSError."""
    if flags & os.XATTR_CREATE and name in inode.xattrs:
        raise fail(errno.EEXIST)
    if flags & os.XATTR_REPLACE and name not in inode.xattrs:
        raise fail(errno.ENODATA)
    if len(name) > NAME_MAX:
        raise fail(errno.ERANGE)
    if len(value) > XATTR_SIZE_MAX:
        raise fail(errno.E2BIG)
    if name in acl.NAMES:
        acl.put(inode, name, value, drop_set_gid=drop_set_gid)
    else:
        inode.xattrs = {**inode.xattrs, name: value}
    if sum(len(key) + len(data) for key, data in inode.xattrs.items()) > _XATTRS_TOTAL_MAX:
        raise fail(errno.ENOSPC)


def remove_xattr(inode: Inode, *, name: bytes) -> None:
    """Remove an extended attribute of an inode. Raises OSError ENODATA."""
    if name not in inode.xattrs and name not in acl.NAMES:
        raise fail(errno.ENODATA)
    acl.remove(inode, name)
