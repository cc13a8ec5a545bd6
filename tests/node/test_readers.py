"""What a reader may ask a store node about etcd: the node checks and limits it, whatever program asks."""

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from typing import Any
from unittest.mock import AsyncMock, Mock, patch

import pytest
import trio
import trio.testing
from google.protobuf.message import DecodeError
from harness.errors import fails_with
from harness.etcd_server import EtcdServer
from hypothesis import given, settings
from hypothesis import strategies as st

from irdmafs.backend.cluster.etcd_rights import own_ranges
from irdmafs.backend.cluster.replica import Replica
from irdmafs.backend.etcd import etcd_pb2 as pb
from irdmafs.backend.etcd import rpc
from irdmafs.backend.etcd.client import DirectClient, Uncertain
from irdmafs.backend.etcd.engine import EtcdEngine
from irdmafs.backend.etcd.leases import LEASE_BITS
from irdmafs.backend.etcd.rpc import Message, Method
from irdmafs.backend.kv import Event, KeyValue, Put
from irdmafs.backend.model.records import pin_key
from irdmafs.backend.node import readers as limits
from irdmafs.backend.node.feed import Feed
from irdmafs.backend.node.readers import PAGE_KEYS, Kept, Readers, checked
from irdmafs.backend.pauses import Throttle
from irdmafs.backend.transport.messages import AskEtcd, EtcdOutcome, EtcdSaid
from irdmafs.backend.transport.relay import Relay
from irdmafs.backend.transport.rights import Peer
from irdmafs.backend.trust.security import Credentials, Identity

OWNER, OTHER = 0xABCDEF, 0xABCDF0
LEASE, FOREIGN = OWNER << LEASE_BITS | 7, OTHER << LEASE_BITS | 7
PREFIX = b"/irdmafs/default/"
OWN, THEIRS = PREFIX + pin_key(1, LEASE), PREFIX + pin_key(1, FOREIGN)


def put(key: bytes = OWN, value: bytes = b"", lease: int = LEASE, **more: Any) -> pb.RequestOp:
    return pb.RequestOp(request_put=pb.PutRequest(key=key, value=value, lease=lease, **more))


def delete(key: bytes = OWN, range_end: bytes = b"") -> pb.RequestOp:
    return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key, range_end=range_end))


def read(key: bytes, range_end: bytes = b"") -> pb.RequestOp:
    return pb.RequestOp(request_range=pb.RangeRequest(key=key, range_end=range_end))


def success(*operations: pb.RequestOp) -> pb.TxnRequest:
    return pb.TxnRequest(success=operations)


def compare(key: bytes, range_end: bytes = b"") -> pb.TxnRequest:
    one = pb.Compare(key=key, range_end=range_end, target=pb.Compare.MOD)
    return pb.TxnRequest(compare=[one])


def watch(key: bytes, range_end: bytes, start: int) -> pb.WatchRequest:
    create = pb.WatchCreateRequest(key=key, range_end=range_end, start_revision=start)
    return pb.WatchRequest(create_request=create)


def nested(inner: pb.TxnRequest) -> pb.TxnRequest:
    """A transaction within a transaction, which etcd before 3.6.11 does not check."""
    body = inner.SerializeToString()
    operation = pb.RequestOp.FromString(b"\x22" + bytes([len(body)]) + body)
    return success(operation)


