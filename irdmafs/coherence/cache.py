"""Contents on this host: which content an open gets on which node, and what happens when it is closed.

docs/sharing.md has the one rule that this module carries out. Nothing here moves parameter bytes except
copies that are made inside the kernel.
"""

import errno
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import trio

from ..backend.namespace import Inode, fail
from ..backend.store.api import Store
from ..backend.store.extents import copy_contents
from ..callers.processes import Processes
from ..inline import detach
from .content import Content, ContentTable, Shown, Stamp, stamp_of
from .isolation import Isolation
from .kernel_cache import KernelCache
from .nodes import Handle, Node, NodeTable
from .publishing import Publisher
from .redirects import Key, Promise, Redirects

__all__ = ["Cache", "truncates"]

log = logging.getLogger(__name__)


class Cache:
    """Opens, publishes and releases file contents. `passthrough`: the session can do it."""

    def __init__(
        self, store: Store, mountpoint: str, isolation: Isolation, *, passthrough: bool
    ) -> None:
        self.store = store
        self.passthrough = passthrough
        self._isolation = isolation
        self._inodes = store.namespace.inodes
        self.nodes = NodeTable(self._inodes, self._dropped)
        self.table = ContentTable(store)
        self.redirects = Redirects()
        self.processes = Processes(mountpoint)
        self.publisher = Publisher(store, self.table, self.nodes, self.processes)
        self._kernel: KernelCache
        self._nameless: list[Inode] = []
        # Of READ and WRITE requests: what passed through us in cached mode.
        self.carried_bytes = 0

    @property
    def kernel(self) -> KernelCache:
        return self._kernel

    @kernel.setter
    def kernel(self, kernel: KernelCache) -> None:
        self._kernel = self.publisher.kernel = kernel

    def close(self) -> None:
        self.processes.close()

    # -- what stat shows -------------------------------------------------------------------------

    def shown(self, node: Node, inode: Inode) -> Shown:
        """How the content that the node stands for looks."""
        content = node.content if node.opens or node.promised else None
        if content is None:
            content = self.table.current.get(inode.ino)
            if content is not None and content.version != inode.version:
                content = self._current(inode)
        if content is not None and (content.is_changing or content.superseded):
            return self.look_of(content, inode)
        return Shown(inode.size, inode.blocks, inode.mtime_ns, inode.ctime_ns)

    def look_of(self, content: Content, inode: Inode) -> Shown:
        """How one of the file's contents looks."""
        if content.private and content.begun and not (content.opens or content.dirty):
            return Shown(0, 0, content.begun[1], inode.ctime_ns)  # nobody has had it open
        if content.is_changing and content.extent:
            status = self.table.stat(content)
            ctime_ns = inode.ctime_ns
            if content.dirty or stamp_of(status) != content.since:
                # The kernel's clock ticks: a write may seem to lie before the change of a name.
                ctime_ns = max(ctime_ns + 1, status.st_ctime_ns)
            return Shown(status.st_size, status.st_blocks, status.st_mtime_ns, ctime_ns)
        return Shown(content.size, content.blocks, content.mtime_ns, inode.ctime_ns)

    def version(self, node: Node, inode: Inode) -> int:
        """The version that the node stands for, or was made of."""
        content = node.content if node.opens else None
        return content.version if content is not None else inode.version

    def changes_unnoticed(self, node: Node) -> bool:
        """Return whether the kernel may not keep a node's attributes: stores through a mapping, and writes
        through another node, change them without its knowing."""
        content = node.content if node.is_bound else self.table.current.get(node.ino)
        if content is None or not content.is_changing:
            return False
        return content.mapped or (not content.private and self.nodes.has_siblings(node.ino))

    def is_at_hand(self, inode: Inode) -> bool:
        """Return whether opens get a content of this host, without anything of another one."""
        content = self._current(inode)
        return content is not None and content.own

    def is_written(self, ino: int) -> bool:
        """Return whether somebody has the file open for writing."""
        return any(node.content and node.content.writers for node in self.nodes.of(ino))

    def is_written_in_place(self, inode: Inode) -> bool:
        """Return whether opens for reading see what is not published."""
        content = self._current(inode)
        return content is not None and content.is_changing

    # -- which content and which node ------------------------------------------------------------

    def _current(self, inode: Inode) -> Content | None:
        """Return the file's content here; None when nobody has had its present version open.

        Another host may have published since. Then the content is left to those who read it; whoever
        writes it in place stays together with all who open it, until `refresh` or a conflict.
        """
        content = self.table.current.get(inode.ino)
        if content is None or content.version == inode.version or not self.store.shared:
            return content
        # While it is published here, the newer version may be that very one.
        if content.is_busy or content.writers:
            return content
        self.table.supersede(content)
        return None

    def _current_or_new(self, inode: Inode) -> Content:
        content = self._current(inode)
        if content is None:
            content = self.table.current[inode.ino] = Content(inode)
        return content

    def node_of(self, inode: Inode, pid: int) -> Node:
        """The node a lookup of the inode's name by this thread finds."""
        if self.redirects.promises:
            promise = self.redirects.promised((pid, inode.ino)) or self._moved(pid, inode)
            if promise is not None:
                promise.looked_up = True
                return promise.node
        node = self.nodes.main.get(inode.ino)
        if node is None or not self._shows_current(node, inode):
            for node in self.nodes.of(inode.ino):
                if self._shows_current(node, inode):
                    break
            else:
                node = self._add_node(inode)
            self.nodes.main[inode.ino] = node
        return node

    def _moved(self, pid: int, inode: Inode) -> Promise | None:
        """Return the promise to a thread whose open was refused because another node has to show the file,
        for the file that it finds now under the name: the kernel tries twice, no more. In a cluster the
        thread is led to the file that it was refused (freshness.py). Raises OSError (ENOSPC, EMFILE)."""
        before = None if self.store.shared else self.redirects.of_thread(pid)
        if before is None or not inode.is_file or not before.may_move:
            return None
        content, cut = self._content_for(inode, before.flags)
        moves = before.moves + 1
        return self._promise(
            (pid, inode.ino), before.came_to, content, inode, before.flags, cut=cut, moves=moves
        )

    def _shows_current(self, node: Node, inode: Inode) -> bool:
        if not node.is_bound:
            return True
        content = node.content
        return content is None or content is self._current(inode)

    def names_are_stable(self, ino: int) -> bool:
        """Whether the kernel may keep the answer of a lookup: no one is to see another node."""
        return ino not in self.table.private and ino not in self.redirects.inodes

    def is_promised(self, pid: int, ino: int) -> bool:
        """Return whether the thread's open of the inode was led to another node."""
        return self.redirects.promised((pid, ino)) is not None

    def _choose(
        self, inode: Inode, node: Node, flags: int, pid: int, promise: Promise | None
    ) -> tuple[Content, bool]:
        """The content that an open arriving at `node` is to get, and whether it is to be emptied. May begin
        a private one.

        Raises OSError ESTALE when another node has to show it: the kernel will look up and open again.
        """
        if promise is not None and promise.is_kept_by(node, flags):
            return promise.content, promise.cut
        nameless = promise is not None and promise.is_nameless(node)
        if nameless and node.opens:
            # An open through a descriptor of the file shares the content of the descriptor.
            assert node.content is not None
            return node.content, truncates(flags)
        content, cut = self._content_for(inode, flags)
        # Lookups of the name are not to find what is private.
        bindable = not content.private or nameless
        if node.content is content if node.is_bound else bindable:
            return content, cut
        self._promise((pid, inode.ino), node, content, inode, flags, cut=cut)
        raise fail(errno.ESTALE)

    def _content_for(self, inode: Inode, flags: int) -> tuple[Content, bool]:
        """The one rule, see docs/sharing.md. Raises OSError (ENOSPC, EMFILE)."""
        if self.redirects.promises:
            for key in self.redirects.stale():
                self._withdraw(key)  # nobody is to join what no open came for
        current = self._current_or_new(inode)
        private = self.table.newest_private(inode.ino)
        if truncates(flags):
            if private is not None and (private.awaited or not private.whole):
                return private, True  # somebody writes it in place, as others may from now on
            if private is not None or self._is_replaced(current, inode):
                return self._begin_private(inode), False
            return self._to_share(current, inode), True
        if flags & os.O_ACCMODE == os.O_RDONLY:
            return current, False
        return self._to_share(private or current, inode), False

    def _to_share(self, content: Content, inode: Inode) -> Content:
        """Return the content that is to be written in place for this one: another if the processes that
        have it open read a store node's own file, which nobody may write."""
        if content.opens and not content.is_busy and self._is_lent(content):
            self.table.supersede(content)
            return self._current_or_new(inode)
        return content

    def _is_replaced(self, current: Content, inode: Inode) -> bool:
        """Return whether emptying the file begins a version of its own, which nobody sees before it is
        closed."""
        writers = current.writers + current.awaited - current.leaving
        written = current.private or current.kept or writers > 0
        return bool(inode.version) and not written and self._isolation.of(inode)

    def _begin_private(self, inode: Inode) -> Content:
        content = Content(inode, private=True)
        self._allocate(content, inode)
        self.table.add_private(content)
        return content

    def _allocate(self, content: Content, inode: Inode) -> None:
        """Give the content an empty extent. As long as nobody writes it, its times are those of the name;
        of one that replaces the file, those of its beginning."""
        extent, fd = self.store.allocate(inode)
        try:
            if not content.private:
                os.utime(fd, ns=(inode.atime_ns, inode.mtime_ns))
            content.begun = stamp_of(os.fstat(fd))
        except BaseException:
            os.close(fd)
            raise
        self.table.give_extent(content, extent, own=True)
        self.table.keep_open(content, fd)
        content.writable = True

    def node_for(self, inode: Inode, content: Content) -> Node:
        """A node that can show this content."""
        for node in self.nodes.of(inode.ino):
            if node.is_bound and node.content is content:
                return node
        if not content.private:
            for node in self.nodes.of(inode.ino):
                if not node.is_bound:
                    return node
        return self._add_node(inode)

    def _add_node(self, inode: Inode) -> Node:
        """From now on what is written in place through one node changes what others are to show."""
        current = self.table.current.get(inode.ino)
        if current is not None and current.is_changing:
            for other in self.nodes.of(inode.ino):
                self.kernel.invalidate_attributes(other)
        return self.nodes.add(inode)

    def _promise(
        self,
        key: Key,
        came_to: Node,
        content: Content,
        inode: Inode,
        flags: int,
        *,
        cut: bool,
        moves: int = 0,
    ) -> Promise:
        """Have the next lookup by this thread find a node for the content."""
        self._withdraw(key)
        node = self.node_for(inode, content)
        if not node.is_bound:
            node.content = content
        self.table.hold(content)
        node.promised += 1
        promise = Promise(key, came_to, node, content, flags, cut=cut, moves=moves)
        content.awaited += promise.joins
        self.redirects.add(promise)
        return promise

    def promise(self, inode: Inode, flags: int, pid: int, came_to: Node | None) -> None:
        """Have everything ready for the thread's second try, which comes by name, or to the same node."""
        content, cut = self._content_for(inode, flags)
        if came_to is None or came_to.ino != inode.ino:
            came_to = self.node_of(inode, 0)
        self._promise((pid, inode.ino), came_to, content, inode, flags, cut=cut)

    def _withdraw(self, key: Key) -> None:
        promise = self.redirects.take(key)
        if promise is not None:
            self._end(promise)

    def _end(self, promise: Promise) -> None:
        """The open came, or never will."""
        node = promise.node
        node.promised -= 1
        promise.content.awaited -= promise.joins
        if self.table.let_go(promise.content):
            self._rest(promise.content)
        if not node.is_bound:
            self._idle(node)

    # -- open ------------------------------------------------------------------------------------

    async def open(self, inode: Inode, node: Node, flags: int, pid: int) -> Handle:
        """Open the file for a request that came to `node`.

        Raises OSError ESTALE when the kernel has to look the name up again.
        """
        promise = self.redirects.take((pid, inode.ino)) if self.redirects.promises else None
        if promise is not None and promise.key[1] != inode.ino:
            self._end(promise)
            promise = None
        try:
            if (
                flags & os.O_TRUNC
                and not truncates(flags)
                and (promise is None or not promise.is_kept_by(node, flags))
            ):
                nameless = promise is not None and promise.is_nameless(node)
                await self._empty(inode, node, nameless=nameless)
                inode = self._inodes[inode.ino]
            inode = await self._settled(inode, flags)
            content, cut = self._choose(inode, node, flags, pid, promise)
            handle = self._open(node, content, flags, pid)
        finally:
            if promise is not None:
                self._end(promise)
        await self._make_ready(handle, content, cut=cut)
        return handle

    async def _settled(self, inode: Inode, flags: int) -> Inode:
        """Return the inode when no store node is taking over the file that a writer would share. Who had
        that open goes on with it alone."""
        while flags & os.O_ACCMODE != os.O_RDONLY:
            content = self.table.newest_private(inode.ino) or self.table.current.get(inode.ino)
            if content is None or not content.leaves:
                break
            await detach()
            async with content.locked():
                pass
            inode = self._inodes[inode.ino]
        return inode

    async def _make_ready(self, handle: Handle, content: Content, *, cut: bool) -> None:
        if handle.writing:
            await self._prepare(handle, content, cut=cut)
        elif content.preparing or (content.awaited and self._is_lent(content)):
            # The file that is going to be written is the one to read.
            try:
                await self._make_writable(content)
            except BaseException:
                await self.release(handle.fh)
                raise

    def open_here(self, inode: Inode, node: Node, flags: int, pid: int) -> Handle:
        """Open for reading what the node shows, whatever that is."""
        content = node.content if node.is_bound else None
        return self._open(node, content or self._current_or_new(inode), flags, pid)

    async def open_any(self, inode: Inode, flags: int, pid: int) -> Handle:
        """Open the file for a request that takes whichever node it is given."""
        if self.redirects.promises:
            self._withdraw((pid, inode.ino))
        content, cut = self._content_for(await self._settled(inode, flags), flags)
        handle = self._open(self.node_for(inode, content), content, flags, pid)
        await self._make_ready(handle, content, cut=cut)
        return handle

    def create(self, inode: Inode, flags: int, pid: int) -> Handle:
        """Open a file that was just made. Raises OSError (ENOSPC, EMFILE)."""
        if self.redirects.promises:
            self._withdraw((pid, inode.ino))
        content = Content(inode)
        node = self.nodes.add(inode)
        if flags & os.O_ACCMODE != os.O_RDONLY:
            content.whole = not flags & os.O_APPEND and (
                bool(flags & os.O_TRUNC) or flags & os.O_ACCMODE == os.O_WRONLY
            )
            try:
                self._allocate(content, inode)
            except OSError:
                self.nodes.drop_unused(node)
                raise
        self.table.current[inode.ino] = content
        self.nodes.main[inode.ino] = node
        handle = self._open(node, content, flags, pid)
        content.mapped = handle.is_rdwr and not node.cached
        return handle

    def _open(self, node: Node, content: Content, flags: int, pid: int) -> Handle:
        if not node.opens:
            self._bind(node, content, writing=flags & os.O_ACCMODE != os.O_RDONLY)
        self.table.hold(content)
        handle = self.nodes.open(node, content, flags, pid)
        if handle.writing and not (flags & os.O_TRUNC or content.writers == 1):
            content.whole = False
        return handle

    def _bind(self, node: Node, content: Content, *, writing: bool) -> None:
        """The first open of a node decides what it shows, and whether past us."""
        node.content = content
        # An empty version has no extent, hence nothing to pass through to; nor has one that is too
        # large to be kept on this host.
        node.cached = not (self.passthrough and (writing or self._is_here(content)))
        if node.backing_id and (node.cached or node.backing_extent != content.extent):
            self.kernel.drop_backing(node)

    def _is_here(self, content: Content) -> bool:
        return content.own or (bool(content.extent) and self.store.is_here(content.extent))

    def _is_lent(self, content: Content) -> bool:
        """Return whether it is the very file of a store node, which nobody may write."""
        return not content.writable and self.store.is_lent(content.extent)

    async def _prepare(self, handle: Handle, content: Content, *, cut: bool) -> None:
        try:
            if not content.writable or content.is_busy:
                await self._make_writable(content)
            if cut:
                self.store.extents.truncate(content.extent, 0)
                content.dirty = True
            elif content.writers > 1:
                handle.since = self.table.stamp(content)
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

    async def _make_writable(self, content: Content) -> None:
        if self.store.waits or content.is_busy:
            # From now on, as others who come before this task goes on are to share the copy.
            content.preparing += 1
            try:
                await detach()
                async with content.locked():
                    if not content.writable:
                        await self._begin_in_place(content)
            finally:
                content.preparing -= 1
        else:
            await self._begin_in_place(content)

    async def _begin_in_place(self, content: Content) -> None:
        """From now on the content may differ from the version that it is."""
        inode = self._inodes[content.ino]
        if not content.extent:
            self._allocate(content, inode)
            content.seen = content.begun if inode.version else None
            return
        before = content.extent
        is_version = content.seen is None or not self.publisher.is_written(content)
        is_copied = self.store.is_lent(before)
        extent = await self.store.begin_in_place(inode, before)
        self.table.give_extent(content, extent, own=extent != before)
        self.table.keep_open(content, self.store.extents.open(extent, os.O_RDWR))
        if is_copied:
            for node in self.nodes.of(content.ino):
                if node.backing_extent == before and (node.content is content or not node.is_bound):
                    self.kernel.drop_backing(node)
        else:
            self._move_backings(content.ino, before, extent)
        if is_version:
            content.seen = content.begun = self._set_mtime(content, inode)
        content.writable = True

    def _move_backings(self, ino: int, before: int, extent: int) -> None:
        """The very file of an extent has another number now."""
        for node in self.nodes.of(ino):
            if node.backing_id and node.backing_extent == before:
                self.nodes.set_backing(node, extent, node.backing_id)
                self.kernel.backing_moved(node)

    def _set_mtime(self, content: Content, inode: Inode) -> Stamp:
        """Give the content the inode's time of modification, and return how it looks then. Its access time
        stays: it may be that of a read which no record has."""
        status = self.table.stat(content)
        if status.st_mtime_ns != inode.mtime_ns:
            self.table.set_times(content, status.st_atime_ns, inode.mtime_ns)
            status = self.table.stat(content)
        return stamp_of(status)

    # -- close -----------------------------------------------------------------------------------

    async def flush(self, handle: Handle, pid: int) -> None:
        """close(2) of one descriptor. Returns when what was written is published."""
        if handle.writing and handle.content is not None:
            await self.publisher.flush(handle, handle.content, pid)

    async def fsync(self, handle: Handle) -> None:
        """fsync(2): publish what is written so far; the descriptor stays open for more."""
        if handle.writing and handle.content is not None:
            await self.publisher.fsync(handle, handle.content)

    async def publish_in_place(self, ino: int) -> None:
        """Publish what is written so far in place, before another host may lock the file."""
        content = self.table.current.get(ino)
        if content is not None and content.is_changing and self._inodes[ino].nlink:
            with self._held(content):
                await self.publisher.publish_so_far(content)

    async def publish_now(self, ino: int) -> None:
        """Publish what is being written to an inode whose name is about to mean something new."""
        with ExitStack() as held:
            contents = list(self.table.private.get(ino, ()))
            current = self.table.current.get(ino)
            if current is not None and current.writers:
                contents.insert(0, current)
            for content in contents:
                held.enter_context(self._held(content))
            for content in contents:
                await self.publisher.publish_named(content)

    @contextmanager
    def _held(self, content: Content) -> Iterator[None]:
        """Keep a content and its extent, whoever closes it meanwhile."""
        self.table.hold(content)
        try:
            yield
        finally:
            if self.table.let_go(content):
                self._rest(content)

    def give_up(self, handle: Handle) -> bool:
        """Publish nothing through this handle any more. Return whether there was something."""
        content = handle.content
        unpublished = handle.writing and content is not None and self.publisher.is_written(content)
        handle.aborted |= unpublished
        return unpublished

    def is_behind(self, inode: Inode) -> bool:
        """Return whether another host has published a newer version than the one written in place here."""
        content = self.table.current.get(inode.ino)
        return content is not None and bool(content.writers) and content.version != inode.version

    async def refresh(self, ino: int) -> None:
        """Have everybody who has the file open in place see the newest version, which another host
        published, unless there is something unpublished here."""
        content, inode = self.table.current.get(ino), self._inodes.get(ino)
        if content is None or inode is None or not self.is_behind(inode):
            return
        with self._held(content):
            await detach()
            async with content.locked():
                inode = await self.store.bring(ino)
                if content.superseded or content.version == inode.version:
                    return
                if self.publisher.is_written(content):
                    return
                if self._is_lent(content):
                    self.table.supersede(content)  # nobody writes it, its last writer is leaving
                    return
                if not content.writable:
                    await self._begin_in_place(content)
                await self._overwrite(content, inode)
        for node in list(self.nodes.of(ino)):
            if node.content is content:
                if node.cached:
                    await self.kernel.forget_content(node)
                self.kernel.invalidate_attributes(node)

    async def _overwrite(self, content: Content, inode: Inode) -> None:
        """Bring a version into a content of which everything is published."""
        extents = self.store.extents
        with extents.opened(content.extent, os.O_RDWR) as fd:
            os.ftruncate(fd, inode.size)
            if inode.extent:
                with extents.opened(inode.extent) as source:
                    await trio.to_thread.run_sync(copy_contents, source, fd)
        content.show(inode)
        content.seen, content.dirty = self._set_mtime(content, inode), False

    async def release(self, fh: int) -> None:
        """The last descriptor of a handle is gone. Publishes what is not yet; the node counts as open
        until that is done."""
        handle = self.nodes.handles[fh]
        content = handle.content
        assert content is not None
        if handle.writing:
            content.leaving += 1
            try:
                await self.publisher.last_release(handle, content)
                if content.writers == 1:
                    await self._last_writer_leaves(handle, content)
            except OSError as error:
                handle.aborted = True
                where = self.store.namespace.describe(content.ino)
                log.error("%s: its last changes could not be published: %s", where, error)
            finally:
                content.leaving -= 1
            if handle.aborted and content.writers == 1:
                with suppress(OSError):  # the extent itself may be missing
                    self.publisher.cut_unpublished(content)
        self.nodes.close(fh)
        if content.fd >= 0 and not content.writers:
            self.table.close(content)
        if self.table.let_go(content):
            self._rest(content)
        if not handle.node.is_bound:
            self._idle(handle.node)
        if self._nameless:
            await self.forget_nameless()

    async def _last_writer_leaves(self, handle: Handle, content: Content) -> None:
        """Nobody writes the content any more: it is a version again, or nothing."""
        if content.private:
            if handle.aborted or content.discarded or not content.awaited:
                self.table.supersede(content)  # given up, or published by a copy
            return
        if content.superseded or not content.extent or not content.own:
            return
        if content.seen is None and handle.killed and self._inodes[content.ino].nlink:
            await self.publisher.keep(content)
        elif handle.aborted and (content.seen is None or self.publisher.is_written(content)):
            self.table.supersede(content)  # its writer was told that it is not published
        elif not self._inodes[content.ino].nlink:
            content.kept = True  # it is no version, and there for those who have it open

    def _rest(self, content: Content) -> None:
        """Nobody has the content open any more."""
        inode = self._inodes[content.ino]
        if not inode.nlink:
            content.kept = False
        elif content.own and content.seen is not None and not content.superseded:
            self._give_back(content, inode)
        self.table.rest(content, inode)

    def _give_back(self, content: Content, inode: Inode) -> None:
        """The content was opened in place, and is what it was: it stands for the version again."""
        if content.version == inode.version and not self.publisher.is_written(content):
            before = content.extent
            if self.store.end_in_place(inode, before):
                content.own = False
                self.table.give_extent(content, inode.extent, own=False)
                self._move_backings(content.ino, before, inode.extent)

    def _idle(self, node: Node) -> None:
        """Nothing has the node open any more."""
        content, inode = node.content, self._inodes[node.ino]
        if node.backing_id and (content is None or node.backing_extent != inode.extent):
            self.kernel.drop_backing(node)
        if content is not None and self.table.current.get(node.ino) is not content:
            node.content = None
            self.kernel.invalidate_attributes(node)
        self.nodes.drop_unused(node)

    def is_held(self, ino: int) -> bool:
        """Whether the kernel or a handle refers to the inode."""
        return self.nodes.has_nodes(ino)

    def unnamed(self, inode: Inode) -> None:
        """The inode has lost its last name, and nothing has it open."""
        content = self.table.current.get(inode.ino)
        if content is not None:
            self.table.supersede(content)

    def _dropped(self, node: Node) -> None:
        self.kernel.drop_backing(node)
        ino = node.ino
        if self.nodes.has_nodes(ino):
            return
        self.publisher.forget(ino)
        content = self.table.current.get(ino)
        if content is not None and not (content.holds or content.kept):
            del self.table.current[ino]
        inode = self._inodes.get(ino)
        if inode is not None and inode.nlink == 0:
            self._nameless.append(inode)

    async def forget_nameless(self) -> None:
        """Remove the inodes whose last name and last node are gone."""
        while self._nameless:
            inode = self._nameless.pop()
            if not self.is_held(inode.ino):
                self.unnamed(inode)
                await self.store.forget(inode)

    # -- truncate and other changes that come as requests ------------------------------------------

    def discard(self, node: Node) -> None:
        """Whoever writes a private content gives it up: closing it publishes nothing.

        Raises OSError EBUSY when others see it already.
        """
        content = node.content
        if content is None or not node.opens or content.seen is not None or not content.whole:
            raise fail(errno.EBUSY, "only what nobody else sees yet can be discarded")
        content.discarded = True

    async def change(self, handle: Handle, change: Callable[[int], None]) -> None:
        """Have a request of a handle change the content's file, of which `change` gets a descriptor."""
        content = handle.content
        assert content is not None
        if not content.writable or content.is_busy:
            await self._make_writable(content)
        with self.store.extents.opened(content.extent, os.O_RDWR) as fd:
            change(fd)
        content.dirty = True
        handle.since = None

    def refuse_growth(self, ino: int, fd: int, offset: int, length: int) -> None:
        """Raise OSError EDQUOT when an extent of the file may not get so many more bytes."""
        quotas = self.store.namespace.quotas
        if quotas.in_use:
            quotas.refuse_growth(ino, os.fstat(fd), offset, length)

    async def truncate(self, inode: Inode, size: int) -> None:
        """truncate(2) by name: everybody on this host sees the file cut at once."""
        content = self.table.newest_private(inode.ino) or self._current_or_new(inode)
        content = self._to_share(content, inode)
        if inode.size == size and not content.is_changing:
            return
        if not size and not content.holds and not content.kept:
            self.table.give_extent(content, 0, own=False)  # it need not come here to be emptied
        await self._cut_and_publish(content, size)

    async def _cut_and_publish(self, content: Content, size: int) -> None:
        """Cut a content; a version at once, unless it is only to become one when its writer closes it."""
        with self._held(content):
            await self._cut(content, size)
            in_place = content.seen is not None and not content.private
            if not content.kept and (in_place or not content.writers):
                await self.publisher.publish_truncated(content)

    async def _empty(self, inode: Inode, node: Node, *, nameless: bool) -> None:
        """O_RDONLY | O_TRUNC: an empty version at once, as nobody will close what was written."""
        content = self._current_or_new(inode)
        if nameless and node.opens:
            assert node.content is not None
            content = node.content
        elif self._is_replaced(content, inode):
            content = self._begin_private(inode)
        else:
            content = self._to_share(content, inode)
        if content.writers or content.private or self.table.stamp(content)[0]:
            await self._cut_and_publish(content, 0)

    async def _cut(self, content: Content, size: int) -> None:
        if not content.writable or content.is_busy:
            await self._make_writable(content)
        self.store.extents.truncate(content.extent, size)
        content.dirty = True

    def set_mtime(self, node: Node, mtime_ns: int) -> None:
        """utimensat(2): where the time is kept in the extent, it is to be set there."""
        content = node.content if node.is_bound else self.table.current.get(node.ino)
        if content is None or not content.extent or not (content.is_changing or content.writable):
            return
        written = self.publisher.is_written(content)
        status = self.table.stat(content)
        self.table.set_times(content, status.st_atime_ns, mtime_ns)
        if written:
            content.dirty = True  # the time may have been set back to what it was
        elif content.seen is not None:
            content.seen = self.table.stamp(content)
        else:
            content.begun = self.table.stamp(content)

    # -- reading and writing through us (cached mode) --------------------------------------------

    async def read(self, handle: Handle, offset: int, size: int) -> bytes:
        content = handle.content
        assert content is not None
        if not content.extent:
            return b""
        if self._is_here(content):
            with self.store.extents.opened(content.extent) as fd:
                data = os.pread(fd, size, offset)
        else:
            await detach()
            size = max(0, min(size, content.size - offset))
            data = await self.store.read(self._inodes[content.ino], content.extent, offset, size)
        self.carried_bytes += len(data)
        return data

    async def write(self, handle: Handle, offset: int, data: "memoryview | bytes") -> int:
        content = handle.content
        assert content is not None
        if not content.writable or content.is_busy:
            data = bytes(data)  # the session reuses its buffer while we wait
            await self._make_writable(content)
        content.dirty = True
        handle.since = None
        view = memoryview(data)
        written = 0
        try:
            with self.store.extents.opened(content.extent, os.O_RDWR) as fd:
                self.refuse_growth(content.ino, fd, offset, len(view))
                while written < len(view):
                    written += os.pwrite(fd, view[written:], offset + written)
        except OSError:
            # Half a content is not to be published because its writer closes the file all the same.
            content.discarded = content.private
            if not written:
                raise
        self.carried_bytes += written
        return written


def truncates(flags: int) -> bool:
    """Whether an open is to begin with an empty file."""
    return bool(flags & os.O_TRUNC) and flags & os.O_ACCMODE != os.O_RDONLY
