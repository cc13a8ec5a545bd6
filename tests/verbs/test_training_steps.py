"""Training steps by RDMA: what they register once the first versions were made."""

import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.clusters import Cluster, ClusterMount, Host, Plan, StoreNode
from harness.parts import STATUS_XATTR
from harness.rdma import need_address
from harness.training_runs import Arrays, start

from irdmafs.backend.cluster.inquiry import ask_nodes
from irdmafs.backend.cluster.report import report_of
from irdmafs.backend.etcd.engine import EtcdEngine
from irdmafs.cli.cluster import load, read_state, with_etcd
from irdmafs.train import Reducer, Worker

pytestmark = [pytest.mark.verbs, pytest.mark.usefixtures("looks_often")]

# Each of the two shards is large enough to move by RDMA, and of one length in every step.
MODEL = {"layer": np.zeros(256 << 10, np.float32)}
STEADY_STEPS = 4
# How many files take turns depends on how soon those of former versions are free again.
STEPS_MAX = 30
SERVE = """
from irdmafs.backend.node import catalog
from irdmafs.cli.command import main

catalog.SPARE_S = float("inf")
main(prog_name="irdmafs")
"""


@contextmanager
def reducing(places: Sequence[Path]) -> Iterator[None]:
    stopped = threading.Event()
    with ExitStack() as stack:
        reducers = [stack.enter_context(Reducer(place, threads=1)) for place in places]
        threads = [
            threading.Thread(target=each.run, args=(stopped.is_set,), daemon=True)
            for each in reducers
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stopped.set()
            for thread in threads:
                thread.join()


class ThriftyCluster(Cluster):
    """Its nodes keep spare files for good: in a guest on a busy machine, a minute is a few steps."""

    def _make_node(self, host: Host) -> StoreNode:
        node = super()._make_node(host)
        assert node.command[:3] == [sys.executable, "-m", "irdmafs"]
        node.command[1:3] = ["-c", SERVE]
        return node


def registrations(cluster: Cluster) -> list[int]:
    """Those of each node and mount. To start a command for it takes longer than a step."""
    config = load(os.fspath(cluster.config))

    async def ask(engine: EtcdEngine) -> dict[str, Any]:
        while True:
            found = await read_state(config, engine)
            await ask_nodes(found, config)
            # One that is busy may not answer in time.
            if len(found.reports) == len(cluster.nodes):
                return report_of(found)

    nodes = with_etcd(config, ask)["nodes"]
    return [each["rdma_registrations"] for each in (*nodes, *map(figures, cluster.mounts))]


def figures(mount: ClusterMount) -> Mapping[str, Any]:
    """As `irdmafs status` tells; to start a process for it takes longer than a step, too."""
    found: Mapping[str, Any] = json.loads(os.getxattr(mount.path, STATUS_XATTR))["cluster"]
    return found


def step(workers: Sequence[Worker], value: float, out: Arrays) -> None:
    gradients = {name: np.full_like(array, value) for name, array in MODEL.items()}
    for worker in workers:
        worker.push(gradients)
    for worker in workers:
        worker.pull(out, timeout_s=60)


@pytest.mark.timeout(300)
def test_steps_register_nothing_once_the_files_take_turns() -> None:
    """Each host has a node, a reducer and a worker; test_staging.py is about mounts elsewhere."""
    plan = Plan(
        nodes=2, mounts=0, namespaces=False, replicas=1, lease_ttl_s=20,
        node_config={"listen": need_address()},
    )  # fmt: skip
    with ThriftyCluster(plan) as cluster, ExitStack() as stack:
        mounts = [cluster.add_mount("--rdma", "require", beside=node) for node in cluster.nodes]
        start(mounts[0].path / "run", MODEL, shards=2, workers=2)
        stack.enter_context(reducing([mount.path / "run" for mount in mounts]))
        workers = [
            stack.enter_context(Worker(mount.path / "run", f"w{number}"))
            for number, mount in enumerate(mounts)
        ]
        out = {name: np.empty_like(array) for name, array in MODEL.items()}
        steady, expected, before = 0, 0.0, registrations(cluster)
        for number in range(STEPS_MAX):
            step(workers, number, out)
            expected += 2 * number
            assert (out["layer"] == expected).all()
            after = registrations(cluster)
            steady, before = steady + 1 if after == before else 0, after
            if steady == STEADY_STEPS:
                break
        assert steady == STEADY_STEPS
        found = [figures(mount) for mount in mounts]
        assert all(each["rdma_bytes"] and not each["rdma_fallbacks"] for each in found)
