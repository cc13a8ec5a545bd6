"""A mount of a cluster with one store node, to hold it to what every mount promises."""

import os
import shutil
import subprocess
from itertools import count

from harness.cluster import LONG_LEASE_S
from harness.daemons import Daemon, wait_until
from harness.etcd_server import need_etcd, shared_etcd
from harness.mountpoint import IRDMAFS, Mount
from harness.network import COMMAND_TIMEOUT_S, Host
from harness.scratch import scratch_directory

CLUSTER = "cluster"

_numbers = count()


class OneNodeMount(Mount):
    """Each has a cluster of its own, by name, in an etcd that all share. The mount counts as another
    host than the node, so that contents really travel."""

    def __init__(self, arguments: tuple[str, ...] = (), store_size: str | None = None) -> None:
        need_etcd()
        super().__init__("kernel", arguments=arguments, store_size=store_size)
        self._directory = scratch_directory()
        self._name = name = f"test{os.getpid()}-{next(_numbers)}"
        done = self._run(
            *(*IRDMAFS, "cluster", "init", "--no-tls", "--etcd", shared_etcd().endpoint),
            *("--name", name, "--out", self._directory),
            *("--replicas", "1", "--buckets", "8", "--lease-ttl", str(LONG_LEASE_S)),
        )
        assert done.returncode == 0, done
        self.config = self._directory / "cluster.toml"
        self.arguments = (*arguments, "--cluster", str(self.config), "--host", "elsewhere")
        serve = (*IRDMAFS, "serve", self._directory / "store", "-f", "--config", self.config)
        self._node = Daemon("node", Host("node", "127.0.0.1"), serve, self._directory / "log")

    def try_mount(self) -> subprocess.CompletedProcess[str]:
        if not self._node.starts:
            self.start_node()
        return super().try_mount()

    def start_node(self) -> None:
        node = self._node
        node.start()

        def serves() -> bool:
            return node.log.read_text().count("is served") == node.starts

        wait_until(serves, "it does not serve:", COMMAND_TIMEOUT_S, node)

    def kill_node(self) -> None:
        """Kill the store node, and have its lease end at once instead of by itself."""
        self._node.kill9()
        etcd = shared_etcd()
        for pair in etcd.range(f"/irdmafs/{self._name}/n".encode())["kvs"]:
            etcd.revoke(int(pair["lease"]))

    def remount(self) -> None:
        """Mount again after a crash, and have the session of before end at once instead of by itself."""
        for session in shared_etcd().get(f"/irdmafs/{self._name}/m".encode()):
            shared_etcd().revoke(int.from_bytes(session, "big"))
        self.mount()

    def log_tail(self, characters: int = 3000) -> str:
        node = self._node.log_tail(characters)
        return f"{super().log_tail(characters)}\nlog of the store node:\n{node}"

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._node.kill9()
            shutil.rmtree(self._directory, ignore_errors=True)
