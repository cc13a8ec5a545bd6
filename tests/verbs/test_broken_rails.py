"""Rails that break: operations go on over another one, else over TCP, and rails that healed are used again.

Nodes listen on an address of loopback, so that the control connection outlives the rails.
"""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio
from harness import rdma as rdma_ports
from harness.programs.breakable import break_pair
from harness.rdma import set_links
from harness.transport_nodes import NodeProcess
from harness.transport_place import MiB, Place, mounted, until
from harness.verbs_place import VerbsPlace, by_verbs, lanes, when_posted

from irdmafs.backend.transport import Extent, Unreachable
from irdmafs.backend.transport.device import NotThisWay
from irdmafs.backend.transport.verbs import networks
from irdmafs.backend.transport.verbs import way as way_module
from irdmafs.backend.transport.verbs.messages import HANDLES_MAX, QUEUE_PAIRS_MAX
from irdmafs.backend.transport.verbs.queue import QueuePair
from irdmafs.backend.transport.verbs.rdma import Choice, Rdma
from irdmafs.backend.transport.verbs.regions import Regions
from irdmafs.backend.transport.verbs.serving import VerbsServing
from irdmafs.backend.transport.verbs.staging import Staging

pytestmark = pytest.mark.verbs

# A host that is busy must not look like one that is gone.
TIMEOUT_S = 15.0
LOOPBACK = "127.0.0.1"
_LINKS = ("roce0", "roce1")
FIRST_ADDRESS = "10.9.0.1"


@pytest.fixture
def links() -> Iterator[tuple[str, ...]]:
    """The links below the devices rxe0 and rxe1, which may be set down."""
    if not rdma_ports.IN_GUEST:
        pytest.skip(f"sets links down; {rdma_ports.REMEDY}")
    rdma_ports.need_ports(2)
    yield _LINKS
    set_links(*_LINKS, up=True)


