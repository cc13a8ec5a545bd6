"""What a mount does about nodes that answer differently, or fail after they were busy for long."""

import errno
import os
from copy import copy
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from harness.closing import descriptor

from irdmafs.backend.model.records import ContentId, GroupConfig, Layout
from irdmafs.backend.namespace import Inode, NewVersion
from irdmafs.backend.store.remote.fetcher import Fetcher, Gone
from irdmafs.backend.store.remote.versions import Versions
from irdmafs.backend.store.remote.writer import Transfer
from irdmafs.backend.transport import Extent, Target, Unreachable

AWAY, HERE = 1, 2
LIMIT_S = 0.1


class Peers:
    """Two nodes. One cannot be reached. The other one takes the content, and after that says that the
    writer's session is over."""

    def __init__(self) -> None:
        self.ended = False

    def device(self, node: int) -> Any:
        return SimpleNamespace(put=self._put_to_one_away if node == AWAY else self._put)

    def shows_bytes(self, node: int) -> bool:
        return False

    async def suspect(self, asked: int, group: int, node: int) -> bool:
        return False

    async def _put_to_one_away(self, extent: Extent, target: Target, data: bytes) -> None:
        raise Unreachable(AWAY, "it is away")

    async def _put(self, extent: Extent, target: Target, data: bytes) -> None:
        # The answer comes after the other node is known to be away.
        await trio.testing.wait_all_tasks_blocked()
        if self.ended:
            raise OSError(errno.ECANCELED, "its writer's session is over")
        self.ended = True


def test_a_node_that_says_no_is_heard_although_another_cannot_be_reached() -> None:
    fd = os.memfd_create("content")
    os.pwrite(fd, b"content", 0)
    config = GroupConfig(1, (AWAY, HERE))

    async def changed() -> None:
        await trio.sleep_forever()

    cluster: Any = SimpleNamespace(
        peers=Peers(),
        groups=SimpleNamespace(get=lambda group: (config, 1), changed=changed),
        buckets=1,
        members=SimpleNamespace(nodes={AWAY, HERE}),
        here=0,
        small_bytes=1000,
        verify=False,
        timeout_s=0.0,
    )
    transfer = Transfer(cluster, NewVersion(2, ContentId(5), 7, 1, 0, layout=Layout(1)), fd)
    with pytest.raises(OSError) as refused:
        trio.run(transfer.complete)
    os.close(fd)
    assert refused.value.errno == errno.ECANCELED


class Slow:
    """A cluster in which each transfer takes longer than the mount waits, and one node then fails. Its
    group does without it soon."""

    def __init__(self) -> None:
        self.moved = trio.Event()
        self.peers = self.members = self.groups = self
        self.nodes = {AWAY, HERE}
        self.session, self.contents = SimpleNamespace(number=1), None
        self.buckets, self.here, self.small_bytes = 1, 0, 1000
        self.verify, self.timeout_s = False, LIMIT_S

    def get(self, group: int) -> tuple[GroupConfig, int]:
        return GroupConfig(1, (HERE,) if self.moved.is_set() else (AWAY,)), 1

    def device(self, node: int) -> Any:
        async def move(*what: object) -> None:
            await trio.sleep(2 * LIMIT_S)
            if node == AWAY:
                trio.lowlevel.spawn_system_task(self._move_soon)
                raise Unreachable(AWAY, "it failed")

        return SimpleNamespace(put=move, read=move)

    async def _move_soon(self) -> None:
        await trio.sleep(LIMIT_S / 2)
        self.moved.set()

    async def changed(self) -> None:
        await self.moved.wait()

    def shows_bytes(self, node: int) -> bool:
        return False


async def test_another_member_gets_what_was_sent_for_longer_than_the_limit() -> None:
    cluster: Any = Slow()
    with descriptor(os.memfd_create("content")) as fd:
        version = NewVersion(2, ContentId(5), 7, 1, 0, layout=Layout(1))
        assert await Transfer(cluster, version, fd).complete()


async def test_another_member_is_read_from_after_one_that_sent_for_longer_than_the_limit() -> None:
    inode = Inode(2, 0o100644, 0, 0, 0)
    inode.layout = Layout(1)
    cluster: Any = Slow()
    assert await Fetcher(cluster).read(inode, ContentId(5), 0, 7) == bytes(7)


async def test_a_file_is_not_lost_that_was_replaced_while_it_was_fetched_for_long() -> None:
    inode = Inode(2, 0o100644, 0, 0, 0)
    inode.nlink, inode.extent = 1, ContentId(5)

    async def fetch(asked: Inode, ahead: object) -> bool:
        if asked.extent == 6:
            return True
        await trio.sleep(3 * LIMIT_S)
        inode.extent = ContentId(6)
        raise Gone

    contents = SimpleNamespace(has=lambda content: False, uncounted=set(), on_nodes=set())
    cluster: Any = SimpleNamespace(
        namespace=SimpleNamespace(inode=lambda ino: copy(inode), inodes={2: inode}),
        replica=SimpleNamespace(barrier=trio.lowlevel.checkpoint), contents=contents,
        timeout_s=2 * LIMIT_S,
    )  # fmt: skip
    fetcher: Any = SimpleNamespace(fetch=fetch)
    lender: Any = None
    assert (await Versions(cluster, fetcher, lender).bring(2)).extent == 6
