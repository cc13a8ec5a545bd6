"""What a cluster promises to programs on different hosts."""

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.beside import repeating
from harness.claims import claim, often
from harness.clusters import (
    LONG_LEASE_S,
    MIB,
    Apart,
    Cluster,
    CommandFailed,
    Plan,
    StoreNode,
    counters,
)
from harness.daemons import paused
from harness.errors import fails_with
from harness.mountpoint import eventually
from harness.patterns import pattern, version_of
from harness.processes import Process, TakeProcess, is_waiting
from harness.programs import hasty_node
from harness.seeds import seeded

from irdmafs.client import draft
from irdmafs.client._files import RENAME_EXCHANGE, rename

ITERATIONS = 60
READERS_KILLED = 3


def write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def read_version(path: Path) -> int:
    return version_of(path.read_bytes())


def copies(cluster: Cluster) -> set[Path]:
    """Return the extents on all nodes. Those of files that are gone may still be among them."""
    return {path for node in cluster.nodes for path in (node.store / "extents").iterdir()}


# -- names of files that have no version yet


@pytest.fixture(params=["claimed", "not claimed"])
def makers(pair: list[Path], request: pytest.FixtureRequest) -> list[Path]:
    """Two hosts of which the first one may have made so many files that it has the directory's claim."""
    if request.param == "claimed":
        claim(pair[0])
    return pair


def is_seen(path: Path) -> bool:
    listed = path.name in os.listdir(path.parent)
    assert path.exists() == listed
    return listed


def test_a_new_file_is_seen_on_another_host_when_it_is_published(makers: list[Path]) -> None:
    one, other = makers
    for i, flags in enumerate((os.O_TRUNC, os.O_EXCL, os.O_APPEND, 0)):
        name = f"file{i}"
        fd = os.open(one / name, os.O_CREAT | os.O_RDWR | flags)
        os.write(fd, b"half")
        assert not is_seen(other / name)
        os.write(fd, b" and half")
        assert is_seen(one / name)
        os.close(fd)
        assert (other / name).read_bytes() == b"half and half"


@pytest.mark.parametrize(("content", "access"), [(b"", os.O_RDWR), (b"content", os.O_WRONLY)])
@pytest.mark.parametrize("means", ["close", "fsync", "rename", "link", "flock", "lockf", "join"])
def test_a_new_file_is_seen(makers: list[Path], means: str, content: bytes, access: int) -> None:
    one, other = makers
    fd, name = os.open(one / "file", os.O_CREAT | os.O_EXCL | access), "file"
    os.write(fd, content)
    assert not is_seen(other / name)
    match means:
        case "close":
            os.close(fd)
        case "fsync":
            os.fsync(fd)
        case "rename" | "link":
            name = "again"
            getattr(os, means)(one / "file", one / name)
        case "flock" | "lockf":
            getattr(fcntl, means)(fd, fcntl.LOCK_EX)
        case "join":
            os.close(os.open(other / "file", os.O_CREAT | os.O_RDWR))
    assert is_seen(other / name)
    if means != "close":
        os.close(fd)
    assert (other / name).read_bytes() == content


@pytest.mark.parametrize("text, joined", [("{}", False), ("", True)])
def test_a_new_file_whose_writers_are_killed_stays_on_its_host_only(
    makers: list[Path], process: TakeProcess, text: str, joined: bool
) -> None:
    one, other = makers
    writers = [process() for _ in range(1 + joined)]
    for writer, mode in zip(writers, "wa", strict=False):
        writer.do("file = open(path, mode)", path=str(one / "file"), mode=mode)
    writers[0].do("file.write(text); file.flush()", text=text)
    for writer in writers:
        writer.kill()
    eventually(lambda: (one / "file").read_text() == text, "it is as on a tmpfs")
    assert not is_seen(other / "file")
    with pytest.raises(FileExistsError):
        (other / "file").touch(exist_ok=False)
    os.setxattr(one, "user.irdmafs.quota_inodes", b"1")
    for place in makers:
        assert os.getxattr(place, "user.irdmafs.quota_used_inodes") == b"1"
    with (one / "file").open("a") as file:
        file.write("\n")
    assert (other / "file").read_text() == text + "\n"


