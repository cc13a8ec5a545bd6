"""Quotas of directory trees: limits for the inodes below a directory, and their usage.

A directory has a quota by its attributes user.irdmafs.quota_bytes and user.irdmafs.quota_inodes.
Everything below it is charged to it, the directory itself is not; where quotas are nested, all of them
hold. A file is charged the bytes that its published version has allocated (as du(1) counts), and one inode
however many names it has below the directory.

The charge is derived from the tree that it belongs to, and kept for each inode that is below a quota.
An inode is compared with its charge whenever it has changed; so the usage is right after any sequence of
changes by any host, and after a restart. A mutation that is being committed is charged as if it had
happened, so that several at once do not use the same room.
"""

import errno
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from ..model.values import human_bytes, parse_size
from .inode import Inode, fail, upwards

QUOTA_BYTES = b"user.irdmafs.quota_bytes"
QUOTA_INODES = b"user.irdmafs.quota_inodes"
QUOTA_NAMES = (QUOTA_BYTES, QUOTA_INODES)

log = logging.getLogger(__name__)

_BLOCK_BYTES = 512
_UNLIMITED = 2**63 - 1
# Little room is left if it is less than this part of the limit, or fewer inodes than this.
_NEAR_PART = 8
_NEAR_INODES = 256


def parse_limit(name: bytes, value: bytes) -> int:
    """Return the limit that an attribute sets. Raises ValueError, which says what is wrong."""
    text = value.decode("ascii", errors="replace").strip()
    if name == QUOTA_BYTES and not text.endswith("%"):
        return parse_size(text)
    if name == QUOTA_INODES and text.isdecimal() and 0 < int(text) < _UNLIMITED:
        return int(text)
    what = "a size like 10G" if name == QUOTA_BYTES else "a number above 0"
    raise ValueError(
        f"{name.decode()} is {what}, not {text!r}; without the attribute there is no limit"
    )


class Usage:
    """The limits and the usage of one directory."""

    __slots__ = ("bytes", "inodes", "limit_bytes", "limit_inodes")

    def __init__(self) -> None:
        self.limit_bytes = self.limit_inodes = _UNLIMITED
        self.bytes = self.inodes = 0

    @property
    def limits(self) -> tuple[int | None, int | None]:
        """Return the limits in bytes and inodes; None: not limited."""
        return (
            self.limit_bytes if self.limit_bytes < _UNLIMITED else None,
            self.limit_inodes if self.limit_inodes < _UNLIMITED else None,
        )


class Charge(NamedTuple):
    """An inode that is charged to `quotas`, which are directories, with so many bytes. `is_near`: little
    room is left then, so the changes of other hosts must be known first."""

    quotas: tuple[int, ...]
    bytes: int
    is_near: bool = False


_NOTHING = Charge((), 0)


