"""A push that cannot count is refused, and one that is gone holds nobody up."""

import errno
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from harness.mountpoint import eventually
from harness.training_runs import check, newest, ones, parameters, reduce, reduce_until, start
from safetensors.numpy import save_file

from irdmafs.train import Reducer, Refused, TrainError, Worker
from irdmafs.train.directory import TrainDirectory, remove, replace
from irdmafs.train.status import report


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_push_with_nan_or_infinity_is_refused(run: Path, shards: int, value: float) -> None:
    start(run, shards=shards)
    with Worker(run, "w") as worker:
        with pytest.raises(Refused, match="NaN or infinite"):
            worker.push(ones(value))
        assert not [name for name in os.listdir(TrainDirectory(run).push) if name[0] != "."]
        assert worker.push(ones()) == 1


@pytest.mark.parametrize("shards", [1, 3])
def test_push_that_misfits_the_model_or_has_no_weight_is_refused(run: Path, shards: int) -> None:
    start(run, shards=shards)
    with Worker(run, "w") as worker:
        for gradients in ({"norm": np.zeros(4, np.float32)}, {"unknown": np.zeros(3)}, {}):
            with pytest.raises(Refused):
                worker.push(gradients)
        for weight in (np.nan, -1.0):
            with pytest.raises(Refused, match="weight"):
                worker.push(ones(), weight=weight)
        with pytest.raises(TypeError, match="tensor 'norm'"):
            worker.push({"norm": None})


@pytest.mark.parametrize("small", [True, False])
def test_push_that_was_finished_or_dropped_counts_no_more(run: Path, small: bool) -> None:
    start(run, shards=1 if small else 3, small=small)
    with Reducer(run) as reducer, Worker(run, "w") as worker:
        pushes = [worker.begin_push() for _ in range(2)]
        pushes[1].put("norm", np.ones(3, np.float32))
        assert pushes[1].finish() == 1
        pushes.append(worker.begin_push())
        pushes[2].abort()
        assert worker.push({"norm": np.ones(3, np.float32)}) == 2
        for push in pushes:
            with pytest.raises(TrainError, match="begin another"):
                push.finish()
            with pytest.raises(TrainError, match="begin another"):
                push.put("norm", np.ones(3, np.float32))
        reduce(reducer)
        assert parameters(run)["norm"].tolist() == [2] * 3
        pushes.append(worker.begin_push())
    with pytest.raises(TrainError, match="begin another"):
        pushes[3].finish()
    with pytest.raises(TrainError, match="is closed"):
        worker.push(ones())
    assert not os.listdir(TrainDirectory(run).workers)


@pytest.mark.parametrize("shards", [1, 3])
def test_push_that_is_removed_while_it_is_planned_holds_nobody_up(run: Path, shards: int) -> None:
    start(run, shards=shards)
    push = TrainDirectory(run).push
    with Reducer(run) as reducer, Worker(run, "a") as a, Worker(run, "b") as b:
        a.push(ones())
        b.push(ones(2))
        train = TrainDirectory(run)
        # The coordinator's part alone: it plans, and shards are not made before the next step.
        reducer._take_parts()
        assert reducer._coordinator is not None
        assert reducer._coordinator.step(train.config(), train.newest_plan(), None)
        gone = next(path for path in push.iterdir() if path.name.startswith("b@"))
        gone.rename(run / "taken away")
        reduce_until(reducer, lambda: newest(run) == 1, "the version is made without the push")
        assert a.pull(timeout_s=5)["norm"].tolist() == [1] * 3
        b.pull(timeout_s=5)
        assert b.push(ones()) == 2


def test_worker_misses_its_push_that_was_removed_before_it_was_planned(run: Path) -> None:
    start(run)
    with Worker(run, "a") as a, Worker(run, "b"), Reducer(run) as reducer:
        a.push(ones())
        reduce(reducer)
        for push in TrainDirectory(run).push.iterdir():
            remove(push)
        with pytest.raises(TrainError, match="push it again"):
            a.pull(timeout_s=10)
        assert a.push(ones()) == 1


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(
    ("name", "reason"), [("stranger@1", "not one of the workers"), ("w@1000", "too far ahead")]
)
def test_push_that_got_its_name_by_renaming_is_refused_as_well(
    run: Path, shards: int, name: str, reason: str
) -> None:
    start(run, workers=("w",), shards=shards)
    train = TrainDirectory(run)
    with Reducer(run) as reducer, Worker(run, "w") as worker:
        worker.push(ones())
        (push,) = (path for path in train.push.iterdir() if not path.name.startswith("."))
        if shards == 1:
            # The metadata counts, not the name.
            save_file(
                ones(), run / "file", dict(zip(("worker", "step"), name.split("@"), strict=True))
            )
            remove(push)
            os.rename(run / "file", train.push / f"{name}.safetensors")
        else:
            os.rename(push, train.push / name)
        reduce_until(reducer, lambda: reason in report(train), "the reason is shown")
        assert newest(run) == 0


