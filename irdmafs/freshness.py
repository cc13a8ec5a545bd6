"""What lookups told a thread without asking anybody, to be checked when it opens the file.

In a cluster a name that is found in the replica is answered at once: a path of five names would take
five round trips otherwise. The open that follows asks once, and then every name that led to it must
still mean the same.
"""

from collections import OrderedDict

from .backend.namespace import Namespace

_THREADS_MAX = 4096
_NAMES_MAX = 64


class Glances:
    """Per thread: the names it looked up since its last open."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self._of: OrderedDict[int, list[tuple[int, bytes, int]]] = OrderedDict()
        self._refused: set[int] = set()

    def note(self, pid: int, parent: int, name: bytes, ino: int) -> None:
        names = self._of.get(pid)
        if names is None:
            names = self._of[pid] = []
            if len(self._of) > _THREADS_MAX:
                self._of.popitem(last=False)
        elif len(names) == _NAMES_MAX:  # a thread that only looks: its oldest names led elsewhere
            del names[: _NAMES_MAX // 2]
        names.append((parent, name, ino))

    def clear(self, pid: int) -> None:
        self._of.pop(pid, None)

    def still_hold(self, pid: int) -> bool:
        """Whether all that the thread looked up means the same in a replica that is fresh now.

        Says no only once in a row: the lookups that the kernel then repeats are fresh.
        """
        names = self._of.pop(pid, ())
        if pid in self._refused:
            self._refused.remove(pid)
            return True
        if all(self._leads_to(parent, name) == ino for parent, name, ino in names):
            return True
        self._refused.add(pid)
        return False

    def _leads_to(self, parent: int, name: bytes) -> int:
        try:
            inode = self._namespace.lookup(parent, name)
        except OSError:  # the directory is gone
            return 0
        return inode.ino if inode is not None else 0
