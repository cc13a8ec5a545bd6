"""The hosts that cluster tests run on: links carry, are cut in one direction or both, and heal."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.cluster import Cluster, Plan
from harness.clusters import need_network
from harness.mountpoint import eventually
from harness.network import NETNS_DIRECTORY, Host, Loopback, Network
from harness.processes import Program, has_ended
from harness.scratch import sweep

PORT = 5000
ECHO = """
import socket, sys
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("ready", flush=True)
while True:
    connection, _ = listener.accept()
    connection.sendall(connection.recv(100))
    connection.close()
"""
ASK = """
import socket, sys
try:
    connection = socket.create_connection((sys.argv[1], int(sys.argv[2])), float(sys.argv[3]))
    connection.sendall(b"hello")
    print(connection.recv(100) == b"hello")
except TimeoutError:
    print("lost")
"""


def start(host: Host, source: str, *arguments: object) -> Program:
    return Program(*host.launcher, sys.executable, "-c", source, *arguments, cwd="/")


def reaches(sender: Host, receiver: Host) -> bool:
    """Return whether there is an answer, however busy the machine is."""
    return start(sender, ASK, receiver.address, PORT, 30).communicate()[0] == "True\n"


def loses(sender: Host, receiver: Host) -> bool:
    """Return whether there is no answer at once."""
    return start(sender, ASK, receiver.address, PORT, 0.3).communicate()[0] == "lost\n"


@pytest.fixture
def network() -> Iterator[Network]:
    with need_network() as made:
        yield made


@pytest.fixture
def hosts(network: Network) -> Iterator[list[Host]]:
    """Three hosts that answer each other."""
    made = network.add_hosts(["a", "b", "c"])
    servers = [start(host, ECHO, host.address, PORT) for host in made]
    for server in servers:
        server.stdout.readline()
    yield made
    for server in servers:
        server.kill()
        server.communicate()


def test_links_carry_nothing_while_they_are_cut(network: Network, hosts: list[Host]) -> None:
    """One that is cut in one direction loses requests or answers, which looks the same to who asks; healing
    one link leaves others cut. A host that is slowed down still answers."""
    a, b, c = hosts
    assert reaches(a, b)
    network.cut(a, b)
    assert loses(a, b)
    assert loses(b, a)
    assert reaches(a, c)
    assert reaches(c, b)
    network.heal(b, a)
    assert reaches(a, b)
    assert reaches(b, a)

    network.cut(a, b, one_way=True)
    network.cut(c, a, one_way=True)
    assert loses(a, b)
    assert loses(b, a)
    network.heal(a, b)
    assert reaches(a, b)
    assert loses(a, c)
    network.heal_all()
    assert reaches(a, c)

    network.shape(a, 1e6)
    assert reaches(a, b)
    network.shape(a, None)
    assert reaches(a, b)


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
