"""Fetching files before they are opened, and the progress of that."""

import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import trio

from ...namespace import Inode
from .cluster import Cluster
from .versions import Versions

log = logging.getLogger(__name__)

_AT_ONCE = 8
# The progress of so many finished requests is kept, for programs that ask for it.
_REMEMBERED = 256


@dataclass(slots=True)
class Progress:
    """The work of one request: to be done, done, and failed. Sizes are in bytes."""

    files: int = 0
    done: int = 0
    failed: int = 0
    bytes: int = 0
    bytes_done: int = 0


class Prefetcher:
    """Fetches files before they are opened. New versions in directories that are followed for good are
    fetched when they are published."""

    def __init__(self, cluster: Cluster, versions: Versions) -> None:
        self._namespace = cluster.namespace
        self._nursery = cluster.nursery
        self._leases = cluster.leases
        self._listeners = cluster.changes.inode_listeners
        self._versions = versions
        self._limit = trio.CapacityLimiter(_AT_ONCE)
        self._progress: dict[int, Progress] = {}
        self.fetched_bytes = 0

    def start(self, ino: int) -> None:
        """Fetch a file, or every file below a directory."""
        progress = Progress()
        self._progress.pop(ino, None)
        self._progress[ino] = progress
        while len(self._progress) > _REMEMBERED:
            del self._progress[next(iter(self._progress))]
        found = list(self._below(ino))
        progress.files = len(found)
        progress.bytes = sum(inode.size for inode in found)
        self._nursery.start_soon(self._fetch_all, [inode.ino for inode in found], progress)

    def progress(self, ino: int) -> dict[str, Any]:
        """Return the progress of the newest request for this file or directory; all zero if there was
        none."""
        return asdict(self._progress.get(ino, Progress()))

    def go_on(self) -> None:
        """Fetch from now on what is published in directories that are followed for good."""
        if self._inode_changed not in self._listeners:
            self._listeners.append(self._inode_changed)

    def _inode_changed(self, old: Inode | None, new: Inode | None) -> None:
        if new is None or not new.extent or (old is not None and new.version == old.version):
            return
        if any(map(self._leases.is_followed_for_good, self._namespace.parents_of(new.ino))):
            self._nursery.start_soon(self._fetch, new.ino, Progress())

    def _below(self, ino: int) -> Iterator[Inode]:
        inode = self._namespace.inodes.get(ino)
        if inode is None:
            return
        if inode.is_dir:
            for _, child in self._namespace.children(ino):
                yield from self._below(child)
        elif inode.is_file and inode.extent:
            yield inode

    async def _fetch_all(self, inos: list[int], progress: Progress) -> None:
        async with trio.open_nursery() as nursery:
            for ino in inos:
                async with self._limit:
                    pass  # wait, so that not thousands of tasks begin at once
                nursery.start_soon(self._fetch, ino, progress)

    async def _fetch(self, ino: int, progress: Progress) -> None:
        async with self._limit:
            try:
                inode = await self._versions.bring(ino, ahead=True)
            except OSError as error:
                where = self._namespace.describe(ino)
                log.info("%s: it could not be fetched ahead: %s", where, error)
                progress.failed += 1
            else:
                progress.bytes_done += inode.size
                self.fetched_bytes += inode.size
        progress.done += 1
