"""The key-value engine of a cluster: a prefix of an etcd, shared with other processes.

Revisions are etcd's, so they grow with what happens under other prefixes, too, and a transaction
always makes one: it puts the key "s", by which `barrier` learns the revision of
the newest transaction, and whose value names its process.
"""

import errno
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from contextlib import aclosing
from operator import attrgetter
from typing import Any, Final, Self

from ..kv import Compares, KeyValue, Operations
from ..unwrap import if_it_fails
from . import etcd_pb2 as pb
from .admin import EtcdAdmin
from .calls import LAST_KEY, A, Calls, Watch
from .client import TRY_S, Client, DirectClient
from .leases import EtcdLeases
from .rpc import RANGE, TXN, Message, Method, RpcError, Status
from .transactions import COMPARES_MAX, EtcdTransactions, operations_max

# An inode has 64 KiB of attributes at most, a message of etcd 512 MiB.
PAGE_KEYS = 5000
# Keys are taken for so much less dense after a range that had less than a page.
_SPARSER = 256
# The length of the longest key: kind, directory, name.
_KEY_BYTES = 1 + 8 + 255
# Ranges whose revision is compacted while they are read are read so often.
_TRIES = 5
_OPEN_S = 10.0
_TRY_S_MIN = 0.5
_KEY: Final = attrgetter("key")


