"""The ioctls of files and directories that filesystems answer: chattr's flags, as tmpfs has them.

The kernel checks who may set which (owner, CAP_LINUX_IMMUTABLE) and sends the request: ioctl_iflags(2),
ioctl_xfsattr(2). Others are no ioctls of files (ENOTTY).
"""

import errno
import struct
from typing import Final

from ..backend.namespace import fail
from ..backend.namespace.protection import APPEND, IMMUTABLE, NOATIME, NODUMP, SETTABLE

GETFLAGS: Final = 0x80086601
SETFLAGS: Final = 0x40086602
FSGETXATTR: Final = 0x801C581F
FSSETXATTR: Final = 0x401C5820
KNOWN: Final = frozenset({GETFLAGS, SETFLAGS, FSGETXATTR, FSSETXATTR})

_FLAGS: Final = struct.Struct("<I")
# struct fsxattr: flags, extent size hint, extents, project, copy-on-write size hint
_FSXATTR: Final = struct.Struct("<IIIII8x")
_FSX_FLAGS: Final = {0x08: IMMUTABLE, 0x10: APPEND, 0x40: NOATIME, 0x80: NODUMP}


def answer(command: int, flags: int) -> bytes:
    """Return the answer to a command that asks for an inode's flags; nothing for one that sets them."""
    if command == GETFLAGS:
        return _FLAGS.pack(flags)
    if command == FSGETXATTR:
        shown = sum(bit for bit, flag in _FSX_FLAGS.items() if flags & flag)
        return _FSXATTR.pack(shown, 0, 0, 0, 0)
    return b""


def asked_flags(command: int, data: bytes) -> int | None:
    """Return the flags that a command sets, None for one that sets none.

    Raises OSError EOPNOTSUPP for flags, and EINVAL for sizes, that there are not.
    """
    if command == SETFLAGS:
        (flags,) = _unpack(_FLAGS, data)
        if flags & ~SETTABLE:
            raise fail(errno.EOPNOTSUPP)
        return flags
    if command == FSSETXATTR:
        shown, extent_size, _, project, cow_size = _unpack(_FSXATTR, data)
        if shown & ~sum(_FSX_FLAGS) or extent_size or project or cow_size:
            raise fail(errno.EOPNOTSUPP)
        return sum(flag for bit, flag in _FSX_FLAGS.items() if shown & bit)
    return None


def _unpack(layout: struct.Struct, data: bytes) -> tuple[int, ...]:
    if len(data) < layout.size:
        raise fail(errno.EINVAL)
    return layout.unpack_from(data)
