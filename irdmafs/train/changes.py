"""Waiting for changes below directories."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

__all__ = ["CHANGES", "GATHER_S", "NO_COUNTER", "Changes"]

CHANGES = "user.irdmafs.changes"
# Not on irdmafs.
NO_COUNTER = (errno.ENODATA, errno.EOPNOTSUPP)
# Without irdmafs below there is nothing to wait for: look again.
_POLL_S = 0.005
# Changes often come together: they are looked at so much later.
GATHER_S = 0.004


class Changes:
    """Waits for a change of anything below a directory. No change is missed that is made after this object:
    make it before looking."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self.path = path
        # None: there is no counter.
        self.counter: str | None = None
        try:
            self.counter = os.getxattr(path, CHANGES).decode()
        except OSError as error:
            if error.errno not in NO_COUNTER:
                raise

    def wait(self, timeout_s: float) -> None:
        """Return when something has changed since, or after a while. Raises InterruptedError and
        OSError."""
        if self.counter is None:
            time.sleep(min(_POLL_S, timeout_s))
        else:
            os.getxattr(self.path, f"{CHANGES}.{self.counter}.{max(0.0, timeout_s):.3f}")
