"""The version of a file that an open gets: whether the one that is known here is the newest, and how it
comes to this host.

It comes even if others replace it meanwhile: when the file is opened, with those that follow it where a
directory is read file by file, or before anybody opens it.
"""

import errno
import logging
import time
from collections.abc import Iterator, Sequence
from functools import partial

import trio

from ...model.records import NO_CONTENT, ContentId
from ...namespace import Inode, Namespace, Unread, fail
from ...unwrap import first_alone, for_each
from .cluster import Cluster
from .fetcher import Fetcher, Gone, Wrong
from .figures import OpenFigures
from .lent import Declined, Lender, Lent

log = logging.getLogger(__name__)

# A file that changed during so many fetches is pinned on its nodes.
_GONE_BEFORE_PIN = 3
_LOOK_AGAIN_S = 0.2
# Reading ahead: the largest window in files, the directories, and how long they are remembered.
_WINDOW_MAX = 128
_DIRECTORIES_MAX = 64
_FORGET_AFTER_S = 5.0
# Fetching before files are opened.
_AT_ONCE = 8


class Versions:
    """Brings current versions to this host, or into memory that programs lend. Waits end with OSError after
    the mount's time-out."""

    def __init__(self, cluster: Cluster, fetcher: Fetcher, lender: Lender) -> None:
        self._namespace = cluster.namespace
        self._replica = cluster.replica
        self._timeout_s = cluster.timeout_s
        self._contents = cluster.contents
        self._fetcher = fetcher
        self._lender = lender
        self._ahead = ReadAhead(cluster.namespace)
        self.figures = OpenFigures()

    async def bring(self, ino: int, *, ahead: bool = False, lent: Lent | None = None) -> Inode:
        """Bring the file's current version to this host, and return the inode as it is then. A content for
        which there is no room here is pinned on its nodes, but not if this is `ahead` of any open. With
        `lent`, read it into that instead. Raises OSError: ESTALE if the file is gone; Declined."""
        contents = self._contents
        attempt, brought = 0, NO_CONTENT
        while True:
            inode = self._namespace.inode(ino)
            if inode.extent in (NO_CONTENT, brought) or contents.has(inode.extent):
                if lent is not None:
                    raise Declined("it is on this host")
                return inode
            if not inode.nlink:
                raise fail(errno.ESTALE)  # its last name was removed, and all nodes have freed it
            if attempt * _LOOK_AGAIN_S > self._timeout_s:
                where = self._namespace.describe(ino)
                raise fail(
                    errno.EIO, f"{where}: no store node has content {inode.extent:x}: it is lost"
                )
            attempt += 1
            lets_go = attempt >= _GONE_BEFORE_PIN
            try:
                if lets_go and not await contents.pin_on_nodes(inode):
                    continue
                if lent is not None:
                    await self._fetcher.read_into(inode, lent)
                    return inode
                is_here = await self._fetcher.fetch(inode, self._ahead.after)
                if not ahead:
                    contents.uncounted.add(inode.extent)
                if is_here:
                    brought = inode.extent
                elif ahead:
                    return inode
                else:
                    lets_go = True
                    if await contents.pin_on_nodes(inode):
                        lets_go = False
                        return inode
            except (Gone, Wrong) as error:
                await self._replica.barrier()
                current = self._namespace.inodes.get(ino)
                is_current = current is not None and current.extent == inode.extent
                if isinstance(error, Wrong) and (current is None or is_current):
                    raise
                if is_current:
                    # The members that should have it do not: they are about to notice that.
                    await trio.sleep(_LOOK_AGAIN_S)
            finally:
                if lets_go:
                    contents.let_go_on_nodes(inode.extent)

    def count_open(self, extent: ContentId) -> None:
        """Count an open that gets this content as one that found it here or had it fetched."""
        if extent in self._contents.uncounted:
            self._contents.uncounted.remove(extent)
            self.figures.cache_misses += 1
        elif extent:
            self.figures.cache_hits += 1

    async def read_into(self, ino: int, memory: int, lifeline: int) -> Inode:
        """Read the file's current version, whole, into memory that a program lends (see lent). Raises
        OSError."""
        async with self._lender.using(memory, lifeline) as lent:
            return await self.bring(ino, lent=lent)


class _Listing:
    """A directory's files in the order of their names when reading ahead began, and each one's position."""

    def __init__(self, inos: list[int]) -> None:
        self.inos = inos
        self.at = {ino: index for index, ino in enumerate(inos)}
        self.window = 1
        self.used = time.monotonic()


