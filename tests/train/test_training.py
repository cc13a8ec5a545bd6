"""A directory trains its models: who waits for whom, and the parameters that come of it."""

import errno
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from harness.processes import Program
from harness.training_runs import (
    BF16,
    SHAPES,
    everywhere,
    gradients,
    model,
    newest,
    ones,
    parameters,
    push_and_reduce,
    reduce,
    reduce_until,
    run_bsp,
    same_bits,
    start,
    zeros,
)
from safetensors.numpy import load_file, save_file

from irdmafs.train import Reducer, TrainError, Worker, begin, end
from irdmafs.train.config import TrainConfig
from irdmafs.train.coordinator import Coordinator
from irdmafs.train.directory import TrainDirectory, move
from irdmafs.train.liveness import Lock, is_locked
from irdmafs.train.status import report
from irdmafs.train.trees import Trees, look

JOINS = """
import sys
from irdmafs.train import Worker
worker = Worker(sys.argv[1], sys.argv[2])
print("joined", flush=True)
sys.stdin.read()
"""


# -- the same bits ---------------------------------------------------------------------------------


def test_run_that_is_repeated_gives_the_same_bits(place: Path) -> None:
    one, other = (run_bsp(place / name, rule="sgd", clip_norm=1.0) for name in ("one", "other"))
    assert same_bits(one, other)


@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=lambda dtype: np.dtype(dtype).name)
def test_number_of_shards_changes_no_bit(place: Path, dtype: type) -> None:
    one = run_bsp(place / "one", rule="adamw", dtype=dtype)
    three = run_bsp(place / "three", rule="adamw", dtype=dtype, shards=3)
    assert same_bits(one, three)
    assert one["embedding"].dtype == dtype


def test_bf16_parameters_are_trained_with_master_weights_in_fp32(run: Path) -> None:
    """An update that is too small for bf16 is not lost."""
    start(run, {"p": np.ones(100, BF16)})
    with Worker(run, "w") as worker, Reducer(run) as reducer:
        for _ in range(16):
            push_and_reduce(reducer, worker, {"p": np.full(100, 2.0**-11, np.float32)})
    assert np.all(parameters(run)["p"].astype(np.float32) == 1 + 2.0**-7)


def test_clipping_is_that_of_the_whole_gradient(run: Path) -> None:
    before = model()
    start(run, before, rule="sgd", lr=1.0, clip_norm=0.5, shards=3)
    with Worker(run, "w") as worker, Reducer(run) as reducer:
        push_and_reduce(reducer, worker, gradients(0, 1))
    norm = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in gradients(0, 1).values()))
    for name, gradient in gradients(0, 1).items():
        expected = before[name] - gradient * np.float32(0.5 / (norm + 1e-6))
        np.testing.assert_allclose(parameters(run)[name], expected, rtol=1e-6, atol=1e-7)


# -- who waits for whom ----------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
def test_bsp_waits_for_every_worker(run: Path, shards: int) -> None:
    start(run, shards=shards)
    with Reducer(run) as reducer, Worker(run, "a") as a, Worker(run, "b") as b:
        reduce(reducer)
        push_and_reduce(reducer, a, ones(1))
        assert newest(run) == 0
        with pytest.raises(TimeoutError, match="who is waited for"):
            a.pull(timeout_s=0.05)
        assert "waits for b\n" in report(TrainDirectory(run))
        push_and_reduce(reducer, b, ones(2))
        assert newest(run) == 1
        assert everywhere(run, 3)
        assert a.pull()["norm"].tolist() == [3, 3, 3]
        assert a.version == 1


