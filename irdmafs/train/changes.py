"""Waiting for changes below directories."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["GATHER_S", "AnyChange", "Changes"]

_CHANGES = "user.irdmafs.changes"
# Without irdmafs below there is nothing to wait for: look again.
_POLL_S = 0.005
# Changes often come together: they are looked at so much later.
GATHER_S = 0.004
# A thread that nobody waits for any more ends its wait after so long.
_WATCH_S = 1.0


class Changes:
    """Waits for a change of anything below a directory. No change is missed that is made after this object:
    make it before looking."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self.path = path
        # None: there is no counter.
        self.counter: str | None = None
        try:
            self.counter = os.getxattr(path, _CHANGES).decode()
        except OSError as error:
            if error.errno not in (errno.ENODATA, errno.EOPNOTSUPP):
                raise

    def wait(self, timeout_s: float) -> None:
        """Return when something has changed since, or after a while. Raises InterruptedError and
        OSError."""
        if self.counter is None:
            time.sleep(min(_POLL_S, timeout_s))
        else:
            os.getxattr(self.path, f"{_CHANGES}.{self.counter}.{max(0.0, timeout_s):.3f}")


class AnyChange:
    """Waits for a change below any of some directories, by a thread for each of them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # The directories whose threads wait.
        self._watched: set[Path] = set()
        self._queues: dict[Path, queue.SimpleQueue[Changes | None]] = {}

    def wait(self, begun: Sequence[Changes], timeout_s: float) -> bool:
        """Return True when something may have changed since, or False after a while."""
        with self._changed:
            for changes in begun:
                # A thread that still waits for an older change ends at once if there was one since.
                if changes.path not in self._watched:
                    self._watched.add(changes.path)
                    self._queue(changes.path).put(changes)
            return self._changed.wait(timeout_s)

    def _queue(self, path: Path) -> queue.SimpleQueue[Changes | None]:
        if path not in self._queues:
            self._queues[path] = queue.SimpleQueue()
            threading.Thread(target=self._watch, args=(path,), name="changes", daemon=True).start()
        return self._queues[path]

    def _watch(self, path: Path) -> None:
        while (changes := self._queues[path].get()) is not None:
            # An error is met by who looks, too.
            with contextlib.suppress(OSError):
                changes.wait(_WATCH_S)
            with self._changed:
                self._watched.discard(path)
                self._changed.notify_all()

    def close(self) -> None:
        for each in self._queues.values():
            each.put(None)
