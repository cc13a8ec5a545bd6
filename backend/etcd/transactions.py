"""Transactions of etcd that are applied once, and whose outcome is known whatever fails meanwhile.

A transaction must not be applied twice, and its caller must learn whether it was applied, although
the connection may break, or etcd's leader die, while it is on its way; and a request on its way may
arrive much later (at a member that was stopped and goes on). Therefore every transaction compares the
mod_revision of a key that this process alone writes, its *fence*. When the outcome of a try is not
known, the process puts its fence anew, at some revision F. From then on the try cannot be applied any
more; whether it was before F is found in the history of "s" up to F. If not, it is tried again, with
the new fence. Keys: "s", and "x" + owner + 8 random bytes (leased) for each process's fence.

A "reader", which may change nothing that others see, may not write "s" either: no other process has to wait
for changes of its own keys, its session for example. Its transactions put a key beside its fence instead.
"""

import errno
import secrets
from contextlib import suppress
from typing import NamedTuple

import trio

from ..kv import (
    Compacted,
    Compares,
    Conflict,
    Delete,
    Empty,
    Exists,
    NoSpace,
    Operations,
    Put,
    Unchanged,
)
from ..pauses import Pauses
from . import etcd_pb2 as pb
from .calls import LAST_KEY, Calls, Watch
from .client import PAUSES_S, Uncertain, Unsent, longer
from .leases import OWNER_BYTES, EtcdLeases, LeaseEnded
from .rpc import DELETE, RANGE, REVOKE, TXN, RpcError, Status

FENCE_KIND = b"x"
# etcd's default --max-txn-ops is 128; one compare and one operation are ours.
COMPARES_MAX = 127
# More operations are in transactions within the transaction: etcd takes 128 compares, and operations of one
# of these, together.
_WITHIN_MAX = 63
_OPERATIONS_WITHIN_MAX = 64
# A fence whose lease is not renewed is deleted; a process that lives longer makes another one.
_FENCE_TTL_S = 3600
_REVOKE_S = 2.0
# etcd, or a reader's certificate, may keep no more.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class _Last(NamedTuple):
    """The newest transaction: the key "s" as it was at some time."""

    revision: int
    identity: bytes


class _Fence(NamedTuple):
    """The mod_revision of this process's fence, and the newest transaction then."""

    revision: int
    last: _Last


