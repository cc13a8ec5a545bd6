"""One store node from start to end.

The order of the start is the point: what this node keeps is compared with what the cluster says it
should keep before the node registers, and it registers when it can be asked. In a clean stop the order is
the reverse, and nobody has to wait for a lease to expire.
"""

import logging
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import trio

from ..._version import __version__
from ..cluster.config import ClusterConfig
from ..cluster.group_configs import Groups
from ..cluster.lease import NODE, Removed, Session
from ..cluster.membership import Members, admit
from ..cluster.records import (
    NodeAddress,
    NodeRecord,
    Settings,
    decode,
    encode,
    key_of,
)
from ..cluster.replica import Replica
from ..cluster.settings import read_settings
from ..kv import Conflict, Put, SharedEngine, WentBack
from ..observe.logs import identify
from ..observe.metrics import Collector, NodeCounters, serve_metrics
from ..process import calm_the_collector, has_terminal, raise_open_files_limit
from ..transport.mover import Mover
from ..transport.movers import all_movers
from ..transport.peers import Peers, patience_s
from ..transport.rights import Peer
from ..transport.server import Listener
from ..transport.verbs.rdma import Rdma
from ..trust.certificates import Certificates
from ..trust.renewal import Renewal
from ..unwrap import only_error
from .agent import Agent
from .catalog import Catalog
from .files import Files
from .handover import Handover
from .resync import Resync
from .scrub import Scrub
from .service import NodeService
from .witness import NodeHistory

__all__ = ["serve_node"]

log = logging.getLogger(__name__)

# The node's key says how much room there is. It is put again when that has changed by this share.
_SPACE_SHARE = 0.02
_SPACE_PERIOD_S = 5.0
# A clean stop takes at most the sum of these.
_LEAVE_S = 5.0
_DRAIN_S = 10.0
_RELEASE_S = 3.0


async def serve_node(
    config: ClusterConfig, ready: Callable[[str], None], *, patient: bool = True
) -> None:
    """Be a store node of a cluster until a signal says so; `ready` is called when it begins to serve, with
    its id and address, and again if it begins anew. The first SIGTERM or SIGINT lets what is being received
    end and gives the lease back, the second one ends at once. Where etcd went back in time the node waits,
    also before it has served if it is `patient`.

    Raises ConfigError, StoreInUse, kv.Damaged or OSError with a line for whoever started it.
    """
    raise_open_files_limit()
    config.listen()  # before anything is touched
    try:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            async with trio.open_nursery() as nursery:
                turn = _Turn(patient)
                nursery.start_soon(_heed, signals, turn, nursery.cancel_scope)
                while await _served(config, turn, ready):
                    pass
                nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        raise only_error(group) from group


class _Turn:
    """`stop` tells the node to end in order, once it `serves`. `renewal` reads its certificates again."""

    def __init__(self, patient: bool) -> None:
        self.patient = patient
        self.stop = trio.Event()
        self.serves = False
        self.renewal: Renewal | None = None


async def _served(config: ClusterConfig, turn: _Turn, ready: Callable[[str], None]) -> bool:
    """Returns whether the node has to begin anew, as etcd is not the one that it knew."""
    went_back = False
    try:
        await _Node(config, turn).run(ready)
    except* WentBack as group:
        if not turn.patient:
            raise
        went_back = True
        log.error("%s. This node stops serving", only_error(group))
    finally:
        turn.serves = False
    return went_back


async def _heed(signals: AsyncIterator[int], turn: _Turn, scope: trio.CancelScope) -> None:
    """The first signal ends the node in order; the next one, or one before it serves, at once. SIGHUP to a
    node without a terminal has it read its certificates again."""
    ends_by_hangup = has_terminal()
    async for number in signals:
        if number == signal.SIGHUP and not ends_by_hangup:
            if turn.renewal is not None:
                turn.renewal.ask()
            continue
        log.info("%s: stopping", signal.Signals(number).name)
        if not turn.serves or turn.stop.is_set():
            scope.cancel()
        turn.stop.set()


