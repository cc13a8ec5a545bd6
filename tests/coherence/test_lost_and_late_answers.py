"""A mount is not told of a version that it has published, or only after its replica has it: etcd's answer
is lost, or late. Or it was stopped for longer than its lease, and a store node on its host has removed what
that session was writing. Or the kernel's thread takes an answer in only after a change."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness.beside import beside
from harness.closing import descriptor
from harness.clusters import LONG_LEASE_S, Cluster, Plan, StoreNode
from harness.daemons import paused
from harness.mountpoint import Mount, eventually
from harness.processes import Program, is_waiting
from harness.programs import hasty_node, misbehaving


@pytest.fixture(scope="module", params=["a node elsewhere", "a node here"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    beside = {0: 0} if request.param == "a node here" else {}
    plan = Plan(nodes=1, replicas=1, beside=beside, lease_ttl_s=LONG_LEASE_S)
    with Cluster(plan, mount_program=misbehaving.__file__) as made:
        yield made


@pytest.fixture
def pair(cluster: Cluster, request: pytest.FixtureRequest) -> list[Path]:
    """The same file on both mounts."""
    name = request.node.name.partition("[")[0]
    return [mount.path / name for mount in cluster.mounts]


def write_and_lose_answer(cluster: Cluster, path: Path) -> int:
    """Return a descriptor of a file whose second version is published, of which the mount is not told."""
    path.write_text("first")
    fd = os.open(path, os.O_RDWR)
    os.pwrite(fd, b"second", 0)
    os.kill(cluster.mounts[0].pid, misbehaving.LOSE)
    with pytest.raises(TimeoutError):
        os.fsync(fd)
    return fd


def replace(path: Path, text: str) -> None:
    """As a lock file gets what its holder is called."""
    with descriptor(os.open(path, os.O_RDWR)) as fd:
        os.ftruncate(fd, 0)
        os.pwrite(fd, text.encode(), 0)
        os.fsync(fd)


def test_a_file_that_others_replace_then_can_be_written_again(
    cluster: Cluster, here: Path, there: Path
) -> None:
    fd = write_and_lose_answer(cluster, here)
    try:
        assert there.read_text() == "second"
        replace(there, "third")
    finally:
        with pytest.raises(OSError, match="Stale"):
            os.close(fd)
    assert there.read_text() == "third"
    for text in ("fourth", "fifth"):
        replace(here, text)
        assert there.read_text() == here.read_text() == text


def test_what_is_written_next_is_published_and_the_version_before_stays_whole(
    cluster: Cluster, here: Path, there: Path
) -> None:
    with descriptor(write_and_lose_answer(cluster, here)) as fd:
        with there.open() as reader:
            os.pwrite(fd, b"THIRD", 0)
            assert reader.read() == "second"
        os.fsync(fd)
        assert there.read_text() == here.read_text() == "THIRDd"
    assert there.read_text() == here.read_text() == "THIRDd"


elsewhere = pytest.mark.parametrize("cluster", ["a node elsewhere"], indirect=True, scope="module")


@contextlib.contextmanager
def published_untold(cluster: Cluster, fd: int, content: bytes, *paths: Path) -> Iterator[None]:
    """Close a descriptor: what it wrote is a version on all mounts; its publisher is told in the end."""
    here = cluster.mounts[0]
    os.kill(here.pid, misbehaving.DELAY)
    os.statvfs(here.path)  # it handles the signal before this
    with beside(lambda: os.close(fd)) as closing:
        try:
            eventually(lambda: all(path.read_bytes() == content for path in paths), "all see it")
            yield
            assert not closing.done()
        finally:
            os.kill(here.pid, misbehaving.DELAY)


def open_again(fd: int) -> int:
    """Open a descriptor once more, for writing, as `> /dev/stdout` does: it shares its content."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR)


def expect_shared_by_readers(path: Path, reader: int, content: bytes) -> None:
    """Open the descriptor of a version, and one that is opened now, once more for writing."""
    with path.open("rb") as later:
        try:
            os.close(open_again(reader))
            os.close(open_again(later.fileno()))
            assert later.read() == os.pread(reader, 9, 0) == content
        finally:
            os.close(reader)
    assert path.read_bytes() == content


@elsewhere
def test_what_was_open_in_place_leaves_the_published_file_to_its_content(
    cluster: Cluster, here: Path, there: Path
) -> None:
    here.write_bytes(b"first")
    with here.open("rb") as first:
        writer = os.open(here, os.O_WRONLY | os.O_TRUNC)
        in_place = open_again(first.fileno())
    os.write(writer, b"second")
    with published_untold(cluster, writer, b"second", here, there):
        assert here.read_bytes() == b"second"
        os.close(in_place)
        assert here.read_bytes() == b"second"
        reader = os.open(here, os.O_RDONLY)
    expect_shared_by_readers(here, reader, b"second")


@elsewhere
def test_a_copy_that_is_published_is_not_taken_from_later_opens(
    cluster: Cluster, here: Path, there: Path
) -> None:
    here.write_bytes(b"first")
    with here.open("rb") as first:
        writer = os.open(here, os.O_WRONLY | os.O_TRUNC)
        one, other = (open_again(first.fileno()) for _ in range(2))
    os.write(writer, b"second")
    os.close(writer)
    os.pwrite(one, b"third", 0)
    with published_untold(cluster, one, b"third", here, there):
        reader = os.open(here, os.O_RDONLY)
    os.close(other)
    for _ in range(2):
        # The release of `other` is carried out before this.
        here.with_name("another").write_bytes(b"")
    expect_shared_by_readers(here, reader, b"third")


