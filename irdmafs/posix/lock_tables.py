"""The lock tables of a mount: POSIX byte-range locks, and BSD locks on whole files.

The kernel asks us instead of its own lists, so these are the rules of fcntl(2) and flock(2), for
one host. The two kinds do not see each other: a mount has one LockTable and one FlockTable.

Checking whether a lock is free takes the logarithm of the number of locks, for any number of owners: the
conflicting spans are counted for all owners and for the one that asks, and compared. So an owner of many
locks does not slow others down. Waiters get their locks in the order in which they began to wait, as far as
the locks are compatible.
"""

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from fcntl import F_RDLCK, F_UNLCK, F_WRLCK
from typing import NamedTuple

import trio

from ..backend.model.lock_claims import FLOCK, POSIX
from .ranges import Overlaps, Ranges

# The last byte a lock can cover; a lock up to here covers what is appended later, too.
LAST_BYTE = 2**63 - 1
# One user may hold so many on a mount.
LOCKS_OF_USER_MAX = 65536
# A search for a deadlock looks at so many owners of locks, 2 us each: all users wait meanwhile.
_LOOKS_MAX = 1024
_REMEMBERED_MAX = 65536


class Lock(NamedTuple):
    """A lock or a request for one: type is F_RDLCK, F_WRLCK or F_UNLCK, start and end inclusive."""

    type: int
    start: int
    end: int
    pid: int
    uid: int = 0


@dataclass(slots=True, eq=False)
class _Owner:
    """The locks that one owner holds on an inode. No byte is in both sets. `lost`: other hosts do not heed
    them, those of this host still do."""

    uid: int
    pid: int = 0
    lost: bool = False
    reads: Ranges = field(default_factory=Ranges)
    writes: Ranges = field(default_factory=Ranges)

    def __len__(self) -> int:
        return len(self.reads) + len(self.writes)

    def first(self, lock: Lock) -> Lock | None:
        """Return the first lock that is in the way of another owner's request."""
        found = self.writes.first(lock.start, lock.end)
        kind = F_WRLCK
        if lock.type == F_WRLCK:
            read = self.reads.first(lock.start, lock.end)
            if read is not None and (found is None or read < found):
                found, kind = read, F_RDLCK
        return Lock(kind, *found, self.pid, self.uid) if found is not None else None


# Has no locks, anywhere.
_NOBODY = _Owner(0)


@dataclass(slots=True, eq=False)
class _Waiter:
    """A request that waits. `woken`: it may try, and nobody behind it who would be in its way."""

    owner: int
    lock: Lock
    event: trio.Event = field(default_factory=trio.Event)
    woken: bool = False

    def wake(self) -> None:
        self.woken = True
        self.event.set()


@dataclass(slots=True, eq=False)
class _Inode:
    """The locks of one inode: by owner, and of all owners together."""

    owners: dict[int, _Owner] = field(default_factory=dict)
    reads: Overlaps = field(default_factory=Overlaps)
    writes: Overlaps = field(default_factory=Overlaps)
    waiters: dict[_Waiter, None] = field(default_factory=dict)

    def conflicts(self, owner: int, lock: Lock) -> bool:
        """Return whether others hold what is in the way of a request."""
        mine = self.owners.get(owner, _NOBODY)
        span = lock.start, lock.end
        if self.writes.count(*span) > mine.writes.count(*span):
            return True
        return lock.type == F_WRLCK and self.reads.count(*span) > mine.reads.count(*span)

    def wake_soon(self) -> None:
        """Do as `_wake` soon: once, however many locks are given up meanwhile."""
        trio.lowlevel.current_trio_token().run_sync_soon(self._wake, idempotent=True)

    def _wake(self) -> None:
        """Wake the waiters that nothing is in the way of, but none that another one, woken earlier, is."""
        ahead = _Inode()
        for waiter in sorted(self.waiters, key=lambda waiter: not waiter.woken):
            owner, lock = waiter.owner, waiter.lock
            if waiter.woken or not (self.conflicts(owner, lock) or ahead.conflicts(owner, lock)):
                waiter.wake()
                taken = ahead.writes if lock.type == F_WRLCK else ahead.reads
                taken.replace((), ((lock.start, lock.end),))


# One that nobody has locked or waits for.
_UNLOCKED = _Inode()


