"""The lock tables of a mount: POSIX byte-range locks, and BSD locks on whole files.

The kernel asks us instead of its own lists, so these are the rules of fcntl(2) and flock(2), for
one host. The two kinds do not see each other: a mount has one LockTable and one FlockTable.

Waiters are all woken whenever a lock of their inode shrinks, and each tries again. A waiter parks
in the same step in which it found itself blocked, so no wakeup is lost, and one that is cancelled
gets no lock.
"""

import errno
import os
from collections.abc import Iterator
from fcntl import F_RDLCK, F_UNLCK, F_WRLCK
from typing import NamedTuple

from trio.lowlevel import ParkingLot

# The last byte a lock can cover; a lock up to here covers what is appended later, too.
LAST_BYTE = 2**63 - 1
# Of one owner on one inode. Every operation walks through them.
MAX_LOCKS = 65536


class Lock(NamedTuple):
    """A lock or a request for one: type is F_RDLCK, F_WRLCK or F_UNLCK, start and end inclusive."""

    type: int
    start: int
    end: int
    pid: int


class _Inode:
    """The locks of one inode: by owner, sorted, without overlap, neighbours of one type merged."""

    def __init__(self) -> None:
        self.held: dict[int, list[Lock]] = {}
        self.waiters = ParkingLot()


class LockTable:
    """POSIX locks by inode.

    The owner is a number that the kernel chose, one for each process (its table of open files).
    Locks of one owner never block each other.
    """

    def __init__(self) -> None:
        self._inodes: dict[int, _Inode] = {}
        # Requests that wait, by owner: several threads of one owner may.
        self._requests: dict[int, list[tuple[int, Lock]]] = {}

    def __len__(self) -> int:
        """Number of inodes with locks."""
        return len(self._inodes)

    def __contains__(self, ino: int) -> bool:
        """Whether anybody holds a lock on the inode."""
        return ino in self._inodes

    def test(self, ino: int, owner: int, lock: Lock) -> Lock | None:
        """A lock of somebody else that `lock` would have to wait for."""
        _validate(lock)
        return next((other for _, other in self._conflicts(ino, owner, lock)), None)

    def acquire(self, ino: int, owner: int, lock: Lock) -> None:
        """Set or, with F_UNLCK, remove a lock. Raises BlockingIOError (EAGAIN), ENOLCK, EINVAL."""
        if not self._try_acquire(ino, owner, lock):
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    async def acquire_wait(self, ino: int, owner: int, lock: Lock) -> None:
        """As `acquire`, but wait until the range is free.

        Raises OSError (EDEADLK) if that could only happen after this owner released something.
        """
        if self._try_acquire(ino, owner, lock):
            return
        request = (ino, lock)
        self._requests.setdefault(owner, []).append(request)
        try:
            while not self._try_acquire(ino, owner, lock):
                if self._waits_for_itself(owner, request):
                    raise OSError(errno.EDEADLK, os.strerror(errno.EDEADLK))
                await self._inodes[ino].waiters.park()
        finally:
            self._requests[owner].remove(request)
            if not self._requests[owner]:
                del self._requests[owner]

    def release_owner(self, ino: int, owner: int) -> None:
        """Remove every lock that `owner` has on the inode, as the last close does."""
        self._set(ino, owner, Lock(F_UNLCK, 0, LAST_BYTE, 0))

    def _try_acquire(self, ino: int, owner: int, lock: Lock) -> bool:
        _validate(lock)
        if any(self._conflicts(ino, owner, lock)):
            return False
        self._set(ino, owner, lock)
        return True

    def _conflicts(self, ino: int, owner: int, lock: Lock) -> Iterator[tuple[int, Lock]]:
        """Locks that block this request, with their owners."""
        inode = self._inodes.get(ino)
        if inode is None or lock.type == F_UNLCK:
            return
        for other_owner, locks in inode.held.items():
            if other_owner == owner:
                continue
            for other in locks:
                if other.start > lock.end:
                    break
                if other.end >= lock.start and F_WRLCK in (lock.type, other.type):
                    yield other_owner, other

    def _set(self, ino: int, owner: int, lock: Lock) -> None:
        inode = self._inodes.get(ino)
        before = inode.held.get(owner, []) if inode else []
        if lock.type == F_UNLCK and not before:
            return
        if inode is None:
            inode = self._inodes[ino] = _Inode()
        after = _combined(before, lock)
        if len(after) > MAX_LOCKS:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        if after:
            inode.held[owner] = after
        else:
            del inode.held[owner]
            if not inode.held:
                # Whoever waits here finds nothing in the way, and makes a new entry.
                del self._inodes[ino]
        if lock.type != F_WRLCK and before:
            inode.waiters.unpark_all()

    def _waits_for_itself(self, owner: int, request: tuple[int, Lock]) -> bool:
        """Whether the owners that block `request` wait, in the end, for `owner`."""
        reached: set[int] = set()
        unexplored = [(owner, request)]
        while unexplored:
            waiter, (ino, lock) = unexplored.pop()
            for blocker, _ in self._conflicts(ino, waiter, lock):
                if blocker == owner:
                    return True
                if blocker not in reached:
                    reached.add(blocker)
                    unexplored += [(blocker, other) for other in self._requests.get(blocker, ())]
        return False


class FlockTable(LockTable):
    """BSD locks: F_RDLCK is LOCK_SH, F_WRLCK is LOCK_EX, on the whole file whatever the range says.

    The owner stands for an open file description. A conversion gives the old lock up first and may
    then block or fail without it, as flock(2) does on Linux: two shared holders that both want to
    be exclusive do not wait for each other for ever. Deadlocks are not detected.
    """

    def test(self, ino: int, owner: int, lock: Lock) -> Lock | None:
        return super().test(ino, owner, _whole_file(lock))

    def _try_acquire(self, ino: int, owner: int, lock: Lock) -> bool:
        inode = self._inodes.get(ino)
        held = inode.held.get(owner) if inode else None
        if held and held[0].type != lock.type:
            self.release_owner(ino, owner)
        return super()._try_acquire(ino, owner, _whole_file(lock))

    def _waits_for_itself(self, owner: int, request: tuple[int, Lock]) -> bool:
        return False


def _whole_file(lock: Lock) -> Lock:
    return lock._replace(start=0, end=LAST_BYTE)


def _validate(lock: Lock) -> None:
    if not 0 <= lock.start <= lock.end <= LAST_BYTE or lock.type not in (F_RDLCK, F_WRLCK, F_UNLCK):
        raise OSError(errno.EINVAL, f"not a lock: {lock}")


def _combined(locks: list[Lock], new: Lock) -> list[Lock]:
    """What one owner holds after `new`: it replaces, splits, or joins what was there."""
    result = []
    joined = new
    for lock in locks:
        if lock.type == new.type and lock.start <= new.end + 1 and new.start <= lock.end + 1:
            start, end = min(joined.start, lock.start), max(joined.end, lock.end)
            joined = joined._replace(start=start, end=end)
            continue
        if lock.start < new.start:
            result.append(lock._replace(end=min(lock.end, new.start - 1)))
        if lock.end > new.end:
            result.append(lock._replace(start=max(lock.start, new.end + 1)))
    if new.type != F_UNLCK:
        result.append(joined)
    result.sort(key=lambda lock: lock.start)
    return result