@elsewhere
def test_copy_that_gets_another_number_is_kept_once(cluster: Cluster, here: Path) -> None:
    """It was made to be published in a session that has ended."""
    mount = cluster.mounts[0]
    with here.open("wb+", buffering=0) as file:
        for text in (b"first", b"second"):
            file.write(text)
            os.fsync(file.fileno())
        before = os.listdir(mount.cache / "extents")
        file.write(b"third")
        os.kill(mount.pid, misbehaving.END_SESSION)
        os.fsync(file.fileno())
        assert len(os.listdir(mount.cache / "extents")) == len(before)
    assert here.read_bytes() == b"firstsecondthird"


def test_what_nodes_dropped_with_a_session_is_sent_again(cluster: Cluster) -> None:
    mount, there = cluster.mounts[0], cluster.mounts[1].path
    os.setxattr(mount.path, "user.irdmafs.drafts", b"*.tmp")
    draft = mount.path / "a.tmp"
    draft.mkdir()
    os.kill(mount.pid, misbehaving.END_SESSION_LATE)
    for number in range(3):
        (draft / f"{number}").write_text(f"{number}")
    draft.rename(mount.path / "final")
    assert [(there / "final" / f"{number}").read_text() for number in range(3)] == ["0", "1", "2"]


def open_in_place(node: StoreNode, path: Path) -> int:
    """Return a descriptor of a file that is written where the node can take it over."""
    opened: list[int] = []
    before = incoming(node)

    def is_there() -> bool:
        path.write_text("before")
        fd = os.open(path, os.O_RDWR)
        if incoming(node) - before:
            opened.append(fd)
        else:
            os.close(fd)
        return bool(opened)

    eventually(is_there, "the node is known")
    return opened[0]


def incoming(node: StoreNode) -> set[str]:
    return set(os.listdir(node.store / "incoming"))


def test_files_that_were_open_for_writing_are_published_opened_and_written_again() -> None:
    """One is not written, one before the mount is stopped, and one after it goes on."""
    plan = Plan(nodes=1, mounts=1, replicas=1, beside={0: 0})
    with Cluster(plan, node_program=hasty_node.__file__) as cluster:
        (mount,), (node,) = cluster.mounts, cluster.nodes
        paths = [mount.path / name for name in ("unwritten", "before", "after")]
        opened = [open_in_place(node, path) for path in paths]
        _, before, after = opened
        try:
            os.pwrite(before, b"BEFORE", 0)
            os.fsync(before)
            with paused(mount):
                eventually(lambda: not incoming(node), "it removes them", within_s=30)
            os.pwrite(after, b"AFTER", 0)
            os.fsync(after)
        finally:
            for fd in opened:
                os.close(fd)
        assert [path.read_text() for path in paths] == ["before", "BEFORE", "AFTERe"]
        for path in paths:
            for text in ("first", "second"):
                with path.open("r+") as file:
                    file.truncate()
                    file.write(text)
                assert path.read_text() == text


READER = """
import os, sys
os.sched_setaffinity(0, {0})
sys.stdin.readline()
fd = os.open(sys.argv[1], os.O_RDONLY)
print(len(os.read(fd, 1000)), os.fstat(fd).st_size)
"""
BUSY = """
import os, sys
os.sched_setaffinity(0, {0})
sys.stdin.readline()
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
print("busy", flush=True)
while True:
    pass
"""


@contextlib.contextmanager
def python(program: str, *arguments: object) -> Iterator[Program]:
    with Program(sys.executable, "-c", program, *arguments) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def processors() -> Iterator[None]:
    """Keep this process, and so its children, on the second processor."""
    before = os.sched_getaffinity(0)
    if not {0, 1} <= before:
        pytest.skip("it needs processors 0 and 1")
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    except PermissionError:
        pytest.skip("it needs the right to real-time scheduling")
    os.sched_setaffinity(0, {1})
    yield
    os.sched_setaffinity(0, before)


def begin(process: Program) -> None:
    process.stdin.write("\n")
    process.stdin.flush()


def test_a_reader_that_looked_a_file_up_before_a_publish_reads_all_of_what_it_opens(
    new_mount: Callable[..., Mount], processors: None
) -> None:
    with new_mount() as mount:
        path = mount.path / "file"
        path.write_bytes(b"first")
        daemon = mount.pid
        for thread in os.listdir(f"/proc/{daemon}/task"):
            os.sched_setaffinity(int(thread), {1})
        with python(READER, path) as reader, python(BUSY) as busy:
            writer = os.open(path, os.O_WRONLY | os.O_TRUNC)
            os.write(writer, b"second" * 10)
            os.kill(daemon, signal.SIGSTOP)
            try:
                begin(reader)
                eventually(lambda: is_waiting(reader.pid), "the reader looks it up")
                begin(busy)
                assert busy.stdout.readline() == "busy\n"
            finally:
                os.kill(daemon, signal.SIGCONT)
            os.close(writer)
            busy.kill()
            assert reader.stdout.read().split() == ["60", "60"]
