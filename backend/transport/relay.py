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
from google.protobuf.message import DecodeError

from ..etcd import etcd_pb2 as pb
from ..etcd.client import TRY_S, Client, Uncertain, Unsent
from ..etcd.connection import Endpoint
from ..etcd.rpc import WATCH, Message, Method, R, RpcError
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
    reader's. Used inside trio; runs in system tasks until `close`."""

    is_relayed = True

    def __init__(self, nodes: Sequence[tuple[str, int]], credentials: Credentials) -> None:
        self._configured = [Endpoint(host, port, True) for host, port in nodes]
        super().__init__(self._configured)
        self._credentials = credentials
        self._is_revoked: Callable[[str], bool] = lambda serial: False
        self._registered: Callable[[], Iterable[tuple[str, int]]] = tuple
        self._connecting = trio.Lock()
        self._control: ControlClient | None = None
        self._nursery: trio.Nursery | None = None
        self._link: Link | None = None
        self._worked = False
        self._closed = False

    @property
    def renewables(self) -> Sequence[Renewable[Any]]:
        return [self._credentials.renewable]

    def heed(
        self, is_revoked: Callable[[str], bool], nodes: Callable[[], Iterable[tuple[str, int]]]
    ) -> None:
        self._is_revoked = is_revoked
        self._registered = nodes

    def close(self) -> None:
        self._closed = True
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()

    async def attempt(self, method: Method[R], request: Message, timeout_s: float) -> R:
        body = request.SerializeToString()
        if len(body) > ETCD_REQUEST_BYTES_MAX:
            raise OSError(errno.EMSGSIZE, f"a reader's request of {len(body)} bytes is too long")
        timeout_s = max(timeout_s, 0.0)
        control: ControlClient | None = None
        with trio.move_on_after(timeout_s):
            control = await self._connected()
            heard = control.heard
            return await self.ask(control, method, body)
        reason = f"no answer within {timeout_s:.1f} s"
        if control is None:
            raise Unsent(reason)
        if control.heard == heard:
            self._leave(control, reason)
        raise Uncertain(reason)

    async def stream(self, method: Method[R], request: Message) -> "_Changes":
        assert isinstance(request, pb.WatchRequest)
        with trio.move_on_after(TRY_S):
            return _Changes(self, await self._connected(), request)
        raise Unsent(f"no connection within {TRY_S:.0f} s")

    def stream_failed(self, error: RpcError) -> bool:
        return False

    async def ask(self, control: ControlClient, method: Method[R], body: bytes) -> R:
        """Return the answer of a node, by its connection. Raises as `attempt`, and OSError."""
        try:
            said = await control.ask(AskEtcd(method.path, body), EtcdSaid)
        except Unreachable as error:
            self._leave(control, error.reason)
            raise Uncertain(error.reason) from None
        if said.outcome == EtcdOutcome.ANSWERED:
            try:
                return method.parse(said.body)
            except DecodeError:
                said = EtcdSaid(EtcdOutcome.UNCERTAIN, text="its answer makes no sense")
        if said.outcome == EtcdOutcome.REFUSED:
            raise RpcError(said.code, said.text)
        # Another node may reach etcd.
        self._leave(control, said.text)
        raise (Unsent if said.outcome == EtcdOutcome.UNSENT else Uncertain)(said.text)

    async def _connected(self) -> ControlClient:
        """Return the connection in use, or one to the first node that accepts it. Raises Unsent."""
        if self._control is not None and self._control.is_open:
            return self._control
        async with self._connecting:
            if self._control is not None:
                if self._control.is_open:
                    return self._control
                self._leave(self._control, self._control.why)
            self._know_all()
            distrusted = 0
            for _ in self.endpoints:
                if self._closed:
                    raise Unsent("the client was closed", final=True)
                link = self._link or await self._begin()
                try:
                    self._control = await link.connected()
                    self._worked = True
                    return self._control
                except Unreachable as error:
                    self._failures[self.address] = error.reason
                    distrusted += isinstance(error, Distrusted)
                finally:
                    # Also when cancelled: a node that does not answer must not be tried for ever.
                    if self._control is None:
                        self._next()
            final = distrusted == len(self.endpoints) and not self._worked
            raise Unsent(self.failures(), final=final)

    def _leave(self, control: ControlClient, reason: str) -> None:
        """Give a connection up, and turn to the next node."""
        control.close(reason)
        if control is self._control:
            self._failures[self.address] = reason
            self._control = None
            self._next()

    def _next(self) -> None:
        self._current = (self._current + 1) % len(self.endpoints)

    # -- the nodes -------------------------------------------------------------------------------

    async def _begin(self) -> Link:
        started = trio.Event()
        trio.lowlevel.spawn_system_task(self._host, started)
        await started.wait()
        assert self._nursery is not None
        caller = Caller(
            "reader",
            "reader",
            self._resolve,
            codec_for(()),
            self._nursery,
            credentials=self._credentials,
            is_revoked=lambda serial: self._is_revoked(serial),
            timeout_s=_SILENT_S,
        )
        self._link = Link(caller, 0)
        return self._link

    async def _host(self, started: trio.Event) -> None:
        """Hold the tasks of connections, which outlive the calls that open them."""
        async with trio.open_nursery() as self._nursery:
            started.set()
            await trio.sleep_forever()

    def _resolve(self, node: int) -> NodeAddress:
        endpoint = self.endpoints[self._current]
        return NodeAddress(endpoint.host, endpoint.port, 0, [], "", "", 0, 0, "")

    def _know_all(self) -> None:
        """Take note of the nodes that are registered now. That in use, or the next one, comes first."""
        registered = [Endpoint(host, port, True) for host, port in self._registered()]
        current = self.endpoints[self._current]
        self.endpoints = list(dict.fromkeys(chain([current], self._configured, registered)))
        self._current = 0


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
