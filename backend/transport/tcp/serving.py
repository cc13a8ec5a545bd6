"""The node's end over TCP: it issues tickets, and serves data connections that show them."""

import socket
import ssl
from collections import OrderedDict, defaultdict
from contextlib import ExitStack
from typing import NamedTuple

import trio

from ...trust.security import describe_tls_error
from ...unwrap import if_it_fails
from ..door import TLS_BEGINS, identity_of
from ..frames import BadMessage
from ..messages import Answer, Request
from ..mover import Connection, Host, Lasting, Serving
from ..rights import Peer
from .authentication import CODE_BYTES, Forged, Ticket
from .channel import Channel, EncryptedChannel, Lost, make_channel
from .data import Data
from .wire import PREAMBLE_BYTES, Granted, Tickets, unpack_preamble

# Callers give idle connections up earlier.
IDLE_S = 60.0
TICKET_S = 30.0
TICKETS_PENDING_MAX = 16384
TICKETS_OF_ONE_MAX = 512


class Guest(Connection):
    """A peer that may open data connections, with tickets, as long as its control connection is open."""

    def __init__(self, serving: "TcpServing", peer: Peer) -> None:
        self.peer = peer
        self.who = peer.who
        self._serving = serving
        # Numbers of tickets that it has not used yet, the oldest first.
        self.tickets: dict[bytes, None] = {}
        self.channels: set[Channel] = set()
        self.has_left = False

    async def answer(self, request: Request) -> Answer | Lasting:
        assert isinstance(request, Tickets)
        return Granted(self._serving.grant(self, request.count))

    def close(self, why: str) -> None:
        """End its data connections, those in use after their request, unless the peer is revoked."""
        self.has_left = True
        is_revoked = self._serving.host.is_revoked(self.peer.identity.serial)
        for channel in self.channels:
            if is_revoked or channel.clean:
                channel.shutdown()
        for number in list(self.tickets):
            self._serving.forget(number)


class _Pending(NamedTuple):
    """A ticket that was not used yet."""

    key: bytes
    end: float
    guest: Guest


class TcpServing(Serving):
    """The end of one node, which issues and redeems the tickets of all peers. `encrypt` refuses data
    connections that are not encrypted; with credentials those that are, are always welcome."""

    def __init__(self, host: Host, encrypt: bool, port: int) -> None:
        self.host = host
        self._encrypt = encrypt
        self.port = port
        self._data = Data(host)
        # Tickets that were not used yet, by number, the oldest first.
        self.pending: OrderedDict[bytes, _Pending] = OrderedDict()
        self._of_peers: defaultdict[str, int] = defaultdict(int)

    def connected(self, peer: Peer, local: str, nursery: trio.Nursery) -> Connection:
        return Guest(self, peer)

    def give_up(self, content: int) -> None:
        self._data.give_up(content)

    def grant(self, guest: Guest, count: int) -> list[Ticket]:
        now = trio.current_time()
        while len(guest.tickets) > TICKETS_OF_ONE_MAX - count:
            self.forget(next(iter(guest.tickets)))
        while self.pending:
            number, first = next(iter(self.pending.items()))
            if first.end > now:
                if len(self.pending) + count <= TICKETS_PENDING_MAX:
                    break
                greedy = max(self._of_peers, key=self._of_peers.__getitem__)
                number = next(n for n, one in self.pending.items() if one.guest.who == greedy)
            self.forget(number)
        granted = []
        for _ in range(count):
            ticket = Ticket.make()
            self.pending[ticket.number] = _Pending(ticket.key, now + TICKET_S, guest)
            guest.tickets[ticket.number] = None
            self._of_peers[guest.who] += 1
            granted.append(ticket)
        return granted

    def redeem(self, channel: Channel, preamble: bytes) -> Guest:
        """Return the peer that the ticket was issued to, and set its key for the channel. Raises
        BadMessage. A ticket is valid for one try."""
        granted = self.forget(unpack_preamble(preamble[:-CODE_BYTES]))
        if granted is None or granted.end < trio.current_time():
            raise BadMessage("it shows no valid ticket for a data connection")
        channel.authenticate(granted.key)
        try:
            channel.checked(preamble)
        except Forged:
            raise BadMessage("it shows a ticket that is not its own") from None
        return granted.guest

    def forget(self, number: bytes) -> _Pending | None:
        """Forget a ticket, and return it; None if there is none of this number."""
        granted = self.pending.pop(number, None)
        if granted is not None:
            del granted.guest.tickets[number]
            self._of_peers[granted.guest.who] -= 1
        return granted

    async def serve(self, sock: trio.socket.SocketType, address: str) -> None:
        """Serve one data connection. Raises as Door.open allows."""
        with ExitStack() as after:
            try:
                with self.host.door.stranger(address):
                    channel = await self._open_channel(sock)
                    after.callback(channel.close)
                    guest = self.redeem(channel, await _preamble(channel))
                with self.host.door.member(guest.peer):
                    guest.channels.add(channel)
                    after.callback(guest.channels.discard, channel)
                    while await _has_request(channel, guest):
                        if not await self._data.serve(channel, guest.peer):
                            break
            except Lost as error:
                raise trio.BrokenResourceError(str(error)) from None

    async def _open_channel(self, sock: trio.socket.SocketType) -> Channel:
        """Return the channel, encrypted if the peer begins with TLS."""
        start = await sock.recv(1, socket.MSG_PEEK)
        encrypted = start == TLS_BEGINS and self.host.credentials is not None
        if self._encrypt and not encrypted:
            raise BadMessage("it opened a data connection that is not encrypted")
        plain = socket.socket(fileno=sock.detach())
        channel = make_channel(plain, self.host, encrypted=encrypted, listens=True)
        if isinstance(channel, EncryptedChannel):
            with if_it_fails(channel.close):
                await _shake_hands(channel.sock)
                identity_of(channel.sock)
        return channel


async def _preamble(channel: Channel) -> bytes:
    """Receive the preamble. Not in a thread, as strangers would take the threads of members."""
    preamble = bytearray(PREAMBLE_BYTES)
    done = 0
    with memoryview(preamble) as view:
        while done < len(preamble):
            try:
                with view[done:] as rest:
                    done += channel.receive(rest, wait=False)
            except BlockingIOError:
                await trio.lowlevel.wait_readable(channel.sock)
    return bytes(preamble)


async def _has_request(channel: Channel, guest: Guest) -> bool:
    """Wait for a request. Return False if there is none for long, or the peer's rights ended."""
    if guest.has_left:
        return False
    if channel.has_input():
        return True
    with trio.move_on_after(IDLE_S):
        await trio.lowlevel.wait_readable(channel.sock)
        return True
    return False


async def _shake_hands(secure: ssl.SSLSocket) -> None:
    """Do the TLS handshake. Raises BadMessage, OSError."""
    secure.setblocking(False)
    while True:
        try:
            secure.do_handshake()
        except ssl.SSLWantReadError:
            await trio.lowlevel.wait_readable(secure)
        except ssl.SSLWantWriteError:
            await trio.lowlevel.wait_writable(secure)
        except ssl.SSLError as error:
            raise BadMessage(describe_tls_error(error)) from None
        else:
            return
