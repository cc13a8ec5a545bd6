"""Versions of the same size on store nodes that are read and written by RDMA verbs: what is used again,
what is registered anew, and what must not be."""

import os
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from harness.closing import descriptor
from harness.clusters import Cluster, counters
from harness.rdma import need_way, registered
from harness.transport_nodes import ExtentDirectory, Node, serving
from harness.transport_place import MiB, Place, mounted
from harness.verbs_place import only_path

from irdmafs.backend.node.files import Files
from irdmafs.backend.transport import Extent, Target
from irdmafs.backend.transport.peers import Peers
from irdmafs.backend.transport.verbs import way as way_module
from irdmafs.backend.transport.verbs.messages import Expose, Exposed, Release, Reserve
from irdmafs.backend.transport.verbs.path import Path as VerbsPath
from irdmafs.backend.transport.verbs.queue import Broken, Piece
from irdmafs.backend.transport.verbs.rdma import Choice, Rdma
from irdmafs.backend.transport.verbs.way import VerbsWay

pytestmark = pytest.mark.verbs

TIMEOUT_S = 5.0
SESSION = 7


def test_a_version_is_sent_once_however_soon_its_file_is_closed(rdma_cluster: Cluster) -> None:
    """A kernel with coarse times (before 6.13) cannot tell a write after close from the one before it."""
    data = random.Random(1).randbytes(256 << 10)
    writer, _ = rdma_cluster.mounts
    moved = counters(writer)["rdma_bytes"]
    for version in range(16):
        fd = os.open(writer.path / "sent once", os.O_RDWR | os.O_CREAT)
        other = os.dup(fd)
        os.pwrite(fd, version.to_bytes(4, "big") + data[4:], 0)
        os.close(fd)
        os.close(other)
    assert counters(writer)["rdma_bytes"] == moved + 16 * len(data)


def test_a_file_truncated_after_its_version_was_sent_is_sent_anew(rdma_cluster: Cluster) -> None:
    first, second = (random.Random(seed).randbytes(2 * MiB) for seed in (1, 2))
    writer, reader = rdma_cluster.mounts
    moved = counters(writer)["rdma_bytes"]
    fd = os.open(writer.path / "truncated", os.O_RDWR | os.O_CREAT)
    other = os.dup(fd)
    os.write(fd, first)
    os.close(fd)
    assert (reader.path / "truncated").read_bytes() == first
    os.ftruncate(other, 0)
    os.pwrite(other, second, 0)
    os.close(other)
    assert (reader.path / "truncated").read_bytes() == second
    assert counters(writer)["rdma_bytes"] == moved + len(first) + len(second)


class FilesService(ExtentDirectory):
    """A node's service over its real store directory, which says yes to everything."""

    def __init__(self, directory: Path, node: int, rdma: Rdma) -> None:
        super().__init__(f"{directory}-unused", node)
        self.files = Files(str(directory), rdma=rdma)

    def size(self, extent: Extent) -> int | None:
        return self.files.size(extent)

    async def create(self, extent: Extent, length: int, allocated: int | None = None) -> Any:
        return self.files.incoming.take_spare(length) or self.files.create(length, allocated)

    async def seal(self, extent: Extent, incoming: Any) -> None:
        self.files.seal(incoming, extent)

    def hold(self, extent: Extent) -> Any:
        return self.files.hold(extent)


class Nodes:
    """Two nodes in this process, and two mounts that ask them: one by verbs, one over TCP."""

    def __init__(
        self, memory: Path, nodes: dict[int, Node], rdma: Rdma, mounts: list[Peers], gone: set[int]
    ) -> None:
        self.files: list[Files] = [node.service.files for node in nodes.values()]
        self.rdma = rdma
        # Sessions that the nodes know to be over.
        self.gone = gone
        self.verbs, self.tcp = (Place(memory, mount, nodes) for mount in mounts)

    async def write(self, number: int, by: Place | None = None) -> bytes:
        """Down the chain. Returns what was written."""
        data = random.Random(number).randbytes(MiB)
        await (by or self.verbs).write(Extent(number, 0), data, 2)
        return data

    async def read(self, number: int, node: int = 1, by: Place | None = None) -> bytes:
        return await (by or self.verbs).read(node, Extent(number, 0), 0, MiB)

    def free(self, number: int) -> None:
        for files in self.files:
            files.free(Extent(number, 0))

    def incoming(self, node: int) -> list[str]:
        return os.listdir(f"{self.files[node - 1].directory}/incoming")

    @property
    def reused(self) -> list[int]:
        return [files.figures().reused_files for files in self.files]


