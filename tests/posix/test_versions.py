"""Versions in detail: how each way of changing a file publishes, and what stat and xattrs then show."""

import ctypes
import errno
import os
from pathlib import Path

import pytest
from conftest import SESSIONS as _SESSIONS
from harness.cluster_mount import CLUSTER
from harness.errors import fails_with
from harness.mountpoint import Mount, eventually
from harness.patterns import pattern
from harness.processes import Process, TakeProcess
from harness.scenarios import AsOnTmpfs
from harness.seeds import chosen_seed

SESSIONS = (*_SESSIONS, CLUSTER)

libc = ctypes.CDLL(None, use_errno=True)
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2
FALLOC_FL_ZERO_RANGE, FALLOC_FL_COLLAPSE_RANGE = 16, 8


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    args = (fd, mode, ctypes.c_int64(offset), ctypes.c_int64(length))
    if libc.fallocate(*args) != 0:
        raise OSError(ctypes.get_errno(), "fallocate")


# -- as on a tmpfs ---------------------------------------------------------------------------

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
    "growing again after a cut shows zeros and not old bytes": """
        a: f = open('file', 'w+b', buffering=0); f.write(b'a' * 10_000)
        a: f.truncate(100); f.truncate(5000); f.seek(0); told(f.read())
        a: f.close()
        b: content('file')
    """,
    "writing past the end leaves zeros between": """
        a: write('new', 'start'); write('old', 'start')
        a: f = open('new', 'wb'); f.seek(1_000_000); f.write(b'end'); f.close()
        a: f = open('old', 'r+b'); f.seek(1_000_000); f.write(b'end'); f.close()
        b: content('new'), content('old')
    """,
    "edits in place of two processes add up": """
        a: write('file', bytes(100_000), 'wb'); fd = open_fd('file')
        b: fd = open_fd('file')
        a: os.pwrite(fd, b'one', 10)
        b: os.pwrite(fd, b'two', 50_000)
        a: os.close(fd)
        b: os.pwrite(fd, b'three', 99_998); os.close(fd)
        c: content('file')
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
    "posix_fallocate works everywhere": """
        a: f = open('file', 'wb'); os.posix_fallocate(f.fileno(), 0, 300_000)
        a: f.write(b'x'); f.close()
        b: content('file')
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
    "a copy within one file": """
        a: write('file', b'abcdef' + bytes(10_000), 'wb'); fd = open_fd('file')
        a: os.copy_file_range(fd, fd, 3, 0, 9_000); os.close(fd)
        b: content('file')
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


# -- appending ----------------------------------------------------------------


@pytest.mark.parametrize("exists", [False, True])
def test_appends_of_several_processes_lose_nothing(
    folder: Path, process: TakeProcess, exists: bool
) -> None:
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


def test_randomly_edited_file_is_what_the_same_edits_make_in_memory(
    folder: Path, process: TakeProcess
) -> None:
    import random

    seed = chosen_seed()
    rng, file, model = random.Random(seed), folder / "file", bytearray()
    editors = [process() for _ in range(3)]
    file.write_bytes(b"")
    fds: dict[Process, bool] = dict.fromkeys(editors, False)
    for _ in range(250):
        editor = rng.choice(editors)
        if not fds[editor]:
            editor.do("fd = os.open(file, os.O_RDWR)", file=str(file))
            fds[editor] = True
            continue
        at, length = rng.randrange(200_000), rng.choice([1, 100, 5000, 70_000])
        action = rng.choice(["write", "write", "read", "truncate", "fsync", "close", "mmap"])
        if action == "write":
            data = rng.randbytes(length)
            editor.do("os.pwrite(fd, data, at)", data=data, at=at)
            model.extend(bytes(max(0, at + length - len(model))))
            model[at : at + length] = data
        elif action == "read":
            found = editor.do("os.pread(fd, length, at)", length=length, at=at)
            assert found == model[at : at + length], f"seed {seed}, {length} bytes at {at}"
        elif action == "truncate":
            editor.do("os.ftruncate(fd, at)", at=at)
            model = model[:at].ljust(at, b"\0")
        elif action == "fsync":
            editor.do("os.fsync(fd)")
        elif action == "mmap" and model:
            at = rng.randrange(len(model))
            editor.do("m = mmap.mmap(fd, 0); m[at] = 7; m.flush(); m.close()", at=at)
            model[at] = 7
        elif action == "close":
            editor.do("os.close(fd)")
            fds[editor] = False
        size = editor.do("os.stat(file).st_size", file=str(file))
        assert size == len(model), f"seed {seed}: stat after {action}"
    for editor in (one for one, is_open in fds.items() if is_open):
        editor.do("os.close(fd)")
    assert process().do("open(file, 'rb').read()", file=str(file)) == model, f"seed {seed}"


# -- what stat shows -------------------------------------------------------------------------


def test_inode_number_stays_and_mtime_moves_over_versions(file: Path, process: TakeProcess) -> None:
    look = "s = os.stat(file); (s.st_ino, s.st_mtime_ns, s.st_size)"
    seen = []
    for size in (10, 5000, 100):
        writer, reader = process(), process()
        writer.do("open(file, 'wb').write(b'x' * size)", file=str(file), size=size)
        seen.append(reader.do(look, file=str(file)))
    inodes, mtimes, sizes = zip(*seen, strict=True)
    assert len(set(inodes)) == 1
    assert list(mtimes) == sorted(mtimes)
    assert mtimes[0] < mtimes[2]
    assert sizes == (10, 5000, 100)


@pytest.mark.parametrize("flags", ["O_WRONLY | os.O_TRUNC", "O_RDWR", "O_WRONLY | os.O_APPEND"])
def test_stat_of_every_hard_link_is_right_once_close_returned(
    folder: Path, reader: Process, writer: Process, flags: str
) -> None:
    look = "[os.stat(name).st_size for name in names]"
    for number in range(30):
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


# -- what the mount says of versions ---------------------------------------------------------


@pytest.mark.beyond_posix
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


@pytest.mark.beyond_posix
def test_own_attributes_are_not_listed_and_cannot_be_set(file: Path) -> None:
    file.write_bytes(b"x")
    assert not [name for name in os.listxattr(file) if "irdmafs" in name]
    with pytest.raises(OSError):
        os.setxattr(file, "user.irdmafs.version", b"7")


@pytest.mark.beyond_posix
def test_unchanged_files_publish_nothing(file: Path, process: TakeProcess) -> None:
    file.write_bytes(pattern(1, 100_000))
    before = os.getxattr(file, "user.irdmafs.version"), os.stat(file).st_mtime_ns
    process().do("f = open(file, 'r+b'); f.read(); f.close()", file=str(file))
    process().do("f = open(file, 'ab'); f.close()", file=str(file))
    assert (os.getxattr(file, "user.irdmafs.version"), os.stat(file).st_mtime_ns) == before


@pytest.mark.beyond_posix
def test_memory_of_old_versions_is_given_back(mount: Mount, folder: Path, reader: Process) -> None:
    file, size = folder / "weights", 8 << 20
    file.write_bytes(bytes(size))
    before = {extent.name for extent in mount.extents()}
    reader.do(
        "f = open(file, 'rb'); m = mmap.mmap(f.fileno(), 0, prot=1); f.close()", file=str(file)
    )
    for _ in range(5):
        file.write_bytes(bytes(size))
    assert len(mount.extents()) <= len(before) + 1
    reader.do("m.close()")
    os.unlink(file)
    eventually(lambda: len(mount.extents()) == len(before) - 1, "its extents are removed")


# -- sparse files, space, copies -------------------------------------------------------------


@pytest.mark.kernel_session("libfuse 3.14's FUSE_LSEEK is not in pyfuse3")
def test_holes_stay_holes(folder: Path, process: TakeProcess) -> None:
    file, hole = folder / "sparse", 64 << 20
    with open(file, "wb") as f:
        f.write(b"a" * 4096)
        f.seek(hole)
        f.write(b"b" * 4096)
    map_holes = """
