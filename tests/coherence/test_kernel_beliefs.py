"""What a host's kernel believes of a cluster's tree without asking, and that it is never what is over.

`one` and `other` are a directory as two hosts see it. The other host follows it, so its kernel answers
stat by itself (that of `there` does if it is asked often); what a program on the first host was told to
have happened, the other one sees at once.
"""

import contextlib
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import make_mount
from harness.claims import often
from harness.clusters import Cluster, ClusterMount, Plan, counters, status_at
from harness.daemons import paused
from harness.mountpoint import Mount, eventually
from harness.processes import TakeProcess
from harness.scratch import mounted_on

ROUNDS = 12
# Longer than a busy machine stops a host, and yet to be waited for once.
PLAN = Plan(nodes=1, replicas=1, mounts=3, lease_ttl_s=8)


@pytest.fixture(scope="module")
def follower(cluster: Cluster) -> ClusterMount:
    return cluster.add_mount("--follow", "/")


@pytest.fixture
def two(cluster: Cluster, follower: ClusterMount, request: pytest.FixtureRequest) -> list[Path]:
    name = re.sub(r"\W+", "_", request.node.name)
    (cluster.mounts[0].path / name).mkdir()
    return [mount.path / name for mount in (cluster.mounts[0], follower)]


class Requests:
    """Requests to the daemon of a path, and what it told its kernel, since this was made. Asking for them
    does not count."""

    def __init__(self, path: Path) -> None:
        self._path = path
        first = Counter(status_at(path)["requests"])
        self._before = status_at(path)
        before = Counter(self._before["requests"])
        self._expected = before + (before - first)

    def count(self, *kinds: str) -> int:
        now = status_at(self._path)["requests"]
        return sum(now.get(kind, 0) - self._expected[kind] for kind in kinds)

    def told(self) -> int:
        now, before = status_at(self._path), self._before
        return sum(int(now[key]) - int(before[key]) for key in ("epochs", "inodes_told"))


def believe(path: Path) -> None:
    """Look at a file until the kernel answers by itself."""

    def is_believed() -> bool:
        often(lambda: os.stat(path))
        requests = Requests(path)
        os.stat(path)
        return not requests.count("LOOKUP", "GETATTR")

    eventually(is_believed, f"{path} is believed")


@pytest.fixture
def believing(two: list[Path], follower: ClusterMount) -> list[Path]:
    """The two directories, when the follower's kernel believes what it knows there."""
    one, other = two
    (one / "kept").touch()
    believe(other / "kept")
    return two


def exists(path: Path) -> bool:
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    return True


# -- what it saves


def test_stat_asks_nobody_and_a_warm_open_is_one_request_and_no_question_to_etcd(
    here: Path, there: Path
) -> None:
    (here / "file").write_bytes(b"x")
    (there / "file").read_bytes()
    believe(there / "file")
    barriers = counters(there)["barriers"]
    requests = Requests(there)
    for _ in range(100):
        os.stat(there / "file")
        os.close(os.open(there / "file", os.O_RDONLY))
    assert requests.count("OPEN") == 100
    assert requests.count("LOOKUP", "GETATTR") < 20  # every few seconds
    assert counters(there)["barriers"] == barriers


def test_listing_many_files_with_attributes_takes_few_requests(here: Path, there: Path) -> None:
    for i in range(500):
        (here / f"file{i}").touch()
    believe(there / "file0")
    requests = Requests(there)
    with os.scandir(there) as entries:
        assert sum(stat.S_ISREG(entry.stat().st_mode) for entry in entries) == 500
    assert requests.count("LOOKUP", "GETATTR") < 20
    assert requests.count("READDIRPLUS", "READDIR") < 20
    requests = Requests(there)
    for i in range(500):
        os.stat(there / f"file{i}")
    assert requests.count("LOOKUP", "GETATTR") < 250


def test_listing_a_directory_for_the_first_time_looks_few_names_up(
    cluster: Cluster, here: Path, there: Path
) -> None:
    maker = cluster.add_mount("-o", "sync").path / here.name  # who looks has nothing to recall
    (maker / "made").mkdir()
    for i in range(1500):
        (maker / "made" / f"file{i}").touch()
    requests = Requests(there)
    with os.scandir(there / "made") as entries:
        assert sum(stat.S_ISREG(entry.stat().st_mode) for entry in entries) == 1500
    assert requests.count("LOOKUP", "GETATTR") < 700  # one page while the directory is followed


# -- that it is never what is over


