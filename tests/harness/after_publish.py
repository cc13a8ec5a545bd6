"""Changes what a mount does when etcd has answered that a version is published."""

from collections.abc import Awaitable, Callable
from typing import Any

from irdmafs.backend.namespace import Namespace

__all__ = ["after_publish"]


def after_publish(do: Callable[[], Awaitable[None]]) -> None:
    """Have this process await `do` before it takes in such an answer. What `do` raises is raised to the
    publisher."""
    publish = Namespace.publish

    async def publish_and_do(self: Namespace, *arguments: Any, **more: Any) -> Any:
        published = await publish(self, *arguments, **more)
        await do()
        return published

    Namespace.publish = publish_and_do  # type: ignore[method-assign]
