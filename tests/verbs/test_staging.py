"""What a mount moves by RDMA verbs passes memory that stays registered; its files are not registered."""

import errno
import os
import random
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from harness.clusters import Cluster, train
from harness.errors import fails_with
from harness.roce import find_ways
from harness.transport_place import KiB, MiB, mounted, random_bytes
from harness.verbs_place import VerbsPlace, by_verbs

from irdmafs.backend.files import digest as digest_module
from irdmafs.backend.files.digest import Stripe, digest_of_bytes
from irdmafs.backend.transport import Extent, FileRange, Memory, Target
from irdmafs.backend.transport.peers import Peers
from irdmafs.backend.transport.verbs import regions as regions_module
from irdmafs.backend.transport.verbs import staging as staging_module
from irdmafs.backend.transport.verbs.rdma import Choice

pytestmark = pytest.mark.verbs

# A host that is busy must not look like one that is gone.
TIMEOUT_S = 20.0
NOWHERE = Target(1, 1, ())
# Slots of 256 KiB.
SMALL = Choice(threshold_bytes=1, limit_bytes=2 * MiB)


@asynccontextmanager
async def with_worker(memory: Path, choice: Choice = SMALL) -> AsyncIterator[VerbsPlace]:
    """`choice` is the worker's."""
    async with by_verbs(memory, 1, choice, of_nodes=Choice(), timeout_s=TIMEOUT_S) as worker:
        yield worker
        for adapter in worker.rdma.adapters:
            assert len(adapter.staging.free) == len(adapter.staging.slots)


@pytest.mark.parametrize("processors", [1, 2])
@pytest.mark.parametrize("length", [1, 256 * KiB + 1, 5 * MiB + 77])
async def test_bytes_arrive_as_they_were_and_no_file_is_registered(
    memory: Path, monkeypatch: pytest.MonkeyPatch, length: int, processors: int
) -> None:
    data = random_bytes(length)
    monkeypatch.setattr(staging_module, "_processors", lambda: processors)
    async with with_worker(memory) as worker:
        for number in range(1, 4):
            await worker.write(Extent(number, 0), data)
            assert await worker.read(1, Extent(number, 0), 0, length) == data
        assert worker.adapter.regions.registrations == 1
        assert worker.adapter.staging.staged_bytes == 6 * length
        assert worker.peers.counters.moved_bytes["verbs"] == 6 * length
        assert worker.peers.counters.message_bytes == 0


async def read_lent(peers: Peers, fd: int, length: int, memory: Memory = Memory.LENT) -> bytes:
    """Extent 1, into memory."""
    await peers.device(1).read(Extent(1, 0), 0, FileRange(fd, 0, length, memory))
    return os.pread(fd, length, 0)


def lent(size: int) -> int:
    fd = os.memfd_create("lent")
    os.posix_fallocate(fd, 0, size)
    return fd


