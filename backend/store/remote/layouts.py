"""Where a mount's files are kept: their layouts over store nodes, the placement groups that these need, and
the room that there is."""

import logging
import os
from typing import Any

from ....inline import detach
from ...cluster.membership import Members
from ...files.digest import BLOCK_BYTES
from ...files.sparse import allocated_bytes
from ...kv import Put
from ...model.placement import group_of, local_seed, pool_of, seed_of
from ...model.policy import parse_policy, policy_id
from ...model.records import STRIPES_MAX, GroupConfig, Layout, policy_key
from ...namespace import ROOT_INO, Inode, attributes
from ...observe.logs import log_failure
from .cluster import Cluster
from .contents import Contents

log = logging.getLogger(__name__)

# Groups that are told of one file: answers to getxattr(2) are to be small.
_TOLD_GROUPS_MAX = 16
# A file that is changed in place is cut into stripes with a digest of their own, of this size at least.
_CUT_BYTES_MIN = 16 << 20
_BLOCK_BYTES = 4096


class Layouts:
    """The layouts of a mount's files, by their names and by the attributes of the directories above."""

    def __init__(self, cluster: Cluster) -> None:
        self._namespace = cluster.namespace
        self._cluster = cluster
        self._members = cluster.members

    def of_name(self, parent: int, name: bytes) -> Layout:
        """Return where the contents of a file created under this name are to be kept."""
        cluster, settings = self._cluster, self._members.settings
        replicas, stripe_bytes, wanted = attributes.of(self._namespace, parent, settings)
        # Files that are kept alike have the same seed, together with a name.
        if wanted.together:
            directory = attributes.directory_with(self._namespace, attributes.PLACEMENT, parent)
            path = directory.to_bytes(8, "big") + b"/" + name
        else:
            path = self._namespace.path_of(parent) + b"/" + name
        policy, rules = 0, self._members.policies
        if rules:  # 0, the default, is that of a rule which no mount has made known, too
            policy = next((number for number, rule in rules.items() if rule == wanted.rule), 0)
        layout = Layout(replicas, stripe_bytes, seed_of(path), policy)
        if wanted.local and cluster.here:
            seed = local_seed(path, layout, 0, settings.buckets, cluster.has_member_here)
            layout = layout._replace(seed=seed)
        return layout

    def of(self, inode: Inode) -> Layout:
        """Return the layout of a file, also of one that has no name yet."""
        if inode.layout.seed:
            return inode.layout
        settings = self._members.settings
        seed = seed_of(inode.ino.to_bytes(8, "big"))
        return Layout(settings.replicas, settings.stripe_bytes, seed)

    def of_change(self, inode: Inode, size: int) -> Layout:
        """Return the layout of a file of `size` bytes that is changed in place: if it is one large stripe,
        it is cut, so that later changes need not send all of it. Where it is the placement that counts,
        files stay whole."""
        layout = self.of(inode)
        stripe_bytes = max(_CUT_BYTES_MIN, -(-size // STRIPES_MAX // BLOCK_BYTES) * BLOCK_BYTES)
        if layout.stripes(size) > 1 or size <= stripe_bytes:
            return layout
        parent = next(iter(self._namespace.parents_of(inode.ino)), ROOT_INO)
        placement = attributes.of(self._namespace, parent, self._members.settings)[2]
        if placement.local or placement.together:
            return layout
        return layout._replace(stripe_bytes=stripe_bytes)

    async def nodes_of(self, inode: Inode) -> list[dict[str, Any]]:
        """Return the groups of a file's stripes, 16 at most, and the nodes that keep each, the primary
        first: the value of user.irdmafs.nodes. Raises OSError if there is no node for them."""
        cluster, layout = self._cluster, self.of(inode)
        stripes = min(max(1, layout.stripes(inode.size)), _TOLD_GROUPS_MAX)
        await self.ensure_groups(layout)
        rows = []
        for stripe in range(stripes):
            group = group_of(layout, stripe, cluster.buckets)
            config, _ = cluster.groups.get(group)
            nodes = [self._node_row(node, config) for node in config.members]
            rows.append({"group": group, "nodes": nodes})
        return rows

    def _node_row(self, node: int, config: GroupConfig) -> dict[str, Any]:
        address = self._members.nodes.get(node)
        return {
            "node": f"{node:016x}",
            "host": address.host if address is not None else "",
            "here": address is not None and address.host == self._cluster.host,
            "in_sync": node in config.in_sync,
        }

    async def prepare_attribute(self, inode: Inode, name: bytes, value: bytes, root: bool) -> None:
        """Make a new placement rule known. Raises OSError; ENOSPC for users before root: rules stay."""
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
        while rule and rule not in self._members.policies.values():
            key = policy_key(policy_id(rule, self._members.policies, is_root=root))
            await self._cluster.replica.attempt([(key, 0)], [Put(key, rule.encode())])

    # -- the groups ------------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Have the usual groups made before they are needed: they decide where a working copy is best
        begun. Does nothing while there are fewer nodes than replicas, as others may be about to start."""
        settings = self._members.settings
        if not self._namespace.writable or len(self._members.candidates()) < settings.replicas:
            return
        with log_failure(log.info, "the placement groups are not made yet"):
            await self.ensure_groups(Layout(settings.replicas, settings.stripe_bytes))

    async def ensure_groups(self, layout: Layout) -> None:
        """Return when there are placement groups for contents of this layout. Raises OSError."""
        cluster = self._cluster
        _, revision = cluster.groups.get(group_of(layout, 0, cluster.buckets))
        if revision:
            return
        pool = pool_of(layout.replicas, layout.policy)
        placement = self._members.placement()
        await cluster.groups.want(cluster.engine, pool, placement, cluster.timeout_s)


class Space:
    """The room that store nodes reported, less what was published since. They do not report what was freed
    again soon."""

    def __init__(self, members: Members, contents: Contents) -> None:
        self._members = members
        self._contents = contents
        self._untold_bytes = 0
        members.node_changed.append(self._told)

    def _told(self, node: int) -> None:
        self._untold_bytes = 0

    def published(self, size: int) -> None:
        """Note that a version has so many bytes more than the one before, which is freed."""
        self._untold_bytes += size

    def lost_by(self, old: Inode, new: Inode | None) -> None:
        """Take back what was counted for a file when its last name is gone."""
        if old.nlink and not (new is not None and new.nlink):
            counted = max(0, self._untold_bytes)
            self.published(-min(counted, allocated_bytes(old.size, old.blocks)))

    def statvfs(self) -> os.statvfs_result:
        """Return the space in the cluster, in files kept with its usual number of replicas: on nodes that
        take new files, which a dead or a draining one does not."""
        settings, addresses = self._members.settings, self._members.nodes
        nodes = [addresses[candidate.node] for candidate in self._members.candidates()]
        copies = max(1, min(settings.replicas, len(nodes)))
        total = sum(node.total_bytes for node in nodes) // copies // _BLOCK_BYTES
        free_bytes = sum(node.free_bytes for node in nodes) // copies
        free = max(0, free_bytes - max(0, self._untold_bytes)) // _BLOCK_BYTES
        below = self._contents.statvfs()
        return os.statvfs_result(
            (_BLOCK_BYTES, _BLOCK_BYTES, total, free, free, below.f_files, below.f_ffree,
             below.f_favail, below.f_flag, 255)
        )  # fmt: skip
