"""Several namespaces on one etcd: one tree for all, whoever changes it and however much at once."""

import errno
import os
import queue
import random
import stat
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

import pytest
import trio
from etcd_server import EtcdServer, etcd, etcd_prefix, new_prefix
from hypothesis import HealthCheck, settings
from hypothesis.stateful import rule, run_state_machine_as_test
from invariants import check, walk
from irdmafs.backend.kv import Conflict, Delete, Event, Exists, KeyValue, Put
from irdmafs.backend.kv.etcd import EtcdEngine
from irdmafs.backend.namespace import (
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    ROOT_INO,
    Inode,
    Namespace,
)
from irdmafs.backend.records import Layout
from irdmafs.backend.replica import Replica
from namespace_model import NamespaceAgainstModel, Thing
from trio.testing import wait_all_tasks_blocked

__all__ = ["etcd", "etcd_prefix"]

Result = TypeVar("Result")
FILE, DIRECTORY, SYMLINK = stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK


class Lagging(Replica):
    """Tells its consumers only of what somebody waits for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held_back: deque[tuple[int, Sequence[Event]]] = deque()
        self._wanted = 0

    def _apply(self, revision: int, events: Sequence[Event]) -> None:
        self._held_back.append((revision, events))
        self._tell()

    async def wait_applied(self, revision: int) -> None:
        self._wanted = max(self._wanted, revision)
        self._tell()
        await super().wait_applied(revision)

    def _tell(self) -> None:
        while self._held_back and self._held_back[0][0] <= self._wanted:
            super()._apply(*self._held_back.popleft())


@asynccontextmanager
async def host(
    server: EtcdServer, prefix: bytes, hub: type[Replica] = Replica
) -> AsyncIterator[Namespace]:
    """One host's namespace. Its hub is its `hub`, its engine its `_engine`."""
    async with EtcdEngine(server.endpoints, prefix) as engine, trio.open_nursery() as nursery:
        namespace = Namespace(engine)
        replica = hub(engine, (namespace,))
        namespace.hub = replica
        await replica.start(nursery)
        await namespace.ensure_root()
        yield namespace
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def hosts(
    server: EtcdServer, prefix: bytes, count: int, hub: type[Replica] = Replica
) -> AsyncIterator[list[Namespace]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(host(server, prefix, hub)) for _ in range(count)]


def run(test: Callable[[], Awaitable[Result]]) -> Result:
    async def limited() -> Result:
        with trio.fail_after(100):
            return await test()

    return trio.run(limited)


def fields(inode: Inode) -> tuple[Any, ...]:
    return tuple(getattr(inode, name) for name in Inode.__slots__)


def everything(namespace: Namespace) -> dict[Any, Any]:
    shown: dict[Any, Any] = {path: fields(inode) for path, inode in walk(namespace)}
    return shown | {ino: fields(inode) for ino, inode in namespace.inodes.items()}


async def expect_all_equal(server: EtcdServer, prefix: bytes, namespaces: list[Namespace]) -> None:
    """All replicas are the same, sound, and what a host that starts now loads."""
    for namespace in namespaces:
        await namespace.hub.barrier()
        check(namespace)
    async with host(server, prefix) as fresh:
        for namespace in namespaces:
            assert everything(namespace) == everything(fresh)


async def error_of(doing: Awaitable[object]) -> str:
    try:
        await doing
    except OSError as error:
        assert error.errno is not None
        return errno.errorcode[error.errno]
    return "ok"


async def all_at_once(*doing: Coroutine[Any, Any, object]) -> list[str]:
    """Run them concurrently; what each ended with."""
    ends = [""] * len(doing)

    async def one(number: int) -> None:
        ends[number] = await error_of(doing[number])

    async with trio.open_nursery() as nursery:
        for number in range(len(doing)):
            nursery.start_soon(one, number)
    return ends


def found(namespace: Namespace, parent: int, name: bytes) -> Inode:
    inode = namespace.lookup(parent, name)
    assert inode is not None
    return inode


# -- what one host does, the others see --------------------------------------------------------------


def test_a_name_created_on_one_host_is_found_on_another_after_a_barrier(
    etcd: EtcdServer, etcd_prefix: bytes
) -> None:
    async def test() -> None:
        async with hosts(etcd, etcd_prefix, 2) as (here, there):
            made = await here.create(
                ROOT_INO, b"file", FILE | 0o640, 7, 8, layout=Layout(2, 1 << 20, 2**64 - 1, 3)
            )
            assert fields(found(here, ROOT_INO, b"file")) == fields(made)
            await there.hub.barrier()
            assert fields(found(there, ROOT_INO, b"file")) == fields(made)
            await expect_all_equal(etcd, etcd_prefix, [here, there])

    run(test)


