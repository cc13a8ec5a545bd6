"""A mount sends to nodes that answer differently, or fail after they were busy for long."""

import errno
import os
from collections.abc import Awaitable, Callable
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
from irdmafs.backend.transport import Unreachable

AWAY, HERE = 1, 2
LIMIT_S = 0.1
CONTENT = ContentId(5)


class Group:
    """A cluster as a mount sees it, with one group. A node that gets or sends an extent does `move`. While
    the mount waits for a change, HERE becomes the only member."""

    def __init__(self, move: Callable[[int], Awaitable[None]], *members: int) -> None:
        self.move = move
        self.config = GroupConfig(1, members)
        self.peers = self.members = self.groups = self
        self.nodes, self.session, self.contents = {AWAY, HERE}, SimpleNamespace(number=1), None
        self.buckets, self.here, self.small_bytes, self.verify = 1, 0, 1000, False
        self.timeout_s = LIMIT_S

    def get(self, group: int) -> tuple[GroupConfig, int]:
        return self.config, 1

    async def changed(self) -> None:
        await trio.sleep(LIMIT_S / 2)
        self.config = GroupConfig(1, (HERE,))

    def device(self, node: int) -> Any:
        async def move(*what: object) -> None:
            await self.move(node)

        return SimpleNamespace(put=move, read=move)

    async def suspect(self, asked: int, group: int, node: int) -> bool:
        return False

    def shows_bytes(self, node: int) -> bool:
        return False


async def send(cluster: Any) -> None:
    with descriptor(os.memfd_create("content")) as fd:
        await Transfer(cluster, NewVersion(2, CONTENT, 7, 1, 0, layout=Layout(1)), fd).complete()


async def test_a_node_that_says_no_is_heard_although_another_cannot_be_reached() -> None:
    """One cannot be reached. The other one takes the content, and after that says that the writer's session
    is over."""
    taken = 0

    async def move(node: int) -> None:
        nonlocal taken
        if node == AWAY:
            raise Unreachable(AWAY, "it is away")
        # The answer comes after the other node is known to be away.
        await trio.testing.wait_all_tasks_blocked()
        if taken:
            raise OSError(errno.ECANCELED, "its writer's session is over")
        taken += 1

    with pytest.raises(OSError) as refused:
        await send(Group(move, AWAY, HERE))
    assert refused.value.errno == errno.ECANCELED


async def test_another_member_takes_over_from_one_that_was_busy_for_longer_than_the_limit() -> None:
    async def move(node: int) -> None:
        await trio.sleep(2 * LIMIT_S)
        if node == AWAY:
            raise Unreachable(AWAY, "it failed")

    await send(Group(move, AWAY))
    inode = Inode(2, 0o100644, 0, 0, 0)
    inode.layout = Layout(1)
    cluster: Any = Group(move, AWAY)
    assert await Fetcher(cluster).read(inode, CONTENT, 0, 7) == bytes(7)


async def test_a_file_is_not_lost_that_was_replaced_while_it_was_fetched_for_long() -> None:
    inode = Inode(2, 0o100644, 0, 0, 0)
    inode.nlink, inode.extent = 1, CONTENT

    async def fetch(asked: Inode, ahead: object) -> bool:
        if asked.extent != CONTENT:
            return True
        await trio.sleep(3 * LIMIT_S)
        inode.extent = ContentId(6)
        raise Gone

    cluster: Any = SimpleNamespace(
        namespace=SimpleNamespace(inode=lambda ino: copy(inode), inodes={2: inode}),
        replica=SimpleNamespace(barrier=trio.lowlevel.checkpoint),
        contents=SimpleNamespace(has=lambda content: False, uncounted=set(), on_nodes=set()),
        timeout_s=2 * LIMIT_S,
    )
    fetcher: Any = SimpleNamespace(fetch=fetch)
    lender: Any = None
    assert (await Versions(cluster, fetcher, lender).bring(2)).extent == 6
