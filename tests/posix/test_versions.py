"""Versions in detail: how each way of changing a file publishes, and what stat and xattrs then show."""

import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import SESSIONS as _SESSIONS
from harness.cluster_mount import CLUSTER
from harness.mountpoint import Mount, eventually
from harness.patterns import pattern
from harness.processes import Process

SESSIONS = (*_SESSIONS, CLUSTER)

TakeProcess = Callable[[], Process]
libc = ctypes.CDLL(None, use_errno=True)
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2
FALLOC_FL_ZERO_RANGE, FALLOC_FL_COLLAPSE_RANGE = 16, 8


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    args = (fd, mode, ctypes.c_int64(offset), ctypes.c_int64(length))
    if libc.fallocate(*args) != 0:
        raise OSError(ctypes.get_errno(), "fallocate")


# -- truncating and appending ----------------------------------------------------------------


@pytest.mark.parametrize("opened", [False, True], ids=["truncate", "ftruncate"])
@pytest.mark.parametrize("size", [0, 1, 4096, 10_000, 100_000, 3_000_000])
def test_truncation_shrinks_and_grows_with_zeros(
    folder: Path, process: TakeProcess, opened: bool, size: int
) -> None:
    file, before = folder / "file", pattern(1, 100_000)
    file.write_bytes(before)
    if opened:
        with open(file, "r+b") as f:
            f.truncate(size)
            assert os.fstat(f.fileno()).st_size == size
    else:
        os.truncate(file, size)
    read = "os.stat(file).st_size, open(file, 'rb').read()"
    expected = before[:size].ljust(size, b"\0")
    assert process().do(read, file=str(file)) == (size, expected)
    os.truncate(file, 50)
    os.truncate(file, 5000)
    assert process().do("open(file, 'rb').read()", file=str(file)) == expected[:50].ljust(
        5000, b"\0"
    )


def test_growing_again_after_a_cut_shows_zeros_not_old_bytes(
    folder: Path, process: TakeProcess
) -> None:
    file = folder / "file"
    writer = process()
    writer.do("f = open(file, 'w+b', buffering=0); f.write(b'a' * 10_000)", file=str(file))
    writer.do("f.truncate(100); f.truncate(5000); f.seek(0)")
    assert writer.do("f.read()") == b"a" * 100 + bytes(4900)
    writer.do("f.close()")
    assert process().do("open(file, 'rb').read()", file=str(file)) == b"a" * 100 + bytes(4900)


def test_appends_of_two_processes_lose_nothing(folder: Path, process: TakeProcess) -> None:
    file = folder / "log"
    file.write_bytes(b"")
    append = """
f = open(file, 'ab', buffering=0)
for n in range(200):
    f.write(b'%c%07d\\n' % (letter, n))
f.close()
"""
    writers = [process(), process()]
    for letter, writer in zip(b"ab", writers, strict=True):
        writer.start(append, file=str(file), letter=letter)
    for writer in writers:
        writer.result()
    lines = file.read_bytes().splitlines()
    for name in ("a", "b"):
        expected = [f"{name}{n:07}".encode() for n in range(200)]
        assert [line for line in lines if line[:1] == name.encode()] == expected


def test_appends_one_after_another_by_many_processes(folder: Path, process: TakeProcess) -> None:
    file = folder / "log"
    pair = process(), process()
    for turn in range(50):
        pair[turn % 2].do("open(file, 'a').write(f'{turn}\\n')", file=str(file), turn=turn)
    assert file.read_text().split() == [str(turn) for turn in range(50)]


def test_writing_past_the_end_leaves_zeros_between(folder: Path, process: TakeProcess) -> None:
    for mode in ("wb", "r+b"):
        file = folder / mode
        file.write_bytes(b"start")
        with open(file, mode) as f:
            f.seek(1_000_000)
            f.write(b"end")
        expected = (b"start" if mode == "r+b" else b"").ljust(1_000_000, b"\0") + b"end"
        assert process().do("open(file, 'rb').read()", file=str(file)) == expected


def test_edits_in_place_of_two_processes_add_up(folder: Path, process: TakeProcess) -> None:
    file = folder / "file"
    file.write_bytes(bytes(100_000))
    first, second = process(), process()
    for one in (first, second):
        one.do("fd = os.open(file, os.O_RDWR)", file=str(file))
    first.do("os.pwrite(fd, b'one', 10)")
    second.do("os.pwrite(fd, b'two', 50_000)")
    first.do("os.close(fd)")
    second.do("os.pwrite(fd, b'three', 99_998); os.close(fd)")
    content = process().do("open(file, 'rb').read()", file=str(file))
    assert (content[10:13], content[50_000:50_003], content[99_998:]) == (b"one", b"two", b"three")
    assert len(content) == 100_003


