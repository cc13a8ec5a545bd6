"""A mover is added by a folder and a line, and has all the promises that the others have.

The one that is added here, tests/ferry, moves extents through files in a directory that both ends see.
"""

import errno
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from ferry.messages import MESSAGES, Bring, Fetch
from ferry.mover import Ferry
from ferry.way import BYTES_MIN, FerryWay
from harness.errors import fails_with
from harness.transport_nodes import serving
from harness.transport_place import MiB, Place, mounted, random_bytes

from irdmafs.backend.transport import Extent, Target
from irdmafs.backend.transport.frames import Codec
from irdmafs.backend.transport.messages import Parcel
from irdmafs.backend.transport.mover import Mover
from irdmafs.backend.transport.movers import all_movers

TIMEOUT_S = 20.0
SESSION, KEY = 7, b"k" * 32
# TCP says 0, as it does not know.
FASTER, AS_FAST = 1, 0


@asynccontextmanager
async def at_the_pier(
    memory: Path, without: Sequence[int] = (), first: bool = True, **options: Any
) -> AsyncIterator[Place]:
    """Nodes 1 to 3 and a mount, all of them with the ferry but the nodes `without`. It is the first of the
    movers, or the last."""
    pier = memory / "pier"
    pier.mkdir()

    def movers(node: int) -> Sequence[Mover]:
        if node in without:
            return all_movers()
        # The line of movers.py.
        return (Ferry(pier), *all_movers()) if first else (*all_movers(), Ferry(pier))

    async with AsyncExitStack() as stack:
        nodes = {
            node: await stack.enter_async_context(
                serving(memory, node, movers=movers(node), timeout_s=TIMEOUT_S)
            )
            for node in (1, 2, 3)
        }
        peers = await stack.enter_async_context(
            mounted(memory, movers=movers(0), timeout_s=TIMEOUT_S, **options)
        )
        yield Place(memory, peers, nodes)
    assert not pier.exists() or not list(pier.iterdir())


async def test_an_extent_goes_down_the_chain_and_comes_back_by_another_mover(memory: Path) -> None:
    data = random_bytes(3 * MiB + 5)
    async with at_the_pier(memory) as place:
        await place.write(Extent(1, 0), data, 2, 3)
        assert place.have(Extent(1, 0), data) == [1, 2, 3]
        for node in place.nodes:
            assert await place.read(node, Extent(1, 0), 77, MiB) == data[77 : 77 + MiB]
        assert place.peers.counters.moved_bytes == {"ferry": len(data) + 3 * MiB}
        for node in (1, 2):
            assert place.nodes[node].peers.counters.moved_bytes == {"ferry": len(data)}


async def test_a_node_without_the_mover_is_reached_in_another_way(memory: Path) -> None:
    data = random_bytes(MiB)
    async with at_the_pier(memory, without=[2]) as place:
        await place.write(Extent(1, 0), data, 2, 3)
        assert place.have(Extent(1, 0), data) == [1, 2, 3]
        assert await place.read(2, Extent(1, 0), 0, MiB) == data
        assert place.peers.counters.moved_bytes == {"ferry": MiB, "tcp": MiB}
        assert place.nodes[1].peers.counters.moved_bytes == {"tcp": MiB}
        assert place.peers.counters.fallbacks == 0


async def test_the_length_decides_which_mover_it_is(memory: Path) -> None:
    async with at_the_pier(memory) as place:
        for content, length in enumerate((BYTES_MIN - 1, BYTES_MIN), 1):
            await place.write(Extent(content, 0), bytes(length))
        await place.peers.device(1).put(Parcel(Extent(3, 0), Target(1, 1, ()), bytes(BYTES_MIN)))
        assert place.peers.counters.moved_bytes == {"tcp": BYTES_MIN - 1, "ferry": BYTES_MIN}
        assert place.peers.counters.message_bytes == BYTES_MIN


@pytest.mark.parametrize("mbit_s", [FASTER, AS_FAST, None], ids=["faster", "as fast", "unreached"])
async def test_the_faster_mover_does_it_and_the_first_one_of_two_that_are_as_fast(
    memory: Path, monkeypatch: pytest.MonkeyPatch, mbit_s: int | None
) -> None:
    async def reach(way: FerryWay) -> int | None:
        return mbit_s

    monkeypatch.setattr(FerryWay, "reach", reach)
    async with at_the_pier(memory, first=False) as place:
        await place.write(Extent(1, 0), bytes(MiB))
        name = "ferry" if mbit_s == FASTER else "tcp"
        assert place.peers.counters.moved_bytes == {name: MiB}


async def test_what_a_mover_cannot_do_after_all_is_done_by_the_next(memory: Path) -> None:
    data = random_bytes(MiB)
    async with at_the_pier(memory) as place:
        (memory / "pier").rmdir()
        await place.write(Extent(1, 0), data, 2)
        assert place.have(Extent(1, 0), data) == [1, 2]
        assert place.peers.counters.moved_bytes == {"tcp": MiB}
        assert place.peers.counters.fallbacks == 1


async def test_an_error_of_the_node_is_the_callers_and_tried_in_no_other_way(memory: Path) -> None:
    async with at_the_pier(memory) as place:
        with pytest.raises(FileNotFoundError):
            await place.read(1, Extent(9, 0), 0, MiB)
        place.service(1).limit_bytes = BYTES_MIN
        with fails_with(errno.ENOSPC):
            await place.write(Extent(1, 0), bytes(MiB))
        assert place.peers.counters.fallbacks == 0
        assert not place.service(1).leftovers


@pytest.mark.parametrize("key", [KEY, bytes(32)], ids=["its own", "another's"])
async def test_the_rights_to_a_movers_messages_are_checked_for_it(memory: Path, key: bytes) -> None:
    async with at_the_pier(memory, session=lambda: SESSION, session_key=key) as place:
        place.service(1).owners = {SESSION: KEY}
        extent = Extent(SESSION << 24 | 1, 0)
        if key == KEY:
            await place.write(extent, bytes(MiB))
        else:
            with pytest.raises(PermissionError):
                await place.write(extent, bytes(MiB))
        assert place.have(extent, bytes(MiB)) == ([1] if key == KEY else [])


def test_two_movers_with_one_tag_are_refused_at_once() -> None:
    class Other(Fetch, tag=64):
        pass

    other = MESSAGES._replace(rights={Other: MESSAGES.rights[Fetch]}, answers=())
    with pytest.raises(TypeError, match="tag"):
        Codec([MESSAGES, other])


def test_only_what_is_about_an_extent_can_be_somebodys_own() -> None:
    from irdmafs.backend.transport.messages import Ping

    with pytest.raises(TypeError, match="nobody owns"):
        Codec([MESSAGES._replace(rights={Ping: MESSAGES.rights[Bring]})])
