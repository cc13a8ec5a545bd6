"""Descriptions of nodes, as sessions send them to the kernel."""

from typing import Final

from ..backend.namespace import ROOT_INO, Inode
from ..coherence.cache import Cache
from ..coherence.nodes import Node
from ..coherence.protocol import Coherence
from ..mount_options import MountOptions
from .atimes import Atimes
from .calls import Attributes
from .privileges import SET_IDS, privileges_of

# The mask of a generation, which tells an inode in a file handle from an earlier one of its number. The
# kernel keeps 32 bits.
_GENERATION: Final = 2**31 - 1


class Answers:
    """Describes nodes, and makes the kernel ask again for changed attributes."""

    def __init__(
        self, cache: Cache, coherence: Coherence, options: MountOptions, atimes: Atimes
    ) -> None:
        self._cache = cache
        self._coherence = coherence
        self._nodes = cache.nodes
        self._options = options
        self._umask = options.umask or 0
        self._atimes = atimes

    def attributes(self, node: Node, inode: Inode, *, is_new: bool = False) -> Attributes:
        """Return the attributes of a node as stat(2) shows them; the kernel may not keep them. `is_new`:
        nobody can have written it."""
        entry = Attributes()
        mode = inode.mode
        entry.ino = inode.ino
        entry.st_ino = node.id
        entry.st_size, entry.st_blocks = inode.size, inode.blocks
        entry.st_mtime_ns, entry.st_ctime_ns = inode.mtime_ns, inode.ctime_ns
        if inode.is_file and not is_new:
            looks = self._cache.looks
            if (content := looks.changing(node, inode)) is not None:
                look = looks.look_of(content, inode)
                entry.st_size, entry.st_blocks, entry.st_mtime_ns, entry.st_ctime_ns = look
        options = self._options
        entry.st_mode = mode & ~self._umask
        entry.st_nlink = inode.nlink
        node.told = privileges_of(inode) if mode & SET_IDS or inode.xattrs else 0
        entry.st_uid = inode.uid if options.uid is None else options.uid
        entry.st_gid = inode.gid if options.gid is None else options.gid
        entry.st_rdev = inode.rdev
        entry.st_atime_ns = self._atimes.of(inode)
        entry.generation = inode.birth_ns & _GENERATION if inode.ino != ROOT_INO else 0
        return entry

    def entry(
        self, parent: int, name: bytes, inode: Inode, pid: int, *, is_made: bool = False
    ) -> Attributes:
        """Return the answer to a lookup of a name, or (`is_made`) to a request that made it. The kernel
        then holds one more reference to the node."""
        node = self._cache.routes.node_of(inode, pid)
        node.lookups += 1
        answer = self.attributes(node, inode)
        believe = self._coherence.made if is_made else self._coherence.entry
        believe(answer, parent, name, node, inode)
        return answer

    def hidden(self, node: Node, inode: Inode) -> Attributes:
        """Return the answer to a lookup of a name that the kernel may not keep."""
        node.lookups += 1
        answer = self.attributes(node, inode)
        if inode.is_dir:
            self._coherence.attributes(answer, node, inode)
        return answer

    def refresh_other_nodes(self, node: Node | None, ino: int) -> None:
        """Have the kernel ask for an inode's attributes that changed through one of its nodes."""
        for other in self._nodes.of(ino):
            if other is not node:
                self._cache.kernel.invalidate_attributes(other)

    def refresh_several(self, ino: int) -> None:
        """Make the kernel ask for attributes that it changed by itself for only one of several nodes."""
        if self._nodes.has_siblings(ino):
            self.refresh_other_nodes(None, ino)
