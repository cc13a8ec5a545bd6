"""Two hosts count under locks while mounts and programs are killed, stopped, and cut off for longer than
the lease: what was acknowledged is neither lost nor counted twice.

IRDMAFS_INCREMENTS says how many increments are to be acknowledged, IRDMAFS_SEED repeats the kinds of faults
and their order.
"""

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import lock_counters
import pytest
from cluster import Cluster, ClusterMount, Plan
from mountpoint import eventually

INCREMENTS = int(os.environ.get("IRDMAFS_INCREMENTS") or 2000)
BETWEEN_FAULTS = 50  # increments
PROGRAMS_OF_HOST = 2
TTL_S = 2
RECOVERY_S = 60


class Programs:
    """The programs that count on one host."""

    def __init__(self, mount: ClusterMount, folder: Path, rng: random.Random) -> None:
        self._mount = mount
        self._folder = folder
        self._rng = rng
        self._running: list[subprocess.Popen[bytes]] = []
        self.records: list[Path] = []

    def __enter__(self) -> "Programs":
        for _ in range(PROGRAMS_OF_HOST):
            self._start()
        return self

    def __exit__(self, *_: object) -> None:
        while self._running:
            self._kill()

    def _start(self) -> None:
        record = self._folder / f"{self._mount.name}-{len(self.records)}"
        self.records.append(record)
        seed = self._rng.randrange(1 << 32)
        with record.open("wb") as output:
            self._running.append(
                subprocess.Popen(
                    [sys.executable, lock_counters.__file__, str(self._mount.path), str(seed)],
                    stdout=output,
                )
            )

    def _kill(self) -> None:
        program = self._running.pop(0)
        program.kill()
        program.wait(RECOVERY_S)

    def replace_one(self) -> None:
        self._kill()
        self._start()


class Storm:
    def __init__(self, cluster: Cluster, programs: list[Programs], rng: random.Random) -> None:
        self._cluster = cluster
        self._programs = programs
        self._rng = rng

    def lines(self) -> Counter[tuple[str, str]]:
        """Return how often each line was printed."""
        found: Counter[tuple[str, str]] = Counter()
        for programs in self._programs:
            for record in programs.records:
                for line in record.read_text().splitlines():
                    name, number = line.split()
                    found[name, number] += 1
        return found

    def acknowledged(self) -> Counter[tuple[str, int]]:
        return Counter(
            {
                (name, int(number)): n
                for (name, number), n in self.lines().items()
                if name != "failed"
            }
        )

    def rage(self, increments: int) -> Counter[str]:
        """Return how often each fault happened, after so many increments."""
        faults: dict[str, Callable[[ClusterMount, Programs], None]] = {
            "mount killed": lambda mount, _: mount.restart(),
            "mount stopped": self._stop,
            "host cut off": self._cut_off,
            "program killed": lambda _, programs: programs.replace_one(),
        }
        happened: Counter[str] = Counter()
        while True:
            before = self.acknowledged().total()
            if before >= increments:
                return happened
            eventually(
                lambda: self.acknowledged().total() >= before + BETWEEN_FAULTS,  # noqa: B023
                "the programs go on counting",
                RECOVERY_S,
            )
            kind = self._rng.choice(list(faults))
            host = self._rng.randrange(len(self._programs))
            faults[kind](self._cluster.mounts[host], self._programs[host])
            happened[kind] += 1

    def _stop(self, mount: ClusterMount, _: Programs) -> None:
        mount.pause()
        time.sleep(self._rng.uniform(0.2, 2.5) * TTL_S)
        mount.resume()

    def _cut_off(self, mount: ClusterMount, _: Programs) -> None:
        self._cluster.isolate(mount)
        time.sleep(self._rng.uniform(0.2, 2.5) * TTL_S)
        self._cluster.heal_all()


@pytest.mark.slow
@pytest.mark.timeout(300 + INCREMENTS)
def test_no_acknowledged_increment_is_lost_or_counted_twice(tmp_path: Path) -> None:
    seed = int(os.environ.get("IRDMAFS_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"\nIRDMAFS_SEED={seed} IRDMAFS_INCREMENTS={INCREMENTS}")
    rng = random.Random(seed)
    plan = Plan(nodes=2, mounts=2, replicas=2, buckets=8, lease_ttl_s=TTL_S)
    with Cluster(plan, links=True) as cluster:
        for name in lock_counters.COUNTERS:
            (cluster.mounts[0].path / name).write_bytes(b"%020d" % 0)
        here, there = (Programs(mount, tmp_path, rng) for mount in cluster.mounts)
        storm = Storm(cluster, [here, there], rng)
        with here, there:
            print(storm.rage(INCREMENTS))
        print(Counter({code: n for (name, code), n in storm.lines().items() if name == "failed"}))
        acknowledged = storm.acknowledged()
        twice = [increment for increment, times in acknowledged.items() if times > 1]
        assert not twice, f"seed {seed}"
        for name in lock_counters.COUNTERS:
            numbers = [number for counter, number in acknowledged if counter == name]
            for mount in cluster.mounts:
                last = int((mount.path / name).read_bytes())
                assert last >= max(numbers), f"seed {seed}: {name} on {mount.name}"
            print(f"{name}: {len(numbers)} acknowledged, the counter is {last}")
