"""A directory tells when something below it changes, to processes that wait for it."""

import errno
import math
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio
import trio.testing
from conftest import EVERYWHERE
from harness.errors import fails_with
from harness.file_changes import append, publish, replace
from harness.mountpoint import Mount, eventually
from harness.processes import AS_NOBODY, Process, is_waiting, many_waiting

from irdmafs.backend.namespace import ROOT_INO, watches
from irdmafs.posix import waits

SESSIONS = EVERYWHERE

CHANGES = "user.irdmafs.changes"
WAIT = "os.getxattr(directory, f'user.irdmafs.changes.{count}')"
TakeProcess = Callable[[], Process]


def count_of(directory: Path) -> int:
    return int(os.getxattr(directory, CHANGES))


def start_waiting(process: Process, directory: Path) -> int:
    """Have a process wait for a change below a directory; return the counter."""
    count = count_of(directory)
    process.start(WAIT, directory=str(directory), count=count)
    eventually(lambda: is_waiting(process.pid), "it waits", 30)
    return count


# -- what counts -------------------------------------------------------------------------------------


CHANGE = {
    "a file is made": lambda path: path.with_name("more").touch(),
    "a file is published": publish,
    "a file is appended to": append,
    "a file is replaced": replace,
    "a file is removed": lambda path: path.unlink(),
    "a file is renamed": lambda path: path.rename(path.with_name("renamed")),
    "a file is moved away": lambda path: path.rename(path.parents[3] / "away"),
    "a directory is made": lambda path: path.with_name("directory").mkdir(),
    "a link is made": lambda path: path.with_name("link").hardlink_to(path),
    "a symbolic link is made": lambda path: path.with_name("symbolic").symlink_to("target"),
    "all is removed": lambda path: shutil.rmtree(path.parents[1]),
}


changes = pytest.mark.parametrize("change", CHANGE.values(), ids=CHANGE.keys())


def assert_that_who_waits_is_woken_by(
    change: Callable[[Path], None], waiter: Process, one: Path, other: Path
) -> None:
    file = one / "top" / "a" / "b" / "file"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"old")
    assert (other / "top" / "a" / "b" / "file").read_bytes() == b"old"  # it has heard of all that
    count = start_waiting(waiter, other / "top")
    change(file)
    assert int(waiter.result()) > count


@changes
def test_a_change_deep_below_wakes_who_waits(
    folder: Path, process: TakeProcess, change: Callable[[Path], None]
) -> None:
    assert_that_who_waits_is_woken_by(change, process(), folder, folder)


def test_what_is_moved_in_wakes_who_waits(folder: Path, process: TakeProcess) -> None:
    (folder / "top").mkdir()
    (folder / "whole" / "deep").mkdir(parents=True)
    waiter = process()
    count = start_waiting(waiter, folder / "top")
    (folder / "whole").rename(folder / "top" / "version")
    assert int(waiter.result()) > count
    count = count_of(folder / "top")
    (folder / "top" / "version" / "deep" / "file").touch()
    assert count_of(folder / "top") > count


def test_changes_elsewhere_and_of_attributes_do_not_count(folder: Path) -> None:
    top = folder / "top"
    top.mkdir()
    (top / "file").write_bytes(b"x")
    count = count_of(top)
    (folder / "beside").write_bytes(b"x")
    (top / "file").chmod(0o600)
    os.setxattr(top / "file", "user.note", b"x")
    (top / "file").read_bytes()
    assert count_of(top) == count


def test_a_change_after_the_counter_was_read_is_not_missed(folder: Path) -> None:
    count = count_of(folder)
    (folder / "file").touch()
    assert int(os.getxattr(folder, f"{CHANGES}.{count}")) > count
    assert int(os.getxattr(folder, f"{CHANGES}.{count - 1}")) > count


def test_a_directory_that_is_removed_wakes_who_waits(folder: Path, process: TakeProcess) -> None:
    (folder / "top").mkdir()
    waiter = process()
    count = start_waiting(waiter, folder / "top")
    (folder / "top").rmdir()
    assert int(waiter.result()) > count


def assert_that_who_is_woken_sees_the_change(waiter: Process, one: Path, other: Path) -> None:
    for number in range(20):
        count = count_of(other)
        waiter.start(
            WAIT + "; sorted(map(int, os.listdir(directory)))", directory=str(other), count=count
        )
        (one / f"{number}").mkdir()
        assert waiter.result() == [*range(number + 1)]


def test_who_is_woken_sees_the_change(folder: Path, process: TakeProcess) -> None:
    assert_that_who_is_woken_sees_the_change(process(), folder, folder)


# -- how a wait ends ---------------------------------------------------------------------------------


def test_a_wait_with_a_time_limit_ends_with_the_same_counter(folder: Path) -> None:
    count = count_of(folder)
    assert int(os.getxattr(folder, f"{CHANGES}.{count}.0.05")) == count
    assert int(os.getxattr(folder, f"{CHANGES}.{count}.0")) == count


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT])
def test_a_signal_that_is_handled_ends_a_wait(
    folder: Path, process: TakeProcess, number: signal.Signals
) -> None:
    waiter = process()
    waiter.do("before = signal.signal(number, lambda *_: None)", number=int(number))
    start_waiting(waiter, folder)
    waiter.send_signal(number)
    with pytest.raises(InterruptedError):
        waiter.result()


def test_who_is_killed_while_it_waits_ends(folder: Path) -> None:
    with Process() as waiter:
        start_waiting(waiter, folder)
        waiter.kill()
    (folder / "file").touch()


