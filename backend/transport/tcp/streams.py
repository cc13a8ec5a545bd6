"""Data connections: bytes between files and sockets, in threads, past every Python object.

A connection begins with a preamble, for which a key was given out on a control connection.
Then there are requests, one after the other: a Header; for a write, the bytes of its ranges; replies. A
read is answered with OK and the bytes. In a cluster with certificates a code follows the bytes, unless they
are encrypted (authentication.py): the last piece is not used before it was found right. A write is answered
with any number of WORKING, which say that the node is alive while it waits for others, and then OK or
FAILED, which may come before all bytes were sent; the connection is of no use after that.

Measured (2 cores, veth, 1 GiB into a tmpfs with huge=within_size, 2 streams): recv into the mapped
file 3.0 GB/s, splice 2.6, recv into a buffer and pwrite 2.2, iperf3 -F 2.8. Fixed socket buffers make no
difference that can be measured.

Processor time for copying 1 GiB into such a file, without TCP: 0.22 s into mapped pages that were
allocated, of which 0.06 s are for clearing them; 0.20 s with a buffer of 2 MiB, as whole huge pages are
written without clearing them first; 0.23 s if they are touched beforehand in pieces (MADV_POPULATE_WRITE).
Splicing copies without clearing, too, but only whole pages: a pipe holds 256 fragments, here 0.5 MiB,
and the rest of the huge page is cleared. Allocating takes 2 ms, and 0.1 s where pages are small.

Threads contend for Python's lock after every call, so calls are few: with pieces of 2 MiB, and looking
for a reply now and then, a chain of two nodes takes a tenth less processor time than with pieces of
1 MiB and a look after each (medians 1.00 and 1.10 s, 1.08 and 1.22 s for 1 GiB; 4 streams, 7 and 9 rounds).
"""

import errno
import mmap
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from operator import itemgetter

from .. import Landed, nothing_landed
from ..frames import BadMessage
from .channel import Channel, Lost, check_progress
from .wire import Header, Ranges, Reply, ReplyKind, decode_reply

# The most that one call sends or receives: a huge page.
PIECE_BYTES_MAX = 2 << 20
# A node sends a piece on while it receives the next, so short streams have smaller pieces.
_PIECE_BYTES_MIN = 256 << 10
_PIECES = 16


def piece_bytes(length: int) -> int:
    """Return the most that one call receives of a stream of `length` bytes."""
    return min(PIECE_BYTES_MAX, max(_PIECE_BYTES_MIN, length // _PIECES))


def send_range(
    channel: Channel, fd: int, offset: int, length: int, passed: Landed = nothing_landed
) -> Reply | None:
    """Send a part of a file. `passed` is called with bytes in this process's memory, and their place.

    Returns the peer's reply if it did not wait for everything, else None. Raises Lost when the peer takes
    nothing and says nothing for the channel's patience, and OSError: EIO when the file is too short.
    """
    progress_at = time.monotonic()
    end = offset + length
    while offset < end:
        try:
            sent = channel.send_file(fd, offset, min(end - offset, PIECE_BYTES_MAX), passed)
            if not sent:
                raise OSError(errno.EIO, "the file shrank while it was sent")
            offset += sent
            progress_at = time.monotonic()
        except BlockingIOError:
            pass
        except Lost:
            with suppress(Lost, BadMessage):
                return wait_for_reply(channel)  # it may have said why
            raise
        # A reader that has everything may send the next request, which is no reply.
        reply = channel.reply_meanwhile() if offset < end else None
        if reply is not None:
            if reply.kind is not ReplyKind.WORKING:
                return reply
            progress_at = time.monotonic()
        if offset < end:
            check_progress(progress_at, channel.patience_s)
    return None


def send_stream(
    channel: Channel,
    header: Header,
    pieces: Iterable[tuple[int, int, int]],
    passed: Landed = nothing_landed,
) -> None:
    """Send one stream of a write; return when it is acknowledged. `pieces` are its bytes in order, each a
    descriptor, an offset and a length; `passed` is as in `send_range`. Raises as that, and the peer's
    error."""
    channel.clean = False
    channel.say(header)
    for fd, offset, length in pieces:
        reply = send_range(channel, fd, offset, length, passed)
        if reply is not None:
            break
    else:
        channel.end_sending()
        reply = wait_for_reply(channel)
        channel.clean = not reply.closing
    reply.check()


def wait_for_reply(channel: Channel, *, may_work: bool = True) -> Reply:
    """Return the final reply. Raises Lost when the peer says nothing for the channel's patience, and
    BadMessage if it says that it is working and has nothing to wait for."""
    progress_at = time.monotonic()
    while True:
        reply = channel.next_message(decode_reply, wait=True)
        if reply is None:
            check_progress(progress_at, channel.patience_s)
        elif reply.kind is not ReplyKind.WORKING:
            return reply
        elif not may_work:
            raise BadMessage("it has a reader wait")
        else:
            progress_at = time.monotonic()


def receive_ranges(
    channel: Channel,
    fd: int,
    ranges: Ranges,
    landed: Landed = nothing_landed,
    between: Callable[[], None] | None = None,
    piece: int = 0,
) -> None:
    """Receive the bytes of ranges of a file, which must be open for reading and writing, in pieces of at
    most `piece` bytes (0: by the length of all). `landed` is called for each piece that is in the file,
    with its place there; for the last one when all bytes are known to be the sender's. `between` is called
    after each piece and in every tick.

    Raises Lost when nothing comes for the channel's patience, Forged, and OSError: ENOSPC.
    """
    missing = sum(map(itemgetter(1), ranges))
    piece = piece or piece_bytes(missing)
    progress_at = time.monotonic()
    if not missing:
        return
    receive = channel.begin_receiving()
    for start, length in ranges:
        skip = start % mmap.ALLOCATIONGRANULARITY
        with (
            mmap.mmap(fd, length + skip, offset=start - skip) as mapped,
            memoryview(mapped) as view,
        ):
            done = 0
            while done < length:
                at = skip + done
                with view[at : min(skip + length, at + piece)] as part:
                    try:
                        count = receive(part)
                    except BlockingIOError:
                        count = 0
                        check_progress(progress_at, channel.patience_s)
                    if count:
                        progress_at = time.monotonic()
                        missing -= count
                        if not missing:
                            channel.end_receiving()
                        with part[:count] as data:
                            landed(start + done, count, data)
                        done += count
                if between is not None:
                    between()
