"""What is said on a control connection, and how: one length-prefixed msgpack frame per message.

A connection begins with Hello, answered with Welcome or Refused. Then the caller sends requests, as
many at once as it likes up to REQUESTS_AT_ONCE, each with a number that its answer repeats. Data
connections have a format of their own (streams.py).
"""

import errno
import os
from typing import TypeAlias, TypeVar

import msgspec
import trio
from msgspec.msgpack import Decoder as _Decoder

from . import Extent, Fenced, Target, Unreachable
from .prompt import PromptStream
from .verbs.ends import RAILS_MAX, QueueEnd, Rail

# Both ends must speak the same version: nodes and mounts are upgraded together.
VERSION = 5

# What a stranger may send, and what a member may. The length of a frame comes before it.
HELLO_BYTES_MAX = 4096
FRAME_BYTES_MAX = 16 << 20
PUT_BYTES_MAX = 1 << 20
# An answer to Get stops when it is this long; the caller asks again for the rest.
GET_BYTES_MAX = 8 << 20
GET_EXTENTS_MAX = 4096
REQUESTS_AT_ONCE = 64
TICKETS_MAX = 64
CHAIN_MAX = 8
TEXT_MAX = 240
NAME_MAX = 255
# What a node answers when it can do nothing by verbs just now, though it may over TCP.
NOT_BY_VERBS = errno.EOPNOTSUPP
# The queue pair is gone; another one may do.
NO_QUEUE_PAIR = errno.ENOLINK
# Of one control connection: for every pair of rails some queue pairs.
QUEUE_PAIRS_MAX = 16
# Of one control connection, at a time: fewer than requests, so that one more is refused and need not wait.
HANDLES_MAX = 48
PIECES_MAX = 1 << 16
EXTENT_BYTES_MAX = 1 << 40

TICKET_NUMBER_BYTES = 16
TICKET_KEY_BYTES = 32
TICKET_BYTES = TICKET_NUMBER_BYTES + TICKET_KEY_BYTES

_LENGTH_BYTES = 4
_RECEIVE_BYTES = 64 << 10
_UINT63_MAX = (1 << 63) - 1

T = TypeVar("T")


class BadMessage(Exception):
    """What a peer sent makes no sense; the connection is of no use any more."""


class Message(msgspec.Struct, array_like=True):
    """The base of all; the tags are the protocol and must not change within a version."""


class Hello(Message, tag=1):
    """The first message of whoever connects. `role` and `name` are believed only where there are no
    certificates; `wanted` is the node that the caller means to speak with. The digest of `session_key`
    is in the record of a mount's session."""

    version: int
    role: str
    name: str
    session: int
    wanted: int
    session_key: bytes = b""


class Welcome(Message, tag=2):
    version: int
    node: int


class Refused(Message, tag=3):
    """The connection is closed after it. `for_good`: trying again is of no use."""

    text: str
    for_good: bool = False


class Renewed(Message, tag=4):
    """The caller has another session from now on. Has no answer."""

    session: int


class Release(Message, tag=5):
    """What `Exposed` gave is not needed any more: an extent was read, or its bytes will not come. Has no
    answer."""

    handle: int


class Detach(Message, tag=6):
    """The caller's queue pair is of no use any more, nor is what was given for it. Has no answer."""

    pair: int


class Request(Message):
    """`trace` is the id of what this is done for, for log lines."""

    number: int
    trace: str


class Ping(Request, tag=10):
    pass


class Put(Request, tag=11):
    extent: Extent
    target: Target
    data: bytes


class Get(Request, tag=12):
    extents: list[Extent]
    limit: int


class Adopt(Request, tag=13):
    extent: Extent
    target: Target
    name: str


class Abort(Request, tag=14):
    content: int


class Suspect(Request, tag=15):
    group: int
    node: int


class Status(Request, tag=16):
    pass


class Tickets(Request, tag=17):
    """Asks for the right to open `count` data connections."""

    count: int


