"""Extents that a node receives, and sends on to the next: each comes on several streams at once.

Each stream has a thread, and another one that sends on the bytes that the first has received, so that both
links are busy whatever the kernel's buffers hold: measured on links of 10 Gbit/s, one thread that takes
turns gets 5.4. A stream is acknowledged when the extent is sealed here and the next node has acknowledged.

If the next node fails, receiving goes on: the caller is told in the end, and when it sends the extent
once more to those that lack it, this node has it already.
"""

import bisect
import errno
import math
import threading
import time
from operator import itemgetter

import trio

from .. import Extent, Unreachable
from ..frames import BadMessage
from ..messages import failure_of
from ..service import Incoming
from .channel import Channel, Lost
from .streams import PIECE_BYTES_MAX, end_sending, piece_bytes, receive_ranges, send_range
from .threads import Promise
from .wire import Header, Ranges, Reply, ReplyKind

# A disk may take long to make an extent durable, or a node to be allowed to receive it.
BUSY_LIMIT_S = 120.0


class Onward:
    """One stream to the next node, with the bytes that a stream here has brought. `offer` and `give_up` are
    for the thread that receives, `send` is for the one that sends; `sent` is fulfilled when the next node
    has acknowledged, and has its failure."""

    def __init__(self, header: Header) -> None:
        self.node, target = header.target.onward()
        self._header = header._replace(target=target)
        self._changed = threading.Condition()
        self._fd = -1
        self._offered = 0
        self._is_given_up = False
        self.sent = Promise()
        self.sent_bytes = 0

    def offer(self, fd: int, count: int) -> None:
        """Note that `count` more bytes are in the file, which stays open until `send` has returned."""
        with self._changed:
            self._fd = fd
            self._offered += count
            self._changed.notify()

    def give_up(self) -> None:
        """Note that no more bytes will be received; `send` ends soon."""
        with self._changed:
            self._is_given_up = True
            self._changed.notify()

    def send(self, channel: Channel) -> None:
        """Send the bytes that are offered, until the next node has acknowledged or failed. Raises its
        error: OSError, Unreachable (which node)."""
        try:
            self._send(channel).check(self._header.target.group)
        except (Lost, BadMessage) as error:
            raise Unreachable(self.node, str(error)) from None

    def _send(self, channel: Channel) -> Reply:
        channel.clean = False
        channel.send_messages(*self._header.messages)
        for start, length in self._header.ranges:
            end = start + length
            while start < end:
                count = min(self._wait_for_more(), end - start)
                reply = send_range(channel, self._fd, start, count)
                if reply is not None:
                    return reply
                self.sent_bytes += count
                start += count
        return end_sending(channel)

    def _wait_for_more(self) -> int:
        """Return how many bytes were offered and not sent yet. Raises Lost."""
        with self._changed:
            while self._offered == self.sent_bytes and not self._is_given_up:
                self._changed.wait()
            if self._is_given_up:
                raise Lost("the sender is gone")
            return self._offered - self.sent_bytes


class Receiving:
    """One extent that node `node` receives. Threads use it; `Data` owns it from start to end."""

    def __init__(self, header: Header, node: int) -> None:
        self.extent: Extent = header.extent
        self.transfer = header.transfer
        self.lengths = header.total, header.comes
        # The file is ready to be filled, or the extent is here already; the extent is sealed.
        self.begun = Promise()
        self.sealed = Promise()
        # All bytes of all streams are in the file.
        self.complete = trio.Event()
        self.scope = trio.CancelScope()
        self.incoming: Incoming | None = None
        self.fd = -1
        self.is_here_already = False
        self._node = node
        # Bytes that no stream has announced yet, and that are not in the file yet.
        self._unannounced = self._missing = header.comes
        self._progress_at = time.monotonic()
        self._token = trio.lowlevel.current_trio_token()
        self._lock = threading.Lock()
        self._channels: set[Channel] = set()
        self._ranges: list[tuple[int, int]] = []
        self._error: OSError | None = None

    def add(self, channel: Channel, ranges: Ranges) -> None:
        """Add a stream. Raises BadMessage if another stream brings some of its bytes, or if more bytes come
        than were announced: the last of them would be written to a sealed file."""
        with self._lock:
            for start, length in ranges:
                at = bisect.bisect(self._ranges, (start, length))
                before = sum(self._ranges[at - 1]) if at else 0
                after = self._ranges[at][0] if at < len(self._ranges) else start + length
                if length and not before <= start <= start + length <= after:
                    raise BadMessage("two streams bring the same bytes of an extent")
            self._unannounced -= sum(map(itemgetter(1), ranges))
            if self._unannounced < 0:
                raise BadMessage("more bytes of an extent come than were announced")
            for each in ranges:
                if each[1]:
                    bisect.insort(self._ranges, each)
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

    # -- in the thread of a stream ---------------------------------------------------------------

    def take(self, channel: Channel, header: Header, onward: Onward | None) -> tuple[Reply, int]:
        """Receive one stream of the extent, and offer it onward.

        Returns the reply, and how many bytes were received; OK has been sent, FAILED has not. Raises Lost
        if the sender is gone, BadMessage if it sends invalid bytes."""
        received = 0

        def landed(start: int, count: int, data: memoryview | None) -> None:
            nonlocal received
            received += count
            with self._lock:
                self._missing -= count
                self._progress_at = time.monotonic()
                if not self._missing:
                    self._token.run_sync_soon(self.complete.set)
            if onward is not None:
                onward.offer(self.fd, count)

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
            self.begun.wait(BUSY_LIMIT_S, channel.say_working)
            if self.is_here_already:
                if onward is not None:
                    onward.offer(self.fd, length)
            else:
                piece = PIECE_BYTES_MAX if onward is None else piece_bytes(length)
                try:
                    receive_ranges(channel, self.fd, header.ranges, landed, between, piece)
                except Lost:
                    # Another thread may have stopped it, with the error.
                    self.check()
                    raise
                if not header.comes:
                    landed(0, 0, None)
                self.sealed.wait(2 * BUSY_LIMIT_S, waiting)
            if onward is not None:
                onward.sent.wait(math.inf, channel.say_working)
        except OSError as error:
            self.fail(error)
            channel.clean = received == length
            return Reply(ReplyKind.FAILED, *failure_of(error, self._node)), received
        except (Lost, BadMessage) as error:
            # The sender may still be there, and tries again if it gets this error on another stream.
            self.fail(Unreachable(self._node, f"a data connection was given up: {error}"))
            raise
        channel.clean = received == length
        reply = Reply(ReplyKind.OK)
        channel.conclude(reply)
        return reply, received
