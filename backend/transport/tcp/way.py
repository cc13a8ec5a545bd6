"""The caller's end over TCP: extents are divided among data connections, each used by a thread."""

import itertools
import logging
import secrets
import socket
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter, itemgetter
from typing import Any, Final

import trio

from ...files.extents import when_unlocked
from ...files.sparse import empty, segments
from ...observe.logs import current_request
from ...unwrap import if_it_fails
from .. import Extent, FileRange, Landed, Memory, Target, Unreachable, landed_from, nothing_landed
from ..caller import ControlClient
from ..device import Sending, Transfer, Way
from ..frames import BadMessage
from ..link import Link, Refusal, check_node
from .authentication import connection_key
from .channel import (
    Channel,
    EncryptedChannel,
    Lost,
    Silent,
    choose_congestion_control,
    make_channel,
)
from .streams import receive_ranges, send_stream, wait_for_reply
from .threads import in_threads
from .wire import PREAMBLE, Admit, Admitted, Header, Op, Ranges, ReplyKind, end_of

log = logging.getLogger(__name__)

# A shorter part is not worth a stream of its own.
_STREAM_BYTES_MIN = 4 << 20
# Two threads that write to one huge page of a file at once slow each other down.
_STREAM_ALIGNMENT_BYTES = 2 << 20
IDLE_CHANNEL_S = 15.0
_CHANNELS_KEPT = 16
_LENGTH: Final = itemgetter(1)
_NOWHERE = Target(0, 0, ())
_IDLE_SINCE: Final = attrgetter("idle_since")


