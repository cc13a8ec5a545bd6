"""What was acknowledged stays readable, whole, and never goes back while RDMA breaks under a cluster.

Programs on two mounts write and read while links go down, queue pairs break and nodes are killed.
IRDMAFS_SEED repeats a run's faults, IRDMAFS_FAULTS says how many.
"""

import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness import rdma
from harness.clusters import MIB, Cluster, Daemon
from harness.mountpoint import eventually
from harness.programs import breakable
from harness.seeds import chosen_seed
from harness.storms.history import Workers, check

pytestmark = pytest.mark.verbs

FAULTS = int(os.environ.get("IRDMAFS_FAULTS") or 5)
LINKS = ("roce0", "roce1")
LARGEST_BYTES = 4 * MIB
# Programs pause so long between two operations, to leave a guest's only processor time for recovery.
PAUSE_S = 0.1
BIG_BYTES = 8 * MIB
# For what must come about at some time. A node that was killed is whole again after 5 s on a machine of
# its own, and after half a minute in a guest on a busy one.
PHASE_S = 180.0


class Faults:
    """Breaks what RDMA goes through, and mends it."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self._cluster = cluster
        self._random = random.Random(seed)
        self.happened: Counter[str] = Counter()
        self._kinds: dict[str, Callable[[], None]] = {
            "link down": lambda: self._down(self._random.choice(LINKS)),
            "all links down": lambda: self._down(*LINKS),
            "queue pairs of a node": lambda: self._break(self._random.choice(cluster.nodes)),
            "queue pairs of a mount": lambda: self._break(self._random.choice(cluster.mounts)),
            "node killed": self._kill,
        }

    def run(self, count: int) -> None:
        """Every kind comes up."""
        order: list[str] = []
        while len(order) < count:
            order += self._random.sample(sorted(self._kinds), len(self._kinds))
        for kind in order[:count]:
            self._kinds[kind]()
            self.happened[kind] += 1
            self._pass_time()

    def _pass_time(self) -> None:
        time.sleep(self._random.uniform(0.2, 1.0))

    def _down(self, *names: str) -> None:
        rdma.set_links(*names, up=False)
        self._pass_time()
        rdma.set_links(*names, up=True)

    def _break(self, part: Daemon) -> None:
        # The signal ends a process that has just begun.
        eventually(lambda: breakable.is_ready(part.pid), f"{part.name} runs", PHASE_S)
        os.kill(part.pid, breakable.SIGNAL)

    def _kill(self) -> None:
        node = self._random.choice(self._cluster.nodes)
        node.kill9()
        self._pass_time()
        node.start()
        self._cluster.wait_healthy(PHASE_S)


def told(cluster: Cluster, what: str) -> int:
    """By all mounts together."""
    return sum(mount.status()["cluster"][what] for mount in cluster.mounts)


def wait_for_more(cluster: Cluster, what: str) -> None:
    """Programs go on meanwhile."""
    before = told(cluster, what)
    end = time.monotonic() + PHASE_S
    while told(cluster, what) <= before:
        assert time.monotonic() < end, f"{what} stays {before} for {PHASE_S:g} s"
        time.sleep(0.2)


def fall_back_and_return(cluster: Cluster) -> None:
    """What is on its way when all links go down is moved over TCP, what comes later by RDMA again."""
    before = told(cluster, "rdma_fallbacks")
    end = time.monotonic() + PHASE_S
    tries = 0
    with ThreadPoolExecutor(1) as programs:
        while told(cluster, "rdma_fallbacks") == before:
            assert time.monotonic() < end, f"nothing fell back to TCP for {PHASE_S:g} s"
            wait_for_more(cluster, "rdma_bytes")
            tries += 1
            data = bytes(BIG_BYTES + tries)
            big = cluster.mounts[0].path / f"big{tries}"
            writing = programs.submit(big.write_bytes, data)
            while not (writing.done() or is_coming_in(cluster, len(data))):
                time.sleep(0.001)
            rdma.set_links(*LINKS, up=False)
            writing.result(PHASE_S)
            rdma.set_links(*LINKS, up=True)
            assert cluster.mounts[1].path.joinpath(big.name).read_bytes() == data
            big.unlink()
    wait_for_more(cluster, "rdma_bytes")


def is_coming_in(cluster: Cluster, size: int) -> bool:
    """Whether a node has a file of this size, which are made before the first byte comes."""
    for node in cluster.nodes:
        for file in (node.store / "incoming").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if file.stat().st_size == size:
                    return True
    return False


@pytest.mark.timeout(600 + 60 * FAULTS)
def test_history_is_allowed_while_rdma_breaks_and_mends(rdma_cluster: Cluster) -> None:
    if not rdma.IN_GUEST:
        pytest.skip(f"sets links down; {rdma.REMEDY}")
    rdma.need_ports(2)
    seed = chosen_seed()
    print(f"IRDMAFS_FAULTS={FAULTS}")
    folders = {mount.host.name: mount.path / "work" for mount in rdma_cluster.mounts}
    (rdma_cluster.mounts[0].path / "work").mkdir()
    before = {what: told(rdma_cluster, what) for what in ("rdma_bytes", "rdma_fallbacks")}
    with Workers(
        folders,
        rdma_cluster.directory / "history",
        seed=seed,
        largest_bytes=LARGEST_BYTES,
        pause_s=PAUSE_S,
    ) as workers:
        try:
            wait_for_more(rdma_cluster, "rdma_bytes")
            faults = Faults(rdma_cluster, seed)
            faults.run(FAULTS)
            fall_back_and_return(rdma_cluster)
        finally:
            rdma.set_links(*LINKS, up=True)
        rdma_cluster.wait_healthy(PHASE_S)
        workers.stop()
        workers.final_reads()
        operations = workers.operations()
    moved = {what: told(rdma_cluster, what) - count for what, count in before.items()}
    print(f"{dict(faults.happened)}; {len(operations)} operations; {moved}")
    violations = check(operations, across_hosts=False)
    texts = "\n\n".join(f"{each.kind}: {each.text}" for each in violations[:20])
    assert not violations, f"{len(violations)} with seed {seed}:\n{texts}"
    assert sum(each.outcome == "ok" for each in operations) > 10 * FAULTS
