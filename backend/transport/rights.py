"""The rights of each kind of peer at a store node, and the peer itself.

A mount writes contents of its own session and no others, a reader none, and an administrator reads and
writes no content at all. A node hands on contents that others gave it, so it may write any content; it is
trusted with everything that a group keeps anyway. A role or a message that is not in the table has no
rights. Each operation has its row in operations.py, each message of a mover beside the mover's messages.
"""

import enum
import errno
import hashlib
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, TypeAlias

import trio

from ..trust.security import Identity
from .messages import Message

# The limit of one peer, over all its connections to a node, of requests and the answers that it will get.
# A short request does not count, as its connection takes more.
OUTSTANDING_BYTES_MAX = 64 << 20
SHORT_BYTES = 1 << 10


class Scope(Enum):
    """The contents that a right covers."""

    NONE = auto()
    OWN = auto()
    """Contents of the peer's own session."""
    ANY = auto()


NONE, OWN, ANY = Scope.NONE, Scope.OWN, Scope.ANY
_SESSION_KEY_BYTES = 32
ROLES = ("node", "mount", "reader", "admin")

# The scope for each of ROLES, in their order.
Row: TypeAlias = tuple[Scope, Scope, Scope, Scope]
# A message on a control connection, or an operation on another one.
Asked: TypeAlias = type[Message] | enum.IntEnum


class Outstanding:
    """The bytes that a peer has outstanding: `taken`, of `most`."""

    def __init__(self, most: float = math.inf) -> None:
        self.most = most
        self.taken = 0
        self._lot = trio.lowlevel.ParkingLot()

    async def room(self, size: int) -> None:
        """Wait until so many bytes are not too much. Who has nothing else may take more than all."""
        while self.taken and self.taken + size > self.most:
            await self._lot.park()
        self._lot.unpark()

    async def take(self, size: int) -> None:
        """Take so many bytes, as soon as there is room."""
        if self.taken + size > self.most:
            await self.room(size)
        self.taken += size

    def give_back(self, size: int) -> None:
        """Give bytes back. The one that waits longest looks again, and then the next one."""
        self.taken -= size
        self._lot.unpark()


@dataclass(eq=False)
class Peer:
    """A connected peer. With credentials, its `identity` is that of the certificate; without, the role and
    name that the peer says. `session` is the number of its session, as it last told, or 0. `session_key`
    shows that the session is its own. `node` is the id of a store node, as it says, or 0. What is
    `outstanding` is that of all with the same certificate; nodes wait for each other, and have no limit."""

    identity: Identity
    address: str
    session: int
    node: int = 0
    session_key: bytes = b""
    outstanding: Outstanding = field(default_factory=Outstanding)
    # Answers of etcd that it has not taken yet, likewise; see Readers.
    said: Outstanding = field(default_factory=Outstanding)
    # The session that was last proved to be its own.
    owned: int = 0
    denials: int = 0
    # Requests that wait for changes in etcd.
    watches: int = 0

    @property
    def who(self) -> str:
        """Return what all connections of a peer have in common."""
        return self.identity.serial or self.address

    def __str__(self) -> str:
        return f"{self.identity.role} {self.identity.name!r} at {self.address}"


def may(rights: Mapping[Any, Row], role: str, asked: Asked) -> Scope:
    """Return the scope in which a role may ask for something."""
    if role not in ROLES or asked not in rights:
        return Scope.NONE
    return rights[asked][ROLES.index(role)]


def denied(text: str) -> PermissionError:
    """Return the error EACCES of a peer that has no right to what it asks for."""
    return PermissionError(errno.EACCES, text)


def make_session_key() -> bytes:
    """Return a new key, by which a mount proves to store nodes that a session is its own."""
    return secrets.token_bytes(_SESSION_KEY_BYTES)


def session_digest(key: bytes) -> bytes:
    """Return the digest of a session's key, for its record. Who reads that cannot show the key."""
    return hashlib.sha256(key).digest()
