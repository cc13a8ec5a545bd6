"""The node's end of the verbs mover, for all its peers."""

from collections.abc import Callable

import trio

from ..mover import Connection, Host, Serving
from ..rights import Peer
from .rdma import Rdma
from .responder import SESSION_OVER, Responder

__all__ = ["VerbsServing"]


class VerbsServing(Serving):
    """Has a responder for each control connection."""

    port = 0

    def __init__(self, host: Host, rdma: Rdma) -> None:
        self._host = host
        self._rdma = rdma
        self.responders: set[Responder] = set()

    def connected(self, peer: Peer, local: str, nursery: trio.Nursery) -> Connection:
        responder = Responder(self._host, self._rdma, peer, local, nursery, self.responders.discard)
        self.responders.add(responder)
        return responder

    def give_up(self, content: int) -> None:
        for responder in self.responders:
            responder.give_up(content)

    def end_rights(self, is_over: Callable[[Peer], bool]) -> None:
        for responder in self.responders:
            if is_over(responder.peer):
                responder.detach(SESSION_OVER)
