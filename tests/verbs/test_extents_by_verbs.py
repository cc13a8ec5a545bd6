"""Extents that move by RDMA verbs: the same promises as over TCP, and what happens when one breaks."""

import errno
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from harness.clusters import Cluster as WholeCluster
from harness.clusters import counters
from harness.errors import fails_with
from harness.programs.breakable import break_pair
from harness.rdma import need_address, registered
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
from harness.verbs_place import by_verbs, lanes, only_path, when_posted

from irdmafs.backend.transport import Extent, Fenced, FileRange, Target
from irdmafs.backend.transport.device import Growth
from irdmafs.backend.transport.verbs import path as path_module
from irdmafs.backend.transport.verbs import way as way_module
from irdmafs.backend.transport.verbs.library import Library
from irdmafs.backend.transport.verbs.messages import Exposed, Reserve
from irdmafs.backend.transport.verbs.queue import Broken, Piece, QueuePair
from irdmafs.backend.transport.verbs.rdma import Adapter, Choice, Rdma

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
        async with registered(cluster.adapter.regions, source) as region:
            assert region.writable
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
        with pytest.raises(Fenced) as fenced:
            await device.write(Extent(2, 0), Target(9, 4, ()), FileRange(source, 0, MiB))
        assert fenced.value.group == 9
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
    with NodeProcess(memory, 1, need_address(), timeout_s=TIMEOUT_S, rdma=True, prefix=prefix):
        with Rdma(Choice()) as rdma:
            async with mounted(memory, timeout_s=TIMEOUT_S, rdma=rdma) as peers:
                await Place(memory, peers, {}).write(Extent(1, 0), data)
                assert peers.counters.moved_bytes["verbs"] == 0
        assert (memory / "1" / "1.0").read_bytes() == data


# -- when things break ---------------------------------------------------------------------------


