"""Several namespaces on one etcd: one tree for all, whoever changes it and however much at once."""

import errno
import os
import random
from unittest.mock import patch

import pytest
import trio
from harness import shared_namespaces as shared
from harness.errors import fails_with
from harness.etcd_server import EtcdKeys
from harness.models.namespace import DIRECTORY, FILE
from harness.open_inodes import while_open
from harness.seeds import chosen_seed

from irdmafs.backend.cluster.replica import Replica
from irdmafs.backend.kv import Compare, Conflict, Delete, Exists, KeyValue, Put
from irdmafs.backend.model.records import ContentId, Layout
from irdmafs.backend.namespace import (
    RENAME_NOREPLACE,
    ROOT_INO,
    Inode,
    Joint,
    Namespace,
    NewVersion,
    Tree,
)  # fmt: skip
from irdmafs.backend.namespace.inode import inode_key, name_key

# -- what one host does, the others see --------------------------------------------------------------


async def test_an_error_is_given_only_if_it_holds_after_all_before(keys: EtcdKeys) -> None:
    """Right after another host's call returned, whether or not the watch has told of it here."""
    async with shared.hosts(keys, 2) as (here, there):
        for number in range(30):
            name, other = b"%d" % number, b"other-%d" % number
            file = await here.create(ROOT_INO, name, FILE, 0, 0)
            await there.link(file.ino, ROOT_INO, other)
            assert await shared.error_of(here.create(ROOT_INO, other, FILE, 0, 0)) == "EEXIST"
            await here.unlink(ROOT_INO, name)
            await there.create(ROOT_INO, name, DIRECTORY, 0, 0)
            await here.rmdir(ROOT_INO, name)
            assert await shared.error_of(there.rmdir(ROOT_INO, name)) == "ENOENT"
            await here.rename(ROOT_INO, other, ROOT_INO, name, RENAME_NOREPLACE)
            await there.set_xattr(file.ino, b"user.a", b"1", os.XATTR_CREATE)
            await here.remove_xattr(file.ino, b"user.a")
            await there.unlink(ROOT_INO, name)
            assert await shared.error_of(here.set_attributes(file.ino, mode=0)) == "ESTALE"


async def test_a_new_inode_has_the_group_its_directory_hands_down_by_then(keys: EtcdKeys) -> None:
    """Whether or not the watch has told of that here."""
    async with shared.hosts(keys, 2, shared.Lagging) as (here, there):
        await there.hub.barrier()
        await here.set_attributes(ROOT_INO, mode=DIRECTORY | 0o2755, gid=5)
        file = await there.create(ROOT_INO, b"file", FILE | 0o644, 7, 8)
        assert file.gid == 5
        await here.set_attributes(ROOT_INO, gid=6)
        place = await there.create(ROOT_INO, b"place", DIRECTORY | 0o755, 7, 8)
        assert (place.gid, place.mode) == (6, DIRECTORY | 0o2755)


async def test_times_of_a_directory_follow_its_names_and_utimes_in_the_order_they_happened(
    keys: EtcdKeys,
) -> None:
    async with shared.hosts(keys, 2) as (here, there):
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
        await here.unlink(place.ino, b"a")
        assert here.inode(place.ino).mtime_ns > place.mtime_ns
        await shared.expect_all_equal(keys, [here, there])


async def test_times_of_a_directory_are_those_of_the_last_change_whatever_the_hosts_clocks_say(
    keys: EtcdKeys,
) -> None:
    async with shared.host(keys) as namespace:
        place = await namespace.create(ROOT_INO, b"place", DIRECTORY | 0o755, 0, 0)
        key = b"t" + place.ino.to_bytes(8, "big")
        for time_ns in (2**62, place.ctime_ns - 5, 2**62 - 1, place.ctime_ns + 5):
            await namespace.engine.transact((), [Put(key, time_ns.to_bytes(8, "big"))])
            await shared.expect_all_equal(keys, [namespace])
            assert namespace.inode(place.ino).mtime_ns == time_ns
            assert namespace.inode(place.ino).ctime_ns == max(place.ctime_ns, time_ns)