def test_every_operation_shows_on_all_hosts(etcd: EtcdServer, etcd_prefix: bytes) -> None:
    async def test() -> None:
        async with hosts(etcd, etcd_prefix, 2) as (here, there):
            place = await here.create(ROOT_INO, b"place", DIRECTORY | 0o2775, 0, 5)
            file = await there.create(place.ino, b"file", FILE | 0o644, 1, 1)
            assert file.gid == 5
            await here.create(place.ino, b"link", SYMLINK | 0o777, 0, 0, target=b"file")
            await there.link(file.ino, ROOT_INO, b"second")
            await here.publish(file.ino, 77, 1000, 8, 12345, layout=Layout(1, 0, 9))
            await there.set_xattr(file.ino, b"user.a", b"1", os.XATTR_CREATE)
            await here.set_xattr(file.ino, b"user.b", b"2")
            await there.remove_xattr(file.ino, b"user.a")
            await here.set_attributes(file.ino, mode=0o4600, uid=9)
            await there.rename(place.ino, b"file", ROOT_INO, b"moved", 0, in_use=False)
            await here.unlink(ROOT_INO, b"second", in_use=False)
            await there.unlink(place.ino, b"link", in_use=False)
            await here.rmdir(ROOT_INO, b"place", in_use=False)
            await there.hub.barrier()
            inode = found(there, ROOT_INO, b"moved")
            assert (inode.ino, inode.mode, inode.uid) == (file.ino, FILE | 0o4600, 9)
            assert (inode.extent, inode.version, inode.size) == (77, 1, 1000)
            assert (inode.xattrs, inode.layout) == ({b"user.b": b"2"}, Layout(1, 0, 9))
            assert [name for name, _ in there.children(ROOT_INO)] == [b"moved"]
            await expect_all_equal(etcd, etcd_prefix, [here, there])

    run(test)


def test_an_error_is_given_only_when_it_holds_after_all_that_happened_before(
    etcd: EtcdServer, etcd_prefix: bytes
) -> None:
    """Right after another host's call returned, whether or not the watch has told of it here."""

    async def test() -> None:
        async with hosts(etcd, etcd_prefix, 2) as (here, there):
            for number in range(30):
                name, other = b"%d" % number, b"other-%d" % number
                file = await here.create(ROOT_INO, name, FILE, 0, 0)
                await there.link(file.ino, ROOT_INO, other)
                assert await error_of(here.create(ROOT_INO, other, FILE, 0, 0)) == "EEXIST"
                await here.unlink(ROOT_INO, name, in_use=False)
                await there.create(ROOT_INO, name, DIRECTORY, 0, 0)
                await here.rmdir(ROOT_INO, name, in_use=False)
                assert await error_of(there.rmdir(ROOT_INO, name, in_use=False)) == "ENOENT"
                await here.rename(ROOT_INO, other, ROOT_INO, name, RENAME_NOREPLACE, in_use=False)
                await there.set_xattr(file.ino, b"user.a", b"1", os.XATTR_CREATE)
                await here.remove_xattr(file.ino, b"user.a")
                await there.unlink(ROOT_INO, name, in_use=False)
                assert await error_of(here.set_attributes(file.ino, mode=0)) == "ESTALE"

    run(test)


def test_times_of_a_directory_follow_its_names_and_utimes_in_the_order_they_happened(
    etcd: EtcdServer, etcd_prefix: bytes
) -> None:
    async def test() -> None:
        async with hosts(etcd, etcd_prefix, 2) as (here, there):
            place = await here.create(ROOT_INO, b"place", DIRECTORY | 0o755, 0, 0)
            await there.create(place.ino, b"a", FILE, 0, 0)
            await here.set_attributes(place.ino, mtime_ns=5, atime_ns=6)
            for namespace in (here, there):
                await namespace.hub.barrier()
                inode = namespace.inode(place.ino)
                assert (inode.mtime_ns, inode.atime_ns) == (5, 6)
                assert inode.ctime_ns > place.ctime_ns
            await there.set_attributes(place.ino, mode=0o700)
            await here.hub.barrier()
            assert here.inode(place.ino).mtime_ns == 5
            await here.unlink(place.ino, b"a", in_use=False)
            assert here.inode(place.ino).mtime_ns > place.mtime_ns
            await expect_all_equal(etcd, etcd_prefix, [here, there])

    run(test)


