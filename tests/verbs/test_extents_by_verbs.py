"""Extents that move by RDMA verbs: the same promises as over TCP, and what happens when one breaks."""

import errno
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trio
import trio.testing
from harness.closing import descriptor
from harness.clusters import Cluster as WholeCluster
from harness.clusters import counters
from harness.errors import fails_with
from harness.rdma import need_way, registered
from harness.transport_nodes import NodeProcess
from harness.transport_place import (
    KiB,
    MiB,
    Place,
    mounted,
    random_bytes,
    read_a_part,
    until,
    write_and_read,
)
from harness.verbs_place import by_verbs, only_path

from irdmafs.backend.transport import Extent, Fenced, FileRange, Target
from irdmafs.backend.transport.device import Growth
from irdmafs.backend.transport.verbs import path as path_module
from irdmafs.backend.transport.verbs.library import Library
from irdmafs.backend.transport.verbs.messages import Exposed, Reserve
from irdmafs.backend.transport.verbs.queue import Broken, Piece, QueuePair, Window
from irdmafs.backend.transport.verbs.rdma import Adapter, Choice, Rdma
from irdmafs.backend.transport.verbs.regions import Region

pytestmark = pytest.mark.verbs

# A host that is busy must not look like one that is gone.
TIMEOUT_S = 5.0


on_adapter = partial(by_verbs, timeout_s=TIMEOUT_S)


# -- what is moved arrives -----------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 4097, 64 * KiB, 4 * MiB, 8 * MiB, 9 * MiB + 5])
async def test_a_written_extent_is_on_every_node_of_the_chain_and_can_be_read(
    memory: Path, length: int, monkeypatch: pytest.MonkeyPatch, certified: dict[str, Any]
) -> None:
    monkeypatch.setattr(path_module, "_PIECE_BYTES_MAX", 4 * MiB)
    async with on_adapter(memory, choice=Choice(threshold_bytes=1), **certified) as cluster:
        await write_and_read(cluster, length)
        # Nothing of it went over TCP: once from here, once from node to node, and back twice.
        assert cluster.peers.counters.moved_bytes["verbs"] == 3 * length
        assert cluster.nodes[1].peers.counters.moved_bytes["verbs"] == length
        assert cluster.peers.counters.fallbacks == 0


async def test_a_part_of_an_extent_is_read_into_a_part_of_a_file(memory: Path) -> None:
    async with on_adapter(memory, 1) as cluster:
        await read_a_part(cluster)


async def test_what_is_short_goes_over_tcp(memory: Path) -> None:
    async with on_adapter(memory, 1) as cluster:
        await cluster.write(Extent(1, 0), bytes(64 * KiB - 1))
        assert cluster.peers.counters.moved_bytes["verbs"] == 0
        await cluster.write(Extent(2, 0), bytes(64 * KiB))
        assert cluster.peers.counters.moved_bytes["verbs"] == 64 * KiB


async def test_a_transfer_takes_one_round_trip_on_the_control_connection(memory: Path) -> None:
    """The node knows itself when all has arrived, and what is not needed any more it is told later."""
    async with on_adapter(memory) as cluster:
        for number in range(1, 4):
            await cluster.write(Extent(number, 0), bytes(MiB), 2)
            before = cluster.peers.counters.round_trips
            await cluster.write(Extent(number + 10, 0), bytes(MiB), 2)
            assert cluster.peers.counters.round_trips == before + 1
            await cluster.read(1, Extent(number, 0), 0, MiB)
            assert cluster.peers.counters.round_trips == before + 2


async def test_what_is_handed_on_is_registered_as_what_comes_in_is(memory: Path) -> None:
    """A version may come in by one adapter and be handed on by another, and the next one the other way."""
    async with on_adapter(memory, 1) as cluster:
        source = cluster.file("source", bytes(MiB))
        readable = os.open(cluster.memory / "source", os.O_RDONLY)
        options: dict[str, Any] = {"rdma": cluster.rdma, "stages": False}
        async with mounted(memory, timeout_s=TIMEOUT_S, **options) as peers:
            whole = FileRange(readable, 0, MiB)
            growth = Growth(MiB, MiB)
            await peers.device(1).write(Extent(1, 0), Target(1, 1, ()), whole, growth=growth)
            assert peers.counters.fallbacks == 0
        registrations = cluster.adapter.regions.registrations
        async with registered(cluster.adapter.regions, source):
            pass
        assert cluster.adapter.regions.registrations == registrations
        os.close(readable)
        os.close(source)


# -- what a node refuses -------------------------------------------------------------------------


async def test_errors_of_a_node_are_told_as_over_tcp(memory: Path) -> None:
    async with on_adapter(memory, 1) as cluster:
        device = cluster.peers.device(1)
        with pytest.raises(FileNotFoundError):
            await cluster.read(1, Extent(1, 0), 0, MiB)
        await cluster.write(Extent(1, 0), bytes(MiB))
        with fails_with(errno.EINVAL):
            await cluster.read(1, Extent(1, 0), 1, MiB)
        source = cluster.file("source", bytes(MiB))
        cluster.service(1).newest_config = 5
        with pytest.raises(Fenced):
            await device.write(Extent(2, 0), Target(9, 4, ()), FileRange(source, 0, MiB))
        cluster.service(1).limit_bytes = MiB - 1
        with fails_with(errno.ENOSPC):
            await device.write(Extent(2, 0), Target(1, 5, ()), FileRange(source, 0, MiB))
        assert not cluster.service(1).leftovers
        assert cluster.peers.counters.fallbacks == 0
        os.close(source)