async def test_inode_numbers_of_different_hosts_never_meet(keys: EtcdKeys) -> None:
    async with shared.hosts(keys, 4) as namespaces:
        numbers = [(await n.orphan(FILE, 0, 0)).ino for n in namespaces for _ in range(500)]
        assert len(set(numbers)) == len(numbers) and min(numbers) > ROOT_INO


async def test_hosts_that_start_at_once_make_one_root(keys: EtcdKeys) -> None:
    roots: list[Inode] = []

    async def start() -> None:
        async with shared.host(keys) as namespace:
            roots.append(namespace.inode(ROOT_INO))

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(start)
    assert all(shared.fields(root) == shared.fields(roots[0]) for root in roots)


# -- files without a name ----------------------------------------------------------------------------


async def test_a_file_that_another_host_removes_stays_for_who_holds_it(keys: EtcdKeys) -> None:
    async with shared.hosts(keys, 2) as (here, there):
        file = await here.create(ROOT_INO, b"file", FILE, 0, 0)
        here.held = lambda ino: ino == file.ino
        await there.unlink(ROOT_INO, b"file")
        await here.hub.barrier()
        orphan = here.inode(file.ino)
        assert (orphan.nlink, orphan.revision) == (0, 0)
        await there.hub.barrier()
        assert file.ino not in there.inodes
        changed = await here.publish(NewVersion(file.ino, ContentId(5), 6, 8, 7))
        assert changed.version == 1
        await here.set_attributes(file.ino, mode=0o600)
        records = await here.engine.range(b"i", b"j")
        assert [record.key for record in records] == [b"i" + bytes(7) + b"\1"]
        here.tree.drop(file.ino)
        await shared.expect_all_equal(keys, [here, there])


async def test_a_directory_removed_with_another_in_it_has_no_links_left(keys: EtcdKeys) -> None:
    """In one transaction, as by a mount that defers both. It had -1, and stat(2) failed with EIO."""
    async with shared.hosts(keys, 2) as (here, there):
        outer = await here.create(ROOT_INO, b"outer", DIRECTORY, 0, 0)
        inner = await here.create(outer.ino, b"inner", DIRECTORY, 0, 0)
        here.held = lambda ino: ino == outer.ino
        keys_of = [name_key(one.parent, one.name) for one in (outer, inner)]
        keys_of += map(inode_key, (outer.ino, inner.ino))
        await there.engine.transact((), [*map(Delete, keys_of)])
        await here.hub.barrier()
        assert here.inode(outer.ino).nlink == 0


async def test_a_file_another_host_removes_at_once_is_there_for_its_maker(keys: EtcdKeys) -> None:
    """Between the transaction and the caller's next step lies a wait for followers."""
    async with shared.hosts(keys, 2) as (here, there):

        async def remove(directories: tuple[int, ...], revision: int) -> None:
            here.after_commit = None
            await there.hub.barrier()
            await there.unlink(ROOT_INO, b"file")
            await here.hub.barrier()

        here.after_commit = remove
        made = await here.create(ROOT_INO, b"file", FILE | 0o600, 0, 0)
        assert here.lookup(ROOT_INO, b"file") is None
        assert here.inode(made.ino).nlink == 0
        here.tree.drop(made.ino)
        await shared.expect_all_equal(keys, [here, there])


async def test_a_version_gives_a_file_its_first_name_and_no_link_gives_one_to_what_nodes_dropped(
    keys: EtcdKeys,
) -> None:
    async with shared.hosts(keys, 2) as (here, there):
        file, other = [await here.orphan(FILE | 0o600, 1, 2) for _ in range(2)]
        version = NewVersion(file.ino, ContentId(9), 10, 8, 11, layout=Layout(2))
        await here.publish(version)
        with fails_with(errno.ESTALE):
            await here.link(file.ino, ROOT_INO, b"name")
        named = version._replace(extent=ContentId(10), name=(ROOT_INO, b"name"))
        await here.publish(named)
        with fails_with(errno.EEXIST):
            await here.publish(named._replace(ino=other.ino))
        assert other.extent == here.inode(other.ino).nlink == 0
        here.tree.drop(other.ino)
        await here.link(file.ino, ROOT_INO, b"second")
        await there.hub.barrier()
        inode = shared.found(there, ROOT_INO, b"name")
        assert (inode.nlink, inode.extent, inode.size) == (2, 10, 10)
        await shared.expect_all_equal(keys, [here, there])


