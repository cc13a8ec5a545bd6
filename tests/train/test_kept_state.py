"""A rule has a file for what it keeps between updates, and none if it keeps nothing."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.training_runs import (
    BF16,
    newest,
    ones,
    parameters,
    push_and_reduce,
    start,
    state_of,
    zeros,
)
from safetensors import safe_open

from irdmafs.train import Reducer, TrainConfig, Worker
from irdmafs.train.directory import TrainDirectory


def kept(run: Path) -> Sequence[str]:
    """Return the names of the arrays that the newest version has beside its parameters."""
    train = TrainDirectory(run)
    (shard,) = train.layout.shards
    path = state_of(train.version(newest(run)), shard)
    if not path.exists():
        return []
    with safe_open(path, "np") as file:
        assert file.metadata()["version"] == str(newest(run))
        return sorted(file.keys())


@pytest.mark.parametrize(
    ("dtype", "config", "expected"),
    [
        (np.float32, {"rule": "sum"}, []),
        (np.float16, {"rule": "sum"}, ["master"]),
        (np.float32, {"rule": "adamw", "lr": 0.1}, ["exp_avg", "exp_avg_sq"]),
        (BF16, {"rule": "adamw", "lr": 0.1}, ["exp_avg", "exp_avg_sq", "master"]),
    ],
)
def test_only_what_is_kept_has_a_file(
    run: Path, dtype: type, config: dict[str, Any], expected: Sequence[str]
) -> None:
    start(run, {name: value.astype(dtype) for name, value in zeros().items()}, **config)
    with Worker(run, "w") as worker, Reducer(run) as reducer:
        assert kept(run) == expected
        for step in (1, 2):
            push_and_reduce(reducer, worker, ones())
            assert newest(run) == step
            assert kept(run) == expected


def test_rule_that_is_changed_begins_with_zeros(run: Path) -> None:
    """Whatever lies in the files that are written anew."""
    config = TrainConfig(rule="sgd", lr=1.0, workers=1, keep=2)
    start(run, rule="sgd", lr=1.0, workers=1, keep=2)
    train = TrainDirectory(run)
    expected = 0.0
    with Worker(run, "w") as worker, Reducer(run) as reducer:
        for momentum in (0.0, 0.5, 0.0, 0.5):
            changed = replace(config, options={"momentum": momentum})
            (train.path / "config.toml").write_text(changed.toml())
            reducer._found = None
            change = 0.0
            for _ in range(4):
                push_and_reduce(reducer, worker, ones())
                change = momentum * change + 1
                expected -= change
                worker.pull()
                assert parameters(run)["norm"].tolist() == [expected] * 3
                assert kept(run) == (["momentum"] if momentum else [])
