"""Locks between processes on different hosts of a cluster."""

import errno
import fcntl
import itertools
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from harness.clusters import Cluster, ClusterMount, Plan, counters
from harness.errors import fails_with
from harness.mountpoint import eventually
from harness.processes import TRY_LOCKS, Process, TakeProcess
from harness.seeds import chosen_seed

# The lease is short, and longer than a busy machine stops a host.
PLAN = Plan(nodes=1, mounts=2, replicas=1, buckets=4, lease_ttl_s=4)
SLOTS = 6
TURNS = 10
UNLOCK = "getattr(fcntl, lock)(fd, fcntl.LOCK_UN)"
WRITE_AND_REMOVE = "os.pwrite(fd, b'1', 0); os.fsync(fd); os.unlink(f); os.close(fd)"
DIE = "os.kill(os.getpid(), signal.SIGKILL)"
NEVER_S = 0.3  # what must not happen is looked for so long
PREPARE = f"""{TRY_LOCKS}
import struct
def failure(step):
    try:
        step()
    except OSError as error:
        return error.errno
    return 0
fd = os.open(f, os.O_RDWR | os.O_CREAT)
"""
COUNT = """
for _ in range(times):
    with open(d + '/lock', mode) as guard:
        getattr(fcntl, lock)(guard, fcntl.LOCK_EX)
        with open(d + '/count') as file:
            number = int(file.read())
        with open(d + '/count', 'w') as file:
            file.write(str(number + 1))
"""
ADD_IN_PLACE = """
fcntl.lockf(fd, fcntl.LOCK_EX)
number = int(os.pread(fd, 20, 0)) + 1
os.pwrite(fd, b'%d' % number, 0)
fcntl.lockf(fd, fcntl.LOCK_UN)
number
"""


@pytest.fixture
def failing(cluster: Cluster) -> Iterator[ClusterMount]:
    """The first host, to be stopped, cut off from the others or killed. It works again after the test."""
    if not cluster.network.links:
        pytest.skip("links cannot be cut")
    mount = cluster.mounts[0]
    yield mount
    cluster.mend()


Two = tuple[Process, Process]


@pytest.fixture
def on_hosts(pair: list[Path], process: TakeProcess) -> Two:
    """A process on each host, with the same file open for reading and writing as `fd`."""
    (pair[0] / "file").write_bytes(b"x" * 100)
    return _both(process, pair, "file")


@pytest.fixture
def counting(pair: list[Path], process: TakeProcess) -> Two:
    (pair[0] / "count").write_text("0")
    return _both(process, pair, "count")


def test_ranges_exclude_each_other_between_hosts(on_hosts: Two) -> None:
    one, other = on_hosts
    assert one.do("try_lock(fd, fcntl.LOCK_EX, 10, 10)")
    assert not other.do("try_lock(fd, fcntl.LOCK_EX, 0, 11)")
    assert not other.do("try_lock(fd, fcntl.LOCK_SH, 19, 1)")
    assert other.do("try_lock(fd, fcntl.LOCK_EX, 20, 0)")
    assert not one.do("try_lock(fd, fcntl.LOCK_EX, 30, 1)")
    one.do("fcntl.lockf(fd, fcntl.LOCK_UN)")
    assert other.do("try_lock(fd, fcntl.LOCK_EX, 0, 11)")


def test_shared_locks_are_shared_between_hosts(on_hosts: Two) -> None:
    one, other = on_hosts
    for kind in ("flock", "lock"):
        assert one.do(f"try_{kind}(fd, fcntl.LOCK_SH)")
        assert other.do(f"try_{kind}(fd, fcntl.LOCK_SH)")
        assert not one.do(f"try_{kind}(fd, fcntl.LOCK_EX)")
        other.do("fcntl.flock(fd, fcntl.LOCK_UN); fcntl.lockf(fd, fcntl.LOCK_UN)")
        assert one.do(f"try_{kind}(fd, fcntl.LOCK_EX)")
        one.do("fcntl.flock(fd, fcntl.LOCK_UN); fcntl.lockf(fd, fcntl.LOCK_UN)")


def test_flock_and_ranges_do_not_see_each_other_between_hosts(on_hosts: Two) -> None:
    one, other = on_hosts
    assert one.do("try_flock(fd, fcntl.LOCK_EX)")
    assert other.do("try_lock(fd, fcntl.LOCK_EX)")


