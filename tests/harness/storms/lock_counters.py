"""A program that adds one to counters under locks until it is killed: in files that it locks, in a database
of SQLite, and in a file of HDF5, which tries to lock it and does not wait.

    python lock_counters.py DIRECTORY SEED

Prints, with times in nanoseconds (monotonic):

    begins NAME BEGAN
    done NAME NUMBER BEGAN UNLOCKING ENDED      it was acknowledged: its unlock succeeded
    failed NAME ERROR BEGAN ENDED
"""

import contextlib
import errno
import fcntl
import os
import random
import re
import sqlite3
import sys
import time
from collections.abc import Callable
from pathlib import Path

try:
    import h5py
except ImportError:
    h5py = None

# The process was told that something of it was not published. Its descriptor is as good as before.
TOLD = (errno.EIO, errno.ESTALE)
RETRY_S = 0.02
THINKING_MAX_S = 0.01  # so that a storm has many faults for its increments
BUSY_S = 10


class Counter:
    """A number in a file. `unlocking` is when the present increment's lock began to be given up, at the
    earliest."""

    _lock: Callable[[int, int], object] = staticmethod(fcntl.lockf)
    unlocking = 0

    def __init__(self, path: str, rng: random.Random) -> None:
        self._path = path
        self._rng = rng
        self._fd = -1

    @staticmethod
    def make(path: Path) -> None:
        path.write_bytes(b"%020d" % 0)

    @staticmethod
    def look(path: Path) -> int:
        return int(path.read_bytes())

    def add(self) -> int:
        """Return what the counter is now. Raises OSError, and what SQLite and HDF5 raise."""
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
        self.unlocking = time.monotonic_ns()
        self._lock(fd, fcntl.LOCK_UN)
        return number

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        with contextlib.suppress(OSError):
            os.close(fd)


class Flock(Counter):
    _lock = staticmethod(fcntl.flock)


class Sqlite(Counter):
    _database: sqlite3.Connection | None = None

    @staticmethod
    def make(path: Path) -> None:
        with contextlib.closing(sqlite3.connect(path)) as database, database:
            database.execute("CREATE TABLE counter (number INTEGER)")
            database.execute("INSERT INTO counter VALUES (0)")

    @staticmethod
    def look(path: Path) -> int:
        with contextlib.closing(sqlite3.connect(path, timeout=BUSY_S)) as database:
            assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            ((number,),) = database.execute("SELECT number FROM counter")
            return int(number)

    def add(self) -> int:
        if self._database is None or self._rng.random() < 0.05:
            self._close()
            os.stat(self._path)  # SQLite would make a database on a directory without a mount
            self._database = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None)
        self.unlocking = time.monotonic_ns()
        try:
            self._database.execute("BEGIN IMMEDIATE")
            self._database.execute("UPDATE counter SET number = number + 1")
            ((number,),) = self._database.execute("SELECT number FROM counter")
            self._database.execute("COMMIT")
        except sqlite3.Error:
            self._close()
            raise
        return int(number)

    def _close(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            with contextlib.suppress(sqlite3.Error):
                database.close()


class Hdf5(Counter):
    @staticmethod
    def make(path: Path) -> None:
        with h5py.File(path, "w") as file:
            file["number"] = 0

    @staticmethod
    def look(path: Path) -> int:
        with h5py.File(path, "r") as file:
            return int(file["number"][()])

    def add(self) -> int:
        with h5py.File(self._path, "r+") as file:
            number = int(file["number"][()]) + 1
            file["number"][()] = number
            self.unlocking = time.monotonic_ns()
        return number


COUNTERS: dict[str, type[Counter]] = {"fcntl": Counter, "flock": Flock, "sqlite": Sqlite}
if h5py is not None:
    COUNTERS["hdf5"] = Hdf5


def error_name(error: Exception) -> str:
    if isinstance(error, sqlite3.Error):
        return error.sqlite_errorname
    # HDF5 tells errno in its text, too, and h5py does not always take it from there.
    told = re.search(r"errno = (\d+)", str(error))
    code = getattr(error, "errno", None) or int(told[1] if told else 0)
    return errno.errorcode.get(code, "_".join(str(error).split()))


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def main(directory: str, seed: int) -> None:
    rng = random.Random(seed)
    counters = {name: kind(f"{directory}/{name}", rng) for name, kind in COUNTERS.items()}
    while True:
        name = rng.choice(list(counters))
        counter = counters[name]
        began = time.monotonic_ns()
        say("begins", name, began)
        try:
            number = counter.add()
        except (OSError, RuntimeError, sqlite3.Error, KeyError) as error:
            say("failed", name, error_name(error), began, time.monotonic_ns())
            time.sleep(RETRY_S)
        else:
            say("done", name, number, began, counter.unlocking, time.monotonic_ns())
            time.sleep(rng.uniform(0, THINKING_MAX_S))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
