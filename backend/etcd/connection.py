"""An HTTP/2 connection to an endpoint of etcd: socket and TLS.

A peer that falls silent shows in the next call that times out, of which a session makes one every third
of its lease (Client.attempt): then the watch on the connection ends, too.

Bytes are sent at once, or by a task from a buffer: a cancelled caller leaves no half frame behind.
"""

import contextlib
import os
import socket
import ssl
from collections.abc import Callable
from typing import NamedTuple

import trio

from ..unwrap import first_error
from .http2 import Http2, Stream
from .rpc import ConnectionLost, NotAccepted, ProtocolError

DEFAULT_PORT = 2379
_CALLS = 1024
_RECEIVE_BYTES = 256 * 1024
_MODERATION_S = 0.02
# How the tasks of a connection end.
_ENDS = (OSError, ProtocolError, trio.ClosedResourceError)
_DRAINED = "the server is shutting down"


class Endpoint(NamedTuple):
    host: str
    port: int
    secure: bool

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def tls_context(ca: str | None, cert: str | None, key: str | None) -> ssl.SSLContext:
    """Return the TLS context of these certificates. Raises OSError or ValueError that name the file."""
    if (cert is None) != (key is None):
        raise ValueError("a client certificate for etcd needs its key, and a key its certificate")
    for path in (ca, cert, key):
        if path is not None:
            os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))  # an error that names the file
    try:
        context = ssl.create_default_context(cafile=ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["h2"])
        if cert is not None:
            context.load_cert_chain(cert, key)
    except ssl.SSLError as error:
        raise ValueError(
            f"{ca}, {cert} or {key} is not what it should be: PEM files of etcd's CA, of a client"
            f" certificate and of its key ({error.reason or error})"
        ) from error
    return context


async def connect(endpoint: Endpoint) -> socket.socket:
    """Return a connected, non-blocking socket. Raises OSError."""
    try:
        stream = await trio.open_tcp_stream(endpoint.host, endpoint.port)
    except OSError as error:
        # One for each address of the name.
        if isinstance(error.__cause__, BaseExceptionGroup):
            raise first_error(error.__cause__) from None
        raise
    # Undo a limit of trio's streams: the kernel may buffer a large request whole.
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, 0)
    sock = socket.socket(fileno=stream.socket.detach())
    sock.setblocking(False)
    return sock


class Moderation:
    """Lets changes wait for others while that is `allowed`, as network cards moderate interrupts: waking
    this process costs more than taking a change in."""

    def __init__(self) -> None:
        self.allowed: Callable[[], bool] = lambda: False
        self._hurry = trio.Event()

    def hurry(self) -> None:
        """Wait no longer."""
        self._hurry.set()

    async def wait(self) -> None:
        self._hurry = trio.Event()
        with trio.move_on_after(_MODERATION_S):
            await self._hurry.wait()


