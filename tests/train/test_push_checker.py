"""Processes that check pushes: one for each owner, and no more than are needed."""

import errno
import os
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
import trio

from irdmafs.coherence.pushes import Owner, Refused
from irdmafs.mount.push_checker import _KEPT, PushChecker, _patience_s

Check = Callable[[str, Owner], Awaitable[None]]

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="checks with the rights of others")


@pytest.fixture
def top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in the place of a mount, which everybody may read."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    (tmp_path / ".train" / "push").mkdir(parents=True)
    tmp_path.chmod(0o755)
    return tmp_path


def children() -> set[int]:
    """Return the processes that this one started and that have not ended."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if int(parent) == os.getpid() and state != "Z":
                found.add(int(entry.name))
    return found


def checked(top: Path, work: Callable[[Check], Awaitable[None]]) -> None:
    """Do something with a function that has the content of a push checked."""

    async def main() -> None:
        checker = PushChecker(str(top), module="harness.pushes")

        async def check(content: str, owner: Owner) -> None:
            push = top / ".train" / "push" / f"w@{owner.uid}"
            push.write_text(content)
            with push.open("rb") as file:
                await checker.check(b"/.train/push", push.name.encode(), file.fileno(), owner)

        try:
            with trio.fail_after(90):
                await work(check)
        finally:
            checker.close()

    trio.run(main)


def test_processes_of_owners_that_are_idle_end_when_there_are_many(top: Path) -> None:
    before = children()

    async def work(check: Check) -> None:
        for uid in range(2000, 2000 + _KEPT + 1):
            await check("fine", Owner(uid, uid))
        assert len(children() - before) == _KEPT
        await check("fine", Owner(2000, 2000))
        with pytest.raises(Refused):
            await check("bad one", Owner(2001, 2001))

    checked(top, work)
    assert children() == before


def test_check_that_waits_is_not_ended_for_others(top: Path) -> None:
    fifo = top / "fifo"
    os.mkfifo(fifo, 0o666)
    fifo.chmod(0o666)

    async def work(check: Check) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(check, "ask fifo", Owner(1999, 1999)))
            for uid in range(2000, 2000 + _KEPT + 1):
                await check("fine", Owner(uid, uid))
            await trio.to_thread.run_sync(fifo.write_text, "fine")

    checked(top, work)


@pytest.mark.parametrize("uid", [0, 2000])
def test_owner_of_a_directory_that_may_not_be_read_gets_an_error(top: Path, uid: int) -> None:
    (top / ".train").chmod(0o700)

    async def work(check: Check) -> None:
        if uid == 0:
            await check("fine", Owner(0, 0))
            return
        with pytest.raises(Refused) as caught:
            await check("fine", Owner(uid, uid))
        assert caught.value.errno == errno.EACCES

    checked(top, work)


def test_request_of_a_killed_process_is_asked_again(top: Path) -> None:
    before = children()

    async def work(check: Check) -> None:
        await check("fine", Owner(2000, 2000))
        (pid,) = children() - before
        os.kill(pid, signal.SIGKILL)
        await check("fine", Owner(2000, 2000))

    checked(top, work)


def test_time_for_a_check_fits_the_size_of_the_push() -> None:
    assert _patience_s(0) == 30
    assert _patience_s(1 << 30) == 46
    assert _patience_s(1 << 50) == 600
