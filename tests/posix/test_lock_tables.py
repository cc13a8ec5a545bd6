"""The lock tables: fcntl(2) against a model that knows every byte, waiting, deadlocks, flock(2)."""

import errno
from bisect import bisect_left
from fcntl import F_RDLCK, F_UNLCK, F_WRLCK
from typing import Any
from unittest.mock import patch

import pytest
import trio
import trio.testing
from harness.errors import fails_with
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from irdmafs.posix.lock_tables import LAST_BYTE, LOCKS_OF_USER_MAX, FlockTable, Lock, LockTable

INO = 7


def read(start: int = 0, end: int = LAST_BYTE, pid: int = 1) -> Lock:
    return Lock(F_RDLCK, start, end, pid)


def write(start: int = 0, end: int = LAST_BYTE, pid: int = 1) -> Lock:
    return Lock(F_WRLCK, start, end, pid)


def unlock(start: int = 0, end: int = LAST_BYTE) -> Lock:
    return Lock(F_UNLCK, start, end, 0)


async def acquire_wait(table: LockTable, ino: int, owner: int, lock: Lock) -> None:
    """Wait for a lock as a mount does."""
    while True:
        try:
            table.acquire(ino, owner, lock)
            return
        except BlockingIOError:
            await table.wait_free(ino, owner, lock)


class LocksAgainstEveryByte(RuleBasedStateMachine):
    """The model has one lock type for each (inode, owner, byte)."""

    BYTES = 12
    inodes = st.integers(1, 2)
    owners = st.integers(1, 3)
    # The last byte of the model stands for everything up to the end of the file.
    ranges = st.tuples(st.integers(0, BYTES - 1), st.integers(0, BYTES - 1)).map(sorted)
    types = st.sampled_from([F_RDLCK, F_WRLCK, F_UNLCK])

    def __init__(self) -> None:
        super().__init__()
        self.table = LockTable()
        self.model: dict[tuple[int, int, int], int] = {}

    def lock(self, type_: int, span: list[int], owner: int) -> Lock:
        end = LAST_BYTE if span[1] == self.BYTES - 1 else span[1]
        return Lock(type_, span[0], end, owner + 100)

    def blockers(self, ino: int, owner: int, type_: int, span: list[int]) -> set[tuple[int, int]]:
        """(owner, byte) of what is in the way."""
        return {
            (other, byte)
            for (held_ino, other, byte), held in self.model.items()
            if held_ino == ino
            and other != owner
            and span[0] <= byte <= span[1]
            and type_ != F_UNLCK
            and F_WRLCK in (type_, held)
        }

    @rule(ino=inodes, owner=owners, type_=types, span=ranges)
    def acquire(self, ino: int, owner: int, type_: int, span: list[int]) -> None:
        lock = self.lock(type_, span, owner)
        if self.blockers(ino, owner, type_, span):
            with fails_with(errno.EAGAIN):
                self.table.acquire(ino, owner, lock)
            return
        self.table.acquire(ino, owner, lock)
        for byte in range(span[0], span[1] + 1):
            if type_ == F_UNLCK:
                self.model.pop((ino, owner, byte), None)
            else:
                self.model[ino, owner, byte] = type_

    @rule(ino=inodes, owner=owners, type_=types, span=ranges)
    def test(self, ino: int, owner: int, type_: int, span: list[int]) -> None:
        found = self.table.test(ino, owner, self.lock(type_, span, owner))
        blockers = self.blockers(ino, owner, type_, span)
        assert (found is None) == (not blockers)
        if found:
            other = found.pid - 100
            last = min(found.end, self.BYTES - 1)
            held = {self.model.get((ino, other, byte)) for byte in range(found.start, last + 1)}
            assert held == {found.type}, "it is held by that owner, whole"
            beside = [self.model.get((ino, other, byte)) for byte in (found.start - 1, last + 1)]
            assert found.type not in beside, "neighbours of one type are one lock"
            assert any(found.start <= byte <= last for who, byte in blockers if who == other)

    @rule(ino=inodes, owner=owners)
    def release_owner(self, ino: int, owner: int) -> None:
        self.table.release_owner(ino, owner)
        for byte in range(self.BYTES):
            self.model.pop((ino, owner, byte), None)

    @invariant()
    def has_no_entry_without_locks(self) -> None:
        assert len(self.table.inodes) == len({ino for ino, _, _ in self.model})

    @invariant()
    def every_byte_is_locked_as_the_model_says(self) -> None:
        for ino in (1, 2):
            for byte in range(self.BYTES):
                for type_ in (F_RDLCK, F_WRLCK):
                    span = [byte, byte]
                    found = self.table.test(ino, 0, self.lock(type_, span, 0))
                    assert (found is None) == (not self.blockers(ino, 0, type_, span))

    def teardown(self) -> None:
        for ino in (1, 2):
            for owner in (1, 2, 3):
                self.table.release_owner(ino, owner)
        assert len(self.table.inodes) == 0


