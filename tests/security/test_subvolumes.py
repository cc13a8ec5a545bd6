"""A mount whose certificate lets it change one directory alone (`irdmafs cluster cert --root`)."""

import errno
import fcntl
import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
from harness.claims import claim_exclusively
from harness.cluster import CLUSTER_NAME
from harness.clusters import Cluster, ClusterMount, CommandFailed, Plan, counters
from harness.errors import error_of, fails_with
from harness.mountpoint import eventually
from harness.refused_changes import changes_in, outcomes
from test_rights import allowed_writes

from irdmafs import client
from irdmafs.backend.cluster.lease import Session
from irdmafs.backend.kv import Delete, Put
from irdmafs.backend.model import records
from irdmafs.backend.model.lock_claims import Entry, entry_key, guard_key
from irdmafs.backend.namespace.inode import ROOT_INO, Inode, inode_key, name_key, time_key
from irdmafs.backend.namespace.numbers import SUBVOLUMES, next_ino_key, numbers_of

# The certificates of the cluster are used here, too.
PLAN = Plan(nodes=1, mounts=1, replicas=1, buckets=4, tls=True, namespaces=False)


@pytest.fixture(scope="module")
def made() -> Iterator[Cluster]:
    with Cluster(PLAN) as cluster:
        give(cluster, "trainer", "models")
        yield cluster


@pytest.fixture(scope="module")
def whole(made: Cluster) -> Path:
    path = made.mounts[0].path
    (path / "others").mkdir()
    (path / "others/small").write_bytes(b"s")
    (path / "others/large").write_bytes(b"l" * 300_000)
    return path


@pytest.fixture(scope="module")
def kept(made: Cluster, whole: Path) -> ClusterMount:
    return made.add_mount(certificate="mount-trainer")


def give(cluster: Cluster, name: str, *more: str) -> str:
    """Make a certificate for a mount that is kept to a directory, if there are `more` arguments."""
    root = ("--root", *more) if more else ()
    return cluster.administer("cert", name, "--role", "mount", *root)


def test_it_changes_nothing_outside_and_reads_everything(whole: Path, kept: ClusterMount) -> None:
    others = kept.path / "others"
    found = outcomes(changes_in(others))
    assert found == dict.fromkeys(found, "EROFS") | {"rmdir": "ENOTEMPTY"}
    assert outcomes([(os.rename, (kept.path / "models", kept.path / "mine"))]) == {
        "rename": "EROFS"
    }
    assert (others / "small").read_bytes() == b"s"
    assert (others / "large").read_bytes() == b"l" * 300_000
    assert sorted(os.listdir(whole / "others")) == ["large", "small"]
    assert counters(kept)["writable"] == "/models"


def test_it_changes_everything_inside(whole: Path, kept: ClusterMount) -> None:
    directory = kept.path / "models"
    (directory / "a/b").mkdir(parents=True)
    (directory / "a/b/small").write_bytes(b"1")
    done = outcomes(changes_in(directory / "a/b")[:5])
    assert done == dict.fromkeys(done, "ok")
    os.link(directory / "a/b/small", directory / "second")
    os.rename(directory / "a/b", directory / "moved")
    fd = os.open(directory, os.O_TMPFILE | os.O_RDWR)
    os.write(fd, b"without a name")
    os.link(f"/proc/self/fd/{fd}", directory / "named", src_dir_fd=0, follow_symlinks=True)
    os.close(fd)
    os.chmod(directory, 0o750)
    os.setxattr(directory / "second", "user.a", b"x")
    seen = whole / "models"
    assert sorted(os.listdir(seen)) == ["a", "moved", "named", "second"]
    assert (seen / "named").read_bytes() == b"without a name"
    assert os.stat(seen).st_mode & 0o7777 == 0o750
    shutil.rmtree(seen / "a")
    (seen / "moved/of the whole").write_bytes(b"w" * 200_000)
    assert (directory / "moved/of the whole").read_bytes() == b"w" * 200_000
    (directory / "moved/of the whole").write_bytes(b"k")
    assert (seen / "moved/of the whole").read_bytes() == b"k"
    shutil.rmtree(directory / "moved")
    assert sorted(os.listdir(seen)) == ["named", "second"]