async def test_an_error_further_down_names_its_node_and_the_first_keeps_all(memory: Path) -> None:
    data = random_bytes(5 * MiB)
    async with on_adapter(memory) as cluster:
        cluster.service(2).limit_bytes = MiB
        with pytest.raises(OSError) as caught:
            await cluster.write(Extent(1, 0), data, 2)
        assert caught.value.errno == errno.ENOSPC
        assert "store node 2" in str(caught.value)
        assert cluster.have(Extent(1, 0), data) == [1]
        cluster.service(2).limit_bytes = 1 << 30
        before = cluster.nodes[1].listener.host.counters.received_bytes
        await cluster.write(Extent(1, 0), data, 2)
        assert cluster.have(Extent(1, 0), data) == [1, 2]
        assert cluster.nodes[1].listener.host.counters.received_bytes == before


async def test_a_content_that_is_given_up_meanwhile_leaves_nothing(memory: Path) -> None:
    async with on_adapter(memory, 1) as cluster:
        service = cluster.service(1)
        service.may_seal = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cluster.write, Extent(1, 0), bytes(2 * MiB))
            await until(lambda: bool(service.created))
            nursery.cancel_scope.cancel()
        await cluster.peers.device(1).abort(1)
        await cluster.peers.ping(1)
        service.may_seal.set()
    assert not list((memory / "1" / "incoming").iterdir())


# -- registrations -------------------------------------------------------------------------------


async def test_a_file_without_a_name_does_not_stay_registered(memory: Path) -> None:
    async with on_adapter(memory, 1) as cluster:
        await cluster.write(Extent(1, 0), bytes(MiB))
        pinned_bytes = cluster.adapter.regions.pinned_bytes
        os.unlink(cluster.service(1).path(Extent(1, 0)))
        cluster.adapter.regions.drop_orphans()
        assert cluster.adapter.regions.pinned_bytes == pinned_bytes - MiB


async def test_what_was_not_used_for_longest_makes_room(memory: Path) -> None:
    async with on_adapter(memory, 1, Choice(limit_bytes=4 * MiB)) as cluster:
        for number in range(6):
            await cluster.write(Extent(number, 0), bytes(MiB))
        regions = cluster.adapter.regions
        assert regions.pinned_bytes <= 4 * MiB
        assert regions.registrations - len(regions._regions) >= 4
        assert cluster.peers.counters.fallbacks == 0


async def test_what_cannot_be_registered_goes_over_tcp(memory: Path) -> None:
    data = random_bytes(4 * MiB)
    async with on_adapter(memory, choice=Choice(limit_bytes=MiB)) as cluster:
        await cluster.write(Extent(1, 0), data, 2)
        assert await cluster.read(1, Extent(1, 0), 0, len(data)) == data
        assert cluster.have(Extent(1, 0), data) == [1, 2]
        assert cluster.peers.counters.fallbacks == 2
        assert cluster.peers.counters.moved_bytes["verbs"] == 0


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv (util-linux)")
async def test_a_node_that_may_not_lock_memory_is_written_to_over_tcp(memory: Path) -> None:
    data = random_bytes(MiB)
    prefix = (
        "prlimit", "--memlock=65536:65536",
        "setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock",
    )  # fmt: skip
    with NodeProcess(memory, 1, need_way().address, timeout_s=TIMEOUT_S, rdma=True, prefix=prefix):
        with Rdma(Choice()) as rdma:
            async with mounted(memory, timeout_s=TIMEOUT_S, rdma=rdma) as peers:
                await Place(memory, peers, {}).write(Extent(1, 0), data)
                assert peers.counters.moved_bytes["verbs"] == 0
        assert (memory / "1" / "1.0").read_bytes() == data


# -- when things break ---------------------------------------------------------------------------


async def test_a_writer_that_dies_leaves_nothing_on_the_node(memory: Path) -> None:
    async with on_adapter(memory, 1) as cluster:
        service = cluster.service(1)
        async with mounted(memory, timeout_s=TIMEOUT_S, rdma=cluster.rdma) as dying:
            path = await only_path(dying)
            exposed = await path.control.ask(
                Reserve(Extent(1, 0), Target(1, 1, ()), 8 * MiB, MiB, 0), Exposed
            )
            assert exposed.wanted
            assert service.leftovers
        await until(lambda: not service.leftovers)


# -- a whole cluster -----------------------------------------------------------------------------