class EtcdTransactions:
    """The transactions of one process, and its fence. `mark` is the key whose value identifies each; it
    begins with the number of the `process`."""

    def __init__(self, calls: Calls, leases: EtcdLeases, *, reader: bool) -> None:
        self._calls = calls
        self._leases = leases
        self.process = secrets.token_bytes(8)
        key = FENCE_KIND + leases.owner.to_bytes(OWNER_BYTES, "big") + self.process
        self._fence_key = calls.prefix + key
        self.mark = key + LAST_KEY if reader else LAST_KEY
        self._fence: _Fence | None = None
        self._lease = 0
        self._fencing = trio.Lock()
        calls.trust_listeners.append(self._forget)

    def new_identity(self) -> bytes:
        """Return a value of `mark`. It is random: no other process can claim a transaction before it is
        applied."""
        return self.process + secrets.token_bytes(8)

    async def carry_out(
        self, compares: Compares, operations: Operations, identity: bytes = b""
    ) -> int:
        """Apply a transaction once, and return its revision. Raises Conflict, LeaseEnded and NoSpace, after
        which nothing has changed, and OSError: then `find` tells the outcome."""
        identity = identity or self.new_identity()
        request = self._request_of(compares, operations, Put(self.mark, identity))
        calls = self._calls
        deadline = trio.current_time() + calls.timeout_s
        since = calls.revision
        pauses: Pauses | None = None
        try_s = calls.client.try_s
        was_cut_off = False
        while True:
            calls.check_trusted()
            if was_cut_off:
                await calls.check_continued(_left_s(deadline))
                was_cut_off = False
            fence = self._fence or await self._put_fence(None, deadline)
            request.compare[-1].mod_revision = fence.revision
            if self.mark != LAST_KEY:
                request.success[-1].request_put.lease = self._lease
            before, left_s = calls.revision, deadline - trio.current_time()
            try:
                answer = await calls.client.attempt(TXN, request, min(try_s, left_s))
            except Unsent as error:
                pauses = pauses or Pauses(*PAUSES_S)
                if error.final or trio.current_time() + pauses.next_s >= deadline:
                    raise calls.given_up(error) from None
                was_cut_off = True
                await pauses.wait()
                continue
            except Uncertain:
                # If nobody can be asked in time, the next transaction ends this one.
                self._drop_fence(fence)
                try_s = longer(try_s)
                await calls.check_continued(_left_s(deadline))
                revision = await self._find(identity, since, fence, deadline)
                if revision is not None:
                    return revision
                continue
            except RpcError as error:
                if error.code == Status.NOT_FOUND:
                    raise LeaseEnded from None
                refusal = calls.failure(error)
                if isinstance(refusal, NoSpace):
                    # etcd says the same of a transaction that it applied, and after which it is full.
                    revision = await self._find(identity, since, fence, deadline)
                    if revision is not None:
                        return revision
                raise refusal from None
            except BaseException:
                # Cancelled: what was sent must not be applied after what the caller does next.
                self._drop_fence(fence)
                raise
            calls.heard(answer.header.revision, before)
            calls.check_trusted()
            if answer.succeeded:
                return answer.header.revision
            key = _differing(compares, answer)
            if key is not None:
                raise Conflict(key)
            self._drop_fence(fence)
            was_cut_off = True

    def _request_of(self, compares: Compares, operations: Operations, mark: Put) -> pb.TxnRequest:
        """Return a transaction, and for each compare the question that tells, if it fails, whether the
        compare held. The compare of the fence is the last one, and so is the operation `mark`."""
        prefix, request = self._calls.prefix, pb.TxnRequest()
        for compare in compares:
            asked = request.failure.add().request_range
            asked.key, asked.keys_only = prefix + compare[0], True
            if isinstance(compare, Unchanged):
                asked.min_mod_revision = after = compare.revision + 1
                test = request.compare.add(target=pb.Compare.MOD, mod_revision=after)
                test.result = pb.Compare.LESS
            elif isinstance(compare, Empty | Exists):
                test = request.compare.add(target=pb.Compare.CREATE, create_revision=0)
            else:
                test = request.compare.add(target=pb.Compare.MOD, mod_revision=compare[1])
            test.key = asked.key
            if isinstance(compare, Empty | Unchanged):
                test.range_end = asked.range_end = prefix + compare.end
                asked.limit = 1
            elif isinstance(compare, Exists):
                test.result = pb.Compare.GREATER
        request.compare.add(key=self._fence_key, target=pb.Compare.MOD, mod_revision=0)
        if len(operations) <= COMPARES_MAX:
            _fill(request, prefix, [*operations, mark])
            return request
        at_once = _within(len(compares))
        for first in range(0, len(operations), at_once):
            within = request.success.add().request_txn
            _fill(within, prefix, operations[first : first + at_once])
        _fill(request, prefix, [mark])
        return request

    async def settle(self) -> None:
        """Return when no transaction can be applied any more whose caller was not told its outcome."""
        self._calls.check_trusted()
        await self._end_tries(self._fence, trio.current_time() + self._calls.timeout_s)

    async def find(self, identity: bytes, since: int) -> int | None:
        """Return the revision after `since` of a transaction with this identity; None if it was not
        applied, and never will be. Raises OSError EIO if etcd has forgotten that, and other ones."""
        self._calls.check_trusted()
        deadline = trio.current_time() + self._calls.timeout_s
        return await self._find(identity, since, self._fence, deadline)

    def _forget(self) -> None:
        """Put the fence anew before the next transaction: another etcd may have answered for it."""
        self._fence = None

    async def end(self) -> None:
        """End the fence's lease, unless that takes too long: it ends by itself."""
        if not self._lease:
            return
        with suppress(RpcError, Unsent, Uncertain), trio.move_on_after(_REVOKE_S):
            request = pb.LeaseRevokeRequest(ID=self._lease)
            await self._calls.client.attempt(REVOKE, request, _REVOKE_S)

    def _drop_fence(self, fence: _Fence) -> None:
        if self._fence is fence:
            self._fence = None

    async def _put_fence(self, than: _Fence | None, deadline: float) -> _Fence:
        """Return a newer fence than this one: a try with that one has been applied or never will be."""
        calls = self._calls
        async with self._fencing:
            if self._fence is not None and self._fence is not than:
                return self._fence
            self._fence = None
            mark = calls.prefix + self.mark
            ask = pb.RequestOp(request_range=pb.RangeRequest(key=mark))
            put = pb.RequestOp(request_put=pb.PutRequest(key=mark))
            there = pb.Compare(key=mark, target=pb.Compare.CREATE, create_revision=0)
            there.result = pb.Compare.GREATER
            while True:
                if not self._lease:
                    self._lease = await self._leases.grant(_FENCE_TTL_S)
                fence = pb.PutRequest(key=self._fence_key, lease=self._lease)
                begin = pb.RequestOp(request_put=fence)
                request = pb.TxnRequest(success=[begin, ask])
                if self.mark == LAST_KEY:
                    # A member may have removed it, and then nothing tells how far the history goes.
                    request.compare.append(there)
                    request.failure.extend([begin, put])
                try:
                    answer = await calls.ask(TXN, request, _left_s(deadline))
                    break
                except RpcError as error:
                    if error.code != Status.NOT_FOUND:
                        raise calls.failure(error) from None
                    self._lease = 0
            last = _Last(answer.header.revision, b"")
            if answer.succeeded:
                last = _last_in(answer.responses[1].response_range)
            self._fence = _Fence(answer.header.revision, last)
            return self._fence

    async def _delete_fence(self, deadline: float) -> _Last:
        """Delete the fence, for which etcd needs no room. Return the newest transaction after that."""
        calls = self._calls
        async with self._fencing:
            self._fence = None
            await calls.call(DELETE, pb.DeleteRangeRequest(key=self._fence_key), _left_s(deadline))
        request = pb.RangeRequest(key=calls.prefix + self.mark)
        return _last_in(await calls.call(RANGE, request, _left_s(deadline)))

    async def _end_tries(self, fence: _Fence | None, deadline: float) -> _Last:
        """Return the newest transaction of a time from which on no try with a fence is applied."""
        try:
            return (await self._put_fence(fence, deadline)).last
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            return await self._delete_fence(deadline)

    async def _find(
        self, wanted: bytes, since: int, fence: _Fence | None, deadline: float
    ) -> int | None:
        """Return the revision after `since` of the transaction `wanted`, which was tried with this fence;
        None if it was not applied, and never will be."""
        last = await self._end_tries(fence, deadline)
        if last.identity == wanted:
            return last.revision
        if last.revision <= since:
            return None
        history = Watch(self._calls, self.mark, self.mark + b"\0", since)
        try:
            with trio.move_on_at(deadline):
                async for change in history:
                    if change.events[0].value == wanted:
                        return change.revision
                    if change.revision >= last.revision:
                        return None
        except Compacted:
            raise OSError(
                errno.EIO,
                "etcd lost the connection, and compacted its history before it could be asked whether"
                " a transaction was applied; let it keep some minutes (--auto-compaction-retention)",
            ) from None
        finally:
            history.close()
        self._calls.check_open()
        raise self._calls.client.timed_out(self._calls.timeout_s)