def test_worker_that_waits_is_told_that_its_file_is_refused(run: Path) -> None:
    """Also if the user has written it, with whatever program."""
    start(run)
    with Reducer(run) as reducer, Worker(run, "w") as worker, ThreadPoolExecutor(1) as pool:
        save_file(ones(np.nan), run / "file")
        shutil.copy(run / "file", TrainDirectory(run).push / "w.safetensors")
        pulled = pool.submit(worker.pull_since, 1, timeout_s=60)
        reduce_until(reducer, pulled.done, "it is told")
        with pytest.raises(Refused, match=r"w.safetensors: .*NaN or infinite"):
            pulled.result()
        (TrainDirectory(run).push / "w.safetensors").unlink()
        worker.push(ones())
        reduce(reducer)
        assert worker.pull_since(1, timeout_s=60)["norm"].tolist() == [1] * 3


def test_worker_that_need_not_wait_is_told_that_its_file_is_refused(run: Path) -> None:
    start(run, sync="async")
    train = TrainDirectory(run)
    with Reducer(run) as reducer, Worker(run, "w") as worker:
        (train.push / "w@.safetensors").write_bytes(b"nonsense")
        reduce_until(reducer, lambda: "w@.safetensors" in report(train), "refused")
        with pytest.raises(Refused, match=r"w@\.safetensors: "):
            worker.pull(timeout_s=60)
        assert worker.pull(timeout_s=60)["norm"].tolist() == [0] * 3


SENSELESS = {
    "w 0;x@.safetensors": "is WORKER.safetensors or WORKER@STEP.safetensors",
    "w@1.5.safetensors": "is WORKER.safetensors or WORKER@STEP.safetensors",
    "w 0.safetensors": "'w 0' cannot be the name of a worker: letters, digits and _ . -",
    "w 0;x@": "is WORKER@STEP or WORKER@STEP;weight=2.0;base=16;lr=0.001",
    "w@1;weight=1e": "its weight is '1e', not a number",
}


def test_name_that_makes_no_sense_is_told_with_what_is_allowed(run: Path) -> None:
    start(run)
    train = TrainDirectory(run)
    for name in SENSELESS:
        if name.endswith(".safetensors"):
            save_file(ones(), train.push / name)
        else:
            (train.push / name).mkdir()

    def told(name: str) -> list[str]:
        lines = report(train).splitlines()
        return [line for line in lines if f"{name}: " in line]

    with Reducer(run) as reducer, Worker(run, "v"):
        reduce_until(reducer, lambda: all(map(told, SENSELESS)), "they are refused")
    for name, reason in SENSELESS.items():
        [line] = told(name)
        assert reason in line


def test_reasons_name_files_by_their_paths_in_the_run(run: Path) -> None:
    """Reducers and workers keep its directories open, and go by descriptors."""
    start(run, workers=("v", "w"), shards=3)
    train = TrainDirectory(run)
    with pytest.raises(TrainError, match=re.escape(str(run / ".train" / "config.toml"))):
        Worker(run, "x")
    (train.push / "v@1").mkdir()
    for name in train.layout.shard_names:
        (train.push / "v@1" / name).write_bytes(b"neither header nor data")
    with Worker(run, "w") as worker, Reducer(run) as reducer:
        worker.push(ones())
        reduce_until(reducer, lambda: "v@1" in report(train), "it is refused")
    assert "/proc/" not in report(train)


def test_push_that_the_coordinator_refuses_is_raised_and_its_step_is_free(run: Path) -> None:
    start(run, workers=("v", "w"))
    train = TrainDirectory(run)
    config = train.config_path.read_text()
    with Worker(run, "w") as worker, Reducer(run) as reducer:
        worker.push(ones(2))
        replace(train.config_path, config.replace('"v", "w"', '"v"').encode())
        reduce_until(reducer, lambda: "w@1" in report(train), "it is refused")
        with pytest.raises(Refused, match="not one of the workers"):
            worker.pull(timeout_s=60)
        assert not os.listdir(train.push)
        replace(train.config_path, config.replace('"v", "w"', '"w"').encode())
        assert worker.push(ones()) == 1
        reduce_until(reducer, lambda: newest(run) == 1, "it counts")
        assert worker.pull(timeout_s=60)["norm"].tolist() == [1] * 3


