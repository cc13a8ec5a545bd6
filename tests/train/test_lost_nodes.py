"""The files of a version have as many replicas as its directory says."""

import contextlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
from harness.clusters import Cluster, Plan
from harness.training_runs import gradients, model, newest, reduce_until, same_bits, start
from numpy.typing import NDArray
from safetensors.numpy import load_file

from irdmafs.train import Reducer, Worker
from irdmafs.train.directory import TrainDirectory

pytestmark = pytest.mark.usefixtures("looks_often")


def replicas_of(file: Path) -> set[int]:
    """Return how many nodes keep each stripe of a file, in sync."""
    stripes = json.loads(os.getxattr(file, "user.irdmafs.nodes"))
    assert stripes
    return {sum(node["in_sync"] for node in stripe["nodes"]) for stripe in stripes}


def step(reducer: Reducer, worker: Worker, number: int) -> None:
    worker.push(gradients(0, number))
    run = worker.train.models
    reduce_until(reducer, lambda: newest(run) == number, f"version {number} is made")
    worker.pull(timeout_s=60)


def arrays_of(run: Path) -> dict[str, NDArray[np.generic]]:
    """Return parameters, master weights and moments of the newest version, as a host reads them."""
    version = TrainDirectory(run).version(newest(run))
    return {
        f"{file.relative_to(version)} {name}": array
        for part in ("params", "state")
        for file in sorted(version.glob(f"*/{part}/*"))
        for name, array in load_file(file).items()
    }


@pytest.mark.timeout(240)
def test_version_outlives_nodes_that_lose_their_disks(place: Path) -> None:
    plan = Plan(nodes=3, mounts=2, replicas=2, node_config={"rereplicate_after": 600})
    undisturbed = start(place / "run", model(), rule="adamw", shards=3)
    with Reducer(undisturbed) as reducer, Worker(undisturbed, "w") as worker:
        for number in (1, 2, 3):
            step(reducer, worker, number)
    with Cluster(plan) as cluster, contextlib.ExitStack() as stack:
        here, there = (mount.path for mount in cluster.mounts)
        members = {}
        for replicas in (2, 3):
            top = here / f"{replicas}"
            top.mkdir()
            os.setxattr(top, "user.irdmafs.replicas", b"%d" % replicas)
            run = start(top / "run", model(), rule="adamw", shards=3)
            members[replicas] = (
                stack.enter_context(Reducer(run)),
                stack.enter_context(Worker(run, "w")),
                run.relative_to(here),
            )
        for replicas, (reducer, worker, run) in members.items():
            for number in (1, 2):
                step(reducer, worker, number)
            version = TrainDirectory(here / run).version(2)
            files = [path for path in version.rglob("*") if path.is_file()]
            assert len(files) == 8
            assert set().union(*map(replicas_of, files)) == {replicas}
        # All but one of the replicas are lost: of the first run's two, then of the other's three.
        for node, (reducer, worker, run) in zip(cluster.nodes, members.values(), strict=False):
            expected = arrays_of(here / run)
            node.kill9()
            node.wipe()
            assert same_bits(arrays_of(there / run), expected)
            step(reducer, worker, 3)
            assert same_bits(
                load_file(there / run / "model.safetensors"),
                load_file(undisturbed / "model.safetensors"),
            )
