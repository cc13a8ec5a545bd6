"""Which directories the kernel has under which names, in a cluster, as far as it was told.

A program changes a name with the kernel's entry for it, and another host may have changed the name since.
When a name is removed or leads to another directory, the kernel takes the directory that it had there for
removed (S_DEAD, vfs_rmdir() and vfs_rename() in fs/namei.c): nothing in it is found on this host any more,
wherever it is. So such a change is refused with ESTALE, and the kernel looks the names up again.
"""

from ..backend.namespace import Inode
from .kernel_cache import Name
from .nodes import NodeTable

_PURGE_EVERY = 1000


class KernelNames:
    """The last answers about names of directories that the kernel knows."""

    def __init__(self, nodes: NodeTable) -> None:
        self._nodes = nodes
        self._inodes: dict[Name, int] = {}
        self._names: dict[int, Name] = {}
        self._purge_at = _PURGE_EVERY

    def found(self, name: Name, inode: Inode | None) -> None:
        """Note what the kernel is told that a name leads to."""
        self._names.pop(self._inodes.pop(name, 0), None)
        if inode is None or not inode.is_dir:
            return
        self._inodes.pop(self._names.get(inode.ino, name), None)
        self._inodes[name], self._names[inode.ino] = inode.ino, name
        if len(self._inodes) > self._purge_at:
            self._purge()

    def of(self, *names: Name) -> dict[Name, int]:
        """Return the directories that the kernel may have under these names."""
        return {
            name: ino
            for name in names
            if (ino := self._inodes.get(name, 0)) and self._nodes.has_nodes(ino)
        }

    def _purge(self) -> None:
        """Forget directories that the kernel has forgotten."""
        self._names = {ino: name for ino, name in self._names.items() if self._nodes.has_nodes(ino)}
        self._inodes = {name: ino for ino, name in self._names.items()}
        self._purge_at = 2 * len(self._inodes) + _PURGE_EVERY