class LockTable:
    """POSIX locks by inode.

    The owner is a number that the kernel chose, one for each process (its table of open files).
    Locks of one owner never block each other.
    """

    kind = POSIX

    def __init__(self) -> None:
        # Tables of inodes that have locks or waiters.
        self.inodes: dict[int, _Inode] = {}
        # Requests that wait, by owner, and their inodes: several threads of one owner may.
        self._waiting: dict[int, dict[_Waiter, int]] = {}
        self._of_user: dict[int, int] = {}
        # Inodes that had a lock of late, oldest first.
        self._remembered: dict[int, None] = {}

    def is_used(self, ino: int) -> bool:
        """Return whether the inode is one of those that get locked."""
        return ino in self._remembered or ino in self.inodes

    def count(self) -> int:
        """Return the number of locks that are held."""
        return sum(self._of_user.values())

    def conflicts(self, ino: int, owner: int, lock: Lock) -> bool:
        """Return whether `lock` would have to wait for somebody else's."""
        return self.inodes.get(ino, _UNLOCKED).conflicts(owner, lock)

    def blockers(self, ino: int, owner: int, lock: Lock) -> set[int]:
        """Return the owners that `lock` would have to wait for."""
        return {other for other, _ in self._conflicts(ino, owner, lock)}

    def holds(self, ino: int, owner: int) -> bool:
        """Return whether an owner has locks on the inode."""
        return owner in self.inodes.get(ino, _UNLOCKED).owners

    def _held(self, ino: int, owner: int) -> _Owner:
        return self.inodes.get(ino, _UNLOCKED).owners.get(owner, _NOBODY)

    def writes(self, ino: int, owner: int, lock: Lock) -> bool:
        """Return whether an owner has some of these bytes locked for writing."""
        return self._held(ino, owner).writes.count(lock.start, lock.end) > 0

    def held(self, ino: int) -> Iterator[Lock]:
        """Yield all locks on an inode that are not lost."""
        for owner in self.inodes.get(ino, _UNLOCKED).owners.values():
            if not owner.lost:
                for kind, ranges in ((F_RDLCK, owner.reads), (F_WRLCK, owner.writes)):
                    for start, end in ranges:
                        yield Lock(kind, start, end, owner.pid, owner.uid)

    def lose(self) -> Iterator[tuple[int, int, bool]]:
        """Mark every lock as lost. Yield inode and process of each owner, and if some were for writing."""
        for ino, inode in self.inodes.items():
            for held in inode.owners.values():
                if not held.lost:
                    held.lost = True
                    yield ino, held.pid, bool(held.writes)

    def is_lost(self, ino: int, owner: int) -> bool:
        """Return whether an owner had locks on the inode, and lost them."""
        return self._held(ino, owner).lost

    def release_lost(self, ino: int, pid: int) -> None:
        """Remove the locks on an inode that a process lost."""
        for owner, held in list(self.inodes.get(ino, _UNLOCKED).owners.items()):
            if held.lost and held.pid == pid:
                self.release_owner(ino, owner)

    def test(self, ino: int, owner: int, lock: Lock) -> Lock | None:
        """Return a lock of somebody else that `lock` would have to wait for."""
        _validate(lock)
        return next((other for _, other in self._conflicts(ino, owner, lock)), None)

    def acquire(self, ino: int, owner: int, lock: Lock) -> None:
        """Set or, with F_UNLCK, remove a lock. Raises BlockingIOError (EAGAIN), ENOLCK, EINVAL."""
        _validate(lock)
        if lock.type != F_UNLCK:
            if self.conflicts(ino, owner, lock):
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            if self.is_lost(ino, owner):
                self.release_owner(ino, owner)
        self._set(ino, owner, lock)

    async def wait_free(self, ino: int, owner: int, lock: Lock) -> None:
        """Wait for a moment at which the range is free. Raises OSError EDEADLK if it can only become free
        after this owner releases a lock.

        A caller that does not take the lock at once afterwards lets others have it.
        """
        inode = self.inodes.get(ino, _UNLOCKED)
        if not inode.conflicts(owner, lock):
            return
        waiter = _Waiter(owner, lock)
        requests = self._waiting.setdefault(owner, {})
        requests[waiter] = ino
        inode.waiters[waiter] = None
        try:
            if self._waits_for_itself(waiter):
                raise OSError(errno.EDEADLK, os.strerror(errno.EDEADLK))
            await waiter.event.wait()
        finally:
            del requests[waiter], inode.waiters[waiter]
            if not requests:
                del self._waiting[owner]
            self._tidy(ino, inode)
            if waiter.woken:
                # The next in line may have been passed over for it.
                inode.wake_soon()

    def release_owner(self, ino: int, owner: int) -> None:
        """Remove every lock that `owner` has on the inode, as the last close does."""
        if self.holds(ino, owner):
            self._set(ino, owner, Lock(F_UNLCK, 0, LAST_BYTE, 0))

    def _conflicts(self, ino: int, owner: int, lock: Lock) -> Iterator[tuple[int, Lock]]:
        """Yield the owners that block this request, each with the first lock that does."""
        inode = self.inodes.get(ino, _UNLOCKED)
        if lock.type == F_UNLCK or not inode.conflicts(owner, lock):
            return
        for other, held in inode.owners.items():
            if other != owner and (found := held.first(lock)) is not None:
                yield other, found

    def _set(self, ino: int, owner: int, lock: Lock) -> None:
        inode = self.inodes.get(ino)
        held = self._held(ino, owner)
        span = lock.start, lock.end
        if held is _NOBODY:
            if lock.type == F_UNLCK:
                return
            held = _Owner(lock.uid)
        reads = (held.reads.adding if lock.type == F_RDLCK else held.reads.removing)(*span)
        writes = (held.writes.adding if lock.type == F_WRLCK else held.writes.removing)(*span)
        growth = reads.growth + writes.growth
        count = self._of_user.get(held.uid, 0) + growth
        if growth > 0 and count > LOCKS_OF_USER_MAX:
            raise OSError(errno.ENOLCK, f"user {held.uid} holds {LOCKS_OF_USER_MAX} locks here")
        if inode is None:
            inode = self.inodes[ino] = _Inode()
            self._remembered.pop(ino, None)
            self._remembered[ino] = None
            if len(self._remembered) > _REMEMBERED_MAX:
                del self._remembered[next(iter(self._remembered))]
        inode.owners[owner] = held
        inode.reads.replace(held.reads.apply(reads), reads.after)
        inode.writes.replace(held.writes.apply(writes), writes.after)
        self._of_user[held.uid] = count
        if not count:
            del self._of_user[held.uid]
        if lock.type != F_UNLCK:
            held.pid = lock.pid
        if not held:
            del inode.owners[owner]
        if lock.type != F_WRLCK and inode.waiters:
            inode.wake_soon()
        self._tidy(ino, inode)

    def _tidy(self, ino: int, inode: _Inode) -> None:
        if not inode.owners and not inode.waiters:
            del self.inodes[ino]

    def _waits_for_itself(self, waiter: _Waiter) -> bool:
        """Return whether the owners that block a request wait, in the end, for its own. Gives up, as Linux
        does, when that takes long: nobody is told then."""
        reached, looks = {waiter.owner}, 0
        unexplored = [(waiter, self._waiting[waiter.owner][waiter])]
        while unexplored:
            one, ino = unexplored.pop()
            for blocker, held in self.inodes[ino].owners.items():
                looks += 1
                if looks > _LOOKS_MAX:
                    return False
                if blocker == one.owner or held.first(one.lock) is None:
                    continue
                if blocker == waiter.owner:
                    return True
                if blocker not in reached:
                    reached.add(blocker)
                    unexplored += self._waiting.get(blocker, {}).items()
        return False


class FlockTable(LockTable):
    """BSD locks: F_RDLCK is LOCK_SH, F_WRLCK is LOCK_EX, and the range is the whole file.

    The owner stands for an open file description. A conversion gives the old lock up first and may
    then block or fail without it, as flock(2) does on Linux: two shared holders that both want to
    be exclusive do not wait for each other for ever. Deadlocks are not detected.
    """

    kind = FLOCK

    def acquire(self, ino: int, owner: int, lock: Lock) -> None:
        if bool(self._held(ino, owner).writes) != (lock.type == F_WRLCK):
            self.release_owner(ino, owner)
        super().acquire(ino, owner, lock)

    def _waits_for_itself(self, waiter: _Waiter) -> bool:
        return False


def _validate(lock: Lock) -> None:
    if not 0 <= lock.start <= lock.end <= LAST_BYTE or lock.type not in (F_RDLCK, F_WRLCK, F_UNLCK):
        raise OSError(errno.EINVAL, f"not a lock: {lock}")
