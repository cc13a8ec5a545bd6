"""A run goes on when the host of its reducer dies, or is cut off for longer than its lease."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.clusters import Cluster, Daemon, Plan
from harness.daemons import paused
from harness.mountpoint import Mount, eventually
from harness.parts import ClusterMount, irdmafs_command, run_instead
from harness.programs import hasty_reducer
from harness.training_runs import everywhere, newest, ones, put_all, reduce_until, start

from irdmafs.train import Reducer, Refused, Worker
from irdmafs.train.directory import TrainDirectory
from irdmafs.train.liveness import is_locked

LEASE_S = 2

pytestmark = pytest.mark.usefixtures("looks_often")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(Plan(nodes=1, mounts=2, replicas=1, lease_ttl_s=LEASE_S)) as made:
        yield made


def reducer_on(cluster: Cluster, mount: ClusterMount) -> Daemon:
    """Start a reducer that has all parts when this returns."""
    run = mount.path / "run"
    log = cluster.directory / "reducer.log"
    process = Daemon("reducer", mount.host, irdmafs_command("train", "reduce", run, "-v"), log)
    run_instead(process, hasty_reducer.__file__).start()
    parts = ["coordinator", *TrainDirectory(run).layout.parts]
    eventually(
        lambda: all(f"has {part} now" in process.log_tail() for part in parts), "it has parts", 30
    )
    return process


def is_free(run: Path) -> bool:
    return not is_locked(TrainDirectory(run).reducers / "coordinator")


def test_reducer_that_was_cut_off_for_longer_than_its_lease_goes_on(cluster: Cluster) -> None:
    here, cut_off = cluster.mounts
    run = start(here.path / "run", shards=2)
    process = reducer_on(cluster, cut_off)
    with Worker(run, "w") as worker:
        worker.push(ones(1))
        assert worker.pull(timeout_s=30)["norm"].tolist() == [1] * 3
        with paused(cut_off):
            eventually(lambda: is_free(run), "its lease ends", 30)
        worker.push(ones(1))
        assert worker.pull(timeout_s=30)["norm"].tolist() == [2] * 3
    process.kill9()


@pytest.mark.parametrize("has_counted", [True, False])
def test_worker_of_a_small_run_that_was_cut_off_pushes_nothing_once_another_has_its_name(
    cluster: Cluster, has_counted: bool
) -> None:
    here, cut_off = cluster.mounts
    run = start(here.path / "run", small=True)
    name = TrainDirectory(run).workers / "w"
    with Worker(cut_off.path / "run", "w") as stopped, Reducer(run) as reducer:
        stopped.push(ones(1))
        if has_counted:
            reduce_until(reducer, lambda: newest(run) == 1, "it counts")
            stopped.pull(timeout_s=30)
        push = put_all(stopped, ones(8))
        with paused(cut_off):
            eventually(lambda: not is_locked(name), "its lease ends", 30)
        with Worker(run, "w") as worker:
            assert worker.step == 1
            with pytest.raises(OSError, match="Input/output"):
                push.finish()
            with pytest.raises(Refused, match="is taking part"):
                stopped.push(ones(8))
            reduce_until(reducer, lambda: newest(run) == 1, "the first counts")
            worker.push(ones(2))
            reduce_until(reducer, lambda: newest(run) == 2, "that of the other counts")
    assert everywhere(run, 3)


def test_reducer_whose_host_reaches_no_node_leaves_its_parts_to_another(cluster: Cluster) -> None:
    here = cluster.mounts[0]
    (node,) = cluster.nodes
    fails = cluster.add_mount("--timeout", "1")
    run = start(here.path / "run", shards=2)
    process = reducer_on(cluster, fails)
    with Worker(run, "w") as worker, Reducer(run) as other:
        worker.push(ones(1))
        worker.pull(timeout_s=30)
        cluster.cut(fails, node)
        worker.push(ones(1))
        eventually(lambda: "leaves its parts" in process.log_tail(), "it gives up", 30)
        eventually(lambda: not is_free(run), "it tries again", 30)
        reduce_until(other, lambda: newest(run) >= 2, "another reducer has its parts")
        assert process.alive
        cluster.heal(fails, node)
    process.kill9()


def test_a_training_has_not_ended_because_its_mount_was_killed(own_mount: Mount) -> None:
    train = TrainDirectory(own_mount.path / "run")
    assert train.has_ended
    start(own_mount.path / "run")
    own_mount.kill9()
    assert not train.has_ended
    own_mount.remount()
    assert not train.has_ended
