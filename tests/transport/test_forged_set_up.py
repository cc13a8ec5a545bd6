"""Set-up messages of queue pairs that are forged, or repeated by somebody who saw them.

What two ends say to each other to move an extent by verbs (numbers of queue pairs, addresses, keys,
handles) is of no use to anybody else: whoever has it all reads nothing by it, writes nothing, and keeps
nobody from being served. The attacker is another member of the cluster; test_adversary.py has who is on the
way of a control connection.
"""

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import trio
from harness.closing import descriptor
from harness.rdma import need_ports, registered
from harness.transport_nodes import Node, serving
from harness.transport_place import KiB, Place, mounted, random_bytes, until
from harness.verbs_place import lanes, only_path

from irdmafs.backend.transport import Extent, FileRange, Target
from irdmafs.backend.transport.messages import Answer, Request
from irdmafs.backend.transport.peers import Peers
from irdmafs.backend.transport.verbs import messages
from irdmafs.backend.transport.verbs.devices import Route
from irdmafs.backend.transport.verbs.library import Library
from irdmafs.backend.transport.verbs.path import Path as VerbsPath
from irdmafs.backend.transport.verbs.queue import Broken, Piece
from irdmafs.backend.transport.verbs.rdma import Adapter, Choice, Rdma
from irdmafs.backend.transport.verbs.serving import Arrival, VerbsServing

pytestmark = pytest.mark.verbs

TIMEOUT_S = 20.0
LENGTH = 256 * KiB
TARGET = Target(1, 1, ())
SECRET, COMING = Extent(1, 0), Extent(2, 0)


class Party:
    """A mount with adapters of its own, and one queue pair to node 1."""

    def __init__(self, peers: Peers, path: VerbsPath, file: int) -> None:
        self.peers = peers
        self.path = path
        self.file = file

    async def ask(self, request: Request) -> Answer:
        return await self.path.control.ask(request, Answer)

    async def expose(self) -> messages.Exposed:
        exposed = await self.ask(messages.Expose(SECRET, 0, LENGTH))
        assert isinstance(exposed, messages.Exposed)
        return exposed

    async def reserve(self) -> messages.Exposed:
        reserved = await self.ask(messages.Reserve(COMING, TARGET, LENGTH, LENGTH, 0))
        assert isinstance(reserved, messages.Exposed)
        return reserved

    async def move(self, way: str, given: messages.Exposed, number: int | None = None) -> None:
        """Between the file and the node's memory, by this party's queue pair. Raises Broken."""
        async with registered(self.path.adapter.regions, self.file) as mine:
            piece = Piece(mine.address(0), LENGTH, mine.key, given.address, given.key, number)
            if way == "read":
                await self.path.pair.read([piece])
            else:
                await self.path.pair.write([piece])

    def bytes(self) -> bytes:
        return os.pread(self.file, LENGTH, 0)


class Scene(Place):
    """Node 1 has an extent. The victim may read it, and is writing another one; the attacker knows all that
    the victim and the node said."""

    def __init__(self, memory: Path, node: Node, victim: Party, attacker: Party) -> None:
        super().__init__(memory, victim.peers, {1: node})
        self.victim = victim
        self.attacker = attacker
        self.secret = random_bytes(LENGTH)

    async def begin(self) -> None:
        """Have everything said that the attacker knows."""
        source = self.file("secret", self.secret)
        await self.victim.peers.device(1).write(SECRET, TARGET, FileRange(source, 0, LENGTH))
        os.close(source)
        self.exposed = await self.victim.expose()
        self.reserved = await self.victim.reserve()
        responders = self.nodes[1].serving(VerbsServing).responders
        # The node's end of the victim's control connection, and of its queue pair.
        [self.responder] = [each for each in responders if each._operations]
        [self.node_end] = [pair.end() for pair in self.responder._pairs.values()]

    async def end(self) -> None:
        """Nothing was read or written, and the victim's transfers end as if nobody had been there."""
        assert self.attacker.bytes() == bytes(LENGTH)
        assert not self.have(COMING, bytes(LENGTH))
        await self.victim.move("read", self.exposed)
        assert self.victim.bytes() == self.secret
        arrival = self.responder._operations[self.reserved.handle]
        assert isinstance(arrival, Arrival)
        assert arrival.growth.done == 0
        await self.victim.move("write", self.reserved, self.reserved.handle)
        await until(lambda: self.have(COMING, self.secret) == [1])


