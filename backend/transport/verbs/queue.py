"""A reliable connection (an RC queue pair) with its own completion queues, which wake the event loop.

A transfer is cut into pieces, posted in batches of BATCH work requests. Only the last request of a batch is
signalled: a queue pair works in order, so its completion means that the whole batch is done. The send queue
has room for BATCHES batches; a transfer that finds it full waits.

When a transfer returns or raises, cancelled or not, the hardware touches its memory no more. After an error
the queue pair is of no use: everything that waits for it raises `Broken` with the reason.
"""

import itertools
import logging
import math
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from ipaddress import IPv6Address
from typing import Any, NamedTuple

import trio

from ...unwrap import if_it_fails
from ..device import NotThisWay
from ..prompt import acquire
from .completions import Completions
from .devices import Gid
from .library import immediate, reason_of
from .messages import QueueEnd
from .regions import OpenedPort, Region

log = logging.getLogger(__name__)

BATCH = 8
BATCHES = 16
SENDS = BATCH * BATCHES
# Receive requests that are posted. A peer that sends more before this end polls gets RNR and tries again.
RECEIVES = 256
# A queue pair in the error state returns all work requests at once. A device that takes longer is broken.
FLUSH_S = 2.0
# 7 means retry forever, as rnr_retry on every device, and as retry_cnt on soft-RoCE; so retry_cnt is 6.
_RETRIES = 6
_TRIES_ARE_FOREVER = 7
# The hardware reports a silent peer after this share of the time-out, before any other timer does.
_PATIENCE_SHARE = 0.5
_TIMEOUT_UNIT_S = 4.096e-6
_RNR_TIMER = 12  # 0.64 ms
_READS_MAX = 16


class Broken(NotThisWay):
    """The queue pair is of no use any more; the text gives the reason."""


class Piece(NamedTuple):
    """A run of bytes at this end (address, length, lkey) and at the peer (address, rkey). A WRITE carries
    `number` as immediate data (None: none); the peer gets it after this piece and all before it."""

    address: int
    length: int
    key: int
    remote_address: int
    remote_key: int
    number: int | None = None


