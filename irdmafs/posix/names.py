"""The names in directories: looked up, made, removed, renamed and listed."""

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from ..backend.namespace import FIRST_VIRTUAL_INO, RENAME_EXCHANGE, Inode, fail
from ..backend.namespace.drafts import is_draft
from ..coherence.kernel_cache import Name
from ..coherence.nodes import INO_BITS, Handle
from ..inline import detach
from .calls import Attributes, Caller
from .locking import Locking
from .metadata import Part, Superblock
from .since import Since

# In every directory of a cluster, though no listing has it: a view of its files for programs that open them
# as this mount knows them, and keep no references to their pages (docs/mount.md).
PRIVATE_VIEW: Final = b".irdmafs-private"
# The types that mknod makes; 0 stands for a regular file, as in mknod(2).
_NODES: Final = frozenset({stat.S_IFREG, stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFBLK})
# A first page has so many names that are not believed: looking at them has the directory followed.
_FIRST_MAX: Final = 18
# A program that lists names with attributes uses them within this time.
_USED_WITHIN_S: Final = 0.5


class Names(Part):
    """Looks names up, changes and lists directories. Files are created by opening them (files.py)."""

    def __init__(self, block: Superblock, since: Since, locking: Locking) -> None:
        super().__init__(block)
        self._since = since
        self._locking = locking

    # -- looked up, and forgotten ----------------------------------------------------------------

    def find(self, parent_inode: int, name: bytes, pid: int) -> Attributes | None:
        """Return the answer to a lookup by a thread; None: use `lookup_fresh`."""
        if name == b".":
            return self._found_by_handle(parent_inode)
        parent = self._nodes.inode_of(parent_inode)
        if name == b"..":
            return self._found_by_handle(self._namespace.parent_of(parent.ino))
        if parent_inode != parent.ino:
            return None  # lookup() is told who asks
        inode = self._coherence.find(parent.ino, name, pid)
        if inode is not None:
            return self._metadata.entry(parent.ino, name, inode, pid)
        valid_s = self._coherence.missing_s(parent, name, pid)
        if valid_s is None or name == PRIVATE_VIEW:
            return None
        if parent.xattrs and (link := self._since.find(parent, name)) is not None:
            return link
        if self._cache.routes.promises:
            self._cache.routes.missed(pid, (parent.ino, name))
        missing = Attributes()
        missing.entry_timeout = valid_s
        return missing

    async def lookup(self, parent_inode: int, name: bytes, ctx: Caller) -> Attributes:
        found = self.find(parent_inode, name, ctx.pid)
        return found or await self.lookup_fresh(parent_inode, name, ctx)

    async def lookup_fresh(self, parent_inode: int, name: bytes, ctx: Caller) -> Attributes:
        """Return the answer to a lookup for which `find` has none."""
        parent = self._nodes.inode_of(parent_inode)
        if parent_inode != parent.ino:
            return self._found_privately(parent, name, ctx)
        inode = await self._coherence.find_fresh(parent, name, ctx.pid)
        if inode is None:
            directory = self._inodes[parent.ino]
            if name == PRIVATE_VIEW and self._coherence.has_private_views:
                return self._metadata.hidden(self._nodes.private_view(directory), directory)
            if directory.xattrs and (link := self._since.find(directory, name)) is not None:
                return link
            self._cache.routes.withdraw(ctx.pid, 0)
            return Attributes()
        return self._metadata.entry(parent.ino, name, inode, ctx.pid)

    def _found_privately(self, directory: Inode, name: bytes, ctx: Caller) -> Attributes:
        inode = self._coherence.find_privately(directory.ino, name, ctx.pid, ctx.uid)
        if inode is None:
            return Attributes()
        return self._metadata.hidden(self._cache.routes.node_of(inode, ctx.pid), inode)

    def _found_by_handle(self, node_id: int) -> Attributes:
        """Return the attributes of a file handle's node (name_to_handle_at(2)), maybe a forgotten one."""
        node = self._nodes.by_id.get(node_id)
        inode = self._inodes.get(node.ino if node is not None else node_id % (1 << INO_BITS))
        if inode is None:
            raise fail(errno.ESTALE)
        if node is None:
            node = self._cache.routes.node_of(inode, 0)
            if node.id != node_id:
                node = self._nodes.add(inode, node_id)
        node.lookups += 1
        answer = self._metadata.describe(node, inode)
        self._coherence.attributes(answer, node, inode)
        return answer

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        for node_id, lookups in inode_list:
            self._nodes.forget(node_id, lookups)
        await self._cache.host.forget_nameless()

    # -- changed ---------------------------------------------------------------------------------

    async def _make(
        self, parent: int, name: bytes, mode: int, ctx: Caller, **what: Any
    ) -> Attributes:
        directory = self._nodes.directory(parent)
        if directory.xattrs:
            self._since.refuse(directory, name)
        inode = await self._namespace.create(directory.ino, name, mode, ctx.uid, ctx.gid, **what)
        return self._metadata.entry(directory.ino, name, inode, ctx.pid, is_made=True)

    async def mknod(
        self, parent_inode: int, mode: int, rdev: int, umask: int, name: bytes, ctx: Caller
    ) -> Attributes:
        kind = stat.S_IFMT(mode) or stat.S_IFREG
        if kind not in _NODES:
            raise fail(errno.EINVAL)
        mode = kind | stat.S_IMODE(mode)
        return await self._make(parent_inode, name, mode, ctx, umask=umask, rdev=rdev, version=1)

    async def mkdir(
        self, parent_inode: int, mode: int, umask: int, name: bytes, ctx: Caller
    ) -> Attributes:
        mode = stat.S_IFDIR | stat.S_IMODE(mode)
        return await self._make(parent_inode, name, mode, ctx, umask=umask)

    async def symlink(self, parent: int, name: bytes, target: bytes, ctx: Caller) -> Attributes:
        if len(target) >= 4096:
            raise fail(errno.ENAMETOOLONG)
        return await self._make(parent, name, stat.S_IFLNK | 0o777, ctx, target=target)

    async def link(self, parent: int, inode: int, name: bytes, ctx: Caller) -> Attributes:
        node, _ = self._nodes.get(inode)
        directory = self._nodes.directory(parent)
        if directory.xattrs:
            self._since.refuse(directory, name)
        # Store nodes keep what a name leads to: what is in a file without one becomes a version with it.
        is_first = self._store.sends and not self._inodes[node.ino].nlink
        named = (directory.ino, name) if is_first else None
        if await self._cache.publisher.publish_now(node.ino, named):
            linked = self._namespace.inode(node.ino)
        else:
            linked = await self._namespace.link(node.ino, directory.ino, name)
        self._metadata.refresh_other_nodes(None, node.ino)  # the name may lead to a further node
        return self._metadata.entry(directory.ino, name, linked, ctx.pid, is_made=True)

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
            known = self._coherence.known_directories((parent, name))
            await self._namespace.rmdir(parent, name, known=known)

    def _unnamed(self, inode: Inode) -> None:
        """Tell the kernel and the store that an inode lost a name."""
        if inode.nlink or self._nodes.has_siblings(inode.ino):
            self._metadata.refresh_other_nodes(None, inode.ino)
        elif not self._nodes.has_nodes(inode.ino):
            self._cache.host.unnamed(inode)
            if not self._store.sends:  # else it goes when the change is seen, unless others name it
                self._store.retire(inode.extent)

    async def rename(
        self, parent: int, new_parent: int, flags: int, name: bytes, new_name: bytes, ctx: Caller
    ) -> None:
        source = self._nodes.directory(parent)
        target = self._nodes.directory(new_parent)
        if source.xattrs or target.xattrs:
            self._since.refuse(source, name)
            self._since.refuse(target, new_name)
        old, new = (source.ino, name), (target.ino, new_name)
        moved = self._namespace.lookup(*old)
        has_drafts = self._namespace.tree.has_drafts
        if moved is not None and has_drafts and not is_draft(self._inodes, target.ino, new_name):
            with self._store.showing(moved.ino):  # a draft may be published
                await self._rename(old, new, moved, flags, ctx)
        else:
            await self._rename(old, new, moved, flags, ctx)

    async def _rename(
        self, old: Name, new: Name, moved: Inode | None, flags: int, ctx: Caller
    ) -> None:
        put_off, drafts = self._cache.put_off, self._cache.drafts
        if put_off.handles:
            self._locking.check(ctx.pid)
        if moved is not None and moved.is_file and not put_off.stays(moved.ino, new[0]):
            await drafts.store(moved.ino)
            await self._cache.publisher.publish_now(moved.ino)
        if len(new[1]) > 255:
            raise fail(errno.ENAMETOOLONG)
        exchanged = self._namespace.lookup(*new) if flags & RENAME_EXCHANGE else None
        if exchanged is not None:
            await drafts.store(exchanged.ino)
        with self._coherence.changing(ctx.pid, old, new):
            unnamed = await self._namespace.rename(
                *old, *new, flags, owner=(ctx.uid, ctx.gid),
                known=self._coherence.known_directories(old, new),
                before=partial(drafts.store, moved.ino) if moved is not None and moved.is_dir else None,
            )  # fmt: skip
        if exchanged is not None:
            self._coherence.renamed(exchanged.ino, new, old)
            self._metadata.refresh_several(exchanged.ino)
        if moved is not None:
            self._coherence.renamed(moved.ino, old, new)
            self._metadata.refresh_several(moved.ino)
        if unnamed is not None:
            self._unnamed(unnamed)

    async def readlink(self, inode: int, ctx: Caller) -> bytes:
        found = self._nodes.inode_of(inode)
        if found.ino >= FIRST_VIRTUAL_INO:
            return await self._since.target(found, ctx)
        self._atimes.read(found)
        return found.target

    # -- listed ----------------------------------------------------------------------------------

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

    def _listing(self, handle: Handle, start_id: int) -> Iterator[tuple[bytes, Inode, int]]:
        """Yield the names of a directory as they were when its listing began, each with its inode, unless
        that is gone, and the id of the name after it."""
        if handle.entries is None or start_id == 0:
            ino = handle.node.ino
            directory = self._inodes[ino]
            self._atimes.read(directory)
            handle.entries = [(b".", ino), (b"..", directory.parent or ino)]
            handle.entries += self._namespace.children(ino)
        entries, inodes = handle.entries, self._inodes
        for index in range(start_id, len(entries)):
            name, ino = entries[index]
            try:
                inode = inodes[ino]
            except KeyError:
                continue
            yield name, inode, index + 1

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
        attributes the kernel is to take no reference: it has them for a while, may not believe them, or it
        is "." or "..". `one_number`: the session has one number for a node and its inode."""
        handle = self._directory_handle(fh)
        directory = handle.node.ino
        valid_s = self._coherence.listing_s(directory)
        known_until = time.monotonic() + min(valid_s / 2, _USED_WITHIN_S)
        for name, inode, next_id in self._listing(handle, start_id):
            ino = inode.ino
            if next_id <= 2 or not valid_s:
                is_enough = not valid_s and start_id == 0 and next_id > _FIRST_MAX
                if is_enough or not add(name, ino, inode.mode, None, next_id):
                    return
                continue
            main = node = self._cache.routes.node_of(inode, 0)
            if one_number:
                node = self._nodes.numbered(inode)
            if node.lookups > 0 and self._coherence.knows((directory, name), node, known_until):
                if not add(name, ino, inode.mode, None, next_id):
                    return
                continue
            entry = self._metadata.describe(node, inode)
            if node is main:
                self._coherence.listed(entry, (directory, name), node, inode, valid_s)
            else:
                self._coherence.attributes(entry, node, inode)
            if not add(name, ino, entry.st_mode, entry, next_id):
                self._nodes.drop_unused(node)
                return
            node.lookups += 1
            node.be_found((directory, name))

    def listed(self, fh: int, start_id: int) -> Iterator[tuple[int, int, bytes, int]]:
        """Yield names without attributes: number of the inode, id of the name after it, name, mode."""
        for name, inode, next_id in self._listing(self._directory_handle(fh), start_id):
            yield inode.ino, next_id, name, inode.mode

    async def releasedir(self, fh: int) -> None:
        self._directory_handle(fh)
        self._nodes.drop_unused(self._nodes.close(fh).node)
        await self._cache.host.forget_nameless()

    async def sync(self) -> None:
        """Make all changes of names that were answered survive a crash."""
        if self._store.sends:
            await detach()
        await self._namespace.flush()
