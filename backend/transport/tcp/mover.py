"""The mover over TCP: it reaches every node, and moves everything but a device's memory."""

from contextlib import AbstractAsyncContextManager

import trio

from ..link import Link
from ..mover import Host, Mover, Serving
from .messages import MESSAGES
from .serving import serving
from .way import TcpWay

__all__ = ["Tcp"]

_THREADS_MAX = 512


class Tcp(Mover):
    """Moves each extent that is long enough over `streams` data connections, encrypted or not."""

    name = TcpWay.name
    messages = MESSAGES
    is_usable = True

    def __init__(self, streams: int = 4, encrypt: bool = False) -> None:
        self._streams = streams
        self._encrypt = encrypt
        self._places = trio.Semaphore(_THREADS_MAX)

    def way(self, link: Link) -> TcpWay:
        return TcpWay(link, self._streams, self._encrypt, self._places)

    def serving(self, host: Host) -> AbstractAsyncContextManager[Serving]:
        return serving(host, self._encrypt)

    async def run(self) -> None:
        """Do nothing: there is no background work."""

    def tidy(self) -> None:
        """Do nothing: each way has connections of its own."""
