"""Workers that join a directory in which others have trained for a while."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from harness.training_runs import reducing

from irdmafs import client
from irdmafs.train import TrainConfig, Worker, begin


@pytest.fixture
def directory(place: Path) -> Iterator[Path]:
    """A directory in which a worker has made two steps, and a reducer at work."""
    client.Store(place).publish_state_dict({"w": np.zeros(3, np.float32)})
    config = TrainConfig(lr=1.0, options={"momentum": 0.5, "nesterov": True})
    begin(place, config, shards=1)
    with reducing(place):
        with Worker(place, "first") as first:
            for _ in range(2):
                first.push({"w": np.ones(3, np.float32)})
                first.pull(timeout_s=60)
        yield place


def test_worker_that_joins_late_pulls_the_newest_version_before_it_pushes(directory: Path) -> None:
    with Worker(directory, "later") as later:
        # Nesterov momentum: 1 + 0.5, and then 1 + 0.5 * (0.5 + 1).
        assert later.pull(timeout_s=60)["w"].tolist() == [-3.25] * 3
        assert (later.step, later.version) == (2, 2)
        later.push({"w": np.zeros(3, np.float32)})
        later.pull(timeout_s=60)
        assert (later.step, later.version) == (3, 3)
