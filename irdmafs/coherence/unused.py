"""Dropping contents that nobody holds any more, nodes that nothing has open, and inodes without a name."""

from collections.abc import Iterator
from contextlib import contextmanager

from ..backend.cluster.records import ContentId
from ..backend.namespace import FIRST_VIRTUAL_INO, Inode
from ..backend.store.api import Store
from .changes import Changes
from .content import Content, ContentTable
from .kernel_cache import KernelCache
from .nodes import Node, NodeEvents, NodeTable


class Unused(NodeEvents):
    """Drops contents and nodes. It makes the table of nodes, which tells it of each node that the kernel
    has forgotten."""

    def __init__(
        self, store: Store, kernel: KernelCache, table: ContentTable, changes: Changes
    ) -> None:
        self._store = store
        self._kernel = kernel
        self._table = table
        self._changes = changes
        self._inodes = store.namespace.inodes
        self.nameless: list[Inode] = []
        self.nodes = NodeTable(store.namespace.inode, self)
        store.namespace.holders.append(self.nodes.has_nodes)

    # -- contents --------------------------------------------------------------------------------

    @contextmanager
    def held(self, content: Content) -> Iterator[None]:
        """Keep a content and its extent even if all descriptors are closed meanwhile."""
        self._table.hold(content)
        try:
            yield
        finally:
            self.let_go(content)

    def let_go(self, content: Content) -> None:
        """Undo one `hold` of a content."""
        if self._table.let_go(content):
            inode = self._inodes[content.ino]
            if not inode.nlink:
                content.kept = False
            elif content.own and content.seen is not None and not content.superseded:
                self._give_back(content, inode)
            self._table.rest(content, inode)

    def _give_back(self, content: Content, inode: Inode) -> None:
        """Make a content that was opened in place, and is unchanged, the version's again."""
        try:
            unchanged = content.version == inode.version and not self._changes.is_written(content)
        except OSError:
            return  # a store node has removed its file with the session that it was begun in
        if unchanged:
            before = content.extent
            if self._store.end_in_place(inode, before):
                content.own = False
                self._table.give_extent(content, inode.extent, own=False)
                self.move_backings(content.ino, before, inode.extent)

    def move_backings(self, ino: int, before: int, extent: ContentId) -> None:
        """Note that the very file of an extent has another number now."""
        for node in self.nodes.of(ino):
            if node.backing_id and node.backing_extent == before:
                self._kernel.move_backing(node, extent)

    # -- nodes -----------------------------------------------------------------------------------

    def idle(self, node: Node) -> None:
        """Note that nothing has the node open any more."""
        content, inode = node.content, self._inodes[node.ino]
        gone = content is None or node.backing_extent != inode.extent or not inode.nlink
        if node.backing_id and gone:
            self._kernel.drop_backing(node)
        if content is not None and self._table.current.get(node.ino) is not content:
            node.content = None
            self._kernel.invalidate_attributes(node)
        self.nodes.drop_unused(node)

    def node_dropped(self, node: Node) -> None:
        self._kernel.drop_backing(node)
        ino = node.ino
        if self.nodes.has_nodes(ino):
            return
        self._table.published.pop(ino, None)
        content = self._table.current.get(ino)
        if content is not None and not (content.holds or content.kept):
            del self._table.current[ino]
        inode = self._inodes.get(ino)
        if inode is not None and (inode.nlink == 0 or ino >= FIRST_VIRTUAL_INO):
            self.nameless.append(inode)

    # -- inodes ----------------------------------------------------------------------------------

    def unnamed(self, inode: Inode) -> None:
        """Note that the inode has lost its last name, and nothing has it open."""
        content = self._table.current.get(inode.ino)
        if content is not None:
            self._table.supersede(content)

    async def forget_nameless(self) -> None:
        """Remove the inodes whose last name and last node are gone."""
        while self.nameless:
            inode = self.nameless.pop()
            if not self.nodes.has_nodes(inode.ino):
                self.unnamed(inode)
                await self._store.forget(inode)
