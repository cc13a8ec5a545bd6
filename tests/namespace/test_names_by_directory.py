"""Namespaces of which a host knows what it uses: directories are read when somebody looks into them."""

import random
from collections.abc import Coroutine
from typing import Any

import pytest
import trio
import trio.testing
from harness.etcd_server import EtcdKeys
from harness.models.namespace import DIRECTORY, FILE
from harness.shared_namespaces import (
    HostNamespace,
    Worker,
    everything,
    expect_all_equal,
    fields,
    found,
    host,
    run,
)

from irdmafs.backend.kv import Change, Delete, Put
from irdmafs.backend.namespace import ROOT_INO, Inode, Namespace, Unread, answered, reading
from irdmafs.backend.namespace.inode import inode_key, name_key


class Tidy(Worker):
    """Makes no further names of files: who changes such a file has to know all names."""

    def choose(self) -> tuple[str, Coroutine[None, None, object]]:
        while True:
            what, doing = super().choose()
            if what != "link":
                return what, doing
            doing.close()


def expect_part_of(part: HostNamespace, whole: Namespace) -> None:
    """All that a host knows is right, and it knows all names in directories that were read."""
    known = part.tree.known
    assert not known.everything
    for ino, inode in part.inodes.items():
        right = whole.inodes[ino]
        assert inode.revision == right.revision
        assert inode.parent == right.parent
        assert inode.name == (b"" if ino in known.placed else right.name)
        names = set(whole.children(ino)) if right.is_dir else set()
        if inode.is_dir and ino not in known.unread:
            assert set(part.children(ino)) == names
            assert ino in known.placed or fields(inode) == fields(right)
        else:
            assert set(part.tree.below(ino)) <= names