@pytest.mark.parametrize("by", ["rmdir", "rename"])
@pytest.mark.parametrize("end", ["killed", "given up"])
def test_a_directory_goes_with_a_new_file_that_is_not_published(
    makers: list[Path], process: TakeProcess, end: str, by: str
) -> None:
    one, other = makers
    writer, again = process(), process()
    writer.do("file = open(path, 'w'); file.write('half'); file.flush()", path=str(one / "file"))
    with fails_with(errno.ENOTEMPTY):
        other.rmdir()
    if end == "given up":
        writer.do("os.setxattr(file.fileno(), 'user.irdmafs.discard', b'')")
    (one / "another").touch()
    moved = other.with_name(f"{other.name}.moved")
    moved.mkdir()
    writer.kill()
    instead = moved if by == "rename" else None
    assert not is_removed(other, instead)
    assert (one / "file").exists()
    (other / "another").unlink()
    again.do("file = open(path, 'r+')", path=str(one / "file"))
    assert not is_removed(other, instead)
    again.kill()
    eventually(lambda: is_removed(other, instead), "nobody writes in it")
    with pytest.raises(FileNotFoundError):  # stat alone may be milliseconds behind
        (one / "file").open()
    assert not one.exists()


def is_removed(directory: Path, instead: Path | None = None) -> bool:
    """Remove a directory, or rename another one to it first, if it is empty; return whether it is gone."""
    with contextlib.suppress(OSError):
        if instead is not None:
            instead.rename(directory)
        directory.rmdir()
    return not directory.exists()


def test_a_directory_goes_with_a_new_file_whose_close_was_killed(
    failing: Cluster, apart: Apart, writer: Process
) -> None:
    _, here, there = apart
    (here / "made").mkdir()
    made = str(here / "made" / "file")
    writer.do("fd = os.open(made, os.O_CREAT | os.O_WRONLY)", made=made)
    failing.etcd.kill9()
    writer.start("os.close(fd)")
    eventually(lambda: is_waiting(writer.pid), "etcd is to store its name")
    writer.kill()
    failing.etcd.start()
    eventually(lambda: is_removed(there / "made"), "nobody writes in it")


def test_a_name_that_is_not_seen_is_taken(makers: list[Path]) -> None:
    one, other = makers
    fd = os.open(one / "file", os.O_CREAT | os.O_WRONLY)
    write(other / "tried", b"x")
    takes: list[Callable[[Path], object]] = [
        lambda path: os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY),
        Path.mkdir,
        lambda path: path.symlink_to("x"),
        lambda path: path.hardlink_to(other / "tried"),
    ]
    for take in takes:
        with pytest.raises(FileExistsError):
            take(other / "file")
    for path in (other / "file", other / "file/below"):
        with pytest.raises(FileNotFoundError):
            os.stat(path)
        with pytest.raises(FileNotFoundError):
            os.rename(path, other / "moved")
    os.close(fd)
    assert is_seen(other / "file")


@pytest.mark.parametrize("maker_is_first", [True, False])
def test_of_two_hosts_that_write_a_new_file_as_a_whole_the_last_close_wins(
    makers: list[Path], maker_is_first: bool
) -> None:
    files = [(folder / "file").open("wb", buffering=0) for folder in makers]
    for file, content in zip(files, (b"maker", b"joiner"), strict=True):
        file.write(content)
    for file in files if maker_is_first else files[::-1]:
        file.close()
    for folder in makers:
        assert (folder / "file").read_bytes() == (b"joiner" if maker_is_first else b"maker")
        assert os.listdir(folder) == ["file"]


def test_who_renames_onto_a_name_not_seen_wins_and_its_maker_is_told(makers: list[Path]) -> None:
    one, other = makers
    fd = os.open(one / "file", os.O_CREAT | os.O_WRONLY)
    os.write(fd, b"lost")
    write(other / "new", b"content")
    (other / "new").rename(other / "file")
    with pytest.raises(OSError, match="Stale"):
        os.close(fd)
    for folder in makers:
        assert (folder / "file").read_bytes() == b"content"
    fd = os.open(one / "own", os.O_CREAT | os.O_WRONLY)
    os.write(fd, b"removed by its maker")
    (one / "own").unlink()
    os.close(fd)


