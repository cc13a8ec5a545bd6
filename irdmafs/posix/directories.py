"""Listing directories."""

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator

from ..backend.namespace import fail
from ..coherence.nodes import Handle
from ..inline import detach
from .calls import Attributes, Caller
from .superblock import Part

# A program that lists names with attributes uses them within this time.
_USED_WITHIN_S = 0.5


class Directories(Part):
    """Opens and lists directories."""

    async def opendir(self, inode: int, ctx: Caller) -> int:
        self._nodes.directory(inode)
        node, found = await self._coherence.settle_names(inode, ctx.pid, by_name=False)
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
        add: Callable[[bytes, int, int, Attributes | None, int], bool],
        *,
        one_number: bool = False,
    ) -> None:
        """Give a session names with attributes. `add` takes a name, the number and mode of its inode, its
        attributes and the id of the name after it; it returns False if there is no room left. Without
        attributes the kernel is to take no reference: it has them, and will for a while, or they are those
        of "." and "..". `one_number`: the session has one number for a node and its inode."""
        handle = self._directory_handle(fh)
        entries, inodes = self._listing(handle, start_id), self._inodes
        directory = handle.node.ino
        valid_s = self._coherence.listing_s(directory)
        known_until = time.monotonic() + min(valid_s / 2, _USED_WITHIN_S)
        for index in range(start_id, len(entries)):
            name, ino = entries[index]
            try:
                inode = inodes[ino]
            except KeyError:
                continue
            if index < 2:
                if not add(name, ino, stat.S_IFDIR, None, index + 1):
                    return
                continue
            main = node = self._cache.routes.node_of(inode, 0)
            if one_number:
                node = self._nodes.numbered(inode)
            known = node.lookups > 0 and valid_s > 0
            if known and self._coherence.knows((directory, name), node, known_until):
                if not add(name, ino, inode.mode, None, index + 1):
                    return
                continue
            entry = self._answers.attributes(node, inode)
            if node is main:
                self._coherence.listed(entry, (directory, name), node, inode, valid_s)
            else:
                self._coherence.attributes(entry, node, inode)
            if not add(name, ino, entry.st_mode, entry, index + 1):
                self._nodes.drop_unused(node)
                return
            node.lookups += 1

    def names(self, fh: int, start_id: int) -> Iterator[tuple[int, int, bytes, int]]:
        """Yield names without attributes: number of the inode, id of the name after it, name, mode."""
        entries, inodes = self._listing(self._directory_handle(fh), start_id), self._inodes
        for index in range(start_id, len(entries)):
            name, ino = entries[index]
            try:
                inode = inodes[ino]
            except KeyError:
                continue
            yield ino, index + 1, name, inode.mode

    async def releasedir(self, fh: int) -> None:
        self._directory_handle(fh)
        self._nodes.drop_unused(self._nodes.close(fh).node)
        await self._cache.host.forget_nameless()

    async def sync(self) -> None:
        """Make all changes of names that were answered survive a crash."""
        if self._store.sends:
            await detach()
        await self._namespace.flush()
