"""One gRPC call on an HTTP/2 connection: its messages and its status."""

from collections import deque
from typing import Protocol
from urllib.parse import unquote

import trio

from .errors import ProtocolError, RpcError

# Bytes that a peer may send on a stream before they are acknowledged.
STREAM_WINDOW = 4 << 20
# Bytes are acknowledged when there are more than this.
_ACKNOWLEDGED_BYTES = STREAM_WINDOW // 2
# Messages that are queued for the receiver; beyond this the peer has to wait.
_QUEUED_BYTES = 16 << 20
_MESSAGE_BYTES = 512 << 20


class Calls(Protocol):
    """The part of a connection that its streams use."""

    def give_up(self, stream: "Stream") -> None: ...

    def acknowledge(self, stream: "Stream", size_bytes: int) -> None: ...


class Stream:
    """One call: its messages as they come in, then its status.

    `unsent` is the part of the request that waits for the peer's window, `send_window` that window.
    """

    def __init__(self, calls: Calls, number: int, window: int) -> None:
        self._calls = calls
        self.number = number
        self.send_window = window
        self.unsent = memoryview(b"")
        self.ended = False
        self._error: Exception | None = None
        self._answered = False
        self._partial = bytearray()
        self._messages: deque[bytes] = deque()
        self._queued_bytes = 0
        self._unacknowledged = 0
        self._waiting: trio.lowlevel.Task | None = None

    async def receive(self) -> bytes | None:
        """Return the next message, None after the last one. One task at a time.

        Raises RpcError and ConnectionLost. May be cancelled and called again.
        """
        if not self._messages and not self.ended:
            self._waiting = trio.lowlevel.current_task()

            def abort(_: object) -> trio.lowlevel.Abort:
                self._waiting = None
                return trio.lowlevel.Abort.SUCCEEDED

            await trio.lowlevel.wait_task_rescheduled(abort)
        if self._messages:
            message = self._messages.popleft()
            self._queued_bytes -= len(message)
            if self._unacknowledged > _ACKNOWLEDGED_BYTES:
                self._acknowledge()
            return message
        if self._error is not None:
            raise self._error
        return None

    def close(self) -> None:
        """Give the call up, if it has not ended."""
        if not self.ended:
            self._calls.give_up(self)

    def end(self, error: Exception | None) -> None:
        self.ended = True
        self._error = error
        self._wake()

    def on_headers(self, headers: dict[str, str], last: bool) -> None:
        """Take the headers of the answer, or with `last` its status. Raises ProtocolError."""
        if not self._answered:
            self._answered = True
            status = headers.get(":status")
            if status != "200" or not headers.get("content-type", "").startswith(
                "application/grpc"
            ):
                raise ProtocolError(f"it answered with HTTP status {status} and not with gRPC")
        if not last:
            return
        code, text = headers.get("grpc-status", ""), unquote(headers.get("grpc-message", ""))
        if not code.isdecimal():
            raise ProtocolError("a gRPC answer has no status")
        if code == "0" and self._partial:
            raise ProtocolError("a gRPC message is cut short")
        self.end(RpcError(int(code), text) if code != "0" else None)

    def on_data(self, data: bytes, length: int) -> None:
        """Take a part of the messages; it used `length` bytes of the window. Raises ProtocolError."""
        partial = self._partial
        partial += data
        while len(partial) >= 5:
            size = int.from_bytes(partial[1:5], "big")
            if partial[0] or size > _MESSAGE_BYTES:
                raise ProtocolError("a gRPC message is compressed or too large")
            if len(partial) < 5 + size:
                break
            self._messages.append(bytes(partial[5 : 5 + size]))
            self._queued_bytes += size
            del partial[: 5 + size]
        self._unacknowledged += length
        if self._unacknowledged > _ACKNOWLEDGED_BYTES:
            self._acknowledge()
        if self._messages:
            self._wake()

    def _acknowledge(self) -> None:
        if self._queued_bytes < _QUEUED_BYTES and not self.ended:
            self._calls.acknowledge(self, self._unacknowledged)
            self._unacknowledged = 0

    def _wake(self) -> None:
        if self._waiting is not None:
            trio.lowlevel.reschedule(self._waiting)
            self._waiting = None
