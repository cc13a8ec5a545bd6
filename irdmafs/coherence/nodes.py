"""The kernel's references to us: nodes, lookup counts, open handles.

A node has one backing file at a time. So a file with an old content open and a new one being written has
two nodes behind one name. docs/sharing.md has the rules; this module has only the bookkeeping.
"""

import errno
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass

from ..backend.model.records import NO_CONTENT, ContentId
from ..backend.namespace import ROOT_INO, Inode, Tree, fail
from ..backend.namespace.inode import damaged
from .content import Content, Mark

# A node's id is its inode's number, with a number of the node's own in the bits above, which are free.
INO_BITS = 48
_EXTRA_IDS_MAX = (1 << 64 - INO_BITS) - 1
# A node remembers so many former names: an open that is looked up again comes by one of the last.
_FORMER_MAX = 7


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """One node. `content` is the content that its handles share, or that it showed last if it has none.

    `promised` counts opens that are on their way here. `cached` is the mode of the present opens: through
    the daemon and the page cache, not passthrough. `backing_extent` is the extent of the kernel's
    `backing_id`, and `read_ns` its access time when that was looked at. `shown`: the kernel was told
    attributes, or an ACL, that it may keep; `outdated`: it has yet to be told that those of its first
    answer are.
    """

    id: int
    ino: int
    lookups: int = 0
    opens: int = 0
    promised: int = 0
    shown: bool = False
    outdated: bool = False
    content: Content | None = None
    cached: bool = False
    backing_id: int = 0
    backing_extent: ContentId = NO_CONTENT
    read_ns: int = 0
    # The privileges of the file (see posix/permissions.py) that the kernel knows of.
    told: int = 0
    # The directory and name by which the kernel last found it, and those before, the last one first.
    name: tuple[int, bytes] | None = None
    former: tuple[tuple[int, bytes] | None, ...] = ()

    @property
    def is_bound(self) -> bool:
        """Return whether it stands for its present content and no other."""
        return bool(self.opens or self.promised)

    def be_found(self, name: tuple[int, bytes]) -> None:
        """Note the directory and name by which the kernel finds it."""
        if self.name not in (name, None):
            self.former = (self.name, *filter(name.__ne__, self.former))[:_FORMER_MAX]
        self.name = name

    def __repr__(self) -> str:
        return f"<Node {self.id} ino={self.ino} opens={self.opens} {self.content}>"


class Handle:
    """One open file description, or a directory being listed (`content` is None).

    `since`: the content's mark when it was opened while others wrote it, None if the handle may have
    changed it. `aborted`: nothing written through it is published; `killed`: because its writer died.
    `name`: the directory and name by which it was opened, if they are known; `version`: the version that
    it was opened on. `told`: who polls it was told that the name leads elsewhere. `trusted`: its user may
    stop this daemon anyway.
    """

    __slots__ = (
        "aborted", "content", "entries", "fh", "flags", "is_directory", "is_rdwr", "killed", "name", "node",
        "pid", "since", "told", "trusted", "version", "writing",
    )  # fmt: skip

    def __init__(self, fh: int, node: Node, content: Content | None, flags: int, pid: int) -> None:
        self.fh = fh
        self.node = node
        self.content = content
        self.flags = flags
        self.pid = pid
        self.writing = flags & os.O_ACCMODE != os.O_RDONLY
        self.is_rdwr = flags & os.O_ACCMODE == os.O_RDWR
        self.since: Mark | None = None
        self.aborted = self.killed = self.told = self.trusted = False
        self.name = node.name
        self.version = content.base.version if content is not None else 0
        self.is_directory = content is None
        self.entries: list[tuple[bytes, int]] | None = None

    @property
    def waits_for_rename(self) -> bool:
        return self.content is not None and self.content.with_rename

    @property
    def keeps_cache(self) -> bool:
        """Return whether others read the node through the page cache when it is opened."""
        return self.node.cached and self.node.opens > 1


