"""Data connections to one store node, kept for a while after they were used."""

import socket
import time
from collections.abc import Iterable

import trio

from .. import Unreachable
from ..caller import ControlClient
from ..frames import BadMessage
from ..link import Link, Refusal, check_node
from .authentication import Ticket
from .channel import Channel, EncryptedChannel, Lost, choose_congestion_control, make_channel
from .messages import TICKETS_MAX, Granted, Tickets
from .threads import in_threads

IDLE_CHANNEL_S = 15.0
_CHANNELS_KEPT = 16


class Pool:
    """`places` are for the threads that open connections."""

    def __init__(self, link: Link, encrypt: bool, places: trio.Semaphore) -> None:
        self._link = link
        self._caller = link.caller
        self._encrypt = encrypt
        self._places = places
        # The connections were opened with tickets of this one.
        self._control: ControlClient | None = None
        self._idle: list[Channel] = []
        self._lent: set[Channel] = set()
        self._opening: set[trio.CancelScope] = set()
        link.given_up.append(self.close)

    async def borrow(self, count: int) -> list[Channel]:
        """Return connections for one request each; the caller gives them back. Raises Unreachable."""
        control = await self._link.connected()
        if control is not self._control:
            self.drop()
            self._control = control
        found: list[Channel] = []
        while self._idle and len(found) < count:
            channel = self._idle.pop()
            if channel.is_closed_by_peer():
                channel.close()
            else:
                found.append(channel)
        try:
            while len(found) < count:
                wanted = min(count - len(found), TICKETS_MAX)
                found += await self._open(control, wanted)
            if control is not self._control:
                raise Unreachable(self._link.node, control.why)
        except BaseException:
            self.give_back(found)
            raise
        self._lent.update(found)
        return found

    def give_back(self, channels: Iterable[Channel]) -> None:
        """Take connections back; those that are not clean are closed."""
        for channel in channels:
            self._lent.discard(channel)
            if channel.clean and self._control is not None and len(self._idle) < _CHANNELS_KEPT:
                channel.idle_since = time.monotonic()
                self._idle.append(channel)
            else:
                channel.close()

    def drop(self) -> None:
        """Close the connections that are not in use."""
        for channel in self._idle:
            channel.close()
        self._idle.clear()

    def close(self) -> None:
        """End what is done on all connections, and keep none until the node is reached again."""
        self.drop()
        for channel in self._lent:
            channel.shutdown()
        for scope in self._opening:
            scope.cancel()
        self._control = None

    def tidy(self) -> None:
        """Close connections that have not been used for long."""
        old = time.monotonic() - IDLE_CHANNEL_S
        while self._idle and self._idle[0].idle_since < old:
            self._idle.pop(0).close()

    async def _open(self, control: ControlClient, count: int) -> list[Channel]:
        node = self._link.node
        answer = await control.ask(Tickets(count), Granted)
        if len(answer.tickets) != count:
            raise Unreachable(node, "its answer makes no sense")
        opened: list[Channel] = []
        errors: list[Unreachable] = []

        async def open_one(ticket: bytes) -> None:
            try:
                with trio.fail_after(self._caller.timeout_s) as scope:
                    self._opening.add(scope)
                    channel = await self._open_channel(control, Ticket.unpack(ticket))
                    opened.append(channel)
            except (OSError, Lost, trio.TooSlowError, BadMessage, Refusal) as error:
                why = str(error) or "no data connection could be opened in time"
                errors.append(Unreachable(node, why))
            finally:
                self._opening.discard(scope)

        try:
            async with trio.open_nursery() as nursery:
                for ticket in answer.tickets:
                    nursery.start_soon(open_one, ticket)
            if errors:
                raise errors[0]
        except BaseException:
            self.give_back(opened)
            raise
        return opened

    async def _open_channel(self, control: ControlClient, ticket: Ticket) -> Channel:
        """Connect to the address at which the node was reached."""
        caller, ends = self._caller, control.ends
        credentials, context = caller.credentials, None
        if credentials is not None and self._encrypt:
            context = credentials.client_context()
        with trio.socket.socket(ends.family, socket.SOCK_STREAM) as sock:
            choose_congestion_control(sock)
            await sock.connect((ends.there[0], ends.record.data_port, *ends.there[2:]))
            plain = socket.socket(fileno=sock.detach())
        channel = make_channel(
            plain, context, caller.timeout_s, codes=credentials is not None, listens=False
        )
        try:
            if isinstance(channel, EncryptedChannel):
                channel.sock.settimeout(caller.timeout_s)
                await in_threads([channel.sock.do_handshake], channel.shutdown, self._places)
                check_node(channel.sock, caller.is_revoked)
            channel.authenticate(ticket.key)
            # Fits into the empty buffer of the new connection.
            channel.send_preamble(ticket.number)
        except BaseException:
            channel.close()
            raise
        return channel
