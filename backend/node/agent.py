"""The leader's work: bringing groups to where they belong, one configuration change at a time.

Each node runs an agent, which changes the groups whose first live member in sync is this node. Two agents
may both take themselves for a group's leader for a moment: each put compares the revision that it was
decided on, so one of them fails and looks again. groups.next_step decides what, this module when.
"""

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import trio

from ..cluster.lease import SessionEnded
from ..cluster.membership import removed_for_good
from ..kv import Conflict
from ..model.groups import emptied, leader, next_step, refenced, without
from ..model.records import GROUP_BUCKET_BITS, GroupConfig
from ..observe.logs import log_failure
from ..pauses import Rests
from .catalog import Catalog
from .handover import Handover
from .housekeeping import Housekeeping
from .state import ClusterState

log = logging.getLogger(__name__)

# Events come in bursts (a node's death touches all its groups): look once for all of them.
GATHER_S = 0.02
RETRY_S = 1.0
LOOK_ANYWAY_S = 10.0
# How long a live node that was full or out of reach is given no groups; then twice as long.
SHUN_FIRST_S = 5.0
SHUN_MAX_S = 300.0
PING_TIMEOUT_S = 2.0
# A node with less free room than this share is given no groups to fill.
ROOM_SHARE = 0.02
# The most groups that a node joins at a time.
_JOINING_AT_ONCE = 8


