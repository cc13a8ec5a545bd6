"""Publishing: store nodes get the bytes of a working copy, then etcd names it as a file's next version.

Nodes keep what this session sent as long as the session lives, since it may be published at any moment. So
a mount tells them which contents it gave up, and tells a node that cannot be reached later. A content whose
publish failed without a definite answer is given up when it is certain that it was not published, and
cannot be any more.
"""

import errno
import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count

import trio

from ...files.sparse import allocated_bytes
from ...kv import Compare, Conflict, Unchanged
from ...model.placement import group_of
from ...model.records import NO_CONTENT, SIZE_MAX, ContentId, session_of
from ...namespace import Inode, Joint, NewVersion, Outdated, fail
from ...observe.logs import log_failure
from ...transport.messages import PUTS_MAX
from ...unwrap import first_alone, for_each
from .cluster import Cluster
from .figures import PublishFigures
from .layouts import Layouts, Space
from .writer import Transfer, put_together

log = logging.getLogger(__name__)

# Contents of which it is not known whether they became versions.
_UNSURE_MAX = 1000
# A node that could not be told is told again after so long. Contents beyond the limit are left to the end
# of the session.
_RETRY_S = 5.0
_GIVEN_UP_MAX = 10_000
_GIVEN_UP_AT_ONCE = 8
# So many contents that do not fit into messages are sent at a time when several are published together,
# which is tried so often.
_TOGETHER_AT_ONCE = 4
_TOGETHER_TRIES = 3
# So many are sent ahead at a time.
_AHEAD_AT_ONCE = 4

