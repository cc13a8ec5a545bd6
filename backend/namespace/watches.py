"""Directories that somebody watches: each has a counter of the changes anywhere below it.

A change is a name that was made, removed or renamed, and a version that was published. The tree tells of it
after it was applied, so whoever is woken sees it. A directory is counted from the first question about its
counter until nobody has asked for a while. A counter never goes back to a value that it had, also if the
directory was forgotten meanwhile, or the daemon started anew: it begins at the time in nanoseconds.
"""

import errno
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import trio

from ..model.clock import now_ns
from .inode import Inode, fail

_FORGOTTEN_AFTER_S = 60.0
_SWEEP_EVERY_S = 10.0
# More than one user's programs may wait for.
_WATCHED_MAX = 32768


class _Watch:
    """One directory. `asked_at` is time.monotonic()."""

    __slots__ = ("asked_at", "count", "waiters")

    def __init__(self, count: int) -> None:
        self.count = count
        self.asked_at = 0.0
        self.waiters = trio.lowlevel.ParkingLot()


class Watches:
    """The counters of a tree with these inodes; `parents_of` returns the directories that hold one;
    require(directory) raises Unread unless all that is below is known."""

    def __init__(
        self,
        inodes: Mapping[int, Inode],
        parents_of: Callable[[int], Sequence[int]],
        require: Callable[[int], None],
    ) -> None:
        self._inodes = inodes
        self._parents_of = parents_of
        self._require = require
        self._watched: dict[int, _Watch] = {}
        self.in_use = False
        self.waiting = 0  # calls of `wait`
        # The newest counter: each change has one, and each directory that begins to be watched.
        self.newest = 0
        self._sweep_at = 0.0

    def count(self, directory: int) -> int:
        """Return the counter of a directory, which is watched from now on. Raises OSError EAGAIN if too
        many are waited for."""
        return self._watch(directory).count

    def covers(self, directory: int) -> bool:
        """Return whether a directory, or one above it, is watched."""
        return any(ino in self._watched for ino in self._from(directory))

    async def wait(self, directory: int, count: int) -> None:
        """Return when the counter of a directory is not `count`. Raises OSError EAGAIN as `count` does."""
        watch = self._watch(directory)
        self.waiting += 1
        try:
            while watch.count == count:
                await watch.waiters.park()
        finally:
            self.waiting -= 1
            watch.asked_at = time.monotonic()

    def changed(
        self, led: Iterable[tuple[int, bytes, int, int]], before: Mapping[int, Inode | None]
    ) -> None:
        """Count a change in every watched directory above what it touched, and in that itself: the
        directories in which names lead elsewhere, the inodes of these names before and after (as in Tree),
        and, by the inodes as they were `before`, files that got another version."""
        touched = [ino for parent, _, *inos in led for ino in (parent, *inos)]
        for ino, old in before.items():
            new = self._inodes.get(ino)
            if old and new and (old.version, old.maker) != (new.version, new.maker):
                touched.append(ino)
        for ino in self._from(*touched):
            watch = self._watched.get(ino)
            if watch is not None:
                watch.count = self._next_count()
                if watch.waiters:
                    watch.waiters.unpark_all()
        now = time.monotonic()
        if now >= self._sweep_at:
            self._sweep(now)

    def _from(self, *inos: int) -> Iterator[int]:
        """Return these inodes and all directories above them, each once."""
        seen: set[int] = set()
        above = [*inos]
        while above:
            ino = above.pop()
            if ino not in seen:
                seen.add(ino)
                yield ino
                above += self._parents_of(ino)

    def _watch(self, directory: int) -> _Watch:
        self._require(directory)
        watch = self._watched.get(directory)
        if watch is None:
            if len(self._watched) >= _WATCHED_MAX:
                self._forget_some()
            watch = self._watched[directory] = _Watch(self._next_count(now_ns()))
            self.in_use = True
        watch.asked_at = time.monotonic()
        return watch

    def _next_count(self, least: int = 0) -> int:
        self.newest = max(self.newest, least) + 1
        return self.newest

    def _forget_some(self) -> None:
        """Forget half of the directories that nobody waits for."""
        idle = [ino for ino, watch in self._watched.items() if not watch.waiters]
        if not idle:
            raise fail(errno.EAGAIN, "too many directories are waited for")
        idle.sort(key=lambda ino: self._watched[ino].asked_at)
        for ino in idle[: (len(idle) + 1) // 2]:
            del self._watched[ino]

    def _sweep(self, now: float) -> None:
        self._sweep_at = now + _SWEEP_EVERY_S
        self._watched = {
            ino: watch
            for ino, watch in self._watched.items()
            if watch.waiters or now - watch.asked_at < _FORGOTTEN_AFTER_S
        }
        self.in_use = bool(self._watched)
