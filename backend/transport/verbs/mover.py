"""The mover for RDMA verbs: it reaches nodes on a network that both ends have a device on."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ..link import Link
from ..mover import Host, Mover, Serving
from .messages import MESSAGES
from .rdma import Rdma
from .serving import VerbsServing
from .way import VerbsWay

__all__ = ["Verbs"]


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

    @asynccontextmanager
    async def serving(self, host: Host) -> AsyncIterator[Serving]:
        yield VerbsServing(host, self._rdma)

    async def run(self) -> None:
        await self._rdma.watch()

    def tidy(self) -> None:
        self._rdma.drop_orphans()
