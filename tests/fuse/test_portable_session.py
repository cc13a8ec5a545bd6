"""The portable session knows that a writer has gone, although the release waits behind reads."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.mountpoint import Mount
from harness.network import CommandFailed
from harness.processes import Process
from harness.scratch import mounted_on

SIZE = 8 << 20
VERSIONS = 40
READERS = 4

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="limiting what the kernel reads ahead needs root"),
    pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="no /dev/fuse on this machine"),
]

READ = """
bad, whole = 0, b''
while whole[:1] != last:
    with open(file, 'rb', buffering=0) as f:
        length = os.fstat(f.fileno()).st_size
        whole = b''.join(os.pread(f.fileno(), 1 << 20, at) for at in range(0, length, 1 << 20))
    bad += not (whole and whole.count(whole[:1]) == size)
bad
"""
REPLACE = """
for version in range(2, last + 1):
    with open(file, 'wb', buffering=0) as f:
        f.write(bytes([version]) * size)
"""


@pytest.fixture
def mount() -> Iterator[Mount]:
    with Mount("pyfuse3") as made:
        yield made


def read_ahead_at_most(mount: Mount, requests: int, folder: Path) -> None:
    """Have the kernel keep more requests of this mount waiting for which no program waits."""
    try:
        with mounted_on(folder, kind="fusectl"):
            limits = folder / str(os.minor(mount.path.stat().st_dev))
            for name in ("max_background", "congestion_threshold"):
                (limits / name).write_text(str(requests))
    except CommandFailed as error:
        pytest.skip(f"the kernel's limits of a mount cannot be seen: {error}")


def test_a_release_behind_reads_leaves_the_version_whole(mount: Mount, tmp_path: Path) -> None:
    read_ahead_at_most(mount, 1, tmp_path)
    file = mount.path / "weights"
    file.write_bytes(bytes([1]) * SIZE)
    readers = [Process() for _ in range(READERS)]
    try:
        for reader in readers:
            reader.start(READ, file=str(file), last=bytes([VERSIONS]), size=SIZE)
        with Process() as writer:
            writer.do(REPLACE, file=str(file), size=SIZE, last=VERSIONS)
        assert [reader.result() for reader in readers] == [0] * READERS
    finally:
        for reader in readers:
            reader.close()


def test_a_writer_with_another_descriptor_shares_the_content(mount: Mount) -> None:
    file = mount.path / "log"
    with file.open("wb", buffering=0) as first:
        first.write(b"first")
        os.close(os.dup(first.fileno()))
        assert file.read_bytes() == b"first"
        with file.open("wb", buffering=0) as second:
            assert os.fstat(first.fileno()).st_size == 0
            second.write(b"second")
        assert file.read_bytes() == b"second"