def test_times_of_a_directory_are_those_of_the_last_change_whatever_the_hosts_clocks_say(
    etcd: EtcdServer, etcd_prefix: bytes
) -> None:
    async def test() -> None:
        async with host(etcd, etcd_prefix) as namespace:
            place = await namespace.create(ROOT_INO, b"place", DIRECTORY | 0o755, 0, 0)
            key = b"t" + place.ino.to_bytes(8, "big")
            for time_ns in (2**62, place.ctime_ns - 5, 2**62 - 1, place.ctime_ns + 5):
                await namespace._engine.transact((), [Put(key, time_ns.to_bytes(8, "big"))])
                await expect_all_equal(etcd, etcd_prefix, [namespace])
                assert namespace.inode(place.ino).mtime_ns == time_ns
                assert namespace.inode(place.ino).ctime_ns == max(place.ctime_ns, time_ns)

    run(test)


def test_inode_numbers_of_different_hosts_never_meet(etcd: EtcdServer, etcd_prefix: bytes) -> None:
    async def test() -> None:
        async with hosts(etcd, etcd_prefix, 4) as namespaces:
            numbers = [n.orphan(FILE, 0, 0).ino for n in namespaces for _ in range(500)]
            assert len(set(numbers)) == len(numbers) and min(numbers) > ROOT_INO

    run(test)


def test_hosts_that_start_at_once_make_one_root(etcd: EtcdServer, etcd_prefix: bytes) -> None:
    async def test() -> None:
        roots: list[Inode] = []

        async def start() -> None:
            async with host(etcd, etcd_prefix) as namespace:
                roots.append(namespace.inode(ROOT_INO))

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(start)
        assert all(fields(root) == fields(roots[0]) for root in roots)

    run(test)


# -- files without a name ----------------------------------------------------------------------------


def test_a_file_that_another_host_removes_stays_for_who_holds_it(
    etcd: EtcdServer, etcd_prefix: bytes
) -> None:
    async def test() -> None:
        async with hosts(etcd, etcd_prefix, 2) as (here, there):
            file = await here.create(ROOT_INO, b"file", FILE, 0, 0)
            here.held = lambda ino: ino == file.ino
            await there.unlink(ROOT_INO, b"file", in_use=False)
            await here.hub.barrier()
            orphan = here.inode(file.ino)
            assert (orphan.nlink, orphan.revision) == (0, 0)
            await there.hub.barrier()
            assert file.ino not in there.inodes
            changed = await here.publish(file.ino, 5, 6, 8, 7)
            assert changed.version == 1
            await here.set_attributes(file.ino, mode=0o600)
            records = await here._engine.range(b"i", b"j")
            assert [record.key for record in records] == [b"i" + bytes(7) + b"\1"]
            await here.drop(file.ino)
            await expect_all_equal(etcd, etcd_prefix, [here, there])

    run(test)


@pytest.mark.parametrize("kind", ["unlink", "rename", "rmdir"])
def test_what_its_own_host_removes_stays_if_in_use(
    etcd: EtcdServer, etcd_prefix: bytes, kind: str
) -> None:
    async def test() -> None:
        async with host(etcd, etcd_prefix) as namespace:
            mode = DIRECTORY if kind == "rmdir" else FILE
            for in_use in (True, False):
                inode = await namespace.create(ROOT_INO, b"name", mode, 0, 0)
                gone: Inode | None
                if kind == "unlink":
                    gone = await namespace.unlink(ROOT_INO, b"name", in_use=in_use)
                elif kind == "rmdir":
                    gone = await namespace.rmdir(ROOT_INO, b"name", in_use=in_use)
                else:
                    await namespace.create(ROOT_INO, b"other", mode, 0, 0)
                    gone = await namespace.rename(
                        ROOT_INO, b"other", ROOT_INO, b"name", 0, in_use=in_use
                    )
                    await namespace.unlink(ROOT_INO, b"name", in_use=False)
                assert gone is not None and (gone.ino, gone.nlink) == (inode.ino, 0)
                assert (inode.ino in namespace.inodes) == in_use
                if kind == "rmdir" and in_use:
                    made = namespace.create(inode.ino, b"below", FILE, 0, 0)
                    assert await error_of(made) == "ENOENT"
                await namespace.drop(inode.ino)
            await expect_all_equal(etcd, etcd_prefix, [namespace])

    run(test)


def test_a_file_made_without_a_name_gets_one_on_all_hosts(
    etcd: EtcdServer, etcd_prefix: bytes
) -> None:
    async def test() -> None:
        async with hosts(etcd, etcd_prefix, 2) as (here, there):
            for number in range(20):
                name = b"%d" % number
                file = here.orphan(FILE | 0o600, 1, 2)
                await here.set_attributes(file.ino, mode=0o644)
                # What is published while the name is on its way is not lost.
                await all_at_once(
                    here.link(file.ino, ROOT_INO, name), here.publish(file.ino, 9, 10, 8, 11)
                )
                await there.hub.barrier()
                inode = found(there, ROOT_INO, name)
                assert (inode.mode, inode.nlink) == (FILE | 0o644, 1)
                assert (inode.version, inode.extent) == (1, 9)
            await expect_all_equal(etcd, etcd_prefix, [here, there])

    run(test)


