"""Locks between processes: fcntl ranges, flock, and what wakes or frees a waiter."""

import errno
import signal
from pathlib import Path

import pytest
from harness.cluster_mount import CLUSTER
from harness.mountpoint import Mount
from harness.processes import Process, TakeProcess
from harness.scenarios import AsOnTmpfs

# With pyfuse3 the kernel keeps locks, which test_as_tmpfs_does.py tries.
SESSIONS = ("kernel", CLUSTER)

TRY_RANGE = """
def try_lock(fd, kind, start, length):
    try:
        fcntl.lockf(fd, kind | fcntl.LOCK_NB, length, start)
        return True
    except (BlockingIOError, PermissionError):
        return False
"""
TRY_FLOCK = """
def try_flock(fd, kind):
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
"""


def openers(file: Path, process: TakeProcess, count: int = 2) -> list[Process]:
    """Processes that have the file open for reading and writing as `fd`."""
    file.write_bytes(b"x" * 1000)
    found = [process() for _ in range(count)]
    for one in found:
        one.do("fd = os.open(file, os.O_RDWR)\n" + TRY_RANGE + TRY_FLOCK, file=str(file))
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
    as_on_tmpfs(SCENARIOS[scenario], begin + TRY_RANGE + TRY_FLOCK)


def test_query_names_the_holder(folder: Path, process: TakeProcess) -> None:
    one, two = openers(folder / "file", process)
    one.do("fcntl.lockf(fd, fcntl.LOCK_EX, 100, 100)")
    query = """
import struct
request = struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, 0, 0, 0)
struct.unpack('hhqqi4x', fcntl.fcntl(fd, fcntl.F_GETLK, request))
"""
    kind, _, start, length, holder = two.do(query)
    assert (start, length, holder) == (100, 100, one.pid)
    assert kind == two.do("fcntl.F_WRLCK")
    one.do("fcntl.lockf(fd, fcntl.LOCK_UN)")
    assert two.do(query)[0] == two.do("fcntl.F_UNLCK")


def test_waiter_is_woken_when_the_range_is_unlocked(folder: Path, process: TakeProcess) -> None:
    one, two = openers(folder / "file", process)
    one.do("fcntl.lockf(fd, fcntl.LOCK_EX)")
    two.start("fcntl.lockf(fd, fcntl.LOCK_EX); os.pread(fd, 3, 0)")
    assert not two.finished(within_s=0.2)
    one.do("os.pwrite(fd, b'one', 0); fcntl.lockf(fd, fcntl.LOCK_UN)")
    assert two.result() == b"one"


@pytest.mark.parametrize("lock", ["lockf", "flock"])
def test_lock_is_free_when_its_holder_is_killed(
    folder: Path, process: TakeProcess, lock: str
) -> None:
    (waiter,) = openers(folder / "file", process, 1)
    with Process() as holder:
        holder.do("fd = os.open(file, os.O_RDWR)", file=str(folder / "file"))
        holder.do("getattr(fcntl, lock)(fd, fcntl.LOCK_EX)", lock=lock)
        waiter.start("getattr(fcntl, lock)(fd, fcntl.LOCK_EX); 'mine'", lock=lock)
        assert not waiter.finished(within_s=0.2)
        holder.kill()
        assert waiter.result() == "mine"


def test_locks_of_a_process_outlive_the_child_that_inherited_its_descriptors(
    folder: Path, process: TakeProcess
) -> None:
    one, two = openers(folder / "file", process)
    one.do("""
fcntl.lockf(fd, fcntl.LOCK_EX)
until, end = os.pipe()
child = os.fork()
if not child:
    os.close(end)
    os.read(until, 1)
    os._exit(0)
os.close(fd)
fd = os.open(file, os.O_RDWR)
fcntl.lockf(fd, fcntl.LOCK_EX)
os.close(end)
os.waitpid(child, 0)
""")
    assert not two.do("try_lock(fd, fcntl.LOCK_EX, 0, 0)")