def test_nothing_is_moved_or_linked_over_its_border(whole: Path) -> None:
    inside, outside = whole / "models/inside", whole / "others/small"
    inside.write_bytes(b"i")
    for call in (os.rename, os.link):
        assert error_of(call, inside, whole / "others/new") == "EXDEV"
        assert error_of(call, outside, whole / "models/new") == "EXDEV"
    for source in (inside, outside):  # the bytes are copied
        assert client.clone(source, whole / "others/cloned").shared_files == (source is outside)
        assert client.clone(source, whole / "models/cloned").shared_files == (source is inside)
    os.unlink(whole / "others/cloned")
    os.unlink(whole / "models/cloned")
    subprocess.run(["mv", inside, whole / "others/moved"], check=True, timeout=60)
    assert (whole / "others/moved").read_bytes() == b"i" and not inside.exists()
    os.unlink(whole / "others/moved")
    os.rename(whole / "models", whole / "others/models")
    os.rename(whole / "others/models", whole / "models")


def test_locks_of_it_hold_between_hosts(whole: Path, kept: ClusterMount) -> None:
    (whole / "models/locked").write_bytes(b"x")
    with (
        open(whole / "models/locked", "rb+") as one,
        open(kept.path / "models/locked", "rb+") as two,
    ):
        fcntl.flock(one, fcntl.LOCK_EX)
        with fails_with(errno.EAGAIN):
            fcntl.flock(two, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(one, fcntl.LOCK_UN)
        fcntl.flock(two, fcntl.LOCK_EX)
    with open(kept.path / "others/small", "rb") as outside:
        fcntl.flock(outside, fcntl.LOCK_SH | fcntl.LOCK_NB)


def test_it_sees_what_others_defer(made: Cluster, whole: Path, kept: ClusterMount) -> None:
    (whole / "alone").mkdir()
    claim_exclusively(whole / "alone")
    (whole / "alone/new").touch()
    assert os.listdir(kept.path / "alone") == ["new"]


def test_a_rule_for_placement_is_not_made_by_it(kept: ClusterMount) -> None:
    with fails_with(errno.EACCES):
        os.setxattr(kept.path / "models", "user.irdmafs.placement", b"zone=a")


def test_a_certificate_is_for_a_new_directory_or_anothers_one(made: Cluster, whole: Path) -> None:
    said = give(made, "second-trainer", "/models/")
    assert "changes what is below /models alone" in said
    rows = made.administer("members")
    assert "mount models" in rows and "mount /models/" in rows
    (whole / "deep/er").mkdir(parents=True)
    claim_exclusively(whole / "deep/er")
    give(made, "third", "deep/er/models")
    eventually(lambda: os.stat(whole / "deep/er/models").st_ino in SUBVOLUMES, "it is seen")
    assert os.stat(whole / "deep/er/models").st_ino != os.stat(whole / "models").st_ino
    for root, why in {
        "others": "move the files",
        "missing/models": "there is no 'missing'",
        "models/below": "choose another",
        "/": "no path",
        "../x": "no path",
    }.items():
        with pytest.raises(CommandFailed, match=why):
            give(made, "fourth", root)
    with pytest.raises(CommandFailed, match="new certificates of mounts"):
        give(made, "trainer", "models", "--renew")


def test_a_renewed_certificate_is_kept_to_the_same(made: Cluster, kept: ClusterMount) -> None:
    made.administer("cert", "trainer", "--role", "mount", "--renew")
    again = made.add_mount(certificate="mount-trainer")
    (again.path / "models/renewed").write_bytes(b"r")
    assert error_of(os.mkdir, again.path / "new") == "EROFS"
    again.close()


def test_without_its_directory_a_mount_is_refused(made: Cluster, whole: Path) -> None:
    give(made, "fifth", "gone")
    os.rmdir(whole / "gone")
    mountpoint = made.directory / "refused"
    mountpoint.mkdir()
    with pytest.raises(CommandFailed, match="was removed"):
        made.irdmafs("mount", mountpoint, "--cluster", made.config_of("mount-fifth"))
    give(made, "sixth", "gone")
    renewed = made.add_mount(certificate="mount-sixth")
    (renewed.path / "gone/file").touch()
    renewed.close()


async def forge(cluster: Cluster, *puts: Put | Delete) -> None:
    """Write records with the certificate of the mount that is kept to models/."""
    async with cluster.engine("mount", "mount-trainer") as engine:
        await engine.transact((), puts)


async def test_a_forged_name_takes_no_file_of_others(made: Cluster, whole: Path) -> None:
    top, victim = os.stat(whole / "models").st_ino, os.stat(whole / "others/small").st_ino
    forged = whole / "models/forged"
    for target in (victim, os.stat(whole / "others").st_ino, ROOT_INO):
        await forge(made, Put(name_key(top, b"forged"), target.to_bytes(8, "big")))
        eventually(lambda: error_of(os.stat, forged) == "EIO", "the name is an error")
        os.unlink(forged)
    assert os.stat(whole / "others/small").st_nlink == 1
    assert (whole / "others/small").read_bytes() == b"s"


def record_of(made: Cluster, path: Path) -> bytes:
    found = made.etcd.get(f"/irdmafs/{CLUSTER_NAME}/i".encode())
    return found[os.stat(path).st_ino.to_bytes(8, "big")]


async def test_a_forged_content_is_not_freed_for_who_has_it(made: Cluster, whole: Path) -> None:
    top, size = os.stat(whole / "models").st_ino, 300_000
    value, forged = record_of(made, whole / "others/large"), top + (1 << 30)
    await forge(
        made, Put(inode_key(forged), value), Put(name_key(top, b"copy"), forged.to_bytes(8, "big"))
    )
    eventually(lambda: (whole / "models/copy").exists(), "the name is seen")
    os.unlink(whole / "models/copy")
    (whole / "models/after").write_bytes(b"a" * size)  # the nodes have seen all that was before
    fresh = made.add_mount()
    assert (fresh.path / "others/large").read_bytes() == b"l" * size
    fresh.close()


async def test_contents_it_names_first_are_published_by_writers(made: Cluster, whole: Path) -> None:
    give(made, "tenant", "apart")
    tenant = made.add_mount(certificate="mount-tenant").path
    written = ("after", "later", "last")
    for directory, first in ((whole / "others", 1 << 31), (tenant / "apart", 1 << 32)):
        (directory / "before").write_bytes(b"b")
        inode = Inode.decode(0, record_of(made, directory / "before"), 1)
        inode.size = 77
        puts = []
        for number in range(1, 20):
            inode.extent = records.ContentId(inode.extent + 1)
            forged = os.stat(whole / "models").st_ino + first + number
            puts.append(Put(inode_key(forged), inode.encode()))
        await forge(made, *puts)
        await forge(made, *(Delete(put.key) for put in puts[:2]))
        for name in written:
            (directory / name).write_bytes(b"a" * 300_000)
        await forge(made, *(Delete(put.key) for put in puts[2:]))
    made.nodes[0].terminate()
    made.nodes[0].start()
    made.wait_healthy()
    fresh = made.add_mount()
    for path in (f"{directory}/{name}" for directory in ("others", "apart") for name in written):
        assert (fresh.path / path).read_bytes() == b"a" * 300_000
    made.remove_mount()
    made.remove_mount()


async def test_an_entry_for_a_file_elsewhere_locks_nothing(made: Cluster, whole: Path) -> None:
    async with made.engine("mount", "mount-trainer") as engine, trio.open_nursery() as nursery:
        session = Session(engine, records.MountRecord("h", "/m", 1, "0", "trainer", "mount"), 20)
        await nursery.start(session.run)
        key = entry_key(os.stat(whole / "others/small").st_ino, session.lease)
        put = Put(key, records.encode(Entry(sole=True)), session.lease)
        await engine.transact((), [put])
        with open(whole / "others/small", "rb+") as locked:
            # In a thread: the session is renewed meanwhile.
            await trio.to_thread.run_sync(fcntl.flock, locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        nursery.cancel_scope.cancel()


async def test_etcd_refuses_it_the_keys_of_all_else(made: Cluster, whole: Path) -> None:
    give(made, "forger", "forged")
    top = os.stat(whole / "forged").st_ino
    makers: list[Callable[[int], bytes]] = [
        inode_key, time_key, guard_key, records.claim_key, next_ino_key,
        lambda ino: name_key(ino, b"x"), lambda ino: records.wish_key(ino, 1),
    ]  # fmt: skip
    inside = {f"{make(top)!r}": make(top) for make in makers}
    last = numbers_of(top)[-1]
    inside |= {f"{make(last)!r}": make(last) for make in makers if make is not next_ino_key}
    outside = [make(number) for make in makers for number in (ROOT_INO, 2, top - 1, last + 1)]
    outside += map(next_ino_key, (ROOT_INO, last, top + 1))
    outside += [records.policy_key(3), records.pool_key(1)]
    async with made.engine("mount", "mount-forger") as engine:
        assert len(await allowed_writes(engine, inside)) == 2 * len(inside)
        assert await allowed_writes(engine, {repr(key): key for key in outside}) == []
        assert await engine.range(b"c", b"d")


def test_inode_numbers_belong_to_one_subvolume() -> None:
    ranges = [numbers_of(subvolume) for subvolume in (ROOT_INO, *SUBVOLUMES)]
    for one, after in itertools.pairwise(ranges):
        assert one.stop == after.start
    assert Inode(SUBVOLUMES[-1], 0o40755, 0, 0, 0).ino in ranges[-1]
