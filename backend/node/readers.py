"""etcd as readers use it through this node: with limits that etcd does not have.

A reader is trusted with reading only. Its requests are checked (reader_requests), and limited for each
certificate: how many are carried out at once, how much it keeps in etcd, and how fast it changes that.
"""

import errno
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import trio

from ..etcd import etcd_pb2 as pb
from ..etcd.client import (
    GRANT,
    KEEP_ALIVE,
    RANGE,
    REVOKE,
    TRY_S,
    TXN,
    WATCH,
    Client,
    Method,
    RpcError,
    Uncertain,
    Unsent,
)
from ..kv import Event, KeyValue
from ..kv.etcd_calls import LAST_KEY
from ..kv.etcd_leases import LEASE_BITS, OWNER_BYTES
from ..transport.messages import AskEtcd, EtcdOutcome, EtcdSaid
from ..transport.rights import Peer
from .feed import Feed
from .reader_requests import KEY_COST_BYTES, Checked, checked, denied

__all__ = ["Kept", "Readers"]

# Limits of one certificate. On 100 hosts that share one, it is 160 KiB each, or some 800 keys.
_KEPT_BYTES_MAX = 16 << 20
_LEASES_MAX = 4096
_AT_ONCE = 16
_MUCH_AT_ONCE = 2
_BYTES_PER_S = 256 << 10
_BURST_BYTES = 1 << 20
# The limit of one connection.
_WATCHES_MAX = 16
# A watch is answered after this time even if nothing has changed.
_WATCH_S = 20.0
# etcd begins with older changes at once, if there are any.
_HISTORY_S = 2.0
_ANSWER_BYTES = 8 << 20
# How long this node may take to learn of a change that etcd has applied. Shorter than a reader's try.
_CATCH_UP_S = 3.0


class Kept:
    """A consumer of the replica: the bytes in etcd of keys that belong to a certificate, by its number."""

    prefixes = (b"m", b"p", b"f", b"a", b"x")

    def __init__(self) -> None:
        self._sizes: dict[bytes, int] = {}
        self.bytes: Counter[int] = Counter()

    def load(self, records: Sequence[KeyValue], revision: int) -> None:
        self._sizes.clear()
        self.bytes.clear()
        for record in records:
            self._take(record.key, record.value)

    def apply(self, revision: int, events: Sequence[Event]) -> None:
        for event in events:
            self._take(event.key, event.value)

    def _take(self, key: bytes, value: bytes | None) -> None:
        size = 0 if value is None else len(key) + len(value) + KEY_COST_BYTES
        self.bytes[_owner(key)] += size - self._sizes.pop(key, 0)
        if size:
            self._sizes[key] = size


def _owner(key: bytes) -> int:
    if key.startswith(b"x"):
        return int.from_bytes(key[1 : 1 + OWNER_BYTES], "big")
    return int.from_bytes(key[1:9], "big") >> LEASE_BITS


class _Account:
    """The use that one certificate makes of etcd through this node."""

    def __init__(self) -> None:
        self.places = trio.Semaphore(_AT_ONCE)
        # For what takes this node long: ranges of keys, and older changes.
        self.places_for_much = trio.Semaphore(_MUCH_AT_ONCE)
        self._leases: dict[int, float] = {}  # when each ends, if it is not kept alive
        self._credit = float(_BURST_BYTES)
        self._counted_at = trio.current_time()

    async def pay(self, cost: int) -> None:
        """Wait until so many bytes may be changed."""
        if not cost:
            return
        now = trio.current_time()
        self._credit += (now - self._counted_at) * _BYTES_PER_S
        self._credit = min(self._credit, _BURST_BYTES) - cost
        self._counted_at = now
        if self._credit < 0:
            await trio.sleep(-self._credit / _BYTES_PER_S)

    def count_leases(self, path: str, asked: Any, answer: bytes) -> None:
        """Take note of leases that a call of etcd has changed."""
        now = trio.current_time()
        if path == GRANT.path:
            self._leases[asked.ID] = now + asked.TTL
        elif path == KEEP_ALIVE.path:
            self._leases[asked.ID] = now + KEEP_ALIVE.parse(answer).TTL
        elif path == REVOKE.path:
            self._leases.pop(asked.ID, None)

    def count_living(self) -> int:
        """Return the number of leases."""
        if len(self._leases) >= _LEASES_MAX:
            now = trio.current_time()
            self._leases = {lease: end for lease, end in self._leases.items() if end > now}
        return len(self._leases)


