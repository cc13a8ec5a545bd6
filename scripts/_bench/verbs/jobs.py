"""The process that asks the store's device, by verbs or over TCP; its jobs give the seconds that each took.

What a version is read into and written from are files in a tmpfs, for all alike.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import trio
from harness.cluster import Cluster

from irdmafs.backend.cluster.config import ClusterConfig
from irdmafs.backend.cluster.lease import Session
from irdmafs.backend.model.records import (
    CONTENT_NUMBER_BITS,
    MountRecord,
    NodeAddress,
    decode,
    encode,
    group_key,
)
from irdmafs.backend.transport import Extent, FileRange, Target, messages
from irdmafs.backend.transport.device import Device
from irdmafs.backend.transport.movers import all_movers
from irdmafs.backend.transport.peers import open_peers
from irdmafs.backend.transport.rights import make_session_key, session_digest
from irdmafs.backend.transport.verbs.rdma import Choice, Rdma

from ..workers import serve_jobs

# Less goes inside a control message, as a mount sends it.
MESSAGE_BYTES = 64 << 10
_SESSION_TTL_S = 60
# Tells a version from the one before it.
_MARK_BYTES = 16


class DeviceJobs:
    """What is asked of a store node. Each version of a size replaces the one before it."""

    def __init__(self, device: Device, target: Target, first: int, place: Path) -> None:
        self._device = device
        self._target = target
        self._contents = first
        self._files = Kept(place)
        self._kept: dict[int, Extent] = {}
        self._marks: dict[int, bytes] = {}

    async def write(self, size: int) -> float:
        self._contents += 1
        extent = Extent(self._contents, 0)
        source = self._files.fd("source", size)
        mark = os.urandom(_MARK_BYTES)
        os.pwrite(source, mark, 0)
        began = time.perf_counter()
        if size < MESSAGE_BYTES:
            data = os.pread(source, size, 0)
            await self._device.put(messages.Parcel(extent, self._target, data))
        else:
            await self._device.write(extent, self._target, FileRange(source, 0, size))
        took_s = time.perf_counter() - began
        if size in self._kept:
            await self._device.abort(self._kept[size].content)
        self._kept[size], self._marks[size] = extent, mark
        return took_s

    async def read(self, size: int) -> float:
        extent = await self._extent(size)
        sink = self._files.fd("sink", size)
        began = time.perf_counter()
        if size < MESSAGE_BYTES:
            (data,) = await self._device.get([extent], size)
            os.pwrite(sink, data or b"", 0)
        else:
            await self._device.read(extent, 0, FileRange(sink, 0, size))
        took_s = time.perf_counter() - began
        if os.pread(sink, _MARK_BYTES, 0) != self._marks[size]:
            raise RuntimeError(f"wrong bytes in an extent of {size} bytes")
        return took_s

    async def one_sided(self, size: int) -> float:
        """A read that the node's memory answers, however short."""
        extent = await self._extent(size)
        into = FileRange(self._files.fd("sink", size), 0, size)
        return await _timed(self._device.read(extent, 0, into))

    async def get(self, size: int) -> float:
        return await _timed(self._device.get([await self._extent(size)], size))

    async def release(self, size: int) -> float:
        """Give the memory of this size back."""
        if size in self._kept:
            await self._device.abort(self._kept.pop(size).content)
        self._files.release(size)
        return 0.0

    async def _extent(self, size: int) -> Extent:
        if size not in self._kept:
            await self.write(size)
        return self._kept[size]


async def _timed(asked: Awaitable[object]) -> float:
    began = time.perf_counter()
    await asked
    return time.perf_counter() - began


class Kept:
    """Files in a tmpfs by name and size, with their memory there, of bytes that no other has."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._files: dict[tuple[str, int], int] = {}

    def _path(self, name: str, size: int) -> Path:
        return self._place / f"{name}-{size}"

    def fd(self, name: str, size: int) -> int:
        """Make the file, or open the one that another process made."""
        if (name, size) not in self._files:
            fd = os.open(self._path(name, size), os.O_RDWR | os.O_CREAT, 0o600)
            if os.fstat(fd).st_size != size:
                block = os.urandom(1 << 20)
                for offset in range(0, size, len(block)):
                    os.pwrite(fd, block[: size - offset], offset)
            self._files[name, size] = fd
        return self._files[name, size]

    def release(self, size: int) -> None:
        """Give the memory of this size back."""
        for name, of_size in list(self._files):
            if of_size == size:
                os.close(self._files.pop((name, size)))
                self._path(name, size).unlink(missing_ok=True)


async def work(
    kind: str, node: int, node_address: str, config: str, group: int, revision: int, place: str
) -> None:
    """Ask a store node by "verbs" or "tcp"."""
    logging.getLogger("irdmafs").setLevel(logging.WARNING)
    address = decode(bytes.fromhex(node_address), NodeAddress)
    async with AsyncExitStack() as stack:
        rdma = None
        if kind == "verbs":
            rdma = stack.enter_context(Rdma(Choice("require", threshold_bytes=1)))
        session, key = await stack.enter_async_context(_session(config))
        peers = await stack.enter_async_context(
            open_peers(
                lambda _node: address, all_movers(rdma, stages=False),
                name="bench", role="mount", session=lambda: session, session_key=key,
                timeout_s=30.0,
            )
        )  # fmt: skip
        target = Target(group, revision, ())
        first = session << CONTENT_NUMBER_BITS
        await serve_jobs(DeviceJobs(peers.device(node), target, first, Path(place)))
        counters = peers.counters
        if rdma is not None and counters.fallbacks:
            print(f"{counters.fallbacks} transfers fell back to TCP", file=sys.stderr)


@asynccontextmanager
async def _session(config: str) -> AsyncIterator[tuple[int, bytes]]:
    """The number of a session as a mount has it, and its key."""
    key = make_session_key()
    record = MountRecord("bench", "", os.getpid(), "", key_digest=session_digest(key))
    async with (
        ClusterConfig.load(config).cluster.engine("mount") as engine,
        trio.open_nursery() as nursery,
    ):
        session = Session(engine, record, _SESSION_TTL_S)
        await nursery.start(session.run)
        yield session.number, key
        await session.release()
        nursery.cancel_scope.cancel()


async def plan_of(cluster: Cluster, group: int, place: Path) -> dict[str, Any]:
    """What `work` needs to ask the first node of a cluster, all but the kind."""
    node, config = cluster.nodes[0].node_id, cluster.mounts[0].config
    async with ClusterConfig.load(str(config)).cluster.engine("mount") as engine:
        found = await engine.get(group_key(group))
        assert found is not None
    return {
        "node": node,
        "node_address": encode(cluster.live_nodes()[node]).hex(),
        "config": str(config),
        "group": group,
        "revision": found.mod_revision,
        "place": str(place),
    }
