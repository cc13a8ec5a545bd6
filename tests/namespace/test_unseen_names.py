"""Names of files that their makers have not published yet, on several namespaces of one etcd."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, patch

import pytest
import trio
import trio.testing
from harness.etcd_server import EtcdKeys
from harness.models.namespace import DIRECTORY, FILE, SYMLINK
from harness.shared_namespaces import HostNamespace, Lagging, all_at_once, error_of, found, host

from irdmafs.backend.model.records import ContentId, MountRecord
from irdmafs.backend.namespace import (
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    ROOT_INO,
    Inode,
    NewVersion,
    shared,
)
from irdmafs.backend.namespace.inode import NO_LAYOUT
from irdmafs.backend.store.api import make_aside
from irdmafs.inline import Detached, Rest, run

HERE, THERE = 11, 22


@asynccontextmanager
async def two(keys: EtcdKeys) -> AsyncIterator[tuple[HostNamespace, HostNamespace]]:
    async with host(keys, maker=HERE) as here, host(keys, maker=THERE) as there:
        yield here, there


async def made(namespace: HostNamespace, name: bytes = b"file", *, parent: int = ROOT_INO) -> Inode:
    return await namespace.create(parent, name, FILE | 0o644, 0, 0)


async def sees(namespace: HostNamespace, name: bytes = b"file") -> bool:
    await namespace.hub.barrier()
    seen = namespace.lookup(ROOT_INO, name) is not None
    assert (name in dict(namespace.children(ROOT_INO))) == seen
    return seen


async def test_who_comes_later_does_not_see_it_either(keys: EtcdKeys) -> None:
    async with two(keys) as (here, _):
        file = await made(here)
        async with host(keys, maker=33) as third:
            assert not await sees(third)
            await here.publish(NewVersion(file.ino, ContentId(7), 1, 1, 1))
            assert await sees(third)


async def test_only_a_file_without_a_version_is_not_seen(keys: EtcdKeys) -> None:
    async with two(keys) as (here, there):
        await here.create(ROOT_INO, b"place", DIRECTORY | 0o755, 0, 0)
        await here.create(ROOT_INO, b"link", SYMLINK | 0o777, 0, 0, target=b"x")
        await here.create(ROOT_INO, b"empty", FILE | 0o644, 0, 0, version=1)
        await here.create(ROOT_INO, b"plain", FILE | 0o644, 0, 0, seen=True)
        for name in (b"place", b"link", b"empty", b"plain"):
            assert await sees(there, name)


async def test_nobody_waits_for_those_who_do_not_see_it(keys: EtcdKeys) -> None:
    async with two(keys) as (here, _):
        waited: list[tuple[int, ...]] = []

        async def after_commit(directories: tuple[int, ...], revision: int) -> None:
            waited.append(directories)

        here.after_commit = after_commit
        file = await made(here)
        assert not waited
        await here.publish(NewVersion(file.ino, ContentId(7), 1, 1, 1))
        assert waited == [(ROOT_INO,)]


async def test_watchers_are_told_when_it_is_seen(keys: EtcdKeys) -> None:
    async with two(keys) as (here, there):
        await made(here)
        await there.hub.barrier()
        count = there.watches.count(ROOT_INO)
        await here.show(ROOT_INO, b"file")
        await there.watches.wait(ROOT_INO, count)
        assert await sees(there)


@pytest.mark.parametrize("ended", [False, True])
async def test_its_name_is_free_only_if_its_mount_has_ended(keys: EtcdKeys, ended: bool) -> None:
    async with two(keys) as (here, there):
        there.ended |= {HERE} if ended else set()
        names = [b"create", b"mkdir", b"link", b"rename"]
        for name in names:
            await made(here, name)
        place = await here.create(ROOT_INO, b"place", DIRECTORY | 0o755, 0, 0)
        await made(here, parent=place.ino)
        exchanged = there.rename(ROOT_INO, b"place", ROOT_INO, b"create", RENAME_EXCHANGE)
        assert await error_of(exchanged) == "ENOENT"
        other = await made(there, b"other")
        await there.show(ROOT_INO, b"other")
        ends = await all_at_once(
            made(there, b"create"),
            there.create(ROOT_INO, b"mkdir", DIRECTORY, 0, 0),
            there.link(other.ino, ROOT_INO, b"link"),
            there.rename(ROOT_INO, b"other", ROOT_INO, b"rename", RENAME_NOREPLACE),
            there.rmdir(ROOT_INO, b"place"),
        )
        assert ends == (["ok"] * 5 if ended else [*["EEXIST"] * 4, "ENOTEMPTY"])
        for name in names:
            assert await sees(there, name) == ended
            assert await sees(here, name) == (name != b"create" or not ended)


# The claims of a mount that is alone.
ALL_CLAIMED: Any = SimpleNamespace(
    is_ours=lambda directory: True, is_exclusive=lambda directory: False,
    is_of_another=lambda directory: False, is_exclusive_elsewhere=lambda directory: False,
    revision=lambda directory: 1, recall=AsyncMock(), look=AsyncMock(),
    making=lambda directory: [], removing=lambda directory: [],
    taking=lambda commit: nullcontext(([], [])),
)  # fmt: skip


async def test_a_change_that_may_have_been_made_is_known_before_the_next(keys: EtcdKeys) -> None:
    """etcd has a file's new name, and the program that gave it is killed before the answer comes."""
    async with host(keys, Lagging, maker=HERE, claims=ALL_CLAIMED) as here:
        into = (await here.create(ROOT_INO, b"into", DIRECTORY | 0o755, 0, 0)).ino
        file = await here.create(ROOT_INO, b"file", FILE | 0o644, 0, 0, seen=True)

        async def not_answered(*change: Any, transact: Any = here.engine.transact) -> None:
            await transact(*change)
            program.cancel()
            await trio.lowlevel.checkpoint()

        with patch.object(here.engine, "transact", not_answered), trio.CancelScope() as program:
            await here.rename(ROOT_INO, b"file", into, b"new", 0)
        again = here.create(into, b"new", DIRECTORY | 0o755, 0, 0)
        ends = await all_at_once(again, here.rmdir(ROOT_INO, b"into"))
        assert (*ends, found(here, into, b"new").ino) == ("EEXIST", "ENOTEMPTY", file.ino)