def test_a_removed_file_that_two_hosts_hold_gets_names_again(
    etcd: EtcdServer, etcd_prefix: bytes
) -> None:
    async def test() -> None:
        async with hosts(etcd, etcd_prefix, 2) as (here, there):
            file = await here.create(ROOT_INO, b"file", FILE, 0, 0)
            for namespace in (here, there):
                namespace.held = lambda ino: ino == file.ino
            await there.unlink(ROOT_INO, b"file", in_use=True)
            await here.hub.barrier()
            ends = await all_at_once(
                here.link(file.ino, ROOT_INO, b"a"), there.link(file.ino, ROOT_INO, b"b")
            )
            assert ends == ["ok", "ok"]
            await expect_all_equal(etcd, etcd_prefix, [here, there])
            assert here.inode(file.ino).nlink == 2

    run(test)


# -- publishing --------------------------------------------------------------------------------------


def test_publishes_of_one_file_at_once_are_all_versions_one_after_the_other(
    etcd: EtcdServer, etcd_prefix: bytes
) -> None:
    async def test() -> None:
        async with hosts(etcd, etcd_prefix, 4) as namespaces:
            file = await namespaces[0].create(ROOT_INO, b"file", FILE, 0, 0)
            for namespace in namespaces:
                await namespace.hub.barrier()
            versions: list[tuple[int, int]] = []

            async def publish(namespace: Namespace, first: int) -> None:
                for extent in range(first, first + 10):
                    inode = await namespace.publish(file.ino, extent, extent, 8, 1)
                    assert inode.extent == extent
                    versions.append((inode.version, extent))

            async with trio.open_nursery() as nursery:
                for number, namespace in enumerate(namespaces):
                    nursery.start_soon(publish, namespace, 100 * number + 1)
            assert sorted(version for version, _ in versions) == list(range(1, 41))
            await expect_all_equal(etcd, etcd_prefix, namespaces)
            assert namespaces[0].inode(file.ino).extent == max(versions)[1]

    run(test)


def test_a_publish_whose_guard_fails_changes_nothing_and_says_which(
    etcd: EtcdServer, etcd_prefix: bytes
) -> None:
    async def test() -> None:
        async with hosts(etcd, etcd_prefix, 2) as (here, there):
            file = await here.create(ROOT_INO, b"file", FILE, 0, 0)
            engine = here._engine
            first = await engine.transact((), [Put(b"g1", b"")])
            guards = [(b"g1", first), Exists(b"g1")]
            assert (await here.publish(file.ino, 1, 1, 8, 1, guards=guards)).version == 1
            # In the way of the inode record only: done again on top.
            await there.hub.barrier()
            await there.set_attributes(file.ino, mode=0o600)
            assert (await here.publish(file.ino, 2, 1, 8, 1, guards=guards)).version == 2
            assert here.inode(file.ino).mode == FILE | 0o600
            await engine.transact((), [Put(b"g1", b"")])
            with pytest.raises(Conflict) as caught:
                await here.publish(file.ino, 3, 1, 8, 1, guards=guards)
            assert caught.value.key == b"g1"
            await engine.transact((), [Delete(b"g1")])
            with pytest.raises(Conflict):
                await here.publish(file.ino, 3, 1, 8, 1, guards=[Exists(b"g1")])
            await here.hub.barrier()
            assert (here.inode(file.ino).version, here.inode(file.ino).extent) == (2, 2)

    run(test)


# -- many at once ------------------------------------------------------------------------------------


def test_exactly_one_of_many_creates_of_a_name_succeeds(
    etcd: EtcdServer, etcd_prefix: bytes
) -> None:
    async def test() -> None:
        async with hosts(etcd, etcd_prefix, 4) as namespaces:
            for number in range(20):
                name = b"%d" % number
                ends = await all_at_once(
                    *(
                        namespace.create(ROOT_INO, name, mode, 0, 0)
                        for namespace in namespaces
                        for mode in (FILE, DIRECTORY)
                    )
                )
                assert sorted(ends) == ["EEXIST"] * 7 + ["ok"]
            await expect_all_equal(etcd, etcd_prefix, namespaces)

    run(test)


