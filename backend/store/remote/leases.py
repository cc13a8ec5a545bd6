"""Directory leases: with one a mount opens files without asking etcd, and its kernel without asking the
mount.

A mount that follows a directory has a key in etcd that says so. A host that changes something below the
directory returns to its caller only when every follower has seen the change and told its kernel, or when
the follower's session is over, which etcd decides. So while a follower's session is valid by its own clock,
its replica is fresh there, and so is what its kernel may believe for a while. A follower that is stuck or
malicious delays others only for a limited time. A directory given with --follow is followed
for good; one that is asked about repeatedly is followed as long as that goes on, unless an attribute
forbids it. Leases on what is above end at a directory that has the attribute.

Moving a directory, or setting its attribute, takes everything below it out of one lease, maybe into none.
The next change below it must not return before each follower whom this concerns knows of it.
"""

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import trio

from ...cluster.lease import now_s
from ...cluster.membership import followed_key, seen_key
from ...kv import Delete, Put
from ...namespace import ROOT_INO, Inode
from ...namespace.attributes import FOLLOW
from ...namespace.inode import told_of
from ...observe.logs import log_failure
from ...pauses import Rests
from ...unwrap import if_it_fails
from .member import Member

log = logging.getLogger(__name__)

# A directory that was looked at, or about which etcd had to be asked, so many times within this time is
# followed.
_QUESTIONS = 8
_WITHIN_S = 2.0
# It is given up after so long without an open, or as soon as there are not this many opens for each change
# by others; older ones count less. An open that asks etcd is one request to read; a change with followers
# is a transaction more for each of them, which everybody is told of, and its author waits for it. A few
# changes never count.
_IDLE_S = 10.0
_OPENS_PER_CHANGE = 4
_CHANGES_FREE = 8
_FOLLOWED_MAX = 256
# A directory that others use, too, is left alone for so long.
REST_S = 10.0
REST_MAX_S = 600.0
# Clocks run at slightly different rates.
_MARGIN_SHARE = 0.1
# For how long the kernel may believe an answer about what is followed, and the attributes of what is not.
_BELIEVED_S = 5.0
_NOT_FOLLOWED_S = 1.0
# A kernel goes on using what it was told, and answers on their way, for so long after the belief has ended.
_AFTERGLOW_S = 1.5


class _Interest:
    """This mount's use of a directory."""

    __slots__ = ("changes", "last_open", "opens", "since")

    def __init__(self, now: float) -> None:
        self.opens = 0
        self.changes = 0
        self.since = self.last_open = now

    @property
    def is_worth_following(self) -> bool:
        return self.opens >= _OPENS_PER_CHANGE * (self.changes - _CHANGES_FREE)


@contextmanager
def counted(calls: Counter[int], directory: int) -> Iterator[None]:
    """Count a call for a directory meanwhile; those for which there is none are not in `calls`."""
    calls[directory] += 1
    try:
        yield
    finally:
        calls[directory] -= 1
        if not calls[directory]:
            del calls[directory]


