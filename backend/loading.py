"""How the replica is filled, and what a crash left is put right."""

import errno
import logging
import os
import stat
import time
from collections.abc import Coroutine, Sequence
from typing import Any, overload

from .commit import Commit, Committer
from .inode import ROOT_INO, Inode, fail
from .kv import Engine, Event, KeyValue

__all__ = ["LoadedTree"]

log = logging.getLogger(__name__)


class LoadedTree(Committer):
    """A tree that knows where it comes from.

    On an engine that is this process's alone a record that makes no sense stops everything; in a
    cluster one is passed over, and what others are about to finish is nobody's left-over.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._hidden: list[tuple[int, bytes, int]] = []

    @overload
    def load(self) -> Coroutine[Any, Any, None]: ...
    @overload
    def load(self, records: Sequence[KeyValue], revision: int) -> None: ...
    def load(
        self, records: Sequence[KeyValue] | None = None, revision: int = 0
    ) -> Coroutine[Any, Any, None] | None:
        """Fill the replica: as a consumer of the replica hub from `records`, else from the engine.

        The latter makes the root directory of a new store. Names without an inode, inodes without a
        name and files that were never published are left-overs of a crash and are removed. Raises
        OSError EIO when a record is damaged.
        """
        if records is None:
            return self._load_own()
        self.take_all(records, revision)
        return None

    async def _load_own(self) -> None:
        assert not self._shared
        # One kind after the other: a list of all the records takes more memory than the tree.
        for start, end in ((b"i", b"j"), (b"t", b"u"), (b"d", b"e")):
            records = await self._engine.range(start, end)
            self._take(Event(mod_revision, key, value) for key, value, mod_revision in records)
        await self.ensure_root()
        self._next_ino = max(self.inodes) + 1
        await self._discard_leftovers()

    async def ensure_root(self) -> None:
        """Make the root directory unless there is one, and be ready to make more."""
        if self._shared:
            await self._take_inos()
        if ROOT_INO not in self.inodes:
            await self._carry_out(self._plan_root)

    def _plan_root(self) -> Commit | None:
        if ROOT_INO in self.inodes:
            return None
        now = time.time_ns()
        root = Inode(ROOT_INO, stat.S_IFDIR | 0o755, os.getuid(), os.getgid(), now)
        commit = Commit()
        commit.inode, commit.inodes = root, (root,)
        return commit

    def _complain(self, message: str) -> None:
        if not self._shared:
            raise fail(errno.EIO, message)
        super()._complain(message)

    def _dangling(self, parent: int, name: bytes) -> None:
        if self._shared:
            super()._dangling(parent, name)
        else:
            self._hidden.append((parent, name, 0))

    async def _discard_leftovers(self) -> None:
        unpublished = {
            ino: inode for ino, inode in self.inodes.items() if inode.is_file and not inode.version
        }
        names = [
            (parent, name, 0)
            for parent, children in (self._children.items() if unpublished else ())
            for name, dentry in children.items()
            if dentry.ino in unpublished
        ]
        commit = Commit()
        commit.names = names + self._hidden
        commit.gone = [
            inode
            for ino, inode in self.inodes.items()
            if ino in unpublished or not (ino == ROOT_INO or self.parents_of(ino))
        ]
        if commit.names or commit.gone:
            log.info(
                "removing %d unpublished names and %d nameless inodes",
                len(commit.names),
                len(commit.gone),
            )
            await self._carry_out(lambda: commit)
        commit = Commit()
        commit.inodes = []
        for ino, inode in self.inodes.items():
            links = len(self.parents_of(ino))
            if not inode.is_dir and inode.nlink != links:
                log.warning("inode %d had nlink %d, has %d names", ino, inode.nlink, links)
                fixed = inode.copy()
                fixed.nlink = links
                commit.inodes.append(fixed)
        if commit.inodes:
            await self._carry_out(lambda: commit)