def test_creates_in_one_directory_are_not_in_each_others_way(
    etcd: EtcdServer, etcd_prefix: bytes
) -> None:
    """They need one transaction each: no conflict, no repetition."""

    async def test() -> None:
        async with hosts(etcd, etcd_prefix, 2) as namespaces:
            before = (await namespaces[0]._engine.get(b"s")).mod_revision  # type: ignore[union-attr]

            async def create(namespace: Namespace, first: int) -> None:
                for number in range(first, first + 20):
                    await namespace.create(ROOT_INO, b"%d" % number, FILE, 0, 0)
                    assert namespace.hub.barriers == barriers[namespace]  # type: ignore[attr-defined]

            barriers = {n: n.hub.barriers for n in namespaces}  # type: ignore[attr-defined]
            async with trio.open_nursery() as nursery:
                for number, namespace in enumerate(namespaces):
                    nursery.start_soon(create, namespace, 100 * number)
            await expect_all_equal(etcd, etcd_prefix, namespaces)
            assert before

    run(test)


def test_a_directory_is_removed_or_filled_but_never_both(
    etcd: EtcdServer, etcd_prefix: bytes
) -> None:
    async def test() -> None:
        async with hosts(etcd, etcd_prefix, 3) as (first, second, third):
            for number in range(20):
                name = b"%d" % number
                place = await first.create(ROOT_INO, name, DIRECTORY, 0, 0)
                file = await first.create(ROOT_INO, b"file-" + name, FILE, 0, 0)
                for namespace in (second, third):
                    await namespace.hub.barrier()
                ends = await all_at_once(
                    first.rmdir(ROOT_INO, name, in_use=False),
                    second.create(place.ino, b"a", FILE, 0, 0),
                    third.rename(ROOT_INO, b"file-" + name, place.ino, b"b", 0, in_use=False),
                )
                if ends[0] == "ok":
                    assert set(ends[1:]) <= {"ENOENT", "ESTALE"}
                    assert first.lookup(ROOT_INO, name) is None
                else:
                    assert ends[0] == "ENOTEMPTY" and "ok" in ends[1:]
                assert file.ino in first.inodes
            await expect_all_equal(etcd, etcd_prefix, [first, second, third])

    run(test)


def test_moves_that_would_make_a_circle_together_do_not_both_succeed(
    etcd: EtcdServer, etcd_prefix: bytes
) -> None:
    """/a -> /b/c/a and /b -> /a/d/b at once; and a third way round over another directory."""

    async def test() -> None:
        async with hosts(etcd, etcd_prefix, 3) as (first, second, third):
            for number in range(15):
                top = await first.create(ROOT_INO, b"%d" % number, DIRECTORY, 0, 0)
                a, b, e = [
                    await first.create(top.ino, n, DIRECTORY, 0, 0) for n in (b"a", b"b", b"e")
                ]
                c = await first.create(b.ino, b"c", DIRECTORY, 0, 0)
                d = await first.create(a.ino, b"d", DIRECTORY, 0, 0)
                for namespace in (second, third):
                    await namespace.hub.barrier()
                ends = await all_at_once(
                    first.rename(top.ino, b"a", c.ino, b"a", 0, in_use=False),
                    second.rename(top.ino, b"b", d.ino, b"b", 0, in_use=False),
                    third.rename(top.ino, b"e", d.ino, b"e", 0, in_use=False),
                )
                assert sorted(ends[:2]) == ["EINVAL", "ok"] and ends[2] == "ok"
                assert first.inode(e.ino).parent == d.ino
                await expect_all_equal(etcd, etcd_prefix, [first, second, third])

    run(test)


def test_link_counts_are_right_after_links_and_unlinks_at_once(
    etcd: EtcdServer, etcd_prefix: bytes
) -> None:
    async def test() -> None:
        async with hosts(etcd, etcd_prefix, 4) as namespaces:
            file = await namespaces[0].create(ROOT_INO, b"file", FILE, 0, 0)
            for namespace in namespaces:
                await namespace.hub.barrier()

            async def link(namespace: Namespace, host_name: bytes) -> None:
                for number in range(8):
                    name = b"%s-%d" % (host_name, number)
                    await namespace.link(file.ino, ROOT_INO, name)
                    if number % 2:
                        await namespace.unlink(ROOT_INO, name, in_use=False)

            async with trio.open_nursery() as nursery:
                for number, namespace in enumerate(namespaces):
                    nursery.start_soon(link, namespace, b"%d" % number)
            await expect_all_equal(etcd, etcd_prefix, namespaces)
            assert namespaces[0].inode(file.ino).nlink == 1 + 4 * 4

    run(test)