async def test_a_removed_file_that_two_hosts_hold_gets_names_again(keys: EtcdKeys) -> None:
    async with shared.hosts(keys, 2) as (here, there):
        file = await here.create(ROOT_INO, b"file", FILE, 0, 0)
        for namespace in (here, there):
            namespace.held = lambda ino: ino == file.ino
        await while_open(there, there.unlink(ROOT_INO, b"file"))
        await here.hub.barrier()
        ends = await shared.all_at_once(
            here.link(file.ino, ROOT_INO, b"a"), there.link(file.ino, ROOT_INO, b"b")
        )
        assert ends == ["ok", "ok"]
        await shared.expect_all_equal(keys, [here, there])
        assert here.inode(file.ino).nlink == 2


# -- publishing --------------------------------------------------------------------------------------


async def test_publishes_of_one_file_at_once_are_versions_one_by_one(keys: EtcdKeys) -> None:
    async with shared.hosts(keys, 4) as namespaces:
        file = await namespaces[0].create(ROOT_INO, b"file", FILE, 0, 0)
        for namespace in namespaces:
            await namespace.hub.barrier()
        versions: list[tuple[int, int]] = []

        async def publish(namespace: Namespace, first: int) -> None:
            for extent in range(first, first + 10):
                version = NewVersion(file.ino, ContentId(extent), extent, 8, 1)
                inode = await namespace.publish(version)
                assert inode.extent == extent
                versions.append((inode.version, extent))

        async with trio.open_nursery() as nursery:
            for number, namespace in enumerate(namespaces):
                nursery.start_soon(publish, namespace, 100 * number + 1)
        assert sorted(version for version, _ in versions) == list(range(1, 41))
        await shared.expect_all_equal(keys, namespaces)
        assert namespaces[0].inode(file.ino).extent == max(versions)[1]


async def test_a_publish_whose_guard_fails_changes_nothing_and_says_which(keys: EtcdKeys) -> None:
    async with shared.hosts(keys, 2) as (here, there):
        file = await here.create(ROOT_INO, b"file", FILE, 0, 0)
        engine = here.engine
        first = await engine.transact((), [Put(b"g1", b"")])
        guards: list[Compare] = [(b"g1", first), Exists(b"g1")]
        assert (
            await here.publish(NewVersion(file.ino, ContentId(1), 1, 8, 1), guards)
        ).version == 1
        # In the way of the inode record only: done again on top.
        await there.hub.barrier()
        await there.set_attributes(file.ino, mode=0o600)
        assert (
            await here.publish(NewVersion(file.ino, ContentId(2), 1, 8, 1), guards)
        ).version == 2
        assert here.inode(file.ino).mode == FILE | 0o600
        await engine.transact((), [Put(b"g1", b"")])
        with pytest.raises(Conflict) as caught:
            await here.publish(NewVersion(file.ino, ContentId(3), 1, 8, 1), guards)
        assert caught.value.key == b"g1"
        await engine.transact((), [Delete(b"g1")])
        with pytest.raises(Conflict):
            await here.publish(NewVersion(file.ino, ContentId(3), 1, 8, 1), [Exists(b"g1")])
        await here.hub.barrier()
        assert (here.inode(file.ino).version, here.inode(file.ino).extent) == (2, 2)


# -- many at once ------------------------------------------------------------------------------------


async def test_exactly_one_of_many_creates_of_a_name_succeeds(keys: EtcdKeys) -> None:
    async with shared.hosts(keys, 4) as namespaces:
        for number in range(20):
            name = b"%d" % number
            ends = await shared.all_at_once(
                *(
                    namespace.create(ROOT_INO, name, mode, 0, 0)
                    for namespace in namespaces
                    for mode in (FILE, DIRECTORY)
                )
            )
            assert sorted(ends) == ["EEXIST"] * 7 + ["ok"]
        await shared.expect_all_equal(keys, namespaces)


