"""Finding and filling what this node lacks: how a joining node becomes a member in sync.

The promotion is right for this reason. The group's configuration C names this node as joining. Every write
committed under C or later went to this node, too, as each commit compares the configuration it was written
for. Every write committed before C is named in the replica once it has applied C. So if nothing that the
replica names is missing here, and the configuration is still C, the node holds everything; the promotion's
transaction compares C.
"""

import errno
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import trio

from ..model.groups import demoted, promoted, refenced, without
from ..model.records import GroupConfig
from ..observe.figures import count, gauge
from ..pauses import Pauses
from ..transport import Extent
from .catalog import Catalog
from .copier import Copier
from .state import ClusterState

log = logging.getLogger(__name__)

GROUPS_AT_ONCE = 8
RETRY_FIRST_S = 0.1
RETRY_MAX_S = 10.0
# Looking over everything takes a while, and a damaged disk shows in one extent after another.
DAMAGE_PAUSE_S = 1.0


@dataclass(slots=True)
class ResyncFigures:
    """Filling the groups that a node joins."""

    resync_bytes: int = count("Bytes copied to fill groups that this node joined")
    resync_groups_left: int = gauge("Groups still to be filled")
    resync_bytes_left: int = gauge("Bytes still to be copied to fill them")
    resync_bytes_per_s: int = gauge("Bytes copied in each of the last seconds")
    lost_extents: int = count("Extents that were found on no node")
    damaged_groups: int = gauge("Groups that lack something while this node alone is in sync")


class _Filling:
    """A group that is being filled: what has to be copied, and what no member has."""

    def __init__(self) -> None:
        self.news = trio.Event()
        self.left: dict[Extent, int] = {}
        self.lost: set[Extent] = set()


