"""The tests marked verbs, run in a guest beside all other tests.

A guest has one core and takes minutes, most of which the other tests spend waiting: a test session that
includes them starts the guest first, and asks for the result at its end.
"""

import os
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

# The worker (spread.py) that starts the guest, and runs the test that asks for its result.
WORKER = "gw0"
GUEST = Path(__file__).resolve().parents[2] / "scripts/rdma_guest"


def starts_guest() -> bool:
    """Return whether this process starts the guest: the only one with tests, or one worker of several."""
    return os.environ.get("PYTEST_XDIST_WORKER", WORKER) == WORKER


class Result(NamedTuple):
    """The exit status of pytest in the guest, and its output."""

    status: int
    output: str


class GuestTests:
    """The run of pytest in a guest. A context manager, whose end is the end of the run."""

    def __init__(self) -> None:
        self._running: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "GuestTests":
        self._output = tempfile.TemporaryFile()
        return self

    def __exit__(self, *_: object) -> None:
        if self._running is not None:
            self._running.terminate()
            self._running.wait()
        self._output.close()

    def start(self) -> subprocess.Popen[bytes]:
        """Begin the run, once. Return its process."""
        if self._running is None:
            command = [os.fspath(GUEST), "test", "--color=no", "-q"]
            self._running = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT
            )
        return self._running

    def result(self) -> Result:
        """Return the result when it is there."""
        status = self.start().wait()
        self._output.seek(0)
        return Result(status, self._output.read().decode(errors="replace"))
