"""Commit mutations to an engine that other processes change, too, and apply them to the tree.

The tree may be out of date. A transaction compares every record that the decision depends on, and the tree
changes only when the watch yields the events, for which the mutation waits: so the tree shows all changes
in the order of their revisions. A conflict, and likewise an error or "nothing to do" that was decided on a
tree which may be out of date, is confirmed: the tree is brought up to date and the mutation is decided
anew.

In a directory of which the mount has the claim (Claims), new files that no other mount sees are kept in the
tree, and stored with the commit that lets others see them. Other changes there may be deferred (Deferred).
"""

import errno
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import starmap
from operator import itemgetter
from typing import TYPE_CHECKING, Final

import trio

from ...inline import detach
from ..kv import Compare, Conflict, Put, Unchanged
from .commit import Commit, compares, operations
from .deferred import Deferred
from .inode import Inode, Unread, fail, inode_key, time_key
from .numbers import ALL_INOS, InodeNumbers, Spent
from .others import Claims, Hub
from .tree import Tree

if TYPE_CHECKING:
    from ..etcd.engine import EtcdEngine

# A mutation that is decided anew so often conflicts every time; the longest pauses last 0.06 s on average,
# so these take more than a minute.
_ATTEMPTS_MAX = 1000
_PAUSES_FROM = 3
_PAUSE_FIRST_S = 0.002
_PAUSE_DOUBLED_MAX = 6
# A transaction of new files compares two records for each, and etcd accepts 128 compares.
_STORED_AT_ONCE = 50
# Files with numbers as near as this are compared together, and with what is between them; so many compares
# are made at most.
_GAP_MAX = 8
_SOURCES_MAX = 40
# Larger changes are not deferred.
_DEFERRED_BYTES_MAX = 8192
# The directory and the name, of an entry of Commit.names.
_NAME_OF: Final = itemgetter(0, 1)


