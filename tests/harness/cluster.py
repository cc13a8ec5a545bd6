"""A whole cluster on one machine: made, hurt and taken away again."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import time
import tomllib
from collections.abc import AsyncIterator, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import trio

from irdmafs.backend.cluster.config import ClusterConfig
from irdmafs.backend.cluster.config_sections import ClusterSection
from irdmafs.backend.etcd.engine import EtcdEngine
from irdmafs.backend.kv import Delete, Put
from irdmafs.backend.model.placement import replicas_of
from irdmafs.backend.model.records import GroupConfig, MountRecord, NodeAddress, decode
from irdmafs.backend.transport.peers import Peers, open_peers
from irdmafs.backend.trust.security import Role

from .closing import Closing
from .daemons import Daemon
from .etcd import Etcd
from .network import CommandFailed, Host, Network, make_network
from .parts import ClusterMount, StoreNode, run_irdmafs, write_toml
from .scratch import scratch_directory, sweep
from .tiers import Tier, allow

MIB = 1 << 20
CLUSTER_NAME = "default"
# A host that is busy for seconds must not look like one that is gone: for tests that end no lease.
LONG_LEASE_S = 20

# The clusters that run, for whoever has to end or explain them.
living: set[Cluster] = set()


@dataclass(frozen=True, slots=True)
class Plan:
    """The parts of a cluster. `beside` puts mount number KEY on the host of node number VALUE.
    `node_config` and `mount_config` are values for those sections of the configuration file. Every second
    mount reads names by directory."""

    nodes: int = 3
    mounts: int = 2
    etcd_members: int = 1
    replicas: int = 2
    buckets: int = 16
    lease_ttl_s: int = 2
    store_bytes: int = 256 * MIB
    cache_bytes: int = 128 * MIB
    tls: bool = False
    namespaces: bool | None = None
    etcd_arguments: tuple[str, ...] = ()
    beside: Mapping[int, int] = field(default_factory=dict)
    node_config: Mapping[str, object] = field(default_factory=dict)
    mount_config: Mapping[str, object] = field(default_factory=dict)


class Cluster(Closing):
    """etcd, store nodes and mounts, each on a host of its own. A context manager: leaving it kills
    every process and removes every directory, mount and namespace.

    Attributes: `nodes`, `mounts`, `etcd` (with `members`), `network`, `directory`.
    """

    def __init__(self, plan: Plan) -> None:
        allow(Tier.ALL, "a cluster")
        self.plan = plan
        self.nodes: list[StoreNode] = []
        self.mounts: list[ClusterMount] = []
        self._mount_numbers = itertools.count()
        sweep()
        self.network: Network = make_network(plan.namespaces)
        self.directory = scratch_directory()
        self.config_directory = self.directory / "config"
        try:
            self.admin, *members = self.network.add_hosts(
                ["admin", *(f"etcd{i}" for i in range(plan.etcd_members))]
            )
            data = self.directory / "etcd"
            data.mkdir()
            credentials = self.config_directory if plan.tls else None
            self.etcd = Etcd(members, data, credentials, plan.etcd_arguments)
        except BaseException:
            self.close()
            raise

    # -- from nothing to a healthy cluster -----------------------------------------------------

    def __enter__(self) -> Self:
        living.add(self)
        try:
            if self.plan.tls:
                self._init("--prepare")
            self.etcd.start()
            self._init()
            hosts = self.network.add_hosts([f"node{i}" for i in range(self.plan.nodes)])
            for host in hosts:
                self._make_node(host)
            for i in range(self.plan.mounts):
                beside = self.plan.beside.get(i)
                self._make_mount(None if beside is None else self.nodes[beside].host)
            for part in (*self.nodes, *self.mounts):
                part.start()
            self.wait_healthy()
            for mount in self.mounts:
                mount.wait_ready()
            if self.plan.tls:
                # The file of the cluster is to serve readers, too.
                line = f"[cluster]\nnodes = {json.dumps(self._addresses())}"
                self.config.write_text(self.config.read_text().replace("[cluster]", line))
        except BaseException:
            self.close()
            raise
        return self

    def _init(self, *more: str) -> None:
        plan = self.plan
        done = run_irdmafs(
            self.admin,
            *("cluster", "init", "--etcd", ",".join(self.etcd.endpoints)),
            *("--out", self.config_directory, "--lease-ttl", str(plan.lease_ttl_s)),
            *("--replicas", str(plan.replicas), "--buckets", str(plan.buckets)),
            *(() if plan.tls else ("--no-tls",)),
            *more,
        )
        if done.returncode != 0:
            raise CommandFailed(f"irdmafs cluster init: {done.stdout}{done.stderr}")

    def _addresses(self) -> list[str]:
        """Where the nodes listen that run now."""
        return [f"{node.address}:{node.control_port}" for node in self.live_nodes().values()]

    def _write_config(
        self, path: Path, section: str, values: Mapping[str, object], certificate: str = ""
    ) -> None:
        base = tomllib.loads(self.config.read_text())
        # Paths in the file are relative to its own directory.
        for key in ("ca", "cert", "key", "etcd_ca", "etcd_cert", "etcd_key"):
            if key in base["cluster"]:
                own = base["cluster"][key].replace("{role}", certificate or "{role}")
                base["cluster"][key] = str(self.config_directory / own)
        base["cluster"]["insecure"] = not self.plan.tls
        if certificate.startswith("reader"):
            base["cluster"]["nodes"] = self._addresses()
        write_toml(path, base | {section: base.get(section, {}) | dict(values)})

    def _make_node(self, host: Host) -> StoreNode:
        directory = self.directory / host.name
        node = StoreNode(host.name, host, directory, self.plan.store_bytes)
        self.nodes.append(node)
        values = {"listen": host.address, "host": host.name, **self.plan.node_config}
        self._write_config(node.config, "node", values)
        return node

    def _make_mount(
        self, host: Host | None, *arguments: str, certificate: str = ""
    ) -> ClusterMount:
        number = next(self._mount_numbers)
        name = f"mount{number}"
        if host is None:
            (host,) = self.network.add_hosts([name])
        mount = ClusterMount(name, host, self.directory / name, arguments, self.plan.cache_bytes)
        self.mounts.append(mount)
        config = {"names_ahead": -(number % 2), **self.plan.mount_config}
        self._write_config(mount.config, "mount", config, certificate)
        return mount

    def add_node(self) -> StoreNode:
        """One more store node; it is started, and may still be joining when this returns."""
        (host,) = self.network.add_hosts([f"node{len(self.nodes)}"])
        node = self._make_node(host)
        node.start()
        return node

    def add_mount(
        self, *arguments: str, beside: StoreNode | None = None, certificate: str = ""
    ) -> ClusterMount:
        """One more mount, given more `arguments` of the command; ready when this returns. `certificate` is
        what its file is called, without the suffix; "" that of its role."""
        host = None if beside is None else beside.host
        mount = self._make_mount(host, *arguments, certificate=certificate)
        mount.start()
        mount.wait_ready()
        return mount

    def remove_mount(self) -> None:
        """Take the newest mount away. It ends in order: the others would wait for its session."""
        mount = self.mounts.pop()
        mount.terminate()
        mount.close()

    def config_of(self, certificate: str) -> Path:
        """A configuration file for who has the certificate of this name, at the nodes that run now."""
        path = self.directory / f"{certificate}.toml"
        self._write_config(path, "mount", self.plan.mount_config, certificate)
        return path

    # -- what etcd and the command say ---------------------------------------------------------

    def irdmafs(self, *arguments: str | os.PathLike[str], allowed: Container[int] = (0,)) -> str:
        """What `irdmafs ARGUMENTS` prints, run where etcd and the nodes can be reached.

        Raises CommandFailed if its exit status is not an allowed one."""
        done = run_irdmafs(self.admin, *arguments)
        if done.returncode not in allowed:
            words = " ".join(os.fspath(word) for word in arguments)
            raise CommandFailed(f"irdmafs {words}: {done.stdout}{done.stderr}")
        return done.stdout

    def administer(self, *arguments: str, allowed: Container[int] = (0,)) -> str:
        """Return the output of `irdmafs cluster ARGUMENTS`. Raises CommandFailed as `irdmafs` does."""
        return self.irdmafs("cluster", *arguments, "--cluster", self.config, allowed=allowed)

    def refused(self, *arguments: str) -> str:
        """Return what `irdmafs cluster ARGUMENTS` says when it fails."""
        done = run_irdmafs(self.admin, "cluster", *arguments, "--cluster", self.config)
        assert (done.returncode, done.stdout) == (1, ""), done
        return done.stderr

    @property
    def config(self) -> Path:
        """The configuration file for commands and further mounts."""
        return self.config_directory / "cluster.toml"

    def status(self) -> dict[str, Any]:
        """`irdmafs cluster status`, also of a cluster that is degraded or unavailable."""
        answer = self.administer("status", "--json", allowed=(0, 1, 2))
        found: dict[str, Any] = json.loads(answer)
        return found

    def section_of(self, certificate: str) -> ClusterSection:
        """Return the section [cluster] of such a configuration."""
        return ClusterConfig.load(os.fspath(self.config_of(certificate))).cluster

    def engine(self, role: Role, certificate: str = "", timeout_s: float = 60.0) -> EtcdEngine:
        """etcd, as those see it who have the certificate of a role, or another one of that role."""
        return self.section_of(certificate or role).engine(role, timeout_s)

    def put(self, operations: Sequence[Put | Delete], role: Role = "mount") -> int:
        """Apply a transaction as a member of a role, and return its revision."""

        async def apply() -> int:
            async with self.engine(role) as engine:
                return await engine.transact((), operations)

        return trio.run(apply)

    def value(self, key: bytes) -> bytes:
        """Return the value of a key of the cluster."""
        return self.etcd.get(self._prefix(key[:1].decode()))[key[1:]]

    @contextlib.asynccontextmanager
    async def peers(self, certificate: str) -> AsyncIterator[Peers]:
        """The nodes that run now, as a mount with this certificate sees them that speaks to no etcd."""
        credentials = self.section_of(certificate).credentials("mount")
        nodes = self.live_nodes()
        async with open_peers(
            nodes.get, (), credentials=credentials, name=certificate, role="mount"
        ) as peers:
            yield peers

    def _prefix(self, kind: str) -> bytes:
        return f"/irdmafs/{CLUSTER_NAME}/{kind}".encode()

    def live_nodes(self) -> dict[int, NodeAddress]:
        found = self.etcd.get(self._prefix("n"))
        return {int.from_bytes(k, "big"): decode(v, NodeAddress) for k, v in found.items()}

    def groups(self) -> dict[int, GroupConfig]:
        found = self.etcd.get(self._prefix("g"))
        return {int.from_bytes(k, "big"): decode(v, GroupConfig) for k, v in found.items()}

    def pins(self) -> set[bytes]:
        """Keys of contents that mounts keep on their nodes while they are read from there."""
        return set(self.etcd.get(self._prefix("p")))

    def key_count(self) -> int:
        """All keys that the cluster has in etcd."""
        return self.etcd.count(self._prefix(""))

    def unhealthy(self) -> str:
        """Why the cluster is not as it should be; empty if it is: every node that runs is alive, and
        every group has as many replicas as it should, in sync and on live nodes."""
        running = [node for node in self.nodes if node.alive and not node.stopped]
        try:
            expected = {node.node_id: node.name for node in running}
        except FileNotFoundError:
            return "a new node has no number yet"
        alive = self.live_nodes()
        if wrong := expected.keys() ^ alive.keys():
            names = (expected.get(node, f"the former {node:016x}") for node in sorted(wrong))
            return f"alive and running are not the same for {', '.join(names)}"
        for number, group in self.groups().items():
            wanted = min(replicas_of(number), len(running))
            if group.joining:
                return f"group {number:#x} is being filled: {group}"
            if len(set(group.in_sync) & alive.keys()) < wanted:
                return f"group {number:#x} is degraded: {group}"
        return ""

    def wait_healthy(self, within_s: float = 60.0) -> None:
        """Raises CommandFailed with what is wrong if it takes longer, or a process ended by itself."""
        deadline = time.monotonic() + within_s
        while True:
            for part in self.parts():
                if part.exit_status not in (None, -signal.SIGKILL, 0):
                    raise CommandFailed(
                        f"{part.name} ended with {part.exit_status}:\n{part.log_tail()}"
                    )
            try:
                reason = self.unhealthy()
            except CommandFailed as error:
                reason = str(error)
            if not reason:
                return
            if time.monotonic() > deadline:
                raise CommandFailed(f"not healthy after {within_s:g} s: {reason}")
            time.sleep(0.05)

    # -- harm ----------------------------------------------------------------------------------

    def cut(self, sender: Daemon, receiver: Daemon, *, one_way: bool = False) -> None:
        """Lose all packets between two processes' hosts; if `one_way` only those of the first."""
        self.network.cut(sender.host, receiver.host, one_way=one_way)

    def heal(self, one: Daemon, other: Daemon) -> None:
        self.network.heal(one.host, other.host)

    def isolate(self, part: Daemon) -> None:
        """Cut a host off from all others. `heal_all` ends it."""
        for other in self.parts():
            if other.host != part.host:
                self.network.cut(part.host, other.host)

    def lose(self, mount: ClusterMount) -> None:
        """Kill a mount, and have its session end at once instead of with its lease."""
        mount.kill9()
        for key, record in self.etcd.get(self._prefix("m")).items():
            if decode(record, MountRecord).pid == mount.pid:
                self.etcd.revoke(int.from_bytes(key, "big"))

    def heal_all(self) -> None:
        """End every cut, let every paused process go on, and give filled nodes their space back."""
        self.network.heal_all()
        for part in self.parts():
            if part.stopped:
                part.resume()
        for node in self.nodes:
            node.unfill()

    def slow_down(self, part: Daemon, bits_per_s: float | None) -> None:
        """Shape the link of a host, each direction; None: full speed."""
        self.network.shape(part.host, bits_per_s)

    def parts(self) -> list[Daemon]:
        return [*self.etcd.members, *self.nodes, *self.mounts]

    def logs(self) -> str:
        """The end of every log."""
        return "\n".join(f"== {part.name}\n{part.log_tail()}" for part in self.parts())

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Whatever state it is in. What cannot be taken away is left to `sweep`."""
        living.discard(self)
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
            stack.callback(self.network.close)
            if hasattr(self, "etcd"):
                stack.callback(self.etcd.kill9)
            for node in self.nodes:
                stack.callback(node.close)
            for mount in self.mounts:
                stack.callback(mount.close)
