"""The smallest engine of one process: a dict, which is there again when the same place is opened again."""

from collections.abc import Sequence

import trio

from irdmafs.backend.kv import Delete, KeyValue, Put

__all__ = ["MemoryEngine", "Place"]


class Place:
    """Where an engine keeps its keys while it is closed."""

    def __init__(self) -> None:
        self.keys: dict[bytes, KeyValue] = {}
        self.revision = 0


class MemoryEngine:
    """An OwnEngine that is lost with its process. Everything is durable at once, as far as it can be."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._closed = False

    async def range(self, start: bytes, end: bytes) -> list[KeyValue]:
        self._check_open()
        found = self._place.keys
        return [found[key] for key in sorted(found) if start <= key < end]

    async def transact(
        self, operations: Sequence[Put | Delete], *, durable: bool = True, urgent: bool = False
    ) -> int:
        self._check_open()
        place = self._place
        if len({operation.key for operation in operations}) < len(operations):
            raise ValueError("a key may occur in one operation only")
        changes = [
            one for one in operations if isinstance(one, Put) or place.keys.get(one.key) is not None
        ]
        place.revision += bool(changes)
        for change in changes:
            if isinstance(change, Put):
                place.keys[change.key] = KeyValue(change.key, change.value, place.revision)
            else:
                del place.keys[change.key]
        return place.revision

    async def idle(self) -> None:
        self._check_open()

    async def flush(self) -> None:
        self._check_open()

    async def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError
