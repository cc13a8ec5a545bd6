"""The format of data connections: a preamble, then Headers and Replies (streams.py says in what order); and
the messages on control connections by which they are asked for.

A header with several ranges is followed by a table of them. Each of these messages is followed by its code
(authentication.py).
"""

import enum
import struct
from collections.abc import Mapping
from operator import itemgetter
from typing import Annotated, Final, NamedTuple, TypeAlias

from msgspec import Meta

from ...files.sparse import SEGMENTS_MAX
from .. import CHAIN_MAX, Extent, Target
from ..frames import BadMessage, MessageSet
from ..messages import VERSION, Answer, Request, describe_version, error_of
from ..rights import ANY, NONE, OWN, Row
from .authentication import CODE_BYTES, TICKET_NUMBER_BYTES

_MAGIC = b"irDM"
_PREAMBLE = struct.Struct(f">4sHH{TICKET_NUMBER_BYTES}s")
_HEADER = struct.Struct(f">BBHIQQQQQQQQ{CHAIN_MAX}Q32s")
_RANGE = struct.Struct(">QQ")
_LENGTH: Final = itemgetter(1)
# The fields: kind, closing, bytes of text that follow, errno, node.
REPLY = struct.Struct(">B?HiQ")

# Lengths with the codes.
PREAMBLE_BYTES = _PREAMBLE.size + CODE_BYTES
HEADER_BYTES = _HEADER.size + CODE_BYTES

_UINT63_MAX = (1 << 63) - 1
TICKETS_MAX = 64

# Starts and lengths of ranges of an extent.
Ranges: TypeAlias = tuple[tuple[int, int], ...]


class Op(enum.IntEnum):
    READ = 1
    WRITE = 2


class Tickets(Request, tag=17):
    """Asks for the right to open `count` data connections."""

    count: Annotated[int, Meta(gt=0, le=TICKETS_MAX)]


class Granted(Answer, tag=24):
    tickets: list[bytes]


MESSAGES = MessageSet({Tickets: (ANY, ANY, ANY, NONE)}, (Granted,))

# The rights to requests on data connections.
RIGHTS: Mapping[Op, Row] = {Op.READ: (ANY, ANY, ANY, NONE), Op.WRITE: (ANY, OWN, NONE, NONE)}


class ReplyKind(enum.IntEnum):
    OK = 1
    WORKING = 2
    FAILED = 3


class Reply(NamedTuple):
    """The answer to a request. `closing`: the connection cannot be used after it, as not all sent bytes
    were received."""

    kind: ReplyKind
    code: int = 0
    node: int = 0
    text: str = ""
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
    transfer: int
    total: int
    comes: int
    ranges: Ranges
    trace: str

    @property
    def length(self) -> int:
        """Return how many bytes the stream brings."""
        return sum(map(_LENGTH, self.ranges))

    @property
    def messages(self) -> list[bytes]:
        """Return the header, and the table of its ranges if there are several."""
        chain, ranges = self.target.chain, self.ranges
        header = _HEADER.pack(
            self.op,
            len(chain),
            len(ranges),
            self.extent.stripe,
            self.extent.content,
            self.target.group,
            self.target.config,
            self.transfer,
            self.total,
            self.comes,
            ranges[0][0],
            sum(map(_LENGTH, ranges)),
            *chain,
            *([0] * (CHAIN_MAX - len(chain))),
            self.trace.encode("ascii", "replace")[:32],
        )
        if len(ranges) == 1:
            return [header]
        return [header, b"".join(_RANGE.pack(*each) for each in ranges)]

    @classmethod
    def unpack(cls, data: bytes) -> "tuple[Header, int]":
        """Return a header from bytes, and how many bytes of a table of ranges follow (`with_table`). Raises
        BadMessage."""
        op, nodes, count, stripe, content, group, config, transfer, *rest = _HEADER.unpack(data)
        total, comes, offset, length, *chain = rest[: 4 + CHAIN_MAX]
        try:
            op = Op(op)
        except ValueError:
            raise BadMessage(f"{op} is no operation on data") from None
        if nodes > CHAIN_MAX:
            raise BadMessage(f"a chain of {nodes} nodes")
        numbers = (content, group, config, total, offset, length, *chain)
        if max(numbers) > _UINT63_MAX or offset + length > _UINT63_MAX:
            raise BadMessage("a number is out of range")
        if op is Op.WRITE and not (length <= comes <= total and offset + length <= total):
            raise BadMessage(f"{length} bytes from {offset} of {comes}, in an extent of {total}")
        if not 0 < count <= (SEGMENTS_MAX if op is Op.WRITE else 1):
            raise BadMessage(f"{count} ranges in one stream")
        trace = rest[-1].rstrip(b"\0").decode("ascii", "replace")
        target = Target(group, config, tuple(chain[:nodes]))
        ranges = ((offset, length),)
        header = cls(op, Extent(content, stripe), target, transfer, total, comes, ranges, trace)
        return header, 0 if count == 1 else count * _RANGE.size

    def with_table(self, table: bytes) -> "Header":
        """Return the header with the ranges in a table. Raises BadMessage."""
        ranges = tuple(_RANGE.iter_unpack(table))
        at = 0
        for start, length in ranges:
            if start < at or not length:
                raise BadMessage("the ranges of a stream do not follow each other")
            at = start + length
        if at > self.total or sum(length for _, length in ranges) != self.length:
            raise BadMessage("the ranges of a stream are not as long as its header says")
        return self._replace(ranges=ranges)


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
