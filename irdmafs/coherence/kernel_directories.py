"""Where the kernel of this host has directories, in a cluster, and when it can move them.

Another host may have removed or moved them since.

A program changes a name with the kernel's entry for it. When a name is removed or leads to another
directory, the kernel takes the directory that it had there for removed (S_DEAD, vfs_rmdir() and
vfs_rename() in fs/namei.c): nothing in it is found on this host any more, wherever it is. So such a change
is refused with ESTALE, and the kernel looks the names up again (`KernelNames`).

A lookup may lead to a directory that another host has moved. The kernel, which has it elsewhere, then moves
its own entry, for which it only tries to take the locks of a rename (__d_unalias in fs/dcache.c): while a
program of this host changes names there it gives ESTALE, looks the name up once more, and then gives up.
So such a lookup is answered when nobody holds them (`KernelLocks`, `Moves`).
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import trio

from ..backend.namespace import Inode
from .kernel_cache import Name
from .nodes import Node, NodeTable

_PURGE_EVERY = 1000

# The kernel has its answer, and has released its locks, a little after it was sent; a program that has
# looked names up for a change, and so has locked them, asks for it within that time.
_SETTLED_S = 0.001
# A program may change names all the time.
_PATIENCE_S = 0.5
# A thread looks a name up again within this time, if that is because it could not be moved.
_AGAIN_S = 0.1
# Directories that were moved within that time.
_MOVED_MAX = 1000


class KernelNames:
    """The last answers about names of directories that the kernel knows."""

    def __init__(self, nodes: NodeTable) -> None:
        self._nodes = nodes
        self._inodes: dict[Name, int] = {}
        self._names: dict[int, Name] = {}
        self._purge_at = _PURGE_EVERY

    def found(self, name: Name, inode: Inode | None) -> None:
        """Note what the kernel is told that a name leads to."""
        self._names.pop(self._inodes.pop(name, 0), None)
        if inode is None or not inode.is_dir:
            return
        self._inodes.pop(self._names.get(inode.ino, name), None)
        self._inodes[name], self._names[inode.ino] = inode.ino, name
        if len(self._inodes) > self._purge_at:
            self._purge()

    def of(self, *names: Name) -> dict[Name, int]:
        """Return the directories that the kernel may have under these names."""
        return {
            name: ino
            for name in names
            if (ino := self._inodes.get(name, 0)) and self._nodes.has_nodes(ino)
        }

    def _purge(self) -> None:
        """Forget directories that the kernel has forgotten."""
        self._names = {ino: name for ino, name in self._names.items() if self._nodes.has_nodes(ino)}
        self._inodes = {name: ino for ino, name in self._names.items()}
        self._purge_at = 2 * len(self._inodes) + _PURGE_EVERY


class KernelLocks:
    """Which directories are locked by requests that have not been answered."""

    def __init__(self) -> None:
        self._held: Counter[int] = Counter()
        # Renames from one directory to another: there is one at a time.
        self._moves = 0
        self._released = trio.Event()

    @contextlib.contextmanager
    def hold(self, *directories: int) -> Iterator[None]:
        """Enclose a change of names in a directory, or in two."""
        moves = len(set(directories)) > 1
        self._moves += moves
        self._held.update(directories)
        try:
            yield
        finally:
            self._moves -= moves
            for directory in directories:
                self._held[directory] -= 1
                if not self._held[directory]:
                    del self._held[directory]
            self._released.set()
            self._released = trio.Event()

    def are_held(self, directory: int) -> bool:
        """Return whether the kernel cannot move an entry away from a directory now."""
        return self._moves > 0 or directory in self._held

    async def released(self, directory: int) -> None:
        """Return when it can, or after a while."""
        with trio.move_on_after(_PATIENCE_S):
            await trio.sleep(_SETTLED_S)
            while self.are_held(directory):
                await self._released.wait()
                await trio.sleep(_SETTLED_S)


@dataclass(slots=True)
class _Move:
    """A directory that threads were told a new place of; `before`: where the kernel had it."""

    before: int
    told_s: float
    threads: set[int]


class Moves:
    """Directories that lookups lead to elsewhere than where the kernel has them."""

    def __init__(self, locks: KernelLocks) -> None:
        self._locks = locks
        self._told: dict[int, _Move] = {}

    def may_tell(self, node: Node, parent: int, pid: int) -> bool:
        """Return whether a thread may be told now that a directory is in `parent`."""
        move = self._move(node, parent)
        if move is None:
            return True
        # Told once more: the kernel could not move it.
        if pid in move.threads or self._locks.are_held(move.before):
            return False
        self._tell(node, move, pid)
        return True

    async def wait_to_tell(self, node: Node, parent: int, pid: int) -> None:
        """Return when it may be, or after a while."""
        move = self._move(node, parent)
        if move is None:
            return
        await self._locks.released(move.before)
        if pid in move.threads:
            move.threads.discard(pid)
        else:
            self._tell(node, move, pid)

    def _move(self, node: Node, parent: int) -> _Move | None:
        move = self._told.get(node.id)
        if move is not None and time.monotonic() < move.told_s + _AGAIN_S:
            return move
        if node.name is None or node.name[0] == parent:
            return None
        return _Move(node.name[0], 0.0, set())

    def _tell(self, node: Node, move: _Move, pid: int) -> None:
        if len(self._told) >= _MOVED_MAX:
            self._told.clear()
        move.told_s = time.monotonic()
        move.threads.add(pid)
        self._told[node.id] = move
