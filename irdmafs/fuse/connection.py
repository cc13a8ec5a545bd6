"""The connection to the kernel: its descriptor, what both sides agree on before the first request, and the
files from which the kernel serves reads and writes by itself (passthrough).

Passthrough needs Linux 6.9, CAP_SYS_ADMIN, and a stack depth of at least 1 agreed in INIT.
"""

import errno
import fcntl
import logging
import os
import struct
from typing import Final

from . import wire
from .wire import BODY, Init, Malformed, Opcode, Request

log = logging.getLogger(__name__)

MAX_WRITE_BYTES: Final = 1024 * 1024
_BUFFER_BYTES: Final = MAX_WRITE_BYTES + 4096
# Releases count among them: one that has to wait its turn would come after an open that it matters to.
_BACKGROUND_MAX: Final = 65535

_WANTED: Final = sum(Init)

_BACKING_OPEN: Final = 0x4010E501
_BACKING_CLOSE: Final = 0x4004E502
_MAP: Final = struct.Struct("<iIQ")
_ID: Final = struct.Struct("<I")


class ProtocolError(Exception):
    """The kernel's FUSE cannot do what this session needs; the text says what."""


class Connection:
    """An open /dev/fuse descriptor whose filesystem is mounted, which it closes in the end.

    The constructor answers the kernel's INIT, which mount(2) leaves in the queue. It raises ProtocolError
    when the kernel lacks what we need; the descriptor then stays the caller's.

    `stack_depth` is how deep this filesystem may lie in a stack of filesystems, at most 2; the files it
    passes through to lie at least one less deep. `acls`: the kernel is to check ACLs, and with them modes,
    whatever the mount options say.
    """

    def __init__(self, device_fd: int, stack_depth: int = 1, *, acls: bool = True) -> None:
        self.fd = device_fd
        self.buffer = bytearray(_BUFFER_BYTES)
        self.buffers = (self.buffer,)  # as readv(2) takes it
        received = os.readv(device_fd, self.buffers)
        request = Request(*wire.IN_HEADER.unpack_from(self.buffer))
        if received < BODY or request.length != received:
            raise Malformed(f"the first request has {received} bytes")
        if request.opcode != Opcode.INIT:
            raise ProtocolError(f"the kernel began with request {request.opcode}, not INIT")
        request.refuse_shorter(BODY + wire.INIT_IN.size)
        major, minor, readahead, flags = wire.INIT_IN.unpack_from(self.buffer, BODY)
        if major != wire.MAJOR or minor < wire.MIN_MINOR:
            needed = f"7.{wire.MIN_MINOR} is needed"
            raise self._refused(request, f"the kernel speaks FUSE {major}.{minor}; {needed}")
        if flags & Init.INIT_EXT:
            (flags2,) = wire.INIT_IN_FLAGS2.unpack_from(self.buffer, BODY + wire.INIT_IN.size)
            flags |= flags2 << 32
        if not flags & Init.PASSTHROUGH:
            needed = "Linux 6.9 with CONFIG_FUSE_PASSTHROUGH has"
            raise self._refused(request, f"the kernel's FUSE has no passthrough ({needed})")
        self.has_epochs = minor >= wire.EPOCH_MINOR
        self.can_prune = minor >= wire.PRUNE_MINOR
        agreed = flags & (_WANTED if acls else _WANTED & ~Init.POSIX_ACL)
        answer = wire.INIT_OUT.pack(
            wire.MAJOR, min(minor, wire.MINOR), readahead, agreed & 0xFFFFFFFF,
            _BACKGROUND_MAX, _BACKGROUND_MAX, MAX_WRITE_BYTES, 1, MAX_WRITE_BYTES // 4096, 0,
            agreed >> 32, stack_depth, 0,
        )  # fmt: skip
        size = wire.OUT_HEADER.size + len(answer)
        os.write(device_fd, wire.OUT_HEADER.pack(size, 0, request.unique) + answer)
        os.set_blocking(device_fd, False)

    def _refused(self, request: Request, why: str) -> ProtocolError:
        self.refuse(request.unique, errno.EPROTO)
        return ProtocolError(why)

    def answer(self, unique: int, payload: bytes) -> None:
        """Send the answer to a request."""
        try:
            size = wire.OUT_HEADER.size + len(payload)
            os.write(self.fd, wire.OUT_HEADER.pack(size, 0, unique) + payload)
        except OSError as error:
            self.not_answered(error)

    def refuse(self, unique: int, code: int) -> None:
        """Answer a request with an error."""
        try:
            os.write(self.fd, wire.OUT_HEADER.pack(wire.OUT_HEADER.size, -code, unique))
        except OSError as error:
            self.not_answered(error)

    @staticmethod
    def not_answered(error: OSError) -> None:
        """Note that an answer could not be sent."""
        # ENOENT: the caller was killed meanwhile. ENODEV: unmounted.
        if error.errno not in (errno.ENOENT, errno.ENODEV):
            log.error("answering the kernel failed: %s", error)

    def tell(self, message: bytes) -> bool:
        """Send what the kernel did not ask for. Return False if it does not know what this is about."""
        try:
            os.write(self.fd, message)
        except OSError as error:
            if error.errno == errno.ENOENT:
                return False
            if error.errno not in (errno.ENODEV, errno.ENOTDIR):
                log.warning("notifying the kernel failed: %s", error)
        return True

    def register(self, fd: int) -> int:
        """Give the kernel a file to serve reads and writes of a node from. Return its backing id (> 0).

        The kernel keeps its own reference; the descriptor may be closed. Raises OSError (EPERM: no
        CAP_SYS_ADMIN; ELOOP: the file lies on a filesystem that is stacked itself).
        """
        # A mutable buffer: for an immutable one fcntl.ioctl returns the buffer, not the id.
        backing_id: int = fcntl.ioctl(self.fd, _BACKING_OPEN, bytearray(_MAP.pack(fd, 0, 0)))
        return backing_id

    def unregister(self, backing_id: int) -> None:
        fcntl.ioctl(self.fd, _BACKING_CLOSE, bytearray(_ID.pack(backing_id)))

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
