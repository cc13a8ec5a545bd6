"""The placement of data: path -> placement group -> nodes. Pure functions.

A group number is policy << 24 | replicas << 16 | bucket; its upper half is the *pool*. Which nodes the
groups of a pool should be on is one record in etcd, Targets, derived from the former one when nodes are
added, removed or change weight: exactly each node's share is moved then, which no function of the current
nodes alone achieves. The actual placement is in the groups' configurations; their leaders move them
towards the targets (groups.next_step).
"""

import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Annotated

import msgspec

from .policy import LEVELS, REPLICAS_MAX, Candidate, Policy, policy_of_rule
from .records import GROUP_BUCKET_BITS, STRIPE_GROUPS_MAX, Layout, Number

# Groups of a pool. Each is a key of some 40 bytes that every process keeps, and changes on its own
# when a node dies: few, and yet one group is a small part of a node's load with up to 50 nodes.
BUCKETS = 1024
_REPLICA_BITS = 8
_LOCAL_TRIES = 64


# --- path -> group


def seed_of(path: bytes) -> int:
    """Return 64 bits that spread paths evenly."""
    return int.from_bytes(hashlib.blake2b(path, digest_size=8).digest(), "big")


def pool_of(replicas: int, policy: int = 0) -> int:
    return policy << _REPLICA_BITS | replicas


def replicas_of(group: int) -> int:
    return group >> GROUP_BUCKET_BITS & (1 << _REPLICA_BITS) - 1


def policy_of(group: int) -> int:
    return group >> GROUP_BUCKET_BITS + _REPLICA_BITS


def group_of(layout: Layout, stripe: int, buckets: int) -> int:
    """Return the group of a stripe; a content's stripes are in at most STRIPE_GROUPS_MAX of them."""
    bucket = (layout.seed + stripe % STRIPE_GROUPS_MAX) % buckets
    pool = layout.policy << _REPLICA_BITS | layout.replicas
    return pool << GROUP_BUCKET_BITS | bucket


def groups_of(layout: Layout, size: int, buckets: int) -> set[int]:
    """Return the groups of all stripes of a content of `size` bytes."""
    stripes = min(layout.stripes(size), STRIPE_GROUPS_MAX)
    return {group_of(layout, stripe, buckets) for stripe in range(stripes)}


def local_seed(
    path: bytes, layout: Layout, size_hint: int, buckets: int, local: Callable[[int], bool]
) -> int:
    """Return a seed under which as many of a content's groups as possible are `local`, which tells whether
    a group has a member on the writer's host. A content of one stripe always gets such a group, if there
    is any."""
    stripes = min(max(1, layout.stripes(size_hint)), STRIPE_GROUPS_MAX)
    best, best_count = 0, -1
    for attempt in range(_LOCAL_TRIES):
        # A path has no NUL, so the suffix cannot make it another file's path.
        seed = seed_of(path if not attempt else path + b"\0%d" % attempt)
        groups = (group_of(layout._replace(seed=seed), i, buckets) for i in range(stripes))
        count = sum(map(local, groups))
        if count > best_count:
            best, best_count = seed, count
        if count == stripes:
            break
    return best


# --- group -> nodes


def place_all(
    pool: int,
    candidates: Iterable[Candidate],
    buckets: int = BUCKETS,
    policy: Policy | None = None,
    before: Callable[[int], Sequence[int]] | None = None,
) -> list[tuple[int, ...]]:
    """Return the nodes for each group of a pool, by bucket, the primary first: one for each replica, or all
    nodes if they are fewer; none if the policy admits none. `before` are the current nodes of a group: it
    stays there as far as shares and failure domains allow."""
    policy = policy or Policy()
    fitting = (one for one in candidates if one.weight > 0 and policy.admits(one))
    nodes = sorted(fitting, key=attrgetter("node"))
    replicas = min(pool & (1 << _REPLICA_BITS) - 1, REPLICAS_MAX, len(nodes))
    if not replicas:
        return [()] * buckets
    # Imported here, as most processes place nothing: a mount starts without numpy.
    import numpy as np

    from .rendezvous import settle

    names = [candidate.node for candidate in nodes]
    first = pool << GROUP_BUCKET_BITS
    held = np.zeros((buckets, len(nodes)), dtype=bool)
    if before is not None:
        column = {name: index for index, name in enumerate(names)}
        for bucket in range(buckets):
            held[bucket, [column[node] for node in before(first + bucket) if node in column]] = True
    chosen = settle(
        np.arange(first, first + buckets, dtype=np.uint64),
        np.array(names, dtype=np.uint64),
        np.array([candidate.weight for candidate in nodes], dtype=np.float64),
        [np.array(column, dtype=np.int64) for column in _domains(nodes, policy.levels)],
        replicas,
        held,
    )
    return [tuple(names[index] for index in row) for row in chosen.tolist()]


