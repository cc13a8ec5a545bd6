"""A mount of a cluster with one store node, to hold it to what every mount promises."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
from itertools import count

from harness import forks
from harness.cluster import LONG_LEASE_S
from harness.etcd_server import need_etcd, shared_etcd
from harness.mountpoint import IRDMAFS, Mount, eventually
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
        self._node: forks.Running | None = None
        self._name = name = f"test{os.getpid()}-{next(_numbers)}"
        done = self._run(
            *(*IRDMAFS, "cluster", "init", "--no-tls", "--etcd", shared_etcd().endpoint),
            *("--name", name, "--out", self._directory),
            *("--replicas", "1", "--buckets", "8", "--lease-ttl", str(LONG_LEASE_S)),
        )
        assert done.returncode == 0, done
        self._config = self._directory / "cluster.toml"
        self.arguments = (*arguments, "--cluster", str(self._config), "--host", "elsewhere")

    def try_mount(self) -> subprocess.CompletedProcess[str]:
        if self._node is None:
            self.start_node()
        return super().try_mount()

    def start_node(self) -> None:
        log = self._directory / "log"
        command = (*IRDMAFS, "serve", str(self._directory / "store"), "-f")
        with log.open("wb") as output:
            self._node = forks.start(
                [*command, "--config", str(self._config)], output=output, errors=output
            )
        eventually(lambda: b"is served" in log.read_bytes(), "the store node serves", 20)

    def kill_node(self) -> None:
        """Kill the store node, and have its lease end at once instead of by itself."""
        assert self._node is not None
        self._node.send_signal(signal.SIGKILL)
        self._node.wait()
        etcd = shared_etcd()
        found = json.loads(etcd.ctl("get", "--prefix", f"/irdmafs/{self._name}/n", "-w", "json"))
        for pair in found["kvs"]:
            etcd.ctl("lease", "revoke", f"{pair['lease']:x}")

    def log_tail(self, characters: int = 3000) -> str:
        with contextlib.suppress(OSError):
            node = (self._directory / "log").read_text(errors="replace")[-characters:]
            return f"{super().log_tail(characters)}\nlog of the store node:\n{node}"
        return super().log_tail(characters)

    def close(self) -> None:
        try:
            super().close()
        finally:
            if self._node is not None:
                self._node.send_signal(signal.SIGKILL)
                self._node.wait()
            shutil.rmtree(self._directory, ignore_errors=True)
