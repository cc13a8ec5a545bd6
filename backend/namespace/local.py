"""Commit mutations to an engine that only this process uses, and repair what a crash left.

The tree is always up to date: nothing is compared, and it changes as soon as the transaction is applied.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial

from ..kv import Compare, Event, OwnEngine
from .changes import Commit, operations
from .inode import ROOT_INO, Inode
from .planner import root_of
from .tree import Tree

__all__ = ["LocalCommitter"]

log = logging.getLogger(__name__)


class LocalCommitter:
    """Commits changes of a strict tree, which `load` fills."""

    read_only = False

    def __init__(self, tree: Tree, engine: OwnEngine) -> None:
        self._tree = tree
        self._engine = engine
        self._next_ino = ROOT_INO + 1

    def new_ino(self) -> int:
        """Return a number that no inode has had since the store was opened."""
        ino = self._next_ino
        self._next_ino = ino + 1
        return ino

    async def carry_out(
        self, plan: Callable[[], Commit | None], guards: Sequence[Compare] = ()
    ) -> Inode | None:
        """Apply the commit that `plan` returns, and return its inode. No other process can make guards
        fail."""
        commit = plan()
        if commit is None:
            return None
        if commit.local:
            self._tree.enact_locally(commit)
            return commit.inode
        revision = await self._engine.transact(
            operations(commit), durable=commit.durable, urgent=commit.urgent
        )
        self._tree.enact(commit, revision)
        return commit.inode

    async def freshen(self) -> None:
        """Do nothing: no other process changes anything."""

    async def flush(self) -> None:
        """Make everything done so far survive a crash."""
        await self._engine.flush()

    async def idle(self) -> None:
        await self._engine.idle()

    async def load(self) -> None:
        """Fill the tree, and make the root directory of a new store. Names without an inode, inodes without
        a name and files that were never published are left over from a crash, and are removed. Raises
        OSError EIO when a record is damaged.
        """
        # Load one kind of records after the other: all together take more memory than the tree.
        for start, end in ((b"i", b"j"), (b"t", b"u"), (b"d", b"e")):
            records = await self._engine.range(start, end)
            self._tree.take(Event(mod_revision, key, value) for key, value, mod_revision in records)
        await self.carry_out(partial(root_of, self._tree))
        self._next_ino = max(self._tree.inodes) + 1
        await self._discard_leftovers()
        await self._correct_link_counts()

    async def _discard_leftovers(self) -> None:
        tree = self._tree
        unpublished = [
            ino for ino, inode in tree.inodes.items() if inode.is_file and not inode.version
        ]
        nameless = [ino for ino in tree.inodes if not (ino == ROOT_INO or tree.parents_of(ino))]
        commit = Commit()
        found = (*tree.dangling, *tree.names_of_all(unpublished))
        commit.names = [(parent, name, 0) for parent, name in found]
        commit.gone = [tree.inodes[ino] for ino in {*unpublished, *nameless}]
        if commit.names or commit.gone:
            log.info(
                "removing %d unpublished names and %d nameless inodes",
                len(commit.names),
                len(commit.gone),
            )
            await self.carry_out(lambda: commit)

    async def _correct_link_counts(self) -> None:
        commit = Commit()
        commit.inodes = []
        for ino, inode in self._tree.inodes.items():
            links = len(self._tree.parents_of(ino))
            if not inode.is_dir and inode.nlink != links:
                log.warning("inode %d had nlink %d, has %d names", ino, inode.nlink, links)
                fixed = inode.copy()
                fixed.nlink = links
                commit.inodes.append(fixed)
        if commit.inodes:
            await self.carry_out(lambda: commit)
