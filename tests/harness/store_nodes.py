"""Store nodes in this process, on a real etcd: everything but the network between them.

What they keep is in real store directories; a link between two of them can be cut, a node can be
killed (its tasks end, its lease stays behind) and started again on what it kept. `Watcher` follows
etcd's history and checks the invariants of replication at every change.
"""

import os
import random
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing, suppress
from functools import partial
from typing import Any

import trio

from harness.etcd_server import EtcdKeys
from irdmafs.backend.cluster.group_configs import Groups
from irdmafs.backend.cluster.lease import Session
from irdmafs.backend.cluster.membership import Members, admit
from irdmafs.backend.cluster.replica import Replica
from irdmafs.backend.etcd.engine import EtcdEngine
from irdmafs.backend.kv import Conflict, Event, KeyValue, Put
from irdmafs.backend.model import records
from irdmafs.backend.model.groups import has_still
from irdmafs.backend.model.placement import group_of
from irdmafs.backend.model.records import GroupConfig
from irdmafs.backend.namespace import Inode
from irdmafs.backend.node.agent import Agent
from irdmafs.backend.node.catalog import Catalog
from irdmafs.backend.node.copier import Copier
from irdmafs.backend.node.files import Files
from irdmafs.backend.node.handover import Handover
from irdmafs.backend.node.resync import Resync
from irdmafs.backend.node.scrub import Scrub
from irdmafs.backend.node.service import NodeService
from irdmafs.backend.node.state import ClusterState
from irdmafs.backend.transport import Extent, FileRange, Landed, Unreachable
from irdmafs.backend.unwrap import background

TTL_S = 2


class Link:
    """What a node gets from another one, unless it is cut."""

    def __init__(self, cluster: "Cluster", here: int, there: int) -> None:
        self._cluster = cluster
        self._here = here
        self._there = there

    def _service(self) -> NodeService:
        node = self._cluster.running.get(self._there)
        if node is None or not self._cluster.reaches(self._here, self._there):
            raise Unreachable(self._there, "the link is cut")
        return node.service

    async def read(self, extent: Extent, start: int, into: FileRange, landed: Landed) -> None:
        with closing(self._service().hold(extent)) as source:
            await trio.sleep(0)
            self._service()
            os.pwrite(into.fd, os.pread(source.fd, into.length, start), into.offset)

    async def digest(self, extent: Extent) -> bytes:
        return await self._service().digest(extent)

    async def doubt(self, extent: Extent) -> None:
        with suppress(Unreachable):
            self._service().doubt(extent)

    async def get(self, extents: Sequence[Extent], limit: int) -> list[bytes | None]:
        await trio.sleep(0)
        found: list[bytes | None] = []
        service = self._service()
        for extent in extents:
            size = service.size(extent)
            if size is None or size > limit:
                found.append(None)
                continue
            with closing(service.hold(extent)) as held:
                found.append(os.pread(held.fd, size, 0))
        return found


class Node:
    """One store node: the parts of its daemon that agree with others on who keeps what."""

    def __init__(self, cluster: "Cluster", files: Files, engine: EtcdEngine) -> None:
        self.files = files
        self.id = files.node
        self.engine = engine
        address = records.NodeAddress(
            "127.0.0.1", 1, 2, ["tcp"], f"host{self.id:x}", files.directory, 1 << 30, 1 << 30, "0"
        )
        ttl_s = cluster.settings.lease_ttl_s
        self.session = Session(engine, address, ttl_s, node=self.id)
        self.members = Members(self.session)
        self.groups = Groups()
        self.catalog = Catalog(files, self.members, self.groups, cluster.settings.buckets)
        self.replica = Replica(engine, (self.members, self.groups, self.catalog))
        here = ClusterState(self.id, engine, self.replica, self.members, self.groups, self.session)

        def device(there: int) -> Any:
            return Link(cluster, self.id, there)

        copier = Copier(self.catalog, self.members, device, 0)
        self.resync = Resync(here, self.catalog, copier)

        async def ping(there: int) -> None:
            if there not in cluster.running or not cluster.reaches(self.id, there):
                raise Unreachable(there, "the link is cut")

        scrub = Scrub(here, self.catalog, copier, bytes_per_s=0, period_s=0)
        handover = Handover(self.catalog, device, scrub.doubt)
        after_s = cluster.rereplicate_after_s
        self.agent = Agent(here, self.catalog, ping, handover, rereplicate_after_s=after_s)
        self.service = NodeService(here, self.catalog, self.agent, self.resync, scrub)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            await self.replica.start(nursery)
            self.catalog.begin()
            await admit(self.engine, self.id, records.NodeRecord("up", 1.0, {}))
            await nursery.start(partial(self.session.run, verify=self.resync.look_over))
            nursery.start_soon(self.resync.run)
            nursery.start_soon(self.agent.run)
            nursery.start_soon(self.catalog.run)
            task_status.started()

    def store(self, extent: Extent, data: bytes) -> None:
        """Take what a writer sends; what comes again is acknowledged again."""
        if not self.session.valid():
            raise Unreachable(self.id, "its session is over")
        if extent in self.files:
            return
        incoming = self.files.create(len(data))
        os.pwrite(incoming.fd, data, 0)
        self.files.seal(incoming, extent)
        os.close(incoming.fd)
        self.catalog.sealed(extent)


