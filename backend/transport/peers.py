"""The caller's end of the transport: all store nodes, as devices.

Connections are opened when they are needed and kept for a while. For a moment after a node could not be
reached every call to it fails at once, so that the caller can turn to a replica.
"""

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, closing
from typing import Any

import trio

from ..model.records import NodeAddress, Settings
from ..unwrap import background
from .caller import Caller
from .device import Device
from .link import Link
from .messages import Done, Ping, Report, Scrub, Status, Suspect, Verdict
from .mover import Mover
from .operations import codec_for

log = logging.getLogger(__name__)


def patience_s(settings: Settings) -> float:
    """Return how long a peer may be silent: shorter than a lease, so that a cut link is noticed before the
    cluster gives a node up, and not much longer than a busy machine may stall."""
    return max(1.0, 0.6 * settings.lease_ttl_s)


@asynccontextmanager
async def open_peers(
    resolve: Callable[[int], NodeAddress | None],
    movers: Sequence[Mover],
    *,
    name: str,
    role: str,
    **options: Any,
) -> AsyncIterator["Peers"]:
    """Call store nodes for the duration of the block. The parameters are those of Caller and Peers."""
    async with background() as nursery:
        caller = Caller(name, role, resolve, codec_for(movers), nursery, **options)
        with closing(Peers(caller, movers)) as peers:
            nursery.start_soon(peers.run)
            yield peers


class Peers:
    """All store nodes, as devices. Extents are moved by `movers` (movers.py), the better one first. Raises
    CredentialsError if those of `caller` cannot be used."""

    def __init__(self, caller: Caller, movers: Sequence[Mover]) -> None:
        if caller.credentials is not None:
            caller.credentials.client_context()  # raises an error now if they cannot be used
        self.resolve = caller.resolve
        self.counters = caller.counters
        self._caller = caller
        self._movers = movers
        self._devices: dict[int, Device] = {}

    def close(self) -> None:
        """End all calls."""
        for device in self._devices.values():
            device.link.give_up("this process is stopping")

    async def run(self) -> None:
        """Do the background work of movers."""
        async with trio.open_nursery() as nursery:
            for mover in self._movers:
                nursery.start_soon(mover.run)

    def device(self, node: int) -> Device:
        device = self._devices.get(node)
        if device is None:
            link = Link(self._caller, node)
            device = Device(link, [mover.way(link) for mover in self._movers])
            self._devices[node] = device
        return device

    async def ping(self, node: int) -> None:
        """Check that a node answers. Raises Unreachable."""
        await self.device(node).link.ask(Ping(), Done)

    async def suspect(self, asked: int, group: int, node: int) -> bool:
        """Have node `asked` check another member; return whether it is none any more. Raises OSError."""
        return (await self.device(asked).link.ask(Suspect(group, node), Verdict)).yes

    async def scrub(self, node: int) -> None:
        """Have a node check everything it keeps, beginning now. Raises OSError."""
        await self.device(node).link.ask(Scrub(), Done)

    async def status(self, node: int) -> dict[str, object]:
        """Return the report of a node. Raises OSError."""
        return (await self.device(node).link.ask(Status(), Report)).status

    def node_changed(self, node: int) -> None:
        """End calls to a node whose lease is over. Called for Members.node_changed."""
        device = self._devices.get(node)
        if device is not None and self.resolve(node) is None:
            device.link.give_up("its lease is over")

    async def check(self, nodes: Iterable[int]) -> None:
        """Find out whether these nodes and this process accept each other (see `refusals`)."""

        async def check_one(node: int) -> None:
            try:
                await self.ping(node)
            except OSError as error:
                log.info("%s", error)

        async with trio.open_nursery() as nursery:
            for node in nodes:
                nursery.start_soon(check_one, node)

    def refusals(self) -> list[str]:
        """Return a line for each node known not to accept this process, or not to be accepted by it."""
        return [
            f"store node {node:x} is of no use: {device.link.refusal}"
            for node, device in sorted(self._devices.items())
            if device.link.refusal
        ]

    def shows_bytes(self, node: int) -> bool:
        """Tell whether bytes written to a node will most likely pass through this process's memory."""
        return self.resolve(node) is not None and self.device(node).shows_bytes()
