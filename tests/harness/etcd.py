"""etcd members on the hosts of a network, or on this machine alone."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import shutil
import socket
import time
from collections.abc import Iterable, Sequence
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from irdmafs.cli.cluster_admin import etcd_arguments

from .daemons import Daemon
from .network import CommandFailed, Host, connect_beside, run
from .tiers import Tier, allow

CLIENT_PORT = 2379
PEER_PORT = 2380
START_TIMEOUT_S = 30.0
ANSWER_TIMEOUT_S = 10.0
# A failed member is noticed in a second or so: tests wait for that often. A member alone has no failures
# to notice, but waits as long before it elects itself.
HEARTBEAT_MS = 100
ELECTION_MS = 700
ALONE_HEARTBEAT_MS = 20
ALONE_ELECTION_MS = 100
# One that lives as long as its worker may wait longer: each beat costs time, also while no test asks.
LONG_LIVED = ("--heartbeat-interval=100", "--election-timeout=500")
# History is dropped all the time, so that whoever cannot stand that fails here.
KEPT_REVISIONS = 5000

_given: set[int] = set()


def free_port(address: str = "127.0.0.1") -> int:
    """A port below those that the kernel gives to outgoing connections, so that it stays free while
    a server that was killed is not running. Each worker of pytest-xdist has ports of its own, and gets none
    twice: a server may choose two, and then begin."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    ports = range(10_000 + worker % workers, 32_000, workers)
    for _ in range(1000):
        port = random.SystemRandom().choice(ports)
        with socket.socket() as probe, contextlib.suppress(OSError):
            if port not in _given:
                probe.bind((address, port))
                _given.add(port)
                return port
    raise AssertionError("no free port")


def missing_programs() -> str:
    """Why no etcd can run on this machine; empty if it can."""
    missing = [name for name in ("etcd", "etcdctl") if shutil.which(name) is None]
    return f"{missing[0]} is not installed (etcd-server, etcd-client)" if missing else ""


def ask(connection: HTTPConnection, method: str, request: dict[str, Any]) -> dict[str, Any]:
    """Ask etcd's interface of JSON, and close the connection. Raises CommandFailed."""
    try:
        connection.request("POST", f"/v3/{method}", json.dumps(request))
        with connection.getresponse() as response:
            text = response.read().decode()
    except (OSError, HTTPException) as error:
        raise CommandFailed(f"etcd does not answer: {error}") from None
    finally:
        connection.close()
    if response.status != 200:
        raise CommandFailed(f"etcd says {response.status}: {text}")
    answer: dict[str, Any] = json.loads(text)
    return answer


def range_of(prefix: bytes, limit: int = 0) -> dict[str, Any]:
    """Return the request "kv/range" for keys that begin with a prefix; `limit` 0 is for all."""
    ends = {"key": prefix, "range_end": prefix[:-1] + bytes([prefix[-1] + 1])}
    encoded = {name: base64.b64encode(key).decode() for name, key in ends.items()}
    return {**encoded, "limit": limit}


def pairs_in(answer: dict[str, Any], prefix: bytes) -> dict[bytes, bytes]:
    """Return the keys of an answer, without their prefix, and their values."""
    decode = base64.b64decode
    return {
        decode(pair["key"])[len(prefix) :]: decode(pair.get("value", ""))
        for pair in answer.get("kvs", ())
    }


