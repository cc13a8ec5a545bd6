"""Tickets that were issued on control connections, until a data connection shows them."""

from collections import OrderedDict
from typing import NamedTuple

import trio

from ..frames import BadMessage
from ..messages import Answer, Message, Request
from ..mover import Connection, Lasting
from ..rights import Peer
from .authentication import CODE_BYTES, Forged, Ticket
from .channel import Channel
from .messages import Granted, Tickets
from .wire import unpack_preamble

TICKET_S = 30.0
TICKETS_PENDING_MAX = 16384
TICKETS_OF_ONE_MAX = 512


class Guest(Connection):
    """A peer that may open data connections, with tickets of the office, as long as its control connection
    is open."""

    def __init__(self, office: "Office", peer: Peer) -> None:
        self.peer = peer
        self._office = office
        # Numbers of tickets that it has not used yet, the oldest first.
        self.tickets: dict[bytes, None] = {}
        # The cancel scopes of data connections that wait for a request.
        self.waiting: set[trio.CancelScope] = set()
        self.has_left = False

    async def answer(self, request: Request) -> Answer | Lasting:
        assert isinstance(request, Tickets)
        return Granted(self._office.grant(self, request.count))

    def take(self, message: Message) -> None:
        """Do nothing: there is no such message."""

    def close(self, why: str) -> None:
        self.has_left = True
        for scope in self.waiting:
            scope.cancel()
        self._office.forget(self)


class _Pending(NamedTuple):
    """A ticket that was not used yet."""

    key: bytes
    end: float
    guest: Guest


class Office:
    """Issues and redeems the tickets of all peers of a node."""

    def __init__(self) -> None:
        self._tickets: OrderedDict[bytes, _Pending] = OrderedDict()

    @property
    def pending(self) -> list[bytes]:
        """Return the numbers of tickets that were not used yet, the oldest first."""
        return list(self._tickets)

    def grant(self, guest: Guest, count: int) -> list[bytes]:
        now = trio.current_time()
        while len(guest.tickets) > TICKETS_OF_ONE_MAX - count:
            self._forget(next(iter(guest.tickets)))
        while self._tickets:
            number, first = next(iter(self._tickets.items()))
            if first.end > now and len(self._tickets) + count <= TICKETS_PENDING_MAX:
                break
            self._forget(number)
        granted = []
        for _ in range(count):
            ticket = Ticket.make()
            self._tickets[ticket.number] = _Pending(ticket.key, now + TICKET_S, guest)
            guest.tickets[ticket.number] = None
            granted.append(ticket.pack())
        return granted

    def redeem(self, channel: Channel, preamble: bytes) -> Guest:
        """Return the peer that the ticket was issued to, and set its key for the channel. Raises
        BadMessage. A ticket is valid for one try."""
        granted = self._forget(unpack_preamble(preamble[:-CODE_BYTES]))
        if granted is None or granted.end < trio.current_time():
            raise BadMessage("it shows no valid ticket for a data connection")
        channel.authenticate(granted.key)
        try:
            channel.checked(preamble)
        except Forged:
            raise BadMessage("it shows a ticket that is not its own") from None
        return granted.guest

    def forget(self, guest: Guest) -> None:
        """Forget the tickets of a peer, which uses none any more."""
        for number in list(guest.tickets):
            self._forget(number)

    def _forget(self, number: bytes) -> _Pending | None:
        granted = self._tickets.pop(number, None)
        if granted is not None:
            del granted.guest.tickets[number]
        return granted
