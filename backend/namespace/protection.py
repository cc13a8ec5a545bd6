"""The flags of chattr(1) that say what may not happen to an inode, by whomever.

Only who has CAP_LINUX_IMMUTABLE sets or takes them (the kernel checks that). tmpfs knows the same four;
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
# An inode that is made in a directory gets these flags from it.
HANDED_DOWN: Final = NODUMP | NOATIME

_PROTECTED: Final = IMMUTABLE | APPEND


def refuse_change(inode: Inode) -> None:
    """Raise OSError EPERM when owner, mode, times, xattrs and number of names of an inode are to stay."""
    if inode.flags & _PROTECTED:
        raise fail(errno.EPERM)


def refuse_new_name(directory: Inode) -> None:
    """Raise OSError EPERM when nothing may be added to a directory."""
    if directory.flags & IMMUTABLE:
        raise fail(errno.EPERM)


def refuse_lost_name(directory: Inode, inode: Inode) -> None:
    """Raise OSError EPERM when a name may not be taken from a directory, or from an inode."""
    if (directory.flags | inode.flags) & _PROTECTED:
        raise fail(errno.EPERM)


def refuse_open(inode: Inode, flags: int) -> None:
    """Raise OSError EPERM when an open asks for more than may happen to a file."""
    writing = flags & os.O_ACCMODE != os.O_RDONLY or bool(flags & os.O_TRUNC)
    if inode.flags & IMMUTABLE and writing:
        raise fail(errno.EPERM)
    if inode.flags & APPEND and writing and (not flags & os.O_APPEND or flags & os.O_TRUNC):
        raise fail(errno.EPERM)
