"""Quotas in the namespace: the account agrees with a recount whatever happens, and nothing exceeds it."""

import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import trio
from harness.etcd_server import EtcdKeys, new_prefix
from harness.models.invariants import check, recount
from harness.models.namespace import DIRECTORY, FILE, SYMLINK, load_own
from harness.open_inodes import while_open
from harness.shared_namespaces import Lagging, error_of, host, hosts, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from irdmafs.backend.kv.map import Map
from irdmafs.backend.model.records import ContentId
from irdmafs.backend.namespace import (
    RENAME_EXCHANGE,
    ROOT_INO,
    Inode,
    Namespace,
    NewVersion,
    quotas,
)
from irdmafs.backend.namespace.inode import upwards
from irdmafs.backend.namespace.quotas import QUOTA_BYTES, QUOTA_INODES, parse_limit

BLOCK = 512


async def quota(namespace: Namespace, directory: int, name: bytes, limit: int) -> None:
    await namespace.set_xattr(directory, name, b"%d" % limit)


async def make(namespace: Namespace, parent: int, name: bytes, mode: int = FILE) -> Inode:
    return await namespace.create(parent, name, mode | 0o644, 0, 0)


def used(namespace: Namespace, directory: int) -> tuple[int, int]:
    """Inodes and bytes that are charged to a directory."""
    usage = namespace.quotas.usages[directory]
    return usage.inodes, usage.bytes


# -- the account, against a recount ----------------------------------------------------------------


class Step(NamedTuple):
    """One change. Numbers choose among what there is."""

    kind: str
    host: int
    what: int
    where: int
    name: bytes
    blocks: int


KINDS = (
    "create", "create", "create", "mkdir", "mkdir", "symlink", "tmpfile", "link", "unlink", "rmdir",
    "rename", "rename", "exchange", "publish", "publish", "limit", "limit", "lift",
)  # fmt: skip
small = st.integers(0, 30)
steps = st.lists(
    st.builds(
        Step, st.sampled_from(KINDS), st.integers(0, 1), small, small,
        st.sampled_from([b"a", b"b", b"c"]), st.integers(0, 40),
    ),
    max_size=60,
)  # fmt: skip


async def do(namespace: Namespace, step: Step) -> None:
    inodes = list(namespace.inodes.values())
    directories = [inode.ino for inode in inodes if inode.is_dir]
    files = [inode.ino for inode in inodes if inode.is_file]
    parent, other = (directories[at % len(directories)] for at in (step.where, step.what))
    file = files[step.what % len(files)] if files else 0
    match step.kind:
        case "create":
            await make(namespace, parent, step.name)
        case "mkdir":
            await make(namespace, parent, step.name, DIRECTORY)
        case "symlink":
            await make(namespace, parent, step.name, SYMLINK)
        case "tmpfile":
            await namespace.orphan(FILE | 0o600, 0, 0, directory=parent)
        case "link":
            await namespace.link(file, parent, step.name)
        case "unlink":
            removing = namespace.unlink(parent, step.name)
            await while_open(namespace, removing, is_open=step.blocks > 20)
        case "rmdir":
            await namespace.rmdir(parent, step.name)
        case "rename" | "exchange":
            flags = RENAME_EXCHANGE if step.kind == "exchange" else 0
            target = b"b" if step.blocks % 2 else step.name
            await namespace.rename(other, step.name, parent, target, flags)
        case "publish":
            await namespace.publish(
                NewVersion(file, ContentId(step.blocks), step.blocks * BLOCK, step.blocks, 1)
            )
        case "limit":
            if step.blocks % 2:
                await quota(namespace, parent, QUOTA_INODES, 1 + step.blocks)
            else:
                await quota(namespace, parent, QUOTA_BYTES, BLOCK * (1 + 3 * step.blocks))
        case "lift":
            await namespace.remove_xattr(parent, QUOTA_BYTES if step.blocks % 2 else QUOTA_INODES)


def nameless(namespace: Namespace) -> frozenset[int]:
    return frozenset(ino for ino, inode in namespace.inodes.items() if not inode.nlink)