class Agent:
    """`ping` raises OSError for a node without a sign of life. `handover` tells when to drop a live one."""

    def __init__(
        self,
        cluster: ClusterState,
        catalog: Catalog,
        ping: Callable[[int], Awaitable[None]],
        handover: Handover,
        *,
        rereplicate_after_s: float,
    ) -> None:
        self.node = cluster.node
        self.rereplicate_after_s = rereplicate_after_s
        self._cluster = cluster
        self._catalog = catalog
        self._ping = ping
        self._wake = trio.Event()
        self._shunned = Rests(SHUN_FIRST_S, SHUN_MAX_S)
        self._waits_for_names = False  # to go: no event tells when they are gone
        self._handover = handover
        self.housekeeping = Housekeeping(cluster, rereplicate_after_s=rereplicate_after_s)
        cluster.members.node_changed.append(self._node_changed)
        cluster.members.targets_changed.append(lambda pool: self.look())
        cluster.groups.group_changed.append(self._group_changed)
        cluster.groups.pool_wanted.append(lambda pool: self.look())

    async def run(self) -> None:
        """Lead groups until the session is released."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.housekeeping.forget_history)
            nursery.start_soon(self._handover.run, self.look)
            await self._run()
            nursery.cancel_scope.cancel()

    async def _run(self) -> None:
        while not self._cluster.session.released:
            try:
                await self._cluster.session.wait_valid()
            except SessionEnded:
                return
            self._wake = trio.Event()
            try:
                if (
                    await self.housekeeping.make_groups()
                    or await self.housekeeping.retarget()
                    or await self._lead()
                    or await self._begin_anew()
                ):
                    continue
            except OSError as error:
                log.warning("groups could not be changed: %s", error)
                await trio.sleep(RETRY_S)
                continue
            with trio.move_on_after(self._quiet_s()):
                await self._wake.wait()
            await trio.sleep(GATHER_S)

    async def evict(self, group: int, node: int) -> bool:
        """Take a member that a writer cannot reach out of its group if that is right; return if it is out.

        Only a member that holds everything may do so, and only if it cannot reach the other one either.
        Raises OSError if etcd cannot be asked.
        """
        await self._cluster.replica.barrier()
        config, revision = self._cluster.groups.get(group)
        if node not in config.members:
            return True
        if (
            node == self.node
            or self.node not in config.in_sync
            or not self._cluster.session.valid()
            or await self._answers_now(node)
        ):
            return False
        log.warning("node %x is evicted from group %#x: it cannot be reached", node, group)
        return await self._cluster.change({group: (revision, without(config, node))})

    async def leave(self) -> int:
        """Prepare a clean stop: take this node out of every group that has another live member in sync, so
        that no writer waits for it. Return how many groups have none, and wait for it. Raises OSError."""
        while True:
            alone = 0
            changes = {}
            for group, (config, revision) in self._cluster.groups.configs.items():
                if self.node not in config.members:
                    continue
                others = set(config.in_sync) - {self.node}
                if others & self._cluster.members.nodes.keys():
                    changes[group] = revision, without(config, self.node)
                elif self.node in config.in_sync:
                    alone += 1
            if await self._cluster.change(changes):
                return alone

    # --- one look at everything

    async def _lead(self) -> bool:
        """Take the next step in each group that this node leads. Return whether there was any."""
        live, known = set(self._cluster.members.nodes), self._cluster.groups.configs
        filling = Counter(node for config, _ in known.values() for node in config.joining)
        joinable = {
            node for node in live if filling[node] < _JOINING_AT_ONCE and self._is_welcome(node)
        }
        changes: dict[int, tuple[int, GroupConfig]] = {}
        new: dict[int, list[int]] = {}  # node -> groups it would join
        for group, (config, revision) in known.items():
            if leader(config, live) != self.node:
                continue
            step = next_step(config, live, self._target(group), joinable)
            if step is None or not self._handover.may_step(group, config, step, live):
                continue
            changes[group] = revision, step
            for node in set(step.members) - set(config.members):
                new.setdefault(node, []).append(group)
                filling[node] += 1
                if filling[node] >= _JOINING_AT_ONCE:
                    joinable.discard(node)
        for node, groups in new.items():
            if not await self._answers_now(node):
                self._shun(node, "does not answer")
                for group in groups:
                    changes.pop(group, None)
        if not changes:
            return False
        await self._cluster.change(changes)
        return True

    async def _begin_anew(self) -> bool:
        """Empty the groups whose members in sync were all removed for good, once no inode names anything in
        them (`cluster remove --force`). The elected node does it. Return whether there was any."""
        self._waits_for_names = False
        if not self.housekeeping.acts():
            return False
        lost: dict[tuple[int, ...], list[int]] = {}
        is_removed = self._cluster.members.is_removed
        for group, (config, _) in self._cluster.groups.configs.items():
            if all(map(is_removed, config.in_sync)) and self._live_target(group):
                if self._catalog.has_names(group):
                    self._waits_for_names = True
                else:
                    lost.setdefault(config.in_sync, []).append(group)
        for gone, groups in lost.items():
            await self._empty(groups, gone)
        return bool(lost)

    async def _empty(self, groups: list[int], gone: tuple[int, ...]) -> None:
        """Empty these groups in two steps: a publish that the dead members acknowledged may still be under
        way. The first step makes it fail, so that no more is named afterwards."""
        known = self._cluster.groups.configs
        fenced = {group: refenced(known[group][0]) for group in groups if group in known}
        changes = {group: (known[group][1], config) for group, config in fenced.items()}
        guards = removed_for_good(gone)
        try:
            await self._cluster.change(changes, guards)
            changes = {}
            for group, config in fenced.items():
                present, revision = self._cluster.groups.get(group)
                target = self._live_target(group)
                if present == config and target and not self._catalog.has_names(group):
                    changes[group] = revision, emptied(config, *target)
            await self._cluster.change(changes, guards)
        except Conflict as conflict:
            log.info("groups of removed nodes stay as they are: %s", conflict)
        else:
            log.warning(
                "%d groups begin anew without nodes %s, which were removed with their content",
                len(changes),
                ", ".join(f"{node:x}" for node in gone),
            )
        await self._cluster.replica.barrier()

    def look(self) -> None:
        """Note that there may be something to do."""
        self._wake.set()

    def _live_target(self, group: int) -> tuple[int, ...]:
        return tuple(node for node in self._target(group) if node in self._cluster.members.nodes)

    def _target(self, group: int) -> tuple[int, ...]:
        """Return the nodes where a group should be; (): where it is."""
        known = self._cluster.members.targets.get(group >> GROUP_BUCKET_BITS)
        return known[0].target(group) if known is not None else ()

    # --- whom to give work

    def _group_changed(self, group: int, before: GroupConfig) -> None:
        config, _ = self._cluster.groups.get(group)
        self._handover.group_changed(group, before, config)
        gone = set(before.members) - set(config.members) if config.members else set()
        for node in gone & self._cluster.members.nodes.keys() - {self.node}:
            if node in self._target(group):
                self._shun(node, f"was taken out of group {group:#x} while it lived")
        self._wake.set()

    def _node_changed(self, node: int) -> None:
        if node not in self._cluster.members.nodes:
            # If it comes back it registers anew, and may be another process.
            self._shunned.forget(node)
        self._wake.set()

    def _is_welcome(self, node: int) -> bool:
        if node in self._shunned:
            return False
        address = self._cluster.members.nodes[node]
        return address.free_bytes >= ROOM_SHARE * address.total_bytes

    def _shun(self, node: int, reason: str) -> None:
        if node not in self._shunned:
            pause_s = self._shunned.begin(node)
            log.warning("node %x is given no groups to fill for %g s: it %s", node, pause_s, reason)

    async def _answers_now(self, node: int) -> bool:
        """Return whether this node can reach another one. Many may ask at once: for a moment after it could
        not be reached, a ping fails at once."""
        if node == self.node:
            return True
        with trio.move_on_after(PING_TIMEOUT_S), log_failure(log.info, "node %x", node):
            await self._ping(node)
            return True
        return False

    def _quiet_s(self) -> float:
        """Return for how many seconds nothing becomes due by time alone."""
        now = time.monotonic()
        dead_since = self._cluster.members.dead_since.values()
        due = [since + self.rereplicate_after_s for since in dead_since]
        due += self._shunned.ends()
        longest = RETRY_S if self._waits_for_names else LOOK_ANYWAY_S
        return min([longest, *(moment - now for moment in due if moment > now)])
