"""Which node an open gets, so that the kernel can pass its content through.

An idle node shows whatever it is opened for. The kernel decides by name which node an open goes to, and
does not know which content we would give it. An open that arrives at a node with another content is
answered ESTALE, and its thread is promised the content on another node. The kernel then looks the name up
once more, and the lookup leads it to the node that is ready for it: the second try is the last one. If the
name has come to mean another file by then, the promise is about that one from then on (`follow`), or, where
that may have to be fetched from other hosts, the thread is led to the file that it came to (`led`). A file
that is opened without a name (/proc/self/fd, a file that is bind-mounted) comes back without a lookup in
between; by fanotify, never.
"""

import errno
import os
import time
from dataclasses import dataclass, field

from ..backend.namespace import Inode, fail
from ..callers.processes import is_gone
from .content import Content, State
from .host import Host, OnHost
from .kernel_cache import Name
from .nodes import Node
from .sharing import truncates

# The kernel comes back at once, unless this daemon or the thread is kept from its processor; an older
# promise belongs to an open that died.
_MAX_AGE_S = 10.0
_MAX_PROMISES = 65536
# The oldest ones may be of threads that were killed: others come back at once.
_LOOKED_AT = 16


@dataclass(slots=True, eq=False)
class Promise:
    """An open by a thread with `flags`, which came to one node by a `name`, if that is known, and will find
    its content on another when it comes again. `cut`: the content is to be emptied for it. `is_emptied`: an
    open with O_RDONLY | O_TRUNC has emptied it already."""

    name: Name | None
    came_to: Node | None
    node: Node
    content: Content
    flags: int
    cut: bool
    is_emptied: bool = False
    looked_up: bool = False
    since: float = field(default_factory=time.monotonic)

    @property
    def joins(self) -> bool:
        """Return whether the open is to write a content that others may write, too."""
        writes = self.flags & os.O_ACCMODE != os.O_RDONLY
        return writes and (self.cut or not self.flags & os.O_TRUNC)

    @property
    def is_old(self) -> bool:
        return time.monotonic() - self.since >= _MAX_AGE_S

    def is_kept_by(self, node: Node, flags: int) -> bool:
        """Return whether an open by the thread is the promised one."""
        return self.node is node and self.flags == flags

    def is_nameless(self, node: Node) -> bool:
        """Return whether the open came to the same node again without a lookup in between."""
        return self.came_to is node and not self.looked_up


