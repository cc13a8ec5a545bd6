"""Locks between processes: fcntl ranges, flock, and what wakes or frees a waiter."""

import errno
from fcntl import F_RDLCK
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness.cluster_mount import CLUSTER
from harness.errors import fails_with
from harness.mountpoint import Mount, eventually
from harness.processes import TRY_LOCKS, Process, TakeProcess
from harness.scenarios import AsOnTmpfs

from irdmafs.posix.lock_tables import LAST_BYTE, Lock
from irdmafs.posix.locking import Locking

# With pyfuse3 the kernel keeps locks, which test_as_tmpfs_does.py tries.
SESSIONS = ("kernel", CLUSTER)


def openers(file: Path, process: TakeProcess, count: int = 2) -> list[Process]:
    """Processes that have the file open for reading and writing as `fd`."""
    file.write_bytes(b"x" * 1000)
    found = [process() for _ in range(count)]
    for one in found:
        one.do("fd = os.open(file, os.O_RDWR)\n" + TRY_LOCKS, file=str(file))
    return found


SCENARIOS = {
    "ranges exclude each other where they overlap": """
        one: fcntl.lockf(fd, fcntl.LOCK_EX, 100, 100)
        two: try_lock(fd, fcntl.LOCK_EX, 0, 100)
        two: try_lock(fd, fcntl.LOCK_EX, 199, 1)
        two: try_lock(fd, fcntl.LOCK_SH, 50, 100)
        two: try_lock(fd, fcntl.LOCK_SH, 200, 0)
        one: try_lock(fd, fcntl.LOCK_SH, 200, 0)
        one: try_lock(fd, fcntl.LOCK_EX, 300, 1)
        one: fcntl.lockf(fd, fcntl.LOCK_UN, 50, 120)
        two: try_lock(fd, fcntl.LOCK_EX, 120, 50)
        two: try_lock(fd, fcntl.LOCK_EX, 119, 1)
        two: try_lock(fd, fcntl.LOCK_EX, 170, 1)
    """,
    "closing any descriptor of a file frees the ranges of the process": """
        one: fcntl.lockf(fd, fcntl.LOCK_EX); os.close(open_fd('file', os.O_RDONLY))
        two: try_lock(fd, fcntl.LOCK_EX, 0, 0)
    """,
    "closing a reader that was opened before frees the ranges of a file that gets locked": """
        one: fcntl.lockf(fd, fcntl.LOCK_EX); fcntl.lockf(fd, fcntl.LOCK_UN)
        one: reader = open_fd('file', os.O_RDONLY); fcntl.lockf(fd, fcntl.LOCK_EX)
        two: try_lock(fd, fcntl.LOCK_EX, 0, 0)
        one: os.close(reader)
        two: try_lock(fd, fcntl.LOCK_EX, 0, 0)
    """,
    **{
        f"a shared {lock} of a read-only descriptor ends with it": f"""
            one: reader = open_fd('file', os.O_RDONLY); os.close(fd)
            one: fcntl.{lock}(reader, fcntl.LOCK_SH)
            two: fcntl.{lock}(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            one: os.close(reader)
            two: fcntl.{lock}(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        """
        for lock in ("lockf", "flock")
    },
    "ranges outlive a child that inherited their descriptors": """
        one: fcntl.lockf(fd, fcntl.LOCK_EX); until, end = os.pipe()
        one: child = os.fork() or (os.close(end), os.read(until, 1), os._exit(0))
        one: os.close(fd); fd = open_fd('file'); fcntl.lockf(fd, fcntl.LOCK_EX)
        one: os.close(end); os.waitpid(child, 0)[1]
        two: try_lock(fd, fcntl.LOCK_EX, 0, 0)
    """,
    "locks hold across versions": """
        one: fcntl.flock(fd, fcntl.LOCK_EX); fcntl.lockf(fd, fcntl.LOCK_EX)
        two: write('file', 'a new version'); os.close(fd); fd = open_fd('file')
        two: try_flock(fd, fcntl.LOCK_EX), try_lock(fd, fcntl.LOCK_EX, 0, 1)
    """,
    "flock is shared or exclusive": """
        one: fcntl.flock(fd, fcntl.LOCK_SH)
        two: try_flock(fd, fcntl.LOCK_SH)
        three: try_flock(fd, fcntl.LOCK_EX)
        one: os.close(fd)
        three: try_flock(fd, fcntl.LOCK_EX)
        two: fcntl.flock(fd, fcntl.LOCK_UN)
        three: try_flock(fd, fcntl.LOCK_EX)
    """,
    "flock belongs to the open file and not to the process": """
        one: other = open_fd('file'); fcntl.flock(fd, fcntl.LOCK_EX); copy = os.dup(fd)
        one: try_flock(other, fcntl.LOCK_EX)
        one: os.close(fd)
        one: try_flock(other, fcntl.LOCK_EX)
        one: os.close(copy)
        one: try_flock(other, fcntl.LOCK_EX)
    """,
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_locks_do_as_on_a_tmpfs(as_on_tmpfs: AsOnTmpfs, scenario: str) -> None:
    begin = "fd = open_fd('file', os.O_RDWR | os.O_CREAT)\n"
    as_on_tmpfs(SCENARIOS[scenario], begin + TRY_LOCKS)


def test_query_names_the_holder(folder: Path, process: TakeProcess) -> None:
    one, two = openers(folder / "file", process)
    one.do("fcntl.lockf(fd, fcntl.LOCK_EX, 100, 100)")
    kind, _, start, length, holder = two.do("query(fd, fcntl.F_WRLCK)")
    assert (start, length, holder) == (100, 100, one.pid)
    assert kind == two.do("fcntl.F_WRLCK")
    one.do("fcntl.lockf(fd, fcntl.LOCK_UN)")
    assert two.do("query(fd, fcntl.F_WRLCK)")[0] == two.do("fcntl.F_UNLCK")


@pytest.mark.parametrize("lock", ["lockf", "flock"])
def test_lock_is_free_when_holder_is_killed(folder: Path, process: TakeProcess, lock: str) -> None:
    (waiter,) = openers(folder / "file", process, 1)
    with Process() as holder:
        holder.do("fd = os.open(file, os.O_RDWR)", file=str(folder / "file"))
        holder.do("getattr(fcntl, lock)(fd, fcntl.LOCK_EX)", lock=lock)
        waiter.start("getattr(fcntl, lock)(fd, fcntl.LOCK_EX); 'mine'", lock=lock)
        assert not waiter.finished(within_s=0.2)
        holder.kill()
        assert waiter.result() == "mine"


def test_status_counts_the_locks_held(mount: Mount, folder: Path, process: TakeProcess) -> None:
    eventually(lambda: mount.status()["locks"] == 0, "locks of tests before are released")
    (one,) = openers(folder / "file", process, 1)
    one.do("fcntl.flock(fd, fcntl.LOCK_EX)")
    one.do("fcntl.lockf(fd, fcntl.LOCK_EX, 1, 0); fcntl.lockf(fd, fcntl.LOCK_SH, 1, 5)")
    assert mount.status()["locks"] == 3


def test_what_a_process_lost_is_nothing_to_the_next_one_of_its_number() -> None:
    """A close that the kernel does not report, of a file that was opened for reading, tells it nothing."""
    store = SimpleNamespace(
        locks=SimpleNamespace(holders=[]), namespace=SimpleNamespace(describe=str)
    )
    locking = Locking("cluster", store, None, None)  # type: ignore[arg-type]
    with Process() as holder:
        locking.flocks.acquire(7, 1, Lock(F_RDLCK, 0, LAST_BYTE, holder.pid))
        locking.lost()
        with fails_with(errno.EIO):
            locking.check(holder.pid)
        holder.kill()
        locking.check(holder.pid)
    assert not locking.lost_by
