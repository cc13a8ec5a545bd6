"""An engine whose keys others change, too: compares, snapshots, pages and watches, on etcd."""

import errno
import random

import pytest
import trio
from harness.errors import fails_with
from harness.etcd_server import EtcdServer, new_prefix
from harness.seeds import seeded
from test_failing_etcd import history

from irdmafs.backend import kv
from irdmafs.backend.etcd import engine as engine_module
from irdmafs.backend.etcd import etcd_pb2 as pb
from irdmafs.backend.etcd.engine import EtcdEngine
from irdmafs.backend.etcd.rpc import Method
from irdmafs.backend.etcd.transactions import COMPARES_MAX, operations_max
from irdmafs.backend.kv import Compare, Conflict, Delete, Empty, Exists, KeyValue, Put

END = b"\xff"


async def contents(engine: EtcdEngine) -> dict[bytes, bytes]:
    """Return everything but the keys of the engine itself."""
    found = await engine.range(b"", END)
    return {key: value for key, value, _ in found if not key.startswith((b"s", b"x"))}


@pytest.fixture
def engine(etcd: EtcdServer) -> EtcdEngine:
    return EtcdEngine(etcd.endpoints, new_prefix())


async def test_a_range_is_ordered_and_excludes_its_end(engine: EtcdEngine) -> None:
    keys = [b"a", b"a\0", b"aa", b"b", b"b\xff", b"c"]
    await engine.transact((), [Put(key, key) for key in reversed(keys)])
    assert [found.key for found in await engine.range(b"a\0", b"c")] == keys[1:-1]
    assert await engine.range(b"c", b"a") == await engine.range(b"b", b"b") == []
    await engine.close()


