"""What lookups told a thread without asking anybody, to be checked when it opens the file.

In a cluster a name that is found in the replica is answered at once: a path of five names would take
five round trips otherwise. The open that follows asks once, and then every name that led to it must
still mean the same. If one does not, the open is answered ESTALE, and the kernel looks the path up
once more and tries a second time, the last one. So what is found then must not be refused again,
although the name may mean yet another file by that time: the thread is *led* to a file that was behind
the name after its open began, which is as good.

An open that no lookup led to comes by a name that the kernel believed in: right under a directory
lease; else the kernel had better look again.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from ..backend.namespace import Inode, Namespace
from .kernel_cache import Name

__all__ = ["LookupTrails", "TrailStep"]

_THREADS_MAX = 4096
_NAMES_MAX = 64


class TrailStep(NamedTuple):
    """A directory, a name in it, and the inode that was found; `link`: a symbolic one."""

    parent: int
    name: bytes
    ino: int
    link: bool = False


class LookupTrails:
    """Per thread: the names it looked up since its last open."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self._of: OrderedDict[int, list[TrailStep]] = OrderedDict()
        # Whose open was refused: the last name of the path. Where it is to find what.
        self._refused: dict[int, bytes] = {}
        self._led: dict[int, tuple[int, Name]] = {}

    def note(self, pid: int, parent: int, name: bytes, inode: Inode) -> None:
        names = self._of.get(pid)
        if names is None:
            names = self._of[pid] = []
            if len(self._of) > _THREADS_MAX:
                self.forget(next(iter(self._of)))
        elif len(names) == _NAMES_MAX:  # a thread that only looks: its oldest names led elsewhere
            del names[: _NAMES_MAX // 2]
        names.append(TrailStep(parent, name, inode.ino, inode.is_symlink))

    def take(self, pid: int) -> Sequence[TrailStep]:
        """The thread opens a file: what it looked up before."""
        self._led.pop(pid, None)
        return self._of.pop(pid, ())

    def forget(self, pid: int) -> None:
        """The thread's open has ended in another way than by coming again."""
        self._of.pop(pid, None)
        self._led.pop(pid, None)
        self._refused.pop(pid, None)

    def hold(self, pid: int, names: Sequence[TrailStep], ino: int, *, believed: bool) -> bool:
        """Whether the names that led this thread to the inode lead there in a replica that is fresh.
        `believed`: the kernel may have come by names that it was not to ask for.

        Says no only once in a row: the lookups that the kernel then repeats are fresh, and what is
        opened again without any (/proc/self/fd) has no name.
        """
        last = names[-1].name if names else b""
        refused = self._refused.pop(pid, None)
        if refused is not None and refused in (last, b""):
            return True
        for step in reversed(names):
            if step.ino != ino and not step.link:
                continue  # it looked at this on the way to something else
            found = self.find(step)
            if found is None or found.ino != step.ino:
                break
            if step.ino == ino:
                believed = True
                ino = step.parent
        else:
            if believed:
                return True
            last = b""
        self._refused[pid] = last
        return False

    def find(self, step: TrailStep) -> Inode | None:
        """What the name leads to now."""
        try:
            return self._namespace.lookup(step.parent, step.name)
        except OSError:  # the directory is gone
            return None

    def lead(self, pid: int, name: Name, ino: int) -> None:
        """When the thread looks this name up once more, it is to find this inode."""
        if len(self._led) >= _THREADS_MAX:
            self._led.clear()
        self._led[pid] = ino, name

    def led(self, pid: int, name: Name) -> int:
        """The inode that the thread is to find here; 0: whatever there is. The kernel asks twice, once
        for what it has and once for what is there instead."""
        found = self._led.get(pid) if self._led else None
        return found[0] if found is not None and found[1] == name else 0