class ReadAhead:
    """The window doubles with every miss, as the kernel's does for pages."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self._listings: dict[int, _Listing] = {}

    def after(self, inode: Inode) -> Iterator[Inode]:
        """Return files that follow this one, whose content was not here, in its directory."""
        directory, now = inode.parent, time.monotonic()
        if not directory:
            return
        listing = self._listings.get(directory)
        if listing is None or now - listing.used > _FORGET_AFTER_S or inode.ino not in listing.at:
            known = self._listings.items()
            left = {of: one for of, one in known if now - one.used <= _FORGET_AFTER_S}
            self._listings = left if len(left) < _DIRECTORIES_MAX else {}
            try:
                names = sorted(self._namespace.children(directory))
            except (KeyError, Unread):
                return
            listing = self._listings[directory] = _Listing([ino for _, ino in names])
        listing.used = now
        start = listing.at.get(inode.ino, len(listing.inos)) + 1
        window = listing.inos[start : start + listing.window]
        listing.window = min(2 * listing.window, _WINDOW_MAX)
        for ino in window:
            found = self._namespace.inodes.get(ino)
            if found is not None and found.is_file and found.extent:
                yield found


class Prefetcher:
    """Fetches files in directories that are followed for good: all that are there, and new versions when
    they are published."""

    def __init__(self, cluster: Cluster, versions: Versions) -> None:
        self._namespace = cluster.namespace
        self._nursery = cluster.nursery
        self._leases = cluster.leases
        self._listeners = cluster.changes.inode_listeners
        self._versions = versions
        self._limit = trio.CapacityLimiter(_AT_ONCE)
        self.fetched_bytes = 0

    def follow(self, ino: int) -> None:
        """Fetch every file below a directory, and from now on what is published in directories that are
        followed for good."""
        fetch_all = partial(for_each, list(self._below(ino)), self._fetch)
        self._nursery.start_soon(partial(fetch_all, at_once=_AT_ONCE))
        if self._inode_changed not in self._listeners:
            self._listeners.append(self._inode_changed)

    def _inode_changed(self, old: Inode | None, new: Inode | None) -> None:
        if new is None or not new.extent or (old is not None and new.version == old.version):
            return
        if any(map(self._leases.is_followed_for_good, self._namespace.parents_of(new.ino))):
            self._nursery.start_soon(self._fetch, new)

    def _below(self, ino: int) -> Iterator[Inode]:
        left = [ino]
        while left:
            inode = self._namespace.inodes.get(left.pop())
            if inode is not None and inode.is_dir:
                left += (child for _, child in self._namespace.children(inode.ino))
            elif inode is not None and inode.is_file and inode.extent:
                yield inode

    async def _fetch(self, inode: Inode) -> None:
        async with self._limit:
            try:
                inode = await self._versions.bring(inode.ino, ahead=True)
            except OSError as error:
                where = self._namespace.describe(inode.ino)
                log.info("%s: it could not be fetched ahead: %s", where, error)
            else:
                self.fetched_bytes += inode.size


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
        # The directories in which any mount may defer changes, this one, too.
        self.exclusive = cluster.claims.exclusive
        # Another mount may have changed a directory, and have told nobody: `freshen` has it told.
        self.is_deferred_elsewhere = cluster.claims.is_exclusive_elsewhere

    def is_fresh(self, inode: Inode) -> bool:
        """Return whether `freshen` has nothing to wait for."""
        if inode.is_dir and not inode.revision:
            return True  # it was made here, and is not stored yet
        directories = self._directories_of(inode)
        exclusive = filter(self.exclusive.__contains__, directories)
        return (
            bool(directories)
            and all(map(self._leases.believable_s, directories))
            and not any(map(self.is_deferred_elsewhere, exclusive))
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
        if directory in self.exclusive and self._claims.is_exclusive_elsewhere(directory):
            return 0.0
        seconds = self._leases.believable_s(directory, used=used)
        if used and not seconds and not self._claims.has_draft(directory):
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
        with first_alone():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._bring_quietly, inode.ino)
                await self._cluster.replica.barrier()
                current = self._namespace.inodes.get(inode.ino)
                if current is None or current.extent != inode.extent:
                    nursery.cancel_scope.cancel()

    async def _bring_quietly(self, ino: int) -> None:
        try:
            await self._versions.bring(ino)
        except OSError as error:
            if error.errno in (errno.ETIMEDOUT, errno.EIO):
                raise  # it has been looked for long enough
            log.debug("inode %d: %s", ino, error)  # an open of the file will raise the same error
