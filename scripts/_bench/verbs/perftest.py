"""perftest (ib_write_bw, ib_read_bw, ib_read_lat) between two processes of this machine."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress

from harness.network import Unavailable
from harness.roce import Way

PROGRAMS = ("ib_write_bw", "ib_read_bw", "ib_read_lat")
# It takes fewer requests than five for a mistake.
ITERATIONS_MIN = 5
# The default, and queues that are no longer than what the device works on at once.
DEPTHS = (128, 16)
# In /proc/net/tcp.
_LISTENS = "0A"
_PORT = 18515
# It fills its buffers first, which takes a while where page faults are slow.
_START_TIMEOUT_S = 120.0
_RUN_TIMEOUT_S = 600.0
# 4.096 us * 2 ** 18: with its own 67 ms, a busy processor looks like lost packets to software RDMA.
_TIMEOUT_EXPONENT = 18
# On a busy machine its clock and the processor's may disagree several times in a row.
_TRIES = 20
_NUMBERS = re.compile(r"^\s*\d+\s+\d+\s+[\d.]+\s+[\d.]+")


class PerftestFailed(Unavailable):
    """The text says what it printed."""


def need() -> None:
    """Raises PerftestFailed."""
    for program in PROGRAMS:
        if shutil.which(program) is None:
            raise PerftestFailed(f"{program} is not installed (apt install perftest)")


def bandwidth(way: Way, program: str, size: int, total: int) -> float:
    """Bytes per second of the better one of `DEPTHS`, moving about `total` bytes with each."""
    iterations = max(ITERATIONS_MIN, total // size)
    # A queue that is longer than the run is as good as any other.
    depths = [depth for depth in DEPTHS if depth < iterations] or [DEPTHS[-1]]
    rates = []
    for depth in depths:
        numbers = _numbers(way, program, "-s", size, "-n", iterations, "-t", depth, "-N")
        # What it calls MB are MiB.
        rates.append(numbers[3] * (1 << 20))
    return max(rates)


def read_latency_us(way: Way, size: int, count: int) -> float:
    """Of one RDMA READ, typically."""
    return _numbers(way, "ib_read_lat", "-s", size, "-n", count)[4]


def _numbers(way: Way, program: str, *options: object) -> list[float]:
    """The line of figures of the side that asked. It gives none where its clock and the processor's
    disagree for a moment, and is asked again."""
    for _ in range(_TRIES - 1):
        with suppress(PerftestFailed):
            return _try(way, program, *options)
    return _try(way, program, *options)


def _try(way: Way, program: str, *options: object) -> list[float]:
    command = [
        program, "-F", "-d", way.device, "-i", str(way.port), "-x", str(way.gid_index), "-p", str(_PORT),
        "-u", str(_TIMEOUT_EXPONENT),
        *(str(option) for option in options),
    ]  # fmt: skip
    _wait_for_port(free=True)
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for_port(free=False, server=server)
        done = subprocess.run(
            [*command, way.address], capture_output=True, text=True, timeout=_RUN_TIMEOUT_S
        )
        for line in done.stdout.splitlines():
            if _NUMBERS.match(line):
                with suppress(subprocess.TimeoutExpired):
                    server.wait(_START_TIMEOUT_S)
                numbers = [float(word) for word in line.split()]
                # What was interrupted by an error is told as nothing.
                if numbers[3] > 0:
                    return numbers
        raise PerftestFailed(f"{' '.join(command)}: {_last(done.stdout, done.stderr)}")
    except subprocess.TimeoutExpired:
        raise PerftestFailed(f"{' '.join(command)}: no end") from None
    finally:
        server.kill()
        server.wait()


def _wait_for_port(free: bool, server: subprocess.Popen[bytes] | None = None) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while _is_listened_on() == free:
        if time.monotonic() > deadline or (server is not None and server.poll() is not None):
            raise PerftestFailed(f"port {_PORT} {'is in use' if free else 'is not listened on'}")
        time.sleep(0.02)


def _is_listened_on() -> bool:
    """Return whether a server listens on the port. It would take a connection for that of its client."""
    for name in ("tcp", "tcp6"):
        with suppress(OSError), open(f"/proc/net/{name}") as sockets:
            for line in sockets.readlines()[1:]:
                _, local, _, state, *_ = line.split()
                if state == _LISTENS and int(local.rpartition(":")[2], 16) == _PORT:
                    return True
    return False


def _last(*texts: str) -> str:
    lines: Sequence[str] = [line for text in texts for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"
