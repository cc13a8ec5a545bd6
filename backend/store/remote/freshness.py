"""Tells whether this mount's replica is up to date, by a directory lease or by asking etcd."""

import errno
import logging
from collections.abc import Sequence

import trio

from ...namespace import Inode
from ...unwrap import first_error
from .cluster import Cluster
from .versions import Versions

log = logging.getLogger(__name__)


class Freshness:
    """How far a shared namespace may be believed on this host: other hosts change it, too. `listeners` are
    told of every change."""

    def __init__(self, cluster: Cluster, versions: Versions) -> None:
        self._cluster = cluster
        self._namespace = cluster.namespace
        self._leases = leases = cluster.leases
        self._versions = versions
        self.listeners = cluster.changes.mount_listeners
        self.path_valid_s = leases.path_valid_s
        self.attributes_believable_s = leases.attributes_believable_s
        self._claims = cluster.claims
        self._exclusive = cluster.claims.exclusive
        # Another mount may have changed a directory, and have told nobody: `freshen` has it told.
        self.is_deferred_elsewhere = cluster.claims.is_exclusive_elsewhere

    def is_fresh(self, inode: Inode) -> bool:
        """Return whether `freshen` has nothing to wait for."""
        if inode.is_dir and not inode.revision:
            return True  # it was made here, and is not stored yet
        directories = self._directories_of(inode)
        return (
            bool(directories)
            and all(map(self._leases.believable_s, directories))
            and not any(map(self.is_deferred_elsewhere, directories))
        )

    def is_missing(self, directory: int, name: bytes) -> bool:
        """Return whether there is no such name, as is known without asking: only this mount makes names in
        the directory."""
        return self._claims.is_ours(directory) and not self._namespace.tree.ino_behind(
            directory, name
        )

    def _directories_of(self, inode: Inode) -> Sequence[int]:
        return (inode.ino,) if inode.is_dir else self._namespace.parents_of(inode.ino)

    def believable_s(self, directory: int, *, used: bool = True) -> float:
        """Return for how many seconds a directory may be believed: its names, and inodes with no other
        names. Hosts that change it wait for this mount that long. A directory that is `used` often becomes
        believable."""
        if directory in self._exclusive and self._claims.is_exclusive_elsewhere(directory):
            return 0.0
        seconds = self._leases.believable_s(directory, used=used)
        if used and not seconds:
            self._leases.asked(directory)
        return seconds

    async def freshen(self, inode: Inode, *, content: bool = False) -> None:
        """Return when the namespace holds every change that anybody was told of before this call and that
        matters to an open of this file (or of a name in this directory). With `content`, the content of a
        small file is fetched, too. Raises OSError ETIMEDOUT."""
        if self.is_fresh(inode):
            return
        small = content and inode.is_file and 0 < inode.size <= self._cluster.small_bytes
        if small and inode.extent and not self._cluster.contents.has(inode.extent):
            await self._barrier_and_content(inode)
        else:
            await self._cluster.replica.barrier()
        await self._cluster.deferred.settle()
        directories = self._directories_of(inode)
        for directory in [*filter(self.is_deferred_elsewhere, directories)]:
            await self._claims.look(directory)
        for directory in directories:
            self._leases.asked(directory)

    async def _barrier_and_content(self, inode: Inode) -> None:
        """Ask whether the version known here is the newest, and for its content, in one round trip."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._bring_quietly, inode.ino)
                await self._cluster.replica.barrier()
                current = self._namespace.inodes.get(inode.ino)
                if current is None or current.extent != inode.extent:
                    nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise first_error(group) from group

    async def _bring_quietly(self, ino: int) -> None:
        try:
            await self._versions.bring(ino)
        except OSError as error:
            if error.errno in (errno.ETIMEDOUT, errno.EIO):
                raise  # it has been looked for long enough
            log.debug("inode %d: %s", ino, error)  # an open of the file will raise the same error
