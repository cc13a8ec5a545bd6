"""Clusters for tests, with skips where it cannot run and logs of what failed."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

import harness.cluster
from harness.cluster import LONG_LEASE_S, MIB, Plan
from harness.daemons import Daemon
from harness.etcd_server import need_etcd
from harness.mountpoint import eventually
from harness.network import CommandFailed, Host, Network, NoNamespaces, make_network
from harness.parts import STATUS_XATTR, ClusterMount, StoreNode, run_instead, run_irdmafs
from harness.scratch import is_mounted
from harness.training import train

__all__ = [
    "LONG_LEASE_S",
    "MIB",
    "Apart",
    "ClusterMount",
    "CommandFailed",
    "Daemon",
    "Host",
    "Plan",
    "StoreNode",
    "run_irdmafs",
    "train",
]


# A mount, and a directory as it and another mount see it.
Apart = tuple[ClusterMount, Path, Path]


def counters(place: ClusterMount | Path) -> dict[str, Any]:
    """Return what a mount, or that of a path if it works, tells of itself and its cluster."""
    status = status_at(place) if isinstance(place, Path) else place.status()
    found: dict[str, Any] = status["cluster"]
    return found


def status_at(path: Path) -> dict[str, Any]:
    """Return the status of the mount that a path is on, which is found without a request to it."""
    top = next(place for place in (path, *path.parents) if is_mounted(place))
    answer: dict[str, Any] = json.loads(os.getxattr(top, STATUS_XATTR))
    return answer


def need_cluster() -> None:
    """Skip the test where no cluster can run."""
    need_etcd()
    if not os.path.exists("/dev/fuse"):
        pytest.skip("no /dev/fuse on this machine")


def need_network() -> Network:
    """A network whose links can be cut. Skips the test where there can be none."""
    try:
        return make_network(True)
    except NoNamespaces as error:
        pytest.skip(f"links cannot be cut: {error}")


class Cluster(harness.cluster.Cluster):
    """A cluster for a test, which is skipped where it cannot run.

    links: they are to be cut or slowed down, so that it takes namespaces. `node_program` and
    `mount_program`, the command `irdmafs` with changes, run its nodes and mounts."""

    def __init__(
        self, plan: Plan, *, links: bool = False, node_program: str = "", mount_program: str = ""
    ) -> None:
        need_cluster()
        self._node_program = node_program
        self._mount_program = mount_program
        if links:
            need_network().close()
        super().__init__(plan)

    def _make_node(self, host: Host) -> StoreNode:
        return run_instead(super()._make_node(host), self._node_program)

    def _make_mount(
        self, host: Host | None, *arguments: str, certificate: str = ""
    ) -> ClusterMount:
        made = super()._make_mount(host, *arguments, certificate=certificate)
        return run_instead(made, self._mount_program)

    def mend(self) -> None:
        """Have all work again: end what was done to parts of it, and start those that were killed."""
        self.heal_all()
        for part in (*self.nodes, *self.mounts):
            if not part.alive:
                part.start()
        self.wait_healthy()
        for mount in self.mounts:
            mount.wait_ready()
            eventually(lambda: counters(mount)["session_valid_seconds"] > 0, "it has a session", 30)  # noqa: B023

    def __exit__(self, *error: object) -> None:
        if error[1] is not None and not isinstance(error[1], pytest.skip.Exception):
            # conftest comes too late for a cluster that is the test's own.
            print(self.logs())
        super().__exit__(*error)
