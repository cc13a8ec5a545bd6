"""A program that adds one to counters under locks, each in the file that is locked, until it is killed.

    python lock_counters.py DIRECTORY SEED

Prints COUNTER NUMBER for each increment that was acknowledged: its unlock succeeded.
"""

import contextlib
import errno
import fcntl
import os
import random
import sys
import time

COUNTERS = {"fcntl": fcntl.lockf, "flock": fcntl.flock}
# The process was told that something of it was not published. Its descriptor is as good as before.
TOLD = (errno.EIO, errno.ESTALE)
RETRY_S = 0.02
THINKING_MAX_S = 0.01  # so that a storm has many faults for its increments


class Counter:
    def __init__(self, directory: str, name: str, rng: random.Random) -> None:
        self._path = f"{directory}/{name}"
        self._lock = COUNTERS[name]
        self._rng = rng
        self._fd = -1

    def add(self) -> int:
        """Return what the counter is now. Raises OSError."""
        if self._fd >= 0 and self._rng.random() < 0.05:
            self._close()
        if self._fd < 0:
            self._fd = os.open(self._path, os.O_RDWR)
        try:
            return self._add(self._fd)
        except BlockingIOError:
            raise
        except OSError as error:
            if error.errno not in TOLD:
                self._close()
            raise

    def _add(self, fd: int) -> int:
        waits = 0 if self._rng.random() < 0.7 else fcntl.LOCK_NB
        self._lock(fd, fcntl.LOCK_EX | waits)
        try:
            number = int(os.pread(fd, 20, 0)) + 1
            os.pwrite(fd, b"%020d" % number, 0)
        except BaseException:
            with contextlib.suppress(OSError):
                self._lock(fd, fcntl.LOCK_UN)
            raise
        self._lock(fd, fcntl.LOCK_UN)
        return number

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        with contextlib.suppress(OSError):
            os.close(fd)


def main(directory: str, seed: int) -> None:
    rng = random.Random(seed)
    counters = {name: Counter(directory, name, rng) for name in COUNTERS}
    while True:
        name = rng.choice(list(counters))
        try:
            number = counters[name].add()
        except OSError as error:
            os.write(1, f"failed {errno.errorcode[error.errno or 0]}\n".encode())
            time.sleep(RETRY_S)
        else:
            os.write(1, f"{name} {number}\n".encode())
            time.sleep(rng.uniform(0, THINKING_MAX_S))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
