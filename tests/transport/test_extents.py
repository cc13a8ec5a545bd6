"""Moving extents between processes: what a caller may rely on, and what happens when a node does not."""

import errno
import json
import os
import random
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from harness.closing import descriptor
from harness.errors import fails_with
from harness.seeds import seeded
from harness.transport_nodes import NodeProcess
from harness.transport_place import (
    TIMEOUT_S,
    MiB,
    Place,
    in_cluster,
    mounted,
    random_bytes,
    read_a_part,
    until,
    write_and_read,
)

from irdmafs.backend.transport import Extent, Fenced, FileRange, Memory, Target, Unreachable, link
from irdmafs.backend.transport.messages import Parcel
from irdmafs.backend.transport.peers import Peers
from irdmafs.backend.transport.tcp import data
from irdmafs.backend.transport.tcp.channel import Channel
from irdmafs.backend.transport.tcp.streams import send_range
from irdmafs.backend.transport.tcp.wire import Reply
from irdmafs.backend.unwrap import background

NEVER_S = 10_000.0
STREAMS = 4


# -- what is moved arrives -----------------------------------------------------------------------


@pytest.fixture(params=["plain", "authenticated", "encrypted"])
def security(request: Any, certified: dict[str, Any]) -> dict[str, Any]:
    """Options of a cluster."""
    if request.param == "plain":
        return {}
    return certified | {"encrypt_data": request.param == "encrypted"}


@pytest.mark.long
@pytest.mark.parametrize("length", [0, 1, 100_000, 17 * MiB + 5])
async def test_a_written_extent_is_on_every_node_of_the_chain_and_can_be_read(
    memory: Path, security: dict[str, Any], length: int
) -> None:
    async with in_cluster(memory, **security) as cluster:
        await write_and_read(cluster, length)


async def test_a_group_may_have_more_members_than_replicas_while_it_moves(memory: Path) -> None:
    data = random_bytes(MiB)
    async with in_cluster(memory, 12) as cluster:
        await cluster.write(Extent(1, 0), data, *range(2, 13))
        assert cluster.have(Extent(1, 0), data) == [*range(1, 13)]


async def test_a_part_of_an_extent_is_read_into_a_part_of_a_file(memory: Path) -> None:
    async with in_cluster(memory, 1) as cluster:
        await read_a_part(cluster)


async def test_a_small_extent_is_put_in_one_round_trip_and_not_handed_on(memory: Path) -> None:
    async with in_cluster(memory, 2) as cluster:
        await cluster.peers.ping(1)
        before = cluster.peers.counters.round_trips
        await cluster.peers.device(1).put(Parcel(Extent(1, 0), Target(1, 1, ()), b"small"))
        assert cluster.peers.counters.round_trips == before + 1
        assert cluster.have(Extent(1, 0), b"small") == [1]
        with fails_with(errno.EINVAL):
            await cluster.peers.device(1).put(Parcel(Extent(2, 0), Target(1, 1, (2,)), b"small"))
        assert not cluster.have(Extent(2, 0), b"small")


async def test_once_connected_a_transfer_costs_one_round_trip(memory: Path) -> None:
    async with in_cluster(memory, 1) as cluster:
        data = random_bytes(17 * MiB)
        await cluster.write(Extent(1, 0), data)
        before = cluster.peers.counters.round_trips
        await cluster.write(Extent(2, 0), data)
        assert cluster.peers.counters.round_trips == before + 1
        assert await cluster.read(1, Extent(2, 0), 0, len(data)) == data
        assert cluster.peers.counters.round_trips == before + 2


class Turns(trio.abc.Instrument):
    """How often the event loop looked for what is ready."""

    count = 0

    def before_io_wait(self, timeout: float) -> None:
        self.count += 1