class Worker:
    """Does random things in a few directories, with names that everybody uses."""

    def __init__(self, namespace: Namespace, random_: random.Random) -> None:
        self.namespace = namespace
        self.random = random_
        self.done: dict[str, int] = {}

    def directory(self) -> int:
        inodes = self.namespace.inodes
        return self.random.choice([ino for ino, inode in inodes.items() if inode.is_dir])

    def name(self) -> bytes:
        return self.random.choice([b"a", b"b", b"c", b"d"])

    def file(self) -> int:
        inodes = self.namespace.inodes
        return self.random.choice([ROOT_INO, *(i for i, inode in inodes.items() if inode.is_file)])

    def choose(self) -> tuple[str, Coroutine[Any, Any, object]]:
        n, parent, name = self.namespace, self.directory(), self.name()
        to, new = self.directory(), self.name()
        match self.random.randrange(10):
            case 0 | 1:
                return "create", n.create(parent, name, FILE, 0, 0, version=1)
            case 2:
                return "mkdir", n.create(parent, name, DIRECTORY, 0, 0)
            case 3:
                return "link", n.link(self.file(), parent, name)
            case 4:
                return "unlink", n.unlink(parent, name, in_use=False)
            case 5:
                return "rmdir", n.rmdir(parent, name, in_use=False)
            case 6 | 7:
                return "rename", n.rename(parent, name, to, new, 0, in_use=False)
            case 8:
                flags = self.random.choice([RENAME_EXCHANGE, RENAME_NOREPLACE])
                return "exchange", n.rename(parent, name, to, new, flags, in_use=False)
            case _:
                return "publish", n.publish(self.file(), self.random.getrandbits(40), 1, 1, 1)

    async def work(self, steps: int) -> None:
        for _ in range(steps):
            what, doing = self.choose()
            end = await error_of(doing)
            assert end in (
                "ok", "EEXIST", "ENOENT", "ENOTDIR", "EISDIR", "ENOTEMPTY", "EINVAL", "ESTALE",
                "EPERM",
            ), what  # fmt: skip
            if end == "ok":
                self.done[what] = self.done.get(what, 0) + 1


@pytest.mark.parametrize("hub", [Replica, Lagging])
@pytest.mark.parametrize("attempt", range(2))
def test_replicas_are_equal_and_sound_after_random_changes_at_once(
    etcd: EtcdServer, etcd_prefix: bytes, attempt: int, hub: type[Replica]
) -> None:
    seed = int(os.environ.get("IRDMAFS_SEED", random.SystemRandom().randrange(2**32)))
    print("IRDMAFS_SEED =", seed)

    async def test() -> None:
        async with hosts(etcd, etcd_prefix, 4, hub) as namespaces:
            mirrors = [Mirror(namespace) for namespace in namespaces]
            workers = [
                Worker(namespace, random.Random(seed + 2 * number + half))
                for number, namespace in enumerate(namespaces)
                for half in range(2)
            ]
            async with trio.open_nursery() as nursery:
                for worker in workers:
                    nursery.start_soon(worker.work, 60)
            assert all(worker.done for worker in workers)
            await expect_all_equal(etcd, etcd_prefix, namespaces)
            for mirror in mirrors:
                mirror.expect_equal()

    run(test)