DENIED: dict[str, tuple[Method[Any], Message]] = {
    "an alarm": (rpc.ALARM, pb.AlarmRequest(action=pb.AlarmRequest.ACTIVATE, alarm=pb.NOSPACE)),
    "compaction": (rpc.COMPACT, pb.CompactionRequest(revision=1)),
    "defragmentation": (rpc.DEFRAGMENT, pb.DefragmentRequest()),
    "status": (rpc.STATUS, pb.StatusRequest()),
    "hashes": (rpc.HASH_KV, pb.HashKVRequest()),
    "members": (rpc.MEMBERS, pb.MemberListRequest()),
    "a password": (rpc.AUTHENTICATE, pb.AuthenticateRequest(name="root", password="-")),
    "a delete of another's key": (rpc.DELETE, pb.DeleteRangeRequest(key=THEIRS)),
    "a delete of a range": (rpc.DELETE, pb.DeleteRangeRequest(key=OWN, range_end=PREFIX + b"q")),
    "a lease of another": (rpc.GRANT, pb.LeaseGrantRequest(ID=FOREIGN, TTL=5)),
    "a lease of nobody": (rpc.GRANT, pb.LeaseGrantRequest(ID=7, TTL=5)),
    "a lease without a number": (rpc.GRANT, pb.LeaseGrantRequest(TTL=5)),
    "a negative lease": (rpc.GRANT, pb.LeaseGrantRequest(ID=-1, TTL=5)),
    "a lease for ever": (rpc.GRANT, pb.LeaseGrantRequest(ID=LEASE, TTL=1 << 40)),
    "to keep another alive": (rpc.KEEP_ALIVE, pb.LeaseKeepAliveRequest(ID=FOREIGN)),
    "to end another": (rpc.REVOKE, pb.LeaseRevokeRequest(ID=FOREIGN)),
    "everybody's keys": (rpc.RANGE, pb.RangeRequest(key=b"\0", range_end=b"\0")),
    "keys beyond the cluster's": (rpc.RANGE, pb.RangeRequest(key=PREFIX, range_end=b"/j")),
    "keys to the end": (rpc.RANGE, pb.RangeRequest(key=PREFIX, range_end=b"\0")),
    "an endless key": (rpc.RANGE, pb.RangeRequest(key=PREFIX + b"d" * 2000)),
    "to watch everybody's": (rpc.WATCH, watch(b"\0", b"\0", 1)),
    "to watch from now": (rpc.WATCH, watch(PREFIX, PREFIX + b"z", 0)),
    "another's key": (rpc.TXN, success(put(THEIRS))),
    "a name": (rpc.TXN, success(put(PREFIX + b"d" + bytes(8) + b"x"))),
    "the last transaction": (rpc.TXN, success(put(PREFIX + b"s"))),
    "a long key": (rpc.TXN, success(put(OWN + bytes(60)))),
    "a long value": (rpc.TXN, success(put(value=bytes(10_000)))),
    "a key for ever": (rpc.TXN, success(put(lease=0))),
    "a key that ends with another": (rpc.TXN, success(put(lease=FOREIGN))),
    "a value as it is": (rpc.TXN, success(put(ignore_value=True))),
    "a lease as it is": (rpc.TXN, success(put(ignore_lease=True))),
    "to delete a range": (rpc.TXN, success(delete(range_end=PREFIX + b"q"))),
    "to delete another's key": (rpc.TXN, success(delete(THEIRS))),
    "to read outside": (rpc.TXN, success(read(b"\0", b"\0"))),
    "to compare a range": (rpc.TXN, compare(PREFIX, PREFIX + b"z")),
    "to read a range": (rpc.TXN, success(read(PREFIX, PREFIX + b"z"))),
    "a put where a compare fails": (rpc.TXN, pb.TxnRequest(failure=[put()])),
    "a transaction in a transaction": (rpc.TXN, nested(success(put(THEIRS)))),
    "too many puts": (rpc.TXN, success(*(put(OWN + bytes([one])) for one in range(129)))),
    "a compare outside": (rpc.TXN, compare(b"/other")),
}


@pytest.mark.parametrize("what", DENIED)
def test_a_reader_may_not_ask_for(what: str) -> None:
    method, request = DENIED[what]
    with pytest.raises(PermissionError):
        checked(method.path, request.SerializeToString(), PREFIX, OWNER)


KEYS = st.sampled_from([OWN, THEIRS, PREFIX + b"s", PREFIX, b"\0", b"", OWN[:-1], OWN + b"x"])
LEASES = st.sampled_from([LEASE, FOREIGN, 0, -1, LEASE + 1])
OPERATIONS = st.lists(
    st.one_of(
        st.builds(put, KEYS, st.binary(max_size=9), LEASES),
        st.builds(delete, KEYS, KEYS),
        st.builds(read, KEYS, KEYS),
        st.binary(max_size=40).map(lambda data: pb.RequestOp(request_put=_parsed(data))),
    ),
    max_size=4,
)


