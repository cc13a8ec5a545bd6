"""Training by RDMA: what steps register once the first versions are there. A mount beside the device."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from conftest import make_mount
from harness.clusters import MIB, Cluster, ClusterMount, counters
from harness.patterns import pattern, version_of
from harness.rdma import need_ports
from harness.training_runs import reducing, start

from irdmafs.backend.cluster.overview import ask_nodes
from irdmafs.backend.cluster.report import report_of
from irdmafs.backend.etcd.engine import EtcdEngine
from irdmafs.cli.cluster import load, read_state, with_etcd
from irdmafs.train import Worker

pytestmark = pytest.mark.verbs

# Each of the two shards is large enough to move by RDMA, and of one length in every step.
MODEL = {"layer": np.zeros(64 << 10, np.float32)}
STEADY_STEPS = 4
# How many files take turns depends on how soon those of former versions are free again.
STEPS_MAX = 30


def registrations(cluster: Cluster, mounts: Sequence[ClusterMount]) -> list[int]:
    """Return how many memory regions each node and each of these mounts has registered. It asks them
    directly: a command takes longer to start than a training step."""
    config = load(os.fspath(cluster.config))

    async def ask(engine: EtcdEngine) -> dict[str, Any]:
        while True:
            found = await read_state(config, engine)
            await ask_nodes(found, config)
            # One that is busy may not answer in time.
            if len(found.reports) == len(cluster.nodes):
                return report_of(found)

    nodes = with_etcd(config, ask)["nodes"]
    return [each["rdma_registrations"] for each in (*nodes, *map(counters, mounts))]


def test_steps_register_nothing_once_the_files_take_turns(rdma_cluster: Cluster) -> None:
    """Each host has a node, a reducer and a worker; test_staging.py is about mounts elsewhere."""
    with ExitStack() as stack:
        mounts = [
            rdma_cluster.add_mount("--rdma", "require", beside=node) for node in rdma_cluster.nodes
        ]
        places = [mount.path / "steps" / "run" for mount in mounts]
        places[0].parent.mkdir()
        os.setxattr(places[0].parent, "user.irdmafs.replicas", b"1")
        start(places[0], MODEL, shards=2, workers=2)
        for place in places:
            stack.enter_context(reducing(place))
        workers = [
            stack.enter_context(Worker(place, f"w{number}")) for number, place in enumerate(places)
        ]
        out = {name: np.empty_like(array) for name, array in MODEL.items()}
        steady, expected, before = 0, 0.0, registrations(rdma_cluster, mounts)
        for number in range(STEPS_MAX):
            for worker in workers:
                worker.push({name: np.full_like(array, number) for name, array in MODEL.items()})
            for worker in workers:
                worker.pull(out, timeout_s=60)
            expected += 2 * number
            assert (out["layer"] == expected).all()
            after = registrations(rdma_cluster, mounts)
            steady, before = steady + 1 if after == before else 0, after
            if steady == STEADY_STEPS:
                break
        assert steady == STEADY_STEPS
        found = [*map(counters, mounts)]
        assert all(each["rdma_bytes"] and not each["rdma_fallbacks"] for each in found)


def test_mount_beside_the_device_passes_reads_and_writes_through() -> None:
    need_ports()
    with make_mount("kernel") as mount:
        file = mount.path / "weights"
        with mount.requests() as requests:
            file.write_bytes(pattern(1, MIB))
            assert version_of(file.read_bytes()) == 1
        assert not {"READ", "WRITE"} & set(requests), requests
