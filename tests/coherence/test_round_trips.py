"""What opening and publishing cost in a cluster, counted in round trips."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import make_mount
from harness.claims import often
from harness.cluster_mount import CLUSTER
from harness.mountpoint import Mount, eventually, fsync

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def kept_mount() -> Iterator[Mount]:
    with make_mount(CLUSTER) as mount:
        yield mount


@pytest.fixture
def mount(kept_mount: Mount) -> Mount:
    """A mount that has no claims: one gives them up in the background, when they are not used."""
    kept_mount.restart()
    return kept_mount


def counted(mount: Mount) -> dict[str, int]:
    """What was asked of etcd and of the store node, but not for directory leases: those begin and
    end in the background, when a directory was asked about so many times."""
    figures = mount.status()["cluster"]
    figures["transactions"] -= figures["lease_transactions"]
    names = ("barriers", "transactions", "round_trips")
    return {name: figures[name] for name in names}


def spent(mount: Mount, before: dict[str, int]) -> dict[str, int]:
    return {name: value - before[name] for name, value in counted(mount).items()}


def test_a_warm_open_deep_in_the_tree_costs_one_round_trip(mount: Mount) -> None:
    folder = mount.path / "a" / "b" / "c"
    folder.mkdir(parents=True)
    (folder / "file").write_bytes(b"warm")
    (folder / "file").read_bytes()
    before = counted(mount)
    assert (folder / "file").read_bytes() == b"warm"
    cost = spent(mount, before)
    assert cost["barriers"] <= 1
    assert cost["transactions"] == cost["round_trips"] == 0


def test_publishing_over_a_small_file_costs_two_round_trips_and_that_of_open(mount: Mount) -> None:
    folder = mount.path / "publish"
    folder.mkdir()
    (folder / "file").write_bytes(b"one")
    before = counted(mount)
    fd = os.open(folder / "file", os.O_WRONLY | os.O_TRUNC)
    os.write(fd, b"two")
    at_open = spent(mount, before)
    assert at_open["barriers"] <= 1
    assert at_open["transactions"] == at_open["round_trips"] == 0
    before = counted(mount)
    os.close(fd)
    cost = spent(mount, before)
    assert cost == {"barriers": 0, "transactions": 1, "round_trips": 1}


def test_a_large_file_is_published_in_one_transfer_and_one_transaction(mount: Mount) -> None:
    path = mount.path / "large"
    with path.open("wb") as file:
        file.write(os.urandom(4 << 20))
        file.flush()
        before = counted(mount)
    cost = spent(mount, before)
    assert cost["transactions"] == 1
    assert cost["barriers"] == 0
    assert cost["round_trips"] <= 2  # data connections are opened once


def test_what_a_directory_lease_costs_is_not_counted_to_what_caused_it(mount: Mount) -> None:
    fsync(mount.path)  # of what was done before nothing is stored later
    before = counted(mount)

    def is_free() -> bool:
        often((mount.path / "none").exists)
        asked = counted(mount)
        assert not (mount.path / "none").exists()
        return not any(spent(mount, asked).values())

    eventually(is_free, "lookups that ask nobody")
    assert spent(mount, before)["transactions"] == 0
    assert mount.status()["cluster"]["lease_transactions"] > 0


def test_a_new_file_that_stays_empty_costs_one_transaction(mount: Mount) -> None:
    """Its mount made the directory, and has the claim of it."""
    folder = mount.path / "empty"
    folder.mkdir()
    fd = os.open(folder, os.O_RDONLY)
    os.fsync(fd)
    before = counted(mount)
    os.close(os.open(folder / "file", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    os.fsync(fd)  # it may be stored later
    os.close(fd)
    cost = spent(mount, before)
    assert cost["transactions"] == 1
    assert cost["round_trips"] == 0
    assert cost["barriers"] == 0
    assert (folder / "file").stat().st_size == 0


def test_the_attributes_of_a_new_file_are_not_asked_for(mount: Mount) -> None:
    """The kernel asks for those of the directory only, as its time has changed."""
    folder = mount.path / "attributes"
    folder.mkdir()
    with mount.requests() as asked:
        for number in range(40):
            (folder / str(number)).write_bytes(b"new")
    assert asked["GETATTR"] < 60


def is_believed(mount: Mount, folder: Path) -> bool:
    with mount.requests() as asked:
        often(folder.stat)
    return not asked["LOOKUP"] + asked["GETATTR"]


def test_a_directory_that_is_looked_at_often_is_known_without_asking(mount: Mount) -> None:
    """Names on the way to a directory in which nobody opens anything cost no request each."""
    folder = mount.path / "looked" / "at" / "often"
    folder.mkdir(parents=True)
    before = counted(mount)
    eventually(lambda: is_believed(mount, folder), "the kernel believes the path")
    assert spent(mount, before)["transactions"] <= 3  # the directories may be stored only now
    assert spent(mount, before)["barriers"] == 0


def test_directories_looked_at_once_are_not_followed_nor_is_what_leads_there(mount: Mount) -> None:
    """Hosts that change something there would wait. They keep no other from being followed for long."""
    way = mount.path / "way"
    folders = [way / str(number) for number in range(300)]
    for folder in folders:
        folder.mkdir(parents=True)
    before = counted(mount)
    for folder in folders:
        folder.stat()
    assert spent(mount, before)["barriers"] == 0
    assert mount.status()["cluster"]["lease_transactions"] == 0
    eventually(lambda: is_believed(mount, way), "the kernel believes it", within_s=6)
