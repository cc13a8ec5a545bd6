"""How a mutation gets into an engine that others change, too, and from there into the tree.

The tree may be behind. A transaction compares every record whose content the decision rests on, and the
tree changes only when the watch tells of it, for which the mutation waits: so it shows all changes in the
order of their revisions. A conflict, and likewise an error or "nothing to do" that was found on a tree
which may be behind, is confirmed: the tree is brought up to date and the mutation is decided anew.
"""

import errno
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import trio

from ..cluster.records import NEXT_INO_KEY
from ..kv import Compare, Conflict, Empty, Exists, Put, SharedEngine
from .changes import Commit, compares, operations
from .inode import ROOT_INO, Inode, fail
from .tree import Tree

__all__ = ["Hub", "SharedCommitter"]

# Inode numbers of a shared engine are taken in blocks; the next one when fewer are left than this.
_BLOCK_INOS = 4096
_SPARE_INOS = 1024
# A mutation that is decided anew so often meets others all the time; the pause before it grows to
# the longest after 6 attempts, so it has gone on for about 3 s.
_ATTEMPTS_MAX = 40
_PAUSE_FIRST_S = 0.002
_PAUSE_MAX_S = 0.1


class Hub(Protocol):
    """What tells this process of changes to a shared engine (see replica)."""

    async def wait_applied(self, revision: int) -> None:
        """Return when the replica has everything up to a revision."""
        ...

    async def barrier(self) -> None:
        """Return when the replica has whatever anybody was told before this call."""
        ...


class SharedCommitter:
    """Commits changes of a tree that `hub` keeps. The hub has to be started before anything is done.

    after_commit(directories, revision) is awaited before a mutation returns; `directories` hold what
    was changed, or are it. `read_only`: nothing is changed, EROFS.
    """

    def __init__(
        self,
        tree: Tree,
        engine: SharedEngine,
        hub: Hub,
        *,
        after_commit: Callable[[tuple[int, ...], int], Awaitable[None]] | None = None,
        read_only: bool = False,
    ) -> None:
        self.read_only = read_only
        self._tree = tree
        self._engine = engine
        self._hub = hub
        self._after_commit = after_commit
        self._next_ino = ROOT_INO + 1
        self._last_ino = 0
        self._taking_inos = trio.Lock()

    async def carry_out(
        self, plan: Callable[[], Commit | None], guards: Sequence[Compare] = ()
    ) -> Inode | None:
        """Do what `plan` decides, asked again where others were first, and return the commit's inode.

        Raises OSError EBUSY and Conflict, if one of the guards does not hold.
        """
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
                self._tree.enact_locally(commit)
                return commit.inode
            elif commit.charge is not None and commit.charge.is_near and not fresh:
                pass
            elif await self._succeeds(commit, guards):
                return commit.inode
            await self._hub.barrier()
            fresh = True
        raise fail(errno.EBUSY, "others change the same names or inodes all the time")

    async def _succeeds(self, commit: Commit, guards: Sequence[Compare]) -> bool:
        """Commit to the shared engine, and wait until that shows in the replica. False: something has
        changed that it rests on. Raises Conflict if that is one of the guards."""
        directories = self._directories(commit)
        tree = self._tree
        revisions = [tree.name_revision(parent, name) for parent, name, _ in commit.names]
        with tree.keeping(commit):
            try:
                revision = await self._engine.transact(
                    [*compares(commit, revisions), *guards], operations(commit)
                )
            except Conflict as conflict:
                if any(conflict.key == _key_of(guard) for guard in guards):
                    raise
                return False
            await self._hub.wait_applied(revision)
            if self._after_commit is not None:
                await self._after_commit(directories, revision)
        for inode in commit.inodes:
            inode.revision = revision
        if commit.inode is not None:
            shown = tree.inodes.get(commit.inode.ino)
            if shown is not None and shown.revision == revision:
                commit.inode = shown  # the same, with what is derived
        return True

    def _directories(self, commit: Commit) -> tuple[int, ...]:
        """Those that a commit changes something in, or that it changes."""
        found = {ino for ino, _ in commit.times}
        for inode in commit.inodes:
            found.update((inode.ino,) if inode.is_dir else self._tree.parents_of(inode.ino))
        found.update(inode.ino for inode in commit.gone if inode.is_dir)
        return tuple(found)

    async def freshen(self) -> None:
        """Return when the tree has whatever anybody was told before this call."""
        await self._hub.barrier()

    async def flush(self) -> None:
        """Every transaction survives a crash when it is acknowledged."""

    async def idle(self) -> None:
        """Nothing is put off."""

    # -- inode numbers ---------------------------------------------------------------------------

    def new_ino(self) -> int:
        """Return a number that no inode ever had."""
        ino = self._next_ino
        if ino > self._last_ino:
            raise fail(
                errno.ENFILE, "more files without a name at once than numbers were taken for"
            )
        self._next_ino = ino + 1
        return ino

    async def _take_inos(self) -> None:
        """Have a block of inode numbers to make more; what was left of the one before is never used."""
        async with self._taking_inos:
            if self._last_ino - self._next_ino >= _SPARE_INOS:
                return
            for _ in range(_ATTEMPTS_MAX):
                first, revision = self._tree.next_block
                after = first + _BLOCK_INOS
                try:
                    await self._engine.transact(
                        ((NEXT_INO_KEY, revision),), (Put(NEXT_INO_KEY, after.to_bytes(8, "big")),)
                    )
                except Conflict:
                    await trio.sleep(random.uniform(0, _PAUSE_MAX_S))
                    await self._hub.barrier()
                else:
                    self._next_ino, self._last_ino = first, after - 1
                    return
            raise fail(errno.EBUSY, "others take inode numbers all the time")


def _key_of(compare: Compare) -> bytes:
    if isinstance(compare, Exists):
        return compare.key
    return compare.start if isinstance(compare, Empty) else compare[0]
