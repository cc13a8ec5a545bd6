"""Where tests of the transport take place: nodes in this process, and a mount that asks them."""

import os
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from harness.closing import descriptor
from harness.transport_nodes import ExtentDirectory, Node, resolver, serving
from irdmafs.backend.transport import Extent, FileRange, Target
from irdmafs.backend.transport.mover import Mover
from irdmafs.backend.transport.movers import all_movers
from irdmafs.backend.transport.peers import Peers, open_peers
from irdmafs.backend.transport.verbs.rdma import Rdma

KiB = 1 << 10
MiB = 1 << 20
# Long enough for a busy machine, short enough to wait for.
TIMEOUT_S = 2.0


class Place:
    """Nodes 1 and further, by number, and the mount's end of the transport."""

    def __init__(self, memory: Path, peers: Peers, nodes: dict[int, Node]) -> None:
        self.memory = memory
        self.peers = peers
        self.nodes = nodes

    def service(self, node: int) -> ExtentDirectory:
        service: ExtentDirectory = self.nodes[node].service
        return service

    def have(self, extent: Extent, data: bytes) -> list[int]:
        """The nodes that keep exactly this."""
        paths = {node: Path(self.service(node).path(extent)) for node in self.nodes}
        return [node for node, path in paths.items() if path.exists() and path.read_bytes() == data]

    def file(self, name: str, data: bytes = b"") -> int:
        fd = os.open(self.memory / name, os.O_RDWR | os.O_CREAT)
        os.write(fd, data)
        return fd

    async def write(self, extent: Extent, data: bytes, *chain: int, first: int = 1) -> None:
        """Write an extent on a node, which hands it down the chain."""
        with descriptor(os.memfd_create("source")) as source:
            os.write(source, data)
            whole = FileRange(source, 0, len(data))
            await self.peers.device(first).write(extent, Target(1, 1, chain), whole)

    async def read(self, node: int, extent: Extent, start: int, length: int) -> bytes:
        """Return a part of an extent, and whatever else came with it."""
        with descriptor(os.memfd_create("target")) as target:
            await self.peers.device(node).read(extent, start, FileRange(target, 0, length))
            return os.pread(target, length + 1, 0)


@asynccontextmanager
async def mounted(
    memory: Path,
    *,
    movers: Sequence[Mover] | None = None,
    rdma: Rdma | None = None,
    encrypt_data: bool = False,
    stages: bool = True,
    role: str = "mount",
    **options: Any,
) -> AsyncIterator[Peers]:
    """A mount's end of the transport, with all movers unless told otherwise; `options` are those of
    open_peers."""
    movers = movers or all_movers(rdma, encrypt_data=encrypt_data, stages=stages)
    async with open_peers(resolver(memory), movers, name="test", role=role, **options) as peers:
        yield peers


@asynccontextmanager
async def in_cluster(
    memory: Path,
    count: int = 3,
    host: str = "127.0.0.1",
    *,
    timeout_s: float = TIMEOUT_S,
    mount: Mapping[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[Place]:
    """Nodes on a host, and a mount, with the same `options` but for those in `mount`."""
    options["timeout_s"] = timeout_s
    async with AsyncExitStack() as stack:
        nodes = {
            node: await stack.enter_async_context(serving(memory, node, host, **options))
            for node in range(1, count + 1)
        }
        peers = await stack.enter_async_context(mounted(memory, **options | dict(mount or {})))
        yield Place(memory, peers, nodes)


def random_bytes(length: int) -> bytes:
    return random.Random(length).randbytes(length)


async def until(condition: Callable[[], bool]) -> None:
    """For what happens in a thread, in another process or in the kernel, which tell nobody."""
    with trio.fail_after(60):
        while not condition():
            await trio.sleep(0.01)


async def write_and_read(place: Place, length: int) -> None:
    """Write a part of a file as an extent on all nodes, and read it from each into a part of a file."""
    data, extent, (first, *chain) = random_bytes(length), Extent(5, 7), place.nodes
    source = place.file("source", b"before" + data + b"after")
    whole = FileRange(source, 6, length)
    await place.peers.device(first).write(extent, Target(1, 1, (*chain,)), whole)
    assert place.have(extent, data) == list(place.nodes)
    for node in place.nodes:
        target = place.file(f"target{node}", b"first")
        await place.peers.device(node).read(extent, 0, FileRange(target, 5, length))
        assert os.pread(target, 5 + length + 1, 0) == b"first" + data
        os.close(target)
    os.close(source)


async def read_a_part(place: Place) -> None:
    """Read a part of an extent into a part of a file, and nothing beside it."""
    data = random_bytes(20 * MiB)
    source, target = place.file("source", data), place.file("target", bytes(15 * MiB))
    device = place.peers.device(1)
    await device.write(Extent(1, 0), Target(1, 1, ()), FileRange(source, 0, len(data)))
    await device.read(Extent(1, 0), 4097, FileRange(target, 9001, 12 * MiB))
    got = os.pread(target, 15 * MiB, 0)
    assert got[:9001] == bytes(9001)
    assert got[9001 : 9001 + 12 * MiB] == data[4097 : 4097 + 12 * MiB]
    assert got[9001 + 12 * MiB :] == bytes(3 * MiB - 9001)
    os.close(source)
    os.close(target)
