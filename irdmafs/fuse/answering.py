"""Answering one request: in place where that needs no waiting, else in a task that a signal may end."""

import errno
import logging
from collections.abc import Coroutine
from types import CoroutineType
from typing import Any

from .. import inline
from .connection import Connection
from .counts import Counts
from .deferred import Deferred
from .interrupts import Waiting, WaitingRequests
from .requests import NoPayload, Row
from .tasks import Tasks
from .wire import BODY, IN_HEADER, Malformed, Opcode, Request

log = logging.getLogger(__name__)

_new, _unpack_header = tuple.__new__, IN_HEADER.unpack_from

# Requests that may be answered before releases and forgets that came earlier are carried out.
_GO_AHEAD = frozenset(
    map(
        int,
        (
            *(Opcode.LOOKUP, Opcode.GETATTR, Opcode.GETXATTR, Opcode.OPEN, Opcode.RELEASE),
            *(Opcode.FORGET, Opcode.BATCH_FORGET),
        ),
    )
)
_PUT_OFF_MAX = 1024
_WITHOUT_ANSWER = (Opcode.FORGET, Opcode.BATCH_FORGET, Opcode.INTERRUPT)


class Answering:
    """Answers the requests that are read into a connection's buffer, by the rows of a table."""

    def __init__(
        self,
        connection: Connection,
        rows: dict[int, Row],
        deferred: Deferred,
        waiting: WaitingRequests,
        tasks: Tasks,
        counts: Counts,
    ) -> None:
        self._connection = connection
        self._buffer = connection.buffer
        self._rows = rows
        self._deferred = deferred
        self._released, self._forgotten = deferred.released, deferred.forgotten
        self._waiting = waiting
        self._tasks = tasks
        self._counts = counts
        self._counted = counts.by_opcode
        self._trace = log.isEnabledFor(logging.DEBUG)

    def answer(self, received: int) -> None:
        """Answer the request of `received` bytes that is in the buffer."""
        # Request(...) takes twice as long.
        request: Request = _new(Request, _unpack_header(self._buffer))
        if received < BODY or request.length != received:
            log.error(
                "from the kernel: %d bytes, which say that they are %d", received, request.length
            )
            return
        opcode = request.opcode
        self._counted[opcode & 63] += 1
        if self._trace:
            log.debug(
                "%s node %d pid %d, %d bytes", _name(opcode), request.nodeid, request.pid, received
            )
        if (self._released or self._forgotten) and (
            opcode not in _GO_AHEAD or len(self._released) + len(self._forgotten) > _PUT_OFF_MAX
        ):
            self._deferred.settle()
        row = self._rows.get(opcode)
        if row is None:
            self._connection.refuse(request.unique, errno.ENOSYS)
            return
        size, carry_out, pack = row
        try:
            if received < size:
                raise Malformed("the request is too short for its kind")
            result = carry_out(request)
            if result.__class__ is CoroutineType:
                result = inline.run(result)
            if result.__class__ is not NoPayload:
                payload = (result or b"") if pack is None else pack(result)
                self._connection.answer(request.unique, payload)
            elif result.code:
                self._connection.refuse(request.unique, result.code)
        except inline.Detached as detached:
            waiting = self._waiting.add(request, any_signal=detached.any_signal)
            self._tasks.start_soon(self._finish, request, row, waiting, result)
        except Exception as error:
            self.fail(request, error)

    async def _finish(
        self, request: Request, row: Row, waiting: Waiting, coro: Coroutine[Any, Any, Any]
    ) -> None:
        """Run a request that waits, in a task of its own; INTERRUPT may cancel it."""
        with waiting.scope as scope:
            try:
                result = await inline.resume(coro)
                payload = (result or b"") if row.pack is None else row.pack(result)
                self._connection.answer(request.unique, payload)
            except Exception as error:
                self.fail(request, error)
            finally:
                self._waiting.remove(request.unique)
        if scope.cancelled_caught:
            self._connection.refuse(request.unique, errno.EINTR)

    def fail(self, request: Request, error: Exception) -> None:
        """Answer with an error, and log it if it is none that a filesystem answers with."""
        opcode = request.opcode
        if isinstance(error, Malformed):
            log.error("from the kernel: %s", error)
            code = errno.EINVAL
        elif isinstance(error, OSError) and error.errno:
            code = error.errno
            if code in (errno.EIO, errno.ENOSPC, errno.EMFILE):
                log.error("%s: %s", _name(opcode), error)
        elif isinstance(error, KeyError):
            log.error("%s: the kernel asked for what is not open", _name(opcode), exc_info=error)
            code = errno.EBADF
        elif isinstance(error, OverflowError):
            code = errno.EINVAL
        else:
            log.exception("%s failed", _name(opcode), exc_info=error)
            code = errno.EIO
        self._counts.failed(code)
        if opcode not in _WITHOUT_ANSWER:
            self._connection.refuse(request.unique, code)


def _name(opcode: int) -> str:
    try:
        return Opcode(opcode).name
    except ValueError:
        return f"request {opcode}"
