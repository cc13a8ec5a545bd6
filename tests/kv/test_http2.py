"""HTTP/2 as etcd's client speaks it, without a socket: the peer's bytes in, ours out."""

from collections.abc import Coroutine, Iterator

import hpack
import pytest

from irdmafs.backend.etcd import http2
from irdmafs.backend.etcd.http2 import Http2, frame, window_update
from irdmafs.backend.etcd.rpc import ConnectionLost, ProtocolError, RpcError


def header_block(headers: list[tuple[str, str]]) -> bytes:
    return hpack.Encoder().encode([(name, value, True) for name, value in headers])


BLOCK = header_block([(":method", "POST")])
# A peer says first that it keeps no table (RFC 7541, 6.3).
NO_TABLE = b"\x20"
HEAD = NO_TABLE + header_block([(":status", "200"), ("content-type", "application/grpc")])


class Wire:
    """An Http2 and everything it has sent; the peer has greeted."""

    def __init__(self) -> None:
        self.sent = bytearray()
        self.ended = 0
        self.http2 = Http2(self.sent.extend, self._end)
        self.http2.take(frame(http2.SETTINGS, 0, 0))
        self.sent.clear()

    def _end(self) -> None:
        self.ended += 1

    def frames(self) -> Iterator[tuple[int, int, int, bytes]]:
        """Yield kind, flags, stream and payload of what was sent since the last call."""
        data = bytes(self.sent)
        self.sent.clear()
        while data:
            end = 9 + int.from_bytes(data[:3], "big")
            yield data[3], data[4], int.from_bytes(data[5:9], "big"), data[9:end]
            data = data[end:]

    def body(self) -> bytes:
        return b"".join(payload for kind, _, _, payload in self.frames() if kind == http2.DATA)


def answer(number: int, message: bytes, status: str = "0") -> bytes:
    body = b"\0" + len(message).to_bytes(4, "big") + message
    trailers = header_block([("grpc-status", status), ("grpc-message", "no%20room")])
    return (
        frame(http2.HEADERS, http2.END_HEADERS, number, HEAD)
        + frame(http2.DATA, 0, number, body)
        + frame(http2.HEADERS, http2.END_HEADERS | http2.END_STREAM, number, trailers)
    )


async def received(stream: http2.Stream) -> list[bytes]:
    found = []
    while (message := await stream.receive()) is not None:
        found.append(message)
    return found


def run_now(wait: Coroutine[object, None, list[bytes]]) -> list[bytes]:
    """Return the result of a coroutine that need not wait."""
    with pytest.raises(StopIteration) as result:
        wait.send(None)
    found: list[bytes] = result.value.value
    return found


def test_answer_may_be_cut_anywhere() -> None:
    data = answer(1, b"first") + answer(3, b"second")
    for size in (1, 2, 7, 10, len(data)):
        wire = Wire()
        streams = [wire.http2.call(BLOCK, b"?") for _ in range(2)]
        for offset in range(0, len(data), size):
            wire.http2.take(data[offset : offset + size])
        assert [run_now(received(stream)) for stream in streams] == [[b"first"], [b"second"]]
        assert wire.ended == 2
        assert not wire.http2.streams


def test_request_waits_for_window_and_goes_on_with_it() -> None:
    wire = Wire()
    message = bytes(range(256)) * 400
    stream = wire.http2.call(BLOCK, message)
    sent = wire.body()
    assert len(sent) == 65535
    wire.http2.take(window_update(stream.number, 1 << 20))
    assert wire.body() == b""  # the connection's window is used up
    wire.http2.take(window_update(0, 1 << 20))
    *_, (_, flags, _, last) = frames = list(wire.frames())
    assert flags == http2.END_STREAM
    assert last
    sent += b"".join(payload for _, _, _, payload in frames)
    assert sent == b"\0" + len(message).to_bytes(4, "big") + message


def test_window_that_settings_make_larger_counts_for_open_calls() -> None:
    wire = Wire()
    wire.http2.call(BLOCK, bytes(100_000))
    wire.http2.take(window_update(0, 1 << 20))
    assert len(wire.body()) == 65535
    size = (1 << 20).to_bytes(4, "big")
    wire.http2.take(
        frame(http2.SETTINGS, 0, 0, http2.INITIAL_WINDOW_SIZE.to_bytes(2, "big") + size)
    )
    assert len(wire.body()) == 100_005 - 65535


def test_call_that_is_given_up_sends_no_more_of_its_request() -> None:
    wire = Wire()
    stream = wire.http2.call(BLOCK, bytes(100_000))
    list(wire.frames())
    stream.close()
    assert list(wire.frames()) == [(http2.RST_STREAM, 0, 1, http2.CANCEL.to_bytes(4, "big"))]
    wire.http2.take(window_update(0, 1 << 20) + window_update(1, 1 << 20) + answer(1, b"late"))
    assert not wire.sent
    assert wire.ended == 1


def test_shutdown_ends_later_calls_as_unsent_and_lets_earlier_ones_finish() -> None:
    wire = Wire()
    first, second = wire.http2.call(BLOCK, b""), wire.http2.call(BLOCK, b"")
    wire.http2.take(frame(http2.GOAWAY, 0, 0, (1).to_bytes(4, "big") + bytes(4)))
    assert wire.http2.draining
    with pytest.raises(ConnectionLost) as lost:
        received(second).send(None)
    assert not lost.value.sent
    wire.http2.take(answer(1, b"yes"))
    assert run_now(received(first)) == [b"yes"]


def test_status_other_than_ok_is_raised_with_its_text() -> None:
    wire = Wire()
    stream = wire.http2.call(BLOCK, b"")
    wire.http2.take(answer(1, b"", status="8"))
    with pytest.raises(RpcError, match="no room") as refused:
        received(stream).send(None)
    assert refused.value.code == 8


def test_settings_are_acknowledged() -> None:
    wire = Wire()
    wire.http2.take(frame(http2.SETTINGS, 0, 0))
    assert list(wire.frames()) == [(http2.SETTINGS, http2.ACK, 0, b"")]


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        frame(http2.DATA, http2.END_STREAM, 1),
        frame(http2.HEADERS, 0, 1, HEAD) + frame(http2.DATA, 0, 1, b""),
        frame(http2.HEADERS, http2.END_HEADERS, 1, NO_TABLE + b"\xff\xff\xff\xff\xff\xff"),
        frame(http2.HEADERS, http2.END_HEADERS, 1, NO_TABLE + header_block([(":status", "404")])),
    ],
)
def test_nonsense_is_refused(data: bytes) -> None:
    wire = Wire()
    wire.http2.call(BLOCK, b"")
    with pytest.raises(ProtocolError):
        wire.http2.take(data)