class Readers:
    """An EtcdForReaders. `client` reaches etcd with the node's own credentials, `kept` and `feed` are fed
    by the node's replica."""

    def __init__(self, client: Client, prefix: bytes, kept: Kept, feed: Feed) -> None:
        self._client = client
        self._prefix = prefix
        self._last_key = prefix + LAST_KEY
        self._kept = kept
        self._feed = feed
        self._accounts: defaultdict[int, _Account] = defaultdict(_Account)

    async def ask(self, peer: Peer, request: AskEtcd) -> EtcdSaid:
        if not peer.is_certified or not peer.owner:
            raise denied("only a certificate makes a reader")
        asked = checked(request.method, request.body, self._prefix, peer.owner)
        if request.method == WATCH.path:
            return await self._watch(peer, request.number, asked.message.create_request)
        account = self._accounts[peer.owner]
        await account.pay(asked.cost)
        is_much = request.method == RANGE.path and asked.message.range_end
        async with account.places_for_much if is_much else account.places:
            if asked.grows:
                self._check_limits(peer.owner, account, asked)
            said = await self._said(request.number, Method(request.method, bytes), asked)
            if request.method == TXN.path and asked.grows:
                await self._count_puts(said)
        if said.outcome == EtcdOutcome.ANSWERED:
            account.count_leases(request.method, asked.message, said.body)
            if request.method == RANGE.path:
                said.body = _shortened(said.body)
                if asked.message.key == self._last_key:
                    return await self._caught_up(said)
        return said

    async def _count_puts(self, said: EtcdSaid) -> None:
        """Wait until `kept` includes the keys that a transaction has put."""
        answer = TXN.parse(said.body)
        if answer.succeeded:
            with trio.move_on_after(_CATCH_UP_S):
                await self._feed.wait(answer.header.revision)

    async def _caught_up(self, said: EtcdSaid) -> EtcdSaid:
        """Return the answer to a barrier when a watch here has come so far. If it does not, another node is
        of more use."""
        for last in RANGE.parse(said.body).kvs:
            with trio.move_on_after(_CATCH_UP_S):
                await self._feed.wait(last.mod_revision)
                return said
            text = "this store node does not hear from etcd"
            return EtcdSaid(said.number, EtcdOutcome.UNSENT, text=text)
        return said

    async def _said(self, number: int, method: Method[bytes], asked: Checked) -> EtcdSaid:
        try:
            body = await self._client.attempt(method, asked.message, TRY_S)
        except RpcError as error:
            return EtcdSaid(number, EtcdOutcome.REFUSED, code=error.code, text=error.text)
        except Unsent as error:
            return EtcdSaid(number, EtcdOutcome.UNSENT, text=str(error))
        except Uncertain as error:
            return EtcdSaid(number, EtcdOutcome.UNCERTAIN, text=str(error))
        return EtcdSaid(number, EtcdOutcome.ANSWERED, body)

    # -- limits ----------------------------------------------------------------------------------

    def _check_limits(self, owner: int, account: _Account, asked: Checked) -> None:
        if self._kept.bytes[owner] + asked.cost > _KEPT_BYTES_MAX:
            raise OSError(
                errno.EDQUOT,
                f"a reader's certificate keeps {_KEPT_BYTES_MAX >> 20} MiB in etcd at most",
            )
        if account.count_living() >= _LEASES_MAX:
            raise OSError(errno.EDQUOT, f"a reader's certificate has {_LEASES_MAX} leases at most")

    # -- watches ---------------------------------------------------------------------------------

    async def _watch(self, peer: Peer, number: int, create: pb.WatchCreateRequest) -> EtcdSaid:
        if peer.watches >= _WATCHES_MAX:
            raise OSError(errno.EDQUOT, f"a reader has {_WATCHES_MAX} watches at most")
        peer.watches += 1
        try:
            with trio.move_on_after(_WATCH_S):
                body = await self._feed.after(
                    create.key, create.range_end, create.start_revision - 1
                )
                if not body:
                    with trio.move_on_after(_HISTORY_S):
                        body = await self._history(peer.owner, create)
                return EtcdSaid(number, EtcdOutcome.ANSWERED, body)
            return EtcdSaid(number, EtcdOutcome.ANSWERED)
        finally:
            peer.watches -= 1

    async def _history(self, owner: int, create: pb.WatchCreateRequest) -> bytes:
        """Return older changes than those that are here."""
        async with self._accounts[owner].places_for_much:
            try:
                stream = await self._client.stream(WATCH, pb.WatchRequest(create_request=create))
                try:
                    while (body := await stream.receive()) is not None:
                        answer = WATCH.parse(body)
                        if answer.events or answer.canceled:
                            return _first_events(answer)
                finally:
                    stream.close()
            except RpcError as error:
                self._client.stream_failed(error)
                raise OSError(errno.EAGAIN, f"etcd: {error.text}") from None
            except Unsent as error:
                raise OSError(errno.EAGAIN, f"etcd: {error}") from None
        return b""


def _shortened(body: bytes) -> bytes:
    """Return the answer to a range, or its first keys, so that it fits into a message."""
    if len(body) <= _ANSWER_BYTES:
        return body
    answer = pb.RangeResponse.FromString(body)
    size = count = 0
    for pair in answer.kvs:
        size += pair.ByteSize()
        if size > _ANSWER_BYTES:
            break
        count += 1
    del answer.kvs[max(count, 1) :]
    answer.more = True
    shortened: bytes = answer.SerializeToString()
    return shortened


def _first_events(answer: pb.WatchResponse) -> bytes:
    """Return etcd's answer to a watch, or its first transactions, so that it fits into a message."""
    size = count = revision = 0
    for event in answer.events:
        if size > _ANSWER_BYTES and event.kv.mod_revision != revision:
            break
        size += event.ByteSize()
        count += 1
        revision = event.kv.mod_revision
    del answer.events[count:]
    shortened: bytes = answer.SerializeToString()
    return shortened
