"""A whole cluster as it was read once (inquiry.py): nodes, groups, mounts, and copies under way."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from ..etcd.admin import Room
from ..kv.faults import Fault, FaultReport, Faults
from ..model.groups import degraded, leader
from ..model.placement import Placement, Targets, plan, policy_of, replicas_of, retargeted
from ..model.policy import LEVELS, Candidate
from ..model.records import GROUP_BUCKET_BITS, GroupConfig, Report
from ..model.values import ConfigError
from .group_configs import Groups
from .membership import Members


class Cluster:
    """The state that was read. `rebalance_rate` is the bytes per second at which each node fills groups."""

    def __init__(self, members: Members, groups: Groups, rebalance_rate: int) -> None:
        self.members = members
        self.groups: dict[int, GroupConfig] = {
            group: config for group, (config, _) in sorted(groups.all().items())
        }
        # Nodes that found that etcd went back in time.
        self.went_back: dict[int, Report] = {}
        # The reports of nodes, by node, and why others were not asked or did not answer.
        self.reports: dict[int, dict[str, object]] = {}
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
        return {
            group for group, config in self.groups.items() if self.members.keeps_alone(node, config)
        }

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
            report = self.reports.get(node, {})
            left = report.get("resync_bytes_left")
            left = float(left) if isinstance(left, int) else count * share
            rate = report.get("resync_bytes_per_s")
            size_bytes += left
            longest_s = max(
                longest_s, left / (rate if isinstance(rate, int) and rate else self._rate)
            )
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
            and (missing := degraded(config, live, replicas_of(group)))
        )

    def pools_in_use(self) -> set[int]:
        """Return the pools in which any file has contents, as nodes report; all pools without a report."""
        told = [
            set(pools)
            for report in self.reports.values()
            if isinstance(pools := report.get("pools_in_use"), list)
        ]
        return set().union(*told) if told else {group >> GROUP_BUCKET_BITS for group in self.groups}

    def unavailable(self) -> int:
        """Return the groups without a live member in sync."""
        live = self.live
        return sum(leader(config, live) is None for config in self.groups.values())

    def damaged(self) -> dict[int, bool]:
        """Return the inodes of which a live node has wrong bytes, and whether another node has, or may
        have, a right copy."""
        found: dict[int, bool] = {}
        for report in self.reports.values():
            told = report.get("wrong_files")
            for ino, may_be_mended in told if isinstance(told, list) else ():
                found[ino] = found.get(ino, True) and bool(may_be_mended)
        return found

    def faults(self) -> tuple[int, list[Fault]]:
        """Return how many records are damaged, as far as one process knows, and some of them."""
        told = [report.get("damaged_records", (0, ())) for report in self.reports.values()]
        reports = [self.own_faults.report(), *(msgspec.convert(one, FaultReport) for one in told)]
        some = {fault.what: fault for report in reports for fault in report.some}
        return max(len(some), *(report.number for report in reports)), [*some.values()]

    def plan(self, candidates: Sequence[Candidate], held: Mapping[int, int]) -> dict[str, Any]:
        """Return what the groups' leaders would copy if these were the nodes; `held` are the groups'
        bytes."""
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
        """Return the targets of each group if these were the nodes."""
        settings = self.members.settings
        assert settings is not None
        buckets, rules = settings.buckets, self.members.policies
        # The pool has no targets in etcd yet.
        fresh = Placement(candidates, buckets, rules)
        targets: dict[int, Targets] = {}
        for pool, (known, _) in self.members.targets.items():
            policy = policy_of(pool << GROUP_BUCKET_BITS)
            rule = rules.get(policy) if policy else ""
            made = None
            if rule is not None:
                made = retargeted(known, pool, candidates, buckets, rule, known.target)
            targets[pool] = made or known

        def target(group: int) -> tuple[int, ...]:
            return targets.get(group >> GROUP_BUCKET_BITS, fresh).target(group)

        return target
