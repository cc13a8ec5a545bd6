"""The rights of each kind of peer at a store node, in one table, and who a peer is.

A mount writes contents of its own session and no others, a reader none, and an administrator touches no
content at all. A node hands on what others gave it, so it may write any content; it is trusted with all
that a group keeps anyway. A role that is not in the table has no rights.
"""

import errno
from enum import Enum, auto
from typing import TypeAlias

import trio

from .messages import (
    Abort,
    Adopt,
    Attach,
    Detach,
    Digest,
    Doubt,
    Expose,
    Get,
    Map,
    Message,
    Ping,
    Put,
    Rails,
    Release,
    Renewed,
    Reserve,
    Scrub,
    Status,
    Suspect,
    Tickets,
)
from .wire import Op

__all__ = ["RIGHTS", "ROLES", "Peer", "Scope", "may", "need"]


class Scope(Enum):
    """How far a right goes."""

    NONE = auto()
    OWN = auto()
    """Contents of the peer's own session."""
    ANY = auto()


# A message on a control connection, or an operation on a data connection.
Asked: TypeAlias = type[Message] | Op

ROLES = ("node", "mount", "reader", "admin")
_NONE, _OWN, _ANY = Scope.NONE, Scope.OWN, Scope.ANY

# In the order of ROLES.
RIGHTS: dict[Asked, tuple[Scope, Scope, Scope, Scope]] = {
    Ping: (_ANY, _ANY, _ANY, _ANY),
    Renewed: (_ANY, _ANY, _ANY, _ANY),
    Status: (_ANY, _NONE, _NONE, _ANY),
    Scrub: (_NONE, _NONE, _NONE, _ANY),
    # Reading.
    Get: (_ANY, _ANY, _ANY, _NONE),
    Op.READ: (_ANY, _ANY, _ANY, _NONE),
    Map: (_ANY, _ANY, _ANY, _NONE),
    Expose: (_ANY, _ANY, _ANY, _NONE),
    # It has the node look for itself whether its bytes are right.
    Doubt: (_ANY, _ANY, _ANY, _NONE),
    # It makes the node read much for little.
    Digest: (_ANY, _NONE, _NONE, _NONE),
    # Writing.
    Put: (_ANY, _OWN, _NONE, _NONE),
    Op.WRITE: (_ANY, _OWN, _NONE, _NONE),
    Op.SPARSE: (_ANY, _OWN, _NONE, _NONE),
    Op.PART: (_ANY, _OWN, _NONE, _NONE),
    Reserve: (_ANY, _OWN, _NONE, _NONE),
    Adopt: (_NONE, _OWN, _NONE, _NONE),
    Abort: (_NONE, _OWN, _NONE, _NONE),
    # It asks the node to look for itself whether another one can be reached.
    Suspect: (_NONE, _ANY, _NONE, _NONE),
    # Connections of its own, over which the above is done.
    Tickets: (_ANY, _ANY, _ANY, _NONE),
    Rails: (_ANY, _ANY, _ANY, _NONE),
    Attach: (_ANY, _ANY, _ANY, _NONE),
    Detach: (_ANY, _ANY, _ANY, _NONE),
    Release: (_ANY, _ANY, _ANY, _NONE),
}


class Peer:
    """A connected peer. With credentials, `role` and `name` are those of the certificate (`is_certified`).
    Without, they are what the peer says. `serial` is the certificate's number. `session` is the number of
    its session, as it last told, or 0. `session_key` shows that the session is its own. `node` is the id of
    a store node, as it says, or 0.
    """

    def __init__(
        self,
        role: str,
        name: str,
        address: str,
        session: int,
        node: int = 0,
        *,
        session_key: bytes = b"",
        is_certified: bool = False,
        serial: str = "",
    ) -> None:
        self.role = role
        self.name = name
        self.address = address
        self.session = session
        self.node = node
        self.session_key = session_key
        self.is_certified = is_certified
        self.serial = serial
        # The session that was last found to be its own.
        self.owned = 0
        # Numbers of tickets that it has not used yet, the oldest first.
        self.tickets: dict[bytes, None] = {}
        # The cancel scopes of data connections that wait for a request.
        self.waiting: set[trio.CancelScope] = set()
        self.has_left = False
        self.denials = 0

    def leave(self) -> None:
        """The control connection ended, and all rights with it."""
        self.has_left = True
        for scope in self.waiting:
            scope.cancel()

    def __str__(self) -> str:
        return f"{self.role} {self.name!r} at {self.address}"


def may(role: str, asked: Asked) -> Scope:
    """Return the scope in which a role may ask for something."""
    if role not in ROLES or asked not in RIGHTS:
        return Scope.NONE
    return RIGHTS[asked][ROLES.index(role)]


def need(role: str, asked: Asked) -> Scope:
    """As `may`; raises OSError EACCES for what a role may not do at all."""
    scope = may(role, asked)
    if scope is Scope.NONE:
        raise PermissionError(errno.EACCES, f"a {role} may not {_verb(asked)}")
    return scope


def _verb(asked: Asked) -> str:
    name = asked.name if isinstance(asked, Op) else asked.__name__
    return f"send {name.lower()} to a store node"
