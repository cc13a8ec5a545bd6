"""Filling a group: how a joining node gets every extent it lacks, and then becomes a member in sync.

The promotion is right for this reason. The group's configuration C names this node as joining. Every write
committed under C or later went to this node, too, as each commit compares the configuration it was written
for. Every write committed before C is named in the replica once it has applied C. So if nothing that the
replica names is missing here, and the configuration is still C, the node holds everything; the promotion's
transaction compares C.
"""

import errno
import logging
import random
from collections.abc import Sequence
from typing import NamedTuple

import trio

from ..model.groups import promoted, without
from ..model.records import GroupConfig
from ..transport import Extent
from .catalog import Catalog
from .copier import Copier
from .figures import ResyncFigures
from .inspection import Inspection
from .state import ClusterState

__all__ = ["Progress", "Resync"]

log = logging.getLogger(__name__)

GROUPS_AT_ONCE = 8
RETRY_FIRST_S = 0.1
RETRY_MAX_S = 10.0
# Looking over everything takes a while, and a damaged disk shows in one extent after another.
DAMAGE_PAUSE_S = 1.0


class Progress(NamedTuple):
    """The copying still to be done to this node, and its rate in the last seconds."""

    groups: int
    extents_left: int
    bytes_left: int
    bytes_per_s: float
    copied_bytes: int
    lost_extents: int  # found on no node
    damaged_groups: int  # this node alone is in sync, and lacks something

    @property
    def seconds_left(self) -> float | None:
        """Return the time left in seconds, None if nothing moves."""
        if not self.bytes_left:
            return 0.0
        return self.bytes_left / self.bytes_per_s if self.bytes_per_s else None


