"""A revoked certificate loses what it opened within seconds, also for a peer that is connected already, or
that has filled etcd (real etcd with TLS, users and roles)."""

import json
import secrets
from dataclasses import replace
from typing import Any

import pytest
import trio
from harness.clusters import Cluster, Plan
from harness.mountpoint import eventually
from harness.secure_cluster import ONLY_ETCD

from irdmafs.backend.cluster.lease import Session
from irdmafs.backend.etcd.engine import EtcdEngine
from irdmafs.backend.etcd.leases import LEASE_BITS
from irdmafs.backend.kv import NoSpace, Put
from irdmafs.backend.model.records import MountRecord, decode, pin_key
from irdmafs.backend.trust.security import identity_in

# Without namespaces, so that this process can talk to nodes itself.
SOON = {"timeout": "3s"}
PLAN = Plan(nodes=1, mounts=1, replicas=1, buckets=4, tls=True, namespaces=False, mount_config=SOON)


def members(cluster: Cluster) -> list[dict[str, Any]]:
    answer = cluster.administer("members", "--json")
    found: list[dict[str, Any]] = json.loads(answer)
    return found


def issue(cluster: Cluster, name: str) -> None:
    cluster.administer("cert", name, "--role", "mount")


def test_a_revoked_mount_is_cut_off_and_another_one_of_its_name_is_let_in(cluster: Cluster) -> None:
    issue(cluster, "w1")
    mount = cluster.add_mount(certificate="mount-w1")
    (mount.path / "before").write_bytes(b"b" * 300_000)
    opened = (mount.path / "opened").open("wb", buffering=0)
    opened.write(b"o" * 300_000)
    old = {
        path: path.read_bytes()
        for kind in ("pem", "key")
        for path in [cluster.config_directory / f"mount-w1.{kind}"]
    }

    refused = cluster.administer("revoke", "w1", allowed=(1,))
    assert refused == ""
    assert (mount.path / "before").read_bytes() == b"b" * 300_000
    cluster.administer("revoke", "w1", "--yes")

    # Whatever it holds open: what it does now is refused by nodes and by etcd.
    eventually(
        lambda: "its certificate was revoked" in cluster.nodes[0].log_tail(), "the node cuts it off"
    )
    with pytest.raises(OSError):
        (mount.path / "after").write_bytes(b"a")
    # Its session cannot begin anew: the close ends all the same.
    with pytest.raises(TimeoutError):
        opened.close()
    assert "this mount has had no session for 3 s: " in mount.log_tail()
    assert "our certificate was revoked" in mount.log_tail()
    assert (cluster.mounts[0].path / "before").read_bytes() == b"b" * 300_000
    assert not (cluster.mounts[0].path / "after").exists()
    mount.kill9()
    mount.detach()
    [state] = [one["state"] for one in members(cluster) if one["name"] == "w1"]
    assert state == "revoked"

    for path in old:
        path.unlink()
    issue(cluster, "w1")
    mount.start()
    mount.wait_ready()
    assert (mount.path / "before").read_bytes() == b"b" * 300_000
    (mount.path / "again").write_bytes(b"again")
    assert (cluster.mounts[0].path / "again").read_bytes() == b"again"
    states = [one["state"] for one in members(cluster) if one["name"] == "w1"]
    assert states == ["valid", "revoked"]

    # The old one does not come back with the name.
    for path, data in old.items():
        path.write_bytes(data)
    thief = cluster._make_mount(None, certificate="mount-w1")
    thief.start()
    eventually(lambda: not thief.alive, "it gives up", 30)
    assert "etcd gave no definite answer" in thief.log_tail()
    assert "it may not accept our certificate" in thief.log_tail()


async def test_an_open_connection_of_a_revoked_certificate_is_cut(cluster: Cluster) -> None:
    """Also where etcd is not asked: whoever speaks the protocol himself, and keeps his connection."""
    issue(cluster, "w2")
    [node] = cluster.live_nodes()

    async with cluster.peers("mount-w2") as peers:
        await peers.ping(node)
        await trio.to_thread.run_sync(lambda: cluster.administer("revoke", "w2", "--yes"))
        with trio.fail_after(20):
            while True:
                try:
                    await peers.ping(node)
                except OSError:
                    break
                await trio.sleep(0.1)
        with pytest.raises(OSError, match="its certificate was revoked"):
            await peers.ping(node)


def test_a_node_starts_where_a_certificate_was_revoked(cluster: Cluster) -> None:
    issue(cluster, "w6")
    cluster.administer("revoke", "w6")
    [node] = cluster.nodes
    node.terminate()
    node.start()
    eventually(lambda: node.node_id in cluster.live_nodes(), "it is a node of the cluster again")


