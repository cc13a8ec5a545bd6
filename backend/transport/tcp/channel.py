"""One data connection as a thread uses it: plain, with bytes that are authenticated, or encrypted."""

import errno
import hmac
import os
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import trio

from ...files.digest import BUFFER_BYTES, of_thread
from ...unwrap import if_it_fails
from .. import Landed, nothing_landed
from ..caller import Caller
from ..frames import LENGTH_BYTES, BadMessage
from ..link import USER_TIMEOUTS
from ..messages import RECEIVER_PATIENCE
from ..mover import Host
from . import wire
from .authentication import CODE_BYTES, Authentication, ByteCode, Forged

T = TypeVar("T")

# A blocking call returns at least this often, so that a thread notices that it must stop.
TICK_S = 0.25
# How often a sender, at most, checks for a reply.
_LOOK_EVERY_S = 0.02
_DRAIN_S = 1.0
# How many times, within its patience, a node tells a caller that it is alive.
_SIGNS_OF_LIFE = 15
_TIMEVAL = struct.Struct("@ll")
_NOT_YET = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError, TimeoutError)
# Errors of a socket, beside ConnectionError; other errors of sendfile and recv are those of the file.
_LOST_ERRNOS = frozenset(
    {
        errno.ENOTCONN,
        errno.EHOSTUNREACH,
        errno.EHOSTDOWN,
        errno.ENETUNREACH,
        errno.ENETDOWN,
        errno.EBADF,
    }
)


class Lost(Exception):
    """The connection cannot be used any more; the text says why."""


class Silent(Lost):
    """The peer sent or received nothing for too long."""


def check_progress(since: float, limit_s: float) -> None:
    """Raise Silent if the last progress, or the beginning of a call, was too long ago."""
    if time.monotonic() > since + limit_s:
        raise Silent(f"no progress for {limit_s:g} s")


