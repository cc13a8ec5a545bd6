"""Extents by RDMA verbs: it reaches nodes on a network that both ends have a device on."""

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
    """Through the adapters of `rdma`, which stays open longer. What this process moves goes through memory
    that is registered once and for all if it `stages`, as a mount does, whose files are used for one
    version; else from and to files that are registered when they are first used."""

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
