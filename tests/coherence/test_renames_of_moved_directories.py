"""A directory that another host has moved, and that a program here has open, is renamed here.

The kernel has it at its old place. A rename looks it up with the locks of its directories held.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness.errors import fails_with

from irdmafs.train.directory import move


@pytest.fixture
def moved(pair: list[Path], request: pytest.FixtureRequest) -> Iterator[Path]:
    """A directory that is open here, and that another host has moved to this path."""
    there, here = (host / request.node.name for host in pair)
    there.mkdir()
    for name in ("before", "after", "target"):
        (there / name).mkdir()
    (there / "before" / "moved").mkdir()
    (there / "before" / "moved" / "file").write_text("content")
    with contextlib.ExitStack() as stack:
        opened = os.open(here / "before" / "moved", os.O_PATH)
        stack.callback(os.close, opened)
        os.rename(there / "before" / "moved", there / "after" / "moved")
        yield here / "after" / "moved"


def test_it_is_renamed_in_its_directory(moved: Path) -> None:
    os.rename(moved, moved.parent / "renamed")
    assert (moved.parent / "renamed" / "file").read_text() == "content"


def test_without_a_look_it_stays_and_is_renamed_after_one(moved: Path) -> None:
    target = moved.parent.parent / "target" / "moved"
    with fails_with(errno.ESTALE):
        os.rename(moved, target)
    assert (moved / "file").read_text() == "content"
    os.rename(moved, target)
    assert (target / "file").read_text() == "content"


@pytest.mark.parametrize("looked_at", [True, False], ids=["after a look", "by a training"])
def test_it_is_renamed_to_another_directory(moved: Path, looked_at: bool) -> None:
    target = moved.parent.parent / "target" / "moved"
    if looked_at:
        os.stat(moved)
        os.rename(moved, target)
    else:
        move(moved, target)
    assert (target / "file").read_text() == "content"


@pytest.mark.parametrize("rename", [os.rename, move], ids=["any program", "a training"])
def test_another_one_does_not_take_name(moved: Path, rename: Callable[[Path, Path], None]) -> None:
    other = moved.parent.parent / "target" / "other"
    other.mkdir()
    with pytest.raises(OSError) as refused:
        rename(other, moved)
    # The first look at the name is that of the rename.
    assert refused.value.errno == (errno.EEXIST if rename is move else errno.ESTALE)
    assert other.exists()
    assert (moved / "file").read_text() == "content"
    with pytest.raises(OSError, match="not empty"):
        os.rename(other, moved)
