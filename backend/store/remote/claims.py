"""Claims of directories: with one a mount makes new files without asking etcd, nor telling anybody.

Only its own mount sees a new file until it has a version (namespace/lookup). So until then its name matters
to nobody but hosts that put names into the same directory. The mount that has the *claim* of the directory,
a key in etcd under its lease, keeps such files to itself (Tree.keep), and stores each with its first
version, in one transaction. A mount that puts a name into a directory, changes its record or removes it
compares in that transaction that no other mount has the claim. If one has, it puts a *wish* beside it; the
holder stores what it keeps to itself, and gives the claim up.

A mount takes the claim of a directory in which it makes several files. A holder whose session has ended has
no claim any more. One that lives and does not answer is waited for as long as a lease lasts; then its claim
is deleted, and it is not waited for again. It finds its files' names free, or taken, when it stores them.
"""

import errno
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import trio

from ...cluster.lease import Session
from ...cluster.membership import Members
from ...cluster.replica import Replica
from ...etcd.engine import EtcdEngine
from ...kv import Compare, Conflict, Delete, Event, Exists, KeyValue, Put
from ...kv.faults import Faults
from ...model.records import CLAIM, WISH, claim_key, wish_key
from ...namespace.inode import inode_key
from .rests import Rests

__all__ = ["ClaimEntries", "Claims"]

log = logging.getLogger(__name__)

# The claim of a directory is taken when so many new files were made in it within this time.
_FILES = 2
_WITHIN_S = 2.0
# It is given up when so long no file was made there.
_IDLE_S = 10.0
_CLAIMS_MAX = 256
_TICK_S = 1.0
# A transaction has 127 operations; who put more wishes deletes them.
_WISHES_AT_ONCE = 100


class _Claim(NamedTuple):
    lease: int
    revision: int


class ClaimEntries:
    """A consumer of the replica hub: the claims of all mounts, and who waits for them to be given up."""

    prefixes: tuple[bytes, ...] = (CLAIM, WISH)

    def __init__(self, faults: Faults | None = None) -> None:
        self._faults = faults or Faults()
        self.claims: dict[int, _Claim] = {}
        self.wishes: dict[int, set[int]] = {}  # directory -> leases
        self.touched: set[int] = set()  # directories about which something changed
        self.changed = trio.lowlevel.ParkingLot()

    def load(self, records: Sequence[KeyValue], revision: int) -> None:
        self.claims.clear()
        self.wishes.clear()
        for record in records:
            self._take(record.key, record.value, record.mod_revision)
        self.changed.unpark_all()

    def apply(self, revision: int, events: Sequence[Event]) -> None:
        for event in events:
            self._take(event.key, event.value, event.revision)
        self.changed.unpark_all()

    def _take(self, key: bytes, value: bytes | None, revision: int) -> None:
        directory = int.from_bytes(key[1:9], "big")
        self.touched.add(directory)
        if key.startswith(WISH):
            wishes, lease = self.wishes.setdefault(directory, set()), int.from_bytes(key[9:], "big")
            wishes.discard(lease) if value is None else wishes.add(lease)
            if not wishes:
                del self.wishes[directory]
        elif value is None:
            self.claims.pop(directory, None)
        else:
            if len(value) != 8:
                self._faults.add(key, "it is no lease")  # and so nobody's claim: others delete it
            self.claims[directory] = _Claim(int.from_bytes(value[:8], "big"), revision)


