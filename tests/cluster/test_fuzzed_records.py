"""Whatever members put into etcd, it harms only what it names: no process ends, spins or forgets others."""

import functools
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import trio
from harness.clusters import Cluster, ClusterMount, Plan, counters
from harness.fuzzed_records import OF_MOUNTS, OF_OTHERS, is_inode, records
from harness.mountpoint import eventually
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from irdmafs.backend.cluster.group_configs import Groups
from irdmafs.backend.cluster.membership import Certificates, Members
from irdmafs.backend.cluster.replica import Consumer
from irdmafs.backend.kv import Delete, Event, KeyValue, Put
from irdmafs.backend.kv.faults import Faults
from irdmafs.backend.model.records import NEXT_INO_KEY
from irdmafs.backend.namespace import Inode, Tree
from irdmafs.backend.namespace.inode import ROOT_INO, inode_key
from irdmafs.backend.store.remote.lock_entries import LockEntries

RECORDS = int(os.environ.get("IRDMAFS_FUZZ", "250"))
_BATCH = 60


@pytest.mark.long
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.lists(records(OF_MOUNTS + OF_OTHERS), min_size=1, max_size=8), max_size=6))
def test_no_record_is_an_error_of_who_follows_it(changes: list[list[tuple[bytes, bytes]]]) -> None:
    faults = Faults()
    followers: list[Consumer] = [
        Members(faults=faults), Groups(faults), Certificates(faults=faults), LockEntries(faults),
        Tree(faults=faults),
    ]  # fmt: skip
    root = KeyValue(inode_key(ROOT_INO), Inode(ROOT_INO, 0o40755, 0, 0, 1).encode(), 1)
    for follower in followers:
        follower.load([root] if isinstance(follower, Tree) else [], 1)
    present: dict[bytes, KeyValue] = {root.key: root}
    for revision, change in enumerate(changes, 2):
        events = faults.well_formed([Event(revision, *record) for record in change])
        present |= {
            event.key: KeyValue(event.key, event.value or b"", revision) for event in events
        }
        for follower in followers:
            mine = [event for event in events if event.key.startswith(follower.prefixes)]
            follower.apply(revision, mine)
    faults.forget()
    for follower in followers:
        mine_now = [one for key, one in present.items() if key.startswith(follower.prefixes)]
        follower.load(mine_now, len(changes) + 2)
    gone = [Event(len(changes) + 3, key, None) for key in present if key != root.key]
    for follower in followers:
        follower.apply(
            len(changes) + 3, [event for event in gone if event.key.startswith(follower.prefixes)]
        )
    faults.well_formed(gone)


def contents(directory: Path) -> dict[str, object]:
    """All that is below a directory: modes, sizes, targets and bytes."""
    found: dict[str, object] = {}
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        data = b"" if not path.is_file() or path.is_symlink() else path.read_bytes()
        target = os.readlink(path) if path.is_symlink() else ""
        found[str(path.relative_to(directory))] = status.st_mode, status.st_size, target, data
    return found


def differences(directory: Path, wanted: dict[str, object]) -> list[str]:
    """Return a line for each path that is not as it was; of a file the length counts."""
    try:
        found = contents(directory)
    except OSError as error:
        return [str(error)]
    paths = (path for path in found | wanted if found.get(path) != wanted.get(path))
    return [f"{path}: {found.get(path)!r:.80} was {wanted.get(path)!r:.80}" for path in paths]


def is_as_before(directory: Path, wanted: dict[str, object]) -> bool:
    print(*(found := differences(directory, wanted)), sep="\n")
    return not found


def follows(mount: ClusterMount, revision: int) -> bool:
    return int(counters(mount)["applied_revision"]) >= revision


def make_victims(directory: Path) -> None:
    for name in ("one", "two/three", "two/four"):
        (directory / name).mkdir(parents=True)
        (directory / name / "small").write_bytes(b"s" * 100)
        (directory / name / "large").write_bytes(b"l" * 300_000)
        (directory / name / "link").symlink_to("small")
    os.link(directory / "one/small", directory / "two/small")


def look_at(directory: Path) -> None:
    """Ask for everything that can be asked of what may be damaged."""
    names = ((here, name) for here, dirs, files in os.walk(directory) for name in dirs + files)
    for path in itertools.islice(itertools.starmap(Path, names), 50):
        asked: list[Callable[[Path], object]] = [
            os.lstat, os.readlink, os.listdir, os.listxattr, Path.read_bytes,
        ]  # fmt: skip
        for ask in asked:
            try:
                ask(path)
            except (OSError, ValueError):
                pass


