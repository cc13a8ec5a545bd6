"""The kernel's memory of a mount, as far as a session can make it forget."""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Protocol

from .nodes import Node

Name = tuple[int, bytes]  # number of a directory, which is its node id, too, and a name in it


class KernelCache(Protocol):
    """The means by which the session makes the kernel forget."""

    @property
    def can_forget(self) -> bool:
        """Whether it can do so without waiting for a lock. Otherwise the kernel is not to believe what
        others may change."""

    def start_soon(self, telling: Callable[..., Awaitable[None]], *args: Any) -> bool:
        """Run something in a task of the session. False: it has ended, and so has the mount."""

    def invalidate_attributes(self, node: Node) -> None:
        """Have a node's attributes asked for before they are shown again."""

    async def expire_names(self, names: list[Name]) -> None:
        """Have names looked up again before their next use. Done when it returns."""

    def forget(self, nodes: Iterable[int], *, names: bool) -> None:
        """Have the attributes of these nodes asked for, and, with `names`, every name looked up again
        before its next use, answers that are on their way into the kernel included."""

    async def forget_content(self, node: Node) -> None:
        """Have the node's content read again from us. Done when it returns."""

    def prune(self, nodes: Sequence[int]) -> None:
        """Let the kernel drop what it keeps of these nodes unused, if it can."""

    def version_published(self, ino: int) -> None: ...

    def backing_moved(self, node: Node) -> None:
        """The node's `backing_extent` is the same file under another number."""

    def drop_backing(self, node: Node) -> None:
        """The node's extent changes or goes: let go of what passthrough holds of it."""