class Attach(Request, tag=18):
    """Asks for a queue pair to move extents by, at a rail of the node; takes the place of an earlier one
    of the number `pair`."""

    end: QueueEnd
    pair: int
    rail: str
    gid: bytes


class Expose(Request, tag=19):
    """Asks to read `length` bytes of an extent, from `start`, out of the node's memory, by queue pair
    `pair`."""

    extent: Extent
    start: int
    length: int
    pair: int = 0


class Reserve(Request, tag=30):
    """Asks to write an extent into the node's memory, in pieces of `piece` bytes and what is left, each
    of which ends with a WRITE that carries the handle that is given for it, by queue pair `pair`.
    Answered a second time, with the number `sealed`, when all of them have arrived and the extent is
    sealed here and down the chain."""

    extent: Extent
    target: Target
    length: int
    piece: int
    sealed: int
    pair: int = 0


class Rails(Request, tag=32):
    """Asks on which rails the node can be reached by verbs."""


class Doubt(Request, tag=33):
    """The caller got other bytes of an extent than were published. The node believes only itself: it
    reads its copy again."""

    extent: Extent


class Digest(Request, tag=34):
    """Asks for the digest of the bytes that the node has of an extent."""

    extent: Extent


class Map(Request, tag=36):
    """Asks where the data of an extent is."""

    extent: Extent


class Scrub(Request, tag=35):
    """Asks the node to look over everything it keeps, now."""


class Answer(Message):
    number: int


class Done(Answer, tag=20):
    pass


class Failed(Answer, tag=21):
    """`node` is where it failed, which may be further down the chain."""

    code: int
    node: int
    text: str


class Contents(Answer, tag=22):
    """Of the first extents of a Get, at least one."""

    data: list[bytes | None]


class Report(Answer, tag=23):
    status: dict[str, object]


class Granted(Answer, tag=24):
    tickets: list[bytes]


class Verdict(Answer, tag=25):
    yes: bool


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


class Digested(Answer, tag=29):
    digest: bytes


class Mapped(Answer, tag=40):
    """Starts and lengths."""

    segments: list[tuple[int, int]]


OneWay: TypeAlias = Renewed | Release | Detach
AnyRequest: TypeAlias = (
    Ping
    | Put
    | Get
    | Adopt
    | Abort
    | Suspect
    | Status
    | Tickets
    | Rails
    | Attach
    | Expose
    | Reserve
    | Doubt
    | Digest
    | Scrub
    | Map
)
AnyAnswer: TypeAlias = (
    Done
    | Failed
    | Contents
    | Report
    | Granted
    | Verdict
    | RailsFound
    | Attached
    | Exposed
    | Digested
    | Mapped
)

_encode = msgspec.msgpack.Encoder().encode
_hello_decoder = _Decoder(Hello)
_welcome_decoder: _Decoder[Welcome | Refused] = _Decoder(Welcome | Refused)
_request_decoder: _Decoder[AnyRequest | OneWay] = _Decoder(AnyRequest | OneWay)
_answer_decoder: _Decoder[AnyAnswer] = _Decoder(AnyAnswer)


def check_target(target: Target) -> None:
    """Raises BadMessage for a target that cannot be one."""
    if len(target.chain) > CHAIN_MAX:
        raise BadMessage(f"a chain of {len(target.chain)} nodes")
    check_numbers(target.group, target.config, *target.chain)


def check_extent(extent: Extent) -> None:
    """Raises BadMessage for numbers that no extent has."""
    check_numbers(extent.content)
    if not 0 <= extent.stripe < 1 << 32:
        raise BadMessage(f"stripe {extent.stripe} is out of range")


def check_range(start: int, length: int) -> None:
    """Raises BadMessage for what no extent can have, nor one request can be about."""
    if not (0 <= start <= _UINT63_MAX and 0 < length <= EXTENT_BYTES_MAX):
        raise BadMessage(f"{length} bytes from {start}")


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


def check_numbers(*numbers: int) -> None:
    """Raises BadMessage for what cannot be the number of a node, a group, a content or a session."""
    for number in numbers:
        if not 0 <= number <= _UINT63_MAX:
            raise BadMessage(f"number {number} is out of range")