def _fill(request: pb.TxnRequest, prefix: bytes, operations: Operations) -> None:
    """Have a transaction carry out operations."""
    for one in operations:
        operation = request.success.add()
        if isinstance(one, Delete):
            operation.request_delete_range.key = prefix + one.key
        else:
            put = operation.request_put
            put.key, put.value, put.lease = prefix + one.key, one.value, one.lease


def operations_max(compares: int) -> int:
    """Return how many operations a transaction with so many compares may have."""
    return max(COMPARES_MAX, _WITHIN_MAX * _within(compares))


def _within(compares: int) -> int:
    return min(COMPARES_MAX - compares, _OPERATIONS_WITHIN_MAX)


def _left_s(deadline: float) -> float:
    return max(deadline - trio.current_time(), 0.0)


def _last_in(answer: pb.RangeResponse) -> _Last:
    """Return the newest transaction, as the key "s" says it in an answer."""
    for last in answer.kvs:
        return _Last(last.mod_revision, last.value)
    return _Last(0, b"")


def _differing(compares: Compares, answer: pb.TxnResponse) -> bytes | None:
    """Return the key of the first compare that did not hold in a transaction that failed."""
    for compare, response in zip(compares, answer.responses, strict=True):
        found = response.response_range.kvs
        if isinstance(compare, Empty | Exists | Unchanged):
            holds = bool(found) == isinstance(compare, Exists)
        else:
            holds = (found[0].mod_revision if found else 0) == compare[1]
        if not holds:
            return compare[0]
    return None
