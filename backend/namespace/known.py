"""Names that a tree knows, and those that it has not read.

The tree of a mount may have the names that the mount uses, and no others (see reading): those in each
directory into which somebody has looked. All directories above a known inode are known.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TypeVar

from ...inline import detach
from ..kv import Event
from ..kv.map import Map
from ..model.records import NEXT_INO_KEY, NEXT_INO_OF
from .inode import ROOT_INO, Inode, Unread, led_to, upwards

T = TypeVar("T")

# Each time something is read that was not known; more depends on it than a call can mean.
_TRIES = 100


class Known:
    """The knowledge of a tree with these records and inodes: `everything`, or the names in all directories
    but the `unread` ones. Of those only names are known that lead to known inodes. An inode is `placed` if
    its directory is known and its name is not.

    All is to be known below directories that are `whole`; `behind` are unread ones there. The next events
    tell of the `needed` inodes, which were not known before. Earlier events told of `passed` inodes, which
    are still not known, since somebody emptied that; it has their records."""

    def __init__(self, records: Map, inodes: Mapping[int, Inode]) -> None:
        self._records = records
        self._inodes = inodes
        self.everything = True
        self.unread: set[int] = set()
        self.placed: set[int] = set()
        self.whole: set[int] = set()
        self.behind: set[int] = set()
        self.needed: Collection[int] = ()
        self.passed: dict[int, bytes | None] = {}

    def require(self, directory: int) -> None:
        """Raise Unread unless the names in a directory are known."""
        if directory in self.unread:
            raise Unread(directory)

    def all_below(self, directory: int) -> bool:
        """Return whether every name below a directory is known."""
        return self.everything or (directory in self.whole and not self.behind)

    def require_all_below(self, directory: int) -> None:
        """Raise Unread unless every name below a directory is known."""
        if not self.all_below(directory):
            raise Unread(directory, below=True)

    def learn_all(self) -> None:
        """Note that everything is known."""
        self.everything = True
        for some in (self.unread, self.placed, self.whole, self.behind):
            some.clear()

    def found(self, directory: int) -> None:
        """Note that there is a directory, in which there may be names."""
        if not (self.everything or directory == ROOT_INO):
            self.unread.add(directory)

    def linked(self, ino: int, parent: int) -> None:
        """Note that a name is known that an inode has in a directory."""
        self.placed.discard(ino)
        if self.whole and ino in self.unread:
            passed = set[int]()
            for above in upwards(self._inodes, parent):
                if above.ino in self.whole:
                    self.behind.add(ino)
                if above.ino in passed:  # a name that leads there is about to be refused
                    break
                passed.add(above.ino)

    def forget(self, ino: int) -> None:
        """Note that an inode is gone."""
        for some in (self.unread, self.placed, self.whole, self.behind):
            some.discard(ino)

    def concerning(self, events: Sequence[Event]) -> Sequence[Event]:
        """Return the events of a transaction that are about what is known. Names come before inodes."""
        if self.everything:
            return events
        inodes, unread, needed = self._inodes, self.unread, self.needed
        found, named = list[Event](), {ROOT_INO, *needed}
        for event in events:
            _, key, value = event
            if key[:1] != b"d":
                continue
            parent = int.from_bytes(key[1:9], "big")
            target = led_to(value)
            if (
                (parent in inodes and parent not in unread)
                or parent in needed
                or target in named
                or (target and target in inodes)
                or self._records.get(key) is not None
            ):
                if target:
                    named.add(target)
                found.append(event)
            else:
                self.passed[parent] = None
        for event in events:
            kind, ino = event.key[:1], int.from_bytes(event.key[1:9], "big")
            if kind in (NEXT_INO_KEY, NEXT_INO_OF) or (
                kind != b"d" and (ino in named or ino in inodes)
            ):
                found.append(event)
            elif kind == b"i":
                self.passed[ino] = event.value
        return found


async def answered(
    ask: Callable[[], Awaitable[T]], learn: Callable[[Unread], Awaitable[None]]
) -> T:
    """Ask again and again, until all names are known that the answer depends on. Raises OSError."""
    for _ in range(_TRIES):
        try:
            return await ask()
        except Unread as unread:
            await detach()
            await learn(unread)
    return await ask()
