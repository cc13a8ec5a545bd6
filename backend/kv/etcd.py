"""The key-value engine of a cluster: a prefix of an etcd, shared with other processes.

Revisions are etcd's, so they grow with what happens under other prefixes, too, and a transaction
that has operations always makes one: it puts the key "s", by which `barrier` learns the revision of
the newest transaction, and whose value says whose transaction it was.

A transaction must not be applied twice, and its caller must learn whether it was applied, although
the connection may break, or etcd's leader die, while it is on its way; and what was on its way may
arrive much later (a member that was stopped and goes on). Therefore every transaction compares the
mod_revision of a key that this process alone writes, its *fence*. When the outcome of a try is not
known, the process puts its fence anew, at some revision F. From then on the try cannot be applied any
more; whether it was before F is found in the history of "s" up to F. If not, it is tried again, with
the new fence. Keys: "s", and "x" + owner + 8 random bytes (leased) for each process's fence.

Who may change nothing that others see ("reader") may not write "s" either: what it does for itself, its
session for example, nobody has to wait for. Its transactions put a key beside its fence instead.

An etcd that was restored from a backup must not be taken for the one that was known before. It is told by
an answer whose revision is lower than one that was heard before the question was sent (answers are
linearizable), and, whenever a watch begins again, by the key "s": at the newest revision that is known it
must be what it was. If it is not, nothing is asked any more but what does no harm (`doubt`).
"""

import errno
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple, Protocol, Self, TypeVar
from weakref import WeakSet

import trio

from ..etcd import etcd_pb2 as pb
from ..etcd.auth import Auth
from ..etcd.client import (
    COMPACT,
    GRANT,
    KEEP_ALIVE,
    RANGE,
    REVOKE,
    STATUS,
    TRY_S,
    TXN,
    Client,
    Message,
    Method,
    Pauses,
    RpcError,
    Uncertain,
    Unsent,
)
from . import Compacted, Compare, Conflict, Delete, Event, KeyValue, NoSpace, Put, WentBack
from .etcd_messages import compare_of, differing, operation_of, question_of
from .etcd_watch import Watch

__all__ = ["EtcdEngine", "LeaseEnded"]

log = logging.getLogger(__name__)

Answer = TypeVar("Answer", bound="Answered")

LAST_KEY = b"s"
# A lease, 63 bits, begins with its owner: the number of a certificate.
OWNER_BYTES = 3
LEASE_BITS = 63 - 8 * OWNER_BYTES
FENCE_KIND = b"x"
# etcd's default --max-txn-ops is 128; one of each is ours.
TRANSACTION_OPERATIONS = 127
PAGE_KEYS = 1000
_PAGE_RETRIES = 5
# A fence that nobody renews goes away; a process that lives longer makes another one.
_FENCE_TTL_S = 3600
_OPEN_S = 10.0
_REVOKE_S = 2.0

# Behind all keys that anybody follows.
_SPENT_KEY = b"\xff"
_SPENDING_AT_ONCE = 32

# gRPC status codes
_NOT_FOUND, _PERMISSION_DENIED, _RESOURCE_EXHAUSTED, _FAILED_PRECONDITION = 5, 7, 8, 9
_OUT_OF_RANGE, _UNAUTHENTICATED = 11, 16


class LeaseEnded(OSError):
    """ESTALE: the lease that a key was to be attached to does not exist any more."""

    def __init__(self) -> None:
        super().__init__(errno.ESTALE, "the lease has ended")


class Answered(Protocol):
    """Any answer of etcd."""

    @property
    def header(self) -> pb.ResponseHeader: ...


class _Fence(NamedTuple):
    """The mod_revision of this process's fence, and "s" as it was then."""

    revision: int
    last_revision: int
    last_id: bytes