def test_without_isolation_a_new_name_is_seen_at_once(here: Path, there: Path) -> None:
    os.setxattr(here, "user.irdmafs.isolation", b"off")
    with (here / "file").open("x") as file:
        assert is_seen(there / "file")
        file.write("content")
    assert (there / "file").read_bytes() == b"content"


# -- versions


@pytest.mark.parametrize("size", [100, 64 << 10, (64 << 10) + 1, 3 * MIB + 17])
def test_what_is_published_on_one_host_is_read_on_another(pair: list[Path], size: int) -> None:
    for i in range(ITERATIONS // 4):
        one, other = pair if i % 2 else pair[::-1]
        write(one / "file", pattern(i, size))
        assert read_version(other / "file") == i


class Mapped:
    """A file that is mapped, changed and published by nothing but its release.

    A mapping of a file that is passed through does not delay its release, so a descriptor in a socket's
    queue does. Dropping that descriptor reports no close.
    """

    def __init__(self, path: Path) -> None:
        self._ends = socket.socketpair()
        with path.open("r+b") as file:
            file.write(b"first")
            os.close(mappings_own := os.dup(file.fileno()))
            self._mapping = mmap.mmap(file.fileno(), 0)
            socket.send_fds(self._ends[0], [b"file"], [file.fileno()])
        # The mapping's own descriptor gets another file, so that no close publishes what is stored now.
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), mappings_own)
        self._mapping[:5] = b"later"

    def unmap(self) -> None:
        self._mapping.close()
        for end in self._ends:
            end.close()


def is_later(path: Path) -> bool:
    return path.read_bytes()[:5] == b"later"


def test_what_a_mapping_leaves_is_published_though_the_kernel_forgets_the_file(
    cluster: Cluster, here: Path, there: Path
) -> None:
    """The release of a mapped file is answered at once, and publishes while nothing refers to it."""
    mount, etcd = cluster.mounts[0], cluster.etcd.members[0]
    write(here / "file", pattern(1, MIB))
    mapped = Mapped(here / "file")
    known = mount.status()["nodes"]
    with paused(etcd):
        mapped.unmap()
        for _ in range(5):
            # The kernel drops what it knows of this mount then, and nothing of those of other tests.
            subprocess.run(["mount", "-i", "-o", "remount", mount.path], check=True)
    eventually(lambda: is_later(here / "file") and is_later(there / "file"), "it is published")
    assert mount.status()["nodes"] <= known


def test_what_a_mapping_leaves_is_read_while_it_is_published(
    cluster: Cluster, here: Path, there: Path
) -> None:
    etcd = cluster.etcd.members[0]
    write(here / "file", pattern(1, MIB))

    def asks_nobody() -> bool:
        often((here / "file").read_bytes)
        before = counters(here)["barriers"]
        (here / "file").read_bytes()
        return bool(counters(here)["barriers"] == before)

    eventually(asks_nobody, "the directory is followed")
    mapped = Mapped(here / "file")
    eventually(asks_nobody, "the directory is followed again")
    with paused(etcd):
        mapped.unmap()
        assert cluster.mounts[0].status()  # requests that can wait are not put off any longer
        for _ in range(3):
            assert is_later(here / "file")
            assert (here / "file").stat().st_size == MIB
    eventually(lambda: is_later(there / "file"), "it is published")
    assert is_later(here / "file")


@pytest.mark.parametrize("change", ["overwrite", "unlink", "replace"])
def test_reader_keeps_its_version_whatever_others_do(here: Path, there: Path, change: str) -> None:
    size = 2 * MIB
    write(here / "file", pattern(1, size))
    with (there / "file").open("rb") as reader:
        mapped = mmap.mmap(reader.fileno(), 0, prot=mmap.PROT_READ)
        if change == "overwrite":
            write(here / "file", pattern(2, size))
        elif change == "unlink":
            (here / "file").unlink()
        else:
            write(here / "new", pattern(2, size))
            (here / "new").rename(here / "file")
        assert version_of(mapped[:]) == 1
        assert version_of(reader.read()) == 1
        mapped.close()
    if change == "unlink":
        eventually(lambda: not (there / "file").exists(), "the other host hears that it is gone")
    else:
        assert read_version(there / "file") == 2


