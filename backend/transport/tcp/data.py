"""The node's end of data connections: extents are given out, and taken in and sent on to the next node.

An extent comes in on several streams at once. Each stream has a thread, and another one that sends on the
bytes that the first has received, so that both links are busy whatever the kernel's buffers hold: measured
on links of 10 Gbit/s, one thread that takes turns gets 5.4. A stream is acknowledged when the extent is
sealed here and the next node has acknowledged.

If the next node fails, receiving goes on: the caller is told in the end, and when it sends the extent
once more to those that lack it, this node has it already.
"""

import bisect
import errno
import math
import os
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from functools import partial
from operator import itemgetter
from typing import Any, TypeVar

import trio

from ...files.sparse import segments
from ...observe import logs
from ...pauses import Places
from ...unwrap import background
from .. import Extent, Unreachable
from ..frames import BadMessage
from ..mover import Host
from ..rights import Peer
from ..service import Held, Incoming, Service, begin, check_right
from .channel import Channel, Lost
from .streams import PIECE_BYTES_MAX, piece_bytes, receive_ranges, send_range, send_stream
from .threads import Promise, in_threads
from .way import TcpWay
from .wire import RIGHTS, Header, Op, Ranges, Reply, ReplyKind, decode_header

T = TypeVar("T")

# A thread serves one stream of a transfer; idle connections have none. Every transfer under way must
# get its threads, or chains that cross would wait for each other.
THREADS_MAX = 2048
_HEADER_S = 5.0
# A disk may take long to make an extent durable, or a node to be allowed to receive it.
BUSY_LIMIT_S = 120.0


class Onward:
    """One stream to the next node, with the bytes that a stream here has brought. `offer` and `give_up` are
    for the thread that receives, `send` is for the one that sends; `sent` is fulfilled when the next node
    has acknowledged, and has its failure."""

    def __init__(self, header: Header) -> None:
        self.node, target = header.target.onward()
        self._header = header._replace(target=target)
        # The file, and how many more bytes are in it; at the end 0.
        self._offers: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self.sent = Promise()
        self.sent_bytes = 0

    def offer(self, fd: int, count: int) -> None:
        """Note that `count` more bytes are in the file, which stays open until `send` has returned."""
        if count:
            self._offers.put((fd, count))

    def give_up(self) -> None:
        """Note that no more bytes will be received; `send` ends soon."""
        self._offers.put((-1, 0))

    def send(self, channel: Channel) -> None:
        """Send the bytes that are offered, until the next node has acknowledged or failed. Raises its
        error: OSError, Unreachable (which node)."""
        try:
            send_stream(channel, self._header, self._pieces())
        except (Lost, BadMessage) as error:
            raise Unreachable(self.node, str(error)) from None

    def _pieces(self) -> Iterator[tuple[int, int, int]]:
        """Yield pieces of the file as they are offered; the one before was sent."""
        fd, offered = -1, 0
        for start, length in self._header.ranges:
            end = start + length
            while start < end:
                if not offered:
                    fd, offered = self._offers.get()
                    if not offered:
                        raise Lost("the sender is gone")
                count = min(offered, end - start)
                yield fd, start, count
                self.sent_bytes += count
                start += count
                offered -= count


