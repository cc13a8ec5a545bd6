"""Calls of etcd: the choice of the endpoint, credentials, and retries.

One connection at a time serves all calls. When it fails, or its member cannot serve (it has no
leader, it is shutting down), the next endpoint is tried. A call that may be repeated is repeated until
it has a definite answer or its time is over; a call that may not (a transaction) reports whether etcd
can have received it.
"""

import copy
import errno
import functools
import logging
import random
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import hpack
import trio

from ..model.values import split_host_port
from ..pauses import Pauses
from ..trust.security import Renewable
from .connection import DEFAULT_PORT, Connection, Endpoint, Moderation, connect, tls_context
from .http2 import Stream
from .rpc import ConnectionLost, Message, Method, NoAnswer, NotAccepted, R, RpcError, Status

log = logging.getLogger(__name__)

# The longest time-out of one try. etcd itself gives a request up after 7 s.
TRY_S = 4.0
_CONNECT_S = 2.0
_HEAD_START_S = 0.2  # of a connection before the next endpoint is tried, too
PAUSES_S = (0.02, 0.5)  # pauses between tries: the first, the longest

_TRANSIENT = {
    Status.CANCELLED,
    Status.UNKNOWN,
    Status.DEADLINE_EXCEEDED,
    Status.ABORTED,
    Status.INTERNAL,
    Status.UNAVAILABLE,
}


class Unsent(Exception):
    """The request did not reach etcd. `final`: trying again will not help (a wrong certificate)."""

    def __init__(self, reason: str, *, final: bool = False) -> None:
        super().__init__(reason)
        self.final = final


class Uncertain(Exception):
    """The request was sent, and no definite answer came: etcd may have applied it, or may do so later."""


def longer(try_s: float) -> float:
    """Return the time-out of the try after one that failed: etcd may be slow."""
    return max(try_s, min(2 * try_s, TRY_S))


class Answers(Protocol):
    """The answers of a call that goes on."""

    async def receive(self) -> bytes | None:
        """Return the next answer, None after the last one. Raises RpcError, OSError."""
        ...

    def close(self) -> None:
        """Give the call up."""
        ...


class Reached(Protocol):
    """A connection to an endpoint. `heard` grows with all that comes from there. One that is not open takes
    no new calls; `why` says the reason, "" if calls under way go on."""

    @property
    def heard(self) -> int: ...

    @property
    def is_open(self) -> bool: ...

    @property
    def why(self) -> str: ...

    def close(self, why: str) -> None: ...


