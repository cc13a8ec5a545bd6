"""The caller's end of the transport: a control connection and data connections to each store node.

Connections are made when they are needed and kept for a while. A node that cannot be reached is left
alone for a moment, in which every call fails at once, so that a caller can turn to a replica.
"""

import errno
import logging
import math
import os
import secrets
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Self

import trio

from ..logs import current_request
from ..records import NodeAddress, Settings
from ..security import Credentials
from ..sparse import empty, is_sparse, segments
from . import Device, Extent, FileRange, Landed, Memory, Target, Unreachable, nothing_landed
from .channel import Channel, Lost, Patience, Silent
from .counters import Counters
from .link import Link
from .messages import (
    CHAIN_MAX,
    GET_EXTENTS_MAX,
    PUT_BYTES_MAX,
    VERSION,
    Abort,
    Adopt,
    BadMessage,
    Contents,
    Digest,
    Digested,
    Doubt,
    Get,
    Hello,
    Map,
    Mapped,
    Ping,
    Put,
    Report,
    Scrub,
    Status,
    Suspect,
    Verdict,
    error_of,
)
from .parts import Parts
from .streams import receive_range, send_range, wait_for_reply
from .threads import in_threads
from .verbs.growth import Growth
from .verbs.lanes import Lanes
from .verbs.queue import NotByVerbs
from .verbs.rdma import Rdma
from .wire import Header, Op, Reply, ReplyKind

__all__ = ["Peers", "patience_s"]

log = logging.getLogger(__name__)

# A stream of its own is not worth it for less.
_STREAM_BYTES_MIN = 4 << 20
# Two threads that touch one huge page of a file at once get into each other's way.
_STREAM_ALIGNMENT_BYTES = 2 << 20
_THREADS_MAX = 512
_TIDY_S = 5.0


def patience_s(settings: Settings) -> float:
    """How long a peer may be silent: shorter than a lease, so that a cut link is noticed before a node
    is given up by the cluster, and not much longer than a busy machine may stall."""
    return max(1.0, 0.6 * settings.lease_ttl_s)