class Claims:
    """The claims of one mount, and its dealings with those of others (see namespace/shared). They may be
    used when `run` runs."""

    def __init__(
        self,
        engine: EtcdEngine,
        replica: Replica,
        members: Members,
        session: Session,
        entries: ClaimEntries,
        nursery: trio.Nursery,
        timeout_s: float,
    ) -> None:
        self._engine = engine
        self._replica = replica
        self._members = members
        self._session = session
        self._entries = entries
        self._nursery = nursery
        self._timeout_s = timeout_s
        # By directory: when files were made there without its claim, and when the claim was used last.
        self._made: dict[int, list[float]] = {}
        self._used: dict[int, float] = {}
        # Directories whose claims other mounts wanted.
        self._rests = Rests()
        # Directories whose claims are just being taken, or given up.
        self._taking: set[int] = set()
        self._ending: set[int] = set()
        # Sessions whose mounts did not answer a wish.
        self._late: set[int] = set()
        self._may_claim = True

    # -- what this mount keeps to itself -----------------------------------------------------------

    def is_ours(self, directory: int) -> bool:
        if not self.revision(directory) or directory in self._ending or not self._session.valid():
            return False
        self._used[directory] = time.monotonic()
        return True

    def revision(self, directory: int) -> int:
        claim = self._entries.claims.get(directory)
        return claim.revision if claim is not None and claim.lease == self._session.lease else 0

    def made_in(self, directory: int) -> None:
        now = time.monotonic()
        made = self._made.setdefault(directory, [])
        made.append(now)
        del made[:-_FILES]
        if (
            len(made) == _FILES
            and now - made[0] <= _WITHIN_S
            and directory not in self._rests
            and self._may_claim
            and directory not in self._taking
            and directory not in self._entries.claims
            and directory not in self._entries.wishes
            and len(self._used) + len(self._taking) < _CLAIMS_MAX
        ):
            self._taking.add(directory)
            self._nursery.start_soon(self._take, directory)

    async def _take(self, directory: int) -> None:
        lease = self._session.lease
        conditions: list[Compare] = [
            (claim_key(directory), 0),
            Exists(inode_key(directory)),
            self._session.compare(),
        ]
        put = Put(claim_key(directory), lease.to_bytes(8, "big"), lease)
        try:
            revision = await self._engine.transact(conditions, [put])
            await self._replica.wait_applied(revision)
            self._used[directory] = time.monotonic()
        except Conflict as conflict:
            log.debug("directory %d is not claimed: %s", directory, conflict)
        except OSError as error:
            log.info("directory %d is not claimed: %s", directory, error)
            if error.errno == errno.EACCES:
                self._may_claim = False
                log.warning(
                    "this mount may not claim directories, so new files are slower: an administrator "
                    "gives it the rights by running `irdmafs cluster protect` of this version"
                )
        finally:
            self._taking.discard(directory)

    def count(self) -> int:
        """Return of how many directories this mount has the claim."""
        return sum(map(bool, map(self.revision, self._entries.claims)))

    # -- claims of others --------------------------------------------------------------------------

    def of_others(self, directories: Iterable[int]) -> list[int]:
        claims = self._entries.claims
        return [one for one in directories if one in claims and not self.revision(one)]

    async def recall(self, directory: int) -> None:
        """Return when no other mount has the claim of the directory. Raises OSError."""
        while self.of_others([directory]):
            claim = self._entries.claims[directory]
            lease = await self._lease()
            if self._members.session_of(claim.lease) is None or claim.lease in self._late:
                await self._change([(claim_key(directory), claim.revision)], claim_key(directory))
                continue
            if lease not in self._entries.wishes.get(directory, ()):
                await self._wish(directory, lease)
            with trio.move_on_after(self._members.lease_ttl_s) as waiting:
                while self._entries.claims.get(directory) == claim:
                    await self._entries.changed.park()
            if waiting.cancelled_caught:
                self._late.add(claim.lease)
                log.warning(
                    "the mount with lease %x does not give the claim of directory %d up: not waited for",
                    claim.lease, directory,
                )  # fmt: skip
        lease = self._session.lease
        if lease in self._entries.wishes.get(directory, ()):
            await self._change([], wish_key(directory, lease))

    async def _lease(self) -> int:
        await self._session.wait_valid(self._timeout_s)
        return self._session.lease

    async def _wish(self, directory: int, lease: int) -> None:
        try:
            revision = await self._engine.transact(
                (), [Put(wish_key(directory, lease), b"", lease)]
            )
        except OSError as error:
            if error.errno != errno.ESTALE:  # LeaseEnded
                raise
        else:
            await self._replica.wait_applied(revision)

    async def _change(self, conditions: Sequence[tuple[bytes, int]], *deleted: bytes) -> None:
        """Delete keys if the conditions hold, and return when the replica shows how things are."""
        try:
            revision = await self._engine.transact(conditions, [Delete(key) for key in deleted])
        except Conflict:
            await self._replica.barrier()
        else:
            await self._replica.wait_applied(revision)

    # -- giving up ---------------------------------------------------------------------------------

    async def run(self, store: Callable[[int], Awaitable[None]]) -> None:
        """Give up the claims that others want, and idle ones. `store(directory)` stores what this mount
        keeps to itself in a directory."""
        while True:
            with trio.move_on_after(_TICK_S):
                await self._entries.changed.park()
            now = time.monotonic()
            touched, self._entries.touched = self._entries.touched, set()
            for directory in touched.union(self._used):
                if directory in self._ending or directory in self._taking:
                    continue
                wanted = directory in self._entries.wishes
                used = self._used.get(directory, now)
                if not self.revision(directory):
                    # The session has ended, or others deleted the claim: they may take the names.
                    if self._used.pop(directory, None):
                        self._nursery.start_soon(self._attempt, store, directory)
                    continue
                if wanted or now - used > _IDLE_S:
                    self._ending.add(directory)
                    self._nursery.start_soon(self._give_up, store, directory)
                if wanted:
                    self._rests.begin(directory)
            self._tidy(now)

    async def _give_up(self, store: Callable[[int], Awaitable[None]], directory: int) -> None:
        """Store what is kept in the directory, and delete its claim and all wishes."""
        try:
            while (revision := self.revision(directory)) and await self._attempt(store, directory):
                wishes = islice(self._entries.wishes.get(directory, ()), _WISHES_AT_ONCE)
                await self._change(
                    [(claim_key(directory), revision)],
                    claim_key(directory),
                    *[wish_key(directory, lease) for lease in wishes],
                )
        except OSError as error:
            log.info("the claim of directory %d is not given up: %s", directory, error)
        finally:
            self._ending.discard(directory)

    async def _attempt(self, store: Callable[[int], Awaitable[None]], directory: int) -> bool:
        try:
            await store(directory)
        except OSError as error:
            log.warning("new files in directory %d are not stored yet: %s", directory, error)
            return False
        return True

    def _tidy(self, now: float) -> None:
        """Forget what has become meaningless."""
        self._rests.tidy()
        for directory, made in [*self._made.items()]:
            if now - made[-1] > _WITHIN_S:
                del self._made[directory]
        self._late = {lease for lease in self._late if self._members.session_of(lease) is not None}
