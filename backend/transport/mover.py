"""Movers: ways of moving extents between two processes, of which this module knows none.

A mover has three parts. `Mover` is a process's use of it: the messages that it adds to control
connections, and whether others can reach this process so. `Way` is the caller's end, to one store node:
what it takes, how fast it is, and moving itself. `Serving` is a store node's end, with a `Connection` for
each control connection.

A transfer takes the fastest way that suits it and reaches the node (device.py). A way that finds that it
cannot do it after all raises NotThisWay, and the next one does it; nothing is lost by that.
"""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import trio

from ..trust.security import Credentials
from . import Device, Extent, FileRange, Landed, Memory, Target
from .codec import MessageSet
from .counters import ServerFigures
from .door import Door
from .growth import Growth
from .link import Link
from .messages import Answer, Message, Request
from .rights import Peer
from .service import Service

__all__ = [
    "Connection",
    "Host",
    "Lasting",
    "Mover",
    "NotThisWay",
    "Others",
    "PuttingWay",
    "Serving",
    "Transfer",
    "Way",
]


class NotThisWay(Exception):
    """This cannot be moved in this way, though it may be in another one; the text says why."""


class Transfer(NamedTuple):
    """One thing to be moved: `length` bytes between a node and `memory`."""

    operation: Literal["read", "write"]
    length: int
    memory: Memory = Memory.FILE
    is_sparse: bool = False


class Way(Protocol):
    """The caller's end of a mover, to one store node. Moving raises OSError as Device's methods do, and
    NotThisWay."""

    @property
    def name(self) -> str:
        """The mover's."""
        ...

    def suits(self, transfer: Transfer) -> bool:
        """Return whether such a transfer had better take this way, as far as is known without asking."""
        ...

    async def reach(self) -> int | None:
        """Return the Mbit/s at which the node is reached (0: not known), None if it is not reached in
        this way now. What is missing for it is set up first. Asked where several ways suit a transfer.
        Raises Unreachable."""
        ...

    @property
    def shows_bytes(self) -> bool:
        """Tell whether bytes that are written pass through memory of this process."""
        ...

    async def read(self, extent: Extent, start: int, into: FileRange, landed: Landed) -> None:
        """As Device.read; the file is long enough."""
        ...

    async def write(
        self, extent: Extent, target: Target, source: FileRange, passed: Landed
    ) -> None:
        """As Device.write."""
        ...

    async def pass_on(
        self,
        extent: Extent,
        target: Target,
        source: FileRange,
        growth: Growth,
        lend: Callable[[], None],
    ) -> None:
        """As `write`, of a file whose bytes are still coming in. `lend` is called before something may
        refer to its pages for ever (service.Held.lend)."""
        ...

    def give_up(self, why: str) -> None:
        """End soon whatever is under way: the node is gone, or this process is stopping."""
        ...

    def tidy(self) -> None:
        """Let go of what was not used for long. Called now and then."""
        ...


@runtime_checkable
class PuttingWay(Way, Protocol):
    """A way that moves small extents, too, out of this process's memory."""

    async def put(self, extent: Extent, target: Target, data: bytes) -> None:
        """As Device.put. Raises NotThisWay, too."""
        ...


W = TypeVar("W", bound=Way)


class Lasting(NamedTuple):
    """The first of two answers to a request. `then` gives the second one, whose number is `number`."""

    first: Answer
    number: int
    then: Callable[[], Awaitable[Answer]]


class Connection(Protocol):
    """One peer at a store node, as long as its control connection is open."""

    async def answer(self, request: Request) -> Answer | Lasting:
        """Do what is asked, which was checked and is the peer's right. Raises OSError."""
        ...

    def take(self, message: Message) -> None:
        """Take a message that has no answer."""
        ...

    def close(self, why: str) -> None:
        """Take back all that was given on the control connection, which ended."""
        ...


class Serving(Protocol):
    """A store node's end of a mover."""

    @property
    def port(self) -> int:
        """Where it listens, 0: nowhere."""
        ...

    def connected(self, peer: Peer, local: str, nursery: trio.Nursery) -> Connection:
        """Return the part for a control connection. `local` is this host's address on it, `nursery` ends
        with it."""
        ...

    def give_up(self, content: int) -> None:
        """Drop extents of this content that are coming in: they have no use any more."""
        ...

    def end_rights(self, is_over: Callable[[Peer], bool]) -> None:
        """Take back what peers whose sessions ended may touch without asking again."""
        ...


class NextNode(Device, Protocol):
    """A store node that extents are handed on to."""

    async def pass_on(
        self,
        extent: Extent,
        target: Target,
        source: FileRange,
        growth: Growth,
        lend: Callable[[], None],
    ) -> None:
        """As Way.pass_on. It waits for no other operation, as chains that cross would wait for each
        other."""
        ...

    def way(self, kind: type[W]) -> W:
        """Return the way of this kind, for the node's end of the same mover. Raises Unreachable."""
        ...


class Others(Protocol):
    """The other store nodes."""

    def device(self, node: int) -> NextNode: ...


@dataclass(frozen=True)
class Host:
    """A store node, for a mover to serve. `nursery` ends with it; `is_gone` tells whether a peer's session
    is over. Who connects to a port of a mover's own comes in by the `door`."""

    service: Service[Any]
    others: Others
    door: Door
    address: str
    credentials: Credentials | None
    counters: ServerFigures
    nursery: trio.Nursery
    timeout_s: float
    is_gone: Callable[[Peer], bool]


class Mover(Protocol):
    """One way of moving extents, in this process."""

    @property
    def name(self) -> str:
        """By which a node registers it."""
        ...

    @property
    def messages(self) -> MessageSet: ...

    @property
    def is_usable(self) -> bool:
        """Tell whether others can reach this process so."""
        ...

    def way(self, link: Link) -> Way:
        """Return the caller's end, to one node."""
        ...

    def serving(self, host: Host) -> AbstractAsyncContextManager[Serving]:
        """Be a store node's end. Raises OSError."""
        ...

    async def run(self) -> None:
        """Do what has to be done all the time that this process asks others."""
        ...

    def tidy(self) -> None:
        """Let go of what was not used for long. Called now and then."""
        ...
