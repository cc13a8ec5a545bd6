"""A worker that was taken for dead pushes nothing once another has its name, and leaves nothing behind.
Files that are being removed are nobody's: what another process moves meanwhile it has whole."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness import training_runs as runs

from irdmafs.client import _files
from irdmafs.train import Reducer, Refused, TrainConfig, Worker, begin, directory, end
from irdmafs.train.directory import TrainDirectory, remove
from irdmafs.train.liveness import Lock
from irdmafs.train.trees import Directory


def lose_lock(worker: Worker) -> None:
    """Do what the end of the session of its mount does."""
    worker._lock.close()


def stopped_in_a_push(folder: Path) -> Worker:
    """Return a worker that has written all of a push, and has not published it."""
    runs.start(folder, shards=3)
    worker = Worker(folder, "a")
    runs.put_all(worker, runs.ones(1))._threads.shutdown()
    lose_lock(worker)
    return worker


def staged(folder: Path) -> list[str]:
    return os.listdir(TrainDirectory(folder).staging)


def test_worker_that_was_replaced_while_it_pushed_publishes_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.start(run, shards=3, sync="async")
    stopped = Worker(run, "a")
    push = runs.put_all(stopped, runs.ones(1))
    lose_lock(stopped)
    with Reducer(run) as reducer, Worker(run, "a") as worker:
        worker.push(runs.ones(2), weight=3)
        # It looked at its lock just before.
        with monkeypatch.context() as patch:
            patch.setattr(Lock, "is_held", True)
            with pytest.raises(OSError):
                push.finish()
            with pytest.raises(FileNotFoundError):
                stopped.push(runs.ones(4))
        runs.reduce(reducer)
        assert runs.everywhere(run, 6)
        assert worker.push(runs.ones(1)) == 2
        runs.reduce(reducer)
    assert runs.everywhere(run, 7)


def test_removed_push_is_not_published_half(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stopped worker goes on while the other removes its push: also a request that has found the
    directory before, as one that was on its way while a mount was cut off."""
    stopped = stopped_in_a_push(run)
    train = TrainDirectory(run)
    home = os.open(stopped._home, os.O_RDONLY | os.O_DIRECTORY)
    removed = []

    def remove_slowly(path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            os.rename(stopped._home / "a@1", train.push / "a@1")
        with pytest.raises(FileNotFoundError):
            os.rename("a@1", train.push / "a@1", src_dir_fd=home)
        removed.append(path)
        remove(path)

    try:
        monkeypatch.setattr(directory, "remove", remove_slowly)
        with Worker(run, "a") as worker:
            assert worker.step == 0
            assert len(removed) == 2, "the push, and the directory of the worker"
    finally:
        os.close(home)


def test_two_workers_of_one_name_do_not_mix_their_shards(run: Path) -> None:
    runs.start(run, shards=3)
    stopped = Worker(run, "a")
    push = stopped.begin_push()
    push.put("norm", runs.ones(8)["norm"])
    lose_lock(stopped)
    with Reducer(run) as reducer, Worker(run, "a") as worker:
        other = runs.put_all(worker, runs.ones(2))
        push.put("embedding", runs.ones(8)["embedding"])
        other.finish()
        push.abort()
        runs.reduce(reducer)
        assert runs.everywhere(run, 2)


@pytest.mark.parametrize("shards", [1, 3])
def test_worker_that_was_cut_off_goes_on_if_nobody_has_its_place(run: Path, shards: int) -> None:
    runs.start(run, shards=shards)
    with Worker(run, "a") as worker, Reducer(run) as reducer:
        worker.push(runs.ones(1))
        runs.reduce(reducer)
        lose_lock(worker)
        runs.reduce_until(
            reducer, lambda: not os.listdir(run / ".train" / "workers"), "it is taken for dead"
        )
        assert worker.push(runs.ones(1)) == 2
        runs.reduce(reducer)
    assert runs.everywhere(run, 2)


@pytest.mark.parametrize("shards", [1, 3])
def test_worker_whose_place_was_taken_is_told(run: Path, shards: int) -> None:
    runs.start(run, shards=shards)
    stopped = Worker(run, "a")
    lose_lock(stopped)
    with Worker(run, "a"), pytest.raises(Refused, match="is taking part in"):
        stopped.push(runs.ones(1))
    with Worker(run, "a") as worker:
        worker.push(runs.ones(1))
    with pytest.raises(Refused, match="another worker has pushed as 'a'"):
        stopped.push(runs.ones(1))
    stopped = Worker(run, "b")
    lose_lock(stopped)
    end(run)
    begin(run, TrainConfig(), shards=shards + 1)
    with pytest.raises(Refused, match="another training has begun"):
        stopped.push(runs.ones(1))


@pytest.mark.parametrize("again", [True, False])
def test_what_a_killed_worker_had_begun_to_push_is_removed(run: Path, again: bool) -> None:
    stopped_in_a_push(run)
    assert len(staged(run)) == 1
    with Reducer(run) as reducer, Worker(run, "b") as other:
        if again:
            with Worker(run, "a"):
                assert len(staged(run)) == 2
        else:
            runs.reduce_until(
                reducer, lambda: len(staged(run)) == 1, "the dead worker's are removed"
            )
        other.push(runs.ones(1))
        runs.reduce_until(reducer, lambda: runs.newest(run) == 1, "the other's push counts")
    assert staged(run) == []


@pytest.mark.parametrize("shards", [1, 3])
def test_place_of_worker_that_ended_is_free_for_one_of_another_name(run: Path, shards: int) -> None:
    runs.start(run, workers=2, shards=shards)
    with Reducer(run) as reducer, Worker(run, "a") as a:
        with Worker(run, "b") as b, Worker(run, "c") as c:
            a.push(runs.ones(1))
            b.push(runs.ones(1))
            runs.reduce(reducer)
            with pytest.raises(Refused, match="'c' is a worker too many: 2 take part"):
                c.push(runs.ones(1))
        with Worker(run, "c") as c:
            a.push(runs.ones(1))
            c.push(runs.ones(1))
            runs.reduce(reducer)
        assert runs.newest(run) == 2
    assert runs.everywhere(run, 4)


@contextmanager
def removed_slowly(inode: int, act: Callable[[], None]) -> Iterator[list[Path]]:
    """Act when this directory is about to be removed. Gives what was."""
    removed: list[Path] = []

    def remove_slowly(path: Path) -> None:
        if path.lstat().st_ino == inode:
            removed.append(path)
            act()
        remove(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(directory, "remove", remove_slowly)
        yield removed


def tidy_up(reducer: Reducer) -> None:
    assert reducer._coordinator is not None
    while reducer._coordinator.tidy_up():
        pass


def test_part_of_a_reducer_that_was_replaced_is_not_published_half(run: Path) -> None:
    """Its rename to the version is on its way while the directory that it is in is removed."""
    runs.start(run)
    train = TrainDirectory(run)
    with Worker(run, "a") as worker, Reducer(run) as stopped:
        worker.push(runs.ones(1))
        runs.reduce(stopped)
        (home,) = train.ahead.iterdir()
        (home / "2").mkdir()
        (home / "2" / "file").write_text("")
        inode = (home / "2").stat().st_ino
        # As a request has it that has been on its way for long.
        opened = Directory(home)
        stopped._leave_parts()

        def publish() -> None:
            with pytest.raises(FileNotFoundError):
                os.rename(opened.path / "2", train.next / "half")

        with removed_slowly(inode, publish) as removed, Reducer(run) as other:
            runs.reduce(other)
            tidy_up(other)
        assert removed
    assert not os.listdir(train.aside)


def test_push_that_has_counted_is_taken_back_whole_or_removed(run: Path) -> None:
    """A worker that was taken for dead takes it back, to write its next push there, while a coordinator
    removes it."""
    runs.start(run, shards=3)
    train = TrainDirectory(run)
    with Reducer(run) as reducer:
        with Worker(run, "a") as worker:
            worker.push(runs.ones(1))
            (push,) = os.listdir(train.push)
            inode = (train.push / push).stat().st_ino
            runs.reduce(reducer)
            assert runs.newest(run) == 1
            assert os.listdir(train.push) == [push]

        def take_back() -> None:
            with pytest.raises(FileNotFoundError):
                os.rename(train.push / push, train.staging / push)

        with removed_slowly(inode, take_back) as removed:
            runs.reduce_until(reducer, lambda: not os.listdir(train.push), "it is put aside")
            tidy_up(reducer)
        assert removed


def test_part_that_was_published_in_spite_of_an_error_is_not_written_any_more(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to its rename was lost, and a push is removed, so that the version is planned again."""
    runs.start(run, shards=3, sync="quorum:1")
    rename = _files.rename
    lost: list[Path] = []

    def lose_answer(source: Path, target: Path, flags: int = 0) -> None:
        rename(source, target, flags)
        if not lost and (Path(source).name, Path(target).name) == ("1", "0"):
            lost.append(Path(target))
            raise OSError(errno.EIO, "Input/output error")

    with Worker(run, "a") as worker, Reducer(run) as reducer:
        worker.push(runs.ones(1))
        with monkeypatch.context() as patch:
            patch.setattr(_files, "rename", lose_answer)
            with pytest.raises(OSError, match="Input/output"):
                runs.reduce(reducer)
        (published,) = lost
        part = reducer._parts[published.name]
        made = part._open_folders(1)
        written = {os.stat(one.path).st_ino for one in (made.params, made.state)}
        assert written.isdisjoint(path.stat().st_ino for path in published.rglob("*"))
        runs.reduce(reducer)
        assert runs.newest(run) == 1
    assert all(bool((array == 1).all()) for array in runs.parameters(run).values())
