"""What lookups told a thread without asking anybody, to be checked when it opens the file.

In a cluster a name that is found in the replica is answered at once: a path of five names would take
five round trips otherwise. The open that follows asks once, and then every name that led to it must
still mean the same.
"""

from collections import OrderedDict
from typing import NamedTuple

from .backend.namespace import Inode, Namespace

_THREADS_MAX = 4096
_NAMES_MAX = 64


class _Glance(NamedTuple):
    parent: int
    name: bytes
    ino: int


class Glances:
    """Per thread: the names it looked up since its last open."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self._of: OrderedDict[int, list[_Glance]] = OrderedDict()
        self._refused: set[int] = set()

    def note(self, pid: int, parent: int, name: bytes, ino: int) -> None:
        names = self._of.get(pid)
        if names is None:
            names = self._of[pid] = []
            if len(self._of) > _THREADS_MAX:
                self._refused.discard(self._of.popitem(last=False)[0])
        elif len(names) == _NAMES_MAX:  # a thread that only looks: its oldest names led elsewhere
            del names[: _NAMES_MAX // 2]
        names.append(_Glance(parent, name, ino))

    def clear(self, pid: int) -> None:
        self._of.pop(pid, None)
        self._refused.discard(pid)

    def still_hold(self, pid: int, ino: int) -> bool:
        """Whether the names that led this thread to the inode lead there in a replica that is fresh.

        Says no only once in a row: the lookups that the kernel then repeats are fresh.
        """
        names = self._of.pop(pid, [])
        if pid in self._refused:
            self._refused.remove(pid)
            return True
        for glance in reversed(names):
            if glance.ino != ino:
                continue  # it looked at this on the way to something else
            found = self._find(glance)
            if found is None or found.ino != ino:
                self._of[pid] = names
                self._refused.add(pid)
                return False
            ino = glance.parent
        return True

    def instead(self, pid: int) -> Inode | None:
        """After a no: what the name that was looked up last leads to now."""
        names = self._of.pop(pid, [])
        return self._find(names[-1]) if names else None

    def _find(self, glance: _Glance) -> Inode | None:
        try:
            return self._namespace.lookup(glance.parent, glance.name)
        except OSError:  # the directory is gone
            return None
