"""Listing directories."""

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator

from ..backend.namespace import fail
from ..backend.store.api import Store
from ..coherence.arrivals import Arrivals
from ..coherence.beliefs import Beliefs
from ..coherence.cache import Cache
from ..coherence.nodes import Handle
from .answers import Answers
from .atimes import Atimes
from .calls import Attributes, Caller


class Directories:
    """Opens and lists directories."""

    def __init__(
        self,
        store: Store,
        cache: Cache,
        answers: Answers,
        arrivals: Arrivals,
        beliefs: Beliefs,
        atimes: Atimes,
    ) -> None:
        self._store = store
        self._namespace = store.namespace
        self._inodes = store.namespace.inodes
        self._shared = store.shared
        self._cache = cache
        self._nodes = cache.nodes
        self._answers = answers
        self._arrivals = arrivals
        self._beliefs = beliefs
        self._atimes = atimes

    async def opendir(self, inode: int, ctx: Caller) -> int:
        node, found = self._nodes.get(inode)
        if not found.is_dir:
            raise fail(errno.ENOTDIR)
        if self._shared:
            names = self._arrivals.trails.take(ctx.pid)
            await self._arrivals.freshen(found)
            node, found = self._nodes.get(inode)
            if names and not self._arrivals.trails.hold(ctx.pid, names, found.ino, believed=True):
                raise fail(errno.ESTALE)  # the kernel looks the names up again, once
        return self._nodes.open(node, None, os.O_RDONLY, ctx.pid).fh

    def _directory_handle(self, fh: int) -> Handle:
        handle = self._nodes.handles[fh]
        if not handle.is_directory:
            raise fail(errno.ENOTDIR)
        return handle

    def _listing(self, handle: Handle, start_id: int) -> list[tuple[bytes, int]]:
        """The names of a directory as they were when its listing began."""
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
        valid_s = self._store.believable_s(directory) if self._shared else 0.0
        soon = time.monotonic() + valid_s / 2
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
            main = node = self._cache.node_of(inode, 0)
            if one_number:
                node = self._nodes.numbered(inode)
            if valid_s and node.lookups and self._beliefs.holds((directory, name), ino, soon):
                # Without a node: the kernel has name and attributes, and will for a while.
                known = Attributes()
                known.ino, known.st_mode = ino, inode.mode
                if not add(name, known, index + 1):
                    return
                continue
            entry = self._answers.attributes(node, inode)
            is_stable = node is main and self._cache.names_are_stable(ino)
            if not is_stable or not self._answers.leads_to(directory, name, ino):
                entry.entry_timeout = 0
            elif valid_s:
                node.name = (directory, name)
                self._answers.let_believe(entry, directory, name, inode, valid_s)
            if not add(name, entry, index + 1):
                self._nodes.drop_unused(node)
                return
            node.lookups += 1

    def names(self, fh: int, start_id: int) -> Iterator[tuple[int, int, bytes, int]]:
        """Yield a listing without attributes: (next id, ino, name, mode)."""
        entries = self._listing(self._directory_handle(fh), start_id)
        for index in range(start_id, len(entries)):
            name, ino = entries[index]
            inode = self._inodes.get(ino)
            if inode is not None:
                yield index + 1, ino, name, inode.mode

    async def releasedir(self, fh: int) -> None:
        self._directory_handle(fh)
        self._nodes.drop_unused(self._nodes.close(fh).node)
        await self._cache.forget_nameless()

    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        await self._namespace.flush()
