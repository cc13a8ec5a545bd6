"""An etcd that was restored from a backup: nobody acts on it, nothing is freed, an administrator decides.

These are the drills of docs/operations.md, with etcd's own tools.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from harness.clusters import Cluster, Plan, StoreNode, run_irdmafs
from harness.etcd_server import EtcdServer
from harness.mountpoint import eventually

from irdmafs.backend.etcd.engine import EtcdEngine
from irdmafs.backend.kv import Put, WentBack

in_time = partial(eventually, within_s=60.0)
SIZE = 200_000  # more than what is kept in etcd itself


def data_of(cluster: Cluster) -> Path:
    return cluster.directory / "etcd" / "etcd0"


def backup(cluster: Cluster) -> Path:
    """`etcdctl snapshot save`."""
    path = cluster.directory / "backup.db"
    cluster.etcd.ctl("snapshot", "save", str(path))
    return path


def restore(cluster: Cluster, path: Path) -> Path:
    """`etcdctl snapshot restore` on an etcd that has lost its data. Returns where those are kept."""
    (member,) = cluster.etcd.members
    kept = cluster.directory / "newest"
    member.kill9()
    shutil.move(data_of(cluster), kept)
    names = ("--name=", "--initial-cluster=", "--initial-advertise-peer-urls=")
    options = [word for word in member.command if word.startswith(names)]
    options += [f"--data-dir={data_of(cluster)}", "--initial-cluster-token=another"]
    command = ["etcdctl", "snapshot", "restore", str(path), *options]
    environment = os.environ | {"ETCDCTL_API": "3"}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    cluster.etcd.start()
    return kept


def put_back(cluster: Cluster, kept: Path) -> None:
    (member,) = cluster.etcd.members
    member.kill9()
    shutil.rmtree(data_of(cluster))
    shutil.copytree(kept, data_of(cluster))
    cluster.etcd.start()


def extents(node: StoreNode) -> set[str]:
    return set(os.listdir(node.store / "extents"))


def in_quarantine(node: StoreNode) -> set[str]:
    return set(os.listdir(node.store / "quarantine"))


def status(cluster: Cluster) -> tuple[int, dict[str, Any]]:
    done = run_irdmafs(cluster.admin, "cluster", "status", "--json", "--cluster", cluster.config)
    return done.returncode, json.loads(done.stdout)


def is_told(cluster: Cluster) -> bool:
    code, told = status(cluster)
    if not any("cluster accept-restore" in problem for problem in told["problems"]):
        return False
    assert code == 2
    assert told["health"] == "unavailable"
    return True


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_bytes(name.encode() * SIZE)


def is_readable(path: Path) -> bool:
    try:
        return path.read_bytes() == path.name.encode() * SIZE
    except OSError:
        return False


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    plan = Plan(nodes=2, mounts=2, buckets=4, mount_config={"timeout": "2s"})
    with Cluster(plan) as made:
        yield made


def test_the_newest_data_come_back_and_everything_goes_on_where_it_was(cluster: Cluster) -> None:
    here, there = (mount.path for mount in cluster.mounts)
    write(here, "old")
    saved = backup(cluster)
    write(here, "new")
    with open(here / "open", "wb") as held:
        held.write(b"half")
        # The running nodes know by themselves.
        before = [extents(node) for node in cluster.nodes]
        kept = restore(cluster, saved)
        in_time(lambda: is_told(cluster), "cluster status tells it")
        with pytest.raises(OSError, match=r"Input/output error"):
            (there / "refused").write_bytes(b"nothing may be written")
        # Killed and started ones, too.
        cluster.nodes[0].kill9()
        cluster.nodes[0].start()
        in_time(lambda: "This node waits" in cluster.nodes[0].log_tail(), "it waits")
        assert [extents(node) for node in cluster.nodes] == before
        put_back(cluster, kept)
        cluster.wait_healthy()
        in_time(lambda: is_readable(there / "new") and is_readable(here / "old"), "both go on")
        held.write(b" and whole")
    in_time(lambda: (there / "open").read_bytes() == b"half and whole", "it is published")
    write(there, "newer")
    assert is_readable(here / "newer")
    in_time(lambda: status(cluster)[0] == 0, "all is well")
    assert not any(map(in_quarantine, cluster.nodes))


def test_the_restored_state_is_accepted_and_nothing_is_mixed_up(cluster: Cluster) -> None:
    here, there = (mount.path for mount in cluster.mounts)
    write(here, "old", "changed")
    saved = backup(cluster)
    write(here, "new", "changed")
    away = cluster.nodes[1]
    away.terminate()
    lost = extents(cluster.nodes[0])
    restore(cluster, saved)
    in_time(lambda: is_told(cluster), "cluster status tells it")
    # A mount that starts now says so, too.
    folder = cluster.directory / "late"
    folder.mkdir()
    late = run_irdmafs(
        cluster.mounts[0].host,
        *("mount", folder, "--cluster", cluster.mounts[0].config),
        *("--store", cluster.directory / "cache of late"),
    )
    assert (late.returncode, "went back in time" in late.stderr) == (1, True), late.stderr
    # A node, too, if it is to be left in the background.
    late = run_irdmafs(away.host, "serve", away.store, "--config", away.config)
    assert (late.returncode, "went back in time" in late.stderr) == (1, True), late.stderr
    # Nobody's place is changed by what an old etcd says of it.
    for command in (
        ("drain", f"{cluster.nodes[0].node_id:x}"),
        ("remove", f"{away.node_id:x}", "--force", "--yes"),
    ):
        assert "cluster accept-restore" in cluster.refused(*command)
    refused = cluster.refused("accept-restore")
    assert "etcd went back in time: it is at" in refused and "--yes accepts" in refused
    assert extents(cluster.nodes[0]) == lost
    assert "is accepted" in cluster.administer("accept-restore", "--yes")
    assert "nothing to accept" in cluster.refused("accept-restore", "--yes")

    away.start()
    cluster.wait_healthy()
    for folder in (here, there):
        in_time(partial(is_readable, folder / "old"), "the mounts go on")
        assert sorted(os.listdir(folder)) == ["changed", "old"]
        assert not is_readable(folder / "changed"), "its content was replaced after the backup"
    assert all(map(in_quarantine, cluster.nodes)), "what is newer can still be had"
    write(here, "newer", "changed")
    write(there, "from there")
    for folder in (here, there):
        assert all(is_readable(folder / name) for name in ("newer", "changed", "from there"))
    in_time(lambda: status(cluster)[0] == 0, "all is well")
    for part in (*cluster.nodes, *cluster.mounts):
        part.kill9()
    for part in (*cluster.nodes, *cluster.mounts):
        part.start()
    for mount in cluster.mounts:
        mount.wait_ready()
    cluster.wait_healthy()
    assert all(is_readable(here / name) for name in ("newer", "changed", "from there", "old"))


def test_an_old_copy_of_a_store_is_not_taken_for_an_old_etcd(cluster: Cluster) -> None:
    here = cluster.mounts[0].path
    node = cluster.nodes[0]
    write(here, "old")
    node.terminate()
    copy = cluster.directory / "copy"
    shutil.copytree(node.store, copy)
    node.start()
    cluster.wait_healthy()
    write(here, "new")
    node.terminate()
    shutil.rmtree(node.store)
    shutil.copytree(copy, node.store)
    node.start()
    cluster.wait_healthy()
    assert status(cluster)[0] == 0
    cluster.nodes[1].kill9()
    in_time(lambda: is_readable(here / "new") and is_readable(here / "old"), "it has all")


@pytest.mark.parametrize("overtaken", [False, True])
async def test_process_knows_another_history_though_it_has_more_revisions(overtaken: bool) -> None:
    with EtcdServer() as server:
        data = server.directory / "m0"
        async with EtcdEngine(server.endpoints, b"x/") as engine:
            await engine.transact((), [Put(b"a", b"1")])
            # The event loop stands still while etcd is replaced: nothing can be noticed meanwhile.
            server.kill9()
            shutil.copytree(data, server.directory / "old")
            server.start()
            revision, _ = await engine.snapshot(b"", b"\xff")
            watch = engine.watch(b"", b"\xff", revision)
            newest = await engine.transact((), [Put(b"a", b"2")])
            assert (await watch.__anext__()).revision == newest
            server.kill9()
            shutil.rmtree(data)
            shutil.copytree(server.directory / "old", data)
            server.start()
            while overtaken and server.revision() <= newest:
                server.ctl("put", "somebody's", "else")
            with trio.fail_after(30), pytest.raises(WentBack, match="went back in time"):
                await watch.__anext__()
            for call in (engine.barrier(), engine.transact((), [Put(b"a", b"3")])):
                with pytest.raises(WentBack):
                    await call
            assert not await engine.calls.is_continued()
            engine.calls.trust()
            found = await engine.get(b"a")
            assert found is not None
            assert found.value == b"1"
