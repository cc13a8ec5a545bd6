"""The kernel session: speaks /dev/fuse itself, for what libfuse 3.14 cannot do, passthrough above all.

One trio task reads requests and starts each one's coroutine in place (see inline.py); almost all are
answered before the next read. A request that has to wait goes on in a task of its own.

While requests keep coming, the reader looks for the next one for a moment before it goes back to
trio: a process that opens file after file is then answered without a sleep and a wake-up in between,
which on a virtual machine cost more than the whole answer.
"""

import errno
import logging
import os
import select
import time
from typing import Final

import trio

from ..posix.operations import Operations
from .answering import Answering
from .backings import Backings
from .connection import Connection
from .counts import Counts
from .notices import Notices
from .session import Session
from .tasks import Tasks
from .wakeups import FastWakeups

log = logging.getLogger(__name__)

# How long the reader looks for the next request before it sleeps, and how long it may keep trio's
# other tasks (signals, waiting requests) from their turn.
_SPIN_NS: Final = 100_000
_TURN_NS: Final = 2_000_000
# Requests that come closer to each other are one burst: wake-ups stay fast.
_BURST_S: Final = 0.01


class KernelSession(Session):
    """Serves one mount by its connection to the kernel; both end with close()."""

    name = "kernel"

    def __init__(
        self,
        connection: Connection,
        operations: Operations,
        backings: Backings,
        notices: Notices,
        tasks: Tasks,
        counts: Counts,
        wakeups: FastWakeups,
    ) -> None:
        self._connection = connection
        self._operations = operations
        self._backings = backings
        self._notices = notices
        self._tasks = tasks
        self._wakeups = wakeups
        self._counts = counts
        self._finished = trio.Event()

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            answering = Answering(
                self._connection, self._operations, self._backings, self._notices, self._counts,
                nursery,
            )  # fmt: skip
            nursery.start_soon(self._tasks.run)
            nursery.start_soon(self._read_requests, answering)
            await self._finished.wait()
            self._tasks.stop()
            answering.deferred.settle()
            nursery.cancel_scope.cancel()

    def stop(self) -> None:
        self._finished.set()

    def close(self) -> None:
        self._tasks.close()
        self._notices.close()
        self._wakeups.close()
        self._connection.close()

    async def _read_requests(self, answering: Answering) -> None:
        device = self._connection.fd
        poller = select.poll()
        poller.register(device, select.POLLIN)
        clock = time.monotonic_ns
        while True:
            with trio.move_on_after(_BURST_S) as pause:
                await trio.lowlevel.wait_readable(device)
            if pause.cancelled_caught:
                self._wakeups.let_go()
                await trio.lowlevel.wait_readable(device)
            self._wakeups.hold()
            turn_ends = clock() + _TURN_NS
            while True:
                if self._serve_one(answering):
                    spin_ends = clock() + _SPIN_NS
                    if spin_ends > turn_ends:
                        await trio.lowlevel.checkpoint()
                        turn_ends = clock() + _TURN_NS
                    continue
                if self._finished.is_set():
                    return
                if answering.waiting and answering.want_turn():
                    break  # requests that wait in their own tasks want their turn
                while not (ready := poller.poll(0)) and clock() < spin_ends:
                    pass
                if not ready:
                    break

    def _serve_one(self, answering: Answering) -> bool:
        """Read and answer one request; False when there is none."""
        try:
            received = os.readv(self._connection.fd, self._connection.buffers)
        except BlockingIOError:
            return answering.deferred.settle()
        except OSError as error:
            if error.errno in (errno.EINTR, errno.ENOENT):
                return True
            if error.errno != errno.ENODEV:
                log.error("reading from the kernel failed: %s", error)
            self._finished.set()
            return False
        answering.answer(received)
        return True
