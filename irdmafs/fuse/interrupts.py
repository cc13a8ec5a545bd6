"""Which signals end a request that waits.

The kernel tells of any signal that a waiting caller gets, once a request, and waits on. Calls on ordinary
files are not interrupted, as on other filesystems: a close() that failed because a timer ticked or a child
ended would lose what was written, and an open() that began anew with each tick of a profiler would never
end. So a request goes on unless its caller is about to die. Two exceptions: whoever waits for a lock can be
woken by any signal, as POSIX says; and an interrupt from the keyboard that a program handles (Python
makes it an exception) ends calls that only look and read.
"""

from typing import Final, NamedTuple

import trio

from ..callers.processes import Processes
from .wire import Opcode

# The kernel says nothing of signals that come after the first.
_LOOK_AGAIN_S = 0.1
_READING: Final = frozenset(
    {
        *(Opcode.LOOKUP, Opcode.GETATTR, Opcode.OPEN, Opcode.READ, Opcode.GETXATTR),
        *(Opcode.OPENDIR, Opcode.READDIR, Opcode.READDIRPLUS, Opcode.ACCESS, Opcode.LSEEK),
    }
)


class Waiting(NamedTuple):
    """A request of `pid` (a thread) that waits in `scope`, until it has `ended`."""

    opcode: int
    pid: int
    scope: trio.CancelScope
    ended: trio.Event

    async def interrupted(self, processes: Processes) -> None:
        """Its caller got a signal: cancel it if it is not to go on, now or after a further signal."""
        while not self.ended.is_set():
            if await self._should_end(processes):
                self.scope.cancel()
                return
            with trio.move_on_after(_LOOK_AGAIN_S):
                await self.ended.wait()

    async def _should_end(self, processes: Processes) -> bool:
        if self.opcode == Opcode.SETLKW:
            return True
        pending = await processes.pending_signals(self.pid)
        return pending.fatal or (pending.keyboard and self.opcode in _READING)