def test_others_are_served_while_many_wait(folder: Path, mount: Mount) -> None:
    waiting = 1000 if mount.session != "pyfuse3" else 40
    call = f"os.getxattr({str(folder)!r}, '{CHANGES}.{count_of(folder)}')"
    with many_waiting(call, waiting) as answers:
        beside = mount.path / f"{folder.name}-beside"
        beside.write_bytes(b"served")
        assert beside.read_bytes() == b"served"
        (folder / "directory").mkdir()  # a file has a second change, of its times
        assert len(answers()) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user")
def test_a_directory_that_may_not_be_read_tells_nothing(folder: Path) -> None:
    folder.chmod(0o700)
    with Process(AS_NOBODY) as stranger, pytest.raises(PermissionError):
        stranger.do(f"os.getxattr(directory, '{CHANGES}')", directory=str(folder))


def test_a_counter_that_makes_no_sense_is_refused(folder: Path) -> None:
    for nonsense in ("x", "1.x", "-1", "1.-1", "1.nan", "", "1.", "9" * 30):
        with fails_with(errno.EINVAL):
            os.getxattr(folder, f"{CHANGES}.{nonsense}")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_wait_ends_with_its_daemon(new_mount: Callable[..., Mount], number: signal.Signals) -> None:
    with new_mount() as mount, Process() as waiter:
        start_waiting(waiter, mount.path)
        mount.kill9() if number == signal.SIGKILL else os.kill(mount.pid, number)
        with fails_with(errno.ENOTCONN, errno.ECONNABORTED):
            waiter.result()
        if number == signal.SIGTERM:
            eventually(lambda: not mount.is_mounted(), "it is unmounted")


def test_a_remounted_daemon_repeats_no_counter(new_mount: Callable[..., Mount]) -> None:
    with new_mount() as mount:
        count = count_of(mount.path)
        for number in range(10):
            (mount.path / f"{number}").touch()
        mount.restart()
        assert int(os.getxattr(mount.path, f"{CHANGES}.{count}")) > count + 20


def test_who_waits_costs_no_requests(folder: Path, mount: Mount, process: TakeProcess) -> None:
    watched, other = folder / "watched", folder / "other"
    for directory in (watched, other):
        (directory / "below").mkdir(parents=True)
    start_waiting(process(), watched / "below")

    def cycle(directory: Path) -> Counter[str]:
        file = directory / "file"
        directory.stat()
        with mount.requests() as requests:
            file.write_bytes(b"x")
            file.read_bytes()
            file.stat()
            file.unlink()
        return requests

    # The kernel of a cluster's mount asks again for what it has believed for a while.
    eventually(lambda: cycle(watched) <= cycle(other), "as few requests as elsewhere")
    (watched / "below" / "end").touch()


# -- between hosts -----------------------------------------------------------------------------------


@changes
def test_a_change_by_another_host_wakes_who_waits(
    pair: list[Path], process: TakeProcess, change: Callable[[Path], None]
) -> None:
    assert_that_who_waits_is_woken_by(change, process(), *pair)


def test_who_is_woken_by_another_host_sees_change(pair: list[Path], process: TakeProcess) -> None:
    assert_that_who_is_woken_sees_the_change(process(), *pair)


# -- the table of counters ---------------------------------------------------------------------------


def table_of(parents_of: Callable[[int], tuple[int, ...]]) -> watches.Watches:
    return watches.Watches({}, parents_of, lambda directory: None)


def test_a_directory_is_forgotten_when_nobody_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    table = table_of(lambda ino: (ROOT_INO,) if ino != ROOT_INO else ())
    before = table.count(ROOT_INO)
    monkeypatch.setattr(watches, "_FORGOTTEN_AFTER_S", 0.0)
    table.changed([(5, b"", 0, 0)], {})
    assert not table.in_use
    assert table.count(ROOT_INO) > before + 1


def test_the_table_forgets_directories_asked_for_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watches, "_WATCHED_MAX", 2)
    table = table_of(lambda ino: ())
    first, second = table.count(1), table.count(2)
    assert table.count(1) == first
    table.count(3)
    assert table.count(1) == first
    assert table.count(2) > second


async def test_an_awaited_directory_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watches, "_WATCHED_MAX", 1)
    monkeypatch.setattr(watches, "_FORGOTTEN_AFTER_S", 0.0)

    table = table_of(lambda ino: ())
    count = table.count(1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(table.wait, 1, count)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(BlockingIOError):
            table.count(2)
        table.changed([(2, b"", 0, 0)], {})
        assert table.count(1) == count
        table.changed([(1, b"", 0, 0)], {})
    assert table.count(1) > count


async def test_one_user_cannot_have_too_many_waits() -> None:
    class Told:
        tells_of_signals = True
        can_forget = False

    class Asked:
        uid = 1000
        pid = gid = umask = 0

    namespace = SimpleNamespace(watches=table_of(lambda ino: ()), inodes={})
    waiting = waits.Waits(namespace, None, Told())  # type: ignore[arg-type]
    count = waiting.count(1)
    async with trio.open_nursery() as nursery:
        for _ in range(4096):
            nursery.start_soon(waiting.changed, 1, count, math.inf, Asked())
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(BlockingIOError):
            await waiting.changed(1, count, math.inf, Asked())
        other = Asked()
        other.uid = 1001
        await waiting.changed(1, count, 0.0, other)
        namespace.watches.changed([(1, b"", 0, 0)], {})
    await waiting.changed(1, waiting.count(1), 0.0, Asked())
