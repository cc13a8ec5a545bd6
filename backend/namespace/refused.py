"""Names whose records make no sense as yet, and may some day: they lead nowhere meanwhile.

A directory has one name, which lies in a directory that there is. A name that would be a second one, or
whose directory is missing, waits here for that directory: to lose the name that it has, or to be made. So a
host that follows all changes knows the names that one which reads everything later finds.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from .inode import Inode


class RefusedName(NamedTuple):
    """A name in the directory `parent` that is to lead to the inode `ino`."""

    parent: int
    name: bytes
    ino: int
    revision: int


class Refused:
    """The names that wait, by the directory that they wait for."""

    def __init__(self) -> None:
        self.waiting: dict[int, list[RefusedName]] = {}
        self._freed: list[int] = []

    def add(self, until: int, name: RefusedName) -> None:
        """Have a name wait for the directory `until`."""
        self.waiting.setdefault(until, []).append(name)

    def forget(self, names: Iterable[tuple[int, bytes]]) -> None:
        """Forget names whose records have changed."""
        changed = set(names)
        for until, waiting in list(self.waiting.items()):
            left = [one for one in waiting if one[:2] not in changed]
            if left:
                self.waiting[until] = left
            else:
                del self.waiting[until]

    def free(self, ino: int) -> None:
        """Note that a directory was made, or lost its name."""
        if ino in self.waiting:
            self._freed.append(ino)

    def freed(self, inodes: Mapping[int, Inode]) -> Iterator[RefusedName]:
        """Yield the names that wait no more, of the directories that were freed since the last call. One
        that was renamed has a name all the same: those that would be a second one wait on."""
        freed, self._freed = self._freed, []
        for directory in freed:
            for name in self.waiting.pop(directory, ()):
                found = inodes.get(directory)
                if name.ino == directory and (found is None or found.name):
                    self.add(directory, name)
                else:
                    yield name
