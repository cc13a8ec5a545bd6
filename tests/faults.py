"""Random faults for a cluster: what happens to it, when, and how it is undone."""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cluster import Cluster, Daemon, StoreNode
from history import Operation

MEGABIT = 1e6
# So many at a time; with more than that hardly anything works, and little is tested.
AT_ONCE = 2
GAP_S = (0.2, 1.5)


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

    `at_once` 1: the cluster recovers from each before the next, so that stalls are those of one."""

    def __init__(
        self,
        cluster: Cluster,
        seed: int,
        at_once: int = AT_ONCE,
        gap_s: tuple[float, float] = GAP_S,
    ) -> None:
        self._cluster = cluster
        self._at_once = at_once
        self._gap_s = gap_s
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
            "cut": self._cut,
            "cut one way": lambda: self._cut(one_way=True),
            "isolate node": self._isolate,
            "pause node": self._pause,
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
        self._end_all()

    def _do(self, kind: str) -> None:
        while len(self._ending) >= self._at_once:
            self._end_next()
        if self._at_once == 1:
            self._cluster.wait_healthy()
        self._kinds[kind]()
        self._pass_time(self._random.uniform(*self._gap_s))

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
        return self._random.uniform(0.1, 1.8) * self._ttl_s

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
        """One member of several; sometimes the leader."""
        members = self._cluster.etcd.members
        if len(members) < 3 or any(member.name in self._hurt for member in members):
            return
        leader = self._random.random() < 0.5
        member = members[self._cluster.etcd.leader()] if leader else self._random.choice(members)
        member.kill9()
        what = member.name + (", the leader" if leader else "")
        self._begin("kill etcd", [member], self._any_duration_s(), member.start, what)

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

    def _isolate(self) -> None:
        node = self._choose(self._cluster.nodes)
        if node is None:
            return
        others = [part for part in self._cluster.parts() if part.host != node.host]
        for other in others:
            self._cluster.cut(node, other)

        def heal() -> None:
            for other in others:
                self._cluster.heal(node, other)

        self._begin("isolate node", [node], self._any_duration_s(), heal)

    def _pause(self) -> None:
        """SIGSTOP until after the lease is over: it wakes up as somebody who was given up."""
        node = self._choose(self._cluster.nodes)
        if node is not None:
            node.pause()
            seconds = self._random.uniform(1.1, 2.0) * self._ttl_s
            self._begin("pause node", [node], seconds, node.resume)

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


class Stall(NamedTuple):
    """How long the slowest operation took that a fault met and that succeeded, in seconds, of programs
    on hosts that the fault left alone."""

    kind: str
    seconds: float


def stalls(faults: Sequence[Fault], operations: Sequence[Operation]) -> list[Stall]:
    """One for each fault."""
    answered = [o for o in operations if o.outcome in ("ok", "absent", "exists")]
    found = []
    for fault in faults:
        met = [
            operation.end - operation.began
            for operation in answered
            if operation.began < fault.ended
            and fault.began < operation.end
            and operation.host not in fault.hosts
        ]
        found.append(Stall(fault.kind, max(met, default=0) / 1e9))
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """Of sorted values."""
    return values[min(len(values) - 1, int(len(values) * share))]
