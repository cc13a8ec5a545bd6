"""A mount does what a tmpfs does: the same steps of several processes on both, every answer compared.

differences.py lists what may differ. `python tests/harness/differential/command.py --help` is the long run.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import EVERYWHERE
from harness.closing import descriptor
from harness.differential.command import (
    Difference,
    Pair,
    compare,
    difference,
    loaded,
    mounts_of,
    programs,
    saved,
    shrink,
)
from harness.differential.differences import REFUSED, Leniency
from harness.differential.hosts import LEFT_OUT
from harness.differential.sides import Normal
from harness.differential.steps import Vocabulary
from harness.errors import error_of
from harness.mountpoint import Mount
from harness.network import CommandFailed
from harness.network import run as run_checked
from harness.processes import TakeProcess
from harness.scratch import mounted_on

SESSIONS = EVERYWHERE
STEPS = 400
SHOWN = pytest.mark.kernel_session("the kernel session shows it")
OFD_GETLK = 36
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_int64)


def _compare(
    session: str, mount: Mount, tmpfs: Path, *, isolated: bool, seed: int, steps: int
) -> None:
    leniency = Leniency(session, isolated=isolated)
    vocabulary = Vocabulary(REFUSED.get(session, frozenset()))
    with Pair([mount.path], tmpfs, leniency) as pair:
        compare(pair, vocabulary, seed, steps)


def test_mount_does_what_a_tmpfs_does(session: str, mount: Mount, tmpfs: Path) -> None:
    _compare(session, mount, tmpfs, isolated=True, seed=1, steps=STEPS)


@pytest.mark.kernel_session("isolation is below the sessions")
def test_mount_without_isolation_does_what_a_tmpfs_does(
    session: str, new_mount: Callable[..., Mount], tmpfs: Path
) -> None:
    with new_mount("-o", "allow_other,isolation=off") as mount:
        _compare(session, mount, tmpfs, isolated=False, seed=2, steps=STEPS // 2)


def test_portable_session_refuses_what_pyfuse3_does_not_hand_on(session: str, folder: Path) -> None:
    if session != "pyfuse3":
        pytest.skip("the other sessions do not refuse it")
    with pytest.raises(CommandFailed, match="not supported"):
        run_checked("fallocate", "--length", "10", folder / "file")
    with pytest.raises(OSError, match="not supported"):
        os.open(folder, os.O_TMPFILE | os.O_RDWR)


@pytest.mark.kernel_session("pyfuse3 does not ask us about locks")
def test_lock_in_the_way_is_told_by_range_of_any_kind(file: Path, process: TakeProcess) -> None:
    file.touch()
    holder = process()
    holder.do("f = open(file, 'r+b'); fcntl.lockf(f, fcntl.LOCK_EX, 7, 10)", file=str(file))
    asked = struct.pack("hhqqixxxx", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    with file.open("r+b") as own:
        answer = fcntl.fcntl(own, OFD_GETLK, asked)
    assert struct.unpack("hhqqixxxx", answer)[:4] == (fcntl.F_WRLCK, os.SEEK_SET, 10, 7)


def _map(fd: int) -> int:
    """Map a page of a file to share it, without the duplicate that Python's mmap keeps."""
    address = _libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    assert address not in (None, ctypes.c_void_p(-1).value)
    return int(address)


@pytest.mark.kernel_session("with pyfuse3 the kernel keeps locks and maps")
def test_flock_ends_with_the_last_descriptor_whatever_is_mapped(file: Path) -> None:
    file.write_bytes(b"content")
    with file.open("r+b") as holder, file.open("rb") as other:
        address = _map(holder.fileno())
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        holder.close()
        fcntl.flock(other, fcntl.LOCK_EX)  # nobody unlocks it
    _libc.munmap(address, mmap.PAGESIZE)


@pytest.mark.kernel_session("with pyfuse3 maps are the kernel's")
def test_map_without_a_descriptor_keeps_its_extent(file: Path) -> None:
    file.write_bytes(b"content")
    with file.open("rb") as opened:
        address = _map(opened.fileno())
    os.truncate(file, 0)
    file.write_bytes(b"another")
    assert ctypes.string_at(address, 7) == b"content"
    _libc.munmap(address, mmap.PAGESIZE)


def test_a_difference_is_found_and_shrunk_to_few_steps(tmpfs: Path, tmp_path: Path) -> None:
    """A tmpfs that is full after 64 KiB is the one that differs."""
    with (
        mounted_on(tmp_path, "size=64k"),
        Pair([tmp_path], tmpfs, Leniency("plain"), times=False) as pair,
    ):
        for program in programs(1, Vocabulary(frozenset({"fork", "exec"}))):
            if difference(pair, program):
                break
        short = shrink(program, lambda shorter: difference(pair, shorter))
        with pytest.raises(Difference, match=r"ENOSPC|size|65536"):
            pair.run(short)
    assert len(short.steps) <= 4


def test_a_program_that_was_written_down_is_the_same_when_read() -> None:
    program = Vocabulary().program(random.Random(1))
    assert loaded(saved(program)) == program


def test_a_time_that_goes_back_is_told_from_one_that_moves_on() -> None:
    normal = Normal()

    def look(mtime_ns: int, ctime_ns: int) -> object:
        seen = normal.value(("stat", 7, 0o100644, 1, 0, 0, 5, 5, mtime_ns, ctime_ns))
        return seen.get("mtime"), seen.get("ctime")

    now = 10**18
    assert look(now, now) == ("now", None)
    assert look(now, now + 1) == ("same", "later")
    assert look(now + 2, now + 1) == ("later", "same")
    assert look(now + 1, now) == ("EARLIER", "EARLIER")
    assert look(5, now + 1) == (5, "later")