def test_a_reader_who_began_with_an_empty_file_keeps_the_bytes_it_saw(
    here: Path, there: Path
) -> None:
    (here / "file").touch()
    with (here / "file").open("rb") as reader:
        for path, seen in ((here, b"one"), (there, b"one")):
            with (path / "file").open("ab") as writer:
                writer.write(b"one")
            assert os.pread(reader.fileno(), 100, 0) == seen
            assert os.fstat(reader.fileno()).st_size == len(seen)
    assert (here / "file").read_bytes() == b"oneone"


def test_a_new_file_that_stays_empty_has_one_time(here: Path, there: Path) -> None:
    for i in range(10):
        with (here / f"file{i}").open("wb") as file:
            opened = os.fstat(file.fileno()).st_mtime_ns
        assert (here / f"file{i}").stat().st_mtime_ns == opened
        assert (there / f"file{i}").stat().st_mtime_ns == opened


# -- where things are kept


def test_as_many_nodes_keep_a_file_as_is_set(cluster: Cluster, here: Path, there: Path) -> None:
    for replicas in (1, 2, 3):
        folder = here / str(replicas)
        folder.mkdir()
        os.setxattr(folder, "user.irdmafs.replicas", b"%d" % replicas)
        before = copies(cluster)
        write(folder / "file", pattern(replicas, MIB))
        assert len(copies(cluster) - before) == replicas
        assert read_version(there / str(replicas) / "file") == replicas


def test_replicas_that_there_are_no_nodes_for_are_missed_while_a_file_wants_them(
    cluster: Cluster, here: Path, there: Path
) -> None:
    os.setxattr(here, "user.irdmafs.replicas", b"5")
    assert "3 store nodes are up" in cluster.mounts[0].log_tail()
    assert cluster.status()["health"] == "ok"
    write(here / "file", pattern(7, MIB))
    assert read_version(there / "file") == 7
    os.setxattr(here, "user.irdmafs.replicas", b"2")
    status = cluster.status()
    assert status["problems"] == [
        "3 nodes cannot keep 5 replicas; add 2, or make the files anew that were created where "
        "user.irdmafs.replicas was 5",
        f"{cluster.plan.buckets} groups without 2 of the replicas",
    ]
    (here / "file").unlink()
    eventually(lambda: cluster.status()["health"] == "ok", "nothing is missed", 20)
    assert cluster.status()["groups"]["total"] == status["groups"]["total"]


def test_a_striped_file_is_read_whole(cluster: Cluster, here: Path, there: Path) -> None:
    os.setxattr(here, "user.irdmafs.stripe_size", b"1M")
    before = copies(cluster)
    write(here / "file", pattern(7, 5 * MIB + 123))
    assert len(copies(cluster) - before) == 6 * cluster.plan.replicas
    assert read_version(there / "file") == 7


def test_superseded_and_unlinked_versions_leave_the_nodes(cluster: Cluster, here: Path) -> None:
    before = copies(cluster)
    for i in range(10):
        write(here / "file", pattern(i, MIB))

    def are_kept(count: int) -> bool:
        return len(copies(cluster) - before) == count

    eventually(lambda: are_kept(cluster.plan.replicas), "one version is kept", 20)
    (here / "file").unlink()
    eventually(lambda: are_kept(0), "none is kept", 20)


# -- the cache


@pytest.mark.parametrize("size", [5000, MIB])
def test_a_version_is_fetched_once_and_every_open_counts_as_a_hit_or_a_miss(
    here: Path, there: Path, size: int
) -> None:
    def found() -> tuple[int, int, int]:
        now = counters(there)
        return now["cache_hits"], now["cache_misses"], now["fetched_bytes"]

    write(here / "file", pattern(1, size))
    hits, misses, fetched = found()
    assert read_version(there / "file") == 1
    assert found() == (hits, misses + 1, fetched + size)
    for _ in range(4):
        assert read_version(there / "file") == 1
    assert found() == (hits + 4, misses + 1, fetched + size)
    write(here / "file", pattern(2, size))
    assert read_version(there / "file") == 2
    assert found() == (hits + 4, misses + 2, fetched + 2 * size)


def test_what_is_overwritten_is_not_fetched_first(here: Path, there: Path) -> None:
    write(here / "small", pattern(1, 5000))
    write(here / "large", pattern(1, MIB))
    before = counters(there)["fetched_bytes"]
    for name in ("small", "large"):
        write(there / name, pattern(2, 5000))
    assert counters(there)["fetched_bytes"] == before
    assert read_version(here / "small") == read_version(here / "large") == 2