@asynccontextmanager
async def with_nodes(memory: Path) -> AsyncIterator[Nodes]:
    async with AsyncExitStack() as stack:
        device, _, _, address = need_way()
        rdma = stack.enter_context(Rdma(Choice(device=device)))
        served: dict[int, Node] = {}
        gone: set[int] = set()
        for node in (1, 2):
            service = FilesService(memory / str(node), node, rdma)
            stack.enter_context(service.files)
            served[node] = await stack.enter_async_context(
                serving(
                    memory, node, address, service=service, timeout_s=TIMEOUT_S, rdma=rdma,
                    is_gone=lambda peer: peer.session in gone,
                )
            )  # fmt: skip
        mounts = [
            await stack.enter_async_context(
                mounted(memory, timeout_s=TIMEOUT_S, rdma=each, session=lambda: SESSION)
            )
            for each in (rdma, None)
        ]
        yield Nodes(memory, served, rdma, mounts, gone)


async def test_in_steady_state_nodes_make_no_file_and_register_nothing(memory: Path) -> None:
    async with with_nodes(memory) as nodes:
        registrations = 0
        for number in range(20):
            data = await nodes.write(number)
            assert await nodes.read(number, 1) == data
            assert await nodes.read(number, 2) == data
            nodes.free(number - 1)
            if number == 1:
                registrations = nodes.rdma.figures().rdma_registrations
        assert nodes.rdma.figures().rdma_registrations == registrations
        assert [files.figures().created_files for files in nodes.files] == [2, 2]
        assert nodes.reused == [18, 18]


@pytest.mark.parametrize("moved", ["read", "written"])
async def test_what_a_node_has_sent_over_tcp_is_not_used_again(memory: Path, moved: str) -> None:
    async with with_nodes(memory) as nodes:
        data = await nodes.write(1, nodes.tcp if moved == "written" else None)
        if moved == "read":
            assert await nodes.read(1, 1, nodes.tcp) == data
        nodes.free(1)
        await nodes.write(2)
        # The last of the chain has sent it to nobody.
        assert nodes.reused == [0, 1]


async def read_window(path: VerbsPath, exposed: Exposed) -> bytes:
    regions = path.adapter.regions
    piece = exposed.address, exposed.key
    with descriptor(os.memfd_create("target")) as target:
        os.posix_fallocate(target, 0, MiB)
        async with registered(regions, target) as mine:
            await path.pair.read([Piece(mine.address(0), MiB, mine.key, *piece)])
        return os.pread(target, MiB, 0)


async def test_who_has_a_window_reads_what_was_there_when_it_is_superseded(memory: Path) -> None:
    async with with_nodes(memory) as nodes:
        data = await nodes.write(1)
        path = await only_path(nodes.verbs.peers)
        exposed = await path.control.ask(Expose(Extent(1, 0), 0, MiB), Exposed)
        nodes.free(1)
        await nodes.write(2)
        assert nodes.reused == [0, 1]
        assert await read_window(path, exposed) == data
        path.control.say_later(Release(exposed.handle))
        await nodes.verbs.peers.ping(1)
        nodes.free(2)
        await nodes.write(3)
        assert nodes.reused == [1, 2]


async def test_rights_end_with_their_session(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(way_module, "RETRY_S", 0.1)
    async with with_nodes(memory) as nodes:
        data = await nodes.write(1)
        path = await only_path(nodes.verbs.peers)
        exposed = await path.control.ask(Expose(Extent(1, 0), 0, MiB), Exposed)
        reserved = await path.control.ask(
            Reserve(Extent(2, 0), Target(1, 1, ()), MiB, MiB, 0), Exposed
        )
        assert reserved.wanted
        listener = nodes.verbs.nodes[1].listener
        listener.end_rights(SESSION + 1)
        assert await read_window(path, exposed) == data
        nodes.gone.add(SESSION)
        listener.end_rights()
        assert not nodes.incoming(1), "what it was writing is dropped"
        with pytest.raises(Broken):
            await read_window(path, exposed)
        # It gets no other way in, until it has another session; TCP asks for no rights in memory.
        moved = nodes.verbs.peers.counters.moved_bytes["verbs"]
        assert await nodes.read(1) == data
        assert nodes.verbs.peers.counters.moved_bytes["verbs"] == moved
        nodes.gone.clear()
        while await nodes.verbs.peers.device(1).way(VerbsWay).reach() is None:
            await trio.sleep(0.05)
        assert await nodes.read(1) == data
        assert nodes.verbs.peers.counters.moved_bytes["verbs"] == moved + MiB
