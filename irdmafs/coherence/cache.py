"""Contents on this host: opens, closes, and what they read and publish.

docs/sharing.md has the rules. Nothing here moves parameter bytes except copies that are made inside the
kernel.
"""

import logging
import os
from contextlib import ExitStack, suppress
from typing import Final

from ..backend.namespace import Inode
from ..backend.store.api import Store
from ..callers.processes import Processes
from ..inline import detach
from .carried import Carried
from .changes import Changes
from .content import Content, ContentTable
from .in_place import InPlace
from .isolation import Isolation
from .kernel_cache import KernelCache
from .looks import Looks
from .newest import Newest
from .nodes import Handle, Node
from .publishing import Publisher
from .redirects import Redirects
from .references import References
from .routes import Routes
from .sharing import Sharing
from .unused import Unused

__all__ = ["Cache"]

log = logging.getLogger(__name__)

# An open that reads, and publishes an empty version, has only O_TRUNC of these flags: O_RDONLY is 0.
_EMPTYING: Final = os.O_TRUNC | os.O_ACCMODE


class Cache:
    """Opens, publishes and releases file contents. `passthrough`: the session is able to pass through."""

    def __init__(
        self,
        store: Store,
        kernel: KernelCache,
        processes: Processes,
        isolation: Isolation,
        *,
        passthrough: bool,
    ) -> None:
        self._store = store
        self._passthrough = passthrough
        self._inodes = store.namespace.inodes
        self.kernel = kernel
        self.processes = processes
        self._table = table = ContentTable(store)
        self._changes = changes = Changes(store, table)
        self._sharing = sharing = Sharing(store, table, isolation)
        self._unused = unused = Unused(store, kernel, table, changes)
        self.nodes = nodes = unused.nodes
        self._redirects = Redirects()
        self._references = references = References()
        self._routes = routes = Routes(store, kernel, table, self._redirects, sharing, unused)
        newest = Newest(store, kernel, table, changes, nodes)
        self._publisher = publisher = Publisher(
            store, kernel, table, changes, nodes, processes, newest
        )
        self._in_place = in_place = InPlace(
            store, kernel, table, changes, sharing, unused, newest, publisher
        )
        self._carried = carried = Carried(store, table, in_place)
        self.show_name = publisher.show_name

        # Bound here, so that a request needs no extra call through this class.
        looks = Looks(table, sharing, nodes)
        self.shown, self.look_of, self.version = looks.shown, looks.look_of, looks.version
        self.changes_unnoticed, self.is_written = looks.changes_unnoticed, looks.is_written

        self.node_of, self.names_are_stable = routes.node_of, routes.names_are_stable
        self.promise, self.is_promised = routes.promise, routes.is_promised
        self.withdraw = routes.withdraw

        self.announce, self.opens_as = references.announce, references.opens

        self.is_isolated = isolation.below
        self.discard, self.is_at_hand = sharing.discard, sharing.is_at_hand
        self.is_written_in_place = sharing.is_written_in_place

        self.change, self.refuse_growth = in_place.change, in_place.refuse_growth
        self.refuse_to_reserve = in_place.refuse_to_reserve
        self.truncate, self.set_mtime = in_place.truncate, in_place.set_mtime
        self.refresh, self.is_behind = in_place.refresh, in_place.is_behind

        self.read, self.write = carried.read, carried.write

        self.unnamed, self.forget_nameless = unused.unnamed, unused.forget_nameless

    @property
    def carried_bytes(self) -> int:
        """Return how many bytes of READ and WRITE requests passed through the daemon (cached mode)."""
        return self._carried.bytes

    # -- open ------------------------------------------------------------------------------------

    async def open(self, inode: Inode, node: Node, flags: int, pid: int) -> Handle:
        """Open the file for a request that came to `node`.

        Raises OSError ESTALE when the kernel has to look the name up again.
        """
        promise = self._routes.take(pid, inode.ino) if self._redirects.promises else None
        try:
            empties_at_once = flags & _EMPTYING == os.O_TRUNC
            if empties_at_once and (promise is None or not promise.is_kept_by(node, flags)):
                nameless = promise is not None and promise.is_nameless(node)
                shown = node.content if nameless and node.opens else None
                await self._in_place.empty(self._sharing.content_to_empty(inode, shown))
                inode = self._inodes[inode.ino]
            if flags & os.O_ACCMODE:
                inode = await self._settled(inode, flags)
            content, cut = self._routes.choose(inode, node, flags, pid, promise)
            handle = self._open(node, content, flags, pid)
        finally:
            if promise is not None:
                self._routes.end(promise)
        if handle.writing or content.preparing or content.awaited:
            await self._make_ready(handle, content, cut=cut)
        return handle

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
        inode = await self._settled(inode, flags)
        node, content, cut = self._routes.choose_any(inode, flags, pid)
        handle = self._open(node, content, flags, pid)
        await self._make_ready(handle, content, cut=cut)
        return handle

    def create(self, inode: Inode, flags: int, pid: int) -> Handle:
        """Open a file that was just made. Raises OSError (ENOSPC, EMFILE)."""
        if self._redirects.promises:
            self._routes.withdraw(pid, inode.ino)
        content = Content(inode)
        node = self.nodes.add(inode)
        if flags & os.O_ACCMODE != os.O_RDONLY:
            content.whole = not flags & os.O_APPEND and (
                bool(flags & os.O_TRUNC) or flags & os.O_ACCMODE == os.O_WRONLY
            )
            try:
                self._sharing.allocate(content, inode)
            except OSError:
                self.nodes.drop_unused(node)
                raise
        self._table.current[inode.ino] = content
        self.nodes.main[inode.ino] = node
        handle = self._open(node, content, flags, pid)
        content.mapped = handle.is_rdwr and not node.cached
        return handle

    def _open(self, node: Node, content: Content, flags: int, pid: int) -> Handle:
        if not node.opens:
            self._bind(node, content, writing=flags & os.O_ACCMODE != os.O_RDONLY)
        self._table.hold(content, lends=self._references.may_stay(pid, content.ino))
        handle = self.nodes.open(node, content, flags, pid)
        if handle.writing and not (flags & os.O_TRUNC or content.writers == 1):
            content.whole = False
        return handle

    def _bind(self, node: Node, content: Content, *, writing: bool) -> None:
        """Decide at the first open of a node which content it shows, and whether it is passed through."""
        node.content = content
        if node.outdated:
            # The kernel has heard of the node by now: it opens it.
            self.kernel.invalidate_attributes(node)
        # An empty version has no extent to pass through to, nor has one that is too large to be kept on
        # this host.
        node.cached = not (self._passthrough and (writing or self._table.is_here(content)))
        if node.backing_id and (node.cached or node.backing_extent != content.extent):
            self.kernel.drop_backing(node)

    async def _make_ready(self, handle: Handle, content: Content, *, cut: bool) -> None:
        if handle.writing:
            await self._prepare(handle, content, cut=cut)
        elif content.preparing or (content.awaited and self._table.is_borrowed(content)):
            # The file that is about to be written is the one that must be read.
            try:
                await self._in_place.make_writable(content)
            except BaseException:
                await self.release(handle.fh)
                raise

    async def _prepare(self, handle: Handle, content: Content, *, cut: bool) -> None:
        try:
            if not content.writable or content.is_busy:
                await self._in_place.make_writable(content)
            if cut:
                self._store.extents.truncate(content.extent, 0)
                content.dirty = True
            elif content.writers > 1:
                handle.since = self._table.stamp(content)
        except BaseException:
            handle.aborted = True
            await self.release(handle.fh)
            raise
        if handle.is_rdwr and not handle.node.cached and not content.mapped:
            content.mapped = True
            self.kernel.invalidate_attributes(handle.node)
        if content.writers == 1 and not content.private and self.nodes.has_siblings(content.ino):
            for other in self.nodes.of(content.ino):
                if other is not handle.node:
                    self.kernel.invalidate_attributes(other)

    # -- publishing ------------------------------------------------------------------------------

    async def flush(self, handle: Handle, pid: int) -> None:
        """Carry out close(2) of one descriptor. Return when everything written is published."""
        if handle.writing and handle.content is not None:
            await self._publisher.flush(handle, handle.content, pid)

    async def fsync(self, handle: Handle) -> None:
        """Carry out fsync(2): publish everything written so far; the descriptor stays open."""
        if handle.writing and handle.content is not None:
            await self._publisher.fsync(handle, handle.content)

    def is_changed_in_place(self, ino: int) -> bool:
        """Return whether anybody wrote the file in place since it was published, as far as stat can
        tell."""
        content = self._table.current.get(ino)
        return content is not None and content.is_changing and self._changes.is_written(content)

    async def publish_in_place(self, ino: int, *, begun: bool) -> None:
        """Publish everything written in place so far, before another host may lock the file. `begun`: also
        a new file whose writers all began with an empty one, which is else left to their closes."""
        content = self._table.current.get(ino)
        if (
            content is not None
            and content.is_changing
            and (begun or not content.whole)
            and self._inodes[ino].nlink
        ):
            with self._unused.held(content):
                await self._publisher.publish_so_far(content)

    async def show_newest(self, ino: int) -> None:
        """Show the newest version, before a lock of the file is granted.

        Raises OSError ESTALE if something else was written in place here; that is in a file beside it now.
        """
        await self._in_place.refresh(ino)
        inode = self._inodes.get(ino)
        if inode is not None and self._in_place.is_behind(inode):
            await self.publish_in_place(ino, begun=True)

    async def publish_now(self, ino: int) -> None:
        """Publish the content being written to an inode whose name is about to lead to another inode."""
        with ExitStack() as held:
            contents = list(self._table.private.get(ino, ()))
            current = self._table.current.get(ino)
            if current is not None and current.writers:
                contents.insert(0, current)
            for content in contents:
                held.enter_context(self._unused.held(content))
            for content in contents:
                await self._publisher.publish_named(content)

    def give_up(self, handle: Handle) -> bool:
        """Publish nothing through this handle any more. Return whether there was anything to publish."""
        content = handle.content
        unpublished = handle.writing and content is not None and self._changes.is_written(content)
        handle.aborted |= unpublished
        return unpublished

    # -- close -----------------------------------------------------------------------------------

    async def release(self, fh: int) -> None:
        """Publish the rest when the last descriptor of a handle is closed; the node counts as open until
        then."""
        handle = self.nodes.handles[fh]
        content = handle.content
        assert content is not None
        if handle.writing:
            content.leaving += 1
            try:
                await self._publisher.last_release(handle, content)
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
                    self._publisher.cut_unpublished(content)
        self.nodes.close(fh)
        if content.fd >= 0 and not content.writers:
            self._table.close(content)
        self._unused.let_go(content)
        if not handle.node.is_bound:
            self._unused.idle(handle.node)
        if self._unused.nameless:
            await self._unused.forget_nameless()

    async def _last_writer_leaves(self, handle: Handle, content: Content) -> None:
        """Make the content a version again, or drop it: it has no writer any more."""
        if content.private:
            if handle.aborted or content.discarded or not content.awaited:
                self._table.supersede(content)  # given up, or published by a copy
            return
        if content.superseded or not content.extent or not content.own:
            return
        if content.seen is None and handle.killed and self._inodes[content.ino].nlink:
            await self._publisher.keep(content)
        elif handle.aborted and (content.seen is None or self._changes.is_written(content)):
            self._table.supersede(content)  # its writer was told that it is not published
        elif not self._inodes[content.ino].nlink:
            content.kept = True  # it is no version, but readers have it open