class Peers:
    """All store nodes, as devices. Use as an async context manager.

    `resolve` tells where a node is (None: it is not registered), `session` the number of this mount's
    session, which `session_key` shows to be its own. A peer that is silent for `timeout_s` is given up.
    With `rdma`, which must stay open longer, what is long enough moves by verbs where both ends can:
    through memory that is registered once and for all if it `stages`, as a mount does, or from and to
    files that are registered when they are first used.
    """

    def __init__(
        self,
        resolve: Callable[[int], NodeAddress | None],
        *,
        credentials: Credentials | None = None,
        name: str,
        role: str,
        session: Callable[[], int] = lambda: 0,
        session_key: bytes = b"",
        streams: int = 4,
        encrypt_data: bool = False,
        timeout_s: float = 5.0,
        rdma: Rdma | None = None,
        stages: bool | None = None,
    ) -> None:
        self.resolve = resolve
        self.name = name
        self.role = role
        self.session = session
        self._session_key = session_key
        self.timeout_s = timeout_s
        self.rdma = rdma
        # A file of a mount is used for one version; a node's serves many, and is sent on while it comes.
        self.stages = role == "mount" if stages is None else stages
        self.streams = streams
        self.encrypt_data = encrypt_data
        self.context = credentials.client_context() if credentials is not None else None
        # Tells whether a node's certificate, by its serial number, is not accepted any more.
        self.is_revoked: Callable[[str], bool] = lambda serial: False
        self.trusted = credentials.ca if credentials is not None else "nobody"
        self.counters = Counters()
        self.limiter = trio.CapacityLimiter(_THREADS_MAX)
        # For what a node passes on, which is limited by what it receives.
        self.unlimited = trio.CapacityLimiter(math.inf)
        self._links: dict[int, Link] = {}

    async def __aenter__(self) -> Self:
        self._manager = trio.open_nursery()
        self.nursery = await self._manager.__aenter__()
        self.nursery.start_soon(self._tidy)
        if self.rdma is not None:
            self.nursery.start_soon(self.rdma.watch)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.nursery.cancel_scope.cancel()
        try:
            # An error of the block is not the nursery's business, which would wrap it.
            await self._manager.__aexit__(None, None, None)
        finally:
            for link in self._links.values():
                link.close()

    @property
    def writing_session(self) -> int:
        """The session that the rights of a data connection hang on; 0: none, as a node's do."""
        return self.session() if self.role == "mount" else 0

    def hello(self, node: int) -> Hello:
        return Hello(VERSION, self.role, self.name, self.session(), node, self._session_key)

    def device(self, node: int) -> Device:
        return self.remote_device(node)

    def remote_device(self, node: int) -> "RemoteDevice":
        return RemoteDevice(self, self.link(node))

    async def ping(self, node: int) -> None:
        """Raises Unreachable."""
        await self.link(node).ask(lambda number: Ping(number, current_request()))

    async def suspect(self, asked: int, group: int, node: int) -> bool:
        """Have node `asked` check on another member of the group; returns whether that is a member no
        more. Raises OSError."""
        answer = await self.link(asked).ask(
            lambda number: Suspect(number, current_request(), group, node)
        )
        return isinstance(answer, Verdict) and answer.yes

    async def doubt(self, node: int, extent: Extent) -> None:
        """Tell a node that it sent other bytes than were published. Raises OSError."""
        await self.link(node).ask(lambda number: Doubt(number, current_request(), extent))

    async def scrub(self, node: int) -> None:
        """Have a node look over everything it keeps, beginning now. Raises OSError."""
        await self.link(node).ask(lambda number: Scrub(number, current_request()))

    async def status(self, node: int) -> dict[str, object]:
        """What a node tells of itself. Raises OSError."""
        answer = await self.link(node).ask(lambda number: Status(number, current_request()))
        return answer.status if isinstance(answer, Report) else {}

    def link(self, node: int) -> Link:
        link = self._links.get(node)
        if link is None:
            link = self._links[node] = Link(self, node)
        return link

    def node_changed(self, node: int) -> None:
        """For Members.node_changed: a node whose lease is over is not waited for any longer."""
        link = self._links.get(node)
        if link is not None and self.resolve(node) is None:
            link.give_up("its lease is over")

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
        """A line for each node of which it is known that it and this process do not accept each
        other."""
        return [
            f"store node {node:x} is of no use: {link.refusal}"
            for node, link in sorted(self._links.items())
            if link.refusal
        ]

    def shows_bytes(self, node: int) -> bool:
        """Whether what is written to a node passes through memory of this process, most likely."""
        address = self.resolve(node)
        if address is None:
            return False
        if self.rdma is not None and self.rdma.is_usable and "verbs" in address.transports:
            return self.stages
        # Where there are certificates, they have a code or are encrypted.
        return self.context is not None

    async def borrow(self, node: int, count: int) -> list[Channel]:
        """Data connections for one request each. Raises Unreachable."""
        return await self.link(node).channels(count)

    def give_back(self, node: int, channels: Iterable[Channel]) -> None:
        """Those that are not clean are closed."""
        self.link(node).give_back(channels)

    async def _tidy(self) -> None:
        while True:
            await trio.sleep(_TIDY_S)
            for link in self._links.values():
                link.tidy()
            if self.rdma is not None:
                self.rdma.drop_orphans()


