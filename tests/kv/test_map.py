"""The ordered map that one host keeps its names in: transactions, crashes, full stores and damage."""

import errno
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import pytest
import trio
from harness.errors import fails_with
from harness.map_changes import Change, change, transaction_of
from harness.seeds import chosen_seed, seeded
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from irdmafs.backend.kv import Damaged, NoSpace
from irdmafs.backend.kv.map import Map

END = b"\xff"


def contents(records: Map) -> dict[bytes, bytes]:
    return dict(records.range(b"a", END))


def apply(state: dict[bytes, bytes], changes: list[Change]) -> None:
    for key, value in changes:
        if value is None:
            state.pop(key, None)
        else:
            state[key] = value


class MapAgainstModel(RuleBasedStateMachine):
    """Random changes; `history` has the contents after each."""

    keys = st.sampled_from([b"a", b"b", b"c", b"cc", b"d\0"])
    changes = st.lists(
        st.tuples(keys, st.none() | st.binary(max_size=4) | st.just(b"x" * 10_000)),
        max_size=4,
        unique_by=lambda one: one[0],
    )
    power_safe = False

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="irdmafs-kv-"))
        self.records = self.opened(self.directory)
        self.history: list[dict[bytes, bytes]] = [{}]
        self.durable = 0

    def opened(self, directory: Path) -> Map:
        return Map(str(directory / "names"), power_safe=self.power_safe)

    def teardown(self) -> None:
        self.records.close()
        shutil.rmtree(self.directory)

    @rule(changes=changes, durable=st.booleans())
    def change(self, changes: list[Change], durable: bool) -> None:
        state = dict(self.history[-1])
        apply(state, changes)
        self.history.append(state)
        change(self.records, changes, durable=durable)
        if durable:
            self.durable = len(self.history) - 1

    @rule(changes=changes)
    def undo(self, changes: list[Change]) -> None:
        self.records.begin()
        for key, value in changes:
            if value is not None:
                self.records.put(key, value)
        self.records.undo()

    @rule()
    def reopen(self) -> None:
        self.records.leave(b"note")
        self.records.close()
        self.records = self.opened(self.directory)
        assert self.records.note == b"note"
        self.durable = len(self.history) - 1

    @rule()
    def crash(self) -> None:
        """A process that starts after a crash finds what is in the file now."""
        copy = self.directory / "copy"
        copy.mkdir()
        shutil.copy(self.directory / "names", copy / "names")
        survivor = self.opened(copy)
        assert survivor.note is None
        assert contents(survivor) in self.history[self.durable :]
        survivor.close()
        shutil.rmtree(copy)

    @rule(start=keys, end=keys)
    def range(self, start: bytes, end: bytes) -> None:
        state = self.history[-1]
        expected = sorted((key, state[key]) for key in state if start <= key < end)
        assert list(self.records.range(start, end)) == expected
        keys = [key for key, _ in expected]
        assert self.records.first(start, end) == (keys[0] if keys else None)
        assert self.records.last(start, end) == (keys[-1] if keys else None)

    @invariant()
    def shows_the_newest_contents(self) -> None:
        assert contents(self.records) == self.history[-1]
        assert all(self.records.get(key) == value for key, value in self.history[-1].items())


class PowerSafeMapAgainstModel(MapAgainstModel):
    power_safe = True


TestMapAgainstModel = MapAgainstModel.TestCase
TestMapAgainstModel.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)
TestPowerSafeMapAgainstModel = PowerSafeMapAgainstModel.TestCase
TestPowerSafeMapAgainstModel.settings = settings(
    max_examples=5, stateful_step_count=40, deadline=None
)


def test_a_closed_map_refuses_everything(tmp_path: Path) -> None:
    records = Map(str(tmp_path / "names"))
    records.close()
    records.close()
    with pytest.raises(trio.ClosedResourceError):
        records.get(b"a")
    with pytest.raises(trio.ClosedResourceError):
        records.put(b"a", b"1")
    with pytest.raises(trio.ClosedResourceError):
        list(records.range(b"a", END))


