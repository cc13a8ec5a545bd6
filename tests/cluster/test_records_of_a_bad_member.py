"""A member puts records into etcd that make no sense: they harm only what they name."""

import errno
import functools
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
from harness.clusters import LONG_LEASE_S, Cluster, Plan, counters
from harness.errors import fails_with
from harness.mountpoint import eventually

from irdmafs.backend.kv import Delete, Put
from irdmafs.backend.kv.faults import Faults
from irdmafs.backend.model import records
from irdmafs.backend.model.policy import policy_of_rule
from irdmafs.backend.namespace import Inode, acl
from irdmafs.backend.namespace.attributes import PLACEMENT, REPLICAS, STRIPE_SIZE
from irdmafs.backend.namespace.inode import inode_key, name_key
from irdmafs.backend.namespace.quotas import QUOTA_BYTES, QUOTA_INODES, QUOTA_NAMES

# Values that no inode has, or that no file of that length can be laid out by.
SENSELESS: list[dict[str, Any]] = [
    {"size": -1},
    {"blocks": -1},
    {"uid": 1 << 32},
    {"gid": -1},
    {"nlink": 1 << 40},
    {"mode": 1 << 33},
    {"mtime_ns": 1 << 63},
    {"version": -1},
    {"size": 1 << 50, "layout": records.Layout(1, 1)},
    {"size": 1 << 40, "layout": records.Layout(1, 1 << 26)},
    {"size": 10, "layout": records.Layout(1, -1)},
    {"size": 10, "layout": records.Layout(-1, 0)},
    {"size": 10, "layout": records.Layout(1, 0, 0, 256)},
    {"mode": 0o120777, "target": b"t" * 4096},
]
FIRST_INO = 1 << 40
# Attributes of directories; the ACLs lack an entry, and the second one has no version.
FORGED = [
    (QUOTA_BYTES, b"9" * 400),
    (QUOTA_INODES, b"-1"),
    (REPLICAS, b"many"),
    (STRIPE_SIZE, b"1"),
    (PLACEMENT, b"orbit=geostationary"),
    (acl.DEFAULT, b"\2\0\0\0" + b"\1\0\7\0\0\0\0\0"),
    (acl.DEFAULT, b"x"),
]
PLAN = Plan(nodes=1, mounts=2, replicas=1, namespaces=False, lease_ttl_s=LONG_LEASE_S)
NEWER_RULE = "zone=a orbit=geostationary"


def senseless(ino: int, values: dict[str, Any], extent: int = 5 << 24 | 1) -> bytes:
    inode = Inode(ino, 0o100644, 0, 0, 1)
    inode.extent, inode.version = records.ContentId(extent), 1
    for name, value in values.items():
        setattr(inode, name, value)
    return inode.encode()


@pytest.mark.parametrize("values", SENSELESS, ids=str)
def test_a_value_that_no_inode_has_is_damage(values: dict[str, Any]) -> None:
    with pytest.raises(msgspec.DecodeError):
        Inode.decode(7, senseless(7, values), 1)


@pytest.mark.parametrize("field", [b"\xa2\xff\xff", b"\x91" * 5000], ids=["not UTF-8", "deep"])
def test_a_record_that_cannot_be_decoded_is_damage(field: bytes) -> None:
    faults = Faults()
    assert faults.sound(b"m" + bytes(8), b"\xdc\x00\x08" + field * 8, records.MountRecord) is None
    # The session that has written an inode is looked for in what is left of it.
    faults.add(inode_key(7), "it is damaged", field)
    assert "2 records" in faults.warnings()[0]


def test_a_rule_that_is_not_understood_admits_no_node() -> None:
    assert policy_of_rule(NEWER_RULE).only[0][1] == ()


def test_nodes_and_mounts_go_on(cluster: Cluster) -> None:
    here, there = (mount.path for mount in cluster.mounts[:2])
    (here / "before").write_bytes(b"b" * 300_000)
    for number in range(len(SENSELESS)):
        (here / f"file{number}").write_bytes(b"x" * 100_000)
    bad = {(here / f"file{number}").stat().st_ino: number for number in range(len(SENSELESS))}

    # First: the log has a few lines of such records at a time.
    cluster.put([Put(records.policy_key(9), NEWER_RULE.encode())])
    inodes = (Inode.decode(ino, cluster.value(inode_key(ino)), 1) for ino in bad)
    lies = (senseless(one.ino, SENSELESS[bad[one.ino]], one.extent) for one in inodes)
    cluster.put([Put(inode_key(ino), lie) for ino, lie in zip(bad, lies, strict=True)])
    (node,) = cluster.nodes
    eventually(lambda: "not understood" in node.log_tail(), "the node was told")
    for mount in (here, there):
        assert (mount / "before").read_bytes() == b"b" * 300_000
        (mount / mount.parent.name).write_bytes(b"a" * 300_000)
        assert len(os.listdir(mount)) >= len(SENSELESS)
    assert node.alive
    late = cluster.add_mount()
    assert (late.path / "before").read_bytes() == b"b" * 300_000
    for mount in (here, there, late.path):
        assert "file0" in os.listdir(mount)
        for ask in (os.stat, os.listxattr, Path.read_bytes):
            with fails_with(errno.EIO):
                ask(mount / "file0")
    told = cluster.status()
    assert told["health"] == "degraded"
    (line,) = (line for line in told["problems"] if "make no sense" in line)
    assert "(/file0), written by mount0:" in line
    assert any("make no sense" in line for line in late.status()["warnings"])

    os.unlink(there / "file0")
    os.rename(there / "before", there / "file1")
    for mount in (here, there, late.path):
        assert "file0" not in os.listdir(mount)
        assert (mount / "file1").read_bytes() == b"b" * 300_000


