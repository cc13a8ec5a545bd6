"""A file that others replace by renaming, all the time, is always there and always whole. One that others
make and remove is found, made anew or missing.

Checkpoints are published by renaming: an open that comes to a file which has just been replaced is led to
the new one, also if that is replaced by then. IRDMAFS_REPLACEMENTS says how often. So it is for descriptors
that are opened once more for writing.
"""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness.closing import descriptor
from harness.clusters import MIB, Cluster, Plan
from harness.daemons import paused
from harness.mountpoint import eventually
from harness.patterns import pattern, version_of

REPLACEMENTS = int(os.environ.get("IRDMAFS_REPLACEMENTS") or 25)
SIZE = 9000
LARGE = 20 * MIB
LISTINGS = 15


@contextmanager
def meanwhile(change: Callable[[], object]) -> Iterator[Callable[[], bool]]:
    """A change goes on from the first question on, whether it does."""
    changing: list[Future[object]] = []

    def goes_on() -> bool:
        if not changing:
            changing.append(programs.submit(change))
            return True
        return not changing[0].done()

    with ThreadPoolExecutor(1) as programs:
        yield goes_on
    changing[0].result()


@contextmanager
def replaced(folder: Path, *, links: bool = False) -> Iterator[Callable[[], bool]]:
    """`folder`/file is replaced REPLACEMENTS times meanwhile, each time by a link next, too."""
    (folder / "file").write_bytes(pattern(1, SIZE))

    def replace() -> None:
        for n in range(REPLACEMENTS):
            (folder / "new").write_bytes(pattern(n + 2, SIZE))
            os.replace(folder / "new", folder / "file")
            if links:
                (folder / "new").symlink_to("target")
                os.replace(folder / "new", folder / "file")

    with meanwhile(replace) as goes_on:
        yield goes_on


def test_reading_it_never_fails(here: Path, there: Path) -> None:
    with replaced(here) as goes_on:
        last = 0
        while goes_on():
            version = version_of((there / "file").read_bytes())
            assert version >= last, "an older version came after a newer one"
            last = version
    assert version_of((there / "file").read_bytes()) == REPLACEMENTS + 1


def test_overwriting_it_never_fails_and_leaves_nothing_empty(here: Path, there: Path) -> None:
    """An overwriting open that is led elsewhere begins its working copy before it comes there; no
    later open of the same thread may meet that."""
    with replaced(here) as goes_on:
        writes = 0
        while goes_on():
            with open(there / "file", "wb") as file:
                file.write(pattern(REPLACEMENTS + 2 + writes, SIZE))
            writes += 1
            assert len((there / "file").read_bytes()) == SIZE
    assert writes


def test_opening_it_never_fails_where_it_is_a_link_by_turns(here: Path, there: Path) -> None:
    (here / "target").touch()
    with replaced(here, links=True) as goes_on:
        while goes_on():
            (there / "file").open("r+b").close()


def test_overwriting_what_it_just_replaced_never_fails(here: Path, there: Path) -> None:
    """The kernel moves a name that it believes in without asking for it again."""
    with replaced(here) as goes_on:
        writes = 0
        while goes_on():
            (there / "mine").write_bytes(pattern(1, SIZE))
            os.replace(there / "mine", there / "file")
            for mode in ("wb", "r+b", "wb"):
                with open(there / "file", mode) as file:
                    file.write(pattern(REPLACEMENTS + 2 + writes, SIZE))
            writes += 1
    assert writes


@pytest.mark.parametrize("mode", ["wb", "ab", "rb", "r+b"])
def test_opening_what_others_make_and_remove_finds_it_or_makes_it_or_says_that_it_is_missing(
    here: Path, there: Path, mode: str
) -> None:
    """In two directories by turns: what is left of an open in one must not count in the other."""
    names = ("empty/file", "whole/file")
    for name in names:
        (here / name).parent.mkdir()

    def remake() -> None:
        for _ in range(REPLACEMENTS):
            (here / names[0]).touch()
            (here / "new").write_bytes(pattern(1, SIZE))
            os.replace(here / "new", here / names[1])
            for name in names:
                (here / name).unlink()

    makes = mode in ("wb", "ab")
    with meanwhile(remake) as goes_on:
        for name in itertools.takewhile(lambda _: goes_on(), itertools.cycle(names)):
            with contextlib.nullcontext() if makes else contextlib.suppress(FileNotFoundError):
                opened = (there / name).open(mode)
                with contextlib.suppress(OSError):  # its name may be another file's by now
                    opened.close()


def test_a_link_made_just_before_an_open_makes_a_file_is_followed(here: Path, there: Path) -> None:
    (here / "target").touch()
    with ThreadPoolExecutor(1) as programs:
        for n in range(REPLACEMENTS):
            opening = programs.submit((there / f"{n}").touch)
            with contextlib.suppress(FileExistsError):
                (here / f"{n}").symlink_to("target")
            opening.result()