class EtcdEngine:
    """An ordered map of all keys of an etcd that begin with `prefix`, which other processes change, too. It
    is reached by `client`; if that is None, at `endpoints`, in clear.

    A context manager; `open` and `close` do the same. Calls are repeated for `timeout_s`, then they
    raise OSError (ETIMEDOUT: whether a transaction was applied is unknown then), and after `close`
    trio.ClosedResourceError.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        prefix: bytes,
        *,
        timeout_s: float = 60.0,
        owner: int = 0,
        reader: bool = False,
        client: Client | None = None,
    ) -> None:
        client = client or DirectClient(endpoints)
        calls = self.calls = Calls(client, prefix, timeout_s)
        self.leases = EtcdLeases(calls, owner)
        self.admin = EtcdAdmin(calls)
        self.fenced = EtcdTransactions(calls, self.leases, reader=reader)
        self.transactions = 0  # asked for, each once

    async def open(self) -> None:
        """Check that etcd can be used. Raises OSError whose text says what to do."""
        request = pb.RangeRequest(key=self.prefix + LAST_KEY)
        await self.calls.call(RANGE, request, timeout_s=min(self.calls.timeout_s, _OPEN_S))

    async def close(self) -> None:
        if self.calls.closed:
            return
        self.calls.closed = True
        try:
            await self.fenced.end()
        finally:
            self.calls.client.close()
            for watch in list(self.calls.watches):
                watch.close()

    async def __aenter__(self) -> Self:
        with if_it_fails(self.calls.client.close):
            await self.open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def try_within(self, lease_ttl_s: float) -> None:
        """Let the first try of a call end well within a lease of so many seconds: what a failing member of
        etcd did not answer, or did not pass on to a new leader, is asked for again."""
        self.calls.client.try_s = min(max(lease_ttl_s / 3, _TRY_S_MIN), TRY_S)

    @property
    def prefix(self) -> bytes:
        return self.calls.prefix

    @property
    def revision(self) -> int:
        """Return the newest revision that is known here."""
        return self.calls.revision

    async def get(self, key: bytes) -> KeyValue | None:
        answer = await self.calls.call(RANGE, pb.RangeRequest(key=self.prefix + key))
        return next(iter(self._found(answer.kvs)), None)

    async def range(self, start: bytes, end: bytes) -> list[KeyValue]:
        """Return the keys with start <= key < end in order, as of one revision."""
        return (await self._read(start, end))[1]

    async def snapshot(self, start: bytes, end: bytes, at: int = 0) -> tuple[int, list[KeyValue]]:
        """Return a range and the revision it is of, from which watching goes on without a gap: `at`, 0: the
        newest one."""
        self.calls.check_trusted()
        revision, found = await self._read(start, end, at)
        self.calls.check_trusted()
        for record in found:
            if record.key == LAST_KEY:
                self.calls.heard(revision, last=record)
        return revision, found

    async def records(self, keys: Sequence[bytes], at: int) -> list[KeyValue]:
        """Return the records of some keys, 128 at most, at a revision. Raises OSError as pages() does."""
        self.calls.check_trusted()
        reads = (pb.RangeRequest(key=self.prefix + key, revision=at) for key in keys)
        request = pb.TxnRequest(success=[pb.RequestOp(request_range=read) for read in reads])
        answer = await self._ask_at(TXN, request)
        self.calls.check_trusted()
        return self._found(one for said in answer.responses for one in said.response_range.kvs)

    async def barrier(self) -> int:
        """Return a revision that is not older than any transaction which was acknowledged before this call.
        A replica that has applied it is up to date."""
        self.calls.check_trusted()
        answer = await self.calls.call(RANGE, pb.RangeRequest(key=self.prefix + LAST_KEY))
        self.calls.check_trusted()
        for last in answer.kvs:
            return int(last.mod_revision)
        # A member removed the key. A transaction of our own is newer than all that it told of.
        return await self.transact((), ())

    def transact(
        self, compares: Compares, operations: Operations, identity: bytes = b""
    ) -> Coroutine[Any, Any, int]:
        """Apply all operations if every compare holds, and return the new revision, which is durable. With
        an `identity` of its own (`fenced.new_identity`), `fenced.find` tells later if it was applied.

        Raises Conflict, after which nothing has changed; LeaseEnded; ValueError for more than COMPARES_MAX
        compares or `operations_max` operations, or two on one key.
        """
        if len(set(map(_KEY, operations))) < len(operations):
            raise ValueError("a key may occur in one operation of a transaction only")
        if max(len(compares), len(operations)) > COMPARES_MAX and (
            len(compares) > COMPARES_MAX or len(operations) > operations_max(len(compares))
        ):
            raise ValueError(
                f"etcd takes no transaction of {len(compares)} compares and {len(operations)} operations"
            )
        self.transactions += 1
        return self.fenced.carry_out(compares, operations, identity)

    def watch(self, start: bytes, end: bytes, from_revision: int) -> Watch:
        """Return an iterator over every transaction with events of start <= key < end after a revision,
        each once and in order, this process's own too. It ends when the engine is closed, and raises
        Compacted when the events are too old to be kept."""
        return Watch(self.calls, start, end, from_revision)

    async def has_more(self, start: bytes, end: bytes, keys: int) -> bool:
        """Return whether a range has more than so many keys."""
        key, range_end = self.prefix + start, self.prefix + end
        request = pb.RangeRequest(key=key, range_end=range_end, limit=1, keys_only=True)
        answer = await self.calls.call(RANGE, request)
        return int(answer.count) > keys

    async def pages(
        self, start: bytes, end: bytes, revision: int = 0
    ) -> AsyncGenerator[tuple[int, list[KeyValue]], None]:
        """Yield the revision that a range is read at (0: the newest), and some keys of it, until there are
        no more. Raises OSError, EBUSY: the revision was compacted meanwhile.

        With the keys of a page, etcd counts all that are left of the range it was asked for. So the range
        ends where about two more pages do, if keys are as dense there as those just read.
        """
        prefix, span = self.prefix, 0
        while start < end:
            upto = _ahead(start, span, end) if span else end
            request = pb.RangeRequest(
                key=prefix + start, range_end=prefix + upto, limit=PAGE_KEYS, revision=revision
            )
            answer = await self._ask_at(RANGE, request)
            revision = revision or answer.header.revision
            found = self._found(answer.kvs)
            yield revision, found
            if answer.more:
                start = found[-1].key + b"\0"
                span = 2 * (_number(start) - _number(found[0].key))
            else:
                start, span = upto, span * _SPARSER

    async def _ask_at(self, method: Method[A], request: Message) -> A:
        """Ask for what there was at a revision. Raises OSError as pages() does."""
        try:
            return await self.calls.ask(method, request)
        except RpcError as error:
            if error.code != Status.OUT_OF_RANGE:
                raise self.calls.failure(error) from None
            raise OSError(
                errno.EBUSY, "etcd's history is compacted faster than it can be read"
            ) from None

    def _found(self, pairs: Iterable[pb.KeyValue]) -> list[KeyValue]:
        cut = len(self.prefix)
        return [KeyValue(one.key[cut:], one.value, one.mod_revision) for one in pairs]

    async def _read(self, start: bytes, end: bytes, at: int = 0) -> tuple[int, list[KeyValue]]:
        """Return the revision of a range and all its keys."""
        for tries_left in reversed(range(_TRIES)):
            revision, found = at or self.revision, list[KeyValue]()
            try:
                async with aclosing(self.pages(start, end, at)) as pages:
                    async for read_at, page in pages:
                        revision = read_at
                        found += page
                break
            except OSError as error:
                if error.errno != errno.EBUSY or at or not tries_left:
                    raise
        return revision, found


def _number(key: bytes) -> int:
    """Return a number that is larger for keys that come later."""
    return int.from_bytes(key[:_KEY_BYTES].ljust(_KEY_BYTES, b"\0"), "big")


def _ahead(start: bytes, span: int, end: bytes) -> bytes:
    """Return the key so far behind `start`, but not after `end`."""
    ahead = _number(start) + span
    return min(end, ahead.to_bytes(_KEY_BYTES, "big")) if ahead >> 8 * _KEY_BYTES == 0 else end
