"""A cluster's store as one mount sees it: the namespace in etcd, the contents on store nodes."""

import errno
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from functools import partial
from typing import Any

import trio

from ...cluster.config import ClusterConfig
from ...cluster.config_values import ConfigError
from ...cluster.group_configs import Groups
from ...cluster.history import History
from ...cluster.membership import MOUNT, Members, Session
from ...cluster.placement import local_seed, pool_of, seed_of
from ...cluster.policy import Policy, parse_policy, policy_id
from ...cluster.records import Layout, MountRecord, Settings, pin_key, policy_key, session_of
from ...cluster.replica import Replica
from ...kv import Compare, Conflict, Delete, Put
from ...kv.etcd import EtcdEngine
from ...namespace import (
    ROOT_INO,
    Inode,
    Namespace,
    Outdated,
    SharedCommitter,
    Tree,
    attributes,
    fail,
)
from ...observe.figures import values_of
from ...transport.movers import all_movers
from ...transport.peers import Peers, patience_s
from ...transport.session_keys import make_session_key, session_digest
from ...transport.verbs.devices import local_address
from ...transport.verbs.rdma import Rdma
from ...trust.certificates import Certificates
from ...unwrap import first_error, only_error
from ..api import StoreEvents
from ..aside import make_aside
from ..extents import copy_contents
from ..pins import Pinned
from ..sparse import allocated_bytes
from ..storedir import lock_directory
from .abandoned import Abandoned
from .cluster import Cluster
from .contents import Contents
from .fetcher import Fetcher, Gone, Wrong
from .figures import ClusterFigures, StoreFigures
from .leases import Leases, Transactions
from .lent import Declined, Lender
from .locks import SharedLocks
from .numbers import ContentNumbers
from .prefetch import Prefetcher
from .readahead import ReadAhead
from .writer import Transfer, digests_of

log = logging.getLogger(__name__)

# A file that changes faster than it can be fetched: the version to read is then pinned on its nodes.
_GONE_BEFORE_PIN = 3
_LOOK_AGAIN_S = 0.2
_RELEASE_S = 3.0
# A version is digested and laid out by stripes, holes as well: some 2 s for 1 TiB of holes.
_SIZE_MAX = 16 << 40


@asynccontextmanager
async def remote_store(
    config: ClusterConfig,
    directory: str,
    mountpoint: str,
    version: str,
    events: StoreEvents,
    *,
    timeout_s: float = 60.0,
) -> AsyncIterator["RemoteStore"]:
    """One mount's part of a cluster. `directory` holds what is kept on this host; it starts empty.

    Raises StoreInUse when another process has it, ConfigError when there is no such cluster, OSError
    when etcd cannot be reached.
    """
    role = config.cluster.mount_role
    record = MountRecord(
        config.mount.host, mountpoint, os.getpid(), version, *config.cluster.identity(role),
        session_digest(session_key := make_session_key()),
    )  # fmt: skip
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
                store = RemoteStore(config, engine, nursery, directory, record, events, timeout_s)
                store.rdma = rdma
                store.session_key = session_key
                with closing(store.contents):
                    await store._start()
                    async with store._make_peers() as store.peers:
                        store._make_parts()
                        nursery.start_soon(store.leases.run)
                        nursery.start_soon(store.locks.run)
                        nursery.start_soon(store._prepare)
                        for path in config.mount.follow:
                            await store.follow_path(path)
                        yield store
                        await store._end()
                        nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        raise only_error(group) from None