def test_a_file_larger_than_cache_is_readable(cluster: Cluster, here: Path, there: Path) -> None:
    size = cluster.plan.cache_bytes * 5 // 4
    small = cluster.add_mount("--cache-size", "16M")
    content = pattern(5, 24 * MIB)
    write(here / "file", content)
    assert size > len(content) > 16 * MIB
    folder = small.path / here.name
    with (folder / "file").open("rb") as file:
        assert version_of(file.read()) == 5
        assert os.pread(file.fileno(), 1000, 20 * MIB) == content[20 * MIB : 20 * MIB + 1000]
        assert os.lseek(file.fileno(), 5, os.SEEK_DATA) == 5
        assert os.lseek(file.fileno(), 5, os.SEEK_HOLE) == len(content)
        with (folder / "part").open("wb") as part:
            assert os.copy_file_range(file.fileno(), part.fileno(), 1000, 20 * MIB) == 1000
        assert (folder / "part").read_bytes() == content[20 * MIB : 20 * MIB + 1000]
        write(here / "file", pattern(6, 24 * MIB))
        assert os.pread(file.fileno(), 1000, 10 * MIB) == content[10 * MIB : 10 * MIB + 1000]
    assert read_version(folder / "file") == 6
    assert counters(small)["cache_bytes"] <= 16 * MIB
    assert read_version(there / "file") == 6


def test_a_reader_of_a_file_larger_than_cache_keeps_its_version_in_a_new_session() -> None:
    content = pattern(5, 24 * MIB)
    with Cluster(Plan(nodes=1, replicas=1, mounts=1, lease_ttl_s=2)) as cluster:
        here, small = cluster.mounts[0].path, cluster.add_mount("--cache-size", "16M")
        write(here / "file", content)
        cluster.irdmafs("prefetch", small.path / "file")
        assert not cluster.pins(), "nobody reads it yet"
        with (small.path / "file").open("rb") as file:
            small.pause()
            eventually(lambda: not cluster.pins(), "its session is over")
            small.resume()
            eventually(lambda: bool(cluster.pins()), "the file is pinned in the next one")
            write(here / "file", pattern(6, 24 * MIB))
            assert file.read() == content
        eventually(lambda: not cluster.pins(), "nothing is pinned any more")


def test_nothing_stays_pinned_for_readers_that_were_killed_while_they_waited() -> None:
    """What changes faster than it comes is pinned on its nodes after some tries."""
    rng = seeded()
    versions = itertools.cycle(range(1, 100))
    pinned: set[bytes] = set()
    with Cluster(Plan(nodes=2, replicas=1), links=True) as cluster:
        one, other = (mount.path for mount in cluster.mounts)
        write(one / "file", pattern(0, 4 * MIB))
        cluster.slow_down(cluster.mounts[1], 100e6)
        with repeating(lambda: write(one / "file", pattern(next(versions), 4 * MIB)), 0.02):
            deadline = time.monotonic() + 60
            while len(pinned) < READERS_KILLED:
                assert time.monotonic() < deadline, f"pinned only {len(pinned)} times"
                with subprocess.Popen(["cat", other / "file"], stdout=subprocess.DEVNULL) as reader:
                    while reader.poll() is None and not (found := cluster.pins() - pinned):
                        time.sleep(0.01)
                    if reader.poll() is None:
                        pinned |= found
                        time.sleep(rng.uniform(0, 0.3))
                        reader.kill()
        eventually(lambda: not cluster.pins(), "nothing is pinned any more")
        cluster.slow_down(cluster.mounts[1], None)
        assert (other / "file").read_bytes() == (one / "file").read_bytes()


def test_the_cache_stays_within_its_limit(cluster: Cluster, pair: list[Path]) -> None:
    one, _ = pair
    small = cluster.add_mount("--cache-size", "16M")
    for i in range(12):
        write(one / f"file{i}", pattern(i, 3 * MIB))
    for _ in range(2):
        for i in range(12):
            assert read_version(small.path / one.name / f"file{i}") == i
    assert counters(small)["cache_bytes"] <= 16 * MIB


