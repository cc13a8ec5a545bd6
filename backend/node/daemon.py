"""One store node from start to end.

The order of the start matters: the node compares what it keeps with what the cluster says it should keep
before it registers, and it registers only when it can be asked. A clean stop runs in reverse order, and
nobody has to wait for a lease to expire.
"""

import logging
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import trio

from ..._version import __version__
from ..cluster.config import ClusterConfig
from ..cluster.group_configs import Groups
from ..cluster.lease import Session
from ..cluster.membership import Certificates, Members, read_settings
from ..cluster.replica import Replica
from ..etcd.client import Client
from ..etcd.engine import EtcdEngine
from ..etcd.rpc import NoAnswer
from ..kv import WentBack
from ..model.records import NodeAddress, Settings
from ..observe.figures import gauge, gauges, values_of
from ..observe.logs import identify, log_failure
from ..observe.metrics import serve_metrics
from ..process import calm_the_collector, has_terminal, raise_limits, tell_manager
from ..transport.caller import Caller
from ..transport.mover import Host
from ..transport.movers import all_movers
from ..transport.operations import codec_for
from ..transport.peers import Peers, patience_s
from ..transport.rights import Peer
from ..transport.server import Listener
from ..transport.verbs.rdma import Rdma
from ..trust.security import Renewal
from ..unwrap import background, first_error, only_error
from .agent import Agent
from .catalog import Catalog
from .copier import Copier
from .feed import Feed
from .files import Files
from .handover import Handover
from .housekeeping import EtcdWatch
from .identity import NodeHistory
from .readers import Kept, Readers
from .resync import Resync
from .scrub import Scrub
from .service import NodeService
from .state import ClusterState

log = logging.getLogger(__name__)

# The node's key has its free room: put again when that has changed by this share, or by so many bytes.
_SPACE_SHARE = 0.02
_SPACE_BYTES = 4 << 20
_SPACE_PERIOD_S = 5.0
# A clean stop takes at most the sum of these two.
_LEAVE_S = 5.0
_DRAIN_S = 10.0
_RELEASE_S = 3.0


async def serve_node(
    config: ClusterConfig,
    ready: Callable[[str], None],
    waits: Callable[[str], None],
    *,
    patient: bool = True,
) -> None:
    """Be a store node of a cluster until a signal arrives. `ready` is called when it begins to serve, with
    its id and address, and again if it begins anew. The first SIGTERM or SIGINT waits for transfers under
    way and gives the lease back, the second one ends at once. Before it serves the node waits as long as
    etcd does not answer: `waits` is told so, once. If etcd went back in time the node waits, before its
    first service only if it is `patient`.

    Raises ConfigError, StoreInUse, kv.Damaged or OSError with a line for the user.
    """
    raise_limits()
    config.listen()  # raises an error before anything is changed
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        async with background() as nursery:
            turn = _Turn(patient, waits)
            nursery.start_soon(_heed, signals, turn, nursery.cancel_scope)
            while await _begins_anew(config, turn, ready):
                pass


class _Turn:
    """One run of the node. `stop` ends it once it `serves`; `renewal` reads its certificates again."""

    def __init__(self, patient: bool, waits: Callable[[str], None]) -> None:
        self.patient = patient
        self._waits = waits
        self._waits_for_etcd = False
        self.stop = trio.Event()
        self.serves = False
        self.renewal: Renewal | None = None

    def wait_for_etcd(self, error: NoAnswer) -> None:
        """Say, once, that the node waits until etcd answers."""
        if not self._waits_for_etcd:
            self._waits_for_etcd = True
            text = f"{error.text} This node waits for it"
            log.warning("%s", text)
            tell_manager(status=text)
            self._waits(text)

    def begin(self) -> None:
        self.serves = self.patient = True
        self._waits_for_etcd = False


async def _begins_anew(config: ClusterConfig, turn: _Turn, ready: Callable[[str], None]) -> bool:
    """Run the node. Return whether it has to begin anew, as etcd did not answer before the node served, or
    is not in the state that the node knew."""
    anew = False
    try:
        await _serve_once(config, turn, ready)
    except* WentBack as group:
        if not turn.patient:
            raise
        anew = True
        text = f"{only_error(group)}. This node stops serving"
        log.error("%s", text)
        tell_manager(status=text)
    except* NoAnswer as group:
        if turn.serves:
            raise
        anew = True
        error = first_error(group)
        assert isinstance(error, NoAnswer)
        turn.wait_for_etcd(error)
    finally:
        turn.serves = False
    return anew