def test_an_open_for_reading_that_empties_a_file_can_read(here: Path, there: Path) -> None:
    def rewrite() -> None:
        for n in range(REPLACEMENTS):
            (here / "file").write_bytes(pattern(n, SIZE))

    rewrite()
    with meanwhile(rewrite) as goes_on:
        while goes_on():
            with open(os.open(there / "file", os.O_RDONLY | os.O_TRUNC), "rb") as file:
                assert len(file.read()) in (0, SIZE)


def test_an_open_for_reading_empties_what_a_host_just_put_there(here: Path, there: Path) -> None:
    (here / "file").touch()
    for n in range(REPLACEMENTS):
        (here / "new").write_bytes(pattern(n, SIZE))
        (there / "file").stat()
        os.replace(here / "new", here / "file")
        with descriptor(os.open(there / "file", os.O_RDONLY | os.O_TRUNC)) as fd:
            assert os.fstat(fd).st_size == 0
        assert (there / "file").stat().st_size == 0


def test_an_open_that_waits_for_a_content_outlives_the_file() -> None:
    """Its last name goes, and the last descriptor of another open, while the content is on its way."""
    plan = Plan(nodes=1, replicas=1)
    with Cluster(plan, links=True) as cluster, ThreadPoolExecutor(1) as programs:
        here, there = (mount.path / "file" for mount in cluster.mounts)
        reader, (node,) = cluster.mounts[1], cluster.nodes
        here.write_bytes(pattern(1, SIZE))
        held = os.open(there, os.O_RDONLY)
        here.write_bytes(pattern(2, LARGE))
        cluster.slow_down(node, LARGE * 8 / 4)
        opening = programs.submit(lambda: there.open("r+b").close())
        eventually(lambda: is_coming_in(reader.cache, LARGE), "the content comes")
        node.pause()
        assert not opening.done()
        cluster.slow_down(node, None)
        here.unlink()
        eventually(lambda: not there.exists(), "the other host knows")
        os.close(held)
        node.resume()
        with contextlib.suppress(FileNotFoundError):  # or it was open before the name went
            opening.result()
        assert "Traceback" not in reader.log_tail(100_000)


def is_coming_in(cache: Path, size: int) -> bool:
    """Whether there are bytes of each quarter of a content, which may come on streams of their own."""
    for file in cache.rglob("*"):
        if file.is_file() and file.stat().st_size == size:
            with file.open("rb") as content:
                starts = (os.pread(content.fileno(), 4096, size * n // 16) for n in (1, 5, 9, 13))
                return all(any(start) for start in starts)
    return False


def test_a_directory_that_was_made_anew_is_listed_as_it_is_now(cluster: Cluster) -> None:
    """By a host that hears of it and is asked for it at the same time."""
    writer, reader = cluster.mounts
    here = writer.path / "anew"
    # The writer gets no claims there, for which the reader would follow what it looks at.
    (reader.path / "anew").mkdir()
    os.setxattr(reader.path / "anew", "user.irdmafs.follow", b"off")
    names = [*map(str, range(LISTINGS))]
    with (
        ThreadPoolExecutor(LISTINGS) as programs,
        descriptor(os.open(reader.path / "anew", os.O_PATH)) as opened,
    ):
        there = Path(f"/proc/self/fd/{opened}")
        for name in names:
            (here / name / "first").mkdir(parents=True)
            assert os.listdir(there / name) == ["first"]
        with paused(reader):
            for name in names:
                (here / name / "first").rmdir()
                (here / name).rmdir()
                (here / name / "second").mkdir(parents=True)
            listings = [programs.submit(os.listdir, there / name) for name in names]
        assert [listing.result() for listing in listings] == [["second"]] * LISTINGS


def test_an_open_never_gets_what_was_moved_away_before_it(cluster: Cluster) -> None:
    """An earlier open of the thread, of a file of that name, was led elsewhere."""
    writer, reader = cluster.mounts
    for name in ("here", "there"):
        # The writer gets no claim then, for which the reader would follow what it looks at.
        (reader.path / name).mkdir()
        os.setxattr(reader.path / name, "user.irdmafs.follow", b"off")
        (writer.path / name / "file").write_bytes(pattern(1, SIZE))
    with ThreadPoolExecutor(1) as programs:
        for version, name in itertools.product(range(2, 16), ("here", "there")):
            folder = writer.path / name
            with paused(reader):
                (folder / "new").write_bytes(pattern(version, SIZE))
                os.replace(folder / "file", folder / "old")
                os.replace(folder / "new", folder / "file")
                reading = programs.submit((reader.path / name / "file").read_bytes)
            assert version_of(reading.result()) == version


def test_a_descriptor_is_opened_once_more_in_a_directory_that_is_not_followed(here: Path) -> None:
    """The open is refused once for each of two reasons: etcd has to be asked whether the file was removed,
    and another node shows what its writer writes."""
    os.setxattr(here, "user.irdmafs.follow", b"off")
    path = here / "file"
    path.write_bytes(b"first")
    with path.open("rb") as first:
        path.write_bytes(b"second")
        with path.open("wb") as writer, path.open("rb") as second:
            with open(f"/proc/self/fd/{second.fileno()}", "r+b") as again:
                assert again.read() == b"second"
            writer.write(b"third")
        assert first.read() == b"first"
    assert path.read_bytes() == b"third"
