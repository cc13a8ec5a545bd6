"""Movers: the interface of ways to move extents between two processes.

A mover has three parts. `Mover` is a process's use of it: the messages that it adds to control
connections, and whether others can reach this process by it. `Way` is the caller's end, to one store node:
its limits, its speed, and moving itself. `Serving` is a store node's end, with a `Connection` for
each control connection.

A transfer takes the fastest way that suits it and reaches the node (device.py).
"""

import errno
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import trio

from ..trust.security import Credentials
from . import Fenced
from .device import Device, Way
from .door import Door, ServerFigures
from .frames import MessageSet
from .link import Link
from .messages import Answer, Message, Request, failure_of
from .rights import Peer
from .service import EtcdForReaders, Service

log = logging.getLogger(__name__)


class Lasting(NamedTuple):
    """The first of two answers to a request. `then` gives the second one, whose number is `number`."""

    first: Answer
    number: int
    then: Callable[[], Awaitable[Answer]]


class Connection(Protocol):
    """One peer at a store node, as long as its control connection is open."""

    async def answer(self, request: Request) -> Answer | Lasting:
        """Carry out a request, which was checked, and to which the peer has the right. Raises OSError."""

    def take(self, message: Message) -> None:
        """Take a message that has no answer. By default there are none."""
        return

    def close(self, why: str) -> None:
        """Revoke all rights that were granted on the control connection, which ended."""


class Serving(Protocol):
    """A store node's end of a mover. `port` is the one on which it listens, 0: none."""

    port: int = 0

    def connected(self, peer: Peer, local: str, nursery: trio.Nursery) -> Connection:
        """Return the part for a control connection to our address `local`; `nursery` ends with it."""

    def give_up(self, content: int) -> None:
        """Drop extents of this content that are being received: it will not be published. By default its
        sender ends them, by closing a connection."""
        return

    def end_rights(self, is_over: Callable[[Peer], bool]) -> None:
        """Revoke the rights to memory of peers whose sessions ended. By default there are none: the rights
        to each request are checked when it comes."""
        return


@dataclass(eq=False)
class Host:
    """A store node that listens at `address`, for its operations and for movers. `device` returns another
    node, to hand extents on to. With credentials, only members of the cluster are served. `is_gone` tells
    whether a peer's session is known to be over, `is_revoked` whether a certificate, by its serial number,
    is not accepted any more. Readers reach `etcd` by it, if it is there."""

    service: Service[Any]
    device: Callable[[int], Device]
    address: str
    credentials: Credentials | None = None
    timeout_s: float = 5.0
    is_gone: Callable[[Peer], bool] = lambda peer: False
    is_revoked: Callable[[str], bool] = lambda serial: False
    etcd: EtcdForReaders | None = None
    counters: ServerFigures = field(default_factory=ServerFigures)
    # The door accepts connections, also to a mover's own port.
    door: Door = field(init=False)
    # While the node is served: the nursery ends with the node, the servings are its ends of its movers.
    nursery: trio.Nursery = field(init=False)
    servings: "dict[Mover, Serving]" = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.door = Door(self.counters, lambda serial: self.is_revoked(serial))

    def failed(self, peer: Peer, what: str, error: OSError) -> tuple[int, int, str]:
        """Count and log that a request of a peer failed. Return what `failure_of` does, to be sent."""
        failure = failure_of(error, self.service.node)
        self.counters.errors[errno.errorcode.get(failure[0], str(failure[0]))] += 1
        level = logging.INFO
        if isinstance(error, PermissionError):
            self.counters.denied_requests += 1
            peer.denials += 1
            # Others of one peer tell nothing new.
            level = logging.WARNING if peer.denials == 1 else logging.DEBUG
        elif isinstance(error, (Fenced, FileNotFoundError)):
            level = logging.DEBUG
        log.log(level, "%s: %s: %s", peer, what, error.strerror or error)
        return failure


class Mover(Protocol):
    """One way of moving extents, in this process. A node registers it by its `name`."""

    name: str
    messages: MessageSet

    @property
    def is_usable(self) -> bool:
        """Return whether others can reach this process by this mover."""

    def way(self, link: Link) -> Way:
        """Return the caller's end, to one node."""

    async def serving(self, host: Host) -> Serving:
        """Return the end of a store node, for as long as the node's nursery lasts. Raises OSError."""

    async def run(self) -> None:
        """Do background work as long as this process calls store nodes."""