class Batch:
    """Work requests that were posted together; only the last one is signalled."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.succeeded = False


class Window:
    """A peer's right to a range of a file, by `QueuePair.grant`, until `close` or its queue pair's end."""

    def __init__(
        self, pair: "QueuePair", region: Region, handle: Any, address: int, key: int
    ) -> None:
        self.pair = pair
        self.region = region
        self._handle = handle
        self.address = address
        self.key = key
        pair.windows.add(self)

    def close(self) -> None:
        self.pair.windows.discard(self)
        self.pair.port.library.close(self._handle)


class QueuePair:
    """A queue pair; make it by Adapter.queue_pair. With `arrived`, the peer may write here, and it is
    called with the number of each of its WRITEs with immediate data. `closed` is called at the end.
    Rights granted to the peer are registered in the protection domain `pd`."""

    def __init__(
        self,
        port: OpenedPort,
        gid: Gid,
        closed: Callable[["QueuePair"], None],
        arrived: Callable[[int], None] | None = None,
    ) -> None:
        self.port = port
        self._library = port.library
        self._closed = closed
        self.gid = gid
        self._arrived = arrived
        self._receives = 0 if arrived is None else RECEIVES
        self._batches: dict[int, Batch] = {}
        self._next = 0
        self._room = trio.Semaphore(BATCHES)
        self._psn = secrets.randbits(24)
        self.failure = ""
        self.failed = trio.Event()
        self.is_closed = False
        # The rights granted to the peer. A bound window must be closed before its queue pair.
        self.windows: set[Window] = set()
        library = self._library
        # One entry for each work request: even an unsignalled one completes if it fails.
        self._sent = Completions(
            library, port.context, SENDS + 1, self._take_sent, lambda: bool(self._batches)
        )
        self._arrivals = self._sent
        self.pd = port.pd
        with if_it_fails(self._close_rest):
            if self._receives and not port.has_windows:
                # Without windows a right is a region, whose rkey works for the whole domain.
                with library.errors:
                    self.pd = library.PD(port.context)
            if self._receives:
                self._arrivals = Completions(
                    library, port.context, RECEIVES, self._take_arrival, lambda: True
                )
                self._arrivals.arm()
            self._pair = self._make()
        # WRITE with immediate data uses no buffer of the receive request, but pyverbs wants an element.
        self._receive = library.RecvWR(num_sge=1, sg=[library.SGE(0, 0, 0)])
        self._signalled = library.enum("SEND_SIGNALED")
        self._read = library.enum("WR_RDMA_READ")
        self._write = library.enum("WR_RDMA_WRITE")
        self._write_number = library.enum("WR_RDMA_WRITE_WITH_IMM")
        self._bind = library.enum("WR_BIND_MW")

    def _make(self) -> Any:
        """Return a queue pair in RESET: `connect` sets the peer's rights on the way. Raises OSError."""
        library = self._library
        with library.errors:
            capacity = library.QPCap(
                max_send_wr=SENDS,
                max_recv_wr=max(1, self._receives),
                max_send_sge=1,
                max_recv_sge=1,
                max_inline_data=0,
            )
            return library.QP(
                self.pd,
                library.QPInitAttr(
                    qp_type=library.enum("QPT_RC"),
                    scq=self._sent.queue,
                    rcq=self._arrivals.queue,
                    cap=capacity,
                ),
            )

    def end(self) -> QueueEnd:
        port, number = self.port, int(self._pair.qp_num)
        reads = min(_READS_MAX, port.reads_answered)
        return QueueEnd(self.gid.value, port.lid, number, self._psn, port.mtu, reads)

    def connect(self, peer: QueueEnd, patience_s: float) -> None:
        """Connect to the peer, which fails if it is silent for half of `patience_s`. Raises OSError."""
        library, port = self._library, self.port
        route = library.GlobalRoute(
            dgid=library.GID(IPv6Address(peer.gid).exploded),
            sgid_index=self.gid.number,
            hop_limit=64,
        )
        mtu = library.enum(f"MTU_{min(peer.mtu, port.mtu)}")
        attributes = library.QPAttr(port_num=port.port, path_mtu=mtu)
        with library.errors:
            attributes.ah_attr = library.AHAttr(
                port_num=port.port, dlid=peer.lid, is_global=1, gr=route
            )
            attributes.qp_access_flags = (
                library.enum("ACCESS_REMOTE_READ") | library.enum("ACCESS_REMOTE_WRITE")
                if self._receives
                else 0
            )
            attributes.dest_qp_num = peer.number
            attributes.sq_psn, attributes.rq_psn = self._psn, peer.psn
            attributes.max_rd_atomic = max(1, min(_READS_MAX, peer.reads, port.reads_asked))
            attributes.max_dest_rd_atomic = min(_READS_MAX, port.reads_answered)
            attributes.min_rnr_timer = _RNR_TIMER
            attributes.timeout = timeout_exponent(patience_s)
            attributes.retry_cnt = _RETRIES
            attributes.rnr_retry = _TRIES_ARE_FOREVER
            self._pair.to_rts(attributes)
            for _ in range(self._receives):
                self._pair.post_recv(self._receive)

    # -- moving bytes ----------------------------------------------------------------------------

    async def read(self, pieces: Sequence[Piece]) -> None:
        """READ from the peer's memory into this end's. Raises Broken."""
        await self._transfer(self._read, pieces)

    async def write(self, pieces: Sequence[Piece]) -> None:
        """WRITE from this end's memory into the peer's. Raises Broken."""
        await self._transfer(self._write, pieces)

    async def begin_write(self, piece: Piece) -> Batch:
        """Post the `write` of a piece and return; the caller must also await `finish`. Pieces arrive in the
        order in which they were begun. Raises Broken."""
        await self._find_room()
        return self._post([self._request(self._write, piece)])

    # -- rights of the peer ----------------------------------------------------------------------

    async def grant(self, region: Region, offset: int, length: int, writable: bool) -> Window:
        """Give the peer the right to `length` bytes of the region's file, from `offset` of the file. The
        region must stay in use until the window is closed. Raises OSError, Broken.

        A device with memory windows gets one of type 2: its rkey works on this queue pair only, for one
        range, for reading or for writing. The memory region below it has no remote rights and stays
        registered. Making a window costs a system call and a work request. (Soft-RoCE checks only that the
        range of an rkey lies in the memory region, which is one extent's file.)

        Other devices get a memory region of its own for each right, registered in a protection domain that
        holds only this queue pair.
        """
        library, port = self._library, self.port
        rights = library.enum("ACCESS_REMOTE_WRITE" if writable else "ACCESS_REMOTE_READ")
        address = region.address(offset)
        if not port.has_windows:
            rights |= library.enum("ACCESS_LOCAL_WRITE") if writable else 0
            with library.errors:
                registration = library.MR(self.pd, length, rights, address=address)
            return Window(self, region, registration, address, registration.rkey)
        with library.errors:
            handle = library.MW(port.pd, library.enum("MW_TYPE_2"))
        window = Window(self, region, handle, address, 0)
        with if_it_fails(window.close):
            info = library.MWBindInfo(region.registration, address, length, rights)
            window.key = await self._bound(handle, info)
        return window

    async def _bound(self, window: Any, info: Any) -> int:
        """Bind a memory window and return its rkey. Raises Broken."""
        # A closed queue pair has closed its windows; a closed window must not be used.
        await self._find_room()
        request = self._library.SendWR(wr_id=0, opcode=self._bind, send_flags=self._signalled)
        request.set_bind_wr(window, info)
        key = int(request.rkey)
        await self.finish([self._post([request])])
        return key

    async def _transfer(self, opcode: int, pieces: Sequence[Piece]) -> None:
        batches: list[Batch] = []
        try:
            for first in range(0, len(pieces), BATCH):
                await self._find_room()
                batch = pieces[first : first + BATCH]
                batches.append(self._post([self._request(opcode, piece) for piece in batch]))
        finally:
            await self.finish(batches)

    def _request(self, opcode: int, piece: Piece) -> Any:
        library, number = self._library, piece.number
        request = library.SendWR(
            opcode=opcode if number is None else self._write_number,
            num_sge=1,
            imm_data=0 if number is None else immediate(number),
            sg=[library.SGE(piece.address, piece.length, piece.key)],
            send_flags=0,
        )
        request.set_wr_rdma(piece.remote_key, piece.remote_address)
        return request

    async def _find_room(self) -> None:
        """Wait for room for a batch in the send queue. Raises Broken."""
        if not self._room.value:
            self._sent.arm()
        await acquire(self._room)
        if self.failure:
            self._room.release()
            raise Broken(self.failure)

    def _post(self, requests: list[Any]) -> Batch:
        """Post a batch; the caller has just awaited `_find_room`."""
        self._next += 1
        batch = self._batches[self._next] = Batch()
        for request, after in itertools.pairwise(requests):
            request.next_wr = after
        last = requests[-1]
        last.wr_id = self._next
        last.send_flags |= self._signalled
        try:
            with self._library.errors:
                self._pair.post_send(requests[0])
        except OSError as error:
            # Some requests may have been posted. They complete when the queue pair is flushed.
            self.fail(f"posting failed: {error.strerror}")
        return batch

    async def finish(self, batches: Sequence[Batch]) -> None:
        """Wait until the hardware is done with the batches, even if cancelled. Raises Broken."""
        if batches and not batches[-1].done.is_set():
            self._sent.look(batches[-1].done.is_set)
        try:
            await self._done(batches)
        except trio.Cancelled:
            with trio.CancelScope(shield=True):
                with trio.move_on_after(FLUSH_S) as limit:
                    await self._done(batches)
                if limit.cancelled_caught:
                    self.fail("a transfer that was given up did not end")
                    await self._done(batches)
            raise
        if not all(batch.succeeded for batch in batches):
            raise Broken(self.failure or "the queue pair was closed")

    async def _done(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            if not batch.done.is_set():
                self._sent.arm()
                await batch.done.wait()

    # -- completions -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Handle completions until the queue pair is closed, or failed and flushed; then close it."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._sent.run)
                if self._arrivals is not self._sent:
                    nursery.start_soon(self._arrivals.run)
                await self.failed.wait()
                await self._flush()
                nursery.cancel_scope.cancel()
        finally:
            self.close()

    async def _flush(self) -> None:
        """Wait until a failed queue pair has returned all work requests."""
        with trio.move_on_after(FLUSH_S):
            for batch in list(self._batches.values()):
                await batch.done.wait()
        if self._batches and not self.is_closed:
            log.warning("RDMA device %s does not give back what is posted", self.port.name)

    def _take_sent(self, completion: Any) -> None:
        if completion.status:
            self.fail(reason_of(completion.status))
        batch = self._batches.pop(completion.wr_id, None)
        if batch is not None:
            batch.succeeded = not completion.status
            batch.done.set()
            self._room.release()

    def _take_arrival(self, completion: Any) -> None:
        if completion.status:
            self.fail(reason_of(completion.status))
        elif self._arrived is not None and not self.is_closed:
            try:
                with self._library.errors:
                    self._pair.post_recv(self._receive)
            except OSError as error:
                self.fail(f"posting failed: {error.strerror}")
            self._arrived(immediate(completion.imm_data))

    # -- the end ---------------------------------------------------------------------------------

    def fail(self, why: str) -> None:
        """Move to the error state: work is flushed, none can be posted. The first reason is kept."""
        if self.failure:
            return
        self.failure = why
        self.failed.set()
        library = self._library
        # The queue pair may be in that state already, or was never connected.
        with suppress(OSError), library.errors:
            attributes = library.QPAttr(qp_state=library.enum("QPS_ERR"))
            self._pair.modify(attributes, library.enum("QP_STATE"))
        if self._batches:
            self._sent.arm()

    def close(self) -> None:
        """Close the queue pair and its windows; the hardware touches no memory of it afterwards."""
        if self.is_closed:
            return
        self.is_closed = True
        self._closed(self)
        self.failure = self.failure or "the queue pair was closed"
        self.failed.set()
        for window in list(self.windows):
            window.close()
        self._library.close(self._pair)
        self._close_rest()
        for batch in self._batches.values():
            batch.done.set()
            self._room.release()
        self._batches.clear()

    def _close_rest(self) -> None:
        for completions in {self._sent, self._arrivals}:
            completions.close()
        if self.pd is not self.port.pd:
            self._library.close(self.pd)


def timeout_exponent(patience_s: float) -> int:
    """Return the exponent n for `timeout`: the hardware waits 4.096 us * 2^n for each try."""
    each_s = patience_s * _PATIENCE_SHARE / (_RETRIES + 1)
    return max(8, min(20, round(math.log2(each_s / _TIMEOUT_UNIT_S))))
