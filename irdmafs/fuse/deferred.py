"""Releases and forgets, carried out when no other request waits: nobody waits for them, but somebody may
wait for a later request."""

import logging
from collections.abc import Coroutine
from typing import Any

from .. import inline
from ..posix.filesystem import Filesystem
from .tasks import Tasks

log = logging.getLogger(__name__)


class Deferred:
    """The deferred work: handles to release, and (node id, lookups) to forget. Call settle() before
    anything that they could make a difference to."""

    def __init__(self, filesystem: Filesystem, tasks: Tasks) -> None:
        self._cache = filesystem.cache
        self._lookups = filesystem.lookups
        self._tasks = tasks
        self.released: list[int] = []
        self.forgotten: list[tuple[int, int]] = []

    def settle(self) -> None:
        """Carry the deferred work out."""
        released, forgotten = self.released[:], self.forgotten[:]
        self.released.clear()
        self.forgotten.clear()
        for fh in released:
            self.carry_out(self._cache.release(fh), "releasing a handle")
        if forgotten:
            self.carry_out(self._lookups.forget(forgotten), "forgetting nodes")

    def carry_out(self, coro: Coroutine[Any, Any, None], what: str) -> None:
        """Run what nobody waits for, in a task of its own when it has to wait. `what` names it in the
        log."""
        try:
            inline.run(coro)
        except inline.Detached:
            self._tasks.start_soon(self._carry_out_later, coro, what)
        except Exception:
            log.exception("%s failed", what)

    async def _carry_out_later(self, coro: Coroutine[Any, Any, None], what: str) -> None:
        try:
            await inline.Rest(coro)
        except Exception:
            log.exception("%s failed", what)
