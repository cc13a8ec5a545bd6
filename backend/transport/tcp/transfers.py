"""Extents that a node receives, and sends on to the next: each comes on several streams at once.

Each stream has a thread, and another one that sends on the bytes that the first has received (onward.py). A
stream is acknowledged when the extent is sealed here and the next node has acknowledged.

If the next node fails, receiving goes on: the caller is told in the end, and when it sends the extent
once more to those that lack it, this node has it already.
"""

import errno
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import trio

from .. import Extent, Unreachable
from ..frames import BadMessage
from ..messages import RECEIVER_PATIENCE, failure_of
from ..service import Incoming, Service, begin
from .channel import Channel, Lost, Patience
from .onward import Onward
from .streams import PIECE_BYTES_MAX, piece_bytes, receive_range
from .threads import Promise
from .wire import Header, Op, Reply, ReplyKind

# A disk may take long to make an extent durable, or a node to be allowed to receive it.
BUSY_LIMIT_S = 120.0
# A PART and its announcement come on two connections.
_ANNOUNCED_S = 5.0
# How many times a sender is told that this node is alive within its time-out.
_SIGNS_OF_LIFE = 5


class Receiving:
    """One extent that is being received. Threads use it; `Transfers` owns it from start to end."""

    def __init__(self, header: Header) -> None:
        self.extent: Extent = header.extent
        self.transfer = header.transfer
        self.total = header.total
        self.is_sparse = header.op is Op.SPARSE
        self._expected = header.length if self.is_sparse else header.total
        self.begun = Promise()
        self.sealed = Promise()
        self.incoming: Incoming | None = None
        self.fd = -1
        self.is_here_already = False
        self.is_sealing = False
        self.progress_at = time.monotonic()
        self._lock = threading.Lock()
        self._channels: set[Channel] = set()
        self._ranges: list[tuple[int, int]] = []
        self._received = 0
        self._error: OSError | None = None

    def add(self, channel: Channel, offset: int, length: int) -> None:
        """Add a stream. Raises BadMessage if another stream brings some of its bytes."""
        with self._lock:
            for start, count in self._ranges:
                if offset < start + count and start < offset + length:
                    raise BadMessage("two streams bring the same bytes of an extent")
            # Otherwise the last of the bytes would be written to a sealed file.
            if sum(count for _, count in self._ranges) + length > self._expected:
                raise BadMessage("more bytes of an extent come than were announced")
            self._ranges.append((offset, length))
            self._channels.add(channel)

    def remove(self, channel: Channel) -> bool:
        """Remove a stream, and return whether it was the last one."""
        with self._lock:
            self._channels.discard(channel)
            return not self._channels

    def arrived(self, count: int) -> bool:
        """Count bytes that are in the file, and return whether all are."""
        with self._lock:
            self._received += count
            self.progress_at = time.monotonic()
            return self._received == self._expected

    def fail(self, error: OSError) -> None:
        """End all streams with this error, unless there was one before."""
        with self._lock:
            if self._error is None:
                self._error = error

    def check(self) -> None:
        """Raise the error, if there was one."""
        if self._error is not None:
            raise self._error


