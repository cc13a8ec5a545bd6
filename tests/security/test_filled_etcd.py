"""A mount fills etcd, which stops all writes, and is shut out (real etcd with TLS, users and roles)."""

import secrets
from pathlib import Path

import pytest
from harness.secure_cluster import SecureCluster

from irdmafs.backend.etcd.engine import EtcdEngine
from irdmafs.backend.etcd.leases import LEASE_BITS
from irdmafs.backend.kv import NoSpace, Put

QUOTA_BYTES = 24 << 20
VALUE_BYTES = 500_000


async def fill(engine: EtcdEngine) -> None:
    """Write own keys until etcd takes no more."""
    session = b"p" + (engine.leases.owner << LEASE_BITS | 99).to_bytes(8, "big")
    for number in range(2 * QUOTA_BYTES // VALUE_BYTES):
        value = secrets.token_bytes(VALUE_BYTES)
        await engine.transact((), [Put(session + number.to_bytes(8, "big"), value)])


async def test_a_mount_that_filled_etcd_is_revoked_and_writes_go_on(tmp_path: Path) -> None:
    with SecureCluster(tmp_path, QUOTA_BYTES) as made:
        made.cert("greedy", "mount")
        async with made.engine("mount", "mount") as engine:
            async with made.engine("greedy", "mount") as greedy:
                with pytest.raises(NoSpace):
                    await fill(greedy)
                with pytest.raises(NoSpace, match="repair-etcd"):
                    await engine.transact((), [Put(b"l" + bytes(7) + b"1", b"")])
                shown = made.irdmafs("status")
                assert shown.returncode == 2
                assert "irdmafs cluster repair-etcd" in shown.stdout

                refused = made.irdmafs("revoke", "greedy")
                assert refused.returncode == 1
                assert (
                    "irdmafs cluster repair-etcd; irdmafs cluster revoke greedy" in refused.stderr
                )
                assert not await engine.range(b"p", b"q")
                repaired = made.irdmafs("repair-etcd")
                assert repaired.returncode == 0, repaired
                await engine.transact((), [Put(b"l" + bytes(7) + b"1", b"")])
                with pytest.raises(PermissionError):
                    await fill(greedy)
            revoked = made.irdmafs("revoke", "greedy")
            assert revoked.returncode == 0, revoked
            assert "ALARM" not in made.irdmafs("status").stdout
