"""A small run of a cluster agrees seldom: a push has one file, and the coordinator makes versions alone."""

import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from harness import training_runs as runs
from harness.clusters import Cluster, counters
from harness.training_runs import everywhere, newest, ones, reduce, same_bits, start

from irdmafs.train import Reducer, Worker
from irdmafs.train.directory import TrainDirectory
from irdmafs.train.liveness import Lock


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_small_run_makes_the_parameters_of_a_large_one(run: Path, clip: float) -> None:
    make = partial(runs.run_bsp, steps=6, shards=3, rule="adamw", keep=2, clip_norm=clip)
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


def test_step_of_two_workers_is_few_transactions(cluster: Cluster) -> None:
    here, there = (mount.path / "small" for mount in cluster.mounts)
    layout = TrainDirectory(start(here, runs.model(), shards=3, small=None)).layout
    assert layout.is_small and len(layout.shards) == 3
    took = []

    def made(version: int) -> bool:
        return newest(here) == version

    with Reducer(here) as reducer, Worker(here, "a") as a, Worker(there, "b") as b:
        for step in range(1, 12):
            for worker in (a, b):
                worker.push(ones())
            runs.reduce_until(reducer, partial(made, step), "the version is made")
            for worker in (a, b):
                worker.pull(timeout_s=30)
            found = [counters(mount) for mount in cluster.mounts]
            took.append(sum(one["transactions"] - one["lease_transactions"] for one in found))
    # One of them is the status, which is written often here.
    assert took[-1] - took[4] <= 13 * 6


@pytest.mark.parametrize("has_counted", [True, False])
def test_worker_that_was_replaced_writes_no_more(
    run: Path, monkeypatch: pytest.MonkeyPatch, has_counted: bool
) -> None:
    start(run, small=True)
    stopped = Worker(run, "a")
    with Reducer(run) as reducer:
        stopped.push(ones())
        if has_counted:
            reduce(reducer)
        stopped._lock.close()
        with Worker(run, "a") as worker, monkeypatch.context() as patch:
            assert worker.step == 1
            patch.setattr(Lock, "is_held", True)
            with pytest.raises(FileNotFoundError):
                stopped.push(ones(4))
            reduce(reducer)
            assert everywhere(run, 1)
            assert worker.push(ones(2)) == 2
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
    start(run, small=True, keep=2, whole_every=2)
    old = run / ".train" / "versions" / "2"
    with Reducer(run) as reducer, Worker(run, "a") as worker:
        for step in range(1, 9):
            worker.push(ones())
            reduce(reducer)
            assert ("model.safetensors" in os.listdir(old.with_name(str(step)))) == (step % 2 == 0)
            assert worker.pull(timeout_s=5)["norm"].tolist() == [step] * 3
            if step == 3:
                (run / "linked").hardlink_to(old / "model.safetensors")
                linked = (run / "linked").read_bytes()
                (old / "version.json").unlink()
                (old / "version.json").symlink_to(run / "elsewhere")
    assert (run / "linked").read_bytes() == linked
    assert not (run / "elsewhere").exists()
