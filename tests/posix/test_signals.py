"""Signals that a program handles do not disturb its calls on files; those that end it do."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import trio
from harness.clusters import MIB, Cluster, ClusterMount, Plan
from harness.daemons import paused
from harness.mountpoint import eventually
from harness.patterns import pattern, version_of
from harness.processes import Process

from irdmafs.callers.processes import PendingSignals, Processes

TICK_S = 0.002
# How long an impatient user would wait.
SOON_S = 10.0
# Nodes are stopped for a while, and must not look like ones that are gone.
PLAN = Plan(nodes=2, mounts=2, lease_ttl_s=60)


@pytest.fixture
def ticking() -> Iterator[list[int]]:
    """A timer's signal comes all the time."""
    came: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: came.append(number))
    signal.siginterrupt(signal.SIGALRM, True)
    signal.setitimer(signal.ITIMER_REAL, TICK_S, TICK_S)
    yield came
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def came(mount: ClusterMount, kind: str) -> Callable[[], bool]:
    """Tells whether the mount has got a request of this kind since now."""

    def count() -> int:
        return int(mount.status()["requests"].get(kind, 0))

    before = count()
    return lambda: count() > before


def test_a_close_publishes_while_a_timer_ticks(cluster: Cluster, ticking: list[int]) -> None:
    for number in range(1, 6):
        # Without Python's own files, which begin calls anew.
        fd = os.open(cluster.mounts[0].path / "ticking", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.write(fd, pattern(number, 16 * MIB))
        if number % 2:
            os.fsync(fd)
        os.close(fd)
        assert os.stat(cluster.mounts[0].path / "ticking").st_size == 16 * MIB
        assert version_of((cluster.mounts[1].path / "ticking").read_bytes()) == number
    assert ticking


def test_names_change_once_while_a_timer_ticks(cluster: Cluster, ticking: list[int]) -> None:
    top = cluster.mounts[0].path / "names"
    for number in range(30):
        top.mkdir()
        os.mkdir(top / "old")
        os.rename(top / "old", top / "new")
        os.symlink("target", top / "link")
        os.setxattr(top / "new", "user.number", b"%d" % number)
        assert sorted(os.listdir(cluster.mounts[1].path / "names")) == ["link", "new"]
        os.unlink(top / "link")
        os.rmdir(top / "new")
        top.rmdir()
    assert ticking


@pytest.mark.parametrize(
    ("number", "after_tick"),
    [(signal.SIGKILL, False), (signal.SIGTERM, False), (signal.SIGQUIT, True)],
)
def test_who_waits_can_be_ended(cluster: Cluster, number: signal.Signals, after_tick: bool) -> None:
    (cluster.mounts[0].path / "wanted").write_bytes(os.urandom(MIB))
    source = (
        "import os, resource, signal, sys\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "for number in signal.SIGTERM, signal.SIGQUIT:\n"
        "    signal.signal(number, signal.SIG_DFL)\n"
        "signal.signal(signal.SIGUSR1, lambda *_: None)\n"
        "os.open(sys.argv[1], os.O_RDONLY)\n"
    )
    command = [sys.executable, "-c", source, str(cluster.mounts[1].path / "wanted")]
    is_opening = came(cluster.mounts[1], "OPEN")
    with paused(*cluster.nodes), subprocess.Popen(command) as reader:
        try:
            eventually(is_opening, "it waits")
            if after_tick:
                reader.send_signal(signal.SIGUSR1)
                with pytest.raises(subprocess.TimeoutExpired):
                    reader.wait(0.5)
            reader.send_signal(number)
            assert reader.wait(SOON_S) == -number
        finally:
            reader.kill()
    assert len((cluster.mounts[1].path / "wanted").read_bytes()) == MIB


def test_an_interrupt_from_the_keyboard_ends_a_wait_for_a_file(cluster: Cluster) -> None:
    (cluster.mounts[0].path / "typed").write_bytes(os.urandom(MIB))
    is_opening = came(cluster.mounts[1], "OPEN")
    with paused(*cluster.nodes), Process() as reader:
        reader.start(
            "import signal\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "try:\n"
            "    open(path, 'rb')\n"
            "except KeyboardInterrupt:\n"
            "    outcome = 'interrupted'\n"
            "outcome",
            path=str(cluster.mounts[1].path / "typed"),
        )
        eventually(is_opening, "it waits")
        os.kill(reader.pid, signal.SIGINT)
        assert reader.result(SOON_S) == "interrupted"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_close_goes_on_when_its_program_ends(cluster: Cluster, number: signal.Signals) -> None:
    """As one does that writes a last checkpoint then."""
    path = cluster.mounts[0].path / f"checkpoint-{number}"
    is_closing = came(cluster.mounts[0], "FLUSH")
    with Process() as writer:
        writer.do(
            "import signal\n"
            "asked = []\n"
            "signal.signal(number, lambda *_: asked.append(1))\n"
            "fd = os.open(path, os.O_CREAT | os.O_WRONLY)\n"
            "os.write(fd, pattern(1, 1 << 20))",
            path=str(path), number=int(number),
        )  # fmt: skip
        with paused(*cluster.nodes):
            writer.start("os.close(fd); asked")
            eventually(is_closing, "it waits")
            os.kill(writer.pid, number)
            assert not writer.finished(within_s=0.5)
        assert writer.result() == [1]
    assert version_of((cluster.mounts[1].path / path.name).read_bytes()) == 1


def pending_signals(pid: int) -> PendingSignals:
    processes = Processes("/nowhere")
    try:
        return trio.run(processes.pending_signals, pid)
    finally:
        processes.close()


def test_a_blocked_signal_is_not_pending_and_a_process_that_is_gone_is_dead() -> None:
    nothing = PendingSignals(fatal=False, keyboard=False)
    assert pending_signals(os.getpid()) == nothing
    with Process() as process:
        process.do("import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [2, 15])")
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(process.pid, number)
        assert pending_signals(process.pid) == nothing
        process.kill()
        assert pending_signals(process.pid).fatal
    assert pending_signals(0) == PendingSignals(fatal=False, keyboard=True)
