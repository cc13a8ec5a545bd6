"""The format of data connections: a preamble, then Headers and Replies (streams.py says in what order).

Each of them is followed by its code (authentication.py).
"""

import enum
import struct
from typing import NamedTuple

from .. import Extent, Target
from ..frames import BadMessage
from ..messages import CHAIN_MAX, VERSION, describe_version, error_of
from .authentication import CODE_BYTES, TICKET_NUMBER_BYTES

_MAGIC = b"irDM"
_PREAMBLE = struct.Struct(f">4sHH{TICKET_NUMBER_BYTES}s")
_HEADER = struct.Struct(f">BBxxIQQQQQQQ{CHAIN_MAX}Q32s")
# The fields: kind, closing, bytes of text that follow, errno, node.
REPLY = struct.Struct(">B?HiQ")

# Lengths with the codes.
PREAMBLE_BYTES = _PREAMBLE.size + CODE_BYTES
HEADER_BYTES = _HEADER.size + CODE_BYTES

_UINT63_MAX = (1 << 63) - 1


class Op(enum.IntEnum):
    READ = 1
    WRITE = 2
    SPARSE = 3
    """A write with holes: only `length` bytes come, in PARTs of the same `transfer`."""
    PART = 4


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
    """`length` bytes from `offset` of an extent, which is `total` bytes long (of a write). The streams
    of one write have the same `transfer`, a random number."""

    op: Op
    extent: Extent
    target: Target
    transfer: int
    total: int
    offset: int
    length: int
    trace: str

    @property
    def follow(self) -> int:
        """Return how many bytes of a write follow on the connection."""
        return 0 if self.op is Op.SPARSE else self.length

    def pack(self) -> bytes:
        chain = self.target.chain
        return _HEADER.pack(
            self.op,
            len(chain),
            self.extent.stripe,
            self.extent.content,
            self.target.group,
            self.target.config,
            self.transfer,
            self.total,
            self.offset,
            self.length,
            *chain,
            *([0] * (CHAIN_MAX - len(chain))),
            self.trace.encode("ascii", "replace")[:32],
        )

    @classmethod
    def unpack(cls, data: bytes) -> "Header":
        """Return a header from bytes. Raises BadMessage."""
        op, nodes, stripe, content, group, config, transfer, *rest = _HEADER.unpack(data)
        total, offset, length, *chain = rest[: 3 + CHAIN_MAX]
        try:
            op = Op(op)
        except ValueError:
            raise BadMessage(f"{op} is no operation on data") from None
        if nodes > CHAIN_MAX:
            raise BadMessage(f"a chain of {nodes} nodes")
        numbers = (content, group, config, total, offset, length, *chain)
        if max(numbers) > _UINT63_MAX or offset + length > _UINT63_MAX:
            raise BadMessage("a number is out of range")
        if op is not Op.READ and offset + length > total:
            raise BadMessage(f"bytes {offset} to {offset + length} of {total}")
        trace = rest[-1].rstrip(b"\0").decode("ascii", "replace")
        target = Target(group, config, tuple(chain[:nodes]))
        return cls(op, Extent(content, stripe), target, transfer, total, offset, length, trace)


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