class Transfers:
    """All extents that are being received. Methods are for the event loop; `nursery` outlives them all."""

    def __init__(self, service: Service[Any], nursery: trio.Nursery) -> None:
        self._service = service
        self._nursery = nursery
        self._current: dict[Extent, Receiving] = {}
        self._came = trio.Event()

    async def announced(self, header: Header) -> None:
        """Wait for the transfer that a PART is of: it comes on another connection. Raises OSError."""
        with trio.move_on_after(_ANNOUNCED_S):
            while not self._is_announced(header):
                await self._came.wait()
        if not self._is_announced(header):
            raise Unreachable(self._service.node, "it does not wait for this part of an extent")

    def _is_announced(self, header: Header) -> bool:
        current = self._current.get(header.extent)
        return current is not None and current.is_sparse and current.transfer == header.transfer

    def join(self, header: Header, channel: Channel) -> Receiving:
        """Return the transfer of a stream that begins; it ends with `leave`. Raises BadMessage."""
        current = self._current.get(header.extent)
        if current is not None and current.transfer == header.transfer:
            if current.total != header.total:
                raise BadMessage("two streams of a transfer do not agree on its size")
            current.add(channel, header.offset, header.follow)
            return current
        if current is not None:
            # Its sender has given the transfer up, or soon will.
            current.fail(OSError(errno.ECANCELED, "another transfer of the extent took its place"))
        receiving = self._current[header.extent] = Receiving(header)
        receiving.add(channel, header.offset, header.follow)
        self._came.set()
        self._came = trio.Event()
        self._nursery.start_soon(receiving.begun.fulfil, lambda: self._begin(receiving, header))
        return receiving

    def give_up(self, content: int) -> None:
        """End the transfers of this content, which will not be published."""
        for extent, receiving in self._current.items():
            if extent.content == content:
                receiving.fail(OSError(errno.ECANCELED, "the content was given up"))

    async def leave(self, receiving: Receiving, channel: Channel) -> None:
        """End a stream. With the last one, a file that is not sealed is dropped."""
        if not receiving.remove(channel):
            return
        if self._current.get(receiving.extent) is receiving:
            del self._current[receiving.extent]
        with trio.CancelScope(shield=True):
            await receiving.begun.ended()
            if receiving.is_sealing:
                await receiving.sealed.ended()
        if receiving.incoming is not None:
            receiving.incoming.close()
        elif receiving.fd >= 0:
            os.close(receiving.fd)

    def seal(self, receiving: Receiving) -> None:
        """Seal a complete extent; `receiving.sealed` is the outcome."""
        receiving.is_sealing = True
        incoming = receiving.incoming
        assert incoming is not None
        self._nursery.start_soon(
            receiving.sealed.fulfil, lambda: self._service.seal(receiving.extent, incoming)
        )

    async def _begin(self, receiving: Receiving, header: Header) -> None:
        extent, total = header.extent, header.total
        allocated = header.length if receiving.is_sparse else total
        incoming = await begin(self._service, extent, header.target, total, allocated)
        if incoming is None:
            receiving.fd = self._service.open(extent)
            receiving.is_here_already = True
            return
        receiving.incoming = incoming
        receiving.fd = incoming.fd
        if header.target.chain:
            incoming.lend()
        receiving.check()


def take_extent(
    channel: Channel,
    header: Header,
    receiving: Receiving,
    seal: Callable[[], None],
    onward: Onward | None,
    node: int,
    timeout_s: float,
) -> tuple[Reply, int]:
    """Receive one stream of an extent in a thread, and offer it onward.

    `seal` is called when all bytes of all streams are here. Returns the reply, and how many bytes were
    received; OK has been sent, FAILED has not. Raises Lost if the sender is gone, BadMessage if it sends
    invalid bytes.
    """
    every_s = timeout_s / _SIGNS_OF_LIFE
    patience = Patience(timeout_s * RECEIVER_PATIENCE)
    received = 0

    def alive() -> None:
        channel.say_working(every_s, patience)

    def arrived(offset: int, count: int) -> None:
        nonlocal received
        received += count
        if receiving.arrived(count):
            seal()
        if onward is not None:
            onward.offer(receiving.fd, count)

    def between() -> None:
        channel.say_working(every_s, patience)
        receiving.check()

    def waiting() -> None:
        between()
        if time.monotonic() > receiving.progress_at + BUSY_LIMIT_S:
            raise OSError(errno.ETIMEDOUT, "the other streams of the extent did not come")

    try:
        receiving.begun.wait(BUSY_LIMIT_S, alive)
        if not receiving.is_here_already:
            try:
                if header.follow:
                    receive_range(
                        channel,
                        receiving.fd,
                        header.offset,
                        header.length,
                        timeout_s * RECEIVER_PATIENCE,
                        arrived,
                        between,
                        piece=PIECE_BYTES_MAX if onward is None else piece_bytes(header.length),
                    )
            except Lost:
                # Another thread may have stopped it, with the error.
                receiving.check()
                raise
            if not header.total or (header.op is Op.SPARSE and not header.length):
                seal()
            if header.op is not Op.PART:
                receiving.sealed.wait(2 * BUSY_LIMIT_S, waiting)
        elif onward is not None:
            onward.offer(receiving.fd, header.follow)
        while onward is not None and not onward.is_done():
            alive()
    except OSError as error:
        receiving.fail(error)
        channel.clean = received == header.follow
        return Reply(ReplyKind.FAILED, *failure_of(error, node)), received
    except (Lost, BadMessage) as error:
        # The sender may still be there, and tries again if it gets this error on another stream.
        receiving.fail(Unreachable(node, f"a data connection was given up: {error}"))
        raise
    channel.clean = received == header.follow
    reply = Reply(ReplyKind.OK)
    channel.conclude(reply, timeout_s * RECEIVER_PATIENCE)
    return reply, received
