"""The key-value engine: what every engine promises, and what SQLite's file survives."""

import errno
import functools
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
import trio
from harness.etcd_server import etcd, new_prefix  # noqa: F401
from harness.memory_engine import MemoryEngine, Place
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from irdmafs.backend.kv import (
    Damaged,
    Delete,
    KeyValue,
    NoSpace,
    OwnEngine,
    Put,
)
from irdmafs.backend.kv.etcd import EtcdEngine
from irdmafs.backend.kv.sqlite import SQLiteEngine

END = b"\xff"
Result = TypeVar("Result")


def in_trio(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        async def call() -> None:
            await test(*args, **kwargs)

        trio.run(call)

    return run


def now(awaitable: Awaitable[Result]) -> Result:
    """The result of a coroutine that does not wait."""
    try:
        awaitable.__await__().__next__()
    except StopIteration as stop:
        result: Result = stop.value
        return result
    raise AssertionError("it waited")


def revision_of(engine: SQLiteEngine) -> int:
    """Return the revision of the newest transaction."""
    return now(engine.transact((), durable=False))


def value_of(engine: SQLiteEngine, key: bytes) -> KeyValue | None:
    return next(iter(now(engine.range(key, key + b"\0"))), None)


class Either:
    """An engine of either kind, by what both can do."""

    def __init__(self, engine: OwnEngine | EtcdEngine) -> None:
        self._engine = engine
        self.range = engine.range
        self.close = engine.close

    async def transact(self, operations: Sequence[Put | Delete], *, durable: bool = True) -> int:
        if isinstance(self._engine, EtcdEngine):
            return await self._engine.transact((), operations)
        return await self._engine.transact(operations, durable=durable)


Open = Callable[[], Either]


@pytest.fixture(params=["sqlite", "sqlite-power-safe", "memory", "etcd"])
def open_engine(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens the engine of this test: the same store every time."""
    if request.param == "etcd":
        server, prefix = request.getfixturevalue("etcd"), new_prefix()
        return lambda: Either(EtcdEngine(server.endpoints, prefix))
    if request.param == "memory":
        place = Place()
        return lambda: Either(MemoryEngine(place))
    power_safe = request.param == "sqlite-power-safe"
    return lambda: Either(SQLiteEngine(str(tmp_path / "kv.sqlite"), power_safe=power_safe))


class TestEveryEngine:
    @in_trio
    async def test_a_new_store_is_empty(self, open_engine: Open) -> None:
        engine = open_engine()
        assert await engine.range(b"", END) == []
        await engine.close()

    @in_trio
    async def test_range_returns_what_was_put_with_its_revision(self, open_engine: Open) -> None:
        engine = open_engine()
        large = random.Random(1).randbytes(1_000_000)
        first = await engine.transact([Put(b"a", b"1"), Put(b"\0\0", b"")])
        second = await engine.transact([Put(b"a", large)])
        assert 0 < first < second
        assert await engine.range(b"\0", b"b") == [
            KeyValue(b"\0\0", b"", first),
            KeyValue(b"a", large, second),
        ]
        await engine.close()

    @in_trio
    async def test_range_is_ordered_and_excludes_its_end(self, open_engine: Open) -> None:
        engine = open_engine()
        keys = [b"a", b"a\0", b"aa", b"b", b"b\xff", b"c"]
        await engine.transact([Put(key, key) for key in reversed(keys)])
        assert [found.key for found in await engine.range(b"a\0", b"c")] == keys[1:-1]
        assert await engine.range(b"c", b"a") == await engine.range(b"b", b"b") == []
        await engine.close()

    @in_trio
    async def test_a_key_cannot_occur_twice_in_a_transaction(self, open_engine: Open) -> None:
        engine = open_engine()
        with pytest.raises(ValueError, match="one operation"):
            await engine.transact([Put(b"a", b"1"), Delete(b"a")])
        assert await engine.range(b"", END) == []
        await engine.close()

    @in_trio
    async def test_everything_is_there_after_closing_and_opening(self, open_engine: Open) -> None:
        engine = open_engine()
        for number in range(20):
            durable = number % 3 == 0
            await engine.transact([Put(b"%d" % number, b"x" * number)], durable=durable)
        revision = await engine.transact([Delete(b"7")], durable=False)
        before = await engine.range(b"0", b":")
        assert len(before) == 19
        await engine.close()
        await engine.close()
        engine = open_engine()
        assert await engine.range(b"0", b":") == before
        assert await engine.transact([Put(b"next", b"")]) > revision
        await engine.close()

    @in_trio
    async def test_revisions_are_not_used_again_after_the_newest_key_was_deleted(
        self, open_engine: Open
    ) -> None:
        engine = open_engine()
        await engine.transact([Put(b"a", b"1")])
        deleted = await engine.transact([Delete(b"a")])
        await engine.close()
        engine = open_engine()
        assert await engine.transact([Put(b"a", b"2")]) > deleted
        await engine.close()

    @in_trio
    async def test_a_closed_engine_refuses_everything(self, open_engine: Open) -> None:
        engine = open_engine()
        await engine.close()
        with pytest.raises(trio.ClosedResourceError):
            await engine.range(b"", END)
        with pytest.raises(trio.ClosedResourceError):
            await engine.transact([Put(b"a", b"1")])


@in_trio
async def test_sqlite_has_no_leases(tmp_path: Path) -> None:
    engine = SQLiteEngine(str(tmp_path / "kv.sqlite"), power_safe=False)
    with pytest.raises(ValueError, match="lease"):
        await engine.transact([Put(b"a", b""), Put(b"b", b"", 1)])
    assert revision_of(engine) == 0
    await engine.close()


class SQLiteAgainstModel(RuleBasedStateMachine):
    """Random transactions; `history` has the contents at every revision."""

    keys = st.sampled_from([b"a", b"b", b"c", b"cc", b"d\0"])
    operations = st.lists(
        st.one_of(
            st.builds(Put, keys, st.binary(max_size=4) | st.just(b"x" * 10_000), st.just(0)),
            st.builds(Delete, keys),
        ),
        max_size=4,
        unique_by=lambda operation: operation.key,
    )

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="irdmafs-kv-"))
        self.engine = SQLiteEngine(str(self.directory / "kv.sqlite"), power_safe=False)
        self.history: list[dict[bytes, KeyValue]] = [{}]
        self.durable = 0

    def teardown(self) -> None:
        now(self.engine.close())
        shutil.rmtree(self.directory)

    @rule(operations=operations, durable=st.booleans())
    def transact(self, operations: list[Put | Delete], durable: bool) -> None:
        state = dict(self.history[-1])
        revision = len(self.history)
        for operation in operations:
            if isinstance(operation, Put):
                state[operation.key] = KeyValue(operation.key, operation.value, revision)
            else:
                state.pop(operation.key, None)
        if operations:
            self.history.append(state)
        assert now(self.engine.transact(operations, durable=durable)) == (len(self.history) - 1)
        if durable:
            self.durable = len(self.history) - 1

    @rule()
    def flush(self) -> None:
        now(self.engine.flush())
        self.durable = len(self.history) - 1

    @rule()
    def reopen(self) -> None:
        now(self.engine.close())
        self.engine = SQLiteEngine(str(self.directory / "kv.sqlite"), power_safe=False)
        self.durable = len(self.history) - 1

    @precondition(lambda self: self.durable < len(self.history) - 1)
    @rule()
    def crash(self) -> None:
        """What is in the files now is what a process that starts after a crash finds."""
        copy = self.directory / "copy"
        copy.mkdir()
        for name in ("kv.sqlite", "kv.sqlite-wal"):
            shutil.copy(self.directory / name, copy / name)
        survivor = SQLiteEngine(str(copy / "kv.sqlite"), power_safe=False)
        revision = revision_of(survivor)
        assert self.durable <= revision < len(self.history)
        expected = self.history[revision]
        assert now(survivor.range(b"", END)) == [expected[key] for key in sorted(expected)]
        now(survivor.close())
        shutil.rmtree(copy)

    @rule(start=keys, end=keys)
    def range(self, start: bytes, end: bytes) -> None:
        state = self.history[-1]
        expected = [state[key] for key in sorted(state) if start <= key < end]
        assert now(self.engine.range(start, end)) == expected

    @invariant()
    def shows_the_newest_contents(self) -> None:
        state = self.history[-1]
        assert revision_of(self.engine) == len(self.history) - 1
        assert now(self.engine.range(b"", END)) == [state[key] for key in sorted(state)]


TestSQLiteAgainstModel = SQLiteAgainstModel.TestCase
TestSQLiteAgainstModel.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def transaction_of(seed: int, revision: int) -> tuple[list[Put | Delete], bool]:
    """What transaction number `revision` of the run `seed` does; each one changes something."""
    chance = random.Random(seed * 1_000_003 + revision)
    keys = chance.sample(range(50), chance.randint(1, 6))
    operations: list[Put | Delete] = [Put(b"newest", b"%d" % revision)]
    for key in keys:
        if chance.random() < 0.3:
            operations.append(Delete(b"%d" % key))
        else:
            operations.append(Put(b"%d" % key, chance.randbytes(chance.choice([3, 200, 9000]))))
    return operations, chance.random() < 0.2


def write_until_killed(path: str, seed: int) -> None:
    """Runs in a child process: acknowledges durable transactions on standard output."""
    engine = SQLiteEngine(path, power_safe=False)
    while True:
        operations, durable = transaction_of(seed, revision_of(engine) + 1)
        revision = now(engine.transact(operations, durable=durable))
        if durable:
            os.write(1, b"%d\n" % revision)


def test_sigkill_loses_no_durable_transaction_and_leaves_a_prefix(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    path = str(tmp_path / "kv.sqlite")
    command = f"import test_engines; test_engines.write_until_killed({path!r}, {seed})"
    state: dict[bytes, bytes] = {}
    replayed = 0
    for _ in range(8):
        with subprocess.Popen(
            [sys.executable, "-c", command],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parent,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        ) as child:
            assert child.stdout is not None
            acknowledgements = [child.stdout.readline() for _ in range(chance.randint(1, 300))]
            child.send_signal(signal.SIGKILL)
            acknowledgements += child.stdout.readlines()
        assert child.returncode == -signal.SIGKILL
        acknowledged = int(acknowledgements[-1])

        engine = SQLiteEngine(path, power_safe=False)
        assert revision_of(engine) >= acknowledged
        while replayed < revision_of(engine):
            replayed += 1
            for operation in transaction_of(seed, replayed)[0]:
                if isinstance(operation, Put):
                    state[operation.key] = operation.value
                else:
                    state.pop(operation.key, None)
        assert {key: value for key, value, _ in now(engine.range(b"", END))} == state
        now(engine.close())


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 16 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    directory = tmp_path / "small"
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", directory], check=True)
    yield directory
    subprocess.run(["umount", "-l", directory], check=True)


def fill(directory: Path) -> None:
    """Take every free byte of the filesystem."""
    with open(directory / "filler", "ab", buffering=0) as filler:
        try:
            while filler.write(b"\0" * 4096):
                pass
        except OSError as error:
            assert error.errno == errno.ENOSPC


class TestFullStore:
    def test_refuses_puts_keeps_what_was_acknowledged_and_still_deletes(
        self, small_tmpfs: Path
    ) -> None:
        engine = SQLiteEngine(str(small_tmpfs / "kv.sqlite"), power_safe=False)
        for number in range(200):
            now(engine.transact([Put(b"k%03d" % number, b"x" * 5000)]))
        now(engine.transact([Put(b"lazy", b"1")], durable=False))
        now(engine.transact([Put(b"lazy", b"2"), Delete(b"k000")], durable=False))
        fill(small_tmpfs)
        revision = revision_of(engine)
        accepted = 0
        with pytest.raises(NoSpace):
            for number in range(3000):
                now(engine.transact([Put(b"more%d" % number, b"y" * 5000)]))
                accepted += 1
        assert revision_of(engine) == revision + accepted
        os.unlink(small_tmpfs / "filler")
        assert value_of(engine, b"lazy") == KeyValue(b"lazy", b"2", revision)
        assert value_of(engine, b"k000") is None
        assert value_of(engine, b"more%d" % accepted) is None

        fill(small_tmpfs)
        for number in range(accepted):
            now(engine.transact([Delete(b"more%d" % number)]))
        for number in range(1, 200):
            urgent: list[Put | Delete] = [
                Delete(b"k%03d" % number),
                Put(b"lazy", b"%d" % number),
            ]
            now(engine.transact(urgent, urgent=True))
        assert now(engine.range(b"", END)) == [KeyValue(b"lazy", b"199", revision_of(engine))]
        os.unlink(small_tmpfs / "filler")
        now(engine.transact([Put(b"after", b"")]))
        assert (small_tmpfs / "kv.sqlite-ballast").stat().st_blocks * 512 == 4 << 20
        before = now(engine.range(b"", END))
        now(engine.close())

        engine = SQLiteEngine(str(small_tmpfs / "kv.sqlite"), power_safe=False)
        assert now(engine.range(b"", END)) == before
        now(engine.close())

    def test_puts_do_not_take_the_room_that_is_kept_back_for_deletes(
        self, small_tmpfs: Path
    ) -> None:
        """The engine has time for what is pending after each of them, and others take what becomes free."""
        path = str(small_tmpfs / "kv.sqlite")
        engine = SQLiteEngine(path, power_safe=False)
        keys = [b"%d" % number for number in range(64)]
        for key in keys:
            now(engine.transact([Put(key, b"")]))
        fill(small_tmpfs)
        os.truncate(small_tmpfs / "filler", os.path.getsize(small_tmpfs / "filler") - (512 << 10))
        refused = 0
        for _ in range(3):
            for key in keys:
                try:
                    now(engine.transact([Put(key, bytes(65536))]))
                except NoSpace:
                    refused += 1
                now(engine.idle())
            fill(small_tmpfs)
            now(engine.close())
            engine = SQLiteEngine(path, power_safe=False)
        assert refused
        for key in keys:
            now(engine.transact([Delete(key)]))
            now(engine.idle())
        assert now(engine.range(b"", END)) == []
        os.unlink(small_tmpfs / "filler")
        now(engine.transact([Put(b"after", bytes(65536))]))
        now(engine.close())

    def test_flushes_what_was_acknowledged_without_being_durable(self, small_tmpfs: Path) -> None:
        engine = SQLiteEngine(str(small_tmpfs / "kv.sqlite"), power_safe=False)
        for number in range(200):
            now(engine.transact([Put(b"%d" % number, b"x" * 5000)], durable=False))
        fill(small_tmpfs)
        now(engine.close())
        engine = SQLiteEngine(str(small_tmpfs / "kv.sqlite"), power_safe=False)
        assert len(now(engine.range(b"", END))) == revision_of(engine) == 200
        now(engine.close())

    def test_cannot_be_made_and_says_so(self, small_tmpfs: Path) -> None:
        fill(small_tmpfs)
        with pytest.raises(OSError) as refused:
            SQLiteEngine(str(small_tmpfs / "kv.sqlite"), power_safe=False)
        assert refused.value.errno == errno.ENOSPC
        os.unlink(small_tmpfs / "filler")
        now(SQLiteEngine(str(small_tmpfs / "kv.sqlite"), power_safe=False).close())

    def test_random_transactions_are_applied_whole_or_refused(self, small_tmpfs: Path) -> None:
        seed = random.randrange(2**32)
        print(f"seed {seed}")
        chance = random.Random(seed)
        path = str(small_tmpfs / "kv.sqlite")
        engine = SQLiteEngine(path, power_safe=False)
        state: dict[bytes, bytes] = {}
        refused = 0
        for step in range(3000):
            if step % 100 == 0:
                fill(small_tmpfs)
            elif step % 100 == 80:
                os.unlink(small_tmpfs / "filler")
            if step % 500 == 499:
                now(engine.close())
                engine = SQLiteEngine(path, power_safe=False)
            operations, durable = transaction_of(seed, step)
            if chance.random() < 0.3:
                operations = [op for op in operations if isinstance(op, Delete)]
            try:
                now(engine.transact(operations, durable=durable))
            except NoSpace:
                refused += 1
            else:
                for operation in operations:
                    if isinstance(operation, Put):
                        state[operation.key] = operation.value
                    else:
                        state.pop(operation.key, None)
            assert {key: value for key, value, _ in now(engine.range(b"", END))} == state
        assert refused
        now(engine.close())


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """The file of a closed engine with 2,000 keys."""
    path = tmp_path / "kv.sqlite"
    engine = SQLiteEngine(str(path), power_safe=False)
    now(engine.transact([Put(b"key %04d" % key, b"value" * 20) for key in range(2000)]))
    now(engine.close())
    return path


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def set_format(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("UPDATE meta SET format = 99")
    db.close()


def replace_by_another_database(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE kv(key BLOB PRIMARY KEY, value BLOB)")
    db.close()


def break_leaves(path: Path) -> None:
    for page in range(8, 20):
        overwrite(path, page * 4096, random.Random(page).randbytes(4096))


class TestDamagedFile:
    @pytest.mark.parametrize(
        ("damage", "said"),
        [
            pytest.param(lambda path: overwrite(path, 0, b"#" * 8192), "not a database"),
            pytest.param(lambda path: path.write_bytes(b"hello\n"), "not a database"),
            pytest.param(lambda path: os.truncate(path, 0), "empty"),
            pytest.param(lambda path: os.truncate(path, 40_000), "malformed"),
            pytest.param(lambda path: os.truncate(path, 50), "malformed"),
            pytest.param(break_leaves, "malformed"),
            pytest.param(set_format, "format is 99"),
            pytest.param(replace_by_another_database, "not a store of irdmafs"),
        ],
    )
    def test_is_refused_with_a_remedy_and_left_in_place(
        self, store: Path, damage: Callable[[Path], None], said: str
    ) -> None:
        damage(store)
        for _ in range(2):
            with pytest.raises(Damaged) as refused:
                SQLiteEngine(str(store), power_safe=False)
            assert str(store) in str(refused.value)
            assert said in str(refused.value)
            assert "Restore" in str(refused.value)
        assert store.exists()

    def test_that_is_missing_beside_its_log_is_not_replaced_by_an_empty_one(
        self, store: Path
    ) -> None:
        store.rename(f"{store}-wal")
        with pytest.raises(Damaged, match="missing"):
            SQLiteEngine(str(store), power_safe=False)
        assert not store.exists()

    def test_with_a_broken_log_header_does_not_lose_the_log(self, store: Path) -> None:
        engine = SQLiteEngine(str(store), power_safe=False)
        now(engine.transact([Put(b"new", b"1")]))
        now(engine.range(b"", END))  # the journal goes into the database and its log
        crashed = store.parent / "crashed.sqlite"
        shutil.copy(store, crashed)
        shutil.copy(f"{store}-wal", f"{crashed}-wal")
        now(engine.close())
        log = Path(f"{crashed}-wal").read_bytes()
        for offset in (0, 9, 17, 30):
            overwrite(Path(f"{crashed}-wal"), offset, b"\x5a")
            with pytest.raises(Damaged, match="log"):
                SQLiteEngine(str(crashed), power_safe=False)
            Path(f"{crashed}-wal").write_bytes(log)
        engine = SQLiteEngine(str(crashed), power_safe=False)
        assert value_of(engine, b"new") == KeyValue(b"new", b"1", 2)
        now(engine.close())

    def test_anywhere_is_an_error_of_ours_or_harmless(self, store: Path) -> None:
        seed = random.randrange(2**32)
        print(f"seed {seed}")
        chance = random.Random(seed)
        intact = store.read_bytes()
        refused = 0
        for _ in range(150):
            store.write_bytes(intact)
            overwrite(
                store,
                chance.randrange(len(intact)),
                chance.randbytes(chance.choice([1, 8, 500, 5000])),
            )
            try:
                engine = SQLiteEngine(str(store), power_safe=False)
                try:
                    now(engine.range(b"", END))
                finally:
                    now(engine.close())
            except (Damaged, OSError):
                refused += 1
        assert refused > 30


def test_a_store_has_one_user(store: Path) -> None:
    engine = SQLiteEngine(str(store), power_safe=False)
    with pytest.raises(OSError, match="another process") as refused:
        SQLiteEngine(str(store), power_safe=False)
    assert refused.value.errno == errno.EBUSY
    now(engine.close())
    now(SQLiteEngine(str(store), power_safe=False).close())


def test_a_store_that_was_killed_while_it_was_made_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "kv.sqlite-new").write_bytes(b"half")
    (tmp_path / "kv.sqlite-new-wal").write_bytes(b"half")
    engine = SQLiteEngine(str(tmp_path / "kv.sqlite"), power_safe=False)
    now(engine.transact([Put(b"a", b"1")]))
    now(engine.close())
    assert sorted(os.listdir(tmp_path)) == [
        "kv.sqlite",
        "kv.sqlite-ballast",
        "kv.sqlite-redo",
    ]


def crashed_with_three_transactions(store: Path) -> Path:
    """A copy of a store as a killed process leaves it: three transactions are in the journal alone."""
    engine = SQLiteEngine(str(store), power_safe=False)
    for number in range(3):
        now(engine.transact([Put(b"%d" % number, b"value")]))
    crashed = store.parent / "crashed.sqlite"
    for suffix in ("", "-wal", "-redo"):
        shutil.copy(f"{store}{suffix}", f"{crashed}{suffix}")
    now(engine.close())
    return crashed


@pytest.mark.parametrize("missing_bytes", [1, 20])
def test_a_record_cut_short_by_a_crash_is_dropped_and_those_before_it_are_kept(
    store: Path, missing_bytes: int
) -> None:
    crashed = crashed_with_three_transactions(store)
    redo = Path(f"{crashed}-redo")
    redo.write_bytes(redo.read_bytes()[:-missing_bytes])
    engine = SQLiteEngine(str(crashed), power_safe=False)
    found = [value_of(engine, b"%d" % number) for number in range(3)]
    assert [record is not None for record in found] == [True, True, False]
    now(engine.transact([Put(b"next", b"")]))
    now(engine.close())


def test_a_journal_broken_in_the_middle_is_refused(store: Path) -> None:
    crashed = crashed_with_three_transactions(store)
    overwrite(Path(f"{crashed}-redo"), 12, b"\x5a\x5a")
    with pytest.raises(Damaged, match="redo"):
        SQLiteEngine(str(crashed), power_safe=False)


def test_an_operation_of_a_wrong_type_leaves_the_rest_of_its_transaction_out(
    store: Path,
) -> None:
    engine = SQLiteEngine(str(store), power_safe=False)
    now(engine.transact([Put(b"lazy", b"1")], durable=False))
    for wrong in (Put(b"b", object()), None):  # type: ignore[arg-type]
        with pytest.raises((TypeError, AttributeError)):
            now(engine.transact([Put(b"a", b"1"), wrong]))  # type: ignore[list-item]
    assert value_of(engine, b"a") is None
    assert value_of(engine, b"lazy") == KeyValue(b"lazy", b"1", 2)
    now(engine.close())
