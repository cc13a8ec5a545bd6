"""A whole cluster as commands read it, once, from etcd and its nodes: they follow no watch."""

import errno
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Annotated, TypedDict

import msgspec
import trio
from msgspec import Meta

from ..etcd.admin import Room
from ..etcd.engine import EtcdEngine
from ..kv import KeyValue, end_of
from ..kv.faults import Fault, FaultReport, Faults
from ..model import placement
from ..model.groups import degraded, leader
from ..model.policy import LEVELS
from ..model.records import GROUP_BUCKET_BITS, Count, GroupConfig, Report
from ..model.values import ConfigError
from ..transport.peers import Peers, open_peers
from .config import ClusterConfig
from .group_configs import Groups
from .history import read_reports
from .membership import Members

_ASK_S = 3.0
_DEPTH_MAX = 1000
_Finite = Annotated[float, Meta(ge=-1e12, le=1e12)]


class NodeReport(TypedDict, total=False):
    """The parts of a node's report that commands use. `wrong_files`: inodes, and if they may be mended."""

    bytes: Count
    free_bytes: Count
    resync_bytes_left: Count
    resync_bytes_per_s: Count
    pools_in_use: list[int]
    wrong_files: list[tuple[int, bool]]
    damaged_records: FaultReport
    credential_problems: list[str]
    quarantined_extents: Count
    quarantined_bytes: Count
    scrub_share: _Finite | None
    scrub_age_s: _Finite | None