@pytest.mark.parametrize(
    ("shards", "config"),
    [
        (3, {"rule": "sgd", "options": {"momentum": 0.9}, "clip_norm": 1.0}),
        (1, {"rule": "adamw"}),
        (3, {"rule": "ema", "options": {"decay": 0.5}}),
    ],
    ids=["sgd", "adamw", "ema"],
)
def test_async_pushes_that_come_together_count_one_by_one(
    place: Path, shards: int, config: dict[str, Any]
) -> None:
    """Parameters do not depend on how many pushes the reducer finds when it looks."""
    results = []
    for together in (False, True):
        run = start(place / f"{together}", model(), sync="async", shards=shards, **config)
        with Reducer(run) as reducer, Worker(run, "a") as a, Worker(run, "b") as b:
            for worker, number in ((a, 0), (b, 1)):
                for step in range(2):
                    worker.push(gradients(number, step))
                    if not together:
                        reduce(reducer)
            reduce(reducer)
        assert newest(run) == (1 if together else 4)
        results.append(parameters(run))
    assert same_bits(*results)


@pytest.mark.parametrize(("others", "counted", "kept"), [(3, 2, [0, 1, 2, 3]), (7, 1, [6, 7])])
def test_async_push_counts_less_by_its_staleness_also_if_its_version_is_gone(
    run: Path, others: int, counted: int, kept: list[int]
) -> None:
    start(run, rule="sgd", lr=1.0, sync="async", staleness="inverse", keep=len(kept))
    with Reducer(run) as reducer, Worker(run, "a") as a, Worker(run, "b") as b:
        b.pull()
        for _ in range(others):
            push_and_reduce(reducer, a, ones(0))
        assert TrainDirectory(run).version_numbers() == kept
        push_and_reduce(reducer, b, ones(-8))
        assert everywhere(run, counted)


def test_learning_rate_0_changes_no_parameter(run: Path) -> None:
    start(run, rule="sgd", lr=1.0)
    with Reducer(run) as reducer, Worker(run, "a") as worker:
        push_and_reduce(reducer, worker, ones(), lr=0)
        assert everywhere(run, 0)
        push_and_reduce(reducer, worker, ones())
        assert everywhere(run, -1)


# -- workers that come and go ----------------------------------------------------------------------


def test_worker_that_joins_later_pulls_at_once_and_is_waited_for(run: Path) -> None:
    start(run)
    with Reducer(run) as reducer, Worker(run, "a") as a:
        for _ in range(3):
            push_and_reduce(reducer, a, ones())
        with Worker(run, "b") as b:
            assert b.step == 3
            assert b.pull(timeout_s=5)["norm"].tolist() == [3] * 3
            assert b.version == 3
            push_and_reduce(reducer, a, ones())
            assert newest(run) == 3
            assert b.push(ones()) == 4
            reduce(reducer)
            assert newest(run) == 4
        push_and_reduce(reducer, a, ones())
        assert newest(run) == 5


def test_killed_worker_is_no_longer_waited_for_and_what_it_pushed_counts(run: Path) -> None:
    start(run)
    with (
        Reducer(run) as reducer,
        Worker(run, "a") as a,
        Program(sys.executable, "-c", JOINS, run, "b") as other,
    ):
        assert other.stdout.readline() == "joined\n"
        push_and_reduce(reducer, a, ones())
        assert newest(run) == 0
        with pytest.raises(TrainError, match="taking part"):
            Worker(run, "b")
        other.send_signal(signal.SIGKILL)
        other.wait()
        reduce_until(reducer, lambda: newest(run) == 1, "the dead worker is not waited for")
        with Worker(run, "b") as again:
            assert again.step == 1


def test_worker_that_begins_again_goes_on_after_its_last_push(run: Path) -> None:
    start(run)
    with Reducer(run) as reducer:
        with Worker(run, "a") as worker:
            worker.push(ones())
            worker.push(ones())
        with Worker(run, "a") as worker:
            assert worker.step == 2
            reduce(reducer)
            assert worker.push(ones()) == 3
        reduce(reducer)
    assert everywhere(run, 3)


