"""etcd as readers use it through this node: with limits that etcd does not have.

A reader is trusted with reading only. It reads all keys of the cluster, and changes keys of its own
certificate only, each of them leased, so that it ends with its session. Everything else is denied: other
methods (alarms, compaction, users), requests within requests, leases of others. Only fields that this
version of irdmafs knows are forwarded. For each certificate there is a limit of requests that are carried
out at once, of what it keeps in etcd, and of how fast it changes that.
"""

import errno
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import closing
from typing import Any, NamedTuple

import trio
from google.protobuf.message import DecodeError, Message

from ..cluster.etcd_rights import own_ranges
from ..cluster.record_keeper import RecordKeeper
from ..etcd import etcd_pb2 as pb
from ..etcd.calls import LAST_KEY
from ..etcd.client import TRY_S, Client, Uncertain, Unsent
from ..etcd.leases import LEASE_BITS, OWNER_BYTES
from ..etcd.rpc import DELETE, GRANT, KEEP_ALIVE, RANGE, REVOKE, TXN, WATCH, Method, RpcError
from ..kv import end_of
from ..pauses import Throttle
from ..transport.messages import AskEtcd, EtcdOutcome, EtcdSaid
from ..transport.rights import Outstanding, Peer, denied
from .feed import Feed

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
# The limit of one certificate: nothing is read for it while so much waits to be taken.
_UNTAKEN_BYTES_MAX = 4 * _ANSWER_BYTES
# How long this node may take to learn of a change that etcd has applied. Shorter than a reader's try.
_CATCH_UP_S = 3.0
_READING = (RANGE.path, TXN.path)
# The limits of one request.
PAGE_KEYS = 1000
# The memory that etcd needs for a key or a lease, besides the bytes.
KEY_COST_BYTES = 200
_KEY_BYTES_MAX = 64
_READ_KEY_BYTES_MAX = 1024
_VALUE_BYTES_MAX = 8192
_OPERATIONS_MAX = 128
_TTL_MAX_S = 3600


class Checked(NamedTuple):
    """A request to forward: `cost` bytes for etcd's history; `grows`: it adds keys or a lease."""

    message: Any
    cost: int = 0
    grows: bool = False


