"""The claims of all mounts as etcd has them, kept up to date through the replica hub."""

from collections.abc import Sequence
from typing import NamedTuple

import trio

from ...kv import Event, KeyValue
from ...kv.faults import Faults
from ...model.records import CLAIM, FOLLOWED, WISH

# Follows a lease in the value of an exclusive claim.
EXCLUSIVE = b"x"


class Claim(NamedTuple):
    lease: int
    revision: int


class ClaimEntries:
    """A consumer of the replica hub: the claims of all mounts, and who waits for them to be given up. It
    comes after `Members`, which has the followers of directories."""

    prefixes: tuple[bytes, ...] = (CLAIM, WISH, FOLLOWED)

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self.claims: dict[int, Claim] = {}
        self.exclusive: dict[int, int] = {}  # directory -> lease
        self.wishes: dict[int, set[int]] = {}  # directory -> leases
        self.touched: set[int] = set()  # directories about which something changed
        self.is_followed_anew = False  # a directory, and with it all that is below
        self.changed = trio.lowlevel.ParkingLot()

    def load(self, records: Sequence[KeyValue], revision: int) -> None:
        self.claims.clear()
        self.exclusive.clear()
        self.wishes.clear()
        for record in records:
            self._take(record.key, record.value, record.mod_revision)
        self.changed.unpark_all()

    def apply(self, revision: int, events: Sequence[Event]) -> None:
        for event in events:
            self._take(event.key, event.value, event.revision)
        self.changed.unpark_all()

    def _take(self, key: bytes, value: bytes | None, revision: int) -> None:
        if key.startswith(FOLLOWED):
            self.is_followed_anew = True
            return
        directory = int.from_bytes(key[1:9], "big")
        self.touched.add(directory)
        if key.startswith(WISH):
            wishes, lease = self.wishes.setdefault(directory, set()), int.from_bytes(key[9:], "big")
            wishes.discard(lease) if value is None else wishes.add(lease)
            if not wishes:
                del self.wishes[directory]
            return
        self.exclusive.pop(directory, None)
        if value is None:
            self.claims.pop(directory, None)
        else:
            if len(value) < 8 or value[8:] not in (b"", EXCLUSIVE):
                self._faults.add(key, "it is no lease")  # and so nobody's claim: others delete it
            lease = int.from_bytes(value[:8], "big")
            self.claims[directory] = Claim(lease, revision)
            if value[8:] == EXCLUSIVE:
                self.exclusive[directory] = lease
