"""The methods of etcd that are called: their paths, and the messages that they answer with."""

from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

from . import etcd_pb2 as pb


class Message(Protocol):
    def SerializeToString(self) -> bytes: ...


Response = TypeVar("Response")


class Method(NamedTuple, Generic[Response]):
    path: str
    parse: Callable[[bytes], Response]


def method(path: str, response: type[Response]) -> Method[Response]:
    """Return the method at this path of the form SERVICE/METHOD."""
    return Method("/etcdserverpb." + path, response.FromString)  # type: ignore[attr-defined]


RANGE = method("KV/Range", pb.RangeResponse)
TXN = method("KV/Txn", pb.TxnResponse)
DELETE = method("KV/DeleteRange", pb.DeleteRangeResponse)
COMPACT = method("KV/Compact", pb.CompactionResponse)
WATCH = method("Watch/Watch", pb.WatchResponse)
GRANT = method("Lease/LeaseGrant", pb.LeaseGrantResponse)
REVOKE = method("Lease/LeaseRevoke", pb.LeaseRevokeResponse)
# On the wire, a stream of one message each way is the same as a unary call.
KEEP_ALIVE = method("Lease/LeaseKeepAlive", pb.LeaseKeepAliveResponse)
AUTHENTICATE = method("Auth/Authenticate", pb.AuthenticateResponse)

STATUS = method("Maintenance/Status", pb.StatusResponse)
ALARM = method("Maintenance/Alarm", pb.AlarmResponse)
DEFRAGMENT = method("Maintenance/Defragment", pb.DefragmentResponse)
HASH_KV = method("Maintenance/HashKV", pb.HashKVResponse)
MEMBERS = method("Cluster/MemberList", pb.MemberListResponse)
