"""Questions about processes, and memory that they lend, asked of one process for each user
(onlooker.py)."""

import errno
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Sequence

import trio

from ..backend.unwrap import if_it_fails
from . import onlooker

log = logging.getLogger(__name__)

# Far longer than an answer takes on a busy machine: after it, the process is taken to be blocked.
PATIENCE_S = 10.0
# The limit for all users; a user has two at most.
_ONLOOKERS_MAX = 32

# A user, and whether processes other than the one that waits for the answer are looked at. Those may wait
# for an answer themselves.
_Key = tuple[int, bool]
# The text and the descriptors of an answer, which has one or the other.
_Answer = tuple[bytes, list[int]]


class _Gone(Exception):
    """The onlooker has ended."""


class _Onlooker:
    """The onlooker of one user."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with if_it_fails(ours.close), theirs:
            end, null = theirs.fileno(), subprocess.DEVNULL
            command = [sys.executable, "-I", "-S", onlooker.__file__, str(end)]
            self.process = subprocess.Popen(
                command, pass_fds=[end], stdin=null, stdout=null, cwd="/", start_new_session=True
            )
        ours.setblocking(False)
        self._channel = ours
        self._turn = trio.Lock()
        self._lent = 0
        self.is_stuck = False

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def is_idle(self) -> bool:
        return not (self._lent or self.is_stuck or self._turn.locked())

    def close(self) -> None:
        """Have the onlooker end, as soon as it does not block."""
        self._channel.close()
        self.process.kill()
        if not self.has_ended:
            self.process.returncode = -9  # no need to wait for it

    async def ask(self, request: bytes, fds: Sequence[int]) -> _Answer:
        """Send a request; return the answer. Raises its OSError, TimeoutError if none comes, _Gone."""
        async with self._turn:
            # Not cancelled in between: the answer would be taken for that of the next request.
            with trio.move_on_after(PATIENCE_S, shield=True):
                return await self._exchange(request, fds)
            self.is_stuck = True
            self.process.kill()
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    async def _exchange(self, request: bytes, fds: Sequence[int]) -> _Answer:
        try:
            await trio.lowlevel.wait_writable(self._channel)
            socket.send_fds(self._channel, [request], fds)
            await trio.lowlevel.wait_readable(self._channel)
            reply, came, _, _ = socket.recv_fds(self._channel, onlooker.REPLY_MAX_BYTES, 2)
        except OSError as error:
            raise _Gone from error
        if not reply:
            raise _Gone
        code, self._lent = onlooker.REPLY.unpack_from(reply)
        data = reply[onlooker.REPLY.size :]
        if code:
            raise OSError(code, data.decode(errors="replace"))
        return data, came


class Onlookers:
    """Asks about processes. Only requests of the same user wait for one that blocks.

    All methods raise OSError: EOPNOTSUPP if no answer comes, because processes of that user block it.
    """

    def __init__(self) -> None:
        self._onlookers: dict[_Key, _Onlooker] = {}

    async def lend(
        self, uid: int, process: int, thread: int, memory: int, lifeline: int
    ) -> tuple[int, int]:
        """Return descriptors of the memory that a thread (and its pidfd) lends, and of a pipe that is
        readable when the lifeline is. Holding or closing either never blocks.

        Raises OSError: EINVAL for other kinds, EBADF, EPERM without the right to trace the process.
        """
        request = onlooker.REQUEST.pack(onlooker.LEND, thread, memory, lifeline)
        _, (fd, end) = await self.ask(uid, request, [process])
        return fd, end

    async def ask(
        self, uid: int, request: bytes, fds: Sequence[int] = (), *, about_other: bool = False
    ) -> _Answer:
        """Ask about a process or thread of a user (see onlooker.py). `about_other`: it is not the one that
        waits for the answer. Raises OSError ENOENT if there is none."""
        key = uid, about_other
        found = self._found(key)
        try:
            return await found.ask(request, fds)
        except TimeoutError:
            _, pid, _, _ = onlooker.REQUEST.unpack_from(request)
            log.warning(
                "process %d of user %d keeps whoever looks at it waiting: the user's closes are not looked "
                "into, nor is anything read into memory of his, until process %d has ended",
                pid, uid, found.process.pid,
            )  # fmt: skip
            raise OSError(errno.EOPNOTSUPP, "what is looked at does not answer") from None
        except _Gone:
            self._drop(key, found)
            raise OSError(errno.EOPNOTSUPP, "the process that looks at others ended") from None

    def _found(self, key: _Key) -> _Onlooker:
        found = self._onlookers.get(key)
        if found is not None and found.has_ended:
            self._drop(key, found)
            found = None
        if found is None:
            if len(self._onlookers) >= _ONLOOKERS_MAX:
                self._make_room()
            found = self._onlookers[key] = _Onlooker()
        elif found.is_stuck:
            raise OSError(errno.EOPNOTSUPP, "a process that was looked at before does not answer")
        return found

    def _make_room(self) -> None:
        for key, found in self._onlookers.items():
            if found.is_idle or found.has_ended:
                self._drop(key, found)
                return
        raise OSError(errno.EOPNOTSUPP, "too many users are looked at already")

    def _drop(self, key: _Key, found: _Onlooker) -> None:
        if self._onlookers.get(key) is found:
            del self._onlookers[key]
            found.close()

    def close(self) -> None:
        """Release all lent memory."""
        for key, found in list(self._onlookers.items()):
            self._drop(key, found)