def limits_hold(namespace: Namespace, before: dict[int, tuple[int, int]]) -> None:
    """Nothing is above a limit that was not above it before."""
    for directory, usage in namespace.quotas.usages.items():
        inodes, size = before.get(directory, (2**63, 2**63))
        assert usage.inodes <= max(usage.limit_inodes, inodes)
        assert usage.bytes <= max(usage.limit_bytes, size)


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(steps)
def test_the_account_is_what_a_recount_finds(steps: Sequence[Step]) -> None:
    async def test() -> None:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
            records = Map(f"{directory}/names")
            namespace = await load_own(records)
            for step in steps:
                before = {ino: used(namespace, ino) for ino in namespace.quotas.usages}
                await error_of(do(namespace, step))
                check(namespace, nameless(namespace))
                limits_hold(namespace, before)
            account = {ino: used(namespace, ino) for ino in namespace.quotas.usages}
            unpublished = any(
                inode.is_file and inode.nlink and not inode.version
                for inode in namespace.inodes.values()
            )
            records.close()
            records = Map(f"{directory}/names")
            again = await load_own(records)
            check(again)
            found = {ino: used(again, ino) for ino in again.quotas.usages}
            assert found.keys() == account.keys()
            assert unpublished or found == account
            records.close()

    trio.run(test)


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(steps)
def test_the_account_is_a_recount_on_every_host(keys: EtcdKeys, steps: Sequence[Step]) -> None:
    """Their replicas lag behind, and a host that starts later agrees with them."""
    own = EtcdKeys(keys.server, new_prefix())

    async def test() -> None:
        async with hosts(own, 2, Lagging) as namespaces:
            for step in steps:
                await error_of(do(namespaces[step.host], step))
            accounts: list[dict[int, tuple[int, int]]] = []
            for namespace in namespaces:
                await namespace.hub.barrier()
                check(namespace, nameless(namespace))
                accounts.append({ino: used(namespace, ino) for ino in namespace.quotas.usages})
            async with host(own) as fresh:
                check(fresh)
                accounts.append({ino: used(fresh, ino) for ino in fresh.quotas.usages})
            assert accounts[0] == accounts[1] == accounts[2]

    run(test)


# -- what holds when several change the tree at once -----------------------------------------------


async def test_a_host_never_exceeds_a_quota_by_doing_much_at_once(keys: EtcdKeys) -> None:
    async with host(keys) as namespace:
        place = await make(namespace, ROOT_INO, b"place", DIRECTORY)
        file = await make(namespace, ROOT_INO, b"file")
        await quota(namespace, place.ino, QUOTA_INODES, 10)
        errors: list[str] = []

        async def create(number: int) -> None:
            errors.append(await error_of(make(namespace, place.ino, b"%d" % number)))

        async with trio.open_nursery() as nursery:
            for number in range(40):
                nursery.start_soon(create, number)
        assert sorted(errors) == ["EDQUOT"] * 30 + ["ok"] * 10
        assert used(namespace, place.ino) == (10, 0) == recount(namespace, place.ino)
        assert await error_of(namespace.link(file.ino, place.ino, b"link")) == "EXDEV"


async def test_room_that_another_host_made_is_there_at_once(keys: EtcdKeys) -> None:
    async with hosts(keys, 2, Lagging) as (here, there):
        place = await make(here, ROOT_INO, b"place", DIRECTORY)
        await quota(here, place.ino, QUOTA_INODES, 1)
        for _ in range(20):
            await make(here, place.ino, b"file")
            assert await error_of(make(there, place.ino, b"file 2")) == "EDQUOT"
            await here.unlink(place.ino, b"file")
            await make(there, place.ino, b"file 2")
            await there.unlink(place.ino, b"file 2")


async def test_what_is_published_in_any_case_is_charged_above_the_limit(tmp_path: Any) -> None:
    records = Map(f"{tmp_path}/names")
    namespace = await load_own(records)
    place = await make(namespace, ROOT_INO, b"place", DIRECTORY)
    await quota(namespace, place.ino, QUOTA_BYTES, 10 * BLOCK)
    file = await make(namespace, place.ino, b"file")
    version = NewVersion(file.ino, ContentId(1), 1, 11, 1)
    assert await error_of(namespace.publish(version)) == "EDQUOT"
    assert used(namespace, place.ino) == (1, 0)
    await namespace.publish(version._replace(in_quotas=False))
    assert used(namespace, place.ino) == (1, 11 * BLOCK)
    check(namespace)
    records.close()


async def test_a_deep_tree_is_charged_in_one_climb(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    depth, steps = 200, 0

    def counted(*asked: Any) -> Iterator[Inode]:
        nonlocal steps
        for one in upwards(*asked):
            steps += 1
            yield one

    records = Map(f"{tmp_path}/names")
    namespace = await load_own(records)
    ino = ROOT_INO
    for _ in range(depth):
        ino = (await make(namespace, ino, b"d", DIRECTORY)).ino
    monkeypatch.setattr(quotas, "upwards", counted)
    await quota(namespace, ROOT_INO, QUOTA_INODES, 1000)
    assert steps <= 3 * depth
    assert used(namespace, ROOT_INO) == (depth, 0)
    records.close()


def test_a_limit_is_a_size_or_a_number() -> None:
    for value, limit in ((b"10G", 10 << 30), (b"4096", 4096)):
        assert parse_limit(QUOTA_BYTES, value) == limit
    assert parse_limit(QUOTA_INODES, b"1000") == 1000
    refused = {QUOTA_BYTES: (b"0", b"50%", b""), QUOTA_INODES: (b"0", b"1K", b"-1", b"\xff")}
    for name, values in refused.items():
        for value in values:
            with pytest.raises(ValueError, match=r"size|number"):
                parse_limit(name, value)