# A version with its layout and number, how it is sent unless it is empty, and the inode before.
_Begun = tuple[NewVersion, Transfer | None, Inode]


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
        self._ahead: dict[ContentId, tuple[NewVersion, Transfer]] = {}
        self._ahead_limit = trio.CapacityLimiter(_AHEAD_AT_ONCE)
        cluster.changes.gone_listeners.append(self._drop_ahead)
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
        before = self._namespace.inode(version.ino)
        version = self._placed(version, before)
        begun_in, begun_as = self._session.number, version.extent
        transfer: Transfer | None = None
        refused_in = 0
        with ExitStack() as ending:
            fd = await self._opened(version, ending) if version.size else -1
            while True:
                session = await self._session.wait_valid(self._cluster.timeout_s)
                if session != begun_in:
                    self._cluster.locks.check(version.pid)
                if version.size and (transfer is None or session_of(version.extent) != session):
                    version = self._numbered(version, session, begun_as, ending)
                    is_adoptable = self._contents.hands_over(version.extent)
                    transfer = Transfer(self._cluster, version, fd, is_adoptable, before)
                guards: list[Compare] = [self._session.compare()]
                is_asked = False
                try:
                    if transfer is not None:
                        self._contents.publishing.add(version.extent)
                        guards += await transfer.complete()
                        version = version._replace(digests=transfer.digests)
                    # Once the transaction has begun, only etcd knows how it ends.
                    is_asked = True
                    with trio.CancelScope(shield=True):
                        inode = await self._namespace.publish(version, guards)
                except Conflict as conflict:
                    # The session, or the configuration of a group, has changed.
                    if transfer is not None:
                        self._contents.not_published(version.extent)
                    log.info(
                        "inode %d, content %x: %s; again", version.ino, version.extent, conflict
                    )
                except BaseException as error:
                    if transfer is None:
                        raise
                    self._failed(version, transfer, error, is_asked=is_asked)
                    is_refused = isinstance(error, OSError) and error.errno == errno.ECANCELED
                    if not is_refused or refused_in == session:
                        raise
                    # The node takes this session for ended, or was told that this content was given up.
                    refused_in = session
                    log.info("content %x: %s; again under another number", version.extent, error)
                    transfer = None
                else:
                    self._published(version, transfer, before, inode)
                    return inode
                await self._cluster.replica.barrier()

    def send_ahead(self, version: NewVersion, after_s: float) -> None:
        if version.size > self._cluster.small_bytes:
            self._cluster.nursery.start_soon(self._send_ahead, version, after_s)

    async def _send_ahead(self, version: NewVersion, after_s: float) -> None:
        extent, contents = version.extent, self._contents
        await trio.sleep(after_s)
        with log_failure(log.debug, "content %x was not sent ahead", extent), ExitStack() as ending:
            async with self._ahead_limit:
                version = self._placed(version, self._namespace.inode(version.ino))
                fd = await self._opened(version, ending)
                if extent in contents.sent or session_of(extent) != self._session.number:
                    return  # it is being published, or will get another number
                contents.sent.add(extent)
                transfer = Transfer(self._cluster, version, fd, contents.hands_over(extent))
                self._ahead[extent] = version, transfer
                await transfer.send_ahead()

    def _drop_ahead(self, extent: ContentId) -> None:
        """Give up a content that was sent ahead and has other bytes now, or no file."""
        if extent in self._ahead:
            self._give_up(*self._ahead.pop(extent), is_certain=True)

    async def _begin(
        self, version: NewVersion, session: int, begun: list[_Begun], ending: ExitStack
    ) -> None:
        """Begin to send a version of a new file, or go on if that was begun ahead."""
        extent, before = version.extent, self._namespace.inode(version.ino)
        placed = self._placed(version, before)
        if not version.size:
            begun.append((placed, None, before))
            return
        fd = await self._opened(placed, ending)
        if extent in self._ahead:
            sent, transfer = self._ahead[extent]
            if await transfer.go_on(fd) and session_of(extent) == session:
                del self._ahead[extent]
                begun.append((placed._replace(layout=sent.layout), transfer, before))
                return
            self._drop_ahead(extent)
        placed = self._numbered(placed, session, extent, ending)
        is_adoptable = self._contents.hands_over(placed.extent)
        begun.append((placed, Transfer(self._cluster, placed, fd, is_adoptable), before))

    async def publish_together(
        self, versions: Sequence[NewVersion], joint: Joint | None = None
    ) -> list[Inode]:
        """Make contents the next versions of files that no other mount sees yet, in one transaction (see
        Store.publish_together)."""
        session = await self._session.wait_valid(self._cluster.timeout_s)
        # Nodes keep what they are sent as long as this session lives, whichever is the mount's by then.
        lives = self._session.compare()
        begun: list[_Begun] = []
        is_asked = False
        with ExitStack() as ending:
            try:
                for version in versions:
                    await self._begin(version, session, begun, ending)
                self._contents.publishing.update(one.extent for one, each, _ in begun if each)
                transfers = [each for _, each, _ in begun if each is not None]
                for first in range(0, len(transfers), PUTS_MAX):
                    await put_together(self._cluster, transfers[first : first + PUTS_MAX])
                others = [transfer for transfer in transfers if not transfer.fits_message]
                for attempt in count(1):
                    known = self._cluster.replica.applied
                    with first_alone():
                        await for_each(others, Transfer.complete, at_once=_TOGETHER_AT_ONCE)
                    groups = [guard[0] for each in transfers for guard in await each.complete()]
                    sent = [
                        placed if each is None else placed._replace(digests=each.digests)
                        for placed, each, _ in begun
                    ]
                    guards: list[Compare] = [lives]
                    if groups:
                        guards.append(Unchanged(min(groups), max(groups) + b"\0", known))
                    is_asked = True
                    try:
                        with trio.CancelScope(shield=True):
                            inodes = await self._namespace.publish_together(sent, guards, joint)
                        break
                    except Conflict:
                        is_asked = False
                        if attempt == _TOGETHER_TRIES or self._session.number != session:
                            raise
                        # A group has changed, maybe of other contents.
                        await self._cluster.replica.barrier()
            except BaseException as error:
                for placed, transfer, _ in begun:
                    if transfer is not None:
                        self._failed(placed, transfer, error, is_asked=is_asked)
                raise
            for (placed, transfer, before), inode in zip(begun, inodes, strict=True):
                self._published(placed, transfer, before, inode)
        return inodes

    def _placed(self, version: NewVersion, before: Inode) -> NewVersion:
        """Return a version with the layout of its content. Raises OSError EFBIG."""
        size = version.size
        if size > SIZE_MAX:
            raise fail(errno.EFBIG)
        if version.base is not None and before.version and self._cluster.verify:
            layout = self._layouts.of_change(before, size)
        elif version.name is not None and not before.layout.seed:
            layout = self._layouts.of_name(*version.name)
        else:
            layout = self._layouts.of(before)
        extent = version.extent if size else NO_CONTENT
        return version._replace(layout=layout.for_size(size), extent=extent)

    async def _opened(self, version: NewVersion, ending: ExitStack) -> int:
        """Return a descriptor of the file of a version for which there is room, until `ending` ends."""
        if self._namespace.quotas.in_use:
            await self._namespace.check_room(version.ino, version.blocks)
        assert version.layout is not None
        await self._layouts.ensure_groups(version.layout)
        # A store node here may adopt it, and free it again, while its file is still needed here.
        self._contents.pin(version.extent)
        ending.callback(self._contents.unpin, version.extent)
        fd = self._contents.open(version.extent)
        ending.callback(os.close, fd)
        return fd

    def _numbered(
        self, version: NewVersion, session: int, begun_as: ContentId, ending: ExitStack
    ) -> NewVersion:
        """Return a version under the number to send it by, another one if need be, which ends with
        `ending`: nodes may drop what an old session sent; and a number stands for the same bytes for ever,
        while the file may be written in place."""
        contents, extent = self._contents, version.extent
        if session_of(extent) != session or extent in contents.sent:
            if extent != begun_as:
                contents.retire(extent)
            extent = contents.renumber(extent)
            contents.pin(extent)
            ending.callback(contents.unpin, extent)
            ending.push(partial(self._retire_failed, extent))
        contents.sent.add(extent)
        return version._replace(extent=extent)

    def _retire_failed(
        self, extent: ContentId, failure: type[BaseException] | None, *_: object
    ) -> None:
        """Retire another number of a working copy whose publish failed; otherwise a version names it."""
        if failure is not None:
            self._contents.retire(extent)

    def may_have_published(self, extent: ContentId) -> bool:
        """Return whether publishing a content failed here, although it may have become a version."""
        return extent in self._unsure

    def _published(
        self, version: NewVersion, transfer: Transfer | None, before: Inode, inode: Inode
    ) -> None:
        """Note that a version was published, with the content that was sent, as the returned `inode` has
        it."""
        self.figures.publishes += 1
        is_freed = before.extent and not self._namespace.tree.clones.count(before.extent)
        freed = allocated_bytes(before.size, before.blocks) if is_freed else 0
        self._space.published(allocated_bytes(version.size, version.blocks) - freed)
        if transfer is None:
            return
        content = version.extent
        self.figures.published_bytes += transfer.sent_bytes
        self._contents.published(content, version.blocks * 512, stripes=transfer.stripes)
        current = self._namespace.inodes.get(version.ino)
        if current is None or current.extent != content:
            self._contents.retire(content)  # another publish was faster
        if not inode.nlink:
            self._give_up(version, transfer, is_certain=True)

    def _failed(
        self, version: NewVersion, transfer: Transfer, error: BaseException, *, is_asked: bool
    ) -> None:
        """Note that a content of which nodes may have a part was not published; or perhaps was, if etcd
        `is_asked` to name it."""
        self._contents.not_published(version.extent)
        if not is_asked:
            self._give_up(version, transfer, is_certain=True)
        elif isinstance(error, OSError):
            certain = isinstance(error, Outdated) or error.errno == errno.EDQUOT
            self._give_up(version, transfer, is_certain=certain)
            if not certain:
                self._unsure[version.extent] = None
                if len(self._unsure) > _UNSURE_MAX:
                    del self._unsure[next(iter(self._unsure))]

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
                with log_failure(log.info, "content %x stays on its nodes for now", content):
                    if doubted:
                        await cluster.engine.fenced.settle()
                        await cluster.deferred.store()  # maybe the removal of that inode
                        await cluster.replica.barrier()
                        inode = cluster.tree.inodes.get(doubted)
                        if inode is not None and inode.extent == content:
                            break
                        if cluster.tree.clones.count(content):
                            break  # it had, and others have got it from that one
                        doubted = 0
                    for node in nodes & cluster.members.nodes.keys():
                        with log_failure(log.info, "content %x stays for now", content):
                            await cluster.peers.device(node).abort(content)
                            nodes.remove(node)
            nodes -= {node for node in nodes if cluster.members.is_removed(node)}
            if nodes:
                await trio.sleep(_RETRY_S)
        self._given_up -= 1