class Receiving:
    """One extent that the node with this `service` receives: by threads, one for each stream, and the task
    `store`. `header` is that of the first stream."""

    def __init__(self, header: Header, service: Service[Any]) -> None:
        self.header = header
        # The file is ready to be filled, or the extent is here already; the extent is sealed.
        self._begun = Promise()
        self._sealed = Promise()
        # All bytes of all streams are in the file.
        self._complete = trio.Event()
        self._scope = trio.CancelScope()
        self._held: Held | None = None  # the file of the extent: `_incoming`, if it is not here yet
        self._incoming: Incoming | None = None
        self._fd = -1
        self._service = service
        self.received_bytes = 0
        self._progress_at = time.monotonic()
        self._token = trio.lowlevel.current_trio_token()
        self._lock = threading.Lock()
        self._channels: set[Channel] = set()
        # The bytes that streams bring, in order.
        self._ranges: list[tuple[int, int]] = []
        self._error: OSError | None = None

    def add(self, channel: Channel, ranges: Ranges) -> None:
        """Add a stream. Raises BadMessage if another stream brings some of its bytes, or if more bytes come
        than were announced: the last of them would be written to a sealed file."""
        with self._lock:
            for start, length in filter(itemgetter(1), ranges):
                at = bisect.bisect(self._ranges, (start, length))
                before = sum(self._ranges[at - 1]) if at else 0
                after = self._ranges[at][0] if at < len(self._ranges) else start + length
                if not before <= start <= start + length <= after:
                    raise BadMessage("two streams bring the same bytes of an extent")
                self._ranges.insert(at, (start, length))
            if sum(map(itemgetter(1), self._ranges)) > self.header.comes:
                raise BadMessage("more bytes of an extent come than were announced")
            self._channels.add(channel)

    def remove(self, channel: Channel) -> bool:
        """Remove a stream, and return whether it was the last one."""
        with self._lock:
            self._channels.discard(channel)
            return not self._channels

    def fail(self, error: OSError) -> None:
        """End all streams with this error, unless there was one before."""
        with self._lock:
            if self._error is None:
                self._error = error

    def check(self) -> None:
        """Raise the error, if there was one."""
        if self._error is not None:
            raise self._error

    # -- in the event loop -----------------------------------------------------------------------

    async def store(self) -> None:
        """Make the file that the bytes come into, and seal the extent when all are there."""
        await self._begun.fulfil(self._begin)
        with self._scope:
            await self._sealed.fulfil(self._seal)

    async def _begin(self) -> None:
        extent, target, header = self.header.extent, self.header.target, self.header
        incoming = await begin(self._service, extent, target, header.total, header.comes)
        self._incoming = incoming
        self._held = self._service.hold(extent) if incoming is None else incoming
        self._fd = self._held.fd
        if target.chain:
            self._held.lend()
        self.check()

    async def _seal(self) -> None:
        await self._complete.wait()
        assert self._incoming is not None
        await self._service.seal(self.header.extent, self._incoming)

    async def close(self) -> None:
        """End `store` when all streams have ended. A file that is not sealed is dropped."""
        with trio.CancelScope(shield=True):
            await self._begun.ended()
            if self._complete.is_set():
                await self._sealed.ended()
        self._scope.cancel()
        if self._held is not None:
            self._held.close()

    # -- in the thread of a stream ---------------------------------------------------------------

    def take(self, channel: Channel, header: Header, onward: Onward | None) -> None:
        """Receive one stream of the extent, offer it onward, and acknowledge it. Raises Lost if the sender
        is gone, BadMessage if it sends invalid bytes, and OSError, which it has to be told."""
        received = 0

        def landed(start: int, count: int, data: memoryview | None) -> None:
            nonlocal received
            received += count
            with self._lock:
                self.received_bytes += count
                self._progress_at = time.monotonic()
                if self.received_bytes == header.comes:
                    self._token.run_sync_soon(self._complete.set)
            if onward is not None:
                onward.offer(self._fd, count)

        def between() -> None:
            channel.say_working()
            if self._error is not None:
                raise self._error

        def waiting() -> None:
            between()
            if time.monotonic() > self._progress_at + BUSY_LIMIT_S:
                raise OSError(errno.ETIMEDOUT, "the other streams of the extent did not come")

        length = header.length
        try:
            self._begun.wait(BUSY_LIMIT_S, channel.say_working)
            if self._incoming is None:  # the extent is here already
                if onward is not None:
                    onward.offer(self._fd, length)
            else:
                piece = PIECE_BYTES_MAX if onward is None else piece_bytes(length)
                try:
                    receive_ranges(channel, self._fd, header.ranges, landed, between, piece)
                except Lost:
                    # Another thread may have stopped it, with the error.
                    self.check()
                    raise
                if not header.comes:
                    landed(0, 0, None)
                self._sealed.wait(2 * BUSY_LIMIT_S, waiting)
            if onward is not None:
                onward.sent.wait(math.inf, channel.say_working)
        except OSError as error:
            self.fail(error)
            raise
        except (Lost, BadMessage) as error:
            # The sender may still be there, and tries again if it gets this error on another stream.
            self.fail(Unreachable(self._service.node, f"a data connection was given up: {error}"))
            raise
        finally:
            channel.clean = received == length
        channel.conclude(Reply(ReplyKind.OK))


