"""Shards that are summed ahead of the plan, and fetched ahead of the version, change no parameter."""

import mmap
import os
import secrets
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from harness.mountpoint import eventually
from harness.training_runs import (
    Arrays,
    fetched,
    gradients,
    model,
    newest,
    parameters,
    put_all,
    reduce,
    reduce_until,
    same_bits,
    start,
    zeros,
)

from irdmafs.client import _files
from irdmafs.client._safetensors import encode
from irdmafs.train import Reducer, Worker
from irdmafs.train.open_push import OpenPush
from irdmafs.train.part import Part, Staged
from irdmafs.train.pushes import STEP, arrays_of, slices_of
from irdmafs.train.reduction import Reduction
from irdmafs.train.trees import Trees, look

SHARDS = 3
# Long enough for whatever is waited for to happen.
LONG_S = 30.0


@pytest.fixture
def reductions(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Collects, for each shard that a reducer opens pushes for, whether that is ahead of the plan."""
    made: list[bool] = []

    class Spy(Reduction):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            made.append(not isinstance(arguments[4], partial))

    monkeypatch.setattr("irdmafs.train.part.Reduction", Spy)
    return made


def sum_ahead(reducer: Reducer, reductions: list[bool], count: int = SHARDS) -> None:
    reduce_until(reducer, lambda: len(reductions) >= count, "the shards are summed ahead")
    reduce(reducer)
    assert reductions == [True] * count


def finish(
    run: Path, reducer: Reducer, *pushes: OpenPush, weights: tuple[float, ...] = ()
) -> Arrays:
    """Finish pushes, and return the parameters that come of them."""
    version = newest(run) + 1
    for push, weight in zip(pushes, weights or [1.0] * len(pushes), strict=True):
        push.finish(weight)
    reduce_until(reducer, lambda: newest(run) == version, "the version is made")
    return parameters(run)


def plainly(run: Path, pushed: Mapping[str, Arrays], **config: Any) -> Arrays:
    """Return the parameters of a run that sums nothing ahead."""
    weights = config.pop("weights", {})
    other = start(run.with_name("plain"), model(), shards=SHARDS, **config)
    workers = {name: Worker(other, name) for name in pushed}
    for name, worker in workers.items():
        worker.push(pushed[name], weight=weights.get(name, 1.0))
    with Reducer(other) as reducer:
        reduce_until(reducer, lambda: newest(other) == 1, "the version is made")
    for worker in workers.values():
        worker.close()
    return parameters(other)


# -- what was summed ahead -------------------------------------------------------------------------


@pytest.mark.parametrize("config", [{"rule": "sum"}, {"rule": "adamw", "sync": "local:2"}], ids=str)
def test_shards_that_were_summed_ahead_make_the_version(
    run: Path, reductions: list[bool], config: dict[str, Any]
) -> None:
    start(run, model(), shards=SHARDS, **config)
    with Reducer(run) as reducer, Worker(run, "a") as a, Worker(run, "b") as b:
        pushes = [put_all(a, gradients(0, 1)), put_all(b, gradients(1, 1))]
        sum_ahead(reducer, reductions)
        assert newest(run) == 0
        found = finish(run, reducer, *pushes)
    assert reductions == [True] * SHARDS
    assert same_bits(found, plainly(run, {"a": gradients(0, 1), "b": gradients(1, 1)}, **config))


def test_following_versions_are_summed_ahead_too(run: Path, reductions: list[bool]) -> None:
    start(run, shards=SHARDS, keep=2)
    with Reducer(run) as reducer, Worker(run, "a") as a, Worker(run, "b") as b:
        for step in range(1, 5):
            pushes = [put_all(a, gradients(0, step)), put_all(b, gradients(1, step))]
            sum_ahead(reducer, reductions, SHARDS * step)
            finish(run, reducer, *pushes)
    assert reductions == [True] * (SHARDS * 4)


@pytest.mark.parametrize(("step", "weight"), [(2, 1.0), (1, 3.0)], ids=["written anew", "weight"])
def test_push_that_changes_after_it_was_summed_is_summed_anew(
    run: Path, reductions: list[bool], step: int, weight: float
) -> None:
    start(run, model(), shards=SHARDS, rule="mean")
    with Reducer(run) as reducer, Worker(run, "a") as a, Worker(run, "b") as b:
        pushes = [put_all(a, gradients(0, 1)), put_all(b, gradients(1, 1))]
        sum_ahead(reducer, reductions)
        if step == 2:
            for other in (3, 4, 2):
                put_all(a, gradients(0, other), pushes[0])
            # A second writer would empty what the reducer may have mapped: SIGBUS.
            assert pushes[0]._path is not None
            assert {_files.read_version(file) for file in pushes[0]._path.iterdir()} == {1}
        found = finish(run, reducer, *pushes, weights=(weight, 1.0))
    assert not all(reductions) if step == 2 else reductions[SHARDS:] == [False] * SHARDS
    pushed = {"a": gradients(0, step), "b": gradients(1, 1)}
    assert same_bits(found, plainly(run, pushed, rule="mean", weights={"a": weight}))


def test_push_of_a_worker_that_leaves_does_not_count(run: Path, reductions: list[bool]) -> None:
    start(run, model(), shards=SHARDS, workers="auto")
    with Reducer(run) as reducer, Worker(run, "a") as a, Worker(run, "b") as b:
        with Worker(run, "c") as c:
            pushes = [put_all(a, gradients(0, 1)), put_all(b, gradients(1, 1))]
            left = put_all(c, gradients(2, 1))
            sum_ahead(reducer, reductions)
            left.abort()
        found = finish(run, reducer, *pushes)
    assert reductions == [True] * SHARDS + [False] * SHARDS
    assert same_bits(found, plainly(run, {"a": gradients(0, 1), "b": gradients(1, 1)}))


def test_another_directory_in_place_of_a_push_counts(run: Path, reductions: list[bool]) -> None:
    start(run, model(), shards=SHARDS)
    other = start(run.with_name("other"), model(), shards=SHARDS)
    with Worker(other, "a") as worker:
        worker.push(gradients(0, 2))
    with Reducer(run) as reducer, Worker(run, "a") as a:
        push = put_all(a, gradients(0, 1))
        sum_ahead(reducer, reductions)
        push.finish()
        (pushed,) = (run / ".train" / "push").iterdir()
        foreign = next((run / ".train" / "staging").iterdir()) / "a@2"
        shutil.copytree(other / ".train" / "push" / pushed.name, foreign)
        pushed.rename(run / "taken")
        foreign.rename(pushed)
        reduce_until(reducer, lambda: newest(run) == 1, "the version is made")
        found = parameters(run)
    assert reductions == [True] * SHARDS + [False] * SHARDS
    assert same_bits(found, plainly(run, {"a": gradients(0, 2)}))


def test_reducer_whose_part_was_taken_publishes_nothing(run: Path, reductions: list[bool]) -> None:
    start(run, model(), shards=SHARDS)
    with Reducer(run) as reducer, Worker(run, "a") as a:
        train, config = reducer.train, reducer.train.config()
        push = put_all(a, gradients(0, 1))
        sum_ahead(reducer, reductions)
        push.finish()
        coordinator, lost = reducer._coordinator, dict(reducer._parts)
        assert coordinator is not None
        eventually(lambda: coordinator.step(config, train.newest_plan(), None), "a plan is made")
        made = train.making(1, look(train.next))
        assert made is not None
        staged = Staged(train, Trees())
        taken = {name: Part(train, name, reducer._blocks, staged) for name in lost}
        for name, part in lost.items():
            assert not part.make(*made)
            assert not (made[0] / name).exists()
            assert taken[name].make(*made)
        reduce(reducer)
        assert newest(run) == 1
        found = parameters(run)
    assert same_bits(found, plainly(run, {"a": gradients(0, 1)}))


@pytest.mark.parametrize("link", ["of a worker", "of a push"])
def test_links_in_staging_are_not_followed(run: Path, reductions: list[bool], link: str) -> None:
    start(run, model(), shards=SHARDS)
    other = start(run.with_name("other"), model(), shards=SHARDS)
    with Worker(other, "a") as worker:
        worker.push(gradients(0, 2))
    (foreign,) = (other / ".train" / "push").iterdir()
    with Reducer(run) as reducer, Worker(run, "a") as a:
        (staging,) = (run / ".train" / "staging").iterdir()
        if link == "of a push":
            (staging / foreign.name).symlink_to(foreign)
        else:
            staging.with_name(f"a@{secrets.token_hex(8)}").symlink_to(foreign.parent)
        staged, config = Staged(reducer.train, Trees()), reducer.train.config()
        assert staged.plan(config, reducer.train.newest_plan()) is None
        if link == "of a push":
            (staging / foreign.name).unlink()
        push = put_all(a, gradients(0, 1))
        found = finish(run, reducer, push)
    assert same_bits(found, plainly(run, {"a": gradients(0, 1)}))


def test_directories_with_other_names_stop_no_reducer(run: Path, reductions: list[bool]) -> None:
    start(run, model(), shards=SHARDS)
    with Reducer(run) as reducer, Worker(run, "a") as a, Worker(run, "b") as b:
        for staging in list((run / ".train" / "staging").iterdir()):
            for name in ("a@1;weight=inf", "b@1;lr=1e999", "c@1;weight=-", "@", "x"):
                (staging / name).mkdir()
        pushes = [put_all(a, gradients(0, 1)), put_all(b, gradients(1, 1))]
        found = finish(run, reducer, *pushes)
    assert same_bits(found, plainly(run, {"a": gradients(0, 1), "b": gradients(1, 1)}))


@pytest.mark.parametrize(
    "config",
    [
        {"clip_norm": 1.0},
        {"nonfinite": "skip"},
        {"sync": "async"},
        {"sync": "ssp:1"},
        {"sync": "quorum:2"},
    ],
    ids=str,
)
def test_nothing_is_summed_ahead_of_a_plan_that_cannot_be_foreseen(
    run: Path, reductions: list[bool], config: dict[str, Any]
) -> None:
    start(run, model(), shards=SHARDS, rule="sgd", **config)
    with Reducer(run) as reducer, Worker(run, "a") as a, Worker(run, "b") as b:
        pushes = [put_all(a, gradients(0, 1)), put_all(b, gradients(1, 1))]
        reduce(reducer)
        for home in reducer.train.ahead.iterdir():
            assert not list(home.iterdir())
        assert reductions == []
        finish(run, reducer, *pushes)
    assert True not in reductions


# -- files that are written anew -------------------------------------------------------------------


def make_version(run: Path, reducer: Reducer, worker: Worker) -> None:
    version = newest(run) + 1
    worker.push(gradients(0, version))
    reduce_until(reducer, lambda: newest(run) == version, "the version is made")
    reduce(reducer)


def params(run: Path, version: int) -> list[Path]:
    return sorted((run / ".train" / "versions" / str(version)).glob("*/params/*"))


def test_file_of_a_version_that_has_another_name_keeps_its_content(run: Path) -> None:
    start(run, model(), shards=SHARDS, keep=2)
    with Reducer(run) as reducer, Worker(run, "w") as worker:
        linked: dict[Path, bytes] = {}
        for _ in range(6):
            make_version(run, reducer, worker)
            path = params(run, newest(run))[0]
            name = run / f"linked-{newest(run)}"
            name.hardlink_to(path)
            linked[name] = path.read_bytes()
    assert [name.read_bytes() for name in linked] == list(linked.values())


def test_reader_keeps_the_bytes_of_a_version_whose_files_are_written_anew(run: Path) -> None:
    start(run, model(), shards=SHARDS, keep=2)
    with Reducer(run) as reducer, Worker(run, "w") as worker:
        make_version(run, reducer, worker)
        files = [path.open("rb", buffering=0) for path in params(run, 1)]
        before = [path.read_bytes() for path in params(run, 1)]
        mapped = [mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) for file in files]
        numbers = {os.fstat(file.fileno()).st_ino for file in files}
        written_anew = set()
        for _ in range(5):
            make_version(run, reducer, worker)
            written_anew |= numbers & {path.stat().st_ino for path in params(run, newest(run))}
        assert written_anew == numbers
        assert [memory[:] for memory in mapped] == before
        assert [file.read() for file in files] == before
        for memory in mapped:
            memory.close()
        for file in files:
            file.close()


# -- what was fetched ahead ------------------------------------------------------------------------


def fetch_ahead(worker: Worker, reducer: Reducer, reductions: list[bool]) -> None:
    """Sum what was put into a push, until a worker that has begun to pull has the sums of all shards."""
    sum_ahead(reducer, reductions)
    eventually(lambda: fetched(worker), "the shards are fetched")


@pytest.mark.parametrize("copied", [False, True], ids=["shown", "copied"])
def test_only_files_that_are_shown_to_a_program_are_opened_for_it(
    run: Path, reductions: list[bool], copied: bool
) -> None:
    """A program may send pages of a file from where they lie, so its node uses that for nothing else."""
    start(run, model(), shards=SHARDS)
    with Reducer(run) as reducer, Worker(run, "a") as a:
        a.pull(zeros() if copied else None)
        push = put_all(a, gradients(0, 1))
        fetch_ahead(a, reducer, reductions)
        assert a._prefetch is not None
        files = [one.file.result() for one in a._prefetch._fetches.values()]
        assert [file.shown for file in files] == [not copied] * SHARDS
        found = finish(run, reducer, push)
        pulled = a.pull(timeout_s=LONG_S)
        assert same_bits(pulled, found)
        begin = pulled["norm"].ctypes.data
        lies_in = [0 <= begin - file._data.ctypes.data < file._data.size for file in files]
        assert any(lies_in) == (not copied)


@pytest.mark.parametrize("by", ["the same reducer", "another one"])
def test_pull_gives_the_version_if_a_shard_was_made_anew_after_it_was_fetched(
    run: Path, reductions: list[bool], by: str
) -> None:
    start(run, model(), shards=SHARDS)
    with ExitStack() as stack, Worker(run, "a") as a:
        a.pull()
        push = put_all(a, gradients(0, 1))
        reducer = stack.enter_context(Reducer(run))
        fetch_ahead(a, reducer, reductions)
        if by == "another one":
            reducer.close()
            reducer = stack.enter_context(Reducer(run))
        for name, value in gradients(0, 2).items():
            push.put(name, value)
        found = finish(run, reducer, push)
        assert same_bits(a.pull(timeout_s=LONG_S), found)
    assert same_bits(found, plainly(run, {"a": gradients(0, 2)}))


def test_push_pull_gives_the_version_if_a_shard_was_made_anew_after_it_was_copied(
    run: Path, reductions: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    start(run, model(), shards=SHARDS)
    out = zeros()
    copied: list[Arrays] = []
    with Reducer(run) as reducer, Worker(run, "a") as a:
        a.pull()
        publish = a._publish

        def write_anew_and_publish(written: Path, *of: Any) -> int:
            fetch_ahead(a, reducer, reductions)
            copied.append({name: array.copy() for name, array in out.items()})
            shard = a.layout.shards[0]
            slices = slices_of(shard, arrays_of(a.layout, gradients(0, 2)))
            path = os.fspath(written / shard.name)
            os.close(_files.write_version(path, encode(slices, {STEP: "1"})))
            step = publish(written, *of)
            reduce_until(reducer, lambda: newest(run) == 1, "the version is made")
            return step

        monkeypatch.setattr(a, "_publish", write_anew_and_publish)
        a.push_pull(gradients(0, 1), out, timeout_s=LONG_S)
        assert same_bits(out, parameters(run))
        assert not same_bits(out, copied[0])
        assert not same_bits(copied[0], zeros())


def test_nothing_is_copied_after_push_pull_has_raised(run: Path, reductions: list[bool]) -> None:
    start(run, model(), shards=SHARDS)
    out = zeros()
    with Reducer(run) as reducer, Worker(run, "a") as a, Worker(run, "b") as b:
        a.pull()
        with pytest.raises(TimeoutError):
            a.push_pull(gradients(0, 1), out, timeout_s=0.05)
        before = {name: array.copy() for name, array in out.items()}
        push = put_all(b, gradients(1, 1))
        sum_ahead(reducer, reductions)
        found = finish(run, reducer, push)
        assert same_bits(out, before)
        assert same_bits(a.pull(out, timeout_s=LONG_S), found)
