"""Send a file with holes: its data goes in PARTs, beside a stream that waits for the extent to be
sealed."""

import threading
from collections import deque
from collections.abc import Sequence

from ..messages import error_of
from .channel import Channel, Lost, Patience
from .streams import send_range, wait_for_reply
from .wire import Header, Reply, ReplyKind

__all__ = ["Parts"]

_SEALED_SOON_S = 1.0


class Parts:
    """The data of one extent, `segments` of the part of a file that begins at `offset`. `begin` is for the
    thread of the stream that waits, `send` for the others."""

    def __init__(
        self, fd: int, offset: int, segments: Sequence[tuple[int, int]], timeout_s: float
    ) -> None:
        self._fd = fd
        self._offset = offset
        self._left = deque(segments)
        self._timeout_s = timeout_s
        self._is_sealed = threading.Event()

    def begin(self, channel: Channel, header: Header) -> Reply:
        """Announce the extent, and wait until it is sealed."""
        channel.clean = False
        channel.send_header(header, Patience(self._timeout_s))
        reply = wait_for_reply(channel, self._timeout_s)
        channel.clean = not reply.closing
        if reply.kind is ReplyKind.OK:
            self._is_sealed.set()
        return reply

    def send(self, channel: Channel, header: Header) -> Reply:
        """Send segments until there are none left, or the node has the extent already."""
        try:
            while not self._is_sealed.is_set():
                try:
                    start, length = self._left.popleft()
                except IndexError:
                    break
                self._send(channel, header._replace(offset=start, length=length))
                if not channel.clean:
                    self._wait_sealed()
        except (Lost, OSError):
            if not self._is_sealed.is_set():
                raise
        return Reply(ReplyKind.OK)

    def _wait_sealed(self) -> None:
        """Wait for the seal. A node that has the extent takes no bytes, but a node after it may lack them.
        Raises Lost then: the caller should send the extent to that one directly."""
        if not self._is_sealed.wait(_SEALED_SOON_S):
            raise Lost("it has the extent already, and others do not")

    def _send(self, channel: Channel, header: Header) -> None:
        timeout_s = self._timeout_s
        channel.clean = False
        patience = Patience(timeout_s)
        channel.send_header(header, patience)
        reply = send_range(
            channel, self._fd, self._offset + header.offset, header.length, timeout_s
        )
        if reply is None:
            patience.renew()
            channel.end_sending(patience)
            reply = wait_for_reply(channel, timeout_s)
            channel.clean = not reply.closing
        if reply.kind is ReplyKind.FAILED:
            raise error_of(reply.code, reply.node, reply.text, header.target.group)
