"""The messages by which queue pairs are set up, and rights to memory given."""

import errno

from .. import Target
from ..codec import MessageSet
from ..frames import BadMessage
from ..messages import (
    LASTING_MAX,
    NAME_MAX,
    AboutExtent,
    Answer,
    Message,
    Request,
    check_extent,
    check_range,
    check_target,
)
from ..rights import ANY, NONE, OWN
from .ends import RAILS_MAX, QueueEnd, Rail

# The error of a node that cannot do a transfer by verbs now, but may in another way.
NOT_BY_VERBS = errno.EOPNOTSUPP
# The queue pair is gone; another one may do.
NO_QUEUE_PAIR = errno.ENOLINK
# The limit for one control connection, which has some queue pairs for every pair of rails.
QUEUE_PAIRS_MAX = 16
# The limit for one control connection at a time.
HANDLES_MAX = LASTING_MAX
PIECES_MAX = 1 << 16


class Release(Message, tag=5):
    """Gives back what `Exposed` gave: an extent was read, or its bytes will not come. Has no answer."""

    handle: int


class Detach(Message, tag=6):
    """The caller's queue pair is of no use any more, nor is what was given for it. Has no answer."""

    pair: int


class Attach(Request, tag=18):
    """Asks for a queue pair to move extents by, at a rail of the node; takes the place of an earlier one
    of the number `pair`."""

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


class Reserve(AboutExtent, tag=30):
    """Asks to write an extent into the node's memory, in pieces of `piece` bytes and what is left, each
    of which ends with a WRITE that carries the handle that is given for it, by queue pair `pair`.
    Answered a second time, with the number `sealed`, when all of them have arrived and the extent is
    sealed here and down the chain."""

    target: Target
    length: int
    piece: int
    sealed: int
    pair: int = 0

    def check(self) -> None:
        check_pair(self.pair)
        check_target(self.target)
        check_extent(self.extent)
        check_reservation(self.length, self.piece)


class Rails(Request, tag=32):
    """Asks on which rails the node can be reached by verbs."""


class Attached(Answer, tag=26):
    end: QueueEnd


class Exposed(Answer, tag=27):
    """Where the bytes are, until Release or until the extent is sealed. `wanted`: the node lacks the
    extent; to one that has it no bytes are written."""

    handle: int
    address: int
    key: int
    wanted: bool = True


class RailsFound(Answer, tag=28):
    rails: list[Rail]


def check_end(end: QueueEnd) -> None:
    """Raises BadMessage for what cannot be a queue pair."""
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
    """Raises BadMessage for more queue pairs than a connection may have."""
    if not 0 <= pair < QUEUE_PAIRS_MAX:
        raise BadMessage(f"queue pair {pair} of {QUEUE_PAIRS_MAX}")


def check_rails(rails: list[Rail]) -> None:
    """Raises BadMessage for what no host has."""
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
    """Raises BadMessage for a number of pieces that nobody needs."""
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
