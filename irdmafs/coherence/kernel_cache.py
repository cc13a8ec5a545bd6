"""The kernel's cache of a mount, and the means to make it forget."""

# Methods that are not abstract do nothing, for sessions that inherit them.
# ruff: noqa: B027

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import trio

from ..backend.model.records import ContentId
from .nodes import Node

Name = tuple[int, bytes]  # number of a directory, which is its node id, too, and a name in it

_TRY_AGAIN_S: Final = 0.001


class KernelCache(ABC):
    """The session's means to make the kernel forget. A session inherits methods that do nothing about what
    its kernel does not keep."""

    # It ends requests whose callers got a signal (see fuse/tasks.py).
    tells_of_signals = False

    def __init__(self, start_soon: Callable[..., bool]) -> None:
        """`start_soon` starts a task of the session. It returns False if the session, and so the mount, has
        ended."""
        self.start_soon = start_soon
        # Names that the kernel is still to be told of, each once, and whether a task does that.
        self._expired: dict[Name, None] = {}
        self._is_telling = False

    @property
    def can_forget(self) -> bool:
        """Return whether the kernel can be made to forget without waiting for a lock. If not, it must not
        believe anything that others may change."""
        return False

    async def caught_up(self) -> None:
        """Return when the requests that the kernel has sent so far were begun; soon in any case."""

    def invalidate_attributes(self, node: Node) -> None:
        """Make the kernel ask for a node's attributes before it shows them again."""
        if not node.shown:
            return  # it asks anyway
        node.outdated = node.lookups > 0 and not self.forget_attributes(node)
        node.shown = node.outdated
        if node.outdated:
            self.start_soon(self._invalidate_later, node)

    async def _invalidate_later(self, node: Node) -> None:
        """Repeat it until the kernel has heard of the node, whose first answer is on its way."""
        while node.outdated and node.lookups > 0 and not self.forget_attributes(node):
            await trio.sleep(_TRY_AGAIN_S)
        node.outdated = False

    @abstractmethod
    def forget_attributes(self, node: Node) -> bool:
        """Have the kernel forget a node's attributes. Return False if it has not heard of the node yet."""

    def expire_names(self, names: list[Name], *, only: bool = False) -> None:
        """Make the kernel look these names up again before their next use. Where it has to lock their
        directories for that, nobody may wait: programs that wait for us may have locked them. `only`: no
        other name, for a filesystem that is stacked on this one may never find that again."""
        self._expired.update(dict.fromkeys(names))
        if not self._is_telling:
            self._is_telling = self.start_soon(self._expire_each)

    async def _expire_each(self) -> None:
        while self._expired:
            name = next(iter(self._expired))
            del self._expired[name]  # it may expire again while the kernel is told
            await self.expire_name(*name)
        self._is_telling = False

    @abstractmethod
    async def expire_name(self, parent: int, name: bytes) -> None:
        """Return when the kernel will look the name up again before its next use."""

    def forget(self, nodes: Iterable[Node], *, names: bool) -> None:
        """Make the kernel ask for the attributes of these nodes and, with `names`, look every name up again
        before its next use. Answers on their way into the kernel count as old, too."""

    @abstractmethod
    async def forget_content(self, node: Node) -> None:
        """Return when the kernel will read the node's content again from the daemon."""

    def prune(self, nodes: Sequence[int]) -> None:
        """Let the kernel drop unused objects of these nodes, if it can."""

    async def wake_poll(self, handle: int) -> None:
        """Have the kernel ask again for the events of a descriptor, by the number that it gave for it."""

    def move_backing(self, node: Node, extent: ContentId) -> None:
        """Note that the file which passthrough holds for a node has another number now."""

    def drop_backing(self, node: Node) -> None:
        """Let go of the file that passthrough holds for a node: its extent changes or goes."""

    def backed_by(self, extent: ContentId) -> list[Node]:
        """Return the nodes for which passthrough holds the file of an extent."""
        return []