def test_attributes_that_no_mount_sets_are_refused_by_their_names(cluster: Cluster) -> None:
    for ino, attribute in enumerate(FORGED, FIRST_INO):
        inode = Inode(ino, 0o40755, 0, 0, 1)
        inode.xattrs = dict([attribute])
        there = Put(name_key(1, b"odd%d" % ino), ino.to_bytes(8, "big"))
        cluster.put([Put(inode_key(ino), inode.encode()), there])
    for mount in cluster.mounts[:2]:
        (mount.path / "elsewhere").write_bytes(b"e" * 300_000)
        for ino, (name, _) in enumerate(FORGED, FIRST_INO):
            file = mount.path / f"odd{ino}" / mount.path.parent.name
            with nullcontext() if name in QUOTA_NAMES else fails_with(errno.EIO):
                file.write_bytes(b"x")
                continue
            assert name.decode().rpartition(".")[2] in mount.log.read_text()
        assert "Traceback" not in mount.log.read_text()


def test_a_file_that_is_said_to_be_larger_than_a_cache_empties_none(cluster: Cluster) -> None:
    here, there = cluster.mounts[:2]
    for name in ("cached", "other"):
        (here.path / name).write_bytes(b"c" * 300_000)
    (there.path / "cached").read_bytes()
    other = cluster.value(inode_key((here.path / "other").stat().st_ino))
    huge = Inode.decode(FIRST_INO - 1, other, 1)
    huge.size, huge.blocks = records.SIZE_MAX, records.SIZE_MAX // 512
    huge.layout = huge.layout._replace(stripe_bytes=0)
    there_is = Put(name_key(1, b"huge"), huge.ino.to_bytes(8, "big"))
    cluster.put([Put(inode_key(huge.ino), huge.encode()), there_is])
    evictions = counters(there)["cache_evictions"]
    (there.path / "huge").open("rb").close()
    assert counters(there)["cache_evictions"] == evictions


def lost(path: Path) -> bool:
    return not path.exists()


def test_a_directory_below_itself_occupies_nobody(cluster: Cluster) -> None:
    here, there = (mount.path for mount in cluster.mounts[:2])
    (here / "a" / "b").mkdir(parents=True)
    (here / "a" / "b" / "file").write_bytes(b"f" * 300_000)
    a, b = ((here / path).stat().st_ino for path in ("a", "a/b"))

    cluster.put([Put(name_key(b, b"loop"), a.to_bytes(8, "big")), Delete(name_key(1, b"a"))])
    for mount in (here, there, cluster.add_mount().path):
        eventually(functools.partial(lost, mount / "a"), "the mount was told")
        (mount / mount.parent.name).write_bytes(b"a" * 300_000)
        assert "a" not in os.listdir(mount)
    assert cluster.nodes[0].alive


def test_a_node_that_announces_a_store_in_a_mount_stops_no_mount(cluster: Cluster) -> None:
    (node,), mount = cluster.nodes, cluster.mounts[0]
    key = records.key_of(b"n", node.node_id)
    (mount.path / "store").mkdir()
    known = records.decode(cluster.value(key), records.NodeAddress)
    lie = msgspec.structs.replace(known, host=mount.name, store=f"{mount.path}/store")
    cluster.put([Put(key, records.encode(lie))], "node")
    for number in range(3):
        (mount.path / f"later{number}").write_bytes(b"a" * 300_000)
        assert (mount.path / f"later{number}").read_bytes() == b"a" * 300_000
    cluster.put([Put(key, records.encode(known))], "node")


def test_a_node_that_announces_no_address_stops_no_mount(cluster: Cluster) -> None:
    (node,), key = cluster.nodes, records.key_of(b"n", 1)
    known = records.decode(cluster.value(records.key_of(b"n", node.node_id)), records.NodeAddress)
    lie = msgspec.structs.replace(known, address="é" * 300)
    cluster.put([Put(key, records.encode(lie))], "node")
    late = cluster.add_mount()
    (late.path / "later").write_bytes(b"a" * 300_000)
    assert (cluster.mounts[0].path / "later").read_bytes() == b"a" * 300_000
    assert "Traceback" not in cluster.administer("status", allowed=(0, 1))
    cluster.put([Delete(key)], "node")


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's directory takes root")
def test_a_node_that_announces_another_users_directory_gives_no_bytes(
    cluster: Cluster, tmp_path: Path
) -> None:
    (node,), mount, there = cluster.nodes, cluster.mounts[0], cluster.mounts[1].path
    for name in ("incoming", "extents", "held"):
        (tmp_path / name).mkdir()
    (tmp_path / "node.json").write_bytes((node.store / "node.json").read_bytes())
    (tmp_path / "secret").write_bytes(b"s" * 300_000)
    # Many, as the mount looks at the directory while it reads.
    files = [f"borrowed{number}" for number in range(40)]
    for name in files:
        (there / name).write_bytes(b"f" * 300_000)
        record = cluster.value(inode_key((there / name).stat().st_ino))
        extent = Inode.decode(1, record, 1).extent
        (tmp_path / "extents" / f"{extent:x}.0").symlink_to(tmp_path / "secret")
    os.chown(tmp_path, 65534, 65534)
    key = records.key_of(b"n", node.node_id)
    known = records.decode(cluster.value(key), records.NodeAddress)
    lie = msgspec.structs.replace(known, host=mount.name, store=str(tmp_path))
    cluster.put([Put(key, records.encode(lie))], "node")
    for name in files:
        assert (mount.path / name).read_bytes() == b"f" * 300_000
    eventually(lambda: "is another user's" in mount.log.read_text(), "it is told")
    cluster.put([Put(key, records.encode(known))], "node")
