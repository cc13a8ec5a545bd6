"""The mover over TCP: it reaches every node, and moves everything but a device's memory."""

import trio

from ..door import listen
from ..link import Link
from ..mover import Host, Mover, Serving
from .channel import choose_congestion_control
from .serving import TcpServing
from .way import TcpWay
from .wire import MESSAGES

_THREADS_MAX = 512
_TIDY_S = 5.0


class Tcp(Mover):
    """Moves each extent that is long enough over `streams` data connections, encrypted or not."""

    name = TcpWay.name
    messages = MESSAGES
    is_usable = True

    def __init__(self, streams: int = 4, encrypt: bool = False) -> None:
        self._streams = streams
        self._encrypt = encrypt
        self._places = trio.Semaphore(_THREADS_MAX)
        self._ways: list[TcpWay] = []

    def way(self, link: Link) -> TcpWay:
        way = TcpWay(link, self._streams, self._encrypt, self._places)
        self._ways.append(way)
        return way

    async def serving(self, host: Host) -> Serving:
        listening = listen(host.address)
        choose_congestion_control(listening)
        served = TcpServing(host, self._encrypt, listening.getsockname()[1])
        host.door.open(host.nursery, listening, served.serve)
        return served

    async def run(self) -> None:
        """Close data connections that have not been used for long."""
        while True:
            await trio.sleep(_TIDY_S)
            for way in self._ways:
                way.tidy()