@pytest.mark.parametrize("block_bytes", [64 * MiB, 256 * KiB])
async def test_memory_that_is_lent_is_registered_once(
    memory: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    data = random_bytes(MiB)
    monkeypatch.setattr(regions_module, "LENT_BLOCK_BYTES", block_bytes)
    blocks = -(-MiB // block_bytes)
    async with with_worker(memory, SMALL._replace(limit_bytes=8 * MiB)) as worker:
        await worker.write(Extent(1, 0), data)
        regions, staging = worker.adapter.regions, worker.adapter.staging
        before, staged_bytes = regions.registrations, staging.staged_bytes
        fd = lent(3 * MiB)
        for length in (MiB, 10, 500 * KiB):
            os.pwrite(fd, bytes(MiB), 0)
            assert await read_lent(worker.peers, fd, length) == data[:length]
        assert regions.registrations == before + blocks
        at = 2 * MiB + 77  # across two small blocks
        await worker.peers.device(1).read(
            Extent(1, 0), 7, FileRange(fd, at, 256 * KiB, Memory.LENT)
        )
        assert os.pread(fd, 256 * KiB + 2, at - 1) == b"\0" + data[7 : 256 * KiB + 7] + b"\0"
        registrations = regions.registrations
        assert registrations == before + (1 if block_bytes > 3 * MiB else blocks + 2)
        assert staging.staged_bytes == staged_bytes
        regions.drop_orphans()  # it has no name, but a lender
        assert await read_lent(worker.peers, fd, 10) == data[:10]
        assert regions.registrations == registrations
        pinned = regions.pinned_bytes
        status = os.fstat(fd)
        regions.forget((status.st_dev, status.st_ino))
        assert regions.pinned_bytes == pinned - min(3 * MiB, (registrations - before) * block_bytes)
        assert await read_lent(worker.peers, fd, MiB) == data
        os.close(fd)


async def test_memory_that_cannot_be_registered_is_filled_by_memory_that_is(memory: Path) -> None:
    data = random_bytes(MiB)
    async with with_worker(memory) as worker:
        await worker.write(Extent(1, 0), data)
        staged_bytes = worker.adapter.staging.staged_bytes
        fd = lent(3 * MiB)  # more than may be registered
        assert await read_lent(worker.peers, fd, MiB) == data
        assert worker.adapter.staging.staged_bytes == staged_bytes + MiB
        assert worker.peers.counters.fallbacks == 0
        os.close(fd)


async def test_a_device_is_never_reached_over_tcp(memory: Path) -> None:
    """Whatever is in the way: its memory is no file, where bytes could be put."""
    data = random_bytes(MiB)
    async with with_worker(memory) as worker:
        await worker.write(Extent(1, 0), data)
        fd = lent(MiB)
        async with mounted(memory, timeout_s=TIMEOUT_S) as without:
            for each in worker.peers, without:
                with fails_with(errno.EOPNOTSUPP):
                    await read_lent(each, fd, MiB, Memory.DEVICE)
        assert os.pread(fd, MiB, 0) == bytes(MiB)
        assert not worker.peers.counters.fallbacks
        os.close(fd)


async def test_many_transfers_share_few_slots(memory: Path) -> None:
    async with with_worker(memory) as worker:

        async def there_and_back(number: int) -> None:
            data = random.Random(number).randbytes(2 * MiB + number)
            await worker.write(Extent(number, 0), data)
            assert await worker.read(1, Extent(number, 0), 0, len(data)) == data

        async with trio.open_nursery() as nursery:
            for number in range(1, 7):
                nursery.start_soon(there_and_back, number)
        assert len(worker.adapter.staging.slots) == 4
        assert worker.peers.counters.fallbacks == 0


async def test_who_stalls_leaves_slots_free(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    copy = staging_module._read_file

    def stalled_copy(fd: int, view: memoryview, offset: int) -> None:
        assert len(view) < MiB or go_on.wait(60)
        copy(fd, view, offset)

    async with with_worker(memory, Choice()) as worker:
        data = random_bytes(10 * MiB)
        monkeypatch.setattr(staging_module, "_processors", lambda: 2)
        monkeypatch.setattr(staging_module, "_read_file", stalled_copy)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.write, Extent(1, 0), data)
            try:
                await worker.write(Extent(2, 0), data[: 64 * KiB])
            finally:
                go_on.set()
        assert await worker.read(1, Extent(1, 0), 0, len(data)) == data
        assert await worker.read(1, Extent(2, 0), 0, 64 * KiB) == data[: 64 * KiB]


@pytest.mark.parametrize("length", [256 * KiB, 9 * MiB + 77])
async def test_what_is_written_is_hashed_as_it_passes(
    memory: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    data = random_bytes(length)

    def read_again(*arguments: Any) -> None:
        pytest.fail("the file is read a second time")

    async with with_worker(memory, Choice()) as worker:
        fd = worker.file("file", data)
        found = Stripe(fd, 0, length)
        await worker.peers.device(1).write(
            Extent(1, 0), NOWHERE, FileRange(fd, 0, length), found.landed
        )
        with monkeypatch.context() as patch:
            patch.setattr(digest_module, "_hash", read_again)
            assert await found.finish() == digest_of_bytes(data)
        assert worker.peers.shows_bytes(1)
        os.close(fd)


async def test_an_error_of_the_file_is_the_callers(memory: Path) -> None:
    async with with_worker(memory) as worker:
        await worker.write(Extent(1, 0), bytes(MiB))
        fd = worker.file("file", bytes(MiB))
        read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        with fails_with(errno.EBADF):
            await worker.peers.device(1).read(Extent(1, 0), 0, FileRange(read_only, 0, MiB))
        with fails_with(errno.EIO):
            await worker.peers.device(1).write(Extent(2, 0), NOWHERE, FileRange(fd, 0, 2 * MiB))
        assert worker.peers.counters.fallbacks == 0
        os.close(read_only)
        os.close(fd)


@pytest.mark.parametrize("operation", ["read", "write"])
async def test_a_slot_is_used_again_only_when_its_copy_has_ended(
    memory: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """Although the transfer is cancelled meanwhile."""
    copying, go_on = threading.Event(), threading.Event()
    name = "write_at" if operation == "read" else "_read_file"
    copy: Any = getattr(staging_module, name)

    def slow_copy(*arguments: Any) -> None:
        copying.set()
        assert go_on.wait(60)
        copy(*arguments)

    async with with_worker(memory) as worker:
        data = random_bytes(MiB)
        await worker.write(Extent(1, 0), data)
        staging = worker.adapter.staging
        monkeypatch.setattr(staging_module, "_processors", lambda: 2)
        monkeypatch.setattr(staging_module, "_ALL_AT_ONCE_BYTES", 0)
        monkeypatch.setattr(staging_module, "_AT_ONCE_BYTES", 0)
        monkeypatch.setattr(staging_module, name, slow_copy)
        async with trio.open_nursery() as nursery:
            if operation == "read":
                nursery.start_soon(worker.read, 1, Extent(1, 0), 0, MiB)
            else:
                nursery.start_soon(worker.write, Extent(2, 0), data)
            await trio.to_thread.run_sync(copying.wait)
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await trio.testing.wait_all_tasks_blocked()
                assert len(staging.free) < len(staging.slots)
                go_on.set()
        assert len(staging.free) == len(staging.slots)
        monkeypatch.undo()
        assert await worker.read(1, Extent(1, 0), 0, MiB) == data


def test_training_registers_nothing_and_no_parameter_byte_is_in_python(
    rdma_cluster: Cluster,
) -> None:
    size_bytes = 6 * MiB
    mounts = [rdma_cluster.add_mount("--rdma", "require") for _ in range(2)]
    first, *others = train(mounts[0], mounts[1], 4, size_bytes)
    assert first.saved.registrations == first.loaded.registrations == 1
    # Once for each device, when it is used for the first time.
    for end in ("saved", "loaded"):
        assert sum(getattr(version, end).registrations for version in others) < len(find_ways())
    for version in others:
        for cost in (version.saved, version.loaded):
            assert cost.python_bytes == 0
            assert cost.fallbacks == 0
            assert size_bytes <= cost.moved_bytes == cost.rdma_bytes == cost.staged_bytes