class Client(ABC):
    """Calls of an etcd, in whatever way it is reached: at `endpoints`, of which number `_current` is in use
    or tried next. `is_relayed`: store nodes answer for etcd. Used inside trio; connections run in system
    tasks until `close`."""

    is_relayed = False

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self.endpoints = list(endpoints)
        self._current = random.randrange(len(self.endpoints))
        self._failures: dict[str, str] = {}
        # The time-out of the first try of a call.
        self.try_s = TRY_S
        self.moderation = Moderation()  # of changes that are watched
        self._connection: Reached | None = None
        self._connecting = trio.Lock()
        self._worked = False
        self._closed = False

    @abstractmethod
    async def ask(self, connection: Any, method: Method[R], message: bytes) -> R:
        """Make a call on a connection. Raises Unsent, Uncertain, and RpcError with a definite refusal."""

    @abstractmethod
    async def _begin(self, connection: Any, method: Method[R], request: Message) -> Answers:
        """Begin a call with a stream of answers on a connection. Raises as `stream`."""

    @abstractmethod
    async def _connect(self, endpoint: Endpoint) -> Reached:
        """Connect to an endpoint. Raises ConnectionLost, NotAccepted."""

    async def _prepare(self) -> None:
        """Get ready to connect, as no connection is in use."""
        return

    def close(self) -> None:
        self._closed = True
        if self._connection is not None:
            self._connection.close("the client was closed")

    async def attempt(self, method: Method[R], request: Message, timeout_s: float) -> R:
        """Try a call once. Raises as `ask`."""
        message = request.SerializeToString()
        timeout_s = max(timeout_s, 0.0)
        asked: Reached | None = None
        with trio.move_on_after(timeout_s):
            connection = self._connection
            if connection is None or not connection.is_open:
                connection = await self._connected()
            heard = connection.heard
            asked = connection
            return await self.ask(connection, method, message)
        reason = f"no answer within {timeout_s:.1f} s"
        if asked is None:
            raise Unsent(reason)
        self._note(asked, reason)
        if asked.heard == heard:
            asked.close(reason)
        raise Uncertain(reason)

    async def stream(self, method: Method[R], request: Message) -> Answers:
        """Begin a call with a stream of answers. Raises Unsent, and RpcError and OSError from
        the stream; pass them to `stream_failed` and begin again."""
        with trio.move_on_after(TRY_S):
            return await self._begin(await self._connected(), method, request)
        raise Unsent(f"no connection within {TRY_S:.0f} s")

    def stream_failed(self, error: RpcError) -> bool:
        """Take note of a failed stream, and return whether another try can succeed."""
        return False

    @property
    def renewables(self) -> Sequence[Renewable[Any]]:
        """Return what is read again when the files of certificates change."""
        return ()

    @property
    def secure(self) -> bool:
        """Return whether all endpoints use TLS."""
        return all(endpoint.secure for endpoint in self.endpoints)

    def heed(
        self, is_revoked: Callable[[str], bool], nodes: Callable[[], Iterable[tuple[str, int]]]
    ) -> None:
        """Reach etcd also through the store nodes at these addresses, if it is relayed, and through none
        whose certificate, by its serial number, is revoked."""
        return

    @property
    def address(self) -> str:
        """Return the endpoint in use, or the next to be tried."""
        return str(self.endpoints[self._current])

    def failures(self) -> str:
        """Return the last error of each endpoint, for people."""
        said = (f"{one}: {self._failures.get(str(one), 'not tried')}" for one in self.endpoints)
        return "; ".join(said)

    async def call(
        self, method: Method[R], request: Message, *, timeout_s: float, try_s: float | None = None
    ) -> R:
        """Repeat a call until etcd answers. The first try takes `try_s` at most (None: the client's).

        Raises RpcError, NoAnswer, and OSError EACCES when another try cannot succeed.
        """
        deadline = trio.current_time() + timeout_s
        pauses = Pauses(*PAUSES_S)
        try_s = self.try_s if try_s is None else try_s
        while True:
            left_s = deadline - trio.current_time()
            try:
                return await self.attempt(method, request, min(left_s, try_s))
            except (Unsent, Uncertain) as error:
                if isinstance(error, Unsent) and error.final:
                    raise self.refused(str(error)) from None
                if trio.current_time() + pauses.next_s >= deadline:
                    raise self.timed_out(timeout_s) from None
            try_s = longer(try_s)
            await pauses.wait()

    def timed_out(self, after_s: float) -> NoAnswer:
        return NoAnswer(
            f"etcd gave no definite answer for {after_s:.0f} s ({self.failures()})."
            " Is it running, has it a majority, and are these its client addresses?"
        )

    def refused(self, reason: str) -> OSError:
        return OSError(errno.EACCES, f"etcd cannot be used: {reason}")

    # -- the choice of an endpoint ---------------------------------------------------------------

    async def _connected(self) -> Reached:
        """Return the connection in use, or one to the first endpoint that accepts it. Raises Unsent."""
        connection = self._connection
        if connection is not None and connection.is_open:
            return connection
        async with self._connecting:
            connection = self._connection
            if connection is not None:
                if connection.is_open:
                    return connection
                # Try other endpoints first: that one was just lost.
                self._note(connection, connection.why or "it is shutting down")
                self._connection = None
                self._current = (self._current + 1) % len(self.endpoints)
            if self._closed:
                raise Unsent("the client was closed", final=True)
            await self._prepare()
            return await self._first_of_all()

    async def _first_of_all(self) -> Reached:
        """Connect to the endpoints, beginning with the current one, to each while those before have not
        answered yet: one that stands still holds nobody up. Use the first that is ready. Raises Unsent."""
        not_accepted = 0

        async def try_one(number: int, failed: trio.Event) -> None:
            nonlocal not_accepted
            endpoint = self.endpoints[number]
            try:
                connection = await self._connect(endpoint)
            except ConnectionLost as error:
                self._failures[str(endpoint)] = str(error)
                not_accepted += isinstance(error, NotAccepted)
                failed.set()
                return
            if self._connection is not None:
                connection.close("another one was faster")
                return
            self._connection, self._current = connection, number
            nursery.cancel_scope.cancel()

        first, count = self._current, len(self.endpoints)
        try:
            async with trio.open_nursery() as nursery:
                for place in range(count):
                    failed = trio.Event()
                    nursery.start_soon(try_one, (first + place) % count, failed)
                    with trio.move_on_after(_HEAD_START_S):
                        await failed.wait()
        finally:
            # Also when cancelled: the next try begins with another one.
            if self._connection is None:
                self._current = (first + 1) % count
        if self._connection is None:
            # An endpoint that worked before may work again: a server that stops can send odd errors.
            final = not_accepted == count and not self._worked
            raise Unsent(self.failures(), final=final)
        self._worked = True
        return self._connection

    def _leave(self, connection: Reached, reason: str) -> None:
        """Give up a connection whose member cannot serve, and turn to the next endpoint."""
        self._note(connection, reason)
        # A store node may be the only one that is known so far: `_prepare` finds others.
        if self.is_relayed or len(self.endpoints) > 1:
            connection.close(reason)

    def _note(self, connection: Reached, reason: str) -> None:
        if connection is self._connection:
            self._failures[self.address] = reason


