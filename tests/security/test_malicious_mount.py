"""A mount with a valid certificate that asks store nodes for what is another mount's, or that follows a
directory and never answers, on a real cluster."""

import errno
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import trio
from harness.closing import descriptor
from harness.clusters import MIB, Cluster, Plan, counters
from harness.errors import fails_with
from harness.mountpoint import eventually

from irdmafs.backend.cluster.group_configs import Groups
from irdmafs.backend.cluster.lease import Session
from irdmafs.backend.cluster.membership import Members, followed_key, seen_key
from irdmafs.backend.cluster.replica import Replica
from irdmafs.backend.etcd.engine import EtcdEngine
from irdmafs.backend.kv import Put
from irdmafs.backend.model.placement import group_of
from irdmafs.backend.model.records import SIZE_MAX, MountRecord
from irdmafs.backend.namespace import ROOT_INO, Inode, Tree
from irdmafs.backend.transport import Extent, FileRange, Target
from irdmafs.backend.transport.messages import Parcel
from irdmafs.backend.transport.movers import all_movers
from irdmafs.backend.transport.peers import Peers, open_peers
from irdmafs.backend.transport.rights import make_session_key, session_digest

# In a message, and in streams.
SIZES = [1000, 300_000]
BUCKETS = 8
PLAN = Plan(nodes=2, mounts=1, buckets=BUCKETS, tls=True, namespaces=False)
STRIPE_SIZE = b"1M"
# Said of a mount that is waited for when something changes.
COMPLAINT = "has acknowledged nothing"


class Attacker:
    """Has all that a worker of the cluster has: the certificate of a mount, and etcd."""

    def __init__(self, engine: EtcdEngine, name: str, role: str) -> None:
        self.key = make_session_key()
        self.members = Members()
        self.groups = Groups()
        self.tree = Tree()
        self.replica = Replica(engine, (self.members, self.groups, self.tree))
        record = MountRecord(
            "attacker", "/mnt", 1, "0", name, role, session_digest(self.key)
        )  # fmt: skip
        self.session = Session(engine, record, 5)
        self.claimed = 0
        self.peers: Peers

    def file(self, size: int) -> Inode:
        [found] = [each for each in self.tree.inodes.values() if each.size == size]
        return found

    def target(self, inode: Inode) -> Target:
        group = group_of(inode.layout, 0, BUCKETS)
        return Target(group, self.groups.get(group)[1], ())


@asynccontextmanager
async def attacking(cluster: Cluster, of_certificate: str = "") -> AsyncIterator[Attacker]:
    config = cluster.section_of("mount")
    credentials = config.credentials("mount")
    assert credentials is not None
    name, role = credentials.identity.name, credentials.identity.role
    async with config.engine("mount") as engine, trio.open_nursery() as nursery:
        attacker = Attacker(engine, of_certificate or name, role)
        await attacker.replica.start(nursery)
        await nursery.start(attacker.session.run)
        async with open_peers(
            attacker.members.nodes.get,
            all_movers(),
            credentials=credentials,
            name="attacker",
            role="mount",
            session=lambda: attacker.claimed or attacker.session.number,
            session_key=attacker.key,
        ) as attacker.peers:
            with trio.fail_after(60):
                yield attacker
        await attacker.session.release()
        nursery.cancel_scope.cancel()


class Tries(NamedTuple):
    """The requests that are tried on one content."""

    attacker: Attacker
    content: int
    target: Target
    size: int

    async def put(self, node: int) -> None:
        parcel = Parcel(Extent(self.content, 0), self.target, b"x" * self.size)
        await self.attacker.peers.device(node).put(parcel)

    async def write(self, node: int) -> None:
        with descriptor(os.memfd_create("data")) as fd:
            os.write(fd, b"x" * self.size)
            whole = FileRange(fd, 0, self.size)
            device = self.attacker.peers.device(node)
            await device.write(Extent(self.content, 0), self.target, whole)

    async def adopt(self, node: int) -> None:
        device = self.attacker.peers.device(node)
        await device.adopt(Extent(self.content, 0), self.target, f"{self.content:x}")

    async def abort(self, node: int) -> None:
        await self.attacker.peers.device(node).abort(self.content)

    async def outcomes(self) -> set[str]:
        """Return how each of the requests ends, on every node."""
        found = set()
        for node in self.attacker.members.nodes:
            for attempt in (self.put, self.write, self.adopt, self.abort):
                try:
                    await attempt(node)
                    found.add(f"{attempt.__name__} is done")
                except OSError as error:
                    found.add(errno.errorcode[error.errno or 0])
        return found


def contents_on_nodes(cluster: Cluster, content: int) -> list[bytes]:
    return [(node.store / f"extents/{content:x}.0").read_bytes() for node in cluster.nodes]


