"""A mount does what a tmpfs does: the same steps of several processes on both, every answer compared.

differences.py lists what may differ. `python tests/harness/differential/command.py --help` is the long run.
"""

import ctypes
import fcntl
import mmap
import os
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import SESSIONS as _SESSIONS
from harness.cluster_mount import CLUSTER
from harness.differential.command import (
    Difference,
    Pair,
    compare,
    difference,
    loaded,
    programs,
    saved,
    shrink,
    tmpfs_directory,
)
from harness.differential.differences import REFUSED, Leniency
from harness.differential.sides import Normal
from harness.differential.steps import Vocabulary
from harness.mountpoint import Mount, run_checked
from harness.processes import Process, TakeProcess

SESSIONS = (*_SESSIONS, CLUSTER)
PROGRAMS_AT_ONCE = 10
STEPS = 400
OFD_GETLK = 36
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_int64)


@pytest.fixture
def reference() -> Iterator[Path]:
    """An empty directory on a tmpfs."""
    with tmpfs_directory() as path:
        yield path


def _compare(
    session: str, mount: Mount, reference: Path, *, isolated: bool, seed: int, steps: int
) -> None:
    leniency = Leniency(session, isolated=isolated)
    vocabulary = Vocabulary(REFUSED.get(session, frozenset()))
    with Pair([mount.path], reference, leniency) as pair:
        compare(pair, vocabulary, seed, steps)


def test_mount_does_what_a_tmpfs_does(session: str, mount: Mount, reference: Path) -> None:
    _compare(session, mount, reference, isolated=True, seed=1, steps=STEPS)


@pytest.mark.kernel_session("isolation is below the sessions")
def test_mount_without_isolation_does_what_a_tmpfs_does(
    session: str, new_mount: Callable[..., Mount], reference: Path
) -> None:
    with new_mount("-o", "allow_other,isolation=off") as mount:
        _compare(session, mount, reference, isolated=False, seed=2, steps=STEPS // 2)


def test_portable_session_refuses_what_pyfuse3_does_not_hand_on(session: str, folder: Path) -> None:
    if session != "pyfuse3":
        pytest.skip("the other sessions do not refuse it")
    with pytest.raises(AssertionError, match="not supported"):
        run_checked("fallocate", "--length", "10", folder / "file")
    with pytest.raises(OSError, match="not supported"):
        os.open(folder, os.O_TMPFILE | os.O_RDWR)


@pytest.mark.kernel_session("pyfuse3 does not ask us about locks")
def test_lock_in_the_way_is_told_by_its_range_whatever_its_kind(
    file: Path, process: TakeProcess
) -> None:
    file.touch()
    holder = process()
    holder.do("f = open(file, 'r+b'); fcntl.lockf(f, fcntl.LOCK_EX, 7, 10)", file=str(file))
    asked = struct.pack("hhqqixxxx", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    with file.open("r+b") as own:
        answer = fcntl.fcntl(own, OFD_GETLK, asked)
    assert struct.unpack("hhqqixxxx", answer)[:4] == (fcntl.F_WRLCK, os.SEEK_SET, 10, 7)


def test_map_of_a_file_that_is_emptied_can_still_be_read(
    session: str, file: Path, reader: Process
) -> None:
    if session != CLUSTER:
        pytest.skip("elsewhere the mapping loses its pages, as POSIX says")
    file.write_bytes(b"content")
    reader.do(
        "f = open(file, 'rb'); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); f.close()",
        file=str(file),
    )
    os.close(os.open(file, os.O_RDONLY | os.O_TRUNC))
    assert reader.do("m[:]") == b"content"
    assert file.read_bytes() == b""


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


def test_two_directories_of_a_tmpfs_do_not_differ(reference: Path) -> None:
    with tmpfs_directory() as other, Pair([other], reference, Leniency("plain")) as pair:
        for _, program in zip(range(PROGRAMS_AT_ONCE), programs(1, Vocabulary()), strict=False):
            pair.run(program)
        assert pair.steps > 10 * PROGRAMS_AT_ONCE


def test_a_difference_is_found_and_shrunk_to_the_steps_that_make_it(
    reference: Path, tmp_path: Path
) -> None:
    """A tmpfs that is full after 64 KiB is the one that differs."""
    run_checked("mount", "-t", "tmpfs", "-o", "size=64k", "none", tmp_path)
    try:
        with Pair([tmp_path], reference, Leniency("plain"), times=False) as pair:
            for program in programs(1, Vocabulary(frozenset({"fork", "exec"}))):
                if difference(pair, program):
                    break
            short = shrink(program, lambda shorter: difference(pair, shorter))
            with pytest.raises(Difference, match=r"ENOSPC|size|65536"):
                pair.run(short)
    finally:
        run_checked("umount", "-l", tmp_path)
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