async def _heed(signals: AsyncIterator[int], turn: _Turn, scope: trio.CancelScope) -> None:
    """End the node in order at the first signal; at once at the next one, or before it serves. SIGHUP makes
    a node without a terminal read its certificates again."""
    ends_by_hangup = has_terminal()
    async for number in signals:
        if number == signal.SIGHUP and not ends_by_hangup:
            if turn.renewal is not None:
                turn.renewal.ask()
            continue
        log.info("%s: stopping", signal.Signals(number).name)
        tell_manager("STOPPING=1", status="stops")
        if not turn.serves or turn.stop.is_set():
            scope.cancel()
        turn.stop.set()


async def _serve_once(config: ClusterConfig, turn: _Turn, ready: Callable[[str], None]) -> None:
    node = config.node
    assert node.store is not None
    with (
        Rdma(config.cluster.rdma_choice(node.encrypt_data)) as rdma,
        Files(node.store, node.size, node.quarantine, rdma) as files,
    ):
        async with config.cluster.engine("node") as engine:
            settings = await read_settings(engine, config)
            files.identity.bind(settings.cluster_id)
            identify("node", f"{files.node:016x}")
            await engine.admin.warn()
            history = NodeHistory(engine, files.identity, files.newest_session())
            await history.wait_trusted(patient=turn.patient)
            # Readers do not hold up the calls of the node itself.
            for_readers, _ = config.cluster.etcd_client("node")
            with closing(for_readers):
                async with background() as nursery:
                    made = _Node(
                        config, turn, settings, files, engine, for_readers, history, nursery
                    )
                    await made.run(ready)


@dataclass(slots=True)
class NodeFigures:
    """The node's part in its cluster."""

    groups: dict[str, int] = gauges("Placement groups, by this node's state in them", "state")
    lease_valid_seconds: float = gauge("How long this node may still serve without etcd")


