"""The ports of a node: a peer that connects to one of them is a stranger first, then a member.

Strangers cost little: they have HANDSHAKE_S to identify themselves, in messages of a few KiB, and when
there are more than STRANGERS_MAX, the oldest one is cut off. A peer that sends invalid messages loses its
connection, with one line in the log. When places or memory run out, the peer that has most of them gives
way, so that none can keep the others out.
"""

import logging
import math
import os
import resource
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import trio

from ..observe.figures import count, counts, gauge
from ..trust.security import Identity, peer_identity
from .frames import BadMessage
from .rights import OUTSTANDING_BYTES_MAX, ROLES, Outstanding, Peer

log = logging.getLogger(__name__)

# Serves a connected socket of the peer at an address.
Serve: TypeAlias = Callable[[trio.socket.SocketType, str], Awaitable[None]]

HANDSHAKE_S = 5.0
STRANGERS_MAX = 128
MEMBERS_MAX = 16384
# The share of the open files that this process may have.
_MEMBERS_SHARE = 0.5
# All answers that wait for members to take them are no longer than this together, and those of one.
UNTAKEN_BYTES_MAX = 1 << 30
UNTAKEN_OF_ONE_MAX = 128 << 20
REVOKED = "its certificate was revoked"
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


class Shares:
    """Places, or bytes, that peers share, `most` of them in all and `of_one`. When more are taken, the peer
    that has most gives up those that it has had longest."""

    def __init__(self, most: int, of_one: float = math.inf) -> None:
        self._most, self._of_one = most, of_one
        self._taken: dict[trio.CancelScope, tuple[str, int]] = {}  # the oldest first
        self._of_peers: Counter[str] = Counter()
        self._total = 0

    def __len__(self) -> int:
        return len(self._taken)

    @contextmanager
    def share(self, who: str, size: int = 1, for_s: float = math.inf) -> Iterator[trio.CancelScope]:
        """Have a share for the block, which is cancelled when it is given up, or after `for_s`."""
        with trio.move_on_after(for_s) as scope:
            self._taken[scope] = who, size
            self._of_peers[who] += size
            self._total += size
            while self._total > self._most or self._of_peers[who] > self._of_one:
                [(greedy, _)] = self._of_peers.most_common(1)
                oldest = next(each for each, (peer, _) in self._taken.items() if peer == greedy)
                self._give_back(oldest)
                oldest.cancel()
            try:
                yield scope
            finally:
                self._give_back(scope)

    def end(self, who: str) -> None:
        """Have a peer give up all that it has."""
        for scope, (peer, _) in self._taken.items():
            if peer == who:
                scope.cancel()

    def _give_back(self, scope: trio.CancelScope) -> None:
        who, size = self._taken.pop(scope, ("", 0))
        self._total -= size
        self._of_peers[who] -= size
        if not self._of_peers[who]:
            del self._of_peers[who]


class Door:
    """The door of one node: its ports share the room for peers."""

    def __init__(self, counters: ServerFigures, is_revoked: Callable[[str], bool]) -> None:
        self._counters = counters
        self._is_revoked = is_revoked
        self.outstanding = defaultdict[str, Outstanding](lambda: Outstanding(OUTSTANDING_BYTES_MAX))
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.strangers = Shares(STRANGERS_MAX)
        self.members = Shares(min(MEMBERS_MAX, int(files * _MEMBERS_SHARE)))
        self.untaken = Shares(UNTAKEN_BYTES_MAX, UNTAKEN_OF_ONE_MAX)

    def open(self, nursery: trio.Nursery, listening: trio.socket.SocketType, serve: Serve) -> None:
        """Have `serve(sock, address)` called, in a task of its own, for each that connects. It ends the
        connection by returning, or by raising one of the errors of sockets and streams, or BadMessage."""
        nursery.start_soon(self._accept, nursery, listening, serve)

    async def _accept(
        self, nursery: trio.Nursery, listening: trio.socket.SocketType, serve: Serve
    ) -> None:
        with listening:
            while True:
                try:
                    sock, address = await listening.accept()
                except OSError as error:
                    # No descriptors or memory are left, or the peer is gone already.
                    log.warning("a connection could not be accepted: %s", error)
                    await trio.sleep(_SETBACK_S)
                    continue
                nursery.start_soon(self._serve, serve, sock, address[0])

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
    def stranger(self, address: str) -> Iterator[None]:
        """Limit the time that a stranger takes inside. Raises BadMessage when it is over."""
        # Whoever has an IPv6 address has all of its network, which is 64 bits.
        address, _, _ = address.partition("%")
        if ":" in address and "." not in address:
            address = socket.inet_pton(socket.AF_INET6, address)[:8].hex()
        with self.strangers.share(address, for_s=HANDSHAKE_S) as scope:
            yield
        if scope.cancelled_caught:
            raise BadMessage("it did not say in time who it is")

    @contextmanager
    def member(self, peer: Peer) -> Iterator[None]:
        """Count a connection that is served inside. Raises BadMessage when its certificate is revoked or
        expires, or when it has to go for others."""
        serial, expires_s = peer.identity.serial, peer.identity.expires_s or math.inf
        if peer.identity.role != "node":
            peer.outstanding = self.outstanding[peer.who]
        with self.members.share(peer.who, for_s=max(expires_s - time.time(), 0)) as scope:
            self._counters.connections += 1
            try:
                if self._is_revoked(serial):
                    scope.cancel()
                yield
            finally:
                self._counters.connections -= 1
        if scope.cancelled_caught:
            why = "it has most of the connections, and others need one"
            if time.time() >= expires_s:
                why = "its certificate has expired"
            raise BadMessage(f"{peer}: {REVOKED if self._is_revoked(serial) else why}")


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