class Connection:
    """A connected, non-blocking socket, which it owns, and the calls on it.

    `run` moves the bytes and must be running while the connection is used; it ends with the connection and
    raises nothing. `tls` is a context and the name that the certificate must have.
    """

    def __init__(
        self, sock: socket.socket, tls: tuple[ssl.SSLContext, str] | None, moderation: Moderation
    ) -> None:
        self._sock = sock
        self._moderation = moderation
        self._tls: ssl.SSLObject | None = None
        if tls is not None:
            self._tls_in, self._tls_out = ssl.MemoryBIO(), ssl.MemoryBIO()
            context, name = tls
            self._tls = context.wrap_bio(self._tls_in, self._tls_out, server_hostname=name)
        self.http2 = Http2(self._send, self._call_ended)
        self._out = bytearray()
        self._has_unsent = trio.Event()
        self._waiting_callers = trio.lowlevel.ParkingLot()
        self._ready = trio.Event()
        # Why the connection ended; "" if it has not.
        self.why = ""
        self._not_accepted = False

    @property
    def heard(self) -> int:
        return self.http2.frames_received

    @property
    def is_open(self) -> bool:
        """Return whether new calls may be made."""
        return not self.http2.draining

    async def run(self) -> None:
        if self.why:
            return  # closed before this task began
        reason = "the connection was closed"
        try:
            if self._tls is not None:
                await self._handshake()
            self.http2.greet()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write)
                # In a task of its own: only one coroutine is resumed for what comes.
                nursery.start_soon(self._read, nursery.cancel_scope)
        except* _ENDS as group:
            error = first_error(group, *_ENDS)
            reason = _reason(error)
            if self._tls is None and not self.http2.greeted:
                reason += " (does it want TLS? Then give its CA)"
            self._not_accepted = isinstance(error, ssl.SSLError | ProtocolError)
        finally:
            self.close(reason)

    def close(self, reason: str) -> None:
        """End all calls with ConnectionLost. Closing twice does nothing."""
        if self.why:
            return
        self.why = reason or "the connection was closed"
        self._moderation.hurry()
        self.http2.end(self.why)
        self._waiting_callers.unpark_all()
        self._ready.set()
        trio.lowlevel.notify_closing(self._sock)
        self._sock.close()

    async def wait_ready(self) -> None:
        """Return when the peer has sent its HTTP/2 settings. Raises ConnectionLost, NotAccepted."""
        await self._ready.wait()
        if self.why:
            kind = NotAccepted if self._not_accepted else ConnectionLost
            raise kind(self.why, sent=False)

    async def start(self, block: bytes, message: bytes) -> Stream:
        """Begin a call with its only request message. `block`: its headers, encoded."""
        http2 = self.http2
        self._moderation.hurry()
        while len(http2.streams) >= _CALLS and not http2.draining:
            await self._waiting_callers.park()
        if http2.draining:
            raise ConnectionLost(self.why or _DRAINED, sent=False)
        return http2.call(block, message)

    def _call_ended(self) -> None:
        self._waiting_callers.unpark()
        if self.http2.draining and not self.http2.streams:
            self.close(_DRAINED)

    def _send(self, data: bytes) -> None:
        """Send without waiting; `run` sends the rest that the socket does not accept now."""
        if self.why:
            return
        sent = 0
        try:
            if self._tls is not None:
                self._tls.write(data)
                data = self._tls_out.read()
            if not self._out:
                sent = self._sock.send(data)
        except BlockingIOError:
            pass
        except ssl.SSLError as error:
            self.close(_reason(error))
            return
        except OSError:
            return  # `run` reads what the peer said before it closed the connection
        if sent < len(data):
            self._out += data[sent:]
            self._has_unsent.set()

    async def _write(self) -> None:
        while not self.why:
            await self._has_unsent.wait()
            while self._out and not self.why:
                await trio.lowlevel.wait_writable(self._sock)
                with contextlib.suppress(BlockingIOError):
                    del self._out[: self._sock.send(self._out)]
            self._has_unsent = trio.Event()

    async def _handshake(self) -> None:
        assert self._tls is not None
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                pass
            else:
                break
            finally:
                self._out += self._tls_out.read()
                while self._out:
                    await trio.lowlevel.wait_writable(self._sock)
                    del self._out[: self._sock.send(self._out)]
            await trio.lowlevel.wait_readable(self._sock)
            data = self._sock.recv(_RECEIVE_BYTES)
            if not data:
                raise ProtocolError("it closed the connection instead of beginning TLS")
            self._tls_in.write(data)
        if self._tls.selected_alpn_protocol() != "h2":
            raise ProtocolError("it does not speak HTTP/2 over TLS")

    async def _read(self, scope: trio.CancelScope) -> None:
        """Take what comes until the connection is closed, and then cancel `scope`."""
        http2 = self.http2
        while not self.why:
            await trio.lowlevel.wait_readable(self._sock)
            try:
                data = self._sock.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                continue
            except ConnectionResetError:
                data = b""
            if not data:
                when = ""
                if not http2.greeted:
                    when = " at once; it may not accept our certificate"
                raise ConnectionResetError("it closed the connection" + when)
            if self._tls is not None:
                self._tls_in.write(data)
                data = self._decrypt()
            http2.take(data)
            if http2.greeted:
                self._ready.set()
            if not http2.questions and self._moderation.allowed():
                await self._moderation.wait()
        scope.cancel()

    def _decrypt(self) -> bytes:
        assert self._tls is not None
        parts = []
        try:
            while part := self._tls.read(_RECEIVE_BYTES):
                parts.append(part)
        except ssl.SSLWantReadError:
            pass
        return b"".join(parts)


def _reason(error: BaseException) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {error.reason or error}"
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
