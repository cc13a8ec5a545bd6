"""One file, many descriptors: who shares what, who joins whom, and what a close publishes."""

import errno
import os
import resource
import signal
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from conftest import EVERYWHERE
from harness.cluster_mount import CLUSTER
from harness.errors import fails_with
from harness.mountpoint import Mount, eventually
from harness.network import CommandFailed
from harness.patterns import pattern
from harness.processes import Process, Program, TakeProcess
from harness.scenarios import AsOnTmpfs
from harness.scratch import mounted_on

SESSIONS = EVERYWHERE

NewMount = Callable[..., Mount]

NEW = os.O_CREAT | os.O_EXCL


SCENARIOS = {
    "a writer who comes by a descriptor after the file was emptied makes no conflict": """
        a: reader = open_fd('file', os.O_RDONLY | os.O_CREAT)
        a: os.close(open_fd('file', os.O_RDONLY | os.O_TRUNC))
        a: writer = open_fd(f'/proc/self/fd/{reader}'); os.write(writer, b'content')
        a: os.close(reader); os.close(writer)
        b: read('file'), tree()
    """,
    "a new file whose first writers wrote nothing is seen as it grows": """
        a: fd = open_fd('file', os.O_WRONLY | os.O_CREAT)
        a: fd = reopened(fd, os.O_WRONLY | os.O_APPEND)
        a: fd = reopened(fd, os.O_RDONLY)
        a: fd = reopened(fd, os.O_RDWR); os.write(fd, b'content')
        b: read('file')
        a: os.close(fd)
        b: read('file')
    """,
    "a temporary file that others fill by name keeps what they wrote": """
        a: import tempfile; file = tempfile.NamedTemporaryFile('w+b', dir='.')
        a: write(file.name, 'data'); file.read()
        a: subprocess.run(['cp', '/etc/hostname', file.name], check=True); file.seek(0)
        a: file.read() == open('/etc/hostname', 'rb').read()
        a: file.flush(); content(file.name) == content('/etc/hostname')
    """,
    "a file without a name keeps its length when its last writer leaves": """
        a: fd = open_fd('file', os.O_WRONLY | os.O_CREAT); os.write(fd, bytes(100))
        a: os.unlink('file')
        a: fd = reopened(fd, os.O_WRONLY)
        a: fd = reopened(fd, os.O_RDONLY)
        a: len(os.pread(fd, 200, 0)), os.fstat(fd).st_size
    """,
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_descriptors_share_a_file_as_on_a_tmpfs(as_on_tmpfs: AsOnTmpfs, scenario: str) -> None:
    as_on_tmpfs(SCENARIOS[scenario])


def version(file: Path) -> int:
    return int(os.getxattr(file, "user.irdmafs.version"))


def test_who_opens_for_writing_joins_who_is_writing(file: Path, process: TakeProcess) -> None:
    file.write_bytes(b"the old version")
    writer, joiner, reader = process(), process(), process()
    reader.do("f = open(file, 'rb')", file=str(file))
    writer.do("f = open(file, 'wb', buffering=0); f.write(b'new ')", file=str(file))
    joiner.do("f = open(file, 'ab', buffering=0); f.write(b'and more')", file=str(file))
    assert writer.do("os.fstat(f.fileno()).st_size") == 12
    assert reader.do("open(file, 'rb').read()", file=str(file)) == b"the old version"
    writer.do("f.close()")
    joiner.do("f.close()")
    assert reader.do("open(file, 'rb').read()", file=str(file)) == b"new and more"
    assert reader.do("f.read()") == b"the old version"


@pytest.mark.kernel_session("pyfuse3 does not tell who closes a file")
def test_a_writer_killed_after_fsync_publishes_what_it_synced_and_no_more(file: Path) -> None:
    file.write_bytes(b"old")
    with Process() as writer:
        writer.do("f = open(file, 'wb', buffering=0); f.write(b'synced')", file=str(file))
        writer.do("os.fsync(f.fileno()); f.write(b' and half')")
        assert file.read_bytes() == b"synced"
        writer.kill(signal.SIGKILL)
    assert file.read_bytes() == b"synced"


def test_a_killed_writer_of_a_new_file_leaves_what_it_wrote(folder: Path) -> None:
    """As on a tmpfs: it was seen as it grew."""
    log = folder / "log"
    with Process() as writer:
        writer.do("f = open(file, 'w'); f.write('step 1\\n'); f.flush()", file=str(log))
        writer.kill(signal.SIGKILL)
    assert log.read_text() == "step 1\n"
    with open(log, "a") as appended:
        appended.write("step 2\n")
    assert log.read_text() == "step 1\nstep 2\n"


def test_empty_version_that_nobody_wrote_gives_way_to_one_published_meanwhile(file: Path) -> None:
    file.write_bytes(b"old")
    script = 'exec 3>"$1"; echo hello > "$1"; exec 3>&-; cat "$1"'
    done = subprocess.run(["bash", "-c", script, "bash", file], capture_output=True, timeout=30)
    assert done.stdout == b"hello\n", done.stderr
    subprocess.run(["bash", "-c", ': > "$1"', "bash", file], timeout=30, check=True)
    assert file.read_bytes() == b""


def test_a_writer_in_place_whose_version_is_replaced_on_the_same_host_closes_last_and_wins(
    folder: Path, file: Path
) -> None:
    reader = os.open(file, os.O_RDONLY | os.O_CREAT)
    replaces = os.open(file, os.O_RDWR | os.O_TRUNC)
    in_place = os.open(f"/proc/self/fd/{reader}", os.O_WRONLY)
    os.write(in_place, b"in place")
    os.write(replaces, b"replacement")
    os.close(replaces)
    assert file.read_bytes() == b"replacement"
    os.close(in_place)
    assert file.read_bytes() == b"in place"
    with file.open("ab") as more:
        more.write(b", and more")
    assert file.read_bytes() == b"in place, and more"
    os.close(reader)
    assert os.listdir(folder) == ["file"]


def test_a_replacement_that_could_be_mapped_is_published_once(file: Path) -> None:
    file.write_bytes(b"version before")
    before = version(file)
    with file.open("w+b") as replacement:
        replacement.write(b"content")
    with file.open("rb") as reader:
        assert reader.read() == b"content"
    assert version(file) == before + 1


@pytest.mark.kernel_session("what is published is decided below the sessions")
def test_rename_publishes_what_is_still_open_for_writing(own_mount: Mount, writer: Process) -> None:
    files = {own_mount.path / name: getattr(os, name) for name in ("O_RDWR", "O_WRONLY")}
    for file, flags in files.items():
        file.write_bytes(pattern(1, 100_000))
        writer.do("fd = os.open(file + '.tmp', flags)", file=str(file), flags=flags | NEW)
        writer.do("os.write(fd, pattern(2, 50_000)); os.rename(file + '.tmp', file)")
    own_mount.kill9()
    own_mount.remount()
    assert [file.read_bytes() for file in files] == [pattern(2, 50_000)] * 2


def test_what_was_written_in_place_survives_a_crash_of_the_daemon(
    own_mount: Mount, writer: Process, session: str
) -> None:
    if session == CLUSTER:
        pytest.skip("a cluster keeps what was published: see docs/sharing.md")
    file, other = own_mount.path / "memmap", own_mount.path / "other"
    for path in (file, other):
        path.write_bytes(pattern(1, 100_000))
    os.utime(other, ns=(1, 1))
    before = version(other)
    writer.do("fd = os.open(file, os.O_RDWR); os.pwrite(fd, b'x' * 10, 500)", file=str(file))
    writer.do("os.ftruncate(fd, 90_000)")
    own_mount.kill9()
    own_mount.remount()
    expected = bytearray(pattern(1, 100_000)[:90_000])
    expected[500:510] = b"x" * 10
    assert file.read_bytes() == expected
    assert (version(other), os.stat(other).st_mtime_ns) == (before, 1)


@pytest.mark.parametrize("option", [False, True])
def test_without_isolation_an_overwrite_is_seen_at_once(
    new_mount: NewMount, reader: Process, writer: Process, option: bool
) -> None:
    mount = new_mount(*(("-o", "isolation=off") if option else ()))
    below = mount.path / "below"
    below.mkdir()
    file = below / "file"
    if not option:
        os.setxattr(mount.path, "user.irdmafs.isolation", b"off")
    file.write_bytes(b"the old version")
    reader.do("f = open(file, 'rb', buffering=0)", file=str(file))
    writer.do("f = open(file, 'wb', buffering=0)", file=str(file))
    assert reader.do("os.fstat(f.fileno()).st_size, f.read()") == (0, b"")
    writer.do("f.write(b'new')")
    assert reader.do("f.read(), open(file, 'rb').read()", file=str(file)) == (b"new", b"new")
    os.setxattr(below, "user.irdmafs.isolation", b"on")
    writer.do("f.close(); f = open(file, 'wb', buffering=0)")
    assert reader.do("open(file, 'rb').read()", file=str(file)) == b"new"
    with fails_with(errno.EINVAL):
        os.setxattr(below, "user.irdmafs.isolation", b"maybe")


@pytest.mark.kernel_session("only root can bind")
@pytest.mark.parametrize("inside", [False, True])
def test_a_bind_mounted_file_shows_each_new_version(
    inside: bool, folder: Path, tmp_path: Path
) -> None:
    """Also if it covers another file of the same mount, which stays as it is."""
    file, target = folder / "config", (folder if inside else tmp_path) / "covered"
    file.write_bytes(b"one")
    target.touch()
    with mounted_on(target, "bind", kind="none", source=file):
        assert target.read_bytes() == b"one"
        for content in (b"two", b"three"):
            file.write_bytes(content)
            assert target.read_bytes() == content
        target.write_bytes(b"four")
        with open(target, "ab") as appended:
            appended.write(b" and five")
        assert file.read_bytes() == target.read_bytes() == b"four and five"
    assert target.read_bytes() == b""


@pytest.mark.kernel_session("only root can stack")
def test_overlayfs_keeps_its_names_on_one_host_and_is_refused_in_a_cluster(
    session: str, folder: Path, file: Path, tmp_path: Path
) -> None:
    """They would be ESTALE for good after a change by another host."""
    layers = [folder / name for name in ("lower", "upper", "work")]
    for directory in layers:
        directory.mkdir()
    options = "lowerdir={},upperdir={},workdir={}".format(*layers)
    refused = pytest.raises(CommandFailed) if session == CLUSTER else nullcontext()
    with refused, mounted_on(tmp_path, options, kind="overlay"):
        stacked = tmp_path / "directory" / "file"
        stacked.parent.mkdir()
        stacked.touch()
        file.touch()
        os.link(file, folder / "link")
        with file.open():
            file.write_bytes(b"new")
        assert stacked.is_file()


def test_no_write_fails_or_is_lost_while_readers_come_and_go(
    file: Path, process: TakeProcess, writer: Process
) -> None:
    file.write_bytes(bytes(8192))
    readers = [process() for _ in range(2)]
    for reader in readers:
        reader.start(
            "while open(file, 'rb').read()[:1] != b'Z': os.close(os.open(file, os.O_RDWR))",
            file=str(file),
        )
    writer.do(
        "for number in range(60):\n"
        "    value = bytes([number % 80])\n"
        "    fd = os.open(file, os.O_RDWR)\n"
        "    assert os.pwrite(fd, value * 8192, 0) == 8192\n"
        "    os.close(fd)\n"
        "    assert open(file, 'rb').read() == value * 8192, number\n",
        file=str(file),
    )
    file.write_bytes(b"Z")
    for reader in readers:
        reader.result()


@pytest.mark.kernel_session("in the pyfuse3 session times are kept by the kernel")
def test_a_store_through_a_mapping_moves_the_times(file: Path, process: TakeProcess) -> None:
    file.write_bytes(bytes(8192))
    before = os.stat(file).st_mtime_ns
    process().do("fd = os.open(file, os.O_RDWR); m = mmap.mmap(fd, 8192); m[0] = 1", file=str(file))
    assert os.stat(file).st_mtime_ns > before


def test_the_open_files_of_one_process_do_not_make_writes_of_others_fail(
    own_mount: Mount, process: TakeProcess
) -> None:
    (daemon,) = own_mount.pids()
    in_use = len(os.listdir(f"/proc/{daemon}/fd"))
    resource.prlimit(daemon, resource.RLIMIT_NOFILE, (in_use + 40, in_use + 40))
    victim, greedy = process(), process()
    victim.do("fd = os.open(file, os.O_RDWR | os.O_CREAT)", file=str(own_mount.path / "victim"))
    greedy.do(
        "fds = [os.open(f'{folder}/{n}', os.O_WRONLY | os.O_CREAT) for n in range(120)]",
        folder=str(own_mount.path),
    )
    assert victim.do("os.pwrite(fd, b'new', 0)") == 3
    victim.do("os.close(fd)")
    assert (own_mount.path / "victim").read_bytes() == b"new"
    greedy.do("for fd in fds: os.write(fd, b'x'); os.close(fd)")
    assert (own_mount.path / "119").read_bytes() == b"x"


def test_an_open_for_writing_is_no_change_of_what_a_child_goes_on_writing(file: Path) -> None:
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.write(fd, b"a")
    with Program("cat", stdout=fd) as child:
        os.close(fd)
        child.stdin.write("b")
        child.stdin.flush()
        eventually(lambda: file.stat().st_size == 2, "the child writes")
        before = file.stat()
        with file.open("r+b"):
            opened = file.stat()
        child.stdin.close()
    assert (opened.st_mtime_ns, opened.st_ctime_ns) == (before.st_mtime_ns, before.st_ctime_ns)
    assert file.read_bytes() == b"ab"
