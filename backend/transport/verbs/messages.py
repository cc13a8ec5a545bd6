"""Messages that set up queue pairs and grant rights to memory."""

import errno

import msgspec

from ..codec import MessageSet
from ..frames import BadMessage
from ..messages import (
    LASTING_MAX,
    NAME_MAX,
    AboutExtent,
    Answer,
    Message,
    Request,
    ToTarget,
    check_extent,
    check_range,
)
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


class QueueEnd(msgspec.Struct, array_like=True, frozen=True):
    """The attributes of a queue pair that the other end needs. `mtu` is in bytes; `reads` is how many READs
    of the peer it answers at once."""

    gid: bytes
    lid: int
    number: int
    psn: int
    mtu: int
    reads: int


class Rail(msgspec.Struct, array_like=True, frozen=True):
    """A port of a host and the network that it is on: the first `bits` of its GID. `name` is the host's own
    name for the port, `kind` the kind of the GID. `on_way`: the control connection goes through it."""

    name: str
    gid: bytes
    bits: int
    kind: str
    mbit_s: int
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
    pair: int
    rail: str
    gid: bytes

    def check(self) -> None:
        check_end(self.end)
        check_pair(self.pair)


class Expose(AboutExtent, tag=19):
    """Asks to read `length` bytes of an extent, from `start`, out of the node's memory, by queue pair
    `pair`."""

    start: int
    length: int
    pair: int = 0

    def check(self) -> None:
        check_pair(self.pair)
        check_extent(self.extent)
        check_range(self.start, self.length)


class Reserve(ToTarget, tag=30):
    """Asks to write an extent into the node's memory, by queue pair `pair`, in pieces of `piece` bytes; the
    last one may be shorter. Each piece ends with a WRITE that carries the granted handle as immediate data.
    Answered a second time, with the number `sealed`, when all pieces have arrived and the extent is sealed
    here and down the chain."""

    length: int
    piece: int
    sealed: int
    pair: int = 0

    def check(self) -> None:
        ToTarget.check(self)
        check_pair(self.pair)
        check_reservation(self.length, self.piece)


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
    rails: list[Rail]


def check_end(end: QueueEnd) -> None:
    """Raise BadMessage if no queue pair can have these attributes."""
    if (
        len(end.gid) != 16
        or not 0 <= end.lid < 1 << 16
        or not 0 <= end.number < 1 << 24
        or not 0 <= end.psn < 1 << 24
        or end.mtu not in (256, 512, 1024, 2048, 4096)
        or not 0 < end.reads < 1 << 8
    ):
        raise BadMessage("what it says of its queue pair makes no sense")


def check_pair(pair: int) -> None:
    """Raise BadMessage for a number beyond the queue pairs of a connection."""
    if not 0 <= pair < QUEUE_PAIRS_MAX:
        raise BadMessage(f"queue pair {pair} of {QUEUE_PAIRS_MAX}")


def check_rails(rails: list[Rail]) -> None:
    """Raise BadMessage for rails that no host can have."""
    if len(rails) > RAILS_MAX:
        raise BadMessage(f"{len(rails)} rails")
    for rail in rails:
        if (
            len(rail.gid) != 16
            or not 0 <= rail.bits <= 128
            or not 0 <= rail.mbit_s < 1 << 31
            or len(rail.name) > NAME_MAX
        ):
            raise BadMessage("what it says of its rails makes no sense")


def check_reservation(length: int, piece: int) -> None:
    """Raise BadMessage for an impossible piece size or too many pieces."""
    check_range(0, length)
    if not (0 < piece <= length and -(-length // piece) <= PIECES_MAX):
        raise BadMessage(f"{length} bytes in pieces of {piece}")


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