# -- pushes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
def test_parameters_that_are_not_pushed_stay(run: Path, shards: int) -> None:
    start(run, rule="mean", shards=shards)
    with Reducer(run) as reducer, Worker(run, "a") as a, Worker(run, "b") as b:
        a.push({"norm": np.array([1, 2, 3], np.float32)})
        b.push({"norm": np.array([3, 2, 1], np.float32), "scale": np.float32(7)})
        reduce(reducer)
    found = parameters(run)
    assert found["norm"].tolist() == [2, 2, 2]
    assert found["scale"] == 7
    assert not found["embedding"].any()


def test_pull_copies_into_arrays_of_the_caller_in_any_order(run: Path) -> None:
    start(run, model(), shards=3)
    with Worker(run, "a") as worker:
        shown, out = worker.pull(), zeros()
        assert worker.pull(out)["norm"] is out["norm"]
        assert same_bits(shown, out)
        out = {name: np.zeros(shape, np.float32, order="F") for name, shape in SHAPES.items()}
        worker.pull(out)
        assert all(np.array_equal(out[name], array) for name, array in shown.items())
        assert not shown["embedding"].flags.writeable
        with pytest.raises(KeyError):
            worker.pull({"unknown": np.zeros(3)})
        for target in (np.zeros(4, np.float32), np.zeros(3, int)):
            with pytest.raises(ValueError, match="for the parameter"):
                worker.pull({"norm": target})


def test_arrays_that_were_pulled_stay_when_their_version_is_removed(run: Path) -> None:
    start(run, model(), keep=2, sync="async")
    with Reducer(run) as reducer, Worker(run, "a") as worker:
        pulled = worker.pull()
        for step in range(1, 5):
            push_and_reduce(reducer, worker, gradients(0, step))
        assert TrainDirectory(run).version_numbers() == [3, 4]
        assert same_bits(pulled, model())


# -- without a Worker ------------------------------------------------------------------------------


def test_files_of_other_programs_are_pushes(run: Path, tmp_path: Path) -> None:
    """Also under the same name again, as soon as the one before has been seen."""
    start(run, rule="mean")
    push = TrainDirectory(run).push
    for value in (1, 2):
        save_file(ones(value), tmp_path / "alice.safetensors")
        with Reducer(run) as reducer:
            for _ in range(2):
                shutil.copyfile(tmp_path / "alice.safetensors", push / "alice.safetensors")
                reduce(reducer)
    assert newest(run) == 4
    assert TrainDirectory(run).newest_plan().clocks == {"alice": 4}
    assert everywhere(run, 2)
    save_file({"norm": np.full(3, 4, np.float32)}, push / "bob.safetensors")
    with Reducer(run) as reducer:
        reduce(reducer)
    assert parameters(run)["norm"].tolist() == [4] * 3
    assert not os.listdir(push)


def test_two_files_of_one_worker_count_one_after_the_other(run: Path, tmp_path: Path) -> None:
    start(run)
    push = TrainDirectory(run).push
    for name, value in (("one", 1), ("other", 2)):
        save_file(ones(value), tmp_path / "push", metadata={"worker": "w"})
        shutil.copyfile(tmp_path / "push", push / f"{name}.safetensors")
    with Reducer(run) as reducer:
        reduce(reducer)
    assert TrainDirectory(run).newest_plan().clocks == {"w": 2}
    assert everywhere(run, 3)


def test_file_written_anew_before_it_is_planned_counts_as_it_is(run: Path, tmp_path: Path) -> None:
    start(run)
    with Reducer(run) as reducer, Worker(run, "b") as worker:
        for weight in ("1", "3"):
            save_file(ones(), tmp_path / "push", metadata={"weight": weight})
            shutil.copyfile(tmp_path / "push", reducer.train.push / "a@1.safetensors")
            reduce(reducer)
        worker.push(ones())
        reduce_until(reducer, lambda: newest(run) == 1, "both count")
    assert everywhere(run, 4)


