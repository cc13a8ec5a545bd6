"""Contents that were sent to store nodes, at least in part, and will not become any file's version.

Nodes keep what this session sent as long as the session lives, since it may be published at any moment. So
a mount tells them which contents it gave up, and tells a node that cannot be reached later. A content whose
publish failed without a definite answer is given up when it is certain that it was not published, and
cannot be any more.
"""

import logging
from collections.abc import Iterable

import trio

from ...model.records import ContentId, session_of
from .cluster import Cluster

log = logging.getLogger(__name__)

RETRY_S = 5.0
# Beyond this number contents are left to the end of the session.
CONTENTS_MAX = 10_000
_AT_ONCE = 8


class Abandoned:
    """The abandoned contents of a mount's session."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._count = 0
        self._limit = trio.CapacityLimiter(_AT_ONCE)

    def give_up(
        self, ino: int, content: ContentId, nodes: Iterable[int], *, is_certain: bool
    ) -> None:
        """Give up a content that was to be this inode's, and that these nodes may have. With `is_certain`,
        nobody has asked etcd to name it."""
        if self._count < CONTENTS_MAX:
            self._count += 1
            doubted = 0 if is_certain else ino
            self._cluster.nursery.start_soon(self._give_up, doubted, content, set(nodes))

    async def _give_up(self, doubted: int, content: ContentId, nodes: set[int]) -> None:
        """Tell the nodes, when it is known that inode `doubted` (0: none) has not got the content."""
        cluster = self._cluster
        while nodes and session_of(content) == cluster.session.number:
            async with self._limit:
                try:
                    if doubted:
                        await cluster.engine.settle()
                        await cluster.replica.barrier()
                        inode = cluster.tree.inodes.get(doubted)
                        if inode is not None and inode.extent == content:
                            break
                        doubted = 0
                    for node in nodes & cluster.members.nodes.keys():
                        if await self._told(node, content):
                            nodes.remove(node)
                except OSError as error:
                    log.info("content %x stays on its nodes for now: %s", content, error)
            nodes -= {node for node in nodes if cluster.members.is_removed(node)}
            if nodes:
                await trio.sleep(RETRY_S)
        self._count -= 1

    async def _told(self, node: int, content: ContentId) -> bool:
        try:
            await self._cluster.peers.device(node).abort(content)
        except OSError as error:
            log.info("content %x stays on node %x for now: %s", content, node, error)
            return False
        return True
