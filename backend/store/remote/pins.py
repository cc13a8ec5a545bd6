"""Pins of contents: by programs here, and for them on the store nodes that keep the content."""

import errno
import logging

from ...kv import Delete, Put
from ...model.records import ContentId, pin_key
from ...namespace import Inode, fail
from ..pins import Pinned
from .cluster import Cluster

log = logging.getLogger(__name__)


class ContentPins(Pinned):
    """The pins of one mount. A content that is read from its store nodes is pinned there, too, by a key in
    etcd that ends with the session."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self._contents = cluster.contents
        self._engine = cluster.engine
        self._session = cluster.session
        self._replica = cluster.replica
        self._inodes = cluster.namespace.inodes
        self._nursery = cluster.nursery
        self._on_nodes: set[ContentId] = set()

    def pin(self, extent: ContentId) -> None:
        """Pin a content. Raises OSError ESTALE if a store node here has freed it: the file has a newer
        version."""
        try:
            self._contents.hold(extent)
        except FileNotFoundError:
            raise fail(errno.ESTALE) from None
        super().pin(extent)

    def lend(self, extent: ContentId) -> None:
        """Note that a program may keep references to pages of a pinned content. Raises OSError ESTALE if a
        store node here has freed it, or has it in another file now; it is fetched when it is opened
        again."""
        try:
            self._contents.lend(extent)
        except FileNotFoundError:
            if self.counts.get(extent) == 1:
                self._contents.lose(extent)
            raise fail(errno.ESTALE) from None

    def unpin(self, extent: ContentId) -> None:
        super().unpin(extent)
        if extent and extent not in self.counts:
            self._contents.let_go(extent)
            self.let_go_on_nodes(extent)

    def _free(self, extent: ContentId) -> None:
        self._contents.free(extent)

    def inode_changed(self, old: Inode | None, new: Inode | None) -> None:
        """Retire the content of a version that is superseded, or whose file is gone."""
        if old is not None and old.extent and (new is None or new.extent != old.extent):
            self.retire(old.extent)

    def is_here(self, extent: ContentId) -> bool:
        """Return whether a content can be read without its nodes."""
        pinned = extent in self.counts and extent not in self._on_nodes
        return pinned or self._contents.has(extent)

    # -- on store nodes --------------------------------------------------------------------------

    async def pin_on_nodes(self, inode: Inode) -> bool:
        """Keep a file's content on its nodes while this mount reads it. Return False if it is not the
        current one any more. Raises OSError."""
        lease, content = self._session.lease, inode.extent
        self._on_nodes.add(content)
        revision = await self._engine.transact(
            (self._session.compare(),), (Put(pin_key(content, lease), b"", lease),)
        )
        await self._replica.wait_applied(revision)
        current = self._inodes.get(inode.ino)
        if current is not None and current.extent == content:
            return True
        await self._unpin_on_nodes(content)
        return False

    def unpin_on_nodes(self, content: ContentId) -> None:
        """Give a content's pin on the nodes up: it is on this host now."""
        if content in self._on_nodes:
            self._nursery.start_soon(self._unpin_on_nodes, content)

    def let_go_on_nodes(self, content: ContentId) -> None:
        """Give a content's pin on the nodes up unless the content was opened."""
        if content not in self.counts:
            self.unpin_on_nodes(content)

    async def _unpin_on_nodes(self, content: ContentId) -> None:
        self._on_nodes.discard(content)
        try:
            await self._engine.transact((), (Delete(pin_key(content, self._session.lease)),))
        except OSError as error:
            log.info("content %x stays pinned until this session ends: %s", content, error)