class Kept(RecordKeeper):
    """The bytes in etcd of keys that belong to a certificate, by its number."""

    prefixes = (b"m", b"p", b"f", b"a", b"x")

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[bytes, int] = {}
        self.bytes: Counter[int] = Counter()

    def take(self, key: bytes, value: bytes | None, revision: int) -> None:
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
        self.untaken = Outstanding(_UNTAKEN_BYTES_MAX)
        self.changes = Throttle(_BYTES_PER_S, _BURST_BYTES)
        self._leases: dict[int, float] = {}  # when each ends, if it is not kept alive

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
    """etcd for readers: `ask` is an EtcdForReaders. `client` reaches etcd with the node's own credentials,
    `kept` and `feed` are fed by the node's replica."""

    def __init__(self, client: Client, prefix: bytes, kept: Kept, feed: Feed) -> None:
        self._client = client
        self._prefix = prefix
        self._last_key = prefix + LAST_KEY
        self._kept = kept
        self._feed = feed
        self._accounts: defaultdict[int, _Account] = defaultdict(_Account)

    async def ask(self, peer: Peer, request: AskEtcd) -> EtcdSaid:
        owner = peer.identity.owner
        if not owner:
            raise denied("only a certificate makes a reader")
        asked = checked(request.method, request.body, self._prefix, owner)
        account = self._accounts[owner]
        peer.said = account.untaken
        if request.method == WATCH.path:
            return await self._watch(peer, asked.message.create_request)
        await account.changes.take(asked.cost)
        is_much = request.method == RANGE.path and asked.message.range_end
        async with account.places_for_much if is_much else account.places:
            if asked.grows:
                self._check_limits(owner, account, asked)
            if request.method in _READING:
                await account.untaken.room(_ANSWER_BYTES)
            said = await self._said(Method(request.method, bytes), asked)
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
        """Return the answer to a barrier when a watch here has come so far, or that it does not."""
        for last in RANGE.parse(said.body).kvs:
            with trio.move_on_after(_CATCH_UP_S):
                await self._feed.wait(last.mod_revision)
                return said
            text = "this store node does not hear from etcd"
            return EtcdSaid(EtcdOutcome.UNSENT, text=text)
        return said

    async def _said(self, method: Method[bytes], asked: Checked) -> EtcdSaid:
        try:
            body = await self._client.attempt(method, asked.message, TRY_S)
        except RpcError as error:
            return EtcdSaid(EtcdOutcome.REFUSED, code=error.code, text=error.text)
        except Unsent as error:
            return EtcdSaid(EtcdOutcome.UNSENT, text=str(error))
        except Uncertain as error:
            return EtcdSaid(EtcdOutcome.UNCERTAIN, text=str(error))
        return EtcdSaid(EtcdOutcome.ANSWERED, body)

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

    async def _watch(self, peer: Peer, create: pb.WatchCreateRequest) -> EtcdSaid:
        if peer.watches >= _WATCHES_MAX:
            raise OSError(errno.EDQUOT, f"a reader has {_WATCHES_MAX} watches at most")
        peer.watches += 1
        try:
            after, untaken = create.start_revision - 1, peer.said
            with trio.move_on_after(_WATCH_S):
                await untaken.room(_ANSWER_BYTES)
                body = await self._feed.after(create.key, create.range_end, after)
                if untaken.taken + len(body) > untaken.most:
                    return EtcdSaid(EtcdOutcome.ANSWERED)  # it asks again
                if not body:
                    with trio.move_on_after(_HISTORY_S):
                        body = await self._history(peer.identity.owner, create)
                return EtcdSaid(EtcdOutcome.ANSWERED, body)
            return EtcdSaid(EtcdOutcome.ANSWERED)
        finally:
            peer.watches -= 1

    async def _history(self, owner: int, create: pb.WatchCreateRequest) -> bytes:
        """Return older changes than those that are here."""
        async with self._accounts[owner].places_for_much:
            try:
                request = pb.WatchRequest(create_request=create)
                with closing(await self._client.stream(WATCH, request)) as stream:
                    while (body := await stream.receive()) is not None:
                        answer = WATCH.parse(body)
                        if answer.events or answer.canceled:
                            return _first_events(answer)
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


# -- requests ------------------------------------------------------------------------------------


def checked(path: str, body: bytes, prefix: bytes, owner: int) -> Checked:
    """Return a request about keys with this prefix of the reader number `owner`. Raises PermissionError."""
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
    operations = (*request.success, *request.failure)
    reads = [one.request_range for one in operations if one.HasField("request_range")]
    for read in (*request.compare, *reads):
        _check_keys(read.key, b"", prefix)
        if read.range_end:  # etcd stops all writes while it looks at each key of so many ranges
            raise denied("a reader's transaction looks at one key at a time")
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
            cost += _check_delete(operation.request_delete_range, prefix, owner).cost
        elif not operation.HasField("request_range"):
            raise denied("its transaction has a part that is not known here")
    if not all(operation.HasField("request_range") for operation in request.failure):
        raise denied("a reader may only read where a compare fails")
    return Checked(request, cost, grows)


def _check_delete(request: pb.DeleteRangeRequest, prefix: bytes, owner: int) -> Checked:
    _check_own(request.key, prefix, owner)
    if request.range_end or request.prev_kv:
        raise denied("a reader deletes one key at a time")
    return Checked(request, KEY_COST_BYTES)


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
    DELETE.path: (pb.DeleteRangeRequest, _check_delete),
    GRANT.path: (pb.LeaseGrantRequest, _check_grant),
    KEEP_ALIVE.path: (pb.LeaseKeepAliveRequest, _check_own_lease),
    REVOKE.path: (pb.LeaseRevokeRequest, _check_own_lease),
}


def _check_keys(key: bytes, range_end: bytes, prefix: bytes) -> None:
    if max(len(key), len(range_end)) > _READ_KEY_BYTES_MAX:
        raise denied("a reader may not read such a key")
    if not key.startswith(prefix) or (range_end and not prefix <= range_end <= end_of(prefix)):
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
