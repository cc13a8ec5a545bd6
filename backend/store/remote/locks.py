"""Locks across the hosts of a cluster: what this mount may grant to its processes.

cluster/lock_claims.py has the protocol. A host that is alone with an inode is the `sole` one and grants
locks at local speed. When another host records that it wants or holds something, the sole host reduces its
claim to what its processes really hold; from then on every growth is a transaction.
"""

import errno
import logging
import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fcntl import F_WRLCK

import trio

from ...etcd.leases import LeaseEnded
from ...kv import Compare, Conflict, Delete, Operations, Put
from ...model.lock_claims import (
    NOTHING,
    Claim,
    Entry,
    LockHolder,
    entry_key,
    guard_key,
    is_blocked,
    is_covered,
    merged,
)
from ...model.records import encode
from ...observe.logs import log_failure
from .lock_entries import LockEntries
from .member import Member

log = logging.getLogger(__name__)

# A host becomes the sole one of an inode after so long without others.
_CALM_S = 1.0
# A request that came later than another host's yields to that one for so long.
_YIELD_S = 0.1
# A host gives its claim on an inode up after so long without locks. Others then need not ask for it.
_IDLE_S = 10.0
_LEFT_BEHIND_S = 30.0
_LOOK_AGAIN_S = 1.0
_RETRY_S = 0.5


@dataclass(slots=True, eq=False)
class _Inode:
    """An inode that is locked here, or was recently. etcd has at least the claim `mine` of this host."""

    mine: Entry = NOTHING
    changing: trio.Lock = field(default_factory=trio.Lock)  # one transaction at a time
    coming_down: bool = False  # from sole: stores through mappings are being published
    settling: bool = False  # a task is about to reduce the claim
    unsure: bool = False  # etcd may have more of this host than `mine`
    wanting: list[Claim] = field(default_factory=list)
    asking: int = 0  # how many of these will not wait
    answers: int = 0  # the last revision of an asking entry that is answered
    # Set, and replaced, when others' entries change.
    moved: trio.Event = field(default_factory=trio.Event)
    yielding_to: dict[int, float] = field(default_factory=dict)  # others that wait, and since when
    contended: float = -_CALM_S
    used: bool = True
    idle_since: float = 0.0
    was_locked: bool = False

    def entry(
        self, held: tuple[Claim, ...], wanted: tuple[Claim, ...], *, sole: bool = False
    ) -> Entry:
        return Entry(sole, held, wanted, bool(wanted) and self.asking > 0, self.answers)

    def wake(self) -> None:
        self.moved.set()
        self.moved = trio.Event()


