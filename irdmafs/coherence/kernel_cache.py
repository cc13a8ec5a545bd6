"""The kernel's memory of a mount, as far as a session can make it forget."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from ..backend.cluster.records import ContentId
from .nodes import Node

Name = tuple[int, bytes]  # number of a directory, which is its node id, too, and a name in it


class KernelCache(ABC):
    """The means by which the session makes the kernel forget."""

    @property
    @abstractmethod
    def can_forget(self) -> bool:
        """Whether it can do so without waiting for a lock. Otherwise the kernel is not to believe what
        others may change."""

    @abstractmethod
    def start_soon(self, telling: Callable[..., Awaitable[None]], *args: Any) -> bool:
        """Run something in a task of the session. False: it has ended, and so has the mount."""

    @abstractmethod
    def invalidate_attributes(self, node: Node) -> None:
        """Have a node's attributes asked for before they are shown again."""

    @abstractmethod
    async def expire_names(self, names: list[Name]) -> None:
        """Have names looked up again before their next use. Done when it returns."""

    @abstractmethod
    def forget(self, nodes: Iterable[int], *, names: bool) -> None:
        """Have the attributes of these nodes asked for, and, with `names`, every name looked up again
        before its next use, answers that are on their way into the kernel included."""

    @abstractmethod
    async def forget_content(self, node: Node) -> None:
        """Have the node's content read again from us. Done when it returns."""

    @abstractmethod
    def prune(self, nodes: Sequence[int]) -> None:
        """Let the kernel drop what it keeps of these nodes unused, if it can."""

    @abstractmethod
    def version_published(self, ino: int) -> None:
        """Wake who waits for a newer version of a file."""

    @abstractmethod
    def move_backing(self, node: Node, extent: ContentId) -> None:
        """The file that passthrough holds of a node has another number now."""

    @abstractmethod
    def drop_backing(self, node: Node) -> None:
        """The node's extent changes or goes: let go of what passthrough holds of it."""

    @abstractmethod
    def backed_by(self, extent: ContentId) -> list[Node]:
        """Return the nodes of which passthrough holds the file of an extent."""
