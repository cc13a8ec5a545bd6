"""A mount's knowledge of its cluster that both fetching and publishing use."""

import json
import os
from collections.abc import Awaitable, Callable

import trio

from ...cluster.config_sections import MountSection
from ...model.placement import group_of
from ...model.records import Layout, Settings
from ...transport.peers import Peers
from .coordination import Coordination

_STRIPES_AT_ONCE = 4


class Cluster:
    """The state that a mount shares with its cluster, and the ways to the store nodes; tasks run in
    `nursery`. Files up to `small_bytes` travel inside control messages. A transfer fails when a group has
    had no reachable members for `timeout_s`. With `verify`, versions get digests, and bytes are compared
    with them. `here` is the store node on `host` whose directory this process can open, 0 if there is
    none."""

    def __init__(
        self,
        coordination: Coordination,
        peers: Peers,
        mount: MountSection,
        nursery: trio.Nursery,
        timeout_s: float,
    ) -> None:
        self.engine = coordination.engine
        self.session = coordination.session
        self.replica = coordination.replica
        self.groups = coordination.groups
        self.members = members = coordination.members
        self.namespace = coordination.namespace
        self.leases = coordination.leases
        self.claims = coordination.claims
        self.deferred = coordination.deferred
        self.peers = peers
        self.nursery = nursery
        self.small_bytes = mount.small_file
        self.verify = mount.verify
        self.timeout_s = timeout_s
        self.here = 0
        self.host = mount.host
        self._find_node_here()
        members.node_changed.append(self._node_changed)

    def _node_changed(self, node: int) -> None:
        self.peers.node_changed(node)
        self._find_node_here()

    def _find_node_here(self) -> None:
        self.here = 0
        for node, address in self.members.nodes.items():
            if address.host == self.host and _is_store_of(address.store, node):
                self.here = node

    @property
    def settings(self) -> Settings:
        assert self.members.settings is not None, "a mount starts with the settings"
        return self.members.settings

    @property
    def store_here(self) -> str:
        """Return the directory of the store node on this host, "" if there is none."""
        address = self.members.nodes.get(self.here)
        return address.store if address is not None else ""

    def group(self, layout: Layout, stripe: int) -> int:
        return group_of(layout, stripe, self.settings.buckets)

    def has_member_here(self, group: int) -> bool:
        found = self.groups.get(group)
        return found is not None and self.here in found[0].members


def _is_store_of(directory: str, node: int) -> bool:
    try:
        with open(f"{directory}/node.json", "rb") as file:
            return bool(json.load(file)["id"] == f"{node:x}") and os.access(
                f"{directory}/incoming", os.W_OK | os.X_OK
            )
    except (OSError, ValueError, KeyError):
        return False


async def for_each_stripe(stripes: int, work: Callable[[int], Awaitable[None]]) -> None:
    """Do `work` for every stripe, a few at a time. Errors are raised as a group, except if there is one
    stripe only."""
    if stripes == 1:
        await work(0)
        return
    limit = trio.CapacityLimiter(_STRIPES_AT_ONCE)

    async def work_on(stripe: int) -> None:
        try:
            await work(stripe)
        finally:
            limit.release_on_behalf_of(stripe)

    async with trio.open_nursery() as nursery:
        for stripe in range(stripes):
            await limit.acquire_on_behalf_of(stripe)
            nursery.start_soon(work_on, stripe)
