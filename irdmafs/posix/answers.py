"""What sessions are told about a node: its attributes, and for how long the kernel may believe them."""

import stat
from typing import Final

from ..backend.namespace import ROOT_INO, Inode
from ..backend.store.api import Store
from ..coherence.beliefs import Beliefs
from ..coherence.cache import Cache
from ..coherence.nodes import Node
from ..mount.config import MountOptions
from .atimes import Atimes
from .calls import Attributes
from .privileges import SET_IDS, privileges_of

# The mask of a generation, which tells an inode in a file handle from an earlier one of its number. The
# kernel keeps 32 bits.
_GENERATION: Final = 2**31 - 1


class Answers:
    """Finds nodes by their ids, and describes them."""

    def __init__(
        self,
        store: Store,
        cache: Cache,
        options: MountOptions,
        atimes: Atimes,
        beliefs: Beliefs,
    ) -> None:
        self._store = store
        self._namespace = store.namespace
        self._inodes = store.namespace.inodes
        self._shared = store.shared
        # What is believed of a shared namespace is decided answer by answer.
        self._valid_s = 0.0 if store.shared else store.believable_s(ROOT_INO)
        self._cache = cache
        self._nodes = cache.nodes
        self._options = options
        self._umask = options.umask or 0
        self._atimes = atimes
        self._beliefs = beliefs

    def attributes(self, node: Node, inode: Inode, *, is_new: bool = False) -> Attributes:
        """`is_new`: nobody can have written it."""
        entry = Attributes()
        mode = inode.mode
        entry.ino = inode.ino
        entry.st_ino = node.id
        if mode & 0o170000 == stat.S_IFREG and not is_new:
            shown = self._cache.shown(node, inode)
            entry.st_size, entry.st_blocks, entry.st_mtime_ns, entry.st_ctime_ns = shown
        else:
            entry.st_size = inode.size
            entry.st_mtime_ns = inode.mtime_ns
            entry.st_ctime_ns = inode.ctime_ns
        options = self._options
        entry.st_mode = mode & ~self._umask
        entry.st_nlink = inode.nlink
        node.told = privileges_of(inode) if mode & SET_IDS or inode.xattrs else 0
        entry.st_uid = inode.uid if options.uid is None else options.uid
        entry.st_gid = inode.gid if options.gid is None else options.gid
        entry.st_rdev = inode.rdev
        entry.st_atime_ns = self._atimes.of(inode)
        entry.generation = inode.birth_ns & _GENERATION if inode.ino != ROOT_INO else 0
        entry.entry_timeout = entry.attr_timeout = self._valid_s
        if self._cache.changes_unnoticed(node):
            entry.attr_timeout = 0
        return entry

    def entry(
        self, parent: int, name: bytes, inode: Inode, pid: int, *, made: bool = False
    ) -> Attributes:
        """What a lookup answers; the kernel then holds one more reference to the node."""
        node = self._cache.node_of(inode, pid)
        node.lookups += 1
        entry = self.attributes(node, inode)
        if not self._cache.names_are_stable(inode.ino):
            entry.entry_timeout = 0
        elif self._shared:
            node.name = (parent, name)
            # What leads to a directory is no question about the one it lies in.
            valid_s = self._store.believable_s(parent, used=not inode.is_dir)
            if inode.is_dir and not valid_s:
                valid_s = self._store.path_valid_s(inode.ino)
            self.let_believe(entry, parent, name, inode, valid_s, made=made)
        return entry

    def let_believe(
        self,
        entry: Attributes,
        parent: int,
        name: bytes,
        inode: Inode,
        valid_s: float,
        *,
        made: bool = False,
    ) -> None:
        """Say in an answer for how long its name and attributes hold in a shared namespace; `made`:
        the kernel takes the attributes for the newest, though they may be older than others."""
        if not valid_s or not self._cache.kernel.can_forget:
            if inode.is_dir and not made:
                self.let_believe_attributes(entry, inode)
            return
        if made and not self.leads_to(parent, name, inode.ino):
            return  # others changed it again while they were waited for
        entry.entry_timeout = valid_s
        self._beliefs.name(parent, name, inode.ino, valid_s)
        if not made:
            self.let_believe_attributes(entry, inode, parent, valid_s)

    def let_believe_attributes(
        self, entry: Attributes, inode: Inode, parent: int = 0, valid_s: float = 0.0
    ) -> None:
        """`valid_s`: for how long `parent` is believable. What has names in several directories is
        believed if all of them are."""
        if self._cache.changes_unnoticed(self._nodes.by_id[entry.st_ino]):
            return
        if parent and inode.parent == parent:
            pass
        elif inode.is_dir:
            valid_s = self._store.believable_s(inode.ino, used=False)
            # Modes of directories are checked at each step of a path.
            valid_s = valid_s or self._store.directories_believable_s()
        else:
            valid_s = min(
                map(self._store.believable_s, self._namespace.parents_of(inode.ino)), default=0.0
            )
        if valid_s and self._cache.kernel.can_forget:
            entry.attr_timeout = valid_s
            self._beliefs.attributes(inode.ino, valid_s)

    def missing(self) -> Attributes:
        answer = Attributes()
        answer.entry_timeout = self._valid_s
        return answer

    def leads_to(self, directory: int, name: bytes, ino: int) -> bool:
        """Whether what was found out a while ago is still so."""
        try:
            found = self._namespace.lookup(directory, name)
        except OSError:  # the directory is gone
            return False
        return found is not None and found.ino == ino

    def refresh_other_nodes(self, node: Node | None, ino: int) -> None:
        """An inode's attributes changed through one node: the kernel may hold them for others."""
        for other in self._nodes.of(ino):
            if other is not node:
                self._cache.kernel.invalidate_attributes(other)

    def refresh_several(self, ino: int) -> None:
        """Something changed that the kernel notes by itself for one node, and cannot for others."""
        nodes = list(self._nodes.of(ino))
        for node in nodes if len(nodes) > 1 else ():
            self._cache.kernel.invalidate_attributes(node)