@pytest.mark.parametrize("seed", range(6))
def test_a_host_knows_rightly_what_it_has_read_whatever_others_do(
    keys: EtcdKeys, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_ = random.Random(seed)
    # With 0 each record is read by its key, not in a range.
    monkeypatch.setattr(reading, "_GAP_MAX", random_.choice([0, 64]))

    async def go() -> None:
        async with (
            host(keys) as first,
            host(keys) as second,
            host(keys, ahead=-1) as part,
            host(keys, ahead=-1) as looker,
        ):
            others = [Tidy(one, random_) for one in (first, second)]
            for _ in range(8):
                async with trio.open_nursery() as nursery:
                    for worker in others:
                        nursery.start_soon(worker.work, 25)
                    nursery.start_soon(Tidy(part, random_).work, 5)
                    if random_.random() < 0.5:
                        nursery.start_soon(look, looker, random_)
                    if random_.random() < 0.3:
                        nursery.start_soon(random_.choice([part, looker]).hub.reload)
                for one in (first, part, looker):
                    await one.hub.barrier()
                directories = [ino for ino, inode in first.inodes.items() if inode.is_dir]
                part.followed = {random_.choice(directories)}
                expect_part_of(part, first)
                expect_part_of(looker, first)
            for one in (part, looker):
                await one.hub.learn(Unread(ROOT_INO, below=True))
                expect_part_of(one, first)
                assert not one.tree.known.unread
                assert everything(one) == everything(first)
            await expect_all_equal(keys, [first, second, part, looker])

    run(go)


async def look(namespace: HostNamespace, random_: random.Random) -> None:
    """Look into a directory that is known, as a program does: with what it leads to."""
    directories = [ino for ino, inode in namespace.inodes.items() if inode.is_dir]
    directory = random_.choice(directories)

    async def ask() -> None:
        namespace.children(directory)

    await answered(ask, namespace.hub.learn)


async def _tree(namespace: HostNamespace, *path: bytes) -> list[Inode]:
    made = [namespace.inode(ROOT_INO)]
    for name in path:
        made.append(await namespace.create(made[-1].ino, name, DIRECTORY, 0, 0))
    return made


def test_what_was_not_looked_at_is_neither_read_nor_kept(keys: EtcdKeys) -> None:
    async def go() -> None:
        async with host(keys) as writer:
            _, a, b = await _tree(writer, b"a", b"b")
            for number in range(10):
                await writer.create(b.ino, b"%d" % number, FILE, 0, 0)
            async with host(keys, ahead=-1) as part:
                assert set(part.inodes) == {ROOT_INO, a.ino}
                with pytest.raises(Unread):
                    part.lookup(a.ino, b"b")
                await part.hub.learn(Unread(a.ino))
                assert found(part, a.ino, b"b").ino == b.ino
                await writer.create(b.ino, b"more", FILE, 0, 0)
                await part.hub.barrier()
                assert set(part.inodes) == {ROOT_INO, a.ino, b.ino}
                await part.hub.learn(Unread(b.ino))
                assert len(part.children(b.ino)) == 11

    run(go)


def test_a_namespace_of_few_names_is_read_at_once(keys: EtcdKeys) -> None:
    async def go() -> None:
        async with host(keys) as writer:
            _, a, _ = await _tree(writer, b"a", b"b")
            async with host(keys, ahead=2) as few, host(keys, ahead=1) as many:
                assert few.lookup(a.ino, b"b") is not None
                assert not many.tree.known.everything

    run(go)


def test_what_is_moved_into_an_unknown_directory_is_still_found_from_there(keys: EtcdKeys) -> None:
    async def go() -> None:
        async with host(keys) as writer, host(keys, ahead=-1) as part:
            _, _, b = await _tree(writer, b"a", b"b")
            deep = await writer.create(b.ino, b"deep", DIRECTORY, 0, 0)
            file = await writer.create(ROOT_INO, b"file", FILE, 0, 0, version=1)
            await part.hub.barrier()
            assert deep.ino not in part.inodes
            await writer.rename(ROOT_INO, b"file", deep.ino, b"moved", 0)
            await part.hub.barrier()
            assert part.names_of(file.ino) == [(deep.ino, b"moved")]
            with pytest.raises(Unread):
                part.path_of(deep.ino)

            async def path() -> bytes:
                return part.path_of(deep.ino)

            assert await answered(path, part.hub.learn) == b"/a/b/deep"
            await writer.unlink(deep.ino, b"moved")
            await part.hub.barrier()
            assert file.ino not in part.inodes

    run(go)


def test_a_file_whose_other_names_are_not_known_is_changed_when_they_are(keys: EtcdKeys) -> None:
    async def go() -> None:
        async with host(keys) as writer:
            _, _, b = await _tree(writer, b"a", b"b")
            file = await writer.create(b.ino, b"file", FILE, 0, 0, version=1)
            await writer.link(file.ino, ROOT_INO, b"second")
            async with host(keys, ahead=-1) as part:
                assert found(part, ROOT_INO, b"second").nlink == 2
                changed = list[tuple[int, ...]]()

                async def note(directories: tuple[int, ...], revision: int) -> None:
                    changed.append(directories)

                part.after_commit = note
                await part.set_attributes(file.ino, mode=0o600)
                assert [{*one} for one in changed] == [{b.ino, ROOT_INO}]

    run(go)


def test_a_quota_counts_what_was_not_looked_at(keys: EtcdKeys) -> None:
    async def go() -> None:
        async with host(keys) as writer:
            _, a, b = await _tree(writer, b"a", b"b")
            for number in range(3):
                await writer.create(b.ino, b"%d" % number, FILE, 0, 0)
            await writer.set_xattr(a.ino, b"user.irdmafs.quota_inodes", b"6")
            async with host(keys, ahead=-1) as part:
                await part.create(a.ino, b"fifth", FILE, 0, 0)
                await writer.create(b.ino, b"sub", DIRECTORY, 0, 0)
                await part.hub.barrier()
                with pytest.raises(OSError, match="quota"):
                    await part.create(a.ino, b"seventh", FILE, 0, 0)
            file = await writer.create(ROOT_INO, b"file", FILE, 0, 0, version=1)
            await writer.set_xattr(ROOT_INO, b"user.irdmafs.quota_bytes", b"5120")
            async with host(keys, ahead=-1) as part:
                assert found(part, ROOT_INO, b"file").ino == file.ino
                await part.check_room(file.ino, 10)
                with pytest.raises(OSError, match="quota"):
                    await part.check_room(file.ino, 11)

    run(go)


def test_a_host_reads_on_after_names_whose_records_are_damaged(keys: EtcdKeys) -> None:
    async def go() -> None:
        async with host(keys) as writer, host(keys, ahead=-1) as part:
            _, a, b = await _tree(writer, b"a", b"b")
            names = (ROOT_INO, a.ino, b.ino)
            damaged = [Put(name_key(ino, b"long"), b"\xff" * 20) for ino in names]
            await writer.engine.transact((), [*damaged, Put(b"d", b"")])
            await part.hub.barrier()
            await part.hub.learn(Unread(ROOT_INO, below=True))
            assert everything(part) == everything(writer)

    run(go)


def test_a_name_that_is_mended_by_hand_leads_to_its_file_again(keys: EtcdKeys) -> None:
    async def go() -> None:
        async with host(keys) as writer, host(keys, ahead=-1) as part:
            _, a = await _tree(writer, b"a")
            file = await writer.create(a.ino, b"file", FILE, 0, 0)
            for target in (a.ino, 77, file.ino):
                put = Put(name_key(a.ino, b"file"), target.to_bytes(8, "big"))
                await writer.engine.transact((), [put])
                await part.hub.barrier()
                await part.hub.learn(Unread(ROOT_INO, below=True))
            assert everything(part) == everything(writer)
            assert not part.tree.damaged

    run(go)


def test_a_directory_that_is_moved_to_where_others_look_has_the_time_of_its_newest_name(
    keys: EtcdKeys,
) -> None:
    async def go() -> None:
        async with host(keys) as writer, host(keys, ahead=-1) as part:
            _, a, b, c = await _tree(writer, b"a", b"b", b"c")
            await part.hub.learn(Unread(ROOT_INO))
            # The host that moves them does not know of the names yet.
            await writer.create(b.ino, b"file", FILE, 0, 0)
            await writer.create(c.ino, b"file", FILE, 0, 0)
            for old, moved in ((name_key(b.ino, b"c"), c), (name_key(a.ino, b"b"), b)):
                changes: list[Put | Delete] = [
                    Delete(old) if moved is c else Put(old, c.ino.to_bytes(8, "big")),
                    Put(name_key(ROOT_INO, b"moved"), moved.ino.to_bytes(8, "big")),
                    Put(inode_key(moved.ino), moved.encode(ROOT_INO)),
                ]
                await writer.engine.transact((), changes)
            await part.hub.barrier()
            await part.hub.learn(Unread(ROOT_INO, below=True))
            assert everything(part) == everything(writer)

    run(go)


def test_a_name_that_was_passed_over_is_forgotten_when_it_goes_from_an_unknown_directory(
    keys: EtcdKeys,
) -> None:
    async def go() -> None:
        async with host(keys) as writer, host(keys, ahead=-1) as part:
            _, a = await _tree(writer, b"a")
            _, b = await _tree(writer, b"b")
            await part.hub.learn(Unread(b.ino))
            second, place = name_key(b.ino, b"second"), name_key(ROOT_INO, b"b")
            steps: list[list[Put | Delete]] = [
                [Put(second, a.ino.to_bytes(8, "big"))],
                [Delete(inode_key(b.ino))],
                [Put(inode_key(b.ino), b.encode()), Put(place, b.ino.to_bytes(8, "big"))],
                [Delete(second)],
                [Delete(name_key(ROOT_INO, b"a"))],
            ]
            for changes in steps:
                await writer.engine.transact((), changes)
                await part.hub.barrier()
            await part.hub.learn(Unread(ROOT_INO, below=True))
            assert everything(part) == everything(writer)

    run(go)


def test_a_name_that_is_mended_while_its_directory_is_read_is_not_told_as_damaged(
    keys: EtcdKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go() -> None:
        async with host(keys) as writer, host(keys, ahead=-1) as part:
            _, a = await _tree(writer, b"a")
            monkeypatch.setattr(part.hub, "_faults", part.tree._faults)
            name, came = name_key(a.ino, b"name"), trio.Event()
            follow, snapshot = part.hub._follow_change, part.engine.snapshot

            async def mend(*some: Any) -> Any:
                read = await snapshot(*some)
                if not came.is_set():
                    await writer.engine.transact((), [Delete(name)])
                    await came.wait()
                    await trio.testing.wait_all_tasks_blocked()
                return read

            async def note(change: Change) -> None:
                came.set()
                await follow(change)

            await writer.engine.transact((), [Put(name, b"no number")])
            await part.hub.barrier()
            monkeypatch.setattr(part.hub, "_follow_change", note)
            monkeypatch.setattr(part.engine, "snapshot", mend)
            await part.hub.learn(Unread(a.ino))
            await part.hub.barrier()
            assert not part.tree._faults.warnings()

    run(go)
