"""Notes that a mount makes of directories which it follows or claims: none outlives what it is for."""

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


class Etcd:
    """It has the keys that are put, and says so too late."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()

    async def transact(self, compares: Compares, operations: Operations) -> None:
        for one in operations:
            self.keys.discard(one.key)
            if isinstance(one, Put):
                self.keys.add(one.key)
                raise TimeoutError


def mount_of(etcd: Etcd, nursery: trio.Nursery) -> Any:
    """A mount's part in a cluster, in a session."""
    session = SimpleNamespace(lease=LEASE, valid=lambda: True, compare=lambda: (b"m", 1))
    return SimpleNamespace(
        engine=None, tree=Tree(), members=Members(), session=session, nursery=nursery,
        changes=Changes(b""), faults=Faults(), replica=etcd,
    )  # fmt: skip


async def test_a_key_of_a_directory_that_could_not_be_followed_is_removed() -> None:
    """Hosts that change something there would wait for this mount, which tells nobody what it has seen."""
    async with trio.open_nursery() as nursery:
        etcd = Etcd()
        leases = Leases(mount_of(etcd, nursery))
        with pytest.raises(TimeoutError):
            await leases.follow(DIRECTORY)
        assert etcd.keys == {followed_key(DIRECTORY, LEASE)}
        assert not leases.follows(DIRECTORY)
        await leases._tidy()
        assert not etcd.keys


async def test_a_directory_is_given_up_while_all_are_looked_through() -> None:
    async with trio.open_nursery() as nursery:
        leases = Leases(mount_of(Etcd(), nursery))
        # One that could not be followed, and one of a session that is over.
        leases._held = {DIRECTORY: 0, DIRECTORY + 1: LEASE - 1}
        async with leases._changing:
            for given_up in (lambda: leases.unfollow(DIRECTORY + 1), leases._tidy):
                nursery.start_soon(given_up)
                await trio.testing.wait_all_tasks_blocked()
    assert not leases._held


async def test_others_may_change_a_directory_much_that_is_just_about_to_be_followed_again() -> None:
    async with trio.open_nursery() as nursery:
        leases = Leases(mount_of(Etcd(), nursery))
        leases._held[DIRECTORY] = LEASE - 1  # in a session that is over
        for _ in range(8):
            leases.asked(DIRECTORY)
        for revision in range(20):
            leases.name_changed(DIRECTORY)
            leases.transaction(revision, False, True)
        await trio.testing.wait_all_tasks_blocked()
        assert not leases._asking


async def test_nothing_is_kept_of_a_directory_never_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("irdmafs.backend.store.remote.claims.is_draft", lambda *_: True)
    async with trio.open_nursery() as nursery:
        mount = mount_of(Etcd(), nursery)
        mount.tree.has_drafts = True
        claims = Claims(mount, Leases(mount), defers=True)
        commit = Commit()
        commit.new, commit.names = Inode(DIRECTORY, 0o40755, 0, 0, 0), ((1, b"new", DIRECTORY),)
        with pytest.raises(TimeoutError), claims.taking(commit) as (_, changes):
            assert [one.key for one in changes] == [claim_key(DIRECTORY)]
            raise TimeoutError
        assert claims.making(DIRECTORY + 1, DIRECTORY) and claims._born
        claims._tidy(0.0)
        assert not claims._born
