"""Commit mutations to a map that only this process uses, and repair what a crash left.

The tree is always up to date: nothing is compared, and it changes as soon as the change is stored.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from ..kv import Compare
from .commit import Commit
from .inode import ROOT_INO, Inode
from .lookup import Totals
from .numbers import ALL_INOS, last_ino
from .planner import root_of
from .tree import Tree

log = logging.getLogger(__name__)

_QUOTAS = (b"q", b"r")


class LocalCommitter:
    """Commits changes of a tree whose map no other process changes."""

    writable = ALL_INOS

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._next_ino = ROOT_INO + 1

    def new_ino(self, directory: int) -> int:
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
        else:
            self._tree.enact(commit)
        return commit.inode

    async def flush(self) -> None:
        """Make everything done so far survive a crash."""
        self._tree.records.commit()

    async def load(self, visit: Callable[[Inode], None] = lambda inode: None) -> bool:
        """Make the root directory of a new store, and remove what a crash left: files that were never
        published. Return whether there was a crash; then visit(inode) was called with all others."""
        tree, records = self._tree, self._tree.records
        self._next_ino = last_ino(tree) + 1
        for key, _ in list(records.range(*_QUOTAS)):
            tree.quotas.take_limits(tree.inodes[int.from_bytes(key[1:], "big")])
        if tree.quotas.in_use:
            tree.quotas.update(())
        if records.note is not None:
            tree.inodes.totals = msgspec.msgpack.decode(records.note, type=Totals)
        else:
            self._discard_leftovers(visit)
        await self.carry_out(partial(root_of, tree))
        return records.note is None

    def leave(self) -> None:
        """Note that nothing is left to repair: the map is about to be closed."""
        self._tree.records.leave(msgspec.msgpack.encode(self._tree.inodes.totals))

    def _discard_leftovers(self, visit: Callable[[Inode], None]) -> None:
        tree = self._tree
        unpublished: list[Inode] = []
        for inode in tree.inodes.values():
            tree.inodes.totals.count(inode, 1)
            if inode.is_file and not inode.version:
                unpublished.append(inode)
            else:
                visit(inode)
        for inode in unpublished:
            commit = Commit()
            commit.names = [(parent, name, 0) for parent, name in tree.names_of(inode.ino)]
            commit.gone = [tree.inodes[inode.ino].copy()]
            commit.urgent = True
            tree.enact(commit)
        if unpublished:
            log.info("removing %d files that were never published", len(unpublished))
