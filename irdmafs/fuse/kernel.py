"""The kernel session: speaks /dev/fuse itself, for what libfuse 3.14 cannot do, passthrough above all.

One trio task reads requests and starts each one's coroutine in place (see inline.py); almost all are
answered before the next read. A request that has to wait goes on in a task of its own, which a signal may
end.

While requests keep coming, the reader looks for the next one for a moment before it goes back to
trio: a process that opens file after file is then answered without a sleep and a wake-up in between,
which on a virtual machine cost more than the whole answer.
"""

import errno
import logging
import os
import select
import time
from collections.abc import Awaitable
from types import CoroutineType
from typing import Any, Final

import trio

from .. import inline
from ..backend.files.extents import asking_user
from ..backend.namespace import Unread, answered, fail
from ..posix.filesystem import Filesystem
from .connection import Connection
from .counts import Counts
from .notices import Notices
from .requests import NoPayload, Requests, Result, Row
from .tasks import Deferred, Tasks, Waiting, WaitingRequests
from .wakeups import FastWakeups
from .wire import BODY, IN_HEADER, OUT_HEADER, Malformed, Opcode, Request, decode_names

log = logging.getLogger(__name__)

_new, _unpack_header = tuple.__new__, IN_HEADER.unpack_from
_pack_header, _HEADER_BYTES = OUT_HEADER.pack, OUT_HEADER.size

# How long the reader looks for the next request before it sleeps, and how long it may keep trio's
# other tasks (signals, waiting requests) from their turn.
_SPIN_NS: Final = 100_000
_TURN_NS: Final = 2_000_000
# Requests that come closer to each other are one burst: wake-ups stay fast.
_BURST_S: Final = 0.01
# A mount is not used if nothing is open for writing and nothing was asked for so long: longer than a kernel
# believes answers about what is not followed (backend/store/remote/leases.py).
_UNUSED_S: Final = 3.0
_LOOKING = (Opcode.LOOKUP, Opcode.GETATTR, Opcode.GETXATTR, Opcode.OPEN)
_LETTING_GO = (Opcode.RELEASE, Opcode.FORGET, Opcode.BATCH_FORGET)
# Requests that may be answered before releases and forgets that came earlier are carried out.
_GO_AHEAD = frozenset(map(int, _LOOKING + _LETTING_GO))
_PUT_OFF_MAX = 1024
_WITHOUT_ANSWER = (Opcode.FORGET, Opcode.BATCH_FORGET, Opcode.INTERRUPT)


