"""A small run of a cluster agrees seldom: a push is one file, and the coordinator makes versions alone."""

import os
import shutil
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from harness import training_runs as runs
from harness.clusters import Cluster
from harness.mountpoint import NOT_BLOCKING
from harness.training_runs import everywhere, newest, ones, reduce, same_bits, start
from safetensors.numpy import save_file

from irdmafs.train import Reducer, TrainError, Worker, coordinator, directory, part
from irdmafs.train import worker as worker_module
from irdmafs.train.directory import TrainDirectory
from irdmafs.train.liveness import Lock, WatchedLock, is_locked


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_small_run_makes_the_parameters_of_a_large_one(run: Path, clip: float) -> None:
    make = partial(runs.run_bsp, steps=6, rule="adamw", keep=2, clip_norm=clip)
    assert same_bits(make(run, small=True), make(run.with_name("large")))


def test_step_makes_and_removes_no_files(run: Path) -> None:
    start(run, runs.model(), shards=3, small=True, keep=2)
    files = []
    with Reducer(run) as reducer, Worker(run, "a") as worker:
        for step in range(1, 9):
            assert worker.push(runs.gradients(0, step)) == step
            reduce(reducer)
            assert same_bits(worker.pull(timeout_s=5), runs.parameters(run))
            files.append({path.stat().st_ino for path in (run / ".train").rglob("*")})
    assert files[4] == files[5] == files[6] == files[7]


@pytest.mark.parametrize(("rule", "most"), [("sum", 110), ("adamw", 130)])
def test_step_is_a_transaction_for_each_push_and_two_for_its_version(
    cluster: Cluster, rule: str, most: int
) -> None:
    """`most`: requests of both mounts."""
    here, there = (mount.path / rule for mount in cluster.mounts)
    model = {"all": np.zeros(1 << 18, np.float32)}
    layout = TrainDirectory(start(here, model, shards=3, small=None, rule=rule)).layout
    assert layout.is_small and len(layout.shards) == 1
    took = []
    with (
        runs.reducing(here), runs.reducing(there), Worker(here, "a") as a, Worker(there, "b") as b
    ):  # fmt: skip
        for _ in range(12):
            for worker in (a, b):
                worker.push(model)
            for worker in (a, b):
                worker.pull(timeout_s=60)
            asked = [mount.status() for mount in cluster.mounts]
            counted = sum((Counter(one["requests"]) for one in asked), Counter())
            answered = sum(counted[kind] for kind in counted.keys() - {*NOT_BLOCKING})
            took.append((sum(one["cluster"]["transactions"] for one in asked), answered))
    # Others keep the machine busy: then some are asked again.
    transactions, requests = np.diff(took, axis=0)[4:].T
    assert np.median(transactions) <= 4, took
    assert min(requests) <= most, took


