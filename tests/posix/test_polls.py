"""A program that polls an open descriptor is told when the name of the file has something newer."""

import os
import select
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import make_mount
from harness.closing import descriptor
from harness.cluster_mount import CLUSTER
from harness.clusters import Cluster, ClusterMount
from harness.file_changes import append, publish, replace
from harness.mountpoint import Mount, eventually
from harness.processes import Process, TakeProcess

# pyfuse3 does not carry it.
SESSIONS = ("kernel", CLUSTER)


@pytest.fixture(scope="module")
def module_mount(session: str) -> Iterator[Mount]:
    with make_mount(session, "-o", "poll") as mount:
        yield mount


@pytest.fixture(scope="module")
def hosts(cluster: Cluster) -> Iterator[list[ClusterMount]]:
    yield [cluster.mounts[0], cluster.add_mount("-o", "poll")]
    cluster.remove_mount()


OPEN = "import select; fd = os.open(file, os.O_RDONLY)"
POLL = "p = select.poll(); p.register(fd, select.POLLPRI); bool(p.poll({ms}))"


def keep_and_replace(path: Path) -> None:
    path.rename(path.with_name("before"))
    replace(path)


CHANGES = {
    "it is published": publish,
    "it is appended to": append,
    "it is truncated": lambda path: os.truncate(path, 1),
    "another is renamed onto it": replace,
    "it is kept by another name": keep_and_replace,
    "it is exchanged for a link": lambda path: (path.unlink(), path.symlink_to("other")),
    "it is removed": lambda path: path.unlink(),
    "it is renamed": lambda path: path.rename(path.with_name("renamed")),
}
changes = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())


def opened(process: Process, file: Path) -> Process:
    process.do(OPEN, file=str(file))
    return process


def start_polling(process: Process) -> None:
    process.start(POLL.format(ms=20_000))
    channel = Path(f"/proc/{process.pid}/wchan")
    eventually(lambda: channel.read_text().startswith("poll_"), "it polls", 30)


@changes
def test_a_change_wakes_who_polls_and_is_told_at_once_to_who_polls_later(
    file: Path, process: TakeProcess, change: Callable[[Path], object]
) -> None:
    file.write_bytes(b"old")
    reader, later = opened(process(), file), opened(process(), file)
    start_polling(reader)
    assert not reader.finished(within_s=0.1)
    change(file)
    assert reader.result() is True
    assert later.do(POLL.format(ms=0)) is True


@changes
def test_a_change_by_another_host_wakes_who_polls(
    here: Path, there: Path, process: TakeProcess, change: Callable[[Path], object]
) -> None:
    (here / "file").write_bytes(b"old")
    reader = opened(process(), there / "file")
    start_polling(reader)
    change(here / "file")
    assert reader.result() is True


def test_a_change_of_something_else_is_not_told(folder: Path, process: TakeProcess) -> None:
    file, beside = folder / "file", folder / "beside"
    file.write_bytes(b"old")
    beside.write_bytes(b"old")
    reader = opened(process(), file)
    publish(beside)
    replace(beside)
    beside.rename(folder / "moved")
    file.chmod(0o600)
    assert reader.do(POLL.format(ms=0)) is False


def test_a_file_is_told_of_by_the_name_that_it_got_last(folder: Path, process: TakeProcess) -> None:
    made, file = folder / "made", folder / "file"
    made.write_bytes(b"old")
    made.rename(file)
    reader = opened(process(), file)
    assert reader.do(POLL.format(ms=0)) is False
    replace(file)
    assert reader.do(POLL.format(ms=0)) is True


def test_the_kernel_looks_a_name_up_again_when_somebody_is_told(
    folder: Path, mount: Mount, reader: Process, session: str
) -> None:
    """It may not have noted the answered change yet."""
    if session == CLUSTER:
        pytest.skip("in a cluster the kernel looks names up anyway")
    file = folder / "file"
    file.write_bytes(b"0")
    opened(reader, file)
    replace(file)
    for asked, looks_up in (("", False), (POLL.format(ms=0), True), (POLL.format(ms=0), False)):
        os.stat(file)
        assert not asked or reader.do(asked) is True
        with mount.requests() as counted:
            os.stat(file)
        assert bool(counted["LOOKUP"]) is looks_up


def test_who_is_told_opens_what_was_told(folder: Path, reader: Process, writer: Process) -> None:
    file, aside = folder / "file", folder / "aside"
    file.write_bytes(b"0")
    opened(reader, file)
    for number in range(1, 50):
        reader.start(
            POLL.format(ms=20_000)
            + "; os.close(fd); fd = os.open(file, os.O_RDONLY); os.read(fd, 10)",
            file=str(file),
        )
        writer.do(
            "open(aside, 'wb').write(b'%d' % number); os.replace(aside, file)",
            aside=str(aside),
            file=str(file),
            number=number,
        )
        assert reader.result() == b"%d" % number


def test_a_directory_cannot_be_polled_for_changes(folder: Path) -> None:
    """The kernel's FUSE has no poll for directories: an attribute tells of their changes."""
    opened, poller = descriptor(os.open(folder, os.O_RDONLY)), select.epoll()
    with opened as fd, poller, pytest.raises(PermissionError):
        poller.register(fd, select.EPOLLPRI)


def test_who_writes_is_not_told_of_its_own_version_and_may_read_and_write(folder: Path) -> None:
    with open(folder / "file", "w+b", buffering=0) as file:
        poller, both = select.poll(), select.POLLIN | select.POLLOUT
        poller.register(file, both | select.POLLPRI)
        file.write(b"one")
        os.fsync(file)
        assert poller.poll(0) == [(file.fileno(), both)]
        replace(folder / "file")
        assert poller.poll(0) == [(file.fileno(), both | select.POLLPRI)]


def test_epoll_tells_of_each_version_by_edge(folder: Path) -> None:
    path = folder / "file"
    path.write_bytes(b"old")
    with path.open("rb") as file, select.epoll() as poller:
        poller.register(file, select.EPOLLPRI | select.EPOLLET)
        assert poller.poll(0) == []
        for change in (publish, append, replace):
            change(path)
            assert poller.poll(20) != []
            assert poller.poll(0) == []


def test_without_the_option_the_kernel_asks_once_and_nothing_is_told(
    new_mount: Callable[..., Mount],
) -> None:
    """io_uring polls 255 times for each buffered write."""
    mount = new_mount()
    with mount.requests() as counted, (mount.path / "file").open("w+b") as file:
        poller, both = select.poll(), select.POLLIN | select.POLLOUT
        poller.register(file, both | select.POLLPRI)
        for _ in range(3):
            replace(mount.path / "file")
            assert poller.poll() == [(file.fileno(), both)]
    assert counted["POLL"] <= 1


def test_a_session_that_tells_nothing_says_so() -> None:
    with make_mount("pyfuse3", "-o", "poll") as mount:
        warnings = mount.status()["warnings"]
    assert [line for line in warnings if line.startswith("-o poll has no effect")]
