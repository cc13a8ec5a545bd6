"""Changes that are answered at once and stored a moment later, many in one transaction.

In a directory of which the mount has an exclusive claim nobody else looks or changes anything
(store/remote/claims.py). So some changes there are answered as soon as the tree has them: a name of a file
without a version, a removed name, attributes of a file, a directory made or removed. Whoever looks into the
directory first has what was deferred stored. So do fsync of anything, and giving up a lock for writing.
Changes are stored in their order, one that is not deferred together with those before it: if this mount
dies, those that are lost are the last ones. A new directory is stored before anything is put into it.

A transaction of deferred changes compares nothing but the claims. If this mount has lost one, with its
session for example, the transaction compares the records that it changes: so nothing is lost unless another
mount has changed the same meanwhile. Until the watch yields a transaction the tree is ahead of the events,
and passes over those that would take it back.
"""

import errno
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from itertools import takewhile
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import trio

from ...inline import detach
from ..kv import Compare, Conflict, Delete, Empty, Event, Exists, Put
from ..model.records import CLAIM, claim_key
from ..pauses import Pauses
from .commit import Commit
from .inode import inode_key, name_key, time_key
from .others import Claims, Hub
from .tree import Tree

if TYPE_CHECKING:
    from ..etcd.engine import EtcdEngine

log = logging.getLogger(__name__)

# A transaction compares the claims of so many directories, and so much in all, which leaves room for so
# many operations. Every process takes these in at once. Etcd accepts 1.5 MiB, keys and all.
_DIRECTORIES_MAX = 50
_COMPARES_MAX = 60
_OPERATIONS_MAX = 2000
_BYTES_MAX = 1 << 19
_LOST_OPERATIONS_MAX = 60
# A change waits so long for others, or until there are so many: storing them takes time from who made them
# and goes on.
_GATHER_S = 0.8
_MANY = 500
# So many changes are deferred at a time, and none while etcd has stored nothing for so long: whoever makes
# more of them waits.
_DEFERRED_MAX = 1000
_OVERDUE_S = 2.0
_RETRY_FIRST_S = 0.1
_RETRY_MAX_S = 5.0
_TOLD_MAX = 10


class _Change(NamedTuple):
    """`operations` are by key. `claims` has the directories that it concerns, with the revisions of their
    claims when it was deferred; one of them is `removed`, or none (0)."""

    number: int
    made_s: float  # trio.current_time()
    operations: dict[bytes, Put | Delete]
    size_bytes: int  # of the values
    claims: dict[int, int]
    removed: int


class _Some(NamedTuple):
    """Changes for one transaction: their operations by key, a later one instead of an earlier one, and the
    directories whose claims they have."""

    changes: list[_Change]
    operations: dict[bytes, Put | Delete]
    claims: set[int]


