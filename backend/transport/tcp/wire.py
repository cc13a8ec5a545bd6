"""The format of data connections: a preamble, then Headers and Replies (streams.py says in what order); and
the messages on control connections by which they are asked for.

Headers and Replies are in MessagePack. Each follows its length; its code (authentication.py) follows.
"""

import enum
import struct
from collections.abc import Mapping
from functools import partial
from operator import itemgetter
from typing import Annotated, Final, NamedTuple, TypeAlias

from msgspec import Meta
from msgspec.msgpack import Decoder, Encoder

from ...files.sparse import SEGMENTS_MAX
from .. import Extent, Number, Target
from ..frames import BadMessage, MessageSet, decoded
from ..messages import TEXT_MAX, VERSION, Answer, Errno, Name, Request, describe_version, error_of
from ..rights import ANY, NONE, OWN, Row
from .authentication import CODE_BYTES, TICKET_NUMBER_BYTES, Ticket

_MAGIC = b"irDM"
_PREAMBLE = struct.Struct(f">4sHH{TICKET_NUMBER_BYTES}s")
_LENGTH: Final = itemgetter(1)

# With the code.
PREAMBLE_BYTES = _PREAMBLE.size + CODE_BYTES
TICKETS_MAX = 64

# Starts and lengths of ranges of an extent.
Ranges: TypeAlias = tuple[tuple[Number, Number], ...]


class Op(enum.IntEnum):
    READ = 1
    WRITE = 2


class Tickets(Request, tag=17):
    """Asks for the right to open `count` data connections."""

    count: Annotated[int, Meta(gt=0, le=TICKETS_MAX)]


class Granted(Answer, tag=24):
    tickets: list[Ticket]


MESSAGES = MessageSet({Tickets: (ANY, ANY, ANY, NONE)}, (Granted,))

# The rights to requests on data connections.
RIGHTS: Mapping[Op, Row] = {Op.READ: (ANY, ANY, ANY, NONE), Op.WRITE: (ANY, OWN, NONE, NONE)}


class ReplyKind(enum.IntEnum):
    OK = 1
    WORKING = 2
    FAILED = 3


class Reply(NamedTuple):
    """The answer to a request. `closing`: the connection is of no more use, as sent bytes were left."""

    kind: ReplyKind
    code: Errno = 0
    node: Number = 0
    text: Annotated[str, Meta(max_length=TEXT_MAX)] = ""
    closing: bool = False

    def check(self, group: int) -> None:
        """Raise the node's error, if it is one; `group` is that of a Fenced."""
        if self.kind is ReplyKind.FAILED:
            raise error_of(self.code, self.node, self.text, group)


class Header(NamedTuple):
    """One stream of a transfer: the `ranges` (start, length) of an extent whose bytes it brings, in this
    order. The streams of one write have the same `transfer`, a random number; the extent is `total` bytes
    long, and all streams together bring `comes` of them: the others are holes."""

    op: Op
    extent: Extent
    target: Target
    transfer: Number
    total: Number
    comes: Number
    ranges: Annotated[Ranges, Meta(min_length=1, max_length=SEGMENTS_MAX)]
    trace: Name

    @property
    def length(self) -> int:
        """Return how many bytes the stream brings."""
        return sum(map(_LENGTH, self.ranges))


encode: Final = Encoder().encode
_headers = Decoder(Header)
decode_reply: Final = partial(decoded, Decoder(Reply))
# The longest is a header with SEGMENTS_MAX ranges, of 19 bytes each.
MESSAGE_BYTES_MAX = 32 << 10
# The shortest reply is that of most transfers.
MESSAGE_BYTES_MIN = len(encode(Reply(ReplyKind.OK)))


def decode_header(data: bytes) -> Header:
    """Return a header. Raises BadMessage, also for values of several fields that do not fit each other."""
    header = decoded(_headers, data)
    at, several = 0, len(header.ranges) > 1
    for start, length in header.ranges:
        if start < at or (several and not length):
            raise BadMessage("the ranges of a stream do not follow each other")
        at = start + length
    if header.op is Op.READ and several:
        raise BadMessage(f"{len(header.ranges)} ranges of an extent are read at once")
    if header.op is Op.WRITE and not (header.length <= header.comes <= header.total >= at):
        raise BadMessage("the ranges of a stream are not in its extent")
    return header


def pack_preamble(number: bytes) -> bytes:
    """Return a preamble with the number of a ticket; its code follows."""
    return _PREAMBLE.pack(_MAGIC, VERSION, 0, number)


def unpack_preamble(data: bytes) -> bytes:
    """Return the number of the ticket in a preamble without its code. Raises BadMessage."""
    magic, version, _, number = _PREAMBLE.unpack(data)
    if magic != _MAGIC:
        raise BadMessage("not an irdmafs data connection")
    if version != VERSION:
        raise BadMessage(describe_version(version))
    return bytes(number)