async def test_requests_take_few_turns_of_the_event_loop_and_many_leave_turns_to_others(
    memory: Path,
) -> None:
    """Of both ends', which are in this process."""
    asked, turns = 60, Turns()
    async with in_cluster(memory, 1) as cluster:
        await cluster.peers.ping(1)
        trio.lowlevel.add_instrument(turns)
        for _ in range(asked):
            await cluster.peers.ping(1)
        # The node hears it; the mount hears the answer, and whoever asked goes on.
        assert turns.count <= 3 * asked + 10
        turns.count = 0
        async with trio.open_nursery() as nursery:
            for _ in range(asked):
                nursery.start_soon(cluster.peers.ping, 1)
        assert asked // 8 <= turns.count <= asked
        trio.lowlevel.remove_instrument(turns)


async def test_many_small_extents_come_in_one_round_trip(memory: Path) -> None:
    async with in_cluster(memory, 1) as cluster:
        device = cluster.peers.device(1)
        for number in range(40):
            await device.put(Parcel(Extent(number, 0), Target(1, 1, ()), b"%d" % number * number))
        before = cluster.peers.counters.round_trips
        got = await device.get([Extent(number, 0) for number in range(50)], 60)
        assert cluster.peers.counters.round_trips == before + 1
        for number in range(50):
            data = b"%d" % number * number
            assert got[number] == (data if number < 40 and len(data) <= 60 else None)


async def test_more_than_a_message_holds_is_got_in_several(memory: Path) -> None:
    async with in_cluster(memory, 1) as cluster:
        device = cluster.peers.device(1)
        data = [random_bytes(MiB - number) for number in range(20)]
        for number, each in enumerate(data):
            await device.put(Parcel(Extent(number, 0), Target(1, 1, ()), each))
        assert await device.get([Extent(number, 0) for number in range(20)], MiB) == data


async def test_a_working_copy_is_adopted_and_sent_down_the_chain(memory: Path) -> None:
    data = random_bytes(5 * MiB)
    async with in_cluster(memory) as cluster:
        Path(f"{memory}/1/incoming/7").write_bytes(data)
        inode = os.stat(f"{memory}/1/incoming/7").st_ino
        for _ in "once", "and again, as if the answer had been lost":
            await cluster.peers.device(1).adopt(Extent(7, 0), Target(1, 1, (2, 3)), "7")
            assert cluster.have(Extent(7, 0), data) == [1, 2, 3]
        assert os.stat(cluster.service(1).path(Extent(7, 0))).st_ino == inode


async def test_an_extent_that_a_node_has_is_not_sent_to_it_again(memory: Path) -> None:
    data = random_bytes(40 * MiB)
    async with in_cluster(memory) as cluster:
        await cluster.write(Extent(1, 0), data)
        for _ in range(3):
            # The node sends what it has to the one that lacks it.
            await cluster.write(Extent(1, 0), data, 2)
            assert cluster.have(Extent(1, 0), data) == [1, 2]
        assert (cluster.service(1).created, cluster.service(2).created) == (1, 1)


@pytest.mark.long
async def test_many_transfers_at_once_do_not_mix(memory: Path) -> None:
    chooser = seeded()
    async with in_cluster(memory, timeout_s=20.0) as cluster:

        async def one(number: int) -> None:
            length = chooser.randrange(6 * MiB)
            data = random.Random(number).randbytes(length)
            first, *rest = chooser.sample((1, 2, 3), 3)
            extent = Extent(number, number)
            await cluster.write(extent, data, *rest, first=first)
            assert cluster.have(extent, data) == [1, 2, 3]
            assert await cluster.read(rest[0], extent, 0, length) == data

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(one, number)


# -- what a node says no to ----------------------------------------------------------------------


@pytest.mark.parametrize("refusing", [1, 2, 3])
@pytest.mark.parametrize("length", [100, 24 * MiB])
async def test_an_old_configuration_is_fenced_wherever_in_the_chain_it_is_noticed(
    memory: Path, refusing: int, length: int
) -> None:
    async with in_cluster(memory) as cluster:
        cluster.service(refusing).newest_config = 5
        source = cluster.file("source", random_bytes(length))
        device = cluster.peers.device(1)
        target = Target(0x30007, 4, (2, 3))
        with pytest.raises(Fenced):
            await device.write(Extent(1, 0), target, FileRange(source, 0, length))
        with pytest.raises(Fenced):
            alone = Target(0x30007, 4, ())
            await cluster.peers.device(refusing).put(Parcel(Extent(2, 0), alone, b"small"))
        os.close(source)
        assert not cluster.service(refusing).sealed
        await until(lambda: not any(node.service.leftovers for node in cluster.nodes.values()))