def test_randomly_edited_file_is_what_the_same_edits_make_in_memory(
    folder: Path, process: TakeProcess
) -> None:
    import random

    seed = int(os.environ.get("IRDMAFS_SEED", random.randrange(1 << 30)))
    print(f"IRDMAFS_SEED={seed}")
    rng, file, model = random.Random(seed), folder / "file", bytearray()
    editors = [process() for _ in range(3)]
    file.write_bytes(b"")
    fds: dict[Process, bool] = dict.fromkeys(editors, False)
    for _ in range(400):
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


def test_inode_number_stays_and_mtime_moves_over_versions(
    folder: Path, process: TakeProcess
) -> None:
    file = folder / "weights"
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


@pytest.mark.parametrize("mode", ["wb", "r+b", "ab"])
def test_times_that_a_writer_sets_before_close_stay(
    folder: Path, process: TakeProcess, mode: str
) -> None:
    file = folder / "file"
    file.write_bytes(b"old")
    writer = process()
    writer.do("f = open(file, mode, buffering=0); f.write(b'new')", file=str(file), mode=mode)
    writer.do("os.utime(f.fileno(), ns=(1_000_000_007, 2_000_000_009)); f.close()")
    found = process().do("os.stat(file).st_mtime_ns", file=str(file))
    assert found == 2_000_000_009


def test_mode_that_a_writer_sets_before_close_stays(folder: Path, process: TakeProcess) -> None:
    file = folder / "file"
    writer = process()
    writer.do("f = open(file, 'wb'); f.write(b'x'); os.fchmod(f.fileno(), 0o640)", file=str(file))
    writer.do("os.setxattr(f.fileno(), 'user.dtype', b'int8'); f.close()")
    look = "os.stat(file).st_mode & 0o777, os.getxattr(file, 'user.dtype')"
    assert process().do(look, file=str(file)) == (0o640, b"int8")


@pytest.mark.beyond_posix
def test_reader_of_an_old_version_is_told_its_size(folder: Path, process: TakeProcess) -> None:
    file = folder / "weights"
    file.write_bytes(b"x" * 10_000)
    reader = process()
    reader.do("fd = os.open(file, os.O_RDONLY)", file=str(file))
    file.write_bytes(b"y" * 20)
    assert reader.do("os.fstat(fd).st_size, os.lseek(fd, 0, os.SEEK_END)") == (10_000, 10_000)
    assert reader.do("os.stat(file).st_size", file=str(file)) == 20


@pytest.mark.parametrize("how", ["wb", "r+b", "ab"])
def test_hard_links_show_the_new_version_under_every_name(
    folder: Path, process: TakeProcess, how: str
) -> None:
    (folder / "d").mkdir()
    one, other = folder / "one", folder / "d" / "other"
    one.write_bytes(b"a" * 10_000)
    os.link(one, other)
    reader = process()
    look = "[(os.stat(f).st_size, open(f, 'rb').read()) for f in files]"
    files = [str(one), str(other)]
    assert reader.do(look, files=files) == [(10_000, b"a" * 10_000)] * 2
    for name in (other, one):
        process().do("f = open(f, how); f.write(b'new'); f.close()", f=str(name), how=how)
        found = reader.do(look, files=files)
        assert found[0] == found[1]
        assert b"new" in found[0][1]
        assert found[0][0] == len(found[0][1])


@pytest.mark.parametrize("flags", ["O_WRONLY | os.O_TRUNC", "O_RDWR", "O_WRONLY | os.O_APPEND"])
def test_stat_of_every_hard_link_is_right_once_close_returned(
    folder: Path, process: TakeProcess, flags: str
) -> None:
    reader, writer = process(), process()
    look = "[os.stat(name).st_size for name in names]"
    for number in range(100):
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
    mount: Mount, folder: Path, process: TakeProcess
) -> None:
    file = folder / "weights"
    file.write_bytes(b"1")
    first = int(os.getxattr(file, "user.irdmafs.version"))
    reader, writer = process(), process()
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
def test_own_attributes_are_not_listed_and_cannot_be_set(folder: Path) -> None:
    file = folder / "file"
    file.write_bytes(b"x")
    assert not [name for name in os.listxattr(file) if "irdmafs" in name]
    with pytest.raises(OSError):
        os.setxattr(file, "user.irdmafs.version", b"7")


@pytest.mark.beyond_posix
def test_unchanged_files_publish_nothing(folder: Path, process: TakeProcess) -> None:
    file = folder / "weights"
    file.write_bytes(pattern(1, 100_000))
    before = os.getxattr(file, "user.irdmafs.version"), os.stat(file).st_mtime_ns
    process().do("f = open(file, 'r+b'); f.read(); f.close()", file=str(file))
    process().do("f = open(file, 'ab'); f.close()", file=str(file))
    assert (os.getxattr(file, "user.irdmafs.version"), os.stat(file).st_mtime_ns) == before


