"""Versions and working copies on this host: which node an open gets, and when bytes become a version.

docs/design.md, "Which node an open gets" and "When a version is published", has the rules that this
module carries out. Nothing here moves parameter bytes except copies before an in-place write and
copies for fsync, both made inside the kernel.
"""

import errno
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Protocol

import trio

from .backend.extents import copy_contents
from .backend.namespace import Inode, fail
from .backend.store import Store
from .inline import detach
from .nodes import Handle, Node, NodeTable, State
from .processes import Processes

log = logging.getLogger(__name__)

# Larger copies are made in a thread, so that other requests are served meanwhile.
_COPY_INLINE_MAX_BYTES = 1024 * 1024
# Before 6.13 tmpfs stamps times with the timer tick (1-10 ms): a write may leave them as they were.
_TIMESTAMP_GRAIN_NS = 20_000_000
# A store with less room than this is full: a write may just have failed.
_FULL_BYTES = 64 * 1024
# The kernel repeats a lookup at once; a redirection older than this belongs to an open that died.
_REDIRECT_MAX_AGE_S = 2.0


Name = tuple[int, bytes]  # number of a directory, which is its node id, too, and a name in it


class KernelCache(Protocol):
    """What the session can make the kernel forget.

    `can_forget`: without waiting for a lock; else it is not to believe what others may change.
    """

    can_forget: bool

    def start_soon(self, telling: Callable[..., Awaitable[None]], *args: Any) -> bool:
        """Run something in a task of the session. False: it has ended, and so has the mount."""

    def invalidate_attributes(self, node: Node) -> None:
        """Have the node's attributes asked for before they are shown again."""

    async def expire_names(self, names: list[Name]) -> None:
        """Have names looked up again before their next use. Done when it returns."""

    def forget(self, nodes: Iterable[int], *, names: bool) -> None:
        """Have the attributes of these nodes asked for, and, with `names`, every name looked up again
        before its next use, answers that are on their way into the kernel included."""

    async def forget_content(self, node: Node) -> None:
        """Have the node's content read again from us. Done when it returns."""

    def prune(self, nodes: Sequence[int]) -> None:
        """Let the kernel drop what it keeps of these nodes unused, if it can."""

    def version_published(self, ino: int) -> None: ...
    def drop_backing(self, node: Node) -> None:
        """The node's extent changes or goes: let go of what passthrough holds of it."""


