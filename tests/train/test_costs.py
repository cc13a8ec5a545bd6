"""Trainings cost a cluster little beside the bytes of their parameters. A mount whose users do not train
pays nothing."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
from harness import training_runs as runs
from harness.cluster_mount import CLUSTER
from harness.clusters import LONG_LEASE_S, Cluster, Plan, counters
from harness.mountpoint import NOT_BLOCKING, Mount, eventually

from irdmafs.train import Reducer, Worker
from irdmafs.train.directory import TrainDirectory
from irdmafs.train.liveness import Lock

pytestmark = pytest.mark.usefixtures("looks_often")

SESSIONS = ("kernel", CLUSTER)
PLAN = Plan(nodes=1, mounts=2, replicas=1, lease_ttl_s=LONG_LEASE_S)


def test_planning_fetches_no_push(cluster: Cluster) -> None:
    worker_at, planned_at = cluster.mounts
    run = runs.start(worker_at.path / "planned", runs.model(), shards=3)
    there = planned_at.path / "planned"
    with Worker(run, "w") as worker, Reducer(there) as reducer:
        reducer._take_parts()
        coordinator, train = reducer._coordinator, reducer.train
        assert coordinator is not None
        # It reads the files of the run itself.
        assert not coordinator.step(train.config(), train.newest_plan(), None)
        worker.push(runs.ones())
        before = counters(planned_at)
        eventually(
            lambda: coordinator.step(train.config(), train.newest_plan(), None), "a plan is made"
        )
        after = counters(planned_at)
        assert after["fetched_files"] == before["fetched_files"]
        # The mount may acknowledge changes above the run, which it follows, at any time.
        took = {kind: after[kind] - before[kind] for kind in ("transactions", "lease_transactions")}
        assert took["transactions"] - took["lease_transactions"] < 4


def test_push_after_the_first_makes_no_files(cluster: Cluster) -> None:
    """They lie in the files of the last one that has counted."""
    run = runs.start(cluster.mounts[0].path / "again", runs.model(), shards=3)

    def numbers() -> set[int]:
        (push,) = train.push.iterdir()
        return {file.stat().st_ino for file in push.iterdir()}

    train = TrainDirectory(run)
    with Worker(run, "w") as worker, Reducer(run) as reducer:
        worker.push(runs.ones())
        first = numbers()
        # A reducer on another host than the node's leaves it time to have one of its own.
        runs.reduce_until(reducer, lambda: runs.newest(run) == 1, "the push counts")
        runs.reduce(reducer)
        worker.push(runs.ones())
        assert numbers() == first
        runs.reduce_until(reducer, lambda: runs.newest(run) == 2, "the next push counts")
    assert not list(train.staging.iterdir())


def test_parameters_that_came_ahead_of_the_version_are_not_fetched_again(cluster: Cluster) -> None:
    worker_at, reduced_at = cluster.mounts
    run = runs.start(worker_at.path / "ahead", runs.model(), shards=3)
    with Worker(run, "w") as worker, Reducer(reduced_at.path / "ahead") as reducer:
        worker.pull()
        push = runs.put_all(worker, runs.ones())
        runs.reduce_until(reducer, lambda: runs.fetched(worker), "the shards are here")
        push.finish()
        runs.reduce_until(reducer, lambda: runs.newest(run) == 1, "the version is made")
        # Its plan is read, too.
        assert worker.train.newest_plan().version == 1
        before = counters(worker_at)["fetched_files"]
        pulled = worker.pull(timeout_s=30)
        assert counters(worker_at)["fetched_files"] == before
        assert runs.same_bits(pulled, runs.parameters(run))


def test_parts_of_others_are_asked_for_only_while_no_version_comes(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question about a lock is one to etcd."""
    here, there = (mount.path / "asked" for mount in cluster.mounts)
    runs.start(here, runs.model(), shards=3)
    asked = Mock(side_effect=Lock.hold)
    monkeypatch.setattr(Lock, "hold", lambda *of: asked(*of))

    def asks(reducer: Reducer) -> int:
        asked.reset_mock()
        reducer._looked_s = 0.0
        reducer.step()
        return int(asked.call_count)

    def sees(reducer: Reducer, version: int) -> bool:
        reducer._found, reducer._looked_s = None, math.inf
        reducer.step()
        found: Any = reducer._found
        return bool(found[1].newest.version == version)

    with Worker(here, "w") as worker, Reducer(here) as works, Reducer(there) as waits:
        # Long ago, when they left parts to reducers beside their nodes.
        works._begun_s = waits._begun_s = 0.0
        # For the coordinator's work and the only part.
        assert asks(works) == asks(waits) == 2
        before = [counters(mount)["lock_transactions"] for mount in cluster.mounts]
        assert asks(waits) == 2
        assert before == [counters(mount)["lock_transactions"] for mount in cluster.mounts]
        worker.push(runs.ones())
        runs.reduce_until(works, lambda: runs.newest(here) == 1, "a version")
        eventually(lambda: sees(waits, 1), "it is seen")
        assert asks(waits) == 0
        assert asks(waits) == 2


def test_who_takes_over_knows_the_version_that_came_while_it_did_not_look(cluster: Cluster) -> None:
    run = runs.start(cluster.mounts[0].path / "taken", runs.model(), shards=1)
    with Worker(run, "w") as worker, Reducer(run) as second:
        with Reducer(run) as first:
            runs.reduce_until(
                first, lambda: len(first._locks) == 2, "it coordinates and has the part"
            )
            second.step()
            worker.push(runs.ones())
            runs.reduce_until(first, lambda: runs.newest(run) == 1, "the push counts")
        worker.pull()
        worker.push(runs.ones())  # on the base of version 1
        runs.reduce_until(second, lambda: runs.newest(run) == 2, "the next push counts")
        worker.pull()


# The kernel asks again for what it has not asked for a second.
ASKS_AGAIN = {"LOOKUP", "GETATTR"}
TIMES = 20


def cost_of(mount: Mount, use: Callable[[], object]) -> tuple[Counter[str], dict[str, int]]:
    """Return the requests of a use that is warm, and what it asked of etcd and of store nodes."""
    use()
    before = mount.status().get("cluster", {})
    with mount.requests() as counted:
        use()
    after = mount.status().get("cluster", {})
    for kind in (*NOT_BLOCKING, *ASKS_AGAIN):
        counted.pop(kind, None)
    names = ("transactions", "round_trips", "lease_transactions")
    return counted, {name: after[name] - before[name] for name in names if before}


def test_use_of_a_mount_costs_the_same_with_a_run_on_it(new_mount: Callable[..., Mount]) -> None:
    with new_mount() as mount:
        folder = mount.path / "folder"
        folder.mkdir()
        (folder / "file").write_bytes(b"x" * 1000)

        def opens() -> None:
            for _ in range(TIMES):
                (folder / "file").read_bytes()

        def publishes() -> None:
            for _ in range(TIMES):
                (folder / "new").write_bytes(b"y")

        def costs() -> list[tuple[Counter[str], dict[str, int]]]:
            return [cost_of(mount, use) for use in (opens, publishes)]

        before = costs()
        while (again := costs()) != before:
            before = again
        run = runs.start(mount.path / "run")
        with Reducer(run) as reducer, Worker(run, "w") as worker:
            worker.push(runs.ones())
            runs.reduce_until(reducer, lambda: runs.newest(run) == 1, "a version is made")
            worker.pull(timeout_s=60)
            # A mount gives up what it has not used for a while, and others may ask how it is.
            eventually(lambda: costs() == before, f"it costs {before} again", 60)
