"""Inode numbers of a shared engine: those of subvolumes, and the blocks in which a mount takes them.

A subvolume is a directory that a mount can be kept to. etcd's roles are ranges of keys, and the keys of
names, inodes, locks and claims begin with the numbers of inodes. So the inodes of a subvolume have numbers
of a range of their own; the first is the directory's. As between project quotas, nothing is moved or linked
into it or out of it: EXDEV.
"""

import errno
import random
from typing import TYPE_CHECKING

import trio

from ..kv import Conflict, Put
from ..model.records import NEXT_INO_KEY, NEXT_INO_OF, key_of
from .inode import FIRST_VIRTUAL_INO, ROOT_INO, fail, inode_key
from .lookup import Names
from .others import Hub

if TYPE_CHECKING:
    from ..etcd.engine import EtcdEngine

# All that have records, those of subvolumes among them.
ALL_INOS = range(ROOT_INO, FIRST_VIRTUAL_INO)
_SIZE = 1 << 36
# The directories that may be subvolumes.
SUBVOLUMES = range(FIRST_VIRTUAL_INO // 2, FIRST_VIRTUAL_INO, _SIZE)
_BLOCK = 1 << 14
# The next block is taken when fewer numbers are left than this.
_SPARE = 1024
_ATTEMPTS_MAX = 40
_PAUSE_MAX_S = 0.1


def subvolume_of(ino: int) -> int:
    """Return the directory of the subvolume that an inode is in; ROOT_INO if it is in none."""
    return ino & -_SIZE if SUBVOLUMES.start <= ino < SUBVOLUMES.stop else ROOT_INO


def numbers_of(subvolume: int) -> range:
    """Return the numbers of a subvolume's inodes; for ROOT_INO of those that are in none."""
    return range(subvolume, SUBVOLUMES.start if subvolume == ROOT_INO else subvolume + _SIZE)


def belongs(ino: int, directory: int) -> bool:
    """Return whether an inode may have a name in a directory."""
    own, subvolume = subvolume_of(ino), subvolume_of(directory)
    return own == subvolume or (subvolume == ROOT_INO and ino == own)


def next_ino_key(subvolume: int) -> bytes:
    """Return the key of the next free inode number of a subvolume; ROOT_INO: outside of all."""
    return NEXT_INO_KEY if subvolume == ROOT_INO else key_of(NEXT_INO_OF, subvolume)


def last_ino(tree: Names, subvolume: int = ROOT_INO) -> int:
    """Return the largest number of an inode of a tree, in a subvolume or outside of all."""
    numbers = numbers_of(subvolume)
    key = tree.records.last(inode_key(numbers.start), inode_key(numbers.stop))
    return int.from_bytes(key[1:], "big") if key is not None else subvolume


class Spent(Exception):
    """There is no number left; `InodeNumbers.take` gets more."""


class InodeNumbers:
    """The numbers that this mount has taken. `wanted` are the subvolumes that need more. `writable` as for
    SharedCommitter."""

    def __init__(self, tree: Names, engine: "EtcdEngine", hub: Hub, writable: range) -> None:
        self._tree = tree
        self._engine = engine
        self._hub = hub
        self._writable = writable
        self.wanted = {subvolume_of(writable.start)} if writable else set()
        self._left: dict[int, range] = {}  # by subvolume
        # In a restored etcd others may take them, too.
        engine.calls.trust_listeners.append(self._left.clear)
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
                told = Put(key, numbers.stop.to_bytes(8, "big"))
                await self._engine.transact([(key, revision)], [told])
            except Conflict:
                await trio.sleep(random.uniform(0, _PAUSE_MAX_S))
                await self._hub.barrier()
            else:
                self._left[subvolume] = numbers
                return
        raise fail(errno.EBUSY, "others take inode numbers all the time")
