"""The key-value engine of a cluster: a prefix of an etcd, shared with other processes.

Revisions are etcd's, so they grow with what happens under other prefixes, too, and a transaction
always makes one: it puts the key "s", by which `barrier` learns the revision of
the newest transaction, and whose value names its process.
"""

import errno
from collections.abc import Coroutine, Sequence
from operator import attrgetter
from typing import Any, Final, Self

from ..kv import Compares, KeyValue, Operations
from ..unwrap import if_it_fails
from . import etcd_pb2 as pb
from .admin import EtcdAdmin
from .calls import LAST_KEY, Calls, Watch
from .client import TRY_S, Client, DirectClient
from .leases import EtcdLeases
from .rpc import RANGE, RpcError, Status
from .transactions import COMPARES_MAX, EtcdTransactions, operations_max

# For each page etcd counts all that is left of the range: *measured* 27 ms of 200,000 keys. An inode has 64
# KiB of attributes at most, a message of etcd 512 MiB.
PAGE_KEYS = 5000
_PAGE_RETRIES = 5
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
        for found in answer.kvs:
            return KeyValue(key, found.value, found.mod_revision)
        return None

    async def range(self, start: bytes, end: bytes, limit: int = 0) -> list[KeyValue]:
        """Return the keys with start <= key < end in order, the first `limit` of them (0: all)."""
        return (await self._pages(start, end, limit))[1]

    async def snapshot(self, start: bytes, end: bytes) -> tuple[int, list[KeyValue]]:
        """Return a range and the revision it is of, from which watching goes on without a gap."""
        self.calls.check_trusted()
        revision, found = await self._pages(start, end, 0)
        self.calls.check_trusted()
        for record in found:
            if record.key == LAST_KEY:
                self.calls.heard(revision, last=record)
        return revision, found

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

    async def _pages(self, start: bytes, end: bytes, limit: int) -> tuple[int, list[KeyValue]]:
        """Return a range, or its first `limit` keys, as of one revision."""
        prefix = self.prefix
        for _ in range(_PAGE_RETRIES):
            found: list[KeyValue] = []
            request = pb.RangeRequest(key=prefix + start, range_end=prefix + end)
            if start >= end:
                return self.revision, found
            try:
                while True:
                    request.limit = min(limit - len(found), PAGE_KEYS) if limit else PAGE_KEYS
                    answer = await self.calls.ask(RANGE, request)
                    found += [
                        KeyValue(one.key[len(prefix) :], one.value, one.mod_revision)
                        for one in answer.kvs
                    ]
                    request.revision = request.revision or answer.header.revision
                    if not answer.more or len(found) == limit:
                        return request.revision, found
                    request.key = prefix + found[-1].key + b"\0"
            except RpcError as error:
                if error.code != Status.OUT_OF_RANGE:
                    raise self.calls.failure(error) from None
                # The revision of the first page was compacted meanwhile.
        raise OSError(errno.EBUSY, "etcd's history is compacted faster than it can be read")
