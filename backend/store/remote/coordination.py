"""A mount's place in its cluster: its session in etcd, and its replica of what etcd holds."""

import logging
from functools import partial

import trio

from ...cluster.config import ClusterConfig
from ...cluster.group_configs import Groups
from ...cluster.history import History
from ...cluster.lease import MOUNT, Session
from ...cluster.membership import Members
from ...cluster.replica import Replica
from ...etcd.engine import EtcdEngine
from ...kv.faults import Faults
from ...model.records import MountRecord, Settings
from ...model.values import ConfigError
from ...namespace import ROOT_INO, Namespace, SharedCommitter, Tree
from ...namespace.subvolumes import ALL_INOS, numbers_of
from ...trust.certificates import Certificates
from ...trust.renewal import Renewal
from ...trust.security import Credentials, Role
from .claims import ClaimEntries, Claims
from .leases import Leases
from .listeners import Changes
from .lock_entries import LockEntries
from .locks import SharedLocks

log = logging.getLogger(__name__)

# Mounts that lost their sessions, with etcd for example, have registered anew by then.
_ABANDONED_AFTER_S = 60.0


class Coordination:
    """The state that a mount shares with others through etcd. Nothing is known before `read`, and nothing
    may be changed before `join`. Tasks run in `nursery`. `defers`: changes of names may be answered before
    they are stored."""

    def __init__(
        self,
        config: ClusterConfig,
        settings: Settings,
        engine: EtcdEngine,
        record: MountRecord,
        nursery: trio.Nursery,
        timeout_s: float,
        *,
        defers: bool,
    ) -> None:
        self._name = config.cluster.name
        self._nursery = nursery
        self.engine = engine
        self.role = config.cluster.mount_role
        engine.try_within(settings.lease_ttl_s)
        self.session = Session(engine, MOUNT, record, settings.lease_ttl_s)
        self.faults = faults = Faults()
        self.members = Members(self.session, faults)
        self.groups = Groups(faults)
        credentials = self.credentials = config.cluster.credentials(self.role)
        self.certificates = Certificates(
            lambda: credentials.identity.serial if credentials else "", faults
        )
        engine.heed(
            self.certificates.is_revoked,
            lambda: [(one.address, one.control_port) for one in self.members.nodes.values()],
        )
        own = [credentials.renewable] if credentials is not None else []
        self.renewal = Renewal([*own, *engine.renewables])
        self.changes = Changes(engine.is_ours)
        writable = _writable(self.role, credentials)
        entries, claims = LockEntries(faults), ClaimEntries(faults)
        tree = Tree(
            listener=self.changes, faults=faults, maker=record.maker,
            is_mounted=self.members.is_mounted,
        )  # fmt: skip
        self.replica = Replica(
            engine,
            (self.members, self.groups, self.certificates, tree, entries, claims, self.changes),
            faults=faults,
            history=History(engine, self.session, faults),
        )
        self.leases = Leases(
            engine, self.replica, tree, self.members, self.session, nursery,
            self.changes.mount_listeners,
        )  # fmt: skip
        self.claims = Claims(
            engine, self.replica, self.members, self.session, claims, self.leases, nursery, timeout_s,
            defers=defers, writable=writable,
        )  # fmt: skip
        self.changes.inode_listeners.append(self.leases.inode_changed)
        self.changes.name_listeners.append(self.leases.name_changed)
        self.changes.transaction_listeners.append(self.leases.transaction)
        self._committer = SharedCommitter(
            tree, engine, self.replica, claims=self.claims,
            after_commit=self.leases.wait_for_followers, writable=writable,
        )  # fmt: skip
        deferred = self._committer.deferred
        assert deferred is not None, "it has claims"
        self.deferred = deferred
        self.namespace = Namespace(tree, self._committer)
        self.locks = SharedLocks(
            engine, self.replica, self.session, self.members, entries, nursery, timeout_s, deferred.store,
            writable,
        )  # fmt: skip

    @property
    def settings(self) -> Settings:
        """Return the present settings."""
        assert self.members.settings is not None, "a mount starts with the settings"
        return self.members.settings

    async def read(self) -> None:
        """Read the state of the cluster, and follow its changes from there. Raises OSError."""
        await self.replica.start(self._nursery)

    async def join(self) -> None:
        """Become a session of the cluster. Raises ConfigError, OSError."""
        await self._nursery.start(partial(self.session.run, on_lost=self.locks.lost))
        await self._ensure_root()
        await self.engine.admin.warn()
        self._nursery.start_soon(self._remove_abandoned)
        self._nursery.start_soon(self.renewal.run)
        self._nursery.start_soon(self.leases.run)
        self._nursery.start_soon(self.deferred.run)
        self._nursery.start_soon(self.claims.run, self._committer.store, self.deferred.store)
        self._nursery.start_soon(self.locks.run)

    async def leave(self) -> None:
        """Store what is deferred, and end the session. Raises OSError."""
        try:
            await self.namespace.flush()
        except OSError as error:
            log.error("changes of names are lost: %s", error)
        await self.session.release()

    async def _remove_abandoned(self) -> None:
        """Remove names that nobody sees once, when the sessions that ended just now have begun anew."""
        if not self.namespace.writable:
            return
        await trio.sleep(_ABANDONED_AFTER_S)
        try:
            await self.namespace.remove_abandoned()
        except OSError as error:
            log.info("names that nobody sees stay until the next mount starts: %s", error)

    async def _ensure_root(self) -> None:
        writable = self.namespace.writable
        if ROOT_INO in writable:
            await self.namespace.ensure_root()
            return
        if writable:
            if writable.start not in self.namespace.inodes:
                raise ConfigError(
                    "the directory that this mount's certificate lets it change was removed; make another "
                    "certificate: irdmafs cluster cert NAME --role mount --root DIRECTORY"
                )
            what = f"changes nothing outside of {self.namespace.describe(writable.start)}"
        else:
            what = "is read-only"
        log.info(
            "this mount %s, by its certificate; locks of the rest hold on this host only", what
        )
        if ROOT_INO not in self.namespace.inodes:
            raise ConfigError(
                f"the cluster {self._name!r} was never mounted for writing: there is nothing to read yet"
            )


def _writable(role: Role, credentials: Credentials | None) -> range:
    """Return the numbers of the inodes that etcd lets a member change."""
    if role == "reader":
        return range(0)
    subvolume = credentials.identity.subvolume if credentials is not None else 0
    return numbers_of(subvolume) if subvolume else ALL_INOS
