"""Log lines about peers, limited in number."""

import logging
import time
from collections.abc import Callable

__all__ = ["Complaints"]

BURST = 256
PER_S = 2.0


class Complaints:
    """Warnings that any peer can cause: BURST at once, and PER_S from then on. Others are counted, and the
    next line says how many were left out."""

    def __init__(self, log: logging.Logger, now_s: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._now_s = now_s
        self._left = float(BURST)
        self._at_s = now_s()
        self._left_out = 0

    def warn(self, text: str, *arguments: object) -> None:
        now_s = self._now_s()
        self._left = min(BURST, self._left + (now_s - self._at_s) * PER_S)
        self._at_s = now_s
        if self._left < 1:
            self._left_out += 1
            return
        self._left -= 1
        self._log.warning(text, *arguments)
        if self._left_out:
            self._log.warning("%d more such lines were left out before it", self._left_out)
            self._left_out = 0
