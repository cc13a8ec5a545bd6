"""Hosts on one machine: network namespaces on one bridge, whose links can be cut and slowed down.

A cut is silent and has a direction, as on a real network: the sender's neighbour entry for the
receiver is pinned to an address where nobody listens. Blackhole routes would tell the sender at
once, and packet filters need kernel modules that are not everywhere.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .closing import Closing
from .fork_server import enter

NETNS_DIRECTORY = Path("/run/netns")
PREFIX = "irdmafs"
HOSTS_MAX = 200
COMMAND_TIMEOUT_S = 60.0
# Frames as on networks made for this; the headers then take 1 % of a shaped rate and not 4 %.
MTU = 9000

_NAME = re.compile(rf"{PREFIX}-(\d+)-\d+-[a-z0-9]+")
_serial = iter(range(1, 1 << 30))


class Unavailable(Exception):
    """Something cannot be had on this machine; the text says why."""


class NoNamespaces(Unavailable):
    """Network namespaces cannot be had here."""


class CommandFailed(Exception):
    """A program that was run said no; the text is what it printed."""


def run(
    *command: str | os.PathLike[str],
    stdin: str | None = None,
    check: bool = True,
    timeout_s: float = COMMAND_TIMEOUT_S,
) -> str:
    """Return what a program prints. Raises CommandFailed with its output, unless not `check`."""
    words = [os.fspath(word) for word in command]
    try:
        done = subprocess.run(
            words,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            cwd="/",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CommandFailed(f"{' '.join(words)}: {error}") from None
    if check and done.returncode != 0:
        said = (done.stdout + done.stderr).strip()
        raise CommandFailed(f"{' '.join(words)}: exit {done.returncode}: {said}")
    return done.stdout


def connect_beside(pid: int, address: tuple[str, int], timeout_s: float) -> socket.socket:
    """Return a TCP connection that is made in the network namespace of a process. Raises OSError."""

    def connect() -> socket.socket:
        # A thread has a namespace of its own.
        enter(f"/proc/{pid}/ns/net")
        return socket.create_connection(address, timeout_s)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(connect).result()


@dataclass(frozen=True, slots=True)
class Host:
    """`launcher` is the command prefix that runs a program on this host."""

    name: str
    address: str
    launcher: tuple[str, ...] = ()


class Network(Closing):
    """Hosts that reach each other. A context manager; leaving it takes all of them away."""

    # Whether links can be cut and shaped.
    links = False

    def add_hosts(self, names: Sequence[str]) -> list[Host]:
        raise NotImplementedError

    def cut(self, sender: Host, receiver: Host, *, one_way: bool = False) -> None:
        """Lose everything that goes from `sender` to `receiver`, and back unless `one_way`."""
        raise NoNamespaces("links of loopback addresses cannot be cut")

    def heal(self, one: Host, other: Host) -> None:
        """End every cut between two hosts. Healing what is not cut does nothing."""
        raise NoNamespaces("links of loopback addresses cannot be cut")

    def heal_all(self) -> None:
        pass

    def shape(self, host: Host, bits_per_s: float | None) -> None:
        """Limit what a host sends and what it receives, each; None takes the limit away."""
        raise NoNamespaces("loopback addresses cannot be shaped")

    def close(self) -> None:
        pass


class Loopback(Network):
    """Hosts as addresses of the loopback device: for users who may not make namespaces."""

    def __init__(self) -> None:
        # Clusters of different processes get different networks, so that they may share port numbers.
        self._network = f"127.{1 + os.getpid() % 250}.{next(_serial) % 250}"
        self._hosts = 0

    def add_hosts(self, names: Sequence[str]) -> list[Host]:
        first = self._hosts + 1
        self._hosts += len(names)
        return [Host(name, f"{self._network}.{first + i}") for i, name in enumerate(names)]


class Namespaces(Network):
    """Hosts as network namespaces, each with one link to a bridge in a namespace of its own.

    Raises NoNamespaces where they cannot be made.
    """

    links = True

    def __init__(self) -> None:
        for program in ("ip", "nsenter", "tc"):
            if shutil.which(program) is None:
                raise NoNamespaces(f"{program} is not installed (apt install iproute2 util-linux)")
        if os.geteuid() != 0:
            raise NoNamespaces("making network namespaces takes root")
        self._prefix = f"{PREFIX}-{os.getpid()}-{next(_serial)}"
        self._switch = f"{self._prefix}-switch"
        self._ports: dict[str, str] = {}
        self._cuts: set[tuple[str, str]] = set()
        self._hosts: dict[str, Host] = {}
        try:
            run("ip", "netns", "add", self._switch)
            self._configure(
                self._switch,
                "link set lo up",
                f"link add br0 address 02:00:00:00:ff:ff mtu {MTU} type bridge forward_delay 0",
                "link set br0 up",
            )
        except CommandFailed as error:
            self.close()
            raise NoNamespaces(str(error)) from None
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _configure(namespace: str, *lines: str) -> None:
        run("ip", "-n", namespace, "-batch", "-", stdin="\n".join(lines) + "\n")

    def _namespace(self, host: Host) -> str:
        return f"{self._prefix}-{host.name}"

    def add_hosts(self, names: Sequence[str]) -> list[Host]:
        """Names are of lower-case letters and digits. Raises CommandFailed."""
        assert len(self._hosts) + len(names) < HOSTS_MAX
        hosts = []
        for name in names:
            assert re.fullmatch(r"[a-z0-9]+", name), name
            assert name not in self._hosts, f"there is a host {name} already"
            number = len(self._hosts) + 1
            namespace = f"{self._prefix}-{name}"
            launcher = ("nsenter", f"--net={NETNS_DIRECTORY / namespace}", "--")
            hosts.append(Host(name, f"10.77.0.{number}", launcher))
            self._hosts[name] = hosts[-1]
            self._ports[name] = f"port{number}"
        run("ip", "-batch", "-", stdin="".join(f"netns add {self._namespace(h)}\n" for h in hosts))
        wires = []
        for host in hosts:
            port = self._ports[host.name]
            namespace = self._namespace(host)
            wires += [
                f"link add {port} mtu {MTU} type veth peer name eth0 mtu {MTU} netns {namespace}",
                f"link set {port} master br0 up",
            ]
        self._configure(self._switch, *wires)
        for host in hosts:
            self._configure(
                self._namespace(host),
                "link set lo up",
                "link set eth0 addrgenmode none",
                f"addr add {host.address}/24 dev eth0",
                "link set eth0 up",
            )
        return hosts

    def cut(self, sender: Host, receiver: Host, *, one_way: bool = False) -> None:
        self._cut(sender, receiver)
        if not one_way:
            self._cut(receiver, sender)

    def _cut(self, sender: Host, receiver: Host) -> None:
        # The bridge's own address: it takes the frames and, routing nothing, drops them.
        self._configure(
            self._namespace(sender),
            f"neigh replace {receiver.address} lladdr 02:00:00:00:ff:ff dev eth0 nud permanent",
        )
        self._cuts.add((sender.name, receiver.name))

    def heal(self, one: Host, other: Host) -> None:
        for sender, receiver in ((one, other), (other, one)):
            if (sender.name, receiver.name) in self._cuts:
                self._configure(self._namespace(sender), f"neigh del {receiver.address} dev eth0")
                self._cuts.discard((sender.name, receiver.name))

    def heal_all(self) -> None:
        for one, other in list(self._cuts):
            self.heal(self._hosts[one], self._hosts[other])

    def shape(self, host: Host, bits_per_s: float | None) -> None:
        _shape(self._namespace(host), "eth0", bits_per_s)
        _shape(self._switch, self._ports[host.name], bits_per_s)

    def close(self) -> None:
        names = [self._namespace(host) for host in self._hosts.values()]
        _remove((*names, self._switch))
        self._hosts.clear()
        self._cuts.clear()


def _shape(namespace: str, device: str, bits_per_s: float | None) -> None:
    """Limit what is sent by a device."""
    if bits_per_s is None:
        run("tc", "-n", namespace, "qdisc", "del", "dev", device, "root", check=False)
        return
    # A millisecond's worth at once, and no less than a few of the largest packets, which the kernel
    # segments late.
    burst = max(256 << 10, int(bits_per_s / 8 / 1000))
    run(
        *("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf"),
        *("rate", f"{int(bits_per_s)}bit", "burst", str(burst), "latency", "20ms"),
    )


def make_network(namespaces: bool | None = None) -> Network:
    """A network of namespaces; loopback addresses if they cannot be had (None) or are not wanted
    (False). Raises NoNamespaces if they are a must (True)."""
    sweep()
    if namespaces is False:
        return Loopback()
    try:
        return Namespaces()
    except NoNamespaces:
        if namespaces:
            raise
        return Loopback()


def _remove(names: Iterable[str]) -> None:
    existing = [name for name in names if (NETNS_DIRECTORY / name).exists()]
    for name in existing:
        for word in run("ip", "netns", "pids", name, check=False).split():
            with contextlib.suppress(OSError):
                os.kill(int(word), signal.SIGKILL)
    if existing:
        lines = "".join(f"netns del {name}\n" for name in existing)
        run("ip", "-force", "-batch", "-", stdin=lines, check=False)


def sweep() -> None:
    """Take away the namespaces, and the processes in them, of runs that were killed."""
    if os.geteuid() != 0 or not NETNS_DIRECTORY.is_dir():
        return
    found = [_NAME.fullmatch(path.name) for path in NETNS_DIRECTORY.iterdir()]
    _remove(match[0] for match in found if match and not Path(f"/proc/{match[1]}").exists())
