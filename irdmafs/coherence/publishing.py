"""When bytes become a version: close, fsync, rename, and what must not become one.

docs/sharing.md, "When a version is published", has the rules that this module carries out.
"""

import errno
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from ..backend.cluster.records import ContentId
from ..backend.namespace import Inode, fail
from ..backend.store.api import Outdated, Store
from ..backend.store.extents import copy_contents
from ..callers.processes import Processes
from ..inline import detach
from .changes import Changes
from .content import Content, ContentTable, changed_ns, stamp_of
from .kernel_cache import KernelCache
from .newest import Newest
from .nodes import Handle, NodeTable

log = logging.getLogger(__name__)

# Larger copies are made in a thread, so that other requests are served meanwhile.
COPY_INLINE_MAX_BYTES = 1024 * 1024
# A store with less room than this is full: a write may just have failed.
_FULL_BYTES = 64 * 1024


class Publisher:
    """Decides what is published when, and publishes it."""

    def __init__(
        self,
        store: Store,
        kernel: KernelCache,
        table: ContentTable,
        changes: Changes,
        nodes: NodeTable,
        processes: Processes,
        newest: Newest,
    ) -> None:
        self._store = store
        self._kernel = kernel
        self._table = table
        self._changes = changes
        self._nodes = nodes
        self._inodes = store.namespace.inodes
        self._processes = processes
        self._newest = newest
        # By inode, those whose contents are being published.
        self._turns: dict[int, trio.Lock] = {}

    # -- close -----------------------------------------------------------------------------------

    async def flush(self, handle: Handle, content: Content, pid: int) -> None:
        """Carry out close(2) of one descriptor. Return when everything written is published."""
        inode = self._inodes[content.ino]
        if not (inode.nlink or inode.maker):
            return
        if pid != handle.pid:
            others = await self._processes.may_still_write(pid, handle.pid)
            if others and await self._processes.hold(others, content.ino):
                return  # half-written files are not published
        if content.is_busy:
            await detach()
            async with content.locked():
                pass
        handle.aborted = content.discarded
        if handle.aborted or (content.superseded and not self._changes.is_written(content)):
            return
        if content.whole or content.seen is None:
            process = await self._processes.of(pid)
            if content.whole and process.killed_by_signal():
                handle.aborted = handle.killed = True
                if process.tell_once():
                    where = self._store.namespace.describe(content.ino)
                    log.info(
                        "%s: pid %d died writing it; it is not published, as is all that it wrote",
                        where, pid,
                    )  # fmt: skip
                return
            if (
                content.seen is None
                and not self._changes.is_written(content)
                and await self._has_duplicate(pid, content.ino)
            ):
                return
            if content.private and not handle.node.cached and self._is_full():
                # The daemon does not see a write that the kernel refused for lack of room.
                handle.aborted = True
                raise fail(errno.ENOSPC, "the store is full; the version before stays")
        changed = self._changes.is_changed(handle, content)
        if not changed and not self._changes.is_to_be_compared(content):
            await self.show_name(content.ino)
            return
        try:
            stays = await self._stays(handle, content, pid)
            await self._publish_locked(content, stays=stays, changed=changed)
        except OSError as error:
            # The closing program gets the error, and may write the file anew: this must not overwrite that.
            # Later writes through a mapping were not refused.
            handle.aborted = not content.mapped
            where = self._store.namespace.describe(content.ino)
            log.error("%s: what pid %d wrote could not be published: %s", where, pid, error)
            raise

    async def _stays(self, handle: Handle, content: Content, pid: int) -> bool:
        """Return whether the content may be written on: a copy is published then, if that makes a
        difference."""
        # The bytes are hashed while they are sent; a program that maps them may store meanwhile.
        if content.writers > 1 or (content.mapped and self._store.shared):
            return True
        if not self._store.hands_over(content.extent):
            return False
        # The store adopts the very file: other descriptors of it would not see later writes.
        if content.holds > 1 or pid != handle.pid:
            return True
        return await self._has_duplicate(pid, content.ino)

    async def _has_duplicate(self, pid: int, ino: int) -> bool:
        """Return whether the process has another descriptor of the file with a number used by
        redirections."""
        process = await self._processes.of(pid)
        return not process.is_in_exec() and await self._processes.holds_low(pid, ino)

    def _is_full(self) -> bool:
        room = self._store.extents.statvfs()
        # f_blocks is 0 on a tmpfs without a limit.
        return bool(room.f_blocks) and room.f_bavail * room.f_frsize < _FULL_BYTES

    async def last_release(self, handle: Handle, content: Content) -> None:
        """Publish the rest when the last descriptor of the only writer, and its mappings, are gone.

        A file without a name may still be given one, or opened, through descriptors that never opened it
        (O_PATH), except in a cluster.
        """
        inode = self._inodes[content.ino]
        while (
            not (handle.aborted or content.discarded)
            and (bool(inode.nlink) or not self._store.shared)
            and not (content.superseded and not self._changes.is_written(content))
            and content.writers == 1
        ):
            changed = self._changes.is_changed(handle, content)
            if changed or (self._changes.is_to_be_compared(content) and not content.superseded):
                await self._publish_locked(content, stays=False, changed=changed)
            if not changed:
                return
            inode = self._inodes[content.ino]

    # -- other occasions -------------------------------------------------------------------------

    async def fsync(self, handle: Handle, content: Content) -> None:
        """Carry out fsync(2): publish everything written so far; the descriptor stays open."""
        if content.discarded or (content.superseded and not self._changes.is_written(content)):
            return
        changed = self._changes.is_changed(handle, content)
        if not self._store.shared:
            # On one host there is no other copy, but processes that wait for versions must be told of this
            # one.
            was_written = content.seen != content.begun
            changed = changed or (was_written and self._changes.may_hide_writes(content))
        if changed or self._changes.is_to_be_compared(content):
            await self._publish_locked(content, stays=True, changed=changed)
        else:
            await self.show_name(content.ino)

    async def show_name(self, ino: int) -> None:
        """Let other hosts see the name of a new file that is empty, or is about to be locked."""
        if self._inodes[ino].maker:
            await detach()
            for name in self._store.namespace.names_of(ino):
                await self._store.namespace.show(*name)

    async def publish_so_far(self, content: Content) -> None:
        """Publish everything written in place so far, by any process; nothing if there is nothing."""
        if not content.extent or content.discarded:
            return
        changed = self._changes.is_written(content)
        if changed or self._changes.is_to_be_compared(content):
            await self._publish_locked(content, stays=True, changed=changed)

    async def publish_named(self, content: Content) -> None:
        """Publish the content being written to a file whose name is about to lead to another inode."""
        if (
            not content.discarded
            and self._table.stamp(content)[0]
            and self._changes.is_written(content)
        ):
            if self._store.waits:
                await detach()
            await self._publish_locked(content, stays=True, naming=True)

    async def publish_truncated(self, content: Content) -> None:
        """Publish a truncation by name: no close will publish it."""
        await self._publish_locked(content, stays=bool(content.writers))

    async def keep(self, content: Content) -> None:
        """Keep a new file whose writer was killed: it stays on this host as it is, as on any filesystem,
        and other hosts do not see it."""
        if not self._table.stamp(content)[0]:
            return
        if self._store.shared:
            content.kept = True
        else:
            await self._publish_locked(content, stays=False)

    def cut_unpublished(self, content: Content) -> None:
        """Cut the extent of a version back to its length after its last writer could not publish."""
        inode = self._inodes[content.ino]
        if not content.extent or content.own or content.extent != inode.extent or not inode.nlink:
            return
        if self._table.stamp(content)[0] > inode.size:
            self._store.extents.truncate(content.extent, inode.size)

    # -- publishing ------------------------------------------------------------------------------

    async def _publish_locked(
        self, content: Content, *, stays: bool, changed: bool = True, naming: bool = False
    ) -> bool:
        """Publish a content; if not `changed`, only if a comparison finds it changed. Return whether it was
        published."""
        waits = self._store.waits or content.is_busy or (stays and self._copies(content))
        if not waits:
            await self._publish(content, stays=stays, naming=naming)
            return True
        await detach()
        seen = content.seen
        async with content.locked():
            # Another task may have published it meanwhile.
            certain = changed and content.seen == seen
            if not certain and not self._changes.is_surely_written(content):
                if not self._changes.is_to_be_compared(content):
                    return False
                same = await self._store.is_same(content.published, content.extent)
                if same and not self._changes.is_surely_written(
                    content
                ):  # somebody may have truncated the file
                    return False
            content.leaves = not stays and self._store.hands_over(content.extent)
            if content.leaves and content.holds > 1:
                content.leaves, stays = False, True  # it was opened meanwhile
            try:
                await self._publish(content, stays=stays, naming=naming)
            finally:
                content.leaves = False
            return True

    def _copies(self, content: Content) -> bool:
        """Return whether a copy is published while the content is written on. Readers of a private content
        need a copy, as they see whole versions only. So does everything that leaves this host."""
        return content.private or self._store.shared

    async def _publish(self, content: Content, *, stays: bool, naming: bool = False) -> None:
        """Publish a content. `naming`: the kernel keeps directories locked until this returns."""
        if not content.extent:
            return
        stays = stays or content.writers > 1  # others may have opened it meanwhile
        status = shape = self._table.stat(content)
        extent = content.extent
        mapped = content.mapped
        written = content.private or self._changes.is_written(content, status)
        ctime_ns = changed_ns(content, status) if written else 0
        dirty, content.dirty = content.dirty, False
        # A writer that replaces a file does so even if others published meanwhile. On one host the last
        # close wins.
        replaces = content.private or content.whole or not self._store.shared
        try:
            if stays and status.st_size and self._copies(content):
                extent, shape = await self._copy(content)
                mapped = False
            try:
                inode = await self._store_version(
                    content, extent, shape, status.st_mtime_ns,
                    ctime_ns=ctime_ns, mapped=mapped, replaces=replaces,
                )  # fmt: skip
            except Outdated as outdated:
                inode = self._inodes[content.ino]
                # Two hosts that only emptied the file, as programs do with lock files, do not conflict.
                if status.st_size or inode.size:
                    if extent == content.extent:
                        extent, shape = await self._copy(content)
                    name = await self._store.save_aside(
                        content.ino, extent, shape, status.st_mtime_ns
                    )
                    extent = content.extent
                    dirty = False
                    raise await self._set_aside(content, name, status, outdated) from outdated
        except BaseException:
            content.dirty |= dirty
            if extent != content.extent:
                self._store.extents.free(extent)
            raise
        if extent not in (content.extent, inode.extent):
            self._store.retire(extent)  # the copy was published under another number
        content.seen = stamp_of(status)
        content.kept = False
        if extent != content.extent and content.private:
            # The content stays private; the copy is the file's version.
            content.published = inode
            content.version = inode.version
            self._supersede_before(inode)
        else:
            content.show(inode)
            content.whole = False
            if extent == content.extent:
                self._handed_over(content, inode)
            # Even if others have joined it meanwhile: the version's extent is this content's, and opens for
            # reading must not begin another one with it.
            if content.private or content.superseded:
                self._table.make_current(content)
        await self._announce(inode, content, naming=naming)

    async def _store_version(
        self,
        content: Content,
        extent: ContentId,
        status: os.stat_result,
        mtime_ns: int,
        *,
        ctime_ns: int,
        mapped: bool,
        replaces: bool,
    ) -> Inode:
        """Have an extent made the file's next version. Unless it `replaces` whatever there is, raises
        Outdated if another host has published since."""
        base = None if replaces else content.version
        async with self._turn(content):
            while True:
                try:
                    inode = await self._store.publish(
                        content.ino, extent, status, mtime_ns,
                        ctime_ns=ctime_ns, mapped=mapped, base=base,
                    )  # fmt: skip
                except Outdated:
                    newest = self._inodes[content.ino]
                    if newest.version == base or not self._is_own(newest):
                        raise
                    base = newest.version  # on this host the last close wins
                else:
                    self._table.published[content.ino] = inode.version
                    return inode

    @asynccontextmanager
    async def _turn(self, content: Content) -> AsyncIterator[None]:
        """Publish one content of a file at a time: while another one is on its way, nobody could tell that
        the newest version is this host's own."""
        if not self._store.waits:
            yield
            return
        lock = self._turns.setdefault(content.ino, trio.Lock())
        try:
            async with lock:
                self._table.publishing[content.ino] = content
                try:
                    yield
                finally:
                    del self._table.publishing[content.ino]
        finally:
            if not lock.locked():
                self._turns.pop(content.ino, None)

    def _is_own(self, inode: Inode) -> bool:
        """Return whether this host has published the newest version, whether or not it was told so."""
        return inode.version == self._table.published.get(
            inode.ino
        ) or self._store.may_have_published(inode.extent)

    def _handed_over(self, content: Content, inode: Inode) -> None:
        """Note that a version names the content's very extent now, maybe under another number."""
        if not inode.extent:
            return
        was_own = content.own
        content.own = was_own and inode.extent != content.extent
        try:
            self._table.give_extent(content, inode.extent, own=False)
        except OSError:
            # Another host has published since, and the store node here has freed the file.
            content.own = was_own
            return
        if self._store.shared:
            content.writable = False

    def _supersede_before(self, inode: Inode) -> None:
        before = self._table.current.get(inode.ino)
        # An open may have begun the content of this version already.
        if before is not None and before.version != inode.version:
            self._table.supersede(before)

    async def _copy(self, content: Content) -> tuple[ContentId, os.stat_result]:
        """Copy the content to an extent of its own. Return that, and its stat. The copy takes no room for
        bytes that were reserved and not written (posix_fallocate); the stat counts them."""
        extent, fd = self._store.allocate(self._inodes[content.ino])
        try:
            with self._store.extents.opened(content.extent) as source:
                if os.fstat(source).st_size <= COPY_INLINE_MAX_BYTES:
                    copy_contents(source, fd)
                else:
                    await trio.to_thread.run_sync(copy_contents, source, fd)
                blocks = os.fstat(source).st_blocks
            return extent, os.stat_result(os.fstat(fd), {"st_blocks": blocks})
        except BaseException:
            self._store.extents.free(extent)
            raise
        finally:
            os.close(fd)

    async def _set_aside(
        self, content: Content, name: str, status: os.stat_result, outdated: Outdated
    ) -> OSError:
        """Return the error of a file that others published while it was written in place here. The bytes
        written are kept in a file beside it, and its descriptors go on with the newest version."""
        where = self._store.namespace.describe(content.ino)
        error = fail(
            errno.ESTALE,
            f"{where}: version {outdated.version} was published while version {content.version} was "
            f"written in place here; what was written is in {name}",
        )
        content.seen = stamp_of(status)
        await self._newest.show_after_conflict(content)
        return error

    async def _announce(self, inode: Inode, content: Content, *, naming: bool) -> None:
        """Announce a published version: other nodes and names of the file may still show the one before."""
        ino = inode.ino
        if self._nodes.has_siblings(ino):
            for node in self._nodes.of(ino):
                if not node.is_bound and node.backing_extent != inode.extent:
                    self._kernel.drop_backing(node)
                if node.content is not content:
                    self._kernel.invalidate_attributes(node)
        if inode.nlink > 1:
            names = self._store.namespace.names_of(ino)
            if naming:
                self._kernel.start_soon(self._kernel.expire_names, names)
            else:
                await detach()
                await self._kernel.expire_names(names)
