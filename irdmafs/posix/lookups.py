"""Which node a name leads to, and which nodes the kernel has forgotten."""

import errno
from collections.abc import Sequence
from typing import Final

from ..backend.namespace import Inode, fail
from ..coherence.nodes import INO_BITS
from .calls import Attributes, Caller
from .since import Since
from .superblock import Part, Superblock

# In every directory of a cluster, though no listing has it: a view of its files for programs that open them
# as this mount knows them, and keep no references to their pages (docs/mount.md).
PRIVATE_VIEW: Final = b".irdmafs-private"


class Lookups(Part):
    """Answers lookups, by name and by file handle."""

    def __init__(self, block: Superblock, since: Since) -> None:
        super().__init__(block)
        self._since = since

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
            return self._answers.entry(parent.ino, name, inode, pid)
        valid_s = self._coherence.missing_s(parent, name, pid)
        if valid_s is None or name == PRIVATE_VIEW:
            return None
        if parent.xattrs and (link := self._since.find(parent, name)) is not None:
            return link
        return self._missing(pid, valid_s)

    def _missing(self, pid: int, valid_s: float) -> Attributes:
        """Return the answer that there is no such name. An open of the thread that was to come again did
        not."""
        if self._cache.routes.promises:
            self._cache.routes.withdraw(pid, 0)
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
                return self._answers.hidden(self._nodes.private_view(directory), directory)
            link = self._since.find(directory, name) if directory.xattrs else None
            return link or self._missing(ctx.pid, 0.0)
        return self._answers.entry(parent.ino, name, inode, ctx.pid)

    def _found_privately(self, directory: Inode, name: bytes, ctx: Caller) -> Attributes:
        inode = self._coherence.find_privately(directory.ino, name, ctx.pid, ctx.uid)
        if inode is None:
            return Attributes()
        return self._answers.hidden(self._cache.routes.node_of(inode, ctx.pid), inode)

    def _found_by_handle(self, node_id: int) -> Attributes:
        """Return the attributes of a file handle's node (name_to_handle_at(2)). The kernel may have
        forgotten it."""
        node = self._nodes.by_id.get(node_id)
        inode = self._inodes.get(node.ino if node is not None else node_id % (1 << INO_BITS))
        if inode is None:
            raise fail(errno.ESTALE)
        if node is None:
            node = self._cache.routes.node_of(inode, 0)
            if node.id != node_id:
                node = self._nodes.add(inode, node_id)
        node.lookups += 1
        answer = self._answers.attributes(node, inode)
        self._coherence.attributes(answer, node, inode)
        return answer

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        for node_id, lookups in inode_list:
            self._nodes.forget(node_id, lookups)
        await self._cache.host.forget_nameless()
