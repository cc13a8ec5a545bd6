"""Finding out which extents this node lacks: before it registers, and when something is damaged."""

import logging
from collections.abc import Callable

import trio

from ..model.groups import demoted, refenced
from ..transport import Extent
from .catalog import Catalog
from .state import ClusterState

__all__ = ["Inspection"]

log = logging.getLogger(__name__)


class Inspection:
    """The inspection of one store node. `damaged` are the groups that lack something and of which this node
    alone is in sync. The functions in `looked` are called after each look over everything."""

    def __init__(self, cluster: ClusterState, catalog: Catalog) -> None:
        self.damaged: set[int] = set()
        self.looked: list[Callable[[], None]] = []
        self._cluster = cluster
        self._catalog = catalog
        # Extents that this process or an earlier one acknowledged may be lost without a trace.
        self._forgetful = True
        self._reported: set[Extent] = set()
        self._damage = trio.Event()
        self._looking_over = trio.Lock()
        self._token = trio.lowlevel.current_trio_token()

    async def look_over(self) -> None:
        """Look over the extents that this node should have.

        If extents are missing and another member has them, the node goes back to joining. The first time in
        a process, and when an extent was lost that nobody had named yet, every configuration that names the
        node is changed: an acknowledged extent may be gone before it is published, and no publish may count
        on it.
        Raises OSError.
        """
        async with self._looking_over:
            await self._look_over()

    async def mend(self) -> None:
        """Drop the reported extents, and look over what is left. Raises OSError."""
        async with self._looking_over:
            for extent in list(self._reported):
                log.error(
                    "extent %x.%x in %s is damaged and dropped",
                    *extent,
                    self._catalog.files.directory,
                )
                # If no inode has named it yet, its writer must not count on the acknowledgement any more.
                self._forgetful |= not self._catalog.is_named(extent.content)
                self._catalog.files.free(extent)
                self._reported.discard(extent)
            await self._look_over()

    def report(self, extent: Extent) -> None:
        """Note that a sealed extent cannot be read. For any thread."""
        if extent not in self._reported:
            self._reported.add(extent)
            self._token.run_sync_soon(lambda: self._damage.set())

    async def wait_reported(self) -> None:
        """Return when damage was reported since the last `mend`."""
        await self._damage.wait()
        self._damage = trio.Event()

    def again(self) -> None:
        """Make `wait_reported` return once more."""
        self._damage.set()

    async def _look_over(self) -> None:
        node = self._cluster.node
        while True:
            await self._cluster.replica.barrier()
            changes = {}
            lost: dict[int, int] = {}
            for group, (config, revision) in list(self._cluster.groups.all().items()):
                if node not in config.members:
                    continue
                await trio.lowlevel.checkpoint()
                lacking = self._catalog.missing(group) if node in config.in_sync else []
                if lacking and len(config.in_sync) > 1:
                    changes[group] = revision, demoted(config, node)
                    continue
                if lacking:
                    lost[group] = len(lacking)
                if self._forgetful:
                    changes[group] = revision, refenced(config)
            newest, late = await self._cluster.groups.change(self._cluster.engine, changes)
            await self._cluster.replica.wait_applied(newest)
            if not late:
                break
        for group in lost.keys() - self.damaged:
            log.error(
                "%d extents of group %#x are not in this store, and no other node is in sync: "
                "the files they belong to cannot be read unless a member that has them joins",
                lost[group],
                group,
            )
        self.damaged = set(lost)
        self._forgetful = False
        for listener in self.looked:
            listener()