def test_listing_again_what_kernel_knows_shows_what_others_changed(believing: list[Path]) -> None:
    one, other = believing

    def sizes(path: Path) -> dict[str, int]:
        with os.scandir(path) as entries:
            return {entry.name: entry.stat().st_size for entry in entries}

    for i in range(100 + ROUNDS):
        (one / f"file{i}").touch()
    for i in range(ROUNDS):
        for _ in range(3):
            assert sizes(other) == sizes(one)
        (one / f"file{i}").write_bytes(bytes(i + 1))
        (one / f"file{i + 100}").unlink()
        os.replace(one / f"file{i + 1}", one / f"file{i + 2}")
        (one / f"file{i + 1}").touch()


@pytest.mark.parametrize(
    ("make", "remove"),
    [(Path.touch, Path.unlink), (Path.mkdir, Path.rmdir)],
    ids=["file", "directory"],
)
@pytest.mark.parametrize("name", ["file", "file{}"], ids=["one name", "many names"])
def test_what_is_removed_is_gone_at_once(
    believing: list[Path], make: Callable[[Path], None], remove: Callable[[Path], None], name: str
) -> None:
    requests = Requests(believing[1])
    for i in range(ROUNDS):
        here, there = (directory / name.format(i) for directory in believing)
        make(here)
        os.stat(there)
        remove(here)
        assert not exists(there)
        assert there.name not in os.listdir(there.parent)
        with pytest.raises(FileNotFoundError):
            os.open(there, os.O_RDONLY)
    assert requests.told() >= ROUNDS


def test_a_renamed_file_is_where_it_was_put_at_once(two: list[Path]) -> None:
    one, other = two
    (one / "file0").write_bytes(b"x")
    believe(other / "file0")
    for i in range(ROUNDS):
        ino = os.stat(other / f"file{i}").st_ino
        (one / f"file{i}").rename(one / f"file{i + 1}")
        assert not exists(other / f"file{i}")
        assert os.stat(other / f"file{i + 1}").st_ino == ino


@pytest.mark.parametrize("written", ["file", "new"], ids=["published", "renamed"])
def test_a_new_version_shows_at_once(two: list[Path], written: str) -> None:
    one, other = two
    (one / "file").write_bytes(b"")
    believe(other / "file")
    requests = Requests(other)
    for i in range(1, ROUNDS):
        os.stat(other / "file")
        (one / written).write_bytes(b"x" * i)
        (one / written).rename(one / "file")
        assert os.stat(other / "file").st_size == i
        fd = os.open(other / "file", os.O_RDONLY)
        assert os.fstat(fd).st_size == i
        assert os.read(fd, 1000) == b"x" * i
        os.close(fd)
    assert requests.told() >= ROUNDS - 1


def test_changed_attributes_show_at_once(two: list[Path]) -> None:
    one, other = two
    (one / "file").write_bytes(b"x")
    believe(other / "file")
    fd = os.open(other / "file", os.O_RDONLY)
    for i in range(ROUNDS):
        os.stat(other / "file")
        (one / "file").chmod(0o600 + i % 8)
        assert os.stat(other / "file").st_mode & 0o777 == 0o600 + i % 8
        assert os.fstat(fd).st_mode & 0o777 == 0o600 + i % 8
        os.utime(one / "file", ns=(i, i))
        assert os.stat(other / "file").st_mtime_ns == i
    os.close(fd)


def test_a_created_file_is_found_and_listed_at_once(believing: list[Path]) -> None:
    one, other = believing
    for i in range(ROUNDS):
        assert not exists(other / f"file{i}")
        modified = os.stat(other).st_mtime_ns
        (one / f"file{i}").touch()
        assert exists(other / f"file{i}")
        assert os.stat(other).st_mtime_ns != modified
        assert len(os.listdir(other)) == i + 2


def test_attributes_of_a_file_show_by_all_its_names(two: list[Path]) -> None:
    one, other = two
    for name in ("a", "b"):
        (one / name).mkdir()
    (one / "a/file").write_bytes(b"x")
    os.link(one / "a/file", one / "b/file")
    for i in range(ROUNDS):
        believe(other / "a/file") if i == 0 else os.stat(other / "a/file")
        os.stat(other / "b/file")
        (one / "b/file").write_bytes(b"x" * i)
        assert os.stat(other / "a/file").st_size == os.stat(other / "b/file").st_size == i
        (one / "a/file").chmod(0o600 + i % 8)
        assert os.stat(other / "b/file").st_mode & 0o777 == 0o600 + i % 8
        os.link(one / "a/file", one / "a/third")
        assert os.stat(other / "b/file").st_nlink == 3
        (one / "a/third").unlink()
        assert os.stat(other / "b/file").st_nlink == 2


