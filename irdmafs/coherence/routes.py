"""Which node an open gets, so that the kernel can pass its content through.

An idle node shows whatever it is opened for. An open that arrives at a node with another content is
promised its own content on another node, and refused: see redirects.py.
"""

import errno
import os

from ..backend.namespace import Inode, fail
from .content import Content, State
from .host import Host
from .nodes import Node
from .redirects import Key, Promise, Redirects
from .sharing import Sharing, truncates


class Routes:
    """Leads lookups to nodes, and opens to nodes that can show their contents."""

    def __init__(self, host: Host, sharing: Sharing) -> None:
        self._host = host
        self._kernel = host.kernel
        self._table = host.table
        self._nodes = host.nodes
        self._sharing = sharing
        self._redirects = Redirects()
        # Checked by each open, which then needs no call.
        self.promises = self._redirects.promises
        # In a cluster a thread is led to the file that its open was refused (trail.py).
        self._may_move = host.store.freshness is None

    # -- lookups ---------------------------------------------------------------------------------

    def node_of(self, inode: Inode, pid: int) -> Node:
        """Return the node that a lookup of the inode's name by this thread finds."""
        if self.promises:
            promise = self._redirects.promised((pid, inode.ino)) or self._moved(pid, inode)
            if promise is not None:
                promise.looked_up = True
                return promise.node
        node = self._nodes.main.get(inode.ino)
        if node is None or ((node.opens or node.promised) and not self._shows_current(node, inode)):
            for node in self._nodes.of(inode.ino):
                if self._shows_current(node, inode):
                    break
            else:
                node = self._add_node(inode)
            self._nodes.main[inode.ino] = node
        return node

    def _moved(self, pid: int, inode: Inode) -> Promise | None:
        """Return the promise to a thread whose open was refused because another node has to show the file,
        for the file that its name leads to now: the kernel tries only twice. Raises OSError (ENOSPC,
        EMFILE)."""
        before = self._redirects.of_thread(pid) if self._may_move else None
        if before is None or not inode.is_file or not before.may_move:
            return None
        self._withdraw_stale()
        content, cut = self._sharing.content_for(inode, before.flags)
        moves = before.moves + 1
        return self._promise(
            (pid, inode.ino), before.came_to, content, inode, before.flags, cut=cut, moves=moves
        )

    def _shows_current(self, node: Node, inode: Inode) -> bool:
        if not node.is_bound:
            return True
        content = node.content
        return content is None or content is self._sharing.current(inode)

    def names_are_stable(self, ino: int) -> bool:
        """Return whether the kernel may keep the answer of a lookup: every thread gets the same node."""
        return ino not in self._table.private and ino not in self._redirects.inodes

    # -- opens -----------------------------------------------------------------------------------

    def choose(
        self, inode: Inode, node: Node, flags: int, pid: int, promise: Promise | None
    ) -> tuple[Content, bool]:
        """Return the content that an open arriving at `node` gets, and whether it is to be emptied. May
        begin a private one.

        Raises OSError ESTALE if another node has to show it: the kernel will look up and open again.
        """
        if promise is not None and promise.is_kept_by(node, flags):
            return promise.content, promise.cut
        nameless = promise is not None and promise.is_nameless(node)
        if (nameless and node.opens) or (not promise and self.comes_by_no_name(node, flags)):
            # An open through a descriptor of the file shares the content of the descriptor.
            assert node.content is not None
            return node.content, truncates(flags)
        if self.promises:
            self._withdraw_stale()
        content, cut = self._sharing.content_for(inode, flags)
        # Lookups of the name must not find a private content.
        bindable = content.state is not State.REPLACING or nameless
        if node.content is content if node.is_bound else bindable:
            return content, cut
        self._promise((pid, inode.ino), node, content, inode, flags, cut=cut)
        raise fail(errno.ESTALE)

    def comes_by_no_name(self, node: Node, flags: int) -> bool:
        """Return whether an open for reading, which nobody promised anything, came to a node to which no
        name leads: the kernel may try it only once (fanotify, FS_IOC_GETFLAGS)."""
        is_private = node.content is not None and node.content.state is State.REPLACING
        return is_private and not flags & (os.O_ACCMODE | os.O_TRUNC)

    def choose_any(self, inode: Inode, flags: int, pid: int) -> tuple[Node, Content, bool]:
        """Return the same, and the node, for a request that accepts any node."""
        self.withdraw(pid, inode.ino)
        self._withdraw_stale()
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

    def promise(self, inode: Inode, flags: int, pid: int, came_to: Node | None) -> None:
        """Prepare the thread's second try, which comes by name, or to the same node."""
        self._withdraw_stale()
        content, cut = self._sharing.content_for(inode, flags)
        if came_to is None or came_to.ino != inode.ino:
            came_to = self.node_of(inode, 0)
        self._promise((pid, inode.ino), came_to, content, inode, flags, cut=cut)

    def is_promised(self, pid: int, ino: int) -> bool:
        """Return whether the thread's open of the inode was led to another node."""
        return self._redirects.promised((pid, ino)) is not None

    def take(self, pid: int, ino: int) -> Promise | None:
        """Return the promise to a thread for this inode; the caller has to `end` it."""
        promise = self._redirects.take((pid, ino))
        if promise is not None and promise.key[1] != ino:
            self.end(promise)
            return None
        return promise

    def withdraw(self, pid: int, ino: int) -> None:
        """Withdraw the thread's promise. If its number cannot be seen, only the one for this inode."""
        promise = self._redirects.take((pid, ino))
        if promise is not None:
            self.end(promise)

    def end(self, promise: Promise) -> None:
        """End a promise: its open came, or never will."""
        node = promise.node
        node.promised -= 1
        promise.content.awaited -= promise.joins
        self._host.let_go(promise.content)
        if not node.is_bound:
            self._host.idle(node)

    def _withdraw_stale(self) -> None:
        """Withdraw promises whose open has not come, so that nobody joins their contents."""
        for pid, ino in self._redirects.stale():
            self.withdraw(pid, ino)

    def _promise(
        self,
        key: Key,
        came_to: Node,
        content: Content,
        inode: Inode,
        flags: int,
        *,
        cut: bool,
        moves: int = 0,
    ) -> Promise:
        """Make the next lookup by this thread find a node for the content."""
        self.withdraw(*key)
        node = self._node_for(inode, content)
        if not node.is_bound:
            node.content = content
        self._table.hold(content)
        node.promised += 1
        promise = Promise(key, came_to, node, content, flags, cut, moves)
        content.awaited += promise.joins
        self._redirects.add(promise)
        return promise
