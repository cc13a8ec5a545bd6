"""Listing directories."""

import errno
import os
import stat
from collections.abc import Callable

from ..backend.namespace import fail
from ..coherence.nodes import Handle
from ..inline import detach
from .calls import Attributes, Caller
from .superblock import Part


class Directories(Part):
    """Opens and lists directories."""

    async def opendir(self, inode: int, ctx: Caller) -> int:
        self._nodes.directory(inode)
        arrived = self._coherence.arrived(inode)
        if arrived is None:
            arrived = await self._coherence.settle_names(inode, ctx.pid, by_name=False)
        node, found = arrived
        if not found.is_dir:
            raise fail(errno.ENOTDIR)
        return self._nodes.open(node, None, os.O_RDONLY, ctx.pid).fh

    def _directory_handle(self, fh: int) -> Handle:
        handle = self._nodes.handles[fh]
        if not handle.is_directory:
            raise fail(errno.ENOTDIR)
        return handle

    def _listing(self, handle: Handle, start_id: int) -> list[tuple[bytes, int]]:
        """Return the names of a directory as they were when its listing began."""
        if handle.entries is None or start_id == 0:
            ino = handle.node.ino
            inode = self._inodes[ino]
            self._atimes.read(inode)
            handle.entries = [(b".", ino), (b"..", inode.parent or ino)]
            handle.entries += self._namespace.children(ino)
        return handle.entries

    async def readdir(
        self,
        fh: int,
        start_id: int,
        add: Callable[[bytes, Attributes, int], bool],
        *,
        one_number: bool = False,
    ) -> None:
        """Give a session names with attributes. `add` takes a name, what it leads to and the id of the name
        after it; it returns False if there is no room left. `one_number`: the session has one number for a
        node and its inode."""
        handle = self._directory_handle(fh)
        directory = handle.node.ino
        entries = self._listing(handle, start_id)
        listing = self._coherence.listing(directory)
        for index in range(start_id, len(entries)):
            name, ino = entries[index]
            inode = self._inodes.get(ino)
            if inode is None:
                continue
            if index < 2:
                dots = Attributes()
                dots.ino = dots.st_ino = ino
                dots.st_mode = stat.S_IFDIR
                if not add(name, dots, index + 1):
                    return
                continue
            main = node = self._cache.routes.node_of(inode, 0)
            if one_number:
                node = self._nodes.numbered(inode)
            if node.lookups and listing.is_known(name, node):
                # Without a node: the kernel has name and attributes, and will for a while.
                known = Attributes()
                known.ino, known.st_mode = ino, inode.mode
                if not add(name, known, index + 1):
                    return
                continue
            entry = self._answers.attributes(node, inode)
            if node is main:
                listing.entry(entry, name, node, inode)
            else:
                self._coherence.attributes(entry, node, inode)
            if not add(name, entry, index + 1):
                self._nodes.drop_unused(node)
                return
            node.lookups += 1

    def names(self, fh: int, start_id: int, most: int) -> list[tuple[int, int, bytes, int]]:
        """Return at most so many names without attributes: number of the inode, id of the name after it,
        name, mode."""
        entries, inodes = self._listing(self._directory_handle(fh), start_id), self._inodes
        found = []
        for index in range(start_id, len(entries)):
            name, ino = entries[index]
            inode = inodes.get(ino)
            if inode is not None:
                found.append((ino, index + 1, name, inode.mode))
                if len(found) == most:
                    break
        return found

    async def releasedir(self, fh: int) -> None:
        self._directory_handle(fh)
        self._nodes.drop_unused(self._nodes.close(fh).node)
        await self._cache.host.forget_nameless()

    async def sync(self) -> None:
        """Make all changes of names that were answered survive a crash."""
        if self._store.sends:
            await detach()
        await self._namespace.flush()
