"""Opens that must come again, to another node than the one they came to first.

The kernel decides by name which node an open goes to, and does not know which content we would give
it. An open that came to the wrong node is answered ESTALE. The kernel then looks the name up once
more, and the lookup leads it to the node that is ready for it. A file that is opened without a name
(/proc/self/fd, a file that is bind-mounted) comes back without a lookup in between; by fanotify, never.

The second try is the last one. If the name has come to mean another file by then, the promise moves to
that file when the thread looks it up.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from .content import Content
from .nodes import Node

# The kernel comes back at once, unless this daemon or the thread is kept from its processor; an older
# promise belongs to an open that died.
_MAX_AGE_S = 10.0
_MAX_PROMISES = 65536
# The kernel looks a name up again each time another thread was led to another node meanwhile.
_MAX_MOVES = 16

Key = tuple[int, int]  # thread, inode


@dataclass(slots=True, eq=False)
class Promise:
    """An open of one thread with `flags`, which came to one node and will find its content on another when
    it comes again. `cut`: the content is to be emptied for it. `moves`: how often the promise was renewed
    because the name had come to mean another file."""

    key: Key
    came_to: Node
    node: Node
    content: Content
    flags: int
    cut: bool
    moves: int
    looked_up: bool = False
    since: float = field(default_factory=time.monotonic)

    @property
    def may_move(self) -> bool:
        """Return whether the promise may move to another file that the name leads to by now. An open with
        O_RDONLY | O_TRUNC may not: it emptied its file when it was refused."""
        empties = self.flags & (os.O_TRUNC | os.O_ACCMODE) == os.O_TRUNC | os.O_RDONLY
        young = time.monotonic() - self.since < _MAX_AGE_S
        return young and self.moves < _MAX_MOVES and not empties

    @property
    def joins(self) -> bool:
        """Return whether the open is to write a content that others may write, too."""
        writes = self.flags & os.O_ACCMODE != os.O_RDONLY
        return writes and (self.cut or not self.flags & os.O_TRUNC)

    def is_kept_by(self, node: Node, flags: int) -> bool:
        """Return whether an open by the thread is the promised one."""
        return self.node is node and not (self.flags ^ flags) & (os.O_TRUNC | os.O_ACCMODE)

    def is_nameless(self, node: Node) -> bool:
        """Return whether the open came to the same node again without a lookup in between."""
        return self.came_to is node and not self.looked_up


class Redirects:
    """The promises not kept yet; at most one for each thread.

    Threads whose number cannot be seen (0, another pid namespace) have one for each inode.
    """

    def __init__(self) -> None:
        # By slot. Lookups and opens check whether it is empty without a call.
        self.promises: dict[Key, Promise] = {}
        # How many threads are on their way to a node of each inode.
        self.inodes: dict[int, int] = {}

    def promised(self, key: Key) -> Promise | None:
        promise = self.promises.get(_slot(key))
        return promise if promise is not None and promise.key == key else None

    def of_thread(self, thread: int) -> Promise | None:
        """Return the promise to a thread, for any inode; None if its number cannot be seen."""
        return self.promises.get((thread, 0)) if thread else None

    def add(self, promise: Promise) -> None:
        """Add a promise; the thread must have no other one."""
        self.promises[_slot(promise.key)] = promise
        ino = promise.key[1]
        self.inodes[ino] = self.inodes.get(ino, 0) + 1

    def take(self, key: Key) -> Promise | None:
        """Remove and return the promise to a thread, maybe for another inode."""
        promise = self.promises.pop(_slot(key), None)
        if promise is not None:
            ino = promise.key[1]
            left = self.inodes[ino] - 1
            if left:
                self.inodes[ino] = left
            else:
                del self.inodes[ino]
        return promise

    def stale(self) -> Iterator[Key]:
        """Keys of promises whose open has not come for long, oldest first."""
        too_many = len(self.promises) - _MAX_PROMISES
        now = time.monotonic()
        for number, promise in enumerate(list(self.promises.values())):
            if number >= too_many and now - promise.since < _MAX_AGE_S:
                return
            yield promise.key


def _slot(key: Key) -> Key:
    thread, ino = key
    return (thread, 0) if thread else (0, ino)
