"""Commit mutations to an engine that other processes change, too, and apply them to the tree.

The tree may be out of date. A transaction compares every record that the decision depends on, and the tree
changes only when the watch yields the events, for which the mutation waits: so the tree shows all changes
in the order of their revisions. A conflict, and likewise an error or "nothing to do" that was decided on a
tree which may be out of date, is confirmed: the tree is brought up to date and the mutation is decided
anew."""

import errno
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import trio

from ..kv import Compare, Conflict, Empty, Exists, Put
from ..model.records import NEXT_INO_KEY
from .commit import Commit, compares, operations
from .inode import ROOT_INO, Inode, fail
from .tree import Tree

if TYPE_CHECKING:
    from ..etcd.engine import EtcdEngine

__all__ = ["Hub", "SharedCommitter"]

# Inode numbers of a shared engine are taken in blocks; the next one when fewer are left than this.
_BLOCK_INOS = 4096
_SPARE_INOS = 1024
# A mutation that is decided anew so often conflicts every time; the pause before each grows to the longest
# after 6 attempts, so these take about 3 s.
_ATTEMPTS_MAX = 40
_PAUSE_FIRST_S = 0.002
_PAUSE_MAX_S = 0.1


class Hub(Protocol):
    """The source of changes to a shared engine in this process (see replica)."""

    async def wait_applied(self, revision: int) -> None:
        """Return when the replica has everything up to a revision."""
        ...

    async def barrier(self) -> None:
        """Return when the replica has every change that was acknowledged before this call."""
        ...


class SharedCommitter:
    """Commits changes of a tree that `hub` keeps up to date. The hub has to be started first.

    after_commit(directories, revision) is awaited before a mutation returns; `directories` were changed, or
    hold a changed inode. `read_only`: every change is refused with EROFS.
    """

    def __init__(
        self,
        tree: Tree,
        engine: "EtcdEngine",
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
        """Apply the commit that `plan` decides, and return its inode. After a conflict `plan` is called
        again.

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
        """Commit to the shared engine, wait until the replica has it, and return True. Return False if a
        record that it depends on has changed. Raises Conflict if that is one of the guards."""
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
            unseen = commit.new is not None and commit.new.maker
            if self._after_commit is not None and not unseen:
                await self._after_commit(directories, revision)
        for inode in commit.inodes:
            inode.revision = revision
        if commit.inode is not None:
            shown = tree.inodes.get(commit.inode.ino)
            if shown is not None and shown.revision == revision:
                commit.inode = shown  # the same, with derived fields
        return True

    def _directories(self, commit: Commit) -> tuple[int, ...]:
        """Return the directories that a commit changes, or whose inodes it changes."""
        found = {ino for ino, _ in commit.times}
        for inode in commit.inodes:
            found.update((inode.ino,) if inode.is_dir else self._tree.parents_of(inode.ino))
        found.update(inode.ino for inode in commit.gone if inode.is_dir)
        return tuple(found)

    async def freshen(self) -> None:
        """Return when the tree has every change that was acknowledged before this call."""
        await self._hub.barrier()

    async def flush(self) -> None:
        """Do nothing: every transaction survives a crash when it is acknowledged."""

    # -- inode numbers ---------------------------------------------------------------------------

    def new_ino(self) -> int:
        """Return a number that no inode ever had."""
        ino = self._next_ino
        while ino in self._tree.inodes:  # the record of the next number was damaged
            ino += 1
        if ino > self._last_ino:
            raise fail(
                errno.ENFILE, "more files without a name at once than numbers were taken for"
            )
        self._next_ino = ino + 1
        return ino

    async def _take_inos(self) -> None:
        """Reserve another block of inode numbers; the numbers left of the former block are never used."""
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
