"""A model in several files is loaded as one version, by its index or from the directory of the version."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.training_runs import newest, reduce, reduce_until
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from irdmafs.train import Reducer, TrainConfig, TrainError, Worker, begin, end
from irdmafs.train.directory import TrainDirectory

INDEX = "model.safetensors.index.json"
FILES = {f"model-{number}-of-3.safetensors": f"layer{number}" for number in (1, 2, 3)}
BESIDE = {"config.json": '{"layers": 3}', "tokenizer.model": "words"}


def start(run: Path) -> Path:
    run.mkdir()
    for file, parameter in FILES.items():
        save_file({parameter: np.zeros(9, np.float32)}, run / file)
    weight_map = {parameter: file for file, parameter in FILES.items()}
    (run / INDEX).write_text(json.dumps({"metadata": {"n": 1}, "weight_map": weight_map}))
    for name, text in BESIDE.items():
        (run / name).write_text(text)
    begin(run, TrainConfig(rule="sum"))
    return run


def push(worker: Worker) -> None:
    worker.push({parameter: np.ones(9, np.float32) for parameter in FILES.values()})


def read_index(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return found


def load(folder: Path, weight_map: dict[str, str]) -> dict[str, NDArray[Any]]:
    """Load parameters as transformers does: the index is read first, then each file that it names."""
    return {name: load_file(folder / file)[name] for name, file in weight_map.items()}


def values(parameters: dict[str, NDArray[Any]]) -> set[float]:
    return {float(value) for array in parameters.values() for value in array}


def test_index_that_was_read_leads_to_one_version_whatever_comes_meanwhile(run: Path) -> None:
    start(run)
    with Worker(run, "w") as worker, Reducer(run) as reducer:
        for version in range(1, 4):
            push(worker)
            reduce(reducer)
            before = read_index(run)
            push(worker)
            reduce_until(reducer, lambda version=version: newest(run) > version, "a newer one")  # type: ignore[misc]
            assert values(load(run, before)) == {2 * version - 1}
            assert values(load(run, read_index(run))) == {2 * version}


def test_index_of_a_version_that_is_gone_leads_nowhere(run: Path) -> None:
    start(run)
    before = read_index(run)
    with Worker(run, "w") as worker, Reducer(run) as reducer:
        for _ in range(3):
            push(worker)
            reduce(reducer)
        reduce_until(reducer, lambda: not TrainDirectory(run).version(0).exists(), "it is gone")
    with pytest.raises(FileNotFoundError, match=r"versions/0/model-1-of-3|No such file"):
        load(run, before)


def test_directory_of_a_version_is_a_model(run: Path) -> None:
    start(run)
    with Worker(run, "w") as worker, Reducer(run) as reducer:
        push(worker)
        reduce(reducer)
    for number in (0, 1):
        version = (run / ".train/versions" / str(number)).resolve()
        assert read_index(version) == {parameter: file for file, parameter in FILES.items()}
        assert values(load(version, read_index(version))) == {number}
        assert {path.name for path in version.glob("*.safetensors")} == FILES.keys()
        assert {name: (version / name).read_text() for name in BESIDE} == BESIDE
    pinned = os.path.realpath(run / ".train/since/0", strict=True)
    assert pinned == str(version)
    # vLLM and others open what *.safetensors finds, one by one, and could mix versions.
    assert not list(run.glob("*.safetensors"))


def test_end_makes_files_of_all_again(run: Path) -> None:
    start(run)
    before = sorted([*FILES, *BESIDE, INDEX])
    with Worker(run, "w") as worker, Reducer(run) as reducer:
        push(worker)
        reduce(reducer)
    assert end(run) == 1
    assert sorted(os.listdir(run)) == before
    assert read_index(run) == {parameter: file for file, parameter in FILES.items()}
    assert values(load(run, read_index(run))) == {1}
    begin(run, TrainConfig(rule="sum"))
    assert values(load(run, read_index(run))) == {1}


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ("{", "is not the index"),
        ('{"weight_map": 3}', "is not the index"),
        (
            '{"weight_map": {"layer1": "other.safetensors"}}',
            "names other.safetensors, which is not",
        ),
    ],
)
def test_index_that_makes_no_sense_is_refused(place: Path, index: str, reason: str) -> None:
    save_file({"layer1": np.zeros(9, np.float32)}, place / "model.safetensors")
    (place / INDEX).write_text(index)
    with pytest.raises(TrainError, match=reason):
        begin(place, TrainConfig(rule="sum"))
    assert sorted(os.listdir(place)) == ["model.safetensors", INDEX]


def test_files_that_have_a_name_of_ours_are_left_out(place: Path) -> None:
    """They would be taken for the plan, or for shards."""
    save_file({"layer1": np.zeros(9, np.float32)}, place / "model.safetensors")
    for name in ("version.json", "0", "version.norm.0", "version.bad.0", "config.json"):
        (place / name).write_text("not a plan")
    os.mkfifo(place / "pipe")
    begin(place, TrainConfig(rule="sum"))
    assert os.listdir(place / ".train/files") == ["config.json"]
    with Worker(place, "w") as worker, Reducer(place) as reducer:
        worker.push({"layer1": np.ones(9, np.float32)})
        reduce(reducer)
    assert values(load_file(place / "model.safetensors")) == {1}
