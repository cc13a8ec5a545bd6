"""Movers: the interface of ways to move extents between two processes.

A mover has three parts. `Mover` is a process's use of it: the messages that it adds to control
connections, and whether others can reach this process by it. `Way` is the caller's end, to one store node:
its limits, its speed, and moving itself. `Serving` is a store node's end, with a `Connection` for
each control connection.

A transfer takes the fastest way that suits it and reaches the node (device.py). A way that cannot do it
after all raises NotThisWay, and the next one does it, without a trace of the first.
"""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import trio

from ..trust.security import Credentials
from . import Extent, FileRange, Landed, Memory, Target, nothing_landed
from .codec import MessageSet
from .counters import ServerFigures
from .door import Door
from .link import Link
from .messages import Answer, Message, Request
from .rights import Peer
from .service import EtcdForReaders, Service


class NotThisWay(Exception):
    """A transfer is not possible in this way, but may be in another one; the text says why."""


class Growth:
    """The progress of an extent that is being received, for tasks that send it on or seal it: the first
    `done` of `length` bytes have been. `lend` is called before anything may keep a reference to the file's
    pages (service.Held.lend)."""

    def __init__(self, length: int, done: int = 0, lend: Callable[[], None] = lambda: None) -> None:
        self.length = length
        self.done = done
        self.lend = lend
        self._error: OSError | None = None
        self._changed = trio.Event()

    def advance(self, count: int) -> None:
        """Count `count` more bytes, at most as many as were missing."""
        self.done = min(self.length, self.done + count)
        self._notify()

    def give_up(self, error: OSError) -> None:
        """Note that no more bytes will be received. A complete extent stays complete."""
        if self._error is None:
            self._error = error
            self._notify()

    async def more_than(self, count: int) -> int:
        """Wait for more bytes than these, and return how many there are. Raises the error of `give_up`."""
        while self.done <= count:
            if self._error is not None:
                raise self._error
            await self._changed.wait()
        return self.done

    async def complete(self) -> None:
        """Wait until all bytes are there. Raises the error of `give_up`."""
        if self.length:
            await self.more_than(self.length - 1)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


class Transfer(NamedTuple):
    """The properties of a transfer: `length` bytes between a node and `memory`."""

    operation: Literal["read", "write"]
    length: int
    memory: Memory = Memory.FILE
    is_sparse: bool = False


class Sending(NamedTuple):
    """An extent on its way to a target: a part of a file. `passed` is called, from any thread, with bytes
    that are in memory of this process. With `growth`, the file is still being received; else it may be
    sparse."""

    extent: Extent
    target: Target
    source: FileRange
    passed: Landed = nothing_landed
    growth: Growth | None = None
    is_sparse: bool = False


class Way(Protocol):
    """The caller's end of a mover, to one store node. Moving raises OSError as Device's methods do, and
    NotThisWay. `name` is the mover's. `shows_bytes`: bytes that are written pass through memory of this
    process."""

    name: str
    shows_bytes: bool

    def suits(self, transfer: Transfer) -> bool:
        """Return whether such a transfer should take this way. Makes no request to find out."""
        ...

    async def reach(self) -> int | None:
        """Return the Mbit/s at which the node is reached (0: not known), None if it is not reached in this
        way now. Connections that are missing are set up first. Called if several ways suit a transfer.
        Raises Unreachable."""
        ...

    async def read(self, extent: Extent, start: int, into: FileRange, landed: Landed) -> None:
        """Do as Device.read; the file is long enough."""
        ...

    async def write(self, sending: Sending) -> None:
        """Do as Device.write."""
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
        """Carry out a request, which was checked, and to which the peer has the right. Raises OSError."""
        ...

    def take(self, message: Message) -> None:
        """Take a message that has no answer."""
        ...

    def close(self, why: str) -> None:
        """Revoke all rights that were granted on the control connection, which ended."""
        ...


class Serving(Protocol):
    """A store node's end of a mover. `port` is the one on which it listens, 0: none."""

    port: int

    def connected(self, peer: Peer, local: str, nursery: trio.Nursery) -> Connection:
        """Return the part for a control connection. `local` is this host's address on it, `nursery` ends
        with it."""
        ...

    def give_up(self, content: int) -> None:
        """Drop extents of this content that are being received: it will not be published."""
        ...

    def end_rights(self, is_over: Callable[[Peer], bool]) -> None:
        """Revoke the rights to memory of peers whose sessions ended."""
        ...


class NextNode(Protocol):
    """A store node that extents are handed on to: what movers use of a Device (device.py)."""

    async def put(self, extent: Extent, target: Target, data: bytes) -> None: ...

    async def write(
        self, extent: Extent, target: Target, source: FileRange, *, growth: Growth | None = None
    ) -> None: ...

    def way(self, kind: type[W]) -> W:
        """Return the way of this kind, for the node's end of the same mover. Raises Unreachable."""
        ...


@dataclass(eq=False)
class Host:
    """A store node that listens at `address`, for its operations and for movers. `device` returns another
    node, to hand extents on to. With credentials, only members of the cluster are served. `is_gone` tells
    whether a peer's session is known to be over, `is_revoked` whether a certificate, by its serial number,
    is not accepted any more. Readers reach `etcd` by it, if it is there."""

    service: Service[Any]
    device: Callable[[int], NextNode]
    address: str
    credentials: Credentials | None = None
    timeout_s: float = 5.0
    is_gone: Callable[[Peer], bool] = lambda peer: False
    is_revoked: Callable[[str], bool] = lambda serial: False
    etcd: EtcdForReaders | None = None
    counters: ServerFigures = field(default_factory=ServerFigures)
    # While the node is served: the door accepts connections to a mover's own port, the nursery ends with
    # the node, and the servings are its ends of its movers.
    door: Door = field(init=False)
    nursery: trio.Nursery = field(init=False)
    servings: "dict[Mover, Serving]" = field(default_factory=dict)


class Mover(Protocol):
    """One way of moving extents, in this process. A node registers it by its `name`."""

    name: str
    messages: MessageSet

    @property
    def is_usable(self) -> bool:
        """Return whether others can reach this process by this mover."""
        ...

    def way(self, link: Link) -> Way:
        """Return the caller's end, to one node."""
        ...

    def serving(self, host: Host) -> AbstractAsyncContextManager[Serving]:
        """Be a store node's end. Raises OSError."""
        ...

    async def run(self) -> None:
        """Do background work as long as this process calls store nodes."""
        ...
