"""Certificates and keys that are read again when their files change, while the process runs.

The value that was loaded before stays in use until the files are valid again. So a process survives files
that are damaged, or copied one after the other.
"""

import logging
import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Generic, TypeVar

import trio

from ..model.values import ConfigError

log = logging.getLogger(__name__)

# How often the files are checked.
LOOK_S = 10.0

T = TypeVar("T")

# For each file: inode number, size, mtime and ctime; None: it does not exist.
_Stamps = tuple[tuple[int, int, int, int] | None, ...]


class Renewable(Generic[T]):
    """A value that `load` makes of files: `current`. `load` gets its former value, at first None. It raises
    OSError, ValueError or ConfigError if the files cannot be used; then `problem` says why."""

    def __init__(self, files: Iterable[str], load: Callable[[T | None], T]) -> None:
        self._files = tuple(files)
        self._load = load
        self._seen = self._failed = self._stamps()
        self.current: T = load(None)
        self.problem = ""

    def renew(self, *, at_once: bool = False) -> None:
        """Load the files again if they have changed. `at_once` does so in any case. For a worker thread."""
        stamps = self._stamps()
        if stamps == self._seen and not at_once:
            return
        try:
            self.current = self._load(self.current)
        except (OSError, ValueError, ConfigError) as error:
            # Files that are copied one after the other do not match for a moment: try once more.
            if stamps != self._failed and not at_once:
                self._failed = stamps
                return
            self.problem = str(error)
            log.error("%s; what was read before stays in use", error)
        else:
            self.problem = ""
            log.info("%s: read again, new connections use them", ", ".join(self._files))
        self._seen = stamps

    def _stamps(self) -> _Stamps:
        return tuple(map(_stamp, self._files))


class Renewal:
    """Keeps the values of files in one process up to date."""

    def __init__(self, renewables: Iterable[Renewable[Any]]) -> None:
        self._renewables = tuple(renewables)
        self._asked = trio.Event()

    def ask(self) -> None:
        """Read all files again now. For the event loop."""
        self._asked.set()

    def problems(self) -> list[str]:
        """Return why some files cannot be used as they are now."""
        return [each.problem for each in self._renewables if each.problem]

    async def run(self) -> None:
        """Check the files periodically."""
        while self._renewables:
            with trio.move_on_after(LOOK_S):
                await self._asked.wait()
            at_once = self._asked.is_set()
            self._asked = trio.Event()
            for each in self._renewables:
                await trio.to_thread.run_sync(partial(each.renew, at_once=at_once))


def _stamp(path: str) -> tuple[int, int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
