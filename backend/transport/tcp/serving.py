"""The node's end over TCP: it issues tickets, and serves data connections that show them."""

import socket
import ssl
from collections.abc import Callable

import trio

from ...trust.security import describe_tls_error
from ..door import begins_with_tls, identity_of
from ..frames import BadMessage
from ..mover import Connection, Host, Serving
from ..rights import Peer
from .channel import AuthenticatedChannel, Channel, EncryptedChannel, Lost
from .data import Data
from .tickets import Guest, Office
from .transfers import Transfers
from .wire import PREAMBLE_BYTES

# Callers give idle connections up earlier.
IDLE_S = 60.0


class TcpServing(Serving):
    """The end of one node. `encrypt` refuses data connections that are not encrypted; with credentials
    those that are, are always welcome."""

    port = 0

    def __init__(self, host: Host, encrypt: bool, port: int) -> None:
        self._door = host.door
        self._credentials = host.credentials
        self._encrypt = encrypt
        self._timeout_s = host.timeout_s
        self.port = port
        self._transfers = Transfers(host.service, host.nursery)
        self._data = Data(host, self._transfers)
        self.office = Office()

    def connected(self, peer: Peer, local: str, nursery: trio.Nursery) -> Connection:
        return Guest(self.office, peer)

    def give_up(self, content: int) -> None:
        self._transfers.give_up(content)

    def end_rights(self, is_over: Callable[[Peer], bool]) -> None:
        """Do nothing: the rights to each request are checked when it comes."""

    async def serve(self, sock: trio.socket.SocketType, address: str) -> None:
        """Serve one data connection. Raises as Door.open allows."""
        channel: Channel | None = None
        try:
            with self._door.stranger():
                channel = await self._open_channel(sock)
                guest = self.office.redeem(channel, await _preamble(channel))
            with self._door.member():
                while await _has_request(channel, guest):
                    if not await self._data.serve(channel, guest.peer):
                        break
        except Lost as error:
            raise trio.BrokenResourceError(str(error)) from None
        finally:
            if channel is not None:
                channel.close()

    async def _open_channel(self, sock: trio.socket.SocketType) -> Channel:
        """Return the channel, encrypted if the peer begins with TLS."""
        start = await sock.recv(1, socket.MSG_PEEK)
        encrypted = begins_with_tls(start) and self._credentials is not None
        if self._encrypt and not encrypted:
            raise BadMessage("it opened a data connection that is not encrypted")
        plain = socket.socket(fileno=sock.detach())
        try:
            if not encrypted:
                kind = Channel if self._credentials is None else AuthenticatedChannel
                return kind(plain, self._timeout_s, listens=True)
            assert self._credentials is not None
            secure = self._credentials.server_context().wrap_socket(
                plain, server_side=True, do_handshake_on_connect=False
            )
            channel = EncryptedChannel(secure, self._timeout_s, listens=True)
        except BaseException:
            plain.close()
            raise
        try:
            await _shake_hands(secure)
            identity_of(secure)
        except BaseException as error:
            channel.close()
            if isinstance(error, ssl.SSLError):
                raise BadMessage(describe_tls_error(error)) from None
            raise
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
    with trio.move_on_after(IDLE_S) as scope:
        guest.waiting.add(scope)
        try:
            await trio.lowlevel.wait_readable(channel.sock)
            return True
        finally:
            guest.waiting.discard(scope)
    return False


async def _shake_hands(secure: ssl.SSLSocket) -> None:
    """Do the TLS handshake. Raises ssl.SSLError and other OSErrors."""
    secure.setblocking(False)
    while True:
        try:
            secure.do_handshake()
        except ssl.SSLWantReadError:
            await trio.lowlevel.wait_readable(secure)
        except ssl.SSLWantWriteError:
            await trio.lowlevel.wait_writable(secure)
        else:
            return