class SharedCommitter:
    """Commits changes of a tree that `hub` keeps up to date. The hub has to be started first.

    after_commit(directories, revision) is awaited before a mutation returns; `directories` were changed, or
    hold a changed inode. `writable` are the numbers of inodes that may be changed, the others are refused
    with EROFS. `deferred` has what is answered and not stored yet; without claims there is nothing.
    """

    def __init__(
        self,
        tree: Tree,
        engine: "EtcdEngine",
        hub: Hub,
        *,
        claims: Claims | None = None,
        after_commit: Callable[[tuple[int, ...], int], Awaitable[None]] | None = None,
        writable: range = ALL_INOS,
    ) -> None:
        self.writable = writable
        self._tree = tree
        self._engine = engine
        self._hub = hub
        self._claims = claims
        self.deferred: Deferred | None = None
        if claims is not None and after_commit is not None:
            self.deferred = Deferred(tree, engine, hub, claims, after_commit)
        self._lost = self.deferred.lost if self.deferred is not None else {}
        # Files that no other mount sees, and that are being stored; and the files and directories of
        # changes of which it is not known whether they were made.
        self._storing: dict[int, trio.Event] = {}
        self._unsure: set[int] = set()
        # The keys of records of inodes and names that are being changed by transactions.
        self._under_way: Counter[bytes] = Counter()
        self._after_commit = after_commit
        self._numbers = InodeNumbers(tree, engine, hub, writable)
        self.new_ino = self._numbers.new

    async def carry_out(
        self, plan: Callable[[], Commit | None], guards: Sequence[Compare] = ()
    ) -> Inode | None:
        """Apply the commit that `plan` decides, and return its inode. After a conflict `plan` is called
        again.

        Raises OSError EBUSY and Conflict, if one of the guards does not hold.
        """
        fresh, removing = False, self._tree.removing
        removed: list[int] = []
        try:
            for attempt in range(_ATTEMPTS_MAX):
                if self._numbers.wanted:
                    await detach()
                    await self._numbers.take()
                seen = self._tree.records.begun_count
                try:
                    commit = plan()
                    if commit is not None and not self._tree.known.everything:
                        self._tree.check_names((*commit.inodes, *commit.gone))
                except Spent:
                    continue
                except Unread as unread:
                    await detach()
                    await self._hub.learn(unread)
                    continue
                except OSError:
                    if fresh:
                        raise
                    commit = None
                if commit is not None and (self._lost or self.writable is not ALL_INOS):
                    self._check(commit)
                for inode in commit.gone if commit is not None else ():
                    if inode.maker:
                        removed.append(inode.ino)
                        removing.append(inode.ino)
                if commit is None:
                    if fresh:
                        return None
                elif commit.local:
                    self._tree.enact_locally(commit)
                    return commit.inode
                elif (self._storing or self._unsure) and await self._has_to_wait(commit):
                    continue
                elif self._stays_here(commit):
                    self._tree.keep(commit)
                    return commit.inode
                elif self._defers(commit):
                    return commit.inode
                elif (
                    await detach()
                    and (
                        commit.charge is not None  # others may have been charged since
                        or self._tree.records.begun_count != seen
                        or await self._has_to_wait(commit)
                    )
                ) or await self._is_made_possible(commit):
                    continue
                elif commit.charge is not None and commit.charge.is_near and not fresh:
                    pass
                elif await self._succeeds(commit, guards):
                    return commit.inode
                await detach()
                if attempt >= _PAUSES_FROM:
                    doubled = min(attempt - _PAUSES_FROM, _PAUSE_DOUBLED_MAX)
                    await trio.sleep(random.uniform(0, _PAUSE_FIRST_S * 2**doubled))
                await self._hub.barrier()
                fresh = True
            raise fail(errno.EBUSY, "others change the same names or inodes all the time")
        finally:
            for ino in removed:
                removing.remove(ino)

    def may_join(self, commit: Commit) -> bool:
        """Return whether a commit of names may be stored with another one: no error is told before it, no
        other mount has to give a claim up, and it compares little."""
        claims, changed = self._claims, _makes_names_in(commit) | _has_files_in(commit)
        is_others = claims is not None and any(map(claims.is_of_another, changed))
        return not (is_others or self._lost) and len(commit.fixed) <= _SOURCES_MAX

    async def _succeeds(self, commit: Commit, guards: Sequence[Compare]) -> bool:
        """Commit to the shared engine, wait until the replica has it, and return True. Return False if a
        record that it depends on has changed. Raises Conflict if that is one of the guards."""
        tree, claims, kept = self._tree, self._claims, commit.kept
        directories = self._directories(commit)
        ours = set(filter(claims.revision, commit.made_in)) if claims is not None else set()
        conditions = compares(commit, ours)
        if commit.sources:
            conditions += self._unchanged(commit.sources)
        changes = operations(commit)
        keys = [one.key for one in changes if not one.key.startswith(b"t")]
        touched = [(ino, tree.records.get(time_key(ino))) for ino, ns in commit.times if ns is None]
        storing = trio.Event()
        with tree.keeping(commit):
            self._storing.update(dict.fromkeys(kept, storing))
            self._under_way.update(keys)
            try:
                with nullcontext(([], [])) if claims is None else claims.taking(commit) as taken:
                    claimed, more = taken
                    conditions += [*claimed, *guards]
                    part = self._engine if self.deferred is None else self.deferred
                    revision = await part.transact(conditions, [*changes, *more])
                    await self._hub.wait_applied(revision)
            except Conflict as conflict:
                if any(conflict.key == guard[0] for guard in guards):
                    raise
                return False
            except BaseException:
                self._unsure |= commit.concerned()
                raise
            finally:
                for ino in kept:
                    self._storing.pop(ino, None)
                storing.set()
                self._under_way.subtract(keys)
                self._under_way = +self._under_way
            if kept or touched:
                self._forget_former(commit, touched)
            unseen = commit.new is not None and commit.new.maker
            if self._after_commit is not None and not unseen and not commit.stores:
                await self._after_commit(directories, revision)
        for inode in commit.inodes:
            inode.revision = revision
        if commit.inode is not None:
            shown = tree.inodes.get(commit.inode.ino)
            if shown is not None and shown.revision == revision:
                commit.inode = shown  # the same, with derived fields
        return True

    # -- new files that this mount keeps to itself -------------------------------------------------

    async def _has_to_wait(self, commit: Commit) -> bool:
        """Wait until no file of a commit is just being stored, and until it is known how earlier changes of
        the same files and directories ended. Return whether there was such a thing."""
        concerned = commit.concerned()
        for storing in map(self._storing.get, concerned):
            if storing is not None:
                await detach()
                await storing.wait()
                return True
        if not self._unsure.isdisjoint(concerned):
            unsure = [*self._unsure]
            await detach()
            await self._engine.fenced.settle()
            await self._hub.barrier()
            self._unsure.difference_update(unsure)
            return True
        return False

    async def _is_made_possible(self, commit: Commit) -> bool:
        """Store what is deferred if a commit, with the names that only this mount knows, cannot be stored
        with it, or wait until no other mount has the claim of a directory in which the commit makes names,
        nor an exclusive one where it has files. Return whether there was such a thing."""
        self._add_names(commit)
        commit.made_in, commit.changed_in = _makes_names_in(commit), _has_files_in(commit)
        claims = self._claims
        if self.deferred is not None and self.deferred.concerns(commit):
            await self.deferred.make_way()
            return True
        if claims is None:
            return False
        others = [*filter(claims.is_of_another, commit.made_in)]
        for directory in others:
            await claims.recall(directory)
        exclusive = [*filter(claims.is_exclusive_elsewhere, commit.changed_in)]
        for directory in exclusive:
            await claims.look(directory)
        return bool(others or exclusive)

    # -- changes that are answered before they are stored ------------------------------------------

    def _defers(self, commit: Commit) -> bool:
        """Apply a commit and defer it if that may be done. Return whether it was."""
        claims, deferred = self._claims, self.deferred
        if claims is None or deferred is None or not (commit.may_wait and deferred.has_room):
            return False
        if any(inode.more for inode in (*commit.inodes, *commit.gone)) or any(
            inode.maker or (inode.is_dir and inode is not commit.new) for inode in commit.inodes
        ):
            return False
        removed = [inode.ino for inode in commit.gone if inode.is_dir]
        directories = _has_files_in(commit).union(removed)
        quotas = self._tree.quotas
        if (
            not directories
            or not all(map(claims.is_exclusive, directories))
            or (quotas.in_use and any(map(quotas.above, directories)))
        ):
            return False
        self._add_names(commit)
        changes = operations(commit)
        size_bytes = 0
        for one in changes:
            size_bytes += len(one.value) if isinstance(one, Put) else 0
            if one.key in self._under_way or size_bytes > _DEFERRED_BYTES_MAX:
                return False
        if commit.new is not None and commit.new.is_dir:
            changes += claims.making(commit.new.ino, commit.names[0][0])
        for directory in removed:
            changes += claims.removing(directory)
        deferred.add(commit, changes, size_bytes, directories)
        return True

    def _check(self, commit: Commit) -> None:
        """Raise OSError EROFS for what may not be changed; and EIO, once, for a change of names or
        attributes in a directory in which earlier ones are lost."""
        may_be_refused = self.writable is not ALL_INOS and not commit.local
        if may_be_refused and not all(ino in self.writable for ino in commit.concerned()):
            raise fail(errno.EROFS)
        if self.deferred is not None and (commit.may_wait or commit.names):
            self.deferred.tell_lost(_has_files_in(commit))

    def _stays_here(self, commit: Commit) -> bool:
        """Return whether a commit makes, changes or removes only files that this mount keeps to itself."""
        if self._claims is None or commit.stores or (commit.charge and commit.charge.quotas):
            return False
        for inode in (*commit.inodes, *commit.gone):
            if inode.revision or not inode.maker:
                return False
        if commit.new is not None:
            return self._claims.is_ours(commit.names[0][0])
        return bool(commit.inodes or commit.gone)

    def _add_names(self, commit: Commit) -> None:
        """Add to a commit the names of its inodes that only this mount knows, and the revisions of all
        names."""
        tree, kept = self._tree, list[int]()
        revisions = [*starmap(tree.name_revision, map(_NAME_OF, commit.names))]
        new = [one for one in commit.inodes if not one.revision and one is not commit.new]
        if new:
            changed = set(map(_NAME_OF, commit.names))
            names, times, within = [*commit.names], dict(commit.times), {*commit.within}
            for inode in new:
                known = tree.names_of(inode.ino)
                if known:
                    kept.append(inode.ino)
                for name in known:
                    if name not in changed and not tree.name_revision(*name):
                        names.append((*name, inode.ino))
                        revisions.append(0)
                        within.add(name[0])
                        times.setdefault(name[0], tree.inodes[name[0]].mtime_ns)
            commit.names, commit.times, commit.within = names, [*times.items()], within
        commit.kept, commit.revisions = kept, revisions

    def _forget_former(self, commit: Commit, touched: Sequence[tuple[int, bytes | None]]) -> None:
        """Remove what was never stored, so that the watch does not tell of it: names that a commit removed,
        and times of directories, as they were, whose records have the times from now on."""
        tree, former = self._tree, Commit()
        for parent, name, ino in commit.names if commit.kept else ():
            if not ino and tree.ino_behind(parent, name) and not tree.name_revision(parent, name):
                former.names = [*former.names, (parent, name, 0)]
        for directory, time in touched:
            if time is not None and tree.records.get(time_key(directory)) == time:
                former.times = [*former.times, (directory, None)]
        if former.names or former.times:
            tree.keep(former)

    async def store(self, directory: int) -> None:
        """Store the files in a directory that this mount keeps to itself; no other mount sees them yet.
        Raises OSError."""
        while kept := [
            inode.ino
            for inode in self._tree.inodes.unrecorded()
            if inode.maker and inode.nlink and directory in self._tree.parents_of(inode.ino)
        ]:
            await self.carry_out(partial(self._stored, kept[:_STORED_AT_ONCE]))

    def _stored(self, numbers: Iterable[int]) -> Commit | None:
        commit, inodes = Commit(), self._tree.inodes
        # To wait for those that are just being stored would take all attempts where there is always one.
        found = [one for ino in numbers if ino not in self._storing and (one := inodes.get(ino))]
        commit.inodes = [inode.copy() for inode in found if inode.nlink and not inode.revision]
        commit.stores = True
        return commit if commit.inodes else None

    # -- what a commit concerns ------------------------------------------------------------------

    def _unchanged(self, files: Sequence[Inode]) -> list[Compare]:
        """Return the conditions under which these files have the same content and a name: their records
        were not put, and their directories, whose times would have changed, lost no names. Raises OSError
        E2BIG."""
        found, applied, last = list[Compare](), self._hub.applied, 0
        for ino in sorted(inode.ino for inode in files):
            first = found.pop()[0] if found and ino - last <= _GAP_MAX else inode_key(ino)
            found.append(Unchanged(first, inode_key(ino + 1), applied))
            last = ino
        for directory in {inode.parent for inode in files}:
            time = time_key(directory)
            found.append((inode_key(directory), self._tree.inodes[directory].revision))
            found.append(Unchanged(time, time + b"\0", applied))
        if len(found) > _SOURCES_MAX:
            raise fail(errno.E2BIG, "they are too far apart")
        return found

    def _directories(self, commit: Commit) -> tuple[int, ...]:
        """Return the directories that a commit changes, or whose inodes it changes."""
        found = {ino for ino, _ in commit.times}
        for inode in commit.inodes:
            found.update((inode.ino,) if inode.is_dir else self._tree.parents_of(inode.ino))
        for inode in commit.gone:
            if inode.is_dir:
                found.add(inode.ino)
        return tuple(found)

    async def flush(self) -> None:
        """Store what is deferred. Raises OSError EIO once if some of it is lost."""
        if self.deferred is not None:
            await self.deferred.flush()


def _makes_names_in(commit: Commit) -> set[int]:
    """Return the directories that get names, change or go."""
    found = {parent for parent, _, ino in commit.names if ino}
    for inode in (*commit.inodes, *commit.gone):
        if inode.is_dir and inode is not commit.new:
            found.add(inode.ino)
    return found


def _has_files_in(commit: Commit) -> set[int]:
    """Return the directories of the names and files that a commit changes. Of a file with several names
    nothing is deferred, so its directories do not matter."""
    found = {parent for parent, _, _ in commit.names}
    for inode in (*commit.inodes, *commit.gone):
        if inode.name and not (inode.is_dir or inode.more):
            found.add(inode.parent)
    return found
