"""Contents on this host: opens, closes, and what they read and publish.

docs/sharing.md has the rules. Nothing here moves parameter bytes except copies that are made inside the
kernel.
"""

import logging
import os
from contextlib import suppress
from typing import Final

from ..backend.namespace import Inode
from ..backend.store.api import Store
from ..callers.processes import Processes
from ..inline import detach
from .carried import Carried
from .content import Content, State
from .drafts import Drafts
from .host import Host
from .in_place import InPlace
from .kernel_cache import KernelCache, Name
from .nodes import Handle, Node
from .publishing import Publisher
from .put_off import PutOff
from .references import References
from .routes import Promise, Routes

log = logging.getLogger(__name__)

# An open that reads, and publishes an empty version, has only O_TRUNC of these flags: O_RDONLY is 0.
_EMPTYING: Final = os.O_TRUNC | os.O_ACCMODE


class Cache:
    """Opens and releases file contents; its parts do all else with them. `isolates`: as for
    Sharing; `passthrough`: the session is able to pass through."""

    def __init__(
        self,
        store: Store,
        kernel: KernelCache,
        processes: Processes,
        *,
        isolates: bool,
        passthrough: bool,
    ) -> None:
        self._store = store
        self._passthrough = passthrough
        self._inodes = store.namespace.inodes
        self.kernel = kernel
        self.processes = processes
        self.host = host = Host(store, kernel, isolates=isolates)
        self.nodes = host.nodes
        self._table = host.table
        self.sharing = host.sharing
        self.routes = Routes(host)
        self.references = References()
        self.in_place = in_place = InPlace(host)
        self.put_off = put_off = PutOff(host)
        self.publisher = publisher = Publisher(host, in_place, put_off, processes)
        self.drafts = Drafts(host, put_off, publisher, self.release)
        self.carried = Carried(host, in_place, publisher)

    # -- open ------------------------------------------------------------------------------------

    async def open(
        self, inode: Inode, node: Node, flags: int, pid: int, name: Name | None
    ) -> Handle:
        """Open the file for a request that came to `node`, by this name if one is known.

        Raises OSError ESTALE when the kernel has to look the name up again.
        """
        if self.put_off.handles:
            inode = await self._stored(inode, flags)
        promise = self.routes.take(pid, inode.ino) if self.routes.promises else None
        try:
            if flags & _EMPTYING == os.O_TRUNC:
                inode = await self._empty(inode, node, flags, promise)
            if flags & os.O_ACCMODE:
                inode = await self._settled(inode, flags)
            content, cut = self.routes.choose(inode, node, flags, pid, promise, name)
            handle = self._open(node, content, flags, pid)
        finally:
            if promise is not None:
                self.routes.end(promise)
        if handle.writing or content.preparing or content.awaited:
            await self._make_ready(handle, content, cut=cut)
        return handle

    async def _empty(self, inode: Inode, node: Node, flags: int, promise: Promise | None) -> Inode:
        """Empty a file for an open with O_RDONLY | O_TRUNC, unless that did it before it was promised the
        content. Return the inode."""
        kept = nameless = False
        if promise is not None:
            kept, nameless = promise.is_kept_by(node, flags), promise.is_nameless(node)
            if kept and promise.is_emptied:
                return inode
        shown = node.content if (nameless if node.opens else kept) else None
        await self.carried.empty(self.sharing.content_to_empty(inode, shown))
        return await self._store.bring(inode.ino)  # others may have published since

    async def _stored(self, inode: Inode, flags: int) -> Inode:
        """Return the inode when its file may be opened so. One that was closed and is not stored yet may be
        read, but not written."""
        handle = self.put_off.handles.get(inode.ino)
        if handle is None:
            return inode
        may_be_read = handle in self.put_off.released or handle.waits_for_rename
        if flags & (os.O_ACCMODE | os.O_TRUNC) or not may_be_read:
            await self.drafts.store(inode.ino)
        return self._inodes[inode.ino]

    async def _settled(self, inode: Inode, flags: int) -> Inode:
        """Return the inode when no store node is adopting the file that a writer would share. Descriptors
        that had that file open go on with it."""
        while flags & os.O_ACCMODE != os.O_RDONLY:
            content = self._table.newest_private(inode.ino) or self._table.current.get(inode.ino)
            if content is None or not content.leaves:
                break
            await detach()
            async with content.locked():
                pass
            inode = self._inodes[inode.ino]
        return inode

    async def open_any(self, inode: Inode, flags: int, pid: int) -> Handle:
        """Open the file for a request that accepts any node."""
        if self.put_off.handles:
            inode = await self._stored(inode, flags)
        inode = await self._settled(inode, flags)
        node, content, cut = self.routes.choose_any(inode, flags, pid)
        handle = self._open(node, content, flags, pid)
        await self._make_ready(handle, content, cut=cut)
        return handle

    def create(self, inode: Inode, flags: int, pid: int) -> Handle:
        """Open a file that was just made. Raises OSError (ENOSPC, EMFILE)."""
        if self.routes.promises:
            self.routes.withdraw(pid, inode.ino)
        content = Content(inode)
        node = self.nodes.add(inode)
        if flags & os.O_ACCMODE != os.O_RDONLY:
            empty = flags & os.O_TRUNC or flags & os.O_ACCMODE == os.O_WRONLY
            try:
                self.sharing.allocate(content, inode, whole=bool(empty and not flags & os.O_APPEND))
            except OSError:
                self.nodes.drop_unused(node)
                raise
        self._table.current[inode.ino] = content
        handle = self._open(node, content, flags, pid)
        if handle.is_rdwr and not node.cached:
            content.be_mapped()
        return handle

    def _open(self, node: Node, content: Content, flags: int, pid: int) -> Handle:
        lends = self._store.sends
        if lends and self.references.announced:
            lends = self.references.may_stay(pid, content.ino)
        self._table.hold(content, lends=lends)  # first: a store node may have freed the file
        if not node.opens:
            # Which content it shows, and whether it is passed through, is decided at its first open.
            node.content = content
            if node.outdated:
                # The kernel has heard of the node by now: it opens it.
                self.kernel.invalidate_attributes(node)
            # An empty version has no extent to pass through to, nor has one that is too large to be kept on
            # this host.
            writing = flags & os.O_ACCMODE != os.O_RDONLY
            node.cached = not (self._passthrough and (writing or self._table.is_here(content)))
            if node.backing_id and (node.cached or node.backing_extent != content.extent):
                self.kernel.drop_backing(node)
        handle = self.nodes.open(node, content, flags, pid)
        if content.whole and handle.writing and not flags & os.O_TRUNC and content.writers > 1:
            content.be_joined()
        return handle

    async def _make_ready(self, handle: Handle, content: Content, *, cut: bool) -> None:
        try:
            if cut:
                if not (content.extent or content.base.version) and content.writers == 1:
                    # Another host is making the file. Both begin with an empty one: the last close wins.
                    self.sharing.allocate(content, content.base, whole=True)
                await self.in_place.change(content, lambda fd: os.ftruncate(fd, 0))
            elif handle.writing:
                if not content.state.writable or content.is_busy:
                    await self.in_place.make_writable(content)
                if content.writers > 1:
                    handle.since = self._table.mark(content)
            elif content.preparing or (content.awaited and self._table.is_borrowed(content)):
                # The file that is about to be written is the one that must be read.
                await self.in_place.make_writable(content)
            if handle.writing and self._inodes[content.ino].maker < 0:
                await self._tell_writers(content.ino)
        except BaseException:
            handle.aborted = True
            await self.release(handle.fh)
            raise
        if not handle.writing:
            return
        if handle.is_rdwr and not handle.node.cached and not content.mapped:
            content.be_mapped()
            self.kernel.invalidate_attributes(handle.node)
        is_shared = content.state is not State.REPLACING
        if content.writers == 1 and is_shared and self.nodes.has_siblings(content.ino):
            for other in self.nodes.of(content.ino):
                if other is not handle.node:
                    self.kernel.invalidate_attributes(other)

    # -- close -----------------------------------------------------------------------------------

    async def release(self, fh: int) -> None:
        """Publish the rest when the last descriptor of a handle is closed; the node counts as open until
        then."""
        handle = self.nodes.handles[fh]
        content = handle.content
        assert content is not None
        if handle.writing:
            if self.put_off.handles and self.put_off.keeps(handle):
                self.drafts.send_ahead(handle)
                return
            content.leaving += 1
            try:
                await self.publisher.last_release(handle, content)
                if content.writers == 1:
                    await self._last_writer_leaves(handle, content)
            except OSError as error:
                handle.aborted = True
                where = self._store.namespace.describe(content.ino)
                log.error("%s: its last changes could not be published: %s", where, error)
            finally:
                content.leaving -= 1
            if handle.aborted and content.writers == 1:
                with suppress(OSError):  # the extent itself may be missing
                    self._cut_unpublished(content)
        self.nodes.close(fh)
        if content.fd >= 0 and not content.writers:
            self._table.close(content)
        self.host.let_go(content)
        node = handle.node
        if not (node.opens or node.promised):
            self.host.idle(node)
        if handle.writing:
            with suppress(OSError):  # a close may have been killed before it showed the name
                await self._tell_writers(content.ino)
        if self.host.nameless:
            await self.host.forget_nameless()

    async def _tell_writers(self, ino: int) -> None:
        """Let other hosts remove a new file, with its directory, unless somebody writes it here."""
        while (inode := self._inodes.get(ino)) is not None and inode.maker and inode.name:
            left = not self.host.has_writers(ino)
            if left == (inode.maker < 0) or ino in self._store.namespace.tree.unseen:
                break
            await self._store.namespace.show(inode.parent, inode.name, left=left)

    async def _last_writer_leaves(self, handle: Handle, content: Content) -> None:
        """Make the content a version again, or drop it: it has no writer any more."""
        if content.state is State.REPLACING:
            if handle.aborted or not content.awaited:
                self._table.supersede(content)  # given up, or published by a copy
            return
        if content.state.ended or not (content.state.writable and content.own):
            return
        if content.seen is None and handle.killed and self._inodes[content.ino].nlink:
            await self._keep(content)
        elif handle.aborted and (content.seen is None or self._table.is_written(content)):
            self._table.supersede(content)  # its writer was told that it is not published
        elif not self._inodes[content.ino].nlink:
            content.be_left()  # it is no version, but readers have it open

    async def _keep(self, content: Content) -> None:
        """Keep a new file whose writer was killed: it stays on this host as it is, as on any filesystem,
        and other hosts do not see it."""
        if not self._table.stamp(content)[0]:
            return
        if self._store.sends:
            content.be_left()
        else:
            await self.publisher.publish(content, stays=False)

    def _cut_unpublished(self, content: Content) -> None:
        """Cut the extent of a version back to its length after its last writer could not publish."""
        inode = self._inodes[content.ino]
        if not content.extent or content.own or content.extent != inode.extent or not inode.nlink:
            return
        if self._table.stamp(content)[0] > inode.size:
            with self._store.extents.opened(content.extent, os.O_RDWR) as fd:
                os.ftruncate(fd, inode.size)