def test_versions_of_a_cluster_move_by_rdma_or_else_tcp(rdma_cluster: WholeCluster) -> None:
    data = random_bytes(5 * MiB)
    writer, _ = rdma_cluster.mounts
    readers = [rdma_cluster.add_mount("--rdma", choice) for choice in ("off", "require")]
    before = counters(writer)
    (writer.path / "by RDMA").write_bytes(data)
    for mount in readers:
        assert (mount.path / "by RDMA").read_bytes() == data
    known = [counters(mount) for mount in (writer, *readers)]
    assert [each["rdma_fallbacks"] for each in known] == [before["rdma_fallbacks"], 0, 0]
    moved = before["rdma_bytes"] + len(data)
    assert [each["rdma_bytes"] for each in known] == [moved, 0, len(data)]


def test_what_a_node_has_wrong_is_noticed_and_read_from_another(rdma_cluster: WholeCluster) -> None:
    written = {f"file{i}": random_bytes(300 * KiB) for i in range(10)}
    written["in two pieces"] = random_bytes(9 * MiB)
    reader = rdma_cluster.add_mount("--rdma", "require")
    for name, data in written.items():
        (rdma_cluster.mounts[0].path / name).write_bytes(data)
    for path in (rdma_cluster.nodes[0].store / "extents").iterdir():
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
    for name, data in written.items():
        assert (reader.path / name).read_bytes() == data
    known = counters(reader)
    size = sum(map(len, written.values()))
    assert known["checked_bytes"] == size < known["rdma_bytes"]
    assert known["wrong_fetches"] and not known["rdma_fallbacks"]


# -- one queue pair ------------------------------------------------------------------------------


class Ends(NamedTuple):
    """Two queue pairs of this process, `there` for a peer of `here`, and memory of both, of 1 MiB."""

    adapter: Adapter
    here: QueuePair
    there: QueuePair
    mine: Region
    yours: Region

    async def grant(self) -> tuple[Window, Piece]:
        """Give `here` the right to write into the other memory, and a piece for all of it."""
        window = await self.there.grant(self.yours, 0, MiB, writable=True)
        return window, Piece(self.mine.address(0), MiB, self.mine.key, window.address, window.key)


@asynccontextmanager
async def with_ends() -> AsyncIterator[Ends]:
    async with AsyncExitStack() as stack:
        rdma = stack.enter_context(Rdma(Choice()))
        route = rdma.rails(need_way().address)[0].route
        adapter = rdma.open(route)
        regions: list[Region] = []
        for name in ("mine", "yours"):
            fd = stack.enter_context(descriptor(os.memfd_create(name)))
            os.posix_fallocate(fd, 0, MiB)
            regions.append(await stack.enter_async_context(registered(adapter.regions, fd)))
        here, there = adapter.queue_pair(route.gid), adapter.queue_pair(route.gid, ignored)
        there.connect(here.end(), TIMEOUT_S)
        here.connect(there.end(), TIMEOUT_S)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(here.run)
            nursery.start_soon(there.run)
            yield Ends(adapter, here, there, *regions)
            nursery.cancel_scope.cancel()


def ignored(number: int) -> None:
    """Take notice of a WRITE that has arrived."""


@pytest.mark.parametrize("misuse", ["beyond", "wrong way"])
async def test_a_key_is_of_no_use_but_for_what_it_was_given(misuse: str) -> None:
    async with with_ends() as ends:
        _, piece = await ends.grant()
        if misuse == "beyond":
            # Soft-RoCE checks the registration's range only: the file, which is one extent.
            piece = piece._replace(remote_address=piece.remote_address + KiB)
        with pytest.raises(Broken, match=r"REM_(ACCESS|OP|INV_REQ)_ERR"):
            await (ends.here.read if misuse == "wrong way" else ends.here.write)([piece])


async def test_a_transfer_that_is_cancelled_touches_memory_no_more() -> None:
    async with with_ends() as ends:
        window, piece = await ends.grant()
        with trio.move_on_after(0) as scope:
            await ends.here.write([piece] * 64)
        assert scope.cancelled_caught
        assert not ends.here._batches
        assert not ends.here.failure
        await ends.here.write([piece])
        window.close()


async def test_everything_that_waits_is_told_why_a_queue_pair_failed() -> None:
    async with with_ends() as ends:
        piece = Piece(ends.mine.address(0), 4096, ends.mine.key, 4096, 1)
        for _ in range(2):
            with pytest.raises(Broken, match="REM_"):
                await ends.here.write([piece] * 200)


class Gone:
    """An object of a device that is gone: that it cannot be closed is all that is told."""

    def __init__(self, made: Any, library: Library) -> None:
        self._made = made
        self._library = library

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made, name)

    def close(self) -> None:
        self._made.close()
        raise self._library.errors._kind("Failed to destroy it")


async def test_a_queue_pair_of_a_device_that_is_gone_ends_whatever_waits_for_it() -> None:
    async with with_ends() as ends:
        library = ends.adapter.library
        window, piece = await ends.grant()
        window._handle = Gone(window._handle, library)
        for pair in (ends.here, ends.there):
            pair._pair = Gone(pair._pair, library)

        async def write() -> None:
            with pytest.raises(Broken):
                await ends.here.write([piece] * 64)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            await trio.testing.wait_all_tasks_blocked()
            ends.here.close()
            ends.there.close()
        assert not ends.there.windows
