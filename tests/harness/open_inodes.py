"""Inodes that are open on a host while they lose their names."""

from collections.abc import Coroutine
from typing import Any, TypeVar

from irdmafs.backend.namespace import Namespace

T = TypeVar("T")


async def while_open(
    namespace: Namespace, removing: Coroutine[Any, Any, T], *, is_open: bool = True
) -> T:
    """Carry out a removal on a host that has open what is removed, unless told otherwise."""

    def holds(ino: int) -> bool:
        return is_open

    namespace.holders.append(holds)
    try:
        return await removing
    finally:
        namespace.holders.remove(holds)