def test_prefetched_files_are_opened_at_once(cluster: Cluster, here: Path, there: Path) -> None:
    for i in range(5):
        write(here / f"file{i}", pattern(i, MIB))
    cluster.irdmafs("prefetch", there)
    before = counters(there)["fetched_bytes"]
    assert [read_version(there / f"file{i}") for i in range(5)] == list(range(5))
    assert counters(there)["fetched_bytes"] == before


def test_a_followed_directory_is_there_before_it_is_opened(cluster: Cluster, here: Path) -> None:
    follower = cluster.add_mount("--follow", f"/{here.name}")
    eventually(lambda: bool(counters(follower)["followed_directories"]), "it is followed")
    # The first look asks for changes here or above that another mount has yet to store.
    assert os.listdir(follower.path / here.name) == []
    for i in range(5):
        write(here / "file", pattern(i, MIB))
        fetched = (i + 1) * MIB
        eventually(lambda: counters(follower)["fetched_bytes"] >= fetched, "it is fetched")  # noqa: B023
        before = counters(follower)
        assert read_version(follower.path / here.name / "file") == i
        after = counters(follower)
        assert after["fetched_bytes"] == before["fetched_bytes"]
        assert after["barriers"] == before["barriers"]


def test_a_very_deep_tree_is_fetched(cluster: Cluster, here: Path) -> None:
    """Deeper than functions of Python call themselves."""
    deep = here / "/".join("d" * sys.getrecursionlimit())
    subprocess.run(["mkdir", "-p", deep], check=True)
    (deep / "file").write_text("deep")
    follower = cluster.add_mount("--follow", f"/{here.name}")
    eventually(lambda: bool(counters(follower)["fetched_bytes"]), "it is fetched")
    cluster.remove_mount()


def test_an_exchange_that_is_too_large_for_etcd_changes_nothing(here: Path, there: Path) -> None:
    one, other = here / "one", here / "other"
    for path in (one, other):
        path.write_text(path.name)
        for number in range(12):
            os.setxattr(path, f"user.{number}", b"x" * 65536)
    with fails_with(errno.EMSGSIZE):
        rename(one, other, RENAME_EXCHANGE)
    os.removexattr(one, "user.0")
    for path in (one, other):
        assert (there / path.name).read_text() == path.name
    for number in range(1, 8):
        os.removexattr(one, f"user.{number}")
    rename(one, other, RENAME_EXCHANGE)
    assert (there / "one").read_text() == "other"


# -- failures


def reading(path: Path, expected: int) -> contextlib.AbstractContextManager[None]:
    """Open and read the file all the time. Raises what went wrong, at the end."""

    def read() -> None:
        assert read_version(path) == expected

    return repeating(read, 0.005)


def test_a_killed_node_loses_nothing_and_service_goes_on() -> None:
    with Cluster(Plan(node_config={"rereplicate_after": 1})) as cluster:
        one, other = (mount.path for mount in cluster.mounts)
        for i in range(20):
            write(one / f"file{i}", pattern(i, 300_000))
        victim = cluster.nodes[0]
        victim.kill9()
        assert [read_version(other / f"file{i}") for i in range(20)] == list(range(20))
        write(one / "after", pattern(99, MIB))
        assert read_version(other / "after") == 99
        cluster.wait_healthy()
        victim.start()
        cluster.wait_healthy()
        cluster.nodes[1].kill9()
        assert [read_version(other / f"file{i}") for i in range(20)] == list(range(20))


def test_what_a_node_cannot_be_sent_goes_by_way_of_another() -> None:
    """It is alive, and reached by all but one host."""
    with Cluster(Plan(nodes=2, replicas=2, lease_ttl_s=3), links=True) as cluster:
        one, other = (mount.path for mount in cluster.mounts)
        for path in (one / "striped", one / "final"):
            path.mkdir()
        os.setxattr(one / "striped", "user.irdmafs.stripe_size", b"1M")
        for number in range(4):
            write(one / f"old{number}", pattern(number, 3000))
        write(one / "striped/file", pattern(1, 3 * MIB))
        members = [group.members for group in cluster.groups().values()]
        cluster.cut(cluster.mounts[0], cluster.nodes[0])
        for number in range(8):
            write(one / f"new{number}", pattern(number, 3000 if number % 2 else 300_000))
        for path in (one / "old0", one / "striped/file"):
            with path.open("r+b") as file:
                file.write(b"changed")
        with draft(one / "final") as directory:
            for number in range(4):
                write(Path(directory) / f"{number}", pattern(number, 3000))
        assert [read_version(other / f"new{i}") for i in range(8)] == list(range(8))
        assert [read_version(other / f"final/{i}") for i in range(4)] == list(range(4))
        for path in (other / "old0", other / "striped/file"):
            assert path.read_bytes().startswith(b"changed")
        assert [group.members for group in cluster.groups().values()] == members


