"""New files in a directory that a mount has the claim of: made without asking, and by one host only."""

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from harness.claims import claim, claimed
from harness.clusters import Cluster, ClusterMount, Plan, counters
from harness.daemons import paused
from harness.errors import fails_with
from harness.mountpoint import can_be_opened, eventually

from irdmafs.backend.kv import Put
from irdmafs.backend.model.records import MountRecord, claim_key, encode, key_of, wish_key

FILES = 50
DIRECTORIES = 20


def make(path: Path) -> int:
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)


@pytest.fixture
def maker(cluster: Cluster) -> ClusterMount:
    """Return a mount that has no claims: one gives them up in the background, when they are not used."""
    return cluster.add_mount()


def transactions(mount: ClusterMount) -> tuple[int, int]:
    """Return how often a mount has changed something in etcd, other than what it follows, and asked how
    far it is."""
    found = counters(mount)
    return found["transactions"] - found["lease_transactions"], found["barriers"]


def test_a_file_costs_one_transaction_and_a_name_that_nobody_saw_none(
    cluster: Cluster, maker: ClusterMount, there: Path
) -> None:
    here = maker.path / there.name
    claim(here)
    before = transactions(maker)
    for number in range(FILES):
        fd = make(here / f"unseen{number}")
        os.fchmod(fd, 0o600)
        os.setxattr(here / f"unseen{number}", "user.note", b"seen by nobody else")
        (here / f"unseen{number}").unlink()
        os.close(fd)
    assert transactions(maker) == before
    for number in range(FILES):
        (here / f"full{number}").write_bytes(b"content")
    # A group of store nodes takes one when it is used first.
    made, asked = transactions(maker)
    assert FILES <= made - before[0] <= FILES + cluster.plan.buckets
    assert asked == before[1]
    assert sorted(os.listdir(there)) == sorted(f"full{number}" for number in range(FILES))
    assert (there / "full7").read_bytes() == b"content"


def test_a_directory_costs_one_transaction_and_each_file_in_it_one(
    cluster: Cluster, maker: ClusterMount, there: Path
) -> None:
    """Its maker has the claim of each; they go with it."""
    here = maker.path / there.name
    claims, before = claimed(maker), transactions(maker)[0]
    for number in range(DIRECTORIES):
        (here / f"{number}").mkdir()
        for name in ("a", "b"):
            (here / f"{number}" / name).write_bytes(b"content")
        key = claim_key((here / f"{number}").stat().st_ino)
        assert key[1:] in cluster.etcd.get(cluster._prefix(key[:1].decode()))
    made = transactions(maker)[0] - before
    assert made <= 3 * DIRECTORIES + cluster.plan.buckets
    assert sorted(os.listdir(there / "0")) == ["a", "b"]
    shutil.rmtree(here)
    eventually(lambda: claimed(maker) <= claims, "their claims are gone")
    assert not can_be_opened(there)


def test_what_was_done_to_a_file_before_its_first_version_is_seen_with_it(
    pair: list[Path], here: Path, there: Path
) -> None:
    claim(here)
    fd = make(here / "file")
    os.fchmod(fd, 0o640)
    os.chown(here / "file", 7, 8)
    os.setxattr(here / "file", "user.note", b"kept")
    os.link(here / "file", here / "second")
    os.write(fd, b"content")
    os.rename(here / "file", here / "renamed")
    os.close(fd)
    for folder in pair:
        assert sorted(os.listdir(folder)) == ["renamed", "second"]
        for name in ("renamed", "second"):
            found = os.stat(folder / name)
            assert (found.st_mode & 0o777, found.st_uid, found.st_gid) == (0o640, 7, 8)
            assert found.st_nlink == 2
            assert os.getxattr(folder / name, "user.note") == b"kept"
            assert (folder / name).read_bytes() == b"content"
    fd = make(here / "empty")
    os.rename(here / "empty", here / "file")
    os.close(fd)
    fd = make(here / "replaced")
    os.rename(here / "file", here / "replaced")
    os.write(fd, b"without a name")
    os.close(fd)
    for folder in pair:
        assert sorted(os.listdir(folder)) == ["renamed", "replaced", "second"]
    assert (there / "replaced").read_bytes() == b""


def test_another_host_that_makes_a_name_ends_the_claim(here: Path, there: Path) -> None:
    claim(here)
    before = claimed(here)
    opened = {number: make(here / f"file{number}") for number in range(3)}
    os.close(make(there / "other"))
    eventually(lambda: claimed(here) < before, "it is given up")
    for number, fd in opened.items():
        with pytest.raises(FileExistsError):
            make(there / f"file{number}")
        os.write(fd, b"content")
        os.close(fd)
        assert (there / f"file{number}").read_bytes() == b"content"
    with pytest.raises(FileExistsError):
        make(here / "other")


