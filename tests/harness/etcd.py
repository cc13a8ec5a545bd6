"""etcd members on the hosts of a network."""

from __future__ import annotations

import base64
import json
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from irdmafs.cluster_admin import etcd_arguments

from .daemons import Daemon
from .network import CommandFailed, Host, run

CLIENT_PORT = 2379
PEER_PORT = 2380
START_TIMEOUT_S = 30.0
# A failed member is noticed in a second or so: tests wait for that often. A member alone has no failures
# to notice, but waits as long before it elects itself.
HEARTBEAT_MS = 100
ELECTION_MS = 700
ALONE_HEARTBEAT_MS = 20
ALONE_ELECTION_MS = 100
# History is dropped all the time, so that whoever cannot stand that fails here.
KEPT_REVISIONS = 5000


def _listens(pid: int, host: Host, port: int) -> bool:
    # The process sees its host's sockets, which nobody outside can connect to.
    address = int.from_bytes(socket.inet_aton(host.address), sys.byteorder)
    wanted = [f"{address:08X}:{port:04X}", "00000000:0000", "0A"]
    try:
        with open(f"/proc/{pid}/net/tcp") as sockets:
            return any(line.split()[1:4] == wanted for line in sockets)
    except OSError:  # it has just ended
        return False


class Etcd:
    """A cluster of etcd members, one on each of `hosts`, with its data below `directory`. With
    `credentials`, the directory that `irdmafs cluster init --prepare` fills before they start, they speak
    TLS to members of the cluster only."""

    def __init__(
        self, hosts: Sequence[Host], directory: Path, credentials: Path | None = None
    ) -> None:
        self._credentials = credentials
        self._scheme = "http" if credentials is None else "https"
        self._private = bool(hosts[0].launcher)
        self._ports = [self._choose_ports(host) for host in hosts]
        self.endpoints = [
            f"{host.address}:{client}" for host, (client, _) in zip(hosts, self._ports, strict=True)
        ]
        members = ",".join(
            f"{host.name}={self._scheme}://{host.address}:{peer}"
            for host, (_, peer) in zip(hosts, self._ports, strict=True)
        )
        self.members = [
            self._member(host, ports, members, directory)
            for host, ports in zip(hosts, self._ports, strict=True)
        ]

    def _choose_ports(self, host: Host) -> tuple[int, int]:
        if self._private:
            return CLIENT_PORT, PEER_PORT
        # The address is shared with the rest of the machine; both ports are held until both are known.
        first = socket.create_server((host.address, 0))
        with first, socket.create_server((host.address, 0)) as second:
            return first.getsockname()[1], second.getsockname()[1]

    def _member(self, host: Host, ports: tuple[int, int], members: str, directory: Path) -> Daemon:
        client, peer = (f"{self._scheme}://{host.address}:{port}" for port in ports)
        alone = len(self._ports) == 1
        command = [
            "etcd",
            f"--name={host.name}",
            f"--data-dir={directory / host.name}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster={members}",
            f"--initial-cluster-token={directory.name}",
            f"--heartbeat-interval={ALONE_HEARTBEAT_MS if alone else HEARTBEAT_MS}",
            f"--election-timeout={ALONE_ELECTION_MS if alone else ELECTION_MS}",
            "--auto-compaction-mode=revision",
            f"--auto-compaction-retention={KEPT_REVISIONS}",
            "--logger=zap",
            "--log-level=warn",
            *(etcd_arguments(str(self._credentials)) if self._credentials else ()),
        ]
        return Daemon(host.name, host, command, directory / f"{host.name}.log")

    def start(self) -> None:
        """Raises CommandFailed when it does not come up."""
        for program in ("etcd", "etcdctl"):
            if shutil.which(program) is None:
                raise CommandFailed(f"{program} is not installed (etcd-server, etcd-client)")
        for member in self.members:
            member.start()
        self.wait_ready()

    def wait_ready(self, within_s: float = START_TIMEOUT_S) -> None:
        """Until the members that run answer a linearizable read. Raises CommandFailed."""
        deadline = time.monotonic() + within_s
        # etcdctl waits for a second when it is refused.
        while time.monotonic() < deadline and not self._all_listen():
            time.sleep(0.01)
        while True:
            try:
                self.control("get", "health")
                return
            except CommandFailed as error:
                dead = next((m for m in self.members if m.exit_status not in (None, -9)), None)
                if dead is not None or time.monotonic() > deadline:
                    log = (dead or self.members[0]).log_tail()
                    raise CommandFailed(f"etcd does not answer: {error}\n{log}") from None
            time.sleep(0.02)

    def _all_listen(self) -> bool:
        """Whether every member that runs accepts connections, or one has ended by itself."""
        for member, (port, _) in zip(self.members, self._ports, strict=True):
            if member.exit_status not in (None, -signal.SIGKILL):
                return True
            if member.alive and not member.stopped and not _listens(member.pid, member.host, port):
                return False
        return True

    def control(self, *arguments: str) -> str:
        """etcdctl, from the host of a member that runs. Raises CommandFailed."""
        running = [
            (member, endpoint)
            for member, endpoint in zip(self.members, self.endpoints, strict=True)
            if member.alive and not member.stopped
        ]
        if not running:
            raise CommandFailed("no etcd member runs")
        endpoints = ",".join(f"{self._scheme}://{endpoint}" for _, endpoint in running)
        shown: tuple[str, ...] = ()
        if self._credentials is not None:
            ca, cert, key = (
                self._credentials / name for name in ("ca.pem", "admin.pem", "admin.key")
            )
            shown = (f"--cacert={ca}", f"--cert={cert}", f"--key={key}")
        return run(
            *running[0][0].host.launcher,
            *("env", "ETCDCTL_API=3", "etcdctl", f"--endpoints={endpoints}", *shown),
            *("--command-timeout=3s", "--dial-timeout=1s", *arguments),
        )

    def get(self, prefix: bytes) -> dict[bytes, bytes]:
        """All keys that begin with `prefix`, without it, and their values."""
        # etcdctl takes keys as text; those asked for here begin with printable characters.
        answer = json.loads(self.control("get", "--prefix", prefix.decode(), "-w", "json"))
        decode = base64.b64decode
        return {
            decode(pair["key"])[len(prefix) :]: decode(pair.get("value", ""))
            for pair in answer.get("kvs", ())
        }

    def count(self, prefix: bytes) -> int:
        """How many keys begin with `prefix`."""
        # The answer's count is of all keys in the range, however few are sent.
        answer = self.control("get", "--prefix", prefix.decode(), "--limit=1", "-w", "json")
        return int(json.loads(answer).get("count", 0))

    def leader(self) -> Daemon:
        """The member that leads; waits until there is one. Raises CommandFailed."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                answers = json.loads(self.control("endpoint", "status", "-w", "json"))
            except CommandFailed:  # a member that was just started may not answer in time
                if time.monotonic() > deadline:
                    raise
                continue
            for answer in answers:
                status = answer["Status"]
                if status.get("leader", 0) == status["header"]["member_id"]:
                    endpoint = answer["Endpoint"].removeprefix(f"{self._scheme}://")
                    return self.members[self.endpoints.index(endpoint)]
            if time.monotonic() > deadline:
                raise CommandFailed("etcd has no leader")
            time.sleep(0.05)

    def kill9(self) -> None:
        for member in self.members:
            member.kill9()
