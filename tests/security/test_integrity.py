"""What a reader gets is what the writer published, whatever a store node or the way from it does to it."""

import mmap
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from harness.clusters import LONG_LEASE_S, MIB, Cluster, Plan, counters
from harness.striped import damage, new_content

from irdmafs.backend.files.digest import BLOCK_BYTES, digest_of_bytes
from irdmafs.backend.model.records import ContentId, GroupConfig, Layout
from irdmafs.backend.namespace import NewVersion
from irdmafs.backend.store.remote.writer import Transfer
from irdmafs.backend.transport import Extent, FileRange, Landed, Target
from irdmafs.cli.status import report
from irdmafs.mount import mounting

# In a message, in a stream, in three stripes.
SIZES = [1000, 300_000, 2 * MIB + 500_000]
# So many that each of two nodes is the first to be asked for some of them.
FILES = 8
PLAN = Plan(nodes=2, mounts=2, lease_ttl_s=LONG_LEASE_S)
STRIPE_SIZE = b"1M"


@pytest.mark.parametrize("size", SIZES)
def test_wrong_bytes_of_one_node_are_dropped_and_another_replica_is_read(
    cluster: Cluster, here: Path, there: Path, size: int
) -> None:
    other = cluster.mounts[1]
    # Side by side, small ones are read ahead, all from one node; apart, each from its own.
    names = [f"file{i}" for i in range(FILES)] + [f"apart{i}/file" for i in range(FILES)]
    written = {name: new_content(size) for name in names}
    for name, content in written.items():
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_bytes(content)
    broken = cluster.nodes[0]
    for content in written.values():
        assert damage(broken, content)
    before = counters(there)["wrong_fetches"]
    for name, content in written.items():
        assert (there / name).read_bytes() == content
    assert counters(there)["wrong_fetches"] > before
    log = other.log.read_text()
    sent = [line for line in log.splitlines() if f"/{here.name}/" in line and "sent" in line]
    assert sent and all(f"store node {broken.node_id:x} sent other bytes" in line for line in sent)
    mount = mounting.find_mount(str(other.path))
    assert mount is not None
    assert any(
        "other bytes than were published" in line for line in report(mount).status["warnings"]
    )


def test_a_mount_that_does_not_verify_lets_nobody_check(cluster: Cluster, here: Path) -> None:
    careless = cluster.add_mount("--no-verify").path / here.name
    contents = {"checked": new_content(300_000), "unchecked": new_content(300_000)}
    (here / "checked").write_bytes(contents["checked"])
    (careless / "unchecked").write_bytes(contents["unchecked"])
    before = counters(here)["checked_bytes"]
    assert (careless / "checked").read_bytes() == contents["checked"]
    assert (here / "unchecked").read_bytes() == contents["unchecked"]
    assert counters(careless)["checked_bytes"] == 0
    assert counters(here)["checked_bytes"] == before


def test_a_file_that_its_writer_keeps_mapped_stays_readable_elsewhere(
    cluster: Cluster, here: Path, there: Path
) -> None:
    """Beside a store node, which takes over the very file that is mapped."""
    beside = cluster.add_mount(beside=cluster.nodes[0]).path / here.name
    os.setxattr(beside, "user.irdmafs.replicas", b"1")
    for number in range(FILES):
        path = beside / f"file{number}"
        with path.open("w+b") as file:
            file.write(bytes(300_000))
            file.flush()
            with mmap.mmap(file.fileno(), 300_000) as memory:
                os.close(os.dup(file.fileno()))  # publishes, though the map stays
                memory[1000] = 1
                assert len((there / path.name).read_bytes()) == 300_000


class Nodes:
    """One node, which lets the writer write while it is being sent to. `shows`: the bytes pass through
    memory, a part of them."""

    def __init__(self, fd: int, change: bytes, touch: bool, shows: bool) -> None:
        self._fd = fd
        self._change = change
        self._touch = touch
        self._shows = shows

    def device(self, node: int) -> "Nodes":
        return self

    def shows_bytes(self, node: int) -> bool:
        return self._shows

    async def write(
        self, extent: Extent, target: Target, source: FileRange, passed: Landed
    ) -> None:
        if self._shows and source.length > BLOCK_BYTES:
            passed(0, BLOCK_BYTES, memoryview(os.pread(source.fd, BLOCK_BYTES, source.offset)))
        status = os.fstat(self._fd)
        os.pwrite(self._fd, self._change, 0)
        if not self._touch:
            os.utime(self._fd, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("shows", [False, True])
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("change", [b"", b"x"])
def test_what_changed_when_sent_is_not_checked(mapped: bool, change: bytes, shows: bool) -> None:
    content = bytes(BLOCK_BYTES + 300_000)
    fd = os.memfd_create("content")
    os.pwrite(fd, content, 0)
    config = GroupConfig(1, (7,))
    cluster: Any = SimpleNamespace(
        peers=Nodes(fd, change, touch=not mapped, shows=shows),
        groups=SimpleNamespace(get=lambda group: (config, 1)),
        buckets=1,
        here=0,
        small_bytes=1000,
        verify=True,
        timeout_s=1.0,
    )
    version = NewVersion(2, ContentId(5), len(content), 1, 0, mapped=mapped, layout=Layout(1))
    transfer = Transfer(cluster, version, fd)
    trio.run(transfer.complete)
    os.close(fd)
    assert transfer.digests == (b"" if change else digest_of_bytes(content))