class EtcdEngine:
    """An Engine on all keys of an etcd cluster that begin with `prefix`.

    A context manager; `open` and `close` do the same. Calls are repeated for `timeout_s`, then they
    raise OSError (ETIMEDOUT: whether a transaction was applied is unknown then).
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        prefix: bytes,
        *,
        user: str | None = None,
        password: str | None = None,
        ca: str | None = None,
        cert: str | None = None,
        key: str | None = None,
        timeout_s: float = 60.0,
        owner: int = 0,
        reader: bool = False,
    ) -> None:
        self._client = Client(endpoints, user=user, password=password, ca=ca, cert=cert, key=key)
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._revision = 0
        self.transactions = 0  # asked for, each once
        self.on_answer: Callable[[int, Sequence[Event]], None] | None = None
        self.known: KeyValue | None = None
        self._went_back: WentBack | None = None
        self._closed = False
        process = self._process = secrets.token_bytes(8)
        self.owner = owner
        fence = FENCE_KIND + owner.to_bytes(OWNER_BYTES, "big") + process
        self._fence_key = prefix + fence
        # Where this process's transactions leave their identity, within the prefix.
        self._mark = fence + LAST_KEY if reader else LAST_KEY
        self._fence: _Fence | None = None
        self._fence_lease = 0
        self._fencing = trio.Lock()
        self._watches: WeakSet[Watch] = WeakSet()

    async def open(self) -> None:
        """Find out whether etcd can be used. Raises OSError whose text says what to do."""
        request = pb.RangeRequest(key=self._prefix + LAST_KEY)
        await self._call(RANGE, request, timeout_s=min(self._timeout_s, _OPEN_S))

    async def __aenter__(self) -> Self:
        try:
            await self.open()
        except BaseException:
            self._client.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @property
    def auth(self) -> Auth:
        """Users and roles of this etcd."""
        return Auth(self._client, self._timeout_s)

    @property
    def prefix(self) -> bytes:
        return self._prefix

    @property
    def secure(self) -> bool:
        """Return whether etcd is spoken to over TLS, and so can know who asks."""
        return self._client.secure and self._client.user is None

    async def has_others(self) -> bool:
        """Return whether there are keys of others in this etcd."""
        after = self._prefix[:-1] + bytes([self._prefix[-1] + 1])
        for start, end in ((b"\0", self._prefix), (after, b"\0")):
            request = pb.RangeRequest(key=start, range_end=end, limit=1, keys_only=True)
            if (await self._call(RANGE, request)).kvs:
                return True
        return False

    async def weaknesses(self) -> list[str]:
        """Why others than the cluster's members, or all of these alike, may change its keys."""
        where = ", ".join(map(str, self._client.endpoints))
        if not self._client.secure:
            return [
                f"etcd ({where}) is spoken to in clear: whoever reaches it can read and change everything;"
                " irdmafs cluster init makes certificates for it"
            ]
        if self._client.user:
            return [
                f"all processes are the one user {self._client.user!r} of etcd: any of them can change"
                " everything; certificates made by irdmafs cluster init tell them apart"
            ]
        if not await self._is_restricted() and not await self.auth.is_enabled():
            return [
                f"etcd ({where}) does not check what a certificate may do: any member of the cluster can"
                " change everything; irdmafs cluster protect has it checked"
            ]
        return []

    async def _is_restricted(self) -> bool:
        """Return whether etcd keeps us from keys of others. Admins are not."""
        try:
            await self._ask(RANGE, pb.RangeRequest(key=b"\0", keys_only=True))
        except RpcError as error:
            return error.code == _PERMISSION_DENIED
        return False

    async def warn(self) -> None:
        """Log the weaknesses. That they cannot be told stops nobody."""
        try:
            for weakness in await self.weaknesses():
                log.warning("%s", weakness)
        except (OSError, RpcError) as error:
            log.info("whether etcd checks who asks is not known: %s", error)

    def is_ours(self, last_id: bytes) -> bool:
        """Whether a value of the key "s" says that this process made the transaction."""
        return last_id.startswith(self._process)

    @property
    def shared(self) -> bool:
        return True

    @property
    def revision(self) -> int:
        return self._revision

    async def get(self, key: bytes) -> KeyValue | None:
        answer = await self._call(RANGE, pb.RangeRequest(key=self._prefix + key))
        for found in answer.kvs:
            return KeyValue(key, found.value, found.mod_revision)
        return None

    async def range(self, start: bytes, end: bytes, limit: int = 0) -> list[KeyValue]:
        return (await self._pages(start, end, limit))[1]

    async def leases_in(self, start: bytes, end: bytes) -> dict[bytes, int]:
        """The keys of a range that hang on a lease, and on which."""
        request = pb.RangeRequest(key=self._prefix + start, range_end=self._prefix + end)
        answer = await self._call(RANGE, request)
        return {one.key[len(self._prefix) :]: one.lease for one in answer.kvs if one.lease}

    async def snapshot(self, start: bytes, end: bytes) -> tuple[int, list[KeyValue]]:
        self._check_trusted()
        revision, found = await self._pages(start, end, 0)
        self._check_trusted()
        for record in found:
            if record.key == LAST_KEY:
                self._knows(record)
        return revision, found

    async def barrier(self) -> int:
        self._check_trusted()
        answer = await self._call(RANGE, pb.RangeRequest(key=self._prefix + LAST_KEY))
        self._check_trusted()
        revision = 0
        for last in answer.kvs:
            revision = last.mod_revision
        return revision

    async def transact(
        self,
        compares: Sequence[Compare],
        operations: Sequence[Put | Delete],
        *,
        durable: bool = True,
        urgent: bool = False,
    ) -> int:
        """As Engine says, but every transaction with operations has a revision of its own, and all of
        them are durable.

        Raises LeaseEnded, and ValueError for more than TRANSACTION_OPERATIONS compares or operations.
        """
        if len({op.key for op in operations}) < len(operations):
            raise ValueError("a key may occur in one operation of a transaction only")
        if max(len(compares), len(operations)) > TRANSACTION_OPERATIONS:
            raise ValueError(f"etcd takes {TRANSACTION_OPERATIONS} operations in a transaction")
        self._check_trusted()
        request = pb.TxnRequest(
            compare=[compare_of(self._prefix, compare) for compare in compares],
            success=[operation_of(self._prefix, operation) for operation in operations],
            failure=[question_of(self._prefix, compare) for compare in compares],
        )
        if not operations:
            answer = await self._call(TXN, request)
            self._check_trusted()
            if not answer.succeeded:
                raise Conflict(differing(compares, answer) or b"")
            return answer.header.revision
        self.transactions += 1
        # Nobody can claim to have made a transaction of ours before it is applied.
        identity = self._process + secrets.token_bytes(8)
        request.success.add().request_put.CopyFrom(
            pb.PutRequest(key=self._prefix + self._mark, value=identity)
        )
        request.compare.add().CopyFrom(
            pb.Compare(key=self._fence_key, target=pb.Compare.MOD, mod_revision=0)
        )
        revision = await self._apply(compares, request, identity)
        if self.on_answer is not None:
            events = [
                Event(revision, op.key, op.value if isinstance(op, Put) else None)
                for op in operations
            ]
            self.on_answer(revision, [*events, Event(revision, self._mark, identity)])
        return revision

    async def settle(self) -> None:
        """Return when no transaction can be applied any more whose caller was not told its outcome."""
        self._check_trusted()
        await self._put_fence(self._fence, trio.current_time() + self._timeout_s)

    async def idle(self) -> None:
        """Nothing is put off here."""

    async def flush(self) -> None:
        """Every transaction is durable when it is acknowledged."""

    def watch(self, start: bytes, end: bytes, from_revision: int) -> "Watch":
        self._check_open()
        self._check_trusted()
        watch = Watch(
            self._client,
            self._prefix,
            start,
            end,
            from_revision,
            self._heard,
            self._check_continued,
        )
        if start < LAST_KEY < end:
            watch.on_event = self._happened
        self._watches.add(watch)
        return watch

    # -- whether it is the etcd that was known ---------------------------------------------------

    async def is_continued(self) -> bool:
        return await self._is_continued(None)

    async def _is_continued(self, timeout_s: float | None) -> bool:
        if self.known is None:
            return True
        return await self.has_transaction(self.known.mod_revision, self.known.value, timeout_s)

    async def has_transaction(
        self, revision: int, last_id: bytes, timeout_s: float | None = None
    ) -> bool:
        if not revision:
            return True
        request = pb.RangeRequest(key=self._prefix + LAST_KEY, revision=revision)
        try:
            answer = await self._ask(RANGE, request, timeout_s)
        except RpcError as error:
            if error.code != _OUT_OF_RANGE:
                raise self._failure(error) from None
            if "future" in error.text:
                return False
            answer = await self._call(RANGE, pb.RangeRequest(key=self._prefix + LAST_KEY))
            return answer.header.revision >= revision
        return any((found.mod_revision, found.value) == (revision, last_id) for found in answer.kvs)

    def doubt(self, error: WentBack) -> None:
        if self._went_back is None:
            self._went_back = error
            for watch in list(self._watches):
                watch.fail(error)

    def trust(self) -> None:
        self._went_back = None
        self._revision = 0
        self._fence = None

    async def _check_continued(self, timeout_s: float | None = None) -> None:
        """Raises WentBack, OSError."""
        if self._went_back is None and not await self._is_continued(timeout_s):
            assert self.known is not None
            self.doubt(
                WentBack(
                    f"revision {self.known.mod_revision}, which this process knew, is not there"
                )
            )
        self._check_trusted()

    def _check_trusted(self) -> None:
        if self._went_back is not None:
            raise WentBack(self._went_back.what)

    def _check_order(self, before: int, revision: int) -> None:
        """`revision` is that of a linearizable answer, `before` what was known when it was asked for."""
        if revision < before and self._went_back is None:
            self.doubt(WentBack(f"it is at revision {revision}, and {before} was known here"))

    def _happened(self, event: Event) -> None:
        if event.key == LAST_KEY and event.value is not None:
            self._knows(KeyValue(LAST_KEY, event.value, event.revision))

    def _knows(self, last: KeyValue) -> None:
        if self.known is None or last.mod_revision > self.known.mod_revision:
            self.known = last

    # -- leases ----------------------------------------------------------------------------------

    async def grant(self, ttl_s: int) -> int:
        """A lease that ends `ttl_s` seconds after it was last kept alive, or a little later."""
        self._check_trusted()
        # The number is ours: a repeated request grants nothing twice.
        lease = self.owner << LEASE_BITS | (secrets.randbits(LEASE_BITS) or 1)
        try:
            await self._ask(GRANT, pb.LeaseGrantRequest(TTL=ttl_s, ID=lease))
        except RpcError as error:
            if error.code != _FAILED_PRECONDITION:  # it exists: an answer was lost
                raise self._failure(error) from None
        return lease

    async def keep_alive(self, lease: int) -> AsyncIterator[tuple[float, float]]:
        """Renew a lease until it has ended, about three times in its life.

        Yields, after each renewal, when it was asked for (time.monotonic(), seconds) and for how
        long from then the lease is sure to live (seconds). Goes on trying for as long as etcd cannot
        be reached: it is for the caller to watch the clock. Raises OSError when etcd refuses.
        """
        request = pb.LeaseKeepAliveRequest(ID=lease)
        pauses = Pauses()
        ttl_s = 1.0
        while True:
            self._check_open()
            self._check_trusted()
            sent = time.monotonic()
            try:
                answer = await self._client.attempt(KEEP_ALIVE, request, max(ttl_s / 3, 0.5))
            except RpcError as error:
                raise self._failure(error) from None
            except (Unsent, Uncertain):
                await pauses.wait()
                continue
            if answer.TTL <= 0:
                return
            pauses = Pauses()
            ttl_s = float(answer.TTL)
            yield sent, ttl_s
            # Whoever was stopped, or had much to do, may be late.
            await trio.sleep(max(0.0, sent + ttl_s / 3 - time.monotonic()))

    async def revoke(self, lease: int) -> None:
        """End a lease and delete its keys; nothing happens if it has ended."""
        try:
            await self._ask(REVOKE, pb.LeaseRevokeRequest(ID=lease))
        except RpcError as error:
            if error.code != _NOT_FOUND:
                raise self._failure(error) from None

    async def compact(self, revision: int) -> None:
        """Let etcd, for all its users, forget the history before `revision`."""
        try:
            await self._ask(COMPACT, pb.CompactionRequest(revision=revision))
        except RpcError as error:
            if error.code != _OUT_OF_RANGE:  # it is forgotten already
                raise self._failure(error) from None

    async def spend(self, count: int) -> None:
        """Let etcd's revision grow by `count`, changing nothing."""
        request = pb.TxnRequest(
            success=[pb.RequestOp(request_put=pb.PutRequest(key=self._prefix + _SPENT_KEY))]
        )
        left = iter(range(count))

        async def put() -> None:
            for _ in left:
                await self._call(TXN, request)

        async with trio.open_nursery() as nursery:
            for _ in range(_SPENDING_AT_ONCE):
                nursery.start_soon(put)

    async def status(self) -> pb.StatusResponse:
        """Version, size of the database in bytes, leader of the member that is in use."""
        return await self._call(STATUS, pb.StatusRequest())

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if self._fence_lease:
                with trio.move_on_after(_REVOKE_S):
                    request = pb.LeaseRevokeRequest(ID=self._fence_lease)
                    await self._client.attempt(REVOKE, request, _REVOKE_S)
        except (RpcError, Unsent, Uncertain):
            pass  # it ends by itself
        finally:
            self._client.close()
            for watch in list(self._watches):
                watch.close()

    async def _pages(self, start: bytes, end: bytes, limit: int) -> tuple[int, list[KeyValue]]:
        """A range as of one revision."""
        skip = len(self._prefix)
        for _ in range(_PAGE_RETRIES):
            found: list[KeyValue] = []
            request = pb.RangeRequest(key=self._prefix + start, range_end=self._prefix + end)
            if start >= end:
                return self._revision, found
            try:
                while True:
                    request.limit = min(limit - len(found), PAGE_KEYS) if limit else PAGE_KEYS
                    answer = await self._ask(RANGE, request)
                    found += [
                        KeyValue(one.key[skip:], one.value, one.mod_revision) for one in answer.kvs
                    ]
                    request.revision = request.revision or answer.header.revision
                    if not answer.more or len(found) == limit:
                        return request.revision, found
                    request.key = self._prefix + found[-1].key + b"\0"
            except RpcError as error:
                if error.code != _OUT_OF_RANGE:
                    raise self._failure(error) from None
                # The revision of the first page was compacted meanwhile.
        raise OSError(errno.EBUSY, "etcd's history is compacted faster than it can be read")

    async def _apply(
        self, compares: Sequence[Compare], request: pb.TxnRequest, identity: bytes
    ) -> int:
        deadline = trio.current_time() + self._timeout_s
        since = self._revision
        pauses = Pauses()
        was_cut_off = False
        while True:
            self._check_open()
            if was_cut_off:
                await self._check_continued(max(deadline - trio.current_time(), 0.0))
                was_cut_off = False
            self._check_trusted()
            fence = self._fence or await self._put_fence(None, deadline)
            request.compare[-1].mod_revision = fence.revision
            if self._mark != LAST_KEY:
                request.success[-1].request_put.lease = self._fence_lease
            before = self._revision
            try:
                answer = await self._client.attempt(
                    TXN, request, min(TRY_S, deadline - trio.current_time())
                )
            except Unsent as error:
                if error.final or trio.current_time() + pauses.next_s >= deadline:
                    raise self._given_up(error) from None
                was_cut_off = True
                await pauses.wait()
                continue
            except Uncertain:
                await self._check_continued(max(deadline - trio.current_time(), 0.0))
                fence = await self._put_fence(fence, deadline)
                revision = await self._find(identity, since, fence, deadline)
                if revision is not None:
                    return revision
                continue
            except RpcError as error:
                if error.code == _NOT_FOUND:
                    raise LeaseEnded from None
                raise self._failure(error) from None
            except BaseException:
                # Cancelled: what was sent must not be applied after what the caller does next.
                self._drop_fence(fence)
                raise
            self._check_order(before, answer.header.revision)
            self._check_trusted()
            self._heard(answer.header.revision)
            if answer.succeeded:
                return answer.header.revision
            key = differing(compares, answer)
            if key is not None:
                raise Conflict(key)
            self._drop_fence(fence)
            was_cut_off = True

    def _drop_fence(self, fence: _Fence) -> None:
        if self._fence is fence:
            self._fence = None

    async def _put_fence(self, than: _Fence | None, deadline: float) -> _Fence:
        """A newer fence than this one: what was sent with that one has been applied or never will."""
        async with self._fencing:
            if self._fence is not None and self._fence is not than:
                return self._fence
            self._fence = None
            request = pb.TxnRequest(
                success=[
                    pb.RequestOp(request_put=pb.PutRequest(key=self._fence_key)),
                    pb.RequestOp(request_range=pb.RangeRequest(key=self._prefix + self._mark)),
                ]
            )
            while True:
                if not self._fence_lease:
                    self._fence_lease = await self.grant(_FENCE_TTL_S)
                request.success[0].request_put.lease = self._fence_lease
                try:
                    answer = await self._ask(
                        TXN, request, timeout_s=max(deadline - trio.current_time(), 0.0)
                    )
                    break
                except RpcError as error:
                    if error.code != _NOT_FOUND:
                        raise self._failure(error) from None
                    self._fence_lease = 0
            last_revision, last_id = 0, b""
            for last in answer.responses[1].response_range.kvs:
                last_revision, last_id = last.mod_revision, last.value
            self._fence = _Fence(answer.header.revision, last_revision, last_id)
            return self._fence

    async def _find(
        self, identity: bytes, since: int, fence: _Fence, deadline: float
    ) -> int | None:
        """The revision after `since` and before `fence` of the transaction `identity`, if any."""
        if fence.last_id == identity:
            return fence.last_revision
        if fence.last_revision <= since:
            return None
        history = self.watch(self._mark, self._mark + b"\0", since)
        try:
            with trio.move_on_at(deadline):
                async for change in history:
                    if change.events[0].value == identity:
                        return change.revision
                    if change.revision >= fence.last_revision:
                        return None
        except Compacted:
            raise OSError(
                errno.EIO,
                "etcd lost the connection, and compacted its history before it could be asked whether"
                " a transaction was applied; let it keep some minutes (--auto-compaction-retention)",
            ) from None
        finally:
            history.close()
        self._check_open()
        raise self._client.timed_out(self._timeout_s)

    async def _ask(
        self, method: Method[Answer], request: Message, timeout_s: float | None = None
    ) -> Answer:
        """Repeat a call until it has an answer. Raises RpcError and OSError."""
        self._check_open()
        before = self._revision
        try:
            answer = await self._client.call(
                method, request, timeout_s=self._timeout_s if timeout_s is None else timeout_s
            )
        except OSError:
            self._check_open()
            raise
        if method is RANGE or method is TXN:
            self._check_order(before, answer.header.revision)
        self._heard(answer.header.revision)
        return answer

    async def _call(
        self, method: Method[Answer], request: Message, timeout_s: float | None = None
    ) -> Answer:
        try:
            return await self._ask(method, request, timeout_s)
        except RpcError as error:
            raise self._failure(error) from None

    def _heard(self, revision: int) -> None:
        if revision > self._revision:
            self._revision = revision

    def _check_open(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("the engine is closed")

    def _given_up(self, error: Unsent) -> OSError:
        self._check_open()
        if error.final:
            return self._client.refused(str(error))
        return self._client.timed_out(self._timeout_s)

    def _failure(self, error: RpcError) -> OSError:
        """A refusal of etcd as an error that says what to do."""
        where = f"etcd at {self._client.address}"
        if error.code == _RESOURCE_EXHAUSTED and "space exceeded" in error.text:
            return NoSpace(f"{where} (compact and defragment it, then `etcdctl alarm disarm`)")
        if error.code in (_PERMISSION_DENIED, _UNAUTHENTICATED) or "user name is" in error.text:
            who = "this user" if self._client.user else "nobody without a user and password"
            return OSError(
                errno.EACCES,
                f"{where} lets {who} do this ({error.text}); `etcdctl user` and `etcdctl role` show"
                f" who may use the keys under {self._prefix!r}",
            )
        if "request is too large" in error.text or "larger than max" in error.text:
            return OSError(errno.EMSGSIZE, f"{where}: a transaction is too large ({error.text})")
        return OSError(errno.EIO, f"{where}: {error.text}")
