"""The closes and fsyncs that are carried out later, in drafts (drafts.py)."""

import math

import trio

from ..backend.namespace import Inode
from ..backend.namespace.drafts import is_draft, is_in_named_draft
from ..backend.store.api import TOGETHER_MAX
from .content import Content, State
from .host import Host, OnHost
from .nodes import Handle

# So many files wait, and so many bytes: who closes more of them stores his own. Another host that looks
# waits for all of them, and takes a host that needs longer than two leases for dead.
_FILES_MAX = 2000
_BYTES_MAX = 128 << 20
# When there are many, by their number or bytes, a transaction of the oldest ones is stored. The newest may
# be just being closed.
_MANY = TOGETHER_MAX + 50
# Others are stored after so long; but those of a draft by its name, which it has until it is published.
_GATHER_S = 2.0


class PutOff(OnHost):
    """The closes that are carried out later: `handles` by inode, the oldest first. `released` has those of
    which no descriptor is open any more."""

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.handles: dict[int, Handle] = {}
        self.released: set[Handle] = set()
        self.any, self.many = trio.Event(), trio.Event()
        self._sizes: dict[int, int] = {}
        self._due_s: dict[int, float] = {}
        self._bytes, self._bytes_max = 0, min(_BYTES_MAX, self._store.may_wait_bytes)

    def takes(self, handle: Handle, content: Content, inode: Inode) -> bool:
        """Return whether a close or fsync is carried out later."""
        is_new = content.state is State.NEW and inode.maker
        waits = content.with_rename or (is_new and self._is_held(inode.parent))
        if not waits or content.writers > 1 or self.handles.get(inode.ino, handle) is not handle:
            return False
        size = self._table.stat(content).st_size
        total = self._bytes - self._sizes.get(inode.ino, 0) + size
        if len(self.handles) >= _FILES_MAX or total > self._bytes_max:
            return False
        self.handles[inode.ino], self._sizes[inode.ino], self._bytes = handle, size, total
        self._set_due(inode.ino, inode.parent, waits=content.with_rename)
        self.any.set()
        if self._are_many():
            self.many.set()
        return True

    def has_all(self, handle: Handle, content: Content) -> bool:
        """Return whether nothing was appended to a file since its close or fsync was put off."""
        if self.handles.get(content.ino) is not handle:
            return False
        return self._table.stat(content).st_size == self._sizes[content.ino]

    def stays(self, ino: int, directory: int) -> bool:
        """Return whether a file that gets a name in this directory is stored later all the same, as if it
        was closed there."""
        if not (ino in self.handles and self._is_held(directory)):
            return False
        self._set_due(ino, directory)
        return True

    def _set_due(self, ino: int, directory: int, *, waits: bool = False) -> None:
        due_s = trio.current_time() + _GATHER_S
        due_s = math.inf if waits or is_in_named_draft(self._inodes, directory) else due_s
        self._due_s[ino] = min(due_s, self._due_s.get(ino, math.inf))

    def due(self) -> list[Handle]:
        """Return the files to store now, those first that were closed first."""
        if self._are_many():
            return [*self.handles.values()][:TOGETHER_MAX]
        now_s, due_s, inodes = trio.current_time(), self._due_s, self._inodes
        due = {ino for ino in self.handles if due_s[ino] <= now_s or not inodes[ino].nlink}
        return [
            handle
            for ino, handle in (self.handles.items() if due else ())
            if ino in due or (due_s[ino] < math.inf and handle in self.released)
        ]

    def _is_held(self, directory: int) -> bool:
        """Return whether a directory is a draft in which no other host looks, and no quota counts."""
        return (
            self._store.holds_alone(directory)
            and is_draft(self._inodes, directory)
            and not self._store.namespace.quotas.above(directory)
        )

    def keeps(self, handle: Handle) -> bool:
        """Return whether the release of a handle is carried out later."""
        if self.handles.get(handle.node.ino) is not handle:
            return False
        self.released.add(handle)
        return True

    def end(self, handle: Handle) -> None:
        """Note that a file is stored, or lost."""
        del self.handles[handle.node.ino], self._due_s[handle.node.ino]
        self._bytes -= self._sizes.pop(handle.node.ino)
        if not self.handles:
            self.any = trio.Event()
        if not self._are_many():
            self.many = trio.Event()

    def _are_many(self) -> bool:
        return len(self.handles) >= _MANY or self._bytes > self._bytes_max // 2