class SharedLocks(LockEntries):
    """The locks of all hosts as etcd has them, and this host's part in them: those of its `holders`. Waits
    for etcd end with OSError after the cluster's time-out. Locks of inodes that are not writable hold on
    this host only."""

    def __init__(self, member: Member) -> None:
        super().__init__(member.faults, member.certificates.kept_to)
        self._member = member
        self._session = member.session
        self._writable = member.writable
        self._timeout_s = member.timeout_s
        self.holders: list[LockHolder] = []
        self._inodes: dict[int, _Inode] = {}
        self.transactions = 0

    def tell(self) -> None:
        touched, self._touched = self._touched, set()
        for ino in touched:
            self._others_moved(ino)
        super().tell()

    # -- what is granted -------------------------------------------------------------------------

    def grants(self, ino: int, claim: Claim, since: float) -> bool:
        """Return whether a lock may be granted now, as far as other hosts are concerned, to a request
        that was made at `since` (time.monotonic(), seconds)."""
        state = self._inodes.get(ino)
        if ino not in self._writable:
            return True
        if state is None or not self._session.valid():
            return False
        state.used = True
        if state.mine.sole:
            return self._is_alone(ino, state)
        return is_covered(state.mine, claim) and not self._yields(ino, state, claim, since)

    def is_alone(self, ino: int) -> bool:
        """Return whether no other host can lock the inode before this one has come down."""
        state = self._inodes.get(ino)
        return ino not in self._writable or (state is not None and self._is_alone(ino, state))

    def _is_alone(self, ino: int, state: _Inode) -> bool:
        return state.mine.sole and not state.coming_down and next(self._others(ino), None) is None

    def _others(self, ino: int) -> Iterator[Entry]:
        ours = self._session.lease
        for lease, entry in self.of(ino).items():
            if lease != ours:
                yield entry

    def _yields(self, ino: int, state: _Inode, claim: Claim, since: float) -> bool:
        """Return whether another host has waited longer for something that this claim conflicts with."""
        entries = self.of(ino)
        return any(
            seen < since and lease in entries and any(map(claim.conflicts, entries[lease].wanted))
            for lease, seen in state.yielding_to.items()
        )

    async def claim(self, ino: int, claim: Claim, *, wait: bool, since: float) -> None:
        """Return when `grants` would grant the claim to a request that need not yield (`since` 0). That
        stays so until the caller awaits something.

        Raises BlockingIOError if other hosts hold something that conflicts and not `wait`, OSError
        ETIMEDOUT, ENOLCK.
        """
        state = self._state(ino)
        yield_until = time.monotonic() + _YIELD_S
        give_up = time.monotonic() + 2 * self._session.ttl_s + self._timeout_s
        asked = 0
        with self._wanting(ino, state, claim, asking=not wait):
            while True:
                await self._session.wait_valid(self._timeout_s)
                moved = state.moved
                now = time.monotonic()
                if self.grants(ino, claim, since if now < yield_until else 0.0):
                    return
                if state.mine.sole:
                    await self._settle(ino, state)
                    continue
                others = list(self._others(ino))
                if is_blocked(others, claim):
                    if wait:
                        await self._want(ino, state)
                    elif not asked:
                        asked = await self._want(ino, state, asks=True)
                    elif now > give_up or is_blocked(
                        [other for other in others if other.answers >= asked], claim
                    ):
                        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
                    with trio.move_on_after(_LOOK_AGAIN_S):
                        await moved.wait()
                elif now < yield_until and self._yields(ino, state, claim, since):
                    await self._want(ino, state)
                    with trio.move_on_after(yield_until - now):
                        await moved.wait()
                elif not await self._grow(ino, state, claim):
                    await self._member.replica.barrier()

    @contextmanager
    def _wanting(
        self, ino: int, state: _Inode, claim: Claim, *, asking: bool = False
    ) -> Iterator[None]:
        """Want a claim meanwhile; `asking`: without waiting for it."""
        state.wanting.append(claim)
        state.asking += asking
        try:
            yield
        finally:
            state.wanting.remove(claim)
            state.asking -= asking
            if state.mine.wanted:
                self._settle_soon(ino, state)

    async def test(self, ino: int, claim: Claim) -> Claim | None:
        """Return what another host's processes hold that conflicts with a lock. Raises OSError
        ETIMEDOUT."""
        state = self._state(ino)
        with self._wanting(ino, state, claim):
            await self._session.wait_valid(self._timeout_s)
            if not self.is_alone(ino):
                await self._member.replica.barrier()
            while not self.is_alone(ino):
                moved = state.moved
                others = list(self._others(ino))
                if not any(other.sole for other in others):
                    held = (held for other in others for held in other.held)
                    return next((one for one in held if one.conflicts(claim)), None)
                await self._want(ino, state)
                with trio.move_on_after(_LOOK_AGAIN_S):
                    await moved.wait()
            return None

    async def store_answered(self) -> None:
        """Return when everything that was answered before is stored. Raises OSError."""
        await self._member.store_answered()

    def shrunk(self, ino: int) -> None:
        """Note that processes gave locks back, and that what they wrote under them is published."""
        state = self._inodes.get(ino)
        if state is not None and not self._is_alone(ino, state):
            self._settle_soon(ino, state)

    async def shrink(self, ino: int) -> None:
        """Do as `shrunk`, and return when other hosts can know it, if etcd can be told now."""
        state = self._inodes.get(ino)
        if state is None or self._is_alone(ino, state):
            return
        try:
            await self._settle(ino, state)
        except BaseException as error:
            self._settle_soon(ino, state)
            if not isinstance(error, OSError):
                raise

    # -- transactions ----------------------------------------------------------------------------

    async def _grow(self, ino: int, state: _Inode, claim: Claim) -> bool:
        """Add a claim to this host's entry, or become the sole host. Return False if others were faster."""
        async with state.changing:
            if state.mine.sole or is_blocked(list(self._others(ino)), claim):
                return True  # the situation has changed meanwhile
            lease, guard = self._session.lease, self.guard(ino)
            calm = time.monotonic() - state.contended > _CALM_S
            # Other hosts often lock for reading, too: the first such lock leaves them theirs.
            often = state.was_locked or claim.type == F_WRLCK
            sole = often and calm and next(self._others(ino), None) is None
            held = merged((*state.mine.held, claim))
            if any(is_blocked(list(self._others(ino)), one) for one in held):
                raise OSError(errno.ENOLCK, "more locks on a file than can be told to other hosts")
            wanting = list(state.wanting)
            wanting.remove(claim)
            entry = state.entry(held, merged(wanting), sole=sole)
            puts = [Put(entry_key(ino, lease), encode(entry), lease), Put(guard_key(ino), b"")]
            try:
                revision = await self._transact([(guard_key(ino), guard)], puts)
            except (Conflict, LeaseEnded):
                return False
            except PermissionError as error:
                # EACCES would mean that another process holds the lock.
                raise OSError(
                    errno.ENOLCK,
                    f"others cannot be told of locks ({error.strerror}); see -o locks=local",
                ) from error
            except BaseException:
                state.unsure = True
                raise
            # No lock is granted under the entry before everything published earlier is known here.
            state.unsure = True
            await self._member.replica.wait_applied(revision)
            for holder in self.holders:
                await holder.refresh(ino)
            if lease != self._session.lease:
                return False
            state.mine, state.unsure, state.was_locked = entry, False, True
        if not self._is_alone(ino, state):
            self._settle_soon(ino, state)  # in case the lock is not taken after all
        return True

    async def _want(self, ino: int, state: _Inode, *, asks: bool = False) -> int:
        """Record which locks processes here wait for, so that a sole host reduces its claim. With `asks`,
        also if that is recorded: the hosts that are in the way of a lock say if their processes hold what
        their entries say. Return the revision that their answers name at least; 0: ask again."""
        async with state.changing:
            wanted = merged(state.wanting)
            if state.mine.sole or not (asks or wanted != state.mine.wanted):
                return 0
            return await self._put(ino, state, state.entry(state.mine.held, wanted))

    def _settle_soon(self, ino: int, state: _Inode) -> None:
        if not state.settling:
            state.settling = True
            self._member.nursery.start_soon(self._settle_quietly, ino, state)

    async def _settle_quietly(self, ino: int, state: _Inode) -> None:
        lease = self._session.lease
        while lease == self._session.lease:
            state.settling = False
            with log_failure(
                log.warning, "inode %d: others are not told yet what is unlocked", ino
            ):
                asked = self.asked(ino, lease)
                if asked > state.answers:
                    for holder in self.holders:
                        await holder.released(ino)
                    state.answers = max(state.answers, asked)
                await self._settle(ino, state)
                return
            state.settling = True
            await trio.sleep(_RETRY_S)
        state.settling = False

    async def _settle(self, ino: int, state: _Inode, *, idle: bool = False) -> None:
        """Reduce this host's entry to what its processes hold and wait for; with `idle` even if it is
        alone."""
        async with state.changing:
            if self._is_alone(ino, state) and not idle and not state.unsure:
                return
            if state.mine.sole:
                state.coming_down = True
                try:
                    for holder in self.holders:
                        await holder.publish(ino)
                except OSError as error:
                    log.error(
                        "inode %d: what was written under a lock is not published: %s", ino, error
                    )
                finally:
                    state.coming_down = False
                # There is no await from here until `mine` is set to what other hosts will know.
            held = merged(self._held(ino))
            entry = state.entry(held, merged(state.wanting))
            if state.unsure or entry != state.mine:
                await self._put(ino, state, entry)

    async def _put(self, ino: int, state: _Inode, entry: Entry) -> int:
        """Put an entry that claims no more than before. Return the revision, 0 if there is no entry now.
        Raises OSError."""
        state.mine = entry
        lease = self._session.lease
        key = entry_key(ino, lease)
        revision = 0
        try:
            if entry:
                revision = await self._transact([], [Put(key, encode(entry), lease)])
            elif next(self._others(ino), None) is not None or not await self._remove(ino):
                await self._transact([], [Delete(key)])
        except (Conflict, LeaseEnded):
            # The session is over, and its entry with it; `lost` may have run before.
            state.mine = NOTHING
        except BaseException:
            state.unsure = True
            raise
        state.unsure = False
        return revision

    async def _remove(self, ino: int) -> bool:
        """Remove this host's entry, and the guard, if there is no other entry. Return False if somebody has
        added one."""
        key, guard = entry_key(ino, self._session.lease), guard_key(ino)
        try:
            await self._transact([(guard, self.guard(ino))], [Delete(key), Delete(guard)])
        except Conflict:
            return False
        return True

    async def _transact(self, compares: Sequence[Compare], operations: Operations) -> int:
        """Apply a transaction within the session."""
        self.transactions += 1
        compares = [self._session.compare(), *compares]
        return await self._member.engine.transact(compares, operations)

    # -- the session -----------------------------------------------------------------------------

    def lost(self) -> None:
        """Note that the session is over: its claims are gone, and other hosts may have them."""
        for state in self._inodes.values():
            state.mine, state.unsure = NOTHING, False
            state.wake()
        for holder in self.holders:
            holder.lost()

    def check(self, pid: int) -> None:
        """Raise OSError EIO if a process may not publish in a new session what it began in a lost one."""
        for holder in self.holders:
            holder.check(pid)

    async def run(self) -> None:
        """Publish reductions of claims, and give idle ones up."""
        while True:
            while not (self._inodes or self.left_behind):
                await self.changed()
            await trio.sleep(1.0)
            await self._tidy()

    async def _tidy(self) -> None:
        now = time.monotonic()
        for ino, state in list(self._inodes.items()):
            if state.unsure:
                self._settle_soon(ino, state)
            if state.used or state.wanting or state.changing.locked():
                state.used, state.idle_since = False, now
            elif now - state.idle_since < _IDLE_S or next(self._held(ino), None) is not None:
                pass
            elif state.mine:
                with log_failure(log.info, "locks are not tidied up now"):
                    await self._settle(ino, state, idle=True)
            elif self._inodes.get(ino) is state:
                del self._inodes[ino]
        await self._remove_left_behind(now)

    async def _remove_left_behind(self, now: float) -> None:
        """Remove guards that stay because the host that put them died. Of all mounts about one a second
        tries."""
        for ino, since in list(self.left_behind.items()):
            if now - since < _LEFT_BEHIND_S or not self._session.valid():
                continue
            if random.random() * len(self._member.members.sessions) < 1:
                with log_failure(log.info, "a guard that was left behind stays for now"):
                    await self._remove(ino)

    # -- what others do ------------------------------------------------------------------------------

    def _others_moved(self, ino: int) -> None:
        state = self._inodes.get(ino)
        if state is None:
            return
        now = time.monotonic()
        ours = self._session.lease
        waiting = {lease for lease, entry in self.of(ino).items() if lease != ours and entry.wanted}
        for lease in state.yielding_to.keys() - waiting:
            del state.yielding_to[lease]
        for lease in waiting:
            state.yielding_to.setdefault(lease, now)
        if next(self._others(ino), None) is not None:
            state.contended = now
            if state.mine.sole or state.unsure or self.asked(ino, ours) > state.answers:
                self._settle_soon(ino, state)
        state.wake()

    def _held(self, ino: int) -> Iterator[Claim]:
        for holder in self.holders:
            yield from holder.held(ino)

    def _state(self, ino: int) -> _Inode:
        state = self._inodes.get(ino)
        if state is None:
            state = self._inodes[ino] = _Inode()
            self._others_moved(ino)
            super().tell()
        return state

    def count(self) -> int:
        """Return the number of inodes on which this host has claims."""
        return sum(bool(state.mine) for state in self._inodes.values())

    @property
    def in_use(self) -> bool:
        return bool(self._inodes)