def test_a_map_in_memory_leaves_neither_file_nor_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    records = Map()
    change(records, [(b"%d" % number, bytes(50_000)) for number in range(100)])
    assert len(contents(records)) == 0 and len(dict(records.range(b"0", b":"))) == 100
    records.close()
    assert len(os.listdir("/proc/self/fd")) == before


_CALL = re.compile(r"^\d+ +(\w+)\((.*)\) += (\d+)")
_BYTES = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
# (offset, bytes) written, "sync", or "done": what the program says after each transaction.
Step = tuple[int, bytes] | str


def steps(trace: str, path: str) -> Iterator[Step]:
    """The system calls by which a traced process changed a file."""
    own: dict[str, bool] = {}  # by descriptor: is each write synced?
    offsets: dict[str, int] = {}
    for line in trace.splitlines():
        found = _CALL.match(line)
        if found is None:
            continue
        name, arguments, result = found.groups()
        fd = arguments.split(",")[0]
        data = b"".join(
            bytes.fromhex(part.replace("\\x", "")) for part in _BYTES.findall(arguments)
        )
        if name == "openat":
            if data.decode() == path:
                own[result] = "O_DSYNC" in arguments
        elif name == "close":
            own.pop(fd, None)
        elif name == "write" and fd == "2":
            yield "done"
        elif fd not in own:
            continue
        elif name == "lseek":
            offsets[fd] = int(result)
        elif name in ("fdatasync", "fsync"):
            yield "sync"
        else:
            assert name in ("pwrite64", "writev"), line
            assert len(data) == int(result), "a part of it was written"
            yield (int(arguments.split(",")[-1]) if name == "pwrite64" else offsets[fd]), data
            if own[fd]:
                yield "sync"


def after_power_loss(synced: bytes, written: bytes, chance: random.Random) -> bytes:
    """The synced bytes with some of the sectors that were written since."""
    survived = bytearray(synced)
    share = chance.choice([0.0, 0.1, 0.5, 0.9, 1.0])
    for start in range(0, len(written), 512):
        sector = slice(start, start + 512)
        if written[sector] != survived[sector] and chance.random() < share:
            survived[sector] = written[sector]
    return bytes(survived)


TRANSACTIONS = 15
TRACED = """
import os
from harness.map_changes import Map, change, transaction_of

records = Map({path!r}, power_safe=True)
for number in range(1, {end}):
    change(records, transaction_of({seed}, number)[0])
    os.write(2, b"done")
"""


