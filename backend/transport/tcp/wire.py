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
from ..messages import TEXT_MAX, Answer, Errno, Name, Prompt, error_of
from ..rights import ANY, NONE, OWN, Row
from .authentication import CODE_BYTES, KEY_BYTES

_LENGTH: Final = itemgetter(1)

# The beginning of a data connection: the number of the peer, and that of the connection. Its code follows.
PREAMBLE = struct.Struct(">QQ")
PREAMBLE_BYTES = PREAMBLE.size + CODE_BYTES

# Starts and lengths of ranges of an extent.
Ranges: TypeAlias = tuple[tuple[Number, Number], ...]


class Op(enum.IntEnum):
    READ = 1
    WRITE = 2
    READ_DATA = 3  # what is not a hole


class Admit(Prompt, tag=17):
    """Asks for the right to open data connections, as long as this control connection is open."""


class Admitted(Answer, tag=24):
    """The number of the peer in preambles, and the key of which those of data connections are made."""

    peer: Number
    key: Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]


MESSAGES = MessageSet({Admit: (ANY, ANY, ANY, NONE)}, (Admitted,))

# The rights to requests on data connections.
RIGHTS: Mapping[Op, Row] = {
    Op.READ: (ANY, ANY, ANY, NONE),
    Op.READ_DATA: (ANY, ANY, ANY, NONE),
    Op.WRITE: (ANY, OWN, NONE, NONE),
}


class ReplyKind(enum.IntEnum):
    OK = 1
    WORKING = 2
    FAILED = 3


class Reply(NamedTuple):
    """The answer to a request. `closing`: the connection is of no more use, as sent bytes were left. To
    READ_DATA, the bytes of the `ranges` of the extent follow."""

    kind: ReplyKind
    code: Errno = 0
    node: Number = 0
    text: Annotated[str, Meta(max_length=TEXT_MAX)] = ""
    closing: bool = False
    ranges: Annotated[Ranges, Meta(max_length=SEGMENTS_MAX)] = ()

    def check(self) -> None:
        """Raise the node's error, if it is one."""
        if self.kind is ReplyKind.FAILED:
            raise error_of(self.code, self.node, self.text)


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
    end = end_of(header.ranges)
    if header.op is not Op.WRITE and len(header.ranges) > 1:
        raise BadMessage(f"{len(header.ranges)} ranges of an extent are read at once")
    if header.op is Op.WRITE and not (header.length <= header.comes <= header.total >= end):
        raise BadMessage("the ranges of a stream are not in its extent")
    return header


def end_of(ranges: Ranges, at: int = 0) -> int:
    """Return where ranges from `at` on end. Raises BadMessage if they do not follow each other."""
    for start, length in ranges:
        if start < at or (len(ranges) > 1 and not length):
            raise BadMessage("the ranges of a stream do not follow each other")
        at = start + length
    return at
