"""Asks separate processes (train/checker.py) about pushes: one for each owner of directories for pushes,
which is started with the first of them. So one user's check cannot hold up another's. The daemon loads none
of their modules."""

import errno
import logging
import os
import signal
import socket
import subprocess
import sys

import trio

from ..coherence.pushes import Owner, Refused
from .push_messages import ANSWER, REASON_MAX_BYTES, REQUEST_MAX_BYTES

__all__ = ["CHECKS", "PushChecker"]

log = logging.getLogger(__name__)

# The module whose function `check` says if a push is in order.
CHECKS = "irdmafs.train.pushes"
# A check reads the push once. One that takes longer is taken to be blocked by what its run's files are.
_PATIENCE_S = 30.0
_PATIENCE_MAX_S = 600.0
_SLOWEST_BYTES_PER_S = 64 << 20
# Processes that are kept for owners whose pushes come later.
_KEPT = 8
_STARTS_MAX = 2


class _Ended(Exception):
    """The process has ended without an answer."""


class _Process:
    """The process and the socket to it."""

    def __init__(self, module: str, owner: Owner) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                command = [sys.executable, "-P", "-m", "irdmafs.train.checker"]
                self._process = subprocess.Popen(
                    [*command, *map(str, (theirs.fileno(), module, owner.uid, owner.gid))],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    cwd="/",
                    start_new_session=True,
                )
        except BaseException:
            self._channel.close()
            raise
        self._channel.setblocking(False)
        log.info("process %d checks pushes", self._process.pid)

    async def ask(self, request: bytes, fd: int) -> tuple[int, str]:
        """Return the error code of the answer, 0 if there is none, and the reason. Raises _Ended."""
        try:
            await trio.lowlevel.wait_writable(self._channel)
            socket.send_fds(self._channel, [request], [fd])
            await trio.lowlevel.wait_readable(self._channel)
            answer = self._channel.recv(ANSWER.size + REASON_MAX_BYTES)
        except OSError as error:
            raise _Ended from error
        if not answer:
            raise _Ended
        (code,) = ANSWER.unpack_from(answer)
        return code, answer[ANSWER.size :].decode(errors="replace")

    def end(self) -> None:
        self._channel.close()
        self._process.kill()

    def wait(self) -> None:
        """Return when the process has ended."""
        self._process.wait()

    async def ended(self) -> str:
        """Return how the process ended, which has closed its socket."""
        code = await trio.to_thread.run_sync(self._process.wait, abandon_on_cancel=True)
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class _Queue:
    """Checks the pushes of one owner, one at a time."""

    def __init__(self, module: str, owner: Owner) -> None:
        self._module = module
        self._owner = owner
        self._turn = trio.Lock()
        self._process: _Process | None = None

    @property
    def is_idle(self) -> bool:
        return not self._turn.locked()

    async def check(self, request: bytes, fd: int) -> None:
        """As PushChecker.check()."""
        patience_s = _patience_s(os.fstat(fd).st_size)
        async with self._turn:
            how = ""
            for _ in range(_STARTS_MAX):
                process = self._started()
                try:
                    with trio.fail_after(patience_s):
                        code, reason = await process.ask(request, fd)
                except _Ended:
                    self._process = None
                    how = await process.ended()
                    process.end()
                    log.warning("the process that checks pushes ended: %s", how)
                except trio.TooSlowError:
                    self.abandon()
                    raise Refused(
                        errno.ETIMEDOUT, f"the check took longer than {patience_s:.0f} s"
                    ) from None
                except BaseException:
                    self.abandon()
                    raise
                else:
                    if code:
                        raise Refused(code, reason)
                    return
            raise Refused(errno.EIO, f"the checker of pushes ended: {how}")

    def _started(self) -> _Process:
        if self._process is None:
            try:
                self._process = _Process(self._module, self._owner)
            except OSError as error:
                raise Refused(
                    errno.EIO, f"the checker of pushes cannot be started: {error}"
                ) from None
        return self._process

    def abandon(self) -> _Process | None:
        """End the process without waiting, and return it: it may wait for this mount. Another push starts
        another one."""
        process, self._process = self._process, None
        if process is not None:
            process.end()
        return process


class PushChecker:
    """Checks pushes with `check` of a module (see train/checker.py, Check)."""

    def __init__(self, mountpoint: str, module: str = CHECKS) -> None:
        self._mountpoint = os.fsencode(mountpoint)
        self._module = module
        # The one that was used last is the last.
        self._queues: dict[Owner, _Queue] = {}

    async def check(self, directory: bytes, name: bytes, fd: int, owner: Owner) -> None:
        """Return if a push is in order. Raises Refused.

        `directory` is a path from the root of the mount, `name` one from that directory, and `owner` owns
        it. A cancelled check ends the process: its answer would be taken for that of the next push.
        """
        request = b"\0".join((self._mountpoint, directory.lstrip(b"/"), name))
        if len(request) > REQUEST_MAX_BYTES:
            raise Refused(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        if owner not in self._queues and len(self._queues) >= _KEPT:
            await self._end_idle()
        queue = self._queues.pop(owner, None) or _Queue(self._module, owner)
        self._queues[owner] = queue
        await queue.check(request, fd)

    async def _end_idle(self) -> None:
        """End the process of the owner who has had no push for the longest time."""
        found = next((owner for owner, queue in self._queues.items() if queue.is_idle), None)
        if found is not None:
            process = self._queues.pop(found).abandon()
            if process is not None:
                await process.ended()

    def close(self) -> None:
        """End the processes, and wait until they have: they keep files of the store open. The mount has
        ended."""
        for process in [queue.abandon() for queue in self._queues.values()]:
            if process is not None:
                process.wait()


def _patience_s(size: int) -> float:
    """Return how long the check of a push of so many bytes may take."""
    return min(_PATIENCE_MAX_S, _PATIENCE_S + size / _SLOWEST_BYTES_PER_S)
