"""How a mutation of the directory tree gets into the key-value engine and from there into the replica.

- On an engine that is this process's alone, the replica is all there is: nothing is compared, and the
  replica changes as soon as the transaction is in.
- On a shared engine the replica may be behind. The transaction compares every record whose content
  the decision rests on, and the replica changes only when the watch tells of it, for which the
  mutation waits: so it shows all changes in the order of their revisions. A conflict, and likewise
  an error or "nothing to do" that was found on a replica which may be behind, is confirmed: the
  replica is brought up to date and the mutation is decided anew.
"""

import errno
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import trio

from .inode import ROOT_INO, Inode, fail, inode_key, name_key, time_key
from .kv import Compare, Conflict, Delete, Empty, Engine, Exists, Put
from .quotas import Charge
from .records import NEXT_INO_KEY
from .tree import Tree

__all__ = ["Commit", "Committer", "Hub"]

# Inode numbers of a shared engine are taken in blocks; the next one when fewer are left than this.
_BLOCK_INOS = 4096
_SPARE_INOS = 1024
# A mutation that is decided anew so often meets others all the time; the pause before it grows to
# the longest after 6 attempts, so it has gone on for about 3 s.
_ATTEMPTS_MAX = 40
_PAUSE_FIRST_S = 0.002
_PAUSE_MAX_S = 0.1
# etcd takes 128 compares in a transaction; some are the engine's, some a caller's guards.
_COMPARES_MAX = 120


class Hub(Protocol):
    """What tells this process of changes to a shared engine (see replica)."""

    async def wait_applied(self, revision: int) -> None:
        """Return when the replica has everything up to a revision."""
        ...

    async def barrier(self) -> None:
        """Return when the replica has whatever anybody was told before this call."""
        ...


class Commit:
    """What one transaction is to do. Made for every mutation: what is not set costs nothing."""

    inode: Inode | None = None  # what the caller gets
    names: Sequence[tuple[int, bytes, int]] = ()  # (parent, name, ino; 0: the name is removed)
    inodes: Sequence[Inode] = ()  # records to put
    new: Inode | None = None  # did not exist; kept for the caller, though others remove it at once
    gone: Sequence[Inode] = ()  # inodes that lose their record, an empty directory for example
    keep = False  # these stay as local orphans
    times: Sequence[tuple[int, int | None]] = ()  # (directory, ns; None: its inode record has them)
    within: Sequence[int] = ()  # directories that must exist
    fixed: Sequence[Inode] = ()  # inodes that must not have changed
    local = False  # a change of local orphans that nobody else is to know
    durable = True
    urgent = False
    charge: Charge | None = None  # of `inode`, where that takes room of a quota


