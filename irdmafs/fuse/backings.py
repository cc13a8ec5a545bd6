"""Which of our files the kernel holds, to serve reads and writes of nodes from (passthrough)."""

import os

from ..backend.cluster.records import ContentId
from ..backend.store.extents import ExtentStore
from ..coherence.nodes import Node
from ..posix.atimes import Atimes
from . import passthrough
from .connection import Connection


class Backings:
    """The files that the kernel holds for nodes, each until it is dropped. `atimes` is told of reads that
    go past us, and of their end."""

    def __init__(self, connection: Connection, extents: ExtentStore, atimes: Atimes) -> None:
        self._connection = connection
        self._extents = extents
        self._atimes = atimes
        self._by_extent: dict[int, set[Node]] = {}

    def register(self, node: Node) -> None:
        """Have reads and writes of a node pass through to its content's file. Raises OSError."""
        content = node.content
        assert content is not None
        if content.fd >= 0:
            self._pass_through(node, content.extent, content.fd)
        else:
            with self._extents.opened(content.extent) as fd:
                self._pass_through(node, content.extent, fd)

    def _pass_through(self, node: Node, extent: ContentId, fd: int) -> None:
        atime_ns = os.fstat(fd).st_atime_ns
        node.backing_id = passthrough.register(self._connection.fd, fd)
        node.backing_extent = extent
        self._by_extent.setdefault(extent, set()).add(node)
        self._atimes.passes(node, extent, atime_ns)

    def drop(self, node: Node) -> None:
        """Make the kernel let go of the file that it holds for a node."""
        if node.backing_id:
            self._atimes.gone(node)
            passthrough.unregister(self._connection.fd, node.backing_id)
            self._remove(node)
            node.backing_id = node.backing_extent = 0

    def move(self, node: Node, extent: ContentId) -> None:
        """Note that the file which the kernel holds for a node has another number now."""
        self._remove(node)
        node.backing_extent = extent
        self._by_extent.setdefault(extent, set()).add(node)
        self._atimes.moved(node, extent)

    def of(self, extent: ContentId) -> list[Node]:
        """Return the nodes for which the kernel holds the file of an extent."""
        return list(self._by_extent.get(extent, ()))

    def _remove(self, node: Node) -> None:
        nodes = self._by_extent[node.backing_extent]
        nodes.discard(node)
        if not nodes:
            del self._by_extent[node.backing_extent]
