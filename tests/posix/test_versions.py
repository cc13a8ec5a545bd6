"""Versions in detail: how each way of changing a file publishes, and what stat and xattrs then show."""

import contextlib
import errno
import itertools
import os
from pathlib import Path

import pytest
from conftest import EVERYWHERE
from harness.errors import fails_with
from harness.mountpoint import Mount, eventually
from harness.processes import Process, TakeProcess
from harness.scenarios import AsOnTmpfs

SESSIONS = EVERYWHERE


SCENARIOS = {
    "truncation shrinks, and grows with zeros": """
        a: sizes = (0, 1, 4096, 10_000, 100_000, 3_000_000)
        a: for size in sizes: write(f'{size}', pattern(1, 100_000), 'wb'); os.truncate(f'{size}', size)
        a: for size in sizes: write(f'f{size}', pattern(1, 100_000), 'wb')
        a: fds = [open_fd(f'f{size}') for size in sizes]
        a: for size, fd in zip(sizes, fds): os.ftruncate(fd, size)
        a: [os.fstat(fd).st_size for fd in fds]
        a: for fd in fds: os.close(fd)
        b: [(os.stat(name).st_size, content(name)) for name in tree()]
        a: for name in tree(): os.truncate(name, 50); os.truncate(name, 5000)
        b: [content(name) for name in tree()]
    """,
    "what a writer sets before it closes stays": """
        a: times = {'ns': (1_000_000_007, 2_000_000_009)}
        a: for mode in ('wb', 'r+b', 'ab'): write(mode, 'old')
        a: files = [open(mode, mode, buffering=0) for mode in ('wb', 'r+b', 'ab')]
        a: for f in files: f.write(b'new'); os.utime(f.fileno(), **times); f.close()
        b: [(os.stat(mode).st_mtime_ns, content(mode)) for mode in ('wb', 'r+b', 'ab')]
        a: f = open('new', 'wb'); f.write(b'x'); os.fchmod(f.fileno(), 0o640)
        a: os.setxattr(f.fileno(), 'user.dtype', b'int8'); f.close()
        b: os.stat('new').st_mode, os.getxattr('new', 'user.dtype')
    """,
    "hard links show the new content under every name": """
        b: look = lambda: [(os.stat(name).st_size, content(name)) for name in ('one', 'd/other')]
        a: os.mkdir('d'); write('one', b'a' * 10_000, 'wb'); os.link('one', 'd/other')
        b: look()
        a: write('d/other', b'new', 'wb')
        b: look()
        a: write('one', b'another', 'r+b')
        b: look()
        a: write('d/other', b'more', 'ab')
        b: look()
    """,
    "a write whose time is set back, as rsync leaves it, is there": """
        a: write('file', pattern(1, 100_000), 'wb'); before = os.stat('file').st_mtime_ns
        a: set_back = lambda: os.utime(fd, ns=(before, before))
        a: fd = open_fd('file', os.O_WRONLY); os.pwrite(fd, pattern(2, 10), 0); os.fsync(fd)
        a: set_back(); os.fsync(fd); os.pwrite(fd, pattern(2, 100_000), 0); set_back(); os.close(fd)
        b: content('file')
        a: os.stat('file').st_mtime_ns == before
    """,
    "copies are made inside the kernel": """
        a: import shutil; sizes = (0, 1, 100_000, 8 << 20)
        a: for size in sizes: write(f'{size}', pattern(3, size), 'wb')
        a: open_all = lambda way: [(open(f'{n}', 'rb'), open(f'{n}{way}', 'wb')) for n in sizes]
        a: close = lambda pairs: [file.close() for pair in pairs for file in pair]
        a: copies = open_all('copy')
        a: [os.copy_file_range(s.fileno(), t.fileno(), 1 << 30, 0, 0) for s, t in copies]
        a: [os.copy_file_range(s.fileno(), t.fileno(), 1 << 30) for s, t in copies]
        a: close(copies); sent = open_all('sent')
        a: [os.sendfile(t.fileno(), s.fileno(), 0, 1 << 30) for s, t in sent]
        a: close(sent)
        b: [content(name) for name in tree()]
    """,
    "vectored and direct calls": """
        a: fd = open_fd('file', os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
        a: page = mmap.mmap(-1, 8192); page[:] = pattern(5, 8192); os.pwrite(fd, page, 0)
        a: os.pwritev(fd, [page, page], 8192)
        a: back = mmap.mmap(-1, 8192); os.preadv(fd, [back], 16384); os.close(fd); told(back)
        b: content('file')
    """,
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_contents_do_as_on_a_tmpfs(as_on_tmpfs: AsOnTmpfs, scenario: str) -> None:
    as_on_tmpfs(SCENARIOS[scenario])


@pytest.mark.parametrize("exists", [False, True])
def test_appends_of_several_lose_nothing(folder: Path, process: TakeProcess, exists: bool) -> None:
    file = folder / "log"
    if exists:
        file.write_bytes(b"")
    append = """
f = open(file, 'ab', buffering=0)
for n in range(200):
    f.write(b'%c%07d\\n' % (letter, n))
f.close()
"""
    writers = [process() for _ in range(4)]
    for letter, writer in zip(b"abcd", writers, strict=True):
        writer.start(append, file=str(file), letter=letter)
    for writer in writers:
        writer.result()
    lines = file.read_bytes().splitlines()
    for name in "abcd":
        expected = [f"{name}{n:07}".encode() for n in range(200)]
        assert [line for line in lines if line[:1] == name.encode()] == expected


def test_stat_of_every_hard_link_is_right_once_close_returned(
    folder: Path, reader: Process, writer: Process
) -> None:
    look = "[os.stat(name).st_size for name in names]"
    ways = ("O_WRONLY | os.O_TRUNC", "O_RDWR", "O_WRONLY | os.O_APPEND")
    for number, flags in zip(range(30), itertools.cycle(ways), strict=False):
        one, other = folder / f"{number}", folder / f"{number}.link"
        one.write_bytes(b"x" * 5000)
        os.link(one, other)
        assert reader.do(look, names=[str(one), str(other)]) == [5000, 5000]
        writer.do(f"fd = os.open(file, os.{flags})", file=str(one))
        reader.do(look)
        writer.do("os.pwrite(fd, b'y' * 10_000, 0)")
        reader.do(look)
        writer.do("os.close(fd)")
        expected = 15_000 if "APPEND" in flags else 10_000
        assert reader.do(look) == [expected, expected], f"file {number}"


def test_versions_count_up_and_name_their_openers(
    mount: Mount, file: Path, reader: Process, writer: Process
) -> None:
    file.write_bytes(b"1")
    first = int(os.getxattr(file, "user.irdmafs.version"))
    reader.do("f = open(file, 'rb')", file=str(file))
    file.write_bytes(b"22")
    assert int(os.getxattr(file, "user.irdmafs.version")) == first + 1
    writer.do("f = open(file, 'wb', buffering=0); f.write(b'333')", file=str(file))
    by_state = {entry["state"]: entry for entry in mount.versions(file)}
    assert set(by_state) == {"current", "open", "working"}
    assert (by_state["current"]["version"], by_state["current"]["size"]) == (first + 1, 2)
    with open(file, "rb") as current:
        assert by_state["current"]["mtime_ns"] == os.fstat(current.fileno()).st_mtime_ns
    assert (by_state["open"]["version"], by_state["open"]["size"]) == (first, 1)
    assert by_state["open"]["openers"] == [reader.pid]
    assert by_state["working"]["openers"] == [writer.pid]
    writer.do("f.close()")
    reader.do("f.close()")
    eventually(lambda: len(mount.versions(file)) == 1, "only the current version is kept")
    assert mount.versions(file)[0]["version"] == first + 2


def test_attributes_that_tell_are_not_listed_nor_set_nor_of_another_kind_of_file(
    folder: Path, file: Path
) -> None:
    file.write_bytes(b"x")
    for path, name in ((file, "version"), (folder, "changes"), (folder, "tree")):
        os.getxattr(path, f"user.irdmafs.{name}")
        assert not any("irdmafs" in listed for listed in os.listxattr(path))
        with pytest.raises(PermissionError):
            os.setxattr(path, f"user.irdmafs.{name}", b"7")
        with fails_with(errno.ENODATA):
            os.getxattr(folder if path == file else file, f"user.irdmafs.{name}")


def _write_calls(pid: int) -> int:
    found = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(found["syscw"])


def test_a_version_costs_no_more_where_thousands_of_old_ones_are_open(
    mount: Mount, file: Path
) -> None:
    """The kernel is told of nothing that it does not keep: not of each old version at each new one."""
    with contextlib.ExitStack() as opened:
        for number in range(500):
            file.write_bytes(b"%d" % number)
            opened.enter_context(open(file, "rb"))
        before = _write_calls(mount.pid)
        for number in range(20):
            file.write_bytes(b"%d" % number)
        assert _write_calls(mount.pid) - before < 20 * 100
        assert file.stat().st_size == 2


def test_a_file_with_many_names_takes_no_more_memory_with_each_version(
    mount: Mount, folder: Path, file: Path
) -> None:
    file.write_bytes(b"0")
    for number in range(2000):
        os.link(file, folder / f"{number}")
    with open(file, "rb"):
        for number in range(20):
            file.write_bytes(b"%d" % number)  # a second node begins
        before = mount.status()["daemon_rss_bytes"]
        for number in range(200):
            file.write_bytes(b"%d" % number)
        assert mount.status()["daemon_rss_bytes"] - before < 20 << 20