@pytest.mark.parametrize("lock", ["lockf", "flock"])
def test_signal_interrupts_a_wait_for_a_lock(folder: Path, process: TakeProcess, lock: str) -> None:
    one, two = openers(folder / "file", process)
    one.do("getattr(fcntl, lock)(fd, fcntl.LOCK_EX)", lock=lock)
    interrupted = """
class Interrupted(Exception): pass
def interrupt(*_): raise Interrupted
previous = signal.signal(signal.SIGINT, interrupt)
try:
    getattr(fcntl, lock)(fd, fcntl.LOCK_EX)
    outcome = 'locked'
except Interrupted:
    outcome = 'interrupted'
signal.signal(signal.SIGINT, previous)
outcome
"""
    two.start(interrupted, lock=lock)
    assert not two.finished(within_s=0.3)
    two.send_signal(signal.SIGINT)
    assert two.result(10) == "interrupted"
    one.do("getattr(fcntl, lock)(fd, fcntl.LOCK_UN)", lock=lock)
    again = (
        "try_flock(fd, fcntl.LOCK_EX)" if lock == "flock" else "try_lock(fd, fcntl.LOCK_EX, 0, 0)"
    )
    assert one.do(again), "the interrupted waiter got the lock after all"


def test_interrupted_system_call_says_eintr(folder: Path, process: TakeProcess) -> None:
    one, two = openers(folder / "file", process)
    one.do("fcntl.flock(fd, fcntl.LOCK_EX)")
    wait = """
libc = ctypes.CDLL(None, use_errno=True)
previous = signal.signal(signal.SIGINT, lambda *_: None)
signal.siginterrupt(signal.SIGINT, True)
result = libc.flock(fd, fcntl.LOCK_EX)
number = ctypes.get_errno()
signal.signal(signal.SIGINT, previous)
result, number
"""
    two.start(wait)
    assert not two.finished(within_s=0.3)
    two.send_signal(signal.SIGINT)
    assert two.result(10) == (-1, errno.EINTR)


def test_waiter_that_is_killed_does_not_get_the_lock(folder: Path, process: TakeProcess) -> None:
    one, two = openers(folder / "file", process)
    one.do("fcntl.flock(fd, fcntl.LOCK_EX)")
    with Process() as waiter:
        waiter.start(
            "fcntl.flock(os.open(file, os.O_RDWR), fcntl.LOCK_EX)", file=str(folder / "file")
        )
        assert not waiter.finished(within_s=0.2)
        waiter.kill()
    one.do("fcntl.flock(fd, fcntl.LOCK_UN)")
    assert two.do("try_flock(fd, fcntl.LOCK_EX)")


@pytest.mark.parametrize("lock", ["lockf", "flock"])
@pytest.mark.parametrize("mode", ["w", "a", "r+", "x"])
def test_lock_file_idiom_excludes_a_second_process(
    folder: Path, process: TakeProcess, lock: str, mode: str
) -> None:
    file = folder / "lock"
    if mode == "r+":
        file.write_text("")
    one, two = process(), process()
    take = "f = open(file, mode); getattr(fcntl, lock)(f, fcntl.LOCK_EX)"
    one.do(take, file=str(file), lock=lock, mode=mode)
    two.start(take + "; 'mine'", file=str(file), lock=lock, mode="w" if mode == "x" else mode)
    assert not two.finished(within_s=0.2)
    one.do("f.close()")
    assert two.result() == "mine"


def test_lock_holds_across_versions(file: Path, process: TakeProcess) -> None:
    one, two = openers(file, process)
    one.do("fcntl.flock(fd, fcntl.LOCK_EX); fcntl.lockf(fd, fcntl.LOCK_EX)")
    file.write_bytes(b"a new version")
    two.do("os.close(fd); fd = os.open(file, os.O_RDWR)")
    assert not two.do("try_flock(fd, fcntl.LOCK_EX)")
    assert not two.do("try_lock(fd, fcntl.LOCK_EX, 0, 1)")


def test_counter_guarded_by_a_lock_loses_no_increment(folder: Path, process: TakeProcess) -> None:
    (folder / "counter").write_text("0")
    (folder / "lock").write_text("")
    count = """
for _ in range(20):
    with open(d + '/lock', 'r+') as guard:
        fcntl.lockf(guard, fcntl.LOCK_EX)
        with open(d + '/counter') as f:
            n = int(f.read())
        with open(d + '/counter', 'w') as f:
            f.write(str(n + 1))
"""
    counters = [process() for _ in range(4)]
    for counter in counters:
        counter.start(count, d=str(folder))
    for counter in counters:
        counter.result()
    assert (folder / "counter").read_text() == "80"


def test_status_counts_the_locks_that_are_held(
    mount: Mount, folder: Path, process: TakeProcess
) -> None:
    before = mount.status()["locks"]
    (one,) = openers(folder / "file", process, 1)
    one.do("fcntl.flock(fd, fcntl.LOCK_EX)")
    one.do("fcntl.lockf(fd, fcntl.LOCK_EX, 1, 0); fcntl.lockf(fd, fcntl.LOCK_SH, 1, 5)")
    assert mount.status()["locks"] == before + 3