class Cluster:
    """Store nodes by their ids. Use `cluster()`."""

    def __init__(
        self, keys: EtcdKeys, directory: str, nursery: trio.Nursery, buckets: int, ttl_s: int
    ) -> None:
        self.keys = keys
        self.settings = records.Settings(1, "test", 2, buckets, 0, ttl_s)
        self.rereplicate_after_s = 0.3
        self.directory = directory
        self.running: dict[int, Node] = {}
        self.stores: dict[int, str] = {}
        self.cut: set[tuple[int, int]] = set()
        self._nursery = nursery
        self._scopes: dict[int, trio.CancelScope] = {}
        self._ended: dict[int, trio.Event] = {}

    def reaches(self, here: int, there: int) -> bool:
        return (here, there) not in self.cut

    async def add(self) -> int:
        """A node with an empty store; its id."""
        return await self.start(f"{self.directory}/{len(self.stores)}")

    async def start(self, store: str) -> int:
        return int(await self._nursery.start(self._run, store))

    async def _run(self, store: str, task_status: trio.TaskStatus[int]) -> None:
        ended = trio.Event()
        try:
            with Files(store) as files, trio.CancelScope() as scope:
                self.stores[files.node] = store
                self._scopes[files.node], self._ended[files.node] = scope, ended
                async with EtcdEngine(self.keys.endpoints, self.keys.prefix) as engine:
                    await self._live(Node(self, files, engine), task_status)
        finally:
            ended.set()

    async def _live(self, node: Node, task_status: trio.TaskStatus[int]) -> None:
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(node.run)
                self.running[node.id] = node
                task_status.started(node.id)
        finally:
            self.running.pop(node.id, None)

    async def kill(self, node: int) -> int:
        """End a node's tasks without a word to anybody. Returns the lease that it leaves behind."""
        lease = self.running[node].session.lease
        self._scopes[node].cancel()
        await self._ended[node].wait()
        return lease


@asynccontextmanager
async def cluster(keys: EtcdKeys, buckets: int = 16, ttl_s: int = TTL_S) -> AsyncIterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="irdmafs-nodes-", dir="/dev/shm") as directory:
        async with background() as nursery:
            made = Cluster(keys, directory, nursery, buckets, ttl_s)
            async with EtcdEngine(keys.endpoints, keys.prefix) as engine:
                await engine.transact(
                    (), [Put(records.SETTINGS_KEY, records.encode(made.settings))]
                )
            yield made


