"""gRPC calls over one HTTP/2 connection (RFC 9113, and gRPC's PROTOCOL-HTTP2.md).

What a client of unary and server-streaming calls needs, and no more: requests are one message each.
Everything that is sent goes out without waiting, or into a buffer that a task empties: a caller that
is cancelled never leaves half a frame behind. Header compression keeps no state: we send literals
only and allow the peer a dynamic table of size 0, so equal header blocks mean equal headers and
nearly all of those received are found in a small table.
"""

import contextlib
import os
import socket
import ssl
from collections import OrderedDict

import hpack
import trio

from .frames import (
    ACK,
    CANCEL,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_BYTES,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_SIZE,
    PING,
    PREFACE,
    PRIORITY,
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    ConnectionLost,
    NotAccepted,
    ProtocolError,
    RpcError,
    frame,
    unpadded,
    window_update,
)
from .stream import STREAM_WINDOW, Stream

_HEADER_BLOCK_BYTES = 64 * 1024
# What the peer may send on all streams before we say that we took it.
_CONNECTION_WINDOW = 1 << 30
_CALLS = 1024
_REMEMBERED_BLOCKS = 64
_RECEIVE_BYTES = 256 * 1024
# etcd closes connections that are pinged more often than every 5 s (--grpc-keepalive-min-time).
_QUIET_S = 6.0
_PONG_S = 4.0
_INTERNAL = 13  # gRPC's status