def test_what_a_power_loss_leaves_of_the_writes_since_a_sync_is_a_commit(tmp_path: Path) -> None:
    """A disk has all that was synced, and any sectors of what was written after that. Whenever the power
    fails, that is a commit, and no older one than the last that had returned."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed")
    seed = chosen_seed()
    chance = random.Random(seed)
    path, trace = tmp_path / "names", tmp_path / "trace"
    Map(str(path), power_safe=True).close()
    image = bytearray(path.read_bytes())
    done = subprocess.run(
        [strace, "-xx", "-s", "1000000", "-f", "-o", trace, "-e",
         "trace=openat,close,lseek,write,pwrite64,writev,pwritev,pwritev2,fdatasync,fsync,msync",
         sys.executable, "-c", TRACED.format(path=str(path), seed=seed, end=TRANSACTIONS)],
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    if "PTRACE" in done.stderr:
        pytest.skip(f"no process may be traced here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    states: list[dict[bytes, bytes]] = [{}]
    for number in range(1, TRANSACTIONS):
        states.append(dict(states[-1]))
        apply(states[-1], transaction_of(seed, number)[0])
    synced = bytes(image)
    returned = losses = 0
    for step in steps(trace.read_text(), str(path)):
        if step == "done":
            returned += 1
        elif step == "sync":
            synced = bytes(image)
        else:
            assert not isinstance(step, str)
            offset, data = step
            image[offset : offset + len(data)] = data
        for _ in range(4):
            crashed = tmp_path / "crashed"
            crashed.write_bytes(after_power_loss(synced, bytes(image), chance))
            records = Map(str(crashed), power_safe=True)
            assert contents(records) in states[returned : returned + 2]
            records.close()
            losses += 1
    assert returned == TRANSACTIONS - 1 and losses >= 100


def fill(directory: Path) -> None:
    """Take every free byte of the filesystem."""
    with open(directory / "filler", "ab", buffering=0) as filler:
        try:
            while filler.write(b"\0" * 4096):
                pass
        except OSError as error:
            assert error.errno == errno.ENOSPC


@pytest.mark.parametrize("power_safe", [False, True])
class TestFullStore:
    def test_refuses_puts_keeps_what_was_acknowledged_and_still_deletes(
        self, small_tmpfs: Path, power_safe: bool
    ) -> None:
        records = Map(str(small_tmpfs / "names"), power_safe=power_safe)
        for number in range(200):
            change(records, [(b"k%03d" % number, b"x" * 5000)])
        change(records, [(b"lazy", b"1")], durable=False)
        change(records, [(b"lazy", b"2"), (b"k000", None)], durable=False)
        fill(small_tmpfs)
        accepted = 0
        with pytest.raises(NoSpace):
            for number in range(3000):
                change(records, [(b"more%d" % number, b"y" * 5000)])
                accepted += 1
        assert records.get(b"lazy") == b"2" and records.get(b"k000") is None
        assert records.get(b"more%d" % accepted) is None
        for number in range(accepted):
            change(records, [(b"more%d" % number, None)], urgent=True)
        for number in range(1, 200):
            change(records, [(b"k%03d" % number, None), (b"lazy", b"%d" % number)], urgent=True)
        assert contents(records) == {b"lazy": b"199"}
        change(records, [(b"after", b"")])
        before = contents(records)
        records.close()
        records = Map(str(small_tmpfs / "names"), power_safe=power_safe)
        assert contents(records) == before
        records.close()

    def test_puts_do_not_take_the_room_that_is_kept_back_for_deletes(
        self, small_tmpfs: Path, power_safe: bool
    ) -> None:
        """Others take what becomes free."""
        path = str(small_tmpfs / "names")
        records = Map(path, power_safe=power_safe)
        keys = [b"k%d" % number for number in range(64)]
        for key in keys:
            change(records, [(key, b"")])
        fill(small_tmpfs)
        os.truncate(small_tmpfs / "filler", os.path.getsize(small_tmpfs / "filler") - (512 << 10))
        refused = 0
        for _ in range(3):
            for key in keys:
                try:
                    change(records, [(key, bytes(65536))])
                except NoSpace:
                    refused += 1
            fill(small_tmpfs)
            records.close()
            records = Map(path, power_safe=power_safe)
        assert refused
        for key in keys:
            change(records, [(key, None)], urgent=True)
        assert contents(records) == {}
        os.unlink(small_tmpfs / "filler")
        change(records, [(b"after", bytes(65536))])
        records.close()

    def test_cannot_be_made_and_says_so(self, small_tmpfs: Path, power_safe: bool) -> None:
        fill(small_tmpfs)
        with fails_with(errno.ENOSPC):
            Map(str(small_tmpfs / "names"), power_safe=power_safe)
        os.unlink(small_tmpfs / "filler")
        Map(str(small_tmpfs / "names"), power_safe=power_safe).close()

    def test_random_transactions_are_applied_whole_or_refused(
        self, small_tmpfs: Path, power_safe: bool
    ) -> None:
        seed = chosen_seed()
        chance = random.Random(seed)
        path = str(small_tmpfs / "names")
        records = Map(path, power_safe=power_safe)
        state: dict[bytes, bytes] = {}
        refused = 0
        for step in range(1000):
            if step % 100 == 0:
                fill(small_tmpfs)
            elif step % 100 == 80:
                os.unlink(small_tmpfs / "filler")
            if step % 500 == 499:
                records.close()
                records = Map(path, power_safe=power_safe)
            changes, durable = transaction_of(seed, step)
            frees = chance.random() < 0.3
            if frees:
                changes = [(key, value) for key, value in changes if value is None]
            elif step % 10 == 0:
                changes.append((b"large", chance.randbytes(400_000)))
            try:
                change(records, changes, durable=durable, urgent=frees)
            except NoSpace:
                refused += 1
            else:
                apply(state, changes)
            assert contents(records) == state
        assert refused
        records.close()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """The file of a closed map with 2,000 keys."""
    path = tmp_path / "names"
    records = Map(str(path))
    change(records, [(b"key %04d" % key, b"value" * 20) for key in range(2000)])
    records.leave(b"note")
    records.close()
    return path


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def replace_by_another_database(path: Path) -> None:
    path.unlink()
    with lmdb.open(str(path), subdir=False, lock=False) as env, env.begin(write=True) as txn:
        txn.put(b"key", b"value")


def break_leaves(path: Path) -> None:
    for page in range(8, 20):
        overwrite(path, page * 4096, random.Random(page).randbytes(4096))


DAMAGES = [
    pytest.param(lambda path: overwrite(path, 0, b"#" * 8192), "not an LMDB", id="no metas"),
    pytest.param(lambda path: path.write_bytes(b"hello\n"), "not an LMDB", id="another file"),
    pytest.param(lambda path: os.truncate(path, 0), "empty", id="empty"),
    pytest.param(lambda path: os.truncate(path, 40_960), "40960 bytes", id="short"),
    pytest.param(lambda path: os.truncate(path, 50), "not an LMDB", id="very short"),
    pytest.param(replace_by_another_database, "not a", id="another database"),
]


class TestDamagedFile:
    @pytest.mark.parametrize("crashed", [False, True])
    @pytest.mark.parametrize(("damage", "said"), DAMAGES)
    def test_is_refused_with_a_remedy_and_left_in_place(
        self, store: Path, damage: Callable[[Path], None], said: str, crashed: bool
    ) -> None:
        if crashed:
            os.unlink(f"{store}-closed")
        damage(store)
        for power_safe in (False, True):
            with pytest.raises(Damaged) as refused:
                Map(str(store), power_safe=power_safe)
            assert str(store) in str(refused.value)
            told = str(refused.value)
            assert said in told or "when it was closed" in told or "beyond EOF" in told
            assert "copy" in str(refused.value)
        assert store.exists()

    def test_anywhere_is_found_if_the_map_was_closed(self, store: Path) -> None:
        intact, note = store.read_bytes(), Path(f"{store}-closed").read_bytes()
        used = len(intact.rstrip(b"\0"))
        chance = random.Random(1)
        break_leaves(store)
        with pytest.raises(Damaged, match="when it was closed"):
            Map(str(store))
        for _ in range(30):
            damaged = bytearray(intact)
            damaged[chance.randrange(used)] ^= 1 << chance.randrange(8)
            store.write_bytes(damaged)
            Path(f"{store}-closed").write_bytes(note)
            with pytest.raises(Damaged, match=r"closed|LMDB"):
                Map(str(store))
        store.write_bytes(intact)
        records = Map(str(store))
        assert len(contents(records)) == 2000 and records.note == b"note"
        records.close()

    def test_anywhere_on_a_disk_is_our_error_or_harmless_after_a_crash(self, store: Path) -> None:
        chance = seeded()
        intact = store.read_bytes()
        used = len(intact.rstrip(b"\0"))
        refused = 0
        for _ in range(60):
            store.write_bytes(intact)
            Path(f"{store}-closed").unlink(missing_ok=True)
            overwrite(
                store, chance.randrange(used), chance.randbytes(chance.choice([1, 8, 500, 5000]))
            )
            try:
                records = Map(str(store), power_safe=True)
                try:
                    contents(records)
                finally:
                    records.close()
            except (Damaged, OSError):
                refused += 1
        assert refused > 10


def test_a_map_that_was_killed_while_it_was_made_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "names-new").write_bytes(b"half")
    records = Map(str(tmp_path / "names"))
    change(records, [(b"a", b"1")])
    records.close()
    assert os.listdir(tmp_path) == ["names"]