TestLocksAgainstEveryByte = LocksAgainstEveryByte.TestCase
TestLocksAgainstEveryByte.settings = settings(
    max_examples=25, stateful_step_count=40, deadline=None
)


@pytest.mark.parametrize(
    "lock", [write(-1, 5), write(5, 4), write(0, LAST_BYTE + 1), Lock(77, 0, 1, 1)]
)
def test_nonsense_is_refused(lock: Lock) -> None:
    table = LockTable()
    with pytest.raises(OSError, match="not a lock") as refused:
        table.acquire(INO, 1, lock)
    assert refused.value.errno == errno.EINVAL
    assert not table.inodes


def test_a_user_has_a_limited_number_of_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LOCKS_OF_USER_MAX > 1000
    monkeypatch.setattr("irdmafs.posix.lock_tables.LOCKS_OF_USER_MAX", 3)
    table = LockTable()
    for byte, ino, owner in ((0, INO, 1), (2, INO, 2), (4, INO + 1, 1)):
        table.acquire(ino, owner, write(byte, byte))
    assert table.count() == 3
    with fails_with(errno.ENOLCK):
        table.acquire(INO, 1, write(6, 6))
    assert table.test(INO, 2, read(6, 6)) is None
    table.acquire(INO, 1, write(0, 1))
    table.acquire(INO, 3, write(9, 9)._replace(uid=1))
    table.release_owner(INO, 2)
    table.acquire(INO, 1, write(6, 6))


