"""Asks a separate process (train/checker.py) about pushes. It is started with the first one, and the daemon
loads none of its modules."""

import errno
import logging
import os
import signal
import socket
import subprocess
import sys

import trio

from ..coherence.pushes import Refused
from .push_messages import ANSWER, REASON_MAX_BYTES, REQUEST_MAX_BYTES

__all__ = ["CHECKS", "PushChecker"]

log = logging.getLogger(__name__)

# The module whose function `check` says if a push is in order.
CHECKS = "irdmafs.train.pushes"
# A check reads the push once. One that takes longer than this is taken to be blocked by the files it reads.
_PATIENCE_S = 600.0
_STARTS_MAX = 2


class _Ended(Exception):
    """The process has ended without an answer."""


class _Process:
    """The process and the socket to it."""

    def __init__(self, module: str) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                command = [sys.executable, "-P", "-m", "irdmafs.train.checker"]
                self._process = subprocess.Popen(
                    [*command, str(theirs.fileno()), module],
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


class PushChecker:
    """Checks pushes one at a time, with `check` of a module (see train/checker.py, Check)."""

    def __init__(self, mountpoint: str, module: str = CHECKS) -> None:
        self._mountpoint = os.fsencode(mountpoint)
        self._module = module
        self._turn = trio.Lock()
        self._process: _Process | None = None

    async def check(self, directory: bytes, name: bytes, fd: int) -> None:
        """Return if a push is in order. Raises Refused.

        `directory` is a path from the root of the mount, `name` one from that directory. A cancelled check
        ends the process: its answer would be taken for that of the next push.
        """
        request = b"\0".join((self._mountpoint, directory.lstrip(b"/"), name))
        if len(request) > REQUEST_MAX_BYTES:
            raise Refused(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        async with self._turn:
            how = ""
            for _ in range(_STARTS_MAX):
                process = self._started()
                try:
                    with trio.fail_after(_PATIENCE_S):
                        code, reason = await process.ask(request, fd)
                except _Ended:
                    self._process = None
                    how = await process.ended()
                    process.end()
                    log.warning("the process that checks pushes ended: %s", how)
                except trio.TooSlowError:
                    self._abandon()
                    raise Refused(
                        errno.ETIMEDOUT, f"the check took longer than {_PATIENCE_S:g} s"
                    ) from None
                except BaseException:
                    self._abandon()
                    raise
                else:
                    if code:
                        raise Refused(code, reason)
                    return
            raise Refused(errno.EIO, f"the checker of pushes ended: {how}")

    def _started(self) -> _Process:
        if self._process is None:
            try:
                self._process = _Process(self._module)
            except OSError as error:
                raise Refused(
                    errno.EIO, f"the checker of pushes cannot be started: {error}"
                ) from None
        return self._process

    def _abandon(self) -> None:
        """End the process without waiting: it may wait for this mount. Another push starts another one."""
        if self._process is not None:
            self._process.end()
            self._process = None

    def close(self) -> None:
        """End the process, and wait until it has: it keeps files of the store open. The mount has ended."""
        process = self._process
        self._abandon()
        if process is not None:
            process.wait()
