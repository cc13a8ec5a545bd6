"""The locks of all hosts as etcd has them, kept up to date through the replica hub."""

import time
from collections.abc import Callable, Mapping

from ...cluster.record_keeper import RecordKeeper
from ...kv.faults import Faults
from ...model.lock_claims import ENTRY, GUARD, Entry, is_blocked, parse_key
from ...namespace.numbers import subvolume_of

_NONE: Mapping[int, Entry] = {}


class LockEntries(RecordKeeper):
    """Every host's entries, including this one's. `left_behind` tells since when (time.monotonic()) an
    inode has had a guard and no entry. `kept_to` as for Catalog: such a mount locks nothing elsewhere."""

    prefixes = (GUARD, ENTRY)

    def __init__(
        self, faults: Faults | None = None, kept_to: Callable[[int], int] = lambda lease: 0
    ) -> None:
        super().__init__(faults)
        self._kept_to = kept_to
        self._entries: dict[int, dict[int, Entry]] = {}  # inode -> lease -> entry
        self._revisions: dict[tuple[int, int], int] = {}  # (inode, lease) -> that of the entry
        self._guards: dict[int, int] = {}
        self.left_behind: dict[int, float] = {}
        self._touched: set[int] = set()  # inodes whose entries or guard changed

    def of(self, ino: int) -> Mapping[int, Entry]:
        """Return the entries of an inode, by the leases of the hosts."""
        return self._entries.get(ino, _NONE)

    def asked(self, ino: int, lease: int) -> int:
        """Return the last revision at which another host asked for a lock that the entry of this lease is
        in the way of, 0: none does."""
        entries = self.of(ino)
        mine = entries.get(lease)
        if mine is None:
            return 0
        asking = (
            other
            for other, entry in entries.items()
            if other != lease
            and entry.asks
            and any(is_blocked([mine], claim) for claim in entry.wanted)
        )
        return max((self._revisions[ino, other] for other in asking), default=0)

    def guard(self, ino: int) -> int:
        """Return the revision that put the guard of an inode, 0: there is none."""
        return self._guards.get(ino, 0)

    def take(self, key: bytes, value: bytes | None, revision: int) -> None:
        ino, lease = parse_key(key)
        self._touched.add(ino)
        if not lease:
            if value is None:
                self._guards.pop(ino, None)
            else:
                self._guards[ino] = revision
        elif value is None:
            entries = self._entries.get(ino)
            if entries is not None:
                entries.pop(lease, None)
                self._revisions.pop((ino, lease), None)
                if not entries:
                    del self._entries[ino]
        elif self._kept_to(lease) not in (0, subvolume_of(ino)):
            self.faults.add(key, "its mount is kept to another directory")
        else:
            entry = self.faults.sound(key, value, Entry)
            if entry is None:
                entry = Entry(sole=True)  # it is not known what is locked: nobody can lock the file
            self._entries.setdefault(ino, {})[lease] = entry
            self._revisions[ino, lease] = revision
        if ino in self._guards and ino not in self._entries:
            self.left_behind.setdefault(ino, time.monotonic())
        else:
            self.left_behind.pop(ino, None)
