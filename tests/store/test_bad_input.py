"""Full stores, damaged stores, senseless arguments: an errno or one clear line, and nothing lost."""

import contextlib
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.errors import fails_with
from harness.mountpoint import Mount, eventually
from harness.patterns import pattern, version_of
from harness.processes import Process, TakeProcess

NewMount = Callable[..., Mount]
MIB = 1 << 20


# -- a full store ----------------------------------------------------------------------------


@pytest.mark.parametrize("closes", [False, True])
def test_full_store_fails_the_write_and_keeps_the_old_version(
    new_mount: NewMount, writer: Process, closes: bool
) -> None:
    """The writer closes the file after that, or is killed."""
    mount = new_mount(store_size="32m")
    file = mount.path / "weights"
    file.write_bytes(pattern(1, 10 * MIB))
    writer.do("f, written = open(file, 'wb', buffering=0), 0", file=str(file))
    with fails_with(errno.ENOSPC):
        writer.do("while True: written += f.write(bytes(1 << 20))")
    assert 14 * MIB < writer.do("written") < 22 * MIB
    assert version_of(file.read_bytes()) == 1
    assert os.stat(file).st_size == 10 * MIB
    if closes:
        with contextlib.suppress(OSError):  # the kernel session tells of it once more
            writer.do("f.close()")
    else:
        writer.kill()
    assert version_of(file.read_bytes()) == 1
    eventually(lambda: os.statvfs(mount.path).f_bavail * 4096 > 14 * MIB, "its space is free again")
    file.write_bytes(pattern(2, 10 * MIB))
    assert version_of(file.read_bytes()) == 2


@pytest.mark.kernel_session("decided below the sessions")
def test_names_can_be_removed_on_a_full_store(new_mount: NewMount) -> None:
    mount = new_mount(store_size="32m")
    for number in range(20):
        (mount.path / f"small{number}").write_bytes(pattern(number, 8192))
    # Published, so that few small files are needed for the rest.
    (mount.path / "medium").write_bytes(bytes(24 * MIB))
    with fails_with(errno.ENOSPC), (mount.path / "large").open("ab", buffering=0) as large:
        while True:
            large.write(bytes(MIB))
    with fails_with(errno.ENOSPC):
        for number in range(100_000):
            (mount.path / f"more{number}").write_bytes(bytes(4096))
    for number in range(20):
        assert version_of((mount.path / f"small{number}").read_bytes()) == number
    for name in os.listdir(mount.path):
        os.unlink(mount.path / name)
    assert os.listdir(mount.path) == []
    eventually(lambda: os.statvfs(mount.path).f_bavail * 4096 > 24 * MIB, "its space is free again")
    (mount.path / "after").write_bytes(pattern(3, 16 * MIB))
    mount.restart()
    assert version_of((mount.path / "after").read_bytes()) == 3


def test_a_new_file_that_does_not_fit_is_left_cut(new_mount: NewMount, writer: Process) -> None:
    mount = new_mount(store_size="32m")
    file = mount.path / "weights"
    writer.do("fd = os.open(file, os.O_WRONLY | os.O_CREAT); done = 0", file=str(file))
    with fails_with(errno.ENOSPC):
        writer.do("while True: done += os.write(fd, bytes(1 << 20))")
    done = writer.do("os.close(fd); done")
    assert file.stat().st_size == done > 16 * MIB


def test_sparse_file_larger_than_the_store_can_be_edited_in_place(new_mount: NewMount) -> None:
    file, size = new_mount(store_size="32m").path / "sparse", 1 << 40
    file.touch()
    os.truncate(file, size)
    with file.open("r+b", buffering=0) as editor:
        os.pwrite(editor.fileno(), b"end", size - 3)
        os.fsync(editor)
        editor.write(b"begin")
    with file.open("rb") as reader:
        assert (reader.read(5), reader.seek(-3, 2), reader.read()) == (b"begin", size - 3, b"end")
    assert file.stat().st_size == size


