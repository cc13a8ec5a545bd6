"""A mount that nobody uses follows no changes: etcd has no watch of it. Who uses it then sees them all."""

import os
import re
import select
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from harness.clusters import Cluster, Plan, counters
from harness.mountpoint import IRDMAFS, eventually
from harness.processes import Program
from harness.programs import hasty_mount

_WATCHES = re.compile(rb"^etcd_debugging_mvcc_watcher_total (\d+)$", re.MULTILINE)
_NODES = 1


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """The second mount reads names by directory."""
    plan = Plan(nodes=_NODES, mounts=2, namespaces=False)
    with Cluster(plan, mount_program=hasty_mount.__file__) as made:
        yield made


def watching(cluster: Cluster) -> int:
    """Return how many mounts have a watch in etcd."""
    with urllib.request.urlopen(f"http://{cluster.etcd.endpoint}/metrics", timeout=10) as answer:
        found = _WATCHES.search(answer.read())
    assert found is not None
    return int(found[1]) - _NODES


def wait_until_watching(cluster: Cluster, mounts: int) -> None:
    eventually(lambda: watching(cluster) == mounts, f"{mounts} mounts watch etcd", within_s=60)


@pytest.mark.parametrize("reader", [0, 1])
@pytest.mark.parametrize("changes", [5, 600])
def test_who_uses_it_again_sees_all_that_changed(
    cluster: Cluster, reader: int, changes: int
) -> None:
    name = f"{reader}-{changes}"
    here, there = (cluster.mounts[number].path / name for number in (1 - reader, reader))
    here.mkdir()
    for file in ("gone", "replaced", "moved", "changed"):
        (here / file).write_bytes(b"before")
    assert sorted(os.listdir(there)) == ["changed", "gone", "moved", "replaced"]
    held = (there / "replaced").open("rb", buffering=0)
    rests = counters(cluster.mounts[reader])["rests"]
    wait_until_watching(cluster, 0)
    for number in range(changes):
        (here / f"new{number}").write_bytes(b"%d" % number)
    (here / "gone").unlink()
    (here / "replaced").write_bytes(b"after")
    (here / "below").mkdir()
    (here / "moved").rename(here / "below" / "moved")
    (here / "changed").chmod(0o600)
    assert watching(cluster) <= 1, "the other one has heard of nothing"
    assert (there / "changed").stat().st_mode & 0o777 == 0o600
    assert not (there / "gone").exists() and not (there / "moved").exists()
    assert (there / "replaced").read_bytes() == b"after"
    with held:
        assert held.read() == b"before"
    assert (there / "below" / "moved").read_bytes() == b"before"
    names = {f"new{number}" for number in range(changes)}
    assert {*os.listdir(there)} == names | {"replaced", "below", "changed"}
    assert all((there / one).read_bytes() == one[3:].encode() for one in list(names)[:20])
    assert counters(cluster.mounts[reader])["rests"] > rests


@contextmanager
def _written(file: Path, _: Path) -> Iterator[None]:
    with file.open("rb+"):
        yield


@contextmanager
def _locked(file: Path, _: Path) -> Iterator[None]:
    with Program("flock", file, "sh", "-c", "echo; read line") as program:
        program.stdout.readline()
        yield
        program.communicate("\n")


@contextmanager
def _watched(file: Path, elsewhere: Path) -> Iterator[None]:
    with Program(*IRDMAFS, "watch", file) as program:

        def has_told() -> bool:
            elsewhere.write_bytes(b"2")
            return bool(select.select([program.stdout], [], [], 0.1)[0])

        eventually(has_told, "it watches")
        yield
        program.kill()


@pytest.mark.parametrize("using", [_written, _locked, _watched])
def test_a_mount_that_is_used_follows_changes(
    cluster: Cluster, using: Callable[[Path, Path], AbstractContextManager[None]]
) -> None:
    elsewhere, file = (mount.path / "used" for mount in cluster.mounts)
    elsewhere.write_bytes(b"1")
    with using(file, elsewhere):
        wait_until_watching(cluster, 1)
    wait_until_watching(cluster, 0)
