"""A mount's session in its cluster, the state that it shares with others through etcd, and who is told of
changes of it on this host."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import trio

from ...cluster.config import ClusterConfig
from ...cluster.group_configs import Groups
from ...cluster.lease import Session
from ...cluster.membership import Certificates, Members
from ...cluster.replica import Replica
from ...etcd.engine import EtcdEngine
from ...kv import Event, KeyValue
from ...kv.faults import Faults
from ...model.records import ContentId, MountRecord, Settings
from ...namespace import ROOT_INO, Inode, Tree
from ...namespace.clones import Clones
from ...namespace.deferred import Deferred
from ...namespace.numbers import ALL_INOS, numbers_of
from ...trust.security import Renewal


class StoreListener(Protocol):
    """The notices of a shared store to its mount: of all changes in its namespace, by any host, before it
    tells any host that this mount knows them. The store calls the methods from inside its own loops: they
    must not block, and must not raise."""

    def inode_changed(self, old: Inode | None, new: Inode | None) -> None:
        """Note that an inode changed. None: it did not exist, or is gone."""

    def name_changed(self, parent: int, name: bytes, old_ino: int) -> None:
        """Note that a name changed. `old_ino` is the inode that it led to, 0 if none."""

    def transaction(self, *, ours: bool) -> None:
        """Note that all changes since the last call were one transaction; `ours`: by this mount."""

    def not_followed(self, directory: int) -> None:
        """Note that nothing below a directory, nor its path, may be believed without asking any more."""

    def content_gone(self, extent: ContentId) -> None:
        """Note that the file of a content left this host. It may come again, as another file."""


class Changes:
    """The listener of the mount's tree, and the last consumer of the replica hub: it learns of a
    transaction when all other consumers know it. The mount is told first. The ids of transactions of this
    process begin with `process`.
    """

    prefixes = (b"s",)

    # The files that have one content together.
    clones: Clones

    def __init__(self, process: bytes) -> None:
        self._process = process
        # The parts of the mount that are told.
        self.mount_listeners: list[StoreListener] = []
        # Called with an inode as it was and as it is; None: it did not exist, or is gone.
        self.inode_listeners: list[Callable[[Inode | None, Inode | None], None]] = []
        # Called likewise for files that lost a content, or their last name.
        self.content_listeners: list[Callable[[Inode, Inode | None], None]] = []
        # Called with the directory in which a name changed.
        self.name_listeners: list[Callable[[int], None]] = []
        # Called with the revision of a transaction, whether this process made it, and whether it is a
        # single known one; it is not for all those together that were missed while the watch was broken.
        self.transaction_listeners: list[Callable[[int, bool, bool], None]] = []
        # Called with a content whose file left this host.
        self.gone_listeners: list[Callable[[ContentId], None]] = []

    # -- listener of the tree ----------------------------------------------------------------------

    def inode_changed(self, old: Inode | None, new: Inode | None) -> None:
        for part in self.mount_listeners:
            part.inode_changed(old, new)
        for listener in self.inode_listeners:
            listener(old, new)
        if old is None or not old.extent:
            return
        if new is None or new.extent != old.extent or not new.nlink:
            if old.extent in self.clones.of and self.clones.count(old.extent):
                return  # others name it
            for loses in self.content_listeners:
                loses(old, new)

    def name_changed(self, parent: int, name: bytes, old_ino: int, new_ino: int) -> None:
        for part in self.mount_listeners:
            part.name_changed(parent, name, old_ino)
        for listener in self.name_listeners:
            listener(parent)

    def kept(self) -> None:
        self._tell(0, ours=True, known=True)

    # -- consumer of the replica hub ---------------------------------------------------------------

    def load(self, records: Sequence[KeyValue], revision: int) -> None:
        """Note the changes made while the watch was broken: somebody may be waiting for us to have seen
        them."""
        self._tell(revision, ours=False, known=False)

    def apply(self, revision: int, events: Sequence[Event]) -> None:
        for event in events:
            last_id = event.value or b""
            self._tell(revision, ours=last_id.startswith(self._process), known=bool(last_id))

    def _tell(self, revision: int, *, ours: bool, known: bool) -> None:
        for part in self.mount_listeners:
            part.transaction(ours=ours)
        for listener in self.transaction_listeners:
            listener(revision, ours, known)

    # -- the cache of contents ---------------------------------------------------------------------

    def content_gone(self, extent: ContentId) -> None:
        for part in self.mount_listeners:
            part.content_gone(extent)
        for listener in self.gone_listeners:
            listener(extent)


class Member:
    """The state that a mount shares with others through etcd. Tasks run in `nursery`. Waits for etcd or for
    nodes end with OSError after `timeout_s`. `writable` are the numbers of the inodes that etcd lets this
    mount change, `subvolume` the directory to which it is kept, 0: to none. The `replica` of what etcd
    holds, and the changes that are `deferred`, are there when the parts of the Cluster are made.
    `store_closed` as for Store.before_looks."""

    replica: Replica
    deferred: Deferred
    store_closed: Callable[[int], Awaitable[None]] | None = None

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
        subvolume = self.credentials.identity.subvolume if self.credentials is not None else 0
        self.subvolume = subvolume
        writable = numbers_of(subvolume) if subvolume else ALL_INOS
        self.writable = range(0) if self.role == "reader" else writable
        engine.try_within(settings.lease_ttl_s)
        self.session = Session(engine, record, settings.lease_ttl_s)
        self.faults = Faults()
        self.members = Members(self.session, self.faults)
        self.groups = Groups(self.faults)
        self.certificates = Certificates(self.credentials, self.faults)
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
        self.changes.clones = self.tree.clones

    async def store_answered(self, below: int = ROOT_INO) -> None:
        """Store what was answered before this call and is not stored yet: files that were closed below a
        directory, and all changes of names. Raises OSError."""
        if self.store_closed is not None:
            await self.store_closed(below)
        await self.deferred.store()
