"""Store nodes free what became no file's, while the mount that sent it lives on."""

import os
from typing import Any

import pytest
from harness.clusters import MIB, Cluster, ClusterMount, Plan
from harness.mountpoint import eventually

WITHIN_S = 60.0
DATA = os.urandom(MIB)


def pending(cluster: Cluster) -> dict[str, Any]:
    """Extents that nodes keep for the open sessions."""
    found = {}
    for node in cluster.status()["nodes"]:
        found[node["id"]] = node.get("pending_extents")
    return found


def wait_none_pending(cluster: Cluster) -> None:
    eventually(
        lambda: set(pending(cluster).values()) == {0}, "no session keeps an extent", WITHIN_S
    )


def session_of(cluster: Cluster, mount: ClusterMount) -> int:
    (found,) = (one["session"] for one in cluster.status()["mounts"] if one["pid"] == mount.pid)
    return int(found)


def test_what_could_not_be_published_goes_while_its_mount_lives_on() -> None:
    plan = Plan(nodes=2, mounts=1, buckets=4, lease_ttl_s=8, mount_config={"timeout": "2s"})
    with Cluster(plan) as cluster:
        (mount,) = cluster.mounts
        (mount.path / "other").write_bytes(DATA)
        session = session_of(cluster, mount)
        (etcd,) = cluster.etcd.members
        file = open(mount.path / "file", "wb", buffering=0)  # noqa: SIM115 (its close is to fail)
        file.write(DATA)
        # The nodes take it, and nobody answers whether it is named.
        etcd.pause()
        with pytest.raises(OSError):
            file.close()
        # One of them cannot be told at once.
        away = cluster.nodes[1]
        away.pause()
        etcd.resume()
        told = f"{cluster.nodes[0].node_id:016x}"
        eventually(lambda: pending(cluster)[told] == 0, "the other one is told", WITHIN_S)
        away.resume()
        wait_none_pending(cluster)
        assert session_of(cluster, mount) == session
        # Nor is what was named taken for abandoned.
        assert (mount.path / "other").read_bytes() == DATA
        (mount.path / "file").write_bytes(DATA[::-1])
        wait_none_pending(cluster)
        cluster.lose(mount)
        mount.start()
        mount.wait_ready()
        assert (mount.path / "file").read_bytes() == DATA[::-1]


def test_what_is_in_a_file_that_gets_its_first_name_is_not_given_up() -> None:
    with Cluster(Plan(nodes=1, mounts=2, replicas=1, buckets=4)) as cluster:
        here, there = (mount.path for mount in cluster.mounts)
        for number in range(24):
            name = str(number)
            fd = os.open(here, os.O_TMPFILE | os.O_RDWR)
            os.write(fd, DATA[number:])
            if number % 2:
                os.fsync(fd)
            os.link(f"/proc/self/fd/{fd}", here / name, src_dir_fd=0, follow_symlinks=True)
            assert (there / name).read_bytes() == DATA[number:]
            if number % 3:
                os.pwrite(fd, b"changed", 0)
            os.close(fd)
            expected = (b"changed" if number % 3 else DATA[number:][:7]) + DATA[number + 7 :]
            assert (there / name).read_bytes() == expected
        wait_none_pending(cluster)
