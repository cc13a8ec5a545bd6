"""Devices: the memory of a store node seen through a transport (device.py).

A device knows extents (content, stripe) and bytes, nothing of files. Every call raises OSError: ENOENT if
the node does not have the extent (superseded, or never written), ENOSPC, ESTALE if the group's
configuration is not the caller's (`Fenced`), ENOTCONN/ETIMEDOUT and the like (`Unreachable`) if the node
cannot be reached, EACCES (`Distrusted`) if it and this process do not accept each other.
"""

import errno
from collections.abc import Callable
from enum import Enum, auto
from typing import Annotated, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

# More than a group has members, also when it moves to other nodes, and again before it is there.
CHAIN_MAX = 63
# The number of a node, a group, a content or a session.
Number: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
# Called from any thread when a range (start, length) of the file has been received, with the bytes if
# they are in memory; called again if the range is received once more.
Landed: TypeAlias = Callable[[int, int, memoryview | None], None]


def nothing_landed(start: int, length: int, data: memoryview | None) -> None:
    """Do nothing: for callers that need no notice."""


def landed_from(landed: Landed, begin: int) -> Landed:
    """Return a function that calls `landed` with ranges moved by `begin`."""
    if not begin:
        return landed

    def land(start: int, length: int, data: memoryview | None) -> None:
        landed(begin + start, length, data)

    return land


class Memory(Enum):
    """The kind of memory that bytes are read into."""

    FILE = auto()
    """A file, which is filled once."""
    HOLES = auto()
    """A file that gets the holes of what is read, and may have no room for them."""
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
    content: Number
    stripe: Annotated[int, Meta(ge=0, lt=1 << 32)]


class Target(msgspec.Struct, array_like=True, frozen=True):
    """The destination of an extent: the group, its configuration (mod_revision of the record) and the
    remaining nodes in order, each of which sends it on to the next."""

    group: Number
    config: Number
    chain: Annotated[tuple[Number, ...], Meta(max_length=CHAIN_MAX)]

    def onward(self) -> tuple[int, "Target"]:
        """Return the next node, and the target to send it."""
        return self.chain[0], Target(self.group, self.config, self.chain[1:])


class Fenced(OSError):
    """The node knows a newer configuration of the group: look it up and begin again."""

    def __init__(self, text: str) -> None:
        super().__init__(errno.ESTALE, text)


class Unreachable(OSError):
    """The node `node` (of a chain, maybe not the first) cannot be reached."""

    def __init__(self, node: int, reason: str) -> None:
        super().__init__(errno.ENOTCONN, f"store node {node:x} cannot be reached: {reason}")
        self.node, self.reason = node, reason


class Distrusted(Unreachable):
    """The node and this process do not accept each other, until the credentials of one change."""

    def __init__(self, node: int, reason: str) -> None:
        super().__init__(node, reason)
        self.errno = errno.EACCES
