"""A cluster's store as one mount sees it: the namespace in etcd, the contents on store nodes."""

import errno
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, closing, suppress
from typing import Any

import trio

from ....inline import detach
from ...cluster.config import ClusterConfig
from ...cluster.membership import Members, read_settings
from ...files.extents import ExtentStore, lock_directory
from ...model.records import SIZE_MAX, ContentId, MountRecord
from ...namespace import ROOT_INO, Inode, NewClone, NewVersion, answered, fail
from ...observe.figures import values_of
from ...transport.rights import make_session_key, session_digest
from ...transport.verbs.devices import local_address
from ...transport.verbs.rdma import Rdma
from ...unwrap import only_error
from ..api import copy_of, save_aside
from .cluster import Cluster
from .fetcher import Fetcher
from .figures import ClusterFigures
from .layouts import Layouts, Space
from .lent import Lender
from .locks import SharedLocks
from .replication import Publisher
from .versions import Freshness, Prefetcher, Versions
from .writer import digests_of

_RELEASE_S = 3.0


@asynccontextmanager
async def remote_store(
    config: ClusterConfig,
    directory: str,
    mountpoint: str,
    version: str,
    *,
    timeout_s: float = 60.0,
    defers: bool = True,
) -> AsyncIterator["RemoteStore"]:
    """Take part in a cluster as one mount. `directory` holds what is kept on this host; it starts empty.
    `defers`: changes of names may be answered before they are stored (namespace/deferred).

    Raises StoreInUse if another process has it, ConfigError if there is no such cluster, OSError if etcd
    cannot be reached.
    """
    role = config.cluster.mount_role
    session_key = make_session_key()
    credentials = config.cluster.credentials(role)
    shown = ("", "") if credentials is None else (credentials.identity.name, role)
    record = MountRecord(
        config.mount.host, mountpoint, os.getpid(), version, *shown, session_digest(session_key)
    )
    os.makedirs(directory, mode=0o700, exist_ok=True)
    try:
        with (
            os.fdopen(lock_directory(directory, "the cache is in use by another daemon")),
            Rdma(config.cluster.rdma_choice(config.mount.encrypt_data)) as rdma,
        ):
            async with (
                config.cluster.engine(role, timeout_s) as engine,
                trio.open_nursery() as nursery,
            ):
                settings = await read_settings(engine, config)
                cluster = Cluster(config, settings, engine, record, nursery, timeout_s)
                cluster.make_parts(directory, defers=defers)
                with closing(cluster.contents):
                    await cluster.read()
                    _check_rdma(rdma, cluster.members)
                    await cluster.join()
                    async with cluster.open_peers(rdma, session_key) as cluster.peers:
                        store = RemoteStore(cluster, rdma)
                        for path in config.mount.follow:
                            await store.follow_path(path)
                        yield store
                        # Releasing the session frees everything that depends on it at once, if etcd can be
                        # told.
                        with trio.move_on_after(_RELEASE_S, shield=True):
                            await cluster.leave()
                        nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        raise only_error(group) from None


def _check_rdma(rdma: Rdma, members: Members) -> None:
    """Raise RdmaUnavailable if RDMA is required and no device is on the way to a node."""
    for node in members.nodes.values():
        try:
            local = local_address(node.address)
        except (OSError, ValueError):
            continue
        rdma.check(local)
        return


