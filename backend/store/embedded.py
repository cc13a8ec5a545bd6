"""The embedded store: extents and the namespace that names them, in one store directory.

It runs inside the mount's daemon. An extent is in one of three states: working (allocated, no version names
it), current (a file's newest version), retired (superseded or given up). A retired extent is freed once
nothing pins it; working and retired extents do not survive a crash.
"""

import errno
import logging
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing

import trio

from ...inline import detach
from ..files.extents import ExtentStore, Pinned, in_memory, lock_directory
from ..kv.map import Map
from ..model.records import NO_CONTENT, ContentId, Layout
from ..namespace import Inode, LocalCommitter, Namespace, NewClone, NewVersion, Tree, fail
from .api import Store, copy_of, save_aside

log = logging.getLogger(__name__)

_NAMES = "names"  # in a store directory
_HERE = Layout()


@asynccontextmanager
async def embedded_store(directory: str) -> AsyncIterator["EmbeddedStore"]:
    """Open a store directory.

    Raises StoreInUse when another process has it open, kv.Damaged when its names cannot be read.
    """
    os.makedirs(directory, mode=0o700, exist_ok=True)
    with os.fdopen(lock_directory(directory, "store is in use by another daemon")):
        waits = not in_memory(directory)
        with (
            closing(Map(f"{directory}/{_NAMES}", power_safe=waits)) as records,
            closing(ExtentStore(f"{directory}/extents")) as extents,
        ):
            store = EmbeddedStore(records, extents, waits=waits)
            await store.begin()
            try:
                yield store
            finally:
                store.end()


class EmbeddedStore(Pinned, Store):
    """The Store of a mount that uses no cluster; made by `embedded_store`."""

    size_max = 2**63 - 1

    def __init__(self, records: Map, extents: ExtentStore, *, waits: bool) -> None:
        super().__init__()
        tree = Tree(records)
        self._committer = LocalCommitter(tree)
        self.namespace = Namespace(tree, self._committer)
        self.extents = extents
        self.waits = waits
        # Extents that were allocated here and that no version names yet.
        self._working: set[ContentId] = set()
        # Extents that programs may have mapped for writing since this process began.
        self._mapped: set[ContentId] = set()

    async def begin(self) -> None:
        """Repair what a crash left."""
        left: set[ContentId] = set()
        # Files whose extents were written after they were published, with the stat of each.
        written: list[tuple[int, os.stat_result]] = []

        def visit(inode: Inode) -> None:
            if not inode.extent:
                return
            left.discard(inode.extent)
            try:
                status = self.extents.stat(inode.extent)
            except OSError:
                log.error(
                    "the content of inode %d (version %d) is missing from the store: %s",
                    inode.ino, inode.version, self.extents.path(inode.extent),
                )  # fmt: skip
                return
            known_ns = max(inode.mtime_ns, inode.ctime_ns)
            if status.st_size != inode.size or status.st_mtime_ns > known_ns:
                written.append((inode.ino, status))

        if self.namespace.tree.records.note is None:
            left.update(self.extents)
        if await self._committer.load(visit):
            for extent in left:
                self.extents.free(extent)
            await self._publish_again(written)

    def end(self) -> None:
        """Free what nobody can have open, and note that nothing is left to be repaired, if so."""
        for extent in self._retired:
            self.extents.free(extent)
        if not (self.counts or self._working):
            self._committer.leave()

    async def _publish_again(self, written: list[tuple[int, os.stat_result]]) -> None:
        """Publish as the files' next versions what was written in place when the daemon or the machine
        stopped. The bytes are in the extents, as on any filesystem."""
        for ino, status in written:
            where = self.namespace.describe(ino)
            log.info("%s: the bytes written in place before the crash are kept", where)
            extent = self.namespace.inode(ino).extent
            version = NewVersion.of_file(ino, extent, status, status.st_mtime_ns)
            await self.publish(version._replace(ctime_ns=status.st_ctime_ns, in_quotas=False))

    # -- the life of an extent -------------------------------------------------------------------

    def free(self, extent: ContentId) -> None:
        self._working.discard(extent)
        self._mapped.discard(extent)
        self.extents.free(extent)

    async def publish(self, version: NewVersion) -> Inode:
        extent = version.extent
        if not version.size:
            version = version._replace(extent=NO_CONTENT)
        elif self.waits:
            await trio.to_thread.run_sync(self.extents.sync, version.extent)
        before = self.namespace.inodes[version.ino].extent
        inode = await self.namespace.publish(version)
        self._retired.discard(version.extent)
        self._working.discard(version.extent)
        if before not in (NO_CONTENT, extent):
            self.retire(before)
        elif extent != version.extent:
            self._working.add(extent)  # it was emptied, and may be written on
        return inode

    async def clone(self, directory: int, wanted: Sequence[NewClone]) -> None:
        linked = list[ContentId]()
        try:
            for _, source, made in wanted:
                extent = source.extent
                is_suspect = extent in self._mapped or extent < self.extents.first
                if extent and is_suspect and self.extents.is_open_to_write(extent):
                    raise fail(errno.ETXTBSY)
                if extent:
                    made.extent = self.extents.link(extent)
                    linked.append(made.extent)
            if self.waits and linked:
                await detach()
                await trio.to_thread.run_sync(self.extents.sync, linked[-1])  # with all names
            await self.namespace.clone(directory, wanted, shares=False)
        except BaseException:
            for extent in linked:
                self.extents.free(extent)
            raise

    def note_mapped(self, extent: ContentId) -> None:
        self._mapped.add(extent)

    # -- writing in place ------------------------------------------------------------------------

    def is_lent(self, extent: ContentId) -> bool:
        return extent > 0 and self.extents.stat(extent).st_nlink > 1

    async def begin_in_place(self, inode: Inode, extent: ContentId) -> ContentId:
        """Return a copy of an extent that other files have, too. It has the version from then on: what is
        written stays if the daemon is killed. Raises OSError (ENOSPC)."""
        await detach()
        copy = await copy_of(self, inode, extent, syncs=self.waits)
        if self.namespace.inode(inode.ino).extent == extent:
            await self.namespace.move(inode.ino, copy)
            self._working.discard(copy)
            self.retire(extent)
        return copy

    async def save_aside(self, version: NewVersion) -> str:
        return await save_aside(self, version, "this-host")

    async def forget(self, inode: Inode) -> None:
        if self.namespace.tree.drop(inode.ino):
            self.retire(inode.extent)

    def layout(self, parent: int, name: bytes) -> Layout:
        return _HERE

    def allocate(self, inode: Inode) -> tuple[ContentId, int]:
        extent, fd = self.extents.allocate()
        self._working.add(extent)
        return extent, fd