class Mirror:
    """A copy of a namespace kept by what its listeners are told alone."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.inodes = {ino: fields(inode) for ino, inode in namespace.inodes.items()}
        self.names: dict[tuple[int, bytes], int] = {}
        namespace.on_change = self.changed
        namespace.on_name_change = self.name_changed

    def changed(self, old: Inode | None, new: Inode | None) -> None:
        known = new or old
        assert known is not None
        assert self.inodes.pop(known.ino, None) == (fields(old) if old is not None else None)
        if new is not None:
            self.inodes[new.ino] = fields(new)

    def name_changed(self, parent: int, name: bytes, old_ino: int, new_ino: int) -> None:
        assert self.names.pop((parent, name), 0) == old_ino != new_ino
        if new_ino:
            self.names[parent, name] = new_ino

    def expect_equal(self) -> None:
        assert self.inodes == {ino: fields(i) for ino, i in self.namespace.inodes.items()}
        assert self.names == {
            (ino, name): child
            for ino, inode in self.namespace.inodes.items()
            if inode.is_dir
            for name, child in self.namespace.children(ino)
        }


# -- lost events -------------------------------------------------------------------------------------


class Recorded:
    """A consumer that knows nothing but the records."""

    prefixes = (b"d", b"i", b"t", b"u")

    def __init__(self) -> None:
        self.records: dict[bytes, KeyValue] = {}
        self.changes: list[tuple[int, list[Event]]] = []

    def load(self, records: list[KeyValue], revision: int) -> None:
        self.records = {record.key: record for record in records}

    def apply(self, revision: int, events: list[Event]) -> None:
        self.changes.append((revision, events))
        for _, key, value in events:
            if value is None:
                self.records.pop(key, None)
            else:
                self.records[key] = KeyValue(key, value, revision)


def test_loading_anew_after_lost_events_tells_exactly_what_differs(
    etcd: EtcdServer, etcd_prefix: bytes
) -> None:
    """The last half of what happened is lost to one host, and made up for by loading everything."""
    seed = int(os.environ.get("IRDMAFS_SEED", random.SystemRandom().randrange(2**32)))
    print("IRDMAFS_SEED =", seed)

    async def test() -> None:
        async with host(etcd, etcd_prefix) as namespace:
            engine = namespace._engine
            worker = Worker(namespace, random.Random(seed))
            behind = Namespace(engine)
            for _ in range(4):
                await worker.work(40)
                revision, records = await engine.snapshot(b"", b"\xff")
                prefixes = behind.prefixes
                mirror = Mirror(behind)
                mirror.names = {
                    (ino, name): child
                    for ino, inode in behind.inodes.items()
                    if inode.is_dir
                    for name, child in behind.children(ino)
                }
                behind.load([r for r in records if r.key.startswith(prefixes)], revision)
                mirror.expect_equal()
                assert everything(behind) == everything(namespace)
                # Nothing is different now.
                told = [0]
                behind.on_change = lambda *change, told=told: told.append(1)
                behind.on_name_change = behind.on_change
                behind.load([r for r in records if r.key.startswith(prefixes)], revision)
                assert told == [0]

    run(test)


# -- the hub -----------------------------------------------------------------------------------------


def test_the_hub_hands_every_transaction_whole_to_its_consumers_in_order(
    etcd: EtcdServer, etcd_prefix: bytes
) -> None:
    async def test() -> None:
        async with (
            EtcdEngine(etcd.endpoints, etcd_prefix) as engine,
            trio.open_nursery() as nursery,
        ):
            consumer = Recorded()
            replica = Replica(engine, (consumer,))
            await replica.start(nursery)
            expected = []
            for number in range(20):
                operations = [Put(b"d%d" % number, b"1"), Put(b"i", b"%d" % number), Put(b"q", b"")]
                revision = await engine.transact((), operations)
                expected.append((revision, {b"d%d" % number, b"i"}))
            await replica.wait_applied(expected[-1][0])
            assert [(r, {e.key for e in events}) for r, events in consumer.changes] == expected
            # What no consumer follows moves the hub on, too.
            revision = await engine.transact((), [Put(b"q", b"again")])
            await replica.barrier()
            assert replica.applied >= revision
            nursery.cancel_scope.cancel()

    run(test)


class Gate:
    """An engine whose barrier takes until the gate is opened, and counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.opened = trio.Event()
        self.error: OSError | None = None

    async def barrier(self) -> int:
        self.asked += 1
        await self.opened.wait()
        if self.error is not None:
            raise self.error
        return 0


def test_barriers_share_the_next_question_and_never_one_that_is_on_its_way() -> None:
    async def test() -> None:
        engine = Gate()
        replica = Replica(engine, ())  # type: ignore[arg-type]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(replica.barrier)
            await wait_all_tasks_blocked()
            for _ in range(10):
                nursery.start_soon(replica.barrier)
            await wait_all_tasks_blocked()
            assert engine.asked == 1
            engine.opened.set()
        assert engine.asked == replica.barriers == 2

    run(test)


def test_a_barrier_that_is_given_up_leaves_nobody_waiting() -> None:
    async def test() -> None:
        engine = Gate()
        replica = Replica(engine, ())  # type: ignore[arg-type]
        async with trio.open_nursery() as nursery:
            async with trio.open_nursery() as impatient:
                impatient.start_soon(replica.barrier)
                await wait_all_tasks_blocked()
                impatient.start_soon(replica.barrier)
                for _ in range(3):
                    nursery.start_soon(replica.barrier)
                await wait_all_tasks_blocked()
                impatient.cancel_scope.cancel()
            await wait_all_tasks_blocked()
            engine.opened.set()
        assert engine.asked == 2

    run(test)


def test_a_barrier_that_fails_fails_for_all_who_share_it() -> None:
    async def test() -> None:
        engine = Gate()
        engine.error = OSError(errno.ETIMEDOUT, "etcd does not answer")
        replica = Replica(engine, ())  # type: ignore[arg-type]

        async def open_the_gate() -> None:
            await wait_all_tasks_blocked()
            engine.opened.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(open_the_gate)
            ends = await all_at_once(*(replica.barrier() for _ in range(5)))
        assert ends == ["ETIMEDOUT"] * 5
        assert engine.asked <= 2

    run(test)


