"""Files of one name are kept together, and each file tells which store nodes keep it."""

import errno
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from harness.clusters import LONG_LEASE_S, MIB, Cluster, Plan
from harness.errors import fails_with
from harness.processes import AS_NOBODY, NOBODY, Process

from irdmafs.train.placement import host_of, shard_names

PLACEMENT, NODES = "user.irdmafs.placement", "user.irdmafs.nodes"

PLAN = Plan(nodes=3, mounts=2, replicas=2, buckets=64, beside={0: 0}, lease_ttl_s=LONG_LEASE_S)


@pytest.fixture
def together(here: Path) -> Path:
    os.setxattr(here, PLACEMENT, b"together")
    return here


def groups_of(file: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(os.getxattr(file, NODES))
    return found


def made(file: Path, content: bytes = b"") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return file


def test_files_of_one_name_have_the_same_groups_by_stripe(together: Path, there: Path) -> None:
    os.setxattr(together, "user.irdmafs.stripe_size", b"1M")
    content = bytes(3 * MIB)
    one, other = made(together / "a" / "0", content), made(together / "b" / "c" / "0", content)
    assert len(groups_of(one)) == 3
    assert groups_of(one) == groups_of(other)
    elsewhere = made(there / "b" / "c" / "d" / "0", content)
    numbers = [row["group"] for row in groups_of(elsewhere)]
    assert numbers == [row["group"] for row in groups_of(one)]
    names = [str(n) for n in range(30)]
    assert len({groups_of(made(together / name))[0]["group"] for name in names}) > 10


def test_rules_of_users_leave_room_for_those_of_root(cluster: Cluster, here: Path) -> None:
    mount = cluster.add_mount("-o", "allow_other")
    own = mount.path / here.name
    os.chown(own, NOBODY, NOBODY)
    source = f"for n in range(300): os.setxattr(own, {PLACEMENT!r}, b'zone=%d' % n)"
    with Process(AS_NOBODY) as user, fails_with(errno.ENOSPC):
        user.do(source, own=str(own))
    os.setxattr(here, PLACEMENT, b"zone=a")


def test_nearest_directory_with_placement_decides_which_files_are_together(together: Path) -> None:
    inner, plain = together / "inner", together / "plain"
    inner.mkdir()
    plain.mkdir()
    os.setxattr(inner, PLACEMENT, b"together")
    os.setxattr(plain, PLACEMENT, b"spread=host")
    names = [str(n) for n in range(8)]
    outer_groups, inner_groups, plain_groups = (
        [groups_of(made(directory / name))[0]["group"] for name in names]
        for directory in (together, inner, plain)
    )
    assert outer_groups != inner_groups
    assert outer_groups != plain_groups


def test_file_that_was_made_without_a_name_is_kept_as_its_first_one_says(together: Path) -> None:
    os.setxattr(together, "user.irdmafs.replicas", b"3")
    fd = os.open(together, os.O_TMPFILE | os.O_WRONLY)
    os.write(fd, b"content")
    os.link(f"/proc/self/fd/{fd}", together / "0", src_dir_fd=fd)
    os.close(fd)
    (group,) = groups_of(together / "0")
    assert len(group["nodes"]) == 3
    assert [group] == groups_of(made(together / "below" / "0", b"content"))


def test_renamed_file_stays_where_it_was_created(together: Path) -> None:
    file = made(together / "0", b"content")
    before = groups_of(file)
    file.rename(together / "1")
    assert groups_of(together / "1") == before


def test_local_and_together_exclude_each_other(here: Path) -> None:
    with fails_with(errno.EINVAL):
        os.setxattr(here, PLACEMENT, b"local together")


def test_file_tells_the_nodes_that_keep_it_primary_first(cluster: Cluster, here: Path) -> None:
    configs = cluster.groups()
    hosts = {node: address.host for node, address in cluster.live_nodes().items()}
    for n in range(10):
        (row,) = groups_of(made(here / str(n), b"content"))
        configs = configs if row["group"] in configs else cluster.groups()
        config = configs[row["group"]]
        assert [int(node["node"], 16) for node in row["nodes"]] == list(config.members)
        for node in row["nodes"]:
            number = int(node["node"], 16)
            assert node["node"] == f"{number:016x}"
            assert node["host"] == hosts[number]
            assert node["here"] == (hosts[number] == cluster.nodes[0].host.name)
            assert node["in_sync"] == (number in config.in_sync)


def test_file_that_was_never_written_tells_it_too(here: Path) -> None:
    with open(here / "file", "wb") as file:
        before = groups_of(here / "file")
        assert before[0]["nodes"]
        file.write(b"content")
    assert groups_of(here / "file") == before


def test_large_file_tells_sixteen_groups(here: Path) -> None:
    os.setxattr(here, "user.irdmafs.stripe_size", b"1M")
    with open(here / "file", "wb") as file:
        file.truncate(20 * MIB)
    assert len(groups_of(here / "file")) == 16
    assert NODES not in os.listxattr(here / "file")


def test_directories_do_not_have_it_and_nobody_sets_it(here: Path) -> None:
    with fails_with(errno.ENODATA):
        os.getxattr(here, NODES)
    with fails_with(errno.EPERM):
        os.setxattr(made(here / "file"), NODES, b"[]")


@pytest.mark.parametrize(
    ("size", "nodes", "each"),
    [(0, 1, 1), (2 * MIB, 2, 1), (3 * MIB, 3, 1), (48 * MIB - 1, 3, 1), (48 * MIB, 3, 2)],
)
def test_each_node_is_primary_of_as_many_shards(
    cluster: Cluster, together: Path, size: int, nodes: int, each: int
) -> None:
    names, parts = shard_names(together, None, size)
    assert os.listdir(together) == []
    files = [made(together / "state" / name, b"content") for name in names]
    primaries = Counter(groups_of(file)[0]["nodes"][0]["node"] for file in files)
    assert sorted(primaries.values()) == [each] * nodes
    assert {int(node, 16) for node in primaries} <= set(cluster.live_nodes())
    if nodes == 3:
        assert Counter(host_of(file) == "" for file in files) == {False: 2 * each, True: each}
    assert parts == (nodes if size else 0)