class Leases:
    """The directories that this mount follows, and its promise to hosts that change them."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._tree = member.tree
        self._members = member.members
        self._session = member.session
        self._nursery = member.nursery
        # Directories, with the leases under which they are followed; 0: they are not, but the key that says
        # so may be there.
        self._held: dict[int, int] = {}
        self._sure_until_s = 0.0  # to know everything, by now_s()
        # By the lease of a follower that is not waited for: the revision that it should have acknowledged.
        self._late: dict[int, int] = {}
        self._followed_under = 0  # the newest lease under which anything was followed
        self._changing = trio.Lock()  # what is followed
        # The directories followed under lease `_ways_lease`, and those above them; empty: not known.
        self._ways: set[int] = set()
        self._ways_lease = 0
        self._for_good: set[int] = set()
        # By directory, how many calls wait for others (see `keeping`).
        self._kept: Counter[int] = Counter()
        self._interest: dict[int, _Interest] = {}
        self._asking: set[int] = set()
        # Directories that were given up for their changes.
        self._rests = Rests(REST_S, REST_MAX_S)
        self._touched: set[int] = set()  # directories, by the transaction being applied
        # Likewise, the directories whose records are changed, and where they were and are.
        self._moving: list[tuple[int, int, int]] = []
        # By the lease of a follower: the newest change of a directory's record that it has to know before
        # anything is changed again. Those that it is known to have seen are forgotten.
        self._moved: dict[int, int] = {}
        self._owed = 0  # the newest revision that somebody may wait for us to have seen
        self._owing = trio.Event()
        self.acknowledgements = 0
        self.transactions = 0  # asked for: to follow, to give up and to acknowledge
        member.changes.inode_listeners.append(self.inode_changed)
        member.changes.name_listeners.append(self.name_changed)
        member.changes.transaction_listeners.append(self.transaction)

    # -- following -------------------------------------------------------------------------------

    def believable_s(self, directory: int, *, used: bool = True) -> float:
        """Return for how many seconds the kernel may believe answers about the directory, below which every
        change is known here, by promise; 0.0: not at all."""
        if not self._held:
            return 0.0
        left_s = min(self._session.valid_until, self._sure_until_s) - now_s()
        if left_s <= 0.0:
            return 0.0
        # The nearest followed directory among it and those above it.
        held, lease, inodes = self._held, self._session.lease, self._tree.inodes
        while held.get(directory) != lease:
            inode = inodes.get(directory)
            if inode is None or not inode.parent or inode.xattrs.get(FOLLOW) == b"off":
                return 0.0
            directory = inode.parent
        interest = self._interest.get(directory) if used else None
        if interest is not None:
            interest.opens += 1
            interest.last_open = time.monotonic()
        return min(left_s, _BELIEVED_S)

    def attributes_believable_s(self) -> float:
        """Return for how many seconds the kernel may believe the attributes of what is not followed.
        It is told of changes when they arrive here, as lookups see them; nobody waits for
        that."""
        return min(self._session.left_s(), _NOT_FOLLOWED_S)

    def path_valid_s(self, directory: int) -> float:
        """Return the same for the name of a directory that is followed, or lies above a followed one: a
        host that changes such a name also waits for the followers of everything below it."""
        if not self._held:
            return 0.0
        lease = self._session.lease
        if not self._ways or self._ways_lease != lease:
            self._ways, self._ways_lease = set(), lease
            for held, under in self._held.items():
                if under == lease:
                    self._ways.update(self._path(held))
        if directory not in self._ways:
            return 0.0
        left_s = min(self._session.valid_until, self._sure_until_s) - now_s()
        return min(max(0.0, left_s), _BELIEVED_S)

    def _path(self, directory: int) -> set[int]:
        """Return the directory and all directories above it, up to one that ends what is followed above."""
        path: set[int] = set()
        inodes = self._tree.inodes
        while directory and directory not in path:
            path.add(directory)
            inode = inodes.get(directory)
            if inode is None or inode.xattrs.get(FOLLOW) == b"off":
                break
            directory = inode.parent
        return path

    def follows(self, directory: int) -> bool:
        """Return whether this mount follows the directory itself."""
        return self._held.get(directory) == self._session.lease

    def keeping(self, directory: int) -> AbstractContextManager[None]:
        """Go on following a directory meanwhile, if it is followed."""
        return counted(self._kept, directory)

    def is_followed_by_others(self, directory: int, *, alone: bool = False) -> bool:
        """Return whether other mounts follow the directory or, unless it `alone` counts, one above it."""
        followed = {directory} if alone else self._path(directory)
        return bool(self._members.followers_of(followed) - {self._session.lease})

    async def follow(self, directory: int, *, for_good: bool = False) -> None:
        """Follow a directory and everything below it from now on."""
        if for_good:
            self._for_good.add(directory)
        async with self._changing:
            lease, asked_s = self._session.lease, now_s()
            with if_it_fails(partial(self._held.update, {directory: 0})):
                # Earlier changes have been applied here then, and hosts that commit later know of this
                # follower.
                await self._transact(Put(followed_key(directory, lease), b"", lease))
                if self._followed_under != lease:
                    self._followed_under = lease
                    self._be_sure(asked_s)
                elif now_s() >= self._sure_until_s:
                    await self._confirm()
            if lease == self._session.lease:
                self._held[directory] = lease
                self._ways.clear()
                self._owe(self._member.replica.applied)  # somebody may be waiting already

    async def _transact(self, operation: Put | Delete) -> None:
        self.transactions += 1
        await self._member.replica.transact((), (operation,))

    async def unfollow(self, directory: int) -> None:
        """Follow a directory no more; the kernel forgets what it believes below it. Raises OSError."""
        async with self._changing:
            if directory not in self._held:
                return
            self._held[directory] = 0
            self._ways.clear()
            for listener in self._member.changes.mount_listeners:
                listener.not_followed(directory)
            # Until it is known to have gone somebody may wait for this mount because of the key.
            await self._transact(Delete(followed_key(directory, self._session.lease)))
            del self._held[directory]

    def asked(self, directory: int) -> None:
        """Note that the directory was looked at, or that etcd had to be asked about it, and follow it if
        that happens often."""
        if directory in self._asking:
            return
        now = time.monotonic()
        interest = self._interest.get(directory)
        if interest is None or now - interest.since > _WITHIN_S:
            if len(self._interest) >= _FOLLOWED_MAX:
                return
            interest = self._interest[directory] = _Interest(now)
        interest.opens += 1
        interest.last_open = now
        if (
            interest.opens >= _QUESTIONS
            and interest.is_worth_following
            and directory not in self._rests
            and self.may_follow(directory)
        ):
            interest.opens = interest.changes = 0
            self._asking.add(directory)
            self._nursery.start_soon(self._follow_quietly, directory)

    def may_follow(self, directory: int) -> bool:
        """Return whether a directory may be claimed, and followed though nobody has asked for that: the
        nearest directory that has the attribute decides."""
        inodes = self._tree.inodes
        while (inode := inodes.get(directory)) is not None:
            value = inode.xattrs.get(FOLLOW)
            if value is not None or directory == ROOT_INO:
                return value != b"off"
            directory = inode.parent
        return True

    async def _follow_quietly(self, directory: int) -> None:
        with log_failure(log.info, "directory %d is not followed", directory):
            await self.follow(directory)
        self._asking.discard(directory)

    # -- keeping the promise ---------------------------------------------------------------------

    def inode_changed(self, old: Inode | None, new: Inode | None) -> None:
        """Note that a change of an inode is being applied. A change of a directory's record, maybe of its
        place, affects everything below it."""
        known = new or old
        assert known is not None
        if self._held or self._interest:
            self._touched.update(self._tree.parents_of(known.ino))
            if known.is_dir and (new is None or not new.nlink):
                self._touched.add(known.ino)
        if new is not None and old is not None and new.is_dir and new.revision != old.revision:
            self._ways.clear()
            if new.nlink:  # there is nothing below one that was removed
                self._moving.append((new.ino, old.parent, new.parent))

    def name_changed(self, directory: int) -> None:
        """Note that a change of a name in the directory is being applied."""
        if self._held or self._interest:
            self._touched.add(directory)

    def transaction(self, revision: int, ours: bool, known: bool) -> None:
        """Note that a transaction was applied, or several if it is not `known`. Nobody waits for an
        acknowledgement of our own, unless it changed the record of a directory that we follow: the next
        change there may come from outside our leases."""
        owed = not ours and not known
        if self._moving:
            lease = self._session.lease
            followers = self._followers_of_moved() if known else self._members.followers()
            self._moved.update(dict.fromkeys(followers - {lease}, revision))
            owed = owed or lease in followers
        if self._tree.known.passed:
            owed = (self._note_passed() and not ours) or owed
        if not ours:
            for directory in set().union(*map(self._path, self._touched)):
                owed = owed or directory in self._held
                interest = self._interest.get(directory)
                if interest is not None:
                    interest.changes += 1
                    if directory in self._held and not interest.is_worth_following:
                        self._rest(directory)
        self._touched.clear()
        self._moving.clear()
        if owed and self._held:
            self._owe(revision)

    def _note_passed(self) -> bool:
        """Note changes of what is not known here. Return whether some may be below what is followed."""
        passed, inodes = self._tree.known.passed, self._tree.inodes
        is_owed = False
        for ino, record in passed.items() if self._held else ():
            if record is not None:
                ino = told_of(record)[1]
            if ino in inodes:
                self._touched.add(ino)
            else:
                is_owed = True
        passed.clear()
        return is_owed

    def _followers_of_moved(self) -> set[int]:
        """Return the leases of mounts that follow a directory above or below those whose records the
        transaction changes: these had, or get, other names for something that they believe."""
        members, found = self._members, set[int]()
        for moved, *parents in self._moving:
            found |= members.followers_of({moved}.union(*map(self._path, parents)))
            inode = self._tree.inodes.get(moved)
            if inode is not None and (inode.nlink > 2 or moved in self._tree.known.unread):
                below = [one for one in members.followed() if moved in self._path(one)]
                found |= members.followers_of(below)
        return found

    def _rest(self, directory: int) -> None:
        """Give a directory up for a while that others change often."""
        if directory not in self._for_good and directory not in self._kept:
            del self._interest[directory]
            self._rests.begin(directory)
            self._nursery.start_soon(self._attempt, partial(self.unfollow, directory))

    def _owe(self, revision: int) -> None:
        self._owed = revision
        self._owing.set()

    async def acknowledge(self) -> None:
        """Acknowledge what was seen whenever somebody may be waiting for it; a task of its own."""
        while True:
            await self._owing.wait()
            self._owing = trio.Event()
            if self._members.acked(self._session.lease) >= self._owed or not self._held:
                continue
            await self._member.replica.wait_applied(self._owed)
            seen = self._member.replica.applied
            lease = self._session.lease
            try:
                self.transactions += 1
                put = Put(seen_key(lease), seen.to_bytes(8, "big"), lease)
                await self._member.engine.transact((), (put,))
                self.acknowledgements += 1
            except OSError as error:
                log.warning("followers' promise not kept for now: %s", error)
                await trio.sleep(0.1)
                self._owing.set()

    async def _confirm(self) -> None:
        """Confirm with etcd that the replica is up to date. Hosts that had stopped waiting for this mount
        wait again once it has acknowledged."""
        lease, asked_s = self._session.lease, now_s()
        await self._member.replica.wait_applied(await self._member.engine.barrier())
        if now_s() >= self._sure_until_s or self._members.acked(lease) < self._owed:
            seen = self._member.replica.applied.to_bytes(8, "big")
            await self._transact(Put(seen_key(lease), seen, lease))
        if lease == self._session.lease:
            self._be_sure(asked_s)

    def _be_sure(self, asked_s: float) -> None:
        """Note that everything that etcd had at `asked_s` (by now_s()) is known here."""
        until_s = asked_s + self._members.lease_ttl_s * (1 - _MARGIN_SHARE)
        self._sure_until_s = max(self._sure_until_s, until_s)

    async def _stay_sure(self) -> None:
        """Confirm again and again while anything is followed; a task of its own."""
        while True:
            if self._held and self._session.valid():
                await self._attempt(self._confirm)
            await trio.sleep(self._members.lease_ttl_s / 4)

    async def wait_for_followers(self, directories: tuple[int, ...], revision: int) -> None:
        """Return when all followers of these directories have seen the revision, and each follower of a
        directory whose record was changed before, by anybody, has seen that; or believe nothing older.

        A follower believes its replica only while it is sure to know everything: it asks etcd again and
        again how far it is, and each answer is good for the time of a lease from when it was asked for. So
        one that does not answer need not be waited for any longer: an honest one has stopped believing by
        then. It is not waited for again until it has acknowledged what it missed, which an honest follower
        does before it believes anything again."""
        path = set().union(*map(self._path, directories))
        members, moved, ours = self._members, self._moved.copy(), self._session.lease

        def awaited() -> dict[int, int]:
            found = dict.fromkeys(members.followers_of(path) - {ours}, revision)
            if moved:
                still = moved.keys() & members.followers()
                found = {lease: moved[lease] for lease in still} | found
            for lease, missed in self._late.items() if found else ():
                if members.acked(lease) < missed:
                    found.pop(lease, None)
            return found

        patience_s = members.lease_ttl_s + _AFTERGLOW_S
        with trio.move_on_after(patience_s) as waiting:
            await members.wait_acked(awaited)
        if waiting.cancelled_caught:
            self._late = {
                lease: missed for lease, missed in self._late.items() if members.session_of(lease)
            }
            for lease, at in awaited().items():
                if members.acked(lease) < at:
                    self._late[lease] = at
                    log.warning(
                        "%s follows a directory and has acknowledged nothing for %g s: not waited for",
                        self._describe(lease), patience_s,
                    )  # fmt: skip
        if moved:
            left = self._moved
            self._moved = {lease: at for lease, at in left.items() if moved.get(lease, 0) < at}

    def _describe(self, lease: int) -> str:
        record = self._members.sessions.get(self._members.session_of(lease) or 0)
        if record is None:
            return "a mount"
        of = f" (certificate {record.name!r})" if record.name else ""
        return f"the mount {record.mountpoint} on {record.host}{of}"

    # -- life ------------------------------------------------------------------------------------

    def is_followed_for_good(self, directory: int) -> bool:
        """Return whether new versions in the directory are to be fetched at once."""
        return bool(self._for_good) and not self._for_good.isdisjoint(self._path(directory))

    def count(self) -> int:
        return sum(map(bool, self._held.values()))

    async def run(self) -> None:
        """Keep the promise, give idle directories up, and follow the others again in a new session."""
        self._nursery.start_soon(self.acknowledge)
        self._nursery.start_soon(self._stay_sure)
        while True:
            await trio.sleep(1.0)
            await self._member.replica.rested()
            await self._tidy()

    async def _tidy(self) -> None:
        now = time.monotonic()
        for directory in [*self._for_good]:
            if not self.follows(directory) and self._session.valid():
                await self._attempt(partial(self.follow, directory, for_good=True))
        for directory in [*self._held]:
            held = self._held.get(directory)  # others give it up, or follow it anew, meanwhile
            if held == 0:
                await self._attempt(partial(self.unfollow, directory))
            elif held != self._session.lease:
                self._held.pop(directory, None)
                self._ways.clear()
            elif directory in self._for_good or directory in self._kept:
                continue
            elif (
                (interest := self._interest.get(directory)) is None
                or now - interest.last_open > _IDLE_S
                or not self.may_follow(directory)
            ):
                self._interest.pop(directory, None)
                await self._attempt(partial(self.unfollow, directory))
            else:
                interest.opens //= 2
                interest.changes //= 2
        self._rests.tidy()
        for directory, interest in list(self._interest.items()):
            is_wanted = directory in self._held or directory in self._asking
            if not is_wanted and now - interest.last_open > _WITHIN_S:
                del self._interest[directory]

    async def _attempt(self, change: Callable[[], Awaitable[None]]) -> None:
        with log_failure(log.info, "directory leases"):
            await change()
