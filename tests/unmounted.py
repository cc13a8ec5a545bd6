"""The events of a store that no mount uses."""

from irdmafs.backend.cluster.lock_claims import NOBODY
from irdmafs.backend.namespace import Inode
from irdmafs.backend.store.api import StoreEvents

__all__ = ["Unmounted"]


class Unmounted(StoreEvents):
    """Nothing is open, and nobody is told."""

    lock_holder = NOBODY

    def is_held(self, ino: int) -> bool:
        return False

    def inode_changed(self, old: Inode | None, new: Inode | None) -> None: ...

    def name_changed(self, parent: int, name: bytes, old_ino: int) -> None: ...

    def transaction(self, *, ours: bool) -> None: ...

    def version_published(self, ino: int) -> None: ...

    def content_gone(self, extent: int) -> None: ...

    def check_publishing(self, ino: int) -> None: ...
