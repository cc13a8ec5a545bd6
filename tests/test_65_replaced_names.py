"""A file that others replace by renaming, all the time, is always there and always whole.

That is how checkpoints are published. An open that comes to a file which has just been replaced has to
be led to the new one, and must not fail because that is replaced, too, by then.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster import Cluster, Plan
from patterns import pattern, version_of

REPLACEMENTS = [120, pytest.param(500, marks=pytest.mark.slow)]
SIZE = 9000


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(Plan()) as made:
        yield made


@pytest.fixture
def two(cluster: Cluster, request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """A directory of this test's own, as two hosts see it."""
    one, other = (mount.path / request.node.name for mount in cluster.mounts)
    one.mkdir()
    return one, other


@contextmanager
def replaced(folder: Path, times: int) -> Iterator[Callable[[], bool]]:
    """`folder`/file is replaced so many times; gives what says whether that still goes on."""
    (folder / "file").write_bytes(pattern(1, SIZE))
    failures: list[BaseException] = []

    def replace() -> None:
        try:
            for n in range(times):
                (folder / "new").write_bytes(pattern(n + 2, SIZE))
                os.replace(folder / "new", folder / "file")
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        yield thread.is_alive
    finally:
        thread.join()
        assert not failures, failures


@pytest.mark.parametrize("times", REPLACEMENTS)
def test_reading_it_never_fails(two: tuple[Path, Path], times: int) -> None:
    here, there = two
    with replaced(here, times) as goes_on:
        reads, last = 0, 0
        while goes_on():
            version = version_of((there / "file").read_bytes())
            assert version >= last, "an older version came after a newer one"
            reads, last = reads + 1, version
    assert reads > 10
    assert version_of((there / "file").read_bytes()) == times + 1


@pytest.mark.parametrize("times", REPLACEMENTS)
def test_overwriting_it_never_fails_and_leaves_nothing_empty(
    two: tuple[Path, Path], times: int
) -> None:
    """An overwriting open that is led elsewhere begins its working copy before it comes there; no
    later open of the same thread may meet that."""
    here, there = two
    with replaced(here, times) as goes_on:
        writes = 0
        while goes_on():
            with open(there / "file", "wb") as file:
                file.write(pattern(times + 2 + writes, SIZE))
            writes += 1
            assert len((there / "file").read_bytes()) == SIZE
    assert writes > 10


@pytest.mark.parametrize("times", REPLACEMENTS)
def test_overwriting_what_it_just_replaced_never_fails(two: tuple[Path, Path], times: int) -> None:
    """The kernel moves a name that it believes in without asking for it again."""
    here, there = two
    with replaced(here, times) as goes_on:
        writes = 0
        while goes_on():
            (there / "mine").write_bytes(pattern(1, SIZE))
            os.replace(there / "mine", there / "file")
            for mode in ("wb", "r+b", "wb"):
                with open(there / "file", mode) as file:
                    file.write(pattern(times + 2 + writes, SIZE))
            writes += 1
    assert writes > 10
