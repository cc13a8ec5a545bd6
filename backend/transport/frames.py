"""Control connections as streams of frames: a length, and one message in MessagePack."""

import msgspec
import trio

from .prompt import PromptStream

# The largest frame of a stranger, and of a member. The length of a frame comes before it.
HELLO_BYTES_MAX = 4096
FRAME_BYTES_MAX = 16 << 20

_LENGTH_BYTES = 4
_RECEIVE_BYTES = 64 << 10
_encode = msgspec.msgpack.Encoder().encode


class BadMessage(Exception):
    """A peer sent an invalid message; the connection cannot be used any more."""


class Frames:
    """Messages on a stream. One task receives; any number may send."""

    def __init__(self, stream: trio.abc.Stream, limit: int) -> None:
        self.stream = stream
        self.limit = limit
        self._buffer = bytearray()
        self._outbox = bytearray()
        self._sending = trio.Lock()

    def put(self, message: msgspec.Struct) -> None:
        """Add a message to those that the next `flush` sends."""
        body = _encode(message)
        if len(body) > FRAME_BYTES_MAX:
            raise ValueError(f"a message of {len(body)} bytes")
        self._outbox += len(body).to_bytes(_LENGTH_BYTES, "big")
        self._outbox += body

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
                    unsent, self._outbox = self._outbox, bytearray()
                    await self.stream.send_all(unsent)

    async def send(self, message: msgspec.Struct) -> None:
        """Send a message. Raises as `flush_now`."""
        self.put(message)
        await self.flush()

    async def receive(self) -> bytes:
        """Return the body of the next frame. Raises BadMessage for one that is longer than the limit, and
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
        """Return whether more bytes were received already."""
        return bool(self._buffer)

    async def _fill(self, count: int) -> None:
        while len(self._buffer) < count:
            more = await self.stream.receive_some(_RECEIVE_BYTES)
            if not more:
                raise trio.EndOfChannel
            self._buffer += more