async def test_keys_of_any_density_come_once_and_are_counted_by_etcd_a_few_times(
    engine: EtcdEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = seeded()
    keys = {b"a", b"s\xff", b"z" * 264, b"z" * 300}
    for _ in range(12):  # directories of any size, whose names differ in any byte
        begin = b"d" + rng.randbytes(rng.choice([2, 8])) + b"model.layers." * rng.randrange(3)
        keys |= {begin + b"%d" % rng.randrange(10**9) for _ in range(rng.randrange(1, 60))}
    inodes = [b"i" + number.to_bytes(8, "big") for number in range(1000, 2000)]
    for some in (sorted(keys), inodes):
        await engine.transact((), [Put(key, b"") for key in some])
    expected = await engine.range(b"", END)
    monkeypatch.setattr(engine_module, "PAGE_KEYS", page_keys := rng.randrange(5, 30))
    asked: list[pb.RangeRequest] = []
    ask = engine.calls.ask

    async def noted(method: Method[pb.RangeResponse], request: pb.RangeRequest) -> pb.RangeResponse:
        asked.append(request)
        return await ask(method, request)

    monkeypatch.setattr(engine.calls, "ask", noted)
    assert await engine.range(b"", END) == expected
    assert {*keys, *inodes} <= {record.key for record in expected}
    # A gap between two directories takes a request for each byte of a key at most.
    assert len(asked) < 2 * len(expected) / page_keys + 13 * 264
    asked.clear()
    assert [record.key for record in await engine.range(b"i", b"j")] == inodes
    counted = 0
    for request in asked:
        left = (key for key in inodes if engine.prefix + key >= request.key)
        counted += sum(engine.prefix + key < request.range_end for key in left)
    # The first request is of all; the others are of the keys they have and two pages more.
    assert counted <= 5 * len(inodes)
    assert len(asked) <= 2 * len(inodes) / page_keys
    await engine.close()


async def test_what_was_put_is_found_with_its_revision(engine: EtcdEngine) -> None:
    large = random.Random(1).randbytes(1_000_000)
    assert await engine.get(b"a") is None
    assert (await engine.snapshot(b"", END))[1] == []
    assert await engine.barrier() == engine.revision
    first = await engine.transact((), [Put(b"a", b"1"), Put(b"\0\0", b"")])
    second = await engine.transact((), [Put(b"a", large)])
    assert 0 < first < second
    found = [KeyValue(b"\0\0", b"", first), KeyValue(b"a", large, second)]
    assert await engine.range(b"\0", b"b") == found
    assert [await engine.get(b"\0\0"), await engine.get(b"a")] == found
    assert engine.revision == await engine.barrier() == second
    await engine.close()


async def test_a_closed_engine_refuses_everything(engine: EtcdEngine) -> None:
    await engine.close()
    for call in (
        engine.range(b"", END),
        engine.transact((), [Put(b"a", b"1")]),
        engine.get(b"a"),
        engine.snapshot(b"", END),
        engine.barrier(),
    ):
        with pytest.raises(trio.ClosedResourceError):
            await call


async def test_a_range_of_any_length_is_of_one_revision(
    engine: EtcdEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("irdmafs.backend.etcd.engine.PAGE_KEYS", 1000)
    keys = [b"k%05d" % number for number in range(2500)]
    for offset in range(0, len(keys), 100):
        await engine.transact((), [Put(key, b"") for key in keys[offset : offset + 100]])

    async def overwrite_from_behind() -> None:
        for key in reversed(keys[::100]):
            await engine.transact((), [Put(key, b"new")])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(overwrite_from_behind)
        for _ in range(5):
            revision, found = await engine.snapshot(b"k", b"l")
            assert [one.key for one in found] == keys
            assert max(one.mod_revision for one in found) <= revision
            # What is old lies before what is new: it was overwritten in that order.
            values = [one.value for one in found if one.key in set(keys[::100])]
            assert values == sorted(values)
    await engine.close()


async def test_the_first_compare_that_fails_is_named_nothing_changes(engine: EtcdEngine) -> None:
    first = await engine.transact((), [Put(b"a", b"1"), Put(b"d\0", b"")])
    second = await engine.transact((), [Put(b"b", b"2")])
    cases: list[tuple[list[Compare], bytes]] = [
        ([(b"a", first), (b"b", first), (b"c", 7)], b"b"),
        ([(b"a", 0), Exists(b"none")], b"a"),
        ([(b"none", 1)], b"none"),
        ([(b"a", second)], b"a"),
        ([Exists(b"a"), Exists(b"none"), (b"a", 0)], b"none"),
        ([Exists(b"a"), Empty(b"b", b"c")], b"b"),
        ([Empty(b"c", b"d"), Empty(b"d", b"e"), Exists(b"none")], b"d"),
        ([kv.Unchanged(b"a", b"b", first), kv.Unchanged(b"a", b"c", first), Exists(b"none")], b"a"),
        ([kv.Unchanged(b"b", b"c", first), Exists(b"none")], b"b"),
    ]
    for compares, key in cases:
        changes: list[Put | Delete] = [Put(b"a", b"9"), Delete(b"b")]
        for operations in (changes, []):
            with pytest.raises(Conflict) as refused:
                await engine.transact(compares, operations)
            assert refused.value.key == key
    assert await contents(engine) == {b"a": b"1", b"b": b"2", b"d\0": b""}
    assert await engine.barrier() == second
    right: list[Compare] = [(b"a", first), (b"b", second), (b"none", 0), Exists(b"a")]
    right += [kv.Unchanged(b"a", b"e", second), kv.Unchanged(b"none", b"nonf", 0)]
    right.append(Empty(b"c", b"d"))
    third = await engine.transact(right, [Put(b"none", b"3")])
    assert third == await engine.barrier() > second
    await engine.close()


@pytest.mark.parametrize("compares", [1, 60, 100, COMPARES_MAX])
async def test_the_largest_transaction_is_one_change_or_none(
    engine: EtcdEngine, compares: int
) -> None:
    since = await engine.transact((), [Put(b"gone", b"")])
    keys = [b"k%05d" % number for number in range(operations_max(compares) - 1)]
    operations: list[Put | Delete] = [*(Put(key, key) for key in keys), Delete(b"gone")]
    held: list[Compare] = [(b"none%d" % number, 0) for number in range(compares)]
    with pytest.raises(Conflict):
        await engine.transact([*held[:-1], Exists(b"none")], operations)
    twice: list[Put | Delete] = [Put(b"twice", b""), Delete(b"twice")]
    for too_much in ((held, [*operations, *twice[:1]]), ([Exists(b"gone")] * 128, ()), ((), twice)):
        with pytest.raises(ValueError, match=r"no transaction of|one operation"):
            await engine.transact(*too_much)
    with fails_with(errno.EMSGSIZE):
        await engine.transact((), [Put(b"large", bytes(4_000_000))])
    assert await engine.barrier() == since
    revision = await engine.transact(held, operations)
    change = await anext(engine.watch(b"a", b"l", since))
    assert change.revision == revision
    assert {event.key for event in change.events} == {*keys, b"gone"}
    assert await contents(engine) == dict(zip(keys, keys, strict=True))
    await engine.close()


async def test_watching_from_a_snapshot_leaves_no_gap(engine: EtcdEngine) -> None:
    """Random transactions, over which replicas are begun at any time. All end up the same."""
    chance = seeded()
    model: dict[bytes, bytes] = {}
    replicas: list[tuple[int, dict[bytes, bytes]]] = []
    for step in range(300):
        if step % 30 == 0:
            revision, found = await engine.snapshot(b"0", b":")
            assert {one.key: one.value for one in found} == model
            replicas.append((revision, dict(model)))
        keys = [b"%d" % key for key in chance.sample(range(20), chance.randint(1, 4))]
        operations = [
            Delete(key) if chance.random() < 0.4 else Put(key, b"%d" % step) for key in keys
        ]
        compares: list[Compare] = [
            Exists(key) if key in model else Empty(key, key + b"\0") for key in keys
        ]
        if chance.random() < 0.2:
            wrong = chance.choice(keys)
            compares.append(Empty(wrong, wrong + b"\0") if wrong in model else Exists(wrong))
            with pytest.raises(Conflict) as refused:
                await engine.transact(compares, operations)
            assert refused.value.key == wrong
            continue
        await engine.transact(compares, operations)
        for operation in operations:
            if isinstance(operation, Put):
                model[operation.key] = operation.value
            else:
                model.pop(operation.key, None)
    last = await engine.transact((), [Put(b"9999", b"last")])
    model[b"9999"] = b"last"
    assert await contents(engine) == model
    for revision, replica in replicas:
        for change in await history(engine, b"0", b":", last, revision):
            for event in change.events:
                if event.value is None:
                    del replica[event.key]
                else:
                    replica[event.key] = event.value
        assert replica == model
    await engine.close()
