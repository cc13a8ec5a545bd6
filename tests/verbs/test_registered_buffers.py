"""A reader's own memory, registered once, that a network card fills."""

import array
import errno
import fcntl
import json
import mmap
import os
import random
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from harness.clusters import MIB, Cluster, ClusterMount, counters
from harness.errors import fails_with
from harness.mountpoint import eventually
from harness.patterns import PAGE_BYTES, pattern, version_of
from harness.rdma import IN_GUEST, REMEDY, need_ports, set_links
from harness.roce import find_ways

from irdmafs import client

pytestmark = pytest.mark.verbs

SIZE = 3 * MIB + 12345
VERSIONS = 4
LINKS = ["roce0", "roce1"]
F_SEAL_SHRINK = 0x2
UDMABUF_CREATE = 0x40187542


@contextmanager
def dma_buf(size: int) -> Iterator[int]:
    """Host memory that looks like a device's."""
    try:
        device = os.open("/dev/udmabuf", os.O_RDWR)
    except FileNotFoundError:
        pytest.skip("no /dev/udmabuf here: modprobe udmabuf")
    memory = os.memfd_create("dma-buf", os.MFD_ALLOW_SEALING)
    try:
        os.truncate(memory, size)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, F_SEAL_SHRINK)
        order = array.array("Q", struct.pack("IIQQ", memory, 0, 0, size))
        made = fcntl.ioctl(device, UDMABUF_CREATE, order)
    finally:
        os.close(memory)
        os.close(device)
    try:
        yield made
    finally:
        os.close(made)


def why_not(mount: ClusterMount, name: str, lent: int) -> str:
    pipe, other_end = os.pipe()
    try:
        text = os.getxattr(mount.path / name, f"user.irdmafs.read_into.{lent}.{pipe}")
    finally:
        os.close(pipe)
        os.close(other_end)
    return str(json.loads(text)["why_not"])


def wait_for_rdma(writer: ClusterMount, reader: ClusterMount) -> None:
    """What is read before there is a queue pair, or while none works, comes over TCP."""

    def is_used() -> bool:
        moved = counters(reader)["rdma_bytes"]
        (writer.path / "first").write_bytes(pattern(1, MIB))
        with client.Buffer(MIB) as buffer:
            buffer.fill(reader.path / "first")
        return bool(counters(reader)["rdma_bytes"] > moved)

    eventually(is_used, "RDMA is used", 60)


def test_versions_are_read_into_memory_that_was_registered_once(rdma_cluster: Cluster) -> None:
    writer, reader = rdma_cluster.mounts
    wait_for_rdma(writer, reader)
    with client.Buffer(4 * MIB) as buffer:
        before = counters(reader)
        for version in range(1, VERSIONS + 1):
            data = random.Random(version).randbytes(SIZE + version)
            (writer.path / "weights").write_bytes(data)
            buffer.fill(f"{reader.path}/weights")
            assert (buffer.filled_by, buffer.version) == ("mount", version)
            assert buffer.memory[: buffer.filled].tobytes() == data
        after = counters(reader)
        # Once by each port, whenever that is first used.
        assert after["rdma_registrations"] <= before["rdma_registrations"] + len(find_ways())
        moved = sum(SIZE + version for version in range(1, VERSIONS + 1))
        assert after["rdma_bytes"] == before["rdma_bytes"] + moved
        assert after["rdma_staged_bytes"] == before["rdma_staged_bytes"]
        assert after["checked_bytes"] == before["checked_bytes"] + moved
        held = after["rdma_registered_bytes"]
    eventually(
        lambda: counters(reader)["rdma_registered_bytes"] <= held - 4 * MIB,
        "the memory is not registered any more",
    )


def test_a_buffer_is_filled_whole_while_links_fail(rdma_cluster: Cluster) -> None:
    """Links go down as soon as something of a version has come by RDMA: one, the other, both."""
    if not IN_GUEST:
        pytest.skip(f"sets links down; {REMEDY}")
    need_ports(len(LINKS))
    writer, reader = rdma_cluster.mounts
    before = counters(reader)
    with client.Buffer(33 * MIB) as buffer, ThreadPoolExecutor(1) as programs:
        for version, failing in enumerate(([LINKS[0]], [LINKS[1]], LINKS), 1):
            wait_for_rdma(writer, reader)
            (writer.path / "failing").write_bytes(pattern(version, 32 * MIB + version))
            buffer.memory[:] = 0
            filling = programs.submit(buffer.fill, reader.path / "failing")
            while not (filling.done() or buffer.memory[: 32 * MIB : PAGE_BYTES].any()):
                time.sleep(0.001)
            set_links(*failing, up=False)
            try:
                filling.result()
            finally:
                set_links(*LINKS, up=True)
            assert (buffer.filled_by, buffer.version) == ("mount", version)
            assert version_of(buffer.memory[: buffer.filled].tobytes()) == version
    after = counters(reader)
    broken = {name: after[name] - before[name] for name in ("rdma_fallbacks", "rdma_reroutes")}
    assert any(broken.values()), "nothing was on its way when a link failed"
    wait_for_rdma(writer, reader)


def test_device_whose_memory_the_card_cannot_reach_is_said_to_be_so(rdma_cluster: Cluster) -> None:
    """soft-RoCE knows no dma-buf."""
    writer, reader = rdma_cluster.mounts
    careless = rdma_cluster.add_mount("--no-verify")
    (writer.path / "for a device").write_bytes(random.Random(0).randbytes(SIZE))
    with dma_buf(SIZE + -SIZE % mmap.PAGESIZE) as lent:
        assert "to be checked" in why_not(reader, "for a device", lent)
        assert "cannot be registered" in why_not(careless, "for a device", lent)
        assert counters(careless)["rdma_fallbacks"] == 0
        (writer.path / "for a device").write_bytes(bytes(SIZE + mmap.PAGESIZE))
        with fails_with(errno.EFBIG):
            why_not(careless, "for a device", lent)
    eventually(lambda: counters(careless)["lent_buffers"] == 0, "it is given back")
    assert (careless.path / "for a device").read_bytes() == bytes(SIZE + mmap.PAGESIZE)