class NodeTable:
    """All nodes and handles. dropped(node) is called when the kernel has forgotten a node, and nothing
    refers to it any more."""

    def __init__(self, tree: Tree, dropped: Callable[[Node], None]) -> None:
        self._inodes = tree.inodes
        self._damaged = tree.damaged
        self._dropped = dropped
        self._next_extra_id = 1
        self._next_fh = 1
        self.by_id: dict[int, Node] = {}
        self.handles: dict[int, Handle] = {}
        # The node of each inode, and of one that has several the one that lookups lead to.
        self.main: dict[int, Node] = {}
        # All nodes of inodes that have several.
        self.siblings: dict[int, set[Node]] = {}
        # Tell whether the kernel knows an inode, to which descriptors that never opened it (O_PATH) may
        # refer, and whether it has several nodes.
        self.has_nodes = self.main.__contains__
        self.has_siblings = self.siblings.__contains__
        root = self.add(self._inodes[ROOT_INO])
        root.lookups = 1
        assert root.id == ROOT_INO

    def get(self, node_id: int) -> tuple[Node, Inode]:
        """Return a node and its inode. Raises OSError: ESTALE if either is gone, EIO if the inode is
        damaged."""
        node = self.by_id.get(node_id)
        if node is None:
            raise fail(errno.ESTALE)
        if node.ino in self._damaged:
            raise damaged(node.ino)
        return node, self._inodes[node.ino]

    def inode_of(self, node_id: int) -> Inode:
        """Return a node's inode. Raises OSError as `get` does."""
        node = self.by_id.get(node_id)
        if node is None:
            raise fail(errno.ESTALE)
        if node.ino in self._damaged:
            raise damaged(node.ino)
        return self._inodes[node.ino]

    def directory(self, node_id: int) -> Inode:
        """Return the inode of a directory in which names are to be listed or changed. Raises OSError EPERM
        for a private view of it, and ESTALE."""
        node = self.by_id.get(node_id)
        if node is None:
            raise fail(errno.ESTALE)
        if node_id != node.ino:
            raise fail(errno.EPERM)
        if node_id in self._damaged:
            raise damaged(node_id)
        return self._inodes[node_id]

    def private_view(self, directory: Inode) -> Node:
        """Return the node of the private view of a directory, another one than its own."""
        own = self.numbered(directory)
        return next((node for node in self.of(directory.ino) if node is not own), None) or self.add(
            directory
        )

    def add(self, inode: Inode, node_id: int = 0) -> Node:
        """Make a node, with `node_id` if given: one that is free again, and by which the inode is asked
        for."""
        node_id = node_id or inode.ino
        while node_id in self.by_id:
            node_id = inode.ino | self._next_extra_id << INO_BITS
            self._next_extra_id = self._next_extra_id % _EXTRA_IDS_MAX + 1
        node = Node(node_id, inode.ino)
        self.by_id[node_id] = node
        main = self.main.setdefault(inode.ino, node)
        if main is not node:
            self.siblings.setdefault(inode.ino, {main}).add(node)
        return node

    def numbered(self, inode: Inode) -> Node:
        """Return the node that has the number of its inode."""
        return self.by_id.get(inode.ino) or self.add(inode)

    def of(self, ino: int) -> Collection[Node]:
        """Return every node of an inode."""
        if ino in self.siblings:
            return [*self.siblings[ino]]
        return (self.main[ino],) if ino in self.main else ()

    def in_use(self, ino: int) -> bool:
        """Return whether the inode must outlive its last name: it is open, or about to be opened."""
        return any(node.opens or node.promised for node in self.of(ino))

    def forget(self, node_id: int, lookups: int) -> None:
        node = self.by_id.get(node_id)
        if node is not None and node.id != ROOT_INO:
            node.lookups -= lookups
            self.drop_unused(node)

    def drop_unused(self, node: Node) -> None:
        """Drop a node if neither the kernel nor a handle nor a promise refers to it."""
        if node.lookups > 0 or node.opens or node.promised or node.id == ROOT_INO:
            return
        if self.by_id.get(node.id) is not node:
            return
        del self.by_id[node.id]
        siblings = self.siblings.get(node.ino)
        if siblings is None:
            del self.main[node.ino]
        else:
            siblings.discard(node)
            if self.main[node.ino] is node:
                self.main[node.ino] = next(iter(siblings))
            if len(siblings) == 1:
                del self.siblings[node.ino]
        self._dropped(node)

    def renamed(self, ino: int, old: tuple[int, bytes], new: tuple[int, bytes]) -> None:
        """Note that the kernel moved its name of an inode, and does not look it up again."""
        for node in self.of(ino):
            if old in (node.name, *node.former):
                node.be_found(new)

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