class Writer:
    """A mount that publishes contents of its own making, one per new inode."""

    def __init__(self, nodes: Cluster, engine: EtcdEngine, first_ino: int) -> None:
        self._nodes = nodes
        self.engine = engine
        self._ino = first_ino
        self._number = 0
        self.groups = Groups()
        self.members = Members()
        self.replica = Replica(engine, (self.members, self.groups))
        record, ttl_s = records.MountRecord("worker", "/mnt", 1, "0"), nodes.settings.lease_ttl_s
        self.session = Session(engine, record, ttl_s)
        self.published: dict[Extent, bytes] = {}
        self.group_of: dict[Extent, int] = {}

    async def start(self, nursery: trio.Nursery) -> None:
        await self.replica.start(nursery)
        await nursery.start(self.session.run)
        await self.groups.want(self.engine, 2, self.members.placement(), 60.0)

    async def publish(self, data: bytes) -> Extent:
        """As docs/replication.md says: on every member of the configuration that the commit compares."""
        self._ino += 1
        self._number += 1
        layout = records.Layout(2, 0, random.getrandbits(63) + 1)
        group = group_of(layout, 0, self._nodes.settings.buckets)
        before: GroupConfig | None = None
        have: set[int] = set()
        extent = Extent(0, 0)
        while True:
            content = await self.session.wait_valid() << 24 | self._number
            if extent.content != content:
                extent, have = Extent(content, 0), set()
            config, revision = self.groups.get(group)
            have = {node for node in have if before and has_still(before, config, node)}
            before = config
            if not self._send(extent, data, config, have):
                with trio.move_on_after(0.05):
                    await self.groups.changed()
                continue
            inode = Inode(self._ino, 0o100644, 0, 0, 0)
            inode.size, inode.extent, inode.layout = len(data), records.ContentId(content), layout
            inode.blocks = -(-len(data) // 512)
            key = records.key_of(b"i", self._ino)
            try:
                await self.engine.transact(
                    [(key, 0), (records.group_key(group), revision), self.session.compare()],
                    [Put(key, inode.encode())],
                )
            except Conflict:
                await self.replica.barrier()
                continue
            self.published[extent], self.group_of[extent] = data, group
            return extent

    def _send(self, extent: Extent, data: bytes, config: GroupConfig, have: set[int]) -> bool:
        for member in config.members:
            node = self._nodes.running.get(member)
            if member in have:
                continue
            if node is None:
                return False
            try:
                node.store(extent, data)
            except OSError:  # its session is over, or it is full: its group is about to change
                return False
            have.add(member)
        return True


class Watcher:
    """A consumer that checks every change of etcd's history.

    I1: each live member in sync has every extent that an inode names. I2: somebody is in sync.
    I3: configurations change one at a time, and only a joining member becomes one in sync.
    """

    prefixes = (b"g", b"i", b"n")

    def __init__(self, nodes: Cluster) -> None:
        self._nodes = nodes
        self.configs: dict[int, GroupConfig] = {}
        self.named: dict[int, set[Extent]] = {}
        self.live: set[int] = set()
        self.changes = 0
        self.moves = 0  # how often a node began to be a member of a group that there was
        self.failures: list[str] = []
        self.replica: Replica

    def load(self, records: Sequence[KeyValue], revision: int) -> None:
        for record in records:
            self._take(record.key, record.value)

    def apply(self, revision: int, events: Sequence[Event]) -> None:
        touched = [self._take(event.key, event.value) for event in events]
        for group in touched:
            if group is not None:
                self._check_members(group, revision)

    def _take(self, key: bytes, value: bytes | None) -> int | None:
        kind, number = key[:1], int.from_bytes(key[1:9], "big")
        if kind == b"n":
            (self.live.discard if value is None else self.live.add)(number)
        elif kind == b"g" and value is not None:
            config = records.decode(value, GroupConfig)
            self._check_step(number, config)
            self.configs[number] = config
            return number
        elif kind == b"i" and value is not None:
            inode = Inode.decode(number, value, 0)
            if inode.extent:
                group = group_of(inode.layout, 0, self._nodes.settings.buckets)
                self.named.setdefault(group, set()).add(Extent(inode.extent, 0))
                return group
        return None

    def _check_step(self, group: int, config: GroupConfig) -> None:
        self.changes += 1
        before = self.configs.get(group)
        if not config.in_sync:
            self.failures.append(f"I2: nobody is in sync in {group:#x}")
        if before is None:
            return
        self.moves += len(set(config.members) - set(before.members))
        if config.epoch != before.epoch + 1:
            self.failures.append(f"I3: {group:#x} went from {before} to {config}")
        risen = set(config.in_sync) - set(before.in_sync)
        if len(risen) > 1 or not risen <= set(before.joining):
            self.failures.append(f"I3: {risen} became in sync in {group:#x}: {before} {config}")

    def _check_members(self, group: int, revision: int) -> None:
        config = self.configs.get(group)
        if config is None:
            self.failures.append(f"an inode names the unknown group {group:#x}")
            return
        for node in set(config.in_sync) & self.live:
            lacking = self.named.get(group, set()) - self._kept_by(node)
            if lacking:
                self.failures.append(
                    f"I1: at {revision} node {node:x} lacks {lacking} of {group:#x} {config}"
                )

    def _kept_by(self, node: int) -> set[Extent]:
        running = self._nodes.running.get(node)
        if running is not None:
            return set(running.files)
        names = (name.split(".") for name in os.listdir(f"{self._nodes.stores[node]}/extents"))
        return {Extent(int(content, 16), int(stripe, 16)) for content, stripe in names}

    def settled(self, node_count: int) -> bool:
        """Whether every group has all its replicas, on live nodes, and nothing moves."""
        return bool(self.configs) and all(
            not config.joining
            and len(config.in_sync) == min(2, node_count)
            and set(config.in_sync) <= self.live
            for config in self.configs.values()
        )