class Connection:
    """An HTTP/2 connection on a connected, non-blocking socket, which it owns.

    `run` moves the bytes and must be running while it is used; it ends with the connection and raises
    nothing. `tls` is a context and the name that the certificate must have.
    """

    def __init__(self, sock: socket.socket, tls: tuple[ssl.SSLContext, str] | None = None) -> None:
        self._sock = sock
        self._tls: ssl.SSLObject | None = None
        if tls is not None:
            self._tls_in, self._tls_out = ssl.MemoryBIO(), ssl.MemoryBIO()
            context, name = tls
            self._tls = context.wrap_bio(self._tls_in, self._tls_out, server_hostname=name)
        self._streams: dict[int, Stream] = {}
        self._next_stream = 1
        self._in = bytearray()
        self._out = bytearray()
        self._has_unsent = trio.Event()
        self._window_opened = trio.lowlevel.ParkingLot()
        self._call_ended = trio.lowlevel.ParkingLot()
        self._send_window = 65535
        self._peer_stream_window = 65535
        self._peer_frame_bytes = FRAME_BYTES
        self._received_bytes = 0
        self._block: tuple[int, int, bytearray] | None = None
        self._decoder = hpack.Decoder(max_header_list_size=_HEADER_BLOCK_BYTES)
        self._decoder.max_allowed_table_size = 0
        self._decoded: OrderedDict[bytes, dict[str, str]] = OrderedDict()
        self._greeted = trio.Event()
        self._draining = False
        self._reason: str | None = None
        self._not_accepted = False
        # Counts everything received: whoever waits can tell whether the peer was silent meanwhile.
        self.frames_received = 0

    @property
    def usable(self) -> bool:
        """Whether new calls may be made."""
        return self._reason is None and not self._draining

    @property
    def lost_because(self) -> str | None:
        return self._reason

    async def run(self) -> None:
        reason = "the connection was closed"
        try:
            if self._tls is not None:
                await self._handshake()
            self.send(
                PREFACE
                # HEADER_TABLE_SIZE 0, ENABLE_PUSH 0, INITIAL_WINDOW_SIZE
                + frame(
                    SETTINGS,
                    0,
                    0,
                    b"\0\1\0\0\0\0\0\2\0\0\0\0\0\4" + STREAM_WINDOW.to_bytes(4, "big"),
                )
                + window_update(0, _CONNECTION_WINDOW - 65535)
            )
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write)
                nursery.start_soon(self._watch_silence)
                await self._read()
                nursery.cancel_scope.cancel()
        except* (OSError, ProtocolError, hpack.HPACKError, trio.ClosedResourceError) as group:
            error = _first(group)
            reason = _reason(error)
            self._not_accepted = isinstance(error, ssl.SSLError | ProtocolError)
        finally:
            self.close(reason)

    def close(self, reason: str) -> None:
        """End all calls with ConnectionLost. Closing twice does nothing."""
        if self._reason is not None:
            return
        self._reason = reason
        for stream in list(self._streams.values()):
            stream.end(ConnectionLost(reason, sent=True))
        self._streams.clear()
        self._window_opened.unpark_all()
        self._call_ended.unpark_all()
        self._greeted.set()
        trio.lowlevel.notify_closing(self._sock)
        self._sock.close()

    async def wait_ready(self) -> None:
        """Until the peer has said that it speaks HTTP/2. Raises ConnectionLost, NotAccepted."""
        await self._greeted.wait()
        if self._not_accepted and self._reason is not None:
            raise NotAccepted(self._reason)
        if self._reason is not None:
            raise ConnectionLost(self._reason, sent=False)

    async def unary(self, block: bytes, message: bytes) -> bytes:
        """The answer to one request. Raises RpcError and ConnectionLost."""
        stream = await self.start(block, message)
        try:
            answer = await stream.receive()
            # The status comes after the message: before it the call may still fail.
            if answer is None or await stream.receive() is not None:
                raise RpcError(_INTERNAL, "the answer is not one message")
            return answer
        finally:
            stream.close()

    async def start(self, block: bytes, message: bytes) -> Stream:
        """Begin a call with its only request message. `block`: its headers, encoded."""
        while self.usable and len(self._streams) >= _CALLS:
            await self._call_ended.park()
        if not self.usable:
            raise ConnectionLost(self._reason or "the server is shutting down", sent=False)
        number = self._next_stream
        self._next_stream += 2
        if number > 1 << 30:  # stream numbers are used up; never seen, but bounded
            self._draining = True
        stream = self._streams[number] = Stream(self, number, self._peer_stream_window)
        body = b"\0" + len(message).to_bytes(4, "big") + message
        head = frame(HEADERS, END_HEADERS, number, block)
        if len(body) <= min(self._send_window, stream.send_window, self._peer_frame_bytes):
            self._send_window -= len(body)
            self.send(head + frame(DATA, END_STREAM, number, body))
            return stream
        self.send(head)
        try:
            await self._send_body(stream, memoryview(body))
        except BaseException:
            stream.close()
            raise
        return stream

    def reset(self, stream: Stream) -> None:
        self._forget(stream)
        stream.end(None)
        self.send(frame(RST_STREAM, 0, stream.number, CANCEL.to_bytes(4, "big")))

    def send(self, data: bytes) -> None:
        """Send without waiting; what the socket does not take now, `run` sends later."""
        if self._reason is not None:
            return
        sent = 0
        try:
            if self._tls is not None:
                self._tls.write(data)
                data = self._tls_out.read()
            if not self._out:
                sent = self._sock.send(data)
        except BlockingIOError:
            pass
        except OSError as error:
            self.close(_reason(error))
            return
        if sent < len(data):
            self._out += data[sent:]
            self._has_unsent.set()

    async def _send_body(self, stream: Stream, body: memoryview) -> None:
        while body and not stream.ended:
            room = min(self._send_window, stream.send_window, self._peer_frame_bytes)
            if room <= 0:
                await self._window_opened.park()
                continue
            piece, body = body[:room], body[room:]
            self._send_window -= len(piece)
            stream.send_window -= len(piece)
            flags = 0 if body else END_STREAM
            self.send(frame(DATA, flags, stream.number, bytes(piece)))

    async def _write(self) -> None:
        while self._reason is None:
            await self._has_unsent.wait()
            while self._out and self._reason is None:
                await trio.lowlevel.wait_writable(self._sock)
                with contextlib.suppress(BlockingIOError):
                    del self._out[: self._sock.send(self._out)]
            self._has_unsent = trio.Event()

    async def _handshake(self) -> None:
        assert self._tls is not None
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                pass
            else:
                break
            finally:
                self._out += self._tls_out.read()
                while self._out:
                    await trio.lowlevel.wait_writable(self._sock)
                    del self._out[: self._sock.send(self._out)]
            await trio.lowlevel.wait_readable(self._sock)
            data = self._sock.recv(_RECEIVE_BYTES)
            if not data:
                raise ProtocolError("it closed the connection instead of beginning TLS")
            self._tls_in.write(data)
        if self._tls.selected_alpn_protocol() != "h2":
            raise ProtocolError("it does not speak HTTP/2 over TLS")

    async def _read(self) -> None:
        while self._reason is None:
            await trio.lowlevel.wait_readable(self._sock)
            try:
                data = self._sock.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                continue
            if not data and not self._greeted.is_set():
                raise ConnectionResetError("it closed the connection at once" + self._hint())
            if not data:
                raise ConnectionResetError("the server closed the connection")
            if self._tls is not None:
                self._tls_in.write(data)
                data = self._decrypt()
            self._on_bytes(data)

    def _decrypt(self) -> bytes:
        assert self._tls is not None
        parts = []
        try:
            while part := self._tls.read(_RECEIVE_BYTES):
                parts.append(part)
        except ssl.SSLWantReadError:
            pass
        return b"".join(parts)

    async def _watch_silence(self) -> None:
        """Ping when nothing came for a while although something is awaited."""
        while True:
            before = self.frames_received
            await trio.sleep(_QUIET_S)
            if self.frames_received != before or not self._streams:
                continue
            self.send(frame(PING, 0, 0, b"irdmafs\0"))
            with trio.move_on_after(_PONG_S):
                while self.frames_received == before:
                    await trio.sleep(_PONG_S / 20)
            if self.frames_received == before:
                raise TimeoutError(f"it has been silent for {_QUIET_S + _PONG_S:g} s")

    def _on_bytes(self, data: bytes) -> None:
        buffer = self._in
        buffer += data
        offset = 0
        while len(buffer) - offset >= 9:
            size = int.from_bytes(buffer[offset : offset + 3], "big")
            kind, flags = buffer[offset + 3], buffer[offset + 4]
            if size > FRAME_BYTES or (kind != SETTINGS and not self._greeted.is_set()):
                raise ProtocolError("it does not speak HTTP/2" + self._hint())
            end = offset + 9 + size
            if end > len(buffer):
                break
            number = int.from_bytes(buffer[offset + 5 : offset + 9], "big") & 0x7FFFFFFF
            self._on_frame(kind, flags, number, bytes(buffer[offset + 9 : end]))
            if self._reason is not None:
                return
            offset = end
        del buffer[:offset]

    def _hint(self) -> str:
        return "" if self._tls is not None else " (does it want TLS? Then give its CA)"

    def _on_frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        self.frames_received += 1
        if (self._block is not None) != (kind == CONTINUATION):
            raise ProtocolError("a header block is interrupted")
        if kind == DATA:
            self._on_data(flags, number, payload)
        elif kind == HEADERS:
            payload = unpadded(flags, payload)[5 if flags & PRIORITY else 0 :]
            self._on_block(flags, number, flags & END_STREAM, bytearray(payload))
        elif kind == CONTINUATION and self._block is not None:
            of, ends, block = self._block
            if of != number or len(block) > _HEADER_BLOCK_BYTES:
                raise ProtocolError("a header block is interrupted or too large")
            self._on_block(flags, number, ends, block + payload)
        elif kind == SETTINGS and not flags & ACK:
            self._on_settings(payload)
        elif kind == WINDOW_UPDATE and len(payload) == 4:
            self._on_window_update(number, int.from_bytes(payload, "big"))
        elif kind == PING and not flags & ACK:
            self.send(frame(PING, ACK, 0, payload))
        elif kind == RST_STREAM and len(payload) == 4:
            code = int.from_bytes(payload, "big")
            if stream := self._forget(self._streams.get(number)):
                reason = f"the server gave the call up (HTTP/2 error {code})"
                stream.end(ConnectionLost(reason, sent=code != REFUSED_STREAM))
        elif kind == GOAWAY and len(payload) >= 8:
            self._draining = True
            last = int.from_bytes(payload[:4], "big") & 0x7FFFFFFF
            for stream in [stream for of, stream in self._streams.items() if of > last]:
                self._forget(stream)
                stream.end(ConnectionLost("the server is shutting down", sent=False))

    def _on_data(self, flags: int, number: int, payload: bytes) -> None:
        self._received_bytes += len(payload)
        if self._received_bytes > _CONNECTION_WINDOW // 2:
            self.send(window_update(0, self._received_bytes))
            self._received_bytes = 0
        stream = self._streams.get(number)
        if stream is None:
            return  # given up; what was on its way still comes
        stream.on_data(unpadded(flags, payload), len(payload))
        if flags & END_STREAM:
            raise ProtocolError("a gRPC answer has no status")

    def _on_block(self, flags: int, number: int, ends: int, block: bytearray) -> None:
        if not flags & END_HEADERS:
            self._block = (number, ends, block)
            return
        self._block = None
        headers = self._decode(bytes(block))
        stream = self._streams.get(number)
        if stream is None:
            return
        if ends:
            self._forget(stream)
        stream.on_headers(headers, bool(ends))

    def _decode(self, block: bytes) -> dict[str, str]:
        headers = self._decoded.get(block)
        if headers is None:
            # Not as bytes: the names and values that gRPC defines are ASCII.
            headers = {str(name): str(value) for name, value in self._decoder.decode(block)}
            if len(self._decoded) >= _REMEMBERED_BLOCKS:
                self._decoded.popitem(last=False)
            self._decoded[block] = headers
        return headers

    def _on_settings(self, payload: bytes) -> None:
        for offset in range(0, len(payload) - 5, 6):
            name = int.from_bytes(payload[offset : offset + 2], "big")
            value = int.from_bytes(payload[offset + 2 : offset + 6], "big")
            if name == INITIAL_WINDOW_SIZE:  # of streams that are open, too
                for stream in self._streams.values():
                    stream.send_window += value - self._peer_stream_window
                self._peer_stream_window = value
                self._window_opened.unpark_all()
            elif name == MAX_FRAME_SIZE:
                self._peer_frame_bytes = value
        self.send(frame(SETTINGS, ACK, 0))
        self._greeted.set()

    def _on_window_update(self, number: int, size: int) -> None:
        if number == 0:
            self._send_window += size
        elif stream := self._streams.get(number):
            stream.send_window += size
        self._window_opened.unpark_all()

    def _forget(self, stream: Stream | None) -> Stream | None:
        """Returns the stream, if it was open."""
        if stream is None or self._streams.pop(stream.number, None) is None:
            return None
        self._call_ended.unpark()
        if self._draining and not self._streams:
            self.close("the server is shutting down")
        return stream


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _reason(error: BaseException) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {error.reason or error}"
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
