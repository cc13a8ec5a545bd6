"""The kernel's references to us: nodes, lookup counts, open handles.

A node has one backing file at a time. So a file of which an old content is open and a new one is being
written is two nodes behind one name. docs/sharing.md has the rules; here is only the bookkeeping.
"""

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

from ..backend.namespace import ROOT_INO, Inode, fail
from .content import Content, Stamp

# The id of a node is the number of its inode, and above these bits, which no number reaches, its own.
INO_BITS = 48
_EXTRA_IDS_MAX = (1 << 64 - INO_BITS) - 1


class Node:
    """One node. `content` is what its handles share, and what it showed last when it has none.

    `promised` counts opens that are on their way here. `cached` is the mode of the present opens: through
    us and the page cache, not passthrough. `backing_extent` is what the kernel's `backing_id` stands for.
    """

    __slots__ = (
        "backing_extent", "backing_id", "cached", "content", "id", "ino", "lookups", "name", "opens",
        "promised", "told",
    )  # fmt: skip

    def __init__(self, node_id: int, inode: Inode) -> None:
        self.id = node_id
        self.ino = inode.ino
        self.lookups = 0
        self.opens = 0
        self.promised = 0
        self.content: Content | None = None
        self.cached = False
        self.backing_id = 0
        self.backing_extent = 0
        # Which privileges of the file (see privileges) the kernel knows of.
        self.told = 0
        # In a shared namespace: the directory and the name by which the kernel found it last.
        self.name: tuple[int, bytes] | None = None

    @property
    def is_bound(self) -> bool:
        """Return whether it stands for its present content and no other."""
        return bool(self.opens or self.promised)

    def __repr__(self) -> str:
        return f"<Node {self.id} ino={self.ino} opens={self.opens} {self.content}>"


class Handle:
    """One open file description, or a directory being listed (`content` is None).

    `since`: the content's stamp when it was opened beside other writers, None when the handle may have
    changed it. `aborted`: what it wrote is not to be published; `killed`: because its writer died.
    """

    __slots__ = (
        "aborted", "content", "entries", "fh", "flags", "is_directory", "killed", "node", "pid", "since",
        "writing",
    )  # fmt: skip

    def __init__(self, fh: int, node: Node, content: Content | None, flags: int, pid: int) -> None:
        self.fh = fh
        self.node = node
        self.content = content
        self.flags = flags
        self.pid = pid
        self.writing = flags & os.O_ACCMODE != os.O_RDONLY
        self.since: Stamp | None = None
        self.aborted = self.killed = False
        self.is_directory = content is None
        self.entries: list[tuple[bytes, int]] | None = None

    @property
    def is_rdwr(self) -> bool:
        return self.flags & os.O_ACCMODE == os.O_RDWR


class NodeEvents(ABC):
    """Is told by a table of nodes."""

    @abstractmethod
    def node_dropped(self, node: Node) -> None:
        """The kernel has forgotten a node, and nothing refers to it any more."""


class NodeTable:
    """All nodes and handles."""

    def __init__(self, inodes: Mapping[int, Inode], events: NodeEvents) -> None:
        self._inodes = inodes
        self._events = events
        self._next_extra_id = 1
        self._next_fh = 1
        self.by_id: dict[int, Node] = {}
        self.handles: dict[int, Handle] = {}
        # The node that lookups of an inode lead to.
        self.main: dict[int, Node] = {}
        # Inodes with several nodes; most have one and are not here.
        self._siblings: dict[int, set[Node]] = {}
        self._first: dict[int, Node] = {}
        root = self.add(inodes[ROOT_INO])
        root.lookups = 1
        assert root.id == ROOT_INO

    def get(self, node_id: int) -> tuple[Node, Inode]:
        """Return a node and its inode. Raises OSError ESTALE if either is gone."""
        node = self.by_id.get(node_id)
        inode = self._inodes.get(node.ino) if node is not None else None
        if node is None or inode is None:
            raise fail(errno.ESTALE)
        return node, inode

    def inode_of(self, node_id: int) -> Inode:
        """Return a node's inode. Raises OSError ESTALE if either is gone."""
        node = self.by_id.get(node_id)
        inode = self._inodes.get(node.ino) if node is not None else None
        if inode is None:
            raise fail(errno.ESTALE)
        return inode

    def add(self, inode: Inode, node_id: int = 0) -> Node:
        """Make a node. `node_id`: one that is free again, by which somebody asks for the inode."""
        node_id = node_id or inode.ino
        while node_id in self.by_id:
            node_id = inode.ino | self._next_extra_id << INO_BITS
            self._next_extra_id = self._next_extra_id % _EXTRA_IDS_MAX + 1
        node = Node(node_id, inode)
        self.by_id[node_id] = node
        first = self._first.setdefault(inode.ino, node)
        if first is not node:
            self._siblings.setdefault(inode.ino, {first}).add(node)
        return node

    def numbered(self, inode: Inode) -> Node:
        """Return the node that has the number of its inode."""
        return self.by_id.get(inode.ino) or self.add(inode)

    def of(self, ino: int) -> Iterator[Node]:
        """Every node of an inode."""
        siblings = self._siblings.get(ino)
        if siblings is not None:
            yield from siblings
        elif ino in self._first:
            yield self._first[ino]

    def has_nodes(self, ino: int) -> bool:
        """Return whether the kernel knows the inode. Descriptors may refer to it that never opened it
        (O_PATH)."""
        return ino in self._first

    def has_siblings(self, ino: int) -> bool:
        return ino in self._siblings

    def in_use(self, ino: int) -> bool:
        """Whether the inode must outlive its last name: something has it open, or is about to."""
        return any(node.opens or node.promised for node in self.of(ino))

    def forget(self, node_id: int, lookups: int) -> None:
        node = self.by_id.get(node_id)
        if node is None or node.id == ROOT_INO:
            return
        node.lookups -= lookups
        if node.lookups <= 0:
            self.drop_unused(node)

    def drop_unused(self, node: Node) -> None:
        """Drop a node that neither the kernel nor a handle nor a promise refers to."""
        if node.lookups > 0 or node.opens or node.promised or node.id == ROOT_INO:
            return
        if self.by_id.get(node.id) is not node:
            return
        del self.by_id[node.id]
        if self.main.get(node.ino) is node:
            del self.main[node.ino]
        siblings = self._siblings.get(node.ino)
        if siblings is None:
            del self._first[node.ino]
        else:
            siblings.discard(node)
            self._first[node.ino] = next(iter(siblings))
            if len(siblings) == 1:
                del self._siblings[node.ino]
        self._events.node_dropped(node)

    def open(self, node: Node, content: Content | None, flags: int, pid: int) -> Handle:
        handle = Handle(self._next_fh, node, content, flags, pid)
        self._next_fh += 1
        self.handles[handle.fh] = handle
        node.opens += 1
        if content is not None:
            content.opens += 1
            if handle.writing:
                content.writers += 1
        return handle

    def close(self, fh: int) -> Handle:
        handle = self.handles.pop(fh)
        handle.node.opens -= 1
        if handle.content is not None:
            handle.content.opens -= 1
            if handle.writing:
                handle.content.writers -= 1
        return handle
