"""Reducers and workers of one host, as processes that begin and end together."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import NamedTuple

from .directory import TrainDirectory, params_of
from .errors import TrainError
from .placement import host_of, is_here
from .status import current, how_to_reduce, is_reduced

__all__ = ["Reducers", "launch", "reducers_here"]

# Processes that are to end are killed after so long, or at a further signal.
_GRACE_S = 10.0
# So long reducers go on after workers have ended, if there are pushes for a version.
_COUNTED_S = 10.0
# Processes and signals are looked at this often.
_LOOK_S = 0.2
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Reducers(NamedTuple):
    """How many reducers there should be on this host, and other hosts that have shards."""

    here: int
    elsewhere: tuple[str, ...]


def reducers_here(train: TrainDirectory) -> Reducers:
    """Say where reducers move the fewest bytes: where shards are. If no reducer is at work there is one
    here in any case. Raises TrainError and OSError."""
    version = train.version(train.newest())
    paths = [params_of(version, shards[0]) for shards in train.layout().parts.values()]
    are_here = [is_here(path) for path in paths]
    elsewhere = {host_of(path) for path, here in zip(paths, are_here, strict=True) if here is False}
    wanted = any(here is not False for here in are_here) or not is_reduced(train)
    return Reducers(int(wanted), tuple(sorted(elsewhere)))


class _Processes:
    """Processes, each the leader of a group of its own: what they start ends with them."""

    def __init__(self, signals: _Signals) -> None:
        self._signals = signals
        self._all: list[subprocess.Popen[bytes]] = []

    def start(self, command: Sequence[str], **environment: str) -> None:
        """Raises OSError."""
        started = subprocess.Popen(
            command, process_group=0, stdin=subprocess.DEVNULL, env={**os.environ, **environment}
        )
        self._all.append(started)

    def ended(self) -> list[int | None]:
        """Return the exit code of each, 128 + N for signal N; None: it goes on."""
        return [_exit_code(one.pid) for one in self._all]

    def end(self, number: int) -> None:
        """Send a signal, and kill what goes on for too long."""
        until_s = time.monotonic() + _GRACE_S
        told = self._signals.count
        self._send(number)
        while None in self.ended() and time.monotonic() < until_s and self._signals.count == told:
            time.sleep(_LOOK_S)
        self._send(signal.SIGKILL)
        for one in self._all:
            one.wait()

    def _send(self, number: int) -> None:
        for one in self._all:
            # Its number is not anyone else's before it is waited for.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, number)


def _exit_code(pid: int) -> int | None:
    """Return the exit code of a child, which is left to be waited for."""
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else 128 + found.si_status


class _Signals:
    """Signals that end everything: the last, and how many there were."""

    def __init__(self) -> None:
        self.last = 0
        self.count = 0

    def _take(self, number: int, _: FrameType | None) -> None:
        self.last = number
        self.count += 1

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Take signals as long as the block runs, in the main thread."""
        # nohup has SIGHUP ignored, and a shell SIGINT for what it starts in the background.
        taken = [one for one in _SIGNALS if signal.getsignal(one) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._take) for number in taken}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def launch(
    train: TrainDirectory,
    command: Sequence[str],
    *,
    workers: int,
    reducers: int,
    say: Callable[[str], None],
) -> int:
    """Run a command as so many workers, with so many reducers beside, until all workers have ended or
    something fails; then all of them end. Return 0, the exit code of the first worker that failed, or 128 +
    the number of the signal that ended it. Each worker has IRDMAFS_WORKER, its number from 0 on, and
    IRDMAFS_WORKERS in its environment. Raises TrainError if a reducer fails, and OSError."""
    signals = _Signals()
    pushing, reducing = _Processes(signals), _Processes(signals)
    with signals.taken():
        try:
            for _ in range(reducers):
                reducing.start(
                    [sys.executable, "-m", "irdmafs", "train", "reduce", str(train.models)]
                )
            for number in range(workers):
                pushing.start(command, IRDMAFS_WORKER=str(number), IRDMAFS_WORKERS=str(workers))
            return _watch(train, pushing, reducing, signals, say)
        finally:
            pushing.end(signals.last or signal.SIGTERM)
            reducing.end(signal.SIGTERM)


def _watch(
    train: TrainDirectory,
    pushing: _Processes,
    reducing: _Processes,
    signals: _Signals,
    say: Callable[[str], None],
) -> int:
    """Return the exit code when it is time to end. Raises TrainError."""
    until_s = float("inf")
    while time.monotonic() < until_s:
        if signals.count:
            return 128 + signals.last
        codes = pushing.ended()
        failed = next((number for number, code in enumerate(codes) if code), None)
        if failed is not None:
            code = codes[failed]
            assert code is not None
            say(f"worker {failed} has failed with the exit code {code}: all others are ended")
            return code
        if any(code is not None for code in reducing.ended()):
            raise TrainError(f"a reducer has ended: {how_to_reduce(train)} shows why")
        if None not in codes:
            # Nobody waits for the last pushes, but they are to count.
            if until_s == float("inf"):
                until_s = time.monotonic() + _COUNTED_S
            if not current(train)[1]:
                return 0
        time.sleep(_LOOK_S)
    return 0
