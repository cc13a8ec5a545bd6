"""Read a cluster's state from etcd, once, and ask its nodes: for commands, which follow no watch."""

import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

import msgspec
import trio

from ..etcd.engine import EtcdEngine
from ..kv import KeyValue, end_of
from ..kv.faults import Faults
from ..model.placement import bytes_of_groups
from ..model.records import Layout
from ..model.values import ConfigError
from ..namespace import Inode
from ..transport.peers import Peers, open_peers
from .config import ClusterConfig
from .group_configs import Groups
from .history import read_reports
from .membership import Members
from .overview import Cluster

_SCAN_KEYS = 1000
_ASK_S = 3.0
_DEPTH_MAX = 1000


async def read_cluster(engine: EtcdEngine, rebalance_rate: int) -> Cluster:
    """Return the state of a cluster. Raises OSError if etcd cannot be read."""
    faults = Faults()
    members, groups = Members(faults=faults), Groups(faults)
    for consumer in (members, groups):
        records: list[KeyValue] = []
        revision = 0
        for prefix in consumer.prefixes:
            revision, found = await engine.snapshot(prefix, end_of(prefix))
            records += found
        consumer.load(faults.well_formed(records), revision)
    cluster = Cluster(members, groups, rebalance_rate)
    cluster.own_faults = faults
    cluster.went_back = await read_reports(engine)
    return cluster


async def ask_nodes(found: Cluster, config: ClusterConfig) -> None:
    """Ask the live nodes for their reports. A node that cannot be reached from here can be healthy: its
    lease decides."""

    async def ask(peers: Peers, node: int) -> None:
        found.reports[node] = await peers.status(node)

    try:
        refused = await _ask_each(found, config, found.live, ask)
    except ConfigError as error:
        found.notes.append(f"nodes are not asked: {error}")
        return
    found.notes += [f"node {node:016x} does not answer: {why}" for node, why in refused.items()]


async def begin_scrub(
    found: Cluster, config: ClusterConfig, nodes: Iterable[int]
) -> dict[int, str]:
    """Have these nodes check everything they keep, and return the reasons of nodes that do not. Raises
    ConfigError."""
    return await _ask_each(found, config, nodes, Peers.scrub)


async def _ask_each(
    found: Cluster,
    config: ClusterConfig,
    nodes: Iterable[int],
    ask: Callable[[Peers, int], Awaitable[None]],
) -> dict[int, str]:
    """Ask these nodes at the same time, and return the reasons of those that do not answer. Raises
    ConfigError."""
    refused: dict[int, str] = {}

    async def ask_one(node: int) -> None:
        try:
            with trio.fail_after(_ASK_S):
                await ask(peers, node)
        except trio.TooSlowError:
            refused[node] = f"no answer within {_ASK_S:g} s"
        except OSError as error:
            refused[node] = error.strerror or str(error)

    credentials = config.cluster.credentials("admin")
    async with (
        open_peers(
            found.members.address, (), credentials=credentials, name="command", role="admin"
        ) as peers,
        trio.open_nursery() as nursery,
    ):
        for node in nodes:
            nursery.start_soon(ask_one, node)
    return refused


async def name_files(found: Cluster, engine: EtcdEngine) -> None:
    """Find the paths of files whose content or record is damaged; if there are any, by reading every name.
    Raises OSError."""
    damaged = {*found.damaged(), *(fault.ino for fault in found.faults()[1] if fault.ino)}
    if not damaged:
        return
    names: dict[int, tuple[int, bytes]] = {}
    async for page in _pages(engine, b"d", b"e"):
        for record in page:
            ino = int.from_bytes(record.value, "big")
            names[ino] = int.from_bytes(record.key[1:9], "big"), record.key[9:]
    for ino in damaged:
        parts: list[bytes] = []
        at = ino
        while at in names and len(parts) < _DEPTH_MAX:
            at, name = names[at]
            parts.append(name)
        if parts:
            found.paths[ino] = os.fsdecode(b"/" + b"/".join(reversed(parts)))


async def read_group_bytes(engine: EtcdEngine, buckets: int) -> dict[int, int]:
    """Return the bytes of one replica of each group, by reading every inode."""
    held: Counter[int] = Counter()
    async for page in _pages(engine, b"i", b"j"):
        held.update(bytes_of_groups(_layouts(page), buckets))
    return dict(held)


async def _pages(engine: EtcdEngine, start: bytes, end: bytes) -> AsyncIterator[list[KeyValue]]:
    """Yield the records of a range, which may be too many to be held at once."""
    while page := await engine.range(start, end, _SCAN_KEYS):
        yield page
        start = page[-1].key + b"\0"


def _layouts(page: Iterable[KeyValue]) -> Iterable[tuple[Layout, int]]:
    for record in page:
        try:
            ino = int.from_bytes(record.key[1:], "big")
            inode = Inode.decode(ino, record.value, record.mod_revision)
        except msgspec.DecodeError:
            continue  # nodes and mounts tell of it
        if inode.extent:
            yield inode.layout, inode.size