def test_status_tells_how_far_each_worker_is(run: Path) -> None:
    start(run, {"p": np.zeros(1000, np.float32)}, sync="async")
    pushed = {"p": np.ones(1000, np.float32)}
    with Reducer(run) as reducer, Worker(run, "ahead") as ahead, Worker(run, "behind") as behind:
        behind.pull()
        for _ in range(3):
            push_and_reduce(reducer, ahead, pushed)
            ahead.pull()
        push_and_reduce(reducer, behind, pushed)
        status = report(TrainDirectory(run))
    assert "version   4\n" in status
    assert re.search(r"^ahead +3 +0 +- +yes", status, re.MULTILINE)
    assert re.search(r"^behind +1 +2 +- +yes", status, re.MULTILINE)


# -- the beginning and the end ---------------------------------------------------------------------


def test_training_begins_and_ends_with_the_files_of_the_model(run: Path) -> None:
    run.mkdir()
    save_file({"a": np.ones(5, np.float32)}, run / "one.safetensors")
    save_file({"b": np.ones((2, 3), BF16)}, run / "other.safetensors")
    begin(run, TrainConfig(rule="sum"), shards=2)
    with pytest.raises(TrainError, match="trained in already"):
        begin(run, TrainConfig())
    with Reducer(run) as reducer, Worker(run, "w") as worker:
        push_and_reduce(
            reducer, worker, {"a": np.ones(5, np.float32), "b": np.ones((2, 3), np.float32)}
        )
    assert load_file(run / "one.safetensors")["a"].tolist() == [2] * 5
    assert end(run) == 1
    assert sorted(os.listdir(run)) == ["one.safetensors", "other.safetensors"]
    assert not (run / "one.safetensors").is_symlink()
    assert load_file(run / "one.safetensors")["a"].tolist() == [2] * 5
    assert load_file(run / "other.safetensors")["b"].astype(np.float32).tolist() == [[2] * 3] * 2


def test_what_a_killed_program_has_left_is_in_the_way_of_none_of_the_same_number(run: Path) -> None:
    """A program that is started again in a container has the number that it had."""
    run.mkdir()
    save_file(zeros(), run / "model.safetensors")
    for left in (
        f".train.{os.uname().nodename}.{os.getpid()}",
        f".model.safetensors.{os.getpid()}",
    ):
        (run / left / "push").mkdir(parents=True)
    begin(run, TrainConfig())
    lock = Lock(run / ".train" / "workers" / f".a.{os.getpid()}")
    assert lock.hold(), "it is on another host, just before it takes part"
    with Worker(run, "a"):
        lock.close()
    assert end(run) == 0


