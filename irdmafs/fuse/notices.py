"""Notifications to the kernel: what it must forget, and which descriptors' events have changed."""

import select
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final

import trio

from ..backend.cluster.records import ContentId
from ..coherence.kernel_cache import KernelCache, Name
from ..coherence.nodes import Node
from . import wire
from .backings import Backings
from .connection import Connection
from .submounts import Submounts
from .tasks import Tasks

_CAUGHT_UP_S: Final = 0.1


class Notices(KernelCache):
    """The kernel's memory of a mount with a kernel session."""

    def __init__(
        self, connection: Connection, backings: Backings, submounts: Submounts, tasks: Tasks
    ) -> None:
        self._connection = connection
        self._backings = backings
        self._submounts = submounts
        self._tasks = tasks

    def close(self) -> None:
        self._submounts.close()

    def start_soon(self, telling: Callable[..., Awaitable[None]], *args: Any) -> bool:
        return self._tasks.start_soon(telling, *args)

    async def caught_up(self) -> None:
        poller = select.poll()
        poller.register(self._connection.fd, select.POLLIN)
        with trio.move_on_after(_CAUGHT_UP_S):  # they are read in the order in which they were sent
            while poller.poll(0):
                await trio.lowlevel.checkpoint()

    # -- what it is to forget --------------------------------------------------------------------

    tells_of_signals = True

    @property
    def can_forget(self) -> bool:
        return self._connection.has_epochs and not self._submounts.exist()

    def forget_attributes(self, node: Node) -> bool:
        return self._connection.tell(wire.inval_inode(node.id, -1, 0))  # takes no lock

    async def expire_names(self, names: list[Name]) -> None:
        if self.can_forget:
            self._connection.tell(wire.inc_epoch())
            return
        for parent, name in names:
            await self._tell_in_thread(wire.inval_entry(parent, name))

    def forget(self, nodes: Iterable[int], *, names: bool) -> None:
        # Neither takes a lock: a thread that waited for one could keep a killed daemon's mount alive.
        if names:
            self._connection.tell(wire.inc_epoch())
        for node_id in nodes:
            self._connection.tell(wire.inval_inode(node_id, -1, 0))

    async def forget_content(self, node: Node) -> None:
        await self._tell_in_thread(wire.inval_inode(node.id, 0, 0))

    def prune(self, nodes: Sequence[int]) -> None:
        if self._connection.can_prune:
            for start in range(0, len(nodes), wire.PRUNE_MAX):
                self._connection.tell(wire.prune(nodes[start : start + wire.PRUNE_MAX]))

    async def _tell_in_thread(self, message: bytes) -> None:
        # The kernel may wait for a lock that a caller of ours holds until we answer.
        await trio.to_thread.run_sync(self._connection.tell, message)

    # -- the files that it holds -----------------------------------------------------------------

    def drop_backing(self, node: Node) -> None:
        self._backings.drop(node)

    def move_backing(self, node: Node, extent: ContentId) -> None:
        self._backings.move(node, extent)

    def backed_by(self, extent: ContentId) -> list[Node]:
        return self._backings.of(extent)

    async def wake_poll(self, handle: int) -> None:
        message = wire.notification(wire.Notify.POLL, wire.NOTIFY_POLL.pack(handle))
        await self._tell_in_thread(message)
