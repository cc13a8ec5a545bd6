"""The node's end over TCP: it hands out keys, and serves data connections whose ends have them."""

import heapq
import itertools
import secrets
import socket
import ssl
from contextlib import ExitStack

import trio

from ...trust.security import describe_tls_error
from ...unwrap import if_it_fails
from ..door import TLS_BEGINS, identity_of
from ..frames import BadMessage
from ..messages import Answer, Request
from ..mover import Connection, Host, Lasting, Serving
from ..rights import Peer
from .authentication import CODE_BYTES, KEY_BYTES, Forged, connection_key
from .channel import Channel, EncryptedChannel, Lost, make_channel
from .data import Data
from .wire import PREAMBLE, PREAMBLE_BYTES, Admitted

# Callers give idle connections up earlier.
IDLE_S = 60.0
# A connection may be overtaken by so many that its peer opened later.
NUMBERS_REMEMBERED = 1024


class Guest(Connection):
    """A peer that may open data connections as long as its control connection is open."""

    def __init__(self, serving: "TcpServing", peer: Peer, number: int) -> None:
        self.peer = peer
        self.number = number
        self.key = secrets.token_bytes(KEY_BYTES)
        self._serving = serving
        # The highest numbers of connections that were opened, as a heap, and one that all of them exceed.
        self._used: list[int] = []
        self._floor = 0
        self.channels: set[Channel] = set()
        self.has_left = False

    async def answer(self, request: Request) -> Answer | Lasting:
        return Admitted(self.number, self.key)

    def use(self, number: int) -> bool:
        """Return whether a number opens a connection, which it does once."""
        if number <= self._floor or number in self._used:
            return False
        heapq.heappush(self._used, number)
        if len(self._used) > NUMBERS_REMEMBERED:
            self._floor = heapq.heappop(self._used)
        return True

    def close(self, why: str) -> None:
        """End its data connections, those in use after their request, unless the peer is revoked."""
        self.has_left = True
        del self._serving.guests[self.number]
        is_revoked = self._serving.host.is_revoked(self.peer.identity.serial)
        for channel in self.channels:
            if is_revoked or channel.clean:
                channel.shutdown()


class TcpServing(Serving):
    """The end of one node. `guests` are all peers, by number. `encrypt` refuses data connections that are
    not encrypted; with credentials those that are, are always welcome."""

    def __init__(self, host: Host, encrypt: bool, port: int) -> None:
        self.host = host
        self._encrypt = encrypt
        self.port = port
        self._data = Data(host)
        self.guests: dict[int, Guest] = {}
        self._numbers = itertools.count(1)

    def connected(self, peer: Peer, local: str, nursery: trio.Nursery) -> Connection:
        guest = Guest(self, peer, next(self._numbers))
        self.guests[guest.number] = guest
        return guest

    def admit(self, channel: Channel, preamble: bytes) -> Guest:
        """Return the peer whose preamble this is, and set the key of the channel. Raises BadMessage."""
        peer, number = PREAMBLE.unpack(preamble[:-CODE_BYTES])
        guest = self.guests.get(peer)
        if guest is None:
            raise BadMessage("it opened a data connection of a peer that is not connected")
        channel.authenticate(connection_key(guest.key, number))
        try:
            channel.checked(preamble)
        except Forged:
            raise BadMessage("it opened a data connection without the peer's key") from None
        if not guest.use(number):
            raise BadMessage("it repeats how a data connection was opened")
        return guest

    async def serve(self, sock: trio.socket.SocketType, address: str) -> None:
        """Serve one data connection. Raises as Door.open allows."""
        with ExitStack() as after:
            try:
                with self.host.door.stranger(address):
                    channel = await self._open_channel(sock)
                    after.callback(channel.close)
                    guest = self.admit(channel, await _preamble(channel))
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
