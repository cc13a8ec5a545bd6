"""Changes of a tree by the events of a shared engine's watch, or by records that are read anew.

Other hosts made them. Hosts that follow the rules make no records that a tree cannot have; those of one
that does not are found here, each by itself, before somebody walks up from a directory, for example, and
never arrives (docs/security.md, "Sensible values").
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from ..kv import Event, KeyValue
from ..model.records import NEXT_INO_KEY, NEXT_INO_OF
from .inode import DAMAGED_INO, FIRST_VIRTUAL_INO, ROOT_INO, Inode, inode_key, is_name, nearest_time
from .lookup import Names
from .numbers import SUBVOLUMES, belongs

# Called with a key, what is wrong with its record, and the value.
Complain = Callable[[bytes, str, bytes], None]
# A parent, a name, and the inode that it leads to from now on, 0: none.
_Name = TypeVar("_Name", bound=tuple[int, bytes, int, *tuple[int, ...]])
# The revision of a name that is not stored yet.
_NOT_STORED = bytes(8)
# The beginning of a name whose record is damaged.
_DAMAGED = DAMAGED_INO.to_bytes(8, "big")


class Listener(Protocol):
    """Called with every change that the watch yields after the first load, also those of this process,
    after the whole transaction is applied. Must not block and not raise."""

    def inode_changed(self, old: Inode | None, new: Inode | None) -> None:
        """Called with the inode before and after; None: it did not exist, or was removed."""

    def name_changed(self, parent: int, name: bytes, old_ino: int, new_ino: int) -> None:
        """Called with the inode numbers before and after; 0: there was no such name, or it was removed."""

    def kept(self) -> None:
        """Called after a change of this process that is known here alone. Other changes are followed by the
        end of their transaction."""


class Changes(NamedTuple):
    """`times` are those of directories, None: the inode has them from now on. `inodes` come with their
    records. `names` are parent, name, inode (0: the name is removed) and revision. `damaged` are the
    numbers and revisions of inodes whose record is that. `gone` are inodes without a record. `blocks` are
    the values and revisions of records of free inode numbers, by subvolume."""

    times: list[tuple[int, int | None]]
    damaged: list[tuple[int, int]]
    inodes: list[tuple[Inode, bytes]]
    names: list[tuple[int, bytes, int, int]]
    gone: list[int]
    blocks: dict[int, tuple[int, int]]


def changes_of(events: Iterable[Event], complain: Complain) -> Changes:
    """Return the changes of events. `complain` is told of each record that makes no sense."""
    found = Changes([], [], [], [], [], {})
    for revision, key, value in events:
        kind, ino = key[:1], int.from_bytes(key[1:9], "big")
        if key == NEXT_INO_KEY or (kind == NEXT_INO_OF and ino in SUBVOLUMES):
            # No number, if it is damaged or gone: the tree finds one.
            told = int.from_bytes(value, "big") if value and len(value) == 8 else 0
            found.blocks[ino or ROOT_INO] = told, revision
        elif not _can_be(kind, ino, key, value):
            if value is not None or key == inode_key(ROOT_INO):
                complain(key, "no tree has such a record, or lacks it", value or b"")
        elif kind == b"d":
            target = int.from_bytes(value, "big") if value is not None else 0
            if value is not None and (
                len(value) != 8
                or not 0 < target < FIRST_VIRTUAL_INO
                or not (ino | target < SUBVOLUMES.start or belongs(target, ino))
            ):
                complain(key, "it leads to no inode that can be there", b"")
                target = DAMAGED_INO
            found.names.append((ino, key[9:], target, revision))
        elif kind == b"t":
            found.times.append((ino, time_of(value) if value is not None else None))
        elif value is None:
            found.gone.append(ino)
        else:
            try:
                found.inodes.append((Inode.decode(ino, value, revision), value))
            except msgspec.DecodeError as error:
                complain(key, str(error), value)
                found.damaged.append((ino, revision))
    return found


def _can_be(kind: bytes, ino: int, key: bytes, value: bytes | None) -> bool:
    """Return whether a tree can have a record, or lose one, of this kind, inode and key."""
    name = key[9:]
    if kind == NEXT_INO_OF or not 0 < ino < FIRST_VIRTUAL_INO or len(key) < 9:
        return False
    if kind == b"i":
        return not name and not (ino == ROOT_INO and value is None)
    if kind == b"d":
        return is_name(name)
    return not name and (value is None or len(value) == 8)


def time_of(value: bytes) -> int:
    """Return the time of a record."""
    return nearest_time(int.from_bytes(value, "big"))


def removals_first(names: Sequence[_Name]) -> Sequence[_Name]:
    """Return names in the order in which an inode that is renamed has one of them at a time."""
    return sorted(names, key=lambda name: name[2] != 0)


def load_order(records: Iterable[KeyValue]) -> Iterator[KeyValue]:
    """Yield records in the order in which a tree takes them with the least work: directories, then each
    inode just before the first of its names, and the rest."""
    left = {record.key: record for record in records}
    names = [record for key, record in left.items() if key.startswith(b"d")]
    for key in dict.fromkeys(b"i" + name.key[1:9] for name in names):
        if key in left:
            yield left.pop(key)
    for name in names:
        if (key := b"i" + name.value) in left:
            yield left.pop(key)
        yield left.pop(name.key)
    yield from left.values()


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
    key = record.key
    kind, ino = key[:1], int.from_bytes(key[1:9], "big")
    known = tree.records.get(key) if _can_be(kind, ino, key, record.value) else None
    if known is None:
        return True
    revision = record.mod_revision.to_bytes(8, "big")
    if kind == b"i":
        return known[:8] != revision or ino in tree.damaged
    if kind == b"d":
        return known != record.value + revision or known.startswith(_DAMAGED)
    return time_of(known) != time_of(record.value)


def _stored(tree: Names) -> Iterator[bytes]:
    """Yield the keys of the tree's records in the engine."""
    for kind in (b"d", b"i", b"t"):
        for key, value in tree.records.range(kind, bytes([kind[0] + 1])):
            if kind != b"d" or value[8:] != _NOT_STORED:
                yield key


def misplaced(tree: Names, linked: Iterable[int]) -> Iterator[tuple[int, tuple[int, bytes]]]:
    """Yield, of the directories that were just given a name, those that have a second one, or lie below
    themselves, with that name. The caller has to remove it before it asks for the next one."""
    linked = dict.fromkeys(linked)
    for ino in linked:
        names = tree.names_of(ino)
        # The one that came first is the right one; of two in one transaction, whichever.
        names.sort(key=lambda name: (tree.name_revision(*name), name))
        for name in names[1:]:
            yield ino, name
    sound: set[int] = set()
    for ino in linked:
        has_names = ino in tree.known.unread or not tree.has_no_known_name(ino)
        if ino == ROOT_INO or (has_names and _lies_below_itself(tree, ino, sound)):
            for name in tree.names_of(ino):
                yield ino, name


def _lies_below_itself(tree: Names, ino: int, sound: set[int]) -> bool:
    """`sound`: directories below which this was found not to be so. They get company."""
    passed = set()
    directory = ino
    while directory != ROOT_INO and directory not in sound:
        passed.add(directory)
        names = tree.names_of(directory)
        if not names and directory not in tree.known.placed:
            break  # it was removed
        directory = names[0][0] if names else tree.inodes[directory].parent
        if directory == ino:
            return True
        if directory in passed:
            return False  # it lies below one that does
    sound |= passed
    return False
