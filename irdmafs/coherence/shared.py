"""Coherence in a cluster, where other hosts change the namespace, too.

A lookup is answered from the replica, and checked when the file is opened (see trail). The kernel may
believe what lies in a directory that the mount follows: others who change something there wait until it
has been made to forget (see beliefs).
"""

import errno
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final

from ..backend.namespace import ROOT_INO, Inode, fail
from ..backend.store.api import Store
from ..inline import detach
from .beliefs import Beliefs
from .cache import Cache
from .kernel_cache import Name
from .kernel_directories import KernelLocks, KernelNames, Moves
from .nodes import Node
from .protocol import Answer, Coherence
from .sharing import truncates
from .trail import LookupTrails, TrailStep

if TYPE_CHECKING:
    from ..backend.store.remote.versions import Freshness

# Stop preparing the second try of an open whose file is replaced so often before its content is here.
_LEADS_MAX: Final = 20


class Shared(Coherence):
    """The mount is one of several of its cluster."""

    @property
    def has_private_views(self) -> bool:
        return self._kernel.can_forget

    def __init__(
        self, store: Store, freshness: "Freshness", cache: Cache, beliefs: Beliefs
    ) -> None:
        super().__init__(store.namespace, cache)
        self._store = store
        self._freshness = freshness
        self._exclusive = freshness.exclusive
        self._inodes = store.namespace.inodes
        self._kernel = cache.kernel
        self._beliefs = beliefs
        self._trails = LookupTrails(store.namespace)
        self.kernel_locks = KernelLocks()
        self._moves = Moves(self.kernel_locks)
        self._kernel_names = KernelNames(cache.nodes)

    # -- for how long the kernel may believe an answer ---------------------------------------------

    def attributes(self, answer: Answer, node: Node, inode: Inode) -> None:
        if inode.is_dir:
            if inode.ino in self._exclusive and self._freshness.is_deferred_elsewhere(inode.ino):
                return
            valid_s = self._freshness.believable_s(inode.ino, used=False)
        elif self._cache.host.changes_unnoticed(node):
            return
        else:
            # A file with names in several directories is believed if all of them are.
            valid_s = min(
                map(self._freshness.believable_s, self.namespace.parents_of(inode.ino)), default=0.0
            )
        # The kernel checks modes at each step of a path, and at its end before an open.
        valid_s = valid_s or self._freshness.attributes_believable_s()
        # A damaged inode has none: an error answers the request for them.
        if valid_s and self._kernel.can_forget and inode.ino not in self.namespace.damaged:
            answer.attr_timeout = valid_s
            self._beliefs.say(inode.ino, valid_s)

    def changed(self, answer: Answer, node: Node) -> None:
        """Let the kernel believe nothing: others may have changed the attributes since."""

    def entry(self, answer: Answer, parent: int, name: bytes, node: Node, inode: Inode) -> None:
        self._kernel_names.found((parent, name), inode)
        if not self._cache.routes.names_are_stable(inode.ino):
            return
        # Looking up a subdirectory does not count as a use of its parent.
        valid_s = self._freshness.believable_s(parent, used=not inode.is_dir)
        if inode.is_dir and not valid_s:
            valid_s = self._freshness.path_valid_s(inode.ino)
        if valid_s and self._kernel.can_forget:
            self._believe_entry(answer, (parent, name), node, inode, valid_s)
        else:
            self.attributes(answer, node, inode)

    def _believe_entry(
        self, answer: Answer, name: Name, node: Node, inode: Inode, valid_s: float
    ) -> None:
        """Have the kernel, which can forget them, believe a name for so long, and the attributes of its
        node."""
        answer.entry_timeout = valid_s
        if inode.more or inode.parent != name[0]:
            self._beliefs.say(inode.ino, valid_s, name, attributes=False)
            self.attributes(answer, node, inode)
            return
        damaged = inode.ino in self.namespace.damaged
        whole = not (damaged or self._cache.host.changes_unnoticed(node))
        if whole:
            answer.attr_timeout = valid_s
        self._beliefs.say(inode.ino, valid_s, name, attributes=whole)

    def made(
        self, answer: Answer, parent: int, name: bytes, node: Node, inode: Inode, pid: int
    ) -> None:
        if self._trails.retries:
            self._trails.forget(pid)  # an open that came again has made its file
        if inode.maker:
            self.attributes(answer, node, inode)  # no other host can have changed them
        if not self._cache.routes.names_are_stable(inode.ino):
            return
        self._kernel_names.found((parent, name), inode)
        valid_s = self._freshness.believable_s(parent, used=False)
        if not valid_s or not self._kernel.can_forget:
            return
        # Others may have changed it again while they were waited for.
        if self.namespace.leads_to(parent, name, inode.ino):
            answer.entry_timeout = valid_s
            self._beliefs.say(inode.ino, valid_s, (parent, name), attributes=False)

    def missing_s(self, parent: Inode, name: bytes, pid: int) -> float | None:
        if (
            self._promises
            or self._trails.retries
            or not self._freshness.is_missing(parent.ino, name)
        ):
            return None
        self._trails.missed(pid)
        self._kernel_names.found((parent.ino, name), None)
        return 0.0

    def listing_s(self, directory: int) -> float:
        valid_s = self._freshness.believable_s(directory)
        return valid_s if self._kernel.can_forget else 0.0

    def knows(self, name: Name, node: Node, until: float) -> bool:
        return self._beliefs.holds(name, node.ino, until)

    def listed(self, answer: Answer, name: Name, node: Node, inode: Inode, valid_s: float) -> None:
        if self._may_be_believed(name, inode):
            self._kernel_names.found(name, inode)
            self._believe_entry(answer, name, node, inode, valid_s)

    # -- what lookups and opens come to ------------------------------------------------------------

    def find(self, parent: int, name: bytes, pid: int) -> Inode | None:
        if self._promises or self._trails.retries:
            retry = self._trails.retry(pid, (parent, name))
            if retry is not None:
                if retry.left:
                    retry.left -= 1
                else:  # the thread looks the name up for another call by now
                    self._trails.forget(pid)
                    self._cache.routes.withdraw(pid, 0)
                    retry = None
            led = self._cache.routes.led(pid, (parent, name))
            if led is not None or retry is not None:
                return led  # None: find_fresh prepares it
        if parent in self._exclusive and self._freshness.is_deferred_elsewhere(parent):
            return None
        inode = self.namespace.lookup(parent, name)
        if self._promises and (inode is None or inode.is_file):
            promise = self._cache.routes.unkept(pid, (parent, name), inode)
            if promise is not None:
                self._trails.expect(pid, {(parent, name)}, promise.flags)
                return None  # find_fresh prepares it
        if inode is not None:
            if inode.is_dir and (
                (inode.ino in self._exclusive and self._freshness.is_deferred_elsewhere(inode.ino))
                or not self._may_tell(parent, inode, pid)
            ):
                return None  # find_fresh waits
            is_special = not inode.is_dir and not inode.is_file
            if is_special and not self._freshness.is_fresh(self._inodes[parent]):
                return None  # the kernel may refuse to open it, and asks nothing more
            self._found(pid, parent, name, inode)
        return inode

    def _found(self, pid: int, parent: int, name: bytes, inode: Inode) -> None:
        """Note what a thread's lookup found. The directory at which its lookups before ended was used."""
        ended = self._trails.note(pid, parent, name, inode)
        if ended and (found := self._inodes.get(ended)) is not None and found.is_dir:
            self._freshness.believable_s(ended)

    async def find_fresh(self, parent: Inode, name: bytes, pid: int) -> Inode | None:
        inode = None
        if not self._freshness.is_missing(parent.ino, name):
            await self.freshen(parent)
            inode = self.namespace.lookup(parent.ino, name)
        if inode is not None and inode.is_dir:
            if self._freshness.is_deferred_elsewhere(inode.ino):
                await self.freshen(inode)  # the time of the directory
            inode = await self._movable(parent.ino, name, inode, pid)
        retry = self._trails.retry(pid, (parent.ino, name))
        if retry is not None and inode is not None and inode.is_file:
            step = TrailStep(parent.ino, name, inode.ino)
            inode = await self._lead_on(step, retry.flags, pid, None)
            if inode is not None:
                # The kernel drops an entry that another program has put there, and asks again.
                retry.left = max(retry.left, 2)
                return inode
            inode = self._trails.find(step)
        if retry is not None and inode is not None and not inode.is_dir:
            self._trails.expect(pid, (), retry.flags)
        if inode is None:
            self._trails.missed(pid)
            self._kernel_names.found((parent.ino, name), None)
        else:
            self._found(pid, parent.ino, name, inode)
        return inode

    def _may_tell(self, parent: int, directory: Inode, pid: int) -> bool:
        node = self._nodes.by_id.get(directory.ino)
        return node is None or self._moves.may_tell(node, parent, pid)

    async def _movable(self, parent: int, name: bytes, directory: Inode, pid: int) -> Inode | None:
        """Return what a name leads to when the kernel can find a directory there."""
        if self._may_tell(parent, directory, pid):
            return directory
        node = self._nodes.by_id[directory.ino]
        await detach()
        await self._moves.wait_to_tell(node, parent, pid)
        return self.namespace.lookup(parent, name)

    def find_privately(self, parent: int, name: bytes, pid: int, uid: int) -> Inode | None:
        led = self._cache.routes.led(pid, (parent, name))
        if led is not None:
            return led
        inode = self.namespace.lookup(parent, name)
        if inode is not None and inode.is_file:
            self._trails.note(pid, parent, name, inode, private=True)
            self._cache.references.announce(pid, inode.ino, uid)
            return inode
        return None

    async def freshen(self, inode: Inode, *, content: bool = False) -> bool:
        if self._freshness.is_fresh(inode):
            return True
        await detach()
        await self._freshness.freshen(inode, content=content)
        return False

    async def settle(self, node_id: int, flags: int, pid: int) -> tuple[Node, Inode, Name | None]:
        way, empties = self._trails.take(pid), truncates(flags)
        node = self._nodes.by_id.get(node_id)
        name = _name_of(node, way.names)
        promise = self._cache.routes.promised(pid, node.ino) if self._promises and node else None
        if promise is not None and promise.flags == flags:
            # It was settled, and counted, when the open came to the other node.
            node, inode = self._nodes.get(node_id)
        else:
            if self._promises:
                self._cache.routes.withdraw(pid, 0)  # it opens something else
            asked = self._inodes.get(node.ino) if node is not None else None
            parent = name.parent if name is not None else ROOT_INO
            asked = asked or self._inodes.get(parent) or self._inodes[ROOT_INO]
            private = bool(way.names) and way.names[-1].private
            believed = private or await self.freshen(asked, content=not empties)
            try:
                node, inode = self._nodes.get(node_id)
                # An open without a lookup came by the only name, or by none, and may be tried only once.
                has_one = bool(inode.name) and not inode.more
                believed = believed or (has_one and node.name == (inode.parent, inode.name))
                believed = believed or self._cache.routes.comes_by_no_name(node, flags)
                is_held = private or self._trails.hold(pid, way, inode.ino, believed=believed)
                if not inode.nlink and not self._nodes.in_use(inode.ino):
                    raise fail(errno.ESTALE)  # its content may be gone with its last name
                if not is_held:
                    if name is None and inode.is_file:
                        # Through a descriptor: the second try, the last one, comes to the same node.
                        await self._prepare(inode, flags, pid, node, None)
                    raise fail(errno.ESTALE)
                inode = await self.bring(inode, content=not empties, opens=True)
            except OSError as error:
                if error.errno == errno.ESTALE and name is not None:
                    await self._lead_on(name, flags, pid, node)
                    links = (step[:2] for step in way.names if step.link)
                    self._trails.expect(pid, {name[:2], *links} if way.names else (), flags)
                raise
        return node, inode, None if name is None else name[:2]

    async def _lead_on(
        self, name: TrailStep, flags: int, pid: int, came_to: Node | None
    ) -> Inode | None:
        """Prepare the file that a name leads to now for a thread that is going to look it up again, and
        return it; None if there is none. By then the name may lead to yet another file; the thread is led
        to this one all the same."""
        for _ in range(_LEADS_MAX):
            found = self._trails.find(name)
            if found is None or not found.is_file:
                return None
            try:
                await self._prepare(found, flags, pid, came_to, name[:2])
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
                await self.freshen(found)  # that one is gone, too
            else:
                return found
        return None

    async def _prepare(
        self, inode: Inode, flags: int, pid: int, came_to: Node | None, name: Name | None
    ) -> None:
        """Have a thread's second try find the file ready to be opened."""
        inode = await self.bring(inode, content=not truncates(flags), opens=True)
        self._cache.routes.promise(inode, flags, pid, came_to, name)

    async def settle_names(self, node_id: int, pid: int, *, by_name: bool) -> tuple[Node, Inode]:
        way = self._trails.take(pid)
        if self._promises:
            self._cache.routes.withdraw(pid, 0)
        fresh = await self.freshen(self._nodes.inode_of(node_id))
        node, inode = self._nodes.get(node_id)
        if not self._trails.hold(pid, way, inode.ino, believed=fresh or not by_name):
            raise fail(errno.ESTALE)
        return node, inode

    async def bring(
        self, inode: Inode, *, content: bool, opens: bool = False, cuts: bool = False
    ) -> Inode:
        if content:
            inode = await self._bring(inode)
        # The content that is written in place here may be older.
        while self._cache.in_place.is_behind(inode):
            await self._cache.in_place.refresh(inode.ino, opens=True, cuts=cuts)
            before, inode = inode.version, self.namespace.inode(inode.ino)
            if inode.version == before:
                break
            if content:
                inode = await self._bring(inode)
        if content and opens:
            self._store.count_open(inode.extent)
        return inode

    async def _bring(self, inode: Inode) -> Inode:
        """Return the inode when what an open is to get of it is on this host."""
        if inode.extent and not (
            self._cache.sharing.is_at_hand(inode) or self._store.is_here(inode.extent)
        ):
            await detach()
            inode = await self._store.bring(inode.ino)
        return inode

    # -- changes by programs of this host ----------------------------------------------------------

    def changing(self, pid: int, *names: Name) -> AbstractContextManager[None]:
        self._trails.forget(pid)  # the thread's lookups were for this change
        if self._promises:
            self._cache.routes.withdraw(pid, 0)
        return self._beliefs.changing(*names)

    def known_directories(self, *names: Name) -> dict[Name, int]:
        return self._kernel_names.of(*names)

    def renamed(self, ino: int, old: Name, new: Name) -> None:
        inode = self._inodes.get(ino)
        if inode is not None and inode.is_dir:
            self._kernel_names.found(new, inode)
        super().renamed(ino, old, new)

    def count(self) -> dict[str, int]:
        return self._beliefs.count()


def _name_of(node: Node | None, names: Sequence[TrailStep]) -> TrailStep | None:
    """Return the name by which an open came to a node: of those that the thread looked up, or the one that
    the kernel did not look up again."""
    if node is None:
        return names[-1] if names else None
    for step in reversed(names):
        if step.ino == node.ino:
            return step
    return TrailStep(*node.name, node.ino) if node.name is not None else None
