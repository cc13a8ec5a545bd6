"""Mounted irdmafs, seen from outside: requests, and the daemon's time and memory."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import mountpoint
from harness.network import Unavailable
from harness.parts import STATUS_XATTR


def read_status(path: Path) -> dict[str, Any]:
    """Return the status that a mount tells of itself. Raises OSError where it is none."""
    status: dict[str, Any] = json.loads(os.getxattr(path, STATUS_XATTR))
    return status


class Mount:
    """An irdmafs that is mounted on a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pid = int(read_status(path)["pid"])
        # Asking for the status is itself counted. What one question costs is subtracted.
        self._cost_of_asking: Counter[str] = Counter()
        for _ in range(3):
            before = self._counts()
            self._cost_of_asking = self._counts() - before
        self._asked: Counter[str] = Counter()

    def _counts(self) -> Counter[str]:
        return Counter(read_status(self.path)["requests"])

    def requests(self) -> Counter[str]:
        """Requests the daemon got so far, by kind, without those that this method causes.

        RELEASE and FORGET follow the call that causes them, so this waits until a question is
        all that arrives between two questions (at most 0.5 s).
        """
        counts = self._counts()
        for _ in range(50):
            self._asked += self._cost_of_asking
            before, counts = counts, self._counts()
            if counts - before == self._cost_of_asking:
                break
            time.sleep(0.01)
        self._asked += self._cost_of_asking
        return counts - self._asked

    def kill(self) -> None:
        """Kill the daemon: every call that waits for an answer of it ends with an error."""
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)


@contextlib.contextmanager
def mounted(session: str, store: Path) -> Iterator[Mount]:
    """Mount with `irdmafs mount`, keeping data in `store`.

    Raises Unavailable where the command says that it cannot.
    """
    made = mountpoint.Mount(session, store=store)
    try:
        done = made.try_mount()
        if done.returncode != 0:
            told = (done.stdout + done.stderr).splitlines() or [f"exit code {done.returncode}"]
            reason = "\n    ".join([told[-1], *made.log_tail().splitlines()[-5:]])
            raise Unavailable(f"irdmafs mount --session {session}: {reason}")
        yield Mount(made.path)
    finally:
        made.close()


def mount_of(directory: Path) -> Mount | None:
    """The irdmafs mount that holds a directory, None where it is on something else."""
    top = directory.resolve()
    while not top.is_mount():
        top = top.parent
    try:
        return Mount(top)
    except OSError:
        return None