@pytest.mark.parametrize("full", [1, 2])
async def test_a_full_node_is_named_and_nothing_is_left_there(memory: Path, full: int) -> None:
    async with in_cluster(memory) as cluster:
        cluster.service(full).limit_bytes = 50
        for extent, length in ((Extent(1, 0), 24 * MiB), (Extent(2, 0), 100)):
            with pytest.raises(OSError, match=f"store node {full}: ") as caught:
                await cluster.write(extent, random_bytes(length), 2, 3)
            assert caught.value.errno == errno.ENOSPC
        await until(lambda: not cluster.service(full).leftovers)
        assert not cluster.service(full).sealed


async def test_bytes_that_a_node_has_lost_meanwhile_are_no_others(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An application may truncate the file that it gave the node."""
    extent, landed = Extent(1, 0), list[int]()

    def shrink_and_send(channel: Channel, fd: int, offset: int, length: int) -> Reply | None:
        os.truncate(cluster.service(1).path(extent), length // 2)
        return send_range(channel, fd, offset, length)

    monkeypatch.setattr(data, "send_range", shrink_and_send)
    async with in_cluster(memory, 1) as cluster:
        await cluster.write(extent, bytes(4 * MiB))
        # It asks once more, on a new connection.
        with descriptor(os.memfd_create("target")) as target, fails_with(errno.EINVAL):
            whole = FileRange(target, 0, 4 * MiB)
            await cluster.peers.device(1).read(extent, 0, whole, lambda *at: landed.append(at[1]))
        assert sum(landed) == 2 * MiB


async def test_what_a_node_does_not_keep_is_enoent(memory: Path) -> None:
    async with in_cluster(memory, 1) as cluster:
        with pytest.raises(FileNotFoundError):
            await cluster.read(1, Extent(1, 0), 0, 20 * MiB)
        assert await cluster.peers.device(1).get([Extent(1, 0)], 100) == [None]


async def test_a_transfer_that_was_given_up_makes_way_for_the_next_one(memory: Path) -> None:
    data = random_bytes(8 * MiB)
    async with in_cluster(memory, 1) as cluster:
        cluster.service(1).may_seal = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cluster.write, Extent(1, 0), data)
            await until(lambda: cluster.service(1).created == 1)
            nursery.cancel_scope.cancel()
        cluster.service(1).may_seal.set()
        await cluster.write(Extent(1, 0), data)
        assert cluster.have(Extent(1, 0), data) == [1]


# -- nodes that fail -----------------------------------------------------------------------------


@asynccontextmanager
async def with_processes(
    memory: Path, count: int = 3, timeout_s: float = TIMEOUT_S, hold: Path | None = None
) -> AsyncIterator[tuple[Peers, dict[int, NodeProcess]]]:
    async with AsyncExitStack() as stack:
        nodes = {
            node: NodeProcess(memory, node, timeout_s=timeout_s, hold=hold)
            for node in range(1, count + 1)
        }
        for process in nodes.values():
            stack.enter_context(process)
        yield await stack.enter_async_context(mounted(memory, timeout_s=timeout_s)), nodes


def sparse_file(path: Path, length: int) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.truncate(fd, length)
    return fd


def full_file(path: Path, length: int) -> int:
    """Without holes."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, length)
    return fd


@pytest.mark.parametrize(("failing", "how"), [(1, "kill"), (2, "kill"), (3, "pause")])
async def test_a_node_that_fails_during_a_write_is_named_and_the_rest_is_sent_around_it(
    memory: Path, failing: int, how: str
) -> None:
    length = 96 * MiB
    hold = memory / "hold"
    hold.touch()

    async with with_processes(memory, hold=hold) as (peers, nodes):
        source = full_file(memory / "source", length)

        async def write() -> None:
            target = Target(1, 1, (2, 3))
            with pytest.raises(Unreachable) as caught:
                await peers.device(1).write(Extent(1, 0), target, FileRange(source, 0, length))
            assert caught.value.node == failing

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            incoming = memory / str(failing) / "incoming"
            await until(lambda: any(incoming.iterdir()))
            getattr(nodes[failing], how)()
            hold.unlink()
        others = [node for node in nodes if node != failing]
        await peers.device(others[0]).write(
            Extent(1, 0), Target(1, 2, (*others[1:],)), FileRange(source, 0, length)
        )
        for node in others:
            assert (memory / str(node) / "1.0").stat().st_size == length
        os.close(source)


@pytest.mark.parametrize("how", ["kill", "pause"])
async def test_a_node_that_fails_during_a_read_is_unreachable(memory: Path, how: str) -> None:
    length = 1 << 30

    async with with_processes(memory, 1) as (peers, nodes):
        os.close(sparse_file(memory / "1" / "1.0", length))
        target = sparse_file(memory / "target", length)

        async def read() -> None:
            with pytest.raises(Unreachable):
                await peers.device(1).read(Extent(1, 0), 0, FileRange(target, 0, length))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await until(lambda: os.fstat(target).st_blocks > 0)
            getattr(nodes[1], how)()
        os.close(target)


async def test_a_silent_node_fails_calls_and_is_left_alone_until_it_answers(memory: Path) -> None:
    async with with_processes(memory, 1) as (peers, nodes):
        await peers.ping(1)
        nodes[1].pause()
        with pytest.raises(Unreachable, match="silent"):
            await peers.ping(1)
        connects = peers.counters.connects
        for _ in range(100):
            with pytest.raises(Unreachable, match="silent"):
                await peers.device(1).get([Extent(1, 0)], 10)
        assert peers.counters.connects == connects
        nodes[1].resume()

        async def answers() -> bool:
            try:
                await peers.ping(1)
            except Unreachable:
                return False
            return True

        with trio.fail_after(60):
            while not await answers():
                await trio.sleep(0.05)


@pytest.mark.parametrize("chain", [(), (2,)])
async def test_a_write_ends_with_the_lease_of_the_last_node_that_it_waits_for(
    memory: Path, chain: tuple[int, ...]
) -> None:
    last = 1 + len(chain)
    async with in_cluster(memory, last, timeout_s=NEVER_S) as cluster:
        cluster.service(last).may_seal = trio.Event()

        async def write() -> None:
            with pytest.raises(Unreachable) as caught:
                await cluster.write(Extent(1, 0), bytes(8 * MiB), *chain)
            assert caught.value.node == last

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            await until(lambda: bool(cluster.service(last).created))
            (memory / "addresses" / f"{last:x}").unlink()
            (cluster.nodes[1].peers if chain else cluster.peers).node_changed(last)


@pytest.fixture
def silent(memory: Path) -> Iterator[Path]:
    """The record of node 1, where somebody listens and never answers."""
    address = memory / "addresses" / "1"
    address.parent.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address.write_text(json.dumps(["127.0.0.1", listening.getsockname()[1], 1]))
        yield address


async def ping_in_vain(peers: Peers) -> None:
    with pytest.raises(Unreachable):
        await peers.ping(1)


async def test_attempts_to_reach_a_node_end_with_its_lease(memory: Path, silent: Path) -> None:
    async with mounted(memory, timeout_s=NEVER_S) as peers:
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(ping_in_vain, peers)
            await until(lambda: peers.counters.connects == 1)
            silent.unlink()
            peers.node_changed(1)
        assert peers.counters.connects == 1


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.usefixtures("silent")
async def test_a_process_that_stood_still_leaves_no_node_alone_for_as_long(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(link, "time", clock)
    patience_s = 0.1
    async with mounted(memory, timeout_s=patience_s) as peers, trio.open_nursery() as nursery:
        nursery.start_soon(ping_in_vain, peers)
        await until(lambda: peers.counters.connects == 1)
        clock.now += 1000
        await until(lambda: not nursery.child_tasks)
        clock.now += patience_s
        to_node = peers.device(1).link
        to_node.caller = replace(to_node.caller, timeout_s=NEVER_S)
        for _ in range(3):
            await ping_in_vain(peers)  # which does not wait for the next attempt
            await until(lambda: peers.counters.connects == 2)


async def test_a_node_is_found_again_where_it_restarts(memory: Path) -> None:
    async with mounted(memory, timeout_s=TIMEOUT_S) as peers:
        for number in range(3):
            with NodeProcess(memory, 1):
                await peers.device(1).put(Parcel(Extent(number, 0), Target(1, 1, ()), b"data"))
                await Place(memory, peers, {}).write(Extent(number, 1), bytes(20 * MiB))
            with pytest.raises(Unreachable):
                await peers.ping(1)


async def test_a_node_that_is_not_registered_is_unreachable(memory: Path) -> None:
    async with mounted(memory, timeout_s=TIMEOUT_S) as peers:
        with pytest.raises(Unreachable, match="not registered"):
            await peers.ping(77)


@pytest.mark.parametrize("address", ["é" * 300, "x" * 300, "a\0b", ""])
async def test_a_node_with_an_address_that_nothing_has_is_unreachable(
    memory: Path, address: str
) -> None:
    async with in_cluster(memory, 1) as cluster:
        (memory / "addresses" / "1").write_text(json.dumps([address, 1, 1, ["tcp"]]))
        with pytest.raises(Unreachable):
            await cluster.peers.ping(1)


async def test_another_node_at_a_known_address_is_not_taken_for_it(memory: Path) -> None:
    async with in_cluster(memory, 1) as cluster:
        (memory / "addresses" / "8").write_text((memory / "addresses" / "1").read_text())
        with pytest.raises(Unreachable, match="this is store node 1, not 8"):
            await cluster.peers.ping(8)


async def test_a_node_that_takes_long_to_seal_is_waited_for(memory: Path) -> None:
    async with in_cluster(memory, timeout_s=1.0) as cluster:
        cluster.service(3).may_seal = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cluster.write, Extent(1, 0), random_bytes(9 * MiB), 2, 3)
            small = Parcel(Extent(2, 0), Target(1, 1, ()), b"x")
            nursery.start_soon(cluster.peers.device(3).put, small)
            # Longer than a node may be silent.
            await trio.sleep(3 * 1.0)
            assert len(nursery.child_tasks) == 2
            cluster.service(3).may_seal.set()
        assert len(cluster.service(3).sealed) == 2


# -- callers that fail ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["write", "read"])
async def test_cancelled_transfer_ends_at_once_and_leaves_nothing(memory: Path, kind: str) -> None:
    length = 1 << 29

    async with with_processes(memory, 2, timeout_s=30.0) as (peers, nodes):
        threads = threading.active_count()
        os.close(sparse_file(memory / "1" / "9.0", length))
        make = full_file if kind == "write" else sparse_file
        fd = make(memory / "file", length)
        device = peers.device(1)
        async with trio.open_nursery() as nursery:
            if kind == "write":
                nursery.start_soon(
                    device.write, Extent(1, 0), Target(1, 1, (2,)), FileRange(fd, 0, length)
                )
                incoming = memory / "1" / "incoming"
                await until(lambda: any(incoming.iterdir()))
            else:
                nursery.start_soon(device.read, Extent(9, 0), 0, FileRange(fd, 0, length))
                await until(lambda: os.fstat(fd).st_blocks > 0)
            nodes[1].pause()
            # It would wait for half a minute if it were not cancelled.
            with trio.fail_after(15):
                nursery.cancel_scope.cancel()
                await trio.sleep_forever()
        nodes[1].resume()
        os.close(fd)
        for node in nodes:
            incoming = memory / str(node) / "incoming"
            await until(lambda incoming=incoming: not any(incoming.iterdir()))
            assert not (memory / str(node) / "1.0").exists()
        await peers.ping(1)
        # Threads of trio's cache end by themselves after a while; no new ones are needed.
        assert threading.active_count() <= threads + STREAMS + 1


async def test_a_source_that_is_too_short_is_an_error_and_not_an_extent(memory: Path) -> None:
    async with in_cluster(memory, 2) as cluster:
        source = cluster.file("source", random_bytes(20 * MiB))
        with fails_with(errno.EIO):
            await cluster.peers.device(1).write(
                Extent(1, 0), Target(1, 1, (2,)), FileRange(source, 0, 21 * MiB)
            )
        os.close(source)
        await until(lambda: not cluster.service(1).leftovers and not cluster.service(2).leftovers)
        assert not cluster.service(1).sealed and not cluster.service(2).sealed


async def test_a_node_that_ends_while_a_stream_fails_ends_without_an_error() -> None:
    async def stream() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise OSError(errno.EIO, "the stream failed")

    with trio.CancelScope() as node:
        async with background() as nursery:
            nursery.start_soon(stream)
            await trio.testing.wait_all_tasks_blocked()
            node.cancel()
            await trio.sleep_forever()
    assert node.cancelled_caught


async def test_full_target_is_enospc_and_no_node_is_blamed(memory: Path, small_tmpfs: Path) -> None:
    async with in_cluster(memory, 1) as cluster:
        await cluster.write(Extent(1, 0), random_bytes(20 * MiB))
        target = os.open(small_tmpfs / "target", os.O_RDWR | os.O_CREAT)
        with fails_with(errno.ENOSPC):
            await cluster.peers.device(1).read(Extent(1, 0), 0, FileRange(target, 0, 20 * MiB))
        os.close(target)


# -- files with holes ----------------------------------------------------------------------------


def file_with_holes(cluster: Place, size: int, data: dict[int, bytes]) -> int:
    fd = cluster.file("source")
    os.ftruncate(fd, size)
    for offset, content in data.items():
        os.pwrite(fd, content, offset)
    return fd


@pytest.mark.long
@pytest.mark.parametrize("segments", [0, 1, 40])
async def test_holes_stay_holes_on_every_node_of_the_chain_and_when_they_are_read(
    memory: Path, security: dict[str, Any], segments: int
) -> None:
    size = 512 * MiB + 5
    data = {number * 12 * MiB + 4096: random_bytes(70_000) for number in range(segments)}
    extent = Extent(5, 7)
    async with in_cluster(memory, **security) as cluster:
        source = file_with_holes(cluster, size, data)
        # Once more to those that have it, too.
        for chain in ((2, 3), (2,), ()):
            await cluster.peers.device(1).write(
                extent, Target(1, 1, chain), FileRange(source, 0, size)
            )
        for node in cluster.nodes:
            target = cluster.file(f"target{node}", b"first")
            device = cluster.peers.device(node)
            # Data that an earlier try left is removed.
            os.pwrite(target, b"x" * 100_000, 12 * MiB)
            await device.read(extent, 0, FileRange(target, 5, size, Memory.HOLES))
            status = os.fstat(target)
            assert status.st_size == 5 + size
            assert status.st_blocks * 512 < (segments + 1) * 2 * MiB
            for offset, content in data.items():
                assert os.pread(target, len(content), 5 + offset) == content
                assert os.pread(target, 4096, offset - 4091) == bytes(4096)
            kept = os.stat(cluster.nodes[node].service.path(extent))
            assert kept.st_size == size
            assert kept.st_blocks * 512 < (segments + 1) * 2 * MiB
            os.close(target)
        os.close(source)


async def test_room_is_asked_for_the_data_of_a_file_and_not_for_its_length(memory: Path) -> None:
    async with in_cluster(memory, 2) as cluster:
        cluster.nodes[2].service.limit_bytes = 10 * MiB
        source = file_with_holes(cluster, 512 * MiB, {MiB: random_bytes(4 * MiB)})
        device = cluster.peers.device(1)
        await device.write(Extent(1, 0), Target(1, 1, (2,)), FileRange(source, 0, 512 * MiB))
        os.pwrite(source, random_bytes(10 * MiB), 100 * MiB)
        with fails_with(errno.ENOSPC, errno.ENOTCONN):
            await device.write(Extent(2, 0), Target(1, 1, (2,)), FileRange(source, 0, 512 * MiB))
        os.close(source)
