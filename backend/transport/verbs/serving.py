"""The node's end of the verbs mover: answers to what its peers ask on control connections."""

from collections.abc import Callable
from functools import partial

import trio

from ..messages import Answer, Done, Message, Request
from ..mover import Connection, Host, Lasting, Serving
from ..rights import Peer
from .messages import (
    Attach,
    Attached,
    Detach,
    Expose,
    Exposed,
    Rails,
    RailsFound,
    Release,
    Reserve,
)
from .rdma import Rdma
from .responder import SESSION_OVER, Responder

__all__ = ["VerbsServing"]


class VerbsServing(Serving):
    """The node's end, for all its peers."""

    port = 0

    def __init__(self, host: Host, rdma: Rdma) -> None:
        self._host = host
        self._rdma = rdma
        self._responders: dict[Responder, Peer] = {}

    @property
    def responders(self) -> list[Responder]:
        """Return the responders, one for each control connection."""
        return list(self._responders)

    def connected(self, peer: Peer, local: str, nursery: trio.Nursery) -> Connection:
        responder = Responder(
            self._host, self._rdma, local, nursery, lambda: self._host.is_gone(peer)
        )
        self._responders[responder] = peer
        return _VerbsConnection(responder, partial(self._responders.pop, responder))

    def give_up(self, content: int) -> None:
        for responder in self._responders:
            responder.give_up(content)

    def end_rights(self, is_over: Callable[[Peer], bool]) -> None:
        for responder, peer in self._responders.items():
            if is_over(peer):
                responder.detach(SESSION_OVER)


class _VerbsConnection(Connection):
    """Has a responder carry out the messages of one peer. `forget` is called when the connection ends."""

    def __init__(self, responder: Responder, forget: Callable[[], Peer]) -> None:
        self._responder = responder
        self._forget = forget

    async def answer(self, request: Request) -> Answer | Lasting:
        responder, number = self._responder, request.number
        match request:
            case Attach():
                end = responder.attach(request.end, request.pair, request.rail, request.gid)
                return Attached(number, end)
            case Rails():
                return RailsFound(number, responder.rails())
            case Expose():
                exposed = await responder.expose(
                    request.extent, request.start, request.length, request.pair
                )
                return Exposed(number, *exposed)
        assert isinstance(request, Reserve)
        reserved = await responder.reserve(
            request.extent, request.target, request.length, request.piece, request.pair
        )
        first = Exposed(number, *reserved)
        return Lasting(first, request.sealed, partial(self._seal, first.handle, request.sealed))

    async def _seal(self, handle: int, number: int) -> Answer:
        await self._responder.seal(handle)
        return Done(number)

    def take(self, message: Message) -> None:
        match message:
            case Release():
                self._responder.release(message.handle)
            case Detach():
                self._responder.detach("the peer gave it up", message.pair)

    def close(self, why: str) -> None:
        self._forget()
        self._responder.detach(why)