class DirectClient(Client):
    """Connections of one process to an etcd cluster. `check_renewed` raises an error where certificates
    must not be used that are there now. Raises ValueError and OSError for senseless addresses and files."""

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        ca: str | None = None,
        cert: str | None = None,
        key: str | None = None,
        check_renewed: Callable[[], None] = lambda: None,
    ) -> None:
        secure = ca is not None or cert is not None
        if not endpoints:
            raise ValueError("no address of etcd is given")
        addresses = (split_host_port(text, DEFAULT_PORT) for text in endpoints)
        super().__init__([Endpoint(host, port, secure) for host, port in addresses])

        def load(before: ssl.SSLContext | None) -> ssl.SSLContext:
            if before is not None:
                check_renewed()
            return tls_context(ca, cert, key)

        files = [path for path in (ca, cert, key) if path is not None]
        # For new connections.
        self.tls = Renewable(files, load) if any(one.secure for one in self.endpoints) else None

    @property
    def renewables(self) -> Sequence[Renewable[Any]]:
        return [self.tls] if self.tls is not None else []

    def only(self, endpoint: Endpoint) -> "DirectClient":
        """Return a client of one endpoint, with the same credentials. The caller closes it."""
        other = copy.copy(self)
        other.endpoints, other._current = [endpoint], 0
        other._connection, other._connecting, other._failures = None, trio.Lock(), {}
        return other

    async def ask(self, connection: Connection, method: Method[R], message: bytes) -> R:
        try:
            headers = _header_block(method.path, self.endpoints[self._current].secure)
            stream = await connection.start(headers, message)
            return method.parse(await stream.answer())
        except ConnectionLost as error:
            self._note(connection, str(error))
            raise (Uncertain if error.sent else Unsent)(str(error)) from None
        except RpcError as error:
            if error.code in _TRANSIENT:
                self._leave(connection, error.text)
                raise Uncertain(error.text) from None
            if error.code == Status.RESOURCE_EXHAUSTED and "too many requests" in error.text:
                raise Unsent(error.text) from None
            if error.code == Status.INVALID_ARGUMENT and "auth store is old" in error.text:
                # Users or roles changed after etcd received the request, so etcd did not apply it.
                raise Unsent(error.text) from None
            raise

    async def _begin(self, connection: Connection, method: Method[R], request: Message) -> Stream:
        try:
            headers = _header_block(method.path, self.endpoints[self._current].secure)
            return await connection.start(headers, request.SerializeToString())
        except ConnectionLost as error:
            raise Unsent(str(error)) from None

    def stream_failed(self, error: RpcError) -> bool:
        if error.code in _TRANSIENT and self._connection is not None:
            self._leave(self._connection, error.text)
            return True
        return False

    async def _connect(self, endpoint: Endpoint) -> Connection:
        """Connect to an endpoint. Raises ConnectionLost."""
        with trio.move_on_after(_CONNECT_S):
            try:
                sock = await connect(endpoint)
            except OSError as error:
                raise ConnectionLost(error.strerror or str(error), sent=False) from None
            tls = (self.tls.current, endpoint.host) if endpoint.secure and self.tls else None
            connection = Connection(sock, tls, self.moderation)
            trio.lowlevel.spawn_system_task(connection.run)
            try:
                await connection.wait_ready()
            except BaseException:
                connection.close("it was not ready in time")
                raise
            if self._closed:
                connection.close("the client was closed")
            return connection
        raise ConnectionLost(f"no answer within {_CONNECT_S:.0f} s", sent=False)


@functools.cache
def _header_block(path: str, secure: bool) -> bytes:
    """Return the encoded headers of a call of this method."""
    headers = {
        ":method": "POST",
        ":scheme": "https" if secure else "http",
        ":path": path,
        ":authority": "etcd",
        "te": "trailers",
        "content-type": "application/grpc",
        "hasleader": "true",  # a member that is cut off refuses calls
    }
    # Each as one that must not enter a table, so that the block can be sent again.
    return hpack.Encoder().encode([(name, value, True) for name, value in headers.items()])