@pytest.mark.parametrize("claims", [False, True], ids=["own session", "the victim's session"])
@pytest.mark.parametrize("size", SIZES)
async def test_what_another_mount_published_stays_as_it_is(
    cluster: Cluster, here: Path, size: int, claims: bool
) -> None:
    size += claims
    written = os.urandom(size)
    (here / "file").write_bytes(written)
    async with attacking(cluster) as attacker:
        inode = attacker.file(size)
        if claims:
            attacker.claimed = inode.extent >> 24
        for wrong in (size, 1):
            tries = Tries(attacker, inode.extent, attacker.target(inode), wrong)
            assert await tries.outcomes() == {"EACCES"}
        assert contents_on_nodes(cluster, inode.extent) == [written, written]
    fresh = cluster.add_mount()
    assert (fresh.path / here.name / "file").read_bytes() == written
    fresh.close()


async def test_numbers_of_another_session_are_not_to_be_had(cluster: Cluster, here: Path) -> None:
    """The victim goes on writing while each of its next numbers is put first, or given up, by another."""
    written = {f"file{i}": os.urandom(1 + i * 40_000) for i in range(12)}
    (here / "first").write_bytes(bytes(777))
    async with attacking(cluster) as attacker:
        first = attacker.file(777)
        for claimed in (0, first.extent >> 24):
            attacker.claimed = claimed
            for ahead in range(1, 9):
                tries = Tries(attacker, first.extent + ahead, attacker.target(first), 10)
                assert await tries.outcomes() == {"EACCES"}
        for name, content in written.items():
            await trio.to_thread.run_sync((here / name).write_bytes, content)
            tries = Tries(attacker, first.extent + 1, attacker.target(first), 10)
            await tries.outcomes()
    fresh = cluster.add_mount()
    for name, content in written.items():
        assert (fresh.path / here.name / name).read_bytes() == content
    fresh.close()


async def test_a_session_under_another_name_has_no_rights(cluster: Cluster, here: Path) -> None:
    (here / "file").write_bytes(bytes(888))
    async with attacking(cluster, of_certificate="somebody-else") as attacker:
        inode = attacker.file(888)
        own = attacker.session.number << 24 | 1
        await attacker.replica.barrier()
        tries = Tries(attacker, own, attacker.target(inode), 10)
        assert await tries.outcomes() == {"EACCES"}


async def test_what_a_mount_published_is_not_replaced_by_it(cluster: Cluster, here: Path) -> None:
    """It may send a content again, as it does when it does not know what became of it."""
    size = 2 * MIB + 123
    async with attacking(cluster) as attacker:
        (here / "file").write_bytes(bytes(999))
        await attacker.replica.barrier()
        target = attacker.target(attacker.file(999))
        own = attacker.session.number << 24 | 1
        tries = Tries(attacker, own, target, size)
        for node in attacker.members.nodes:
            await tries.write(node)
            await tries.write(node)
            for shorter in (10, 100_000):
                for attempt in (Tries.put, Tries.write):
                    with pytest.raises(FileExistsError):
                        await attempt(tries._replace(size=shorter), node)
        assert contents_on_nodes(cluster, own) == [b"x" * size] * 2


async def test_an_extent_longer_than_any_file_is_refused(cluster: Cluster, here: Path) -> None:
    """It is one hole, and takes no room; but nodes would read it for years when they check it."""
    async with attacking(cluster) as attacker:
        (here / "file").write_bytes(bytes(555))
        await attacker.replica.barrier()
        own = Extent(attacker.session.number << 24 | 1, 0)
        target = attacker.target(attacker.file(555))
        with descriptor(os.memfd_create("hole")) as fd:
            os.ftruncate(fd, SIZE_MAX + 1)
            device = attacker.peers.device(next(iter(attacker.members.nodes)))
            with fails_with(errno.EFBIG):
                await device.write(own, target, FileRange(fd, 0, SIZE_MAX + 1))


async def test_a_reader_that_never_answers_does_not_stop_writers(cluster: Cluster) -> None:
    mount = cluster.mounts[0]
    record = MountRecord("elsewhere", "/hostile", 1, "0", "reader", "reader")

    async def publish(name: str, revision: int) -> None:
        def is_known() -> bool:
            return bool(counters(mount)["applied_revision"] >= revision)

        # In a thread: the session of the reader is renewed meanwhile.
        await trio.to_thread.run_sync(eventually, is_known, "the mount knows it")
        await trio.to_thread.run_sync((mount.path / name).write_bytes, b"x")

    async with cluster.engine("reader") as engine, trio.open_nursery() as nursery:
        session = Session(engine, record, PLAN.lease_ttl_s)
        await nursery.start(session.run)
        lease = session.lease
        revision = await engine.transact((), [Put(followed_key(ROOT_INO, lease), b"", lease)])
        await publish("first", revision)
        assert mount.log_tail().count(COMPLAINT) == 1
        assert "/hostile on elsewhere (certificate 'reader')" in mount.log_tail()
        await publish("second", revision)
        assert mount.log_tail().count(COMPLAINT) == 1
        # Once he has seen everything he is waited for again.
        seen = (1 << 62).to_bytes(8, "big")
        await engine.transact((), [Put(seen_key(lease), seen, lease)])
        await publish("third", revision)
        assert mount.log_tail().count(COMPLAINT) == 1
        nursery.cancel_scope.cancel()
