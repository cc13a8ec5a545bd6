"""A rule has a file for what it keeps between updates, and none if it keeps nothing."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import training_runs as runs
from safetensors import safe_open

from irdmafs.train import Reducer, Worker
from irdmafs.train.directory import TrainDirectory


def kept(run: Path) -> Sequence[str]:
    """Return the names of the arrays that the newest version has beside its parameters."""
    train = TrainDirectory(run)
    (shard,) = train.layout.shards
    path = runs.state_of(train.version(runs.newest(run)), shard)
    if not path.exists():
        return []
    with safe_open(path, "np") as file:
        assert file.metadata()["version"] == str(runs.newest(run))
        return sorted(file.keys())


@pytest.mark.parametrize(
    ("dtype", "config", "expected"),
    [
        (np.float32, {"rule": "sum"}, []),
        (np.float16, {"rule": "sum"}, ["master"]),
        (np.float32, {"rule": "adamw", "lr": 0.1}, ["exp_avg", "exp_avg_sq"]),
        (runs.BF16, {"rule": "adamw", "lr": 0.1}, ["exp_avg", "exp_avg_sq", "master"]),
    ],
)
def test_only_what_is_kept_has_a_file(
    run: Path, dtype: type, config: dict[str, Any], expected: Sequence[str]
) -> None:
    runs.start(run, {name: value.astype(dtype) for name, value in runs.zeros().items()}, **config)
    with Worker(run, "w") as worker, Reducer(run) as reducer:
        assert kept(run) == expected
        for step in (1, 2):
            runs.push_and_reduce(reducer, worker, runs.ones())
            assert runs.newest(run) == step
            assert kept(run) == expected


def test_rule_that_is_changed_begins_with_zeros(run: Path) -> None:
    """Whatever lies in the files that are written anew."""
    runs.start(run, rule="sgd", lr=1.0, workers=1, keep=2)
    train = TrainDirectory(run)
    expected = 0.0
    with Worker(run, "w") as worker, Reducer(run) as reducer:
        for momentum in (0.0, 0.5, 0.0, 0.5):
            changed = replace(train.config(), options={"momentum": momentum})
            (train.path / "config.toml").write_text(changed.toml())
            reducer._found = None
            change = 0.0
            for _ in range(4):
                runs.push_and_reduce(reducer, worker, runs.ones())
                change = momentum * change + 1
                expected -= change
                worker.pull()
                assert runs.parameters(run)["norm"].tolist() == [expected] * 3
                assert kept(run) == (["momentum"] if momentum else [])
