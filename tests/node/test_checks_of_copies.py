"""A store node's answers about its own copies, and the handover of a group to those who have them right."""

import errno
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import pytest
import trio
import trio.testing
from test_store_node import files

from irdmafs.backend.cluster.group_configs import Groups
from irdmafs.backend.cluster.membership import Members
from irdmafs.backend.files.digest import digest_of_bytes
from irdmafs.backend.kv import KeyValue
from irdmafs.backend.model import records
from irdmafs.backend.model.groups import without
from irdmafs.backend.model.placement import group_of
from irdmafs.backend.namespace import Inode
from irdmafs.backend.node.catalog import Catalog
from irdmafs.backend.node.files import Files, Incoming
from irdmafs.backend.node.handover import Handover
from irdmafs.backend.transport import Extent

__all__ = ["files"]

CONTENT = 1000 << 24 | 1
BUCKETS = 16
OTHER = 7
LAYOUT = records.Layout(replicas=2, stripe_bytes=1)
WRONG = digest_of_bytes(b"wrong")


@contextmanager
def received(files: Files, data: bytes) -> Iterator[Incoming]:
    incoming = files.create(len(data))
    os.pwrite(incoming.fd, data, 0)
    yield incoming
    os.close(incoming.fd)


class Other:
    """The node OTHER as a transport shows it: what it says of its copies. `before` is awaited before each
    answer, `doubted` called with each doubt."""

    def __init__(self) -> None:
        self.digests: dict[Extent, bytes] = {}
        self.asked: list[Extent] = []
        self.before: Callable[[Extent], Awaitable[None]] = lambda extent: trio.sleep(0)
        self.doubted: Callable[[Extent], None] = lambda extent: None

    async def digest(self, extent: Extent) -> bytes:
        self.asked.append(extent)
        await self.before(extent)
        if extent not in self.digests:
            raise OSError(errno.EHOSTUNREACH, "it does not answer")
        return self.digests[extent]

    async def doubt(self, extent: Extent) -> None:
        self.doubted(extent)


class Place:
    """A node with a file of some stripes of one byte, which are in sync on it and on OTHER."""

    def __init__(self, files: Files, stripes: int) -> None:
        self.files = files
        self.right = [bytes([stripe]) for stripe in range(stripes)]
        self.digests = [digest_of_bytes(data) for data in self.right]
        self.other = Other()
        self.groups = Groups()
        self.members = Members()
        self.catalog = Catalog(files, self.members, self.groups, BUCKETS)
        for node in (files.node, OTHER):
            address = records.NodeAddress("127.0.0.1", 1, 2, ["tcp"], "", "", 1 << 30, 1 << 30, "0")
            self.members.nodes[node] = address
        self.config = records.GroupConfig(1, (files.node, OTHER))
        configs = [
            KeyValue(records.group_key(2 << 16 | bucket), records.encode(self.config), 1)
            for bucket in range(BUCKETS)
        ]
        self.groups.load(configs, 1)
        inode = Inode(2, 0o100644, 0, 0, 0)
        inode.extent, inode.size = records.ContentId(CONTENT), stripes
        inode.layout, inode.version, inode.digests = LAYOUT, 1, b"".join(self.digests)
        self.catalog.load([KeyValue(records.key_of(b"i", 2), inode.encode(), 1)], 1)
        for stripe, data in enumerate(self.right):
            self.other.digests[Extent(CONTENT, stripe)] = self.digests[stripe]
            with received(files, data) as incoming:
                files.seal(incoming, Extent(CONTENT, stripe))

    def handover(self) -> Handover:
        other: Any = self.other
        return Handover(self.catalog, lambda node: other, lambda extent: None)

    def may_leave(self, handover: Handover) -> bool:
        """Whether this node may leave the group of stripe 0 to OTHER."""
        step = without(self.config, self.files.node)
        return handover.may_step(
            group_of(LAYOUT, 0, BUCKETS), self.config, step, {self.files.node, OTHER}
        )


async def test_a_node_that_leaves_waits_on_a_host_that_has_just_started_too(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Mock(monotonic=lambda: 10.0)
    monkeypatch.setattr("irdmafs.backend.node.handover.time", clock)
    place = Place(files, 1)
    assert not place.may_leave(place.handover())


async def test_a_node_that_leaves_waits_for_each_extent_in_any_order(files: Files) -> None:
    # Stripes 0 and 16 are in one group.
    place = Place(files, 17)
    first, last = Extent(CONTENT, 0), Extent(CONTENT, 16)
    place.other.digests[first] = WRONG

    doubted = trio.Event()

    async def after_the_doubt(extent: Extent) -> None:
        if extent == last:
            await doubted.wait()

    def mend(extent: Extent) -> None:
        assert extent == first
        place.other.digests[first] = place.digests[0]
        doubted.set()

    place.other.before, place.other.doubted = after_the_doubt, mend
    ready = trio.Event()
    handover = place.handover()
    assert not place.may_leave(handover)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(handover.run, ready.set)
        await ready.wait()
        nursery.cancel_scope.cancel()
    assert place.other.asked.count(first) == 2, "it was let go before the other one had mended"
    assert place.may_leave(handover)


async def test_a_node_that_leaves_waits_until_the_other_says_what_it_has(files: Files) -> None:
    place = Place(files, 1)
    extent = Extent(CONTENT, 0)
    answer = place.other.digests.pop(extent)
    ready = trio.Event()
    handover = place.handover()
    assert not place.may_leave(handover)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(handover.run, ready.set)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert place.other.asked == [extent] and not ready.is_set()
        place.other.digests[extent] = answer
        await ready.wait()
        nursery.cancel_scope.cancel()
