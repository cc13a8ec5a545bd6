"""Find out that a worker waits in vain: no reducer is at work, or its push was refused or removed."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path

from . import refusals
from .directory import TrainDirectory, discard
from .errors import Refused, TrainError
from .pushes import worker_of
from .status import is_reduced, no_reducer

log = logging.getLogger(__name__)

# Reducers and workers are often started together.
_WITHOUT_REDUCER_S = 3.0


class Watch:
    """Looks after the reducers and the worker's pushes, while the worker waits."""

    def __init__(self, train: TrainDirectory, worker: str) -> None:
        self._train = train
        self._worker = worker
        # The refusals that were there before, or that the worker was told of.
        self._known = set(refusals.names(train))
        # The name and the step of the last push.
        self._last, self._step = "", 0
        # When this wait began, or a reducer was seen in it.
        self._reducer_s = 0.0
        self._told = False

    def begin(self) -> None:
        """Begin a wait."""
        self._reducer_s = time.monotonic()

    def pushed(self, name: str, step: int) -> None:
        """Note the worker's last push, which is looked after from now on."""
        self._last, self._step = name, step

    def counted(self) -> Path | None:
        """Return the last push if it has counted: its files may be written anew."""
        return self._train.push / self._last if self._last and self._has_counted() else None

    @contextlib.contextmanager
    def noting(self, path: str) -> Iterator[None]:
        """Write into refused/ why the worker refuses its own push, if this user may write there."""
        try:
            yield
        except (Refused, TrainError) as error:
            self._known.add(refusals.note(self._train, path, error))
            raise

    def look(self) -> None:
        """Raise Refused if a push of the worker was refused; remove the push if the worker itself made it.
        Raise TrainError if the last push was removed before it counted: the worker would wait forever."""
        names = refusals.names(self._train)
        new = [name for name in names if name not in self._known]
        self._known = set(names)
        for refusal in refusals.read(self._train, new):
            if worker_of(refusal.path) == self._worker and not refusal.counts:
                if self._last == refusal.path:
                    if self._has_counted():
                        # The configuration that refused the push was changed since.
                        continue
                    self._last = ""
                    discard(self._train, self._train.push / refusal.path)
                raise Refused(refusal.code, f"{refusal.path}: {refusal.reason}")
        if not self._last or (self._train.push / self._last).exists():
            return
        self._last = ""
        if not self._has_counted():
            raise TrainError(
                f"push {self._step} of {self._worker!r} was removed before it counted: push it again"
            )

    def _has_counted(self) -> bool:
        return self._train.newest_plan().clocks.get(self._worker, 0) >= self._step

    def look_for_reducer(self) -> None:
        """Log a warning if there has been no reducer for some seconds of a wait."""
        now_s = time.monotonic()
        if is_reduced(self._train):
            self._reducer_s, self._told = now_s, False
        elif not self._told and now_s > self._reducer_s + _WITHOUT_REDUCER_S:
            self._told = True
            log.warning("irdmafs: %s", no_reducer(self._train))
