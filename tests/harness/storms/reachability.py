"""How long writers wrote nothing although they had what writing takes.

A thread on the host of each mount looks at etcd, again and again, as a client of its own. A look is
*clear* if

- etcd answered it with a linearizable read: a majority of etcd's members is together, and one that belongs
  to it can be reached from the host,
- the mount is mounted, and no fault harms its process or its whole host,
- each group has a member in sync that no fault harms, and whose link to the host is not cut.

So a time in which a storm keeps a majority of etcd or all replicas of a group away is not counted. Looks
are counted and not seconds: a machine that is too busy for the mounts is too busy for the looks, too.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection

from harness.closing import Closing
from harness.clusters import Cluster, ClusterMount, CommandFailed
from harness.etcd import ask, pairs_in, range_of
from harness.fork_server import enter
from harness.forks import namespace_of
from irdmafs.backend.model.records import GroupConfig, NodeAddress, decode

LOOK_EVERY_S = 0.2
ANSWER_S = 0.5
PREFIX = b"/irdmafs/default/"

NO_MORE = sys.maxsize, False
# When somebody looked, and the hosts of the members in sync of each group; None: nothing could be written.
Look = tuple[int, list[list[str]] | None]
# can_write(when, groups): no fault stopped a writer then, when the members in sync were on these hosts.
CanWrite = Callable[[int, Collection[Collection[str]]], bool]


@dataclass(frozen=True, slots=True)
class Gap:
    """A time without success, in nanoseconds, and how many looks in succession were clear in it at most."""

    began: int
    ended: int
    clear: int

    def __str__(self) -> str:
        seconds = (self.ended - self.began) / 1e9
        return f"{seconds:.1f} s from {self.began / 1e9:.3f}, {self.clear} clear looks"


def gaps(successes: Sequence[int], looks: Sequence[Look], can_write: CanWrite) -> list[Gap]:
    """Return the times between successes of one writer, whose host made these looks."""
    found = []
    judged = ((when, groups is not None and can_write(when, groups)) for when, groups in looks)
    when, clear = next(judged, NO_MORE)
    for began, ended in itertools.pairwise(successes):
        longest = run = 0
        while when < ended:
            run = run + 1 if clear and when > began else 0
            longest = max(longest, run)
            when, clear = next(judged, NO_MORE)
        found.append(Gap(began, ended, longest))
    return found


class Lookouts(Closing):
    """Look from each host, as long as the block runs; `looks` has what was seen, by host."""

    def __init__(self, cluster: Cluster) -> None:
        self.looks: dict[str, list[Look]] = {mount.host.name: [] for mount in cluster.mounts}
        self._ended = threading.Event()
        self._threads = ThreadPoolExecutor(len(cluster.mounts))
        self._looking = [
            self._threads.submit(self._keep_looking, mount, [*cluster.etcd.endpoints])
            for mount in cluster.mounts
        ]

    def close(self) -> None:
        """Raises what kept somebody from looking."""
        self._ended.set()
        with self._threads:
            for looking in self._looking:
                looking.result()

    def _keep_looking(self, mount: ClusterMount, endpoints: list[str]) -> None:
        if namespace := namespace_of(mount.host.launcher):
            enter(namespace)
        hosts: dict[bytes, str] = {}
        next_s = time.monotonic()
        while not self._ended.wait(next_s - time.monotonic()):
            next_s = time.monotonic() + LOOK_EVERY_S
            when = time.monotonic_ns()
            groups = _look(endpoints, hosts) if mount.is_mounted() else None
            self.looks[mount.host.name].append((when, groups))


def _look(endpoints: list[str], hosts: dict[bytes, str]) -> list[list[str]] | None:
    """Ask an etcd member that answers, which is the first one to be asked next time. `hosts` are those of
    all nodes that were ever seen."""
    for endpoint in endpoints:
        try:
            nodes, groups = (_records(endpoint, PREFIX + kind) for kind in (b"n", b"g"))
        except CommandFailed:
            continue
        if nodes and groups:
            endpoints.remove(endpoint)
            endpoints.insert(0, endpoint)
            hosts |= {key: decode(value, NodeAddress).host for key, value in nodes.items()}
            sets = {decode(value, GroupConfig).in_sync for value in groups.values()}
            return [[hosts.get(node.to_bytes(8, "big"), "") for node in nodes] for nodes in sets]
    return None


def _records(endpoint: str, prefix: bytes) -> dict[bytes, bytes]:
    connection = HTTPConnection(endpoint, timeout=ANSWER_S)
    return pairs_in(ask(connection, "kv/range", range_of(prefix)), prefix)
