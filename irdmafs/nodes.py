"""What the kernel holds of us: nodes (one per inode and version), lookup counts, open handles.

A node has one backing file at a time, so a file that has an old version open and a new one being
written is two nodes behind one name. docs/design.md, "Which node an open gets", has the rules; here
is only the bookkeeping.
"""

import enum
import os
from collections.abc import Callable, Iterator

import trio

from .backend.namespace import ROOT_INO, Inode

# The id of a node is the number of its inode, and above these bits, which no number reaches, its own.
INO_BITS = 48
_EXTRA_IDS_MAX = (1 << 64 - INO_BITS) - 1


class State(enum.IntEnum):
    SEALED = 0  # an immutable version (and every node that is not a regular file)
    PRIVATE = 1  # a working copy nobody but its opener sees
    LIVE = 2  # written in place, shared by every opener on this host


class Node:
    """One node. For regular files it stands for a version or for a working copy.

    `extent` is what reads are served from; `working` says that it is an allocated extent no version
    names, so that writing it hurts nobody. `fd` is our own descriptor of it, -1 when we need none.
    `cached` tells the mode of the present opens: through us and the page cache, not passthrough.
    `discarded`: its opener gave the working copy up. `mapped`: somebody could map the working copy to
    write it, and may go on when every descriptor is closed.
    `stamp` is what stat said of the extent when it was last published, `settled` that a later write
    is sure to have moved its times.
    """

    __slots__ = (
        "backing_id",
        "blocks",
        "cached",
        "dirty",
        "discarded",
        "extent",
        "fd",
        "id",
        "ino",
        "lock",
        "lookups",
        "mapped",
        "mtime_ns",
        "name",
        "opens",
        "pinned",
        "settled",
        "size",
        "stamp",
        "state",
        "version",
        "working",
        "writers",
    )  # fmt: skip

    def __init__(self, node_id: int, inode: Inode) -> None:
        self.id = node_id
        self.ino = inode.ino
        self.lookups = 0
        self.opens = 0
        self.writers = 0
        self.fd = -1
        self.backing_id = 0
        self.state = State.SEALED
        self.cached = False
        self.working = False
        self.dirty = False
        self.discarded = False
        self.mapped = False
        self.pinned = 0
        self.stamp: tuple[int, int] | None = None
        self.settled = False
        self.lock: trio.Lock | None = None
        # In a shared namespace: the directory and the name by which the kernel found it last.
        self.name: tuple[int, bytes] | None = None
        self.show(inode)

    @property
    def is_sealed(self) -> bool:
        return self.state is State.SEALED

    def show(self, inode: Inode) -> None:
        """Stand for the inode's current version."""
        self.version = inode.version
        self.extent = inode.extent
        self.size = inode.size
        self.blocks = inode.blocks
        self.mtime_ns = inode.mtime_ns

    def __repr__(self) -> str:
        return f"<Node {self.id} ino={self.ino} v{self.version} {self.state.name}>"


class Handle:
    """One open file description, or a directory being listed."""

    __slots__ = ("aborted", "entries", "fh", "flags", "is_directory", "node", "pid", "writing")

    def __init__(self, fh: int, node: Node, flags: int, pid: int) -> None:
        self.fh = fh
        self.node = node
        self.flags = flags
        self.pid = pid
        self.writing = flags & os.O_ACCMODE != os.O_RDONLY
        self.aborted = False
        self.is_directory = False
        self.entries: list[tuple[bytes, int]] | None = None


class NodeTable:
    """All nodes and handles. `on_drop` is told of every node the kernel forgot."""

    def __init__(self, root: Inode, on_drop: Callable[[Node], None]) -> None:
        self._on_drop = on_drop
        self._next_extra_id = 1
        self._next_fh = 1
        self.by_id: dict[int, Node] = {}
        self.handles: dict[int, Handle] = {}
        # The node that stands for an inode's current version, and the one written in place.
        self.sealed: dict[int, Node] = {}
        self.live: dict[int, Node] = {}
        # How many private working copies an inode has (absent: none).
        self.private: dict[int, int] = {}
        # Inodes with several nodes; most have one and are not here.
        self._siblings: dict[int, set[Node]] = {}
        self._first: dict[int, Node] = {}
        # (pid, inode) -> the node which that process's repeated lookup is to find
        self.redirected: dict[tuple[int, int], Node] = {}
        root_node = self.add(root)
        root_node.lookups = 1
        assert root_node.id == ROOT_INO

    def add(self, inode: Inode, node_id: int = 0) -> Node:
        """Make a node that stands for the inode's current version. `node_id`: one that is free again, by
        which somebody asks for the inode."""
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

    def of(self, ino: int) -> Iterator[Node]:
        """Every node of an inode."""
        siblings = self._siblings.get(ino)
        if siblings is not None:
            yield from siblings
        elif ino in self._first:
            yield self._first[ino]

    def in_use(self, ino: int) -> bool:
        """Whether the inode must outlive its last name: something has it open, or is about to."""
        expected = self.redirected.values() if self.redirected else ()
        return any(
            node.opens or node.state is not State.SEALED or node in expected
            for node in self.of(ino)
        )

    def forget(self, node_id: int, lookups: int) -> None:
        node = self.by_id.get(node_id)
        if node is None or node.id == ROOT_INO:
            return
        node.lookups -= lookups
        if node.lookups <= 0:
            self.drop_unused(node)

    def drop_unused(self, node: Node) -> None:
        """Drop a node that neither the kernel nor a handle nor a redirection refers to."""
        if node.lookups > 0 or node.opens or node.id == ROOT_INO:
            return
        if self.by_id.get(node.id) is not node or node in self.redirected.values():
            return
        del self.by_id[node.id]
        if self.sealed.get(node.ino) is node:
            del self.sealed[node.ino]
        if self.live.get(node.ino) is node:
            del self.live[node.ino]
        siblings = self._siblings.get(node.ino)
        if siblings is None:
            del self._first[node.ino]
        else:
            siblings.discard(node)
            self._first[node.ino] = next(iter(siblings))
            if len(siblings) == 1:
                del self._siblings[node.ino]
        self._on_drop(node)

    def open(self, node: Node, flags: int, pid: int) -> Handle:
        handle = Handle(self._next_fh, node, flags, pid)
        self._next_fh += 1
        self.handles[handle.fh] = handle
        node.opens += 1
        if handle.writing:
            node.writers += 1
            node.mapped |= flags & os.O_ACCMODE == os.O_RDWR
        return handle

    def close(self, fh: int) -> Handle:
        handle = self.handles.pop(fh)
        handle.node.opens -= 1
        if handle.writing:
            handle.node.writers -= 1
        return handle

    def add_private(self, node: Node) -> None:
        node.state = State.PRIVATE
        self.private[node.ino] = self.private.get(node.ino, 0) + 1

    def remove_private(self, node: Node, state: State) -> None:
        node.state = state
        left = self.private[node.ino] - 1
        if left:
            self.private[node.ino] = left
        else:
            del self.private[node.ino]
