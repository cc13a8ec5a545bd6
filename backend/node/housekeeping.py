"""Tasks that one node does for the cluster: make groups, place them, and compact etcd's history.

Every node runs this; the elected one (Members.elected) acts. The election need not be exact: two nodes may
act for a moment, as targets are put by compare-and-swap. Each node watches the room that etcd has.
"""

import errno
import logging
import time
from collections import deque
from dataclasses import dataclass

import trio

from ..etcd.admin import remedy
from ..etcd.engine import EtcdEngine
from ..kv import Put
from ..model.placement import policy_of, replicas_of, retargeted
from ..model.policy import POLICIES_MAX, REPLICAS_MAX, Candidate
from ..model.records import GROUP_BUCKET_BITS, encode, targets_key
from ..observe.figures import gauge, gauges
from ..observe.logs import log_failure
from .state import ClusterState

log = logging.getLogger(__name__)

# A watch that was interrupted for less continues where it was; for longer, it reads all keys anew. A
# transaction of unknown outcome is looked for in the history within a minute.
HISTORY_KEPT_S = 600.0
FORGET_PERIOD_S = 120.0
_FORGET_TIMEOUT_S = 10.0
# Etcd is asked for its room so often.
_ROOM_PERIOD_S = 30.0
_ALARMS = ("CORRUPT", "NOSPACE")


class Housekeeping:
    """The housekeeping of one store node."""

    def __init__(self, cluster: ClusterState, *, rereplicate_after_s: float) -> None:
        self._cluster = cluster
        self._rereplicate_after_s = rereplicate_after_s
        # By pool: what its targets were last made for.
        self._fitting: dict[int, tuple[tuple[Candidate, ...], str, int]] = {}
        self._passed: deque[tuple[float, int]] = deque()  # times, and what had been applied then
        self._forgotten = 0

    def acts(self) -> bool:
        """Return whether this node is the one to act now."""
        cluster = self._cluster
        return cluster.session.valid() and cluster.members.elected() == cluster.node

    # --- targets

    async def retarget(self) -> bool:
        """Make the targets anew of each pool for which the candidate nodes or the placement rule have
        changed. Return whether there was any such pool. Raises OSError."""
        if not self.acts():
            return False
        changed = False
        for pool in sorted(self._cluster.groups.pools()):
            changed |= await self._retarget_pool(pool, self._cluster.members.settings.buckets)
        return changed

    async def _retarget_pool(self, pool: int, buckets: int) -> bool:
        members = self._cluster.members
        known, revision = members.targets.get(pool, (None, 0))
        if known is not None and not known.nodes:
            known = None
        policy = policy_of(pool << GROUP_BUCKET_BITS)
        rule = members.policies.get(policy) if policy else ""
        # A node that has been dead for long is in no targets. It must not get in again because this process
        # has only just learned of it: its share would be taken from others.
        candidates = members.candidates(self._rereplicate_after_s, known.nodes if known else ())
        if rule is None or self._fitting.get(pool) == (candidates, rule, revision):
            return False
        where = {
            group: config.members
            for group, (config, _) in self._cluster.groups.configs.items()
            if group >> GROUP_BUCKET_BITS == pool
        }
        try:
            # About 10 ms for 1024 groups on 10 nodes; leases have to be renewed meanwhile.
            targets = await trio.to_thread.run_sync(
                retargeted,
                known,
                pool,
                candidates,
                buckets,
                rule,
                lambda group: where.get(group, ()),
            )
        except ValueError as error:
            log.error("groups of pool %#x stay where they are: %s", pool, error)
            targets = None
        if targets is None:
            self._fitting[pool] = candidates, rule, revision
            return False
        put = Put(targets_key(pool), encode(targets))
        if await self._cluster.replica.attempt([(put.key, revision)], [put]):
            log.info("the groups of pool %#x are to be on %d nodes", pool, len(targets.nodes))
        return True

    # --- groups

    async def make_groups(self) -> bool:
        """Create the groups of the pools that mounts want. Return whether there were any to create."""
        if not self.acts():
            return False
        made, cluster, groups = False, self._cluster, self._cluster.groups
        for pool in sorted(groups.wanted):
            if not self._is_sensible(pool):
                continue
            if not groups.missing(pool, cluster.members.settings.buckets):
                continue
            try:
                await groups.ensure(cluster.replica, pool, cluster.members.placement())
                made = True
            except OSError as error:
                if error.errno != errno.EHOSTUNREACH:
                    raise
                log.info("the groups of pool %#x are not made yet: %s", pool, error)
        return made

    def _is_sensible(self, pool: int) -> bool:
        """Return whether any file can be in the pool: etcd does not limit what mounts ask for."""
        group = pool << GROUP_BUCKET_BITS
        policy = policy_of(group)
        return 0 < replicas_of(group) <= REPLICAS_MAX and (
            not policy or (policy <= POLICIES_MAX and policy in self._cluster.members.policies)
        )

    # --- history

    async def forget_history(self) -> None:
        """Let etcd forget, from time to time, what is older than HISTORY_KEPT_S."""
        while True:
            await trio.sleep(FORGET_PERIOD_S)
            await self.forget(time.monotonic())

    async def forget(self, now: float) -> None:
        """Note how far etcd is at `now` (time.monotonic()), and if this node acts, let etcd forget what is
        older than HISTORY_KEPT_S. A failure is only logged."""
        self._passed.append((now, self._cluster.replica.applied))
        old = 0
        while self._passed and self._passed[0][0] <= now - HISTORY_KEPT_S:
            old = self._passed.popleft()[1]
        if old <= self._forgotten or not self.acts():
            return
        try:
            with trio.fail_after(_FORGET_TIMEOUT_S):
                await self._cluster.engine.admin.compact(old)
            self._forgotten = old
        except (OSError, trio.TooSlowError) as error:
            log.info("etcd's history before revision %d is kept for now: %s", old, error)


@dataclass(slots=True)
class EtcdFigures:
    """The room of the member of etcd that this node uses."""

    etcd_file_bytes: int = gauge("Size of etcd's file, which its quota limits")
    etcd_used_bytes: int = gauge("Bytes of etcd's file in use")
    etcd_quota_bytes: int = gauge("etcd's quota; 0: not known")
    etcd_alarms: dict[str, int] = gauges("1 for an alarm of etcd that is raised", "alarm")


class EtcdWatch:
    """Asks etcd for its room from time to time, and logs an alarm, which stops the whole cluster."""

    def __init__(self, engine: EtcdEngine) -> None:
        self._engine = engine
        self.figures = EtcdFigures()
        self._told: tuple[object, ...] = (False,)  # the alarms, and whether there was a fault

    async def run(self) -> None:
        while True:
            with log_failure(log.info, "the room of etcd is not known"):
                await self.look()
            await trio.sleep(_ROOM_PERIOD_S)

    async def look(self) -> None:
        """Ask etcd once. Raises OSError."""
        room = await self._engine.admin.room()
        alarms = {alarm: int(alarm in room.alarms) for alarm in _ALARMS}
        self.figures = EtcdFigures(room.file_bytes, room.used_bytes, room.quota_bytes, alarms)
        fault = remedy(room)
        kind = (*room.alarms, bool(fault))
        if kind != self._told:
            self._told = kind
            if fault:
                log.error("%s", fault)
            else:
                log.info("etcd has room, and no alarm")