class Placement:
    """The placement of new groups, which are empty. A pool is computed when it is first needed.

    `rules` are the policies by number, as they are in etcd.
    """

    def __init__(
        self,
        candidates: Iterable[Candidate],
        buckets: int = BUCKETS,
        rules: Mapping[int, str] | None = None,
    ) -> None:
        self.candidates = tuple(candidates)
        self.buckets = buckets
        self.rules = {0: "", **(rules or {})}
        self._pools: dict[int, list[tuple[int, ...]]] = {}

    def target(self, group: int) -> tuple[int, ...]:
        """Return the nodes of a group, as place_all does; () also if the group's policy is not known."""
        pool = group >> GROUP_BUCKET_BITS
        targets = self._pools.get(pool)
        if targets is None:
            rule = self.rules.get(policy_of(group))
            if rule is None:
                return ()
            policy = policy_of_rule(rule)
            targets = self._pools[pool] = place_all(pool, self.candidates, self.buckets, policy)
        bucket = group & (1 << GROUP_BUCKET_BITS) - 1
        return targets[bucket] if bucket < len(targets) else ()


class Targets(msgspec.Struct, array_like=True, frozen=True):
    """The nodes that the groups of a pool should be on (records.targets_key). `made_for` identifies the
    input; `rows` has per bucket `replicas` indices into `nodes`, 2 bytes LE each."""

    made_for: str
    nodes: tuple[Number, ...]
    replicas: Annotated[int, msgspec.Meta(ge=0, le=REPLICAS_MAX)]
    rows: bytes

    def check(self) -> None:
        """Raise msgspec.ValidationError for rows that lead to no node."""
        if len(self.rows) % max(2, 2 * self.replicas):
            raise msgspec.ValidationError("its rows are incomplete")
        if max(_places(self.rows), default=-1) >= len(self.nodes):
            raise msgspec.ValidationError("a row leads to no node")

    def target(self, group: int) -> tuple[int, ...]:
        """Return the nodes for a group, the primary first; () if there is none."""
        width = 2 * self.replicas
        start = (group & (1 << GROUP_BUCKET_BITS) - 1) * width
        return tuple(map(self.nodes.__getitem__, _places(self.rows[start : start + width])))


def _places(rows: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(rows) // 2}H", rows)


def retargeted(
    known: Targets | None,
    pool: int,
    candidates: Iterable[Candidate],
    buckets: int,
    rule: str,
    members: Callable[[int], Sequence[int]],
) -> Targets | None:
    """Return the record to replace `known`; None if that one still fits, or if no node is admitted (then
    everything stays where it is). `members` returns the nodes of a group without a known target."""
    nodes = sorted(candidates, key=attrgetter("node"))
    described = [[node.node, float(node.weight), sorted(node.labels.items())] for node in nodes]
    made_of = msgspec.json.encode([buckets, rule, described])
    made_for = hashlib.blake2b(made_of, digest_size=16).hexdigest()
    if known is not None and known.made_for == made_for:
        return None
    before = members if known is None else known.target
    targets = place_all(pool, nodes, buckets, policy_of_rule(rule), before)
    if not targets[0]:
        return None
    names = tuple(sorted({node for target in targets for node in target}))
    index = {name: number.to_bytes(2, "little") for number, name in enumerate(names)}
    rows = b"".join(index[node] for target in targets for node in target)
    return Targets(made_for, names, len(targets[0]), rows)


def _domains(nodes: Sequence[Candidate], levels: Sequence[str]) -> list[list[int]]:
    """Return, per level, the number of each node's domain. A rack is a rack of its zone, and so on."""
    result = []
    for level in levels:
        path = LEVELS[: LEVELS.index(level) + 1]
        numbers: dict[tuple[object, ...], int] = {}
        column = []
        for candidate in nodes:
            name: tuple[object, ...] = tuple(candidate.labels.get(part, "") for part in path)
            if level == "host" and not candidate.labels.get("host"):
                name = (*name, candidate.node)
            column.append(numbers.setdefault(name, len(numbers)))
        result.append(column)
    return result
