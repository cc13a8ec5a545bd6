"""The attributes of inodes: shown, set by their owners, and taken by others' changes."""

import errno
import os
from typing import Final

from ..backend.namespace import ROOT_INO, Inode, fail
from ..callers.processes import CAP_FSETID
from ..coherence.cache import Cache
from ..coherence.nodes import Node
from ..coherence.protocol import Coherence
from ..inline import detach
from ..mount_options import MountOptions
from . import quotas
from .atimes import Atimes
from .calls import Attributes, Caller, Space, refuse_other_than_file
from .permissions import CAPABILITY, SET_IDS, mode_left, privileges_of, refuse_stranger

# The mask of a generation, which tells an inode in a file handle from an earlier one of its number. The
# kernel keeps 32 bits.
_GENERATION: Final = 2**31 - 1


class Superblock:
    """One mounted filesystem: its contents, what the kernel may believe, access times, and the attributes
    that nodes show."""

    def __init__(
        self, cache: Cache, coherence: Coherence, atimes: Atimes, options: MountOptions
    ) -> None:
        self.cache = cache
        self.coherence = coherence
        self.atimes = atimes
        self.options = options
        self.metadata = Metadata(self)


class _Operations:
    """The base of all operations: the objects that they work on."""

    def __init__(self, block: Superblock) -> None:
        self._cache = block.cache
        self._store = block.cache.host.store
        self._namespace = self._store.namespace
        self._inodes = self._namespace.inodes
        self._nodes = block.cache.nodes
        self._processes = block.cache.processes
        self._coherence = block.coherence
        self._atimes = block.atimes
        self._options = block.options


class Part(_Operations):
    """The operations about one thing, which show the attributes of nodes."""

    def __init__(self, block: Superblock) -> None:
        super().__init__(block)
        self._metadata = block.metadata


