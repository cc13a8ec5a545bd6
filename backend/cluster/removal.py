"""Give up the contents that only a dead node had, so that its placement groups can be used again.

docs/replication.md says why this is safe. Each step can be repeated, and done by several processes at once:

1. The node's record is deleted, which compares that it is not alive: it cannot come back by itself.
2. The groups of which no other node is in sync get a new epoch: its earlier acknowledgements do not count
   any more, so nothing is named there that is not named now.
3. The names of all files that have a part of their content there are removed.
4. The elected store node finds that nothing is named in these groups, and begins them anew (Agent).
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import NamedTuple

import trio

from ..etcd.engine import EtcdEngine
from ..kv import Conflict
from ..model.groups import refenced
from ..model.placement import groups_of
from ..model.values import ConfigError
from ..namespace import Inode, Namespace, SharedCommitter, Tree
from ..unwrap import background, for_each, only_error
from .group_configs import Groups
from .membership import Members, removed_for_good
from .replica import Replica

_ROUNDS_MAX = 20
_UNLINKS_AT_ONCE = 16
# Mounts that follow a directory tell their kernel within a lease's time, or their session ends.
_TOLD_S = 30.0


class Lost(NamedTuple):
    """Groups without a member in sync, and the files that are lost with them: the paths (below the
    mountpoint) and bytes of files that have some of their content there."""

    groups: frozenset[int]
    paths: tuple[bytes, ...]
    files: int
    bytes: int


class Removal:
    """A view of the cluster, for removing a dead node."""

    def __init__(self, engine: EtcdEngine) -> None:
        self._members = Members()
        self._groups = Groups()
        tree = Tree()
        self.replica = Replica(engine, (self._members, self._groups, tree))
        committer = SharedCommitter(tree, engine, self.replica, after_commit=self._note)
        self._namespace = Namespace(tree, committer)
        self._newest = 0

    def lost(self, node: int) -> Lost:
        """Return what is lost with this dead node: the others that were in sync with it were removed."""
        groups = self._lost_groups(node)
        inodes = self._inodes_of(groups)
        paths = sorted(
            self._namespace.path_of(parent) + b"/" + name
            for inode in inodes
            for parent, name in self._namespace.names_of(inode.ino)
        )
        return Lost(groups, tuple(paths), len(inodes), sum(inode.size for inode in inodes))

    async def carry_out(self, node: int) -> Lost:
        """Do steps 2 and 3 for a node that was removed, and return what is lost. Raises OSError, and
        ConfigError if the node was admitted again meanwhile."""
        groups = self._lost_groups(node)
        await self._fence(groups)
        lost = self.lost(node)
        await self._unlink_all(groups & lost.groups)
        with trio.move_on_after(_TOLD_S):
            await self._members.wait_acked(
                lambda: dict.fromkeys(self._members.followers(), self._newest)
            )
        return lost

    async def wait_usable(self, node: int, patience_s: float) -> int:
        """Wait until a node's lost groups have begun anew; return how many have not after `patience_s`."""
        with trio.move_on_after(patience_s):
            while self._lost_groups(node):
                await self._groups.changed()
        return len(self._lost_groups(node))

    def _lost_groups(self, node: int) -> frozenset[int]:
        if node in self._members.nodes:
            return frozenset()
        return frozenset(
            group
            for group, (config, _) in self._groups.configs.items()
            if self._members.keeps_alone(node, config)
        )

    def has_room(self) -> bool:
        """Return whether there is a node to begin groups anew on."""
        return bool(self._members.candidates())

    async def _fence(self, groups: frozenset[int]) -> None:
        by_members: dict[tuple[int, ...], set[int]] = {}
        for group in groups:
            by_members.setdefault(self._groups.configs[group][0].in_sync, set()).add(group)
        for gone, left in by_members.items():
            guards = removed_for_good(gone)
            for _ in range(_ROUNDS_MAX):
                changes = {
                    group: (revision, refenced(config))
                    for group, (config, revision) in self._groups.configs.items()
                    if group in left and config.in_sync == gone
                }
                try:
                    left = await self._groups.change(self.replica, changes, guards)
                except Conflict:
                    names = ", ".join(f"{node:016x}" for node in gone)
                    raise ConfigError(f"of nodes {names} one was admitted again") from None
                if not left:
                    break
            else:
                raise ConfigError("the groups' configurations change all the time; try again")

    async def _unlink_all(self, groups: frozenset[int]) -> None:
        """Remove names until nothing is named there: names may be added and moved meanwhile."""
        for _ in range(_ROUNDS_MAX):
            inodes = self._inodes_of(groups)
            if not inodes:
                return
            unlink = partial(self._unlink, groups)
            try:
                await for_each(inodes, unlink, at_once=_UNLINKS_AT_ONCE)
            except BaseExceptionGroup as group:
                raise only_error(group) from group
            await self.replica.barrier()
        raise ConfigError("names are given to lost files all the time; try again")

    async def _unlink(self, groups: frozenset[int], inode: Inode) -> None:
        for parent, name in self._namespace.names_of(inode.ino):
            await self._namespace.unlink_if(parent, name, partial(self._is_in, groups))

    async def _note(self, directories: tuple[int, ...], revision: int) -> None:
        self._newest = max(self._newest, revision)

    def _inodes_of(self, groups: frozenset[int]) -> list[Inode]:
        if not groups:
            return []
        return [inode for inode in self._namespace.inodes.values() if self._is_in(groups, inode)]

    def _is_in(self, groups: frozenset[int], inode: Inode) -> bool:
        size = inode.size if inode.extent else 0
        return not groups.isdisjoint(groups_of(inode.layout, size, self._members.settings.buckets))


@asynccontextmanager
async def removal(engine: EtcdEngine) -> AsyncIterator[Removal]:
    """Yield a view that is up to date. Raises OSError if etcd cannot be read."""
    async with background() as nursery:
        made = Removal(engine)
        await made.replica.start(nursery)
        yield made
