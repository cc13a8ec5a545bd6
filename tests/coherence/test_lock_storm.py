"""Two hosts count under locks, in files, in a database of SQLite and in a file of HDF5, while mounts and
programs are killed, stopped, and cut off for longer than the lease: what was acknowledged is neither lost
nor counted twice, and no lock is refused while nobody holds it.

IRDMAFS_INCREMENTS says how many increments are to be acknowledged, IRDMAFS_SEED repeats the kinds of faults
and their order.
"""

import math
import os
import random
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest
from harness.closing import Closing
from harness.clusters import Cluster, ClusterMount, Plan
from harness.mountpoint import eventually
from harness.seeds import chosen_seed
from harness.storms import lock_counters
from harness.storms.faults import Faults

INCREMENTS = int(os.environ.get("IRDMAFS_INCREMENTS") or 100)
BETWEEN_FAULTS = 50  # increments
PROGRAMS_OF_HOST = 2
TTL_S = 2
RECOVERY_S = 60


class Line(NamedTuple):
    """What a program said of one increment; times in nanoseconds. It held the lock between `began` and
    `ended` at most. `ended` is None if it was killed meanwhile, `number` unless it was acknowledged."""

    name: str
    began: int
    ended: int | None = None
    number: int | None = None
    unlocking: int = 0
    error: str = ""


class Programs(Closing):
    """The programs that count on one host. A context manager; leaving it kills them."""

    def __init__(self, mount: ClusterMount, folder: Path, rng: random.Random) -> None:
        self._mount = mount
        self._folder = folder
        self._rng = rng
        self._running: list[subprocess.Popen[bytes]] = []
        self._records: list[Path] = []
        for _ in range(PROGRAMS_OF_HOST):
            self._start()

    def close(self) -> None:
        while self._running:
            self._kill()

    def _start(self) -> None:
        record = self._folder / f"{self._mount.name}-{len(self._records)}"
        self._records.append(record)
        seed = self._rng.randrange(1 << 32)
        command = [sys.executable, lock_counters.__file__, str(self._mount.path), str(seed)]
        with record.open("wb") as output:
            self._running.append(subprocess.Popen(command, stdout=output))

    def _kill(self) -> None:
        program = self._running.pop(0)
        program.kill()
        program.wait(RECOVERY_S)

    def replace_one(self) -> None:
        self._kill()
        self._start()

    def acknowledged(self) -> int:
        return sum(record.read_bytes().count(b"done") for record in self._records)

    def said(self) -> list[list[Line]]:
        """Return what each program said."""
        return [_lines(record.read_text()) for record in self._records]


def _lines(text: str) -> list[Line]:
    found: list[Line] = []
    for words in map(str.split, text.splitlines()):
        kind, name, *rest = words
        if kind == "begins":
            found.append(Line(name, int(rest[0])))
        elif kind == "done":
            number, began, unlocking, ended = map(int, rest)
            found[-1] = Line(name, began, ended, number, unlocking)
        else:
            found[-1] = Line(name, int(rest[1]), int(rest[2]), error=rest[0])
    return found


def refused_without_a_holder(said: list[list[Line]]) -> list[Line]:
    """Return the increments that failed with EAGAIN although no other program can have held the lock."""
    lines = sorted((line for lines in said for line in lines), key=lambda line: line.began)
    # A program that waited for the lock got it after the increment before was about to give it up.
    given_up = {(line.name, line.number): line.unlocking for line in lines if line.number}
    held: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for line in lines:
        if line.error != "EAGAIN":
            before = given_up.get((line.name, (line.number or 0) - 1), 0)
            held[line.name].append((max(line.began, before), line.ended or math.inf))
    return [
        line
        for line in lines
        if line.error == "EAGAIN"
        and not any(
            since <= (line.ended or 0) and line.began <= until for since, until in held[line.name]
        )
    ]


class LockFaults(Faults):
    """Does harm to hosts and programs that count, one at a time, each time that they have counted on."""

    lasts = pauses = (0.2, 2.5)

    def __init__(self, cluster: Cluster, programs: list[Programs], seed: int) -> None:
        super().__init__(cluster, seed)
        self._programs = programs
        self._kinds = {
            "kill mount": self._kill_mount,
            "pause mount": lambda: self._pause("mount", cluster.mounts),
            "isolate mount": lambda: self._isolate("mount", cluster.mounts),
            "kill program": lambda: self._random.choice(programs).replace_one(),
        }

    def acknowledged(self) -> int:
        return sum(programs.acknowledged() for programs in self._programs)

    def run(self, count: int) -> None:
        """Go on until so many increments are acknowledged."""
        while (before := self.acknowledged()) < count:
            eventually(
                lambda: self.acknowledged() >= before + BETWEEN_FAULTS,
                "the programs go on counting",
                RECOVERY_S,
            )
            self._do(self._random.choice([*self._kinds]))
            self._recover()


@pytest.mark.slow
@pytest.mark.timeout(300 + INCREMENTS)
def test_no_acknowledged_increment_is_lost_or_counted_twice(tmp_path: Path) -> None:
    seed = chosen_seed()
    print(f"IRDMAFS_INCREMENTS={INCREMENTS}")
    rng = random.Random(seed)
    plan = Plan(nodes=2, mounts=2, replicas=2, buckets=8, lease_ttl_s=TTL_S)
    with Cluster(plan, links=True) as cluster:
        for name, counter in lock_counters.COUNTERS.items():
            counter.make(cluster.mounts[0].path / name)
        here, there = (Programs(mount, tmp_path, rng) for mount in cluster.mounts)
        faults = LockFaults(cluster, [here, there], seed)
        with here, there:
            try:
                faults.run(INCREMENTS)
            finally:
                print(*faults.history, sep="\n")
        said = [*here.said(), *there.said()]
        lines = [line for program in said for line in program]
        print(Counter(f"{line.name} {line.error}" for line in lines if line.error))
        spurious = refused_without_a_holder(said)
        assert not spurious, f"seed {seed}"
        for name, counter in lock_counters.COUNTERS.items():
            numbers = [line.number for line in lines if line.name == name and line.number]
            twice = [number for number, times in Counter(numbers).items() if times > 1]
            said_twice = sorted(
                (line.began, place, line)
                for place, program in enumerate(said)
                for line in program
                if line.name == name and line.number in twice
            )
            print(*said_twice, sep="\n")
            assert not twice, f"seed {seed}: {name}"
            for mount in cluster.mounts:
                last = counter.look(mount.path / name)
                assert last >= max(numbers), f"seed {seed}: {name} on {mount.name}"
            print(f"{name}: {len(numbers)} acknowledged, the counter is {last}")
