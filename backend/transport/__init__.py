"""Devices: the memory of a store node seen through a transport.

A device knows extents (content, stripe) and bytes, nothing of files. Every call raises OSError:
ENOENT when the node does not keep the extent (superseded, or never written), ENOSPC, ESTALE when the
group's configuration is another than the caller's (`Fenced`), ENOTCONN/ETIMEDOUT and the like
(`Unreachable`) when the node cannot be asked, EACCES (`Distrusted`) when it will not be either.
"""

import errno
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import NamedTuple, Protocol, TypeAlias

import msgspec

__all__ = [
    "Device",
    "Distrusted",
    "Extent",
    "Fenced",
    "FileRange",
    "Landed",
    "Memory",
    "Target",
    "Unreachable",
    "landed_from",
    "nothing_landed",
]

# Told, in any thread, that bytes (start, length) of what is read are in the file, and shown them if they
# are at hand; told again when they come once more.
Landed: TypeAlias = Callable[[int, int, memoryview | None], None]


def nothing_landed(start: int, length: int, data: memoryview | None) -> None:
    """For who does not want to know."""


def landed_from(landed: Landed, begin: int) -> Landed:
    """Return a function that tells `landed` of bytes whose range begins at `begin` of its own."""

    def land(start: int, length: int, data: memoryview | None) -> None:
        landed(begin + start, length, data)

    return land


class Memory(Enum):
    """What bytes are read into."""

    FILE = auto()
    """A file, which is filled once."""
    LENT = auto()
    """A program's own, which is filled again and again: worth being registered."""
    DEVICE = auto()
    """A device's own, as a dma-buf: only a network card reaches it."""


class FileRange(NamedTuple):
    """`length` bytes of an open file, from `offset`."""

    fd: int
    offset: int
    length: int
    memory: Memory = Memory.FILE

    def part(self, start: int, length: int) -> "FileRange":
        return self._replace(offset=self.offset + start, length=length)


class Extent(NamedTuple):
    content: int
    stripe: int


class Target(msgspec.Struct, array_like=True, frozen=True):
    """Where an extent goes: the group, its configuration (mod_revision of the record) and the nodes
    that are still to get it, in order; each hands it on to the next."""

    group: int
    config: int
    chain: tuple[int, ...]

    def onward(self) -> tuple[int, "Target"]:
        """Return the next node, and the target that it is given."""
        return self.chain[0], Target(self.group, self.config, self.chain[1:])


class Fenced(OSError):
    """The node knows a newer configuration of the group: look it up and begin again."""

    def __init__(self, group: int) -> None:
        super().__init__(errno.ESTALE, f"group {group:#x} has a newer configuration")
        self.group = group


class Unreachable(OSError):
    """The node `node` (of a chain, maybe not the first) cannot be asked."""

    def __init__(self, node: int, reason: str) -> None:
        super().__init__(errno.ENOTCONN, f"store node {node:x} cannot be reached: {reason}")
        self.node = node


class Distrusted(Unreachable):
    """The node and this process do not accept each other: no waiting helps, until somebody changes the
    credentials of one of them."""

    def __init__(self, node: int, reason: str) -> None:
        super().__init__(node, reason)
        self.errno = errno.EACCES


class Device(Protocol):
    """One store node."""

    async def put(self, extent: Extent, target: Target, data: bytes) -> None:
        """Store a small extent on the node and down the chain: sealed everywhere when it returns."""
        ...

    async def write(
        self,
        extent: Extent,
        target: Target,
        source: FileRange,
        passed: Landed = nothing_landed,
    ) -> None:
        """Send a part of a file as an extent; sealed everywhere when it returns. Holes stay holes, unless
        they are small. The bytes pass no Python object; `passed` is shown those that pass through memory of
        this process, in any thread. The descriptor stays the caller's."""
        ...

    async def read(
        self,
        extent: Extent,
        start: int,
        into: FileRange,
        landed: Landed = nothing_landed,
    ) -> None:
        """Receive as much of an extent, from `start`, as the part of a file takes, which may lie behind
        its end. Raises OSError EOPNOTSUPP for a device's memory that cannot be reached."""
        ...

    async def get(self, extents: Sequence[Extent], limit: int) -> list[bytes | None]:
        """Small extents whole, in one round trip; None for those the node does not keep or that are
        longer than `limit` bytes."""
        ...

    async def adopt(self, extent: Extent, target: Target, name: str) -> None:
        """Same host only: take the file `incoming/NAME` of the node's store directory over as this
        extent (no copy), and send it down the chain."""
        ...

    async def read_sparse(
        self, extent: Extent, into: FileRange, landed: Landed = nothing_landed
    ) -> None:
        """As `read`, of a whole extent that has holes; they become holes of the file."""
        ...

    async def digest(self, extent: Extent) -> bytes:
        """The digest (backend/store/digest.py) of what the node has."""
        ...

    async def doubt(self, extent: Extent) -> None:
        """Tell the node that it sent other bytes than were published. It looks for itself."""
        ...

    async def abort(self, content: int) -> None:
        """Drop what was stored of a content that will not be published."""
        ...
