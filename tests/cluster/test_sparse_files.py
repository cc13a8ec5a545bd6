"""A file with holes takes the room of its data, on store nodes, on the way between them and in caches."""

import os
from pathlib import Path

import pytest
from harness.clusters import LONG_LEASE_S, MIB, Cluster, Plan, StoreNode, counters
from harness.mountpoint import eventually
from harness.patterns import pattern
from harness.programs import hasty_node

from irdmafs.backend.model.records import STRIPES_MAX

STORE_BYTES = 192 * MIB
PLAN = Plan(
    nodes=2, mounts=2, store_bytes=STORE_BYTES, cache_bytes=64 * MIB, lease_ttl_s=LONG_LEASE_S
)


def write_with_holes(path: Path, size: int, data: dict[int, bytes]) -> None:
    with path.open("wb") as file:
        file.truncate(size)
        for offset, content in data.items():
            file.seek(offset)
            file.write(content)


def check(path: Path, size: int, data: dict[int, bytes]) -> None:
    with path.open("rb") as file:
        assert os.fstat(file.fileno()).st_size == size
        for offset, content in data.items():
            file.seek(offset)
            assert file.read(len(content)) == content
            file.seek(max(0, offset - 100))
            if offset >= 100:
                assert file.read(100) == bytes(100)
        file.seek(size - 1)
        assert file.read(2) in (b"\0", data.get(size - 1, b"\0"))


def allocated(node: StoreNode) -> int:
    return sum(path.stat().st_blocks * 512 for path in (node.store / "extents").iterdir())


DATA = {
    8 * MIB: pattern(1, 300_000),
    900 * MIB + 4096: pattern(2, 5 * MIB),
    1500 * MIB: b"x" * 4096,
}


@pytest.mark.parametrize("stripe", ["0", "64M", "65000001"])
@pytest.mark.parametrize("data", [{}, DATA])
def test_a_file_larger_than_everything_is_kept_and_read_by_what_is_in_it(
    cluster: Cluster, here: Path, there: Path, stripe: str, data: dict[int, bytes]
) -> None:
    os.setxattr(here, "user.irdmafs.stripe_size", stripe.encode())
    before = [allocated(node) for node in cluster.nodes]
    evictions = counters(there)["cache_evictions"]
    write_with_holes(here / "file", 2048 * MIB, data)
    check(there / "file", 2048 * MIB, data)
    for node, had in zip(cluster.nodes, before, strict=True):
        assert allocated(node) - had < 40 * MIB
    assert counters(there)["cache_bytes"] < 64 * MIB
    assert counters(there)["cache_evictions"] == evictions
    for part in cluster.status()["nodes"]:
        assert part["bytes"] < 64 * MIB
    (here / "file").unlink()


def test_a_file_with_a_hole_in_every_other_page_is_read_as_written(here: Path, there: Path) -> None:
    content = bytearray(24 * MIB)
    with (here / "comb").open("wb") as file:
        file.truncate(len(content))
        for page in range(0, len(content) // 4096, 2):
            content[page * 4096 : (page + 1) * 4096] = pattern(page, 4096)
            file.seek(page * 4096)
            file.write(content[page * 4096 : (page + 1) * 4096])
    assert (there / "comb").read_bytes() == content


def test_a_new_node_gets_holes_as_holes() -> None:
    plan = Plan(nodes=2, mounts=1, buckets=8, store_bytes=STORE_BYTES, lease_ttl_s=LONG_LEASE_S)
    with Cluster(plan, node_program=hasty_node.__file__) as made:
        write_with_holes(made.mounts[0].path / "file", 1700 * MIB, DATA)
        third = made.add_node()
        made.wait_healthy()
        drained, other, _ = made.nodes
        made.administer("drain", f"{drained.node_id:x}")
        eventually(lambda: not drained.stored_bytes(), "it keeps nothing any more", 30)
        assert 5 * MIB < allocated(third) < 64 * MIB
        for node in (drained, other):
            node.terminate()
        check(made.add_mount().path / "file", 1700 * MIB, DATA)


def test_a_file_that_is_longer_than_a_cluster_keeps_is_refused_and_stays_as_it_was(
    here: Path, there: Path
) -> None:
    file = here / "endless"
    file.write_bytes(b"short")
    with pytest.raises(OSError, match="too large"):
        os.truncate(file, 999_999_999_999_999)
    with file.open("r+b") as opened, pytest.raises(OSError, match="too large"):
        os.posix_fallocate(opened.fileno(), 1 << 50, 1)
    assert file.read_bytes() == b"short"
    fd = os.open(file, os.O_RDWR)
    os.pwrite(fd, b"far", 1 << 50)
    with pytest.raises(OSError, match="too large"):
        os.close(fd)
    assert (there / "endless").read_bytes() == b"short"
    file.unlink()


def test_longest_file_is_cut_into_few_stripes(cluster: Cluster, here: Path, there: Path) -> None:
    longest = 16 << 40
    os.setxattr(here, "user.irdmafs.replicas", b"1")
    before = sum(part["extents"] for part in cluster.status()["nodes"])
    write_with_holes(here / "longest", longest, {longest - 1: b"x"})
    check(there / "longest", longest, {longest - 1: b"x"})
    after = sum(part["extents"] for part in cluster.status()["nodes"])
    assert after - before <= STRIPES_MAX
    cluster.administer("scrub")  # At 32 MiB a second so many bytes would take six days.
    is_over = lambda part: part["scrub_running_s"] is None  # noqa: E731
    eventually(lambda: all(map(is_over, cluster.status()["nodes"])), "it is looked over", 60)
    with pytest.raises(OSError, match="too large"):
        os.truncate(here / "longest", longest + 1)
    (here / "longest").unlink()
