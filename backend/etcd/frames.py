"""HTTP/2 frames (RFC 9113) as bytes."""

from .errors import ProtocolError

DATA, HEADERS, RST_STREAM, SETTINGS = 0, 1, 3, 4
PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 6, 7, 8, 9
END_STREAM = ACK = 1
END_HEADERS, PADDED, PRIORITY = 4, 8, 32
# settings
INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 4, 5
# error codes
REFUSED_STREAM, CANCEL = 7, 8

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_BYTES = 16384  # the largest frame that either side may send without asking


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    head = len(payload) << 48 | kind << 40 | flags << 32 | stream
    return head.to_bytes(9, "big") + payload


def window_update(stream: int, size: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, size.to_bytes(4, "big"))


def unpadded(flags: int, payload: bytes) -> bytes:
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise ProtocolError("a frame is all padding")
    return payload[1 : len(payload) - payload[0]]
