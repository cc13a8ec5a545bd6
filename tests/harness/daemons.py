"""Programs that run on the hosts of a network until they are told to end, or killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from . import forks
from .network import CommandFailed, Host

END_TIMEOUT_S = 30.0
LOG_TAIL_CHARACTERS = 8000


class Daemon:
    """One program. It can be started again after its end; each start appends to the same log."""

    def __init__(
        self, name: str, host: Host, command: Sequence[str | os.PathLike[str]], log: Path
    ) -> None:
        self.name = name
        self.host = host
        self.command = [os.fspath(word) for word in command]
        self.log = log
        self.starts = 0
        self._running: forks.Running | None = None
        self._stopped = self._killed = False

    def start(self) -> None:
        assert not self.alive, f"{self.name} runs already"
        with self.log.open("ab") as log:
            # A session of its own: Ctrl-C reaches whoever drives the cluster, who ends it in order.
            self._running = forks.start(self.command, self.host.launcher, output=log, errors=log)
        self._stopped = self._killed = False
        self.starts += 1

    @property
    def pid(self) -> int:
        """The launcher replaces itself by the program, so this is the program's."""
        assert self._running is not None, f"{self.name} was never started"
        return self._running.pid

    @property
    def alive(self) -> bool:
        return self._running is not None and self._running.poll() is None

    @property
    def stopped(self) -> bool:
        return self.alive and self._stopped

    @property
    def exit_status(self) -> int | None:
        return None if self._running is None else self._running.poll()

    def _signal(self, number: int) -> None:
        # The whole session: a helper process that outlives its parent would hold files and ports.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def kill9(self, *, wait: bool = True) -> None:
        """Kill it and wait until it is gone: its sockets and files are closed then. A process cannot go
        while it closes files of a mount that does not answer."""
        # Once it is gone, its number may be another program's.
        if self._running is None or self._killed:
            return
        self._signal(signal.SIGKILL)
        if wait:
            self._running.wait(END_TIMEOUT_S)
            self._killed = True

    def wait(self, timeout_s: float) -> int:
        """Return its exit status when it has ended by itself. Raises CommandFailed if it does not."""
        assert self._running is not None, f"{self.name} was never started"
        try:
            return self._running.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise CommandFailed(f"{error}\n{self.log_tail()}") from None

    def pause(self) -> None:
        """SIGSTOP: it neither runs nor dies, and its connections stay up."""
        self._signal(signal.SIGSTOP)
        self._stopped = True

    def resume(self) -> None:
        self._signal(signal.SIGCONT)
        self._stopped = False

    def terminate(self, timeout_s: float = END_TIMEOUT_S) -> int:
        """Ask it to end, and kill it if it does not. Returns its exit status."""
        if self._running is None:
            return 0
        if self._running.poll() is None:
            self._signal(signal.SIGTERM)
            self._signal(signal.SIGCONT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._running.wait(timeout_s)
        self.kill9()
        return self._running.wait(END_TIMEOUT_S)

    def log_tail(self, characters: int = LOG_TAIL_CHARACTERS) -> str:
        with contextlib.suppress(OSError):
            return self.log.read_text(errors="replace")[-characters:]
        return "(no log)"

    def __repr__(self) -> str:
        state = "stopped" if self.stopped else "runs" if self.alive else "down"
        return f"<{self.name} {state}>"


@contextlib.contextmanager
def paused(*programs: Daemon) -> Iterator[None]:
    """Have programs stand still as long as the block runs."""
    for one in programs:
        one.pause()
    try:
        yield
    finally:
        for one in programs:
            one.resume()


def wait_until(
    condition: Callable[[], bool],
    failure: str,
    within_s: float,
    daemon: Daemon | None = None,
    error: type[Exception] = CommandFailed,
) -> None:
    """Wait for what sends no event. Raises an error, at once if the daemon that it takes ends."""
    began = asked = time.monotonic()
    while not condition():
        answered = time.monotonic()
        if answered > began + within_s or (daemon is not None and not daemon.alive):
            raise error(f"{failure}\n{daemon.log_tail()}" if daemon else failure)
        # A condition that takes the processor long is not asked all the time.
        time.sleep(max(0.01, answered - asked))
        asked = time.monotonic()
