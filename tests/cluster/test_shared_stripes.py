"""A file that is changed in place: what stays the same is neither sent nor stored again."""

import os
from contextlib import suppress
from pathlib import Path

from harness.clusters import LONG_LEASE_S, MIB, Cluster, Plan, StoreNode, counters
from harness.mountpoint import eventually
from harness.patterns import pattern

PLAN = Plan(nodes=2, store_bytes=512 * MIB, cache_bytes=300 * MIB, lease_ttl_s=LONG_LEASE_S)
STRIPE_SIZE = b"1M"


def sent_bytes(cluster: Cluster) -> int:
    """Return how many bytes of published files the first mount has sent so far."""
    sent = counters(cluster.mounts[0])["published_bytes"]
    assert isinstance(sent, int)
    return sent


def change(path: Path, expected: bytearray, offset: int, data: bytes) -> None:
    """Overwrite a part of the file, and of what it is expected to hold."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
    expected[offset : offset + len(data)] = data


def files(node: StoreNode) -> set[int]:
    """Return the inode numbers of the files that a node has extents in."""
    found = set()
    for path in (node.store / "extents").iterdir():
        with suppress(FileNotFoundError):  # freed a moment ago
            found.add(path.stat().st_ino)
    return found


def test_a_small_change_sends_the_stripe_that_it_is_in(cluster: Cluster, pair: list[Path]) -> None:
    one, other = (directory / "file" for directory in pair)
    expected = bytearray(pattern(1, 8 * MIB + 5000))
    one.write_bytes(expected)
    for at in (0, 3 * MIB + 17, 8 * MIB + 4000):
        before = sent_bytes(cluster)
        change(one, expected, at, b"changed")
        assert sent_bytes(cluster) - before <= MIB
        assert other.read_bytes() == expected
        with one.open("rb") as opened:
            assert opened.read() == expected


def test_a_file_that_grows_and_shrinks_in_place_is_right_everywhere(pair: list[Path]) -> None:
    one, other = (directory / "file" for directory in pair)
    expected = bytearray(pattern(2, 4 * MIB))
    one.write_bytes(expected)
    with one.open("ab") as file:
        file.write(b"x" * 300)
    expected += b"x" * 300
    assert other.read_bytes() == expected
    os.truncate(one, 2 * MIB + 1)
    del expected[2 * MIB + 1 :]
    assert other.read_bytes() == expected
    os.truncate(one, 3 * MIB)
    expected += bytes(3 * MIB - len(expected))
    assert other.read_bytes() == expected


def test_versions_share_files_of_nodes_and_freed_ones_leave_the_others(
    cluster: Cluster, pair: list[Path]
) -> None:
    one, other = (directory / "file" for directory in pair)
    expected = bytearray(pattern(3, 8 * MIB))
    one.write_bytes(expected)
    before = [files(node) for node in cluster.nodes]
    for round in range(5):
        change(one, expected, 5 * MIB + round, b"#")
        eventually(
            lambda: all(
                len(files(node) - had) <= 1 for node, had in zip(cluster.nodes, before, strict=True)
            ),
            "nodes keep what has changed, once",
        )
    assert other.read_bytes() == expected
    copy = one.with_name("another")
    copy.write_bytes(pattern(4, 8 * MIB))  # nobody may use the shared files for it
    assert other.read_bytes() == expected
    one.unlink()
    assert other.with_name("another").read_bytes() == pattern(4, 8 * MIB)


def test_shared_stripes_outlive_restart_of_their_nodes(cluster: Cluster, pair: list[Path]) -> None:
    one, other = (directory / "file" for directory in pair)
    expected = bytearray(pattern(5, 6 * MIB))
    one.write_bytes(expected)
    change(one, expected, 10, b"changed")
    for node in cluster.nodes:
        node.kill9()
        node.start()
        cluster.wait_healthy()
    assert other.read_bytes() == expected
    change(one, expected, 4 * MIB, b"again")
    assert other.read_bytes() == expected


def test_a_large_file_of_one_stripe_is_cut_when_it_is_changed(cluster: Cluster) -> None:
    one, other = (mount.path / "large" for mount in cluster.mounts)
    expected = bytearray(pattern(6, 70 * MIB))
    one.write_bytes(expected)
    change(one, expected, 1, b"cuts it")
    before = sent_bytes(cluster)
    change(one, expected, 40 * MIB, b"changed")
    assert sent_bytes(cluster) - before <= 16 * MIB
    assert other.read_bytes() == expected
    one.unlink()
