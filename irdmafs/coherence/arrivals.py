"""Which node and content an open has come to in a namespace that others change, too.

An open comes by names that were answered from the replica (see freshness). Here it is made sure that
they are right, and that the content is on this host.
"""

import errno
from collections.abc import Sequence
from typing import Final

from ..backend.namespace import ROOT_INO, Inode, fail
from ..backend.store.api import Store
from ..inline import detach
from .cache import Cache
from .freshness import LookupTrails, TrailStep
from .nodes import Node
from .sharing import truncates

# A file that is replaced each time before its content is here.
_LEADS_MAX: Final = 20


def name_of(node: Node | None, names: Sequence[TrailStep]) -> TrailStep | None:
    """Return the name by which an open came to a node: of those that the thread looked up, or the one that
    the kernel did not look up again."""
    if node is None:
        return names[-1] if names else None
    for step in reversed(names):
        if step.ino == node.ino:
            return step
    return TrailStep(*node.name, node.ino) if node.name is not None else None


class Arrivals:
    """Settles what opens came to, and prepares the second try of those that have to come again."""

    def __init__(self, store: Store, cache: Cache) -> None:
        self._store = store
        self._namespace = store.namespace
        self._inodes = store.namespace.inodes
        self._cache = cache
        self._nodes = cache.nodes
        self.trails = LookupTrails(store.namespace)

    async def freshen(self, inode: Inode, *, content: bool = False) -> bool:
        """See to it that the namespace is fresh; whether it was without asking. `content`: a small
        file's is wanted, too."""
        if self._store.is_fresh(inode):
            return True
        await detach()
        await self._store.freshen(inode, content=content)
        return False

    async def ensure_local(self, inode: Inode) -> Inode:
        """Return the inode once what an open is to get of it is on this host."""
        if inode.extent and not (
            self._cache.is_at_hand(inode) or self._store.is_here(inode.extent)
        ):
            await detach()
            inode = await self._store.bring(inode.ino)
        return inode

    async def refreshed(self, inode: Inode, *, bring: bool) -> Inode:
        """Return the inode once what is written in place here is not older than its version. `bring`: that
        is on this host, and has to be again if another one is published meanwhile."""
        while True:
            await self._cache.refresh(inode.ino)
            now = self._namespace.inode(inode.ino)
            if now.version == inode.version:
                return now
            inode = await self.ensure_local(now) if bring else now

    async def settled(
        self, node_id: int, names: Sequence[TrailStep], flags: int, pid: int
    ) -> tuple[Node, Inode]:
        """The node and the inode that an open came to, once it is sure that they are the right ones and
        the content is on this host.

        Raises OSError ESTALE when the names that led here mean something else by now: what they mean is
        then ready for the thread's second try.
        """
        node = self._nodes.by_id.get(node_id)
        if node is not None and self._cache.is_promised(pid, node.ino):
            return self._nodes.get(node_id)  # it was settled when the open came to the other node
        inode = self._inodes.get(node.ino) if node is not None else None
        name = name_of(node, names)
        if inode is None and name is not None:
            inode = self._inodes.get(name.parent)
        asked = inode or self._inodes[ROOT_INO]
        believed = await self.freshen(asked, content=not truncates(flags))
        try:
            node, inode = self._nodes.get(node_id)
            if not self.trails.hold(pid, names, inode.ino, believed=believed):
                raise fail(errno.ESTALE)
            if not inode.nlink and not self._nodes.in_use(inode.ino):
                raise fail(errno.ESTALE)  # its content may be gone with its last name
            return node, inode if truncates(flags) else await self.ensure_local(inode)
        except OSError as error:
            if error.errno == errno.ESTALE and name is not None:
                await self._lead_on(name, flags, pid, node)
            raise

    async def _lead_on(self, name: TrailStep, flags: int, pid: int, came_to: Node | None) -> None:
        """Have ready what a name means now for a thread that is to look it up once more. By then it may
        mean yet another file; the thread is led to this one all the same."""
        for _ in range(_LEADS_MAX):
            found = self.trails.find(name)
            if found is None or not found.is_file:
                return  # the second try finds out
            try:
                if not truncates(flags):
                    found = await self.ensure_local(found)
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
                await self.freshen(found)  # that one is gone, too
            else:
                self._cache.promise(found, flags, pid, came_to)
                self.trails.lead(pid, (name.parent, name.name), found.ino)
                return
