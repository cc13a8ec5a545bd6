"""Coherence on one host, where nothing changes but through this mount."""

from contextlib import AbstractContextManager, nullcontext
from typing import Final

from ..backend.namespace import Inode, Namespace
from .cache import Cache
from .freshness import TrailStep
from .kernel_cache import Name
from .nodes import Node
from .protocol import Answer, Coherence, Listing

__all__ = ["Alone"]

_FOREVER_S: Final = 86_400.0


class Alone(Coherence):
    """The mount is alone with its store. The kernel may believe everything except changes that it does not
    notice: of a content that several nodes show or programs map, and of the node of a file that is being
    replaced."""

    listings_stay = True
    kernel_locks = None
    has_private_views = False

    def __init__(self, namespace: Namespace, cache: Cache) -> None:
        self._cache = cache
        self._namespace = namespace
        self._nodes = cache.nodes

    def attributes(self, answer: Answer, node: Node, inode: Inode) -> None:
        if not self._cache.looks.changes_unnoticed(node):
            answer.attr_timeout = _FOREVER_S

    def changed(self, answer: Answer, node: Node) -> None:
        if not self._cache.looks.changes_unnoticed(node):
            answer.attr_timeout = _FOREVER_S

    def entry(self, answer: Answer, parent: int, name: bytes, node: Node, inode: Inode) -> None:
        node.name = (parent, name)
        if self._cache.routes.names_are_stable(inode.ino):
            answer.entry_timeout = _FOREVER_S
        if not self._cache.looks.changes_unnoticed(node):
            answer.attr_timeout = _FOREVER_S

    made = entry

    def missing_s(self, parent: Inode) -> float | None:
        # A process that waits for a name looks it up before the kernel has noted the answered change.
        watches = self._namespace.watches
        return 0.0 if watches.in_use and watches.covers(parent.ino) else _FOREVER_S

    def listing(self, directory: int) -> Listing:
        return _Listing(self._namespace, self._cache, directory)

    def find(self, parent: int, name: bytes, pid: int) -> Inode | None:
        return self._namespace.lookup(parent, name)

    async def find_fresh(self, parent: Inode, name: bytes, pid: int) -> Inode | None:
        return self._namespace.lookup(parent.ino, name)

    def find_privately(self, parent: int, name: bytes, pid: int, uid: int) -> Inode | None:
        return None

    async def freshen(self, inode: Inode) -> None:
        """Do nothing: everything is known."""

    def arrived(self, node_id: int) -> tuple[Node, Inode] | None:
        return self._nodes.get(node_id)

    async def settle(
        self, node_id: int, flags: int, pid: int
    ) -> tuple[Node, Inode, TrailStep | None]:
        return *self._nodes.get(node_id), None

    async def settle_names(self, node_id: int, pid: int, *, by_name: bool) -> tuple[Node, Inode]:
        return self._nodes.get(node_id)

    def come_again(self, pid: int, name: TrailStep, ino: int) -> None:
        """Do nothing: the cache itself leads the thread on."""

    async def bring(self, inode: Inode, *, content: bool, opens: bool = False) -> Inode:
        return inode

    def changing(self, pid: int, *names: Name) -> AbstractContextManager[None]:
        return nullcontext()

    def known_directories(self, *names: Name) -> dict[Name, int]:
        """Return none: the kernel notes every change by itself."""
        return {}

    def renamed(self, ino: int, old: Name, new: Name) -> None:
        self._nodes.renamed(ino, old, new)

    def count(self) -> dict[str, int]:
        return {"epochs": 0, "inodes_told": 0}


class _Listing(Listing):
    def __init__(self, namespace: Namespace, cache: Cache, directory: int) -> None:
        self._cache = cache
        self._namespace = namespace
        self._directory = directory

    def is_known(self, name: bytes, node: Node) -> bool:
        return False

    def entry(self, answer: Answer, name: bytes, node: Node, inode: Inode) -> None:
        node.name = (self._directory, name)
        cache = self._cache
        if not cache.looks.changes_unnoticed(node):
            answer.attr_timeout = _FOREVER_S
        # Names are listed as they were when the listing began.
        if cache.routes.names_are_stable(inode.ino) and self._namespace.leads_to(
            self._directory, name, inode.ino
        ):
            answer.entry_timeout = _FOREVER_S