def _parsed(data: bytes) -> pb.PutRequest:
    request = pb.PutRequest()
    with suppress(DecodeError):
        request.ParseFromString(data)
    return request


@given(made=OPERATIONS, rest=st.binary(max_size=20))
@settings(max_examples=200, deadline=None)
def test_whatever_it_sends_only_own_keys_are_changed(made: list[pb.RequestOp], rest: bytes) -> None:
    try:
        found = checked(rpc.TXN.path, success(*made).SerializeToString() + rest, PREFIX, OWNER)
    except PermissionError:
        return
    for operation in found.message.success:
        if operation.HasField("request_put"):
            assert operation.request_put.lease >> LEASE_BITS == OWNER
            _check_own(operation.request_put.key)
        elif operation.HasField("request_delete_range"):
            assert not operation.request_delete_range.range_end
            _check_own(operation.request_delete_range.key)
        else:
            assert operation.HasField("request_range")


def _check_own(key: bytes) -> None:
    assert any(start <= key[len(PREFIX) :] < end for start, end in own_ranges("reader", OWNER))


def test_what_is_not_known_here_is_not_forwarded() -> None:
    hidden = success(put()).SerializeToString() + b"\x22\x02\x08\x01"
    found = checked(rpc.TXN.path, hidden, PREFIX, OWNER)
    assert found.message.SerializeToString() == success(put()).SerializeToString()
    everything = pb.RangeRequest(key=PREFIX, range_end=PREFIX + b"z", limit=1 << 40)
    found = checked(rpc.RANGE.path, everything.SerializeToString(), PREFIX, OWNER)
    assert found.message.limit == PAGE_KEYS
    own = pb.DeleteRangeRequest(key=OWN)
    assert checked(rpc.DELETE.path, own.SerializeToString(), PREFIX, OWNER).message == own


# -- with a real etcd ------------------------------------------------------------------------------


class Asking:
    """A reader as a store node sees it."""

    def __init__(self, node: Readers, owner: int = OWNER) -> None:
        self.node = node
        self.peer = Peer(Identity("reader", "r", owner, "1"), "127.0.0.1", 0)

    async def ask(self, method: Method[Any], request: Message) -> Any:
        said = await self.said(method, request)
        assert said.outcome == EtcdOutcome.ANSWERED, said
        return method.parse(said.body)

    async def said(self, method: Method[Any], request: Message) -> EtcdSaid:
        asked = AskEtcd(method.path, request.SerializeToString())
        return await self.node.ask(self.peer, asked)

    async def changes(self, after: int, end: bytes = b"z") -> pb.WatchResponse:
        request = watch(PREFIX, PREFIX + end, after + 1)
        found: pb.WatchResponse = await self.ask(rpc.WATCH, request)
        return found


@asynccontextmanager
async def answering(
    server: EtcdServer, **options: Any
) -> AsyncIterator[tuple[Readers, EtcdEngine]]:
    kept, feed = Kept(), Feed(PREFIX, **options)
    with closing(DirectClient(server.endpoints)) as client:
        async with EtcdEngine(server.endpoints, PREFIX) as engine, trio.open_nursery() as nursery:
            await engine.transact((), [Put(b"c", b"")])
            await Replica(engine, (kept, feed)).start(nursery)
            yield Readers(client, PREFIX, kept, feed), engine
            nursery.cancel_scope.cancel()


@pytest.fixture(scope="module")
def server() -> Any:
    with EtcdServer() as own:
        yield own


