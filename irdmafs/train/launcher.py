"""Reducers and workers of one host, as processes that begin and end together."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from .directory import TrainDirectory, params_of
from .errors import TrainError
from .placement import host_of
from .status import are_enough, how_to_reduce, is_reduced

# Processes that are to end are killed after so long, or at a further signal.
_GRACE_S = 10.0
# So long reducers go on after workers have ended, if there are pushes for a version.
_COUNTED_S = 10.0
# Processes and signals are looked at this often.
_LOOK_S = 0.2
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def reducers_here(train: TrainDirectory) -> tuple[bool, list[str]]:
    """Return whether there should be a reducer on this host, and which other hosts have shards: reducers
    move the fewest bytes where shards are. If no reducer is at work there should be one here in any case.
    Raises TrainError and OSError."""
    version = train.version(train.newest())
    parts = train.layout.parts.values()
    hosts = {host_of(params_of(version, shards[0])) for shards in parts}
    elsewhere = sorted(filter(None, hosts))
    return bool(hosts & {"", None}) or not is_reduced(train), elsewhere


class _Processes:
    """Processes, each the leader of a group of its own: what they start ends with them."""

    def __init__(self) -> None:
        self._all: list[subprocess.Popen[bytes]] = []

    def start(self, command: Sequence[str], **environment: str) -> None:
        """Raises OSError."""
        null, env = subprocess.DEVNULL, {**os.environ, **environment}
        self._all.append(subprocess.Popen(command, process_group=0, stdin=null, env=env))

    def ended(self) -> list[int | None]:
        """Return the exit code of each, 128 + N for signal N; None: it goes on. Processes that have ended
        are left to be waited for, so that nobody else gets their numbers."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        found = [os.waitid(os.P_PID, one.pid, options) for one in self._all]
        return [one and one.si_status + 128 * (one.si_code != os.CLD_EXITED) for one in found]

    def end(self, number: int, signals: Sequence[int]) -> None:
        """Send a signal, and kill what goes on for too long, or when a further one of `signals` comes."""
        until_s = time.monotonic() + _GRACE_S
        told = len(signals)
        self._send(number)
        while None in self.ended() and time.monotonic() < until_s and len(signals) == told:
            time.sleep(_LOOK_S)
        self._send(signal.SIGKILL)
        for one in self._all:
            one.wait()

    def _send(self, number: int) -> None:
        for one in self._all:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, number)


@contextlib.contextmanager
def signals_taken() -> Iterator[list[int]]:
    """Collect the signals that end a command, as long as the block runs, in the main thread."""
    came: list[int] = []
    # nohup has SIGHUP ignored, and a shell SIGINT for what it starts in the background.
    taken = [one for one in _SIGNALS if signal.getsignal(one) is not signal.SIG_IGN]
    before = {one: signal.signal(one, lambda number, _: came.append(number)) for one in taken}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def launch(
    train: TrainDirectory,
    command: Sequence[str],
    *,
    workers: int,
    reduces: bool,
    say: Callable[[str], None],
) -> int:
    """Run a command as so many workers, if it `reduces` with a reducer beside, until all workers have ended
    or something fails; then all of them end. Return 0, the exit code of the first worker that failed, or
    128 + the number of the signal that ended it. Each worker has IRDMAFS_WORKER, its number from 0 on, and
    IRDMAFS_WORKERS in its environment. Raises TrainError if a reducer fails, and OSError."""
    pushing, reducing = _Processes(), _Processes()
    with signals_taken() as signals:
        try:
            if reduces:
                reduce = ["-m", "irdmafs", "train", "reduce", str(train.models)]
                reducing.start([sys.executable, *reduce])
            for number in range(workers):
                pushing.start(command, IRDMAFS_WORKER=str(number), IRDMAFS_WORKERS=str(workers))
            until_s = math.inf
            while time.monotonic() < until_s:
                if signals:
                    return 128 + signals[-1]
                codes = pushing.ended()
                for number, code in enumerate(codes):
                    if code:
                        failed = f"worker {number} has failed with the exit code {code}"
                        say(f"{failed}: all others are ended")
                        return code
                if any(code is not None for code in reducing.ended()):
                    raise TrainError(f"a reducer has ended: {how_to_reduce(train)} shows why")
                if None not in codes:
                    # Nobody waits for the last pushes, but they are to count.
                    until_s = min(until_s, time.monotonic() + _COUNTED_S)
                    if not are_enough(train):
                        return 0
                time.sleep(_LOOK_S)
            return 0
        finally:
            pushing.end(signals[-1] if signals else signal.SIGTERM, signals)
            reducing.end(signal.SIGTERM, signals)