def test_a_write_whose_time_is_set_back_is_published(folder: Path, process: TakeProcess) -> None:
    """As rsync --inplace --times leaves it: same size, same time, other bytes."""
    file, size = folder / "weights", 100_000
    file.write_bytes(pattern(1, size))
    before = os.stat(file).st_mtime_ns
    process().do(
        "fd = os.open(file, os.O_WRONLY); os.pwrite(fd, data[:10], 0); os.fsync(fd);"
        "os.utime(fd, ns=(time, time)); os.fsync(fd); os.pwrite(fd, data, 0);"
        "os.utime(fd, ns=(time, time)); os.close(fd)",
        file=str(file),
        data=pattern(2, size),
        time=before,
    )
    assert process().do("open(file, 'rb').read()", file=str(file)) == pattern(2, size)
    assert os.stat(file).st_mtime_ns == before


@pytest.mark.beyond_posix
def test_memory_of_old_versions_is_given_back(
    mount: Mount, folder: Path, process: TakeProcess
) -> None:
    file, size = folder / "weights", 8 << 20
    file.write_bytes(bytes(size))
    before = {extent.name for extent in mount.extents()}
    reader = process()
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
    with pytest.raises(OSError) as caught:
        os.lseek(fd, hole + 4096, os.SEEK_DATA)
    os.close(fd)
    assert caught.value.errno == errno.ENXIO


@pytest.mark.parametrize("mode", ["wb", "r+b"])
@pytest.mark.kernel_session("fallocate is not in pyfuse3")
def test_fallocate(folder: Path, process: TakeProcess, mode: str) -> None:
    file = folder / "file"
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
        with pytest.raises(OSError) as caught:
            fallocate(fd, FALLOC_FL_COLLAPSE_RANGE, 0, 4096)
        assert caught.value.errno in (errno.EOPNOTSUPP, errno.EINVAL)
        with pytest.raises(OSError) as caught:
            fallocate(fd, 0, 0, 0)
        assert caught.value.errno == errno.EINVAL
    expected = bytearray(b"x" * 100_000)
    expected[8192:12288] = bytes(4096)
    assert process().do("open(file, 'rb').read()", file=str(file)) == expected


def test_posix_fallocate_works_everywhere(folder: Path, process: TakeProcess) -> None:
    writer = process()
    writer.do(
        "f = open(file, 'wb'); os.posix_fallocate(f.fileno(), 0, 300_000)", file=str(folder / "f")
    )
    writer.do("f.write(b'x'); f.close()")
    assert process().do("open(file, 'rb').read()", file=str(folder / "f")) == b"x".ljust(
        300_000, b"\0"
    )


@pytest.mark.parametrize("size", [0, 1, 100_000, 8 << 20])
def test_copies_inside_the_kernel(folder: Path, process: TakeProcess, size: int) -> None:
    source, target = folder / "source", folder / "target"
    source.write_bytes(pattern(3, size))
    copy = """
a, b = open(source, 'rb'), open(target, 'wb')
done = 0
while count := os.copy_file_range(a.fileno(), b.fileno(), size + 1, done, done):
    done += count
a.close(); b.close(); done
"""
    paths = {"source": str(source), "target": str(target)}
    assert process().do(copy, size=size, **paths) == size
    assert process().do("open(target, 'rb').read()", **paths) == pattern(3, size)
    copy = "a, b = open(source, 'rb'), open(target, 'wb')\n" + (
        "while os.sendfile(b.fileno(), a.fileno(), None, 1 << 30): pass\na.close(); b.close()"
    )
    process().do(copy, **paths)
    assert process().do("open(target, 'rb').read()", **paths) == pattern(3, size)


def test_copy_within_one_file(folder: Path, process: TakeProcess) -> None:
    file = folder / "file"
    file.write_bytes(b"abcdef" + bytes(10_000))
    copy = (
        "f = open(file, 'r+b'); os.copy_file_range(f.fileno(), f.fileno(), 3, 0, 9_000); f.close()"
    )
    process().do(copy, file=str(file))
    assert process().do("open(file, 'rb').read()", file=str(file))[9_000:9_004] == b"abc\0"


def test_vectored_and_direct_io(folder: Path, process: TakeProcess) -> None:
    file = folder / "file"
    step = """
fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
page = mmap.mmap(-1, 8192)
page[:] = pattern(5, 8192)
os.pwrite(fd, page, 0)
os.pwritev(fd, [page, page], 8192)
back = mmap.mmap(-1, 8192)
os.preadv(fd, [back], 16384)
os.close(fd)
bytes(back)
"""
    try:
        assert process().do(step, file=str(file)) == pattern(5, 8192)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        pytest.skip("this filesystem has no O_DIRECT, as older tmpfs")
    assert process().do("open(file, 'rb').read()", file=str(file)) == pattern(5, 8192) * 3
