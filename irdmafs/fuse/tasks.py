"""Work of a session after it has gone on to the next request: tasks, waiting requests, and what is put off.

The kernel reports only the first signal that a waiting caller gets, and goes on waiting. Calls on ordinary
files are not interrupted, as on other filesystems: a close() that failed because of a timer or the end of a
child would lose bytes, and an open() that began anew at each tick of a profiler would never end. So a
request goes on unless its caller is about to die. There are two exceptions: any signal wakes a process that
waits for a lock, as POSIX says, or for a change by others; and an interrupt from the keyboard that a
program handles (Python raises an exception) ends calls that only look and read.

Nobody waits for releases and forgets, but somebody may wait for a later request. They are carried out when
no other request waits.
"""

import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, NamedTuple

import trio

from .. import inline
from ..callers.processes import Processes
from ..posix.filesystem import Filesystem
from .wire import Opcode, Request

log = logging.getLogger(__name__)

_Step = tuple[Callable[..., Awaitable[None]], tuple[Any, ...]]

# The kernel does not report signals after the first.
_LOOK_AGAIN_S = 0.1
_READING: Final = {
    *(Opcode.LOOKUP, Opcode.GETATTR, Opcode.OPEN, Opcode.READ, Opcode.GETXATTR),
    *(Opcode.OPENDIR, Opcode.READDIR, Opcode.READDIRPLUS, Opcode.ACCESS, Opcode.LSEEK),
}


class Tasks:
    """Runs the functions given to start_soon(), from run() until stop(), which cancels them."""

    def __init__(self) -> None:
        self._nursery: trio.Nursery | None = None
        self._ended = trio.Event()
        # Given before run().
        self._early: list[_Step] = []

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for step, args in self._early:
                nursery.start_soon(step, *args)
            try:
                await self._ended.wait()
            finally:
                self._ended.set()
            nursery.cancel_scope.cancel()

    def start_soon(self, step: Callable[..., Awaitable[None]], *args: Any) -> bool:
        """Run this in a task. Return False, and do nothing, after stop()."""
        if self._ended.is_set():
            return False
        if self._nursery is None:
            self._early.append((step, args))
        else:
            self._nursery.start_soon(step, *args)
        return True

    def stop(self) -> None:
        self._ended.set()


class Waiting(NamedTuple):
    """A request of `pid` (a thread) that waits in `scope`, until it has `ended`. `any_signal`: it waits for
    others, and ends with any signal."""

    opcode: int
    pid: int
    any_signal: bool
    scope: trio.CancelScope
    ended: trio.Event

    async def interrupted(self, processes: Processes) -> None:
        """Cancel the request if its caller's signal ends it, now or after a further signal."""
        while not self.ended.is_set():
            ends = self.any_signal
            if not ends:
                pending = await processes.pending_signals(self.pid)
                ends = pending.fatal or (pending.keyboard and self.opcode in _READING)
            if ends:
                self.scope.cancel()
                return
            with trio.move_on_after(_LOOK_AGAIN_S):
                await self.ended.wait()


class WaitingRequests:
    """The requests that wait in tasks of their own, by their numbers."""

    def __init__(self, processes: Processes, tasks: Tasks) -> None:
        self._processes = processes
        self._tasks = tasks
        self.by_unique: dict[int, Waiting] = {}
        # How many of them wait for others, which may take long.
        self._resting = 0

    def add(self, request: Request, *, any_signal: bool) -> Waiting:
        """Note that a request begins to wait."""
        waiting = Waiting(request.opcode, request.pid, any_signal, trio.CancelScope(), trio.Event())
        self.by_unique[request.unique] = waiting
        self._resting += any_signal
        return waiting

    def remove(self, unique: int) -> None:
        waiting = self.by_unique.pop(unique)
        waiting.ended.set()
        self._resting -= waiting.any_signal

    def interrupt(self, unique: int) -> None:
        """Handle INTERRUPT: the caller of a request got a signal."""
        waiting = self.by_unique.get(unique)
        if waiting is not None:
            self._tasks.start_soon(waiting.interrupted, self._processes)

    def want_turn(self) -> bool:
        """Return whether their tasks may have something to do."""
        if len(self.by_unique) > self._resting:
            return True
        return self._resting > 0 and trio.lowlevel.current_statistics().tasks_runnable > 0


class Deferred:
    """The deferred work: handles to release, and (node id, lookups) to forget. Call settle() before
    anything that they could make a difference to."""

    def __init__(self, filesystem: Filesystem, tasks: Tasks) -> None:
        self._cache = filesystem.cache
        self._nodes = filesystem.cache.nodes
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
        for node_id, lookups in forgotten:
            self._nodes.forget(node_id, lookups)
        if self._cache.host.nameless:
            self.carry_out(self._cache.host.forget_nameless(), "forgetting inodes")

    def carry_out(self, coro: Coroutine[Any, Any, None], what: str) -> None:
        """Run what nobody waits for, in its own task if it has to wait. `what`: its name in the log."""
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
