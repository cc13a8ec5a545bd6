"""One transaction on the directory tree: a list of record changes, and the conditions for it."""

import errno
from collections.abc import Callable, Collection, Sequence, Set
from contextlib import suppress

from ..kv import Compare, Delete, Empty, Exists, Put
from .inode import Inode, fail, inode_key, name_key, time_key
from .quotas import Charge

# etcd accepts 128 compares in a transaction; some are the engine's, some a caller's guards.
_COMPARES_MAX = 120


class Commit:
    """The changes of one transaction. Made for every mutation, so fields that are not set cost nothing."""

    inode: Inode | None = None  # returned to the caller
    names: Sequence[tuple[int, bytes, int]] = ()  # (parent, name, ino; 0: the name is removed)
    inodes: Sequence[Inode] = ()  # records to put
    new: Inode | None = None  # did not exist; kept for the caller, though others remove it at once
    gone: Sequence[Inode] = ()  # inodes that lose their record, an empty directory for example
    times: Sequence[tuple[int, int | None]] = ()  # (directory, ns; None: its inode record has them)
    within: Collection[int] = ()  # directories that must exist
    fixed: Sequence[Inode] = ()  # inodes that must not have changed
    sources: Sequence[Inode] = ()  # files that must have a name, and the same content
    local = False  # a change of local orphans, which is not stored
    may_wait = False  # it can be answered before it is stored (see deferred)
    stores = False  # it stores new files that no other mount sees yet
    # False: a crash may lose it until a durable transaction follows. A shared engine stores it at once.
    durable = True
    urgent = False
    charge: Charge | None = None  # the charge of `inode`, if that grows in a quota
    # Decided when it is about to be stored: the revision of each of `names`, 0: there is no such name; the
    # files whose names only this mount knew before, the directories that get names, change or go, and those
    # in which names and files change.
    revisions: Sequence[int] = ()
    kept: Sequence[int] = ()
    made_in: Set[int] = frozenset()
    changed_in: Set[int] = frozenset()

    def concerned(self) -> set[int]:
        """Return the inodes that it changes, and the directories of its names."""
        found = {parent for parent, _, _ in self.names}
        return found.union(inode.ino for inode in (*self.inodes, *self.gone))


class Joint:
    """A plan that is carried out in the transaction of another one, if that can be: its commit, with all
    that the other one changes, as it was `planned` last and as it was `done`."""

    planned: Commit | None = None
    done: Commit | None = None

    def __init__(self, plan: Callable[[], Commit | None]) -> None:
        self._plan = plan

    def added_to(self, other: Commit, may_join: Callable[[Commit], bool]) -> Commit:
        """Plan both. Return their commit, or that of the `other` one."""
        self.planned = None
        with suppress(OSError):  # it is raised when the plan is carried out alone
            commit = self._plan()
            if commit is not None and may_join(commit):
                commit.inodes = [*commit.inodes, *other.inodes]
                commit.urgent = True
                self.planned = commit
        return self.planned or other


def operations(commit: Commit) -> list[Put | Delete]:
    """Return the record changes. Those of a removed directory delete its times, too, if it has any."""
    found: list[Put | Delete] = []
    for parent, name, ino in commit.names:
        key = name_key(parent, name)
        found.append(Put(key, ino.to_bytes(8, "big")) if ino else Delete(key))
    places = {ino: parent for parent, _, ino in commit.names}
    for inode in commit.inodes:
        place = places.get(inode.ino, inode.parent)
        found.append(Put(inode_key(inode.ino), inode.encode(place)))
    for ino, time_ns in commit.times:
        key = time_key(ino)
        found.append(Delete(key) if time_ns is None else Put(key, time_ns.to_bytes(8, "big")))
    for inode in commit.gone:
        found.append(Delete(inode_key(inode.ino)))
        if inode.is_dir:
            found.append(Delete(time_key(inode.ino)))
    return found


def compares(commit: Commit, ours: Set[int]) -> list[Compare]:
    """Return the conditions of the transaction. `ours`: directories in which nobody else makes names, and
    whose records nobody else changes or removes, which the caller compares. Raises OSError
    ENAMETOOLONG."""
    known: dict[bytes, int] = {}
    elsewhere = set[int]()
    for (parent, name, ino), revision in zip(commit.names, commit.revisions, strict=True):
        if revision or parent not in ours:
            known[name_key(parent, name)] = revision
            elsewhere.add(ino)
    for inode in (*commit.inodes, *commit.gone, *commit.fixed):
        if inode.revision or inode.ino in elsewhere or not commit.names:
            known[inode_key(inode.ino)] = inode.revision
    found: list[Compare] = [*known.items()]
    found += map(Exists, map(inode_key, {*commit.within} - ours))
    if commit.gone:
        removed = [one.ino for one in commit.gone if one.is_dir and one.ino not in ours]
        found += [Empty(name_key(ino, b""), name_key(ino + 1, b"")) for ino in removed]
    if len(found) > _COMPARES_MAX:
        raise fail(errno.ENAMETOOLONG, "more records decide it than a transaction compares")
    return found