class Resync:
    """Fills the groups that this node is joining, and those that lack extents."""

    def __init__(
        self,
        cluster: ClusterState,
        catalog: Catalog,
        inspection: Inspection,
        copier: Copier,
    ) -> None:
        self.node = cluster.node
        self._cluster = cluster
        self._catalog = catalog
        self._inspection = inspection
        self._copier = copier
        self._slots = trio.CapacityLimiter(GROUPS_AT_ONCE)
        self._active: set[int] = set()
        self._touched: set[int] = set()
        self._wake = trio.Event()
        self._lost: dict[int, set[Extent]] = {}  # by group that is being filled
        self._lost_count = 0
        self._news: dict[int, trio.Event] = {}
        self._left: dict[int, dict[Extent, int]] = {}
        inspection.looked.append(self._looked_over)
        cluster.groups.group_changed.append(self._group_changed)
        cluster.members.node_changed.append(self._node_changed)

    async def run(self) -> None:
        self._touched.update(self._cluster.groups.all())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._mend)
            while True:
                self._wake = trio.Event()
                for group in self._touched - self._active:
                    if self._due(group) is not None:
                        self._active.add(group)
                        nursery.start_soon(self._fill, group)
                self._touched.clear()
                await self._wake.wait()

    async def _mend(self) -> None:
        delay_s = DAMAGE_PAUSE_S
        while True:
            await self._inspection.wait_reported()
            try:
                await self._cluster.session.wait_valid()
                await self._inspection.mend()
                delay_s = DAMAGE_PAUSE_S
            except OSError as error:
                log.warning("what is damaged is looked for again in %.1f s: %s", delay_s, error)
                self._inspection.again()
            await trio.sleep(delay_s)
            delay_s = min(2 * delay_s, RETRY_MAX_S)

    def _looked_over(self) -> None:
        self._touched.update(self._inspection.damaged)
        self._wake.set()

    def has_names(self, group: int) -> bool:
        """Return whether an inode names an extent of the group, as far as the replica is."""
        return next(self._catalog.extents_of(group), None) is not None

    def pools_in_use(self) -> set[int]:
        """Return the pools in which an inode names an extent, as far as the replica is."""
        return self._catalog.pools_in_use()

    def figures(self) -> ResyncFigures:
        now = self.progress()
        return ResyncFigures(now.copied_bytes, now.groups, now.bytes_left)

    def progress(self) -> Progress:
        return Progress(
            groups=len(self._active),
            extents_left=sum(len(left) for left in self._left.values()),
            bytes_left=sum(sum(left.values()) for left in self._left.values()),
            bytes_per_s=self._copier.bytes_per_s(),
            copied_bytes=self._copier.copied_bytes,
            lost_extents=self._lost_count,
            damaged_groups=len(self._inspection.damaged),
        )

    def _group_changed(self, group: int) -> None:
        if (news := self._news.get(group)) is not None:
            news.set()
        self._touched.add(group)
        self._wake.set()

    def _node_changed(self, node: int) -> None:
        for news in self._news.values():
            news.set()

    def _due(self, group: int) -> tuple[GroupConfig, int] | None:
        found = self._cluster.groups.get(group)
        if found is not None and (
            self.node in found[0].joining
            or (group in self._inspection.damaged and self.node in found[0].in_sync)
        ):
            return found
        return None

    async def _fill(self, group: int) -> None:
        delay_s = RETRY_FIRST_S
        try:
            while not self._cluster.session.released and (found := self._due(group)) is not None:
                news = self._news[group] = trio.Event()
                try:
                    async with self._slots:
                        progressed = await self._advance(group, *found)
                except OSError as error:
                    log.warning("group %#x is not filled yet: %s", group, error)
                    progressed = False
                if progressed:
                    delay_s = RETRY_FIRST_S
                    continue
                # The group may be waiting for a member that comes or goes.
                with trio.move_on_after(delay_s * random.uniform(0.5, 1.0)):
                    await news.wait()
                delay_s = min(2 * delay_s, RETRY_MAX_S)
        finally:
            self._active.discard(group)
            self._news.pop(group, None)
            self._left.pop(group, None)
            self._lost.pop(group, None)

    async def _advance(self, group: int, config: GroupConfig, revision: int) -> bool:
        """Do one round. Return whether there was progress. Raises OSError if a member or etcd could not be
        asked."""
        await self._cluster.session.wait_valid()
        await self._cluster.replica.wait_applied(revision)
        if self._cluster.groups.get(group) != (config, revision):
            return True
        lost = self._lost.get(group, set())
        left = {extent: size for extent, size in self._catalog.missing(group) if extent not in lost}
        self._left[group] = left
        if not left:
            await self._finish(group, config, revision)
            return True
        count = len(left)
        try:
            denied = await self._copier.copy(config, left)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            await self._leave(group, config, revision)
            return False
        if denied:
            await self._confirm_lost(group, config, denied)
        return len(left) < count or bool(denied)

    async def _finish(self, group: int, config: GroupConfig, revision: int) -> None:
        if self.node in config.in_sync:
            log.info("group %#x is whole again", group)
            self._inspection.damaged.discard(group)
            return
        await self._cluster.change({group: (revision, promoted(config, self.node))})

    async def _leave(self, group: int, config: GroupConfig, revision: int) -> None:
        """Leave a group: a full node that stays joining would make writes fail, while others are in
        sync."""
        log.error(
            "the store %s is full: group %#x cannot be kept here. Remove files, give the store more "
            "room, or add store nodes",
            self._catalog.files.directory,
            group,
        )
        if self.node in config.joining:
            await self._cluster.change({group: (revision, without(config, self.node))})

    async def _confirm_lost(
        self, group: int, config: GroupConfig, denied: Sequence[Extent]
    ) -> None:
        """Find out about extents that every member in sync denies. Either they were superseded, which the
        replica shows after a barrier, or they are nowhere: waiting for them would keep the group degraded
        for ever."""
        await self._cluster.replica.barrier()
        found = self._cluster.groups.get(group)
        if found is None or found[0] != config:
            return
        lost = [extent for extent in denied if self._catalog.is_missing(extent)]
        if lost:
            log.error(
                "%d extents of group %#x are on no member that is in sync: they are lost, like content "
                "%x",
                len(lost),
                group,
                lost[0].content,
            )
            self._lost.setdefault(group, set()).update(lost)
            self._lost_count += len(lost)
