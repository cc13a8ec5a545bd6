"""The claims of hosts on the locks of one inode: the records in etcd, and the rules between them.

Nothing here knows of etcd: decisions are functions of the records. A locked inode has two kinds of keys.
The *guard* is empty. The *entry* of a mount is under its lease; only that mount may write it:

- sole: no other host has an entry, and this one grants locks from memory, until the file has not been
  locked for ten seconds.
- held: the ranges that processes of the host have locked, or more, never less.
- wanted: the locks that they ask for. It excludes nobody.
- asks, answers: some of them will not wait. A host in the way makes `held` exact and puts it with the
  revision of the asking entry as its answer. Only such an answer refuses a try.

The rules:

1. Growing (more `held`, or `sole`) puts the entry and the guard, and compares the guard's revision
   and the mount's session. A host grows only if that conflicts with no other entry that it knows.
   If it missed another's growth it missed the guard of that, and its transaction fails.
2. Shrinking is a plain put. Before it is sent, the host stops granting those locks.
3. A sole host that sees another entry grants nothing new, publishes stores through mappings, and
   puts the locks really held. After a second without others it may become sole again.
4. Nothing is granted under a growth before this host knows everything published up to its revision,
   and the file written in place shows it.
5. No lock for writing is given up before the bytes are published and changes of names are stored, or
   the holder was told that they are not.
6. Nothing is granted when the session is over by the host's own clock, which is before etcd removes
   its entries. Bytes are published in the session they were written in, or the publish finds that
   its process lost a lock.
7. The guard has no lease. Only a host that knows of no other entry deletes it, compared like
   growing. A guard that is left alone is removed by any mount that sees it.

Entries of dead hosts end with their leases, which wakes the hosts that wait; nothing is polled.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from fcntl import F_RDLCK, F_WRLCK
from typing import Annotated, NamedTuple

import msgspec

from .ranges import Range, fewer
from .records import Count, key_of

GUARD, ENTRY = b"l", b"L"
POSIX, FLOCK = 0, 1
# An entry is written anew with each of its changes, and sent to every mount.
CLAIMS_MAX = 1024


class Claim(NamedTuple):
    """Bytes that are locked: `table` is POSIX or FLOCK, `type` F_RDLCK or F_WRLCK, `end` inclusive."""

    table: Annotated[int, msgspec.Meta(ge=POSIX, le=FLOCK)]
    type: Annotated[int, msgspec.Meta(ge=F_RDLCK, le=F_WRLCK)]
    start: Count
    end: Count

    def conflicts(self, other: "Claim") -> bool:
        """Return whether two hosts cannot have both."""
        return (
            self.table == other.table
            and F_WRLCK in (self.type, other.type)
            and self.start <= other.end
            and other.start <= self.end
        )

    def includes(self, other: "Claim") -> bool:
        """Return whether a host that has this one may grant the other to a process."""
        return (
            self.table == other.table
            and self.type in (F_WRLCK, other.type)
            and self.start <= other.start
            and other.end <= self.end
        )


class Entry(msgspec.Struct, array_like=True, frozen=True):
    """One host's record of an inode. `sole`: no other host has any claim, so this one grants freely.
    `held`: the locks of its processes, at least. `wanted`: the locks that they ask for, which bind no
    other host. `asks`: some of these processes will not wait, so hosts in their way are to answer.
    `answers`: a revision of etcd; the asking entries up to it were answered, as `held` is exact since
    then."""

    sole: bool = False
    held: tuple[Claim, ...] = ()
    wanted: tuple[Claim, ...] = ()
    asks: bool = False
    answers: Count = 0

    def check(self) -> None:
        """Raise msgspec.ValidationError for more claims than a host makes."""
        if max(map(len, (self.held, self.wanted))) > 4 * CLAIMS_MAX:
            raise msgspec.ValidationError("it has too many claims")

    def __bool__(self) -> bool:
        return self.sole or bool(self.held or self.wanted)


NOTHING = Entry()


def guard_key(ino: int) -> bytes:
    """Return the key that every growth of a claim on the inode puts; without it there is no claim."""
    return key_of(GUARD, ino)


def entry_key(ino: int, lease: int) -> bytes:
    return key_of(ENTRY, lease, ino)


def parse_key(key: bytes) -> tuple[int, int]:
    """Return inode and lease; the lease is 0 for a guard."""
    first, second = int.from_bytes(key[1:9], "big"), int.from_bytes(key[9:17], "big")
    return (second, first) if key[:1] == ENTRY else (first, 0)


def is_covered(mine: Entry, claim: Claim) -> bool:
    """Return whether a host with this entry may grant a lock, as far as other hosts are concerned."""
    return mine.sole or any(held.includes(claim) for held in mine.held)


def is_blocked(others: Collection[Entry], claim: Claim) -> bool:
    """Return whether other hosts' entries forbid a claim."""
    return any(other.sole or any(held.conflicts(claim) for held in other.held) for other in others)


def merged(claims: Iterable[Claim]) -> tuple[Claim, ...]:
    """Return the fewest claims that include all these, no more than CLAIMS_MAX for each table and type:
    then bytes between them are claimed, too, the smallest gaps first."""
    found: dict[tuple[int, int], list[Range]] = {}
    for table, kind, start, end in sorted(claims):
        row = found.setdefault((table, kind), [])
        if row and start <= row[-1][1] + 1:
            row[-1] = row[-1][0], max(row[-1][1], end)
        else:
            row.append((start, end))
    rows = ((key, fewer(row, CLAIMS_MAX)) for key, row in found.items())
    return tuple(Claim(*key, *each) for key, row in rows for each in row)


class LockHolder(ABC):
    """The mount's side: the locks and writes of its processes."""

    @abstractmethod
    def held(self, ino: int) -> Iterable[Claim]:
        """Return the locks of this host's processes on an inode."""

    @abstractmethod
    async def publish(self, ino: int) -> None:
        """Publish what was written in place: another host may lock the file next. Raises OSError."""

    @abstractmethod
    async def released(self, ino: int) -> None:
        """Return when descriptors that were closed before the call hold no lock of the inode any more."""

    @abstractmethod
    async def refresh(self, ino: int) -> None:
        """Show the newest version: another host may have written it under the lock. Raises OSError."""

    @abstractmethod
    def lost(self) -> None:
        """Note that every lock is lost with the session."""

    @abstractmethod
    def check(self, pid: int) -> None:
        """Raise OSError EIO if a process that is about to publish has lost locks, and may not know it."""