def test_adding_and_draining_a_node_moves_its_share_while_reading_goes_on() -> None:
    plan = Plan(nodes=3, buckets=32, lease_ttl_s=LONG_LEASE_S)
    with Cluster(plan, node_program=hasty_node.__file__) as cluster:
        one, other = (mount.path for mount in cluster.mounts)
        for i in range(60):
            write(one / f"file{i}", pattern(i, 500_000))
        stored = 60 * 500_000 * plan.replicas
        with reading(other / "file0", 0):
            added = cluster.add_node()
            eventually(lambda: _is_member(cluster, added), "it has a place in a group")
            _wait_settled(cluster)
            moved = added.stored_bytes()
            assert 0 < moved <= 1.6 * stored / len(cluster.nodes)
            cluster.administer("drain", f"{added.node_id:x}")
            eventually(lambda: not _is_member(cluster, added), "it has no place any more", 60)
            _wait_settled(cluster)
        eventually(
            lambda: sum(node.stored_bytes() for node in cluster.nodes) == stored,
            "each version is stored as often as it is to be, and nothing else",
            30,
        )
        assert [read_version(other / f"file{i}") for i in range(60)] == list(range(60))


def _is_member(cluster: Cluster, node: StoreNode) -> bool:
    """Return whether a node is a member of any group; without a number it is not."""
    with contextlib.suppress(FileNotFoundError):
        return any(node.node_id in group.members for group in cluster.groups().values())
    return False


def _wait_settled(cluster: Cluster) -> None:
    """Until all groups are where they should be, and nothing moves."""

    def settled() -> bool:
        with contextlib.suppress(CommandFailed):
            status = cluster.status()
            return bool(status["health"] == "ok" and status["moving"]["replicas"] == 0)
        return False

    cluster.wait_healthy()
    eventually(settled, "everything is where it should be", 60)


def test_full_nodes_refuse_before_anything_is_lost() -> None:
    with Cluster(Plan(nodes=2, store_bytes=48 * MIB, cache_bytes=96 * MIB)) as cluster:
        one, other = (mount.path for mount in cluster.mounts)
        written = []
        with fails_with(errno.ENOSPC):
            for i in range(20):
                write(one / f"file{i}", pattern(i, 8 * MIB))
                written.append(i)
        assert len(written) >= 4
        assert [read_version(other / f"file{i}") for i in written] == written
        for i in written:
            (one / f"file{i}").unlink()
        eventually(lambda: _can_write(one / "again"), "there is room again", 20)
        assert read_version(other / "again") == 1


def _can_write(path: Path) -> bool:
    try:
        write(path, pattern(1, 8 * MIB))
    except OSError as error:
        assert error.errno == errno.ENOSPC
        return False
    return True


def test_groups_wait_for_nodes_that_are_about_to_start() -> None:
    plan = Plan(nodes=1, mounts=0, replicas=2, lease_ttl_s=LONG_LEASE_S)
    with Cluster(plan) as cluster:
        mount = cluster.add_mount()
        for _ in range(2):
            cluster.add_node()
        cluster.wait_healthy()
        write(mount.path / "file", pattern(0, MIB))
        groups = cluster.groups().values()
        assert {(group.epoch, len(group.in_sync)) for group in groups} == {(1, 2)}


def test_an_open_that_the_kernel_tries_only_once_needs_no_lookup(pair: list[Path]) -> None:
    for path, mode in itertools.product(pair, ("ab", "wb")):
        with open(path / "file", mode) as file, fails_with(errno.ENOTTY):
            fcntl.ioctl(file, 0x80086601, bytes(8))  # FS_IOC_GETFLAGS opens the file once more