def test_locks_of_directories_hold_on_one_host(here: Path, there: Path) -> None:
    """The kernel keeps them by itself."""
    with ExitStack() as opened:
        for place in (here, there):
            fds = [os.open(place, os.O_RDONLY) for _ in range(2)]
            for fd in fds:
                opened.callback(os.close, fd)
            fcntl.flock(fds[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
            with fails_with(errno.EAGAIN):
                fcntl.flock(fds[1], fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_open_file_description_locks_hold_between_hosts(on_hosts: Two) -> None:
    one, other = on_hosts
    take = """
def ofd(kind):
    request = struct.pack('hhqqi4x', kind, 0, 0, 0, 0)
    return failure(lambda: fcntl.fcntl(fd, fcntl.F_OFD_SETLK, request))
"""
    one.do(take)
    other.do(take)
    assert one.do("ofd(fcntl.F_WRLCK)") == 0
    assert other.do("ofd(fcntl.F_RDLCK)") == errno.EAGAIN
    one.do("copy = os.dup(fd); os.close(fd)")
    assert other.do("ofd(fcntl.F_RDLCK)") == errno.EAGAIN, "it belongs to the description"
    one.do("os.close(copy)")
    eventually(lambda: other.do("ofd(fcntl.F_RDLCK)") == 0, "the lock is free")


def test_query_tells_of_a_lock_on_another_host_without_its_process(on_hosts: Two) -> None:
    one, other = on_hosts
    assert other.do("query(fd, fcntl.F_WRLCK)")[0] == other.do("fcntl.F_UNLCK")
    one.do("fcntl.lockf(fd, fcntl.LOCK_SH, 5, 10)")
    kind, _, start, length, pid = other.do("query(fd, fcntl.F_WRLCK)")
    assert (kind, start, length, pid) == (other.do("fcntl.F_RDLCK"), 10, 5, 0)
    assert other.do("query(fd, fcntl.F_RDLCK)")[0] == other.do("fcntl.F_UNLCK")


@pytest.mark.parametrize("end", [UNLOCK, "os.close(fd)", WRITE_AND_REMOVE, DIE])
@pytest.mark.parametrize("lock", ["lockf", "flock"])
def test_waiter_gets_what_another_host_gives_up(on_hosts: Two, lock: str, end: str) -> None:
    one, other = on_hosts
    one.do("getattr(fcntl, lock)(fd, fcntl.LOCK_EX)", lock=lock)
    other.start("getattr(fcntl, lock)(fd, fcntl.LOCK_EX); 'mine'", lock=lock)
    assert not other.finished(NEVER_S)
    one.start(end, lock=lock)
    assert other.result() == "mine"


@pytest.mark.parametrize("end", [DIE, "os._exit(0)"])
@pytest.mark.parametrize("lock", ["lockf", "flock"])
def test_next_holder_sees_what_a_holder_that_ends_wrote_in_place(
    pair: list[Path], process: TakeProcess, lock: str, end: str
) -> None:
    """Also in files that it opened before and after the locked one, such as a journal."""
    names = ["before", "locked", "after"]
    for name in names:
        (pair[0] / name).write_bytes(b"0")
    opened = "fds = [os.open(f'{d}/{name}', os.O_RDWR) for name in names]"
    take = "; getattr(fcntl, lock)(fd, fcntl.LOCK_EX); "
    other = process()
    for number in (b"1", b"3", b"5", b"7"):
        one = process()
        one.do(f"{opened}; fd = fds[1]{take}", d=str(pair[0]), names=names, lock=lock)
        one.do("[os.pwrite(fd, number, 0) for fd in fds]", number=number)
        look = f"fd = os.open(d + '/locked', os.O_RDWR){take}{opened}; [os.pread(fd, 9, 0) for fd in fds]"
        other.start(look, d=str(pair[1]), names=names, lock=lock)
        assert not other.finished(NEVER_S / 3)
        one.start(end)
        assert other.result() == [number] * 3
        other.do("[(os.pwrite(fd, b'2', 0), os.close(fd)) for fd in (fd, *fds)]")
    assert sorted(os.listdir(pair[0])) == sorted(names), "nobody was in conflict"


def test_waiter_that_is_interrupted_or_killed_gets_nothing(
    on_hosts: Two, pair: list[Path], process: TakeProcess
) -> None:
    one, other = on_hosts
    one.do("fcntl.flock(fd, fcntl.LOCK_EX)")
    other.do("""
class Interrupted(Exception): pass
def interrupt(*_): raise Interrupted
signal.signal(signal.SIGINT, interrupt)
""")
    other.start("""
try:
    fcntl.flock(fd, fcntl.LOCK_EX)
    outcome = 'locked'
except Interrupted:
    outcome = 'interrupted'
outcome
""")
    assert not other.finished(NEVER_S)
    other.send_signal(signal.SIGINT)
    assert other.result() == "interrupted"
    third = process()
    third.start("fcntl.flock(os.open(f, os.O_RDWR), fcntl.LOCK_EX)", f=str(pair[1] / "file"))
    assert not third.finished(NEVER_S)
    third.kill()
    one.do("fcntl.flock(fd, fcntl.LOCK_UN)")
    assert one.do("try_flock(fd, fcntl.LOCK_EX)")
    one.do("fcntl.flock(fd, fcntl.LOCK_UN)")
    assert other.do("try_flock(fd, fcntl.LOCK_EX)")


@pytest.mark.parametrize("lock", ["lockf", "flock"])
def test_lock_that_nobody_holds_is_refused_to_none_of_two_hosts_that_take_turns(
    pair: list[Path], writer: Process, lock: str
) -> None:
    (pair[0] / "file").touch()
    take_turns = """
refused = []
for number in range(turns):
    for kind in (fcntl.LOCK_EX, fcntl.LOCK_SH):
        for d in directories:
            fd = os.open(d + '/file', os.O_RDWR)
            try:
                getattr(fcntl, lock)(fd, kind | fcntl.LOCK_NB)
                os.write(fd, b'y')
            except BlockingIOError:
                refused.append((number, kind, d))
            os.close(fd)
refused
"""
    assert writer.do(take_turns, lock=lock, turns=TURNS, directories=[*map(str, pair)]) == []


def test_try_is_refused_at_once_by_a_holder_and_by_one_that_is_stopped_in_the_end(
    failing: ClusterMount, on_hosts: Two
) -> None:
    holder, tries = on_hosts
    holder.do("fcntl.flock(fd, fcntl.LOCK_EX)")
    for _ in range(20):
        assert not tries.do("try_flock(fd, fcntl.LOCK_EX)")
    failing.pause()
    try:
        tries.start("try_flock(fd, fcntl.LOCK_EX)")
        assert tries.result(30), "its session has ended, and the lock with it"
    finally:
        failing.resume()
        holder.kill()  # it would be told of the lost lock in the tests that take it next


def test_two_hosts_that_both_convert_their_shared_flock_take_turns(on_hosts: Two) -> None:
    for process in on_hosts:
        process.do("fcntl.flock(fd, fcntl.LOCK_SH)")
    for process in on_hosts:
        process.start("fcntl.flock(fd, fcntl.LOCK_EX); fcntl.flock(fd, fcntl.LOCK_UN); 'done'")
    assert [process.result() for process in on_hosts] == ["done", "done"]


@pytest.mark.parametrize("other", [0, 1])
def test_a_flock_conversion_that_fails_has_given_up_the_old_lock(
    pair: list[Path], other: int
) -> None:
    (pair[0] / "file").write_bytes(b"x")
    with (pair[0] / "file").open("rb") as one, (pair[other] / "file").open("rb") as two:
        fcntl.flock(one, fcntl.LOCK_SH)
        fcntl.flock(two, fcntl.LOCK_SH)
        with pytest.raises(BlockingIOError):
            fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(two, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_host_that_locks_again_and_again_lets_a_waiting_one_in(on_hosts: Two) -> None:
    one, other = on_hosts
    one.do("fcntl.flock(fd, fcntl.LOCK_EX)")
    other.start("fcntl.flock(fd, fcntl.LOCK_EX); 'mine'")
    assert not other.finished(NEVER_S)
    one.start("""
for _ in range(2000):
    fcntl.flock(fd, fcntl.LOCK_UN)
    fcntl.flock(fd, fcntl.LOCK_EX)
    if os.path.exists(d + '/enough'):
        break
""", d=one.do("d"))  # fmt: skip
    assert other.result(20) == "mine"
    other.do("open(d + '/enough', 'w').close(); fcntl.flock(fd, fcntl.LOCK_UN)")
    one.result()


@pytest.mark.parametrize(
    ("lock", "mode"),
    [("lockf", "a"), ("flock", "a"), ("flock", "w")],
    ids=["lockf", "flock", "emptied"],
)
def test_no_update_is_lost(pair: list[Path], process: TakeProcess, lock: str, mode: str) -> None:
    (pair[0] / "count").write_text("0")
    counting = [process() for _ in range(4)]
    for number, one in enumerate(counting):
        one.start(COUNT, d=str(pair[number % 2]), lock=lock, mode=mode, times=8)
    for one in counting:
        one.result()
    assert (pair[0] / "count").read_text() == (pair[1] / "count").read_text() == "32"


def test_host_that_is_alone_asks_nobody(cluster: Cluster, here: Path, writer: Process) -> None:
    writer.do("fd = os.open(d + '/alone', os.O_RDWR | os.O_CREAT)", d=str(here))
    writer.do("fcntl.lockf(fd, fcntl.LOCK_EX, 1, 0)")
    before = counters(cluster.mounts[0])["lock_transactions"]
    writer.do("""
for byte in range(200):
    fcntl.lockf(fd, fcntl.LOCK_EX, 1, byte)
    fcntl.flock(fd, fcntl.LOCK_EX)
    fcntl.flock(fd, fcntl.LOCK_UN)
""")
    assert counters(cluster.mounts[0])["lock_transactions"] == before


@pytest.mark.parametrize("lock", ["lockf", "flock"])
@pytest.mark.parametrize("kind", ["LOCK_UN", "LOCK_SH"])
def test_unlock_publishes_what_a_host_wrote_alone(
    on_hosts: Two, pair: list[Path], lock: str, kind: str
) -> None:
    one, _ = on_hosts
    for byte in (b"1", b"2"):
        one.do("fcntl.lockf(fd, fcntl.LOCK_EX); fcntl.flock(fd, fcntl.LOCK_EX)")
        one.do("os.pwrite(fd, byte, 0)", byte=byte)
        one.do(f"fcntl.{lock}(fd, fcntl.{kind})")
        assert (pair[1] / "file").read_bytes() == byte + b"x" * 99


def test_unlock_publishes_nothing_that_did_not_change(cluster: Cluster, on_hosts: Two) -> None:
    one, _ = on_hosts
    one.do("fcntl.lockf(fd, fcntl.LOCK_EX); os.pwrite(fd, b'1', 0)")
    before = counters(cluster.mounts[0])["publishes"]
    one.do("""
for _ in range(50):
    fcntl.lockf(fd, fcntl.LOCK_UN)
    fcntl.lockf(fd, fcntl.LOCK_EX)
""")
    assert counters(cluster.mounts[0])["publishes"] == before + 1


def test_nothing_is_left_in_etcd_of_locks_that_are_gone(cluster: Cluster, on_hosts: Two) -> None:
    one, other = on_hosts
    one.do("fcntl.flock(fd, fcntl.LOCK_EX)")
    assert not other.do("try_flock(fd, fcntl.LOCK_EX)")
    one.do("os.close(fd)")
    eventually(lambda: other.do("try_flock(fd, fcntl.LOCK_SH)"), "the lock is free")
    ino = other.do("os.fstat(fd).st_ino")
    other.do("os.close(fd)")
    number = ino.to_bytes(8, "big")

    def keys() -> list[bytes]:
        return [
            *(key for key in cluster.etcd.get(cluster._prefix("l")) if key == number),
            *(key for key in cluster.etcd.get(cluster._prefix("L")) if key.endswith(number)),
        ]

    eventually(lambda: not keys(), "etcd has forgotten the locks", 20)


def test_conflicting_ranges_are_never_held_together(pair: list[Path], process: TakeProcess) -> None:
    """Each records when it was sure to be inside, on the clock that all hosts here share; and counts,
    under the lock of a slot's byte, in a file of that slot."""
    seed = chosen_seed()
    for slot in range(SLOTS):
        (pair[0] / f"count{slot}").write_text("0")
    (pair[0] / "lock").touch()
    work = """
import random, time
rng = random.Random(seed)
fd = os.open(d + '/lock', os.O_RDWR)
inside, added = [], [0] * slots
for _ in range(15):
    first = rng.randrange(slots)
    last = rng.randrange(first, min(slots, first + 3))
    write = rng.random() < 0.6
    kind = fcntl.LOCK_EX if write else fcntl.LOCK_SH
    if rng.random() < 0.3:
        try:
            fcntl.lockf(fd, kind | fcntl.LOCK_NB, last - first + 1, first)
        except BlockingIOError:
            continue
    else:
        fcntl.lockf(fd, kind, last - first + 1, first)
    began = time.monotonic_ns()
    if write:
        with open(d + '/count%d' % first) as file:
            number = int(file.read())
        with open(d + '/count%d' % first, 'w') as file:
            file.write(str(number + 1))
        added[first] += 1
    inside.append((first, last, write, began, time.monotonic_ns()))
    fcntl.lockf(fd, fcntl.LOCK_UN, last - first + 1, first)
inside, added
"""
    workers = [process() for _ in range(4)]
    for number, worker in enumerate(workers):
        worker.start(work, d=str(pair[number % 2]), seed=seed + number, slots=SLOTS)
    results = [worker.result(300) for worker in workers]
    for (one, _), (other, _) in itertools.combinations(results, 2):
        for a, b in itertools.product(one, other):
            apart = a[1] < b[0] or b[1] < a[0] or a[4] < b[3] or b[4] < a[3]
            assert apart or not (a[2] or b[2]), f"seed {seed}: {a} and {b} are inside together"
    for slot in range(SLOTS):
        expected = sum(added[slot] for _, added in results)
        assert (pair[1] / f"count{slot}").read_text() == str(expected), f"seed {seed}, slot {slot}"


# -- hosts that fail ------------------------------------------------------------------------------


def _opened(process: Process, directory: Path, name: str) -> None:
    process.do(PREPARE, d=str(directory), f=str(directory / name))


def _both(process: TakeProcess, pair: list[Path], name: str) -> Two:
    """Return a process on each host, which has a file of their directory open."""
    found = process(), process()
    for one, directory in zip(found, pair, strict=True):
        _opened(one, directory, name)
    return found


def test_locks_of_a_host_that_dies_or_is_cut_off_go_with_its_session(
    cluster: Cluster, failing: ClusterMount, on_hosts: Two, pair: list[Path]
) -> None:
    (pair[1] / "count").write_text("0")
    holder, waiter = on_hosts
    holder.do("fcntl.flock(fd, fcntl.LOCK_EX)")
    # Paused for less than the lease lives: nothing is lost.
    failing.pause()
    assert not waiter.finished(NEVER_S)
    failing.resume()
    assert not waiter.do("try_flock(fd, fcntl.LOCK_EX)")
    holder.do("file = open(d + '/count', 'w'); file.write('stale')", d=str(pair[0]))
    holder.do("os.mkdir(d + '/a'); late = open(d + '/a/late', 'w'); late.write('stale')")
    holder.do("os.setxattr(late.fileno(), 'user.irdmafs.with_rename', b''); late.close()")
    waiter.start("fcntl.flock(fd, fcntl.LOCK_EX); 'mine'")
    cluster.isolate(failing)
    assert waiter.result(30) == "mine"
    waiter.do("file = open(d + '/count', 'w'); file.write('1'); file.close()", d=str(pair[1]))
    cluster.heal_all()
    assert holder.do("failure(file.close)") == errno.EIO
    assert (pair[1] / "count").read_text() == "1", "who lost the lock overwrote it"
    again = "failure(lambda: open(d + '/count', 'w').write('stale'))"
    assert holder.do("f = open(d + '/other', 'w'); f.write('x'); failure(f.close)") == errno.EIO
    assert holder.do("failure(lambda: os.rename(d + '/a', d + '/b'))") == errno.EIO
    assert holder.do("failure(lambda: fcntl.flock(fd, fcntl.LOCK_UN))") == errno.EIO
    assert holder.do(again) == 0, "it has been told"
    assert not holder.do("try_flock(fd, fcntl.LOCK_EX)")
    waiter.do("fcntl.flock(fd, fcntl.LOCK_UN)")
    holder.do("fcntl.flock(fd, fcntl.LOCK_EX)")
    # The same when the daemon is killed.
    waiter.start("fcntl.flock(fd, fcntl.LOCK_EX); 'mine'")
    failing.kill9()
    assert waiter.result(30) == "mine"


def test_process_that_asks_again_for_a_lost_lock_is_told_first(
    cluster: Cluster, failing: ClusterMount, on_hosts: Two, pair: list[Path]
) -> None:
    holder, waiter = on_hosts
    holder.do("fcntl.flock(fd, fcntl.LOCK_EX)")
    waiter.start("fcntl.flock(fd, fcntl.LOCK_EX); 'mine'")
    cluster.isolate(failing)
    assert waiter.result(30) == "mine"
    waiter.do("fcntl.flock(fd, fcntl.LOCK_UN)")
    cluster.heal_all()
    write = "file = open(d + '/new', 'w'); file.write('new'); failure(file.close)"
    assert holder.do(write, d=str(pair[0])) == errno.EIO
    assert holder.do("failure(lambda: fcntl.flock(fd, fcntl.LOCK_EX))") == errno.EIO
    holder.do("fcntl.flock(fd, fcntl.LOCK_EX)")
    assert holder.do(write) == 0


@pytest.mark.parametrize("how", ["stopped", "cut off"])
def test_host_that_comes_back_goes_on_from_what_others_made_of_its_last_unlock(
    cluster: Cluster, failing: ClusterMount, counting: Two, pair: list[Path], how: str
) -> None:
    here, there = counting
    here.do(ADD_IN_PLACE)
    failing.pause() if how == "stopped" else cluster.isolate(failing)
    there.start(ADD_IN_PLACE)
    assert there.result(30) == 2
    failing.resume() if how == "stopped" else cluster.heal_all()
    assert [one.do(ADD_IN_PLACE) for one in (here, here, there, here)] == [3, 4, 5, 6]
    assert sorted(os.listdir(pair[1])) == ["count"]


@pytest.mark.parametrize(
    ("lock", "shown"), [("lockf", False), ("flock", True)], ids=["", "opened meanwhile"]
)
def test_what_a_process_writes_without_its_lost_lock_comes_to_nobody(
    failing: ClusterMount,
    counting: Two,
    pair: list[Path],
    process: TakeProcess,
    lock: str,
    *,
    shown: bool,
) -> None:
    """As SQLite does, which puts back what was there before when it cannot commit."""
    add = ADD_IN_PLACE.replace("lockf", lock)
    next_one, there = counting
    loser = process()
    _opened(loser, pair[0], "count")
    assert next_one.do(add) == 1
    loser.do(f"fcntl.{lock}(fd, fcntl.LOCK_EX); os.pread(fd, 20, 0)")
    if not shown:
        loser.do("os.pwrite(fd, b'2', 0)")
    failing.pause()
    there.start(add)
    assert there.result(30) == 2
    assert [there.do(add) for _ in range(3)] == [3, 4, 5]
    failing.resume()
    if shown:
        eventually(lambda: (pair[0] / "count").read_text() == "5", "it shows what others wrote")
    next_one.start(add)
    assert not next_one.finished(NEVER_S), "whoever lost its lock may still write"
    assert loser.do("failure(lambda: os.fsync(fd))") == (0 if shown else errno.EIO)
    loser.do("os.pwrite(fd, b'1', 0)")
    assert loser.do(f"failure(lambda: fcntl.{lock}(fd, fcntl.LOCK_UN))") == errno.EIO
    assert next_one.result(30) == 6
    assert [one.do(add) for one in (loser, there, next_one)] == [7, 8, 9]
    (aside,) = (name for name in os.listdir(pair[1]) if "conflict" in name)
    assert (pair[1] / aside).read_text() == "1"


def test_a_process_that_waits_for_more_when_its_lock_is_lost_is_told(
    cluster: Cluster, failing: ClusterMount, counting: Two, pair: list[Path]
) -> None:
    (pair[0] / "count").write_text("0" * 20)
    loser, there = counting
    loser.do("fcntl.lockf(fd, fcntl.LOCK_SH, 1, 0)")
    there.do("fcntl.lockf(fd, fcntl.LOCK_EX, 1, 10)")
    loser.start("failure(lambda: fcntl.lockf(fd, fcntl.LOCK_EX, 1, 10))")
    assert not loser.finished(NEVER_S)
    cluster.isolate(failing)
    there.do("fcntl.lockf(fd, fcntl.LOCK_EX); os.pwrite(fd, b'1', 0)")
    cluster.heal_all()
    there.do("fcntl.lockf(fd, fcntl.LOCK_UN)")
    assert loser.result(30) == errno.EIO


def test_unlock_that_cannot_publish_fails_and_gives_the_lock_up(
    cluster: Cluster, failing: ClusterMount, counting: Two, pair: list[Path]
) -> None:
    here, there = counting
    here.do("fcntl.lockf(fd, fcntl.LOCK_EX); os.pwrite(fd, b'9', 0)")
    cluster.isolate(failing)
    here.start("failure(lambda: fcntl.lockf(fd, fcntl.LOCK_UN))")
    there.start(ADD_IN_PLACE)
    assert there.result(30) == 1
    cluster.heal_all()
    assert here.result(60) == errno.EIO
    assert there.do(ADD_IN_PLACE) == 2
    assert here.do(ADD_IN_PLACE) == 3
    (aside,) = (name for name in os.listdir(pair[1]) if "conflict" in name)
    assert (pair[1] / aside).read_text() == "9"


@pytest.mark.parametrize("publish", ["os.fsync(fd)", "fcntl.lockf(fd, fcntl.LOCK_EX)"])
def test_lock_shows_the_newest_version_to_a_descriptor_that_was_told_of_a_conflict(
    cluster: Cluster, on_hosts: Two, pair: list[Path], publish: str
) -> None:
    """A lock that tells of it is not granted."""
    one, other = on_hosts
    one.do("os.pwrite(fd, b'1', 0)")
    other.do("os.pwrite(fd, b'2', 0); os.fsync(fd)")
    assert one.do(f"failure(lambda: {publish})") == errno.ESTALE
    assert other.do("try_lock(fd, fcntl.LOCK_EX)")
    other.do("fcntl.lockf(fd, fcntl.LOCK_UN)")
    one.do("fcntl.lockf(fd, fcntl.LOCK_EX)")
    assert one.do("os.pread(fd, 1, 0)") == b"2"
    one.do("os.pwrite(fd, b'3', 0); fcntl.lockf(fd, fcntl.LOCK_UN)")
    assert (pair[1] / "file").read_bytes()[:1] == b"3"
    one.do("os.close(fd)")
    aside, _ = sorted(os.listdir(pair[1]), key=len, reverse=True)
    assert f"is in /{pair[1].name}/{aside}" in cluster.mounts[0].log_tail()


def test_locks_can_be_kept_on_one_host_or_refused(
    cluster: Cluster, pair: list[Path], process: TakeProcess
) -> None:
    (pair[0] / "file").touch()
    local = cluster.add_mount("-o", "locks=local")
    refusing = cluster.add_mount("-o", "locks=refuse")
    holder, other = process(), process()
    _opened(holder, pair[0], "file")
    holder.do("fcntl.flock(fd, fcntl.LOCK_EX)")
    _opened(other, local.path / pair[0].name, "file")
    assert other.do("try_flock(fd, fcntl.LOCK_EX)")
    assert not holder.do("try_flock(os.open(f, os.O_RDWR), fcntl.LOCK_EX)", f=other.do("f"))
    other.do("fd = os.open(f, os.O_RDWR)", f=str(refusing.path / pair[0].name / "file"))
    assert other.do("failure(lambda: fcntl.flock(fd, fcntl.LOCK_EX))") == errno.ENOLCK
    assert other.do("failure(lambda: fcntl.lockf(fd, fcntl.LOCK_EX))") == errno.ENOLCK


def test_flock_is_free_for_whoever_asks_after_the_last_close(here: Path, writer: Process) -> None:
    """Nobody waits for a release, and this one looks for what was stored through a mapping."""
    (here / "file").write_bytes(bytes(30_000_000))
    for _ in range(3):
        _opened(writer, here, "file")
        writer.do("reader = os.open(f, os.O_RDONLY); fcntl.flock(fd, fcntl.LOCK_EX)")
        writer.do("os.pwrite(fd, b'new', 0)")
        assert writer.do("os.close(fd); try_flock(reader, fcntl.LOCK_SH)")
        writer.do("os.close(reader)")
