"""Send a file with holes: its data goes in PARTs, beside a stream that waits for the extent to be
sealed."""

import threading
from collections import deque
from collections.abc import Sequence

from .channel import Channel, Lost, Patience
from .streams import end_sending, send_part
from .wire import Header

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

    def begin(self, channel: Channel, header: Header) -> None:
        """Announce the extent, and wait until it is sealed. Raises OSError: the node's error."""
        channel.clean = False
        channel.send_header(header, Patience(self._timeout_s))
        end_sending(channel, self._timeout_s).check(header.target.group)
        self._is_sealed.set()

    def send(self, channel: Channel, header: Header) -> None:
        """Send segments until there are none left, or the node has the extent already. Raises OSError: the
        node's error."""
        try:
            while not self._is_sealed.is_set():
                try:
                    start, length = self._left.popleft()
                except IndexError:
                    break
                part = header._replace(offset=start, length=length)
                reply = send_part(channel, part, self._fd, self._offset + start, self._timeout_s)
                reply.check(header.target.group)
                if not channel.clean:
                    self._wait_sealed()
        except (Lost, OSError):
            if not self._is_sealed.is_set():
                raise

    def _wait_sealed(self) -> None:
        """Wait for the seal. A node that has the extent takes no bytes, but a node after it may lack them.
        Raises Lost then: the caller should send the extent to that one directly."""
        if not self._is_sealed.wait(_SEALED_SOON_S):
            raise Lost("it has the extent already, and others do not")