def test_a_file_is_emptied_in_a_full_store_which_is_unmounted_in_order(new_mount: NewMount) -> None:
    mount = new_mount(store_size="24m")
    small = [mount.path / f"small{number}" for number in range(50)]
    for path in small:
        path.write_text("a")
        os.utime(path, (0, 0))
    with contextlib.suppress(OSError), (mount.path / "large").open("wb") as large:
        while True:
            large.write(bytes(MIB))
    with fails_with(errno.ENOSPC):
        for number in range(100_000):
            (mount.path / f"{number:0200}").mkdir()
    for path in small:
        assert path.read_text() == "a"
    (mount.path / "large").write_bytes(b"")
    assert (mount.path / "large").stat().st_size == 0
    mount.unmount()
    assert "Traceback" not in mount.log_tail()
    assert "unmounted" in mount.log_tail()


@pytest.mark.kernel_session("pyfuse3 reports a refused write by write(2) alone")
def test_versions_stay_whoever_makes_room_after_a_refused_write(new_mount: NewMount) -> None:
    top = new_mount(store_size="24m").path
    other, path, another = (top / name for name in ("other", "file", "another"))
    another.write_bytes(b"before")
    for make_room in ("unlink(other)", "truncate(other, 0)", "close(reader)", "close(refused)"):
        other.write_bytes(bytes(MIB))
        path.write_bytes(bytes(MIB))
        reader = os.open(path, os.O_RDONLY)
        refused, writer = (os.open(name, os.O_WRONLY | os.O_TRUNC) for name in (another, path))
        path.write_bytes(b"newer")
        os.write(refused, bytes(MIB))
        for full in (writer, refused):
            with fails_with(errno.ENOSPC):
                while True:
                    os.write(full, bytes(MIB))
        with contextlib.suppress(OSError):
            names = {"other": other, "reader": reader, "refused": refused}
            eval(f"os.{make_room}", {"os": os}, names)
        eventually(lambda: os.statvfs(top).f_bavail > 0, "there is room")
        for call in (os.fsync, os.close):
            with fails_with(errno.ENOSPC):
                call(writer)
        with contextlib.suppress(OSError):
            os.close(refused)
        assert (path.read_bytes(), another.read_bytes()) == (b"newer", b"before")


def test_a_version_stays_after_a_refused_write_though_the_clock_went_back(
    new_mount: NewMount,
) -> None:
    top = new_mount(store_size="24m").path
    (top / "other").write_bytes(bytes(MIB))
    (top / "file").write_bytes(b"before")
    fd = os.open(top / "file", os.O_WRONLY | os.O_TRUNC)
    # As if it had been begun by a clock that was set back since.
    os.utime(fd, (time.time() + 3600, time.time() + 3600))
    with fails_with(errno.ENOSPC):
        while True:
            os.write(fd, bytes(MIB))
    os.unlink(top / "other")
    with fails_with(errno.ENOSPC):
        os.close(fd)
    assert (top / "file").read_bytes() == b"before"


def test_a_file_without_room_for_its_content_gets_no_name(new_mount: NewMount) -> None:
    path = new_mount(store_size="24m,nr_inodes=16").path
    written = 0
    with fails_with(errno.ENOSPC):
        for written in range(16):
            (path / f"{written}").write_text("a")
    assert len(os.listdir(path)) == written
    (path / "0").unlink()
    eventually(lambda: os.statvfs(path).f_ffree > 0, "its inode is freed")
    (path / "0").write_text("a")


@pytest.mark.kernel_session("pyfuse3 does not hand fallocate on")
def test_room_that_is_not_there_is_not_reserved(new_mount: NewMount) -> None:
    path = new_mount(store_size="24m").path / "file"
    with path.open("wb") as file:
        with fails_with(errno.ENOSPC):
            os.posix_fallocate(file.fileno(), 0, 32 << 20)
        os.posix_fallocate(file.fileno(), 0, 4 << 20)
    assert path.stat().st_size == 4 << 20
    with path.open("wb") as file, fails_with(errno.ENOSPC):
        os.posix_fallocate(file.fileno(), 0, 32 << 20)
    assert path.stat().st_size == 0


