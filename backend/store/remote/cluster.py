"""A mount's part in its cluster: its session, its replica of what etcd holds, and the users of them."""

import json
import logging
import os
from contextlib import AbstractAsyncContextManager
from functools import partial

import trio

from ...cluster.history import History
from ...cluster.replica import Replica
from ...model.values import ConfigError, filesystem_of
from ...namespace import ROOT_INO, Namespace, SharedCommitter
from ...namespace.reading import Reader
from ...observe.logs import log_failure
from ...transport.movers import all_movers
from ...transport.peers import Peers, open_peers, patience_s
from ...transport.verbs.rdma import Rdma
from .claims import Claims
from .contents import Contents
from .leases import Leases
from .locks import SharedLocks
from .member import Member

log = logging.getLogger(__name__)

# Mounts that lost their sessions, with etcd for example, have registered anew by then.
_ABANDONED_AFTER_S = 60.0
# The stripes of one content that are sent or fetched at the same time.
STRIPES_AT_ONCE = 4


class Cluster(Member):
    """A mount's names, contents, claims, leases and locks, and the ways to the store nodes, its `peers`.
    Nothing is known before `read`, and nothing may be changed before `join`.

    Files up to `small_bytes` travel inside control messages. With `verify`, versions get digests, with
    which bytes are compared. `buckets`: groups of a pool. `here` is the store node on `host` whose
    directory, `store_here`, this process can open; 0 and "" if there is none."""

    peers: Peers

    def make_parts(self, directory: str, *, defers: bool) -> None:
        """Make the parts, once. The contents lie in a directory. `defers`: changes of names may be answered
        before they are stored."""
        config, engine = self.config, self.engine
        self.locks = SharedLocks(self)
        self.leases = Leases(self)
        self.claims = Claims(self, self.leases, defers=defers)
        self.replica = Replica(
            engine,
            (
                self.members, self.groups, self.certificates, self.tree, self.locks,
                self.claims, self.changes,
            ),
            faults=self.faults,
            history=History(engine, self.session, self.faults),
            names=Reader(
                self.tree, engine, config.mount.names_ahead, self.members.followed, self.subvolume
            ),
            is_depended_on=self._is_depended_on,
        )  # fmt: skip
        self.small_bytes = config.mount.small_file
        self.verify = config.mount.verify
        self.host = config.mount.host
        self.here, self.store_here = 0, ""
        self._looking = trio.CapacityLimiter(1)
        self.members.node_changed.append(self._node_changed)
        self.contents = Contents(self, f"{directory}/extents")
        self._committer = SharedCommitter(
            self.tree, engine, self.replica, claims=self.claims,
            after_commit=self.leases.wait_for_followers, writable=self.writable,
        )  # fmt: skip
        assert self._committer.deferred is not None, "it has claims"
        self.deferred = self._committer.deferred
        self.namespace = Namespace(self.tree, self._committer)

    def open_peers(self, rdma: Rdma, session_key: bytes) -> AbstractAsyncContextManager[Peers]:
        """Return what opens the ways to the store nodes, which become `peers`."""
        mount = self.config.mount
        movers = all_movers(
            rdma, streams=mount.streams, encrypt_data=mount.encrypt_data, stages=True
        )
        return open_peers(
            self.members.nodes.get, [mover for mover in movers if mover.is_usable],
            credentials=self.credentials,
            name=f"{self.host}:{os.getpid()}", role=self.role,
            session=lambda: self.session.number, session_key=session_key,
            timeout_s=patience_s(self.members.settings), is_revoked=self.certificates.is_revoked,
        )  # fmt: skip

    # -- life ------------------------------------------------------------------------------------

    async def read(self) -> None:
        """Read the state of the cluster, and follow its changes from there. Raises OSError."""
        await self.replica.start(self.nursery)
        await self._find_node_here()

    async def join(self) -> None:
        """Become a session of the cluster. Raises ConfigError, OSError."""
        start_soon = self.nursery.start_soon
        await self.nursery.start(partial(self.session.run, on_lost=self._session_lost))
        await self._ensure_root()
        await self.engine.admin.warn()
        start_soon(self._remove_abandoned)
        start_soon(self.renewal.run)
        start_soon(self.leases.run)
        start_soon(self.deferred.run)
        start_soon(self.claims.run, self._committer)
        start_soon(self.locks.run)

    def _session_lost(self) -> None:
        self.locks.lost()
        self.nursery.start_soon(self.contents.pin_again)

    async def leave(self) -> None:
        """Store what is deferred, and end the session. Raises OSError."""
        with log_failure(log.error, "changes of names are lost"):
            await self.namespace.flush()
        await self.session.release()

    async def _remove_abandoned(self) -> None:
        """Remove names that nobody sees once, when the sessions that ended just now have begun anew."""
        if not self.writable:
            return
        await trio.sleep(_ABANDONED_AFTER_S)
        with log_failure(log.info, "names that nobody sees stay until the next mount starts"):
            await self.namespace.remove_abandoned()

    async def _ensure_root(self) -> None:
        writable = self.writable
        if ROOT_INO in writable:
            await self.namespace.ensure_root()
            return
        if writable:
            if writable.start not in self.tree.inodes:
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
        if ROOT_INO not in self.tree.inodes:
            raise ConfigError(
                f"the cluster {self.config.cluster.name!r} was never mounted for writing: there is "
                "nothing to read yet"
            )

    def _is_depended_on(self) -> bool:
        """Return whether other hosts may wait until this one knows a change, or programs here, or this one
        for etcd."""
        in_use = self.claims.in_use or self.locks.in_use or self.leases.count() > 0
        return in_use or self.tree.watches.waiting > 0 or not self.session.valid()

    # -- nodes and groups ------------------------------------------------------------------------

    def _node_changed(self, node: int) -> None:
        nodes = self.members.nodes
        if node == self.here or (node in nodes and nodes[node].host == self.host):
            self.here, self.store_here = 0, ""
            self.nursery.start_soon(self._find_node_here)

    async def _find_node_here(self) -> None:
        """Find `here`, in a thread: a node may announce any path, also one below this very mount."""
        for node, address in list(self.members.nodes.items()):
            if address.host != self.host:
                continue
            store = await trio.to_thread.run_sync(
                _store_of, address.store, node, abandon_on_cancel=True, limiter=self._looking
            )
            if store:
                is_there = self.members.nodes.get(node) == address
                self.here, self.store_here = (node, store) if is_there else (0, "")

    def has_member_here(self, group: int) -> bool:
        return self.here in self.groups.get(group)[0].members


def _store_of(directory: str, node: int) -> str:
    """Return the path, without links, of a node's store directory that this process can open; "" if it is
    none, or of a user who could have this process open any file there."""
    try:
        directory = os.path.realpath(directory)
        with open(f"{directory}/node.json", "rb") as file:
            is_there = (
                not filesystem_of(os.fstat(file.fileno()).st_dev).startswith(b"fuse")
                and bool(json.load(file)["id"] == f"{node:x}")
                and os.access(f"{directory}/incoming", os.W_OK | os.X_OK)
            )
        if is_there and os.stat(directory).st_uid not in (0, os.geteuid()):
            log.warning("store node %x, on this host, is another user's: it shares no files", node)
            return ""
        return directory if is_there else ""
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
