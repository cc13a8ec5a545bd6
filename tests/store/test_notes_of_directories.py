"""Notes that a mount makes of directories which it follows or claims: none outlives what it is for."""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from irdmafs.backend.cluster.membership import Members, followed_key
from irdmafs.backend.kv import Compares, Operations, Put
from irdmafs.backend.kv.faults import Faults
from irdmafs.backend.model.records import claim_key
from irdmafs.backend.namespace import Inode, Tree
from irdmafs.backend.namespace.commit import Commit
from irdmafs.backend.store.remote.claims import Claims
from irdmafs.backend.store.remote.leases import Leases
from irdmafs.backend.store.remote.member import Changes

DIRECTORY, LEASE = 7, 2
LOST_ANSWER = TimeoutError("no answer")


def member(nursery: trio.Nursery, transact: Callable[..., Awaitable[int]]) -> Any:
    """A mount's part in a cluster whose etcd is a function."""
    session = SimpleNamespace(lease=LEASE, valid=lambda: True, compare=lambda: (b"m", 1))
    return SimpleNamespace(
        engine=None, tree=Tree(), members=Members(), session=session, nursery=nursery,
        changes=Changes(b""), faults=Faults(), replica=SimpleNamespace(transact=transact),
    )  # fmt: skip


async def test_a_key_of_a_directory_that_could_not_be_followed_is_removed() -> None:
    """Hosts that change something there would wait for this mount, which tells nobody what it has seen."""
    present: set[bytes] = set()

    async def transact(compares: Compares, operations: Operations) -> int:
        for one in operations:
            present.add(one.key) if isinstance(one, Put) else present.discard(one.key)
            if isinstance(one, Put):
                raise LOST_ANSWER
        return 1

    async with trio.open_nursery() as nursery:
        leases = Leases(member(nursery, transact))
        with pytest.raises(TimeoutError):
            await leases.follow(DIRECTORY)
        assert present == {followed_key(DIRECTORY, LEASE)}
        assert not leases.follows(DIRECTORY)
        await leases._tidy()
        assert not present


async def test_others_may_change_a_directory_much_that_is_just_about_to_be_followed_again() -> None:
    followed = trio.Event()

    async def transact(compares: Compares, operations: Operations) -> int:
        followed.set()
        raise LOST_ANSWER

    async with trio.open_nursery() as nursery:
        leases = Leases(member(nursery, transact))
        leases._held[DIRECTORY] = LEASE - 1  # in a session that is over
        for _ in range(8):
            leases.asked(DIRECTORY)
        for revision in range(20):
            leases.name_changed(DIRECTORY)
            leases.transaction(revision, False, True)
        await followed.wait()
        await trio.testing.wait_all_tasks_blocked()


async def test_nothing_is_kept_of_a_directory_that_could_not_be_made() -> None:
    async def transact(compares: Compares, operations: Operations) -> int:
        raise AssertionError("nothing else is asked for")

    async with trio.open_nursery() as nursery:
        mount = member(nursery, transact)
        claims = Claims(mount, Leases(mount), defers=True)
        commit = Commit()
        commit.new = commit.inode = Inode(DIRECTORY, 0o40755, 0, 0, 0)
        commit.names = ((1, b"new", DIRECTORY),)
        mount.tree.has_drafts = True
        with pytest.MonkeyPatch.context() as patched, suppress(TimeoutError):
            patched.setattr("irdmafs.backend.store.remote.claims.is_draft", lambda *_: True)
            with claims.taking(commit) as (_, changes):
                assert [one.key for one in changes] == [claim_key(DIRECTORY)]
                raise LOST_ANSWER
        assert claims.making(DIRECTORY + 1) and claims._born
        claims._tidy(trio.current_time())
        assert not claims._born
