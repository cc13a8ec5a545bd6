"""Random faults for a cluster: what happens to it, when, and how it is undone."""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from harness.clusters import Cluster, Daemon, StoreNode
from harness.storms.history import Operation

MEGABIT = 1e6
RECOVERY_S = 90.0
# So many at a time; with more than that hardly anything works, and little is tested.
AT_ONCE = 2
# A mount stores what it defers within this time, unless it is cut off.
DEFERRED_NS = 1e9


@dataclass(frozen=True, slots=True)
class Fault:
    """What was done, when (nanoseconds, monotonic), and the hosts whose own work it disturbs."""

    kind: str
    what: str
    began: int
    ended: int
    hosts: frozenset[str]

    def __str__(self) -> str:
        return f"{self.began / 1e9:.3f}..{self.ended / 1e9:.3f} {self.kind} {self.what}"


class Faults:
    """Does random harm to a cluster, most of it undone after a while; `history` is what was done.

    `at_once` 1: the cluster recovers from each before the next."""

    # The time of a fault, and of a pause, in lengths of a lease.
    lasts = (0.1, 1.8)
    pauses = (1.1, 2.0)
    gap_s = (0.2, 1.5)

    def __init__(self, cluster: Cluster, seed: int, at_once: int = AT_ONCE) -> None:
        self._cluster = cluster
        self._at_once = at_once
        self._random = random.Random(seed)
        self._ttl_s = cluster.plan.lease_ttl_s
        self._numbers = itertools.count()
        self._ending: list[tuple[float, int, Callable[[], None]]] = []
        self._hurt: set[str] = set()
        self.history: list[Fault] = []
        self._kinds: dict[str, Callable[[], None]] = {
            "kill node": self._kill_node,
            "lose store": self._lose_store,
            "kill mount": self._kill_mount,
            "kill etcd": self._kill_etcd,
            "isolate etcd": lambda: self._isolate("etcd", self._etcd_member()),
            "pause etcd": lambda: self._pause("etcd", self._etcd_member()),
            "cut": self._cut,
            "cut one way": lambda: self._cut(one_way=True),
            "isolate node": lambda: self._isolate("node", cluster.nodes),
            "isolate mount": lambda: self._isolate("mount", cluster.mounts),
            "pause node": lambda: self._pause("node", cluster.nodes),
            "pause mount": lambda: self._pause("mount", cluster.mounts),
            "fill node": self._fill,
            "slow link": self._slow_down,
        }

    def run(self, count: int) -> None:
        """So many faults, and the end of all of them. Raises CommandFailed when the cluster does not
        recover, or dies of it."""
        # Each kind comes up, however few there are.
        order: list[str] = []
        while len(order) < count:
            order += self._random.sample(sorted(self._kinds), len(self._kinds))
        for kind in order[:count]:
            self._do(kind)
        self._recover()

    def _recover(self) -> None:
        self._end_all()
        self._cluster.heal_all()
        for mount in self._cluster.mounts:
            mount.wait_ready()
        self._cluster.wait_healthy(RECOVERY_S)

    def _do(self, kind: str) -> None:
        while len(self._ending) >= self._at_once:
            self._end_next()
        if self._at_once == 1:
            self._cluster.wait_healthy()
        self._kinds[kind]()
        self._pass_time(self._random.uniform(*self.gap_s))

    def _end_all(self) -> None:
        while self._ending:
            self._end_next()

    # -- time

    def _pass_time(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._ending and self._ending[0][0] <= until:
            self._end_next()
        time.sleep(max(0.0, until - time.monotonic()))

    def _end_next(self) -> None:
        at, _, end = heapq.heappop(self._ending)
        time.sleep(max(0.0, at - time.monotonic()))
        end()

    def _begin(
        self,
        kind: str,
        parts: Sequence[Daemon],
        seconds: float,
        end: Callable[[], None],
        what: str = "",
        began: int | None = None,
    ) -> None:
        began = time.monotonic_ns() if began is None else began
        names = {part.name for part in parts}
        self._hurt |= names

        def finish() -> None:
            end()
            self._hurt.difference_update(names)
            hosts = frozenset(part.host.name for part in parts)
            text = what or " - ".join(part.name for part in parts)
            self.history.append(Fault(kind, text, began, time.monotonic_ns(), hosts))

        heapq.heappush(self._ending, (time.monotonic() + seconds, next(self._numbers), finish))

    def _choose(self, parts: Sequence[Daemon]) -> Daemon | None:
        whole = [part for part in parts if part.name not in self._hurt]
        return self._random.choice(whole) if whole else None

    def _any_duration_s(self) -> float:
        """Shorter or longer than a lease."""
        return self._random.uniform(*self.lasts) * self._ttl_s

    def _pause_s(self) -> float:
        """Until after the lease is over: who was stopped wakes up as somebody who was given up."""
        return self._random.uniform(*self.pauses) * self._ttl_s

    # -- faults

    def _kill_node(self) -> None:
        node = self._choose(self._cluster.nodes)
        if node is not None:
            node.kill9()
            self._begin("kill node", [node], self._any_duration_s(), node.start)

    def _lose_store(self) -> None:
        """A node comes back empty. What it kept must be elsewhere, so nothing else may be wrong."""
        self._end_all()
        self._cluster.wait_healthy()
        node = self._choose(self._cluster.nodes)
        assert isinstance(node, StoreNode)
        node.kill9()
        began = time.monotonic_ns()
        node.wipe()
        node.start()
        # A node under a new number: the old one's groups are filled again elsewhere.
        self._cluster.wait_healthy()
        self._begin("lose store", [node], 0, lambda: None, began=began)

    def _kill_mount(self) -> None:
        mount = self._choose(self._cluster.mounts)
        if mount is not None:
            mount.kill9()
            seconds = self._random.uniform(0, 0.5)
            self._begin("kill mount", [mount], seconds, mount.start)

    def _kill_etcd(self) -> None:
        for member in self._etcd_member():
            member.kill9()
            self._begin("kill etcd", [member], self._any_duration_s(), member.start)

    def _etcd_member(self) -> Sequence[Daemon]:
        """Return one of several members, often the leader; none while another one is hurt."""
        members = self._cluster.etcd.members
        if len(members) < 3 or any(member.name in self._hurt for member in members):
            return []
        leads = self._random.random() < 0.5
        return [members[self._cluster.etcd.leader()] if leads else self._random.choice(members)]

    def _cut(self, one_way: bool = False) -> None:
        one = self._choose([*self._cluster.nodes, *self._cluster.mounts])
        others = [part for part in self._cluster.parts() if one is not None and part is not one]
        other = self._choose([part for part in others if part.host != (one and one.host)])
        if one is None or other is None:
            return
        if self._random.random() < 0.5:
            one, other = other, one
        self._cluster.cut(one, other, one_way=one_way)
        self._begin(
            "cut one way" if one_way else "cut",
            [one, other],
            self._any_duration_s(),
            lambda: self._cluster.heal(one, other),
            f"{one.name} {'->' if one_way else '-'} {other.name}",
        )

    def _isolate(self, kind: str, parts: Sequence[Daemon]) -> None:
        part = self._choose(parts)
        if part is None:
            return
        self._cluster.isolate(part)
        others = [other for other in self._cluster.parts() if other.host != part.host]

        def heal() -> None:
            for other in others:
                self._cluster.heal(part, other)

        self._begin(f"isolate {kind}", [part], self._any_duration_s(), heal)

    def _pause(self, kind: str, parts: Sequence[Daemon]) -> None:
        part = self._choose(parts)
        if part is not None:
            part.pause()
            self._begin(f"pause {kind}", [part], self._pause_s(), part.resume)

    def _fill(self) -> None:
        node = self._choose(self._cluster.nodes)
        if node is not None:
            assert isinstance(node, StoreNode)
            node.fill(self._random.choice((0, 1 << 20)))
            self._begin("fill node", [node], self._any_duration_s(), node.unfill)

    def _slow_down(self) -> None:
        part = self._choose([*self._cluster.nodes, *self._cluster.mounts])
        if part is not None:
            bits_per_s = self._random.uniform(20, 300) * MEGABIT
            self._cluster.slow_down(part, bits_per_s)
            what = f"{part.name} to {bits_per_s / MEGABIT:.0f} Mbit/s"
            end = lambda: self._cluster.slow_down(part, None)  # noqa: E731
            self._begin("slow link", [part], self._any_duration_s(), end, what)


def can_write(
    faults: Sequence[Fault], host: str, when: int, groups: Collection[Collection[str]]
) -> bool:
    """Return whether faults left the mount of a host what writing takes besides etcd, at a time when the
    members in sync of each group were on these hosts."""
    away = {""}
    for fault in faults:
        if fault.began <= when < fault.ended and fault.kind != "slow link":
            # A cut has two ends. It matters here if this host is one.
            is_cut = len(fault.hosts) > 1
            away |= fault.hosts - {host} if not is_cut or host in fault.hosts else set()
            if not is_cut and host in fault.hosts:
                return False
    return all(set(members) - away for members in groups)


def with_deferred(faults: Sequence[Fault], operations: Iterable[Operation]) -> list[Operation]:
    """Return the operations, and as failed those that may be lost: removals shortly before a mount was
    killed or cut off, or while it was (backend/namespace/deferred.py)."""

    def may_be_lost(operation: Operation) -> bool:
        return any(
            operation.host in fault.hosts
            and fault.began < operation.end + DEFERRED_NS
            and operation.start < fault.ended + DEFERRED_NS
            for fault in faults
        )

    return [
        replace(operation, outcome="failed")
        if operation.kind == "unlink" and operation.outcome == "ok" and may_be_lost(operation)
        else operation
        for operation in operations
    ]