def test_whoever_waits_for_the_hub_is_told_when_the_engine_is_closed(
    etcd: EtcdServer, etcd_prefix: bytes
) -> None:
    async def test() -> None:
        engine = EtcdEngine(etcd.endpoints, etcd_prefix)
        async with engine, trio.open_nursery() as nursery:
            replica = Replica(engine, ())
            await replica.start(nursery)

            async def wait() -> None:
                with pytest.raises(trio.ClosedResourceError):
                    await replica.wait_applied(2**60)

            nursery.start_soon(wait)
            await wait_all_tasks_blocked()
            await engine.close()
        with pytest.raises(trio.ClosedResourceError):
            await replica.wait_applied(2**60)

    run(test)


def test_a_revision_that_does_not_come_is_waited_for_only_so_long(
    etcd: EtcdServer, etcd_prefix: bytes
) -> None:
    async def test() -> None:
        async with (
            EtcdEngine(etcd.endpoints, etcd_prefix) as engine,
            trio.open_nursery() as nursery,
        ):
            replica = Replica(engine, (), timeout_s=0.1)
            await replica.start(nursery)
            assert await error_of(replica.wait_applied(2**60)) == "ETIMEDOUT"
            nursery.cancel_scope.cancel()

    run(test)


# -- against the model, on two hosts whose replicas are as far behind as they may be ----------------


class TrioThread:
    """A trio loop beside the test, for tests that must not be async."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[trio.lowlevel.TrioToken] = queue.SimpleQueue()
        self._thread = threading.Thread(target=trio.run, args=(self._main,))
        self._thread.start()
        self._token = self._jobs.get()

    async def _main(self) -> None:
        self._end = trio.Event()
        self._jobs.put(trio.lowlevel.current_trio_token())
        await self._end.wait()

    def run(self, doing: Coroutine[Any, Any, Result]) -> Result:
        async def limited() -> Result:
            with trio.fail_after(30):
                return await doing

        return trio.from_thread.run(limited, trio_token=self._token)

    def close(self) -> None:
        trio.from_thread.run_sync(self._end.set, trio_token=self._token)
        self._thread.join()


class Cluster:
    """Two hosts on one prefix, kept by a task of their own until it is closed."""

    def __init__(self, server: EtcdServer) -> None:
        self._server = server
        self._ready = trio.Event()
        self._end = trio.Event()
        self._ended = trio.Event()
        self.namespaces: list[Namespace] = []

    async def start(self) -> None:
        trio.lowlevel.spawn_system_task(self._keep)
        await self._ready.wait()

    async def _keep(self) -> None:
        async with hosts(self._server, new_prefix(), 2, Lagging) as self.namespaces:
            self._ready.set()
            await self._end.wait()
        self._ended.set()

    async def close(self) -> None:
        self._end.set()
        await self._ended.wait()


class NamespaceOnEtcd(NamespaceAgainstModel):
    """Two hosts take turns; each is up to date only as far as its operations see to it."""

    def __init__(self, server: EtcdServer) -> None:
        super().__init__()
        self.trio = TrioThread()
        self.cluster = Cluster(server)
        self.run(self.cluster.start())
        self.hosts = self.cluster.namespaces
        self.turn = 0
        self.choose_host()
        self.model.root.uid = self.namespace.inode(ROOT_INO).uid

    def teardown(self) -> None:
        self.compare()
        self.run(self.cluster.close())
        self.trio.close()

    def run(self, doing: Coroutine[Any, Any, Result]) -> Result:
        return self.trio.run(doing)

    def choose_host(self, *things: Thing, in_use: bool = False) -> None:
        held = in_use or any(thing in self.model.held for thing in things)
        self.turn = 0 if held else 1 - self.turn
        self.namespace = self.hosts[self.turn]
        self.engine = self.namespace._engine

    def settle(self) -> None:
        self.run(self.namespace.hub.barrier())

    @rule()
    def compare(self) -> None:
        for number, namespace in enumerate(self.hosts):
            self.namespace = namespace
            self.settle()
            self.expect_as_the_model_says(holds=number == 0)
        self.choose_host()

    @rule()
    def swap_turns(self) -> None:
        self.choose_host()


def test_two_hosts_together_do_what_the_model_says(etcd: EtcdServer) -> None:
    run_state_machine_as_test(
        lambda: NamespaceOnEtcd(etcd),
        settings=settings(
            max_examples=40,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