async def test_reader_that_keeps_too_much_is_refused_and_others_are_not(server: EtcdServer) -> None:
    with patch.object(limits, "_KEPT_BYTES_MAX", 100_000):
        async with answering(server) as (node, engine):
            greedy, other = Asking(node), Asking(node, OTHER)
            for one, lease in ((greedy, LEASE), (other, FOREIGN)):
                await one.ask(rpc.GRANT, pb.LeaseGrantRequest(ID=lease, TTL=60))
            with fails_with(errno.EDQUOT):
                for number in range(100):
                    key = OWN[:-2] + number.to_bytes(2, "big")
                    await greedy.ask(rpc.TXN, success(put(key, bytes(8000))))
            kept = await engine.range(b"p", b"q")
            assert 10 <= len(kept) <= 12
            await other.ask(rpc.TXN, success(put(THEIRS, lease=FOREIGN)))
            # It may use again all that it gives up.
            await greedy.ask(rpc.REVOKE, pb.LeaseRevokeRequest(ID=LEASE))
            await greedy.ask(rpc.GRANT, pb.LeaseGrantRequest(ID=LEASE, TTL=60))
            while node._kept.bytes[OWNER]:
                await trio.sleep(0.01)
            await greedy.ask(rpc.TXN, success(put()))
            for one, lease in ((greedy, LEASE), (other, FOREIGN)):
                await one.ask(rpc.REVOKE, pb.LeaseRevokeRequest(ID=lease))


async def test_a_reader_has_so_many_leases_and_no_more(server: EtcdServer) -> None:
    with patch.object(limits, "_LEASES_MAX", 3):
        async with answering(server) as (node, _):
            reader = Asking(node)
            leases = [OWNER << LEASE_BITS | 100 + number for number in range(4)]
            for lease in leases[:3]:
                await reader.ask(rpc.GRANT, pb.LeaseGrantRequest(ID=lease, TTL=60))
            with pytest.raises(OSError, match="3 leases"):
                await reader.ask(rpc.GRANT, pb.LeaseGrantRequest(ID=leases[3], TTL=60))
            await reader.ask(rpc.REVOKE, pb.LeaseRevokeRequest(ID=leases[0]))
            await reader.ask(rpc.GRANT, pb.LeaseGrantRequest(ID=leases[3], TTL=60))
            for lease in leases:
                await reader.said(rpc.REVOKE, pb.LeaseRevokeRequest(ID=lease))


async def test_a_reader_that_changes_much_waits(server: EtcdServer) -> None:
    async with answering(server) as (node, _):
        reader = Asking(node)
        await reader.ask(rpc.GRANT, pb.LeaseGrantRequest(ID=LEASE, TTL=60))
        node._accounts[OWNER].changes = Throttle(20_000, 1000)
        began = trio.current_time()
        for _ in range(2):
            await reader.ask(rpc.TXN, success(put(value=bytes(8000))))
        assert trio.current_time() > began + 0.2
        await reader.ask(rpc.REVOKE, pb.LeaseRevokeRequest(ID=LEASE))


async def test_thousands_of_watches_of_one_connection_are_refused(server: EtcdServer) -> None:
    async with answering(server) as (node, engine), trio.open_nursery() as nursery:
        reader, refused = Asking(node), 0
        newest = await engine.barrier()

        async def watch() -> None:
            nonlocal refused
            try:
                await reader.changes(newest)
            except OSError:
                refused += 1

        for _ in range(1000):
            nursery.start_soon(watch)
        await trio.testing.wait_all_tasks_blocked()
        assert (refused, reader.peer.watches) == (1000 - limits._WATCHES_MAX, limits._WATCHES_MAX)
        nursery.cancel_scope.cancel()


async def test_changes_come_in_order_from_any_revision(server: EtcdServer) -> None:
    """Also those that are not kept here any more, which etcd still has."""
    async with answering(server, kept_bytes=1000) as (node, engine):
        reader = Asking(node)
        before = await engine.barrier()
        revisions = [
            await engine.transact((), [Put(b"i" + n.to_bytes(8, "big"), b"v" * 200)])
            for n in range(1, 21)
        ]
        while node._feed.revision < revisions[-1]:
            await trio.sleep(0.01)
        assert before < node._feed.before
        found: list[int] = []
        while len(found) < 20:
            answer = await reader.changes(found[-1] if found else before, b"j")
            found += [event.kv.mod_revision for event in answer.events]
        assert found == revisions
        # The next change wakes it, and nothing else.
        async with trio.open_nursery() as nursery:
            answers: list[pb.WatchResponse] = []

            async def wait() -> None:
                answers.append(await reader.changes(revisions[-1], b"j"))

            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            await engine.transact((), [Put(b"l" + bytes(7) + b"1", b"")])
            newest = await engine.transact((), [Put(b"i" + bytes(7) + b"1", b"")])
        [event] = answers[0].events
        assert (event.kv.key, event.kv.mod_revision) == (PREFIX + b"i" + bytes(7) + b"1", newest)