def test_what_is_not_to_be_followed_is_not_claimed(pair: list[Path]) -> None:
    """Hosts take turns there: each would have to recall what another has claimed."""
    os.setxattr(pair[0], "user.irdmafs.follow", b"off")
    claims, rounds = sum(map(claimed, pair)), FILES // 5
    for number in range(rounds):
        for host, path in enumerate(pair):
            folder = path / f"{number}-{host}"
            folder.mkdir()
            for name in ("a", "b", "c"):
                (folder / name).write_bytes(b"content")
    assert sum(map(claimed, pair)) <= claims
    for path in pair:
        assert len([*path.glob("*/[abc]")]) == 2 * 3 * rounds


def test_a_holder_that_is_dead_or_stopped_delays_others_for_a_lease(failing: Cluster) -> None:
    holder, other = failing.mounts
    for name in ("stopped", "killed"):
        (holder.path / name).mkdir()
        claim(holder.path / name)
    fd = make(holder.path / "stopped" / "file")
    os.write(fd, b"lost")
    with paused(holder):
        write = make(other.path / "stopped" / "file")
        os.write(write, b"content")
        os.close(write)
    with fails_with(errno.ESTALE):
        os.close(fd)
    for mount in (holder, other):
        assert (mount.path / "stopped" / "file").read_bytes() == b"content"
    eventually(lambda: bool(counters(holder)["session_valid_seconds"]), "it has a session again")
    claim(holder.path / "killed")
    fd = make(holder.path / "killed" / "file")
    holder.kill9()
    os.close(make(other.path / "killed" / "file"))
    assert os.listdir(other.path / "killed") == ["file"]


def test_file_whose_directory_another_host_has_claimed_since_is_published(failing: Cluster) -> None:
    holder, other = failing.mounts
    (holder.path / "directory").mkdir()
    claim(holder.path / "directory")
    fd = make(holder.path / "directory" / "file")
    os.write(fd, b"content")
    with paused(holder):
        for number in range(5):
            (other.path / "directory" / f"other{number}").write_bytes(b"content")
    os.close(fd)
    for mount in (holder, other):
        assert (mount.path / "directory" / "file").read_bytes() == b"content"


@pytest.fixture
def loopback() -> Iterator[Cluster]:
    """A cluster whose etcd this process can speak to."""
    with Cluster(Plan(nodes=1, mounts=2, replicas=1, namespaces=False)) as made:
        yield made


def test_a_member_that_gives_no_claim_up_is_waited_for_once(loopback: Cluster) -> None:
    mount, holder = loopback.mounts
    (holder.path / "held").mkdir()
    claim(holder.path / "held")
    held = (holder.path / "held").stat().st_ino
    directories = [mount.path / f"directory{number}" for number in range(5)]
    for directory in directories:
        directory.mkdir()
    numbers = [directory.stat().st_ino for directory in directories]

    async def hold(done: threading.Event) -> None:
        async with loopback.engine("mount") as engine:
            lease = await engine.leases.grant(60)
            record = MountRecord("elsewhere", "/nowhere", 1, "1", key_digest=b"m" * 32)
            claims = [Put(claim_key(ino), lease.to_bytes(8, "big"), lease) for ino in numbers[:2]]
            # A claim of nobody, and one that is no number.
            claims += [
                Put(claim_key(numbers[2]), bytes(7) + b"1"),
                Put(claim_key(numbers[3]), b"mine"),
                Put(claim_key(numbers[4]), lease.to_bytes(8, "big") + b"x", lease),
            ]
            await engine.transact((), [Put(key_of(b"m", lease), encode(record), lease), *claims])
            for first in range(1, 400, 100):  # more than a transaction can delete
                wishes = [wish_key(held, other) for other in range(first, first + 100)]
                await engine.transact((), [Put(key, b"") for key in wishes])
            while not done.is_set():
                await trio.sleep(0.1)

    done = threading.Event()
    holding = threading.Thread(target=trio.run, args=(hold, done))
    holding.start()
    try:
        eventually(lambda: len(loopback.status()["mounts"]) == 3, "the other member is there")
        assert not os.listdir(directories.pop())  # the claim is an exclusive one
        for directory in directories:
            (directory / "file").write_bytes(b"content")
        eventually(lambda: not claimed(holder), "it is given up")
    finally:
        done.set()
        holding.join()
    assert mount.log.read_text().count("does not give the claim") == 1
