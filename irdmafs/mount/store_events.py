"""The delivery of a store's events to the parts of its mount."""

from typing import NamedTuple

from ..backend.cluster.lock_claims import NOBODY, LockHolder
from ..backend.cluster.records import ContentId
from ..backend.namespace import Inode
from ..backend.store.api import StoreEvents
from ..coherence.beliefs import Beliefs
from ..coherence.cache import Cache
from ..coherence.kernel_cache import KernelCache
from ..posix.locking import Locking

__all__ = ["MountEvents", "Parts"]


class Parts(NamedTuple):
    """The parts of a mount that are told, or asked."""

    cache: Cache
    beliefs: Beliefs
    locking: Locking
    kernel: KernelCache


class MountEvents(StoreEvents):
    """The events of a mount's store. The store is there first: until `begin` is called nothing is open
    through the mount, and its kernel knows nothing that it could have to forget."""

    def __init__(self) -> None:
        self._parts: Parts | None = None

    def begin(self, parts: Parts) -> None:
        """Tell these parts from now on."""
        self._parts = parts

    @property
    def lock_holder(self) -> LockHolder:
        return self._parts.locking if self._parts is not None else NOBODY

    def is_held(self, ino: int) -> bool:
        return self._parts is not None and self._parts.cache.nodes.has_nodes(ino)

    def inode_changed(self, old: Inode | None, new: Inode | None) -> None:
        if self._parts is not None:
            self._parts.beliefs.inode_changed(old, new)

    def name_changed(self, parent: int, name: bytes, old_ino: int) -> None:
        if self._parts is not None:
            self._parts.beliefs.name_changed(parent, name, old_ino)

    def transaction(self, *, ours: bool) -> None:
        if self._parts is not None:
            self._parts.beliefs.transaction(ours=ours)

    def version_published(self, ino: int) -> None:
        if self._parts is not None:
            self._parts.kernel.version_published(ino)

    def content_gone(self, extent: ContentId) -> None:
        if self._parts is not None:
            self._parts.beliefs.content_gone(extent)

    def check_publishing(self, ino: int) -> None:
        if self._parts is not None:
            self._parts.locking.check_publishing(ino)