async def test_changes_that_etcd_has_forgotten_are_said_to_be(server: EtcdServer) -> None:
    async with answering(server, kept_bytes=1) as (node, engine):
        before = await engine.barrier()
        for _ in range(5):
            newest = await engine.transact((), [Put(b"i", b"v")])
        server.compact()
        while node._feed.revision < newest:
            await trio.sleep(0.01)
        answer = await Asking(node).changes(before)
        assert answer.canceled
        assert answer.compact_revision


async def test_a_node_that_does_not_hear_from_etcd_says_so(server: EtcdServer) -> None:
    """A reader then turns to another node."""
    with (
        patch.object(limits, "_CATCH_UP_S", 0.05),
        closing(DirectClient(server.endpoints)) as client,
    ):
        async with EtcdEngine(server.endpoints, PREFIX) as engine:
            await engine.transact((), [Put(b"c", b"")])
            deaf = Asking(Readers(client, PREFIX, Kept(), Feed(PREFIX)))
            said = await deaf.said(rpc.RANGE, pb.RangeRequest(key=PREFIX + b"s"))
            assert said.outcome == EtcdOutcome.UNSENT
            said = await deaf.said(rpc.RANGE, pb.RangeRequest(key=PREFIX + b"c"))
            assert said.outcome == EtcdOutcome.ANSWERED


async def test_an_answer_that_makes_no_sense_is_none() -> None:
    control: Any = Mock(ask=AsyncMock(return_value=EtcdSaid(EtcdOutcome.ANSWERED, b"\xff")))
    with pytest.raises(Uncertain, match="makes no sense"):
        await Relay([("node", 1)], Credentials("", "", "")).ask(control, rpc.RANGE, b"")
    assert control.close.called


async def test_a_long_answer_comes_in_parts(server: EtcdServer) -> None:
    with patch.object(limits, "_ANSWER_BYTES", 10_000):
        async with answering(server) as (node, engine):
            await engine.transact((), [Put(b"t" + bytes([n]), b"v" * 3000) for n in range(9)])
            request = pb.RangeRequest(key=PREFIX + b"t", range_end=PREFIX + b"u")
            answer = await Asking(node).ask(rpc.RANGE, request)
            assert answer.more
            assert len(answer.kvs) == 3


@pytest.mark.parametrize("serial", ["", "1"])
async def test_who_has_no_certificate_is_no_reader(server: EtcdServer, serial: str) -> None:
    async with answering(server) as (node, _):
        asking = Asking(node)
        asking.peer.identity = Identity("reader", "r", serial=serial)
        with pytest.raises(PermissionError):
            await asking.said(rpc.RANGE, pb.RangeRequest(key=PREFIX))


def test_keys_are_counted_for_their_certificate() -> None:
    kept = Kept()
    first = KeyValue(pin_key(1, LEASE), b"", 1)
    kept.load([first, KeyValue(pin_key(2, FOREIGN), b"", 1)], 1)
    one = kept.bytes[OWNER]
    assert one == kept.bytes[OTHER] > 0
    fence = b"x" + OWNER.to_bytes(3, "big") + bytes(8)
    kept.apply(2, [Event(2, fence, b"1234"), Event(2, first.key, b"")])
    assert kept.bytes[OWNER] > one
    kept.apply(3, [Event(3, fence, None), Event(3, first.key, None)])
    assert kept.bytes[OWNER] == 0
    assert kept.bytes[OTHER] == one
