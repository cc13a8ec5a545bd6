"""Whatever is killed, each push counts once and nothing of a run is lost.

IRDMAFS_SEED repeats a run's faults, IRDMAFS_KILLS says how many things are killed.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.clusters import Cluster, Plan
from harness.mountpoint import Mount, eventually
from harness.programs.training_worker import (
    COUNTERS,
    LEDGER,
    SHAPES,
    TOTAL,
    Records,
    digest,
    gradients,
)
from harness.seeds import chosen_seed
from harness.storms.training_faults import RECOVERY_S, RUN, Processes, TrainingFaults
from harness.training_runs import reduce, sized, state_of
from safetensors.numpy import load_file, save_file

from irdmafs.train import Reducer, TrainConfig, Worker, begin
from irdmafs.train.directory import TrainDirectory

KILLS = int(os.environ.get("IRDMAFS_KILLS") or 8)
TIMEOUT_S = 120 + 5 * KILLS
WORKERS = ("w0", "w1", "w2")
REDUCERS = 2
SHARDS = 3

Arrays = dict[str, np.ndarray[Any, Any]]


def _model(kind: str) -> Arrays:
    if kind == "async":
        return {"ledger": np.zeros(LEDGER, np.float32), "total": np.zeros(TOTAL, np.float32)}
    random = np.random.default_rng(7)
    return {
        name: np.asarray(random.standard_normal(shape), np.float32)
        for name, shape in SHAPES.items()
    }


def _start(folder: Path, kind: str, config: TrainConfig, shards: int = SHARDS) -> TrainDirectory:
    folder.mkdir()
    save_file(_model(kind), folder / "model.safetensors")
    begin(folder, config, shards=shards)
    return TrainDirectory(folder)


def _state(train: TrainDirectory, version: int) -> Arrays:
    """Return what the rule keeps, whole."""
    shards = [load_file(state_of(train.version(version), shard)) for shard in train.layout.shards]
    return {name: np.concatenate([shard[name] for shard in shards]) for name in shards[0]}


def _disturb(
    kind: str, config: TrainConfig, seed: int, check: Callable[[TrainDirectory, Records], None]
) -> None:
    print(f"IRDMAFS_KILLS={KILLS}")
    plan = Plan(
        nodes=3, mounts=3, beside={0: 0, 1: 1}, etcd_members=3, replicas=2,
        node_config={"rereplicate_after": 3},
    )  # fmt: skip
    with Cluster(plan) as cluster:
        with sized(small=False if seed & 2 else None):
            train = _start(cluster.mounts[0].path / RUN, kind, config)
        with Processes(cluster, kind, len(WORKERS), REDUCERS) as processes:
            faults = TrainingFaults(processes, seed)
            began_s = time.monotonic()
            faults.run(KILLS)
            seconds = time.monotonic() - began_s
            print(f"{faults.kills} kills in {seconds:.0f} s; ended by themselves: {processes.ends}")
            processes.finish(processes.records.newest() + 3)
            print(f"version {train.newest()}")
            check(train, processes.records)


def _check_lockstep(train: TrainDirectory, records: Records) -> None:
    """Compare all that was pulled, and the last state, with a run that nothing disturbs."""
    last = records.last_step()
    assert last is not None
    with Mount("kernel") as own:
        alone = own.path / RUN
        undisturbed = _start(alone, "bsp", train.config(), len(train.layout.shards))
        expected = {0: digest(_model("bsp"))}
        workers = [Worker(alone, name) for name in WORKERS]
        with Reducer(alone, threads=1) as reducer:
            for step in range(1, last + 1):
                for worker in workers:
                    parameters = worker.pull()
                    worker.push(gradients(worker.name, step, parameters))
                reduce(reducer)
                expected[step] = digest(workers[0].pull())
            for worker in workers:
                worker.close()
        wanted = _state(undisturbed, last)
    assert train.newest() == last
    wrong = [pull for pull in records.digests() if pull[2] != expected[pull[1]]]
    assert not wrong, f"{len(wrong)} pulls are not those of an undisturbed run: {wrong[:5]}"
    found = _state(train, last)
    assert found.keys() == wanted.keys()
    assert all(found[name].tobytes() == wanted[name].tobytes() for name in wanted)


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
def test_parameters_and_state_are_those_of_an_undisturbed_run() -> None:
    seed = chosen_seed()
    config = TrainConfig(rule="adamw", lr=0.01, workers=WORKERS, clip_norm=float(seed % 2))
    _disturb("bsp", config, seed, _check_lockstep)


def _check_counts(train: TrainDirectory, records: Records) -> None:
    """Compare what was acknowledged with what was applied."""
    acks = records.acks()
    eventually(lambda: not [*train.push.glob("[!.]*")], "all pushes count", RECOVERY_S)
    plan = train.newest_plan()
    found = load_file(train.version(plan.version) / "model.safetensors")
    counters = found["ledger"].astype(np.int64)[:, None] >> (2 * np.arange(COUNTERS)) & 3
    counts = counters.reshape(-1)
    wrong = {number: (*who, counts[number]) for number, who in acks.items() if counts[number] != 1}
    assert not wrong, f"acknowledged, and not counted once: {wrong}"
    assert counts.max() == 1
    assert not counts[records.tries() :].any()
    assert np.all(found["total"] == counts.sum())
    counted = [
        push for version in train.version_numbers() for push in train.plan_of(version).pushes
    ]
    assert all(push.weight == 1 for push in counted)
    steps = {(push.worker, push.step) for push in counted}
    assert len(steps) == len(counted) == counts.sum()
    assert steps.issuperset(acks.values())


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
def test_acknowledged_pushes_count_once_and_others_at_most_once() -> None:
    config = TrainConfig(rule="sum", sync="async", workers=WORKERS, keep=1_000_000)
    _disturb("async", config, chosen_seed(), _check_counts)
