"""A mount's session in its cluster, and the state that it shares with others through etcd."""

import trio

from ...cluster.config import ClusterConfig
from ...cluster.group_configs import Groups
from ...cluster.lease import MOUNT, Session
from ...cluster.membership import Members
from ...cluster.replica import Replica
from ...etcd.engine import EtcdEngine
from ...kv.faults import Faults
from ...model.records import MountRecord, Settings
from ...namespace import Tree
from ...namespace.deferred import Deferred
from ...namespace.subvolumes import ALL_INOS, numbers_of
from ...trust.certificates import Certificates
from ...trust.renewal import Renewal
from .listeners import Changes


class Member:
    """The state that a mount shares with others through etcd. Tasks run in `nursery`. Waits for etcd or for
    nodes end with OSError after `timeout_s`. `writable` are the numbers of the inodes that etcd lets this
    mount change. The `replica` of what etcd holds, and the changes that are `deferred`, are there when the
    parts of the Cluster are made."""

    replica: Replica
    deferred: Deferred

    def __init__(
        self,
        config: ClusterConfig,
        settings: Settings,
        engine: EtcdEngine,
        record: MountRecord,
        nursery: trio.Nursery,
        timeout_s: float,
    ) -> None:
        self.config = config
        self.engine = engine
        self.nursery = nursery
        self.timeout_s = timeout_s
        self.buckets = settings.buckets
        self.role = config.cluster.mount_role
        self.credentials = config.cluster.credentials(self.role)
        self.writable = self._writable()
        engine.try_within(settings.lease_ttl_s)
        self.session = Session(engine, MOUNT, record, settings.lease_ttl_s)
        self.faults = Faults()
        self.members = Members(self.session, self.faults)
        self.groups = Groups(self.faults)
        self.certificates = Certificates(
            lambda: self.credentials.identity.serial if self.credentials else "", self.faults
        )
        engine.calls.client.heed(
            self.certificates.is_revoked,
            lambda: [(one.address, one.control_port) for one in self.members.nodes.values()],
        )
        own = [self.credentials.renewable] if self.credentials is not None else []
        self.renewal = Renewal([*own, *engine.calls.client.renewables])
        self.changes = Changes(engine.fenced.process)
        self.tree = Tree(
            listener=self.changes, faults=self.faults, maker=record.maker,
            is_mounted=self.members.is_mounted,
        )  # fmt: skip

    @property
    def settings(self) -> Settings:
        """Return the present settings."""
        assert self.members.settings is not None, "a mount starts with the settings"
        return self.members.settings

    def _writable(self) -> range:
        if self.role == "reader":
            return range(0)
        subvolume = self.credentials.identity.subvolume if self.credentials is not None else 0
        return numbers_of(subvolume) if subvolume else ALL_INOS