class RemoteStore(Pinned):
    """What `remote_store` opens: the Store of a mount."""

    shared = True
    waits = True
    size_max = _SIZE_MAX

    def __init__(
        self,
        config: ClusterConfig,
        engine: EtcdEngine,
        nursery: trio.Nursery,
        directory: str,
        record: MountRecord,
        events: StoreEvents,
        timeout_s: float,
    ) -> None:
        super().__init__()
        self._events = events
        self.config = config
        self.engine = engine
        self.timeout_s = timeout_s
        self._nursery = nursery
        self._record = record
        self._pinned_afar: set[int] = set()
        # Numbers that may not be used for other bytes: sent once, or named by a version.
        self._used: set[int] = set()
        # Fetched for an open that is not counted yet.
        self._fetched: set[int] = set()
        self.contents = Contents(
            f"{directory}/extents", ContentNumbers(lambda: self.session.number).new,
            events.content_gone, config.mount.cache_size,
        )  # fmt: skip
        self.members = Members()
        self.groups = Groups()
        tree = Tree(held=events.is_held, listener=self)
        self.locks = SharedLocks(engine, self.members, lambda: events.lock_holder, timeout_s)
        self._transactions = Transactions()
        self.history = History(engine)
        self.certificates = Certificates(config.cluster.serial(config.cluster.mount_role))
        self.replica = self.locks.replica = Replica(
            engine,
            (
                self.members,
                self.groups,
                self.certificates,
                tree,
                self.locks,
                self._transactions,
            ),
            history=self.history,
        )
        self.role = config.cluster.mount_role
        committer = SharedCommitter(
            tree, engine, self.replica,
            after_commit=self._wait_for_followers, read_only=self.role == "reader",
        )  # fmt: skip
        self.namespace = Namespace(tree, committer)
        self.session: Session
        self.leases: Leases
        self.rdma: Rdma
        self.session_key: bytes
        self.peers: Peers
        # Published since the nodes last told how much room they have.
        self._untold_bytes = 0
        self._figures = StoreFigures()

    # -- start and end ---------------------------------------------------------------------------

    async def _start(self) -> None:
        """Read what the cluster is, and become a session of it."""
        config = self.config
        await self.replica.start(self._nursery)
        self._check_rdma()
        if self.members.settings is None:
            raise ConfigError(
                f"etcd at {', '.join(config.cluster.etcd)} knows no cluster named "
                f"{config.cluster.name!r}; make it with: irdmafs cluster init"
            )
        self.session = self.locks.session = Session(
            self.engine, MOUNT, self._record, self.settings.lease_ttl_s, on_lost=self.locks.lost
        )
        self.members.attach(self.session)
        self.history.on_doubt = self.session.doubt
        self.history.on_accepted = self.session.lose
        self.leases = Leases(self.engine, self.replica, self.namespace, self.members, self.session)
        self._transactions.on_transaction = self._transaction
        await self._nursery.start(self.session.run)
        await self._ensure_root()
        await self.engine.admin.warn()

    async def _ensure_root(self) -> None:
        if not self.namespace.read_only:
            await self.namespace.ensure_root()
            return
        log.info(
            "this mount is read-only: its certificate is a reader's (locks hold on this host only, unless "
            "-o locks= says otherwise)"
        )
        if ROOT_INO not in self.namespace.inodes:
            raise ConfigError(
                f"the cluster {self.config.cluster.name!r} was never mounted for writing: there is "
                "nothing to read yet"
            )

    def _check_rdma(self) -> None:
        """Whether a device is on the way to a node. Raises RdmaUnavailable."""
        for node in self.members.nodes.values():
            try:
                local = local_address(node.address)
            except OSError:
                continue
            self.rdma.check(local)
            return

    async def _prepare(self) -> None:
        """Have the usual groups made before they are needed: where a working copy is best begun
        depends on them. Not on fewer nodes than are to have them: others may be about to start."""
        if self.namespace.read_only:
            return
        if len(self.members.candidates()) >= self.settings.replicas:
            layout = Layout(self.settings.replicas, self.settings.stripe_bytes)
            try:
                await self._ensure_pool(layout)
            except OSError as error:
                log.info("the placement groups are not made yet: %s", error)

    async def _end(self) -> None:
        """What hangs on the session is free at once, if etcd can be told."""
        with trio.move_on_after(_RELEASE_S, shield=True):
            await self.session.release()

    def _make_peers(self) -> Peers:
        config = self.config
        movers = all_movers(
            self.rdma, streams=config.mount.streams, encrypt_data=config.mount.encrypt_data,
            stages=True,
        )  # fmt: skip
        return Peers(
            self.members.address, movers, credentials=config.cluster.credentials(self.role),
            name=f"{config.mount.host}:{os.getpid()}", role=self.role,
            session=lambda: self.session.number, session_key=self.session_key,
            timeout_s=patience_s(self.settings), is_revoked=self.certificates.is_revoked,
        )  # fmt: skip

    def _make_parts(self) -> None:
        self.cluster = Cluster(
            self.replica, self.groups, self.members, self.peers,
            small_bytes=self.config.mount.small_file, timeout_s=self.timeout_s,
        )  # fmt: skip
        self.fetcher = Fetcher(
            self.contents, self._pins, self.cluster, salt=self.session.number,
            verify=self.config.mount.verify, describe=self.namespace.describe,
        )  # fmt: skip
        self.abandoned = Abandoned(
            self.engine, self.replica, self.members, self.peers, self.session, self._named
        )
        self._nursery.start_soon(self.abandoned.run)
        self._lender = Lender(self._nursery, self.rdma.forget)
        self.ahead = ReadAhead(self.namespace)
        self.prefetcher = Prefetcher(
            self.namespace, self._nursery, partial(self._bring, ahead=True)
        )
        self.members.node_changed.append(self._node_changed)
        self._find_node_here()

    def _node_changed(self, node: int) -> None:
        self._untold_bytes = 0
        self.peers.node_changed(node)
        self._find_node_here()

    def _named(self, contents: set[int]) -> set[int]:
        return contents & {inode.extent for inode in self.namespace.inodes.values()}

    def _find_node_here(self) -> None:
        """Which store node's directory this host can open, if any."""
        here = 0
        for node, address in self.members.nodes.items():
            if address.host == self.config.mount.host and _is_store_of(address.store, node):
                here = node
        self.cluster.here = here

    @property
    def extents(self) -> Contents:
        return self.contents

    @property
    def settings(self) -> Settings:
        assert self.members.settings is not None
        return self.members.settings

    # -- what changed, told by the replica -------------------------------------------------------

    def inode_changed(self, old: Inode | None, new: Inode | None) -> None:
        known = new or old
        assert known is not None
        self._events.inode_changed(old, new)
        if old is not None and old.extent and (new is None or new.extent != old.extent):
            self.retire(old.extent)
        if new is not None and old is not None and new.version != old.version:
            self._events.version_published(new.ino)
            if new.extent and any(
                map(self.leases.is_followed_for_good, self.namespace.parents_of(new.ino))
            ):
                self.prefetcher.start_one(new.ino)
        self.leases.changed(self.namespace.parents_of(known.ino))
        if new is None and known.is_dir:
            self.leases.changed((known.ino,))
        if new is not None and old is not None and new.is_dir and new.revision != old.revision:
            self.leases.directory_changed(moved=new.parent != old.parent)

    async def _wait_for_followers(self, directories: tuple[int, ...], revision: int) -> None:
        await self.leases.wait_for_followers(directories, revision)

    def name_changed(self, parent: int, name: bytes, old_ino: int, new_ino: int) -> None:
        self._events.name_changed(parent, name, old_ino)
        self.leases.changed((parent,))

    def _transaction(self, revision: int, last_id: bytes) -> None:
        ours = self.engine.is_ours(last_id)
        self._events.transaction(ours=ours)
        self.leases.transaction(revision, ours=ours, known=bool(last_id))

    # -- contents on this host -------------------------------------------------------------------

    def pin(self, extent: int) -> None:
        """Raises OSError ESTALE when a store node here has let it go: the file has a newer version."""
        try:
            self.contents.hold(extent)
        except FileNotFoundError:
            raise fail(errno.ESTALE) from None
        super().pin(extent)

    def unpin(self, extent: int) -> None:
        super().unpin(extent)
        if extent and extent not in self._pins:
            self.contents.let_go(extent)
            self._let_go_afar(extent)

    def _free(self, extent: int) -> None:
        self._used.discard(extent)
        self._fetched.discard(extent)
        self.contents.free(extent)

    def is_here(self, extent: int) -> bool:
        pinned = extent in self._pins and extent not in self._pinned_afar
        return pinned or self.contents.has(extent)

    def count_open(self, extent: int) -> None:
        if extent in self._fetched:
            self._fetched.remove(extent)
            self._figures.cache_misses += 1
        elif extent:
            self._figures.cache_hits += 1

    async def bring(self, ino: int) -> Inode:
        return await self._bring(ino, ahead=False)

    async def _bring(self, ino: int, *, ahead: bool) -> Inode:
        async def fetch(inode: Inode) -> Inode | None:
            await self.fetcher.fetch(inode, partial(self.ahead.after, inode))
            if not ahead:
                self._fetched.add(inode.extent)
            if not self.contents.has(inode.extent):
                return inode if await self._pin_afar(inode) else None
            if inode.extent in self._pinned_afar:
                self._nursery.start_soon(self._unpin_afar, inode.extent)
            current = self.namespace.inode(ino)  # ESTALE: it went meanwhile, and nobody held it
            return current if self.contents.has(current.extent) else None

        return await self._with_current(ino, fetch)

    async def read_into(self, ino: int, memory: int, lifeline: int) -> Inode:
        was_read = False

        async def read(inode: Inode) -> Inode:
            nonlocal was_read
            await self.fetcher.read_into(inode, lent)
            was_read = True
            self._let_go_afar(inode.extent)
            return inode

        async with self._lender.using(memory, lifeline) as lent:
            inode = await self._with_current(ino, read)
        if not was_read:
            raise Declined("it is on this host")
        return inode

    async def _with_current(
        self, ino: int, get: Callable[[Inode], Awaitable[Inode | None]]
    ) -> Inode:
        """Have `get` get the file's current version, again and again while that is replaced under it (or it
        returns None), unless it is on this host. Raises OSError: ESTALE when the file is gone."""
        deadline = time.monotonic() + self.timeout_s
        attempt = 0
        while time.monotonic() < deadline:
            attempt += 1
            inode = self.namespace.inode(ino)
            if not inode.extent or self.contents.has(inode.extent):
                return inode
            if not inode.nlink:
                raise fail(errno.ESTALE)  # gone with its last name, from all nodes
            got = None
            try:
                if attempt >= _GONE_BEFORE_PIN and not await self._pin_afar(inode):
                    continue
                got = await get(inode)
            except Gone:
                await self.replica.barrier()
                current = self.namespace.inodes.get(ino)
                if current is not None and current.extent == inode.extent:
                    # Those who should have it do not: they are about to find that out, too.
                    await trio.sleep(_LOOK_AGAIN_S)
                continue
            except Wrong:
                await self.replica.barrier()
                current = self.namespace.inodes.get(ino)
                if current is None or current.extent == inode.extent:
                    raise
                continue
            finally:
                if got is None:
                    self._let_go_afar(inode.extent)
            if got is not None:
                return got
        where = self.namespace.describe(ino)
        raise fail(errno.EIO, f"{where}: no store node has content {inode.extent:x}: it is lost")

    async def read(self, inode: Inode, extent: int, offset: int, size: int) -> bytes:
        return await self.fetcher.read(inode, extent, offset, size)

    async def _pin_afar(self, inode: Inode) -> bool:
        """Keep a content on its nodes while this mount reads it; False: it is not current any more."""
        lease, content = self.session.lease, inode.extent
        self._pinned_afar.add(content)
        revision = await self.engine.transact(
            (self.session.compare(),), (Put(pin_key(content, lease), b"", lease),)
        )
        await self.replica.wait_applied(revision)
        current = self.namespace.inodes.get(inode.ino)
        if current is not None and current.extent == content:
            return True
        await self._unpin_afar(content)
        return False

    def _let_go_afar(self, content: int) -> None:
        """Nobody reads it now, unless it was opened."""
        if content in self._pinned_afar and content not in self._pins:
            self._nursery.start_soon(self._unpin_afar, content)

    async def _unpin_afar(self, content: int) -> None:
        self._pinned_afar.discard(content)
        try:
            await self.engine.transact((), (Delete(pin_key(content, self.session.lease)),))
        except OSError as error:
            log.info("content %x stays pinned until this session ends: %s", content, error)

    # -- working copies and publishing -----------------------------------------------------------

    def layout(self, parent: int, name: bytes) -> Layout:
        replicas, stripe_bytes, wanted = attributes.of(self.namespace, parent, self.settings)
        path = self.namespace.path_of(parent) + b"/" + name
        layout = Layout(replicas, stripe_bytes, seed_of(path), self._policy_number(wanted))
        if wanted.local and self.cluster.here:
            seed = local_seed(path, layout, 0, self.settings.buckets, self.cluster.has_member_here)
            layout = layout._replace(seed=seed)
        return layout

    def _policy_number(self, wanted: Policy) -> int:
        """0, the default, too, for a rule that nobody has made known (an attribute set by other means)."""
        rules = self.members.policies
        return next((number for number, rule in rules.items() if rule == wanted.rule), 0)

    def _layout_of(self, inode: Inode) -> Layout:
        if inode.layout.seed:
            return inode.layout
        # A file that was made without a name.
        seed = seed_of(inode.ino.to_bytes(8, "big"))
        return Layout(self.settings.replicas, self.settings.stripe_bytes, seed)

    async def check_attribute(self, inode: Inode, name: bytes, value: bytes) -> None:
        """A new placement rule is made known to all."""
        if name not in attributes.NAMES:
            return
        if not inode.is_dir:
            raise fail(errno.EINVAL, "only directories have a policy: for what is created below")
        try:
            attributes.check(name, value)
        except ValueError as error:
            raise fail(errno.EINVAL, str(error)) from None
        if name == attributes.REPLICAS and int(value) > (up := len(self.members.candidates())):
            log.warning(
                "%s: %d replicas are wanted, and %d store nodes are up: what is created there has fewer "
                "until others are added",
                self.namespace.describe(inode.ino), int(value), up,
            )  # fmt: skip
        if name != attributes.PLACEMENT:
            return
        if self.namespace.read_only:
            raise fail(errno.EROFS)
        rule = parse_policy(value.decode("ascii", errors="replace")).rule
        while rule and rule not in self.members.policies.values():
            number = policy_id(rule, self.members.policies)
            key = policy_key(number)
            try:
                revision = await self.engine.transact([(key, 0)], [Put(key, rule.encode())])
                await self.replica.wait_applied(revision)
            except Conflict:
                await self.replica.barrier()

    def allocate(self, inode: Inode) -> tuple[int, int]:
        self.contents.make_room(0, self._pins)
        store = self.cluster.store_here
        group = self.cluster.group(self._layout_of(inode), 0)
        if store and self.cluster.has_member_here(group):
            # One that gets longer than a stripe is sent after all.
            return self.contents.allocate_in(f"{store}/incoming")
        return self.contents.allocate()

    async def publish(
        self,
        ino: int,
        extent: int,
        status: os.stat_result,
        mtime_ns: int,
        *,
        ctime_ns: int | None = None,
        mapped: bool = False,
        base: int | None = None,
    ) -> Inode:
        size = status.st_size
        if size > self.size_max:
            raise fail(errno.EFBIG)
        layout = self._layout_of(self.namespace.inode(ino))
        commit = partial(
            self._commit, ino, status=status, mtime_ns=mtime_ns, ctime_ns=ctime_ns, base=base,
            layout=layout,
        )  # fmt: skip
        begun_in = self.session.number
        while not size:
            if await self.session.wait_valid() != begun_in:
                self._events.check_publishing(ino)
            try:
                return await commit(content=0, transfer=None)
            except Conflict as conflict:
                log.info("inode %d, empty: %s; again", ino, conflict)
                await self.replica.barrier()
        await self.namespace.check_room(ino, status.st_blocks)
        await self._ensure_pool(layout)
        begun_as, transfer = extent, None
        with ExitStack() as ending:
            # A store node here may take it over, and let it go, while it is still to be found.
            ending.enter_context(self.pinned(extent))
            fd = self.contents.open(extent)
            # A descriptor that stays open, or a later one if this failed, may truncate it.
            ending.callback(os.close, fd)
            ending.callback(self.rdma.forget, fd)
            while True:
                session = await self.session.wait_valid()
                if session != begun_in:
                    self._events.check_publishing(ino)
                if session_of(extent) != session or (transfer is None and extent in self._used):
                    # What an old session sent may be dropped any time; and a number stands for the
                    # same bytes for ever, though the file may be written on in place.
                    if extent != begun_as:
                        self.retire(extent)
                    extent, transfer = self.contents.renumber(extent), None
                    ending.enter_context(self._renumbered(extent))
                if transfer is None:
                    transfer = Transfer(
                        self.cluster, extent, layout, fd, size,
                        self.contents.adoptable(extent) if layout.stripes(size) == 1 else "",
                        verify=self.config.mount.verify, mapped=mapped,
                    )  # fmt: skip
                self._used.add(extent)
                try:
                    with self.contents.publishing(extent):
                        return await commit(content=extent, transfer=transfer)
                except Conflict as conflict:
                    log.info("content %x: %s; again", extent, conflict)
                    await self.replica.barrier()
                except OSError as error:
                    if error.errno != errno.ECANCELED:
                        raise
                    # A node takes our session for over, or heard that this content was given up.
                    log.info("content %x: %s; again under another number", extent, error)
                    await self.replica.barrier()
                    transfer = None

    @contextmanager
    def _renumbered(self, extent: int) -> Iterator[None]:
        """Keep another number of a working copy until its publish has ended, and longer if it is named."""
        with self.pinned(extent):
            try:
                yield
            except BaseException:
                self.retire(extent)
                raise

    async def _commit(
        self,
        ino: int,
        *,
        content: int,
        status: os.stat_result,
        mtime_ns: int,
        ctime_ns: int | None,
        base: int | None,
        layout: Layout,
        transfer: Transfer | None,
    ) -> Inode:
        """Raises Conflict when the session or a group's configuration is another one by now, Outdated
        when the file's version is not `base`."""
        guards: list[Compare] = [self.session.compare()]
        if transfer is not None:
            try:
                guards += await transfer.complete()
            except BaseException:
                self.abandoned.give_up(content, transfer.asked, is_certain=True)
                raise
        # Once begun, only etcd knows how it ends.
        try:
            with trio.CancelScope(shield=True):
                inode = await self.namespace.publish(
                    ino, content, status.st_size, status.st_blocks, mtime_ns,
                    ctime_ns=ctime_ns, base=base, layout=layout,
                    digests=transfer.digests if transfer is not None else b"", guards=guards,
                )  # fmt: skip
        except OSError as error:
            if transfer is not None:
                certain = isinstance(error, Outdated) or error.errno == errno.EDQUOT
                self.abandoned.give_up(content, transfer.asked, is_certain=certain)
            raise
        self._figures.publishes += 1
        self._untold_bytes += allocated_bytes(status.st_size, status.st_blocks)
        self._figures.published_bytes += status.st_size
        if content:
            self.contents.published(content, status.st_blocks * 512, self.cluster.store_here)
            self._retired.discard(content)
            current = self.namespace.inodes.get(ino)
            if current is None or current.extent != content:
                self.retire(content)  # somebody was faster
            if not inode.nlink and transfer is not None:
                self.abandoned.give_up(content, transfer.asked, is_certain=True)
        return inode

    async def save_aside(self, ino: int, extent: int, status: os.stat_result, mtime_ns: int) -> str:
        made, name = await make_aside(self.namespace, ino, self.config.mount.host, self.layout)
        published = await self.publish(made.ino, extent, status, mtime_ns)
        if published.extent != extent:
            self.retire(extent)
        return name

    # -- contents that are written in place ------------------------------------------------------

    async def begin_in_place(self, inode: Inode, extent: int) -> int:
        if not self.contents.is_lent(extent):
            return await self._take_out(inode, extent)
        number, fd = self.allocate(inode)
        try:
            with self.contents.opened(extent) as source:
                await trio.to_thread.run_sync(copy_contents, source, fd)
        except BaseException:
            self.contents.free(number)
            raise
        finally:
            os.close(fd)
        return number

    async def _take_out(self, inode: Inode, extent: int) -> int:
        try:
            return self.contents.take_out(extent)
        except FileNotFoundError:
            pass  # it may have gone since it was brought
        if inode.extent == extent:
            inode = await self.bring(inode.ino)
        if inode.extent != extent:
            raise fail(errno.ESTALE)
        try:
            return self.contents.take_out(extent)
        except FileNotFoundError:
            raise fail(
                errno.EFBIG,
                f"{self.namespace.describe(inode.ino)} is larger than this mount keeps of other "
                "hosts' files, and cannot be written in place; see --cache-size",
            ) from None

    def end_in_place(self, inode: Inode, extent: int) -> bool:
        return bool(inode.extent) and self.contents.put_back(extent, inode.extent)

    def is_lent(self, extent: int) -> bool:
        return self.contents.is_lent(extent)

    def hands_over(self, extent: int) -> bool:
        return bool(self.contents.adoptable(extent))

    async def is_same(self, inode: Inode, extent: int) -> bool:
        with self.contents.opened(extent) as fd:
            if os.fstat(fd).st_size != inode.size:
                return False
            if not inode.size or not inode.digests:
                return not inode.size
            return await digests_of(fd, inode.size, inode.layout) == inode.digests

    async def _ensure_pool(self, layout: Layout) -> None:
        if self.groups.get(self.cluster.group(layout, 0)) is not None:
            return
        pool = pool_of(layout.replicas, layout.policy)
        target = self.members.placement().target
        await self.groups.want(self.engine, pool, self.settings, target, self.timeout_s)

    async def forget(self, inode: Inode) -> None:
        if inode.ino in self.namespace.inodes:
            await self.namespace.drop(inode.ino)
            self.retire(inode.extent)

    def prefetch(self, ino: int) -> None:
        self.prefetcher.start(ino)

    def prefetch_progress(self, ino: int) -> dict[str, Any]:
        return self.prefetcher.progress(ino)

    # -- freshness -------------------------------------------------------------------------------

    def is_fresh(self, inode: Inode) -> bool:
        directories = self._directories_of(inode)
        return bool(directories) and all(map(self.leases.covers, directories))

    def _directories_of(self, inode: Inode) -> Sequence[int]:
        return (inode.ino,) if inode.is_dir else self.namespace.parents_of(inode.ino)

    def believable_s(self, directory: int, *, used: bool = True) -> float:
        seconds = self.leases.believable_s(directory, used=used)
        if used and not seconds:
            self.leases.asked(directory)
        return seconds

    def directories_believable_s(self) -> float:
        return self.leases.directories_believable_s()

    def path_valid_s(self, directory: int) -> float:
        return self.leases.path_valid_s(directory)

    async def freshen(self, inode: Inode, *, content: bool = False) -> None:
        if self.is_fresh(inode):
            return
        small = content and inode.is_file and 0 < inode.size <= self.cluster.small_bytes
        if small and inode.extent and not self.contents.has(inode.extent):
            await self._barrier_and_content(inode)
        else:
            await self.replica.barrier()
        for directory in self._directories_of(inode):
            self.leases.asked(directory)

    async def _barrier_and_content(self, inode: Inode) -> None:
        """Ask whether the version known here is the newest, and for its content, in one round trip."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._bring_quietly, inode.ino)
                await self.replica.barrier()
                current = self.namespace.inodes.get(inode.ino)
                if current is None or current.extent != inode.extent:
                    nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise first_error(group) from group

    async def _bring_quietly(self, ino: int) -> None:
        try:
            await self.bring(ino)
        except OSError as error:
            if error.errno in (errno.ETIMEDOUT, errno.EIO):
                raise  # it was looked for long enough
            log.debug("inode %d: %s", ino, error)  # whoever opens it will see for itself

    async def follow_path(self, path: str) -> None:
        """Follow a directory, named from the root of the filesystem, for good.

        Raises OSError ENOENT, ENOTDIR."""
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
        await self.leases.follow(inode.ino, for_good=True)
        self.prefetcher.start(inode.ino)

    # -- figures ---------------------------------------------------------------------------------

    def statvfs(self) -> os.statvfs_result:
        """Space in the cluster, in files kept with its usual number of replicas."""
        block = 4096
        copies = max(1, min(self.settings.replicas, len(self.members.nodes)))
        total = sum(node.total_bytes for node in self.members.nodes.values()) // copies // block
        free = sum(node.free_bytes for node in self.members.nodes.values()) // copies
        free = max(0, free - self._untold_bytes) // block
        below = self.contents.statvfs()
        return os.statvfs_result(
            (block, block, total, free, free, below.f_files, below.f_ffree, below.f_favail,
             below.f_flag, 255)
        )  # fmt: skip

    def figures(self) -> list[Any]:
        """Return the dataclasses of figures that status and metrics show."""
        peers, rdma = self.peers.counters, self.rdma.figures()
        looked_up = ClusterFigures(
            applied_revision=self.replica.applied,
            barriers=self.replica.barriers,
            transactions=self.engine.transactions,
            followed_directories=self.leases.count(),
            lease_transactions=self.leases.transactions,
            acknowledgements=self.leases.acknowledgements,
            locked=self.locks.count(),
            lock_transactions=self.locks.transactions,
            session_valid_seconds=self.session.left_s(),
            lent_buffers=len(self._lender),
            prefetched_bytes=self.prefetcher.fetched_bytes,
            round_trips=peers.round_trips,
            message_bytes=peers.message_bytes,
            rdma_bytes=peers.moved_bytes["verbs"],
            rdma_fallbacks=peers.fallbacks,
            rdma_reroutes=peers.reroutes,
            rdma_rails=peers.rails,
            rdma_staged_bytes=rdma.staged_bytes,
            rdma_registrations=rdma.registrations,
            rdma_registration_hits=rdma.hits,
            rdma_registered_bytes=rdma.registered_bytes,
        )
        return [self._figures, self.fetcher.figures, self.contents.figures(), looked_up]

    def status(self) -> dict[str, Any]:
        return {
            "cluster": {
                "name": self.config.cluster.name,
                "id": self.settings.cluster_id,
                "etcd": list(self.config.cluster.etcd),
                "session": self.session.number,
                "role": self.role,
                "session_valid": self.session.valid(),
                "nodes_up": len(self.members.nodes),
                "nodes_known": len(self.members.records),
                "node_here": f"{self.cluster.here:x}" if self.cluster.here else None,
                "verify": self.config.mount.verify,
                "rdma": self.rdma.why_not or "on",
                **values_of(*self.figures()),
            }
        }


def _is_store_of(directory: str, node: int) -> bool:
    try:
        with open(f"{directory}/node.json", "rb") as file:
            return bool(json.load(file)["id"] == f"{node:x}") and os.access(
                f"{directory}/incoming", os.W_OK | os.X_OK
            )
    except (OSError, ValueError, KeyError):
        return False