class Deferred:
    """The deferred changes of a tree; `count` is how many there have been. Nothing is deferred until `run`
    runs."""

    def __init__(
        self,
        tree: Tree,
        engine: "EtcdEngine",
        hub: Hub,
        claims: Claims,
        after_commit: Callable[[tuple[int, ...], int], Awaitable[None]],
    ) -> None:
        self._tree = tree
        self._engine = engine
        self._hub = hub
        self._claims = claims
        self._after_commit = after_commit
        self._changes: deque[_Change] = deque()
        self.count = 0
        # How many changes put or delete a key, of those that are not being stored; and what is being
        # stored, by key, and the changes.
        self._waiting: Counter[bytes] = Counter()
        self._under_way: dict[bytes, bytes | None] = {}
        self._sent: list[_Change] = []
        # Transactions that may have been applied: the identity, a revision before, and what they store.
        self._doubted: list[tuple[bytes, int, _Some]] = []
        # The revisions of names and inodes before deferred changes; 0: there was none.
        self._before: dict[bytes, int] = {}
        self._stored_s = 0.0  # when everything was stored, or the last changes were
        self._storing = trio.Lock()
        # Commits that wait until nothing is deferred, and 1 until `run` runs: nothing is, meanwhile.
        self._in_the_way = 1
        self._first, self._many = trio.Event(), trio.Event()
        # Errors for programs that work in directories in which changes are lost; and the keys of records
        # that are lost, or others may have changed after they were stored, until the tree is right again.
        self.lost: dict[int, OSError] = {}
        self._lost_keys: set[bytes] = set()
        tree.news = self._news

    @property
    def has_room(self) -> bool:
        if self._lost_keys or self._in_the_way or len(self._changes) >= _DEFERRED_MAX:
            return False
        is_empty = not (self._changes or self._under_way)
        return is_empty or trio.current_time() < self._stored_s + _OVERDUE_S

    def add(
        self,
        commit: Commit,
        changes: Sequence[Put | Delete],
        size_bytes: int,
        within: Iterable[int],
    ) -> None:
        """Apply a commit, and defer its `changes` of records, with values of so many bytes, which concern
        files in these directories alone. Raises OSError."""
        now_s = trio.current_time()
        if not (self._changes or self._under_way):
            self._stored_s = now_s
        for (parent, name, _), revision in zip(commit.names, commit.revisions, strict=True):
            self._before.setdefault(name_key(parent, name), revision)
        for inode in (*commit.inodes, *commit.gone):
            self._before.setdefault(inode_key(inode.ino), inode.revision)
        self._tree.keep(commit)
        self.count += 1
        claims = {directory: self._claims.revision(directory) for directory in within}
        removed = next((one.ino for one in commit.gone if one.is_dir), 0)
        operations = {one.key: one for one in changes}
        change = _Change(self.count, now_s, operations, size_bytes, claims, removed)
        self._changes.append(change)
        self._waiting.update(change.operations.keys())
        self._first.set()
        if len(self._changes) >= _MANY:
            self._many.set()

    def concerns(self, commit: Commit) -> bool:
        """Return whether a commit cannot be stored with what is deferred: it changes the same, or needs a
        directory that is not stored yet. If the outcome of that were not known, what was deferred would be
        stored again, over the commit."""
        if not (self._changes or self._under_way):
            return False
        if any(one.is_dir and not self._claims.revision(one.ino) for one in commit.gone):
            return True  # there must be no names in it
        keys = [name_key(parent, name) for parent, name, _ in commit.names]
        keys += map(inode_key, commit.concerned().union(commit.within))
        keys += [time_key(ino) for ino, time_ns in commit.times if time_ns is None]
        keys += [inode_key(one.ino) for one in commit.fixed]
        keys += [inode_key(ino) for one in commit.sources for ino in (one.ino, one.parent)]
        return any(key in self._waiting or key in self._under_way for key in keys)

    def _news(self, events: Sequence[Event]) -> Sequence[Event]:
        """Return the events of a transaction that show no earlier state of a record than the tree has."""
        if not (self._changes or self._under_way):
            return events
        return [event for event in events if not self._is_ahead_of(event)]

    def _is_ahead_of(self, event: Event) -> bool:
        """Return whether the tree has a later state of a record than an event."""
        key = event.key
        if key in self._waiting:
            return True
        if key not in self._under_way:
            return False
        return self._under_way[key] != event.value or self._is_kept(event)

    def _is_kept(self, event: Event) -> bool:
        """Return whether a new file that this mount keeps to itself has a removed name by now, or gave its
        directory a later time."""
        if event.value is not None:
            known = self._tree.records.get(event.key) if event.key.startswith(b"t") else None
            return known is not None and known > event.value
        if not event.key.startswith(b"d"):
            return False
        parent, name = int.from_bytes(event.key[1:9], "big"), event.key[9:]
        return bool(self._tree.ino_behind(parent, name))

    async def run(self) -> None:
        """Store what is deferred, soon after it was."""
        self._in_the_way -= 1
        pauses = Pauses(_RETRY_FIRST_S, _RETRY_MAX_S)
        while True:
            await self._first.wait()
            made_s = self._changes[0].made_s if self._changes else trio.current_time()
            with trio.move_on_at(made_s + _GATHER_S):
                await self._many.wait()
            try:
                async with self._storing:
                    if self._lost_keys:
                        await self._take_back()
                    if self._changes:
                        await self._store_some()
                pauses.begin_anew()
            except OSError as error:
                log.warning("%d changes are not stored yet: %s", len(self._changes), error)
                await pauses.wait()
            if not (self._changes or self._lost_keys):
                self._first = trio.Event()
            if len(self._changes) < _MANY:
                self._many = trio.Event()

    async def store(self) -> None:
        """Return when nothing is deferred any more of what was before this call. Raises OSError ETIMEDOUT:
        then it is still deferred."""
        newest = self.count
        if not (self._changes or self._under_way):
            return
        await detach()
        async with self._storing:
            while self._changes and self._changes[0].number <= newest:
                await self._store_some()

    async def make_way(self) -> None:
        """Return when nothing is deferred any more, also of what programs that never pause go on changing,
        for a commit that it `concerns`. Raises as `store`."""
        self._in_the_way += 1
        try:
            await self.store()
        finally:
            self._in_the_way -= 1

    async def settle(self) -> None:
        """Return when the tree shows what others changed where claims are lost. Raises OSError."""
        if self._lost_keys or self._not_held():
            async with self._storing:
                while self._not_held():
                    await self._store_some()

    async def flush(self) -> None:
        """Store everything that was deferred before this call. Raises OSError EIO once if some of it, or of
        what was deferred earlier, is lost."""
        await self.store()
        self.tell_lost([*self.lost])

    def tell_lost(self, directories: Iterable[int]) -> None:
        """Raise OSError EIO, once, if changes in one of these directories are lost."""
        lost = [self.lost.pop(one) for one in directories if one in self.lost]
        if lost:
            raise lost[0]

    async def transact(
        self, conditions: Sequence[Compare], operations: Sequence[Put | Delete]
    ) -> int:
        """Apply operations if conditions hold, and return the revision of that. What was deferred before
        this call is stored before, or in the same transaction. Raises Conflict, OSError."""
        newest = self.count
        if self._changes or self._under_way:
            async with self._storing:
                while self._changes and self._changes[0].number <= newest:
                    earlier = [one for one in self._changes if one.number <= newest]
                    some = self._first_of(earlier, _OPERATIONS_MAX - len(operations))
                    is_room = len(conditions) + len(some.claims) <= _COMPARES_MAX
                    if is_room and len(some.changes) == len(earlier) and not self._not_held():
                        return await self._send(some, conditions, operations)
                    await self._store_some()
        return await self._engine.transact(conditions, operations)

    async def _store_some(self) -> None:
        """Store the first changes, up to one whose claims are lost; or that, and others that are lost."""
        lost = self._not_held()
        held = [*takewhile(lambda change: change not in lost[:1], self._changes)]
        try:
            if lost and self._doubted:
                await self._find_outcomes()
            elif not held:
                await self._settle(lost)
            else:
                await self._send(self._first_of(held, _OPERATIONS_MAX), (), ())
        except Conflict:
            await self._hub.barrier()  # the claims are known then

    def _first_of(self, changes: Collection[_Change], operations_max: int) -> _Some:
        """Return the first changes, as many as a transaction takes, at least one."""
        some, size = _Some([], {}, set()), 0
        for change in changes:
            more = change.operations.keys() - some.operations.keys()
            size += change.size_bytes
            if some.changes and (
                len(some.operations) + len(more) > operations_max
                or len(some.claims | change.claims.keys()) > _DIRECTORIES_MAX
                or size > _BYTES_MAX
            ):
                break
            some.changes.append(change)
            some.operations.update(change.operations)
            some.claims.update(change.claims)
        return some

    async def _send(
        self, some: _Some, conditions: Sequence[Compare], operations: Sequence[Put | Delete]
    ) -> int:
        """Store changes and then `operations`, if the conditions hold and the claims are as they were.
        Return the revision when the tree has it. Raises Conflict, OSError."""
        compares: list[Compare] = [(claim_key(d), self._claims.revision(d)) for d in some.claims]
        compares += conditions
        stored = some.operations | {operation.key: operation for operation in operations}
        self._remove(some.changes)
        sent = [(key, stored[key]) for key in some.operations]
        self._under_way = {key: one.value if isinstance(one, Put) else None for key, one in sent}
        self._sent = some.changes
        identity, since = self._engine.fenced.new_identity(), self._engine.revision
        try:
            revision = await self._engine.transact(compares, [*stored.values()], identity)
            await self._hub.wait_applied(revision)
        except BaseException as error:
            # It may have been applied. It is tried again, and finds its claims, or that.
            if not isinstance(error, Conflict):
                self._doubted.append((identity, since, some))
            self._under_way, self._sent = {}, []
            self._changes = deque(sorted((*some.changes, *self._changes), key=itemgetter(0)))
            for change in some.changes:
                self._waiting.update(change.operations.keys())
            raise
        self._under_way, self._sent = {}, []
        self._stored_s = trio.current_time()
        self._note_stored(stored, revision)
        self._doubted = [one for one in self._doubted if one[2].changes[0] not in some.changes]
        return revision

    def _note_stored(self, stored: Mapping[bytes, Put | Delete], revision: int) -> None:
        """Note the operations of a transaction that was applied."""
        for key, operation in stored.items():
            if key not in self._waiting:
                self._before.pop(key, None)
            elif key in self._before:
                self._before[key] = revision if isinstance(operation, Put) else 0

    def _remove(self, changes: Sequence[_Change]) -> None:
        numbers = {change.number for change in changes}
        for change in self._changes:
            if change.number in numbers:
                self._waiting.subtract(change.operations.keys())
        self._changes = deque(one for one in self._changes if one.number not in numbers)
        self._waiting = +self._waiting

    # -- changes that cannot be stored ---------------------------------------------------------------

    def _not_held(self) -> list[_Change]:
        """Return the changes of which this mount has lost a claim."""
        revision = self._claims.revision
        return [
            change
            for change in (*self._sent, *self._changes)
            if any(revision(directory) != held for directory, held in change.claims.items())
        ]

    async def _settle(self, lost: Sequence[_Change]) -> None:
        """Store the first of these changes, whose claims are lost, or give them up."""
        for directory in {one for change in lost for one in change.claims}:
            await self._claims.recall(directory)
        some, conditions = self._first_of_lost(lost)
        try:
            revision = await self._send(some, conditions, ())
        except Conflict as conflict:
            await self._hub.barrier()
            if not conflict.key.startswith(CLAIM):
                self._lose([one for one in lost if not some.claims.isdisjoint(one.claims)])
                await self._take_back()
        else:
            await self._after_commit((*some.claims,), revision)

    async def _find_outcomes(self) -> None:
        """Find out which transactions were applied of which that is not known. Others may have changed the
        same after those: nothing of them is stored again. Raises OSError."""
        while self._doubted:
            identity, since, some = self._doubted[0]
            revision = None
            try:
                revision = await self._engine.fenced.find(identity, since)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
            del self._doubted[0]
            if revision is not None:
                self._remove(some.changes)
                self._note_stored(some.operations, revision)
                self._lost_keys |= some.operations.keys() - self._waiting.keys()
        if self._lost_keys:
            await self._take_back()

    def _first_of_lost(self, lost: Sequence[_Change]) -> tuple[_Some, list[Compare]]:
        """Return the first of these changes, without claims, and what is to be so that they undo nothing of
        others. A directory is removed apart: it has to be empty before."""
        run = (one for one, first in zip(lost, self._changes, strict=False) if one is first)
        together = [*takewhile(lambda change: not change.removed, run)] or lost[:1]
        some = self._first_of(together, _LOST_OPERATIONS_MAX)
        for key in [key for key in some.operations if key.startswith(CLAIM)]:
            del some.operations[key]
        keys = map(inode_key, some.claims)
        conditions: list[Compare] = [Exists(key) for key in keys if self._before.get(key) != 0]
        conditions += [(key, self._before[key]) for key in some.operations if key in self._before]
        if removed := together[0].removed:
            conditions.append(Empty(name_key(removed, b""), name_key(removed + 1, b"")))
        return some, conditions

    def _lose(self, lost: Sequence[_Change]) -> None:
        """Give up changes: another mount has changed the same."""
        self._remove(lost)
        keys = set[bytes]().union(*(change.operations for change in lost))
        self._lost_keys |= keys
        for key in keys - self._waiting.keys():
            self._before.pop(key, None)
        directories: set[int] = set().union(*(change.claims for change in lost))
        where = ", ".join(sorted(map(self._tree.describe, directories))[:_TOLD_MAX])
        text = f"{len(lost)} changes in {where} are lost: they were cut off, and others changed the same"
        log.error("%s", text)
        self.lost.update(dict.fromkeys(directories, OSError(errno.EIO, text)))
        self._first.set()

    async def _take_back(self) -> None:
        """Have the tree as it is without what was lost."""
        keys = frozenset(self._lost_keys)
        await self._hub.reload()
        tree, commit = self._tree, Commit()
        names = [(int.from_bytes(key[1:9], "big"), key[9:]) for key in keys if key[:1] == b"d"]
        unstored = [name for name in names if not tree.name_revision(*name)]
        found = [(name, tree.inodes.get(tree.ino_behind(*name))) for name in unstored]
        made = [(name, inode) for name, inode in found if inode and not inode.maker]
        commit.names = [(*name, 0) for name, _ in made]
        numbers = [int.from_bytes(key[1:], "big") for key in keys if key[:1] == b"i"]
        # The tree keeps a file that was changed here and removed by others, without record and name.
        nameless = [one for one in map(tree.inodes.at_hand, numbers) if one and not one.name]
        gone = [*(inode for _, inode in made), *nameless]
        commit.gone = [one.copy() for one in gone if not (one.revision or one.maker)]
        for inode in commit.gone:
            inode.nlink = 0
        tree.keep(commit)
        self._lost_keys -= keys
