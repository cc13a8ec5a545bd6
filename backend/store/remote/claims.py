"""Claims of directories: with one a mount changes names without asking etcd, and tells others later.

Only its own mount sees a new file until it has a version (namespace/lookup). So until then its name matters
to nobody but hosts that put names into the same directory. The mount that has the *claim* of the directory,
a key in etcd under its lease, keeps such files to itself (Tree.keep), and stores each with its first
version, in one transaction. A mount that puts a name into a directory, changes its record or removes it
compares in that transaction that no other mount has the claim. If one has, it puts a *wish* beside it; the
holder stores what it keeps to itself, and gives the claim up.

An *exclusive* claim lets its holder defer other changes, too (namespace/deferred). So a mount that looks
into the directory, or changes a file in it, follows it first (leases) and waits until the claim is not
exclusive any more. A holder defers nothing in a directory that others follow, makes its claim an ordinary
one, and leaves it so for a while, for longer each time.

A mount takes the claim of a directory that it makes, and of one in which it makes or removes several files,
with the transaction that does so, unless an attribute says that hosts take turns there. A holder whose
session has ended has no claim any more. One that lives and does not answer is waited for as long as a lease
lasts, and once more when etcd answers: etcd, or who waits, may not have run. Then its claim is deleted, and
it is not waited for again for a while. It finds its files' names free, or taken, when it stores them, and
likewise what it deferred; it gives all its claims up, and takes none for longer than that while.
"""

import errno
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import NamedTuple

import trio

from ...cluster.record_keeper import RecordKeeper
from ...etcd.leases import LeaseEnded
from ...kv import Compare, Conflict, Delete, Exists, Put
from ...model.records import CLAIM, FOLLOWED, WISH, claim_key, wish_key
from ...namespace import SharedCommitter
from ...namespace.commit import Commit
from ...namespace.drafts import is_draft
from ...namespace.inode import inode_key
from ...observe.logs import log_failure
from ...pauses import Rests
from .leases import REST_MAX_S, REST_S, Leases, counted
from .member import Member

log = logging.getLogger(__name__)

# Follows a lease in the value of an exclusive claim.
EXCLUSIVE = b"x"
# The claim of a directory is taken with the second change in it within this time.
_WITHIN_S = 2.0
# It is given up when so long no file was made there, many at a time.
_IDLE_S = 10.0
_GIVEN_UP_AT_ONCE = 50
_CLAIMS_MAX = 1000
# An exclusive claim is not taken for so long after somebody looked, and then for twice as long each time.
_SHARED_S = 1.0
# A holder has the time of a lease to answer, so often. One that did not is passed over for a while, and has
# no claims for longer.
_PATIENCE = 2
_LATE_S = 60.0
_DOUBTED_S = 120.0
_TICK_S = 1.0
# A transaction has 127 operations; who put more wishes deletes them.
_WISHES_AT_ONCE = 100


def _claim(directory: int, lease: int, *, exclusive: bool) -> Put:
    value = lease.to_bytes(8, "big") + (EXCLUSIVE if exclusive else b"")
    return Put(claim_key(directory), value, lease)


class Claim(NamedTuple):
    lease: int
    revision: int