class Data:
    """Serves requests of data connections, one at a time each, and has all extents that are coming in."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._current: dict[Extent, Receiving] = {}
        self._places = Places(THREADS_MAX)

    async def serve(self, channel: Channel, peer: Peer) -> bool:
        """Serve a request. Return whether the connection can be used again."""
        header = channel.next_message(decode_header, wait=False)
        if header is None:
            with trio.fail_after(_HEADER_S):
                while (header := channel.next_message(decode_header, wait=False)) is None:
                    await trio.lowlevel.wait_readable(channel.sock)
        host, op, extent = self._host, header.op.name.lower(), header.extent
        host.counters.requests[op] += 1
        channel.clean = False
        async with self._places.one(peer.who if peer.identity.role != "node" else ""):
            with logs.request(header.trace):
                try:
                    await check_right(host.service, RIGHTS, peer, header.op, (extent.content,))
                    if header.op is Op.WRITE:
                        await self._take(channel, header)
                    else:
                        give = partial(self._give, channel, header)
                        [sent] = await self._in_thread(channel, give)
                        host.counters.sent_bytes += sent
                except OSError as error:
                    what = f"{op} of extent {extent.content:x}.{extent.stripe:x}"
                    reply = Reply(ReplyKind.FAILED, *host.failed(peer, what, error))
                    await self._in_thread(channel, partial(channel.conclude, reply))
        return channel.clean

    def _in_thread(self, channel: Channel, work: Callable[[], T]) -> Awaitable[list[T]]:
        return in_threads([work], channel.shutdown, None)

    def _give(self, channel: Channel, header: Header) -> int:
        """Send a range of an extent, or its data, and return how many bytes. Raises OSError, which the peer
        has to be told, and Lost if the bytes cannot be had when some of them were sent."""
        ((start, length),) = header.ranges
        channel.clean = True
        with closing(self._host.service.hold(header.extent)) as held:
            held.lend()
            try:
                if start + length > os.fstat(held.fd).st_size:
                    raise OSError(errno.EINVAL, "the extent is shorter than what is asked for")
                data: Ranges = ()
                if header.op is Op.READ_DATA:
                    found = segments(held.fd, start, length)
                    data = tuple((start + at, count) for at, count in found)
                channel.clean = False
                channel.say(Reply(ReplyKind.OK, ranges=data))
                sent = header.ranges if header.op is Op.READ else data
                for at, count in sent:
                    if send_range(channel, held.fd, at, count) is not None:
                        raise BadMessage("it replies to what it receives")
                channel.end_sending()
            except OSError as error:
                if channel.clean:
                    raise
                raise Lost(f"what is asked for cannot be read: {error.strerror}") from None
        channel.clean = True
        return sum(map(itemgetter(1), sent))

    async def _take(self, channel: Channel, header: Header) -> None:
        receiving = self._join(header, channel)
        try:
            if not header.target.chain:
                await self._in_thread(channel, partial(receiving.take, channel, header, None))
                return
            onward = Onward(header)
            try:
                async with background() as nursery:
                    nursery.start_soon(onward.sent.fulfil, partial(self._hand_on, onward))
                    try:
                        take = partial(receiving.take, channel, header, onward)
                        await self._in_thread(channel, take)
                    finally:
                        onward.give_up()
            finally:
                self._host.counters.sent_bytes += onward.sent_bytes
        finally:
            await self._leave(receiving, channel)

    async def _hand_on(self, onward: Onward) -> None:
        way = self._host.device(onward.node).way(TcpWay)
        borrowed = await way.borrow(1)
        try:
            (next_node,) = borrowed
            # Each of these belongs to a thread that receives, so they are limited already.
            await in_threads([partial(onward.send, next_node)], next_node.shutdown, None)
        finally:
            way.give_back(borrowed)

    # -- what is being received ------------------------------------------------------------------

    def _join(self, header: Header, channel: Channel) -> Receiving:
        """Return the transfer of a stream that begins; it ends with `_leave`. Raises BadMessage."""
        current = self._current.get(header.extent)
        if current is not None and current.header.transfer == header.transfer:
            if (current.header.total, current.header.comes) != (header.total, header.comes):
                raise BadMessage("two streams of a transfer do not agree on its size")
            current.add(channel, header.ranges)
            return current
        if current is not None:
            # Its sender has given the transfer up, or soon will.
            current.fail(OSError(errno.ECANCELED, "another transfer of the extent took its place"))
        receiving = self._current[header.extent] = Receiving(header, self._host.service)
        receiving.add(channel, header.ranges)
        self._host.nursery.start_soon(receiving.store)
        return receiving

    async def _leave(self, receiving: Receiving, channel: Channel) -> None:
        """End a stream, and with the last one the transfer."""
        if receiving.remove(channel):
            extent = receiving.header.extent
            if self._current.get(extent) is receiving:
                del self._current[extent]
            self._host.counters.received_bytes += receiving.received_bytes
            await receiving.close()