class Committer(Tree):
    """A tree that can be changed through an engine.

    On a shared engine `hub` must be set, and be started, before anything else is done.
    after_commit(directories, revision) is awaited before a mutation returns; `directories` hold what
    was changed, or are it.
    """

    hub: Hub

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine
        self._shared = engine.shared
        self.after_commit: Callable[[tuple[int, ...], int], Awaitable[None]] | None = None
        # Nothing is changed through this tree: EROFS.
        self.read_only = False
        self._next_ino = ROOT_INO + 1
        self._last_ino = 0 if self._shared else 2**63
        self._taking_inos = trio.Lock()

    async def _carry_out(
        self, plan: Callable[[], Commit | None], guards: Sequence[Compare] = ()
    ) -> Inode | None:
        """Do what `plan` decides on the replica, and return the commit's inode. `plan` may be asked
        again; it returns None when there is nothing to do."""
        if self._shared:
            return await self._agree(plan, guards)
        commit = plan()
        if commit is None:
            return None
        if commit.local:
            self._enact_locally(commit)
            return commit.inode
        revision = await self._engine.transact(
            (), self._operations(commit), durable=commit.durable, urgent=commit.urgent
        )
        for ino, time_ns in commit.times:
            self._set_time(ino, time_ns)
        for inode in commit.inodes:
            inode.revision = revision
            if inode.is_dir:
                self._put(inode)
            else:
                self.inodes[inode.ino] = inode
        if commit.gone:
            for inode in commit.gone:
                inode.revision = 0
                self.inodes[inode.ino] = inode
        for parent, name, ino in commit.names:
            self._set_name(parent, name, ino, revision)
        if commit.gone:
            for inode in commit.gone:
                self._let_go(inode.ino, keep=commit.keep)
        if self.quotas.in_use:
            self.quotas.update(inode.ino for inode in (*commit.inodes, *commit.gone))
        return commit.inode

    def _enact_locally(self, commit: Commit) -> None:
        for inode in commit.inodes:
            self.inodes[inode.ino] = inode

    def _operations(self, commit: Commit) -> list[Put | Delete]:
        operations: list[Put | Delete] = []
        for parent, name, ino in commit.names:
            key = name_key(parent, name)
            operations.append(Put(key, ino.to_bytes(8, "big")) if ino else Delete(key))
        for inode in commit.inodes:
            key, value = inode_key(inode.ino), inode.encode()
            operations.append(Put(key, value))
        for ino, time_ns in commit.times:
            key = time_key(ino)
            operations.append(
                Delete(key) if time_ns is None else Put(key, time_ns.to_bytes(8, "big"))
            )
        if commit.gone:
            for inode in commit.gone:
                operations.append(Delete(inode_key(inode.ino)))
                # Others may have put the times of a directory without us knowing yet.
                if inode.is_dir and (self._shared or inode.ino in self._times):
                    operations.append(Delete(time_key(inode.ino)))
        return operations

    # -- a shared engine -------------------------------------------------------------------------

    def _compares(self, commit: Commit) -> list[Compare]:
        """All that must hold when the transaction is applied."""
        revisions: dict[bytes, int] = {}
        for parent, name, _ in commit.names:
            known = self._children[parent].get(name)
            revisions[name_key(parent, name)] = known.revision if known is not None else 0
        for inode in (*commit.inodes, *commit.gone, *commit.fixed):
            revisions[inode_key(inode.ino)] = inode.revision
        compares: list[Compare] = [*revisions.items()]
        compares += [Exists(inode_key(ino)) for ino in commit.within]
        compares += [
            Empty(name_key(inode.ino, b""), name_key(inode.ino + 1, b""))
            for inode in commit.gone
            if inode.is_dir
        ]
        if len(compares) > _COMPARES_MAX:
            raise fail(errno.ENAMETOOLONG, "a directory cannot be moved that deep")
        return compares

    async def _agree(
        self, plan: Callable[[], Commit | None], guards: Sequence[Compare]
    ) -> Inode | None:
        if self.read_only:
            raise fail(errno.EROFS)
        if self._last_ino - self._next_ino < _SPARE_INOS:
            await self._take_inos()
        fresh = False
        for attempt in range(_ATTEMPTS_MAX):
            if attempt > 1:
                pause_s = min(_PAUSE_FIRST_S * 2 ** (attempt - 2), _PAUSE_MAX_S)
                await trio.sleep(random.uniform(0, pause_s))
            try:
                commit = plan()
            except OSError:
                if fresh:
                    raise
                commit = None
            if commit is None:
                if fresh:
                    return None
            elif commit.local:
                self._enact_locally(commit)
                return commit.inode
            elif commit.charge is not None and commit.charge.is_near and not fresh:
                pass
            elif await self._succeeds(commit, guards):
                return commit.inode
            await self.hub.barrier()
            fresh = True
        raise fail(errno.EBUSY, "others change the same names or inodes all the time")

    async def _succeeds(self, commit: Commit, guards: Sequence[Compare]) -> bool:
        """Commit to the shared engine, and wait until that shows in the replica. False: something has
        changed that it rests on. Raises Conflict if that is one of the guards."""
        directories = self._directories(commit)
        keeping = [inode.ino for inode in commit.gone] if commit.keep else []
        if commit.new is not None:
            keeping.append(commit.new.ino)
        self._keeping += keeping
        if commit.charge is not None and commit.inode is not None:
            self.quotas.expect(commit.inode.ino, commit.charge)
        try:
            revision = await self._engine.transact(
                [*self._compares(commit), *guards], self._operations(commit)
            )
            await self.hub.wait_applied(revision)
            if self.after_commit is not None:
                await self.after_commit(directories, revision)
        except Conflict as conflict:
            if any(conflict.key == _key_of(guard) for guard in guards):
                raise
            return False
        finally:
            for ino in keeping:
                self._keeping.remove(ino)
            if commit.charge is not None and commit.inode is not None:
                self.quotas.update((commit.inode.ino,))
        for inode in commit.inodes:
            inode.revision = revision
        if commit.inode is not None:
            shown = self.inodes.get(commit.inode.ino)
            if shown is not None and shown.revision == revision:
                commit.inode = shown  # the same, with what is derived
        return True

    def _directories(self, commit: Commit) -> tuple[int, ...]:
        """Those that a commit changes something in, or that it changes."""
        found = {ino for ino, _ in commit.times}
        for inode in commit.inodes:
            found.update((inode.ino,) if inode.is_dir else self.parents_of(inode.ino))
        found.update(inode.ino for inode in commit.gone if inode.is_dir)
        return tuple(found)

    # -- inode numbers ---------------------------------------------------------------------------

    def _new_ino(self) -> int:
        ino = self._next_ino
        if ino > self._last_ino:
            raise fail(
                errno.ENFILE, "more files without a name at once than numbers were taken for"
            )
        self._next_ino = ino + 1
        return ino

    async def _take_inos(self) -> None:
        """Take a block of inode numbers; what was left of the one before is never used."""
        async with self._taking_inos:
            if self._last_ino - self._next_ino >= _SPARE_INOS:
                return
            for _ in range(_ATTEMPTS_MAX):
                first, revision = self._next_block
                after = first + _BLOCK_INOS
                try:
                    await self._engine.transact(
                        ((NEXT_INO_KEY, revision),), (Put(NEXT_INO_KEY, after.to_bytes(8, "big")),)
                    )
                except Conflict:
                    await trio.sleep(random.uniform(0, _PAUSE_MAX_S))
                    await self.hub.barrier()
                else:
                    self._next_ino, self._last_ino = first, after - 1
                    return
            raise fail(errno.EBUSY, "others take inode numbers all the time")


def _key_of(compare: Compare) -> bytes:
    if isinstance(compare, Exists):
        return compare.key
    return compare.start if isinstance(compare, Empty) else compare[0]
