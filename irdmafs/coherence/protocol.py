"""For how long this host's knowledge of the namespace may be believed, and what must be asked first.

There are two implementations: `Alone`, where nothing changes without us, and `Shared` with other hosts.
"""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Protocol

from ..backend.namespace import Inode
from .freshness import TrailStep
from .kernel_cache import Name
from .kernel_locks import KernelLocks
from .nodes import Node

__all__ = ["Answer", "Coherence", "Listing"]


class Answer(Protocol):
    """An answer to the kernel, with how many seconds it may keep the name and the attributes; both are 0 in
    a new answer."""

    entry_timeout: float
    attr_timeout: float


class Listing(ABC):
    """A directory that is being listed with attributes, in one answer."""

    @abstractmethod
    def is_known(self, name: bytes, node: Node) -> bool:
        """Return whether the kernel knows the name and the attributes of its node, and will for a while."""

    @abstractmethod
    def entry(self, answer: Answer, name: bytes, node: Node, inode: Inode) -> None:
        """Set how long a listed name holds, and the attributes of the node that it leads to."""


class Coherence(ABC):
    """The rules of when operations, and the kernel, may believe the namespace.

    `listings_stay`: the kernel may keep listings. `kernel_locks` is told of changes of names that are being
    carried out; it is None where others need not know of a change before it is answered. `pid` is the
    number of the calling thread.
    """

    listings_stay: bool
    kernel_locks: KernelLocks | None

    @property
    @abstractmethod
    def has_private_views(self) -> bool:
        """Return whether opens in private views of directories differ from others (see find_privately)."""

    # -- for how long the kernel may believe an answer ---------------------------------------------

    @abstractmethod
    def attributes(self, answer: Answer, node: Node, inode: Inode) -> None:
        """Set how long attributes hold that the kernel asked for."""

    @abstractmethod
    def changed(self, answer: Answer, node: Node) -> None:
        """Set how long attributes hold in the answer to a change of them. The kernel takes them for the
        newest."""

    @abstractmethod
    def entry(self, answer: Answer, parent: int, name: bytes, node: Node, inode: Inode) -> None:
        """Set how long a name holds that was looked up, and the attributes of the node that it leads to."""

    @abstractmethod
    def made(self, answer: Answer, parent: int, name: bytes, node: Node, inode: Inode) -> None:
        """Set how long a name holds that the caller has just made, and the attributes of its node. The
        kernel takes these for the newest."""

    @abstractmethod
    def missing_s(self, parent: Inode) -> float | None:
        """Return for how many seconds the kernel may believe that a directory does not have a name; None:
        use `find_fresh`."""

    @abstractmethod
    def listing(self, directory: int) -> Listing:
        """Begin an answer that lists a directory."""

    # -- what lookups and opens come to ------------------------------------------------------------

    @abstractmethod
    def find(self, parent: int, name: bytes, pid: int) -> Inode | None:
        """Return the inode that a name leads to as far as is known here. Raises OSError."""

    @abstractmethod
    async def find_fresh(self, parent: Inode, name: bytes, pid: int) -> Inode | None:
        """Return the inode that a name leads to now. Raises OSError."""

    @abstractmethod
    def find_privately(self, parent: int, name: bytes, pid: int, uid: int) -> Inode | None:
        """Return the file that a name leads to as far as is known here, which the thread opens as it is
        known, too, and of whose pages it keeps no references, if its user is believed (see references).
        Raises OSError."""

    @abstractmethod
    async def freshen(self, inode: Inode) -> None:
        """Return when what is known here of the inode is fresh. Raises OSError."""

    @abstractmethod
    def arrived(self, node_id: int) -> tuple[Node, Inode] | None:
        """Return the node and inode that an open of this node gets; None: ask `settle` or `settle_names`.
        Raises OSError ESTALE."""

    @abstractmethod
    async def settle(
        self, node_id: int, flags: int, pid: int
    ) -> tuple[Node, Inode, TrailStep | None]:
        """Return the node and inode that an open of a file gets, and its name, if one is known. The newest
        content is on this host then, and counted as opened. Raises OSError; ESTALE: the kernel has to look
        the name up again."""

    @abstractmethod
    async def settle_names(self, node_id: int, pid: int, *, by_name: bool) -> tuple[Node, Inode]:
        """Return the node and inode that the names a thread looked up lead to. `by_name`: no other way
        counts. Raises OSError; ESTALE: the kernel has to look them up again."""

    @abstractmethod
    def come_again(self, pid: int, name: TrailStep, ino: int) -> None:
        """Make the thread find this inode by the name again, after its open was refused with ESTALE."""

    @abstractmethod
    async def bring(self, inode: Inode, *, content: bool, opens: bool = False) -> Inode:
        """Return the inode when this host's programs see nothing older than its version. `content`: its
        bytes are on this host, too. `opens`: count an open of them. Raises OSError."""

    # -- changes by programs of this host ----------------------------------------------------------

    @abstractmethod
    def changing(self, pid: int, *names: Name) -> AbstractContextManager[None]:
        """Return a context manager for a change of these names by a thread."""

    @abstractmethod
    def known_directories(self, *names: Name) -> dict[Name, int]:
        """Return the inodes of directories that the kernel may have under these names, which are about to
        lead elsewhere or nowhere: then it takes them for removed."""

    @abstractmethod
    def renamed(self, ino: int, old: Name, new: Name) -> None:
        """Note that the kernel moved its name of an inode, and does not look it up again."""

    @abstractmethod
    def count(self) -> dict[str, int]:
        """Return figures for `irdmafs status`: how often the kernel was made to forget."""
