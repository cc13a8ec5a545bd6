"""Transactions of the engine as etcd's messages."""

from collections.abc import Sequence

from ..kv import Compare, Delete, Empty, Exists, Put
from . import etcd_pb2 as pb


def compare_of(prefix: bytes, compare: Compare) -> pb.Compare:
    if isinstance(compare, Exists):
        return pb.Compare(
            key=prefix + compare.key,
            target=pb.Compare.CREATE,
            result=pb.Compare.GREATER,
            create_revision=0,
        )
    if isinstance(compare, Empty):
        return pb.Compare(
            key=prefix + compare.start,
            range_end=prefix + compare.end,
            target=pb.Compare.CREATE,
            create_revision=0,
        )
    key, revision = compare
    return pb.Compare(key=prefix + key, target=pb.Compare.MOD, mod_revision=revision)


def question_of(prefix: bytes, compare: Compare) -> pb.RequestOp:
    """Return the request that tells, when a transaction fails, whether this compare held."""
    if isinstance(compare, Empty):
        request = pb.RangeRequest(
            key=prefix + compare.start,
            range_end=prefix + compare.end,
            limit=1,
            keys_only=True,
        )
    else:
        key = compare.key if isinstance(compare, Exists) else compare[0]
        request = pb.RangeRequest(key=prefix + key, keys_only=True)
    return pb.RequestOp(request_range=request)


def operation_of(prefix: bytes, operation: Put | Delete) -> pb.RequestOp:
    key = prefix + operation.key
    if isinstance(operation, Delete):
        return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key))
    put = pb.PutRequest(key=key, value=operation.value, lease=operation.lease)
    return pb.RequestOp(request_put=put)


def differing(compares: Sequence[Compare], answer: pb.TxnResponse) -> bytes | None:
    """Return the key of the first compare that did not hold in a transaction that failed."""
    for compare, response in zip(compares, answer.responses, strict=True):
        found = response.response_range.kvs
        if isinstance(compare, Empty):
            if found:
                return compare.start
        elif isinstance(compare, Exists):
            if not found:
                return compare.key
        elif (found[0].mod_revision if found else 0) != compare[1]:
            return compare[0]
    return None
