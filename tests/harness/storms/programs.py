"""A program that does everything to a few files at once with others of its kind, until a time is over.

    python programs.py DIRECTORY SEED SECONDS FILES [STEP...]

It chooses among FILES files, which may be missing, and some steps or all. Prints, as JSON, how often each
step failed with which errno.
"""

import contextlib
import errno
import json
import mmap
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence

SIZES = (0, 1, 100, 5000, 70_000, 400_000)
HELD_MAX = 8
STEPS = (
    "replace", "write_in_place", "append", "truncate", "rename_over", "read", "reopen", "store", "unlink",
    "hold", "let_go", "write_held", "truncate_held",
)  # fmt: skip
# Of a program, not of a filesystem: a descriptor that is not open for writing.
OWN_ERRORS = (errno.EBADF, errno.EINVAL)


class Program:
    def __init__(self, directory: str, seed: int, files: int) -> None:
        self._directory = directory
        self._seed = seed
        self._files = files
        self._rng = random.Random(seed)
        self._held: list[int] = []
        self.failures: Counter[str] = Counter()

    def run(self, seconds: float, steps: Sequence[str]) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._try(self._rng.choice(steps))
        while self._held:
            self._try("let_go")

    def _try(self, step: str) -> None:
        try:
            getattr(self, step)()
        except OSError as error:
            self.failures[f"{step}: {errno.errorcode[error.errno or 0]}"] += 1

    def _file(self) -> str:
        return f"{self._directory}/file{self._rng.randrange(self._files)}"

    def _bytes(self) -> bytes:
        return bytes([self._seed % 251]) * self._rng.choice(SIZES)

    def replace(self) -> None:
        with open(self._file(), "wb") as file:
            file.write(self._bytes())

    def write_in_place(self) -> None:
        fd = os.open(self._file(), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            os.pwrite(fd, self._bytes(), self._rng.randrange(1000))
            if self._rng.random() < 0.3:
                os.fsync(fd)
        finally:
            os.close(fd)

    def append(self) -> None:
        fd = os.open(self._file(), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(fd, b"a line\n")
        finally:
            os.close(fd)

    def truncate(self) -> None:
        os.truncate(self._file(), self._rng.choice(SIZES))

    def rename_over(self) -> None:
        own = f"{self._directory}/own{self._seed}"
        with open(own, "wb") as file:
            file.write(self._bytes())
        os.rename(own, self._file())

    def read(self) -> None:
        with open(self._file(), "rb") as file:
            file.read()

    def reopen(self) -> None:
        with open(self._file(), "rb") as file:
            os.close(
                os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDWR)
            )  # as `> /dev/stdout` does

    def store(self) -> None:
        """Through a mapping, to a page that was read before."""
        with open(self._file(), "r+b") as file:
            if os.fstat(file.fileno()).st_size:
                # Another one may cut the file: that is SIGBUS, unless the first page stays.
                with contextlib.suppress(ValueError), mmap.mmap(file.fileno(), 0) as stores:
                    if os.fstat(file.fileno()).st_size:
                        self._flip(stores)

    @staticmethod
    def _flip(stores: mmap.mmap) -> None:
        stores[0] ^= 1

    def unlink(self) -> None:
        if self._rng.random() < 0.2:
            os.unlink(self._file())

    def hold(self) -> None:
        if len(self._held) < HELD_MAX:
            flags = self._rng.choice((os.O_RDONLY, os.O_RDWR, os.O_WRONLY))
            self._held.append(os.open(self._file(), flags))

    def let_go(self) -> None:
        if self._held:
            os.close(self._held.pop(self._rng.randrange(len(self._held))))

    def write_held(self) -> None:
        self._with_held(lambda fd: os.write(fd, b"a line of its own\n"))

    def truncate_held(self) -> None:
        size = self._rng.choice(SIZES)
        self._with_held(lambda fd: os.ftruncate(fd, size))

    def _with_held(self, step: Callable[[int], object]) -> None:
        if self._held:
            try:
                step(self._rng.choice(self._held))
            except OSError as error:
                if error.errno not in OWN_ERRORS:
                    raise


if __name__ == "__main__":
    directory, seed, seconds, files, *steps = sys.argv[1:]
    program = Program(directory, int(seed), int(files))
    program.run(float(seconds), steps or STEPS)
    print(json.dumps(program.failures))
