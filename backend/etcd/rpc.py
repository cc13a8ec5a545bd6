"""The methods of etcd that are called, the messages that they answer with, and the ways in which a call, or
the connection that it is made on, fails."""

import errno
from collections.abc import Callable
from enum import IntEnum
from typing import Generic, NamedTuple, Protocol, TypeVar

from google.protobuf.message import DecodeError

from . import etcd_pb2 as pb

R = TypeVar("R")


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


class NoAnswer(TimeoutError):
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


class Message(Protocol):
    def SerializeToString(self) -> bytes: ...


class Method(NamedTuple, Generic[R]):
    """`parse` raises ConnectionLost for an answer that makes no sense: it is as good as lost."""

    path: str
    parse: Callable[[bytes], R]


def method(path: str, response: type[R]) -> Method[R]:
    """Return the method at this path of the form SERVICE/METHOD."""

    def parse(answer: bytes) -> R:
        try:
            parsed: R = response.FromString(answer)  # type: ignore[attr-defined]
        except DecodeError:
            raise ConnectionLost("an answer makes no sense", sent=True) from None
        return parsed

    return Method("/etcdserverpb." + path, parse)


RANGE = method("KV/Range", pb.RangeResponse)
TXN = method("KV/Txn", pb.TxnResponse)
DELETE = method("KV/DeleteRange", pb.Answer)
COMPACT = method("KV/Compact", pb.Answer)
WATCH = method("Watch/Watch", pb.WatchResponse)
GRANT = method("Lease/LeaseGrant", pb.Answer)
REVOKE = method("Lease/LeaseRevoke", pb.Answer)
# On the wire, a stream of one message each way is the same as a unary call.
KEEP_ALIVE = method("Lease/LeaseKeepAlive", pb.LeaseKeepAliveResponse)
AUTHENTICATE = method("Auth/Authenticate", pb.Answer)

STATUS = method("Maintenance/Status", pb.StatusResponse)
ALARM = method("Maintenance/Alarm", pb.AlarmResponse)
DEFRAGMENT = method("Maintenance/Defragment", pb.Answer)
HASH_KV = method("Maintenance/HashKV", pb.HashKVResponse)
MEMBERS = method("Cluster/MemberList", pb.MemberListResponse)
