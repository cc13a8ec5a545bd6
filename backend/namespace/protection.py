"""The flags of chattr(1) that forbid changes of an inode to every user.

Only a process with CAP_LINUX_IMMUTABLE can change them (the kernel checks that). tmpfs has the same four;
other flags are refused. Bits are those of FS_IOC_GETFLAGS (ioctl_iflags(2)).
"""

import errno
import os
from typing import Final

from .inode import Inode, fail

IMMUTABLE: Final = 0x10
APPEND: Final = 0x20
NODUMP: Final = 0x40
NOATIME: Final = 0x80
SETTABLE: Final = IMMUTABLE | APPEND | NODUMP | NOATIME
# A new inode gets these flags from its directory.
HANDED_DOWN: Final = NODUMP | NOATIME

_PROTECTED: Final = IMMUTABLE | APPEND


def refuse_change(inode: Inode) -> None:
    """Raise OSError EPERM if owner, mode, times, xattrs and link count of an inode may not change."""
    if inode.flags & _PROTECTED:
        raise fail(errno.EPERM)


def refuse_new_name(directory: Inode) -> None:
    """Raise OSError EPERM if no name may be added to a directory."""
    if directory.flags & IMMUTABLE:
        raise fail(errno.EPERM)


def refuse_lost_name(directory: Inode, inode: Inode) -> None:
    """Raise OSError EPERM if no name may be removed from a directory, or from an inode."""
    if (directory.flags | inode.flags) & _PROTECTED:
        raise fail(errno.EPERM)


def refuse_open(inode: Inode, flags: int) -> None:
    """Raise OSError EPERM if the flags of a file forbid an open of this kind."""
    writing = flags & os.O_ACCMODE != os.O_RDONLY or bool(flags & os.O_TRUNC)
    if inode.flags & IMMUTABLE and writing:
        raise fail(errno.EPERM)
    if inode.flags & APPEND and writing and (not flags & os.O_APPEND or flags & os.O_TRUNC):
        raise fail(errno.EPERM)
