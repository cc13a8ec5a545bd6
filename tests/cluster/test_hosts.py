"""The hosts that cluster tests run on: their addresses, and what a run leaves."""

import os
import signal
import sys
from pathlib import Path

from harness.cluster import Cluster, Plan
from harness.clusters import need_network
from harness.mountpoint import eventually
from harness.network import NETNS_DIRECTORY, Loopback
from harness.processes import Program, has_ended
from harness.scratch import sweep


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
