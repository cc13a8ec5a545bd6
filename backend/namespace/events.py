"""What the events of a shared engine's watch change in a tree. Other hosts made them: records that no tree
can have are found here, each by itself (docs/security.md, "Sensible values")."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from ..kv import Event
from ..model.records import NEXT_INO_KEY, NEXT_INO_OF
from .inode import (
    DAMAGED_INO,
    FIRST_VIRTUAL_INO,
    NAME_MAX,
    ROOT_INO,
    Inode,
    inode_key,
    nearest_time,
)
from .subvolumes import SUBVOLUMES, belongs

# Called with a key, what is wrong with its record, and the value.
Complain = Callable[[bytes, str, bytes], None]
# A parent, a name, and the inode that it leads to from now on, 0: none.
_Name = TypeVar("_Name", bound=tuple[int, bytes, int, *tuple[int, ...]])


class Listener(Protocol):
    """Called with every change that the watch yields after the first load, also those of this process,
    after the whole transaction is applied. Must not block and not raise."""

    def inode_changed(self, old: Inode | None, new: Inode | None) -> None:
        """Called with the inode before and after; None: it did not exist, or was removed."""
        ...

    def name_changed(self, parent: int, name: bytes, old_ino: int, new_ino: int) -> None:
        """Called with the inode numbers before and after; 0: there was no such name, or it was removed."""
        ...

    def kept(self) -> None:
        """Called after a change of this process that is known here alone. Other changes are followed by the
        end of their transaction."""
        ...


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
    times: list[tuple[int, int | None]] = []
    damaged: list[tuple[int, int]] = []
    inodes: list[tuple[Inode, bytes]] = []
    names: list[tuple[int, bytes, int, int]] = []
    gone: list[int] = []
    blocks: dict[int, tuple[int, int]] = {}
    for revision, key, value in events:
        kind, ino = key[:1], int.from_bytes(key[1:9], "big")
        if key == NEXT_INO_KEY or (kind == NEXT_INO_OF and ino in SUBVOLUMES):
            # No number, if it is damaged or gone: the tree finds one.
            told = int.from_bytes(value, "big") if value and len(value) == 8 else 0
            blocks[ino or ROOT_INO] = told, revision
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
            names.append((ino, key[9:], target, revision))
        elif kind == b"t":
            times.append((ino, time_of(value) if value is not None else None))
        elif value is None:
            gone.append(ino)
        else:
            try:
                inodes.append((Inode.decode(ino, value, revision), value))
            except msgspec.DecodeError as error:
                complain(key, str(error), value)
                damaged.append((ino, revision))
    return Changes(times, damaged, inodes, names, gone, blocks)


def _can_be(kind: bytes, ino: int, key: bytes, value: bytes | None) -> bool:
    """Return whether a tree can have a record, or lose one, of this kind, inode and key."""
    name = key[9:]
    if not 0 < ino < FIRST_VIRTUAL_INO or len(key) < 9:
        return False
    if kind == NEXT_INO_OF:
        return False
    if kind == b"i":
        return not name and not (ino == ROOT_INO and value is None)
    if kind == b"d":
        return (
            0 < len(name) <= NAME_MAX
            and not (b"/" in name or b"\0" in name)
            and name not in (b".", b"..")
        )
    return not name and (value is None or len(value) == 8)


def time_of(value: bytes) -> int:
    """Return the time of a record."""
    return nearest_time(int.from_bytes(value, "big"))


def removals_first(names: Sequence[_Name]) -> Sequence[_Name]:
    """Return names in the order in which an inode that is renamed has one of them at a time."""
    return sorted(names, key=lambda name: name[2] != 0)
