"""How files look to stat(2) on this host: size, blocks and times of the content that a node stands for."""

from typing import NamedTuple

from ..backend.namespace import Inode
from .content import Content, State
from .host import OnHost
from .nodes import Node
from .table import changed_ns, stamp_of


class Shown(NamedTuple):
    """How a file looks to stat(2): bytes, 512-byte units, nanoseconds."""

    size: int
    blocks: int
    mtime_ns: int
    ctime_ns: int


class Looks(OnHost):
    """Tells the attributes that are the content's, and not the inode's."""

    def changing(self, node: Node, inode: Inode) -> Content | None:
        """Return the content that the node stands for, if the inode does not tell how that looks."""
        content = node.content if node.opens or node.promised else None
        if content is None:
            content = self._table.current.get(inode.ino)
            if content is not None and content.base.version != inode.version:
                content = self._sharing.current(inode)
        if content is None or not (
            content.is_changing or content.state.ended or content.base.version < inode.version
        ):
            return None
        return content

    def look_of(self, content: Content, inode: Inode) -> Shown:
        """Return how one of the file's contents looks."""
        is_untouched = content.state is State.REPLACING and not content.dirty
        if is_untouched and content.begun and not content.opens:
            return Shown(0, 0, content.begun[1], inode.ctime_ns)  # nobody has had it open
        base = content.base
        if not (content.extent and (content.writers or content.state.writable)):
            return Shown(base.size, base.blocks, base.mtime_ns, inode.ctime_ns)
        status, ctime_ns = self._table.stat(content), inode.ctime_ns
        is_told = self._table.publishing.get(inode.ino) is content and inode.version != base.version
        if not is_told and (content.dirty or stamp_of(status) != (content.seen or content.begun)):
            # The inode does not tell of the write yet, nor of its time. The kernel's clock ticks: a write
            # may seem to lie before the change of a name.
            ctime_ns = max(ctime_ns + 1, changed_ns(content, status))
        return Shown(status.st_size, status.st_blocks, status.st_mtime_ns, ctime_ns)

    def version(self, node: Node, inode: Inode) -> int:
        """Return the version that the node stands for, or was made of."""
        content = node.content if node.opens else None
        return content.base.version if content is not None else inode.version

    def changes_unnoticed(self, node: Node) -> bool:
        """Return whether the kernel may not keep a node's attributes: stores through a mapping, and writes
        through another node, change them without its knowing."""
        bound = node.opens or node.promised
        content = node.content if bound else self._table.current.get(node.ino)
        if content is None or not content.is_changing:
            return False
        if content.mapped:
            return True
        return content.state is not State.REPLACING and self._nodes.has_siblings(node.ino)

    def is_written(self, ino: int) -> bool:
        """Return whether somebody has the file open for writing."""
        return any(node.content and node.content.writers for node in self._nodes.of(ino))
