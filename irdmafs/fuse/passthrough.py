"""FUSE passthrough: the two ioctls by which the kernel serves a node from a file of ours.

Needs Linux 6.9, CAP_SYS_ADMIN, and PASSTHROUGH with a stack depth of at least 1 agreed in INIT.
"""

import fcntl
import struct

_BACKING_OPEN = 0x4010E501
_BACKING_CLOSE = 0x4004E502
_MAP = struct.Struct("<iIQ")
_ID = struct.Struct("<I")


def register(device_fd: int, backing_fd: int) -> int:
    """Give the kernel a file to serve reads and writes from. Returns its backing id (> 0).

    The kernel keeps its own reference; the descriptor may be closed. Raises OSError (EPERM: no
    CAP_SYS_ADMIN; ELOOP: the file lies on a filesystem that is stacked itself).
    """
    # A mutable buffer: for an immutable one fcntl.ioctl returns the buffer, not the id.
    backing_id: int = fcntl.ioctl(device_fd, _BACKING_OPEN, bytearray(_MAP.pack(backing_fd, 0, 0)))
    return backing_id


def unregister(device_fd: int, backing_id: int) -> None:
    fcntl.ioctl(device_fd, _BACKING_CLOSE, bytearray(_ID.pack(backing_id)))
