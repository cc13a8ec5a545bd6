"""Contents that were sent to store nodes, at least in part, and will not become any file's version.

Nodes keep what this session sent as long as the session lives, since it may be published at any moment. So
a mount tells them which contents it gave up, and tells a node that cannot be reached later. A content whose
publish failed without a definite answer is given up when it is certain that it was not published, and
cannot be any more.
"""

import logging
from collections.abc import Iterable
from typing import NamedTuple

import trio

from ...model.records import ContentId, session_of
from .cluster import Cluster

log = logging.getLogger(__name__)

RETRY_S = 5.0
# Beyond this number the oldest are left to the end of the session.
CONTENTS_MAX = 10_000


class _GivenUp(NamedTuple):
    nodes: set[int]  # that may have the content
    is_certain: bool


class Abandoned:
    """The abandoned contents of a mount's session."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._contents: dict[ContentId, _GivenUp] = {}  # the oldest first
        self._news = trio.Event()

    def __len__(self) -> int:
        return len(self._contents)

    def give_up(self, content: ContentId, nodes: Iterable[int], *, is_certain: bool) -> None:
        """Give a content up. With `is_certain`, nobody has asked etcd to name it."""
        self._contents[content] = _GivenUp(set(nodes), is_certain)
        if len(self._contents) > CONTENTS_MAX:
            del self._contents[next(iter(self._contents))]
        self._news.set()

    async def run(self) -> None:
        while True:
            await self._news.wait()
            self._news = trio.Event()
            while self._contents:
                try:
                    await self._make_certain()
                except OSError as error:
                    log.info("contents whose naming failed stay on their nodes for now: %s", error)
                await self._tell()
                if self._contents:
                    with trio.move_on_after(RETRY_S):
                        await self._news.wait()
                    self._news = trio.Event()

    async def _make_certain(self) -> None:
        """Find out which contents of uncertain outcome are no file's. Raises OSError."""
        doubtful = {content for content, one in self._contents.items() if not one.is_certain}
        if not doubtful:
            return
        await self._cluster.engine.settle()
        await self._cluster.replica.barrier()
        for inode in self._cluster.tree.inodes.values():
            if inode.extent in doubtful:
                del self._contents[inode.extent]
        for content in doubtful & self._contents.keys():
            self._contents[content] = self._contents[content]._replace(is_certain=True)

    async def _tell(self) -> None:
        told: dict[int, list[ContentId]] = {}  # by node
        for content, (nodes, is_certain) in list(self._contents.items()):
            nodes -= {node for node in nodes if self._cluster.members.is_removed(node)}
            if not nodes or session_of(content) != self._cluster.session.number:
                del self._contents[content]
            elif is_certain:
                for node in nodes & self._cluster.members.nodes.keys():
                    told.setdefault(node, []).append(content)
        async with trio.open_nursery() as nursery:
            for node, contents in told.items():
                nursery.start_soon(self._tell_node, node, contents)
        for content in [content for content, one in self._contents.items() if not one.nodes]:
            del self._contents[content]

    async def _tell_node(self, node: int, contents: list[ContentId]) -> None:
        for content in contents:
            try:
                await self._cluster.peers.device(node).abort(content)
            except OSError as error:
                log.info("content %x stays on node %x for now: %s", content, node, error)
                return
            if (one := self._contents.get(content)) is not None:
                one.nodes.discard(node)
