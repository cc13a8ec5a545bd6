"""Control connections as streams of frames: a length, and one message in MessagePack, which is one of those
of operations, or one that a mover adds."""

from collections.abc import Iterable, Mapping
from functools import partial, reduce
from operator import or_
from typing import Final, NamedTuple, TypeVar

import msgspec
import trio
from msgspec.msgpack import Decoder, Encoder

from .messages import AboutContents, Answer, Hello, Message, Refused, Welcome
from .prompt import PromptStream
from .rights import OWN, Outstanding, Row

# The largest frame of a stranger, and of a member. The length of a frame comes before it.
HELLO_BYTES_MAX = 4096
FRAME_BYTES_MAX = 16 << 20

T = TypeVar("T")

LENGTH_BYTES = 4
_RECEIVE_BYTES = 64 << 10
# Longer frames count as outstanding while they come.
_LONG_BYTES = 16 << 10
# An answer is encrypted in pieces of this size, so that others are served meanwhile.
_SEND_BYTES = 1 << 20
_encode = Encoder().encode


class BadMessage(Exception):
    """A peer sent an invalid message; the connection cannot be used any more."""


class Frames:
    """Messages on a stream. One task receives, any may send. `outstanding` limits what comes."""

    def __init__(self, stream: trio.abc.Stream, limit: int) -> None:
        self.stream = stream
        self.limit = limit
        self.outstanding = Outstanding()
        self._buffer = bytearray()
        self._outbox = bytearray()
        self._sending = trio.Lock()

    def put(self, message: msgspec.Struct) -> int:
        """Add a message to those that the next `flush` sends, and return its length."""
        body = _encode(message)
        if len(body) > FRAME_BYTES_MAX:
            raise ValueError(f"a message of {len(body)} bytes")
        self._outbox += len(body).to_bytes(LENGTH_BYTES, "big")
        self._outbox += body
        return len(body)

    @property
    def has_unsent(self) -> bool:
        return bool(self._outbox)

    def flush_now(self) -> bool:
        """Send as much as possible without waiting, and return whether that is all. Raises
        trio.BrokenResourceError and the like."""
        stream = self.stream
        if not isinstance(stream, PromptStream) or self._sending.locked():
            return not self._outbox and not self._sending.locked()
        if self._outbox:
            with memoryview(self._outbox) as unsent:
                sent = stream.send_now(unsent)
            del self._outbox[:sent]
        return not self._outbox

    async def flush(self) -> None:
        """Return when all messages that were put before are sent. Raises as `flush_now`."""
        if not self.flush_now():
            async with self._sending:
                while self._outbox:
                    unsent = self._outbox[:_SEND_BYTES]
                    del self._outbox[:_SEND_BYTES]
                    await self.stream.send_all(unsent)

    async def send(self, message: msgspec.Struct) -> None:
        """Send a message. Raises as `flush_now`."""
        self.put(message)
        await self.flush()

    async def receive(self) -> bytes:
        """Return the body of the next frame. Raises BadMessage for one that is longer than the limit, and
        trio.EndOfChannel when the peer closed."""
        buffer = self._buffer
        await self._fill(LENGTH_BYTES)
        length = int.from_bytes(buffer[:LENGTH_BYTES], "big")
        if length > self.limit:
            raise BadMessage(f"a frame of {length} bytes, {self.limit} are allowed")
        end = LENGTH_BYTES + length
        if length > _LONG_BYTES:
            await self._fill_long(end)
        else:
            await self._fill(end)
        body = bytes(memoryview(buffer)[LENGTH_BYTES:end])
        del buffer[:end]
        return body

    @property
    def has_received(self) -> bool:
        """Return whether more bytes were received already."""
        return bool(self._buffer)

    async def _fill_long(self, count: int) -> None:
        await self.outstanding.take(count)
        try:
            await self._fill(count)
        finally:
            self.outstanding.give_back(count)

    async def _fill(self, count: int) -> None:
        while len(self._buffer) < count:
            more = await self.stream.receive_some(_RECEIVE_BYTES)
            if not more:
                raise trio.EndOfChannel
            self._buffer += more


class MessageSet(NamedTuple):
    """The messages of one part of the transport. `rights` has a row for each message to a node; a message
    that is no Request has no answer, and one that only the owner may make is AboutContents."""

    rights: Mapping[type[Message], Row]
    answers: tuple[type[Answer], ...]


class Codec:
    """Decodes the messages of `sets`, each of which has a tag of its own: `decode` those to a node,
    `decode_answer` a node's. They raise BadMessage."""

    def __init__(self, sets: Iterable[MessageSet]) -> None:
        every = tuple(sets)
        self.rights = {kind: row for each in every for kind, row in each.rights.items()}
        for kind, row in self.rights.items():
            if OWN in row and not issubclass(kind, AboutContents):
                raise TypeError(f"nobody owns what {kind.__name__} is about")
        answers = (kind for each in every for kind in each.answers)
        asked: Decoder[Message] = Decoder(reduce(or_, self.rights))
        answered: Decoder[Answer] = Decoder(reduce(or_, answers))
        self.decode = partial(decoded, asked)
        self.decode_answer = partial(decoded, answered)


def decoded(decoder: Decoder[T], body: bytes) -> T:
    """Return a message. Raises BadMessage."""
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadMessage(f"not a message of this protocol: {error}") from None


# Return the first message of a caller, and of a node. They raise BadMessage.
decode_hello: Final = partial(decoded, Decoder(Hello))
decode_welcome: "Final[partial[Welcome | Refused]]" = partial(decoded, Decoder(Welcome | Refused))