def cpu_s(cluster: Cluster) -> float:
    total = 0.0
    for part in (*cluster.nodes, *cluster.mounts):
        fields = Path(f"/proc/{part.pid}/stat").read_text().rsplit(")", 1)[1].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def is_idle(cluster: Cluster) -> bool:
    before = cpu_s(cluster)
    cluster.etcd.ctl("get", "x")
    trio.run(trio.sleep, 0.5)
    return cpu_s(cluster) - before < 0.1


@pytest.mark.timeout(120 + RECORDS // 20)
@pytest.mark.filterwarnings("ignore:Generating overly large repr")
def test_a_cluster_outlives_all_records_that_a_mount_may_put(tmp_path: Path) -> None:
    plan = Plan(nodes=2, mounts=2, replicas=2, buckets=4, namespaces=False)
    with Cluster(plan) as cluster:
        here, there = (mount.path for mount in cluster.mounts)
        make_victims(here / "victims")
        (here / "others").mkdir()
        (here / "others" / "file").write_bytes(b"o" * 200_000)
        before = contents(here / "victims")

        async def snapshot() -> dict[bytes, bytes]:
            async with cluster.engine("mount") as engine:
                _, found = await engine.snapshot(b"", b"\xff")
                return {record.key: record.value for record in found}

        async def put(changes: Sequence[Put | Delete]) -> int:
            """Return the revision of etcd at which all is changed."""
            revision = 0
            async with cluster.engine("mount") as engine:
                for start in range(0, len(changes), 100):
                    revision = await engine.transact((), changes[start : start + 100])
            return revision

        present = trio.run(snapshot)
        kept = {(here / path).stat().st_ino for path in ("", "victims", "others", "others/file")}
        victims = {
            key: value
            for key, value in present.items()
            if key[0] in b"dit" and int.from_bytes(key[1:9], "big") not in kept
        }
        put_keys: set[bytes] = set()
        batches, put_records = itertools.count(), 0

        @settings(
            max_examples=10, deadline=None, database=None,
            suppress_health_check=list(HealthCheck), phases=[Phase.generate],
        )  # fmt: skip
        @given(st.lists(records(OF_MOUNTS, victims), min_size=20, max_size=_BATCH))
        def harm(batch: list[tuple[bytes, bytes]]) -> None:
            chosen = {
                key: value
                for key, value in batch
                if may_be_put(key, kept) and not (key in victims and is_inode(key, value))
            }
            nonlocal put_records
            put_records += len(chosen)
            put_keys.update(chosen)
            trio.run(put, [Put(*item) for item in chosen.items()])
            number = next(batches)
            assert all(part.alive for part in cluster.parts())
            one, other = (here, there) if number % 2 else (there, here)
            name = f"others/new{number % 20}"
            (one / name).write_bytes(b"%d" % number * 20_000)
            kept.add((one / name).stat().st_ino)
            assert (other / name).read_bytes() == b"%d" % number * 20_000
            assert (other / "others/file").read_bytes() == b"o" * 200_000
            assert {"file", f"new{number % 20}"} <= set(os.listdir(one / "others"))
            if number % 10 == 0:
                look_at(other / "victims")

        while put_records < RECORDS:
            harm()
        assert "damaged" in cluster.administer("status", allowed=(0, 1, 2))
        late = cluster.add_mount()
        assert (late.path / "others/file").read_bytes() == b"o" * 200_000
        mended: list[Put | Delete] = [
            Put(key, present[key]) for key in put_keys if key in present and key != NEXT_INO_KEY
        ]
        # No host takes a number of inodes again that it has seen.
        mended.append(Put(NEXT_INO_KEY, (1 << 40).to_bytes(8, "big")))
        mended += [Delete(key) for key in put_keys - present.keys() - {NEXT_INO_KEY}]
        revision = trio.run(put, mended)
        for mount in cluster.mounts:
            eventually(functools.partial(follows, mount, revision), "it follows", 60)
            eventually(functools.partial(is_as_before, mount.path / "victims", before), "as before")
            assert not mount.status()["warnings"]
        eventually(lambda: is_idle(cluster), "nothing is done any more", 30)
        assert all(part.alive for part in cluster.parts())


def may_be_put(key: bytes, kept: set[int]) -> bool:
    """Return whether a record harms nothing but victims: the key is not that of another's."""
    is_anothers = key[0] in b"dit" and int.from_bytes(key[1:9], "big") in kept
    return key != b"s" and not (is_anothers and len(key) >= 9)
