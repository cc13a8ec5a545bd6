"""What a writer does about nodes of a group that answer differently."""

import errno
import os
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from irdmafs.backend.model.records import ContentId, GroupConfig, Layout
from irdmafs.backend.namespace import NewVersion
from irdmafs.backend.store.remote.writer import Transfer
from irdmafs.backend.transport import Extent, Target, Unreachable

AWAY, HERE = 1, 2


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