def test_of_two_workers_that_begin_at_the_same_time_one_has_the_name(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither saw the other when it looked, nor did the coordinator see the one."""
    start(run, small=True)
    with Worker(run, "a") as worker, Reducer(run) as reducer:
        monkeypatch.setattr(worker_module, "is_locked", lambda path: False)
        with pytest.raises(TrainError, match="is taking part"):
            Worker(run, "a")
        for name in ("WatchedLock.is_held", "is_locked"):
            monkeypatch.setattr(f"irdmafs.train.coordinator.{name}", lambda path: False)
        reduce(reducer)
        assert worker.push(ones()) == 1 and worker._lock.is_held


@pytest.mark.parametrize("is_ended", [True, False])
def test_a_worker_goes_on_with_the_file_of_one_that_ended_or_another_one(
    run: Path, monkeypatch: pytest.MonkeyPatch, is_ended: bool
) -> None:
    """A coordinator may be about to remove it."""
    start(run, small=True)
    path = run / ".train" / "workers" / "a"
    Worker(run, "a")._lock.close()
    before = path.stat().st_ino
    watched = WatchedLock(path)
    if not is_ended:
        hold = Lock.hold

        def removed_meanwhile(lock: Lock, content: bytes = b"") -> bool:
            watched.remove(path)
            return hold(lock, content)

        monkeypatch.setattr(Lock, "hold", removed_meanwhile)
    with Worker(run, "a") as worker:
        assert (path.stat().st_ino == before) is is_ended
        assert not watched.remove(path) or not is_ended
        assert worker._lock.is_held and is_locked(path)


def test_what_is_no_file_of_a_worker_is_removed(run: Path) -> None:
    start(run, small=True)
    workers = run / ".train" / "workers"
    (workers / "directory" / "below").mkdir(parents=True)
    os.mkfifo(workers / "fifo")
    (workers / "link").symlink_to("fifo")
    with Reducer(run) as reducer:
        reduce(reducer)
    assert os.listdir(workers) == []


def test_number_never_has_the_bits_of_another_version(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(run, small=True, keep=2)
    versions = run / ".train" / "versions"
    found: dict[str, list[bytes]] = {}
    rename = directory.move

    def look_and_rename(path: Path, target: Path) -> None:
        for version in versions.iterdir():
            file = version / "model.safetensors"
            found.setdefault(version.name, []).append(file.read_bytes())
        rename(path, target)

    monkeypatch.setattr(part, "move", look_and_rename)
    with Worker(run, "a") as worker, Reducer(run) as reducer:
        for _ in range(6):
            worker.push(ones())
            reduce(reducer)
    assert [len(found[name]) for name in "012345"] == [2, 2, 2, 2, 2, 1]
    assert all(len({*contents}) == 1 for contents in found.values())


def test_pushes_that_were_written_anew_are_all_read_on_a_slow_host(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "_READ_S", 0.0)
    runs.run_bsp(run, steps=3, small=True)
    assert newest(run) == 3


@pytest.mark.parametrize("again", [True, False])
def test_pushes_of_a_worker_that_ended_count_once(run: Path, again: bool) -> None:
    start(run, small=True, sync="async")
    train = TrainDirectory(run)
    worker = Worker(run, "a")
    for value in (1, 2):
        worker.push(ones(value))
    worker._lock.close()
    if again:
        with Worker(run, "a") as other:
            assert other.step == 2
            other.push(ones(4))
    with Reducer(run) as reducer:
        done = [everywhere, lambda *_: not os.listdir(train.push) + os.listdir(train.staging)]
        value = 7 if again else 3
        runs.reduce_until(reducer, lambda: all(one(run, value) for one in done), "they count")
        reduce(reducer)
    assert everywhere(run, value)


@pytest.mark.parametrize("steps", [1, 2])
def test_push_of_a_worker_that_ends_while_it_is_looked_after_counts(
    run: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """It was written where one is that has counted, after the coordinator looked there."""
    start(run, small=True, sync="async")
    worker = Worker(run, "a")

    def ends(path: Path) -> bool:
        if worker._lock.is_held:
            for _ in range(steps):
                worker.push(ones())
            worker.close()
        return is_locked(path)

    with Reducer(run) as reducer:
        worker.push(ones())
        reduce(reducer)
        planner = reducer._coordinator
        assert planner is not None
        # It has not seen yet that the worker takes part.
        planner._members.clear()
        with monkeypatch.context() as patch:
            patch.setattr(coordinator, "is_locked", ends)
            train = reducer.train
            planner._find_pushes(train.config(), train.newest_plan())
        reduce(reducer)
    assert everywhere(run, 1 + steps)


def test_push_counts_though_its_file_was_removed_when_the_last_one_had_counted(
    cluster: Cluster,
) -> None:
    here, there = (mount.path / "removed" for mount in cluster.mounts)
    start(here, small=True)
    with Reducer(here) as reducer, Worker(there, "a") as worker:
        for step in range(1, 4):
            worker.push(ones())
            runs.reduce_until(reducer, lambda: newest(here) == step, "it counts")  # noqa: B023
            worker.pull(timeout_s=30)
            (file,) = (here / ".train" / "push").iterdir()
            file.unlink()
    assert everywhere(here, 3)


def test_version_of_a_coordinator_that_was_replaced_is_not_published(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rename is on its way while another coordinator makes the version."""
    start(run, small=True, keep=2)
    late: list[tuple[Path, Path]] = []

    def stop(path: Path, target: Path) -> None:
        late.append((path, target))
        raise OSError("stopped")

    with Worker(run, "a") as worker, Reducer(run) as stopped:
        for _ in range(4):
            worker.push(ones())
            reduce(stopped)
        worker.push(ones())
        with monkeypatch.context() as patch, pytest.raises(OSError, match="stopped"):
            patch.setattr(part, "move", stop)
            reduce(stopped)
        stopped._leave_parts()
        with Reducer(run) as reducer:
            reduce(reducer)
            worker.push(ones())
            with pytest.raises(OSError):
                os.rename(*late[0])
            reduce(reducer)
    assert everywhere(run, 6)


def test_pushes_of_other_programs_count_in_a_small_run(run: Path, place: Path) -> None:
    start(run, small=True)
    train = TrainDirectory(run)
    save_file(ones(), place / "push")
    (place / "shards").mkdir()
    save_file(ones(), place / "shards" / "model.safetensors")
    with Reducer(run) as reducer:
        shutil.copyfile(place / "push", train.push / "shell.safetensors")
        reduce(reducer)
        assert everywhere(run, 1)
        os.rename(place / "shards", train.push / "shell@2;weight=2.0")
        reduce(reducer)
    assert everywhere(run, 3)


def test_push_with_nan_counts_with_weight_0_if_it_is_skipped(run: Path) -> None:
    start(run, small=True, shards=3, nonfinite="skip", clip_norm=1e9)
    with Reducer(run) as reducer, Worker(run, "a") as a, Worker(run, "b") as b:
        a.push(ones(np.nan))
        b.push(ones())
        reduce(reducer)
    assert everywhere(run, 1)
    assert [one.weight for one in TrainDirectory(run).newest_plan().pushes] == [0, 1]


def test_what_others_put_into_an_old_version_is_not_written(run: Path) -> None:
    start(run, small=True, keep=2)
    old = run / ".train" / "versions" / "2"
    with Reducer(run) as reducer, Worker(run, "a") as worker:
        for step in range(1, 9):
            worker.push(ones())
            reduce(reducer)
            assert worker.pull(timeout_s=5)["norm"].tolist() == [step] * 3
            if step == 3:
                (run / "linked").hardlink_to(old / "model.safetensors")
                linked = (run / "linked").read_bytes()
                (old / "state").rmdir()
                (old / "state").symlink_to(run / "elsewhere")
    assert (run / "linked").read_bytes() == linked
    assert not (run / "elsewhere").exists()
