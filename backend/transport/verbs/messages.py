"""Messages that set up queue pairs and grant rights to memory."""

import errno
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from .. import Number
from ..frames import BadMessage, MessageSet
from ..messages import LASTING_MAX, AboutExtent, Answer, Length, Message, Name, Request, ToTarget
from ..rights import ANY, NONE, OWN

# The error of a node that cannot do a transfer by verbs now, but can by another mover.
NOT_BY_VERBS = errno.EOPNOTSUPP
# The error when the queue pair is gone; the transfer may succeed on another one.
NO_QUEUE_PAIR = errno.ENOLINK
# The limit for one control connection, which has at least one queue pair for every pair of rails.
QUEUE_PAIRS_MAX = 16
# The limit of granted rights for one control connection at a time.
HANDLES_MAX = LASTING_MAX
PIECES_MAX = 1 << 16
# The limit for one host. A port counts once for each network that it is on.
RAILS_MAX = 16

Mtu: TypeAlias = Literal[256, 512, 1024, 2048, 4096]
_Gid: TypeAlias = Annotated[bytes, Meta(min_length=16, max_length=16)]
_Uint24: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 24)]
# The number of a queue pair of a connection.
_Pair: TypeAlias = Annotated[int, Meta(ge=0, lt=QUEUE_PAIRS_MAX)]


class QueueEnd(msgspec.Struct, array_like=True, frozen=True):
    """A queue pair as the other end needs it: `mtu` in bytes, `reads`: the READs it answers at once."""

    gid: _Gid
    lid: Annotated[int, Meta(ge=0, lt=1 << 16)]
    number: _Uint24
    psn: _Uint24
    mtu: Mtu
    reads: Annotated[int, Meta(gt=0, lt=1 << 8)]


class Rail(msgspec.Struct, array_like=True, frozen=True):
    """A port of a host and the network that it is on: the first `bits` of its GID. `name` is the host's own
    name for the port, `kind` the kind of the GID. `on_way`: the control connection goes through it."""

    name: Name
    gid: _Gid
    bits: Annotated[int, Meta(ge=0, le=128)]
    kind: str
    mbit_s: Annotated[int, Meta(ge=0, lt=1 << 31)]
    is_soft: bool
    on_way: bool

    @property
    def network(self) -> tuple[str, int, int]:
        """Return a key that is equal for rails that reach each other."""
        return self.kind, self.bits, int.from_bytes(self.gid, "big") >> 128 - self.bits


class Release(Message, tag=5):
    """Gives a right back: the extent was read, or its bytes will not come. Has no answer."""

    handle: int


class Detach(Message, tag=6):
    """Tells that the caller closed its queue pair; the rights granted for it end. Has no answer."""

    pair: int


class Attach(Request, tag=18):
    """Asks for a queue pair on a rail of the node; it replaces an earlier one with the number `pair`."""

    end: QueueEnd
    pair: _Pair
    rail: str
    gid: bytes


class Expose(AboutExtent, tag=19):
    """Asks to read `length` bytes of an extent, from `start`, out of the node's memory by a queue pair."""

    start: Number
    length: Length
    pair: _Pair = 0


class Reserve(ToTarget, tag=30):
    """Asks to write an extent into the node's memory, by queue pair `pair`, in pieces of `piece` bytes; the
    last one may be shorter. Each piece ends with a WRITE that carries the granted handle as immediate data.
    Answered a second time, with the number `sealed`, when all pieces have arrived and the extent is sealed
    here and down the chain."""

    length: Length
    piece: int
    sealed: int
    pair: _Pair = 0

    def check(self) -> None:
        if not (0 < self.piece <= self.length and -(-self.length // self.piece) <= PIECES_MAX):
            raise BadMessage(f"{self.length} bytes in pieces of {self.piece}")


class Rails(Request, tag=32):
    """Asks on which rails the node can be reached by verbs."""


class Attached(Answer, tag=26):
    end: QueueEnd


class Exposed(Answer, tag=27):
    """The address and rkey of the bytes, valid until Release or until the extent is sealed. `wanted` is
    false if the node has the extent already: no bytes are to be written then."""

    handle: int
    address: int
    key: int
    wanted: bool = True


class RailsFound(Answer, tag=28):
    rails: Annotated[list[Rail], Meta(max_length=RAILS_MAX)]


MESSAGES = MessageSet(
    # In the order of ROLES.
    {
        Expose: (ANY, ANY, ANY, NONE),
        Reserve: (ANY, OWN, NONE, NONE),
        Rails: (ANY, ANY, ANY, NONE),
        Attach: (ANY, ANY, ANY, NONE),
        Detach: (ANY, ANY, ANY, NONE),
        Release: (ANY, ANY, ANY, NONE),
    },
    (Attached, Exposed, RailsFound),
)