class Cluster:
    """Nodes, groups, mounts, and copies under way, as they were read. `rebalance_rate` is the bytes per
    second at which each node fills groups."""

    def __init__(self, members: Members, groups: Groups, rebalance_rate: int) -> None:
        self.members = members
        self.groups: dict[int, GroupConfig] = {
            group: config for group, (config, _) in sorted(groups.configs.items())
        }
        # Nodes that found that etcd went back in time.
        self.went_back: dict[int, Report] = {}
        # The reports of nodes, by node, and why others were not asked or did not answer.
        self.reports: dict[int, NodeReport] = {}
        # Paths of files that nodes found damaged, by inode.
        self.paths: dict[int, str] = {}
        self.notes: list[str] = []
        # The damaged records that this process found; nodes report more.
        self.own_faults = Faults()
        # The room of etcd's members by address, or why it is not known.
        self.etcd_room: dict[str, Room | OSError] = {}
        self._rate = rebalance_rate
        self.in_sync = Counter(node for c in self.groups.values() for node in c.in_sync)
        self.joining = Counter(node for c in self.groups.values() for node in c.joining)
        self.primary = Counter(config.in_sync[0] for config in self.groups.values())

    @property
    def live(self) -> set[int]:
        return set(self.members.nodes)

    def nodes(self) -> list[int]:
        """Return every node that was admitted, is alive or should keep a group."""
        members = {node for config in self.groups.values() for node in config.members}
        return sorted(members | self.members.records.keys() | self.members.nodes.keys())

    def find_node(self, text: str) -> int:
        """Return the node of a name that its row in `cluster status` shows: its id (hexadecimal; an
        unambiguous prefix suffices), HOST:PORT, its address or its host name. Raises ConfigError with a
        list of nodes if the name stands for no node, or for more than one."""
        wanted = text.lower().removeprefix("0x")
        names = {node: self._names(node) for node in self.nodes()}
        found = [node for node in names if wanted == f"{node:016x}"] or [
            node
            for node, known in names.items()
            if text in known
            or (wanted and (f"{node:016x}".startswith(wanted) or f"{node:x}".startswith(wanted)))
        ]
        if len(found) == 1:
            return found[0]
        listed = ", ".join(
            f"{node:016x} ({', '.join(sorted(names[node])) or 'down'})" for node in found or names
        )
        if found:
            raise ConfigError(f"{text!r} means several nodes: {listed}; give one of their ids")
        raise ConfigError(f"there is no store node {text!r}; known are: {listed or 'none'}")

    def _names(self, node: int) -> set[str]:
        """Return the names of a node beside its id."""
        names = set()
        if (at := self.members.nodes.get(node)) is not None:
            names = {at.address, f"{at.address}:{at.control_port}", at.endpoint}
        if (record := self.members.records.get(node)) is not None and "host" in record.labels:
            names.add(record.labels["host"])
            names.add("/".join(record.labels[level] for level in LEVELS if level in record.labels))
        return names

    def groups_of(self, node: int) -> int:
        """Return in how many groups a node is a member."""
        return self.in_sync[node] + self.joining[node]

    def only_copies(self, node: int) -> set[int]:
        """Return the groups that only this node, of those that may come back, has in full."""
        is_alone = self.members.keeps_alone
        return {group for group, config in self.groups.items() if is_alone(node, config)}

    def state_of(self, node: int) -> str:
        if node not in self.members.nodes:
            return "down"
        record = self.members.records.get(node)
        return record.state if record else "up"

    def moving(self) -> dict[str, int | float]:
        """Return how many replicas are being filled, and about how many bytes and seconds that takes, as
        nodes report. For a node without a report, a replica is assumed
        to be as large as the mean of those in sync, and to be filled at the usual rate."""
        used = sum(at.total_bytes - at.free_bytes for at in self.members.nodes.values())
        kept = sum(count for node, count in self.in_sync.items() if node in self.members.nodes)
        share = used / kept if kept else 0.0
        size_bytes, longest_s = 0.0, 0.0
        for node, count in self.joining.items():
            report = self.reports.get(node, NodeReport())
            left = report.get("resync_bytes_left", count * share)
            size_bytes += left
            longest_s = max(longest_s, left / (report.get("resync_bytes_per_s") or self._rate))
        return {
            "replicas": self.joining.total(),
            "bytes_about": int(size_bytes),
            "seconds_about": round(longest_s, 1),
        }

    def missing(self) -> Counter[int]:
        """Return how many groups of the pools in use lack how many replicas."""
        live, in_use = self.live, self.pools_in_use()
        return Counter(
            missing
            for group, config in self.groups.items()
            if group >> GROUP_BUCKET_BITS in in_use
            and (missing := degraded(config, live, placement.replicas_of(group)))
        )

    def pools_in_use(self) -> set[int]:
        """Return the pools in which any file has contents, as nodes report; all pools without a report."""
        reports = self.reports.values()
        told = [report["pools_in_use"] for report in reports if "pools_in_use" in report]
        return set().union(*told) if told else {group >> GROUP_BUCKET_BITS for group in self.groups}

    def unavailable(self) -> int:
        """Return the groups without a live member in sync."""
        live = self.live
        return sum(leader(config, live) is None for config in self.groups.values())

    def damaged(self) -> dict[int, bool]:
        """Return the inodes of which a live node has wrong bytes, and if another may have right ones."""
        found: dict[int, bool] = {}
        for report in self.reports.values():
            for ino, may_be_mended in report.get("wrong_files", ()):
                found[ino] = found.get(ino, True) and may_be_mended
        return found

    def faults(self) -> tuple[int, list[Fault]]:
        """Return how many records are damaged, as far as one process knows, and some of them."""
        told = (report.get("damaged_records") for report in self.reports.values())
        reports = [self.own_faults.report(), *filter(None, told)]
        some = {fault.what: fault for report in reports for fault in report.some}
        return max(len(some), *(report.number for report in reports)), [*some.values()]

    def misplaced(self) -> int:
        """Return how many replicas the groups' leaders have still to copy to the nodes that should keep
        them."""
        buckets, rules = self.members.settings.buckets, self.members.policies
        candidates = self.members.candidates()
        # For pools that have no targets in etcd yet.
        fresh = placement.Placement(candidates, buckets, rules)
        targets: dict[int, placement.Targets] = {}
        for pool, (known, _) in self.members.targets.items():
            policy = placement.policy_of(pool << GROUP_BUCKET_BITS)
            rule = rules.get(policy) if policy else ""
            made = None
            if rule is not None:
                made = placement.retargeted(known, pool, candidates, buckets, rule, known.target)
            targets[pool] = made or known
        return sum(
            node not in config.in_sync
            for group, config in self.groups.items()
            for node in targets.get(group >> GROUP_BUCKET_BITS, fresh).target(group)
        )


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
    """Ask the live nodes for their reports. One that cannot be reached from here can be healthy."""

    async def ask(peers: Peers, node: int) -> None:
        status = await peers.status(node)
        try:
            # As JSON has it.
            told = msgspec.json.decode(msgspec.json.encode(status))
            found.reports[node] = told | msgspec.convert(told, NodeReport)
        except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
            raise OSError(errno.EBADMSG, f"its report makes no sense: {error}") from None

    try:
        refused = await ask_each(found, config, found.live, ask)
    except ConfigError as error:
        found.notes.append(f"nodes are not asked: {error}")
        return
    found.notes += [f"node {node:016x} does not answer: {why}" for node, why in refused.items()]


async def ask_each(
    found: Cluster,
    config: ClusterConfig,
    nodes: Iterable[int],
    ask: Callable[[Peers, int], Awaitable[None]],
) -> dict[int, str]:
    """Ask these nodes at the same time; return why some do not answer. Raises ConfigError."""
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
            found.members.nodes.get, (), credentials=credentials, name="command", role="admin"
        ) as peers,
        trio.open_nursery() as nursery,
    ):
        for node in nodes:
            nursery.start_soon(ask_one, node)
    return refused


async def name_files(found: Cluster, engine: EtcdEngine) -> None:
    """Find the paths of damaged files and records, if any, by reading every name. Raises OSError."""
    damaged = {*found.damaged(), *(fault.ino for fault in found.faults()[1] if fault.ino)}
    if not damaged:
        return
    names: dict[int, tuple[int, bytes]] = {}
    async with aclosing(engine.pages(b"d", b"e")) as pages:
        async for _, page in pages:
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
