"""Changes that a mount answers before etcd has them: nobody who looks can tell."""

import errno
import os
import stat
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain
from pathlib import Path

import pytest
import trio
from harness.beside import beside, repeating
from harness.claims import claim_exclusively, claimed, few_transactions, often
from harness.clusters import Apart, Cluster, ClusterMount, Plan, counters
from harness.errors import fails_with
from harness.mountpoint import can_be_opened, eventually, fsync
from harness.processes import Process, Program

from irdmafs.backend.kv import Delete
from irdmafs.backend.model.records import claim_key
from irdmafs.backend.namespace.inode import inode_key, name_key

FILES = 200


def deferred(place: ClusterMount | Path) -> int:
    return int(counters(place)["deferred_changes"])


def test_many_changes_cost_one_transaction(here: Path, there: Path) -> None:
    claim_exclusively(here)
    with few_transactions(here, FILES // 20):
        for number in range(FILES):
            (here / f"file{number}").touch()
            os.chmod(here / f"file{number}", 0o600)
        for number in range(0, FILES, 2):
            (here / f"file{number}").unlink()
        os.symlink("target", here / "link")
    assert len(os.listdir(there)) == 1 + FILES // 2
    assert stat.S_IMODE((there / "file1").stat().st_mode) == 0o600
    assert os.readlink(there / "link") == "target"


def test_a_version_or_a_rename_takes_what_was_deferred_along(here: Path, there: Path) -> None:
    """As `tar x` works: it sets times and modes of files that it has closed."""
    (here / "moved0").write_bytes(b"content")
    claim_exclusively(here)
    before = counters(here)["transactions"]
    for number in range(FILES):
        file = here / f"file{number}"
        file.write_bytes(b"content")
        os.utime(file, ns=(number, number))
        file.chmod(0o600)
        (here / f"moved{number}").rename(here / f"moved{number + 1}")
    assert counters(here)["transactions"] - before < FILES * 2.25
    for number in range(FILES):
        found = (there / f"file{number}").stat()
        assert (found.st_mtime_ns, stat.S_IMODE(found.st_mode)) == (number, 0o600)


def test_directories_are_made_and_removed_many_at_a_time(here: Path, there: Path) -> None:
    claim_exclusively(here)
    with few_transactions(here, FILES // 20):
        for number in range(FILES):
            (here / f"{number}").mkdir()
        assert here.stat().st_nlink == FILES + 2
    with few_transactions(here, FILES // 20):
        for number in range(0, FILES, 2):
            (here / f"{number}").rmdir()
    assert here.stat().st_nlink == FILES // 2 + 2
    assert sorted(os.listdir(there)) == sorted(f"{number}" for number in range(1, FILES, 2))


def test_a_directory_that_was_just_made_holds_what_is_put_into_it(here: Path, there: Path) -> None:
    (here / "file").write_bytes(b"content")
    claim_exclusively(here)
    for name in ("moved", "linked", "nested", "made", "set"):
        (here / name).mkdir()
    (here / "file").rename(here / "moved/file")
    os.link(here / "moved/file", here / "linked/file")
    (here / "nested/folder").mkdir()
    (here / "nested/folder/file").write_bytes(b"content")
    (here / "nested").rename(here / "made/nested")
    os.close(os.open(here / "made/empty", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    (here / "set").chmod(0o2700)
    os.setxattr(here / "set", "user.note", b"set")
    os.utime(here / "set", (1, 2))
    expected = ["linked/file", "made/empty", "made/nested/folder/file", "moved/file"]
    for folder in (here, there):
        found = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
        assert sorted(found) == expected
        assert (folder / "made/nested/folder/file").read_bytes() == b"content"
        was_set = (folder / "set").stat()
        assert (stat.S_IMODE(was_set.st_mode), was_set.st_mtime) == (0o2700, 2)
        assert os.getxattr(folder / "set", "user.note") == b"set"


def test_others_use_a_directory_that_was_just_made_and_miss_one_that_was_just_removed(
    here: Path, there: Path
) -> None:
    claim_exclusively(here)
    before = deferred(here)
    os.utime(here, (1, 2))
    (here / "made").mkdir()
    os.utime(here, (3, 4))
    assert here.stat().st_mtime == 4
    (here / "removed").mkdir()
    assert deferred(here) == before + 2
    (there / "made/file").write_bytes(b"content")
    assert (here / "made/file").read_bytes() == b"content"
    with pytest.raises(FileExistsError):
        (there / "removed").mkdir()
    inside = os.open(there / "removed", os.O_RDONLY | os.O_DIRECTORY)
    claim_exclusively(here)
    (here / "removed").rmdir()
    assert os.listdir(inside) == []
    with pytest.raises(FileNotFoundError):
        os.mkdir("folder", dir_fd=inside)
    assert not can_be_opened(there / "removed")
    (there / "removed").mkdir()
    os.close(inside)


def test_no_directory_is_claimed_where_claims_are_forbidden_by_now(here: Path) -> None:
    claim_exclusively(here)
    os.setxattr(here, "user.irdmafs.follow", b"off")
    before = claimed(here)
    (here / "inside").mkdir()
    fsync(here)
    assert claimed(here) == before


def test_a_followed_directory_that_is_removed_later_delays_nobody(here: Path, there: Path) -> None:
    """Another host has it open, and changes something where nobody follows."""
    os.setxattr(there, "user.irdmafs.follow", b"off")
    (there / "inside/removed").mkdir(parents=True)
    os.setxattr(there / "inside", "user.irdmafs.follow", b"on")
    opened = os.open(there / "inside/removed", os.O_PATH)
    claim_exclusively(here / "inside")
    claim_exclusively(here / "inside/removed")

    def is_followed() -> bool:
        often(lambda: os.listdir(here / "inside/removed"))
        return bool(counters(here)["followed_directories"])

    eventually(is_followed, "it is followed")
    (here / "inside/removed").rmdir()
    fsync(here / "inside")
    begun_s = time.monotonic()
    (there / "file").touch()
    # A directory that is not asked about is followed for 10 s.
    assert time.monotonic() < begun_s + 5
    os.close(opened)


def test_a_deferred_change_is_counted_once(here: Path, there: Path) -> None:
    claim_exclusively(here)
    before = os.getxattr(here, "user.irdmafs.changes")
    (here / "file").touch()
    counted = os.getxattr(here, "user.irdmafs.changes")
    assert len(os.listdir(there)) == 1  # it is stored
    assert os.getxattr(here, "user.irdmafs.changes") == counted > before


def scan(path: Path) -> os.stat_result:
    found = {entry.name: entry for entry in list(os.scandir(path.parent))}
    if path.name not in found:
        raise FileNotFoundError(path)
    return found[path.name].stat()


LOOKS: dict[str, Callable[[Path], object]] = {
    "stat": os.stat,
    "list": scan,
    "open": lambda path: os.close(os.open(path, os.O_RDONLY)),
    "append": lambda path: os.close(os.open(path, os.O_WRONLY | os.O_APPEND)),
    "chmod": lambda path: os.chmod(path, 0o600),
    "unlink": os.unlink,
    "rename": lambda path: os.rename(path, path.with_name("renamed")),
    "link": lambda path: os.link(path, path.with_name("linked")),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("is_made", [True, False], ids=["made", "removed"])
def test_a_name_that_was_just_made_or_removed_is_known_to_whoever_looks(
    here: Path, there: Path, look: str, *, is_made: bool
) -> None:
    if not is_made:
        (here / "file").touch()
    claim_exclusively(here)
    before = deferred(here)
    (here / "file").touch() if is_made else (here / "file").unlink()
    with nullcontext() if is_made else pytest.raises(FileNotFoundError):
        LOOKS[look](there / "file")
    assert deferred(here) > before


def test_attributes_that_were_just_set_are_seen_by_whoever_looks(here: Path, there: Path) -> None:
    (here / "file").write_bytes(b"content")
    os.stat(there / "file")
    claim_exclusively(here)
    before = deferred(here)
    os.chmod(here / "file", 0o611)
    os.chown(here / "file", 7, 8)
    os.utime(here / "file", (1, 2))
    os.setxattr(here / "file", "user.note", b"set")
    os.utime(here, (3, 4))
    found = os.stat(there / "file")
    assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (0o611, 7, 8)
    assert (found.st_mtime, found.st_size) == (2, 7)
    assert os.getxattr(there / "file", "user.note") == b"set"
    assert os.stat(there).st_mtime == 4
    assert deferred(here) >= before + 4


def test_directory_keeps_the_time_of_a_new_file_when_an_earlier_one_is_stored(here: Path) -> None:
    claim_exclusively(here)
    (here / "stored").touch()
    with open(here / "kept", "wb"):
        made = os.stat(here).st_mtime_ns
        fsync(here)
        assert os.stat(here).st_mtime_ns == made


def test_large_attributes_do_not_come_together(here: Path, there: Path) -> None:
    for number in range(40):
        (here / f"{number}").touch()
    claim_exclusively(here)
    for number in range(40):
        os.setxattr(here / f"{number}", "user.note", bytes(1000 + number * 1500))
    for number in range(40):
        assert len(os.getxattr(there / f"{number}", "user.note")) == 1000 + number * 1500


def test_a_removed_name_is_free_for_others_and_a_made_one_is_taken(here: Path, there: Path) -> None:
    (here / "old").write_bytes(b"old")
    claim_exclusively(here)
    (here / "old").unlink()
    (here / "new").touch()
    with pytest.raises(FileExistsError):
        os.open(there / "new", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    os.close(os.open(there / "old", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    assert sorted(os.listdir(here)) == sorted(os.listdir(there)) == ["new", "old"]


@pytest.mark.parametrize("is_empty", [True, False], ids=["empty", "with a file"])
def test_a_directory_is_removed_by_another_host_if_it_is_empty_by_then(
    here: Path, there: Path, *, is_empty: bool
) -> None:
    here, there = here / "directory", there / "directory"
    here.mkdir()
    claim_exclusively(here)
    (here / "file").touch()
    if is_empty:
        (here / "file").unlink()
    with nullcontext() if is_empty else fails_with(errno.ENOTEMPTY):
        there.rmdir()
    assert can_be_opened(here) != is_empty


def test_a_file_open_on_another_host_is_published_without_its_name(here: Path, there: Path) -> None:
    (here / "file").write_bytes(b"first")
    with (there / "file").open("r+b") as file:
        claim_exclusively(here)
        (here / "file").unlink()
        (here / "file").write_bytes(b"another")
        file.write(b"second")
    assert (here / "file").read_bytes() == (there / "file").read_bytes() == b"another"


def test_a_name_that_is_removed_and_made_again_and_again_is_there(here: Path, there: Path) -> None:
    claim_exclusively(here)
    for number in range(20):
        (here / "file").write_bytes(b"%d" % number)
        (here / "file").unlink()
        (here / "file").touch()
        if number % 3:
            (here / "file").unlink()
    (here / "file").write_bytes(b"last")
    for folder in (here, there):
        assert os.listdir(folder) == ["file"]
        assert (folder / "file").read_bytes() == b"last"


def test_programs_that_never_pause_keep_no_change_waiting(here: Path, there: Path) -> None:
    """Nobody gets EBUSY, least of all close()."""
    (here / "file").touch()
    claim_exclusively(here)
    with repeating(lambda: (here / "file").chmod(0o600)):
        for number in range(5):
            (there.parent / f"{there.name}{number}").mkdir()
            (here.parent / f"{here.name}{number}").rmdir()
            (here / "file").write_bytes(b"%d" % number)
    assert (there / "file").read_bytes() == b"4"


def test_a_file_whose_name_was_just_removed_is_published_in_a_few_transactions(here: Path) -> None:
    claim_exclusively(here)
    for _ in range(3):
        (here / "file").write_bytes(b"content")
        before = counters(here)["transactions"]
        (here / "file").unlink()
        (here / "file").write_bytes(b"content")
        assert counters(here)["transactions"] < before + 8


@pytest.mark.parametrize("by", ["fsync of a file", "fsync of a directory", "a version", "umount"])
def test_what_was_changed_before_it_survives(failing: Cluster, apart: Apart, by: str) -> None:
    holder, here, there = apart
    (here / "old").touch()
    (holder.path / "elsewhere").touch()
    claim_exclusively(here)
    for number in range(50):
        (here / f"{number:02}").touch()
    (here / "old").unlink()
    if by == "a version":
        (holder.path / "elsewhere").write_bytes(b"content")
    elif by == "umount":
        holder.terminate()
    else:
        fsync(here if by.endswith("directory") else holder.path / "elsewhere")
    failing.lose(holder)
    assert sorted(os.listdir(there)) == [f"{number:02}" for number in range(50)]


CHANGE_UNDER_A_LOCK = """
import fcntl, os, sys
fd = os.open("lock", os.O_RDWR)
lock, then = getattr(fcntl, sys.argv[1]), getattr(fcntl, sys.argv[2], None)
lock(fd, fcntl.LOCK_EX)
os.unlink("old")
os.chmod("changed", 0o600)
os.close(fd) if then is None else lock(fd, then)
os.write(1, b"given up")
"""


@pytest.mark.parametrize(
    ("kind", "by"),
    [("lockf", "LOCK_UN"), ("flock", "LOCK_SH"), ("lockf", "close"), ("flock", "close")],
)
def test_what_was_changed_under_a_lock_survives_when_it_was_given_up(
    failing: Cluster, apart: Apart, kind: str, by: str
) -> None:
    """As SQLite removes its journal, and unlocks the database."""
    holder, here, there = apart
    for name in ("lock", "old", "changed"):
        (here / name).write_bytes(b"content")
    claim_exclusively(here)
    before = deferred(holder)
    with Program(sys.executable, "-c", CHANGE_UNDER_A_LOCK, kind, by, cwd=here) as program:
        assert program.stdout.read(8) == "given up"
        assert deferred(holder) > before
        failing.lose(holder)
    assert sorted(os.listdir(there)) == ["changed", "lock"]
    assert stat.S_IMODE((there / "changed").stat().st_mode) == 0o600


def test_nothing_is_lost_while_etcd_is_away_beyond_a_lease(failing: Cluster, apart: Apart) -> None:
    holder, here, there = apart
    claim_exclusively(here)
    (member,) = failing.etcd.members
    member.pause()
    before, made = deferred(holder), 0
    back = threading.Timer(3 * failing.plan.lease_ttl_s, member.resume)
    back.start()
    while back.is_alive():
        (here / f"{made:04}").touch()
        made += 1
    assert deferred(holder) > before
    for folder in (here, there):
        assert sorted(os.listdir(folder)) == [f"{number:04}" for number in range(made)]
    assert "are lost" not in holder.log.read_text()


def test_changes_of_a_mount_that_was_cut_off_are_lost_if_others_changed_the_same(
    failing: Cluster, apart: Apart
) -> None:
    holder, here, there = apart
    (here / "old").write_bytes(b"content")
    (here / "changed").write_bytes(b"content")
    claim_exclusively(here)
    failing.isolate(holder)
    (here / "old").unlink()
    (here / "changed").chmod(0o600)
    (here / "new").touch()
    assert sorted(os.listdir(there)) == ["changed", "old"]
    (there / "other").touch()
    (there / "changed").chmod(0o644)
    failing.heal_all()
    eventually(lambda: "are lost" in holder.log.read_text(), "it is told")
    eventually(lambda: sorted(os.listdir(here)) == ["changed", "old", "other"], "the tree is right")
    assert (here / "old").read_bytes() == b"content"
    assert stat.S_IMODE((here / "changed").stat().st_mode) == 0o644
    with fails_with(errno.EIO):
        fsync(here)
    fsync(here)
    claim_exclusively(here)
    (here / "new").touch()
    assert (there / "new").exists()


def test_what_was_stored_although_no_answer_came_is_not_taken_for_a_change_of_others() -> None:
    plan = Plan(nodes=1, replicas=1, lease_ttl_s=3, mount_config={"timeout": 4})
    with Cluster(plan, links=True) as cluster:
        holder, here, there = cluster.mounts[0], *(mount.path for mount in cluster.mounts)
        for number in range(4):
            (here / f"{number}").touch()
        assert len(os.listdir(there)) == 4
        claim_exclusively(here)
        fsync(here)
        before = cluster.key_count()
        with (here / "0").open("rb") as file:
            cluster.cut(cluster.etcd.members[0], holder, one_way=True)
            (here / "0").unlink()
            (here / "1").unlink()
            with pytest.raises(TimeoutError), beside(lambda: os.fsync(file)):
                eventually(lambda: cluster.key_count() < before, "they are stored")
                (here / "2").unlink()
                (here / "3").unlink()
                assert sorted(os.listdir(there)) == ["2", "3"]
                (there / "0").touch()
            cluster.heal_all()
            eventually(lambda: os.listdir(there) == ["0"], "the others are stored")
        assert "are lost" not in holder.log.read_text()
        fsync(here)
        assert os.listdir(here) == ["0"]


def test_a_mount_that_comes_back_shows_what_others_made_of_its_lost_changes(
    failing: Cluster, apart: Apart
) -> None:
    holder, here, there = apart
    (here / "name").write_bytes(b"content")
    (here / "folder").mkdir()
    for directory in (here, here / "folder"):
        claim_exclusively(directory)
    failing.isolate(holder)
    (here / "name").unlink()
    (here / "folder/new").touch()
    (there / "name").write_bytes(b"of the other")
    (there / "folder").rmdir()
    failing.heal_all()
    assert (here / "name").read_bytes() == b"of the other"
    assert not can_be_opened(here / "folder")
    for folder in (here, there):
        assert os.listdir(folder) == ["name"]
    with fails_with(errno.EIO):
        (here / "folder").mkdir()
    (here / "folder").mkdir()


def test_lost_changes_bring_no_removed_file_back(failing: Cluster, apart: Apart) -> None:
    holder, here, there = apart
    (here / "file").write_bytes(b"content")
    claim_exclusively(here)
    with (here / "file").open("rb") as file:
        failing.isolate(holder)
        (here / "file").chmod(0o600)
        (there / "file").unlink()
        failing.heal_all()
        eventually(lambda: "file" not in os.listdir(here), "it is gone")
        with fails_with(errno.EIO):
            (here / "other").touch()
        os.fchmod(file.fileno(), 0o640)
        status = os.fstat(file.fileno())
        assert (status.st_nlink, stat.S_IMODE(status.st_mode)) == (0, 0o640)
        assert file.read() == b"content"
    with pytest.raises(KeyError):
        failing.value(inode_key(status.st_ino))


def test_a_directory_takes_the_name_of_a_dead_host(failing: Cluster, apart: Apart) -> None:
    """Nobody saw that: its file had no version."""
    holder, here, there = apart
    with Process() as writer:
        writer.do("files = [open(f'{path}/{name}', 'wb') for name in 'ab']", path=str(here))
        for name in "ab":
            with fails_with(errno.EEXIST):
                (there / name).mkdir()
        failing.lose(holder)
    claim_exclusively(there)
    (there / "a").mkdir()
    fsync(there)
    (there / "a").rename(there / "b")
    assert os.listdir(there) == ["b"]


def test_a_directory_that_another_host_uses_is_not_removed(failing: Cluster, apart: Apart) -> None:
    holder, here, there = apart
    for directory in (here, here / "used", here / "unused"):
        directory.mkdir(exist_ok=True)
        claim_exclusively(directory)
    failing.isolate(holder)
    for name in ("used", "unused"):
        (here / name).rmdir()
    (here / "made").mkdir()
    (there / "used/file").write_bytes(b"content")
    failing.heal_all()
    eventually(lambda: "are lost" in holder.log.read_text(), "it is told")
    for folder in (here, there):
        eventually(lambda: (folder / "used/file").exists(), "the tree is right")  # noqa: B023
        assert (folder / "used/file").read_bytes() == b"content"
        assert (folder / "used").stat().st_nlink == 2
    with fails_with(errno.EIO):
        fsync(here)
    (here / "used/file").unlink()
    (here / "used").rmdir()


def test_directories_of_a_mount_cut_off_are_stored_later(failing: Cluster, apart: Apart) -> None:
    holder, here, there = apart
    # The first one may have to wait for long; a claim that is not used meanwhile is given up.
    claim_exclusively(here)
    for number in range(5):
        (here / f"old{number}").mkdir()
        claim_exclusively(here / f"old{number}")
    failing.isolate(holder)
    for number in range(5):
        (here / f"new{number}").mkdir()
        (here / f"old{number}").rmdir()
    assert len(os.listdir(there)) == 5
    (there / "other").touch()
    failing.heal_all()
    expected = ["new0", "new1", "new2", "new3", "new4", "other"]
    eventually(lambda: sorted(os.listdir(there)) == expected, "all are stored")
    assert sorted(os.listdir(here)) == expected
    assert "are lost" not in holder.log.read_text()
    (here / "new0/file").write_bytes(b"content")
    assert (there / "new0/file").read_bytes() == b"content"


async def stored_at(cluster: Cluster, directory: int) -> list[int]:
    """Return the revisions at which etcd got the names in a directory, in the order of these."""
    async with cluster.engine("mount") as engine:
        found = await engine.range(name_key(directory, b""), name_key(directory + 1, b""))
        return [record.mod_revision for record in found]


def test_a_mount_whose_claim_others_deleted_stores_all_in_order_and_defers_nothing_more() -> None:
    """As they do if it has not answered for a lease's length, though its session lives."""
    with Cluster(Plan(nodes=1, mounts=2, replicas=1, namespaces=False)) as cluster:
        holder, here, there = cluster.mounts[0], *(one.path / "lost" for one in cluster.mounts)
        directories = here.with_name("held"), here
        for directory in directories:
            directory.mkdir()
            claim_exclusively(directory)
        for number in range(50):
            for directory in directories:
                (directory / f"{number:02}").touch()
        cluster.put([Delete(claim_key(here.stat().st_ino))])
        assert sorted(os.listdir(here)) == [f"{number:02}" for number in range(50)]
        eventually(lambda: sorted(os.listdir(there)) == sorted(os.listdir(here)), "all are stored")
        fsync(here)
        revisions = [trio.run(stored_at, cluster, one.stat().st_ino) for one in directories]
        assert [*chain(*zip(*revisions, strict=True))] == sorted(chain(*revisions))
        before = deferred(holder)
        for number in range(50):
            (here / f"{number:02}").unlink()
        assert deferred(holder) == before
        assert not os.listdir(there)


def test_a_holder_that_answered_while_who_looked_did_not_run_is_asked_again(
    failing: Cluster, apart: Apart
) -> None:
    """A busy machine runs neither for a while: the time that a holder has is up when its answer is read."""
    holder, here, there = apart
    other, ttl_s = failing.mounts[1], failing.plan.lease_ttl_s
    claim_exclusively(here)
    (here / "file").touch()
    holder.pause()
    asked = time.monotonic()
    with beside(lambda: os.listdir(there)):
        time.sleep(0.6 * ttl_s)
        other.pause()
        holder.resume()
        time.sleep(max(0.0, asked + 1.1 * ttl_s - time.monotonic()))
        other.resume()
    (here / "next").mkdir()
    claim_exclusively(here / "next")
    for number in range(20):
        (here / "next" / f"{number}").touch()
        assert (there / "next" / f"{number}").exists()


def test_nothing_is_deferred_with_dirsync(cluster: Cluster, here: Path) -> None:
    mount = cluster.add_mount("-o", "dirsync")
    for number in range(20):
        (mount.path / here.name / f"{number}").touch()
    assert not deferred(mount)
