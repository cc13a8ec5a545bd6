"""Bytes that change on a store node's disk or in its memory are found, and mended as long as any node has
them right; a copy that is wrong never takes the place of a sound one."""

import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from harness.clusters import LONG_LEASE_S, MIB, Cluster, Plan, StoreNode
from harness.errors import fails_with
from harness.mountpoint import eventually
from harness.striped import damage, new_content

from irdmafs.backend.cluster.config import ClusterConfig
from irdmafs.backend.transport import Extent
from irdmafs.backend.transport.peers import open_peers

# In a message, in a stream, in three stripes.
SIZES = [1000, 300_000, 2 * MIB + 500_000]
PLAN = Plan(nodes=2, mounts=2, buckets=16, store_bytes=1024 * MIB, lease_ttl_s=LONG_LEASE_S)
STRIPE_SIZE = b"1M"


def soon(holds: Callable[[], bool]) -> None:
    eventually(holds, "it is mended or told of", 60)


def sound(node: StoreNode, contents: list[bytes]) -> int:
    """How many of these contents' stripes a node keeps as they were published."""
    stripes = {c[at : at + MIB] for c in contents for at in range(0, len(c), MIB)}
    return sum(path.read_bytes() in stripes for path in (node.store / "extents").iterdir())


def stripes_of(contents: list[bytes]) -> int:
    return sum(-(-len(content) // MIB) for content in contents)


def publish(directory: Path, sizes: list[int]) -> dict[str, bytes]:
    """Return the contents by their paths from the root of the mount, which the directory is right in."""
    names = [f"{directory.name}/file{number}" for number in range(len(sizes))]
    written = {name: new_content(size) for name, size in zip(names, sizes, strict=True)}
    for name, content in written.items():
        (directory.parent / name).write_bytes(content)
    return written


def read_all(path: Path, written: dict[str, bytes]) -> None:
    for name, content in written.items():
        assert (path / name).read_bytes() == content, name


def node_status(cluster: Cluster, node: StoreNode) -> dict[str, Any]:
    (found,) = (one for one in cluster.status()["nodes"] if int(one["id"], 16) == node.node_id)
    return dict(found)


def test_a_node_mends_what_a_reader_got_wrong_bytes_of(cluster: Cluster, here: Path) -> None:
    written = publish(here, 4 * SIZES)
    contents = list(written.values())
    bad = cluster.nodes[0]
    assert sum(damage(bad, content) for content in contents) == stripes_of(contents)
    read_all(cluster.mounts[1].path, written)
    soon(lambda: sound(bad, contents) > 0)
    soon(lambda: node_status(cluster, bad)["wrong_mended"] == sound(bad, contents))
    # Not before the last one: while a copy is being mended the file has a replica less.
    soon(lambda: cluster.status()["health"] == "ok")


def test_a_round_finds_and_mends_what_nobody_reads(cluster: Cluster, here: Path) -> None:
    written = publish(here, SIZES)
    contents = list(written.values())
    bad = cluster.nodes[1]
    before = node_status(cluster, bad)
    assert sum(damage(bad, content) for content in contents) == stripes_of(contents)
    cluster.administer("scrub", f"{bad.node_id:x}")
    soon(lambda: sound(bad, contents) == stripes_of(contents))
    soon(lambda: node_status(cluster, bad)["scrub_running_s"] is None)
    after = node_status(cluster, bad)
    assert after["scrub_age_s"] < before["scrub_age_s"] + 60
    assert after["wrong_mended"] - before["wrong_mended"] == stripes_of(contents)
    assert cluster.status()["health"] == "ok"


def test_a_round_that_ended_in_the_future_does_not_keep_the_next_one_waiting(
    cluster: Cluster, here: Path
) -> None:
    contents = list(publish(here, SIZES[:3]).values())
    bad = cluster.nodes[1]
    bad.terminate()
    assert sum(damage(bad, content) for content in contents) == stripes_of(contents)
    progress = bad.store / "scrub.json"
    state = json.loads(progress.read_text())
    # By a clock that was wrong.
    progress.write_text(json.dumps(state | {"finished": time.time() + 1e9}))
    bad.start()
    soon(lambda: sound(bad, contents) == stripes_of(contents))


def test_a_file_that_nobody_has_right_is_named_until_published(
    cluster: Cluster, here: Path
) -> None:
    os.setxattr(here, "user.irdmafs.replicas", b"1")
    written = publish(here, [300_000])
    ((name, content),) = written.items()
    assert sum(damage(node, content) for node in cluster.nodes) == 1
    cluster.administer("scrub")
    soon(lambda: cluster.status()["health"] == "unavailable")
    found = cluster.status()
    assert [one["path"] for one in found["damaged_files"]] == [f"/{name}"]
    assert any(f"/{name}" in problem for problem in found["problems"])
    with fails_with(errno.EIO):
        (cluster.mounts[1].path / name).read_bytes()
    said = f"/{name} cannot be read: no replica has the bytes"
    assert said in cluster.mounts[1].log.read_text()
    # It was not dropped: it may be all that is left.
    salvage = cluster.add_mount("--no-verify")
    assert len((salvage.path / name).read_bytes()) == len(content)
    (cluster.mounts[0].path / name).write_bytes(content)
    soon(lambda: cluster.status()["health"] == "ok")
    assert (cluster.mounts[1].path / name).read_bytes() == content


@pytest.mark.parametrize("nodes", [2, 3])
def test_a_drain_of_the_sound_node_keeps_what_is_sound(nodes: int) -> None:
    """With two nodes the drain waits until the other's copies are sound: no node joins, which would check
    them on arrival."""
    with Cluster(Plan(nodes=nodes, mounts=1, buckets=16, lease_ttl_s=LONG_LEASE_S)) as made:
        made.wait_healthy()
        (made.mounts[0].path / "d").mkdir()
        os.setxattr(made.mounts[0].path / "d", "user.irdmafs.stripe_size", b"1M")
        written = publish(made.mounts[0].path / "d", 2 * nodes * SIZES)
        contents = list(written.values())
        bad, good = made.nodes[:2]
        damaged = sum(damage(bad, content) for content in contents)
        assert damaged == stripes_of(contents) if nodes == 2 else damaged
        made.administer("drain", f"{good.node_id:x}")
        good.terminate()
        assert nodes == 3 or sound(bad, contents) == damaged
        read_all(made.add_mount().path, written)
        soon(lambda: not made.status()["damaged_files"])


def test_a_node_that_comes_back_gives_the_right_copies_that_only_it_has() -> None:
    plan = Plan(nodes=2, mounts=1, buckets=16, node_config={"rereplicate_after": "1s"})
    with Cluster(plan) as made:
        (made.mounts[0].path / "d").mkdir()
        written = publish(made.mounts[0].path / "d", 4 * [1000, 300_000])
        bad, good = made.nodes
        assert sum(damage(bad, content) for content in written.values())
        good.kill9()
        third = made.add_node()
        made.administer("scrub", f"{bad.node_id:x}")
        soon(lambda: len(made.status()["damaged_files"]) == len(written))
        soon(lambda: sum(1 for _ in (third.store / "extents").iterdir()) == len(written))
        good.start()
        soon(lambda: not made.status()["damaged_files"])
        read_all(made.add_mount().path, written)
        assert sound(bad, list(written.values())) + sound(third, list(written.values())) > 0


def test_what_somebody_says_of_a_sound_copy_changes_nothing() -> None:
    """A member that lies: all it brings about is that the node reads its copy again."""
    with Cluster(Plan(nodes=2, namespaces=False, lease_ttl_s=LONG_LEASE_S)) as made:
        (made.mounts[0].path / "d").mkdir()
        written = publish(made.mounts[0].path / "d", [1000, 300_000])
        trio.run(slander, made)
        read_all(made.mounts[1].path, written)
        for node in made.nodes:
            assert sound(node, list(written.values())) == len(written)
            assert node_status(made, node)["wrong_found"] == 0


async def slander(cluster: Cluster) -> None:
    config = ClusterConfig.load(str(cluster.config))
    async with open_peers(
        cluster.live_nodes().get,
        (),
        credentials=config.cluster.credentials("mount"),
        name="liar",
        role="mount",
    ) as peers:
        for node in cluster.nodes:
            for path in (node.store / "extents").iterdir():
                content, stripe = (int(part, 16) for part in path.name.split("."))
                await peers.device(node.node_id).doubt(Extent(content, stripe))
            await peers.device(node.node_id).doubt(Extent(1 << 40, 7))
            with fails_with(errno.EPERM, errno.EACCES):
                await peers.scrub(node.node_id)
