"""How a tree differs from records that were read anew, as events."""

from collections.abc import Iterable, Iterator

from ..kv import Event, KeyValue
from .events import time_of
from .inode import DAMAGED_INO, time_key
from .lookup import Names

# The revision of a name that is not stored yet.
_NOT_STORED = bytes(8)


def differences(tree: Names, records: Iterable[KeyValue], revision: int) -> list[Event]:
    """Return the events that make a tree what the records say, which are all records at a revision. What is
    known here alone stays."""
    events: list[Event] = []
    present: set[bytes] = set()
    for record in records:
        present.add(record.key)
        if _differs(tree, record):
            events.append(Event(record.mod_revision, record.key, record.value))
    events += [Event(revision, key, None) for key in _stored(tree) if key not in present]
    return events


def _differs(tree: Names, record: KeyValue) -> bool:
    kind, ino = record.key[:1], int.from_bytes(record.key[1:9], "big")
    if kind == b"i":
        inode = tree.inodes.get(ino)
        return inode is None or inode.revision != record.mod_revision or ino in tree.damaged
    if kind == b"d":
        name = record.key[9:]
        if tree.ino_behind(ino, name) == DAMAGED_INO:
            return True
        return tree.name_revision(ino, name) != record.mod_revision
    if kind == b"t":
        known = tree.records.get(time_key(ino))
        return known is None or time_of(known) != time_of(record.value)
    return True


def _stored(tree: Names) -> Iterator[bytes]:
    """Yield the keys of the tree's records in the engine."""
    for kind in (b"d", b"i", b"t"):
        for key, value in tree.records.range(kind, bytes([kind[0] + 1])):
            if kind != b"d" or value[8:] != _NOT_STORED:
                yield key
