"""A directory that one host moves is found by another, which has it open, at its new place, while programs
there rename files.

The kernel moves what it knows of a directory when a lookup finds it elsewhere, if it gets the locks of a
rename at once; else the lookup fails with ESTALE.
"""

import errno
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
import trio.testing
from harness.beside import repeating
from harness.closing import descriptor

from irdmafs.coherence.kernel_locks import KernelLocks, Moves
from irdmafs.coherence.nodes import Node

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
