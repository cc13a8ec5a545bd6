"""Hosts of tests have addresses of their own, nothing of a killed run stays, and commands that are forked
from a process that has imported irdmafs are as real ones."""

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from harness import forks
from harness.cluster import Cluster, Plan
from harness.clusters import Host, need_network
from harness.mountpoint import Mount, eventually
from harness.network import NETNS_DIRECTORY, Loopback
from harness.processes import Program, has_ended
from harness.scratch import sweep

forked = pytest.mark.skipif(forks.REAL in os.environ, reason="nothing is forked")


def test_loopback_hosts_have_addresses_of_their_own() -> None:
    with Loopback() as one, Loopback() as other:
        hosts = [*one.add_hosts(["a", "b"]), *other.add_hosts(["a", "b"])]
    assert len({host.address for host in hosts}) == 4


def test_what_a_killed_run_left_is_swept_away() -> None:
    need_network().close()
    script = f"""
import sys, time
sys.path[:0] = {sys.path!r}
from harness.cluster import Cluster, Plan
cluster = Cluster(Plan(namespaces=True))
cluster.etcd.start()
print(cluster.directory, cluster.etcd.members[0].pid, flush=True)
time.sleep(60)
"""
    maker = Program(sys.executable, "-c", script)
    directory, pid = maker.stdout.readline().split()
    # From its death on, tests in other workers may sweep it away, too.
    assert Path(directory).exists()
    maker.send_signal(signal.SIGKILL)
    maker.communicate()
    with Cluster(Plan(nodes=0, mounts=0, etcd_members=1, namespaces=True)):
        pass
    sweep()
    assert not Path(directory).exists()
    assert not [name for name in os.listdir(NETNS_DIRECTORY) if f"-{maker.pid}-" in name]
    eventually(lambda: has_ended(int(pid)), "its etcd has ended")


def run(words: list[str]) -> tuple[int, str, str]:
    done = forks.run([*forks.PREFIX, *words], timeout_s=60)
    return done.returncode, done.stdout, done.stderr


@forked
@pytest.mark.parametrize("words", [["--version"], ["umount", "/proc"], ["no such command"]])
def test_output_and_exit_status_are_those_of_the_command(words: list[str]) -> None:
    found = run(words)
    with forks.real_commands():
        assert run(words) == found


def state(pid: int) -> dict[str, object]:
    """Return what a process has from who started it."""
    here = Path(f"/proc/{pid}")
    lines = (here / "status").read_text().splitlines()
    fields = dict(line.split(":\t", 1) for line in lines)
    links = [os.readlink(fd) for fd in (here / "fd").iterdir()]
    return {
        "words": (here / "cmdline").read_bytes().rstrip(b"\0").split(b"\0"),
        "directory": os.readlink(here / "cwd"),
        "input": os.readlink(here / "fd/0"),
        "open": sorted(link.partition(":[")[0].replace(f"/{pid}/", "/PID/") for link in links),
        "leads its session": os.getsid(pid) == pid,
        "namespace": os.readlink(here / "ns/net"),
        "name": fields["Name"],
        "signals": [fields[f"Sig{kind}"] for kind in ("Blk", "Ign", "Cgt")],
    }


def started(own: Mount, host: Host, number: int) -> tuple[dict[str, object], int]:
    """Mount a new store on a host in the foreground, and end it by a signal. Returns its state and its exit
    status."""
    shutil.rmtree(own.store, ignore_errors=True)
    words = [*forks.PREFIX, "mount", str(own.path), "--store", str(own.store), "-f"]
    with own.log.open("wb") as log:
        running = forks.start(words, host.launcher, output=log, errors=log)
    try:
        eventually(lambda: b"mounted (" in own.log.read_bytes(), "it is mounted")
        assert own.pids() == [running.pid]
        found = state(running.pid)
    finally:
        running.send_signal(number)
    return found, running.wait(10)


@forked
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_state_and_end_of_a_process_are_those_of_the_command(number: int) -> None:
    own = Mount("kernel")
    try:
        with need_network() as network:
            (host,) = network.add_hosts(["host"])
            found, status = started(own, host, number)
            with forks.real_commands():
                assert started(own, host, number) == (found, status)
        assert status == (-number if number == signal.SIGKILL else 0)
        assert found["namespace"] != os.readlink("/proc/self/ns/net")
    finally:
        own.close()
