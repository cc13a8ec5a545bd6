"""Directories that a mount leaves alone for a while, as others use them, too."""

import time
from typing import NamedTuple

_REST_S = 10.0
_REST_MAX_S = 600.0


class _Rest(NamedTuple):
    until: float
    length_s: float


class Rests:
    """The directories that rest now: each for `first_s`, and for twice as long each time that its rest
    begins again soon."""

    def __init__(self, first_s: float = _REST_S) -> None:
        self._first_s = first_s
        self._rests: dict[int, _Rest] = {}

    def begin(self, directory: int) -> None:
        """Let a directory rest from now on."""
        before = self._rests.get(directory)
        length_s = min(2 * before.length_s, _REST_MAX_S) if before is not None else self._first_s
        self._rests[directory] = _Rest(time.monotonic() + length_s, length_s)

    def __contains__(self, directory: int) -> bool:
        rest = self._rests.get(directory)
        return rest is not None and time.monotonic() < rest.until

    def tidy(self) -> None:
        """Forget rests that ended long ago."""
        now = time.monotonic()
        for directory, rest in [*self._rests.items()]:
            if now > rest.until + rest.length_s:
                del self._rests[directory]
