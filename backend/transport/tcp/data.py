"""The node's end of data connections: extents are given out and taken in."""

import errno
import logging
import os
from collections.abc import Callable
from functools import partial

import trio

from ...observe import logs
from ...unwrap import only_error
from .. import Extent
from ..frames import BadMessage
from ..messages import failure_of
from ..mover import Host
from ..rights import Peer, tell_of_denial
from ..service import begin, check_right
from .channel import Channel
from .messages import RIGHTS
from .streams import send_range
from .threads import in_threads
from .transfers import Onward, Receiving
from .way import TcpWay
from .wire import Header, Op, Reply, ReplyKind

log = logging.getLogger(__name__)

# A thread serves one stream of a transfer; idle connections have none. Every transfer under way must
# get its threads, or chains that cross would wait for each other.
THREADS_MAX = 2048
_HEADER_S = 5.0


class Data:
    """Serves requests of data connections, one at a time each, and has all extents that are being
    received."""

    def __init__(self, host: Host) -> None:
        self._service = host.service
        self._device = host.device
        self._nursery = host.nursery
        self._counters = host.counters
        self._current: dict[Extent, Receiving] = {}
        self._places = trio.Semaphore(THREADS_MAX)

    async def serve(self, channel: Channel, peer: Peer) -> bool:
        """Serve a request. Return whether the connection can be used again."""
        header = channel.header_if_there()
        if header is None:
            receive = partial(channel.receive_header, _HEADER_S)
            (header,) = await in_threads([receive], channel.shutdown, self._places)
        self._counters.requests[header.op.name.lower()] += 1
        channel.clean = False
        with logs.request(header.trace):
            try:
                await check_right(self._service, RIGHTS, peer, header.op, header.extent.content)
            except OSError as error:
                if isinstance(error, PermissionError):
                    self._counters.denied_requests += 1
                    tell_of_denial(peer, error)
                reply = Reply(ReplyKind.FAILED, *failure_of(error, self._service.node))
                await self._conclude(channel, reply)
            else:
                if header.op is Op.READ:
                    reply = await self._give(channel, header)
                else:
                    reply = await self._take(channel, header)
            if reply.kind is ReplyKind.FAILED:
                self._counters.errors[errno.errorcode.get(reply.code, str(reply.code))] += 1
                log.info(
                    "%s: %s of extent %x.%x: %s",
                    peer,
                    header.op.name.lower(),
                    *header.extent,
                    reply.text or os.strerror(reply.code),
                )
        return channel.clean

    async def _give(self, channel: Channel, header: Header) -> Reply:
        work = partial(self._send_extent, channel, header)
        ((reply, sent),) = await in_threads([work], channel.shutdown, self._places)
        self._counters.sent_bytes += sent
        return reply

    def _send_extent(self, channel: Channel, header: Header) -> tuple[Reply, int]:
        ((start, length),) = header.ranges
        fd = -1
        sent = 0
        try:
            fd = self._service.open(header.extent)
            if start + length > os.fstat(fd).st_size:
                raise OSError(errno.EINVAL, "the extent is shorter than what is asked for")
            reply = Reply(ReplyKind.OK)
            channel.reply(reply)
            if send_range(channel, fd, start, length) is not None:
                raise BadMessage("it replies to what it receives")
            channel.end_sending()
            sent = length
        except OSError as error:
            if sent:
                raise
            reply = Reply(ReplyKind.FAILED, *failure_of(error, self._service.node))
            channel.reply(reply)
        finally:
            if fd >= 0:
                os.close(fd)
        channel.clean = True
        return reply, sent

    async def _take(self, channel: Channel, header: Header) -> Reply:
        receiving = self._join(header, channel)
        onward = Onward(header) if header.target.chain else None
        work = partial(receiving.take, channel, header, onward)
        try:
            if onward is None:
                ((reply, received),) = await in_threads([work], channel.shutdown, self._places)
            else:
                reply, received = await self._take_and_hand_on(channel, work, onward)
        finally:
            await self._leave(receiving, channel)
        self._counters.received_bytes += received
        if reply.kind is ReplyKind.FAILED:
            await self._conclude(channel, reply)
        return reply

    async def _take_and_hand_on(
        self, channel: Channel, work: Callable[[], tuple[Reply, int]], onward: Onward
    ) -> tuple[Reply, int]:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(onward.sent.fulfil, partial(self._hand_on, onward))
                try:
                    (outcome,) = await in_threads([work], channel.shutdown, self._places)
                finally:
                    onward.give_up()
                    nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise only_error(group) from None
        finally:
            self._counters.sent_bytes += onward.sent_bytes
        return outcome

    async def _conclude(self, channel: Channel, reply: Reply) -> None:
        finish = partial(channel.conclude, reply)
        await in_threads([finish], channel.shutdown, self._places)

    async def _hand_on(self, onward: Onward) -> None:
        way = self._device(onward.node).way(TcpWay)
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
        if current is not None and current.transfer == header.transfer:
            if current.lengths != (header.total, header.comes):
                raise BadMessage("two streams of a transfer do not agree on its size")
            current.add(channel, header.ranges)
            return current
        if current is not None:
            # Its sender has given the transfer up, or soon will.
            current.fail(OSError(errno.ECANCELED, "another transfer of the extent took its place"))
        receiving = self._current[header.extent] = Receiving(header, self._service.node)
        receiving.add(channel, header.ranges)
        self._nursery.start_soon(self._store, receiving, header)
        return receiving

    def give_up(self, content: int) -> None:
        """End the transfers of this content, which will not be published."""
        for extent, receiving in self._current.items():
            if extent.content == content:
                receiving.fail(OSError(errno.ECANCELED, "the content was given up"))

    async def _leave(self, receiving: Receiving, channel: Channel) -> None:
        """End a stream. With the last one, a file that is not sealed is dropped."""
        if not receiving.remove(channel):
            return
        if self._current.get(receiving.extent) is receiving:
            del self._current[receiving.extent]
        with trio.CancelScope(shield=True):
            await receiving.begun.ended()
            if receiving.complete.is_set():
                await receiving.sealed.ended()
        receiving.scope.cancel()
        if receiving.incoming is not None:
            receiving.incoming.close()
        elif receiving.fd >= 0:
            os.close(receiving.fd)

    async def _store(self, receiving: Receiving, header: Header) -> None:
        """Make the file that the bytes come into, and seal the extent when all are there."""

        async def seal() -> None:
            await receiving.complete.wait()
            assert receiving.incoming is not None
            await self._service.seal(receiving.extent, receiving.incoming)

        await receiving.begun.fulfil(partial(self._begin, receiving, header))
        with receiving.scope:
            await receiving.sealed.fulfil(seal)

    async def _begin(self, receiving: Receiving, header: Header) -> None:
        extent = header.extent
        incoming = await begin(self._service, extent, header.target, header.total, header.comes)
        if incoming is None:
            receiving.fd = self._service.open(extent)
            receiving.is_here_already = True
            return
        receiving.incoming = incoming
        receiving.fd = incoming.fd
        if header.target.chain:
            incoming.lend()
        receiving.check()
