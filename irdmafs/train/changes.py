"""Waiting for changes below directories."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

__all__ = ["GATHER_S", "Changes", "count_changes"]

_CHANGES = "user.irdmafs.changes"
# Not on irdmafs.
_NO_COUNTER = (errno.ENODATA, errno.EOPNOTSUPP)
# Without irdmafs below there is nothing to wait for: look again.
_POLL_S = 0.005
# Changes often come together: they are looked at so much later.
GATHER_S = 0.004


def count_changes(path: Path, waiting: str = "") -> str | None:
    """Return the counter of changes of anything below a directory, None where there is none. `waiting`:
    ".N.SECONDS", until it is not N. Raises OSError."""
    try:
        return os.getxattr(path, _CHANGES + waiting).decode()
    except OSError as error:
        if error.errno not in _NO_COUNTER:
            raise
        return None


class Changes:
    """Waits for a change of anything below a directory. No change is missed that is made after this object:
    make it before looking."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self.path = path
        self.counter = count_changes(path)

    def wait(self, timeout_s: float) -> None:
        """Return when something has changed since, or after a while. Raises InterruptedError and
        OSError."""
        if self.counter is None:
            time.sleep(min(_POLL_S, timeout_s))
        else:
            os.getxattr(self.path, f"{_CHANGES}.{self.counter}.{max(0.0, timeout_s):.3f}")