class Cache:
    """Opens, publishes and releases file contents. `passthrough`: the session can do it."""

    def __init__(self, store: Store, mountpoint: str, *, passthrough: bool) -> None:
        self.store = store
        self.mountpoint = mountpoint
        self.passthrough = passthrough
        self.kernel: KernelCache
        self._inodes = store.namespace.inodes
        self.nodes = NodeTable(self._inodes[1], self._dropped)
        self.processes = Processes(mountpoint)
        self._nameless: list[Inode] = []
        self._redirect_times: dict[tuple[int, int], float] = {}
        # Of READ and WRITE requests: what passed through us in cached mode.
        self.carried_bytes = 0

    def close(self) -> None:
        self.processes.close()

    # -- what stat shows -------------------------------------------------------------------------

    def content(self, node: Node, inode: Inode) -> tuple[int, int, int]:
        """Size in bytes, 512-byte blocks and mtime (ns) of what the node stands for."""
        if node.state is not State.SEALED and (node.working or not node.cached):
            status = os.fstat(node.fd)
            return status.st_size, status.st_blocks, status.st_mtime_ns
        if node.version == inode.version or not node.opens:
            return inode.size, inode.blocks, inode.mtime_ns
        return node.size, node.blocks, node.mtime_ns

    # -- which node ------------------------------------------------------------------------------

    def node_of(self, inode: Inode, pid: int) -> Node:
        """The node a lookup of the inode's name by this process finds."""
        ino = inode.ino
        node = self.nodes.redirected.get((pid, ino))
        if node is None:
            node = self._live(inode) or self._sealed(inode)
        return node

    def is_written_in_place(self, inode: Inode) -> bool:
        """Whether opens for reading see what is not published."""
        return self._live(inode) is not None

    def _live(self, inode: Inode) -> Node | None:
        """The node that is written in place here, which others join: unless another host has
        published since, and what is here holds nothing new."""
        live = self.nodes.live.get(inode.ino)
        if live is None or live.version == inode.version or not self.store.shared:
            return live
        return live if self._changed(live, rdwr=True) else None

    def _sealed(self, inode: Inode) -> Node:
        node = self.nodes.sealed.get(inode.ino)
        if node is None or node.version != inode.version:
            node = self.nodes.add(inode)
            self.nodes.sealed[inode.ino] = node
        return node

    def names_are_stable(self, ino: int) -> bool:
        """Whether the kernel may keep the answer of a lookup: no one is to see another node."""
        if ino in self.nodes.private:
            return False
        return not self._redirect_times or all(key[1] != ino for key in self._redirect_times)

    def choose(self, inode: Inode, node: Node, flags: int, pid: int) -> Node:
        """The node that an open arriving at `node` is to be served from. May begin a working copy.

        Raises OSError ESTALE when that is another one: the kernel will look up and open again.
        """
        key = (pid, inode.ino)
        for other in [k for k in self._redirect_times if k[0] == pid and k != key]:
            self._abandon(other)
        expected = self._take_redirection(key)
        if expected is not None and truncates(flags) != (expected.state is State.PRIVATE):
            # It was prepared for another open, which did not come again.
            self._give_up(expected)
            expected = None
        if expected is node:
            return node
        if expected is not None:
            # Looking up again led here once more: a descriptor opened through /proc/self/fd or
            # /dev/stdout, which has no name to look up. It shares what the descriptor has.
            self._give_up(expected)
            if node.opens and node.state is not State.SEALED and flags & os.O_TRUNC:
                os.ftruncate(node.fd, 0)
            if node.opens:
                return node
        chosen = self.choose_any(inode, node, flags)
        if chosen is node:
            return node
        self.redirect(key, chosen)
        raise fail(errno.ESTALE)

    def choose_any(self, inode: Inode, node: Node, flags: int) -> Node:
        """The node an open is to be served from; `node` is it, if it can be."""
        if truncates(flags):
            # Never the node that the name leads to: others still see the present version there.
            return self._begin_on(self.nodes.add(inode), lambda new: self.begin(new, State.PRIVATE))
        live = self._live(inode)
        if live is not None:
            return live
        if flags & os.O_ACCMODE == os.O_RDONLY:
            return node if _is_current(node, inode) else self._sealed(inode)
        can_take = _is_current(node, inode) and self._is_idle(node)
        chosen = node if can_take else self.nodes.add(inode)
        if inode.extent:
            return self._begin_on(chosen, self._begin_in_place)
        return self._begin_on(chosen, lambda new: self.begin(new, State.LIVE))

    def _begin_on(self, node: Node, begin: Callable[[Node], None]) -> Node:
        try:
            begin(node)
        except OSError:
            self.nodes.drop_unused(node)
            raise
        return node

    def _is_idle(self, node: Node) -> bool:
        """Whether the node may take another content: nobody has it open or is on the way to it."""
        if node.opens or node.state is not State.SEALED:
            return False
        return not self._redirect_times or node not in self.nodes.redirected.values()

    def redirect(self, key: tuple[int, int], node: Node) -> None:
        """Let the next lookup by this process (key: pid, inode) find `node`."""
        now = time.monotonic()
        for old, since in list(self._redirect_times.items()):
            if now - since > _REDIRECT_MAX_AGE_S:
                self._abandon(old)
        self._pin(node)
        self.nodes.redirected[key] = node
        self._redirect_times[key] = now

    def _take_redirection(self, key: tuple[int, int]) -> Node | None:
        if not self._redirect_times:
            return None
        self._redirect_times.pop(key, None)
        return self.nodes.redirected.pop(key, None)

    def _abandon(self, key: tuple[int, int]) -> None:
        abandoned = self._take_redirection(key)
        assert abandoned is not None
        self._give_up(abandoned)

    def _give_up(self, node: Node) -> None:
        """A node was prepared for an open that did not come."""
        if node.opens or node in self.nodes.redirected.values():
            return
        if node.state is not State.SEALED:
            self._seal(node)
        _close(node)
        self._unpin(node)
        self.nodes.drop_unused(node)

    def _pin(self, node: Node) -> None:
        """Keep what the node stands for, though the file may move on."""
        if node.pinned != node.extent:
            self.store.pin(node.extent)
            self._unpin(node)
            node.pinned = node.extent

    def _unpin(self, node: Node) -> None:
        self.store.unpin(node.pinned)
        node.pinned = 0

    # -- working copies --------------------------------------------------------------------------

    def begin(self, node: Node, state: State) -> None:
        """Give the node an empty working copy. Raises OSError (ENOSPC, EMFILE)."""
        extent, fd = self.store.allocate(self._inodes[node.ino])
        self._let_go(node)
        node.extent, node.fd, node.working = extent, fd, True
        node.cached = not self.passthrough
        node.dirty = True
        node.mapped = False
        node.stamp = None
        self._pin(node)
        if self.nodes.sealed.get(node.ino) is node:
            del self.nodes.sealed[node.ino]
        if state is State.PRIVATE:
            self.nodes.add_private(node)
        else:
            node.state = state
            self.nodes.live[node.ino] = node

    def _begin_in_place(self, node: Node) -> None:
        """Open the node for writing in place; its base is copied before the first write."""
        fd = self.store.extents.open(node.extent)
        self._let_go(node)
        node.fd, node.working, node.cached, node.dirty = fd, False, True, False
        self._pin(node)
        if self.nodes.sealed.get(node.ino) is node:
            del self.nodes.sealed[node.ino]
        node.state = State.LIVE
        self.nodes.live[node.ino] = node

    def _let_go(self, node: Node) -> None:
        """Close and unpin what the node holds of its present extent."""
        self.kernel.drop_backing(node)
        _close(node)
        if node.working:
            self._retire_working(node)
        self._unpin(node)

    def _retire_working(self, node: Node) -> None:
        self.store.retire(node.extent)
        node.working = False

    async def make_writable(self, node: Node) -> None:
        """Before a write through us (cached mode): copy what a version still names."""
        if node.working:
            return
        if node.size > _COPY_INLINE_MAX_BYTES or node.lock is not None:
            await detach()
            async with self._locked(node):
                if not node.working:
                    await self._copy_before_write(node)
        else:
            await self._copy_before_write(node)

    async def _copy_before_write(self, node: Node) -> None:
        extent, fd = await self._copy(node)
        base = node.extent
        os.close(node.fd)
        node.extent, node.fd, node.working = extent, fd, True
        self._pin(node)
        log.debug("%r: copied extent %x to %x before a write", node, base, extent)

    async def _copy(self, node: Node) -> tuple[int, int]:
        extent, fd = self.store.allocate(self._inodes[node.ino])
        try:
            if os.fstat(node.fd).st_size <= _COPY_INLINE_MAX_BYTES:
                copy_contents(node.fd, fd)
            else:
                await trio.to_thread.run_sync(copy_contents, node.fd, fd)
        except BaseException:
            os.close(fd)
            self.store.extents.free(extent)
            raise
        return extent, fd

    def _locked(self, node: Node) -> trio.Lock:
        if node.lock is None:
            node.lock = trio.Lock()
        return node.lock

    # -- open and release ------------------------------------------------------------------------

    def open(self, node: Node, flags: int, pid: int) -> Handle:
        """Open a handle on the node that choose() or a creation decided on."""
        if not node.opens and node.state is State.SEALED:
            # An empty version has no extent, hence nothing to pass through to; nor has one that is
            # too large to be kept on this host.
            here = node.extent and self.store.is_here(node.extent)
            node.cached = not (self.passthrough and here)
            if node.cached and here:
                node.fd = self.store.extents.open(node.extent)
            self._pin(node)
        return self.nodes.open(node, flags, pid)

    async def release(self, fh: int) -> None:
        """The last descriptor of a handle is gone. Publishes what is not yet; the node counts as open
        until that is done."""
        handle = self.nodes.handles[fh]
        node = handle.node
        try:
            while handle.writing and node.writers == 1 and self._is_unpublished(handle):
                if self.store.waits:
                    await detach()
                await self._publish(node, writers_stay=False)
        except OSError as error:
            where = self.store.namespace.describe(node.ino)
            log.error("%s: its last changes could not be published: %s", where, error)
        self.nodes.close(fh)
        if handle.writing and not node.writers and not node.is_sealed:
            self._seal(node)
        if not node.opens:
            await self._rest(node)

    def _is_unpublished(self, handle: Handle) -> bool:
        """Whether what was written through a handle, of late maybe by a mapping, is still to be seen."""
        node = handle.node
        return (
            not (node.is_sealed or handle.aborted or node.discarded)
            and bool(self._inodes[node.ino].nlink)
            and self._changed(node, rdwr=_is_rdwr(handle))
        )

    async def _rest(self, node: Node) -> None:
        """Nothing has the node open any more."""
        _close(node)
        if node not in self.nodes.redirected.values():
            self._unpin(node)
        inode = self._inodes[node.ino]
        if node.version != inode.version or not node.extent:
            self.kernel.drop_backing(node)
        if inode.nlink == 0 and not self.nodes.in_use(node.ino):
            await self.store.forget(inode)
        self.nodes.drop_unused(node)

    def _seal(self, node: Node) -> None:
        """The last writer is gone: the node stands for a version again."""
        inode = self._inodes[node.ino]
        node.discarded = False
        if node.state is State.PRIVATE:
            self.nodes.remove_private(node, State.SEALED)
        else:
            node.state = State.SEALED
            if self.nodes.live.get(node.ino) is node:
                del self.nodes.live[node.ino]
        if node.extent == inode.extent or (node.working and not inode.size and not _size(node)):
            if node.working:
                self._retire_working(node)
            node.show(inode)
            self.nodes.sealed[node.ino] = node
        elif node.opens:
            # Readers joined it; they keep what they have, and others look for the current version.
            status = os.fstat(node.fd)
            node.size, node.blocks = status.st_size, status.st_blocks
            node.mtime_ns = status.st_mtime_ns
            node.version = -1
            if node.working:
                self._retire_working(node)
        else:
            self._let_go(node)
            node.show(inode)
            self.nodes.sealed.setdefault(node.ino, node)
            self.kernel.invalidate_attributes(node)

    def is_held(self, ino: int) -> bool:
        """Whether the kernel or a handle refers to the inode."""
        return any(True for _ in self.nodes.of(ino))

    def _dropped(self, node: Node) -> None:
        self.kernel.drop_backing(node)
        inode = self._inodes.get(node.ino)
        if inode is not None and inode.nlink == 0 and not any(self.nodes.of(node.ino)):
            self._nameless.append(inode)

    async def forget_nameless(self) -> None:
        """Remove the inodes whose last name and last node are gone."""
        while self._nameless:
            await self.store.forget(self._nameless.pop())

    # -- publishing ------------------------------------------------------------------------------

    async def flush(self, handle: Handle, pid: int) -> None:
        """close(2) of one descriptor. Returns when what was written is published."""
        node = handle.node
        if not handle.writing or node.state is State.SEALED or not self._inodes[node.ino].nlink:
            return
        if pid != handle.pid:
            others = await self.processes.may_still_write(pid, handle.pid)
            if others and await self.processes.hold(others, node.ino):
                return  # it is not half written that a file is published
        process = await self.processes.of(pid)
        if node.lock is not None and node.lock.locked():
            await detach()
            async with node.lock:
                pass
        handle.aborted = node.discarded
        if handle.aborted:
            return
        if node.state is State.PRIVATE:
            if process.killed_by_signal():
                handle.aborted = True
                if process.tell_once():
                    where = self.store.namespace.describe(node.ino)
                    log.info(
                        "%s: pid %d died writing it; the version before stays, as of all that it wrote",
                        where, pid,
                    )  # fmt: skip
                return
            if (
                node.stamp is None
                and not _size(node)
                and not process.is_in_exec()
                and await self.processes.holds_low(pid, node.ino)
            ):
                return
            if not node.cached and self._is_full():
                # A write that the kernel refused for want of room did not come to us.
                handle.aborted = True
                raise fail(errno.ENOSPC, "the store is full; the version before stays")
        if not self._changed(node, rdwr=_is_rdwr(handle)):
            return
        stays = node.writers > 1
        try:
            if (stays and not node.cached) or self.store.waits:
                await detach()
                async with self._locked(node):
                    await self._publish(node, writers_stay=stays)
            else:
                await self._publish(node, writers_stay=stays)
        except OSError as error:
            # Whoever closes it is told, and may write it anew: that must not be overwritten by this.
            # What is written through a mapping later has not been refused.
            handle.aborted = not node.mapped
            where = self.store.namespace.describe(node.ino)
            log.error("%s: what pid %d wrote could not be published: %s", where, pid, error)
            raise

    def _is_full(self) -> bool:
        room = self.store.extents.statvfs()
        # f_blocks is 0 on a tmpfs without a limit.
        return bool(room.f_blocks) and room.f_bavail * room.f_frsize < _FULL_BYTES

    def discard(self, node: Node) -> None:
        """Whoever writes a private working copy gives it up: closing it publishes nothing.

        Raises OSError EBUSY when it is not private, or no longer.
        """
        if node.state is not State.PRIVATE:
            raise fail(errno.EBUSY, "only what nobody else sees yet can be discarded")
        node.discarded = True

    async def fsync(self, handle: Handle) -> None:
        """fsync(2): publish what is written so far; the descriptor stays open for more."""
        await self._publish_so_far(handle.node, rdwr=_is_rdwr(handle))

    async def publish_in_place(self, ino: int) -> None:
        """Publish what is written so far in place, before another host may lock the file."""
        node = self.nodes.live.get(ino)
        if node is not None and self._inodes[ino].nlink:
            await self._publish_so_far(node, rdwr=True)

    def give_up(self, handle: Handle) -> bool:
        """Publish nothing through this handle any more. Return whether there was something."""
        unpublished = handle.writing and self._is_unpublished(handle)
        handle.aborted |= unpublished
        return unpublished

    def is_behind(self, inode: Inode) -> bool:
        """Whether another host has published a newer version than the one that is written in place here."""
        live = self.nodes.live.get(inode.ino)
        return live is not None and live.version != inode.version

    async def refresh(self, ino: int) -> None:
        """Have the node that is written in place show the newest version, which another host published,
        unless there is something unpublished in it."""
        node, inode = self.nodes.live.get(ino), self._inodes.get(ino)
        if node is None or inode is None or node.version == inode.version:
            return
        await detach()
        async with self._locked(node):
            inode = await self.store.bring(ino)
            if node.version == inode.version or self._changed(node, rdwr=True):
                return
            if node.working:
                await self._overwrite(node, inode)
            elif node.cached and inode.extent:
                fd = self.store.extents.open(inode.extent)
                _close(node)
                node.fd = fd
                node.show(inode)
                self._pin(node)
            else:
                return
        if node.cached:
            await self.kernel.forget_content(node)
        self.kernel.invalidate_attributes(node)

    async def _overwrite(self, node: Node, inode: Inode) -> None:
        """Bring a version into a working copy of which everything is published."""
        os.ftruncate(node.fd, inode.size)
        if inode.extent:
            with self.store.extents.opened(inode.extent) as source:
                await trio.to_thread.run_sync(copy_contents, source, node.fd)
        node.version, node.size = inode.version, inode.size
        node.blocks, node.mtime_ns = inode.blocks, inode.mtime_ns
        node.stamp, node.dirty = _stamp(os.fstat(node.fd)), False

    async def _publish_so_far(self, node: Node, *, rdwr: bool) -> None:
        if node.state is State.SEALED or node.discarded:
            return
        if not self._changed(node, rdwr=rdwr):
            return
        if node.cached and not self.store.waits:
            await self._publish(node, writers_stay=True)
        else:
            await detach()
            async with self._locked(node):
                await self._publish(node, writers_stay=True)

    async def publish_now(self, ino: int) -> None:
        """Publish what is being written to an inode whose name is about to mean something new."""
        if self.store.waits:
            await detach()
        for node in list(self.nodes.of(ino)):
            if node.state is not State.PRIVATE or node.discarded:
                continue
            if _size(node) and self._changed(node, rdwr=False):
                await self._publish(node, writers_stay=False, naming=True)

    async def _publish(self, node: Node, *, writers_stay: bool, naming: bool = False) -> None:
        """`naming`: the kernel keeps directories locked until we return."""
        status = published = os.fstat(node.fd)
        extent = node.extent
        # Where writes come to us, so do those through mappings.
        mapped = node.mapped and not node.cached
        dirty, node.dirty = node.dirty, False
        try:
            if writers_stay and status.st_size and not node.cached:
                extent, fd = await self._copy(node)
                published = os.fstat(fd)
                os.close(fd)
                mapped = False
            inode = await self.store.publish(
                node.ino, extent, published, status.st_mtime_ns, mapped=mapped
            )
        except BaseException:
            node.dirty |= dirty
            if extent != node.extent:
                self.store.extents.free(extent)
            raise
        if inode.extent and extent == node.extent != inode.extent:
            # The store took the very same file under another number.
            node.extent = inode.extent
            self._pin(node)
            self.store.retire(extent)
        node.version = inode.version
        node.size, node.blocks, node.mtime_ns = inode.size, inode.blocks, inode.mtime_ns
        node.working = inode.extent != node.extent
        node.stamp = _stamp(status)
        node.settled = time.time_ns() - status.st_ctime_ns > _TIMESTAMP_GRAIN_NS
        if node.state is State.PRIVATE and not node.working and not writers_stay:
            # Handed over: whoever opens the file now reads this very extent.
            self.nodes.remove_private(node, State.LIVE)
            self.nodes.live[node.ino] = node
        await self._announce(inode, naming=naming)

    async def _announce(self, inode: Inode, *, naming: bool = False) -> None:
        """A version was published. Its other names may still lead the kernel to the one before."""
        self.kernel.version_published(inode.ino)
        if inode.nlink > 1:
            names = self.store.namespace.names_of(inode.ino)
            if naming:
                self.kernel.start_soon(self.kernel.expire_names, names)
            else:
                await detach()
                await self.kernel.expire_names(names)

    def _changed(self, node: Node, *, rdwr: bool) -> bool:
        """Whether the node may hold bytes that its last published version does not."""
        if node.stamp is None and self.store.shared and not (node.version or _size(node)):
            return False  # a new file that stays empty: its name says so already, to all
        if node.dirty or node.cached or node.stamp is None:
            return node.dirty
        status = os.fstat(node.fd)
        if _stamp(status) != node.stamp:
            return True
        # Stores through a mapping move no times; they matter when the version is a copy.
        return node.working and status.st_size > 0 and (rdwr or not node.settled)

    def set_mtime(self, node: Node, mtime_ns: int) -> None:
        """utimensat(2): where the time is kept in the working copy, it is to be set there."""
        if node.state is State.SEALED or not (node.working or not node.cached):
            return
        status = os.fstat(node.fd)
        written = _stamp(status) != node.stamp
        os.utime(node.fd, ns=(status.st_atime_ns, mtime_ns))
        if node.stamp is None:
            return
        if written:
            node.dirty = True  # the time may have been set back to what it was
        else:
            node.stamp = _stamp(os.fstat(node.fd))

    # -- truncate --------------------------------------------------------------------------------

    async def truncate(self, node: Node, size: int) -> None:
        """ftruncate(2), and truncate(2) of a node that is being written."""
        if node.cached:
            await self.make_writable(node)
        os.ftruncate(node.fd, size)
        node.dirty = True

    async def truncate_sealed(self, inode: Inode, node: Node, size: int, pid: int) -> None:
        """truncate(2) by name: publish the shortened or extended content at once.

        Raises OSError ESTALE when the name leads to another node from now on.
        """
        key = (pid, inode.ino)
        expected = self._take_redirection(key)
        if expected is node and inode.size == size:
            return
        live = self.nodes.live.get(inode.ino)
        if live is None and inode.size == size and node.version == inode.version:
            return
        if live is not None and live is not node:
            self.redirect(key, live)
            raise fail(errno.ESTALE)
        target = node if self._is_idle(node) else self.nodes.add(inode)
        extent, fd = self.store.allocate(inode)
        try:
            if inode.extent and size:
                with self.store.extents.opened(inode.extent) as source:
                    if min(inode.size, size) > _COPY_INLINE_MAX_BYTES:
                        await detach()
                        await trio.to_thread.run_sync(copy_contents, source, fd, size)
                    else:
                        copy_contents(source, fd, size)
            os.ftruncate(fd, size)
            status = os.fstat(fd)
            if self.store.waits:
                await detach()
            published = await self.store.publish(inode.ino, extent, status, status.st_mtime_ns)
        except BaseException:
            self.store.extents.free(extent)
            raise
        finally:
            os.close(fd)
        if not published.extent:
            self.store.extents.free(extent)
        self.kernel.drop_backing(target)
        target.show(published)
        self.nodes.sealed[inode.ino] = target
        await self._announce(published)
        if target is not node:
            self.redirect(key, target)
            raise fail(errno.ESTALE)

    # -- reading and writing through us (cached mode) --------------------------------------------

    async def read(self, handle: Handle, offset: int, size: int) -> bytes:
        node = handle.node
        if node.fd >= 0:
            data = os.pread(node.fd, size, offset)
        elif not node.extent:
            return b""
        else:
            await detach()
            size = max(0, min(size, node.size - offset))
            data = await self.store.read(self._inodes[node.ino], node.extent, offset, size)
        self.carried_bytes += len(data)
        return data

    async def write(self, handle: Handle, offset: int, data: "memoryview | bytes") -> int:
        node = handle.node
        if not node.working:
            data = bytes(data)  # the session reuses its buffer while we wait
            await self.make_writable(node)
        node.dirty = True
        view = memoryview(data)
        written = 0
        try:
            while written < len(view):
                written += os.pwrite(node.fd, view[written:], offset + written)
        except OSError:
            # Half a content is not to be published because its writer closes the file all the same.
            node.discarded = node.state is State.PRIVATE
            raise
        self.carried_bytes += written
        return written


def _close(node: Node) -> None:
    if node.fd >= 0:
        os.close(node.fd)
        node.fd = -1


def _is_current(node: Node, inode: Inode) -> bool:
    return node.state is State.SEALED and node.version == inode.version


def _stamp(status: os.stat_result) -> tuple[int, int]:
    """What a write to an extent moves. Not st_ctime: a store that takes the very file moves it, too."""
    return status.st_size, status.st_mtime_ns


def _size(node: Node) -> int:
    return os.fstat(node.fd).st_size if node.fd >= 0 else node.size


def truncates(flags: int) -> bool:
    """Whether an open is to begin with an empty file."""
    return bool(flags & os.O_TRUNC) and flags & os.O_ACCMODE != os.O_RDONLY


def _is_rdwr(handle: Handle) -> bool:
    return handle.flags & os.O_ACCMODE == os.O_RDWR