def test_many_locks_of_others_are_not_walked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by what is compared: the spans that a request makes the table look at."""
    table = LockTable()
    for number in range(3000):
        table.acquire(
            INO, number % 50, Lock((F_RDLCK, F_WRLCK)[number % 2], 2 * number, 2 * number, 1)
        )

    class Counting(int):
        looked_at = 0

        def __lt__(self, other: int) -> bool:
            Counting.looked_at += 1
            return int(self) < int(other)

        def __gt__(self, other: int) -> bool:
            Counting.looked_at += 1
            return int(self) > int(other)

    for byte in range(1, 1001, 2):
        table.acquire(INO, 99, Lock(F_WRLCK, Counting(byte), Counting(byte), 1))
        table.acquire(INO, 99, Lock(F_UNLCK, Counting(byte), Counting(byte), 1))
    assert Counting.looked_at / 1000 < 150
    with pytest.raises(BlockingIOError):
        table.acquire(INO, 99, write())


async def test_who_waits_does_not_walk_through_all_others() -> None:
    """Each waits for all owners of the layer below. Counted by the looks at what is locked."""
    table, owners = LockTable(), range(100)
    for owner in owners:
        table.acquire(INO, owner, read(owner // 10, owner // 10))
    looks = [0]

    def look(*arguments: Any) -> int:
        looks[0] += 1
        return bisect_left(*arguments)

    with patch("irdmafs.posix.ranges.bisect_left", look):
        async with trio.open_nursery() as nursery:
            for owner in owners[10:]:
                below = owner // 10 - 1
                nursery.start_soon(acquire_wait, table, INO, owner, write(below, below))
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
    assert looks[0] < 2100 * len(owners)


async def test_waiters_that_cannot_have_it_stay_asleep() -> None:
    table = LockTable()
    table.acquire(INO, 1, write())
    order: list[int] = []

    async def take(owner: int, lock: Lock) -> None:
        await acquire_wait(table, INO, owner, lock)
        order.append(owner)

    async with trio.open_nursery() as nursery:
        for owner, lock in ((2, read()), (3, write()), (4, read())):
            nursery.start_soon(take, owner, lock)
            await trio.testing.wait_all_tasks_blocked()
        table.release_owner(INO, 1)
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(order) == [2, 4], "readers share it"
        table.release_owner(INO, 2)
        await trio.testing.wait_all_tasks_blocked()
        assert len(order) == 2
        table.release_owner(INO, 4)
    assert order[2:] == [3]


@pytest.mark.parametrize("given", [unlock(50, 50), read(50, 50), unlock(LAST_BYTE, LAST_BYTE)])
async def test_a_waiter_gets_the_part_that_is_unlocked_or_downgraded(given: Lock) -> None:
    table = LockTable()
    table.acquire(INO, 1, write())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(acquire_wait, table, INO, 2, read(given.start, given.end))
        await trio.testing.wait_all_tasks_blocked()
        table.acquire(INO, 1, given)
    assert table.test(INO, 3, write(given.start, given.end)) is not None


@pytest.mark.parametrize("kind", [LockTable, FlockTable])
async def test_no_wakeup_is_lost_among_many_waiters(kind: type[LockTable]) -> None:
    table = kind()
    inside = passed = 0

    async def take_turns(owner: int) -> None:
        nonlocal inside, passed
        for _ in range(20):
            await acquire_wait(table, INO, owner, write())
            inside += 1
            assert inside == 1
            await trio.lowlevel.checkpoint()
            inside -= 1
            passed += 1
            table.release_owner(INO, owner)

    async with trio.open_nursery() as nursery:
        for owner in range(20):
            nursery.start_soon(take_turns, owner)
    assert passed == 400
    assert not table.inodes


@pytest.mark.parametrize("kind", [LockTable, FlockTable])
async def test_a_cancelled_waiter_gets_nothing_and_holds_nobody_up(kind: type[LockTable]) -> None:
    table = kind()
    table.acquire(INO, 1, write())
    scope = trio.CancelScope()

    async def wait_until_cancelled() -> None:
        with scope:
            await acquire_wait(table, INO, 2, write())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait_until_cancelled)
        nursery.start_soon(acquire_wait, table, INO, 3, write(pid=3))
        await trio.testing.wait_all_tasks_blocked()
        scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        table.release_owner(INO, 1)
    assert table.test(INO, 4, read()) == write(pid=3)
    table.release_owner(INO, 3)
    assert not table.inodes


async def test_a_circle_of_waiting_owners_is_refused_and_no_chain() -> None:
    table = LockTable()
    for owner in range(4):
        table.acquire(INO + owner, owner, write())
    async with trio.open_nursery() as nursery:
        for other in range(10, 1500):  # wait for something else
            nursery.start_soon(acquire_wait, table, INO, other, read())
        nursery.start_soon(acquire_wait, table, INO + 3, 2, read())
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(acquire_wait, table, INO + 2, 1, write())
        await trio.testing.wait_all_tasks_blocked()
        with fails_with(errno.EDEADLK):
            await acquire_wait(table, INO + 1, 3, write())
        table.release_owner(INO + 3, 3)
        await trio.testing.wait_all_tasks_blocked()
        table.release_owner(INO + 2, 2)
        table.release_owner(INO, 0)
    # Nobody waits any more: the same request is no circle now.
    table.release_owner(INO + 1, 1)
    await acquire_wait(table, INO + 1, 3, write())


@pytest.mark.parametrize("kind", [LockTable, FlockTable])
async def test_two_upgrades_are_a_deadlock_unless_with_flock(kind: type[LockTable]) -> None:
    table, errors = kind(), list[int | None]()

    async def upgrade(owner: int) -> None:
        try:
            await acquire_wait(table, INO, owner, write())
        except OSError as error:
            errors.append(error.errno)
        table.release_owner(INO, owner)

    async with trio.open_nursery() as nursery:
        for owner in (1, 2):
            table.acquire(INO, owner, read())
            nursery.start_soon(upgrade, owner)
    assert errors == ([errno.EDEADLK] if kind is LockTable else [])
    assert not table.inodes
