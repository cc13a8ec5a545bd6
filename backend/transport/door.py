"""The ports of a node: a peer that connects to one of them is a stranger first, then a member.

Strangers cost little: they have HANDSHAKE_S to identify themselves, in messages of a few KiB, and when
there are more than STRANGERS_MAX, the oldest one is cut off. A peer that sends invalid messages loses its
connection, with one line in the log.
"""

import logging
import os
import socket
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import trio

from ..observe.figures import count, counts, gauge
from ..trust.security import Identity, peer_identity
from .frames import BadMessage
from .rights import ROLES

log = logging.getLogger(__name__)

# Serves a connected socket of the peer at an address.
Serve: TypeAlias = Callable[[trio.socket.SocketType, str], Awaitable[None]]

HANDSHAKE_S = 5.0
STRANGERS_MAX = 128
MEMBERS_MAX = 16384
# All answers that wait for members to take them are no longer than this together.
UNTAKEN_BYTES_MAX = 1 << 30
_BACKLOG = 1024
_SETBACK_S = 0.1
# The first byte of a connection that uses TLS.
TLS_BEGINS = b"\x16"
_ENDS = (
    OSError,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
    trio.EndOfChannel,
    trio.TooSlowError,
)


@dataclass(slots=True)
class ServerFigures:
    """The node's end."""

    requests: Counter[str] = counts("Requests served, by kind", "kind")
    errors: Counter[str] = counts("Requests that failed, by errno name", "errno")
    received_bytes: int = count("Bytes of extents received")
    sent_bytes: int = count("Bytes of extents sent, also down the chain")
    rejected_peers: int = count("Connections refused: not authenticated, or not understood")
    denied_requests: int = count("Requests of peers without the right to them")
    connections: int = gauge("Connections of peers")


class Door:
    """The door of one node: all its ports share the room for strangers and for members. `nursery` ends with
    the node."""

    def __init__(self, nursery: trio.Nursery, counters: ServerFigures) -> None:
        self._nursery = nursery
        self._counters = counters
        self.strangers: OrderedDict[int, trio.CancelScope] = OrderedDict()
        self._untaken: dict[trio.CancelScope, int] = {}  # the oldest first
        self._untaken_bytes = 0

    def open(self, listening: trio.socket.SocketType, serve: Serve) -> None:
        """Have `serve(sock, address)` called, in a task of its own, for each that connects. It ends the
        connection by returning, or by raising one of the errors of sockets and streams, or BadMessage."""
        self._nursery.start_soon(self._accept, listening, serve)

    async def _accept(self, listening: trio.socket.SocketType, serve: Serve) -> None:
        with listening:
            while True:
                try:
                    sock, address = await listening.accept()
                except OSError as error:
                    # No descriptors or memory are left, or the peer is gone already.
                    log.warning("a connection could not be accepted: %s", error)
                    await trio.sleep(_SETBACK_S)
                    continue
                self._nursery.start_soon(self._serve, serve, sock, address[0])

    async def _serve(self, serve: Serve, sock: trio.socket.SocketType, address: str) -> None:
        try:
            with sock:
                await serve(sock, address)
        except BadMessage as error:
            self._counters.rejected_peers += 1
            log.warning("connection from %s closed: %s", address, str(error))
        except _ENDS as error:
            log.debug("connection from %s ended: %s", address, str(error))
        except Exception:
            log.exception("connection from %s", address)

    @contextmanager
    def stranger(self) -> Iterator[None]:
        """Limit the time that a stranger takes inside. Raises BadMessage when it is over."""
        if len(self.strangers) >= STRANGERS_MAX:
            self.strangers.popitem(last=False)[1].cancel()
        with trio.move_on_after(HANDSHAKE_S) as scope:
            self.strangers[id(scope)] = scope
            try:
                yield
            finally:
                self.strangers.pop(id(scope), None)
        if scope.cancelled_caught:
            raise BadMessage("it did not say in time who it is")

    @contextmanager
    def member(self) -> Iterator[None]:
        """Count a member that is served inside. Raises BadMessage when there are too many."""
        if self._counters.connections >= MEMBERS_MAX:
            raise BadMessage(f"there are {MEMBERS_MAX} connections already")
        self._counters.connections += 1
        try:
            yield
        finally:
            self._counters.connections -= 1

    @contextmanager
    def answer(self, size: int, patience_s: float) -> Iterator[trio.CancelScope]:
        """Limit the time that a member takes inside to receive an answer of `size` bytes. If the answers of
        all are too long together, the time of those that have waited longest is over at once."""
        with trio.move_on_after(patience_s) as scope:
            self._untaken[scope] = size
            self._untaken_bytes += size
            while self._untaken_bytes > UNTAKEN_BYTES_MAX:
                oldest = next(iter(self._untaken))
                self._untaken_bytes -= self._untaken.pop(oldest)
                oldest.cancel()
            try:
                yield scope
            finally:
                self._untaken_bytes -= self._untaken.pop(scope, 0)


def listen(address: str, port: int = 0) -> trio.socket.SocketType:
    """Return a socket that listens at an IP address; port 0 takes a free one. Raises OSError."""
    family, *_, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    is_six = family == socket.AF_INET6
    try:
        sock = socket.create_server(where, family=family, backlog=_BACKLOG, dualstack_ipv6=is_six)
    except OSError as error:
        text = f"cannot listen on {address} port {port}: {os.strerror(error.errno or 0)}"
        raise OSError(error.errno, text) from error
    return trio.socket.from_stdlib_socket(sock)


def identity_of(connection: Any) -> Identity:
    """Return the identity in the certificate at the other end. Raises BadMessage if it may not ask us."""
    identity = peer_identity(connection)
    if identity is None or identity.role not in ROLES:
        raise BadMessage("its certificate names no role that may use store nodes")
    return identity