# -- a damaged store -------------------------------------------------------------------------


@pytest.mark.kernel_session("decided below the sessions")
def test_damaged_namespace_refuses_to_mount_with_one_line(own_mount: Mount) -> None:
    for number in range(200):
        (own_mount.path / f"file{number}").write_bytes(b"x")
    own_mount.unmount()
    extents = sorted(own_mount.extents())
    names = own_mount.store / "names"
    names.write_bytes(names.read_bytes()[:4096] + b"\xa5" * (names.stat().st_size - 4096))
    done = own_mount.try_mount()
    assert done.returncode == 1, done
    [line] = done.stderr.splitlines()
    assert str(own_mount.store) in line, "it must say what is damaged"
    assert not own_mount.is_mounted()
    assert sorted(own_mount.extents()) == extents, "the contents must stay for whoever repairs it"


@pytest.mark.kernel_session("decided below the sessions")
def test_missing_extent_is_error_of_that_file_only(own_mount: Mount, process: TakeProcess) -> None:
    (own_mount.path / "good").write_bytes(pattern(1, 10_000))
    before = set(own_mount.extents())
    (own_mount.path / "bad").write_bytes(pattern(2, 10_000))
    (lost,) = set(own_mount.extents()) - before
    own_mount.unmount()
    lost.unlink()
    own_mount.remount()
    for mode in ("rb", "r+b"):
        with fails_with(errno.EIO):
            process().do("open(file, mode).read()", file=str(own_mount.path / "bad"), mode=mode)
    assert "missing" in own_mount.log_tail(), "the log must say why"
    assert version_of((own_mount.path / "good").read_bytes()) == 1
    (own_mount.path / "bad").write_bytes(pattern(3, 10_000))
    assert version_of((own_mount.path / "bad").read_bytes()) == 3
    os.unlink(own_mount.path / "bad")


# -- senseless arguments ---------------------------------------------------------------------


def test_huge_sizes_work_or_are_refused_cleanly(file: Path, process: TakeProcess) -> None:
    for size in (2**40, 2**62, 2**63 - 1):
        file.write_bytes(b"content")
        try:
            os.truncate(file, size)
        except OSError as error:
            assert error.errno in (errno.EFBIG, errno.EINVAL, errno.ENOSPC)
            size = 7
        look = "f = open(file, 'rb'); (os.stat(file).st_size, f.read(7), f.seek(0, 2))"
        assert process().do(look, file=str(file)) == (size, b"content", size)
    file.write_bytes(b"small again")
    assert file.read_bytes() == b"small again"


def test_file_size_limit_of_a_process_is_kept(file: Path) -> None:
    with Process() as limited:
        limited.do(f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({MIB}, {MIB}))")
        for mode in ("wb", "r+b", "ab"):
            file.write_bytes(b"")
            limited.do("f = open(file, mode, buffering=0)", file=str(file), mode=mode)
            assert limited.do("f.write(b'x' * 1_000_000)") == 1_000_000, mode
            assert limited.do("f.write(b'x' * 1_000_000)") == MIB - 1_000_000, mode
            with fails_with(errno.EFBIG):
                limited.do("f.write(b'x')")
            limited.do("f.close()")
            assert file.read_bytes() == b"x" * MIB, mode


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_read_only_mount_refuses_changes(own_mount: Mount) -> None:
    (own_mount.path / "file").write_bytes(b"x")
    own_mount.unmount()
    own_mount.arguments = ("-o", "ro")
    own_mount.remount()
    assert (own_mount.path / "file").read_bytes() == b"x"
    for change in (
        lambda: (own_mount.path / "file").write_bytes(b"y"),
        lambda: (own_mount.path / "new").write_bytes(b"y"),
        lambda: (own_mount.path / "file").unlink(),
        lambda: os.utime(own_mount.path / "file"),
    ):
        with fails_with(errno.EROFS):
            change()
