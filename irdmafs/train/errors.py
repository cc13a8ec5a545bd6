"""The errors of training."""

from __future__ import annotations

import errno
import os


class TrainError(Exception):
    """A directory cannot be trained in, or its training cannot go on; the text says what to do."""


class BadPush(Exception):
    """A push that is part of a plan cannot be summed. `path`: its name in push/."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class Refused(OSError):
    """A push is refused; `strerror` says why."""

    def __str__(self) -> str:
        return f"{self.strerror} ({os.strerror(self.errno or 0)})"


def invalid(reason: str) -> Refused:
    """Return the error for a push that is not as pushes are."""
    return Refused(errno.EINVAL, reason)