async def test_creates_in_one_directory_are_not_in_each_others_way(keys: EtcdKeys) -> None:
    """They need one transaction each: no conflict, no repetition."""
    async with shared.hosts(keys, 2) as namespaces:

        async def create(namespace: shared.HostNamespace, first: int) -> None:
            for number in range(first, first + 20):
                await namespace.create(ROOT_INO, b"%d" % number, FILE, 0, 0)
                assert namespace.hub.barriers == barriers[namespace]

        barriers = {n: n.hub.barriers for n in namespaces}
        async with trio.open_nursery() as nursery:
            for number, namespace in enumerate(namespaces):
                nursery.start_soon(create, namespace, 100 * number)
        await shared.expect_all_equal(keys, namespaces)


async def test_a_directory_is_removed_or_filled_but_never_both(keys: EtcdKeys) -> None:
    async with shared.hosts(keys, 3) as (first, second, third):
        for number in range(20):
            name = b"%d" % number
            place = await first.create(ROOT_INO, name, DIRECTORY, 0, 0)
            file = await first.create(ROOT_INO, b"file-" + name, FILE, 0, 0)
            for namespace in (second, third):
                await namespace.hub.barrier()
            ends = await shared.all_at_once(
                first.rmdir(ROOT_INO, name),
                second.create(place.ino, b"a", FILE, 0, 0),
                third.rename(ROOT_INO, b"file-" + name, place.ino, b"b", 0),
            )
            if ends[0] == "ok":
                assert set(ends[1:]) <= {"ENOENT", "ESTALE"}
                assert first.lookup(ROOT_INO, name) is None
            else:
                assert ends[0] == "ENOTEMPTY" and "ok" in ends[1:]
            assert file.ino in first.inodes
        await shared.expect_all_equal(keys, [first, second, third])


async def test_moves_that_would_make_a_circle_together_do_not_both_succeed(keys: EtcdKeys) -> None:
    """/a -> /b/c/a and /b -> /a/d/b at once; and a third way round over another directory."""
    async with shared.hosts(keys, 3) as (first, second, third):
        for number in range(15):
            top = await first.create(ROOT_INO, b"%d" % number, DIRECTORY, 0, 0)
            a, b, e = [await first.create(top.ino, n, DIRECTORY, 0, 0) for n in (b"a", b"b", b"e")]
            c = await first.create(b.ino, b"c", DIRECTORY, 0, 0)
            d = await first.create(a.ino, b"d", DIRECTORY, 0, 0)
            for namespace in (second, third):
                await namespace.hub.barrier()
            ends = await shared.all_at_once(
                first.rename(top.ino, b"a", c.ino, b"a", 0),
                second.rename(top.ino, b"b", d.ino, b"b", 0),
                third.rename(top.ino, b"e", d.ino, b"e", 0),
            )
            assert sorted(ends[:2]) == ["EINVAL", "ok"] and ends[2] == "ok"
            await shared.expect_all_equal(keys, [first, second, third])
            assert first.inode(e.ino).parent == d.ino


async def test_a_directory_is_moved_deep_down_but_not_to_where_its_way_cannot_be_compared(
    keys: EtcdKeys,
) -> None:
    async with shared.host(keys) as namespace:
        path = [ROOT_INO]
        for _ in range(130):
            path.append((await namespace.create(path[-1], b"d", DIRECTORY, 0, 0)).ino)
        await namespace.create(ROOT_INO, b"moved", DIRECTORY, 0, 0)
        await namespace.create(ROOT_INO, b"file", FILE, 0, 0)
        move = namespace.rename
        assert await shared.error_of(move(ROOT_INO, b"moved", path[-1], b"moved", 0)) == (
            "ENAMETOOLONG"
        )
        await move(ROOT_INO, b"moved", path[100], b"moved", 0)
        await move(path[100], b"moved", path[100], b"again", 0)
        await move(ROOT_INO, b"file", path[-1], b"file", 0)
        assert namespace.path_of(path[100]) == b"/d" * 100
        await shared.expect_all_equal(keys, [namespace])