class Channel:
    """A data connection, the node's end if it `listens`. Only `shutdown` is for several threads.

    `receive`, `send` and `send_file` return after TICK_S at the latest and raise BlockingIOError when
    nothing could be done. Other calls raise Silent when the peer makes no progress for `patience_s`:
    `timeout_s`, and longer at the node, so that the caller reports the error. All raise Lost when the
    connection is broken, and other OSErrors for what is wrong with the file. `clean` is false while a
    request is under way: such a connection cannot be used again. `authenticate` comes before messages."""

    def __init__(self, sock: socket.socket, timeout_s: float, *, listens: bool) -> None:
        self.sock = sock
        self.patience_s = timeout_s * RECEIVER_PATIENCE if listens else timeout_s
        self._listens = listens
        self.authentication: Authentication
        self.clean = True
        self.idle_since = 0.0  # 0: it was never idle
        # The next message, as far as it was received.
        self._message = bytearray()
        self._said = 0.0
        self._looked = 0.0
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        user_timeout_ms = max(1, int(timeout_s * USER_TIMEOUTS * 1000))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, user_timeout_ms)
        self._set_blocking()

    def authenticate(self, key: bytes) -> None:
        """Have messages carry codes made with this key."""
        self.authentication = Authentication(key, listens=self._listens)

    def _set_blocking(self) -> None:
        """Set time-outs in the kernel: the socket stays blocking, as MSG_WAITALL needs it."""
        tick = _TIMEVAL.pack(int(TICK_S), int(TICK_S % 1 * 1_000_000))
        self.sock.settimeout(None)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)

    def shutdown(self) -> None:
        """Make every call, also one that is under way in a thread, end with Lost."""
        self._shut(socket.SHUT_RDWR)

    def _shut(self, how: int) -> None:
        with suppress(OSError):
            # An SSLSocket's own shutdown would take TLS away from a thread that is using it.
            socket.socket.shutdown(self.sock, how)

    def close(self) -> None:
        self.sock.close()

    def is_closed_by_peer(self) -> bool:
        """Return whether an idle connection is of no use: it is closed, or the peer has sent something."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN | select.POLLRDHUP)
        return bool(poll.poll(0))

    def has_input(self) -> bool:
        """Return whether there are received bytes that the kernel does not have."""
        return False

    # -- messages --------------------------------------------------------------------------------

    def say(self, message: wire.Header | wire.Reply) -> None:
        """Send a message, with its length and its code."""
        body = wire.encode(message)
        self.send_all(len(body).to_bytes(LENGTH_BYTES, "big") + self.signed(body))

    def signed(self, message: bytes) -> bytes:
        """Return the next message that is sent, with its code."""
        return message + self.authentication.sign(message)

    def checked(self, data: bytes | bytearray) -> bytes:
        """Check a received message, and return it without its code. Raises Forged."""
        message = bytes(data[:-CODE_BYTES])
        self.authentication.check(message, bytes(data[-CODE_BYTES:]))
        return message

    def next_message(self, decode: Callable[[bytes], T], *, wait: bool) -> T | None:
        """Return the next message; None if it has not come (`wait`: in a tick). Raises BadMessage."""
        buffer = self._message
        while True:
            needed = LENGTH_BYTES + wire.MESSAGE_BYTES_MIN + CODE_BYTES
            if len(buffer) >= needed:
                length = int.from_bytes(buffer[:LENGTH_BYTES], "big")
                if not wire.MESSAGE_BYTES_MIN <= length <= wire.MESSAGE_BYTES_MAX:
                    raise BadMessage(f"a message of {length} bytes")
                needed = LENGTH_BYTES + length + CODE_BYTES
                if len(buffer) == needed:
                    message = self.checked(buffer[LENGTH_BYTES:])
                    buffer.clear()
                    return decode(message)
            more = bytearray(needed - len(buffer))
            try:
                with memoryview(more) as view:
                    buffer += view[: self.receive(view, wait)]
            except BlockingIOError:
                return None

    def reply_meanwhile(self) -> wire.Reply | None:
        """Return a reply that came while this end is sending. It is checked for periodically only, as each
        check costs a thread as much as sending a piece. Raises BadMessage."""
        now = time.monotonic()
        if now < self._looked + _LOOK_EVERY_S:
            return None
        self._looked = now
        return self.next_message(wire.decode_reply, wait=False)

    def say_working(self) -> None:
        """Tell the caller that this node is alive, if the last time was long ago."""
        if time.monotonic() - self._said >= self.patience_s / _SIGNS_OF_LIFE:
            self._said = time.monotonic()
            self.say(wire.Reply(wire.ReplyKind.WORKING))

    # -- plain bytes -----------------------------------------------------------------------------

    def receive(self, view: memoryview, wait: bool = True) -> int:
        """Receive some bytes, all of `view` if they come in time, and return how many."""
        try:
            flags = socket.MSG_WAITALL if wait else socket.MSG_DONTWAIT
            count = self.sock.recv_into(view, 0, flags)
        except OSError as error:
            raise _socket_failure(error) from None
        if not count:
            raise Lost("the peer closed the connection")
        return count

    def send(self, data: bytes | memoryview) -> int:
        try:
            return self.sock.send(data)
        except OSError as error:
            raise _socket_failure(error) from None

    def receive_exactly(self, count: int) -> bytes:
        """Receive a few bytes, and return them."""
        began = time.monotonic()
        buffer = bytearray(count)
        done = 0
        with memoryview(buffer) as view:
            while done < count:
                try:
                    with view[done:] as rest:
                        done += self.receive(rest)
                except BlockingIOError:
                    pass
                check_progress(began, self.patience_s)
        return bytes(buffer)

    def send_all(self, data: bytes) -> None:
        began = time.monotonic()
        done = 0
        while done < len(data):
            try:
                done += self.send(data[done:])
            except BlockingIOError:
                check_progress(began, self.patience_s)

    # -- files -----------------------------------------------------------------------------------

    def send_file(self, fd: int, offset: int, count: int, passed: Landed = nothing_landed) -> int:
        """Send some bytes of a file, and return how many. `passed` is called with them, and their place in
        the file, if they are in memory of this process."""
        try:
            return os.sendfile(self.sock.fileno(), fd, offset, count)
        except OSError as error:
            raise _socket_failure(error) from None

    def end_sending(self) -> None:
        """Finish sending: all bytes of a request were sent."""

    def begin_receiving(self) -> Callable[[memoryview], int]:
        """Get ready for the bytes of a request, and return what does as `receive` for them."""
        return self.receive

    def end_receiving(self) -> None:
        """Finish receiving: the bytes of a request may be used only if this does not raise Forged."""

    # -- the end of a request --------------------------------------------------------------------

    def conclude(self, reply: wire.Reply) -> None:
        """Send the last reply to a request. A peer that still sends is told that the connection will be
        closed, and receives the reply before."""
        self.say(reply._replace(closing=not self.clean))
        if not self.clean:
            self._drain()

    def _drain(self) -> None:
        end = time.monotonic() + _DRAIN_S
        self._shut(socket.SHUT_WR)
        with suppress(Lost, OSError), memoryview(bytearray(BUFFER_BYTES)) as view:
            while time.monotonic() < end:
                with suppress(BlockingIOError):
                    self.receive(view)


class AuthenticatedChannel(Channel):
    """A channel with a code after all bytes of a request: they are sent from a buffer, so that the code is
    of the bytes that were sent, even if the file changes meanwhile."""

    _sending: ByteCode | None = None
    _receiving: ByteCode | None = None

    def send_file(self, fd: int, offset: int, count: int, passed: Landed = nothing_landed) -> int:
        if self._sending is None:
            self._sending = self.authentication.outgoing_bytes()
        code = self._sending

        def take(start: int, length: int, data: memoryview | None) -> None:
            assert data is not None
            code.add(data)
            passed(start, length, data)

        return _send_copy(self, fd, offset, count, take)

    def end_sending(self) -> None:
        code, self._sending = self._sending, None
        if code is not None:
            self.send_all(code.code())

    def begin_receiving(self) -> Callable[[memoryview], int]:
        self._receiving = self.authentication.incoming_bytes()
        return self._receive_bytes

    def _receive_bytes(self, view: memoryview) -> int:
        count = self.receive(view)
        assert self._receiving is not None
        with view[:count] as data:
            self._receiving.add(data)
        return count

    def end_receiving(self) -> None:
        code, self._receiving = self._receiving, None
        assert code is not None
        if not hmac.compare_digest(self.receive_exactly(CODE_BYTES), code.code()):
            raise Forged("bytes on a data connection were not sent by the other end")


class EncryptedChannel(Channel):
    """A channel over TLS: bytes are copied through a buffer of OpenSSL and, when sent, one of ours."""

    sock: ssl.SSLSocket

    def _set_blocking(self) -> None:
        self.sock.settimeout(TICK_S)

    def is_closed_by_peer(self) -> bool:
        # Unexpected bytes may also be a TLS session ticket; only reading tells.
        try:
            with memoryview(bytearray(1)) as view:
                self.receive(view, wait=False)
        except BlockingIOError:
            return False
        except Lost:
            pass
        return True

    def has_input(self) -> bool:
        return self.sock.pending() > 0

    def receive(self, view: memoryview, wait: bool = True) -> int:
        self.sock.settimeout(TICK_S if wait else 0)
        try:
            count = self.sock.recv_into(view)
        except OSError as error:
            raise _socket_failure(error) from None
        if not count:
            raise Lost("the peer closed the connection")
        return count

    def send(self, data: bytes | memoryview) -> int:
        self.sock.settimeout(TICK_S)
        return super().send(data)

    def send_file(self, fd: int, offset: int, count: int, passed: Landed = nothing_landed) -> int:
        return _send_copy(self, fd, offset, count, passed)


def make_channel(
    plain: socket.socket, owner: Caller | Host, *, encrypted: bool, listens: bool
) -> Channel:
    """Return the channel of a connected socket, which is closed if there is an error. Where there are
    credentials, bytes are `encrypted`, after a handshake, or a code follows those of a request."""
    credentials, timeout_s = owner.credentials, owner.timeout_s
    with if_it_fails(plain.close):
        if credentials is None:
            return Channel(plain, timeout_s, listens=listens)
        if not encrypted:
            return AuthenticatedChannel(plain, timeout_s, listens=listens)
        context = credentials.server_context() if listens else credentials.client_context()
        secure = context.wrap_socket(plain, listens, do_handshake_on_connect=False)
        return EncryptedChannel(secure, timeout_s, listens=listens)


def _send_copy(channel: Channel, fd: int, offset: int, count: int, passed: Landed) -> int:
    """Send some bytes of a file from a buffer: a mapping would raise SIGBUS if the file were truncated."""
    view = of_thread.buffer
    there = os.preadv(fd, [view[: min(count, BUFFER_BYTES)]], offset)
    sent = channel.send(view[:there]) if there else 0
    with view[:sent] as data:
        passed(offset, sent, data)
    return sent


def choose_congestion_control(sock: trio.socket.SocketType) -> None:
    """Avoid BBR where it is the system's default. Called before the socket is connected, or listens: the
    timers with which BBR paces a sender stay with a connection that began with it.

    Store nodes and mounts are near each other, and pacing costs more than it gains there. Measured on a
    veth pair: 2.7 GB/s with it and 6.4 without (iperf3), 0.9 and 1.6 (a chain of two nodes).
    """
    try:
        name = bytes(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16))
    except OSError:
        return
    if not name.startswith(b"bbr"):
        return
    for better in (b"cubic", b"reno"):
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, better)
            return
        except OSError:
            pass  # the algorithm is not available, or not allowed


def _socket_failure(error: OSError) -> Exception:
    """Return the exception for an error of a call that uses the socket: BlockingIOError if nothing could be
    done yet, Lost if the connection is broken, and an OSError for what is wrong with the file."""
    if error.errno == errno.ETIMEDOUT:
        return Lost(os.strerror(errno.ETIMEDOUT))
    if isinstance(error, _NOT_YET):
        return BlockingIOError(errno.EAGAIN, "nothing could be done yet")
    if isinstance(error, ssl.SSLError):
        return Lost(f"TLS: {error.reason or error}")
    if isinstance(error, ConnectionError) or error.errno in _LOST_ERRNOS:
        return Lost(os.strerror(error.errno or 0))
    if error.errno == errno.EFAULT:
        # A page of a mapped file could not be allocated.
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return error