def failure_of(error: OSError, node: int) -> tuple[int, int, str]:
    """errno, node and text that tell another process of an error that `node` met."""
    text = error.strerror or str(error) or type(error).__name__
    if isinstance(error, Unreachable):
        # The receiver's Unreachable says which node again.
        return errno.ENOTCONN, error.node, text.partition(": ")[2][:TEXT_MAX]
    return error.errno or errno.EIO, node, text[:TEXT_MAX]


def error_of(code: int, node: int, text: str, group: int = 0) -> OSError:
    """The error that `failure_of` told of."""
    if code == errno.ENOTCONN:
        return Unreachable(node, text)
    if code == errno.ESTALE and group:
        return Fenced(group)
    return OSError(code, f"store node {node:x}: {text or os.strerror(code)}")


class Frames:
    """Messages on a stream. One task receives; any number may send."""

    def __init__(self, stream: trio.abc.Stream, limit: int) -> None:
        self.stream = stream
        self.limit = limit
        self._buffer = bytearray()
        self._outbox = bytearray()
        self._sending = trio.Lock()

    def put(self, message: Message) -> None:
        """To be sent with the next `flush`."""
        body = _encode(message)
        if len(body) > FRAME_BYTES_MAX:
            raise ValueError(f"a message of {len(body)} bytes")
        self._outbox += len(body).to_bytes(_LENGTH_BYTES, "big")
        self._outbox += body

    @property
    def has_unsent(self) -> bool:
        return bool(self._outbox)

    def flush_now(self) -> bool:
        """Send what can be sent without waiting; whether that is all. Raises trio.BrokenResourceError
        and the like."""
        stream = self.stream
        if not isinstance(stream, PromptStream) or self._sending.locked():
            return not self._outbox and not self._sending.locked()
        if self._outbox:
            with memoryview(self._outbox) as unsent:
                sent = stream.send_now(unsent)
            del self._outbox[:sent]
        return not self._outbox

    async def flush(self) -> None:
        """Returns when all is sent that was put before. Raises as `flush_now`."""
        if not self.flush_now():
            async with self._sending:
                while self._outbox:
                    unsent, self._outbox = self._outbox, bytearray()
                    await self.stream.send_all(unsent)

    async def send(self, message: Message) -> None:
        """Raises as `flush_now`."""
        self.put(message)
        await self.flush()

    async def receive(self) -> bytes:
        """The body of the next frame. Raises BadMessage for one that is longer than the limit, and
        trio.EndOfChannel when the peer closed."""
        buffer = self._buffer
        await self._fill(_LENGTH_BYTES)
        length = int.from_bytes(buffer[:_LENGTH_BYTES], "big")
        if length > self.limit:
            raise BadMessage(f"a frame of {length} bytes, {self.limit} are allowed")
        end = _LENGTH_BYTES + length
        await self._fill(end)
        body = bytes(memoryview(buffer)[_LENGTH_BYTES:end])
        del buffer[:end]
        return body

    @property
    def has_received(self) -> bool:
        """Whether there is more of what came already."""
        return bool(self._buffer)

    async def _fill(self, count: int) -> None:
        while len(self._buffer) < count:
            more = await self.stream.receive_some(_RECEIVE_BYTES)
            if not more:
                raise trio.EndOfChannel
            self._buffer += more


def decode_request(body: bytes) -> AnyRequest | OneWay:
    """Raises BadMessage."""
    return _decoded(_request_decoder, body)


def decode_hello(body: bytes) -> Hello:
    """Raises BadMessage."""
    return _decoded(_hello_decoder, body)


def decode_welcome(body: bytes) -> Welcome | Refused:
    """Raises BadMessage."""
    return _decoded(_welcome_decoder, body)


def decode_answer(body: bytes) -> AnyAnswer:
    """Raises BadMessage."""
    return _decoded(_answer_decoder, body)


def _decoded(decoder: _Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadMessage(f"not a message of this protocol: {error}") from None
