"""The locks of one mount: its own tables, the claims of other hosts, and lost locks.

A process that gets a lock sees everything written under it before, on any host: bytes are published before
another host can lock the file, and a host that gets the lock shows the newest version. Locks are lost with
the mount's session in its cluster. Then a process that held one can publish nothing until it has been told,
by an error when it closes or unlocks the locked file.
"""

import errno
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from fcntl import F_RDLCK, F_UNLCK
from typing import TYPE_CHECKING, NamedTuple

import trio

from ..backend.model.lock_claims import POSIX, Claim, LockHolder
from ..backend.store.api import Store
from ..callers.processes import has_ended, process_of
from ..coherence.kernel_cache import KernelCache
from ..coherence.publishing import Publisher
from ..inline import detach
from ..mount_options import LockScope
from .lock_tables import LAST_BYTE, FlockTable, Lock, LockTable

if TYPE_CHECKING:
    from ..backend.store.remote.locks import SharedLocks

log = logging.getLogger(__name__)


class _Loser(NamedTuple):
    """A process (its pidfd) that does not know yet that it lost locks: on which inodes, and whether for
    writing."""

    process: int
    inodes: dict[int, bool]


class Locking(LockHolder):
    """The locks that processes of this host take through the mount. Its store has those of others."""

    def __init__(
        self, scope: LockScope, store: Store, contents: Publisher, kernel: KernelCache
    ) -> None:
        self._scope = scope
        self._shared = store.locks if scope == "cluster" else None
        self._contents = contents
        self._kernel = kernel
        self._describe = store.namespace.describe
        self.posix = LockTable()
        self.flocks = FlockTable()
        # Owners of POSIX locks, by the handle through which they took some, until a close gives them back.
        self.lockers: dict[int, set[int]] = {}
        # Handles that are being released, whose flock(2) locks end with them, and what tells of the end.
        self._leaving: dict[int, trio.Event] = {}
        # By the number of the process, which is another one's when it has ended.
        self.lost_by: dict[int, _Loser] = {}
        if self._shared is not None:
            self._shared.holders.append(self)

    # -- fcntl(2) and flock(2) -------------------------------------------------------------------

    async def test(self, ino: int, owner: int, lock: Lock) -> Lock:
        """fcntl(F_GETLK): return the lock in the way, or `lock` as F_UNLCK. The process of one that is held
        on another host has the number 0."""
        self._refuse()
        found = self.posix.test(ino, owner, lock)
        if found is None and self._shared is not None and lock.type != F_UNLCK:
            await detach()
            other = await self._shared.test(ino, Claim(POSIX, lock.type, lock.start, lock.end))
            found = other and Lock(other.type, other.start, other.end, 0)
        return found or lock._replace(type=F_UNLCK)

    async def lock(
        self, fh: int, ino: int, owner: int, lock: Lock, *, flock: bool, wait: bool
    ) -> None:
        """fcntl(F_SETLK, F_SETLKW) and flock(2), also LOCK_UN. Raises OSError EAGAIN, EDEADLK, ENOLCK;
        EIO: a lock of the file was lost."""
        # The kernel may reuse the number of a file description before its release is known here.
        table, owner = (self.flocks, fh) if flock else (self.posix, owner)
        if lock.type == F_UNLCK:
            try:
                await self._unlock(table, ino, owner, lock)
            except OSError:
                await self._told(lock.pid, ino)
                raise
            await self._tell_lost(lock.pid, ino)
            return
        self._refuse()
        if not flock:
            self.lockers.setdefault(fh, set()).add(owner)
        await self._acquire(table, ino, owner, lock, wait=wait)

    async def _acquire(
        self, table: LockTable, ino: int, owner: int, lock: Lock, *, wait: bool
    ) -> None:
        shared = self._shared
        since = turn = time.monotonic()
        claim = Claim(table.kind, lock.type, lock.start, lock.end)
        if shared is not None:
            await self._tell_lost(lock.pid, ino)
            await self._contents.show_name(ino)
            if lock.type == F_RDLCK:
                await self._publish_written(shared, table, ino, owner, lock, any_signal=wait)
        while True:
            if self.lost_by:
                await self._tell_lost(lock.pid, ino)  # maybe while it waited
            granted = shared is None or shared.grants(ino, claim, turn)
            if shared is not None and not granted:
                await detach(any_signal=wait)
                if table is self.flocks and table.holds(ino, owner):
                    # A conversion gives the old lock up first: two hosts that both want more can go on.
                    await self._unlock(table, ino, owner, lock._replace(type=F_UNLCK))
                if not table.conflicts(ino, owner, lock):
                    await shared.claim(ino, claim, wait=wait, since=since)
                    turn = 0.0  # it has yielded for long enough
                    continue
            try:
                if not granted:
                    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
                table.acquire(ino, owner, lock)
            except BlockingIOError:
                # A closed file does not keep its lock: the kernel does not wait for a release, so that a
                # process may ask for the lock before we have given it up.
                leaving = self._leaving.keys() if table is self.flocks else ()
                if not wait and not table.blockers(ino, owner, lock).issubset(leaving):
                    raise
            else:
                if shared is not None and lock.type == F_RDLCK:
                    shared.shrunk(ino)  # it may have been one for writing
                return
            await detach(any_signal=wait)
            await table.wait_free(ino, owner, lock)
            turn = since

    async def _unlock(
        self, table: LockTable, ino: int, owner: int, lock: Lock, *, closing: bool = False
    ) -> None:
        shared = self._shared
        if shared is None or not table.holds(ino, owner):
            table.acquire(ino, owner, lock)
            return
        if table.is_lost(ino, owner):
            try:
                await self._tell_lost(lock.pid, ino)
            finally:
                table.acquire(ino, owner, lock)
            return
        try:
            await self._publish_written(shared, table, ino, owner, lock, closing=closing)
        except OSError:
            await self._give_up(table, ino, owner, lock)
            raise
        # A process that is killed meanwhile keeps its locks until its files are closed, and published.
        await self._give_up(table, ino, owner, lock)

    async def _give_up(self, table: LockTable, ino: int, owner: int, lock: Lock) -> None:
        table.acquire(ino, owner, lock)
        if self._shared is not None and not self._shared.is_alone(ino):
            await detach()
            await self._shared.shrink(ino)

    async def _publish_written(
        self,
        shared: "SharedLocks",
        table: LockTable,
        ino: int,
        owner: int,
        lock: Lock,
        *,
        closing: bool = False,
        any_signal: bool = False,
    ) -> None:
        """Publish what was written in place before an owner gives up locks for writing, and have changes of
        names stored: others may lock the file next. Raises OSError if that fails. While this host is alone,
        a store through a mapping that no time shows waits until another host asks for a lock."""
        if not table.writes(ino, owner, lock):
            return
        if self._contents.is_changed_in_place(ino) or not shared.is_alone(ino):
            await detach(any_signal=any_signal)
            await self._contents.publish_in_place(ino, begun=not closing, pid=lock.pid)
        await shared.store_answered()

    def _refuse(self) -> None:
        if self._scope == "refuse":
            raise OSError(errno.ENOLCK, "the mount refuses locks (-o locks=refuse)")

    # -- closing ---------------------------------------------------------------------------------

    def may_end(self, fh: int, ino: int, owner: int) -> bool:
        """Return whether other hosts may get a lock when a descriptor is closed."""
        held = fh in self.lockers or self.posix.holds(ino, owner) or self.flocks.holds(ino, fh)
        return held and self._shared is not None

    async def closed(self, fh: int, ino: int, owner: int, pid: int, *, published: bool) -> None:
        """Drop a process's locks on a file when it closes a descriptor of it, as POSIX requires. Without
        locks, `lockers` and lost ones there are none to drop. Raises OSError if bytes written under them
        cannot be published, or a lock was lost. `published`: else the close fails in any case."""
        owners = self.lockers.get(fh)
        if owners is not None:
            owners.discard(owner)
            if not owners:
                del self.lockers[fh]
        if not published:
            await self._told(pid, ino)
        if self.posix.holds(ino, owner):
            all_of_it = Lock(F_UNLCK, 0, LAST_BYTE, pid)
            if published:
                await self._unlock(self.posix, ino, owner, all_of_it, closing=True)
            else:
                await self._give_up(self.posix, ino, owner, all_of_it)
        await self._tell_lost(pid, ino)

    async def releasing(self, fh: int, ino: int, release: Callable[[int], Awaitable[None]]) -> None:
        """Release a handle that has no descriptor any more, which publishes its bytes, and its locks."""
        owners = self.lockers.pop(fh, ())
        all_of_it = Lock(F_UNLCK, 0, LAST_BYTE, 0)
        self._leaving[fh] = trio.Event()
        try:
            try:
                await release(fh)
                writes = any(self.posix.writes(ino, owner, all_of_it) for owner in owners)
                if writes and self._shared is not None:
                    await self._shared.store_answered()
            finally:
                # Left are read locks of owners whose closes were not reported, and open file descriptions'.
                for owner in owners:
                    self.posix.release_owner(ino, owner)
                    if self._shared is not None:
                        self._shared.shrunk(ino)
                if self.flocks.holds(ino, fh):
                    await self._unlock(self.flocks, ino, fh, all_of_it, closing=True)
        finally:
            self._leaving.pop(fh).set()

    # -- what the mount tells of itself to other hosts (LockHolder) ------------------------------

    def held(self, ino: int) -> Iterable[Claim]:
        for table in (self.posix, self.flocks):
            for lock in table.held(ino):
                yield Claim(table.kind, lock.type, lock.start, lock.end)

    async def publish(self, ino: int) -> None:
        await self._contents.publish_in_place(ino, begun=False)

    async def released(self, ino: int) -> None:
        # The kernel reports the last close of a description, but the process does not wait for that.
        await self._kernel.caught_up()
        for fh, ended in list(self._leaving.items()):
            if self.flocks.holds(ino, fh):
                await ended.wait()

    async def refresh(self, ino: int) -> None:
        await self._contents.show_newest(ino)

    # -- locks that are lost ---------------------------------------------------------------------

    def lost(self) -> None:
        """Note that the session is over: other hosts may have taken locks that processes here believe to
        hold. Here they go on to exclude others until their processes have been told: these may write."""
        if self._shared is None:
            return
        for pid in list(self.lost_by):
            self._loser(pid)  # forgets who has ended
        for table in (self.posix, self.flocks):
            for ino, pid, writes in table.lose():
                log.error(
                    "%s: the locks of process %d are lost with the session: what it writes is not "
                    "published until it has closed, unlocked or locked the file",
                    self._describe(ino), pid,
                )  # fmt: skip
                if (loser := self._loser(pid)) is None:
                    try:
                        loser = self.lost_by[pid] = _Loser(os.pidfd_open(pid), {})
                    except OSError:
                        continue  # it has ended
                loser.inodes[ino] = writes or loser.inodes.get(ino, False)

    def _loser(self, pid: int) -> _Loser | None:
        """Return the process of this number if it lost locks, and was not told of all of them."""
        loser = self.lost_by.get(pid)
        if loser is None or not has_ended(loser.process):
            return loser
        os.close(self.lost_by.pop(pid).process)
        return None

    async def _tell_lost(self, pid: int, ino: int) -> None:
        """Raise OSError EIO, once, when a process locks, unlocks or closes a file whose lock it lost."""
        if self.lost_by and await self._told(pid, ino):
            raise OSError(errno.EIO, "the lock was lost: the mount was cut off from its cluster")

    async def _told(self, pid: int, ino: int) -> bool:
        """Note that a process gets an error when it locks, unlocks or closes a file. Return whether it had
        lost a lock of the file and was not told before. Then what it may have written since is set aside,
        and others on this host get locks again."""
        pid = process_of(pid)
        loser = self._loser(pid)
        if loser is None or ino not in loser.inodes:
            return False
        writes = loser.inodes.pop(ino)
        if not loser.inodes:
            os.close(self.lost_by.pop(pid).process)
        try:
            if writes:
                await self._contents.set_aside(ino)
        except OSError as error:
            log.error("%s: what was written without its lock stays: %s", self._describe(ino), error)
        finally:
            for table in (self.posix, self.flocks):
                table.release_lost(ino, pid)
        return True

    def check(self, pid: int) -> None:
        if self.lost_by and self._loser(process_of(pid)) is not None:
            raise OSError(errno.EIO, "the mount was cut off: close, unlock or lock that file first")