fd = os.open(file, os.O_RDONLY)
first = os.lseek(fd, 0, os.SEEK_HOLE)
(os.lseek(fd, 0, os.SEEK_DATA), first, os.lseek(fd, first, os.SEEK_DATA), os.stat(file).st_blocks)
"""
    *found, blocks = process().do(map_holes, file=str(file))
    assert found[0] == 0
    assert 4096 <= found[1] <= 2 << 20, "a huge page at most"
    assert hole - (2 << 20) <= found[2] <= hole
    assert blocks * 512 < hole
    with open(file, "r+b") as f:
        f.write(b"edited")
    *found, blocks = process().do(map_holes, file=str(file))
    assert hole - (2 << 20) <= found[2] <= hole, "an edit in place filled the hole"
    assert blocks * 512 < hole
    fd = os.open(file, os.O_RDONLY)
    with fails_with(errno.ENXIO):
        os.lseek(fd, hole + 4096, os.SEEK_DATA)
    os.close(fd)


@pytest.mark.parametrize("mode", ["wb", "r+b"])
@pytest.mark.kernel_session("fallocate is not in pyfuse3")
def test_fallocate(file: Path, process: TakeProcess, mode: str) -> None:
    file.write_bytes(b"")
    with open(file, mode, buffering=0) as f:
        fd = f.fileno()
        fallocate(fd, 0, 0, 100_000)
        assert os.fstat(fd).st_size == 100_000
        assert os.fstat(fd).st_blocks * 512 >= 100_000
        fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, 500_000)
        assert os.fstat(fd).st_size == 100_000
        os.pwrite(fd, b"x" * 100_000, 0)
        fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 8192, 4096)
        with fails_with(errno.EOPNOTSUPP, errno.EINVAL):
            fallocate(fd, FALLOC_FL_COLLAPSE_RANGE, 0, 4096)
        with fails_with(errno.EINVAL):
            fallocate(fd, 0, 0, 0)
    expected = bytearray(b"x" * 100_000)
    expected[8192:12288] = bytes(4096)
    assert process().do("open(file, 'rb').read()", file=str(file)) == expected
