"""The contents and nodes of a mount on this host: what keeps them, and how they look to stat(2)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ..backend.model.records import ContentId
from ..backend.namespace import FIRST_VIRTUAL_INO, Inode
from ..backend.store.api import Store
from .content import Content, State
from .kernel_cache import KernelCache
from .nodes import Node, NodeTable
from .sharing import Sharing
from .table import ContentTable, changed_ns, stamp_of


class Shown(NamedTuple):
    """How a file looks to stat(2): bytes, 512-byte units, nanoseconds."""

    size: int
    blocks: int
    mtime_ns: int
    ctime_ns: int


class Host:
    """A mount's contents (`table`), the choice of one for an open (`sharing`), and the kernel's nodes that
    show them (`nodes`). Drops contents that nobody holds, nodes that nothing has open, and inodes without
    a name. `isolates`: as for Sharing."""

    def __init__(self, store: Store, kernel: KernelCache, *, isolates: bool) -> None:
        self.store = store
        self.inodes = store.namespace.inodes
        self.kernel = kernel
        self.table = ContentTable(store)
        self.sharing = Sharing(self.table, isolates=isolates)
        self.nameless: list[Inode] = []
        self.nodes = NodeTable(store.namespace.tree, self._node_dropped)
        store.namespace.holders.append(self.nodes.has_nodes)

    # -- contents --------------------------------------------------------------------------------

    @contextmanager
    def held(self, content: Content) -> Iterator[None]:
        """Keep a content and its extent even if all descriptors are closed meanwhile."""
        self.table.hold(content)
        try:
            yield
        finally:
            self.let_go(content)

    def let_go(self, content: Content) -> None:
        """Undo one `hold` of a content. One that nobody holds any more is the version's again, or is
        superseded."""
        content.holds -= 1
        if content.holds:
            return
        table, inode = self.table, self.inodes[content.ino]
        self.store.unpin(content.extent)
        if content.fd >= 0:
            table.close(content)
        if content.state is State.IN_PLACE and content.own and inode.nlink:
            self._give_back(content, inode)
        state = content.state
        if state is State.LEFT and inode.nlink:
            return
        is_version = content.base.version == inode.version and content.extent == inode.extent
        if state.ended or state is State.REPLACING or not is_version:
            table.supersede(content)
        else:
            if content.mapped:
                self.store.note_mapped(content.extent)
            content.rest()

    def _give_back(self, content: Content, inode: Inode) -> None:
        """Make a content that was opened in place, and is unchanged, the version's again."""
        try:
            unchanged = content.base.version == inode.version and not self.table.is_written(content)
        except OSError:
            return  # a store node has removed its file with the session that it was begun in
        before = content.extent
        if content.mapped and unchanged:
            # Other files have the version's content, too: no program may store to it any more.
            self.drop_idle_backings(content.ino)
            unchanged = not self.store.extents.is_open_to_write(before)
        if unchanged and self.store.end_in_place(inode, before):
            self.table.give_extent(content, inode.extent, frees=False)
            self.move_backings(content.ino, before, inode.extent)

    def drop_idle_backings(self, ino: int) -> None:
        """Have the kernel close the files that it keeps for nodes of an inode that nothing has open."""
        for node in self.nodes.of(ino):
            if not node.is_bound:
                self.kernel.drop_backing(node)

    def move_backings(self, ino: int, before: ContentId, extent: ContentId) -> None:
        """Note that the very file of an extent has another number now."""
        for node in self.nodes.of(ino):
            if node.backing_id and node.backing_extent == before:
                self.kernel.move_backing(node, extent)

    # -- nodes -----------------------------------------------------------------------------------

    def idle(self, node: Node) -> None:
        """Note that nothing has the node open any more."""
        content, inode = node.content, self.inodes[node.ino]
        gone = content is None or node.backing_extent != inode.extent or not inode.nlink
        if node.backing_id and gone:
            self.kernel.drop_backing(node)
        if content is not None and self.table.current.get(node.ino) is not content:
            node.content = None
            self.kernel.invalidate_attributes(node)
        if node.lookups <= 0:
            self.nodes.drop_unused(node)

    def _node_dropped(self, node: Node) -> None:
        if node.backing_id:
            self.kernel.drop_backing(node)
        ino = node.ino
        if self.nodes.has_nodes(ino):
            return
        self.table.published.pop(ino, None)
        content = self.table.current.get(ino)
        if content is not None and not content.holds and content.state is not State.LEFT:
            del self.table.current[ino]
        inode = self.inodes.at_hand(ino)
        if inode is not None and (inode.nlink == 0 or ino >= FIRST_VIRTUAL_INO):
            self.nameless.append(inode)

    # -- inodes ----------------------------------------------------------------------------------

    def unnamed(self, inode: Inode) -> None:
        """Note that the inode has lost its last name, and nothing has it open."""
        if (content := self.table.current.get(inode.ino)) is not None:
            self.table.supersede(content)

    async def forget_nameless(self) -> None:
        """Remove the inodes whose last name and last node are gone."""
        while self.nameless:
            inode = self.nameless.pop()
            if not self.nodes.has_nodes(inode.ino):
                if inode.ino in self.table.current:
                    self.unnamed(inode)
                await self.store.forget(inode)

    # -- how they look: the attributes that are the content's, and not the inode's -----------------

    def changing(self, node: Node, inode: Inode) -> Content | None:
        """Return the content that the node stands for, if the inode does not tell how that looks."""
        content = node.content if node.opens or node.promised else None
        if content is None:
            content = self.table.current.get(inode.ino)
            if content is not None and content.base.version != inode.version:
                content = self.sharing.current(inode)
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
        status, ctime_ns = self.table.stat(content), inode.ctime_ns
        is_told = self.table.publishing.get(inode.ino) is content and inode.version != base.version
        if not is_told and (content.dirty or stamp_of(status) != (content.seen or content.begun)):
            # The inode does not tell of the write yet, nor of its time. The kernel's clock ticks: a write
            # may seem to lie before the change of a name.
            ctime_ns = max(ctime_ns + 1, changed_ns(content, status))
        return Shown(status.st_size, status.st_blocks, status.st_mtime_ns, ctime_ns)

    def version_of(self, node: Node, inode: Inode) -> int:
        """Return the version that the node stands for, or was made of."""
        content = node.content if node.opens else None
        return content.base.version if content is not None else inode.version

    def changes_unnoticed(self, node: Node) -> bool:
        """Return whether the kernel may not keep a node's attributes: stores through a mapping, and writes
        through another node, change them without its knowing."""
        bound = node.opens or node.promised
        content = node.content if bound else self.table.current.get(node.ino)
        if content is None or not content.is_changing:
            return False
        if content.mapped:
            return True
        return content.state is not State.REPLACING and self.nodes.has_siblings(node.ino)

    def has_writers(self, ino: int) -> bool:
        """Return whether somebody has the file open for writing."""
        return any(node.content and node.content.writers for node in self.nodes.of(ino))


class OnHost:
    """The base of what works on the contents and nodes of a host."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._store = host.store
        self._inodes = host.inodes
        self._kernel = host.kernel
        self._table = host.table
        self._sharing = host.sharing
        self._nodes = host.nodes