@pytest.mark.parametrize("by", ["its first version", "a link"])
async def test_what_waits_for_a_file_that_is_being_stored_goes_on_whenever_that_ends(
    keys: EtcdKeys, by: str
) -> None:
    """It leaves its caller before it waits, and does so a moment later."""
    async with host(keys, maker=HERE, claims=ALL_CLAIMED) as here:
        file = await made(here)
        async with trio.open_nursery() as nursery:
            if by == "a link":
                nursery.start_soon(here.link, file.ino, ROOT_INO, b"second")
            else:
                nursery.start_soon(here.publish, NewVersion(file.ino, ContentId(7), 1, 1, 1))
            await trio.testing.wait_all_tasks_blocked()
            changing = here.set_attributes(file.ino, mode=0o600)
            with pytest.raises(Detached):
                run(changing)
        await Rest(changing)
        assert here.inode(file.ino).mode == FILE | 0o600


async def test_a_claim_is_given_up_while_programs_publish_one_file_after_the_other(
    keys: EtcdKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "_STORED_AT_ONCE", 10)
    monkeypatch.setattr(shared, "_ATTEMPTS_MAX", 5)
    async with host(keys, maker=HERE, claims=ALL_CLAIMED) as here, trio.open_nursery() as nursery:
        for number in range(100):
            await made(here, b"%d" % number)
        nursery.start_soon(here.committer.store, ROOT_INO)
        for number in range(100):
            await here.show(ROOT_INO, b"%d" % number)


def test_a_mount_has_one_number_in_all_of_its_sessions_that_fits_an_inode() -> None:
    record = MountRecord("host", "/mnt", 1, "0.2", key_digest=b"\xff" * 32)
    assert record.maker == record.maker == 2**63 - 1
    made = Inode(5, FILE | 0o644, 0, 0, 1)
    made.maker = record.maker
    assert Inode.decode(5, made.encode(), 9).maker == made.copy().maker == record.maker


async def test_what_lost_a_conflict_has_no_place_beside_a_removed_file(keys: EtcdKeys) -> None:
    async with two(keys) as (here, there):
        here.held = lambda ino: True
        file = await made(here)
        await here.publish(NewVersion(file.ino, ContentId(7), 1, 1, 1))
        assert await sees(there)
        await there.unlink(ROOT_INO, b"file")
        assert not await sees(here)
        aside = make_aside(here, file.ino, "host", lambda parent, name: NO_LAYOUT)
        assert await error_of(aside) == "ESTALE"


async def test_a_file_that_its_host_replaces_is_only_gone_if_another_host_took_its_name_before(
    keys: EtcdKeys,
) -> None:
    async with host(keys, Lagging, maker=HERE) as here, host(keys, maker=THERE) as there:
        here.held = lambda ino: True
        file = await made(here)
        for namespace, name in ((here, b"mine"), (there, b"theirs")):
            await namespace.create(ROOT_INO, name, FILE | 0o644, 0, 0, version=1)
        await there.rename(ROOT_INO, b"theirs", ROOT_INO, b"file", 0)
        await here.rename(ROOT_INO, b"mine", ROOT_INO, b"file", 0)
        await here.publish(NewVersion(file.ino, ContentId(7), 1, 1, 1))
