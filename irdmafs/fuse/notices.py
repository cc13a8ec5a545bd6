"""The kernel's memory of a mount: what it must forget, and the files that it holds, from which it serves
reads and writes of nodes (passthrough)."""

import os
import re
import select
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Final

import trio

from ..backend.files.extents import ExtentStore
from ..backend.model.records import NO_CONTENT, ContentId
from ..coherence.kernel_cache import KernelCache, Name
from ..coherence.nodes import Node
from ..posix.atimes import Atimes
from . import wire
from .connection import Connection
from .tasks import Tasks

_CAUGHT_UP_S: Final = 0.1
_MOUNTS: Final = "/proc/self/mountinfo"
# Id, id of the mount below, device.
_MOUNT: Final = re.compile(rb"^(\d+) (\d+) (\S+)", re.MULTILINE)


class Submounts:
    """The filesystems below the mount with this device number ("0:37") that this process can see: there was
    any, or not, when it was last asked to `look`. To be done again when poll tells of `changes`.

    When the kernel finds that a directory's name was forgotten by a new epoch, it unmounts the filesystem
    mounted there, in every mount namespace. So while there is such a filesystem, names are forgotten one by
    one.
    """

    def __init__(self, device: str) -> None:
        self._device = device.encode()
        self._fd = os.open(_MOUNTS, os.O_RDONLY | os.O_CLOEXEC)
        # The kernel tells by POLLPRI that the table changed since the last question.
        self.changes = select.poll()
        self.changes.register(self._fd, select.POLLPRI)
        self.look()

    def close(self) -> None:
        os.close(self._fd)

    def look(self) -> None:
        """Find out whether there is any."""
        with open(_MOUNTS, "rb") as file:
            table = _MOUNT.findall(file.read())
        ours = {mount for mount, _, device in table if device == self._device}
        self.exist = not ours.isdisjoint(map(itemgetter(1), table))


class Notices(KernelCache):
    """The kernel's memory of a mount with a kernel session. `atimes` is told when reads pass through to a
    file of `extents` no more."""

    def __init__(
        self,
        connection: Connection,
        extents: ExtentStore,
        atimes: Atimes,
        submounts: Submounts,
        tasks: Tasks,
    ) -> None:
        super().__init__(tasks.start_soon)
        self._connection = connection
        self._extents = extents
        self._atimes = atimes
        self._submounts = submounts
        # The nodes for which the kernel holds the file of an extent, each until that is dropped.
        self._backed: dict[int, set[Node]] = {}

    def close(self) -> None:
        self._submounts.close()

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
        submounts = self._submounts
        if submounts.changes.poll(0):
            submounts.look()
        return self._connection.has_epochs and not submounts.exist

    def forget_attributes(self, node: Node) -> bool:
        return self._connection.tell(wire.inval_inode(node.id, -1, 0))  # takes no lock

    def expire_names(self, names: list[Name], *, only: bool = False) -> None:
        if self.can_forget and not only:
            self._connection.tell(wire.inc_epoch())
        else:
            super().expire_names(names)

    async def expire_name(self, parent: int, name: bytes) -> None:
        await self._tell_in_thread(wire.inval_entry(parent, name))

    def forget(self, nodes: Iterable[Node], *, names: bool) -> None:
        # Neither takes a lock: a thread that waited for one could keep a killed daemon's mount alive.
        # Names that were told before a filesystem was mounted here are over in a second.
        if names and self.can_forget:
            self._connection.tell(wire.inc_epoch())
        for node in nodes:
            node.shown = not self.forget_attributes(node)

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

    def pass_through(self, node: Node) -> None:
        """Have reads and writes of a node pass through to its content's file. Raises OSError."""
        content = node.content
        assert content is not None
        extent, fd = content.extent, content.fd
        if fd < 0:
            fd = self._extents.open(extent)
        try:
            node.read_ns = os.fstat(fd).st_atime_ns
            node.backing_id = self._connection.register(fd)
        finally:
            if fd != content.fd:
                os.close(fd)
        node.backing_extent = extent
        self._backed.setdefault(extent, set()).add(node)

    def drop_backing(self, node: Node) -> None:
        if node.backing_id:
            self._atimes.gone(node)
            self._connection.unregister(node.backing_id)
            self._remove(node)
            node.backing_id, node.backing_extent = 0, NO_CONTENT

    def move_backing(self, node: Node, extent: ContentId) -> None:
        self._remove(node)
        node.backing_extent = extent
        self._backed.setdefault(extent, set()).add(node)

    def backed_by(self, extent: ContentId) -> list[Node]:
        return list(self._backed.get(extent, ()))

    def _remove(self, node: Node) -> None:
        nodes = self._backed[node.backing_extent]
        nodes.discard(node)
        if not nodes:
            del self._backed[node.backing_extent]

    async def wake_poll(self, handle: int) -> None:
        message = wire.notification(wire.Notify.POLL, wire.NOTIFY_POLL.pack(handle))
        await self._tell_in_thread(message)
