"""Ways in which a call of etcd, or the connection that it is made on, fails."""

import errno
from enum import IntEnum


class Status(IntEnum):
    """Status codes of gRPC."""

    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


class NoAnswer(OSError):
    """ETIMEDOUT: etcd gave no definite answer in time."""

    def __init__(self, text: str) -> None:
        super().__init__(errno.ETIMEDOUT, text)
        self.text = text


class RpcError(Exception):
    """The server answered with a gRPC status other than OK."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{text} (gRPC status {code})")
        self.code = code
        self.text = text


class ConnectionLost(OSError):
    """The connection ended before the answer. `sent`: the server may have got the request."""

    def __init__(self, reason: str, *, sent: bool) -> None:
        super().__init__(reason)
        self.sent = sent


class NotAccepted(ConnectionLost):
    """The peer could be reached, but TLS or HTTP/2 could not be begun with it."""


class ProtocolError(Exception):
    """The peer does not speak gRPC over HTTP/2."""
