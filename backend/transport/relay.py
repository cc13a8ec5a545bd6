"""etcd as a reader reaches it: through store nodes, which answer what a reader may ask.

One node at a time serves all calls. When it cannot be reached, or cannot reach etcd itself, the next one is
asked: those of the configuration, and those that are registered. Nothing depends on the node: sessions and
fences are keys in etcd, and a watch goes on from the last revision that came.
"""

import errno
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import trio

from ..etcd import etcd_pb2 as pb
from ..etcd.client import Client, Uncertain, Unsent
from ..etcd.connection import Endpoint
from ..etcd.rpc import WATCH, ConnectionLost, Message, Method, NotAccepted, R, RpcError
from ..model.records import NodeAddress
from ..trust.security import Credentials, Renewable
from . import Distrusted, Unreachable
from .caller import Caller, ControlClient
from .link import Link
from .messages import ETCD_REQUEST_BYTES_MAX, AskEtcd, EtcdOutcome, EtcdSaid
from .operations import codec_for

# A node that is silent for so long is given up.
_SILENT_S = 3.0


class Relay(Client):
    """The etcd of a cluster, by way of its store nodes, some of which are given. `credentials` are a
    reader's."""

    is_relayed = True

    def __init__(self, nodes: Sequence[tuple[str, int]], credentials: Credentials) -> None:
        self._configured = [Endpoint(host, port, True) for host, port in nodes]
        super().__init__(self._configured)
        self._credentials = credentials
        self._is_revoked: Callable[[str], bool] = lambda serial: False
        self._registered: Callable[[], Iterable[tuple[str, int]]] = tuple
        self._nursery: trio.Nursery | None = None
        self._links: dict[Endpoint, Link] = {}

    @property
    def renewables(self) -> Sequence[Renewable[Any]]:
        return [self._credentials.renewable]

    def heed(
        self, is_revoked: Callable[[str], bool], nodes: Callable[[], Iterable[tuple[str, int]]]
    ) -> None:
        self._is_revoked = is_revoked
        self._registered = nodes

    def close(self) -> None:
        super().close()
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()

    async def ask(self, connection: ControlClient, method: Method[R], message: bytes) -> R:
        if len(message) > ETCD_REQUEST_BYTES_MAX:
            text = f"a reader's request of {len(message)} bytes is too long"
            raise OSError(errno.EMSGSIZE, text)
        try:
            said = await connection.ask(AskEtcd(method.path, message), EtcdSaid)
        except Unreachable as error:
            self._leave(connection, error.reason)
            raise Uncertain(error.reason) from None
        if said.outcome == EtcdOutcome.ANSWERED:
            try:
                return method.parse(said.body)
            except ConnectionLost as error:
                said = EtcdSaid(EtcdOutcome.UNCERTAIN, text=str(error))
        if said.outcome == EtcdOutcome.REFUSED:
            raise RpcError(said.code, said.text)
        # Another node may reach etcd.
        self._leave(connection, said.text)
        raise (Unsent if said.outcome == EtcdOutcome.UNSENT else Uncertain)(said.text)

    async def _begin(
        self, connection: ControlClient, method: Method[R], request: Message
    ) -> "_Changes":
        assert isinstance(request, pb.WatchRequest)
        return _Changes(self, connection, request)

    # -- the nodes -------------------------------------------------------------------------------

    async def _prepare(self) -> None:
        """Take note of the nodes that are registered now. The one to try next comes first."""
        registered = [Endpoint(host, port, True) for host, port in self._registered()]
        current = self.endpoints[self._current]
        self.endpoints = list(dict.fromkeys(chain([current], self._configured, registered)))
        self._current = 0
        if self._nursery is None:
            started = trio.Event()
            trio.lowlevel.spawn_system_task(self._host, started)
            await started.wait()

    async def _host(self, started: trio.Event) -> None:
        """Hold the tasks of connections, which outlive the calls that open them."""
        async with trio.open_nursery() as self._nursery:
            started.set()
            await trio.sleep_forever()

    async def _connect(self, endpoint: Endpoint) -> ControlClient:
        link = self._links.get(endpoint)
        if link is None:
            link = self._links[endpoint] = self._link_to(endpoint)
        try:
            return await link.connected()
        except Unreachable as error:
            kind = NotAccepted if isinstance(error, Distrusted) else ConnectionLost
            raise kind(error.reason, sent=False) from None

    def _link_to(self, endpoint: Endpoint) -> Link:
        assert self._nursery is not None
        address = NodeAddress(endpoint.host, endpoint.port, 0, [], "", "", 0, 0, "")
        caller = Caller(
            "reader",
            "reader",
            lambda node: address,
            codec_for(()),
            self._nursery,
            credentials=self._credentials,
            is_revoked=lambda serial: self._is_revoked(serial),
            timeout_s=_SILENT_S,
        )
        return Link(caller, 0)


class _Changes:
    """A watch: each question is for the next changes, and waits at the node until there are any."""

    def __init__(self, relay: Relay, control: ControlClient, request: pb.WatchRequest) -> None:
        self._relay = relay
        self._control = control
        self._request = request
        self._scope = trio.CancelScope()
        self._closed = False

    async def receive(self) -> bytes | None:
        with trio.CancelScope() as self._scope:
            while not self._closed:
                question = self._request.SerializeToString()
                try:
                    answer = await self._relay.ask(self._control, WATCH, question)
                except Uncertain as error:
                    raise Unsent(str(error)) from None
                if answer.events:
                    newest = answer.events[-1].kv.mod_revision
                    self._request.create_request.start_revision = newest + 1
                if answer.events or answer.canceled:
                    return bytes(answer.SerializeToString())
        return None

    def close(self) -> None:
        self._closed = True
        self._scope.cancel()
