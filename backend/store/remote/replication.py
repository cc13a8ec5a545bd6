"""Publishing: store nodes get the bytes of a working copy, then etcd names it as a file's next version.

Nodes keep what this session sent as long as the session lives, since it may be published at any moment. So
a mount tells them which contents it gave up, and tells a node that cannot be reached later. A content whose
publish failed without a definite answer is given up when it is certain that it was not published, and
cannot be any more.
"""

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import trio

from ...files.sparse import allocated_bytes
from ...kv import Compare, Conflict
from ...model.placement import group_of
from ...model.records import NO_CONTENT, SIZE_MAX, ContentId, session_of
from ...namespace import Inode, NewVersion, Outdated, fail
from ..api import make_aside
from .cluster import Cluster
from .figures import PublishFigures
from .layouts import Layouts, Space
from .writer import Transfer

log = logging.getLogger(__name__)

# Contents of which it is not known whether they became versions.
_UNSURE_MAX = 1000
# A node that could not be told is told again after so long. Contents beyond the limit are left to the end
# of the session.
_RETRY_S = 5.0
_GIVEN_UP_MAX = 10_000
_GIVEN_UP_AT_ONCE = 8


class Publisher:
    """Publishes the working copies of one mount."""

    def __init__(self, cluster: Cluster, layouts: Layouts, space: Space) -> None:
        self._namespace = cluster.namespace
        self._session = cluster.session
        self._cluster = cluster
        self._contents = cluster.contents
        self._layouts = layouts
        self._space = space
        # Contents that are being given up, and the limit of those about which somebody is asked.
        self._given_up = 0
        self._asking = trio.CapacityLimiter(_GIVEN_UP_AT_ONCE)
        self._unsure: dict[ContentId, None] = {}  # the oldest first
        self.figures = PublishFigures()

    def allocate(self, inode: Inode) -> tuple[ContentId, int]:
        """Return the number of an empty working copy for a file, and a descriptor that the caller closes.
        Raises OSError (ENOSPC, EMFILE)."""
        self._contents.make_room(0)
        cluster, store = self._cluster, self._cluster.store_here
        group = group_of(self._layouts.of(inode), 0, cluster.buckets) if store else 0
        if store and cluster.has_member_here(group):
            # A working copy that grows beyond a stripe is sent after all.
            return self._contents.allocate_in(store)
        return self._contents.allocate()

    async def publish(self, version: NewVersion) -> Inode:
        """Make a content the file's next version (see Store.publish)."""
        ino, size = version.ino, version.size
        if size > SIZE_MAX:
            raise fail(errno.EFBIG)
        before = self._namespace.inode(ino)
        if version.name is not None and not before.layout.seed:
            layout = self._layouts.of_name(*version.name)
        else:
            layout = self._layouts.of(before)
        if version.base is not None and before.version and self._cluster.verify:
            layout = self._layouts.of_change(before, size)
        extent = version.extent if size else NO_CONTENT
        version = version._replace(layout=layout.for_size(size), extent=extent)
        begun_in, begun_as = self._session.number, extent
        transfer: Transfer | None = None
        with ExitStack() as ending:
            fd = await self._opened(version, ending) if size else -1
            while True:
                session = await self._session.wait_valid(self._cluster.timeout_s)
                if session != begun_in:
                    self._cluster.locks.check(version.pid)
                if size and (transfer is None or session_of(version.extent) != session):
                    version = self._numbered(version, session, begun_as, ending)
                    is_adoptable = self._contents.hands_over(version.extent)
                    transfer = Transfer(self._cluster, version, fd, is_adoptable, before)
                try:
                    with self._contents.publishing(version.extent):
                        return await self._commit(version, transfer, before)
                except Conflict as conflict:
                    log.info("inode %d, content %x: %s; again", ino, version.extent, conflict)
                except OSError as error:
                    if transfer is None or error.errno != errno.ECANCELED:
                        raise
                    # The node takes this session for ended, or was told that this content was given up.
                    log.info("content %x: %s; again under another number", version.extent, error)
                    transfer = None
                await self._cluster.replica.barrier()

    async def _opened(self, version: NewVersion, ending: ExitStack) -> int:
        """Return a descriptor of the file of a version for which there is room, until `ending` ends."""
        if self._namespace.quotas.in_use:
            await self._namespace.check_room(version.ino, version.blocks)
        assert version.layout is not None
        await self._layouts.ensure_groups(version.layout)
        # A store node here may adopt it, and free it again, while its file is still needed here.
        ending.enter_context(self._contents.pinned(version.extent))
        fd = self._contents.open(version.extent)
        ending.callback(os.close, fd)
        return fd

    def _numbered(
        self, version: NewVersion, session: int, begun_as: ContentId, ending: ExitStack
    ) -> NewVersion:
        """Return a version under the number to send it by, another one if need be, which ends with
        `ending`: nodes may drop what an old session sent; and a number stands for the same bytes for ever,
        while the file may be written in place."""
        extent = version.extent
        if session_of(extent) != session or extent in self._contents.sent:
            if extent != begun_as:
                self._contents.retire(extent)
            extent = self._contents.renumber(extent)
            ending.enter_context(self._renumbered(extent))
        self._contents.sent.add(extent)
        return version._replace(extent=extent)

    def may_have_published(self, extent: ContentId) -> bool:
        """Return whether publishing a content failed here, although it may have become a version."""
        return extent in self._unsure

    @contextmanager
    def _renumbered(self, extent: ContentId) -> Iterator[None]:
        """Keep another number of a working copy until its publish has ended, and longer if a version names
        it."""
        with self._contents.pinned(extent):
            try:
                yield
            except BaseException:
                self._contents.retire(extent)
                raise

    async def _commit(self, version: NewVersion, transfer: Transfer | None, before: Inode) -> Inode:
        """Name the content as the file's version in etcd. Raises Conflict if the session or a group's
        configuration has changed, Outdated if the file's version is not the one it is based on."""
        content = version.extent
        guards: list[Compare] = [self._session.compare()]
        if transfer is not None:
            try:
                guards += await transfer.complete()
            except BaseException:
                self._give_up(version, transfer, is_certain=True)
                raise
            version = version._replace(digests=transfer.digests)
        # Once the transaction has begun, only etcd knows how it ends.
        try:
            with trio.CancelScope(shield=True):
                inode = await self._namespace.publish(version, guards)
        except OSError as error:
            if transfer is not None:
                certain = isinstance(error, Outdated) or error.errno == errno.EDQUOT
                self._give_up(version, transfer, is_certain=certain)
                if not certain:
                    self._unsure[content] = None
                    if len(self._unsure) > _UNSURE_MAX:
                        del self._unsure[next(iter(self._unsure))]
            raise
        self.figures.publishes += 1
        freed = allocated_bytes(before.size, before.blocks)
        self._space.published(allocated_bytes(version.size, version.blocks) - freed)
        if transfer is not None:
            self._published(version, transfer, inode)
        return inode

    def _published(self, version: NewVersion, transfer: Transfer, inode: Inode) -> None:
        """Note that a content that was sent is a version now, as the returned `inode` has it."""
        content = version.extent
        self.figures.published_bytes += transfer.sent_bytes
        self._contents.published(content, version.blocks * 512, stripes=transfer.stripes)
        self._contents.named(content)
        current = self._namespace.inodes.get(version.ino)
        if current is None or current.extent != content:
            self._contents.retire(content)  # another publish was faster
        if not inode.nlink:
            self._give_up(version, transfer, is_certain=True)

    async def save_aside(self, version: NewVersion) -> str:
        """Publish a version as a new file beside the one that it was made for, and return that one's name.
        Raises OSError."""
        made, name = await make_aside(
            self._namespace, version.ino, self._cluster.host, self._layouts.of_name
        )
        published = await self.publish(
            version._replace(ino=made.ino, base=None, ctime_ns=None, name=None)
        )
        if published.extent != version.extent:
            self._contents.retire(version.extent)
        return name

    # -- giving up -------------------------------------------------------------------------------

    def _give_up(self, version: NewVersion, transfer: Transfer, *, is_certain: bool) -> None:
        """Give up a content that nodes may have. With `is_certain`, nobody has asked etcd to name it, or it
        is named no more."""
        if self._given_up < _GIVEN_UP_MAX:
            self._given_up += 1
            doubted = 0 if is_certain else version.ino
            self._cluster.nursery.start_soon(
                self._free_on, set(transfer.asked), version.extent, doubted
            )

    async def _free_on(self, nodes: set[int], content: ContentId, doubted: int) -> None:
        """Have nodes free a content, when it is known that inode `doubted` (0: none) has not got it."""
        cluster = self._cluster
        while nodes and session_of(content) == cluster.session.number:
            async with self._asking:
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
                await trio.sleep(_RETRY_S)
        self._given_up -= 1

    async def _told(self, node: int, content: ContentId) -> bool:
        try:
            await self._cluster.peers.device(node).abort(content)
        except OSError as error:
            log.info("content %x stays on node %x for now: %s", content, node, error)
            return False
        return True