@pytest.mark.parametrize("what", ["irdmafs.train.reducer.Coordinator", "os.ftruncate"])
def test_reducer_whose_filesystem_fails_while_it_takes_its_part_leaves_it_to_all(
    run: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    start(run)
    with Worker(run, "w") as worker, Reducer(run) as fails, Reducer(run) as other:
        worker.push(ones())
        with monkeypatch.context() as patch:
            patch.setattr(what, Mock(side_effect=OSError(errno.EIO, "broken")))
            with pytest.raises(OSError, match="broken"):
                fails.step()
        goes_on = fails if what.endswith("Coordinator") else other
        reduce_until(goes_on, lambda: newest(run) == 1, "the version is made")


def test_files_that_were_being_written_when_a_process_was_killed_are_removed(run: Path) -> None:
    start(run)
    for left, seconds in ((".a.1", 100), (".a.12", 0)):
        path = run / ".train" / "workers" / left
        path.touch()
        os.utime(path, (time.time() - seconds,) * 2)
    with Reducer(run) as reducer:
        reduce(reducer)
    names = [path.name for path in (run / ".train").rglob(".*.*")]
    assert names == [".a.12"]


def test_version_has_nothing_that_a_killed_reducer_was_writing(run: Path) -> None:
    """One was killed before it had planned the version, another one while it made it."""
    start(run, shards=2, rule="sgd", clip_norm=1.0)
    making = run / ".train" / "next" / "1"
    making.mkdir()
    with Worker(run, "w") as worker, Reducer(run) as reducer:
        worker.push(ones())
        while not (making / "version.json").exists():
            reducer.step()
        (making / ".0.host.123").write_bytes(b"half")
        reduce(reducer)
    assert newest(run) == 1
    assert not [*(run / ".train" / "versions").rglob("*123*")]


def test_newest_of_more_versions_than_an_answer_of_the_mount_can_tell_is_found(run: Path) -> None:
    start(run, shards=2)
    for number in range(400):
        (run / ".train" / "versions" / f"{number:0200}.kept").mkdir()
    with Worker(run, "w") as worker, Reducer(run) as reducer:
        for step in (1, 2):
            push_and_reduce(reducer, worker, ones())
            assert worker.pull(timeout_s=30)["norm"].tolist() == [step] * 3
        with pytest.raises(OSError, match="Argument list too long"):
            look(worker.train.versions, levels=0)


def test_what_is_put_aside_does_not_pile_up(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("irdmafs.train.coordinator._TIDY_S", -1.0)
    start(run, shards=2)
    with Worker(run, "w") as worker, Reducer(run) as reducer:
        for _ in range(12):
            push_and_reduce(reducer, worker, ones())
            assert reducer._coordinator is not None
            reducer._coordinator.tidy_up()
        assert len(os.listdir(run / ".train" / "aside")) < 5


@pytest.mark.parametrize("value", [1, np.nan])
def test_version_that_is_planned_anew_under_its_name_is_made(
    run: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    """Also if reducers have to tell of a bad push once more."""
    monkeypatch.setattr("irdmafs.train.open_push.check_finite", lambda _: None)
    start(run, shards=2)
    lock = Lock(run / ".train" / "reducers" / "coordinator")
    assert lock.hold()
    with Worker(run, "w") as worker, Reducer(run) as reducer:
        train = reducer.train
        coordinator = Coordinator(train, Trees())

        def coordinate() -> bool:
            plan = train.newest_plan()
            made = train.making(plan.version + 1, look(train.next))
            coordinator.step(train.config(), plan, made)
            return newest(run) == 1

        worker.push(ones(value))
        coordinate()
        reduce(reducer)
        shutil.rmtree(train.next / "1")
        reduce_until(reducer, coordinate, "it is made")
    lock.close()


def test_version_that_is_planned_once_more_when_it_was_made_holds_nobody_up(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a coordinator that was taken for dead, and saw no version since."""
    start(run)

    def commit(path: Path, target: Path) -> None:
        move(path, target)
        if target.name == "1":
            path.mkdir()
            shutil.copy(target / "version.json", path)

    with Worker(run, "w") as worker, Reducer(run) as reducer:
        monkeypatch.setattr("irdmafs.train.coordinator.move", commit)
        for _ in range(2):
            worker.push(ones())
            for _ in range(20):
                reducer.step()
        assert newest(run) == 2


def test_version_is_made_by_a_reducer_that_has_opened_its_directories_again(run: Path) -> None:
    """As when its mount was killed: they have other descriptors."""
    start(run)
    lower = os.open(os.devnull, os.O_RDONLY)
    with Worker(run, "w") as worker, Reducer(run) as reducer:
        worker.push(ones())
        while reducer._found is None or reducer._found[1].made is None:
            reducer.step()
        os.close(lower)
        reducer._begin_again()
        reduce_until(reducer, lambda: newest(run) == 1, "it is made")


def test_part_of_a_reducer_that_ended_is_taken_over(run: Path) -> None:
    start(run, shards=2)
    with Worker(run, "w") as worker:
        worker.push(ones())
        with Reducer(run) as first, Reducer(run) as second:
            first.step()
            reduce(second)
            assert newest(run) == 0
            first.close()
            reduce_until(second, lambda: newest(run) == 1, "the other reducer has all parts")
        assert not is_locked(run / ".train" / "reducers" / "coordinator")