def test_two_hosts_that_take_turns_do_what_a_tmpfs_does(tmpfs: Path) -> None:
    """Close-to-open; harness/differential/hosts.py says what a turn is."""
    with (
        mounts_of("hosts", ()) as (mounts, leniency),
        Pair(mounts, tmpfs, leniency, times=False) as pair,
    ):
        compare(pair, Vocabulary(LEFT_OUT), 3, 500)


# -- what docs/posix.md tells of -----------------------------------------------------------------


def answer(path: Path, call: Callable[[int], object]) -> str:
    with descriptor(os.open(path, os.O_RDONLY)) as fd:
        return error_of(lambda: call(fd))


# linux/fs.h: a file's block on its device, the identity of a filesystem, get and set flags, also with a
# project. linux/fcntl.h: seals of a file.
FIBMAP, FS_IOC_GETFSUUID, F_GET_SEALS = 1, 0x80111500, 1034
FLAGS = {"GETFLAGS": 0x80086601, "SETFLAGS": 0x40086602}
FLAGS |= {"FSGETXATTR": 0x801C581F, "FSSETXATTR": 0x401C5820}


def control(command: int, size: int) -> Callable[[int], object]:
    return lambda fd: fcntl.ioctl(fd, command, bytes(size))


# Calls on a directory, and on an empty file, with the answers of a tmpfs and of a mount.
OTHERWISE: dict[str, tuple[str, Callable[[int], object], str, str]] = {
    "SEEK_DATA": (".", lambda fd: os.lseek(fd, 0, os.SEEK_DATA), "EINVAL", "ENXIO"),
    "SEEK_END": (".", lambda fd: os.lseek(fd, 0, os.SEEK_END), "EINVAL", "ok"),
    "GETFSUUID": (".", control(FS_IOC_GETFSUUID, 17), "ok", "ENOTTY"),
    "FIBMAP": ("file", control(FIBMAP, 4), "EINVAL", "ok"),
    "seals": ("file", lambda fd: fcntl.fcntl(fd, F_GET_SEALS), "ok", "EINVAL"),
    **{
        f"{name} of {path}": (path, control(command, 28), "ok", "ENOTTY")
        for name, command in FLAGS.items()
        for path in (".", "file")
    },
}  # fmt: skip


@SHOWN
@pytest.mark.parametrize("what", OTHERWISE)
def test_calls_that_the_kernel_answers_another_way(folder: Path, tmpfs: Path, what: str) -> None:
    path, call, of_tmpfs, here = OTHERWISE[what]
    for place, expected in ((tmpfs, of_tmpfs), (folder, here)):
        (place / "file").touch()
        assert answer(place / path, call) == expected
        (place / "file").write_bytes(b"x")


@SHOWN
def test_size_of_a_directory_is_told_as_0(folder: Path, tmpfs: Path) -> None:
    for place in (tmpfs, folder):
        (place / "file").touch()
    assert tmpfs.stat().st_size > 0
    assert folder.stat().st_size == 0


RWF_NOAPPEND = 0x20


@SHOWN
def test_write_that_is_not_to_append_appends(folder: Path, tmpfs: Path) -> None:
    for place, expected in ((tmpfs, b"xb"), (folder, b"abx")):
        (place / "file").write_bytes(b"ab")
        with descriptor(os.open(place / "file", os.O_WRONLY | os.O_APPEND)) as fd:
            os.pwritev(fd, [b"x"], 0, RWF_NOAPPEND)
        assert (place / "file").read_bytes() == expected


# linux/fanotify.h
FAN_REPORT_FID, FAN_CREATE, FAN_MARK_ADD, FAN_MARK_FILESYSTEM = 0x200, 0x100, 1, 0x100


@SHOWN
def test_fanotify_tells_names_of_marked_inodes_only(folder: Path, tmpfs: Path) -> None:
    for place, of_filesystem in ((tmpfs, "ok"), (folder, "ENODEV")):
        for what, expected in ((0, "ok"), (FAN_MARK_FILESYSTEM, of_filesystem)):
            fd = _libc.fanotify_init(FAN_REPORT_FID, os.O_RDONLY)
            with descriptor(fd):
                created, path = ctypes.c_uint64(FAN_CREATE), os.fsencode(place)
                done = _libc.fanotify_mark(fd, FAN_MARK_ADD | what, created, -100, path)
                assert ("ok" if done == 0 else errno.errorcode[ctypes.get_errno()]) == expected


@SHOWN
def test_times_are_kept_between_1677_and_2262(folder: Path, tmpfs: Path) -> None:
    found = []
    for file in (tmpfs / "file", folder / "file"):
        file.touch()
        os.utime(file, (-(1 << 40), 1 << 40))
        status = file.stat()
        found.append((status.st_atime_ns, status.st_mtime_ns))
    second_ns = 1_000_000_000
    assert found == [(-(second_ns << 40), second_ns << 40), (-(1 << 63), (1 << 63) - 1)]


def birth(path: Path) -> float:
    return float(run_checked("stat", "--format=%.9W", path))


@SHOWN
def test_time_of_birth_is_told_and_never_changes(own_mount: Mount, process: TakeProcess) -> None:
    file, directory = own_mount.path / "file", own_mount.path / "dir"
    file.write_bytes(b"x")
    directory.mkdir()
    born = [birth(path) for path in (file, directory)]
    made = file.stat().st_mtime
    assert abs(made - born[0]) < 10
    process().do("import time; time.sleep(0.02); open(f, 'wb').write(b'other')", f=str(file))
    os.utime(file, (1, 1))
    os.chmod(file, 0o600)
    os.rename(file, own_mount.path / "moved")
    assert birth(own_mount.path / "moved") == born[0]
    own_mount.restart()
    assert [birth(path) for path in (own_mount.path / "moved", directory)] == born
