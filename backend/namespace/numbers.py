"""Inode numbers of a shared engine: a mount takes them in blocks, those of each subvolume by themselves."""

import errno
import random
from typing import TYPE_CHECKING

import trio

from ..kv import Conflict, Put
from .inode import fail
from .others import Hub
from .subvolumes import next_ino_key, numbers_of, subvolume_of
from .tree import Tree

if TYPE_CHECKING:
    from ..etcd.engine import EtcdEngine

_BLOCK = 4096
# The next block is taken when fewer numbers are left than this.
_SPARE = 1024
_ATTEMPTS_MAX = 40
_PAUSE_MAX_S = 0.1


class Spent(Exception):
    """There is no number left; `InodeNumbers.take` gets more."""


class InodeNumbers:
    """The numbers that this mount has taken. `wanted` are the subvolumes that need more. `writable` as for
    SharedCommitter."""

    def __init__(self, tree: Tree, engine: "EtcdEngine", hub: Hub, writable: range) -> None:
        self._tree = tree
        self._engine = engine
        self._hub = hub
        self._writable = writable
        self.wanted = {subvolume_of(writable.start)} if writable else set()
        self._left: dict[int, range] = {}  # by subvolume
        self._taking = trio.Lock()

    def new(self, directory: int) -> int:
        """Return a number that no inode ever had, for one in a directory. Raises Spent, and OSError
        EROFS."""
        if directory not in self._writable:
            raise fail(errno.EROFS)
        subvolume = subvolume_of(directory)
        left = self._left.get(subvolume, range(0))
        while left and left[0] in self._tree.inodes:  # the record of the next number was damaged
            left = left[1:]
        if len(left) <= _SPARE:
            self.wanted.add(subvolume)
        if not left:
            raise Spent
        self._left[subvolume] = left[1:]
        return left[0]

    async def take(self) -> None:
        """Reserve another block where it is wanted; what is left of the former one is never used."""
        async with self._taking:
            while self.wanted:
                subvolume = next(iter(self.wanted))
                await self._take(subvolume)
                self.wanted.discard(subvolume)

    async def _take(self, subvolume: int) -> None:
        for _ in range(_ATTEMPTS_MAX):
            first, revision = self._tree.next_block(subvolume)
            numbers = range(first, first + _BLOCK)
            if numbers[-1] not in numbers_of(subvolume):
                raise fail(errno.ENOSPC, "there are no inode numbers left")
            key = next_ino_key(subvolume)
            try:
                await self._engine.transact(
                    [(key, revision)], [Put(key, numbers.stop.to_bytes(8, "big"))]
                )
            except Conflict:
                await trio.sleep(random.uniform(0, _PAUSE_MAX_S))
                await self._hub.barrier()
            else:
                self._left[subvolume] = numbers
                return
        raise fail(errno.EBUSY, "others take inode numbers all the time")
