"""The caller's end over TCP: extents are divided among data connections, each used by a thread."""

import logging
import secrets
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from itertools import repeat
from operator import itemgetter
from typing import Any, Final

import trio

from ...files.sparse import segments
from ...observe.logs import current_request
from .. import Extent, FileRange, Landed, Memory, Target, Unreachable, landed_from, nothing_landed
from ..frames import BadMessage
from ..link import Link
from ..mover import Sending, Transfer, Way
from .channel import Channel, Lost
from .pool import Pool
from .streams import end_sending, receive_ranges, send_range, wait_for_reply
from .threads import in_threads
from .wire import Header, Op, Ranges, Reply, ReplyKind

log = logging.getLogger(__name__)

# A shorter part is not worth a stream of its own.
_STREAM_BYTES_MIN = 4 << 20
# Two threads that write to one huge page of a file at once slow each other down.
_STREAM_ALIGNMENT_BYTES = 2 << 20
_LENGTH: Final = itemgetter(1)


class TcpWay(Way):
    """Moves extents over up to `streams` connections, encrypted or not. `places` are for threads that move
    this process's own extents; those that send on bytes are limited by its receiving."""

    name = "tcp"

    def __init__(self, link: Link, streams: int, encrypt: bool, places: trio.Semaphore) -> None:
        self.pool = Pool(link, encrypt, places)
        self._link = link
        self._streams = streams
        self._places = places

    def suits(self, transfer: Transfer) -> bool:
        return transfer.memory is not Memory.DEVICE

    async def reach(self) -> int | None:
        return 0

    @property
    def shows_bytes(self) -> bool:
        # Where there are certificates, bytes have a code or are encrypted.
        return self._link.caller.credentials is not None

    def read(
        self, extent: Extent, start: int, into: FileRange, landed: Landed
    ) -> Coroutine[Any, Any, None]:
        nowhere = Target(0, 0, ())
        # Where byte 0 of the extent would be in the file.
        base = into.offset - start
        landed = landed_from(landed, -into.offset)

        def work(channel: Channel, header: Header) -> None:
            _receive(channel, header, into.fd, base, landed)

        return self._run(
            Op.READ, extent, nowhere, 0, [(start, into.length)], self._streams, work, self._places
        )

    async def write(self, sending: Sending) -> None:
        extent, target, (fd, offset, length, _), passed, growth, has_holes = sending
        ranges, streams = [(0, length)], self._streams
        places: trio.Semaphore | None = self._places
        if growth is not None:
            streams, places = 1, None
            growth.lend()
            await growth.complete()
        elif has_holes:
            ranges = await trio.to_thread.run_sync(segments, fd, offset, length) or [(0, 0)]
        if passed is not nothing_landed:
            passed = landed_from(passed, -offset)

        def work(channel: Channel, header: Header) -> None:
            _send(channel, header, fd, offset, passed)

        await self._run(Op.WRITE, extent, target, length, ranges, streams, work, places)

    async def _run(
        self,
        op: Op,
        extent: Extent,
        target: Target,
        total: int,
        ranges: Sequence[tuple[int, int]],
        streams: int,
        work: Callable[[Channel, Header], None],
        places: trio.Semaphore | None,
    ) -> None:
        """Divide the ranges among streams, and do each stream's work on a connection."""
        link, pool = self._link, self.pool
        link.caller.counters.round_trips += 1
        comes, trace = sum(map(_LENGTH, ranges)), current_request()
        shares = _shares(ranges, comes, streams)
        number = secrets.randbits(63)
        headers = [Header(op, extent, target, number, total, comes, s, trace) for s in shares]
        channels = await pool.borrow(len(shares))
        works = [*map(partial, repeat(work), channels, headers)]
        try:
            await in_threads(works, partial(_shut_down, channels), places)
        except BadMessage as error:
            pool.drop()
            log.warning("store node %x: a data connection is given up: %s", link.node, error)
            raise Unreachable(link.node, str(error)) from None
        except Lost as error:
            pool.drop()
            raise Unreachable(link.node, str(error)) from None
        finally:
            pool.give_back(channels)


def _shut_down(channels: Sequence[Channel]) -> None:
    for channel in channels:
        channel.shutdown()


def _shares(ranges: Sequence[tuple[int, int]], length: int, streams: int) -> list[Ranges]:
    """Divide ranges, `length` bytes together, among at most so many streams, each of which is worth it."""
    count = max(1, min(streams, length // _STREAM_BYTES_MIN))
    share = -(-length // count)
    if count > 1:
        share += -share % _STREAM_ALIGNMENT_BYTES
    shares: list[list[tuple[int, int]]] = [[]]
    room = share
    for start, left in ranges:
        while left > room:
            if room:
                shares[-1].append((start, room))
            start, left = start + room, left - room
            shares.append([])
            room = share
        shares[-1].append((start, left))
        room -= left
    return [*map(tuple, shares)]


def _send(channel: Channel, header: Header, fd: int, base: int, passed: Landed) -> None:
    """Send one stream of an extent that begins at `base` of a file. Raises the node's error."""
    channel.clean = False
    channel.send_header(header)
    reply: Reply | None = None
    for start, length in header.ranges:
        reply = send_range(channel, fd, base + start, length, passed)
        if reply is not None:
            break
    (end_sending(channel) if reply is None else reply).check(header.target.group)


def _receive(channel: Channel, header: Header, fd: int, base: int, landed: Landed) -> None:
    """Receive one stream of an extent. Raises the node's error."""
    channel.clean = False
    channel.send_header(header)
    reply = wait_for_reply(channel)
    if reply.kind is ReplyKind.OK:
        ranges = header.ranges
        if base:
            ranges = tuple((base + start, length) for start, length in ranges)
        receive_ranges(channel, fd, ranges, landed)
    channel.clean = True
    reply.check(header.target.group)
