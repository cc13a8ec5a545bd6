"""A worker process of a training run in which things are killed. It begins again after every error.

    python training_worker.py KIND DIRECTORY NAME RECORDS

KIND "bsp" pushes what is a function of the worker, the step and the parameters that it pulled. Each push
of "async" counts itself in an element of "ledger" that no other push counts in, and once in every element
of "total". RECORDS is a directory outside the run:

    stop     once there is such a file, the worker ends: in bsp after the step that it names
    pulled   a line for each version that a worker pulled: NAME VERSION DIGEST
    tries    a byte for each push of "async" that was begun; its position is the number of the push
    acked    a line for each that was acknowledged: NUMBER NAME STEP
"""

import hashlib
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from irdmafs.train import TrainError, Worker

Arrays = Mapping[str, NDArray[Any]]

SHAPES = {"layer.weight": (257, 129), "layer.bias": (257,), "scale": ()}
# A push of "async" adds 1 to one of so many counters of two bits in an element: fp32 holds them exactly.
COUNTERS = 12
LEDGER = 8192
TOTAL = 3000
AGAIN_S = 0.1


def gradients(name: str, step: int, parameters: Arrays) -> dict[str, NDArray[Any]]:
    """Return what a worker of "bsp" pushes at a step."""
    random = np.random.default_rng([int(name[1:]), step])
    found = {}
    for parameter, value in sorted(parameters.items()):
        noise = random.standard_normal(value.shape).astype(np.float32)
        found[parameter] = np.asarray(noise + value * np.float32(0.25), np.float32)
    return found


def counted(number: int) -> dict[str, NDArray[Any]]:
    """Return the push of "async" with this number."""
    ledger = np.zeros(LEDGER, np.float32)
    ledger[number // COUNTERS] = 4.0 ** (number % COUNTERS)
    return {"ledger": ledger, "total": np.ones(TOTAL, np.float32)}


def digest(parameters: Arrays) -> str:
    """Return a digest of all bits of parameters."""
    found = hashlib.sha256()
    for name, value in sorted(parameters.items()):
        found.update(name.encode() + np.ascontiguousarray(value).tobytes())
    return found.hexdigest()[:16]


class Records:
    """Records that the processes of a run keep outside it. Each is appended at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _append(self, name: str, record: bytes) -> int:
        """Return the position after the record."""
        fd = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(fd, record)
            return os.lseek(fd, 0, os.SEEK_CUR)
        finally:
            os.close(fd)

    def _lines(self, name: str) -> list[list[str]]:
        path = self._folder / name
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def stop(self, step: int) -> None:
        hidden = self._folder / ".stop"
        hidden.write_text(str(step))
        hidden.rename(self._folder / "stop")

    def last_step(self) -> int | None:
        """Return the step that stop() was called with; None: not yet."""
        try:
            return int((self._folder / "stop").read_text())
        except FileNotFoundError:
            return None

    def pulled(self, name: str, version: int, parameters: Arrays) -> None:
        self._append("pulled", f"{name} {version} {digest(parameters)}\n".encode())

    def digests(self) -> list[tuple[str, int, str]]:
        """Return name, version and digest of each pull, in their order."""
        return [(name, int(version), seen) for name, version, seen in self._lines("pulled")]

    def newest(self) -> int:
        """Return the newest version that was pulled."""
        return max((version for _, version, _ in self.digests()), default=0)

    def next_try(self) -> int:
        return self._append("tries", b".") - 1

    def tries(self) -> int:
        path = self._folder / "tries"
        return path.stat().st_size if path.exists() else 0

    def acknowledged(self, number: int, name: str, step: int) -> None:
        self._append("acked", f"{number} {name} {step}\n".encode())

    def acks(self) -> dict[int, tuple[str, int]]:
        """Return worker and step of each push that was acknowledged, by its number."""
        return {int(number): (name, int(step)) for number, name, step in self._lines("acked")}


def lockstep(worker: Worker, records: Records) -> None:
    while True:
        parameters = worker.pull()
        records.pulled(worker.name, worker.version, parameters)
        last = records.last_step()
        if last is not None and worker.step >= last:
            return
        worker.push(gradients(worker.name, worker.step + 1, parameters))


def asynchronous(worker: Worker, records: Records) -> None:
    while records.last_step() is None:
        parameters = worker.pull()
        records.pulled(worker.name, worker.version, parameters)
        number = records.next_try()
        records.acknowledged(number, worker.name, worker.push(counted(number)))


KINDS = {"bsp": lockstep, "async": asynchronous}


def main(kind: str, directory: str, name: str, folder: str) -> None:
    records = Records(Path(folder))
    said = ""
    while True:
        try:
            with Worker(directory, name) as worker:
                KINDS[kind](worker, records)
            return
        except (OSError, TrainError) as error:
            if said != str(error):
                said = str(error)
                print(f"{time.monotonic():.3f} {type(error).__name__}: {error}", flush=True)
            # A mount that is not there tells nothing when it comes.
            time.sleep(AGAIN_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
