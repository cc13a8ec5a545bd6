"""Consumers of the replica hub (replica.py) that take their records one by one."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import trio

from ..kv import Event, KeyValue
from ..kv.faults import Faults

T = TypeVar("T")


class RecordKeeper(ABC):
    """Keeps the records of some kinds of keys. What is read here is as new as `Replica.applied`. Methods
    are called from inside the hub's loop, and so are listeners: they must not block and not raise. `faults`
    are told of records that make no sense."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self._keys: set[bytes] = set()  # all that there are
        self._moved = trio.lowlevel.ParkingLot()

    @abstractmethod
    def take(self, key: bytes, value: bytes | None, revision: int) -> None:
        """Take a record as it is since a revision; None: it was deleted. It may be the known one."""

    def load(self, records: Sequence[KeyValue], revision: int) -> None:
        """Take all records, at first or after a gap in the watch."""
        present = {record.key for record in records}
        # Deletions first: a mount's key, for instance, is never put twice.
        for key in sorted(self._keys - present):
            self.take(key, None, revision)
        for record in records:
            self.take(record.key, record.value, record.mod_revision)
        self._keys = present
        self.tell()

    def apply(self, revision: int, events: Sequence[Event]) -> None:
        for event in events:
            if event.value is None:
                self._keys.discard(event.key)
            else:
                self._keys.add(event.key)
            self.take(event.key, event.value, event.revision)
        self.tell()

    def tell(self) -> None:
        """Wake everybody who waits for a change."""
        self._moved.unpark_all()

    async def changed(self) -> None:
        """Wait for the next change of anything here."""
        await self._moved.park()


def call(listeners: Iterable[Callable[[T], None]], about: T) -> None:
    """Tell all listeners of a number or name."""
    for listener in listeners:
        listener(about)
