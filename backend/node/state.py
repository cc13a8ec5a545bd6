"""The cluster as a store node knows it, and the node's own session in it: what most of its parts need."""

from dataclasses import dataclass

from ..cluster.group_configs import Groups
from ..cluster.lease import Session
from ..cluster.membership import Members
from ..cluster.replica import Replica
from ..etcd.engine import EtcdEngine
from ..kv import Compares
from ..model.records import GroupConfig


@dataclass(frozen=True)
class ClusterState:
    """`node` is the node's number. `replica` feeds `members` and `groups`."""

    node: int
    engine: EtcdEngine
    replica: Replica
    members: Members
    groups: Groups
    session: Session

    async def change(
        self, changes: dict[int, tuple[int, GroupConfig]], guards: Compares = ()
    ) -> bool:
        """Put configurations of groups, each if the group's is still that of the revision. Return whether
        all were put, once the outcome is known here. Raises OSError, and Conflict if a guard fails."""
        return not await self.groups.change(self.replica, changes, guards)
