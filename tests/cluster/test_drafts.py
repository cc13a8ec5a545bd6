"""Drafts: directories whose new files are closed at once, and stored a moment later, many together."""

import errno
import fcntl
import os
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path

import pytest
from harness.beside import beside
from harness.claims import claim, claimed, few_transactions, often, transactions
from harness.cluster_mount import OneNodeMount
from harness.clusters import Apart, Cluster, Plan, counters, status_at
from harness.errors import fails_with
from harness.mountpoint import eventually
from harness.patterns import pattern
from harness.processes import Process
from harness.seeds import seeded

from irdmafs.client import _drafts, draft

FILES = 200
MIB = 1 << 20


@pytest.fixture(autouse=True)
def patterns(request: pytest.FixtureRequest) -> None:
    for directory in {"here", "apart"}.intersection(request.fixturenames):
        found = request.getfixturevalue(directory)
        os.setxattr(
            found if isinstance(found, Path) else found[1], "user.irdmafs.drafts", b"*.tmp x"
        )


def contents(directory: Path) -> dict[str, bytes]:
    return {name: (directory / name).read_bytes() for name in os.listdir(directory)}


def written(directory: Path, count: int, size: int = 1000) -> dict[str, bytes]:
    """Make files in a directory, and return their contents."""
    made = {f"{number:03}": pattern(number, size) for number in range(count)}
    for name, data in made.items():
        (directory / name).write_bytes(data)
    return made


def waiting(place: Path) -> int:
    """Return how many files of a mount are closed and not stored yet."""
    return int(status_at(place)["files_to_store"])