class TcpWay(Way):
    """Moves extents over up to `streams` connections, encrypted or not. `places` are for threads that open
    connections and move this process's own extents; those that send on are limited by its receiving."""

    name = "tcp"

    def __init__(self, link: Link, streams: int, encrypt: bool, places: trio.Semaphore) -> None:
        self._link = link
        self._streams = streams
        self._encrypt = encrypt
        self._places = places
        # Where there are certificates, bytes have a code or are encrypted.
        self.shows_bytes = link.caller.credentials is not None
        # The connections were opened with the key of this one, once it was asked for.
        self._control: ControlClient | None = None
        self._admitted: Admitted | None = None
        self._numbers = itertools.count(1)
        self._idle: list[Channel] = []
        self._lent: set[Channel] = set()
        self._opening: set[trio.CancelScope] = set()
        link.given_up.append(self.close)

    def suits(self, transfer: Transfer) -> bool:
        return transfer.memory is not Memory.DEVICE

    async def reach(self) -> int | None:
        return 0

    def read(
        self, extent: Extent, start: int, into: FileRange, landed: Landed
    ) -> Coroutine[Any, Any, None]:
        # Where byte 0 of the extent would be in the file.
        base = into.offset - start
        landed = landed_from(landed, -into.offset)
        work = partial(_receive, fd=into.fd, base=base, landed=landed)
        op = Op.READ_DATA if into.memory is Memory.HOLES else Op.READ
        return self._run(op, extent, _NOWHERE, 0, [(start, into.length)], work)

    async def write(self, sending: Sending) -> None:
        extent, target, (fd, offset, length, _), passed, growth, has_holes = sending
        ranges = [(0, length)]
        if growth is not None:
            growth.lend()
            await growth.complete()
        elif has_holes:
            ranges = await when_unlocked(segments, fd, offset, length) or [(0, 0)]
        if passed is not nothing_landed:
            passed = landed_from(passed, -offset)
        work = partial(_send, fd=fd, base=offset, passed=passed)
        is_own = growth is None
        await self._run(Op.WRITE, extent, target, length, ranges, work, is_own=is_own)

    async def _run(
        self,
        op: Op,
        extent: Extent,
        target: Target,
        total: int,
        ranges: Sequence[tuple[int, int]],
        work: Callable[[Channel, Header], None],
        *,
        is_own: bool = True,
    ) -> None:
        """Divide the ranges among streams, and do each stream's work on a connection; what is not this
        process's own is one stream. If an idle connection turns out to be broken, new ones are used."""
        link = self._link
        link.caller.counters.round_trips += 1
        comes, trace = sum(map(_LENGTH, ranges)), current_request()
        shares = _shares(ranges, comes, self._streams if is_own else 1)
        places = self._places if is_own else None
        may_repeat = True
        while True:
            number = secrets.randbits(63)
            header = partial(Header, op, extent, target, number, total, comes, trace=trace)
            channels = await self.borrow(len(shares))
            works = [*map(partial, repeat(work), channels, map(header, shares))]
            was_idle = any(map(_IDLE_SINCE, channels))
            try:
                await in_threads(works, partial(_shut_down, channels), places)
                return
            except BadMessage as error:
                self._drop()
                log.warning("store node %x: a data connection is given up: %s", link.node, error)
                raise Unreachable(link.node, str(error)) from None
            except Lost as error:
                self._drop()
                if not (may_repeat and was_idle) or isinstance(error, Silent):
                    raise Unreachable(link.node, str(error)) from None
                may_repeat = False
                log.info("store node %x: on new data connections: %s", link.node, error)
            finally:
                self.give_back(channels)

    # -- connections -----------------------------------------------------------------------------

    async def borrow(self, count: int) -> list[Channel]:
        """Return connections for one request each; the caller gives them back. Raises Unreachable."""
        control = await self._link.connected()
        if control is not self._control:
            self._drop()
            self._control, self._admitted = control, None
        found: list[Channel] = []
        while self._idle and len(found) < count:
            channel = self._idle.pop()
            if channel.is_closed_by_peer():
                channel.close()
            else:
                found.append(channel)
        with if_it_fails(partial(self.give_back, found)):
            if len(found) < count:
                found += await self._open(control, count - len(found))
            if control is not self._control:
                raise Unreachable(self._link.node, control.why)
        self._lent.update(found)
        return found

    def give_back(self, channels: Iterable[Channel]) -> None:
        """Take connections back; those that are not clean are closed."""
        for channel in channels:
            self._lent.discard(channel)
            if channel.clean and self._control is not None and len(self._idle) < _CHANNELS_KEPT:
                channel.idle_since = time.monotonic()
                self._idle.append(channel)
            else:
                channel.close()

    def _drop(self) -> None:
        """Close the connections that are not in use."""
        for channel in self._idle:
            channel.close()
        self._idle.clear()

    def close(self) -> None:
        """End what is done on all connections, and keep none until the node is reached again."""
        self._drop()
        _shut_down(self._lent)
        for scope in self._opening:
            scope.cancel()
        self._control = None

    def tidy(self) -> None:
        """Close connections that have not been used for long."""
        old = time.monotonic() - IDLE_CHANNEL_S
        while self._idle and self._idle[0].idle_since < old:
            self._idle.pop(0).close()

    async def _open(self, control: ControlClient, count: int) -> list[Channel]:
        node = self._link.node
        admitted = self._admitted or await control.ask(Admit(), Admitted)
        if control is self._control:
            self._admitted = admitted
        opened: list[Channel] = []
        errors: list[Unreachable] = []

        async def open_one() -> None:
            try:
                with trio.fail_after(self._link.caller.timeout_s) as scope:
                    self._opening.add(scope)
                    channel = await self._open_channel(control, admitted)
                    opened.append(channel)
            except (OSError, Lost, trio.TooSlowError, BadMessage, Refusal) as error:
                why = str(error) or "no data connection could be opened in time"
                errors.append(Unreachable(node, why))
            finally:
                self._opening.discard(scope)

        with if_it_fails(partial(self.give_back, opened)):
            async with trio.open_nursery() as nursery:
                for _ in range(count):
                    nursery.start_soon(open_one)
            if errors:
                raise errors[0]
        return opened

    async def _open_channel(self, control: ControlClient, admitted: Admitted) -> Channel:
        """Connect to the address at which the node was reached."""
        caller, ends = self._link.caller, control.ends
        with trio.socket.socket(ends.family, socket.SOCK_STREAM) as sock:
            choose_congestion_control(sock)
            await sock.connect((ends.there[0], ends.record.data_port, *ends.there[2:]))
            plain = socket.socket(fileno=sock.detach())
        channel = make_channel(plain, caller, encrypted=self._encrypt, listens=False)
        with if_it_fails(channel.close):
            if isinstance(channel, EncryptedChannel):
                channel.sock.settimeout(caller.timeout_s)
                await in_threads([channel.sock.do_handshake], channel.shutdown, self._places)
                check_node(channel.sock, caller.is_revoked)
            number = next(self._numbers)
            channel.authenticate(connection_key(admitted.key, number))
            # Fits into the empty buffer of the new connection.
            channel.send_all(channel.signed(PREAMBLE.pack(admitted.peer, number)))
        return channel


def _shut_down(channels: Iterable[Channel]) -> None:
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
    pieces = ((fd, base + start, length) for start, length in header.ranges)
    send_stream(channel, header, pieces, passed)


def _receive(channel: Channel, header: Header, fd: int, base: int, landed: Landed) -> None:
    """Receive one stream of an extent. Raises the node's error."""
    channel.clean = False
    channel.say(header)
    reply = wait_for_reply(channel, may_work=False)
    if reply.kind is ReplyKind.OK:
        ranges = header.ranges
        if header.op is Op.READ_DATA:
            ranges = reply.ranges
            _make_holes(ranges, *header.ranges[0], fd, base)
        if base:
            ranges = tuple((base + start, length) for start, length in ranges)
        receive_ranges(channel, fd, ranges, landed)
    channel.clean = True
    reply.check()


def _make_holes(ranges: Ranges, start: int, length: int, fd: int, base: int) -> None:
    """Empty what lies between the ranges that come of those `length` bytes. Raises BadMessage if they lie
    elsewhere."""
    end = start + length
    if end_of(ranges, start) > end:
        raise BadMessage("it sends more of an extent than was asked for")
    for first, count in (*ranges, (end, 0)):
        empty(fd, base + start, first - start)
        start = first + count
