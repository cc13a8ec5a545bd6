"""etcd itself refuses what a member of the cluster may not change, whatever program he writes for it."""

import errno
import itertools
from collections.abc import Awaitable, Sequence

import pytest
import trio
from harness.clusters import Cluster
from harness.secure_cluster import (
    CLUSTER,
    NAMESPACE,
    NODE_RECORDS,
    ONLY_ETCD,
    PLACEMENT,
    keys_within,
)

from irdmafs.backend.cluster.etcd_rights import own_ranges, shared_ranges
from irdmafs.backend.cluster.lease import MOUNT, Session
from irdmafs.backend.etcd.engine import EtcdEngine
from irdmafs.backend.etcd.rpc import RpcError
from irdmafs.backend.kv import Delete, Put
from irdmafs.backend.model.lock_claims import guard_key
from irdmafs.backend.model.records import MountRecord, key_of, pin_key, policy_key, pool_key
from irdmafs.backend.namespace.inode import FIRST_VIRTUAL_INO, inode_key, name_key
from irdmafs.backend.trust.security import Role

PLAN = ONLY_ETCD


def session(engine: EtcdEngine) -> Session:
    return Session(engine, MountRecord("host", "/m", 1, "0"), 5)


async def refused(doing: Awaitable[object]) -> bool:
    try:
        await doing
    except RpcError as error:
        return "permission denied" in error.text
    except OSError as error:
        return error.errno == errno.EACCES
    return False


async def allowed_writes(engine: EtcdEngine, keys: dict[str, bytes]) -> list[str]:
    """Return the puts and deletes that etcd lets this member make."""
    return [
        f"{operation.__class__.__name__} {what}"
        for what, key in keys.items()
        for operation in (Put(key, b"forged"), Delete(key))
        if not await refused(engine.transact((), [operation]))
    ]


def test_ranges_of_different_certificates_do_not_meet() -> None:
    roles: Sequence[Role] = ("mount", "node", "reader")
    last = (1 << 24) - 1
    for role in roles:
        ranges = [one for owner in (1, 2, 3, last - 1, last) for one in own_ranges(role, owner)]
        ranges += shared_ranges(role) if role != "reader" else []
        ranges.sort()
        assert all(one.start < one.end for one in ranges)
        assert all(one.end <= after.start for one, after in itertools.pairwise(ranges))


async def test_a_mount_changes_neither_members_nor_groups_nor_settings(cluster: Cluster) -> None:
    async with cluster.engine("mount") as engine:
        assert await allowed_writes(engine, NODE_RECORDS | PLACEMENT | CLUSTER) == []
        writes = await allowed_writes(engine, NAMESPACE | {"a wanted pool": pool_key(1)})
        # The engine itself puts this key in each transaction, so it cannot be asked for again.
        assert {what for what in NAMESPACE if f"Put {what}" not in writes} <= {
            "the last transaction"
        }


async def test_a_mount_writes_no_keys_that_mean_nothing(cluster: Cluster) -> None:
    odd = [
        *(b"d", b"dd", inode_key(0), inode_key(FIRST_VIRTUAL_INO), name_key(2**63, b"x"), b"i\xff"),
        *(b"t\0", guard_key(2**64 - 1), policy_key(0), policy_key(256), pool_key(1 << 16)),
        *(b"P", b"w", b"uu", b"s\0", b"z"),
    ]
    async with cluster.engine("mount") as engine:
        assert await allowed_writes(engine, {repr(key): key for key in odd}) == []


async def test_a_mount_has_its_own_session_and_no_other_s(cluster: Cluster) -> None:
    cluster.administer("cert", "other", "--role", "mount")
    async with (
        cluster.engine("mount", "mount-other") as victim,
        cluster.engine("mount") as engine,
        trio.open_nursery() as nursery,
    ):
        theirs, ours = session(victim), session(engine)
        await nursery.start(theirs.run)
        await nursery.start(ours.run)

        await victim.transact((), [Put(pin_key(5, theirs.lease), b"", theirs.lease)])
        foreign = keys_within(theirs.lease) | {"the session": key_of(MOUNT, theirs.lease)}
        assert await allowed_writes(engine, foreign) == []
        assert await refused(engine.leases.revoke(theirs.lease))
        fences = await engine.range(b"x", b"y")
        ours_begin = engine.leases.owner.to_bytes(3, "big")
        foreign = {f"fence {one.key!r}": one.key for one in fences if one.key[1:4] != ours_begin}
        assert foreign
        assert await allowed_writes(engine, foreign) == []
        own = keys_within(ours.lease)
        assert len(await allowed_writes(engine, own)) == 2 * len(own)
        assert theirs.valid()
        nursery.cancel_scope.cancel()


async def test_a_node_changes_neither_names_nor_sessions(cluster: Cluster) -> None:
    async with cluster.engine("node") as engine, cluster.engine("mount") as mount:
        names = {what: key for what, key in NAMESPACE.items() if what != "the last transaction"}
        lease = await mount.leases.grant(5)
        of_mount = {"a session": key_of(MOUNT, lease), "a pin": pin_key(5, lease)}
        assert await allowed_writes(engine, names | of_mount | CLUSTER) == []
        assert len(await allowed_writes(engine, NODE_RECORDS | PLACEMENT)) == 8


@pytest.mark.parametrize("role", ["mount", "node"])
async def test_nobody_gives_himself_rights(cluster: Cluster, role: Role) -> None:
    async with cluster.engine(role) as engine:
        assert await refused(engine.admin.auth.add_user("thief", ["root"]))
        assert await refused(engine.admin.auth.set_role("thief", [], [(b"\0", b"\xff")]))
        assert await refused(engine.admin.auth.delete_user("mount"))


async def test_the_keys_of_others_in_the_same_etcd_are_not_read(cluster: Cluster) -> None:
    async with cluster.engine("mount") as engine:
        assert await refused(engine.admin.has_others())