async def test_a_broken_queue_pair_costs_no_operation_and_is_replaced(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(way_module, "RETRY_S", 0.0)
    data = random_bytes(24 * MiB)
    async with on_adapter(memory) as cluster:
        # All have their queue pairs.
        await cluster.write(Extent(3, 0), data, 2)
        broken = when_posted(monkeypatch, 2, break_pair)
        await cluster.write(Extent(1, 0), data, 2)
        assert cluster.have(Extent(1, 0), data) == [1, 2]
        assert broken.is_set()
        await lanes(cluster.nodes[1].peers, 2)
        await lanes(cluster.peers)
        broken = when_posted(monkeypatch, 2, break_pair)
        assert await cluster.read(1, Extent(1, 0), 0, len(data)) == data
        assert broken.is_set()
        assert cluster.peers.counters.fallbacks + cluster.nodes[1].peers.counters.fallbacks == 2
        await lanes(cluster.peers)
        before = cluster.peers.counters.moved_bytes["verbs"]
        await cluster.write(Extent(2, 0), data, 2)
        assert cluster.peers.counters.moved_bytes["verbs"] == before + len(data)
    for node in (1, 2):
        assert not list((memory / str(node) / "incoming").iterdir())


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


class Ends:
    """Two queue pairs of this process, `there` for a peer of `here`, and memory of both."""

    def __init__(self, adapter: Adapter, here: QueuePair, there: QueuePair) -> None:
        self.adapter = adapter
        self.here = here
        self.there = there


@asynccontextmanager
async def with_ends() -> AsyncIterator[Ends]:
    with Rdma(Choice()) as rdma:
        route = rdma.rails(need_address())[0].route
        adapter = rdma.open(route)
        here, there = adapter.queue_pair(route.gid), adapter.queue_pair(route.gid, ignored)
        there.connect(here.end(), TIMEOUT_S)
        here.connect(there.end(), TIMEOUT_S)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(here.run)
            nursery.start_soon(there.run)
            yield Ends(adapter, here, there)
            nursery.cancel_scope.cancel()


def ignored(number: int) -> None:
    """Take notice of a WRITE that has arrived."""


@pytest.fixture
def two_files(memory: Path) -> Iterator[tuple[int, int]]:
    fds = [os.open(memory / name, os.O_RDWR | os.O_CREAT) for name in ("one", "two")]
    for fd in fds:
        os.write(fd, bytes(MiB))
    yield fds[0], fds[1]
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize("misuse", ["beyond", "closed", "wrong way", "another's"])
async def test_a_key_is_of_no_use_but_for_what_it_was_given(
    memory: Path, two_files: tuple[int, int], misuse: str
) -> None:
    async with with_ends() as ends:
        adapter, owner = ends.adapter, ends.there
        async with (
            registered(adapter.regions, two_files[0]) as mine,
            registered(adapter.regions, two_files[1]) as yours,
        ):
            if misuse == "another's":
                owner = adapter.queue_pair(ends.there.gid, ignored)
                peer = adapter.queue_pair(ends.there.gid)
                owner.connect(peer.end(), TIMEOUT_S)
                peer.connect(owner.end(), TIMEOUT_S)
            async with trio.open_nursery() as nursery:
                if owner is not ends.there:
                    nursery.start_soon(owner.run)
                window = await owner.grant(yours, 0, MiB // 2, writable=True)
                # Soft-RoCE checks the registration's range only: the file, which is one extent.
                at = MiB - KiB if misuse == "beyond" else 0
                piece = Piece(mine.address(0), 4096, mine.key, window.address + at, window.key)
                if misuse == "closed":
                    window.close()
                with pytest.raises(Broken, match=r"REM_(ACCESS|OP|INV_REQ)_ERR"):
                    if misuse == "wrong way":
                        await ends.here.read([piece])
                    else:
                        await ends.here.write([piece])
                nursery.cancel_scope.cancel()
            ends.here.close()
            ends.there.close()
            if misuse == "another's":
                owner.close()
                peer.close()


async def test_a_transfer_that_is_cancelled_touches_memory_no_more(
    memory: Path, two_files: tuple[int, int]
) -> None:
    async with with_ends() as ends:
        adapter = ends.adapter
        async with (
            registered(adapter.regions, two_files[0]) as mine,
            registered(adapter.regions, two_files[1]) as yours,
        ):
            window = await ends.there.grant(yours, 0, MiB, writable=True)
            piece = Piece(mine.address(0), MiB, mine.key, window.address, window.key)
            with trio.move_on_after(0) as scope:
                await ends.here.write([piece] * 64)
            assert scope.cancelled_caught
            assert not ends.here._batches
            assert not ends.here.failure
            await ends.here.write([piece])
            window.close()


async def test_everything_that_waits_is_told_why_a_queue_pair_failed(
    memory: Path, two_files: tuple[int, int]
) -> None:
    async with with_ends() as ends:
        adapter = ends.adapter
        async with registered(adapter.regions, two_files[0]) as mine:
            piece = Piece(mine.address(0), 4096, mine.key, 4096, 1)
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


async def test_a_queue_pair_of_a_device_that_is_gone_ends_whatever_waits_for_it(
    two_files: tuple[int, int],
) -> None:
    async with with_ends() as ends:
        library, regions = ends.adapter.library, ends.adapter.regions
        async with (
            registered(regions, two_files[0]) as mine,
            registered(regions, two_files[1]) as yours,
        ):
            window = await ends.there.grant(yours, 0, MiB, writable=True)
            piece = Piece(mine.address(0), MiB, mine.key, window.address, window.key)
            window._handle = Gone(window._handle, library)
            ends.there._pair = Gone(ends.there._pair, library)
            ends.here._pair = Gone(ends.here._pair, library)
            async with trio.open_nursery() as nursery:

                async def write() -> None:
                    with pytest.raises(Broken):
                        await ends.here.write([piece] * 64)

                nursery.start_soon(write)
                await trio.testing.wait_all_tasks_blocked()
                ends.here.close()
                ends.there.close()
            assert not ends.there.windows