class RemoteDevice:
    """A store node reached over TCP, and by verbs where both ends can."""

    def __init__(self, peers: Peers, link: Link) -> None:
        self._peers = peers
        self._link = link

    async def put(self, extent: Extent, target: Target, data: bytes) -> None:
        _check_chain(target)
        if len(data) > PUT_BYTES_MAX:
            raise OSError(errno.EMSGSIZE, f"{len(data)} bytes do not fit into a message")
        await self._link.ask(
            lambda number: Put(number, current_request(), extent, target, data), target.group
        )
        self._peers.counters.sent_bytes += len(data)
        self._peers.counters.message_bytes += len(data)

    async def get(self, extents: Sequence[Extent], limit: int) -> list[bytes | None]:
        found: list[bytes | None] = []
        limit = min(limit, PUT_BYTES_MAX)
        while len(found) < len(extents):
            wanted = list(extents[len(found) : len(found) + GET_EXTENTS_MAX])
            answer = await self._link.ask(partial(_get, wanted, limit))
            if not isinstance(answer, Contents) or not 0 < len(answer.data) <= len(wanted):
                raise OSError(errno.EPROTO, "a node's answer makes no sense")
            found += answer.data
        received = sum(len(data) for data in found if data is not None)
        self._peers.counters.received_bytes += received
        self._peers.counters.message_bytes += received
        return found

    async def adopt(self, extent: Extent, target: Target, name: str) -> None:
        _check_chain(target)
        await self._link.ask(
            lambda number: Adopt(number, current_request(), extent, target, name), target.group
        )

    async def read_sparse(
        self, extent: Extent, into: FileRange, landed: Landed = nothing_landed
    ) -> None:
        answer = await self._link.ask(lambda number: Map(number, current_request(), extent))
        if not isinstance(answer, Mapped):
            raise OSError(errno.EPROTO, "a node's answer makes no sense")
        fd, offset, length, _ = into
        if os.fstat(fd).st_size < offset + length:
            os.ftruncate(fd, offset + length)
        await trio.to_thread.run_sync(empty, fd, offset, length)
        for start, count in answer.segments:
            if not 0 <= start < start + count <= length:
                raise OSError(errno.EIO, "the extent has not the length that it should have")
            shown = partial(_landed_from, landed, start)
            await self.read(extent, start, into.part(start, count), shown)

    async def digest(self, extent: Extent) -> bytes:
        """Return the digest of the bytes that the node has. Raises OSError: ENOENT."""
        answer = await self._link.ask(lambda number: Digest(number, current_request(), extent))
        return answer.digest if isinstance(answer, Digested) else b""

    async def doubt(self, extent: Extent) -> None:
        """Tell the node that it sent other bytes than were published. Raises OSError."""
        await self._peers.doubt(self._link.node, extent)

    async def abort(self, content: int) -> None:
        await self._link.ask(lambda number: Abort(number, current_request(), content))

    async def write(
        self,
        extent: Extent,
        target: Target,
        source: FileRange,
        passed: Landed = nothing_landed,
    ) -> None:
        _check_chain(target)
        peers = self._peers
        status = os.fstat(source.fd)
        async with self._link.operation():
            if is_sparse(status.st_size, status.st_blocks):
                await self._send_sparse(extent, target, source)
            elif not await self._by_verbs(
                "write",
                source.length,
                lambda lanes: lanes.write(extent, target, source, passed=passed),
            ):
                await self._send_all(extent, target, source, peers.streams, peers.limiter, passed)
        peers.counters.sent_bytes += source.length

    async def pass_on(
        self,
        extent: Extent,
        target: Target,
        fd: int,
        length: int,
        growth: Growth,
        lend: Callable[[], None],
    ) -> None:
        """As `write`, of a whole file whose bytes are still coming in. It waits for no other operation, as
        chains that cross would wait for each other. `lend` is called before the file is sent over TCP."""
        _check_chain(target)
        peers, here = self._peers, FileRange(fd, 0, length)
        if not await self._by_verbs(
            "write", length, lambda lanes: lanes.write(extent, target, here, growth)
        ):
            lend()
            await growth.complete()
            await self._send_all(extent, target, here, 1, peers.unlimited)
        peers.counters.sent_bytes += length

    async def _send_sparse(self, extent: Extent, target: Target, source: FileRange) -> None:
        fd, offset, length, _ = source
        found = await trio.to_thread.run_sync(segments, fd, offset, length)
        data = sum(count for _, count in found)
        base = Header(
            Op.SPARSE, extent, target, secrets.randbits(63), length, 0, data, current_request()
        )
        streams = min(self._peers.streams, len(found))
        headers = [base, *([base._replace(op=Op.PART)] * streams)]
        parts = Parts(fd, offset, found, self._peers.timeout_s)

        def work(channel: Channel, header: Header) -> Reply:
            move = parts.begin if header.op is Op.SPARSE else parts.send
            return self._checked(move(channel, header), header)

        # `parts` knows only what was sent, not what arrived. So it begins anew with the caller's next try.
        await self._run("write", headers, work, self._peers.limiter, repeats=False)

    async def _send_all(
        self,
        extent: Extent,
        target: Target,
        source: FileRange,
        streams: int,
        limiter: trio.CapacityLimiter,
        passed: Landed = nothing_landed,
    ) -> None:
        fd, offset, length, _ = source
        headers = self._headers(Op.WRITE, extent, target, 0, length, streams, total=length)

        def work(channel: Channel, header: Header) -> Reply:
            return self._send(channel, header, fd, offset, passed)

        await self._run("write", headers, work, limiter)

    async def read(
        self,
        extent: Extent,
        start: int,
        into: FileRange,
        landed: Landed = nothing_landed,
    ) -> None:
        fd, offset, length, memory = into
        if os.fstat(fd).st_size < offset + length:
            os.ftruncate(fd, offset + length)
        async with self._link.operation():
            if not await self._by_verbs(
                "read", length, lambda lanes: lanes.read(extent, start, into, landed),
                only=memory is Memory.DEVICE,
            ):  # fmt: skip
                await self._run(
                    "read",
                    self._headers(
                        Op.READ, extent, Target(0, 0, ()), start, length, self._peers.streams
                    ),
                    lambda channel, header: self._receive(
                        channel, header, fd, offset, start, landed
                    ),
                    self._peers.limiter,
                )
        self._peers.counters.received_bytes += length

    async def _by_verbs(
        self, kind: str, length: int, move: Callable[[Lanes], Awaitable[None]], only: bool = False
    ) -> bool:
        """Whether it was moved so; if not, TCP has to. Raises OSError: what the node answers; EOPNOTSUPP
        when it is the `only` way."""
        link, counters = self._link, self._peers.counters
        lanes = await link.lanes(length, only)
        if lanes is None:
            if only:
                raise OSError(errno.EOPNOTSUPP, f"RDMA does not lead to store node {link.node:x}")
            return False
        counters.requests[kind] += 1
        try:
            with link.watched():
                await move(lanes)
        except NotByVerbs as error:
            if only:
                raise OSError(errno.EOPNOTSUPP, str(error)) from None
            counters.fallbacks += 1
            log.info("store node %x: over TCP: %s", link.node, error)
            return False
        counters.verbs_bytes += length
        return True

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
        """One per stream."""
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
        kind: str,
        headers: list[Header],
        work: Callable[[Channel, Header], Reply],
        limiter: trio.CapacityLimiter,
        repeats: bool = True,
    ) -> None:
        """Have each header's work done on a connection. If one that had been idle turns out to be broken,
        and the work `repeats`, all is done once more on new ones."""
        link, counters = self._link, self._peers.counters
        counters.requests[kind] += 1
        counters.round_trips += 1
        channels = await link.channels(len(headers))
        repeats = repeats and any(channel.was_idle for channel in channels)
        try:
            try:
                await self._run_on(channels, headers, work, limiter)
            except Lost as error:
                if not repeats or isinstance(error, Silent):
                    raise
                log.info("store node %x: on new data connections: %s", link.node, error)
                transfer = secrets.randbits(63)
                headers = [header._replace(transfer=transfer) for header in headers]
                channels = await link.channels(len(headers))
                await self._run_on(channels, headers, work, limiter)
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
        work: Callable[[Channel, Header], Reply],
        limiter: trio.CapacityLimiter,
    ) -> None:
        link = self._link

        def stop() -> None:
            for channel in channels:
                channel.shutdown()

        link.stops.add(stop)
        try:
            with link.watched():
                await in_threads(
                    [partial(work, *pair) for pair in zip(channels, headers, strict=True)],
                    stop,
                    limiter,
                )
        except (Lost, BadMessage) as error:
            if isinstance(error, BadMessage):
                self._peers.counters.rejected += 1
                log.warning("store node %x: a data connection is given up: %s", link.node, error)
            link.lost()
            raise
        finally:
            link.stops.remove(stop)
            link.give_back(channels)

    def _send(
        self, channel: Channel, header: Header, fd: int, offset: int, passed: Landed
    ) -> Reply:
        timeout_s, begin = self._peers.timeout_s, header.offset
        if passed is not nothing_landed:
            passed = partial(_landed_from, passed, begin)
        channel.clean = False
        patience = Patience(timeout_s)
        channel.send_header(header, patience)
        reply = send_range(channel, fd, offset + begin, header.length, timeout_s, passed)
        if reply is None:
            patience.renew()
            channel.end_sending(patience)
            reply = wait_for_reply(channel, timeout_s)
            channel.clean = not reply.closing
        return self._checked(reply, header)

    def _receive(
        self, channel: Channel, header: Header, fd: int, offset: int, start: int, landed: Landed
    ) -> Reply:
        timeout_s = self._peers.timeout_s
        channel.clean = False
        channel.send_header(header, Patience(timeout_s))
        reply = wait_for_reply(channel, timeout_s)
        if reply.kind is ReplyKind.OK:
            begin = header.offset - start
            receive_range(
                channel, fd, offset + begin, header.length, timeout_s,
                landed=lambda at, count, data: landed(begin + at, count, data),
            )  # fmt: skip
        channel.clean = True
        return self._checked(reply, header)

    def _checked(self, reply: Reply, header: Header) -> Reply:
        if reply.kind is ReplyKind.FAILED:
            raise error_of(reply.code, reply.node, reply.text, header.target.group)
        return reply


def _landed_from(
    landed: Landed, begin: int, start: int, count: int, data: memoryview | None
) -> None:
    landed(begin + start, count, data)


def _get(extents: list[Extent], limit: int, number: int) -> Get:
    return Get(number, current_request(), extents, limit)


def _check_chain(target: Target) -> None:
    if len(target.chain) > CHAIN_MAX:
        raise OSError(errno.EINVAL, f"a chain has at most {CHAIN_MAX + 1} nodes")