@asynccontextmanager
async def party(memory: Path, name: str) -> AsyncIterator[Party]:
    with descriptor(os.open(memory / name, os.O_RDWR | os.O_CREAT)) as file:
        os.posix_fallocate(file, 0, LENGTH)
        with Rdma(Choice(device="rxe0")) as rdma:
            async with mounted(memory, timeout_s=TIMEOUT_S, rdma=rdma) as peers:
                yield Party(peers, await only_path(peers), file)


@pytest.fixture(params=["windows", "none"])
def windows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices with memory windows, and devices without."""
    make = Adapter.__init__

    def made(port: Adapter, library: Library, route: Route, limit_bytes: int) -> None:
        make(port, library, route, limit_bytes)
        port.has_windows = False

    if request.param == "none":
        monkeypatch.setattr(Adapter, "__init__", made)


def on_scene(memory: Path, attack: Callable[[Scene], Awaitable[None]]) -> None:
    need_ports()

    async def main() -> None:
        async with AsyncExitStack() as stack:
            rdma = stack.enter_context(Rdma(Choice(device="rxe0")))
            node = await stack.enter_async_context(
                serving(memory, 1, timeout_s=TIMEOUT_S, rdma=rdma)
            )
            victim = await stack.enter_async_context(party(memory, "victim"))
            attacker = await stack.enter_async_context(party(memory, "attacker"))
            scene = Scene(memory, node, victim, attacker)
            await scene.begin()
            await attack(scene)
            await scene.end()

    trio.run(main)


@pytest.mark.usefixtures("windows")
@pytest.mark.parametrize("way", ["read", "write"])
@pytest.mark.parametrize("what", ["exposed", "reserved"])
def test_address_and_key_are_of_no_use_to_another_member(memory: Path, way: str, what: str) -> None:
    async def attack(scene: Scene) -> None:
        given = scene.exposed if what == "exposed" else scene.reserved
        with pytest.raises(Broken, match=r"REM_(ACCESS|OP|INV_REQ)_ERR"):
            await scene.attacker.move(way, given)

    on_scene(memory, attack)


def test_a_handle_completes_nothing_of_another_member(memory: Path) -> None:
    async def attack(scene: Scene) -> None:
        # A WRITE of nothing takes no right, and carries the victim's number.
        await scene.attacker.path.pair.write([Piece(0, 0, 0, 0, 0, scene.reserved.handle)])
        await scene.attacker.peers.ping(1)
        assert scene.service(1).leftovers

    on_scene(memory, attack)


def test_handles_and_queue_pairs_of_others_cannot_be_given_up(memory: Path) -> None:
    async def attack(scene: Scene) -> None:
        control = scene.attacker.path.control
        for handle in range(max(scene.exposed.handle, scene.reserved.handle) + 3):
            await control.say(messages.Release(handle))
        for pair in range(messages.QUEUE_PAIRS_MAX):
            await control.say(messages.Detach(pair))
        await scene.attacker.peers.ping(1)
        assert scene.service(1).leftovers

    on_scene(memory, attack)


@pytest.mark.usefixtures("windows")
@pytest.mark.parametrize("whose", ["the victim's", "the node's"])
def test_a_queue_pair_that_is_somebody_elses_brings_no_bytes(memory: Path, whose: str) -> None:
    """A replayed Attach names the victim's queue pair; a forged one the node's own for the victim."""

    async def attack(scene: Scene) -> None:
        theirs = scene.victim.path.pair.end() if whose == "the victim's" else scene.node_end
        (lane,) = (await lanes(scene.attacker.peers))._lanes
        rail, other = lane.other, 1
        attached = await scene.attacker.ask(messages.Attach(theirs, other, rail.name, rail.gid))
        assert isinstance(attached, messages.Attached)
        exposed = await scene.attacker.ask(messages.Expose(SECRET, 0, LENGTH, other))
        assert isinstance(exposed, messages.Exposed)
        # The right is the other queue pair's, which nobody here can use.
        with pytest.raises(Broken, match=r"REM_(ACCESS|OP|INV_REQ)_ERR"):
            await scene.attacker.move("read", exposed)

    on_scene(memory, attack)


@pytest.mark.usefixtures("windows")
def test_a_right_is_over_for_its_owner_too_once_it_was_given_up(memory: Path) -> None:
    """Replaying one's own messages later is of no use either."""

    async def attack(scene: Scene) -> None:
        mine = await scene.attacker.expose()
        await scene.attacker.path.control.say(messages.Release(mine.handle))
        await scene.attacker.peers.ping(1)
        with pytest.raises(Broken, match=r"REM_(ACCESS|OP|INV_REQ)_ERR"):
            await scene.attacker.move("read", mine)

    on_scene(memory, attack)
