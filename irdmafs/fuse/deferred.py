"""Releases and forgets, carried out when no other request waits: nobody waits for them, but somebody may
wait for a later request."""

import logging
from collections.abc import Coroutine
from typing import Any

import trio

from .. import inline
from ..posix.operations import Operations

log = logging.getLogger(__name__)


class Deferred:
    """The deferred work: handles to release, and (node id, lookups) to forget. Call settle() before
    anything that they could make a difference to."""

    def __init__(self, operations: Operations, nursery: trio.Nursery) -> None:
        self._operations = operations
        self._nursery = nursery
        self.released: list[int] = []
        self.forgotten: list[tuple[int, int]] = []

    def settle(self) -> bool:
        """Carry the deferred work out. Return whether there was any."""
        released, forgotten = self.released[:], self.forgotten[:]
        self.released.clear()
        self.forgotten.clear()
        for fh in released:
            self.carry_out(self._operations.release(fh), "releasing handle %d", fh)
        if forgotten:
            self.carry_out(self._operations.forget(forgotten), "forgetting nodes")
        return bool(released or forgotten)

    def carry_out(self, coro: Coroutine[Any, Any, None], what: str, *args: object) -> None:
        """Run what nobody waits for, in a task of its own when it has to wait. `what` and `args` name it in
        the log."""
        try:
            inline.run(coro)
        except inline.Detached:
            self._nursery.start_soon(self._carry_out_later, coro, what, *args)
        except Exception:
            log.exception(what + " failed", *args)

    async def _carry_out_later(
        self, coro: Coroutine[Any, Any, None], what: str, *args: object
    ) -> None:
        try:
            await inline.resume(coro)
        except Exception:
            log.exception(what + " failed", *args)
