"""The group and default ACL that a new inode gets from the directory that it is made in."""

import stat
from typing import NamedTuple

from . import acl
from .inode import NO_XATTRS, Inode

__all__ = ["Inherited", "inherited_from"]


class Inherited(NamedTuple):
    """The attributes that a new inode begins with."""

    mode: int
    gid: int
    xattrs: dict[bytes, bytes]


def inherited_from(directory: Inode, mode: int, gid: int, umask: int) -> Inherited:
    """Return the attributes of a new inode that a process of group `gid` makes in a directory."""
    xattrs = NO_XATTRS
    if not stat.S_ISLNK(mode):
        default = directory.xattrs.get(acl.DEFAULT)
        if default is None:
            mode &= ~(umask & 0o777)  # never the type, whatever the umask says
        else:
            mode, xattrs = acl.inherited(default, mode)
    if directory.mode & stat.S_ISGID:
        gid = directory.gid
        mode |= stat.S_ISGID if stat.S_ISDIR(mode) else 0
    return Inherited(mode, gid, xattrs or NO_XATTRS)