@pytest.mark.parametrize("ahead", [True, False])
def test_push_in_shards_with_nan_that_nobody_has_checked_counts_for_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """Made by another program than our client: reducers find it."""
    start(run, shards=3, clip_norm=0.0 if ahead else 1e9)
    train = TrainDirectory(run)
    with Reducer(run) as reducer, Worker(run, "a") as a, Worker(run, "b") as b:
        with monkeypatch.context() as unchecked:
            unchecked.setattr("irdmafs.train.open_push.check_finite", lambda _: None)
            a.push(ones(np.nan))
        b.push(ones())
        reduce_until(reducer, lambda: newest(run) == 1, "the version is made without it")
        assert parameters(run)["norm"].tolist() == [1] * 3
        reduce_until(reducer, lambda: "NaN" in report(train), "the reason is shown")
        assert a.pull(timeout_s=60)["norm"].tolist() == [1] * 3


def test_many_files_of_one_who_pushes_hold_up_nobody(run: Path) -> None:
    start(run, sync="async", workers="auto")
    push = TrainDirectory(run).push
    for number in range(1000):
        (push / f"m{number}.safetensors").write_bytes(b"garbage")
    with Reducer(run) as reducer, Worker(run, "z") as worker:
        worker.push(ones())
        looked = 0
        while newest(run) == 0:
            reducer.step()
            assert reducer._coordinator is not None
            looked = len(reducer._coordinator._looks)
        assert looked < 1000, "its push was looked at before all of the others"
        lines = report(TrainDirectory(run)).splitlines()
        assert len(lines) < 50
        assert any(line.startswith("z ") for line in lines)


def test_push_with_nan_is_skipped_where_that_is_wanted(run: Path) -> None:
    start(run, nonfinite="skip", shards=3)
    with Reducer(run) as reducer, Worker(run, "a") as a, Worker(run, "b") as b:
        a.push(ones(np.nan))
        b.push(ones())
        reduce(reducer)
        assert parameters(run)["norm"].tolist() == [1] * 3


REFUSED = [
    ({"worker": "stranger", "step": "1"}, errno.EPERM, "not one of the workers"),
    ({"worker": "../w", "step": "1"}, errno.EINVAL, "cannot be the name"),
    ({"worker": "w", "step": "1"}, errno.ESTALE, "is past"),
    ({"worker": "w", "step": "1000"}, errno.EINVAL, "too far ahead"),
    ({"worker": "w", "step": "-1"}, errno.EINVAL, "not a step"),
    ({"worker": "w", "step": "x"}, errno.EINVAL, "its step is 'x', not a whole number"),
    ({"worker": "w", "step": "9", "base": "99"}, errno.EINVAL, "no version 99"),
    ({"worker": "w", "step": "9", "base": "0"}, errno.ESTALE, "version 0 is gone"),
]


def test_push_that_says_what_cannot_be_is_refused(place: Path) -> None:
    run = start(place / "run", workers=("w",), keep=2)
    with Reducer(run) as reducer, Worker(run, "w") as worker:
        for _ in range(4):
            worker.push(ones())
            reduce(reducer)
    path = place / "push"
    for metadata, code, reason in REFUSED:
        save_file(ones(), path, metadata)
        with path.open("rb") as file, pytest.raises(Refused, match=reason) as caught:
            check(run, file.fileno(), "push.safetensors")
        assert caught.value.errno == code


def test_worker_without_a_reducer_says_so_and_what_to_do(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("irdmafs.train.status._WITHOUT_REDUCER_S", 0.2)
    start(run)
    said = f"no reducer is at work: irdmafs train reduce {run}"
    with Worker(run, "w") as worker:
        worker.push(ones())
        with ThreadPoolExecutor(1) as pool:
            pulled = pool.submit(worker.pull, timeout_s=60)
            eventually(lambda: said in caplog.text, "it is logged")
            with Reducer(run) as reducer:
                reduce_until(reducer, pulled.done, "the version is made")
            pulled.result()
        with pytest.raises(TimeoutError, match=re.escape(said)):
            worker.pull_since(2, timeout_s=0.1)
