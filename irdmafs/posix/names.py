"""Changes of names: what is created, linked, removed and renamed."""

import errno
import stat
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..backend.namespace import RENAME_EXCHANGE, Inode, fail
from ..backend.store.api import Store
from ..coherence.arrivals import Arrivals
from ..coherence.beliefs import Beliefs
from ..coherence.cache import Cache
from ..coherence.kernel_cache import Name
from ..inline import detach
from .answers import Answers
from .atimes import Atimes
from .calls import Attributes, Caller


class Names:
    """Changes directories. Files are created by opening them, see opens."""

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
        self._shared = store.shared
        self._cache = cache
        self._nodes = cache.nodes
        self._answers = answers
        self._arrivals = arrivals
        self._beliefs = beliefs
        self._atimes = atimes

    async def _make(
        self, parent: int, name: bytes, mode: int, ctx: Caller, **what: Any
    ) -> Attributes:
        directory = self._nodes.inode_of(parent)
        if self._shared:
            await detach()
        inode = await self._namespace.create(
            directory.ino, name, mode, ctx.uid, ctx.gid, umask=ctx.umask, **what
        )
        return self._answers.entry(directory.ino, name, inode, ctx.pid, made=True)

    async def mknod(
        self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: Caller
    ) -> Attributes:
        return await self._make(parent_inode, name, mode, ctx, rdev=rdev, version=1)

    async def mkdir(self, parent_inode: int, name: bytes, mode: int, ctx: Caller) -> Attributes:
        mode = mode & ~stat.S_IFMT(mode) | stat.S_IFDIR
        return await self._make(parent_inode, name, mode, ctx)

    async def symlink(
        self, parent_inode: int, name: bytes, target: bytes, ctx: Caller
    ) -> Attributes:
        if len(target) >= 4096:
            raise fail(errno.ENAMETOOLONG)
        return await self._make(parent_inode, name, stat.S_IFLNK | 0o777, ctx, target=target)

    async def link(
        self, inode: int, new_parent_inode: int, new_name: bytes, ctx: Caller
    ) -> Attributes:
        node, _ = self._nodes.get(inode)
        directory = self._nodes.inode_of(new_parent_inode)
        if self._shared:
            await detach()
        await self._cache.publish_now(node.ino)
        linked = await self._namespace.link(node.ino, directory.ino, new_name)
        self._answers.refresh_other_nodes(None, node.ino)  # the name may lead to a further one
        return self._answers.entry(directory.ino, new_name, linked, ctx.pid, made=True)

    async def unlink(self, parent_inode: int, name: bytes, ctx: Caller) -> None:
        parent = self._nodes.inode_of(parent_inode).ino
        if self._shared:
            self._arrivals.trails.forget(ctx.pid)  # what it looked up was for this
            await detach()
        found = self._namespace.lookup(parent, name)
        in_use = found is not None and self._nodes.has_nodes(found.ino)
        with self._changing((parent, name)):
            inode = await self._namespace.unlink(parent, name, in_use=in_use)
        await self._unnamed(inode, in_use)

    async def rmdir(self, parent_inode: int, name: bytes, ctx: Caller) -> None:
        parent = self._nodes.inode_of(parent_inode).ino
        if self._shared:
            await detach()
        found = self._namespace.lookup(parent, name)
        # Whoever stands in it still asks us about it.
        in_use = found is not None and any(self._nodes.of(found.ino))
        with self._changing((parent, name)):
            await self._namespace.rmdir(parent, name, in_use=in_use)

    async def _unnamed(self, inode: Inode, in_use: bool) -> None:
        """An inode lost a name."""
        if inode.nlink:
            self._answers.refresh_other_nodes(None, inode.ino)
        elif in_use:
            self._answers.refresh_several(inode.ino)
        else:
            self._cache.unnamed(inode)
            self._store.retire(inode.extent)

    async def rename(
        self,
        parent_inode_old: int,
        name_old: bytes,
        parent_inode_new: int,
        name_new: bytes,
        flags: int,
        ctx: Caller,
    ) -> None:
        old, new = (
            self._nodes.inode_of(parent_inode_old).ino,
            self._nodes.inode_of(parent_inode_new).ino,
        )
        if self._shared:
            await detach()
        moved = self._namespace.lookup(old, name_old)
        if moved is not None and moved.is_file:
            await self._cache.publish_now(moved.ino)
        if len(name_new) > 255:
            raise fail(errno.ENAMETOOLONG)
        replaced = self._namespace.lookup(new, name_new)
        in_use = replaced is not None and self._nodes.has_nodes(replaced.ino)
        with self._changing((old, name_old), (new, name_new)):
            unnamed = await self._namespace.rename(
                old, name_old, new, name_new, flags, in_use=in_use, owner=(ctx.uid, ctx.gid)
            )
        if self._shared:
            self._arrivals.trails.forget(ctx.pid)  # what it looked up was for this
            # The kernel moves its name, and does not look it up again.
            if moved is not None:
                self._renamed(moved, (old, name_old), (new, name_new))
            if replaced is not None and flags & RENAME_EXCHANGE:
                self._renamed(replaced, (new, name_new), (old, name_old))
        if moved is not None:
            self._answers.refresh_several(moved.ino)
        if unnamed is not None:
            await self._unnamed(unnamed, in_use)
        elif replaced is not None:
            self._answers.refresh_several(replaced.ino)

    def _changing(self, *names: Name) -> AbstractContextManager[None]:
        """While a program here changes names. Where nobody else does, the kernel knows all of it."""
        return self._beliefs.changing(*names) if self._shared else nullcontext()

    def _renamed(self, inode: Inode, old: Name, new: Name) -> None:
        for node in self._nodes.of(inode.ino):
            if node.name == old:
                node.name = new

    async def readlink(self, inode: int, ctx: Caller) -> bytes:
        found = self._nodes.inode_of(inode)
        self._atimes.read(found)
        return found.target
