"""The tests marked verbs, run in a guest beside all other tests.

A guest has one core and takes minutes, most of which the other tests spend waiting: a test session that
includes them starts the guests first, one after the other, and asks for their results at its end.
"""

import os
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

# The worker (spread.py) that starts the guests, and runs the tests that ask for their results.
WORKER = "gw0"
GUEST = Path(__file__).resolve().parents[2] / "scripts/rdma_guest"


def starts_guests() -> bool:
    """Return whether this process starts guests: the only one that runs tests, or one worker of several."""
    return os.environ.get("PYTEST_XDIST_WORKER", WORKER) == WORKER


class Result(NamedTuple):
    """The exit status of pytest in the guest, and its output."""

    status: int
    output: str


class GuestTests:
    """Runs of pytest in guests, in the order in which they were asked for. A context manager."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "guest tests")
        self._results: dict[tuple[str, ...], Future[Result]] = {}
        self._running: subprocess.Popen[bytes] | None = None
        self._ended = False

    def __enter__(self) -> "GuestTests":
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        if (running := self._running) is not None:
            running.terminate()
        self._executor.shutdown(cancel_futures=True)

    def start(self, arguments: Sequence[str]) -> None:
        """Begin a run with these arguments of pytest, once."""
        key = tuple(arguments)
        if key not in self._results:
            self._results[key] = self._executor.submit(self._run, key)

    def result(self, arguments: Sequence[str]) -> Result:
        """Return the result of a run when it is there."""
        self.start(arguments)
        return self._results[tuple(arguments)].result()

    def _run(self, arguments: Sequence[str]) -> Result:
        command = [os.fspath(GUEST), "test", "--color=no", "-q", *arguments]
        with tempfile.TemporaryFile() as output:
            self._running = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
            if self._ended:
                self._running.terminate()
            status = self._running.wait()
            output.seek(0)
            return Result(status, output.read().decode(errors="replace"))
