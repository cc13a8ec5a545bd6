"""Real etcd for tests: one member or a cluster on this machine, its data in memory.

    with EtcdServer() as server:
        server.endpoints  # ["127.0.0.1:12345"]

A test that only needs a place of its own takes the fixtures `etcd` (a server for the whole session)
and `etcd_prefix`. Import both where they are used: a fixture belongs to the module it is found in,
the server behind it is the same everywhere.
"""

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
import trustme

START_TIMEOUT_S = 30.0
COMMAND_TIMEOUT_S = 20
# A member alone waits for nobody's vote, but as long as for one before it elects itself.
ALONE = ("--heartbeat-interval=20", "--election-timeout=100")
USER, PASSWORD = "irdmafs", "a secret"


def free_port() -> int:
    """A port below those that the kernel gives to outgoing connections, so that it stays free while
    a server that was killed is not running."""
    for _ in range(1000):
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")


class EtcdServer:
    """`members` etcd processes that are one cluster. A context manager.

    tls: clients must show a certificate of `ca`; `ca_file`, `cert_file`, `key_file` are theirs.
    auth: only USER with PASSWORD may come in; a token is good for `token_ttl_s`.
    """

    def __init__(
        self,
        members: int = 1,
        *,
        tls: bool = False,
        auth: bool = False,
        token_ttl_s: int = 300,
        quota_bytes: int = 0,
        arguments: tuple[str, ...] = (),
    ) -> None:
        if shutil.which("etcd") is None or shutil.which("etcdctl") is None:
            pytest.skip("etcd and etcdctl are not installed (Debian: etcd-server, etcd-client)")
        self._members = members
        self._auth = auth
        self._arguments = (
            *arguments,
            f"--auth-token-ttl={token_ttl_s}",
            f"--quota-backend-bytes={quota_bytes}",
        )
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * members
        memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
        self.directory = Path(tempfile.mkdtemp(prefix="irdmafs-etcd-", dir=memory))
        self._ports = [(free_port(), free_port()) for _ in range(members)]
        self.endpoints = [f"127.0.0.1:{client}" for client, _ in self._ports]
        self.ca_file = self.cert_file = self.key_file = ""
        if tls:
            self._make_certificates()
        # Outlives us if we are killed, and takes the members and their data away.
        self._guardian = subprocess.Popen(
            [
                "sh",
                "-c",
                'read -r line; for pid in "$1"/*.pid; do kill -9 "$(cat "$pid")"; done; rm -rf "$1"',
                "sh",
                str(self.directory),
            ],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # signals to our process group, as timeout(1) sends them, miss it
        )

    def __enter__(self) -> Self:
        try:
            for member in range(self._members):
                self._spawn(member)
            self.wait_ready()
            if self._auth:
                self._enable_auth()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def endpoint(self) -> str:
        """The address of the first member, "host:port"."""
        return self.endpoints[0]

    def start(self, member: int = 0) -> None:
        """Start a member that was stopped or killed; its data is still there."""
        self._spawn(member)
        self.wait_ready(member)

    def stop(self, member: int = 0) -> None:
        """End a member in order: it says good-bye to its clients."""
        self._end(member, signal.SIGTERM)

    def kill9(self, member: int = 0) -> None:
        self._end(member, signal.SIGKILL)

    def pause(self, member: int = 0) -> None:
        """SIGSTOP: the member keeps its connections and answers nothing."""
        self._process(member).send_signal(signal.SIGSTOP)

    def resume(self, member: int = 0) -> None:
        self._process(member).send_signal(signal.SIGCONT)

    def is_running(self, member: int = 0) -> bool:
        return self._processes[member] is not None

    def leader(self) -> int:
        """Index of the member that leads; waits until there is one."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            for member, process in enumerate(self._processes):
                if process is None:
                    continue
                with contextlib.suppress(subprocess.CalledProcessError):
                    status = self._status(member)
                    if status["leader"] == status["header"]["member_id"]:
                        return member
            time.sleep(0.1)
        raise AssertionError("etcd has no leader\n" + self.log_tail())

    def revision(self, member: int = 0) -> int:
        return int(self._status(member)["header"]["revision"])

    def compact(self, revision: int | None = None) -> int:
        """Forget the history before `revision` (default: the newest). Returns it."""
        revision = self.revision() if revision is None else revision
        self.ctl("compact", str(revision), "--physical")
        return revision

    def ctl(self, *arguments: str, member: int | None = None) -> str:
        """Run etcdctl. Raises CalledProcessError."""
        endpoints = self.endpoints if member is None else [self.endpoints[member]]
        scheme = "https" if self.ca_file else "http"
        command = [
            "etcdctl",
            "--endpoints=" + ",".join(f"{scheme}://{endpoint}" for endpoint in endpoints),
            "--command-timeout=10s",
        ]
        if self.ca_file:
            command += [
                f"--cacert={self.ca_file}",
                f"--cert={self.cert_file}",
                f"--key={self.key_file}",
            ]
        if self._auth and (self.directory / "auth").exists():
            command += [f"--user={USER}:{PASSWORD}"]
        return subprocess.run(
            [*command, *arguments],
            check=True,
            timeout=COMMAND_TIMEOUT_S,
            env={"ETCDCTL_API": "3", "PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
        ).stdout

    def wait_ready(self, member: int | None = None) -> None:
        """Until every member that runs (or this one) takes part in a cluster that has a leader."""
        members = range(self._members) if member is None else [member]
        deadline = time.monotonic() + START_TIMEOUT_S
        for one in members:
            while self._processes[one] is not None:
                try:
                    # etcdctl waits for a second when it is refused.
                    socket.create_connection(("127.0.0.1", self._ports[one][0])).close()
                    if self._status(one)["leader"]:
                        break
                except ConnectionRefusedError:
                    pass
                except (subprocess.CalledProcessError, KeyError, ValueError):
                    pass
                process = self._process(one)
                if process.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError("etcd did not start\n" + self.log_tail())
                time.sleep(0.01)

    def log_tail(self) -> str:
        return "\n".join(
            path.name + ":\n" + "\n".join(path.read_text(errors="replace").splitlines()[-20:])
            for path in sorted(self.directory.glob("*.log"))
        )

    def close(self) -> None:
        for member, process in enumerate(self._processes):
            if process is not None:
                self._end(member, signal.SIGKILL)
        shutil.rmtree(self.directory, ignore_errors=True)
        if self._guardian.stdin is not None:
            self._guardian.stdin.close()
        self._guardian.wait()

    def _status(self, member: int) -> dict[str, Any]:
        # A value of 0 is left out of etcdctl's JSON: "leader" is missing while there is none.
        output = self.ctl("endpoint", "status", "-w", "json", member=member)
        status: dict[str, Any] = json.loads(output)[0]["Status"]
        return status

    def _process(self, member: int) -> subprocess.Popen[bytes]:
        process = self._processes[member]
        assert process is not None, f"member {member} does not run"
        return process

    def _spawn(self, member: int) -> None:
        assert self._processes[member] is None, f"member {member} runs already"
        client, peer = self._ports[member]
        scheme = "https" if self.ca_file else "http"
        command = [
            "etcd",
            f"--name=m{member}",
            f"--data-dir={self.directory}/m{member}",
            f"--listen-client-urls={scheme}://127.0.0.1:{client}",
            f"--advertise-client-urls={scheme}://127.0.0.1:{client}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
            "--initial-cluster="
            + ",".join(f"m{i}=http://127.0.0.1:{port}" for i, (_, port) in enumerate(self._ports)),
            "--initial-cluster-token=" + self.directory.name,
            "--logger=zap",
            "--log-level=warn",
            "--bcrypt-cost=4",
            *(ALONE if self._members == 1 else ()),
            *self._arguments,
        ]
        if self.ca_file:
            command += [
                f"--cert-file={self.directory}/server.pem",
                f"--key-file={self.directory}/server.key",
                f"--trusted-ca-file={self.ca_file}",
                "--client-cert-auth",
            ]
        with open(self.directory / f"m{member}.log", "ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes[member] = process
        (self.directory / f"m{member}.pid").write_text(str(process.pid))

    def _end(self, member: int, number: signal.Signals) -> None:
        process = self._process(member)
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)
        process.wait()
        (self.directory / f"m{member}.pid").unlink(missing_ok=True)
        self._processes[member] = None

    def _enable_auth(self) -> None:
        self.ctl("user", "add", f"root:{PASSWORD}")
        self.ctl("user", "grant-role", "root", "root")
        self.ctl("user", "add", f"{USER}:{PASSWORD}")
        self.ctl("user", "grant-role", USER, "root")
        self.ctl("auth", "enable")
        (self.directory / "auth").touch()

    def _make_certificates(self) -> None:
        authority = trustme.CA()
        self.ca_file = str(self.directory / "ca.pem")
        authority.cert_pem.write_to_path(self.ca_file)
        server = authority.issue_cert("127.0.0.1", "localhost")
        client = authority.issue_cert("irdmafs", common_name="irdmafs")
        for name, certificate in (("server", server), ("client", client)):
            certificate.private_key_pem.write_to_path(str(self.directory / f"{name}.key"))
            chain = certificate.cert_chain_pems
            for number, pem in enumerate(chain):
                pem.write_to_path(str(self.directory / f"{name}.pem"), append=number > 0)
        self.cert_file = str(self.directory / "client.pem")
        self.key_file = str(self.directory / "client.key")


_shared: list[EtcdServer] = []
_prefixes = itertools.count(1)


@pytest.fixture(scope="session")
def etcd() -> Iterator[EtcdServer]:
    """An etcd server that all tests of the session share; do not stop it."""
    if not _shared:
        _shared.append(EtcdServer())
        _shared[0].__enter__()
    yield _shared[0]
    # Each module that imports the fixture has it end once, all at the end of the session.
    _shared[0].close()


@pytest.fixture
def etcd_prefix() -> bytes:
    """A key prefix that no other test uses."""
    return b"/test-%d-%d/" % (os.getpid(), next(_prefixes))


def new_prefix() -> bytes:
    """Like the fixture, for tests that need several."""
    return b"/test-%d-%d/" % (os.getpid(), next(_prefixes))
