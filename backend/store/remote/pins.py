"""The cache of a mount whose pins hold on store nodes, too, where a content is read from them."""

import errno
import logging
from typing import TYPE_CHECKING

from ...cluster.lease import Session
from ...kv import Delete, Put
from ...model.records import CONTENT_NUMBER_BITS, ContentId, pin_key
from ...namespace import Inode, fail
from .contents import Contents

if TYPE_CHECKING:
    from .cluster import Cluster

log = logging.getLogger(__name__)

_NUMBERS = 1 << CONTENT_NUMBER_BITS


class ContentNumbers:
    """The content numbers that a mount gives: the session that writes one, and a counter."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._last = 0
        self._last_of = 0

    def new(self) -> ContentId:
        """Return a new number. Raises OSError ENOSPC if the session has none left."""
        session = self._session.number
        if session != self._last_of:
            self._last_of, self._last = session, 0
        self._last += 1
        if self._last >= _NUMBERS:
            raise fail(errno.ENOSPC, "this session has no content numbers left; mount again")
        return ContentId(session << CONTENT_NUMBER_BITS | self._last)


class SharedContents(Contents):
    """The contents on a mount's host. One that is read from its store nodes is pinned there, too, by a key
    in etcd that ends with the session."""

    def __init__(self, cluster: "Cluster", directory: str) -> None:
        new_number = ContentNumbers(cluster.session).new
        cache_size = cluster.config.mount.cache_size
        super().__init__(directory, new_number, cluster.changes.content_gone, cache_size)
        self._cluster = cluster
        self._on_nodes: set[ContentId] = set()
        cluster.changes.content_listeners.append(self._lost_by)

    def _unpinned(self, extent: ContentId) -> None:
        super()._unpinned(extent)
        if extent in self._on_nodes:
            self.unpin_on_nodes(extent)

    def is_here(self, extent: ContentId) -> bool:
        """Return whether a content can be read without its nodes."""
        pinned = extent in self.counts and extent not in self._on_nodes
        return pinned or self.has(extent)

    def _lost_by(self, old: Inode, new: Inode | None) -> None:
        """Retire the content of a version that is superseded, or whose file is gone."""
        if new is None or new.extent != old.extent:
            self.retire(old.extent)

    async def pin_on_nodes(self, inode: Inode) -> bool:
        """Keep a file's content on its nodes while this mount reads it. Return False if it is not the
        current one any more. Raises OSError."""
        cluster, content = self._cluster, inode.extent
        lease = cluster.session.lease
        self._on_nodes.add(content)
        put = Put(pin_key(content, lease), b"", lease)
        await cluster.replica.transact([cluster.session.compare()], [put])
        current = cluster.tree.inodes.get(inode.ino)
        if current is not None and current.extent == content:
            return True
        await self._unpin_on_nodes(content)
        return False

    def unpin_on_nodes(self, content: ContentId) -> None:
        """Give a content's pin on the nodes up: it is on this host now."""
        if content in self._on_nodes:
            self._cluster.nursery.start_soon(self._unpin_on_nodes, content)

    def let_go_on_nodes(self, content: ContentId) -> None:
        """Give a content's pin on the nodes up unless the content was opened."""
        if content not in self.counts:
            self.unpin_on_nodes(content)

    async def _unpin_on_nodes(self, content: ContentId) -> None:
        self._on_nodes.discard(content)
        try:
            key = pin_key(content, self._cluster.session.lease)
            await self._cluster.engine.transact((), (Delete(key),))
        except OSError as error:
            log.info("content %x stays pinned until this session ends: %s", content, error)
