"""What the events of a shared engine's watch change in a tree. Other hosts made them: records that no tree
can have are found here, each by itself (docs/security.md, "Sensible values")."""

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import msgspec

from ..cluster.records import NEXT_INO_KEY
from ..kv import Event
from .inode import FIRST_VIRTUAL_INO, NAME_MAX, ROOT_INO, Inode, nearest_time

__all__ = ["Changes", "Listener", "changes_of", "time_of"]


class Listener(Protocol):
    """Called with every change that the watch yields after the first load, also those of this process,
    after the whole transaction is applied. Must not block and not raise."""

    def inode_changed(self, old: Inode | None, new: Inode | None) -> None:
        """Called with the inode before and after; None: it did not exist, or was removed."""
        ...

    def name_changed(self, parent: int, name: bytes, old_ino: int, new_ino: int) -> None:
        """Called with the inode numbers before and after; 0: there was no such name, or it was removed."""
        ...


class Changes(NamedTuple):
    """`times` are those of directories, None: the inode has them from now on. `names` are parent, name,
    inode (0: the name is removed) and revision. `gone` are inodes without a record. `next_ino` is the value
    and revision of the record of free inode numbers, if that changed."""

    times: list[tuple[int, int | None]]
    inodes: list[Inode]
    names: list[tuple[int, bytes, int, int]]
    gone: list[int]
    next_ino: tuple[int, int] | None


def changes_of(events: Iterable[Event], complain: Callable[[str], None]) -> Changes:
    """Return the changes of events. `complain` is told of each record that is passed over."""
    times: list[tuple[int, int | None]] = []
    inodes: list[Inode] = []
    names: list[tuple[int, bytes, int, int]] = []
    gone: list[int] = []
    next_ino = None
    for revision, key, value in events:
        kind, ino = key[:1], int.from_bytes(key[1:9], "big")
        if key == NEXT_INO_KEY:
            next_ino = int.from_bytes(value or b"", "big"), revision
        elif not _is_sound(kind, ino, key[9:], value):
            complain(f"the record {key!r} is damaged")
        elif kind == b"d":
            target = int.from_bytes(value, "big") if value is not None else 0
            names.append((ino, key[9:], target, revision))
        elif kind == b"t":
            times.append((ino, time_of(value) if value is not None else None))
        elif value is None:
            gone.append(ino)
        else:
            try:
                inodes.append(Inode.decode(ino, value, revision))
            except msgspec.DecodeError as error:
                complain(f"the record of inode {ino} is damaged: {error}")
    return Changes(times, inodes, names, gone, next_ino)


def _is_sound(kind: bytes, ino: int, rest: bytes, value: bytes | None) -> bool:
    """Return whether a record, whose key is its kind, an inode number and `rest`, can be one of a tree."""
    if not 0 < ino < FIRST_VIRTUAL_INO:
        return False
    if kind == b"i":
        return not rest and not (ino == ROOT_INO and value is None)
    if kind == b"d" and (
        not 0 < len(rest) <= NAME_MAX or b"/" in rest or b"\0" in rest or rest in (b".", b"..")
    ):
        return False
    return (kind == b"d" or not rest) and (value is None or len(value) == 8)


def time_of(value: bytes) -> int:
    """Return the time of a record."""
    return nearest_time(int.from_bytes(value, "big"))