class Claims(RecordKeeper):
    """The claims of all mounts as etcd has them, and this mount's dealings with its own and others' (see
    namespace/shared). They may be used when `run` runs. `defers`: it may take exclusive ones. They come
    after `Members`, which has the followers of directories."""

    prefixes: tuple[bytes, ...] = (CLAIM, WISH, FOLLOWED)

    def __init__(self, member: Member, leases: Leases, *, defers: bool) -> None:
        super().__init__(member.faults)
        self.claims: dict[int, Claim] = {}
        self.exclusive: dict[int, int] = {}  # directory -> lease
        self._wishes: dict[int, set[int]] = {}  # directory -> leases
        self._touched: set[int] = set()  # directories about which something changed
        self._is_followed_anew = False  # a directory, and with it all that is below
        self._member = member
        self._session = member.session
        self._leases = leases
        self._nursery = member.nursery
        self._defers = defers
        # By directory: when something was changed there last without being deferred, and when the claim was
        # used last.
        self._changed: dict[int, float] = {}
        self._used: dict[int, float] = {}
        # Directories whose claims other mounts wanted.
        self._rests = Rests(REST_S, REST_MAX_S)
        # Directories of which this mount had an exclusive claim when others looked.
        self._looks = Rests(_SHARED_S, REST_MAX_S)
        # Directories whose claims are just being taken, or given up.
        self._taking: set[int] = set()
        self._ending: set[int] = set()
        self._sharing: set[int] = set()
        # By directory, how many calls are about to give it a name where others look.
        self._showing: Counter[int] = Counter()
        # Directories that this mount made with an exclusive claim: who follows one above knows of that, and
        # follows the directory itself to look into it.
        self._born: set[int] = set()
        # Directories that this mount has removed, and of which it may still have the claim.
        self._removed: set[int] = set()
        # Sessions whose mounts did not answer, and until when they are not waited for.
        self._late: dict[int, float] = {}
        # The leases under which this mount took its newest claim, was refused one, and under which others
        # deleted one; until when it takes none under that.
        self._claimed_under = self._refused_under = self._doubted = 0
        self._doubted_until = 0.0

    # -- as etcd has them --------------------------------------------------------------------------

    def take(self, key: bytes, value: bytes | None, revision: int) -> None:
        if key.startswith(FOLLOWED):
            self._is_followed_anew = True
            return
        directory = int.from_bytes(key[1:9], "big")
        self._touched.add(directory)
        if key.startswith(WISH):
            wishes = self._wishes.setdefault(directory, set())
            lease = int.from_bytes(key[9:], "big")
            wishes.discard(lease) if value is None else wishes.add(lease)
            if not wishes:
                del self._wishes[directory]
            return
        self.exclusive.pop(directory, None)
        if value is None:
            self.claims.pop(directory, None)
        else:
            if len(value) < 8 or value[8:] not in (b"", EXCLUSIVE):
                self.faults.add(key, "it is no lease")  # and so nobody's claim: others delete it
            lease = int.from_bytes(value[:8], "big")
            self.claims[directory] = Claim(lease, revision)
            if value[8:] == EXCLUSIVE:
                self.exclusive[directory] = lease
                return
        self._born.discard(directory)

    # -- what this mount keeps to itself -----------------------------------------------------------

    def is_ours(self, directory: int) -> bool:
        claim, lease = self.claims.get(directory), self._session.lease
        if (
            claim is None
            or claim.lease != lease
            or directory in self._ending
            or (self._doubted == lease and self._is_doubted())
            or not self._session.valid()
        ):
            return False
        self._used[directory] = time.monotonic()
        return True

    def revision(self, directory: int) -> int:
        claim = self.claims.get(directory)
        return claim.revision if claim is not None and claim.lease == self._session.lease else 0

    def _is_doubted(self) -> bool:
        """Return whether others may pass over this mount."""
        return self._doubted == self._session.lease and time.monotonic() < self._doubted_until

    def is_exclusive(self, directory: int) -> bool:
        return (
            self.exclusive.get(directory) == self._session.lease
            and directory not in self._sharing
            and directory not in self._showing
            and self.is_ours(directory)
            and not self._is_looked_at(directory)
        )

    def _is_looked_at(self, directory: int) -> bool:
        """Return whether another mount looks into a directory of which this one has an exclusive claim."""
        return self._leases.is_followed_by_others(directory, alone=directory in self._born)

    @contextmanager
    def taking(self, commit: Commit) -> Iterator[tuple[list[Compare], list[Put | Delete]]]:
        """Do as namespace/others says."""
        lease, taken, ours, now = self._session.lease, list[int](), list[int](), time.monotonic()
        changes: list[Put | Delete] = []
        conditions: list[Compare] = [(claim_key(one), self.revision(one)) for one in commit.made_in]
        for one in commit.changed_in - commit.made_in:
            claim = self.claims.get(one)
            conditions.append((claim_key(one), claim.revision if claim is not None else 0))
        for inode in commit.gone:
            if inode.is_dir and self.revision(inode.ino):
                ours.append(inode.ino)
                changes.append(Delete(claim_key(inode.ino)))
        directories = commit.changed_in if commit.names or commit.may_wait else ()
        for one in directories:
            is_changed_often = now - self._changed.get(one, -_WITHIN_S) < _WITHIN_S
            if (is_changed_often or self._is_draft(one)) and self._is_worth_taking(one):
                taken.append(one)
                conditions.append(Exists(inode_key(one)))
                changes.append(_claim(one, lease, exclusive=self._may_be_exclusive(one)))
        for _, _, ino in commit.names if self._showing else ():
            if ino in self._showing and self.exclusive.get(ino) == lease:
                self._looks.begin(ino)
                if self._has_kept(ino, commit):
                    taken.append(ino)
                    changes.append(_claim(ino, lease, exclusive=False))
                else:
                    ours.append(ino)
                    changes.append(Delete(claim_key(ino)))
        made = commit.new if commit.new is not None and commit.new.is_dir else None
        if made and self._may_take() and all(map(self._leases.may_follow, directories)):
            taken.append(made.ino)
            tree, (parent, name, _) = self._member.tree, commit.names[0]
            exclusive = self._defers and is_draft(tree.inodes, parent, name)
            changes.append(_claim(made.ino, lease, exclusive=exclusive))
            if exclusive:
                self._born.add(made.ino)
        if taken:
            conditions.append(self._session.compare())
        self._taking.update(taken, ours)
        try:
            yield conditions, changes
        except OSError as error:
            if not taken or not (isinstance(error, LeaseEnded) or error.errno == errno.EACCES):
                raise
            self._refused(error)
            raise Conflict(claim_key(taken[0])) from error
        else:
            self._changed.update(dict.fromkeys(directories, now))
            self._used.update(dict.fromkeys(taken, time.monotonic()))
            self._claimed_under = lease if taken else self._claimed_under
            for directory in ours:
                self._used.pop(directory, None)
        finally:
            self._taking.difference_update(taken, ours)
            if not self._touched.isdisjoint(taken):
                self.tell()  # somebody may want one already

    def _has_kept(self, directory: int, commit: Commit) -> bool:
        """Return whether this mount alone knows of files in a directory, apart from those of a commit."""
        tree, stored = self._member.tree, {inode.ino for inode in commit.inodes}
        found = (tree.inodes.get(ino) for _, ino in tree.below(directory) if ino not in stored)
        return any(inode is not None and inode.maker for inode in found)

    def has_draft(self, directory: int) -> bool:
        """Return whether a directory is a draft that this mount made with an exclusive claim."""
        return directory in self._born and self._is_draft(directory)

    def _is_draft(self, directory: int) -> bool:
        tree = self._member.tree
        return tree.has_drafts and is_draft(tree.inodes, directory)

    def making(self, directory: int, parent: int) -> list[Put]:
        if not (self._may_take() and self._leases.may_follow(parent)):
            return []
        self._born.add(directory)
        return [_claim(directory, self._session.lease, exclusive=True)]

    def removing(self, directory: int) -> list[Delete]:
        self._removed.add(directory)
        return [Delete(claim_key(directory))]

    def _may_take(self) -> bool:
        return (
            self._refused_under != self._session.lease
            and len(self._used) + len(self._taking) < _CLAIMS_MAX
            and self._session.valid()
            and not self._is_doubted()
        )

    def _refused(self, error: OSError) -> None:
        """Take no more claims in this session."""
        self._refused_under = self._session.lease
        if error.errno == errno.EACCES:
            log.warning(
                "this mount may not claim directories, so new files are slower: an administrator gives "
                "it the rights by running `irdmafs cluster protect` of this version"
            )

    def _is_worth_taking(self, directory: int) -> bool:
        if directory in self._taking or directory in self._wishes:
            return False
        if directory not in self.claims:
            may_take = self._may_take() and self._leases.may_follow(directory)
            return may_take and directory not in self._rests
        is_shared = directory not in self.exclusive and directory not in self._sharing
        return is_shared and self._may_be_exclusive(directory) and self.is_ours(directory)

    def _may_be_exclusive(self, directory: int) -> bool:
        if not self._defers or directory in self._looks:
            return False
        return not self._leases.is_followed_by_others(directory)

    @property
    def in_use(self) -> bool:
        return bool(self._used)

    def count(self, *, exclusive: bool = False) -> int:
        """Return of how many directories this mount has the claim, or an exclusive one."""
        among = self.exclusive if exclusive else self.claims
        return sum(map(bool, map(self.revision, among)))

    # -- claims of others --------------------------------------------------------------------------

    def is_of_another(self, directory: int) -> bool:
        claim = self.claims.get(directory)
        return claim is not None and claim.lease != self._session.lease

    def is_exclusive_elsewhere(self, directory: int) -> bool:
        """Return whether another mount has an exclusive claim of the directory."""
        return self.exclusive.get(directory, self._session.lease) != self._session.lease

    async def recall(self, directory: int) -> None:
        """Return when no other mount has the claim of the directory. Raises OSError."""
        await self._wait_for_holder(directory, self.is_of_another, self._wish)
        lease = self._session.lease
        if lease in self._wishes.get(directory, ()):
            await self._member.replica.transact((), [Delete(wish_key(directory, lease))])

    async def look(self, directory: int) -> None:
        """Return when no other mount has an exclusive claim of the directory. Raises OSError."""
        with self._leases.keeping(directory):
            await self._wait_for_holder(directory, self.is_exclusive_elsewhere, self._follow)

    async def _wait_for_holder(
        self, directory: int, is_held: Callable[[int], bool], ask: Callable[[int], Awaitable[None]]
    ) -> None:
        """Have the holder of a claim asked, by a key that ends with this session, until the directory is
        not held any more."""
        while is_held(directory):
            claim = self.claims[directory]
            lease = claim.lease
            await self._session.wait_valid(self._member.timeout_s)
            ends = self._member.members.session_of(lease) is not None
            if ends and self._late.get(lease, 0.0) < time.monotonic():
                try:
                    if await self._is_answered(directory, claim, ask):
                        continue
                except LeaseEnded:
                    continue
                log.warning(
                    "the mount with lease %x does not give the claim of directory %d up: not waited for",
                    lease, directory,
                )  # fmt: skip
            if directory not in self._member.writable:
                return
            key = claim_key(directory)
            replica = self._member.replica
            if await replica.attempt([(key, claim.revision)], [Delete(key)]) and ends:
                self._late[lease] = time.monotonic() + _LATE_S

    async def _is_answered(
        self, directory: int, claim: Claim, ask: Callable[[int], Awaitable[None]]
    ) -> bool:
        """Ask the holder of a claim, and return whether it gave that up. Raises LeaseEnded."""
        for _ in range(_PATIENCE):
            await ask(directory)
            with trio.move_on_after(self._member.members.lease_ttl_s):
                while self.claims.get(directory) == claim:
                    await self.changed()
                return True
            await self._member.replica.barrier()
        return self.claims.get(directory) != claim

    async def _wish(self, directory: int) -> None:
        lease = self._session.lease
        if lease not in self._wishes.get(directory, ()):
            await self._member.replica.transact((), [Put(wish_key(directory, lease), b"", lease)])

    async def _follow(self, directory: int) -> None:
        if not self._leases.follows(directory):
            await self._leases.follow(directory)

    # -- giving up ---------------------------------------------------------------------------------

    async def run(self, committer: SharedCommitter) -> None:
        """Give up the claims that others want, and idle ones; share those of directories that others
        follow."""
        self._committer = committer
        tick_at = 0.0
        while True:
            with trio.move_on_after(_TICK_S):
                await self.changed()
            await self._member.replica.rested()
            now = time.monotonic()
            touched, self._touched = self._touched, set()
            if self._is_followed_anew or now >= tick_at:
                touched.update(self._used)
                self._is_followed_anew, tick_at = False, now + _TICK_S
                self._tidy(now)
            idle: list[int] = []
            for directory in touched:
                if directory in self._ending or directory in self._taking:
                    self._touched.add(directory)
                    continue
                if not self.revision(directory):
                    # The session has ended, or others deleted the claim: they may take the names.
                    if self._used.pop(directory, None) and directory not in self._removed:
                        if self._claimed_under == self._session.lease:
                            self._doubted = self._session.lease
                            self._doubted_until = now + _DOUBTED_S
                        self._nursery.start_soon(self._store, directory)
                    self._removed.discard(directory)
                    continue
                used = self._used.setdefault(directory, now)
                if directory in self._wishes:
                    self._rests.begin(directory)
                    self._start_giving_up([directory])
                elif now - used > _IDLE_S or self._is_doubted():
                    idle.append(directory)
                elif directory in self.exclusive and self._is_looked_at(directory):
                    self._share_soon(directory)
            if idle:
                self._start_giving_up(idle[:_GIVEN_UP_AT_ONCE])

    def _start_giving_up(self, directories: list[int]) -> None:
        self._ending.update(directories)
        self._nursery.start_soon(self._give_up, directories)

    async def _give_up(self, directories: list[int]) -> None:
        """Store what is kept in directories, and delete their claims and all wishes."""
        try:
            while held := [one for one in directories if self.revision(one)]:
                conditions = [(claim_key(one), self.revision(one)) for one in held]
                for directory in held:
                    if not await self._store(directory):
                        return
                keys = (wish_key(one, lease) for one in held for lease in self._wishes.get(one, ()))
                wishes = islice(keys, _WISHES_AT_ONCE - len(held))
                deletes = [*map(Delete, map(claim_key, held)), *map(Delete, wishes)]
                if await self._member.replica.attempt(conditions, deletes):
                    for directory in held:
                        self._used.pop(directory, None)
        except OSError as error:
            log.info("claims of %d directories are not given up: %s", len(directories), error)
        finally:
            self._ending.difference_update(directories)

    def showing(self, directory: int) -> AbstractContextManager[None]:
        """Defer nothing in a directory meanwhile. The transaction that gives it a name deletes an exclusive
        claim of it, or makes it an ordinary one if others cannot know all its files yet."""
        return counted(self._showing, directory)

    def _share_soon(self, directory: int) -> None:
        """Begin to make an exclusive claim an ordinary one: others look there."""
        if directory not in self._sharing:
            self._sharing.add(directory)
            self._looks.begin(directory)
            self._nursery.start_soon(self._share, directory)

    async def _share(self, directory: int) -> None:
        """Store what is deferred, and make an exclusive claim an ordinary one."""
        try:
            await self._member.store_answered(directory)
            conditions = [(claim_key(directory), self.revision(directory)), self._session.compare()]
            claim = _claim(directory, self._session.lease, exclusive=False)
            await self._member.replica.transact(conditions, [claim])
        except Conflict as conflict:
            log.debug("the claim of directory %d has gone: %s", directory, conflict)
        except OSError as error:
            log.info("the claim of directory %d is not shared: %s", directory, error)
        finally:
            self._sharing.discard(directory)

    async def _store(self, directory: int) -> bool:
        """Store what this mount keeps to itself in a directory. Return whether that succeeded."""
        with log_failure(log.warning, "new files in directory %d are not stored yet", directory):
            await self._member.store_answered(directory)
            await self._committer.store(directory)
            return True
        return False

    def _tidy(self, now: float) -> None:
        """Forget what has become meaningless."""
        self._rests.tidy()
        self._looks.tidy()
        for directory, changed in [*self._changed.items()]:
            if now - changed > _WITHIN_S:
                del self._changed[directory]
        self._late = {lease: until for lease, until in self._late.items() if until > now}
        self._born = set(filter(self._member.tree.inodes.__contains__, self._born))
