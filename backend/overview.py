"""The whole cluster at a glance: what etcd says of nodes, groups and mounts, and what is wrong with it.

Read once, not watched: for commands, which come and go.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import trio

from .cluster_config import ClusterConfig
from .config_values import ConfigError
from .groups import degraded, leader
from .history import described, read_reports
from .kv import KeyValue, SharedEngine, WentBack
from .membership import Groups, Members
from .namespace import Inode
from .placement import Placement, Targets, bytes_of_groups, plan, policy_of, replicas_of, retargeted
from .policy import Candidate, parse_policy
from .records import GROUP_BUCKET_BITS, GroupConfig, Layout, MountRecord, Report, decode
from .transport.peers import Peers

__all__ = [
    "Cluster",
    "Health",
    "NodeNotFound",
    "ask_nodes",
    "begin_scrub",
    "counted",
    "name_files",
    "read_cluster",
    "read_group_bytes",
]

Health = Literal["ok", "degraded", "unavailable"]
HEALTHS: tuple[Health, ...] = ("ok", "degraded", "unavailable")

_SCAN_KEYS = 1000
_ASK_S = 3.0
_FULL_SHARE = 0.05
_FILES_SHOWN = 5
_DEPTH_MAX = 1000
# What is shown of what a node tells.
_TOLD = (
    "bytes",
    "extents",
    "uptime_s",
    "lease_valid_s",
    "created_files",
    "reused_files",
    "rdma_registrations",
    "rdma_registered_bytes",
    "pending_extents",
    "quarantined_extents",
    "quarantined_bytes",
    "scrub_age_s",
    "scrub_running_s",
    "scrub_share",
    "scrubbed_bytes",
    "wrong_found",
    "wrong_mended",
    "wrong_extents",
    "broken_extents",
)


class NodeNotFound(Exception):
    """No node, or more than one, is meant by a name; the text says which there are."""


class Moving(NamedTuple):
    """Replicas that are being filled, and about how many bytes and seconds that takes."""

    replicas: int
    bytes: int
    seconds: float


class Cluster:
    """What was read. `rebalance_rate` is the bytes per second at which each node fills groups."""

    def __init__(
        self,
        members: Members,
        groups: Groups,
        targets: Mapping[int, Targets],
        rebalance_rate: int,
    ) -> None:
        self.members = members
        self.targets = targets
        self.groups: dict[int, GroupConfig] = {
            group: config for group, (config, _) in sorted(groups.all().items())
        }
        # Nodes that found that etcd went back in time.
        self.went_back: dict[int, Report] = {}
        # What nodes tell of themselves, by node, and why others were not asked or did not answer.
        self.reports: dict[int, dict[str, object]] = {}
        # Paths of files that nodes found damaged, by inode.
        self.paths: dict[int, str] = {}
        self.notes: list[str] = []
        self._rate = rebalance_rate
        self._in_sync = Counter(node for c in self.groups.values() for node in c.in_sync)
        self._joining = Counter(node for c in self.groups.values() for node in c.joining)
        self._primary = Counter(config.in_sync[0] for config in self.groups.values())

    @property
    def live(self) -> set[int]:
        return set(self.members.nodes)

    def nodes(self) -> list[int]:
        """Everybody that was admitted, is alive or should keep a group."""
        members = {node for config in self.groups.values() for node in config.members}
        return sorted(members | self.members.records.keys() | self.members.nodes.keys())

    def find_node(self, text: str) -> int:
        """The node of an id (hexadecimal, as many digits as make it clear) or HOST:PORT."""
        wanted = text.lower().removeprefix("0x")
        found = [
            node
            for node in self.nodes()
            if f"{node:016x}".startswith(wanted) or f"{node:x}".startswith(wanted)
        ]
        if not found:
            found = [
                node
                for node, at in self.members.nodes.items()
                if text in (f"{at.address}:{at.control_port}", f"[{at.address}]:{at.control_port}")
            ]
        if len(found) == 1:
            return found[0]
        names = ", ".join(f"{node:016x}" for node in found or self.nodes()) or "none"
        if found:
            raise NodeNotFound(f"{text!r} means several nodes: {names}; give more digits")
        raise NodeNotFound(f"there is no store node {text!r}; known are: {names}")

    def groups_of(self, node: int) -> int:
        """In how many groups a node is a member."""
        return self._in_sync[node] + self._joining[node]

    def only_copies(self, node: int) -> set[int]:
        """Groups of which no other node that may come back has everything."""
        return {
            group for group, config in self.groups.items() if self.members.keeps_alone(node, config)
        }

    def state_of(self, node: int) -> str:
        if node not in self.members.nodes:
            return "down"
        record = self.members.records.get(node)
        return record.state if record else "up"

    def moving(self) -> Moving:
        """As the nodes report. Of one that was not asked: a replica is taken to be as large as the mean
        of those in sync, and to be filled at the usual rate."""
        used = sum(at.total_bytes - at.free_bytes for at in self.members.nodes.values())
        kept = sum(count for node, count in self._in_sync.items() if node in self.members.nodes)
        share = used / kept if kept else 0.0
        size_bytes, longest_s = 0.0, 0.0
        for node, count in self._joining.items():
            report = self.reports.get(node, {})
            left = report.get("filling_bytes_left")
            left = float(left) if isinstance(left, int) else count * share
            seconds = report.get("filling_seconds_left")
            size_bytes += left
            longest_s = max(
                longest_s, seconds if isinstance(seconds, float | int) else left / self._rate
            )
        return Moving(self._joining.total(), int(size_bytes), longest_s)

    def missing(self) -> Counter[int]:
        """How many groups of the pools in use lack how many replicas."""
        live, in_use = self.live, self.pools_in_use()
        return Counter(
            missing
            for group, config in self.groups.items()
            if group >> GROUP_BUCKET_BITS in in_use
            and (missing := degraded(config, live, replicas_of(group)))
        )

    def pools_in_use(self) -> set[int]:
        """Those in which any file keeps something, as the nodes tell; all, if none was asked."""
        told = [
            set(pools)
            for report in self.reports.values()
            if isinstance(pools := report.get("pools_in_use"), list)
        ]
        return set().union(*told) if told else {group >> GROUP_BUCKET_BITS for group in self.groups}

    def unavailable(self) -> int:
        """Groups of which no member in sync is alive."""
        live = self.live
        return sum(leader(config, live) is None for config in self.groups.values())

    def health(self) -> tuple[Health, list[str]]:
        """The verdict, and a line for each thing that is wrong."""
        problems: list[tuple[Health, str]] = []
        live = self.live
        if self.went_back:
            problems.append(("unavailable", str(WentBack(described(self.went_back)).strerror)))
        if not live:
            problems.append(
                ("unavailable", "no store node is up; start one with: irdmafs serve STORE")
            )
        elif all(self.state_of(node) != "up" for node in live):
            problems.append(("degraded", "every store node is draining: nothing can be moved"))
        else:
            problems += (("degraded", line) for line in self._nodes_to_add())
        problems += (("degraded", line) for line in map(self._node_problem, self.nodes()) if line)
        if lost := self.unavailable():
            problems.append(
                (
                    "unavailable",
                    f"{counted(lost, 'group')} without a live replica in sync: files there must wait",
                )
            )
        for missing, count in sorted(self.missing().items()):
            problems.append(
                ("degraded", f"{counted(count, 'group')} without {missing} of the replicas")
            )
        problems += self._damaged_files()
        worst: Health = max((health for health, _ in problems), key=HEALTHS.index, default="ok")
        return worst, [line for _, line in problems]

    def damaged(self) -> dict[int, bool]:
        """The inodes of which some live node has other bytes than were published, and whether another has
        a right copy, or may have one."""
        found: dict[int, bool] = {}
        for report in self.reports.values():
            told = report.get("wrong_files")
            for ino, may_be_mended in told if isinstance(told, list) else ():
                found[ino] = found.get(ino, True) and bool(may_be_mended)
        return found

    def _damaged_files(self) -> Iterator[tuple[Health, str]]:
        damaged = self.damaged()
        hopeless = [ino for ino, may_be_mended in damaged.items() if not may_be_mended]
        waiting = [ino for ino, may_be_mended in damaged.items() if may_be_mended]
        if hopeless:
            yield (
                "unavailable",
                f"{counted(len(hopeless), 'file')} of which no node has what was published: "
                f"{self._named(hopeless)}; publish them again, start the node that has a sound copy, "
                "or read what there is with: irdmafs mount --no-verify",
            )
        if waiting:
            yield (
                "degraded",
                f"{counted(len(waiting), 'file')} with fewer sound replicas than they should have: "
                f"{self._named(waiting)}; a right copy is being fetched as soon as a node can give it",
            )

    def _named(self, inos: Sequence[int]) -> str:
        names = [self.paths.get(ino, f"inode {ino}") for ino in inos[:_FILES_SHOWN]]
        more = len(inos) - len(names)
        return ", ".join(names) + (f" and {more} more" if more else "")

    def _nodes_to_add(self) -> Iterator[str]:
        """Where more replicas are wanted than there are nodes that may keep one."""
        settings = self.members.settings
        usual = settings.replicas if settings else 0
        wanted = {0: usual}  # by policy
        for pool in self.pools_in_use():
            group = pool << GROUP_BUCKET_BITS
            policy = policy_of(group)
            wanted[policy] = max(wanted.get(policy, 0), replicas_of(group))
        candidates = self.candidates()
        for policy, replicas in sorted(wanted.items()):
            rule = self.members.policies.get(policy, "")
            admits = parse_policy(rule).admits
            fitting = sum(admits(candidate) for candidate in candidates if candidate.weight > 0)
            if fitting >= replicas:
                continue
            fit = f" within the placement {rule!r}" if rule else ""
            line = f"{counted(fitting, 'node')}{fit} cannot keep {replicas} replicas"
            line += f"; add {replicas - fitting}"
            if replicas > usual:
                line += (
                    ", or make the files anew that were created where user.irdmafs.replicas was "
                    f"{replicas}"
                )
            yield line

    def _node_problem(self, node: int) -> str:
        """What is wrong with a node, and what to do; "" for nothing."""
        at, alone = self.members.nodes.get(node), len(self.only_copies(node))
        name = f"node {node:016x}"
        if at is not None:
            if at.free_bytes >= _FULL_SHARE * at.total_bytes:
                return ""
            return (
                f"{name} is nearly full, {at.free_bytes >> 20} MiB of {at.total_bytes >> 20} MiB "
                "free; add nodes or remove files"
            )
        kept = f"{name} is down, and with it the only copy of {counted(alone, 'group')}"
        if node not in self.members.records:
            if not alone:
                return ""  # its groups are about to be moved off it
            return (
                f"{kept}; it was removed: give up what only it has with: irdmafs cluster remove "
                f"{node:016x} --force, or have it back: irdmafs cluster admit {node:016x}"
            )
        if alone:
            return f"{kept}; start it again"
        return f"{name} is down; start it again, or: irdmafs cluster remove {node:016x}"

    def _unfit_rules(self) -> list[str]:
        """Placement rules that no node obeys. A rule stays known when no directory has it any more, so
        this is nothing wrong."""
        candidates = self.candidates()
        return [
            f"no node that is up fits the placement {rule!r}: below directories that have it "
            "nothing can be written"
            for rule in self.members.policies.values()
            if candidates and not any(map(parse_policy(rule).admits, candidates))
        ]

    def _quarantined(self) -> list[str]:
        """Describe, for each node, the extents that it keeps though nothing names them."""
        return [
            f"node {node:016x} keeps {counted(extents, 'extent')} ({size >> 20} MiB) in quarantine that "
            "nothing names: they go in time, or when room is wanted"
            for node, report in sorted(self.reports.items())
            if isinstance(extents := report.get("quarantined_extents"), int)
            and isinstance(size := report.get("quarantined_bytes"), int)
            and extents
        ]

    def to_json(self) -> dict[str, Any]:
        health, problems = self.health()
        settings = self.members.settings
        moving = self.moving()
        return {
            "health": health,
            "problems": problems,
            "notes": [*self.notes, *self._unfit_rules(), *self._quarantined()],
            "settings": None if settings is None else msgspec.structs.asdict(settings),
            "nodes": [self._node_json(node) for node in self.nodes()],
            "groups": {
                "total": len(self.groups),
                "unavailable": self.unavailable(),
                "degraded": self.missing().total(),
                "missing_replicas": {str(lack): n for lack, n in self.missing().items()},
            },
            "moving": {
                "replicas": moving.replicas,
                "bytes_about": moving.bytes,
                "seconds_about": round(moving.seconds, 1),
            },
            "damaged_files": [
                {"ino": ino, "path": self.paths.get(ino), "may_be_mended": may_be_mended}
                for ino, may_be_mended in self.damaged().items()
            ],
            "mounts": [
                {"session": session, **_told_of(record)}
                for session, record in sorted(self.members.sessions.items())
            ],
        }

    def _node_json(self, node: int) -> dict[str, Any]:
        record, at = self.members.records.get(node), self.members.nodes.get(node)
        result: dict[str, Any] = {
            "id": f"{node:016x}",
            "state": self.state_of(node),
            "weight": record.weight if record else None,
            "labels": record.labels if record else {},
            "groups_primary": self._primary[node],
            "groups_in_sync": self._in_sync[node],
            "groups_joining": self._joining[node],
        }
        if at is not None:
            result |= {
                "address": f"[{at.address}]" if ":" in at.address else at.address,
                "port": at.control_port,
                "host": at.host,
                "store": at.store,
                "total_bytes": at.total_bytes,
                "free_bytes": at.free_bytes,
                "version": at.version,
            }
            for key in _TOLD:
                result[key] = self.reports.get(node, {}).get(key)
        return result

    def candidates(self) -> list[Candidate]:
        """The nodes that groups should be on now: alive and not draining."""
        return [
            Candidate(node, record.weight, record.labels)
            for node, record in self.members.records.items()
            if self.state_of(node) == "up"
        ]

    def plan(self, candidates: Sequence[Candidate], held: Mapping[int, int]) -> dict[str, Any]:
        """What the groups' leaders would copy if these were the nodes; `held` are the groups' bytes."""
        moves = plan(self.groups, self._target_with(candidates), held)
        arriving: Counter[int] = Counter()
        for move in moves:
            arriving[move.to] += move.bytes
        return {
            "moves": [
                {
                    "group": f"{move.group:x}",
                    "from": f"{move.source:016x}" if move.source else None,
                    "to": f"{move.to:016x}",
                    "bytes": move.bytes,
                }
                for move in moves
            ],
            "bytes": arriving.total(),
            "bytes_kept": sum(
                held.get(group, 0) * len(config.in_sync) for group, config in self.groups.items()
            ),
            "seconds_about": round(max(arriving.values(), default=0) / self._rate, 1),
        }

    def _target_with(self, candidates: Sequence[Candidate]) -> Callable[[int], tuple[int, ...]]:
        """Where the leaders would bring each group if these were the nodes."""
        settings = self.members.settings
        assert settings is not None
        buckets, rules = settings.buckets, self.members.policies
        # Of a pool that has no targets in etcd yet.
        fresh = Placement(candidates, buckets, rules)
        targets: dict[int, Targets] = {}
        for pool, known in self.targets.items():
            policy = policy_of(pool << GROUP_BUCKET_BITS)
            rule = rules.get(policy) if policy else ""
            made = None
            if rule is not None:
                made = retargeted(known, pool, candidates, buckets, rule, known.target)
            targets[pool] = made or known

        def target(group: int) -> tuple[int, ...]:
            return targets.get(group >> GROUP_BUCKET_BITS, fresh).target(group)

        return target


async def read_cluster(engine: SharedEngine, rebalance_rate: int) -> Cluster:
    """Raises OSError when etcd cannot be asked."""
    members, groups = Members(), Groups()
    for consumer in (members, groups):
        records: list[KeyValue] = []
        revision = 0
        for prefix in consumer.prefixes:
            revision, found = await engine.snapshot(prefix, _after(prefix))
            records += found
        consumer.load(records, revision)
    targets = {
        _number(record): decode(record.value, Targets)
        for record in await engine.range(b"T", _after(b"T"))
    }
    cluster = Cluster(members, groups, targets, rebalance_rate)
    cluster.went_back = await read_reports(engine)
    return cluster


async def ask_nodes(found: Cluster, config: ClusterConfig) -> None:
    """Have the live nodes report. That one cannot be asked from here says nothing of its health: what
    counts is its lease."""
    try:
        credentials = config.cluster.credentials("admin")
    except ConfigError as error:
        found.notes.append(f"nodes are not asked: {error}")
        return

    async def ask(node: int, peers: Peers) -> None:
        try:
            with trio.fail_after(_ASK_S):
                found.reports[node] = await peers.status(node)
        except trio.TooSlowError:
            found.notes.append(f"node {node:016x} does not answer within {_ASK_S:g} s")
        except OSError as error:
            found.notes.append(f"node {node:016x} does not answer: {error.strerror or error}")

    peers = Peers(found.members.address, (), credentials=credentials, name="status", role="admin")
    async with peers, trio.open_nursery() as nursery:
        for node in found.live:
            nursery.start_soon(ask, node, peers)


async def begin_scrub(
    found: Cluster, config: ClusterConfig, nodes: Iterable[int]
) -> dict[int, str]:
    """Have these nodes look over everything they keep. Returns why some do not. Raises ConfigError."""
    refused: dict[int, str] = {}
    credentials = config.cluster.credentials("admin")
    peers = Peers(found.members.address, (), credentials=credentials, name="scrub", role="admin")
    async with peers:
        for node in nodes:
            try:
                with trio.fail_after(_ASK_S):
                    await peers.scrub(node)
            except trio.TooSlowError:
                refused[node] = f"it does not answer within {_ASK_S:g} s"
            except OSError as error:
                refused[node] = error.strerror or str(error)
    return refused


async def name_files(found: Cluster, engine: SharedEngine) -> None:
    """Find the paths of damaged files, by reading every name if there are any. Raises OSError."""
    damaged = found.damaged()
    if not damaged:
        return
    names: dict[int, tuple[int, bytes]] = {}
    start = b"d"
    while True:
        page = await engine.page(start, b"e", _SCAN_KEYS)
        for record in page:
            ino = int.from_bytes(record.value, "big")
            names[ino] = int.from_bytes(record.key[1:9], "big"), record.key[9:]
        if len(page) < _SCAN_KEYS:
            break
        start = page[-1].key + b"\0"
    for ino in damaged:
        parts: list[bytes] = []
        at = ino
        while at in names and len(parts) < _DEPTH_MAX:
            at, name = names[at]
            parts.append(name)
        if parts:
            found.paths[ino] = os.fsdecode(b"/" + b"/".join(reversed(parts)))


def _told_of(record: MountRecord) -> dict[str, Any]:
    return {
        key: value for key, value in msgspec.structs.asdict(record).items() if key != "key_digest"
    }


def _after(prefix: bytes) -> bytes:
    return prefix[:-1] + bytes([prefix[-1] + 1])


async def read_group_bytes(engine: SharedEngine, buckets: int) -> dict[int, int]:
    """What one replica of each group holds, in bytes, by reading every inode (1000 at a time)."""
    held: Counter[int] = Counter()
    start = b"i"
    while True:
        page = await engine.page(start, b"j", _SCAN_KEYS)
        held.update(bytes_of_groups(_layouts(page), buckets))
        if len(page) < _SCAN_KEYS:
            return dict(held)
        start = page[-1].key + b"\0"


def counted(count: int, noun: str) -> str:
    """ "1 node", "2 nodes"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _layouts(page: Iterable[KeyValue]) -> Iterable[tuple[Layout, int]]:
    for record in page:
        inode = Inode.decode(_number(record), record.value, record.mod_revision)
        if inode.extent:
            yield inode.layout, inode.size


def _number(record: KeyValue) -> int:
    return int.from_bytes(record.key[1:], "big")