class Etcd:
    """A cluster of etcd members, one on each of `hosts`, with its data below `directory`. With
    `credentials`, a directory such as `irdmafs cluster init --prepare` fills, they speak TLS to members of
    the cluster only. `user` is "name:password", once they ask for one. Members go by their numbers."""

    user = ""

    def __init__(
        self,
        hosts: Sequence[Host],
        directory: Path,
        credentials: Path | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        self.directory = directory
        self._credentials = credentials
        self._scheme = "http" if credentials is None else "https"
        self._arguments = arguments
        # Without a namespace of its own, a host's address is shared with the rest of the machine.
        self._ports = [
            (CLIENT_PORT, PEER_PORT)
            if host.launcher
            else (free_port(host.address), free_port(host.address))
            for host in hosts
        ]
        own = [*zip(hosts, self._ports, strict=True)]
        self.endpoints = [f"{host.address}:{client}" for host, (client, _) in own]
        peers = [f"{host.name}={self._scheme}://{host.address}:{peer}" for host, (_, peer) in own]
        self.members = [self._member(host, ports, ",".join(peers)) for host, ports in own]

    @property
    def endpoint(self) -> str:
        """The address of the first member, "host:port"."""
        return self.endpoints[0]

    def _member(self, host: Host, ports: tuple[int, int], all_members: str) -> Daemon:
        client, peer = (f"{self._scheme}://{host.address}:{port}" for port in ports)
        alone = len(self._ports) == 1
        command = [
            "etcd",
            *(etcd_arguments(str(self._credentials)) if self._credentials else ()),
            f"--name={host.name}",
            f"--data-dir={self.directory / host.name}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster={all_members}",
            f"--initial-cluster-token={self.directory.name}",
            f"--heartbeat-interval={ALONE_HEARTBEAT_MS if alone else HEARTBEAT_MS}",
            f"--election-timeout={ALONE_ELECTION_MS if alone else ELECTION_MS}",
            "--auto-compaction-mode=revision",
            f"--auto-compaction-retention={KEPT_REVISIONS}",
            "--logger=zap",
            "--log-level=warn",
            "--pre-vote",
            *self._arguments,
        ]
        return Daemon(host.name, host, command, self.directory / f"{host.name}.log")

    # -- starting and ending -------------------------------------------------------------------

    def _chosen(self, member: int | None) -> Sequence[Daemon]:
        return self.members if member is None else [self.members[member]]

    def start(self, member: int | None = None) -> None:
        """Start a member, or all; data of earlier starts is still there. Raises CommandFailed."""
        allow(Tier.ALL, "etcd")
        if missing := missing_programs():
            raise CommandFailed(missing)
        for one in self._chosen(member):
            one.start()
        self.wait_ready(member)

    def kill9(self, member: int | None = None) -> None:
        for one in self._chosen(member):
            one.kill9()

    def wait_ready(self, member: int | None = None, within_s: float = START_TIMEOUT_S) -> None:
        """Wait until a member, or all that run, answer a linearizable read. Raises CommandFailed."""
        deadline = time.monotonic() + within_s
        for number in self._running() if member is None else [member]:
            one = self.members[number]
            while True:
                try:
                    if self._answers_http:
                        self.range(b"health")
                    else:
                        # etcdctl waits for a second when it is refused.
                        self._connect(number).close()
                        self.ctl("get", "health", member=number)
                    break
                except CommandFailed as error:
                    if not one.alive or time.monotonic() > deadline:
                        raise CommandFailed(f"{error}\n{one.log_tail()}") from None
                time.sleep(0.01)

    def _running(self) -> Iterable[int]:
        return [i for i, one in enumerate(self.members) if one.alive and not one.stopped]

    # -- asking --------------------------------------------------------------------------------

    def ctl(self, *arguments: str, member: int | None = None) -> str:
        """Run etcdctl on the host of a member, and ask it, or all that run. Raises CommandFailed."""
        asked = self._running() if member is None else [member]
        if not asked:
            raise CommandFailed("no etcd member runs")
        endpoints = ",".join(f"{self._scheme}://{self.endpoints[number]}" for number in asked)
        shown: list[str] = []
        if self._credentials is not None:
            names = {"cacert": "ca.pem", "cert": "admin.pem", "key": "admin.key"}
            shown = [f"--{option}={self._credentials / name}" for option, name in names.items()]
        if self.user:
            shown.append(f"--user={self.user}")
        return run(
            *self.members[next(iter(asked))].host.launcher,
            *("env", "ETCDCTL_API=3", "etcdctl", f"--endpoints={endpoints}", *shown),
            *(f"--command-timeout={ANSWER_TIMEOUT_S:g}s", "--dial-timeout=1s", *arguments),
        )

    def get(self, prefix: bytes) -> dict[bytes, bytes]:
        """All keys that begin with `prefix`, without it, and their values."""
        return pairs_in(self.range(prefix), prefix)

    def count(self, prefix: bytes) -> int:
        """How many keys begin with `prefix`."""
        # The answer's count is of all keys in the range, however few are sent.
        return int(self.range(prefix, limit=1).get("count", 0))

    def range(self, prefix: bytes, limit: int = 0) -> dict[str, Any]:
        """Return etcd's answer about the keys that begin with `prefix`, as JSON. Raises CommandFailed."""
        if self._answers_http:
            return self._ask("kv/range", range_of(prefix, limit))
        # etcdctl takes keys as text; those asked for here begin with printable characters.
        arguments = ("get", "--prefix", prefix.decode(), f"--limit={limit}", "-w", "json")
        answer: dict[str, Any] = json.loads(self.ctl(*arguments))
        return answer

    def revoke(self, lease: int) -> None:
        """End a lease. Raises CommandFailed."""
        if self._answers_http:
            self._ask("lease/revoke", {"ID": lease})
        else:
            self.ctl("lease", "revoke", f"{lease:x}")

    @property
    def _answers_http(self) -> bool:
        return len(self.members) == 1 and self._credentials is None and not self.user

    def _ask(self, method: str, request: dict[str, Any]) -> dict[str, Any]:
        """As etcdctl does, which takes longer to start than to ask: many tests wait for keys."""
        if not self._running():
            raise CommandFailed("no etcd member runs")
        connection = HTTPConnection(self.endpoint)
        connection.sock = self._connect(0)
        return ask(connection, method, request)

    def _connect(self, member: int) -> socket.socket:
        """Return a connection to a member. Raises CommandFailed."""
        one, (port, _) = self.members[member], self._ports[member]
        connect = (
            partial(connect_beside, one.pid) if one.host.launcher else socket.create_connection
        )
        try:
            return connect((one.host.address, port), ANSWER_TIMEOUT_S)
        except OSError as error:
            raise CommandFailed(f"etcd does not answer: {error}") from None

    def _status(self, member: int) -> dict[str, Any]:
        # A value of 0 is left out of etcdctl's JSON: "leader" is missing while there is none.
        answer = self.ctl("endpoint", "status", "-w", "json", member=member)
        status: dict[str, Any] = json.loads(answer)[0]["Status"]
        return status

    def leader(self) -> int:
        """The number of the member that leads; waits until there is one. Raises CommandFailed."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            for member in self._running():
                # A member that was just started may not answer in time.
                with contextlib.suppress(CommandFailed):
                    status = self._status(member)
                    if status.get("leader", 0) == status["header"]["member_id"]:
                        return member
            time.sleep(0.05)
        raise CommandFailed(f"etcd has no leader\n{self.log_tail()}")

    def revision(self, member: int = 0) -> int:
        return int(self._status(member)["header"]["revision"])

    def compact(self) -> int:
        """Forget the history before the newest revision. Returns that."""
        revision = self.revision()
        self.ctl("compact", str(revision), "--physical")
        return revision

    def log_tail(self) -> str:
        return "\n".join(f"{one.name}:\n{one.log_tail()}" for one in self.members)