class RemoteStore:
    """The Store of a mount in a cluster; made by `remote_store`. Its parts do the work; each call of the
    mount goes to one of them directly."""

    sends = True
    waits = True
    size_max = SIZE_MAX

    def __init__(self, cluster: Cluster, rdma: Rdma) -> None:
        self._cluster = cluster
        self._rdma = rdma
        self.peers = cluster.peers
        self.members = cluster.members
        self.namespace = cluster.namespace
        contents = cluster.contents
        self.extents: ExtentStore = contents
        self.locks: SharedLocks | None = cluster.locks
        cluster.members.node_changed.append(cluster.peers.node_changed)
        space = Space(cluster.members, contents)
        self._fetcher = Fetcher(cluster)
        self._lender = Lender(cluster.nursery, rdma.forget)
        self._versions = versions = Versions(cluster, self._fetcher, self._lender)
        layouts = Layouts(cluster)
        self._publisher = publisher = Publisher(cluster, layouts, space)
        self.freshness: Freshness | None = Freshness(cluster, versions)
        self._prefetcher = Prefetcher(cluster, versions)
        cluster.changes.content_listeners.append(space.lost_by)
        cluster.nursery.start_soon(layouts.prepare)

        self.pin, self.unpin, self.retire = contents.pin, contents.unpin, contents.retire
        self.lend, self.hands_over = contents.lend, contents.hands_over
        self.is_here = contents.is_here
        self.is_as_left = contents.written_here.__contains__
        self.layout, self.prepare_attribute = layouts.of_name, layouts.prepare_attribute
        self.nodes_of = layouts.nodes_of
        self.allocate, self.publish = publisher.allocate, publisher.publish
        self.publish_together = publisher.publish_together
        self.send_ahead = publisher.send_ahead
        self.may_wait_bytes = contents.working_bytes // 2
        self.holds_alone, self.showing = cluster.claims.is_exclusive, cluster.claims.showing
        self.may_have_published = publisher.may_have_published
        self.bring, self.read_into = versions.bring, versions.read_into
        self.read, self.count_open = self._fetcher.read, versions.count_open
        self.learn, self.resting = cluster.replica.learn, cluster.replica.resting
        self.statvfs = space.statvfs

    def before_looks(self, store: Callable[[int], Awaitable[None]]) -> None:
        self._cluster.store_closed = store

    async def forget(self, inode: Inode) -> None:
        tree = self.namespace.tree
        if tree.drop(inode.ino) and not tree.clones.count(inode.extent):
            self.retire(inode.extent)

    async def clone(self, directory: int, wanted: Sequence[NewClone]) -> None:
        await detach()
        await self.namespace.clone(directory, wanted, shares=True)

    async def save_aside(self, version: NewVersion) -> str:
        return await save_aside(self, version, self._cluster.host)

    def note_mapped(self, extent: ContentId) -> None:
        return

    # -- writing in place ------------------------------------------------------------------------

    def is_lent(self, extent: ContentId) -> bool:
        contents, clones = self._cluster.contents, self.namespace.tree.clones
        return (
            contents.is_lent(extent)
            or (extent in clones.of and clones.count(extent) > 1)
            or contents.counts.get(extent, 0) > 1  # of a file that named it before
        )

    async def begin_in_place(self, inode: Inode, extent: ContentId) -> ContentId:
        """Make the content of a version writable, and return its new number. It is a copy if a store node
        here has the file, or other files have it, too. Raises OSError (ENOSPC)."""
        contents, is_copied = self._cluster.contents, self.is_lent(extent)
        if not contents.has(extent):  # it may have been evicted since it was fetched
            if inode.extent == extent:
                inode = await self.bring(inode.ino)
            if inode.extent != extent or self.is_lent(extent) != is_copied:
                raise fail(errno.ESTALE)
        if is_copied and contents.has(extent):
            return await copy_of(self, inode, extent)
        with suppress(FileNotFoundError):
            return contents.take_out(extent)
        raise fail(
            errno.EFBIG,
            f"{self.namespace.describe(inode.ino)} is larger than this mount keeps of other hosts' "
            "files, and cannot be written in place; see --cache-size",
        )

    def end_in_place(self, inode: Inode, extent: ContentId) -> bool:
        if not inode.extent or self.is_lent(inode.extent):
            return False
        return self._cluster.contents.put_back(extent, inode.extent)

    async def is_same(self, inode: Inode, extent: ContentId) -> bool:
        with self.extents.opened(extent) as fd:
            if os.fstat(fd).st_size != inode.size:
                return False
            if not inode.size or not inode.digests:
                return not inode.size
            return await digests_of(fd, inode.size, inode.layout) == inode.digests

    # -- what the mount is started and asked with ------------------------------------------------

    async def follow_path(self, path: str) -> None:
        """Follow a directory, given by its path from the root of the filesystem, for good.

        Raises OSError ENOENT, ENOTDIR."""

        async def find() -> int:
            inode = self.namespace.inode(ROOT_INO)
            for name in os.fsencode(path).split(b"/"):
                if not name or name == b".":
                    continue
                found = self.namespace.lookup(inode.ino, name)
                if found is None:
                    raise OSError(errno.ENOENT, "no such directory to follow", path)
                inode = found
            if not inode.is_dir:
                raise OSError(errno.ENOTDIR, "not a directory to follow", path)
            self.namespace.tree.known.require_all_below(inode.ino)
            return inode.ino

        directory = await answered(find, self.learn)
        await self._cluster.leases.follow(directory, for_good=True)
        self._prefetcher.follow(directory)

    def renew(self) -> None:
        """Read certificates and keys again now."""
        self._cluster.renewal.ask()

    def warnings(self) -> list[str]:
        """Return a line for each problem: with the credentials of this mount, or of nodes; damaged records
        in etcd; what this mount waits for; wrong bytes."""
        cluster = self._cluster
        warnings = self.peers.refusals()
        warnings += [f"{it}; the former ones stay in use" for it in cluster.renewal.problems()]
        warnings += cluster.faults.warnings()
        if not cluster.session.valid():
            etcd = ", ".join(cluster.config.cluster.etcd)
            warnings.append(f"etcd at {etcd} does not answer: calls wait, and fail after a while")
        if not self.members.nodes:
            warnings.append(
                "no store node is up: nothing can be published, and only what is cached here can be "
                "read (irdmafs cluster status)"
            )
        if wrong := self._fetcher.figures.wrong_fetches:
            warnings.append(
                f"{wrong} fetches brought other bytes than were published, and were dropped: the log "
                "says from which store nodes"
            )
        return warnings

    # -- figures ---------------------------------------------------------------------------------

    def figures(self) -> list[Any]:
        """Return the dataclasses of figures that status and metrics show."""
        cluster, leases = self._cluster, self._cluster.leases
        peers = self.peers.counters
        looked_up = ClusterFigures(
            applied_revision=cluster.replica.applied,
            barriers=cluster.replica.barriers,
            rests=cluster.replica.rests,
            transactions=cluster.engine.transactions,
            followed_directories=leases.count(),
            claimed_directories=cluster.claims.count(),
            exclusive_directories=cluster.claims.count(exclusive=True),
            deferred_changes=cluster.deferred.count,
            lease_transactions=leases.transactions,
            acknowledgements=leases.acknowledgements,
            locked=cluster.locks.count(),
            lock_transactions=cluster.locks.transactions,
            session_valid_seconds=cluster.session.left_s(),
            lent_buffers=len(self._lender),
            prefetched_bytes=self._prefetcher.fetched_bytes,
            round_trips=peers.round_trips,
            message_bytes=peers.message_bytes,
            rdma_bytes=peers.moved_bytes["verbs"],
            rdma_fallbacks=peers.fallbacks,
            rdma_reroutes=peers.reroutes,
            rdma_rails=peers.rails,
        )
        return [
            self._versions.figures, self._publisher.figures, self._fetcher.figures,
            cluster.contents.figures(), looked_up, self._rdma.figures(),
        ]  # fmt: skip

    def status(self) -> dict[str, Any]:
        """Return figures of its own for `irdmafs status`."""
        cluster, config = self._cluster, self._cluster.config
        here, writable = cluster.here, cluster.writable
        return {
            "cluster": {
                "name": config.cluster.name,
                "id": self.members.settings.cluster_id,
                "etcd": list(config.cluster.etcd),
                "session": cluster.session.number,
                "role": cluster.role,
                "writable": self.namespace.describe(writable.start) if writable else None,
                "session_valid": cluster.session.valid(),
                "nodes_up": len(self.members.nodes),
                "nodes_known": len(self.members.records),
                "node_here": f"{here:x}" if here else None,
                "all_names": cluster.tree.known.everything,
                "verify": config.mount.verify,
                "rdma": self._rdma.why_not or "on",
                **values_of(*self.figures()),
            }
        }