@pytest.mark.parametrize("followed", [False, True])
def test_many_files_cost_few_commits_and_messages(here: Path, there: Path, followed: bool) -> None:
    """`followed`: by a host that looks often for what is to come."""
    if followed:
        often(lambda: (there / "final").exists())
        eventually(lambda: counters(there)["followed_directories"], "it follows the directory")
    before = counters(here)["round_trips"]
    with few_transactions(here, FILES // 6):  # of twice as many files
        (here / "files.tmp" / "below").mkdir(parents=True)
        made = written(here / "files.tmp", FILES)
        below = written(here / "files.tmp" / "below", FILES)
        (here / "files.tmp").rename(here / "final")
    assert counters(here)["round_trips"] - before < FILES * 2
    assert contents(there / "final" / "below") == below
    (there / "final" / "below").rename(there / "moved")
    assert contents(there / "final") == made


@pytest.mark.parametrize(
    ("where", "count", "most"),
    [
        ("alone", 20, 2),
        ("followed", 20, 2),
        ("replaces", 20, 2),
        ("alone", 1000, 3),
        ("alone", 2000, 5),
    ],
)
def test_a_draft_of_the_client_takes_few_transactions(
    here: Path, there: Path, where: str, count: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for the directory, one for its files and its name, and others for each 500 files before; removing
    what it replaces takes others. The mount may have others to do meanwhile, as for claims: the draft that
    cost the fewest tells."""
    monkeypatch.setattr(_drafts, "remove", lambda path: None)
    costs = [most + 1]
    if where == "followed":
        often(lambda: (there / "final").exists())
        eventually(lambda: counters(there)["followed_directories"], "it follows the directory")
    while min(costs) > most and len(costs) <= 5:
        final = "final" if where == "replaces" else f"final{len(costs)}"
        before = transactions(here)
        with draft(here / final) as path:
            made = written(Path(path), count - 1)
            made["empty"] = b""
            Path(path, "empty").touch()
        costs.append(transactions(here) - before)
        assert contents(there / final) == made
    assert min(costs) <= most, costs


def test_a_draft_by_its_name_is_stored_when_it_gets_another_one(here: Path, there: Path) -> None:
    """Others a while after their files are closed; of these, one that comes from there."""
    named, other = here / ".draft-a", here / "a.tmp"
    for directory in (named, other):
        directory.mkdir()
    made = written(named, 5)
    (named / "moved").write_bytes(b"moved")
    (named / "moved").rename(other / "moved")
    (other / "file").write_bytes(b"file")
    eventually(lambda: waiting(here) == len(made), "the others are stored")
    (named / "removed").touch()
    (named / "removed").unlink()
    eventually(lambda: waiting(here) == len(made), "nothing waits that is removed")
    named.rename(here / "a")
    assert waiting(here) == 0 and contents(there / "a") == made


@pytest.mark.parametrize("is_open", [False, True])
def test_a_published_draft_is_claimed_only_while_others_do_not_know_its_files(
    here: Path, there: Path, is_open: bool
) -> None:
    (here / "a.tmp").mkdir()
    (here / "a.tmp" / "file").write_bytes(b"file")
    with ExitStack() as ending:
        if is_open:
            ending.enter_context((here / "a.tmp" / "open").open("wb"))
        before = claimed(here)
        (here / "a.tmp").rename(here / "a")
        assert claimed(here) == before - (not is_open)
        if is_open:
            with fails_with(errno.EEXIST):
                (there / "a" / "open").open("xb")


def test_a_draft_gets_a_name_where_another_host_makes_files(here: Path, there: Path) -> None:
    """Which first gives up the claim that it has there."""
    (there / "other").mkdir()
    claim(there / "other")
    (here / "a.tmp").mkdir()
    made = written(here / "a.tmp", 20)
    (here / "a.tmp").rename(here / "other" / "final")
    assert contents(there / "other" / "final") == made


def test_each_closed_file_is_seen_by_every_look_of_another_host(here: Path, there: Path) -> None:
    (here / "a.tmp").mkdir()
    for number in range(20):
        name, data = f"{number}", pattern(number, 1 + 5_000 * number)
        (here / "a.tmp" / name).write_bytes(data)
        if number % 3:
            assert (there / "a.tmp" / name).read_bytes() == data
        else:
            assert contents(there / "a.tmp")[name] == data


def test_others_see_what_was_closed_while_any_look_waits(here: Path, there: Path) -> None:
    """Each change is one that a tmpfs would have had, too, when it returned."""
    chooser, (here_now, model) = seeded(), (here / "random.tmp", dict[str, bytes]())
    here_now.mkdir()
    for step in range(300):
        name, other = (f"{chooser.randrange(12)}" for _ in range(2))
        data = pattern(step, chooser.choice((1, 1000, 70_000, 200_000)))
        match chooser.randrange(8):
            case 0 | 1 | 2:
                (here_now / name).write_bytes(data)
                model[name] = data
            case 3:
                with (here_now / name).open("ab") as file:
                    file.write(data)
                model[name] = model.get(name, b"") + data
            case 4 if name in model:
                (here_now / name).rename(here_now / other)
                model[other] = model.pop(name)
            case 5 if name in model:
                (here_now / name).unlink()
                del model[name]
            case 6 if name in model:
                os.truncate(here_now / name, 10)
                model[name] = model[name][:10].ljust(10, b"\0")
            case 7:
                assert contents(chooser.choice((here, there)) / "random.tmp") == model
    here_now.rename(here / "random")
    assert contents(there / "random") == model


def test_a_reader_keeps_what_it_opened_before_it_was_stored(
    here: Path, reader: Process, writer: Process
) -> None:
    file = here / "a.tmp" / "file"
    file.parent.mkdir()
    file.write_bytes(b"closed")
    reader.do("file = open(path, 'rb')", path=str(file))
    writer.do("open(file, 'wb').write(b'new')", file=str(file))
    assert reader.do("file.read()") == b"closed"
    assert file.read_bytes() == b"new"


def test_what_is_synced_is_seen_and_stays_while_its_writer_goes_on(here: Path, there: Path) -> None:
    (here / "a.tmp").mkdir()
    with (here / "a.tmp" / "file").open("wb") as file:
        file.write(b"synced")
        file.flush()
        os.fsync(file.fileno())
        assert (there / "a.tmp" / "file").read_bytes() == b"synced"
        file.write(b", and closed")
    assert (there / "a.tmp" / "file").read_bytes() == b"synced, and closed"


def test_a_file_that_is_locked_is_stored(here: Path, there: Path) -> None:
    (here / "a.tmp").mkdir()
    (here / "a.tmp" / "file").write_bytes(b"content")
    with (here / "a.tmp" / "file").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        with (there / "a.tmp" / "file").open("r+b") as other:
            assert other.read() == b"content"
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_file_that_leaves_the_draft_or_gets_a_new_name_is_stored(here: Path, there: Path) -> None:
    (here / "a.tmp").mkdir()
    for number in range(3):
        (here / "a.tmp" / f"{number}").write_bytes(b"%d" % number)
    (here / "a.tmp" / "0").rename(here / "0")
    os.link(here / "a.tmp" / "1", here / "1")
    (here / "a.tmp" / "2").rename(here / "a.tmp" / "3")
    assert ((there / "0").read_bytes(), (there / "1").read_bytes()) == (b"0", b"1")
    assert contents(there / "a.tmp") == {"1": b"1", "3": b"2"}


def test_a_draft_that_is_removed_leaves_nothing(here: Path, there: Path) -> None:
    (here / "a.tmp").mkdir()
    written(here / "a.tmp", 20)
    for path in (here / "a.tmp").iterdir():
        path.unlink()
    (here / "a.tmp").rmdir()
    eventually(lambda: not waiting(here), "nothing waits to be stored")
    assert os.listdir(there) == []


def test_nothing_is_put_off_below_a_quota(here: Path, there: Path) -> None:
    """But in other drafts."""
    (here / "limited").mkdir()
    os.setxattr(here / "limited", "user.irdmafs.quota_bytes", b"100k")
    for directory, stored in ((here / "limited" / "a.tmp", True), (here / "b.tmp", False)):
        directory.mkdir()
        before = counters(here)["transactions"]
        written(directory, 15)
        assert (counters(here)["transactions"] - before >= 15) is stored
    with fails_with(errno.EDQUOT):
        written(here / "limited" / "a.tmp", 40)


def test_times_stay_while_files_are_stored(here: Path) -> None:
    (here / "a.tmp").mkdir()
    written(here / "a.tmp", 250, 100_000)
    before = {file: file.stat().st_ctime_ns for file in (here / "a.tmp").iterdir()}
    while waiting(here):
        assert {file: file.stat().st_ctime_ns for file in before} == before


def test_a_pattern_is_of_names(here: Path) -> None:
    for wrong in (b"", b" ", b"a/b", b"*.tmp " * 50):
        with fails_with(errno.EINVAL):
            os.setxattr(here, "user.irdmafs.drafts", wrong)


# -- files that wait for a rename ---------------------------------------------------------------------


def replace(path: Path, data: bytes) -> None:
    """Write a file anew, which the rename of a directory above publishes."""
    with path.open("wb") as file:
        os.setxattr(file.fileno(), "user.irdmafs.with_rename", b"1")
        file.write(data)


def test_files_written_anew_are_published_by_the_rename_in_its_transaction(
    here: Path, there: Path
) -> None:
    """And not before, whoever looks."""
    os.setxattr(here, "user.irdmafs.follow", b"off")
    (here / "a" / "below").mkdir(parents=True)
    names = ("small", "large", "below/file", "new")
    made = {name: pattern(number, 1 + 100_000 * number) for number, name in enumerate(names)}
    for name in names[:3]:
        (here / "a" / name).write_bytes(b"before")
    for name, data in made.items():
        replace(here / "a" / name, data)
    assert waiting(here) == len(names)
    for path in [path / "a" / name for path in (here, there) for name in names[:3]]:
        assert path.read_bytes() == b"before"
    before = transactions(here)
    (here / "a").rename(here / "b")
    assert transactions(here) == before + 1
    for path in (here, there):
        assert {name: (path / "b" / name).read_bytes() for name in names} == made
    with (here / "b" / "new").open("rb") as reading, fails_with(errno.EBUSY):
        os.setxattr(reading.fileno(), "user.irdmafs.with_rename", b"1")


def test_other_writers_and_removals_of_a_file_do_not_wait_for_a_rename(
    here: Path, there: Path
) -> None:
    (here / "a").mkdir()
    for name in ("file", "removed"):
        (here / "a" / name).write_bytes(b"before")
    with (here / "a" / "file").open("wb") as other:
        replace(here / "a" / "file", b"waits")
        os.setxattr(other.fileno(), "user.irdmafs.with_rename", b"1")
        other.write(b"other")
    assert contents(there / "a")["file"] == b"other"
    with (here / "a" / "file").open("ab") as file:
        assert contents(there / "a")["file"] == b"waits"
        file.write(b", appended")
    replace(here / "a" / "removed", b"waits")
    (there / "a" / "removed").unlink()
    eventually(lambda: not waiting(here), "nothing waits that is removed")
    (here / "a").rename(here / "b")
    assert contents(there / "b") == {"file": b"waits, appended"}


# -- when a host dies --------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["rename", "umount", "unlocking"])
def test_what_was_closed_before_it_survives(failing: Cluster, apart: Apart, by: str) -> None:
    holder, here, there = apart
    (here / "lock").write_bytes(b"")
    (here / "a.tmp").mkdir()
    with (here / "lock").open("r+b") as lock, (there / "lock").open("r+b") as other:
        if by == "unlocking":
            fcntl.flock(lock, fcntl.LOCK_EX)
        made = written(here / "a.tmp", 50)
        if by == "rename":
            (here / "a.tmp").rename(here / "final")
        elif by == "unlocking":
            fcntl.flock(lock, fcntl.LOCK_UN)
            fcntl.flock(other, fcntl.LOCK_EX)
    if by == "umount":
        holder.terminate()
    else:
        failing.lose(holder)
    assert contents(there / ("final" if by == "rename" else "a.tmp")) == made


def test_large_files_are_sent_before_they_are_named() -> None:
    """And again if they are changed; and given up if they are removed."""
    with Cluster(Plan(nodes=2, lease_ttl_s=60)) as cluster:
        one, other = (mount.path for mount in cluster.mounts)
        os.setxattr(one, "user.irdmafs.drafts", b"*.tmp")
        (one / "first").write_bytes(b"x")  # there are placement groups from now on
        (one / "a.tmp").mkdir()
        (one / "a.tmp" / "small").write_bytes(b"")

        def stored() -> set[int]:
            return {node.stored_bytes() for node in cluster.nodes}

        (etcd,) = cluster.etcd.members
        etcd.pause()
        made = {"small": b"", **written(one / "a.tmp", 4, 200_000)}
        eventually(lambda: stored() == {800_001}, "each node has all of them")
        etcd.resume()
        (one / "a.tmp").rename(one / "a")
        assert contents(other / "a") == made

        (one / "b.tmp").mkdir()
        made = written(one / "b.tmp", 40, 100_000)
        for name in [*made]:
            match int(name) % 4:
                case 0:
                    (one / "b.tmp" / name).unlink()
                    del made[name]
                case 1:
                    os.truncate(one / "b.tmp" / name, 70_000)
                    made[name] = made[name][:70_000]
                case 2:
                    os.utime(one / "b.tmp" / name, (1, 1))
        (one / "b.tmp").rename(one / "b")
        assert contents(other / "b") == made
        left = 800_001 + sum(map(len, made.values()))
        eventually(lambda: stored() == {left}, "nodes keep nothing else")


def test_a_host_that_dies_leaves_whole_files_or_none(failing: Cluster, apart: Apart) -> None:
    holder, here, there = apart
    (here / "a.tmp").mkdir()
    made = written(here / "a.tmp", 300)
    failing.lose(holder)
    left = contents(there / "a.tmp")
    assert left.items() <= made.items()


def test_what_waits_leaves_room_for_what_is_being_written() -> None:
    """As without a draft: what is stored may leave the cache."""
    with OneNodeMount(store_size="64M") as mount:
        os.setxattr(mount.path, "user.irdmafs.drafts", b"*.tmp")
        (mount.path / "a.tmp").mkdir()
        made = written(mount.path / "a.tmp", 20, 4 * MIB)
        (mount.path / "a.tmp").rename(mount.path / "a")
        assert contents(mount.path / "a") == made


def test_a_rename_fails_until_what_is_in_the_draft_can_be_stored() -> None:
    with Cluster(Plan(nodes=2, store_bytes=48 * MIB, cache_bytes=256 * MIB)) as cluster:
        one, other = (mount.path for mount in cluster.mounts)
        os.setxattr(one, "user.irdmafs.drafts", b"*.tmp")
        (one / "a.tmp").mkdir()
        made = written(one / "a.tmp", 16, 8 * MIB)
        with fails_with(errno.ENOSPC):
            (one / "a.tmp").rename(one / "final")
        assert contents(one / "a.tmp") == made
        assert os.listdir(other) == ["a.tmp"]
        for name in [*made][3:]:
            (one / "a.tmp" / name).unlink()
            del made[name]

        def is_renamed() -> bool:
            try:
                (one / "a.tmp").rename(one / "final")
            except OSError as error:
                assert error.errno == errno.ENOSPC
                return False
            return True

        eventually(is_renamed, "there is room again", 20)
        assert contents(other / "final") == made


def let_go(fd: int) -> None:
    with suppress(TimeoutError):  # it is just tried to store the file
        os.close(fd)


@pytest.mark.parametrize("are_open", [False, True])
def test_files_that_no_node_can_take_are_waited_for_together(*, are_open: bool) -> None:
    with OneNodeMount(("--timeout", "1s", "--log-level", "info")) as mount, ExitStack() as ending:
        os.setxattr(mount.path, "user.irdmafs.drafts", b"*.tmp")
        (mount.path / "a.tmp").mkdir()
        (mount.path / "first").write_bytes(b"has the placement groups made")
        mount.kill_node()
        for number in range(40):
            fd = os.open(mount.path / f"a.tmp/{number}", os.O_CREAT | os.O_WRONLY)
            ending.callback(let_go, fd)
            os.write(fd, b"content")
            with suppress(TimeoutError):
                os.fsync(fd)
        if not are_open:
            ending.close()
        with pytest.raises(TimeoutError):
            (mount.path / "a.tmp").rename(mount.path / "final")
        assert mount.log_tail(1_000_000).count("another way is looked for") < 20


# -- by the client -----------------------------------------------------------------------------------


def test_a_directory_appears_whole_and_replaces_another(here: Path, there: Path) -> None:
    for version in range(2):
        with draft(here / "model") as directory:
            made = written(Path(directory), 3 + version)
            assert (
                len(os.listdir(there / "model")) == 3 if version else not (there / "model").exists()
            )
        assert contents(there / "model") == made
    with pytest.raises(ZeroDivisionError), draft(here / "model") as directory:
        written(Path(directory), 1)
        raise ZeroDivisionError
    assert contents(there / "model") == made
    assert os.listdir(there) == ["model"]
    with draft(here / ("n" * 255)):
        pass
    assert (there / ("n" * 255)).is_dir()


@pytest.mark.parametrize("path", ["", ".", "..", "other/.."])
def test_a_path_needs_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    here = tmp_path / "above" / "here"
    (here / "other").mkdir(parents=True)
    monkeypatch.chdir(here)
    with fails_with(errno.EINVAL), draft(path):
        pass
    assert os.listdir(here) == ["other"]


# -- when etcd does not answer -----------------------------------------------------------------------


def is_there(cluster: Cluster, name: str) -> bool:
    """Return whether there is such a name in any directory of a cluster, as etcd has it."""
    return any(key.endswith(name.encode()) for key in cluster.etcd.get(cluster._prefix("d")))


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("lost", ["answer", "request"])
def test_a_draft_is_published_whole_or_stays_if_etcd_is_cut_off(
    lost: str, *, is_late: bool
) -> None:
    """While it is renamed. `is_late`: until the mount has given up, once for all files."""
    with Cluster(Plan(nodes=1, mounts=1, replicas=1, lease_ttl_s=60)) as cluster:
        mount = cluster.add_mount("--timeout", "3s" if is_late else "60s", "--log-level", "info")
        there, (etcd,) = cluster.mounts[0].path, cluster.etcd.members
        place, final = mount.path / ".draft-a", mount.path / "final"
        final.mkdir()
        place.mkdir()
        made = written(place, 50)

        def publish() -> None:
            place.rename(final)

        cluster.cut(etcd, mount, one_way=lost == "answer")
        with fails_with(errno.ETIMEDOUT) if is_late else nullcontext(), beside(publish) as renaming:
            if lost == "answer":
                eventually(lambda: not is_there(cluster, place.name), "etcd has carried it out")
            if not is_late:
                assert not renaming.done()
                cluster.heal(etcd, mount)
        assert "one by one" not in mount.log_tail(1_000_000)
        cluster.heal(etcd, mount)
        if is_late and lost == "request":
            assert contents(there / "final") == {} and contents(place) == made
            publish()
        assert contents(there / "final") == made
        eventually(lambda: not place.exists(), "the mount sees it, too")
        eventually(lambda: not waiting(mount.path), "all is known to be stored")
        assert contents(final) == contents(there / "final") == made
        assert sorted(os.listdir(there)) == ["final"]
