"""A directory that one host moves is found by another, which has it open, at its new place, while programs
there rename files.

The kernel moves what it knows of a directory when a lookup finds it elsewhere, if it gets the locks of a
rename at once; else the lookup fails with ESTALE. A rename itself looks it up with
the locks of its directories held.
"""

import errno
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import trio
import trio.testing
from harness.beside import repeating
from harness.closing import descriptor
from harness.errors import fails_with

from irdmafs.coherence.kernel_directories import KernelLocks, Moves
from irdmafs.coherence.nodes import Node
from irdmafs.train.directory import move

MOVES = 150
# A thread that is not run for long may still have a lock that it should have released. Without waiting for
# renames there are several failures for each move.
FAILURES_MAX = MOVES
PAUSE_S = 0.003

OLD, NEW, OTHER = 10, 11, 12
ONE = 100


def test_it_is_found_while_files_are_renamed(here: Path, there: Path) -> None:
    for name in "abcd":
        (here / name).mkdir()
    (here / "a" / "moved").mkdir()
    (there / "c" / "file").write_text("")

    failures = 0

    def rename() -> None:
        os.rename(there / "c" / "file", there / "d" / "file")
        os.rename(there / "d" / "file", there / "c" / "file")

    def is_there(path: Path) -> bool:
        nonlocal failures
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY))
        except FileNotFoundError:
            return False
        except OSError as error:
            assert error.errno == errno.ESTALE, error
            failures += 1
            return False
        return True

    with descriptor(os.open(there / "a" / "moved", os.O_PATH)), repeating(rename, PAUSE_S):
        for number in range(MOVES):
            before, after = ("ab", "ba")[number % 2]
            os.rename(here / before / "moved", here / after / "moved")
            assert any(is_there(there / after / "moved") for _ in range(100))
            assert not is_there(there / before / "moved")
    assert failures <= FAILURES_MAX


@pytest.fixture
def locks() -> KernelLocks:
    return KernelLocks()


@pytest.fixture
def moves(locks: KernelLocks) -> Moves:
    return Moves(locks)


def node_in(parent: int) -> Node:
    return Node(50, 50, name=(parent, b"name"))


def run(waiting: Callable[..., Awaitable[None]], *arguments: object) -> None:
    """Wait, in time that passes when nobody can do anything."""
    trio.run(waiting, *arguments, clock=trio.testing.MockClock(autojump_threshold=0))


def test_it_is_waited_until_the_locks_are_released(moves: Moves, locks: KernelLocks) -> None:
    node = node_in(OLD)
    order = []

    async def change() -> None:
        with locks.hold(OLD):
            await trio.sleep(0.1)
            order.append("released")

    async def wait() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(change)
            await trio.testing.wait_all_tasks_blocked()
            await moves.wait_to_tell(node, NEW, ONE)
            order.append("told")

    run(wait)
    assert order == ["released", "told"]


def test_nobody_waits_for_ever(moves: Moves, locks: KernelLocks) -> None:
    with locks.hold(OLD):
        run(moves.wait_to_tell, node_in(OLD), NEW, ONE)


@pytest.fixture
def moved(pair: list[Path], request: pytest.FixtureRequest) -> Iterator[Path]:
    """A directory that is open here, and that another host has moved to this path."""
    there, here = (host / request.node.name for host in pair)
    there.mkdir()
    for name in ("before", "after", "target"):
        (there / name).mkdir()
    (there / "before" / "moved").mkdir()
    (there / "before" / "moved" / "file").write_text("content")
    with descriptor(os.open(here / "before" / "moved", os.O_PATH)):
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
    # The first look at the name is that of the rename.
    with fails_with(errno.EEXIST if rename is move else errno.ESTALE):
        rename(other, moved)
    assert other.exists()
    assert (moved / "file").read_text() == "content"
    with pytest.raises(OSError, match="not empty"):
        os.rename(other, moved)