class Resync:
    """Fills the groups that this node is joining, and those that lack extents. `damaged` are the groups
    that lack something and of which this node alone is in sync."""

    def __init__(self, cluster: ClusterState, catalog: Catalog, copier: Copier) -> None:
        self.node = cluster.node
        self.damaged: set[int] = set()
        self._cluster = cluster
        self._catalog = catalog
        self._copier = copier
        # Extents that this process or an earlier one acknowledged may be lost without a trace.
        self._forgetful = True
        self._reported: set[Extent] = set()
        self._damage = trio.Event()
        self._looking_over = trio.Lock()
        self._token = trio.lowlevel.current_trio_token()
        self._slots = trio.CapacityLimiter(GROUPS_AT_ONCE)
        self._touched: set[int] = set()
        self._wake = trio.Event()
        self._lost_count = 0
        self._filling: dict[int, _Filling] = {}  # by group
        cluster.groups.group_changed.append(self._group_changed)
        cluster.members.node_changed.append(self._node_changed)

    async def run(self) -> None:
        self._touched.update(self._cluster.groups.configs)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._drop_reported)
            while True:
                self._wake = trio.Event()
                for group in self._touched - self._filling.keys():
                    if self._is_due(group):
                        filling = self._filling[group] = _Filling()
                        nursery.start_soon(self._fill, group, filling)
                self._touched.clear()
                await self._wake.wait()

    def figures(self) -> ResyncFigures:
        return ResyncFigures(
            resync_bytes=self._copier.copied_bytes,
            resync_groups_left=len(self._filling),
            resync_bytes_left=sum(sum(one.left.values()) for one in self._filling.values()),
            resync_bytes_per_s=round(self._copier.bytes_per_s()),
            lost_extents=self._lost_count,
            damaged_groups=len(self.damaged),
        )

    # -- finding ---------------------------------------------------------------------------------

    async def look_over(self) -> None:
        """Look over the extents that this node should have.

        If extents are missing and another member has them, the node goes back to joining. The first time in
        a process, and when an extent was lost that nobody had named yet, every configuration that names the
        node is changed: an acknowledged extent may be gone before it is published, and no publish may count
        on it. Raises OSError.
        """
        async with self._looking_over:
            await self._look_over()

    async def _look_over(self) -> None:
        lost = None
        while lost is None:
            lost = await self._compared()
        for group in lost.keys() - self.damaged:
            log.error(
                "%d extents of group %#x are not in this store, and no other node is in sync: "
                "the files they belong to cannot be read unless a member that has them joins",
                lost[group],
                group,
            )
        self.damaged = set(lost)
        self._forgetful = False
        self._touched.update(self.damaged)
        self._wake.set()

    async def _compared(self) -> dict[int, int] | None:
        """Change the configurations of groups once, as `look_over` says. Return how many extents of which
        groups are lost; None if a configuration changed meanwhile."""
        await self._cluster.replica.barrier()
        changes = {}
        lost: dict[int, int] = {}
        for group, (config, revision) in list(self._cluster.groups.configs.items()):
            if self.node not in config.members:
                continue
            await trio.lowlevel.checkpoint()
            lacking = self._catalog.missing(group) if self.node in config.in_sync else []
            if lacking and len(config.in_sync) > 1:
                changes[group] = revision, demoted(config, self.node)
                continue
            if lacking:
                lost[group] = len(lacking)
            if self._forgetful:
                changes[group] = revision, refenced(config)
        return lost if await self._cluster.change(changes) else None

    def report(self, extent: Extent) -> None:
        """Note that a sealed extent cannot be read. For any thread."""
        if extent not in self._reported:
            self._reported.add(extent)
            self._token.run_sync_soon(lambda: self._damage.set())

    async def _drop_reported(self) -> None:
        """Drop the extents that cannot be read, whenever some are reported, and look over what is left."""
        pauses = Pauses(DAMAGE_PAUSE_S, RETRY_MAX_S)
        while True:
            await self._damage.wait()
            self._damage = trio.Event()
            try:
                await self._cluster.session.wait_valid()
                async with self._looking_over:
                    for extent in list(self._reported):
                        self._drop(extent)
                    await self._look_over()
                pauses.begin_anew()
            except OSError as error:
                log.warning("what is damaged is looked for again in a moment: %s", error)
                self._damage.set()
            await pauses.wait()

    def _drop(self, extent: Extent) -> None:
        directory = self._catalog.files.directory
        log.error("extent %x.%x in %s is damaged and dropped", *extent, directory)
        # If no inode has named it yet, its writer must not count on the acknowledgement any more.
        self._forgetful |= not self._catalog.is_named(extent.content)
        self._catalog.files.free(extent)
        self._reported.discard(extent)

    # -- filling ---------------------------------------------------------------------------------

    def _group_changed(self, group: int, before: GroupConfig) -> None:
        if (filling := self._filling.get(group)) is not None:
            filling.news.set()
        self._touched.add(group)
        self._wake.set()

    def _node_changed(self, node: int) -> None:
        for filling in self._filling.values():
            filling.news.set()

    def _is_due(self, group: int) -> bool:
        config, _ = self._cluster.groups.get(group)
        is_damaged = group in self.damaged and self.node in config.in_sync
        return is_damaged or self.node in config.joining

    async def _fill(self, group: int, filling: _Filling) -> None:
        pauses = Pauses(RETRY_FIRST_S, RETRY_MAX_S)
        try:
            while not self._cluster.session.released and self._is_due(group):
                news = filling.news = trio.Event()
                try:
                    async with self._slots:
                        progressed = await self._advance(group, filling)
                except OSError as error:
                    log.warning("group %#x is not filled yet: %s", group, error)
                    progressed = False
                if progressed:
                    pauses.begin_anew()
                    continue
                # The group may be waiting for a member that comes or goes.
                with trio.move_on_after(pauses.take_s()):
                    await news.wait()
        finally:
            del self._filling[group]

    async def _advance(self, group: int, filling: _Filling) -> bool:
        """Do one round; return if there was progress. Raises OSError if a member or etcd is away."""
        config, revision = self._cluster.groups.get(group)
        await self._cluster.session.wait_valid()
        await self._cluster.replica.wait_applied(revision)
        # The node may have left the group before its turn came.
        if self._cluster.groups.get(group) != (config, revision) or not self._is_due(group):
            return True
        missing, lost = self._catalog.missing(group), filling.lost
        left = filling.left = {extent: size for extent, size in missing if extent not in lost}
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
            await self._confirm_lost(group, config, denied, filling.lost)
        return len(left) < count or bool(denied)

    async def _finish(self, group: int, config: GroupConfig, revision: int) -> None:
        if self.node in config.in_sync:
            log.info("group %#x is whole again", group)
            self.damaged.discard(group)
            return
        await self._cluster.change({group: (revision, promoted(config, self.node))})

    async def _leave(self, group: int, config: GroupConfig, revision: int) -> None:
        """Leave a group: a full node that stays joining makes writes fail, while others are in sync."""
        log.error(
            "the store %s is full: group %#x cannot be kept here. Remove files, give the store more "
            "room, or add store nodes",
            self._catalog.files.directory,
            group,
        )
        if self.node in config.joining:
            await self._cluster.change({group: (revision, without(config, self.node))})

    async def _confirm_lost(
        self, group: int, config: GroupConfig, denied: Sequence[Extent], known: set[Extent]
    ) -> None:
        """Find out about extents that every member in sync denies. Either they were superseded, which the
        replica shows after a barrier, or nowhere, and must not keep the group degraded for ever."""
        await self._cluster.replica.barrier()
        if self._cluster.groups.get(group)[0] != config:
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
            known.update(lost)
            self._lost_count += len(lost)