def test_a_revoked_node_is_put_out_and_stays_out() -> None:
    with Cluster(PLAN) as own:
        own.administer("revoke", "node", "--yes")
        eventually(lambda: not own.live_nodes(), "the node is not in the cluster any more")
        [node] = own.nodes
        eventually(lambda: "our certificate was revoked" in node.log_tail(), "it says why")
        eventually(lambda: "registering again" in node.log_tail(), "it tries to come back")
        assert not own.live_nodes()


async def test_what_is_revoked_stays_so_when_etcd_forgets_it(cluster: Cluster) -> None:
    """A record that is taken back by other means lets nobody in where it was known."""
    issue(cluster, "w3")
    identity = identity_in(str(cluster.config_directory / "mount-w3.pem"))
    assert identity is not None
    cluster.administer("revoke", "w3")
    eventually(lambda: "'w3' is revoked" in cluster.nodes[0].log_tail(), "the node knows")
    key = f"/irdmafs/default/K{identity.serial}"
    cluster.etcd.ctl("del", key)
    [node] = cluster.live_nodes()

    async with cluster.peers("mount-w3") as peers:
        with pytest.raises(OSError, match="its certificate was revoked"):
            await peers.ping(node)


def test_who_hides_behind_another_name_is_put_out_all_the_same(cluster: Cluster) -> None:
    issue(cluster, "w5")
    left_over: dict[str, bytes] = {}

    async def hide() -> None:
        async with cluster.engine("mount", "mount-w5") as engine, trio.open_nursery() as nursery:
            record = MountRecord("elsewhere", "/hidden", 1, "0", "mount", "mount")
            session = Session(engine, record, 60)
            await nursery.start(session.run)
            # Without a lease, it would stay for ever.
            left_over["pin"] = pin_key(5, session.lease)
            await engine.transact((), [Put(left_over["pin"], b"")])
            await trio.to_thread.run_sync(lambda: cluster.administer("revoke", "w5", "--yes"))
            with pytest.raises(PermissionError):
                await engine.transact((), [Put(left_over["pin"], b"")])
            nursery.cancel_scope.cancel()

    async def look() -> list[bytes]:
        async with cluster.engine("admin") as engine:
            mounts = [decode(pair.value, MountRecord) for pair in await engine.range(b"m", b"n")]
            assert "/hidden" not in [mount.mountpoint for mount in mounts]
            return [pair.key for pair in await engine.range(b"p", b"q")]

    trio.run(hide)
    assert left_over["pin"] not in trio.run(look)


def test_revoking_what_is_not_there_or_gone_already_says_so(cluster: Cluster) -> None:
    assert "no certificate was issued to 'nobody'" in cluster.refused("revoke", "nobody")
    issue(cluster, "w4")
    cluster.administer("revoke", "w4")
    assert "were revoked already" in cluster.refused("revoke", "w4")
    assert "--yes agrees to cutting them off" in cluster.refused("revoke", "mount")
    assert [one["state"] for one in members(cluster) if one["name"] == "mount"] == ["valid"]


QUOTA_BYTES = 24 << 20
VALUE_BYTES = 500_000


async def fill(engine: EtcdEngine) -> None:
    """Write own keys until etcd takes no more."""
    session = b"p" + (engine.leases.owner << LEASE_BITS | 99).to_bytes(8, "big")
    for number in range(2 * QUOTA_BYTES // VALUE_BYTES):
        value = secrets.token_bytes(VALUE_BYTES)
        await engine.transact((), [Put(session + number.to_bytes(8, "big"), value)])


async def test_a_mount_that_filled_etcd_is_revoked_and_writes_go_on() -> None:
    quota = (f"--quota-backend-bytes={QUOTA_BYTES}",)
    with Cluster(replace(ONLY_ETCD, etcd_arguments=quota)) as made:
        issue(made, "greedy")
        async with made.engine("mount") as engine:
            async with made.engine("mount", "mount-greedy") as greedy:
                with pytest.raises(NoSpace):
                    await fill(greedy)
                with pytest.raises(NoSpace, match="repair-etcd"):
                    await engine.transact((), [Put(b"l" + bytes(7) + b"1", b"")])
                shown = made.administer("status", allowed=(2,))
                assert "irdmafs cluster repair-etcd" in shown
                refused = made.refused("revoke", "greedy")
                assert "irdmafs cluster repair-etcd; irdmafs cluster revoke greedy" in refused
                assert not await engine.range(b"p", b"q")
                made.administer("repair-etcd")
                await engine.transact((), [Put(b"l" + bytes(7) + b"1", b"")])
                with pytest.raises(PermissionError):
                    await fill(greedy)
            made.administer("revoke", "greedy")
            assert "ALARM" not in made.administer("status", allowed=(0, 1, 2))