class KernelSession:
    """Serves one mount by its connection to the kernel; both end with close()."""

    name = "kernel"

    def __init__(
        self,
        connection: Connection,
        filesystem: Filesystem,
        notices: Notices,
        tasks: Tasks,
        counts: Counts,
        wakeups: FastWakeups,
    ) -> None:
        self._connection = connection
        self._notices = notices
        self._tasks = tasks
        self._wakeups = wakeups
        self.deferred = deferred = Deferred(filesystem, tasks)
        self.waiting = waiting = WaitingRequests(filesystem.processes, tasks)
        self._rows = Requests(connection, filesystem, notices, deferred, waiting).rows
        self._nodes, store = filesystem.cache.nodes, filesystem.cache.host.store
        self._learn, self._resting = store.learn, store.resting
        self._counts = counts
        self._trace = log.isEnabledFor(logging.DEBUG)
        self._finished = trio.Event()

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tasks.run)
            nursery.start_soon(self._read_requests)
            await self._finished.wait()
            self.deferred.settle()
            self._tasks.stop()
            nursery.cancel_scope.cancel()

    def stop(self) -> None:
        self._finished.set()

    def close(self) -> None:
        self._notices.close()
        self._wakeups.close()
        self._connection.close()

    async def _read_requests(self) -> None:
        device, buffers = self._connection.fd, self._connection.buffers
        poller = select.poll()
        poller.register(device, select.POLLIN)
        answer, deferred, waiting = self.answer, self.deferred, self.waiting
        wakeups, clock, readv = self._wakeups, time.monotonic_ns, os.readv
        spin_ends = 0
        while True:
            with trio.move_on_after(_BURST_S) as pause:
                await trio.lowlevel.wait_readable(device)
            if pause.cancelled_caught:
                wakeups.let_go()
                await self._await_request()
            if wakeups.enabled and not wakeups.held:
                wakeups.hold()
            turn_ends = clock() + _TURN_NS
            while True:
                try:
                    received = readv(device, buffers)
                except BlockingIOError:
                    if deferred.released or deferred.forgotten:
                        deferred.settle()
                    elif waiting.by_unique and waiting.want_turn():
                        break  # requests that wait in their own tasks want their turn
                    else:
                        while not (ready := poller.poll(0)) and clock() < spin_ends:
                            pass
                        if not ready:
                            break
                        continue
                except OSError as error:
                    if not self._goes_on(error):
                        return
                else:
                    answer(received)
                spin_ends = clock() + _SPIN_NS
                if spin_ends > turn_ends:
                    await trio.lowlevel.checkpoint()
                    turn_ends = clock() + _TURN_NS

    async def _await_request(self) -> None:
        """Return when there is a request, which may take long: while nobody uses the mount it need not know
        what other hosts change."""
        device, is_used = self._connection.fd, True
        while is_used:
            with trio.move_on_after(_UNUSED_S):
                await trio.lowlevel.wait_readable(device)
                return
            is_written = any(handle.writing for handle in self._nodes.handles.values())
            is_used = is_written or bool(self.waiting.by_unique)
        async with self._resting():
            await trio.lowlevel.wait_readable(device)

    def _goes_on(self, error: OSError) -> bool:
        """Return whether requests may come after an error of reading one; if not, the session ends."""
        if error.errno in (errno.ENOENT, errno.EINTR):  # the caller of a request was killed
            return True
        if error.errno != errno.ENODEV:
            log.error("reading from the kernel failed: %s", error)
        self._finished.set()
        return False

    # -- answering -------------------------------------------------------------------------------

    def answer(self, received: int) -> None:
        """Answer the request of `received` bytes that is in the buffer."""
        # Request(...) takes twice as long.
        request: Request = _new(Request, _unpack_header(self._connection.buffer))
        if received < BODY or request.length != received:
            log.error("from the kernel: %d bytes that say they are %d", received, request.length)
            return
        opcode = request.opcode
        self._counts.by_opcode[opcode & 63] += 1
        if self._trace:
            log.debug(
                "%s node %d pid %d, %d bytes", _name(opcode), request.nodeid, request.pid, received
            )
        deferred = self.deferred
        if (deferred.released or deferred.forgotten) and (
            opcode not in _GO_AHEAD
            or len(deferred.released) + len(deferred.forgotten) > _PUT_OFF_MAX
        ):
            deferred.settle()
        row = self._rows.get(opcode)
        if row is None:
            self._connection.refuse(request.unique, errno.ENOSYS)
            return
        layout, size, names, carry_out, pack = row
        try:
            if received < size:
                raise Malformed("the request is too short for its kind")
            buffer = self._connection.buffer
            fields = layout.unpack_from(buffer, BODY)
            if names:
                fields += decode_names(buffer, size, received, names)
            result = carry_out(request, *fields)
            if result.__class__ is CoroutineType:
                result = inline.run(result)
            if result.__class__ is NoPayload:
                if result.code:
                    self._connection.refuse(request.unique, result.code)
                return
            payload = (result or b"") if pack is None else pack(result)
        except inline.Detached as detached:
            waiting = self.waiting.add(request, any_signal=detached.any_signal)
            self._tasks.start_soon(self._finish, request, row, fields, waiting, inline.Rest(result))
            return
        except Unread as unread:
            waiting = self.waiting.add(request, any_signal=False)
            rest = self._again(request, row, fields, unread)
            self._tasks.start_soon(self._finish, request, row, fields, waiting, rest)
            return
        except Exception as error:
            self.fail(request, error)
            return
        answer = _pack_header(_HEADER_BYTES + len(payload), 0, request.unique) + payload
        try:
            os.write(self._connection.fd, answer)
        except OSError as error:
            self._connection.not_answered(error)

    async def _again(
        self, request: Request, row: Row, fields: tuple[Any, ...], unread: Unread
    ) -> Result:
        """Carry out a request that asked for a name which is not known, when it is."""

        async def ask() -> Result:
            result = row.carry_out(request, *fields)
            if result.__class__ is NoPayload:
                raise fail(result.code)
            return await result if result.__class__ is CoroutineType else result

        if request.opcode in (Opcode.SETXATTR, Opcode.WRITE):  # the next request is in the buffer
            raise unread
        await self._learn(unread)
        return await answered(ask, self._learn)

    async def _finish(
        self,
        request: Request,
        row: Row,
        fields: tuple[Any, ...],
        waiting: Waiting,
        rest: Awaitable[Result],
    ) -> None:
        """Run a request that waits, in a task of its own; INTERRUPT may cancel it."""
        asking_user.set(str(request.uid))
        with waiting.scope as scope:
            try:
                try:
                    result = await rest
                except Unread as unread:
                    result = await self._again(request, row, fields, unread)
                payload = (result or b"") if row.pack is None else row.pack(result)
                self._connection.answer(request.unique, payload)
            except Exception as error:
                self.fail(request, error)
            finally:
                self.waiting.remove(request.unique)
        if scope.cancelled_caught:
            self._connection.refuse(request.unique, errno.EINTR)

    def fail(self, request: Request, error: Exception) -> None:
        """Answer with an error."""
        code = self._counts.failed(_name(request.opcode), error)
        if request.opcode not in _WITHOUT_ANSWER:
            self._connection.refuse(request.unique, code)


def _name(opcode: int) -> str:
    try:
        return Opcode(opcode).name
    except ValueError:
        return f"request {opcode}"