def test_a_moved_directory_takes_all_below_along(cluster: Cluster, here: Path, there: Path) -> None:
    """Where it goes nobody follows it, so that who changes something there waits for nobody."""
    third = cluster.mounts[2].path
    (here / "followed").mkdir()
    for i in range(ROUNDS // 3):
        away = f"{here.name}-{i}"
        (here / "followed/moved/below").mkdir(parents=True)
        (here / "followed/moved/below/file").touch()
        believe(there / "followed/moved/below/file")
        (here / "followed/moved").rename(here.parent / away)
        assert not exists(there / "followed/moved/below/file")
        assert exists(there.parent / away / "below/file")
        (third / away / "below/file").rename(third / away / "below/again")
        with pytest.raises(FileNotFoundError):
            os.open(there.parent / away / "below/file", os.O_RDONLY)
        os.close(os.open(there.parent / away / "below/again", os.O_RDONLY))


def test_a_directory_that_moves_concerns_those_alone_who_follow_what_is_above_or_below_it(
    here: Path, there: Path
) -> None:
    (here / "above/moved").mkdir(parents=True)
    (here / "moved/below").mkdir(parents=True)
    (here / "elsewhere/moved").mkdir(parents=True)
    for watched in ("above/file", "moved/below/file"):
        (here / watched).touch()

    def acknowledged(moved: str, away: str) -> int:
        before = int(counters(there)["lease_transactions"])
        for _ in range(3):  # a directory that is changed more often is given up
            (here / moved).rename(here / away)
            (here / away).rename(here / moved)
        return int(counters(there)["lease_transactions"]) - before

    def few_of(moved: str, away: str, watched: str) -> bool:
        believe(there / watched)
        return acknowledged(moved, away) < 3

    for watched in ("above/file", "moved/below/file"):
        # The mount gives up what it followed before, such as the directory above, once it is not used.
        eventually(
            lambda: few_of("elsewhere/moved", "elsewhere/away", watched),  # noqa: B023
            "moves elsewhere are not acknowledged",
            within_s=30,
        )
    believe(there / "above/file")
    assert acknowledged("above/moved", "elsewhere/away") >= 6
    believe(there / "moved/below/file")
    assert acknowledged("moved", "elsewhere/away") >= 6


def test_what_is_not_to_be_followed_is_not_followed_from_above(here: Path, there: Path) -> None:
    """Nor is it believed any more as soon as that is said."""
    (here / "restless/below").mkdir(parents=True)
    (here / "file").touch()

    def acknowledged() -> int:
        before = int(counters(there)["lease_transactions"])
        for name in range(ROUNDS):
            (here / f"restless/below/{name}").touch()
            os.close(os.open(there / f"restless/below/{name}", os.O_RDONLY))
            (here / f"restless/below/{name}").unlink()
        return int(counters(there)["lease_transactions"]) - before

    for number in range(ROUNDS // 3):
        kept = f"restless/below/kept{number}"
        (here / kept).touch()
        believe(there / "file")
        believe(there / kept)
        os.setxattr(here / "restless", "user.irdmafs.follow", b"off")
        (here / kept).unlink()
        with pytest.raises(FileNotFoundError):
            os.open(there / kept, os.O_RDONLY)
        believe(there / "file")
        # It goes on following what it followed there until it looks over that.
        eventually(lambda: acknowledged() < ROUNDS, "what happens there is not acknowledged")
        os.removexattr(here / "restless", "user.irdmafs.follow")


def test_a_file_that_is_removed_as_soon_as_it_is_made_is_gone_for_its_maker(
    believing: list[Path], process: TakeProcess
) -> None:
    one, other = believing
    maker = process()
    for i in range(ROUNDS):
        maker.start("open(path, 'x').close()", path=str(other / f"file{i}"))
        while True:
            with contextlib.suppress(FileNotFoundError):
                (one / f"file{i}").unlink()
                break
        with contextlib.suppress(OSError):
            maker.result()
        assert not exists(other / f"file{i}")


def test_a_name_changed_here_is_believed_no_longer_than_any_other(believing: list[Path]) -> None:
    one, other = believing
    for i in range(ROUNDS):
        (other / "file").write_bytes(b"x")
        os.stat(other / "file")
        (other / "file").rename(other / "renamed")
        assert exists(other / "renamed")
        (one / "renamed").unlink()
        assert not exists(other / "renamed"), i


def test_hosts_that_remove_each_others_files_at_a_time_do_not_wait_for_ever(
    pair: list[Path], process: TakeProcess
) -> None:
    """Each kernel believes in names whose directory a program on its own host is changing."""
    workers = [process(), process()]
    for number, (worker, folder) in enumerate(zip(workers, pair, strict=True)):
        worker.do("import os", folder=str(folder), number=number)
    for i in range(50):
        for number in range(2):
            (pair[0] / f"{number}-{i}").touch()
    believe(pair[0] / "0-0")
    believe(pair[1] / "0-0")
    for worker in workers:
        worker.start(
            """
for i in range(50):
    os.path.exists(f"{folder}/{1 - number}-{i}")
    os.unlink(f"{folder}/{number}-{i}")
"""
        )
    for worker in workers:
        worker.result(60)
    assert os.listdir(pair[0]) == os.listdir(pair[1]) == []


def test_a_stopped_mount_does_not_let_its_kernel_believe_longer_than_its_session(
    two: list[Path], follower: ClusterMount, process: TakeProcess
) -> None:
    one, other = two
    (one / "file").write_bytes(b"x")
    looking, opening = process(), process()
    believe(other / "file")
    with paused(follower):
        # Returns when the session of the other mount is over.
        (one / "file").rename(one / "renamed")
        looking.start("import os; os.path.exists(path)", path=str(other / "file"))
        opening.start("open(path)", path=str(other / "file"))
        assert not looking.finished(0.3)
        assert not opening.finished()
    with pytest.raises(FileNotFoundError):
        opening.result()
    looking.result()
    assert not exists(other / "file")
    assert exists(other / "renamed")


def test_a_followed_directory_that_others_always_write_is_given_up(here: Path, there: Path) -> None:
    (here / "file").touch()
    believe(there / "file")
    followed = counters(there)["followed_directories"]
    i = 0

    def given_up() -> bool:
        nonlocal i
        for _ in range(20):
            i += 1
            (here / f"new{i}").touch()
        return bool(counters(there)["followed_directories"] < followed)

    eventually(given_up, "the directory is not followed any more", 30)
    (here / "file").unlink()
    eventually(lambda: not exists(there / "file"), "it is gone")


# -- what one mount promises its own programs, in a cluster or not


@pytest.fixture(scope="module", params=["kernel", "cluster"])
def single(request: pytest.FixtureRequest) -> Iterator[Mount]:
    with make_mount(request.param) as mount:
        yield mount


def test_renaming_a_file_with_two_names_while_it_is_written_does_not_hang(single: Mount) -> None:
    file = single.path / "file"
    file.write_bytes(b"one")
    os.link(file, single.path / "second")
    with file.open("wb") as writer:
        writer.write(b"two")
        writer.flush()
        file.rename(single.path / "renamed")
    for name in ("renamed", "second"):
        assert (single.path / name).read_bytes() == b"two"
        assert os.stat(single.path / name).st_size == 3


def test_a_listing_that_began_before_does_not_bring_a_name_back(single: Mount) -> None:
    folder = single.path / "listed"
    folder.mkdir()
    for i in range(300):
        (folder / f"file{i:03}").touch()
    with (folder / "file299").open("rb"), os.scandir(folder) as entries:
        first = next(entries)
        os.stat(first.path)
        (folder / "file299").unlink()
        for entry in entries:
            if entry.name != "file299":
                entry.stat()
        assert not exists(folder / "file299")


def test_what_others_removed_leaves_the_memory_of_a_host_that_looked_at_it(
    cluster: Cluster, here: Path
) -> None:
    """A kernel keeps what it knows until it wants the memory; our part would stay as long."""
    mount = cluster.add_mount()  # others may just be forgetting what tests before removed
    there = mount.path / here.name

    def nodes() -> int:
        found: int = mount.status()["nodes"]
        return found

    before = nodes()
    for round_ in range(2):
        folder = f"folder{round_}"
        (here / folder).mkdir()
        for i in range(50):
            (here / folder / f"file{i}").write_bytes(b"x")
        assert len([path.stat() for path in (there / folder).iterdir()]) == 50
        assert nodes() > before + 50
        for i in range(50):
            (here / folder / f"file{i}").unlink()
        (here / folder).rmdir()
    eventually(lambda: nodes() <= before + 5, f"{before} nodes as before")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a filesystem")
def test_what_is_mounted_on_a_directory_stays_when_others_change_what_was_believed_before(
    believing: list[Path],
) -> None:
    one, other = believing
    (one / "place").mkdir()
    os.stat(other / "place")
    with mounted_on(other / "place"):
        (one / "kept").unlink()
        eventually(lambda: not exists(other / "kept"), "the kernel asks again")
        assert os.path.ismount(other / "place")


def test_a_program_in_a_directory_still_knows_where(two: list[Path], process: TakeProcess) -> None:
    here, there = two
    (here / "folder").mkdir()
    standing = process()
    standing.do("os.chdir(d)", d=str(there / "folder"))
    for i in range(5):
        (there / "folder").stat()
        (here / f"file{i}").write_bytes(b"x")
        assert (there / f"file{i}").stat().st_size == 1
        (here / f"file{i}").unlink()
        assert not (there / f"file{i}").exists()
        (there / "folder").stat()
        assert standing.do("os.getcwd()") == str(there / "folder")