class Quotas:
    """The quotas of a tree, of which it is given the parts; below(directory) returns the names in it and
    the inodes that they lead to; require(directory) raises Unread unless all that is below is known.
    `in_use` is False while there are none."""

    def __init__(
        self,
        inodes: Mapping[int, Inode],
        below: Callable[[int], Sequence[tuple[bytes, int]]],
        parents_of: Callable[[int], Sequence[int]],
        describe: Callable[[int], str],
        require: Callable[[int], None],
    ) -> None:
        self._inodes = inodes
        self._below = below
        self._parents_of = parents_of
        self._describe = describe
        self._require = require
        self.in_use = False
        self.usages: dict[int, Usage] = {}  # by the directory that has the quota
        # The charge of every inode below a quota.
        self._charges: dict[int, Charge] = {}
        # Directories that got or lost a quota since the last `update`.
        self._changed: set[int] = set()

    # -- reading ---------------------------------------------------------------------------------

    def above(self, directory: int) -> tuple[int, ...]:
        """Return the directories to whose quotas the names in a directory are charged."""
        return self._known(self._above(directory, {}))

    def of(self, ino: int) -> tuple[int, ...]:
        """Return the directories to whose quotas an inode is charged."""
        return self._known(self._of(ino, {}))

    def _known(self, quotas: tuple[int, ...]) -> tuple[int, ...]:
        for quota in quotas:
            self._require(quota)
        return quotas

    def _above(self, directory: int, climbed: dict[int, tuple[int, ...]]) -> tuple[int, ...]:
        """`climbed`: the answers for directories, as long as nothing changes. It gets more."""
        way: list[int] = []
        quotas: tuple[int, ...] = ()
        for one in upwards(self._inodes, directory):
            if one.ino in climbed:
                quotas = climbed[one.ino]
                break
            way.append(one.ino)
        for ino in reversed(way):
            climbed[ino] = quotas = (ino, *quotas) if ino in self.usages else quotas
        return quotas

    def _of(self, ino: int, climbed: dict[int, tuple[int, ...]]) -> tuple[int, ...]:
        parents = self._parents_of(ino)
        if len(parents) == 1:
            return self._above(parents[0], climbed)
        return tuple(sorted({quota for one in parents for quota in self._above(one, climbed)}))

    def around(self, ino: int) -> list[Usage]:
        """Return the quotas that an inode belongs to, or what is made in it if it is a directory."""
        found = self.above(ino) if self._inodes[ino].is_dir else self.of(ino)
        return [self.usages[directory] for directory in found]

    # -- deciding --------------------------------------------------------------------------------

    def admit(self, ino: int, quotas: tuple[int, ...], blocks: int) -> Charge:
        """Return the charge of an inode that is to be in these quotas with so many blocks of 512 bytes.

        Raises OSError EDQUOT if it grows and there is no room. An inode that does not grow is admitted also
        above the limit.
        """
        size = blocks * _BLOCK_BYTES
        charged = self._charges.get(ino, _NOTHING)
        is_near = False
        for quota in quotas:
            usage = self.usages[quota]
            is_new = quota not in charged.quotas
            if is_new:
                left = usage.limit_inodes - usage.inodes - 1
                if left < 0:
                    raise self._exceeded(quota, f"{usage.limit_inodes} inodes")
                is_near |= left < max(usage.limit_inodes // _NEAR_PART, _NEAR_INODES)
            more = size if is_new else size - charged.bytes
            if more > 0:
                left = usage.limit_bytes - usage.bytes - more
                if left < 0:
                    raise self._exceeded(quota, human_bytes(usage.limit_bytes))
                is_near |= left < usage.limit_bytes // _NEAR_PART
        return Charge(quotas, size, is_near)

    def refuse_to_enter(self, quotas: Iterable[int], directory: int) -> None:
        """Raise OSError EXDEV when something of these quotas is moved or linked into a directory that has
        others above it. Who moves it then copies it, as between project quotas."""
        if not set(self.above(directory)) <= set(quotas):
            raise fail(errno.EXDEV)

    def refuse_growth(self, ino: int, status: os.stat_result, offset: int, length: int) -> None:
        """Raise OSError EDQUOT when a content of a file, which has this stat, could not be published once
        so many more bytes were allocated at an offset, by what is known now: publishing it tells."""
        allocated = status.st_blocks * _BLOCK_BYTES
        after = min(allocated + length, max(allocated, status.st_size, offset + length))
        self.admit(ino, self._of(ino, {}), -(-after // _BLOCK_BYTES))

    def _exceeded(self, directory: int, limit: str) -> OSError:
        return fail(errno.EDQUOT, f"the quota of {self._describe(directory)} is {limit}")

    # -- keeping account -------------------------------------------------------------------------

    def take_limits(self, directory: Inode) -> None:
        """Note the quota that a directory's record gives it, if it does."""
        limits: dict[bytes, int] = {}
        for name in QUOTA_NAMES:
            if name in directory.xattrs:
                try:
                    limits[name] = parse_limit(name, directory.xattrs[name])
                except ValueError as error:
                    log.error("directory %d: %s", directory.ino, error)
        ino = directory.ino
        if not limits:
            self.forget(ino)
            return
        usage = self.usages.get(ino)
        if usage is None:
            usage = self.usages[ino] = Usage()
            self._changed.add(ino)
            self.in_use = True
        usage.limit_bytes = limits.get(QUOTA_BYTES, _UNLIMITED)
        usage.limit_inodes = limits.get(QUOTA_INODES, _UNLIMITED)

    def forget(self, directory: int) -> None:
        """Note that a directory has no quota, or is gone."""
        if self.usages.pop(directory, None) is not None:
            self._changed.add(directory)

    def update(self, inos: Iterable[int]) -> None:
        """Bring the account up to date after these inodes, or their names, have changed."""
        todo = list(inos)
        for directory in self._changed:
            todo += [ino for _, ino in self._below(directory)]
        self._changed.clear()
        climbed: dict[int, tuple[int, ...]] = {}
        while todo:
            ino = todo.pop()
            if self._look_at(ino, climbed):
                todo += [below for _, below in self._below(ino)]
        self.in_use = bool(self.usages)

    def _look_at(self, ino: int, climbed: dict[int, tuple[int, ...]]) -> bool:
        """Return whether an inode belongs to other quotas than it did."""
        before = self._charges.get(ino, _NOTHING)
        inode = self._inodes.get(ino)
        quotas = self._of(ino, climbed) if inode is not None else ()
        size = inode.blocks * _BLOCK_BYTES if inode is not None and quotas else 0
        if quotas != before.quotas or size != before.bytes:
            self.charge(ino, Charge(quotas, size))
        return quotas != before.quotas

    def charge(self, ino: int, charge: Charge) -> None:
        """Charge an inode; as if a mutation under way had succeeded, until the next `update`."""
        before = self._charges.pop(ino, _NOTHING)
        for sign, one in ((-1, before), (1, charge)):
            for quota in one.quotas:
                if (usage := self.usages.get(quota)) is not None:
                    usage.inodes += sign
                    usage.bytes += sign * one.bytes
        if charge.quotas:
            self._charges[ino] = charge