@pytest.mark.parametrize("taken", ["", "by another", "by this host", "while it is tried"])
async def test_files_get_versions_in_the_transaction_that_renames_their_directory_or_before_it(
    keys: EtcdKeys, taken: str
) -> None:
    """`taken`: the new name, by a directory that is not empty."""
    async with shared.hosts(keys, 2, shared.Lagging) as (here, there):
        draft = await here.create(ROOT_INO, b"draft", DIRECTORY, 0, 0)
        files = [await here.create(draft.ino, b"%d" % number, FILE, 0, 0) for number in range(3)]
        versions = [
            NewVersion(file.ino, ContentId(number), 1, 1, 1) for number, file in enumerate(files, 7)
        ]

        async def take(namespace: Namespace) -> None:
            place = await namespace.create(ROOT_INO, b"final", DIRECTORY, 0, 0)
            await namespace.create(place.ino, b"file", FILE, 0, 0, version=1)

        async def publish(joint: Joint) -> None:
            guard = (b"guard", 0)
            await there.engine.transact((), [Put(b"guard", b"")])
            with pytest.raises(Conflict):
                await here.publish_together(versions, [guard], joint)
            assert joint.done is None and not here.inode(files[0].ino).version
            if taken == "while it is tried":
                await take(there)
            published = await here.publish_together(versions, (), joint)
            assert [inode.extent for inode in published] == [7, 8, 9]

        if taken.startswith("by"):
            await take(there if taken == "by another" else here)
        before = here.engine.transactions
        renaming = here.rename(ROOT_INO, b"draft", ROOT_INO, b"final", 0, before=publish)
        assert await shared.error_of(renaming) == ("ENOTEMPTY" if taken else "ok")
        if not taken:
            assert here.engine.transactions == before + 2  # one failed
        await there.hub.barrier()
        assert shared.found(there, ROOT_INO, b"draft" if taken else b"final").ino == draft.ino
        assert [there.inode(file.ino).version for file in files] == [1, 1, 1]
        await shared.expect_all_equal(keys, [here, there])


@pytest.mark.parametrize("hub", [Replica, shared.Lagging])
async def test_replicas_are_equal_and_sound_after_random_changes_at_once(
    keys: EtcdKeys, hub: type[Replica]
) -> None:
    seed = chosen_seed()

    async with shared.hosts(keys, 4, hub) as namespaces:
        mirrors = [shared.Mirror(namespace) for namespace in namespaces]
        workers = [
            shared.Worker(namespace, random.Random(seed + 2 * number + half))
            for number, namespace in enumerate(namespaces)
            for half in range(2)
        ]
        async with trio.open_nursery() as nursery:
            for worker in workers:
                nursery.start_soon(worker.work, 60)
        assert all(worker.done for worker in workers)
        await shared.expect_all_equal(keys, namespaces)
        for mirror in mirrors:
            mirror.expect_equal()


def test_a_tree_decodes_files_once_when_it_is_loaded_and_what_changed_when_it_is_again() -> None:
    files, tree = 5_000, Tree()
    records = [KeyValue(inode_key(ROOT_INO), Inode(ROOT_INO, DIRECTORY, 0, 0, 1).encode(), 1)]
    for ino in range(2, 2 + files):
        name = b"%d" % (ino * 7919 % files)  # names are in another order than numbers
        records.append(KeyValue(inode_key(ino), Inode(ino, FILE, 0, 0, 1).encode(), 1))
        records.append(KeyValue(name_key(ROOT_INO, name), ino.to_bytes(8, "big"), 1))
    put = patch.object(tree.records, "put", wraps=tree.records.put)
    with put as puts, patch.object(Inode, "decode", wraps=Inode.decode) as decodes:
        tree.load(sorted(records), 1)
        assert tree.inodes.totals.files == files == len(tree.children(ROOT_INO))
        assert puts.call_count < 2.01 * files and decodes.call_count < 1.01 * files
        tree.load([*records, KeyValue(name_key(ROOT_INO, b"new"), (2).to_bytes(8, "big"), 2)], 2)
        assert decodes.call_count < 1.02 * files and len(tree.names_of(2)) == 2
