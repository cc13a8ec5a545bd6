"""A reader's certificate opens store nodes, and not etcd: a node asks etcd for it, within limits."""

from collections.abc import Awaitable
from contextlib import closing
from pathlib import Path

import pytest
import trio
from harness.clusters import LONG_LEASE_S, Cluster, Plan, counters
from harness.mountpoint import eventually
from harness.secure_cluster import CLUSTER, NAMESPACE, NODE_RECORDS, PLACEMENT, keys_within
from test_rights import refused

from irdmafs.backend.cluster.config import ClusterConfig
from irdmafs.backend.cluster.lease import MOUNT, Session
from irdmafs.backend.etcd import etcd_pb2 as pb
from irdmafs.backend.etcd.client import DirectClient, Unsent
from irdmafs.backend.etcd.rpc import ALARM, COMPACT, GRANT, STATUS
from irdmafs.backend.kv import Delete, Put
from irdmafs.backend.model.records import SETTINGS_KEY, MountRecord, key_of, pin_key
from irdmafs.backend.model.values import ConfigError

FOREIGN = NODE_RECORDS | PLACEMENT | CLUSTER | NAMESPACE
# Without namespaces, so that this process can talk to nodes and etcd itself.
PLAN = Plan(nodes=2, mounts=1, buckets=4, tls=True, namespaces=False, lease_ttl_s=LONG_LEASE_S)


async def is_accepted(cluster: Cluster, certificate: str) -> bool:
    """Return whether etcd grants a lease to who has this certificate."""
    ca, cert, key = (
        str(cluster.config_directory / name)
        for name in ("ca.pem", f"{certificate}.pem", f"{certificate}.key")
    )
    with closing(DirectClient(cluster.etcd.endpoints, ca=ca, cert=cert, key=key)) as client:
        try:
            await client.attempt(GRANT, pb.LeaseGrantRequest(TTL=5), 5.0)
        except Unsent:
            return False
        return True


async def shut_out(doing: Awaitable[object]) -> bool:
    try:
        await doing
    except OSError as error:
        return "its certificate was revoked" in str(error)
    return False


async def test_etcd_does_not_accept_a_reader_s_certificate(cluster: Cluster) -> None:
    assert not await is_accepted(cluster, "reader")
    assert "unhandled critical extension" in cluster.etcd.log_tail()


async def test_a_reader_changes_its_own_session_and_nothing_else(cluster: Cluster) -> None:
    said = cluster.administer("cert", "bystander", "--role", "reader")
    assert all(f":{node.control_port}" in said for node in cluster.live_nodes().values())
    async with (
        cluster.engine("reader") as engine,
        cluster.engine("reader", "reader-bystander") as victim,
        trio.open_nursery() as nursery,
    ):
        ours, theirs = (
            Session(one, MountRecord("host", "/m", 1, "0"), 5) for one in (engine, victim)
        )
        await nursery.start(ours.run)
        await nursery.start(theirs.run)

        await victim.transact((), [Put(pin_key(5, theirs.lease), b"", theirs.lease)])
        foreign = FOREIGN | keys_within(theirs.lease)
        foreign["the session"] = key_of(MOUNT, theirs.lease)
        for key in foreign.values():
            assert await refused(engine.transact((), [Put(key, b"forged", ours.lease)]))
            assert await refused(engine.transact((), [Delete(key)]))
        for key in keys_within(ours.lease).values():
            assert await refused(engine.transact((), [Put(key, b"for ever")]))
            await engine.transact((), [Put(key, b"", ours.lease)])
            await engine.transact((), [Delete(key)])
        assert await refused(engine.leases.revoke(theirs.lease))
        calls = engine.calls
        alarm = pb.AlarmRequest(action=pb.AlarmRequest.ACTIVATE, alarm=pb.NOSPACE)
        assert await refused(calls.call(ALARM, alarm))
        assert await refused(calls.call(COMPACT, pb.CompactionRequest(revision=1)))
        assert await refused(calls.call(STATUS, pb.StatusRequest()))
        assert await refused(engine.admin.auth.add_user("thief", ["root"]))
        assert await refused(engine.admin.has_others())
        assert theirs.valid()
        assert ours.valid()
        nursery.cancel_scope.cancel()
    assert "alarm" not in cluster.etcd.ctl("alarm", "list")


async def test_a_revoked_reader_can_do_nothing(cluster: Cluster) -> None:
    cluster.administer("cert", "r1", "--role", "reader")
    async with cluster.engine("reader", "reader-r1", 1.0) as engine:
        lease = await engine.leases.grant(60)
        await engine.transact((), [Put(pin_key(5, lease), b"", lease)])
        await trio.to_thread.run_sync(lambda: cluster.administer("revoke", "r1", "--yes"))
        assert await shut_out(engine.get(SETTINGS_KEY))
        assert await shut_out(engine.leases.grant(60))
        assert await shut_out(engine.transact((), [Put(pin_key(5, lease), b"", lease)]))
    assert pin_key(5, lease)[1:] not in cluster.pins()


async def test_with_a_revoked_certificate_etcd_cannot_be_reached(cluster: Cluster) -> None:
    cluster.administer("cert", "w1", "--role", "mount")
    cluster.administer("revoke", "w1")
    assert await is_accepted(cluster, "mount")
    assert not await is_accepted(cluster, "mount-w1")


def test_a_reader_needs_the_addresses_of_nodes(cluster: Cluster, tmp_path: Path) -> None:
    text = cluster.config_of("reader").read_text()
    config = tmp_path / "cluster.toml"
    config.write_text(text.replace("nodes = ", "# nodes = "))
    with pytest.raises(ConfigError, match="a reader reaches the cluster by its store nodes"):
        ClusterConfig.load(str(config)).cluster.engine("reader")


def test_a_reader_goes_on_with_its_session_when_its_node_ends(cluster: Cluster) -> None:
    """At a node that its configuration does not name."""
    writer = cluster.mounts[0].path
    (writer / "before").write_bytes(b"b" * 300_000)
    reader = cluster._make_mount(None, certificate="reader")
    text = reader.config.read_text()
    [line] = [line for line in text.splitlines() if line.startswith("nodes = ")]
    used = cluster.nodes[0]
    address = cluster.live_nodes()[used.node_id]
    only = f'nodes = ["{address.address}:{address.control_port}"]'
    reader.config.write_text(text.replace(line, only))
    reader.start()
    reader.wait_ready()
    assert (reader.path / "before").read_bytes() == b"b" * 300_000
    session = counters(reader)["session"]
    used.kill9()
    (writer / "after").write_bytes(b"a")
    eventually((reader.path / "after").exists, "it sees the change", 30)
    assert (reader.path / "before").read_bytes() == b"b" * 300_000
    assert counters(reader)["session"] == session
