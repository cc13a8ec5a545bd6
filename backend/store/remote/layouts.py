"""The layout of files over store nodes, and the placement groups that it needs."""

import logging
from typing import Any

from ....inline import detach
from ...files.digest import BLOCK_BYTES, PARTS_MAX
from ...kv import Conflict, Put
from ...model.placement import group_of, local_seed, pool_of, seed_of
from ...model.policy import Policy, parse_policy, policy_id
from ...model.records import GroupConfig, Layout, policy_key
from ...namespace import ROOT_INO, Inode, attributes
from .cluster import Cluster

# Groups that are told of one file: answers to getxattr(2) are to be small.
_TOLD_GROUPS_MAX = 16

# A file that is changed in place is cut into stripes with a digest of their own, of this size at least.
_CUT_BYTES_MIN = 16 << 20

log = logging.getLogger(__name__)


class Layouts:
    """The layouts of a mount's files, by their names and by the attributes of the directories above."""

    def __init__(self, cluster: Cluster) -> None:
        self._namespace = cluster.namespace
        self._cluster = cluster
        self._members = cluster.members

    def of_name(self, parent: int, name: bytes) -> Layout:
        """Return where the contents of a file created under this name are to be kept."""
        cluster, settings = self._cluster, self._cluster.settings
        replicas, stripe_bytes, wanted = attributes.of(self._namespace, parent, settings)
        # Files that are kept alike have the same seed, together with a name.
        if wanted.together:
            directory = attributes.directory_with(self._namespace, attributes.PLACEMENT, parent)
            path = directory.to_bytes(8, "big") + b"/" + name
        else:
            path = self._namespace.path_of(parent) + b"/" + name
        policy = self._policy_number(wanted) if self._members.policies else 0
        layout = Layout(replicas, stripe_bytes, seed_of(path), policy)
        if wanted.local and cluster.here:
            seed = local_seed(path, layout, 0, settings.buckets, cluster.has_member_here)
            layout = layout._replace(seed=seed)
        return layout

    def _policy_number(self, wanted: Policy) -> int:
        """Return the number of a placement rule; 0, the default, for one that no mount has made known (its
        attribute was set by other means)."""
        rules = self._members.policies
        return next((number for number, rule in rules.items() if rule == wanted.rule), 0)

    def of(self, inode: Inode) -> Layout:
        """Return the layout of a file, also of one that has no name yet."""
        if inode.layout.seed:
            return inode.layout
        settings = self._cluster.settings
        seed = seed_of(inode.ino.to_bytes(8, "big"))
        return Layout(settings.replicas, settings.stripe_bytes, seed)

    def of_change(self, inode: Inode, size: int) -> Layout:
        """Return the layout of a file of `size` bytes that is changed in place: if it is one large stripe,
        it is cut, so that later changes need not send all of it. Where it is the placement that counts,
        files stay whole."""
        layout = self.of(inode)
        stripe_bytes = max(_CUT_BYTES_MIN, -(-size // PARTS_MAX // BLOCK_BYTES) * BLOCK_BYTES)
        if layout.stripes(size) > 1 or size <= stripe_bytes:
            return layout
        parent = next(iter(self._namespace.parents_of(inode.ino)), ROOT_INO)
        placement = attributes.of(self._namespace, parent, self._cluster.settings)[2]
        if placement.local or placement.together:
            return layout
        return layout._replace(stripe_bytes=stripe_bytes)

    async def nodes_of(self, inode: Inode) -> list[dict[str, Any]]:
        """Return the groups of a file's stripes, 16 at most, and the nodes that keep each, the primary
        first: the value of user.irdmafs.nodes. Raises OSError if there is no node for them."""
        cluster, layout = self._cluster, self.of(inode)
        stripes = min(max(1, layout.stripes(inode.size)), _TOLD_GROUPS_MAX)
        await self.ensure_groups(layout)
        groups = (group_of(layout, stripe, cluster.buckets) for stripe in range(stripes))
        return [*map(self._group_row, groups)]

    def _group_row(self, group: int) -> dict[str, Any]:
        found = self._cluster.groups.get(group)
        config = found[0] if found is not None else GroupConfig(0, ())
        nodes = [self._node_row(node, config) for node in config.members]
        return {"group": group, "nodes": nodes}

    def _node_row(self, node: int, config: GroupConfig) -> dict[str, Any]:
        address = self._members.nodes.get(node)
        return {
            "node": f"{node:016x}",
            "host": address.host if address is not None else "",
            "here": address is not None and address.host == self._cluster.host,
            "in_sync": node in config.in_sync,
        }

    async def prepare_attribute(self, inode: Inode, name: bytes, value: bytes) -> None:
        """Make a placement rule that is about to be set known to the cluster. Raises OSError."""
        if name == attributes.REPLICAS and int(value) > (up := len(self._members.candidates())):
            log.warning(
                "%s: %d replicas are wanted, and %d store nodes are up: what is created there has fewer "
                "until others are added",
                self._namespace.describe(inode.ino), int(value), up,
            )  # fmt: skip
        if name != attributes.PLACEMENT:
            return
        await detach()
        rule = parse_policy(value.decode("ascii", errors="replace")).rule
        replica = self._cluster.replica
        while rule and rule not in self._members.policies.values():
            number = policy_id(rule, self._members.policies)
            key = policy_key(number)
            try:
                await replica.transact([(key, 0)], [Put(key, rule.encode())])
            except Conflict:
                await replica.barrier()

    # -- the groups ------------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Have the usual groups made before they are needed: they decide where a working copy is best
        begun. Does nothing while there are fewer nodes than replicas, as others may be about to start."""
        settings = self._cluster.settings
        if not self._namespace.writable or len(self._members.candidates()) < settings.replicas:
            return
        try:
            await self.ensure_groups(Layout(settings.replicas, settings.stripe_bytes))
        except OSError as error:
            log.info("the placement groups are not made yet: %s", error)

    async def ensure_groups(self, layout: Layout) -> None:
        """Return when there are placement groups for contents of this layout. Raises OSError."""
        cluster = self._cluster
        if cluster.groups.get(group_of(layout, 0, cluster.buckets)) is not None:
            return
        pool = pool_of(layout.replicas, layout.policy)
        target = self._members.placement().target
        await cluster.groups.want(cluster.engine, pool, cluster.settings, target, cluster.timeout_s)
