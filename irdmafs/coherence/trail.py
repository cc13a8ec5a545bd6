"""The names that a thread looked up, to be checked when it opens the file.

A cluster's replica answers lookups at once: a path of five names would take five round trips otherwise. The
open that follows asks etcd once, and then every name that led to it must still lead to the same inode. If
one does not, the open is answered ESTALE: the kernel looks the path up again, and tries a second time, the
last one. That must not be refused, although the name may lead to yet another file by then: the thread is
promised a file that had the name after its open began (routes.py), or else what the lookups of its second
try find (`Retry`).

An open without a lookup comes by a name that the kernel believed. That is right under a directory lease;
otherwise the kernel has to look again.
"""

import stat
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..backend.namespace import Inode, Namespace
from .kernel_cache import Name

_THREADS_MAX = 4096
_NAMES_MAX = 64
_RETRY_LOOKUPS = 4
_LOOKUPS_OF_ANY = 20


class TrailStep(NamedTuple):
    """A directory, a name in it, and the inode that was found; `link`: a symbolic one; `private`: in the
    private view of the directory."""

    parent: int
    name: bytes
    ino: int
    link: bool = False
    private: bool = False


class Way(NamedTuple):
    """The way of a thread to what it opens: the names that it looked up. `refused`: if its open before this
    one was refused, the last name of that, and links on the way; none if it came by no name."""

    names: Sequence[TrailStep]
    refused: set[bytes] | None


@dataclass(slots=True, eq=False)
class Retry:
    """The second try of a refused open with `flags`. `names`: its name, and links on the way; none, for
    any, if it looked up none, or once it found a link. `left`: lookups of them: the kernel asks for the
    entry that it has, and for those that replaced it. After that, or an open, this is over."""

    names: Collection[Name]
    flags: int
    left: int


class LookupTrails:
    """Per thread: the names it looked up since its last open."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self._ino_behind = namespace.tree.ino_behind
        self._of: OrderedDict[int, list[TrailStep]] = OrderedDict()
        # By thread: the last name of a refused open, and links on the way; none if it came by no name.
        self._refused: dict[int, set[bytes]] = {}
        self.retries: dict[int, Retry] = {}

    def note(
        self, pid: int, parent: int, name: bytes, inode: Inode, *, private: bool = False
    ) -> int:
        """Note what a thread found. Return the inode at which its lookups before this one ended, if it did
        not open that; 0: this one goes on from there."""
        names = self._of.setdefault(pid, [])
        if len(self._of) > _THREADS_MAX:
            self.forget(next(iter(self._of)))
        # Threads whose number cannot be seen are taken for one.
        ended = names[-1].ino if pid and names and names[-1].ino != parent else 0
        if len(names) == _NAMES_MAX:  # a thread that only looks: its oldest names led elsewhere
            del names[: _NAMES_MAX // 2]
        is_link = inode.mode & 0o170000 == stat.S_IFLNK
        names.append(TrailStep(parent, name, inode.ino, is_link, private))
        return ended

    def take(self, pid: int) -> Way:
        """Return, and forget, the way of a thread to what it opens."""
        self.retries.pop(pid, None)
        return Way(self._of.pop(pid, ()), self._refused.pop(pid, None))

    def forget(self, pid: int) -> None:
        """Forget a thread: its lookups were not for an open, or its open does not come again."""
        self.missed(pid)
        self.retries.pop(pid, None)

    def missed(self, pid: int) -> None:
        """Note that a thread found nothing: an open comes again if it makes files, with another lookup."""
        self._of.pop(pid, None)
        self._refused.pop(pid, None)
        if self.retries and (retry := self.retries.get(pid)) is not None:
            retry.left = min(retry.left, 1)

    def hold(self, pid: int, way: Way, ino: int, *, believed: bool) -> bool:
        """Return whether the names by which this thread came lead to the inode in a replica that is fresh.
        `believed`: the kernel may have come by names that it need not look up.

        Return False only once in a row: the lookups that the kernel then repeats are fresh, and a file that
        is opened again without any (/proc/self/fd) has no name.
        """
        names, refused = way
        if refused is not None and (not refused or refused & _leading(names)):
            return True
        for step in reversed(names):
            if step.ino != ino and not step.link:
                continue  # it looked at this on the way to something else
            if self._ino_behind(step.parent, step.name) != step.ino:
                found = self.find(step)  # "." and ".." are no names
                if found is None or found.ino != step.ino:
                    break
            if step.ino == ino:
                believed = True
                ino = step.parent
        else:
            if believed:
                return True
            names = ()
        self._refused[pid] = _leading(names)
        return False

    def find(self, step: TrailStep) -> Inode | None:
        """Return what the name leads to now."""
        try:
            return self._namespace.lookup(step.parent, step.name)
        except OSError:  # the directory is gone
            return None

    def expect(self, pid: int, names: Collection[Name], flags: int) -> None:
        """Note that the thread's open by one of these names was refused; none: by any."""
        if len(self.retries) >= _THREADS_MAX:
            self.retries.clear()
        if pid:  # those that cannot be seen are taken for one
            self.retries[pid] = Retry(names, flags, _RETRY_LOOKUPS if names else _LOOKUPS_OF_ANY)

    def retry(self, pid: int, name: Name) -> Retry | None:
        """Return the second try that a thread is at, by this name."""
        found = self.retries.get(pid)
        return found if found is not None and (not found.names or name in found.names) else None


def _leading(names: Sequence[TrailStep]) -> set[bytes]:
    """Return the last of these names, and those of links: another one may lead on instead of either."""
    return {step.name for step in names if step.link or step is names[-1]}
