"""The requests to etcd that a store node forwards for readers.

A reader reads all keys of the cluster, and changes keys of its own certificate only, each of them leased,
so that it ends with its session. Everything else is denied: other methods (alarms, compaction, users),
requests within requests, leases of others. Only fields that this version of irdmafs knows are forwarded.
"""

import errno
from collections.abc import Callable
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError, Message

from ..etcd import etcd_pb2 as pb
from ..etcd.client import GRANT, KEEP_ALIVE, RANGE, REVOKE, TXN, WATCH
from ..kv.etcd_leases import LEASE_BITS
from ..trust.rights import own_ranges

__all__ = ["KEY_COST_BYTES", "PAGE_KEYS", "Checked", "checked", "denied"]

PAGE_KEYS = 1000
# The memory that etcd needs for a key or a lease, besides the bytes.
KEY_COST_BYTES = 200
_KEY_BYTES_MAX = 64
_READ_KEY_BYTES_MAX = 1024
_VALUE_BYTES_MAX = 8192
_OPERATIONS_MAX = 128
_TTL_MAX_S = 3600


class Checked(NamedTuple):
    """A request that may be forwarded. `cost` is how many bytes it adds to etcd's history, `grows` whether
    it adds keys or a lease."""

    message: Any
    cost: int = 0
    grows: bool = False


def checked(path: str, body: bytes, prefix: bytes, owner: int) -> Checked:
    """Return a request of a reader, whose certificate has the number `owner`, about the keys with this
    prefix. Raises PermissionError."""
    if path not in _CHECKS:
        raise denied(f"a reader may not ask etcd for {path[:60]!r}")
    kind, check = _CHECKS[path]
    message = kind()
    try:
        message.ParseFromString(body)
    except DecodeError:
        raise denied("its request to etcd is damaged") from None
    # Requests that are newer than this software, or are hidden in others, are in unknown fields.
    message.DiscardUnknownFields()
    return check(message, prefix, owner)


def denied(text: str) -> PermissionError:
    return PermissionError(errno.EACCES, text)


def _check_range(request: pb.RangeRequest, prefix: bytes, owner: int) -> Checked:
    _check_keys(request.key, request.range_end, prefix)
    if not 0 < request.limit < PAGE_KEYS:
        request.limit = PAGE_KEYS
    return Checked(request)


def _check_watch(request: pb.WatchRequest, prefix: bytes, owner: int) -> Checked:
    create = request.create_request
    _check_keys(create.key, create.range_end, prefix)
    if create.start_revision < 1:
        raise denied("a reader watches from a revision on")
    return Checked(request)


def _check_transaction(request: pb.TxnRequest, prefix: bytes, owner: int) -> Checked:
    if max(map(len, (request.compare, request.success, request.failure))) > _OPERATIONS_MAX:
        raise denied("its transaction has too many parts")
    for compare in request.compare:
        _check_keys(compare.key, compare.range_end, prefix)
    for operation in (*request.success, *request.failure):
        if operation.HasField("request_range"):
            _check_range(operation.request_range, prefix, owner)
            operation.request_range.limit = 1
    cost, grows = 0, False
    for operation in request.success:
        if operation.HasField("request_put"):
            put = operation.request_put
            _check_own(put.key, prefix, owner)
            _check_lease(put.lease, owner)
            if len(put.value) > _VALUE_BYTES_MAX or put.ignore_value or put.ignore_lease:
                raise denied("a reader may not put such a value")
            cost += len(put.key) + len(put.value) + KEY_COST_BYTES
            grows = True
        elif operation.HasField("request_delete_range"):
            delete = operation.request_delete_range
            _check_own(delete.key, prefix, owner)
            if delete.range_end:
                raise denied("a reader deletes one key at a time")
            cost += KEY_COST_BYTES
        elif not operation.HasField("request_range"):
            raise denied("its transaction has a part that is not known here")
    if not all(operation.HasField("request_range") for operation in request.failure):
        raise denied("a reader may only read where a compare fails")
    return Checked(request, cost, grows)


def _check_grant(request: pb.LeaseGrantRequest, prefix: bytes, owner: int) -> Checked:
    _check_lease(request.ID, owner)
    if not 0 < request.TTL <= _TTL_MAX_S:
        raise denied(f"a reader may not have a lease of {request.TTL} s")
    return Checked(request, KEY_COST_BYTES, True)


def _check_own_lease(
    request: pb.LeaseKeepAliveRequest | pb.LeaseRevokeRequest, prefix: bytes, owner: int
) -> Checked:
    _check_lease(request.ID, owner)
    return Checked(request)


_CHECKS: dict[str, tuple[type[Message], Callable[[Any, bytes, int], Checked]]] = {
    RANGE.path: (pb.RangeRequest, _check_range),
    WATCH.path: (pb.WatchRequest, _check_watch),
    TXN.path: (pb.TxnRequest, _check_transaction),
    GRANT.path: (pb.LeaseGrantRequest, _check_grant),
    KEEP_ALIVE.path: (pb.LeaseKeepAliveRequest, _check_own_lease),
    REVOKE.path: (pb.LeaseRevokeRequest, _check_own_lease),
}


def _check_keys(key: bytes, range_end: bytes, prefix: bytes) -> None:
    if max(len(key), len(range_end)) > _READ_KEY_BYTES_MAX:
        raise denied("a reader may not read such a key")
    after = prefix[:-1] + bytes([prefix[-1] + 1])
    if not key.startswith(prefix) or (range_end and not prefix <= range_end <= after):
        raise denied("a reader may not read keys outside the cluster's")


def _check_own(key: bytes, prefix: bytes, owner: int) -> None:
    own = key[len(prefix) :]
    if (
        not key.startswith(prefix)
        or len(own) > _KEY_BYTES_MAX
        or not any(start <= own < end for start, end in own_ranges("reader", owner))
    ):
        raise denied("a reader may not change keys that are not its own")


def _check_lease(lease: int, owner: int) -> None:
    if lease < 0 or lease >> LEASE_BITS != owner:
        raise denied("a reader may not use leases that are not its own")
