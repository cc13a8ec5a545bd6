"""Files that are being removed are nobody's: what another process moves meanwhile it has whole."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness.training_runs import newest, ones, parameters, reduce, reduce_until, start

from irdmafs.train import Reducer, Worker, directory
from irdmafs.train.directory import TrainDirectory, remove
from irdmafs.train.trees import Directory


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
    start(run)
    train = TrainDirectory(run)
    with Worker(run, "a") as worker, Reducer(run) as stopped:
        worker.push(ones(1))
        reduce(stopped)
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
            reduce(other)
            tidy_up(other)
        assert removed
    assert not os.listdir(train.aside)


def test_push_that_has_counted_is_taken_back_whole_or_removed(run: Path) -> None:
    """A worker that was taken for dead takes it back, to write its next push there, while a coordinator
    removes it."""
    start(run, shards=3)
    train = TrainDirectory(run)
    with Reducer(run) as reducer:
        with Worker(run, "a") as worker:
            worker.push(ones(1))
            (push,) = os.listdir(train.push)
            inode = (train.push / push).stat().st_ino
            reduce(reducer)
            assert newest(run) == 1
            assert os.listdir(train.push) == [push]

        def take_back() -> None:
            with pytest.raises(FileNotFoundError):
                os.rename(train.push / push, train.staging / push)

        with removed_slowly(inode, take_back) as removed:
            reduce_until(reducer, lambda: not os.listdir(train.push), "it is put aside")
            tidy_up(reducer)
        assert removed


def test_part_that_was_published_in_spite_of_an_error_is_not_written_any_more(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to its rename was lost, and a push is removed, so that the version is planned again."""
    start(run, shards=3, sync="quorum:1")
    rename = os.rename
    lost: list[Path] = []

    def lose_answer(source: Path, target: Path) -> None:
        rename(source, target)
        if not lost and (Path(source).name, Path(target).name) == ("1", "0"):
            lost.append(Path(target))
            raise OSError(errno.EIO, "Input/output error")

    with Worker(run, "a") as worker, Reducer(run) as reducer:
        worker.push(ones(1))
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", lose_answer)
            with pytest.raises(OSError, match="Input/output"):
                reduce(reducer)
        (published,) = lost
        part = reducer._parts[published.name]
        made = part._open_folders(1)
        written = {os.stat(one.path).st_ino for one in (made.params, made.state)}
        assert written.isdisjoint(path.stat().st_ino for path in published.rglob("*"))
        reduce(reducer)
        assert newest(run) == 1
    assert all(bool((array == 1).all()) for array in parameters(run).values())