class _Node:
    """The parts of a store node, made with what each of them needs, and their start and end."""

    def __init__(
        self,
        config: ClusterConfig,
        turn: _Turn,
        settings: Settings,
        files: Files,
        engine: EtcdEngine,
        for_readers: Client,
        history: NodeHistory,
        nursery: trio.Nursery,
    ) -> None:
        section, node = config.node, files.node
        self._config = config
        self._turn = turn
        self._files = files
        self._history = history
        self._nursery = nursery
        self._where = where = config.listen()
        credentials = config.cluster.credentials("node")
        own = [credentials.renewable] if credentials is not None else []
        of_etcd = [*engine.calls.client.renewables, *for_readers.renewables]
        self._renewal = turn.renewal = Renewal([*own, *of_etcd])

        # The state of the cluster.
        self._name = credentials.identity.name if credentials is not None else ""
        engine.try_within(settings.lease_ttl_s)
        session = Session(engine, None, settings.lease_ttl_s, node=node)
        faults = history.faults
        members, groups = Members(session, faults), Groups(faults)
        certificates = Certificates(credentials, faults)
        self._catalog = catalog = Catalog(
            files, members, groups, settings.buckets, faults, certificates.kept_to
        )
        kept, feed = Kept(), Feed(engine.prefix)
        consumers = (members, groups, certificates, catalog, kept, feed)
        replica = Replica(
            engine, consumers, faults=faults, history=history, is_depended_on=feed.is_asked
        )
        cluster = ClusterState(node, engine, replica, members, groups, session)
        self._cluster = cluster

        # Extents that are kept and copied.
        movers = all_movers(files.rdma, streams=section.streams, encrypt_data=section.encrypt_data)
        caller = Caller(
            f"{node:x}",
            "node",
            members.nodes.get,
            codec_for(movers),
            nursery,
            credentials=credentials,
            is_revoked=certificates.is_revoked,
            session=lambda: session.number,
            timeout_s=patience_s(settings),
        )
        self._peers = peers = Peers(caller, movers)
        members.node_changed.append(peers.node_changed)
        copier = Copier(catalog, members, peers.device, section.rebalance_rate)
        self._resync = resync = Resync(cluster, catalog, copier)
        rates = {"bytes_per_s": section.scrub_rate, "period_s": section.scrub_period}
        self._scrub = scrub = Scrub(cluster, catalog, copier, **rates)
        handover = Handover(catalog, peers.device, scrub.doubt)
        self._agent = agent = Agent(
            cluster, catalog, peers.ping, handover, rereplicate_after_s=section.rereplicate_after
        )
        self._etcd_watch = EtcdWatch(engine)

        # Service to other processes.
        self._service = service = NodeService(cluster, catalog, agent, resync, scrub, self._status)
        host = Host(
            service,
            peers.device,
            where.bind,
            credentials,
            is_gone=self._is_gone,
            is_revoked=certificates.is_revoked,
            etcd=Readers(for_readers, engine.prefix, kept, feed).ask,
        )
        self._listener = listener = Listener(host, movers, where.port)
        certificates.revoked.append(listener.cut)
        members.session_gone.append(listener.end_rights)
        members.node_changed.append(lambda changed: listener.end_rights())

    async def run(self, ready: Callable[[str], None]) -> None:
        """Serve until the turn is told to stop."""
        nursery, where = self._nursery, self._where
        nursery.start_soon(self._renewal.run)
        await self._cluster.replica.start(nursery)
        self._catalog.begin()
        await self._history.take_over()
        calm_the_collector()
        self._files.rdma.check(where.advertised)
        with closing(self._peers):
            nursery.start_soon(self._peers.run)
            labels = {"node": f"{self._files.node:016x}"}
            address, port = self._config.node.metrics_address, self._config.node.metrics_port
            metrics = serve_metrics("node", self._figures, labels, address, port)
            async with self._listener, metrics:
                await self._serve(ready)

    async def _serve(self, ready: Callable[[str], None]) -> None:
        nursery, listener, where = self._nursery, self._listener, self._where
        node, session = self._config.node, self._cluster.session
        await self._files.identity.register(self._cluster.engine, node.weight, node.labels)
        await session.update(self._address())
        await nursery.start(partial(session.run, verify=self._resync.look_over))
        for task in (
            self._resync.run,
            self._agent.run,
            self._catalog.run,
            self._scrub.run,
            self._tell_space,
            self._etcd_watch.run,
        ):
            nursery.start_soon(task)
        nursery.start_soon(self._history.run)
        text = f"node {self._files.node:016x} at {where.advertised}:{listener.control_port}"
        log.info("serving %s as %s", self._files.directory, text)
        self._turn.begin()
        tell_manager("READY=1", status=f"serves as {text}")
        ready(text)
        await self._turn.stop.wait()
        await self._end()

    def _is_gone(self, peer: Peer) -> bool:
        """Return whether a peer's session is over. One newer than the replica counts as going on."""
        if not 0 < peer.session <= self._cluster.replica.applied:
            return False
        members = self._cluster.members
        role = peer.identity.role
        if role == "node":
            return peer.node not in members.nodes
        return role in ("mount", "reader") and peer.session not in members.sessions

    def _address(self) -> NodeAddress:
        """Return the record of this node, with the room that it has now."""
        listener, space = self._listener, self._files.space()
        return NodeAddress(
            self._where.advertised,
            listener.control_port,
            listener.ports["tcp"],
            sorted(listener.ports),
            self._config.node.host,
            os.path.realpath(self._files.directory),
            space.total,
            space.free,
            __version__,
            self._name,
        )

    async def _tell_space(self) -> None:
        now = self._address()
        while True:
            await trio.sleep(_SPACE_PERIOD_S)
            before, now, record = now, self._address(), self._cluster.session.record
            assert isinstance(record, NodeAddress)
            ignored = _SPACE_SHARE * now.total_bytes
            if now == before:
                ignored = min(ignored, _SPACE_BYTES)
            changed = abs(now.free_bytes - record.free_bytes)
            if changed > ignored or now.total_bytes != record.total_bytes:
                with log_failure(log.info, "the room that is left here could not be told"):
                    await self._cluster.session.update(now)

    # -- ending ----------------------------------------------------------------------------------

    async def _end(self) -> None:
        """Hand over this node's responsibilities, and end."""
        failed = log_failure(log.warning, "groups could not be handed over")
        with trio.move_on_after(_LEAVE_S), failed:
            if alone := await self._agent.leave():
                log.warning("%d groups have no other replica: they wait for this node", alone)
        self._service.close()
        with trio.move_on_after(_DRAIN_S):
            await self._service.drained()
        with trio.move_on_after(_RELEASE_S):
            await self._history.remember()
        with trio.move_on_after(_RELEASE_S):
            await self._cluster.session.release()

    # -- figures ---------------------------------------------------------------------------------

    def _figures(self) -> list[Any]:
        """Return the dataclasses of figures that status and metrics show."""
        return [
            self._listener.host.counters,
            self._files.figures(),
            self._catalog.figures(),
            self._resync.figures(),
            self._scrub.figures(),
            self._files.rdma.figures(),
            self._etcd_watch.figures,
            NodeFigures(self._own_groups(), self._cluster.session.left_s()),
        ]

    def _status(self) -> dict[str, Any]:
        return {
            **values_of(*self._figures()),
            "version": __version__,
            "rdma": self._files.rdma.why_not or "on",
            "credential_problems": self._renewal.problems(),
            "damaged_records": self._history.faults.report(),
            "pools_in_use": sorted(self._catalog.pools_in_use()),
        }

    def _own_groups(self) -> dict[str, int]:
        """Return the number of groups that this node is a member of, by its role in them."""
        node = self._files.node
        states: Counter[str] = Counter()
        for config, _ in self._cluster.groups.configs.values():
            if node in config.joining:
                states["joining"] += 1
            elif node in config.in_sync:
                states["primary" if config.in_sync[0] == node else "in_sync"] += 1
        return dict(states)