class _Node:
    def __init__(self, config: ClusterConfig, turn: _Turn) -> None:
        self._turn = turn
        self._config = config
        self._members = Members()
        self._groups = Groups()
        self._counters = NodeCounters()

    async def run(self, ready: Callable[[str], None]) -> None:
        node = self._config.node
        assert node.store is not None
        choice = self._config.cluster.rdma_choice(node.encrypt_data)
        with (
            Rdma(choice) as self._rdma,
            Files(node.store, node.size, node.quarantine, self._rdma) as self._files,
        ):
            async with self._config.cluster.engine("node") as self._engine:
                settings = await read_settings(self._engine, self._config)
                self._files.identity.bind(settings.cluster_id)
                identify("node", f"{self._files.node:016x}")
                await self._engine.admin.warn()
                self._history = NodeHistory(self._engine, self._files)
                await self._history.wait_trusted(patient=self._turn.patient)
                async with trio.open_nursery() as self._nursery:
                    await self._assemble(settings, ready)
                    self._nursery.cancel_scope.cancel()

    async def _assemble(self, settings: Settings, ready: Callable[[str], None]) -> None:
        config, files = self._config, self._files
        self._catalog = Catalog(files, self._groups, settings.buckets)
        credentials = self._credentials = config.cluster.credentials("node")
        self._certificates = Certificates(
            lambda: credentials.identity.serial if credentials else ""
        )
        own = [credentials.renewable] if credentials is not None else []
        self._renewal = self._turn.renewal = Renewal([*own, *self._engine.renewables])
        self._nursery.start_soon(self._renewal.run)
        consumers = self._members, self._groups, self._certificates, self._catalog
        self._replica = Replica(self._engine, consumers, history=self._history)
        await self._replica.start(self._nursery)
        self._catalog.begin()
        await self._history.take_over()
        calm_the_collector()
        address = NodeAddress(
            address="", control_port=0, data_port=0, transports=["tcp"], host=config.node.host,
            store=os.path.realpath(files.directory), total_bytes=0, free_bytes=0,
            version=__version__, name=credentials.identity.name if credentials is not None else "",
        )  # fmt: skip
        await self._work(settings, address, ready)

    async def _work(
        self, settings: Settings, address: NodeAddress, ready: Callable[[str], None]
    ) -> None:
        config, files = self._config, self._files
        self._session = Session(self._engine, NODE, address, settings.lease_ttl_s, node=files.node)
        self._members.attach(self._session)
        movers = all_movers(
            self._rdma, streams=config.node.streams, encrypt_data=config.node.encrypt_data
        )
        async with self._peers(settings, movers) as peers:
            self._members.node_changed.append(peers.node_changed)
            self._resync = Resync(
                files.node, self._engine, self._replica, self._members, self._groups,
                self._session, self._catalog, files, peers.device,
                bytes_per_s=config.node.rebalance_rate,
            )  # fmt: skip
            self._session.verify = self._resync.verify
            self._agent = Agent(
                files.node, self._engine, self._replica, self._members, self._groups,
                self._session, self._resync, peers.ping,
                rereplicate_after_s=config.node.rereplicate_after,
            )  # fmt: skip
            self._catalog.wanted = self._agent.wants
            self._scrub = Scrub(
                files, self._catalog, self._members, self._groups, self._resync.checks,
                self._resync.copier, bytes_per_s=config.node.scrub_rate,
                period_s=config.node.scrub_period,
            )  # fmt: skip
            self._agent.handover = Handover(
                files.node, self._catalog, self._resync.checks, peers.device, self._scrub.doubt,
                self._agent.look,
            )  # fmt: skip
            self._service = NodeService(
                files, self._catalog, self._replica, self._members, self._groups, self._session,
                self._agent.evict, self._figures, self._resync.report_damage, scrub=self._scrub,
            )  # fmt: skip
            await self._serve(peers, movers, ready)

    async def _serve(
        self, peers: Peers, movers: Sequence[Mover], ready: Callable[[str], None]
    ) -> None:
        config = self._config
        where = config.listen()
        self._rdma.check(where.advertised)
        self._listener = Listener(
            self._service, peers, movers, where.bind, where.port,
            credentials=self._credentials, is_gone=self._is_gone,
            is_revoked=self._certificates.is_revoked,
        )  # fmt: skip
        self._certificates.revoked.append(self._listener.cut)
        self._members.session_gone.append(self._listener.end_rights)
        self._members.node_changed.append(lambda node: self._listener.end_rights())
        async with self._listener as listener, self._metrics():
            await self._register(where.advertised, listener.control_port, listener.ports)
            for task in (
                self._resync.run, self._agent.run, self._catalog.run, self._scrub.run,
                self._tell_space,
            ):  # fmt: skip
                self._nursery.start_soon(task)
            self._nursery.start_soon(
                self._history.run, self._session, lambda: len(self._members.nodes)
            )
            text = f"node {self._files.node:016x} at {where.advertised}:{listener.control_port}"
            log.info("serving %s as %s", self._files.directory, text)
            self._turn.serves = self._turn.patient = True
            ready(text)
            await self._turn.stop.wait()
            await self._end()

    def _is_gone(self, peer: Peer) -> bool:
        """A session that began later than what is known here may well go on."""
        if not 0 < peer.session <= self._replica.applied:
            return False
        if peer.role == "node":
            return peer.node not in self._members.nodes
        return peer.role in ("mount", "reader") and peer.session not in self._members.sessions

    # -- beginning -------------------------------------------------------------------------------

    def _peers(self, settings: Settings, movers: Sequence[Mover]) -> Peers:
        return Peers(
            self._members.address,
            movers,
            credentials=self._credentials,
            name=f"{self._files.node:x}",
            role="node",
            session=lambda: self._session.number,
            timeout_s=patience_s(settings),
            is_revoked=self._certificates.is_revoked,
        )

    async def _register(self, address: str, control_port: int, ports: dict[str, int]) -> None:
        node = self._config.node
        await _admit(self._engine, self._files, node.weight, node.labels)
        self._session.record = msgspec.structs.replace(
            self._with_space(), address=address, control_port=control_port, data_port=ports["tcp"],
            transports=sorted(ports),
        )  # fmt: skip
        await self._nursery.start(self._session.run)

    def _with_space(self) -> NodeAddress:
        record, space = self._session.record, self._files.space()
        assert isinstance(record, NodeAddress)
        return msgspec.structs.replace(record, total_bytes=space.total, free_bytes=space.free)

    async def _tell_space(self) -> None:
        while True:
            await trio.sleep(_SPACE_PERIOD_S)
            record, now = self._session.record, self._with_space()
            assert isinstance(record, NodeAddress)
            changed = abs(now.free_bytes - record.free_bytes)
            if changed > _SPACE_SHARE * now.total_bytes or now.total_bytes != record.total_bytes:
                try:
                    await self._session.update(now)
                except OSError as error:
                    log.info("the room that is left here could not be told: %s", error)

    # -- ending ----------------------------------------------------------------------------------

    async def _end(self) -> None:
        """Hand over what this node is responsible for, and go."""
        with trio.move_on_after(_LEAVE_S):
            try:
                alone = await self._agent.leave()
                if alone:
                    log.warning("%d groups have no other replica: they wait for this node", alone)
            except OSError as error:
                log.warning("groups could not be handed over: %s", error)
        self._service.close()
        with trio.move_on_after(_DRAIN_S):
            await self._service.drained()
        with trio.move_on_after(_RELEASE_S):
            await self._history.put(self._session)
        with trio.move_on_after(_RELEASE_S):
            await self._session.release()

    # -- figures ---------------------------------------------------------------------------------

    @asynccontextmanager
    async def _metrics(self) -> AsyncIterator[None]:
        node = self._config.node
        if node.metrics_port is None:
            yield
            return
        collector = Collector(
            "node",
            self._refreshed,
            {"node": f"{self._files.node:016x}"},
            trio.lowlevel.current_trio_token(),
        )
        server = serve_metrics(collector, node.metrics_address, node.metrics_port)
        log.info("metrics are served on %s port %d", node.metrics_address, server.port)
        try:
            yield
        finally:
            # Its thread may be waiting for this one to look figures up.
            await trio.to_thread.run_sync(server.close)

    def _refreshed(self) -> tuple[NodeCounters]:
        """Return the figures, brought up to date."""
        counters, heard = self._counters, self._listener.counters
        progress, space = self._resync.progress(), self._files.space()
        counters.requests, counters.errors = heard.requests, heard.errors
        counters.received_bytes, counters.sent_bytes = heard.received_bytes, heard.sent_bytes
        counters.rejected_peers, counters.connections = heard.rejected, heard.connections
        counters.resync_bytes = progress.copied_bytes
        counters.resync_groups_left = progress.groups
        counters.resync_bytes_left = progress.bytes_left
        counters.freed_extents = self._catalog.freed_extents
        counters.store_bytes, counters.store_free_bytes = space.used, space.free
        counters.extents = len(self._files)
        counters.created_files = self._files.figures().created_files
        counters.reused_files = self._files.figures().reused_files
        rdma = self._rdma.figures()
        counters.rdma_registrations = rdma.registrations
        counters.rdma_registered_bytes = rdma.registered_bytes
        counters.pending_extents = self._catalog.pending_extents
        counters.lease_valid_seconds = self._session.left_s()
        counters.groups = self._own_groups()
        scrub = self._scrub.progress()
        counters.scrubbed_bytes = scrub.checked_bytes
        counters.scrub_finished_seconds = scrub.finished_at
        counters.wrong_found, counters.wrong_mended = scrub.found, scrub.mended
        counters.wrong_extents, counters.broken_extents = scrub.wrong, scrub.broken
        return (counters,)

    def _figures(self) -> dict[str, Any]:
        rdma = self._rdma.figures()
        return {
            "version": __version__,
            "own_groups": self._own_groups(),
            "connections": self._listener.counters.connections,
            "rdma": self._rdma.why_not or "on",
            "credential_problems": self._renewal.problems(),
            "rdma_registrations": rdma.registrations,
            "rdma_registered_bytes": rdma.registered_bytes,
            **self._agent.status(),
        }

    def _own_groups(self) -> dict[str, int]:
        """How many groups this node is a member of, by what it is in them."""
        node = self._files.node
        states: Counter[str] = Counter()
        for config, _ in self._groups.all().values():
            if node in config.joining:
                states["joining"] += 1
            elif node in config.in_sync:
                states["primary" if config.in_sync[0] == node else "in_sync"] += 1
        return dict(states)


async def _admit(engine: SharedEngine, files: Files, weight: float, labels: dict[str, str]) -> None:
    """Make the node known with this weight and these labels; a known one stays up or draining. Raises
    Removed."""
    if not files.identity.admitted:
        if await admit(engine, files.node, NodeRecord("up", weight, labels)):
            log.info("this store is new to the cluster")
        files.identity.mark_admitted()
    key = key_of(b"N", files.node)
    while (found := await engine.get(key)) is not None:
        try:
            known = decode(found.value, NodeRecord)
            record = NodeRecord(known.state, weight, labels)
            if record == known:
                return
        except msgspec.DecodeError as error:
            log.error("the record of this node in etcd was damaged and is made anew: %s", error)
            record = NodeRecord("up", weight, labels)
        try:
            await engine.transact([(key, found.mod_revision)], [Put(key, encode(record))])
            return
        except Conflict:
            continue
    raise Removed(files.node)
