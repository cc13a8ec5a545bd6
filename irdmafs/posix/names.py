"""Changes of names: create, link, remove and rename."""

import errno
import stat
from typing import Any

from ..backend.namespace import FIRST_VIRTUAL_INO, RENAME_EXCHANGE, Inode, fail
from .calls import Attributes, Caller
from .since import Since
from .superblock import Part, Superblock

# The types that mknod makes; 0 stands for a regular file, as in mknod(2).
_NODES = frozenset({stat.S_IFREG, stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFBLK})


class Names(Part):
    """Changes directories. Files are created by opening them, see opens."""

    def __init__(self, block: Superblock, since: Since) -> None:
        super().__init__(block)
        self._since = since

    async def _make(
        self, parent: int, name: bytes, mode: int, ctx: Caller, **what: Any
    ) -> Attributes:
        directory = self._nodes.directory(parent)
        if directory.xattrs:
            self._since.refuse(directory, name)
        inode = await self._namespace.create(directory.ino, name, mode, ctx.uid, ctx.gid, **what)
        return self._answers.entry(directory.ino, name, inode, ctx.pid, is_made=True)

    async def mknod(
        self, parent_inode: int, name: bytes, mode: int, umask: int, rdev: int, ctx: Caller
    ) -> Attributes:
        kind = stat.S_IFMT(mode) or stat.S_IFREG
        if kind not in _NODES:
            raise fail(errno.EINVAL)
        mode = kind | stat.S_IMODE(mode)
        return await self._make(parent_inode, name, mode, ctx, umask=umask, rdev=rdev, version=1)

    async def mkdir(
        self, parent_inode: int, name: bytes, mode: int, umask: int, ctx: Caller
    ) -> Attributes:
        mode = stat.S_IFDIR | stat.S_IMODE(mode)
        return await self._make(parent_inode, name, mode, ctx, umask=umask)

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
        directory = self._nodes.directory(new_parent_inode)
        if directory.xattrs:
            self._since.refuse(directory, new_name)
        # Store nodes keep what a name leads to: what is in a file without one becomes a version with it.
        is_first = self._store.sends and not self._inodes[node.ino].nlink
        name = (directory.ino, new_name) if is_first else None
        if await self._cache.publisher.publish_now(node.ino, name):
            linked = self._namespace.inode(node.ino)
        else:
            linked = await self._namespace.link(node.ino, directory.ino, new_name)
        self._answers.refresh_other_nodes(None, node.ino)  # the name may lead to a further node
        return self._answers.entry(directory.ino, new_name, linked, ctx.pid, is_made=True)

    async def unlink(self, parent_inode: int, name: bytes, ctx: Caller) -> None:
        directory = self._nodes.directory(parent_inode)
        parent = directory.ino
        if directory.xattrs:
            self._since.refuse(directory, name)
        with self._coherence.changing(ctx.pid, (parent, name)):
            inode = await self._namespace.unlink(parent, name)
        self._unnamed(inode)

    async def rmdir(self, parent_inode: int, name: bytes, ctx: Caller) -> None:
        parent = self._nodes.directory(parent_inode).ino
        with self._coherence.changing(ctx.pid, (parent, name)):
            await self._namespace.rmdir(
                parent, name, known=self._coherence.known_directories((parent, name))
            )

    def _unnamed(self, inode: Inode) -> None:
        """Tell the kernel and the store that an inode lost a name."""
        nodes = self._nodes.count(inode.ino)
        if inode.nlink or nodes > 1:
            self._answers.refresh_other_nodes(None, inode.ino)
        elif not nodes:
            self._cache.host.unnamed(inode)
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
        source = self._nodes.directory(parent_inode_old)
        target = self._nodes.directory(parent_inode_new)
        old, new = source.ino, target.ino
        if source.xattrs or target.xattrs:
            self._since.refuse(source, name_old)
            self._since.refuse(target, name_new)
        moved = self._namespace.lookup(old, name_old)
        if moved is not None and moved.is_file:
            await self._cache.publisher.publish_now(moved.ino)
        if len(name_new) > 255:
            raise fail(errno.ENAMETOOLONG)
        exchanged = self._namespace.lookup(new, name_new) if flags & RENAME_EXCHANGE else None
        names = (old, name_old), (new, name_new)
        with self._coherence.changing(ctx.pid, *names):
            unnamed = await self._namespace.rename(
                old, name_old, new, name_new, flags, owner=(ctx.uid, ctx.gid),
                known=self._coherence.known_directories(*names),
            )  # fmt: skip
        if exchanged is not None:
            self._coherence.renamed(exchanged.ino, (new, name_new), (old, name_old))
            self._answers.refresh_several(exchanged.ino)
        if moved is not None:
            self._coherence.renamed(moved.ino, (old, name_old), (new, name_new))
            self._answers.refresh_several(moved.ino)
        if unnamed is not None:
            self._unnamed(unnamed)

    async def readlink(self, inode: int, ctx: Caller) -> bytes:
        found = self._nodes.inode_of(inode)
        if found.ino >= FIRST_VIRTUAL_INO:
            return await self._since.target(found, ctx)
        self._atimes.read(found)
        return found.target