class Metadata(_Operations):
    """Shows and changes what stat(2) and statfs(2) show, and makes the kernel ask for it again."""

    def __init__(self, block: Superblock) -> None:
        super().__init__(block)
        self._unread = self._namespace.tree.known.unread

    # -- shown -----------------------------------------------------------------------------------

    def attributes(self, node_id: int) -> Attributes:
        node, found = self._nodes.get(node_id)
        answer = self.describe(node, found)
        self._coherence.attributes(answer, node, found)
        return answer

    def describe(self, node: Node, inode: Inode, *, is_new: bool = False) -> Attributes:
        """Return the attributes of a node as stat(2) shows them; the kernel may not keep them. `is_new`:
        nobody can have written it."""
        entry = Attributes()
        mode = inode.mode
        entry.ino = inode.ino
        entry.st_ino = node.id
        entry.st_size, entry.st_blocks = inode.size, inode.blocks
        entry.st_mtime_ns, entry.st_ctime_ns = inode.mtime_ns, inode.ctime_ns
        if inode.is_file and not is_new:
            host = self._cache.host
            if (content := host.changing(node, inode)) is not None:
                look = host.look_of(content, inode)
                entry.st_size, entry.st_blocks, entry.st_mtime_ns, entry.st_ctime_ns = look
        options = self._options
        entry.st_mode = mode & ~(options.umask or 0)
        entry.st_nlink = inode.nlink
        if inode.is_dir and inode.ino in self._unread:
            entry.st_nlink = 1  # as on btrfs: not known
        node.told = privileges_of(inode) if mode & SET_IDS or inode.xattrs else 0
        node.shown = True
        entry.st_uid = inode.uid if options.uid is None else options.uid
        entry.st_gid = inode.gid if options.gid is None else options.gid
        entry.st_rdev = inode.rdev
        entry.st_atime_ns = inode.atime_ns if is_new else self._atimes.of(inode)
        entry.generation = inode.birth_ns & _GENERATION if inode.ino != ROOT_INO else 0
        return entry

    def entry(
        self, parent: int, name: bytes, inode: Inode, pid: int, *, is_made: bool = False
    ) -> Attributes:
        """Return the answer to a lookup of a name, or (`is_made`) to a request that made it. The kernel
        then holds one more reference to the node."""
        node = self._cache.routes.node_of(inode, pid)
        node.lookups += 1
        node.be_found((parent, name))
        answer = self.describe(node, inode)
        if is_made:
            self._coherence.made(answer, parent, name, node, inode, pid)
        else:
            self._coherence.entry(answer, parent, name, node, inode)
        return answer

    def hidden(self, node: Node, inode: Inode) -> Attributes:
        """Return the answer to a lookup of a name that the kernel may not keep."""
        node.lookups += 1
        answer = self.describe(node, inode)
        if inode.is_dir:
            self._coherence.attributes(answer, node, inode)
        return answer

    async def statfs(self, node_id: int = ROOT_INO) -> Space:
        """Return the space of the filesystem, or what quotas leave of it at the node."""
        data = Space(*self._store.statvfs()[:8])
        node = self._nodes.by_id.get(node_id)
        if self._namespace.quotas.in_use and node is not None:
            for usage in self._namespace.quotas.around(node.ino):
                quotas.limit(data, usage)
        return data

    def refresh_other_nodes(self, node: Node | None, ino: int) -> None:
        """Have the kernel ask for an inode's attributes that changed through one of its nodes."""
        for other in self._nodes.of(ino):
            if other is not node:
                self._cache.kernel.invalidate_attributes(other)

    def refresh_several(self, ino: int) -> None:
        """Make the kernel ask for attributes that it changed by itself for only one of several nodes."""
        if self._nodes.has_siblings(ino):
            self.refresh_other_nodes(None, ino)

    # -- changed ---------------------------------------------------------------------------------

    async def change(
        self,
        node_id: int,
        changes: dict[str, int],
        ctx: Caller,
        *,
        size: int | None = None,
        fh: int | None = None,
        lose_set_ids: bool = False,
    ) -> Attributes:
        """Set attributes: `changes` by the names of Namespace.set_attributes, and the size, through the
        handle `fh` if given. `lose_set_ids`: the caller is about to change the content, or does so by this
        truncation, and may not keep set-user-id and set-group-id."""
        node, found = self._nodes.get(node_id)
        if size is not None:
            await self._truncate(found, size, fh)
            self.refresh_other_nodes(node, node.ino)  # one may show the cut content
            found = self._nodes.inode_of(node_id)
        if lose_set_ids or "uid" in changes or "gid" in changes:
            left = await mode_left(found, ctx, self._processes)
            changes.setdefault("mode", left)
            if lose_set_ids and size is None and not self._cache.host.has_writers(found.ino):
                await refuse_stranger(found, left, ctx, self._processes)
        if "mtime_ns" in changes:
            await self._cache.carried.set_mtime(node, changes["mtime_ns"])
        if not changes and size is None:
            changes["mode"] = found.mode  # chown(2) to nobody: the time of change moves
        if changes:
            changes.setdefault("atime_ns", self._atimes.of(found))
            await self._namespace.set_attributes(node.ino, **changes)
            self._atimes.saved(self._inodes[node.ino])
            self.refresh_other_nodes(node, node.ino)
        answer = self.describe(node, self._inodes[node.ino])
        self._coherence.changed(answer, node)
        return answer

    async def _truncate(self, inode: Inode, size: int, fh: int | None) -> None:
        refuse_other_than_file(inode)
        if size > self._store.size_max:
            raise fail(errno.EFBIG)
        handle = self._nodes.handles.get(fh) if fh is not None else None
        if handle is not None and handle.writing:
            await self._cache.carried.change(handle, lambda fd: os.ftruncate(fd, size))
        else:
            self._namespace.check_writable(inode.ino)
            inode = await self._coherence.bring(inode, content=size > 0, cuts=True)
            await self._cache.drafts.store(inode.ino)
            await self._cache.carried.truncate(self._inodes[inode.ino], size)

    async def lose_privileges(self, ino: int, ctx: Caller, *, set_ids: bool | None = None) -> None:
        """Take the privileges of a file whose content is about to change (see permissions), with or without
        `set_ids`; None if the session does not say whether the caller may keep these."""
        found = self._inodes[ino]
        if not found.xattrs and not found.mode & SET_IDS:
            return
        await detach()
        if CAPABILITY in found.xattrs:
            await self._namespace.remove_xattr(ino, CAPABILITY)
        if found.mode & SET_IDS:
            if set_ids is None:
                set_ids = not (await self._processes.credentials(ctx.pid)).has(CAP_FSETID)
            mode = await mode_left(found, ctx, self._processes) if set_ids else found.mode
            if mode != found.mode:
                await self._namespace.set_attributes(ino, mode=mode)
                self.refresh_other_nodes(None, ino)
