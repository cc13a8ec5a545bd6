"""For how long this host's knowledge of the namespace may be believed, and what must be asked first.

`Coherence` has the rules of one host, where nothing changes but through this mount; `Shared` (shared.py) is
the coherence of a cluster, whose other hosts change the namespace, too.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Final, Protocol

from ..backend.namespace import Inode, Namespace
from .cache import Cache
from .kernel_cache import Name
from .kernel_directories import KernelLocks
from .nodes import Node

_FOREVER_S: Final = 86_400.0


class Answer(Protocol):
    """An answer to the kernel, with how many seconds it may keep the name and the attributes; both are 0 in
    a new answer."""

    entry_timeout: float
    attr_timeout: float


class Coherence:
    """The rules of when operations, and the kernel, may believe the namespace. On one host the kernel may
    believe everything except changes that it does not notice: of a content that several nodes show or
    programs map, and of the node of a file that is being replaced.

    `kernel_locks` is told of changes of names that are being carried out; it is None where others need not
    know of a change before it is answered. `pid` is the number of the calling thread.
    """

    kernel_locks: KernelLocks | None = None

    def __init__(self, namespace: Namespace, cache: Cache) -> None:
        self.namespace = namespace
        self._cache = cache
        self._nodes = cache.nodes
        self._promises = cache.routes.promises

    @property
    def has_private_views(self) -> bool:
        """Return whether opens in private views of directories differ from others (see find_privately)."""
        return False

    # -- for how long the kernel may believe an answer ---------------------------------------------

    def attributes(self, answer: Answer, node: Node, inode: Inode) -> None:
        """Set how long attributes hold that the kernel asked for."""
        if inode.is_dir or not self._cache.host.changes_unnoticed(node):
            answer.attr_timeout = _FOREVER_S

    def changed(self, answer: Answer, node: Node) -> None:
        """Set how long attributes hold in the answer to a change of them. The kernel takes them for the
        newest."""
        if not self._cache.host.changes_unnoticed(node):
            answer.attr_timeout = _FOREVER_S

    def entry(self, answer: Answer, parent: int, name: bytes, node: Node, inode: Inode) -> None:
        """Set how long a name holds that was looked up, and the attributes of the node that it leads to."""
        if self._cache.routes.names_are_stable(inode.ino):
            answer.entry_timeout = _FOREVER_S
        if not self._cache.host.changes_unnoticed(node):
            answer.attr_timeout = _FOREVER_S

    def made(
        self, answer: Answer, parent: int, name: bytes, node: Node, inode: Inode, pid: int
    ) -> None:
        """Set how long a name holds that a thread has just made, and the attributes of its node. The kernel
        takes these for the newest."""
        if node.lookups > 1:  # it had the inode before, as one that gets a further name
            self.entry(answer, parent, name, node, inode)
            return
        answer.entry_timeout = _FOREVER_S
        if node.content is None or not node.content.mapped:
            answer.attr_timeout = _FOREVER_S

    def missing_s(self, parent: Inode, name: bytes, pid: int) -> float | None:
        """Return for how many seconds the kernel may believe that a directory does not have a name, which
        `find` has not found; None: use `find_fresh`."""
        # A process that waits for a name looks it up before the kernel has noted the answered change.
        watches = self.namespace.watches
        return 0.0 if watches.in_use and watches.covers(parent.ino) else _FOREVER_S

    def listing_s(self, directory: int) -> float:
        """Return for how many seconds names hold that are listed with attributes from now on."""
        return _FOREVER_S

    def knows(self, name: Name, node: Node, until: float) -> bool:
        """Return whether the kernel knows a name and the attributes of its node until then
        (time.monotonic())."""
        return False

    def listed(self, answer: Answer, name: Name, node: Node, inode: Inode, valid_s: float) -> None:
        """Set how long a listed name holds, and the attributes of the node that it leads to."""
        if not self._cache.host.changes_unnoticed(node):
            answer.attr_timeout = valid_s
        if self._may_be_believed(name, inode):
            answer.entry_timeout = valid_s

    def _may_be_believed(self, name: Name, inode: Inode) -> bool:
        """Return whether the name leads to the inode now: names are listed as they were when the listing
        began."""
        if not self._cache.routes.names_are_stable(inode.ino):
            return False
        return (inode.parent, inode.name) == name or self.namespace.leads_to(*name, inode.ino)

    # -- what lookups and opens come to ------------------------------------------------------------

    def find(self, parent: int, name: bytes, pid: int) -> Inode | None:
        """Return the inode that a name leads to as far as is known here, or to which the thread's open is
        led by it. Raises OSError."""
        inode = self.namespace.lookup(parent, name)
        if self._promises and inode is not None:
            self._cache.routes.follow(pid, (parent, name), inode)
        return inode

    async def find_fresh(self, parent: Inode, name: bytes, pid: int) -> Inode | None:
        """Return the inode that a name leads to now. Raises OSError."""
        return self.namespace.lookup(parent.ino, name)

    def find_privately(self, parent: int, name: bytes, pid: int, uid: int) -> Inode | None:
        """Return the file that a name leads to as far as is known here, which the thread opens as it is
        known, too, and of whose pages it keeps no references, if its user is believed (see references).
        Raises OSError."""
        return None

    async def freshen(self, inode: Inode, *, content: bool = False) -> bool:
        """Have what is known here of the inode be fresh, and return whether it was without asking.
        `content`: that of a small file is wanted, too. Raises OSError."""
        return True

    async def settle(self, node_id: int, flags: int, pid: int) -> tuple[Node, Inode, Name | None]:
        """Return the node and inode that an open of a file gets, and its name, if one is known. The newest
        content is on this host then, and counted as opened. Raises OSError; ESTALE: the kernel has to look
        the name up again."""
        node, inode = self._nodes.get(node_id)
        return node, inode, node.name

    async def settle_names(self, node_id: int, pid: int, *, by_name: bool) -> tuple[Node, Inode]:
        """Return the node and inode that the names a thread looked up lead to. `by_name`: no other way
        counts. Raises OSError; ESTALE: the kernel has to look them up again."""
        return self._nodes.get(node_id)

    async def bring(
        self, inode: Inode, *, content: bool, opens: bool = False, cuts: bool = False
    ) -> Inode:
        """Return the inode when this host's programs see nothing older than its version. `content`: its
        bytes are on this host, too. `opens`: count an open of them. `cuts`: as for InPlace.refresh. Raises
        OSError."""
        return inode

    # -- changes by programs of this host ----------------------------------------------------------

    def changing(self, pid: int, *names: Name) -> AbstractContextManager[None]:
        """Return a context manager for a change of these names by a thread."""
        return nullcontext()

    def known_directories(self, *names: Name) -> dict[Name, int]:
        """Return the inodes of directories that the kernel may have under these names, which are about to
        lead elsewhere or nowhere: then it takes them for removed. On one host it notes each change."""
        return {}

    def renamed(self, ino: int, old: Name, new: Name) -> None:
        """Note that the kernel moved its name of an inode, and does not look it up again."""
        self._nodes.renamed(ino, old, new)

    def count(self) -> dict[str, int]:
        """Return figures for `irdmafs status`: how often the kernel was made to forget."""
        return {"epochs": 0, "inodes_told": 0}
