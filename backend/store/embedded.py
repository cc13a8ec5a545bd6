"""The embedded store: extents and the namespace that names them, in one store directory.

It runs inside the mount's daemon. An extent is in one of three states: working (allocated, no version names
it), current (a file's newest version), retired (superseded or given up). A retired extent is freed once
nothing pins it; working and retired extents do not survive a crash.
"""

import errno
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any

import trio

from ..cluster.records import NO_CONTENT, ContentId, Layout
from ..kv import OwnEngine
from ..kv.engines import OpenEngine, open_engine
from ..namespace import Inode, Namespace, NewVersion, fail, load_own
from .aside import make_aside
from .extents import ExtentStore
from .pins import Pinned
from .storedir import in_memory, lock_directory

log = logging.getLogger(__name__)

# A file in the store directory, see EmbeddedStore.begin.
OPEN_MARK = "open"

_HERE = Layout()


@asynccontextmanager
async def embedded_store(
    directory: str, open_engine: OpenEngine = open_engine
) -> AsyncIterator["EmbeddedStore"]:
    """Open a store directory.

    Raises StoreInUse when another process has it open, kv.Damaged when its database cannot be read.
    """
    os.makedirs(directory, mode=0o700, exist_ok=True)
    with os.fdopen(lock_directory(directory, "store is in use by another daemon")):
        waits = not in_memory(directory)
        engine = open_engine(directory, power_safe=waits)
        try:
            with closing(ExtentStore(f"{directory}/extents")) as extents:
                namespace = await load_own(engine)
                store = EmbeddedStore(engine, namespace, extents, waits=waits)
                await store.begin(f"{directory}/{OPEN_MARK}")
                try:
                    yield store
                finally:
                    store.end(f"{directory}/{OPEN_MARK}")
        finally:
            await engine.close()


class EmbeddedStore(Pinned):
    """The Store of a mount that uses no cluster; made by `embedded_store`."""

    sends = reads_into = False
    locks = freshness = None
    size_max = 2**63 - 1

    def __init__(
        self, engine: OwnEngine, namespace: Namespace, extents: ExtentStore, *, waits: bool
    ) -> None:
        super().__init__()
        self.engine = engine
        self.namespace = namespace
        self.extents = extents
        self.waits = waits

    async def begin(self, open_mark: str) -> None:
        """Repair what a crash left. The file `open_mark` exists while files may be open."""
        self._free_leftovers()
        try:
            os.close(os.open(open_mark, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            await self._take_what_was_written()

    def end(self, open_mark: str) -> None:
        """Remove what the next daemon would take for the remains of a crash."""
        for extent in self._retired:
            self.extents.free(extent)
        if not self.counts:
            os.unlink(open_mark)

    async def _take_what_was_written(self) -> None:
        """Publish as the files' next versions what was written in place when the daemon or the machine
        stopped. The bytes are in the extents, as on any filesystem."""
        for inode in list(self.namespace.inodes.values()):
            if not inode.extent:
                continue
            try:
                status = self.extents.stat(inode.extent)
            except OSError:
                continue  # the extent is missing, which is logged
            known_ns = max(inode.mtime_ns, inode.ctime_ns)
            if status.st_size != inode.size or status.st_mtime_ns > known_ns:
                where = self.namespace.describe(inode.ino)
                log.info("%s: the bytes written in place before the crash are kept", where)
                version = NewVersion.of_file(inode.ino, inode.extent, status, status.st_mtime_ns)
                version = version._replace(ctime_ns=status.st_ctime_ns, in_quotas=False)
                await self.publish(version)

    def _free_leftovers(self) -> None:
        named = {inode.extent for inode in self.namespace.inodes.values()}
        present = set(self.extents)
        for extent in present - named:
            self.extents.free(extent)
        missing = named - present - {0}
        for inode in self.namespace.inodes.values():
            if inode.extent in missing:
                log.error(
                    "the content of inode %d (version %d) is missing from the store: %s",
                    inode.ino, inode.version, self.extents.path(inode.extent),
                )  # fmt: skip

    # -- the life of an extent -------------------------------------------------------------------

    def _free(self, extent: ContentId) -> None:
        self.extents.free(extent)

    async def publish(self, version: NewVersion) -> Inode:
        """Make an extent the file's next version. It survives a crash when this returns.

        Waits for the disk if the store is on one (`waits`). An empty extent is not kept: the version is
        recorded as empty. Raises OSError ENOSPC, EDQUOT; the file then keeps its present version.
        """
        if not version.size:
            version = version._replace(extent=NO_CONTENT)
        elif self.waits:
            await trio.to_thread.run_sync(self.extents.sync, version.extent)
        before = self.namespace.inode(version.ino).extent
        inode = await self.namespace.publish(version)
        self.named(version.extent)
        if before != version.extent:
            self.retire(before)
        return inode

    def may_have_published(self, extent: ContentId) -> bool:
        return False

    async def save_aside(self, version: NewVersion) -> str:
        made, name = await make_aside(self.namespace, version.ino, "this-host", self.layout)
        await self.publish(version._replace(ino=made.ino, base=None))
        return name

    async def begin_in_place(self, inode: Inode, extent: ContentId) -> ContentId:
        return extent

    def end_in_place(self, inode: Inode, extent: ContentId) -> bool:
        return False

    def lend(self, extent: ContentId) -> None:
        pass

    def is_lent(self, extent: ContentId) -> bool:
        return False

    def hands_over(self, extent: ContentId) -> bool:
        return False

    async def is_same(self, inode: Inode, extent: ContentId) -> bool:
        return False

    async def forget(self, inode: Inode) -> None:
        """Drop an inode that has no name and no holder, and its content."""
        if inode.ino in self.namespace.inodes:
            await self.namespace.drop(inode.ino)
            self.retire(inode.extent)

    # -- what is all here: nothing to ask for ----------------------------------------------------

    def layout(self, parent: int, name: bytes) -> Layout:
        return _HERE

    async def nodes_of(self, inode: Inode) -> list[dict[str, Any]]:
        raise fail(errno.ENODATA, "it is on this host")

    def allocate(self, inode: Inode) -> tuple[ContentId, int]:
        return self.extents.allocate()

    async def bring(self, ino: int) -> Inode:
        return self.namespace.inode(ino)

    async def read_into(self, ino: int, memory: int, lifeline: int) -> Inode:
        os.close(memory)
        os.close(lifeline)
        raise fail(errno.EOPNOTSUPP, "it is on this host")

    def count_open(self, extent: ContentId) -> None:
        """Do nothing: all contents are here."""

    def is_here(self, extent: ContentId) -> bool:
        return True

    async def read(self, inode: Inode, extent: ContentId, offset: int, size: int) -> bytes:
        with self.extents.opened(extent) as fd:
            return os.pread(fd, size, offset)

    def prefetch(self, ino: int) -> None:
        raise fail(errno.EOPNOTSUPP)

    def prefetch_progress(self, ino: int) -> dict[str, Any]:
        raise fail(errno.EOPNOTSUPP)

    def statvfs(self) -> os.statvfs_result:
        return self.extents.statvfs()

    async def check_attribute(self, inode: Inode, name: bytes, value: bytes) -> None:
        pass

    def figures(self) -> list[Any]:
        return []

    def status(self) -> dict[str, Any]:
        return {}
