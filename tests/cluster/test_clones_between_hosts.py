"""Clones in a cluster: files that name one content, on two hosts."""

import contextlib
import os
import shutil
import time
from contextlib import closing
from pathlib import Path

import pytest
from harness.beside import repeating
from harness.cloned_files import ClonedFiles
from harness.clusters import MIB, Cluster, Plan, counters
from harness.mountpoint import eventually
from harness.patterns import pattern
from harness.processes import TakeProcess
from harness.seeds import seeded

from irdmafs import client

PLAN = Plan(nodes=2, mounts=2, store_bytes=512 * MIB, cache_bytes=300 * MIB)
STRIPE_SIZE = b"1M"
FILES = 60
STEPS = 120
KILLS = 3
CLONE = """
from irdmafs import client
while True:
    client.clone(f"{place}/source", f"{place}/clone")
"""


def moved(cluster: Cluster) -> list[tuple[int, int]]:
    """Return how many bytes each mount has sent, and has fetched, so far."""
    found = map(counters, cluster.mounts)
    return [(one["published_bytes"], one["fetched_bytes"]) for one in found]


def extents(cluster: Cluster) -> list[int]:
    """Return how many extents each node keeps."""
    return [len(os.listdir(node.store / "extents")) for node in cluster.nodes]


def test_a_directory_is_cloned_in_few_transactions_and_no_bytes(
    cluster: Cluster, here: Path, there: Path
) -> None:
    (here / "source").mkdir()
    for number in range(FILES):
        (here / "source" / f"{number}").write_bytes(pattern(number, 100_000))
    (here / "source" / "striped").write_bytes(pattern(FILES, 5 * MIB))
    for path in (there / "source").iterdir():
        path.read_bytes()
    before, kept = moved(cluster), extents(cluster)
    transactions = counters(here)["transactions"]
    done = client.clone(here / "source", here / "clone")
    assert done[0::2] == (FILES + 1, 0)
    assert counters(here)["transactions"] - transactions < 14
    for number in range(FILES):
        assert (there / "clone" / f"{number}").read_bytes() == pattern(number, 100_000)
    assert (there / "clone" / "striped").read_bytes() == pattern(FILES, 5 * MIB)
    assert moved(cluster) == before
    for number in range(20):
        client.clone(there / "clone" / "striped", there / f"{number}")
    assert extents(cluster) == kept
    (here / "source" / "striped").unlink()
    with (there / "clone" / "striped").open("r+b") as file:
        file.write(b"changed")
    assert (here / "19").read_bytes() == pattern(FILES, 5 * MIB)
    assert moved(cluster)[1][0] - before[1][0] <= MIB


def test_a_content_goes_with_the_last_file_that_names_it(
    cluster: Cluster, here: Path, there: Path
) -> None:
    before = extents(cluster)
    (here / "one").write_bytes(pattern(1, 3 * MIB))
    client.clone(here / "one", here / "other")
    client.clone(there / "other", there / "third")
    (here / "one").unlink()
    (there / "other").write_bytes(b"another")
    fetched = moved(cluster)
    assert (here / "third").read_bytes() == pattern(1, 3 * MIB)
    assert moved(cluster)[0] == fetched[0]
    for node in cluster.nodes:
        node.kill9()
        node.start()
        cluster.wait_healthy()
    assert (there / "third").read_bytes() == pattern(1, 3 * MIB)
    for mount in cluster.mounts:
        mount.restart()
    assert (here / "third").read_bytes() == pattern(1, 3 * MIB)
    (there / "third").unlink()
    (there / "other").unlink()
    eventually(lambda: extents(cluster) == before, "nodes free it")


def test_what_is_written_in_place_is_copied_and_neither_changes_the_other(
    here: Path, there: Path
) -> None:
    (here / "one").write_bytes(pattern(1, 3 * MIB))
    with (here / "one").open("r+b") as file:
        file.write(b"changed")
        file.flush()
        assert client.clone(here / "one", here / "other") == (0, 0, 1, 3 * MIB)
        assert client.clone(there / "one", there / "third") == (1, 3 * MIB, 0, 0)
    assert (there / "other").read_bytes() == b"changed" + pattern(1, 3 * MIB)[7:]
    assert (here / "third").read_bytes() == pattern(1, 3 * MIB)
    with (here / "third").open("rb") as reader:
        client.clone(here / "third", here / "fourth")
        with (here / "fourth").open("r+b") as file:
            file.write(b"fourth")
            file.flush()
            assert reader.read() == pattern(1, 3 * MIB)
    assert (there / "fourth").read_bytes() == b"fourth" + pattern(1, 3 * MIB)[6:]


def test_a_draft_of_a_version_sends_what_is_changed_in_it(
    cluster: Cluster, here: Path, there: Path
) -> None:
    versions = client.Versions(here, keep=1)
    with versions.draft() as directory:
        for number in range(FILES):
            Path(directory, f"{number}").write_bytes(pattern(number, 100_000))
    with client.Versions(there).hold(local=True):
        pass
    before = moved(cluster)
    with versions.draft(base=1) as directory:
        Path(directory, "7").write_bytes(pattern(100, 100_000))
    with client.Versions(there).hold(2, local=True) as version:
        assert Path(version.path, "7").read_bytes() == pattern(100, 100_000)
        assert Path(version.path, "8").read_bytes() == pattern(8, 100_000)
    (sent, fetched), (_, fetched_there) = moved(cluster)
    assert (sent - before[0][0], fetched_there - before[1][1]) == (100_000, 100_000)
    assert fetched == before[0][1]


def test_random_clones_and_changes_on_two_hosts(pair: list[Path]) -> None:
    with closing(ClonedFiles(pair, seeded())) as files:
        for _ in range(STEPS):
            files.step()
        files.check_all()


def test_files_that_another_host_replaces_and_removes_are_cloned_whole(
    here: Path, there: Path
) -> None:
    """A node would free the content of a file that was removed while it was cloned."""
    random, made = seeded(), 0
    (here / "source").mkdir()

    def change() -> None:
        path = there / "source" / f"{random.randrange(20)}"
        if random.random() < 0.3:
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(f"{path.name}.{random.random()}\n".encode() * 200)

    with repeating(change):
        while made < 6:
            with contextlib.suppress(FileNotFoundError):  # a name that was listed has gone
                made += client.clone(here / "source", here / f"{made}").shared_files > 5
    shutil.rmtree(there / "source")
    for path in there.glob("[0-9]/*"):
        lines = path.read_bytes().splitlines()
        assert len(lines) == 200 and len(set(lines)) == 1


def test_clones_that_a_killed_mount_was_making_are_whole_or_not_there(
    cluster: Cluster, here: Path, there: Path, process: TakeProcess
) -> None:
    random, mount = seeded(), cluster.mounts[0]
    (there / "source").mkdir()
    for number in range(FILES):
        (there / "source" / f"{number}").write_bytes(pattern(number, 1000))
    for _ in range(KILLS):
        shutil.rmtree(here / "clone", ignore_errors=True)
        cloner = process()
        cloner.start(CLONE, place=str(here))
        eventually((here / "clone").exists, "it clones")
        time.sleep(random.uniform(0, 0.3))
        mount.kill9()
        mount.restart()
        with pytest.raises(OSError):
            cloner.result()
        for number in range(FILES) if (there / "clone").exists() else ():
            assert (there / "clone" / f"{number}").read_bytes() == pattern(number, 1000)
    client.clone(here / "source", here / "clone")
    (here / "source" / "0").write_bytes(b"other")
    assert (there / "clone" / "0").read_bytes() == pattern(0, 1000)
