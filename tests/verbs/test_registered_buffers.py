"""A reader's own memory, registered once, that a network card fills."""

import array
import errno
import fcntl
import itertools
import json
import mmap
import os
import random
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from harness.clusters import MIB, Cluster, ClusterMount, Plan, counters
from harness.mountpoint import eventually
from harness.patterns import pattern, version_of
from harness.rdma import IN_GUEST, REMEDY, need_address, need_ports, ports

from irdmafs import client

pytestmark = [pytest.mark.verbs, pytest.mark.timeout(300)]

SIZE = 3 * MIB + 12345
VERSIONS = 6
FILLS = 60
LINKS = ["roce0", "roce1"]
F_SEAL_SHRINK = 0x2
UDMABUF_CREATE = 0x40187542


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    plan = Plan(
        nodes=2, mounts=2, namespaces=False, node_config={"listen": need_address()},
        # A host that is busy must not look like one that is gone.
        lease_ttl_s=20,
    )  # fmt: skip
    with Cluster(plan) as made:
        yield made


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


def test_versions_are_read_into_memory_that_was_registered_once(cluster: Cluster) -> None:
    writer, reader = cluster.mounts[:2]
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
        assert after["rdma_registrations"] <= before["rdma_registrations"] + len(ports())
        moved = sum(SIZE + version for version in range(1, VERSIONS + 1))
        assert after["rdma_bytes"] == before["rdma_bytes"] + moved
        assert after["rdma_staged_bytes"] == before["rdma_staged_bytes"]
        assert after["checked_bytes"] == before["checked_bytes"] + moved
        held = after["rdma_registered_bytes"]
    eventually(
        lambda: counters(reader)["rdma_registered_bytes"] <= held - 4 * MIB,
        "the memory is not registered any more",
    )


@contextmanager
def links_failing(seed: int) -> Iterator[None]:
    """Now this one is down for a while, now the other, now both."""
    over = threading.Event()
    rng = random.Random(seed)

    def set_links(state: str, names: list[str]) -> None:
        for name in names:
            subprocess.run(["ip", "link", "set", name, state], check=True)

    def break_and_mend() -> None:
        while not over.wait(rng.uniform(0.1, 0.5)):
            names = rng.sample(LINKS, rng.randint(1, len(LINKS)))
            set_links("down", names)
            over.wait(rng.uniform(0.1, 0.5))
            set_links("up", names)

    thread = threading.Thread(target=break_and_mend)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        set_links("up", LINKS)


def test_a_buffer_is_filled_whole_while_links_fail(cluster: Cluster) -> None:
    if not IN_GUEST:
        pytest.skip(f"sets links down; {REMEDY}")
    need_ports(len(LINKS))
    seed = int(os.environ.get("IRDMAFS_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"\nIRDMAFS_SEED={seed}")
    writer, reader = cluster.mounts[:2]
    before = counters(reader)

    def broken() -> dict[str, int]:
        now = counters(reader)
        return {name: now[name] - before[name] for name in ("rdma_fallbacks", "rdma_reroutes")}

    with client.Buffer(16 * MIB) as buffer, links_failing(seed):
        # On a busy machine few links fail just while something is on its way.
        for version in itertools.count(1):
            (writer.path / "failing").write_bytes(pattern(version, 8 * MIB + version))
            buffer.fill(reader.path / "failing")
            assert (buffer.filled_by, buffer.version) == ("mount", version)
            assert version_of(buffer.memory[: buffer.filled].tobytes()) == version
            if version >= FILLS and any(broken().values()):
                break
    print(broken())
    wait_for_rdma(writer, reader)


def test_a_device_whose_memory_the_card_cannot_reach_is_said_to_be_so(cluster: Cluster) -> None:
    """soft-RoCE knows no dma-buf."""
    writer, reader = cluster.mounts[:2]
    careless = cluster.add_mount("--no-verify")
    (writer.path / "for a device").write_bytes(random.Random(0).randbytes(SIZE))
    with dma_buf(SIZE + -SIZE % mmap.PAGESIZE) as lent:
        assert "to be checked" in why_not(reader, "for a device", lent)
        assert "cannot be registered" in why_not(careless, "for a device", lent)
        assert counters(careless)["rdma_fallbacks"] == 0
        (writer.path / "for a device").write_bytes(bytes(SIZE + mmap.PAGESIZE))
        with pytest.raises(OSError) as caught:
            why_not(careless, "for a device", lent)
        assert caught.value.errno == errno.EFBIG
    eventually(lambda: counters(careless)["lent_buffers"] == 0, "it is given back")
    assert (careless.path / "for a device").read_bytes() == bytes(SIZE + mmap.PAGESIZE)
