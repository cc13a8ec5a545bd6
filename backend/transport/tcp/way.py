"""The caller's end over TCP: extents are divided among data connections, each used by a thread."""

import errno
import logging
import os
import secrets
from collections.abc import Callable
from functools import partial

import trio

from ...files.sparse import is_sparse, segments
from ...observe.logs import current_request
from .. import Extent, FileRange, Landed, Memory, Target, Unreachable, landed_from, nothing_landed
from ..frames import BadMessage
from ..growth import Growth
from ..link import Link
from ..mover import Transfer, Way
from .channel import Channel, Lost, Patience, Silent
from .parts import Parts
from .pool import Pool
from .streams import receive_range, send_part, wait_for_reply
from .threads import in_threads
from .wire import Header, Op, ReplyKind

__all__ = ["TcpWay"]

log = logging.getLogger(__name__)

# A shorter part is not worth a stream of its own.
_STREAM_BYTES_MIN = 4 << 20
# Two threads that write to one huge page of a file at once slow each other down.
_STREAM_ALIGNMENT_BYTES = 2 << 20


class TcpWay(Way):
    """Moves extents over up to `streams` connections, encrypted or not. `places` are for threads that move
    this process's own extents; those that send on bytes are limited by its receiving."""

    name = "tcp"

    def __init__(
        self,
        link: Link,
        streams: int,
        encrypt: bool,
        places: trio.Semaphore,
    ) -> None:
        self.pool = Pool(link, encrypt, places)
        self._link = link
        self._streams = streams
        self._places = places
        self._timeout_s = link.caller.timeout_s
        self._counters = link.caller.counters

    def suits(self, transfer: Transfer) -> bool:
        return transfer.memory is not Memory.DEVICE

    async def reach(self) -> int | None:
        return 0

    @property
    def shows_bytes(self) -> bool:
        # Where there are certificates, bytes have a code or are encrypted.
        return self._link.caller.credentials is not None

    async def read(self, extent: Extent, start: int, into: FileRange, landed: Landed) -> None:
        nowhere = Target(0, 0, ())
        headers = self._headers(Op.READ, extent, nowhere, start, into.length, self._streams)

        def work(channel: Channel, header: Header) -> None:
            self._receive(channel, header, into.fd, into.offset, start, landed)

        await self._run(headers, work, self._places)

    async def write(
        self, extent: Extent, target: Target, source: FileRange, passed: Landed
    ) -> None:
        status = os.fstat(source.fd)
        if is_sparse(status.st_size, status.st_blocks):
            await self._send_sparse(extent, target, source)
        else:
            await self._send_all(extent, target, source, self._streams, self._places, passed)

    async def pass_on(
        self,
        extent: Extent,
        target: Target,
        source: FileRange,
        growth: Growth,
        lend: Callable[[], None],
    ) -> None:
        lend()
        await growth.complete()
        await self._send_all(extent, target, source, 1, None)

    def give_up(self, why: str) -> None:
        self.pool.close()

    def tidy(self) -> None:
        self.pool.tidy()

    async def _send_sparse(self, extent: Extent, target: Target, source: FileRange) -> None:
        fd, offset, length, _ = source
        found = await trio.to_thread.run_sync(segments, fd, offset, length)
        data = sum(count for _, count in found)
        base = Header(
            Op.SPARSE, extent, target, secrets.randbits(63), length, 0, data, current_request()
        )
        streams = min(self._streams, len(found))
        headers = [base, *([base._replace(op=Op.PART)] * streams)]
        parts = Parts(fd, offset, found, self._timeout_s)

        def work(channel: Channel, header: Header) -> None:
            move = parts.begin if header.op is Op.SPARSE else parts.send
            move(channel, header)

        # `parts` knows which segments were sent, not which arrived, so the caller's next try begins anew.
        await self._run(headers, work, self._places, repeats=False)

    async def _send_all(
        self,
        extent: Extent,
        target: Target,
        source: FileRange,
        streams: int,
        places: trio.Semaphore | None,
        passed: Landed = nothing_landed,
    ) -> None:
        fd, offset, length, _ = source
        headers = self._headers(Op.WRITE, extent, target, 0, length, streams, total=length)

        def work(channel: Channel, header: Header) -> None:
            self._send(channel, header, fd, offset, passed)

        await self._run(headers, work, places)

    def _headers(
        self,
        op: Op,
        extent: Extent,
        target: Target,
        start: int,
        length: int,
        streams: int,
        total: int = 0,
    ) -> list[Header]:
        """Return a header for each stream."""
        count = max(1, min(streams, length // _STREAM_BYTES_MIN))
        share = -(-length // count)
        if count > 1:
            share += -share % _STREAM_ALIGNMENT_BYTES
        transfer = secrets.randbits(63)
        trace = current_request()
        return [
            Header(
                op, extent, target, transfer, total, start + done, min(share, length - done), trace
            )
            for done in range(0, max(length, 1), max(share, 1))
        ]

    async def _run(
        self,
        headers: list[Header],
        work: Callable[[Channel, Header], None],
        places: trio.Semaphore | None,
        repeats: bool = True,
    ) -> None:
        """Do each header's work on a connection. If a connection that had been idle turns out to be
        broken, and the work `repeats`, all is done once more on new ones."""
        link, counters = self._link, self._counters
        counters.round_trips += 1
        channels = await self.pool.borrow(len(headers))
        repeats = repeats and any(channel.was_idle for channel in channels)
        try:
            try:
                await self._run_on(channels, headers, work, places)
            except Lost as error:
                if not repeats or isinstance(error, Silent):
                    raise
                log.info("store node %x: on new data connections: %s", link.node, error)
                transfer = secrets.randbits(63)
                headers = [header._replace(transfer=transfer) for header in headers]
                channels = await self.pool.borrow(len(headers))
                await self._run_on(channels, headers, work, places)
        except (Lost, BadMessage) as error:
            counters.errors["ENOTCONN"] += 1
            raise Unreachable(link.node, str(error)) from None
        except OSError as error:
            counters.errors[errno.errorcode.get(error.errno or 0, "EIO")] += 1
            raise

    async def _run_on(
        self,
        channels: list[Channel],
        headers: list[Header],
        work: Callable[[Channel, Header], None],
        places: trio.Semaphore | None,
    ) -> None:
        link = self._link

        def stop() -> None:
            for channel in channels:
                channel.shutdown()

        try:
            with link.watched():
                await in_threads(
                    [partial(work, *pair) for pair in zip(channels, headers, strict=True)],
                    stop,
                    places,
                )
        except (Lost, BadMessage) as error:
            if isinstance(error, BadMessage):
                self._counters.rejected += 1
                log.warning("store node %x: a data connection is given up: %s", link.node, error)
            self.pool.drop()
            raise
        finally:
            self.pool.give_back(channels)

    def _send(self, channel: Channel, header: Header, fd: int, offset: int, passed: Landed) -> None:
        begin = header.offset
        if passed is not nothing_landed:
            passed = landed_from(passed, begin)
        reply = send_part(channel, header, fd, offset + begin, self._timeout_s, passed)
        reply.check(header.target.group)

    def _receive(
        self, channel: Channel, header: Header, fd: int, offset: int, start: int, landed: Landed
    ) -> None:
        timeout_s = self._timeout_s
        channel.clean = False
        channel.send_header(header, Patience(timeout_s))
        reply = wait_for_reply(channel, timeout_s)
        if reply.kind is ReplyKind.OK:
            begin = header.offset - start
            receive_range(
                channel,
                fd,
                offset + begin,
                header.length,
                timeout_s,
                landed=landed_from(landed, begin),
            )
        channel.clean = True
        reply.check(header.target.group)
