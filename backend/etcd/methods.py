"""The methods of etcd that are called: their paths, and the messages that they answer with."""

from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

from . import etcd_pb2 as pb

__all__ = [
    "ALARM",
    "AUTHENTICATE",
    "COMPACT",
    "DEFRAGMENT",
    "DELETE",
    "GRANT",
    "HASH_KV",
    "KEEP_ALIVE",
    "MEMBERS",
    "RANGE",
    "REVOKE",
    "STATUS",
    "TXN",
    "WATCH",
    "Message",
    "Method",
    "Response",
    "auth_method",
]


class Message(Protocol):
    def SerializeToString(self) -> bytes: ...


Response = TypeVar("Response")


class Method(NamedTuple, Generic[Response]):
    path: str
    parse: Callable[[bytes], Response]


def _method(path: str, response: type[Response]) -> Method[Response]:
    return Method("/etcdserverpb." + path, response.FromString)  # type: ignore[attr-defined]


def auth_method(name: str, response: type[Response]) -> Method[Response]:
    """Return a method of etcd's service of users and roles."""
    return _method(f"Auth/{name}", response)


RANGE: Method[pb.RangeResponse] = _method("KV/Range", pb.RangeResponse)
TXN: Method[pb.TxnResponse] = _method("KV/Txn", pb.TxnResponse)
DELETE: Method[pb.DeleteRangeResponse] = _method("KV/DeleteRange", pb.DeleteRangeResponse)
COMPACT: Method[pb.CompactionResponse] = _method("KV/Compact", pb.CompactionResponse)
WATCH: Method[pb.WatchResponse] = _method("Watch/Watch", pb.WatchResponse)
GRANT: Method[pb.LeaseGrantResponse] = _method("Lease/LeaseGrant", pb.LeaseGrantResponse)
REVOKE: Method[pb.LeaseRevokeResponse] = _method("Lease/LeaseRevoke", pb.LeaseRevokeResponse)
# On the wire, a stream of one message each way is the same as a unary call.
KEEP_ALIVE: Method[pb.LeaseKeepAliveResponse] = _method(
    "Lease/LeaseKeepAlive", pb.LeaseKeepAliveResponse
)
AUTHENTICATE: Method[pb.AuthenticateResponse] = _method(
    "Auth/Authenticate", pb.AuthenticateResponse
)

STATUS: Method[pb.StatusResponse] = _method("Maintenance/Status", pb.StatusResponse)
ALARM: Method[pb.AlarmResponse] = _method("Maintenance/Alarm", pb.AlarmResponse)
DEFRAGMENT: Method[pb.DefragmentResponse] = _method("Maintenance/Defragment", pb.DefragmentResponse)
HASH_KV: Method[pb.HashKVResponse] = _method("Maintenance/HashKV", pb.HashKVResponse)
MEMBERS: Method[pb.MemberListResponse] = _method("Cluster/MemberList", pb.MemberListResponse)