class Routes(OnHost):
    """Leads lookups to nodes, and opens to nodes that can show their contents."""

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        # The promises not kept yet, at most one for each thread, and for each inode one for all threads
        # whose number cannot be seen. Lookups and opens check whether it is empty without a call.
        self.promises: dict[tuple[int, int], Promise] = {}

    # -- lookups ---------------------------------------------------------------------------------

    def node_of(self, inode: Inode, pid: int) -> Node:
        """Return the node that a lookup of the inode's name by this thread finds."""
        if self.promises and (promise := self.promised(pid, inode.ino)) is not None:
            promise.looked_up = True
            return promise.node
        node = self._nodes.main.get(inode.ino)
        if node is None:
            return self._nodes.add(inode)
        if (node.opens or node.promised) and node.content is not None:
            current = self._sharing.current(inode)
            if node.content is current:
                return node
            for node in self._nodes.of(inode.ino):
                if not node.is_bound or node.content in (None, current):
                    break
            else:
                node = self._add_node(inode)
            self._nodes.main[inode.ino] = node
        return node

    def led(self, pid: int, name: Name) -> Inode | None:
        """Return the file that a thread's open came to by a name, and is promised when it looks the name up
        again. The kernel asks twice: for the entry that it has, and for the one that replaced it."""
        promise = self._by_name(pid, name)
        return None if promise is None else self._inodes.get(promise.content.ino)

    def unkept(self, pid: int, name: Name, inode: Inode | None) -> Promise | None:
        """Return the promise to a thread that comes again by a name which leads to another file by now. The
        kernel does not tell by which name an open comes: the file may have several, or have lost it. A name
        that never led to the file is that of one on which it is mounted."""
        promise = self.promises.get((pid, 0)) if pid else None
        if promise is None or promise.looked_up or promise.is_old:
            return None
        if inode is not None and promise.content.ino == inode.ino:
            promise.name = name
            return None
        node = promise.came_to
        return promise if node is None or name in (node.name, *node.former) else None

    def follow(self, pid: int, name: Name, inode: Inode) -> None:
        """Have a thread's open be promised the file that its name means now. One with O_RDONLY | O_TRUNC
        has emptied its file already. Raises OSError (ENOSPC, EMFILE)."""
        promise = self._by_name(pid, name) or self.unkept(pid, name, inode)
        if promise is None or self.promised(pid, inode.ino) or not inode.is_file:
            return
        if promise.flags & (os.O_TRUNC | os.O_ACCMODE) != os.O_TRUNC | os.O_RDONLY:
            self.promise(inode, promise.flags, pid, None, name)

    def _by_name(self, pid: int, name: Name) -> Promise | None:
        slots = [(pid, 0)] if pid else [slot for slot in self.promises if not slot[0]]
        for promise in filter(None, map(self.promises.get, slots)):
            if promise.name == name and not promise.is_old:
                return promise
        return None

    def names_are_stable(self, ino: int) -> bool:
        """Return whether the kernel may keep the answer of a lookup: every thread gets the same node."""
        awaited = self.promises and any(node.promised for node in self._nodes.of(ino))
        return not awaited and ino not in self._table.private

    # -- opens -----------------------------------------------------------------------------------

    def choose(
        self,
        inode: Inode,
        node: Node,
        flags: int,
        pid: int,
        promise: Promise | None,
        name: Name | None,
    ) -> tuple[Content, bool]:
        """Return the content that an open arriving at `node` by a name gets, and whether it is to be
        emptied. May begin a private one.

        Raises OSError ESTALE if another node has to show it: the kernel will look up and open again.
        """
        if promise is not None and promise.is_kept_by(node, flags):
            return promise.content, promise.cut
        nameless = promise is not None and promise.is_nameless(node)
        if (nameless and node.opens) or (not promise and self.comes_by_no_name(node, flags)):
            # An open through a descriptor of the file shares the content of the descriptor.
            assert node.content is not None
            if flags & os.O_ACCMODE and not self._sharing.may_be_written(node.content):
                raise fail(errno.ESTALE)
            return node.content, truncates(flags)
        if self.promises:
            self._withdraw_stale(inode.ino)
        content, cut = self._sharing.content_for(inode, flags)
        # Lookups of the name must not find a private content.
        bindable = content.state is not State.REPLACING or nameless
        if node.content is content if node.opens or node.promised else bindable:
            return content, cut
        self.promise(inode, flags, pid, node, name, (content, cut)).is_emptied = True
        raise fail(errno.ESTALE)

    def comes_by_no_name(self, node: Node, flags: int) -> bool:
        """Return whether an open for reading, which nobody promised anything, came to a node to which no
        name leads: the kernel may try it only once (fanotify, FS_IOC_GETFLAGS)."""
        is_private = node.content is not None and node.content.state is State.REPLACING
        return is_private and not flags & (os.O_ACCMODE | os.O_TRUNC)

    def choose_any(self, inode: Inode, flags: int, pid: int) -> tuple[Node, Content, bool]:
        """Return the same, and the node, for a request that accepts any node."""
        self.withdraw(pid, inode.ino)
        self._withdraw_stale(inode.ino)
        content, cut = self._sharing.content_for(inode, flags)
        return self._node_for(inode, content), content, cut

    def _node_for(self, inode: Inode, content: Content) -> Node:
        """Return a node that can show this content."""
        for node in self._nodes.of(inode.ino):
            if node.is_bound and node.content is content:
                return node
        if content.state is not State.REPLACING:
            for node in self._nodes.of(inode.ino):
                if not node.is_bound:
                    return node
        return self._add_node(inode)

    def _add_node(self, inode: Inode) -> Node:
        """Make a further node. Writes through one then change the content that others show."""
        current = self._table.current.get(inode.ino)
        if current is not None and current.is_changing:
            for other in self._nodes.of(inode.ino):
                self._kernel.invalidate_attributes(other)
        return self._nodes.add(inode)

    # -- promises --------------------------------------------------------------------------------

    def promise(
        self,
        inode: Inode,
        flags: int,
        pid: int,
        came_to: Node | None,
        name: Name | None,
        chosen: tuple[Content, bool] | None = None,
    ) -> Promise:
        """Prepare the thread's second try, which comes by name, or to the same node: that finds a node for
        the content, which may be `chosen` already. Return what it is promised."""
        if chosen is None:
            self._withdraw_stale(inode.ino)
            chosen = self._sharing.content_for(inode, flags)
        content, cut = chosen
        self.withdraw(pid, inode.ino)
        node = self._node_for(inode, content)
        if not node.is_bound:
            node.content = content
        self._table.hold(content)
        node.promised += 1
        promise = Promise(name, came_to, node, content, flags, cut)
        content.awaited += promise.joins
        self.promises[_slot(pid, inode.ino)] = promise
        return promise

    def promised(self, pid: int, ino: int) -> Promise | None:
        """Return the promise by which the thread's open of the inode was led to another node, if any."""
        promise = self.promises.get(_slot(pid, ino))
        return promise if promise is not None and promise.content.ino == ino else None

    def take(self, pid: int, ino: int) -> Promise | None:
        """Return the promise to a thread for this inode; the caller has to `end` it."""
        promise = self.promises.pop(_slot(pid, ino), None)
        if promise is not None and promise.content.ino != ino:
            self.end(promise)
            return None
        return promise

    def withdraw(self, pid: int, ino: int) -> None:
        """Withdraw the thread's promise. If its number cannot be seen, only the one for this inode."""
        if (promise := self.promises.pop(_slot(pid, ino), None)) is not None:
            self.end(promise)

    def missed(self, pid: int, name: Name) -> None:
        """Note that a thread did not find a name: its promised open comes by that once more, or never."""
        promise = self.promises.get((pid, 0))
        if promise is not None and promise.looked_up:
            self.withdraw(pid, 0)
        elif promise is not None:
            promise.name, promise.looked_up = name, True

    def end(self, promise: Promise) -> None:
        """End a promise: its open came, or never will."""
        node = promise.node
        node.promised -= 1
        promise.content.awaited -= promise.joins
        self._host.let_go(promise.content)
        if not node.is_bound:
            self._host.idle(node)

    def _withdraw_stale(self, ino: int = 0) -> None:
        """Withdraw promises whose open has not come, the oldest first, so that nobody joins their contents;
        those of this inode also if the thread has been killed."""
        too_many = max(0, len(self.promises) - _MAX_PROMISES)
        for number, (slot, promise) in enumerate(list(self.promises.items())):
            is_over = number < too_many or promise.is_old
            if not is_over and number >= too_many + _LOOKED_AT:
                return
            if is_over or (promise.content.ino == ino and slot[0] and is_gone(slot[0])):
                self.withdraw(*slot)


def _slot(pid: int, ino: int) -> tuple[int, int]:
    return (pid, 0) if pid else (0, ino)
