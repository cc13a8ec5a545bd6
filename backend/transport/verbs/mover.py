"""The mover for RDMA verbs: it reaches nodes on a network that both ends have a device on."""

import trio

from ..link import Link
from ..mover import Host, Mover, Serving
from .messages import MESSAGES
from .rdma import Rdma
from .serving import VerbsServing
from .way import VerbsWay

_TIDY_S = 5.0


class Verbs(Mover):
    """Moves extents through the adapters of `rdma`, which must stay open longer. With `stages`, this
    process's bytes pass through memory that stays registered: a mount does so, whose files hold one version
    each. Without it, files are registered at first use, and bytes move from and to them directly."""

    name = VerbsWay.name
    messages = MESSAGES

    def __init__(self, rdma: Rdma, *, stages: bool) -> None:
        self._rdma = rdma
        self._stages = stages

    @property
    def is_usable(self) -> bool:
        return self._rdma.is_usable

    def way(self, link: Link) -> VerbsWay:
        return VerbsWay(link, self._rdma, self._stages)

    async def serving(self, host: Host) -> Serving:
        return VerbsServing(host, self._rdma)

    async def run(self) -> None:
        """Watch ports, and free the memory of files that were removed."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._rdma.watch)
            while True:
                await trio.sleep(_TIDY_S)
                self._rdma.drop_orphans()