async def there_and_back(place: Place, number: int, length: int) -> None:
    """Write an extent to both nodes, read it from both."""
    data = Random(number).randbytes(4096) * (length // 4096) + bytes(length % 4096)
    extent = Extent(number, 0)
    await place.write(extent, data, 2)
    assert place.have(extent, data) == [1, 2]
    for node in place.nodes:
        assert await place.read(node, extent, 0, length) == data
        os.unlink(place.service(node).path(extent))


def in_place(
    memory: Path,
    choice: Choice = Choice(),  # noqa: B008
    address: str = LOOPBACK,
    timeout_s: float = TIMEOUT_S,
) -> AbstractAsyncContextManager[VerbsPlace]:
    return by_verbs(memory, choice=choice, of_nodes=choice, address=address, timeout_s=timeout_s)


def goes_through(device: str) -> Callable[[QueuePair], bool]:
    return lambda pair: pair.port.name == device


# -- several rails and queue pairs ---------------------------------------------------------------


@pytest.mark.usefixtures("links")
async def test_a_long_read_is_divided_between_rails_and_many_operations_too(memory: Path) -> None:
    async with in_place(memory) as place:
        await lanes(place.peers, count=2)
        await there_and_back(place, 1, 16 * MiB + 7)
        moved = place.peers.counters.rails
        # A write goes whole over one of them, a read over both.
        assert sum(moved.values()) == 3 * (16 * MiB + 7)
        assert len({name for name, count in moved.items() if count > 4 * MiB}) == 2
        moved.clear()
        async with trio.open_nursery() as nursery:
            for number in range(2, 10):
                nursery.start_soon(there_and_back, place, number, MiB)
        assert len(moved) == 2
        assert sum(moved.values()) == 8 * 3 * MiB
        assert place.peers.counters.fallbacks == place.peers.counters.reroutes == 0


@pytest.mark.usefixtures("links")
async def test_queue_pairs_end_with_their_connection(memory: Path) -> None:
    async with in_place(memory) as place:
        found = await lanes(place.peers, count=2)
        (responder,) = (
            each for each in place.nodes[1].serving(VerbsServing).responders if len(each._pairs)
        )
        assert len(responder._pairs) == len(found._lanes) == 2
        assert max(lane.number for lane in found._lanes) < QUEUE_PAIRS_MAX < HANDLES_MAX
        found.control.close("the test ends it")
        await until(lambda: not responder._pairs)
        await until(lambda: not any(lane.is_usable for lane in found._lanes))


# -- links that go down --------------------------------------------------------------------------


@pytest.mark.parametrize("down", _LINKS)
async def test_a_link_that_goes_down_costs_no_operation_and_is_used_again(
    memory: Path,
    links: tuple[str, ...],
    down: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    async with in_place(memory) as place:
        found = await lanes(place.peers, count=2)
        device = f"rxe{links.index(down)}"
        lost = when_posted(
            monkeypatch, 3, lambda pair: set_links(down, up=False), goes_through(device)
        )
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(there_and_back, place, number, 5 * MiB)
        assert lost.is_set()
        monkeypatch.undo()
        counters = [place.peers.counters, place.nodes[1].peers.counters]
        assert sum(each.fallbacks for each in counters) == 0
        assert sum(each.reroutes for each in counters) > 0
        assert len(found.usable) == 1
        set_links(down, up=True)
        await until(lambda: len(found.usable) == 2)
        place.peers.counters.rails.clear()
        await there_and_back(place, 100, 8 * MiB)
        assert any(device in name for name in place.peers.counters.rails)
        # Only the mount speaks to the first node.
        said = [text for text in caplog.messages if text.startswith("store node 1: ")]
        (lost_line,) = (text for text in said if "is lost" in text)
        (back_line,) = (text for text in said if "is back" in text)
        assert f"{device}/1" in lost_line
        assert f"port 1 of {device} is down" in lost_line or "WR_FLUSH_ERR" in lost_line
        assert f"over rxe{1 - links.index(down)}/1" in lost_line
        assert f"{device}/1" in back_line


@pytest.mark.usefixtures("links")
async def test_the_last_link_that_goes_down_leaves_tcp_until_it_is_up_again(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with in_place(memory, Choice(device="rxe0")) as place:
        found = await lanes(place.peers)
        lost = when_posted(monkeypatch, 3, lambda pair: set_links("roce0", up=False))
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(there_and_back, place, number, 5 * MiB)
        assert lost.is_set()
        monkeypatch.undo()
        counters = place.peers.counters
        assert counters.fallbacks > 0
        assert not found.is_usable
        set_links("roce0", up=True)
        await until(lambda: len(found.usable) == 1)
        before = counters.moved_bytes["verbs"]
        await there_and_back(place, 100, 5 * MiB)
        assert counters.moved_bytes["verbs"] == before + 3 * 5 * MiB


@pytest.fixture
def first_address(links: tuple[str, ...]) -> Iterator[str]:
    """Of the first link, which may be taken away."""
    yield FIRST_ADDRESS
    if FIRST_ADDRESS not in {str(address) for address in networks.own_addresses()}:
        change_address("add")


def change_address(what: str) -> None:
    """Sockets outlive a link that is down as long as this host still has the address."""
    command = ["ip", "address", what, f"{FIRST_ADDRESS}/24", "dev", _LINKS[0]]
    subprocess.run(command, check=True)


async def test_a_way_that_takes_the_control_connection_along_makes_the_node_unreachable(
    memory: Path, first_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with in_place(memory, Choice(device="rxe0"), first_address, timeout_s=5.0) as place:
        await lanes(place.peers)
        await there_and_back(place, 1, MiB)
        lost = when_posted(monkeypatch, 2, lambda pair: change_address("del"))
        with pytest.raises(Unreachable):
            await place.write(Extent(2, 0), bytes(5 * MiB))
        assert lost.is_set()
        monkeypatch.undo()
        change_address("add")
        with trio.fail_after(60):
            while True:
                try:
                    await there_and_back(place, 3, MiB)
                    break
                except Unreachable:
                    await trio.sleep(0.1)
        await lanes(place.peers)


@pytest.mark.usefixtures("links")
async def test_a_rail_that_was_down_at_first_is_used_when_it_comes_up(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(way_module, "_LOOK_S", 0.1)
    set_links("roce1", up=False)
    async with in_place(memory) as place:
        await lanes(place.peers)
        set_links("roce1", up=True)
        await lanes(place.peers, count=2)


@pytest.mark.usefixtures("links")
async def test_a_device_that_is_gone_is_left_alone(memory: Path) -> None:
    async with in_place(memory) as place:
        found = await lanes(place.peers, count=2)
        (adapter,) = (each for each in place.rdma.adapters if each.name == "rxe0")
        # Its port is not there when the kernel tells of something next.
        adapter.port = 200
        set_links("roce0", up=False)
        set_links("roce0", up=True)
        await until(lambda: bool(adapter.failure))
        await until(lambda: not adapter.pairs)
        await there_and_back(place, 1, 5 * MiB)
        assert list(found.usable) == ["rxe1/1 - rxe1/1 (10.9.1.1)"]
        assert place.peers.counters.fallbacks == 0


# -- queue pairs that break ----------------------------------------------------------------------


@pytest.mark.usefixtures("links")
async def test_queue_pairs_that_break_under_load_cost_no_operation_and_are_replaced(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(way_module, "RETRY_S", 0.1)
    broken: list[QueuePair] = []
    post = QueuePair._post
    posted = 0

    def posting(self: QueuePair, requests: list[Any]) -> Any:
        nonlocal posted
        posted += 1
        batch = post(self, requests)
        if posted % 20 == 0 and len(broken) < 6:
            broken.append(self)
            break_pair(self)
        return batch

    monkeypatch.setattr(QueuePair, "_post", posting)
    async with in_place(memory) as place:
        found = await lanes(place.peers, count=2)
        for round in range(3):
            async with trio.open_nursery() as nursery:
                for number in range(6):
                    nursery.start_soon(there_and_back, place, 10 * round + number, 5 * MiB)
        assert len(broken) == 6
        assert place.peers.counters.reroutes + place.nodes[1].peers.counters.reroutes > 0
        await until(lambda: len(found.usable) == 2)
    for node in ("1", "2"):
        assert not list((memory / node / "incoming").iterdir())


@pytest.mark.usefixtures("links")
async def test_a_queue_pair_that_broke_at_the_node_is_noticed_by_who_uses_it_next(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(way_module, "RETRY_S", 0.1)
    async with in_place(memory) as place:
        found = await lanes(place.peers, count=2)
        (responder,) = (
            each for each in place.nodes[1].serving(VerbsServing).responders if each._pairs
        )
        first = found._lanes[0]
        path = first.path
        responder._pairs[first.number].fail("the node's device broke it")
        await until(lambda: first.number not in responder._pairs)
        await there_and_back(place, 1, MiB)
        counters = place.peers.counters
        assert (counters.fallbacks, counters.reroutes) == (0, 1)
        await until(lambda: first.path not in (None, path))
        await there_and_back(place, 2, MiB)
        assert (counters.fallbacks, counters.reroutes) == (0, 1)


@pytest.mark.usefixtures("links")
@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_node_that_is_killed_takes_all_rails_along(
    memory: Path, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    length = 24 * MiB

    async def test(node: NodeProcess) -> None:
        with Rdma(Choice()) as rdma:
            async with mounted(memory, timeout_s=TIMEOUT_S, rdma=rdma) as peers:
                place = Place(memory, peers, {})
                await place.write(Extent(1, 0), bytes(length))
                await lanes(peers, count=2)
                killed = when_posted(monkeypatch, 1, lambda pair: node.kill())
                with pytest.raises(Unreachable):
                    if operation == "read":
                        await place.read(1, Extent(1, 0), 0, length)
                    else:
                        await place.write(Extent(2, 0), bytes(length))
                assert killed.is_set()
                for adapter in rdma.adapters:
                    users = sum(region.users for region in adapter.regions._regions)
                    assert users == bool(adapter.staging.slots)  # staging uses its own for ever
                await until(lambda: not any(adapter.pairs for adapter in rdma.adapters))

    with NodeProcess(memory, 1, timeout_s=TIMEOUT_S, rdma=True) as node:
        trio.run(test, node)
    assert not (memory / "1" / "2.0").exists()


# -- memory that cannot be had -------------------------------------------------------------------


@pytest.mark.usefixtures("links")
@pytest.mark.parametrize("whose", ["caller", "node"])
async def test_memory_that_cannot_be_registered_is_moved_over_tcp_and_the_rails_stay(
    memory: Path, whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with in_place(memory) as place:
        found = await lanes(place.peers, count=2)
        rdma = place.rdma if whose == "caller" else place.of_nodes
        failing: set[object] = set()
        for adapter in rdma.adapters:
            failing |= {adapter.regions, adapter.staging}
        acquire, make = Regions.acquire, Staging.make

        async def cannot_acquire(self: Regions, *arguments: Any) -> Any:
            if self in failing:
                raise OSError(12, "Cannot allocate memory")
            return await acquire(self, *arguments)

        async def cannot_make(self: Staging) -> None:
            if self in failing:
                raise NotThisWay("memory cannot be registered")
            await make(self)

        monkeypatch.setattr(Regions, "acquire", cannot_acquire)
        monkeypatch.setattr(Staging, "make", cannot_make)
        await there_and_back(place, 1, MiB)
        assert place.peers.counters.fallbacks == 3
        assert place.peers.counters.reroutes == 0
        assert len(found.usable) == 2
        failing.clear()
        await there_and_back(place, 2, MiB)
        assert place.peers.counters.fallbacks == 3


@pytest.mark.usefixtures("links")
async def test_a_window_that_cannot_be_had_makes_it_tcp_and_nothing_stays_in_use(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with in_place(memory) as place:
        await lanes(place.peers, count=2)
        library = place.of_nodes.adapters[0].library

        def none(*arguments: Any) -> Any:
            raise OSError(12, "Cannot allocate memory")

        with monkeypatch.context() as patch:
            patch.setattr(library, "MW", none)
            await there_and_back(place, 1, MiB)
        assert place.peers.counters.fallbacks == 3
        for adapter in place.of_nodes.adapters:
            users = sum(region.users for region in adapter.regions._regions)
            assert users == bool(adapter.staging.slots)  # staging uses its own for ever
        await there_and_back(place, 2, MiB)
        assert place.peers.counters.fallbacks == 3
